"""Exact canaries (models with one right answer) in the lab: construction, proof, export, capture."""
