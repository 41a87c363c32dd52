"""Integer arithmetic for known right results: reproducible streams, exact rounding, and an order-sensitive digest.

Nothing here uses a floating-point operation. Everything is defined by two's-complement int64 arithmetic modulo 2**64,
so that it gives the same bits on every torch, every backend and every vendor.
"""

from __future__ import annotations

import math
from typing import Any

from canaryd.worker.numeric.seeds import GAMMA, MIX1, MIX2, derive, mix64
from canaryd.worker.numeric.tensors import bits, torch

# The constants of `seeds` as signed int64.
_GAMMA, _MIX1, _MIX2 = (constant - (1 << 64) for constant in (GAMMA, MIX1, MIX2))
_CHUNK = 1 << 20


def _mix(z: Any) -> Any:
    # torch shifts int64 arithmetically: the mask makes the shift a logical one. What is new here is changed in place:
    # new memory for every step would take longer than the arithmetic.
    z = (z >> 30).bitwise_and_((1 << 34) - 1).bitwise_xor_(z).mul_(_MIX1)
    z = (z >> 27).bitwise_and_((1 << 37) - 1).bitwise_xor_(z).mul_(_MIX2)
    return (z >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(z)


def stream(seed: int, name: str, shape: tuple[int, ...]) -> Any:
    """Return int64 values uniform on 0 … 2**63 - 1, on the host; equal arguments give equal values."""
    index = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64)
    return (mixed(index, derive(seed, name)) & ((1 << 63) - 1)).view(shape)


def mixed(index: Any, start: int) -> Any:
    """Return pseudo-random 64-bit words for the positions `index` (int64, any device) of the stream `start`."""
    return _mix(index * _GAMMA + start)


def below(seed: int, name: str, shape: tuple[int, ...], limit: int) -> Any:
    """Return int64 values on 0 … limit - 1 that are uniform up to a bias below limit / 2**63."""
    return stream(seed, name, shape) % limit


def signed(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> Any:
    """Return int64 values whose magnitude is uniform on low … high (low ≥ 1) and whose sign is random."""
    raw = stream(seed, name, shape)
    magnitude = (raw >> 1).remainder_(high - low + 1).add_(low)
    minus = (raw & 1).neg_()  # 0 or -1; (m ^ -1) + 1 is -m
    return magnitude.bitwise_xor_(minus).sub_(minus)


def permutation(seed: int, name: str, n: int) -> Any:
    """Return a permutation of 0 … n - 1."""
    return torch.argsort(stream(seed, name, (n,)), stable=True)


def bit_length(values: Any) -> Any:
    """Return the number of bits of |value| for int64 values of magnitude below 2**62."""
    magnitude = values.abs()
    length = torch.zeros_like(magnitude)
    for step in (32, 16, 8, 4, 2, 1):
        shift = (magnitude >> step).clamp_(max=1).mul_(step)
        length += shift
        magnitude >>= shift
    return length.add_(magnitude)


def longest(values: Any) -> int:
    """Return the number of bits of the largest magnitude in an int64 tensor."""
    return int(values.abs().max()).bit_length()


def significant_bits(values: Any) -> int:
    """Return the largest distance in bits, over all values, from the highest to the lowest set bit, both included."""
    lowest = bit_length(values & -values)
    return int((bit_length(values) - lowest + (lowest > 0).to(torch.int64)).max())


def round_significand(values: Any, precision: int) -> Any:
    """Return int64 values rounded to `precision` significant bits, to nearest, ties to even, by integer arithmetic."""
    magnitude = values.abs()
    shift = (bit_length(values) - precision).clamp(min=0)
    quotient = magnitude >> shift
    remainder = magnitude - (quotient << shift)
    half = (torch.ones_like(shift) << shift) >> 1
    up = (remainder > half) | ((remainder == half) & (shift > 0) & ((quotient & 1) == 1))
    rounded = (quotient + up.to(torch.int64)) << shift
    return torch.where(values < 0, -rounded, rounded)


def digest(tensor: Any) -> str:
    """Return a 64-bit digest, as hex, of all bits of the tensor and their places; the tensor's device computes it.

    The digest is the sum of mixed (bits, index) pairs modulo 2**64. An exchange of two different elements, a moved row
    or one flipped bit changes it, except with a chance of 2**-64.
    """
    flat = bits(tensor.contiguous()).view(-1)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=part.device)
        total += int(_mix(_mix(part + _MIX2) + index * _GAMMA).sum())
    return f"{mix64(total + flat.numel()):016x}"


def combine(digests: list[tuple[str, str]]) -> int:
    """Return one integer below 2**53 for (name, digest) pairs; a Prometheus sample holds it without loss."""
    total = 0
    for name, value in sorted(digests):
        total = mix64(total ^ derive(int(value, 16), name))
    return total & ((1 << 53) - 1)
