"""Readings that devices, drivers and the host report."""
