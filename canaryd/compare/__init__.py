"""Compare two captures, or two score files."""
