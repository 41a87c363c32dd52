"""Exact tiles, computed on every unit (core or SM) of a device, so that a wrong result names its unit."""
