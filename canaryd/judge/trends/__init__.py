"""Judge slow changes, day by day."""
