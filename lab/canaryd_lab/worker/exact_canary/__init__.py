"""Exact canaries: made, proved, exported, captured."""
