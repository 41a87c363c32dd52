"""A language model with one right answer, bit for bit: constructed, proved, run (docs/exact-canary.md)."""
