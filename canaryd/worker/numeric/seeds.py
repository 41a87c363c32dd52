"""Seeds of reproducible streams, in plain Python: for code that must run without torch."""

from __future__ import annotations

import zlib

# SplitMix64: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the
# finaliser is David Stafford's Mix13.
GAMMA = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Return SplitMix64's finaliser of one unsigned 64-bit integer."""
    z = value & _MASK64
    z = ((z ^ (z >> 30)) * MIX1) & _MASK64
    z = ((z ^ (z >> 27)) * MIX2) & _MASK64
    return z ^ (z >> 31)


def derive(seed: int, name: str) -> int:
    """Return the seed of the stream called `name` under `seed`; unsigned, below 2**63."""
    text = name.encode()
    return mix64(mix64(seed) ^ (zlib.crc32(text) | zlib.adler32(text) << 32)) >> 1
