"""Code of the lab that runs in a worker and uses torch; it imports only modules of canaryd that a probe may import."""
