"""Captures (recorded intermediate results) of a device, and the comparison of two captures."""
