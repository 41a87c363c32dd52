"""Ask a model server and record what it answers."""
