"""What a Prometheus knows about all nodes."""
