"""Worker processes and the deadlines of their work."""
