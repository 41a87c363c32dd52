"""Declare, read and check settings."""
