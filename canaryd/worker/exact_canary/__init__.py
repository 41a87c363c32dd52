"""A language model with one right answer, bit for bit: its construction, proof and inference (docs/exact-canary.md)."""
