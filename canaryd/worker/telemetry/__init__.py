"""Readings that devices, drivers and the host report; `interface.py` says how to add a vendor."""
