"""Compare two captures or two score files; show the result of an exact capture."""
