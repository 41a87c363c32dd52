"""Captures of a device, and their comparison."""
