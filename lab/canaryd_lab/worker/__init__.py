"""What the lab runs in a worker, beside torch; it imports of canaryd what a probe may."""
