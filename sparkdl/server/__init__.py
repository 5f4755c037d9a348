"""The endpoint of a run: coordinator, aggregation and HTTP server."""
