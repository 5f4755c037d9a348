"""The endpoint of a run: who takes part, how updates meet, and the HTTP server before it."""
