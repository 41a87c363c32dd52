"""Transfers between host and device and between devices, which find out whether the link or the memory was wrong."""
