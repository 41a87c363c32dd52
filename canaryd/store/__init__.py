"""The memory of canaryd, in one SQLite file."""
