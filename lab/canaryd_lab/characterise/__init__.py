"""Characterise a device: parts, their results on disk, and a page."""
