"""Metric families and their exposition."""
