"""The HTTP server with TLS and passwords."""
