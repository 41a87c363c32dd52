"""Send data from host to device and between devices, and tell a wrong way from wrong memory."""
