"""Code of the lab that runs in a worker, beside torch; it imports only those modules of canaryd that a probe may."""
