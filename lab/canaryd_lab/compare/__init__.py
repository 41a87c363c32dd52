"""Compare two captures, or two score files; tell what an exact capture found."""
