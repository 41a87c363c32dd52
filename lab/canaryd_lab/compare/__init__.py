"""Comparison of two captures or two score files, and the text of an exact capture's result."""
