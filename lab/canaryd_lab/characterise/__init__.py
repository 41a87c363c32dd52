"""Characterise a device: the tests ("parts") to run, their results on disk, and a page."""
