"""Judge what devices, drivers and the kernel report."""
