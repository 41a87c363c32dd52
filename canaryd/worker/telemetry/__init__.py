"""Read what devices, drivers and the host report."""
