"""Captures of a device, and the comparison of two captures."""
