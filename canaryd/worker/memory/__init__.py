"""Tests of memory with patterns, which find out whether the memory or the transfer was wrong."""
