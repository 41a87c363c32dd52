"""Characterise a device: the parts, their results on disk, and a page."""
