"""Patterns of words that switch the lines of a link. Each device computes them, so both ends know the right words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canaryd.worker.memory.slices import OWN
from canaryd.worker.numeric.integers import mixed
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import torch

WORD = 8
ALTERNATING = 0x5555555555555555
BITS = 64


def walking(index: Any, _: int) -> Any:
    """Return words with a single 1 that walks through all bits, then words with a single 0: they test single lines."""
    ones = torch.ones_like(index) << (index % BITS)
    return ones ^ -(index // BITS % 2)


def alternating(index: Any, _: int) -> Any:
    """Return words that alternate between 0x55… and 0xAA…: every line changes with every word."""
    return -(index % 2) ^ ALTERNATING


def random(index: Any, seed: int) -> Any:
    """Return pseudo-random words for a seed."""
    return mixed(index, derive(seed, "random words"))


def address(index: Any, _: int) -> Any:
    """Return each word's own number, with its complement in the upper half, so that a word at a wrong place is seen."""
    return index * OWN - (1 << 32)


PATTERNS: dict[str, Callable[[Any, int], Any]] = {
    "walking": walking,
    "alternating": alternating,
    "random": random,
    "address": address,
}


def make(name: str, words: int, seed: int, device: Any) -> Any:
    """Return `words` words (int64) of a pattern, computed on `device` by integer operations alone."""
    return PATTERNS[name](torch.arange(words, dtype=torch.int64, device=device), seed)
