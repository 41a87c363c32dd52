"""Exact and recorded operations on a device."""
