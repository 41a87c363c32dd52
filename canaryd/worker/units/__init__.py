"""Exact tiles on every unit of a device, so that a wrong one names its core or SM."""
