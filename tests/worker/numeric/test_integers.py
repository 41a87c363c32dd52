"""Integer arithmetic of the goldens against mirrors in plain Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.worker.numeric import integers, seeds
from canaryd.worker.numeric.tensors import bits

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

MASK = (1 << 64) - 1
wide = st.integers(min_value=-(1 << 61), max_value=1 << 61)


def test_splitmix_matches_the_published_vector():
    """SplitMix64 from state 1234567 gives the first values of the published reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state, out = 1234567, []
    for _ in published:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        out.append(seeds.mix64(state))
    assert out == published


@given(values=st.lists(wide, min_size=1, max_size=30), precision=st.integers(1, 53))
@settings(max_examples=200)
def test_rounding_matches_python(maker, values, precision):
    """Rounding to a significand is to nearest with ties to even, for every precision and sign."""
    tensor = torch.tensor(values, dtype=torch.int64)
    assert integers.round_significand(tensor, precision).tolist() == [maker.round_to(v, precision) for v in values]


def patterns(dtype):
    """A 6 x 10 tensor of `dtype` with arbitrary bits."""
    raw = integers.stream(9, str(dtype), (60,))
    probe = torch.zeros(1, dtype=dtype)
    return raw.to(bits(probe).dtype).view(dtype).view(6, 10)


DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "int64"]


@pytest.mark.parametrize("name", DTYPES)
def test_digest_matches_a_plain_python_mirror(maker, name):
    """The digest of a tensor equals the one computed from its bit patterns in Python integers."""
    tensor = patterns(getattr(torch, name))
    assert integers.digest(tensor) == maker.digest_of(maker.raw_of(tensor), tensor.element_size() * 8)


@pytest.mark.parametrize("name", DTYPES)
def test_every_single_bit_flip_changes_the_digest(name):
    """No bit of any element is without influence, and no two flips give one digest."""
    tensor = patterns(getattr(torch, name))
    seen = {integers.digest(tensor)}
    raw = bits(tensor).reshape(-1)
    width = tensor.element_size() * 8
    for element in range(0, raw.numel(), 7):
        for bit in range(width):
            flip = (1 << bit) - ((1 << width) if bit == width - 1 and width > 8 else 0)
            raw[element] ^= flip
            seen.add(integers.digest(tensor))
            raw[element] ^= flip
    assert len(seen) == 1 + len(range(0, raw.numel(), 7)) * width
