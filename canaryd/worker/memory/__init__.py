"""Sweep memory with patterns, and tell a wrong cell from a wrong transfer."""
