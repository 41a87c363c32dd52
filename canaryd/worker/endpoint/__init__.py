"""Ask a model server questions and record its answers."""
