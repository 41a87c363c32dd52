"""Pure functions from evidence to a verdict."""
