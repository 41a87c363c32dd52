"""The HTTP server and its TLS."""
