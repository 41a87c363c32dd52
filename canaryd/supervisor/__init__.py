"""Worker processes and their deadlines."""
