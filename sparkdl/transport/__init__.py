"""Messages between workers and the endpoint, and the HTTP connections that carry them."""
