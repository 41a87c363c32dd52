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


def splitmix(seed: int, count: int) -> list[int]:
    """SplitMix64 as its authors wrote it: add gamma, mix; the top bit is cleared here as the streams do."""
    state, out = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        out.append((z ^ z >> 31) & (MASK >> 1))
    return out


@given(seed=st.integers(0, (1 << 63) - 1), name=st.text(max_size=12), count=st.integers(0, 40))
@settings(max_examples=60)
def test_stream_is_splitmix(seed, name, count):
    """A stream is SplitMix64 started at the seed derived for its name."""
    assert integers.stream(seed, name, (count,)).tolist() == splitmix(seeds.derive(seed, name), count)


def test_splitmix_matches_the_published_vector():
    """SplitMix64 from state 1234567 gives the first values of the published reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state, out = 1234567, []
    for _ in published:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        out.append(seeds.mix64(state))
    assert out == published


def test_streams_do_not_depend_on_their_shape_and_differ_by_name_and_seed():
    """A shape only folds the stream; another name or seed is another stream."""
    flat = integers.stream(5, "a", (24,))
    assert integers.stream(5, "a", (2, 3, 4)).reshape(-1).tolist() == flat.tolist()
    assert integers.stream(5, "b", (24,)).tolist() != flat.tolist()
    assert integers.stream(6, "a", (24,)).tolist() != flat.tolist()


@given(low=st.integers(1, 1 << 40), span=st.integers(0, 1 << 40), seed=st.integers(0, 1 << 40))
@settings(max_examples=60)
def test_signed_stays_in_its_range_without_zero(low, span, seed):
    """Magnitudes lie on low … high, so zero never occurs; the lowest bit of the stream is the sign."""
    values = integers.signed(seed, "x", (64,), low, low + span).tolist()
    assert all(low <= abs(v) <= low + span for v in values)
    raw = splitmix(seeds.derive(seed, "x"), 64)
    assert values == [(low + (r >> 1) % (span + 1)) * (-1 if r & 1 else 1) for r in raw]


def test_signed_and_below_reach_their_ends_and_both_signs():
    """Small ranges are used fully."""
    assert set(integers.signed(1, "x", (400,), 1, 3).tolist()) == {-3, -2, -1, 1, 2, 3}
    assert set(integers.below(1, "x", (400,), 5).tolist()) == set(range(5))


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_permutation_holds_every_index_once(n):
    """A permutation is one."""
    assert sorted(integers.permutation(3, "p", n).tolist()) == list(range(n))


@given(values=st.lists(wide, min_size=1, max_size=30))
@settings(max_examples=150)
def test_bit_length_and_significant_bits_match_python(values):
    """bit_length is Python's; significant bits run from the highest to the lowest set bit."""
    tensor = torch.tensor(values, dtype=torch.int64)
    assert integers.bit_length(tensor).tolist() == [v.bit_length() for v in values]
    wanted = max((abs(v) // (v & -v)).bit_length() if v else 0 for v in values)
    assert integers.significant_bits(tensor) == wanted


@given(values=st.lists(wide, min_size=1, max_size=30), precision=st.integers(1, 53))
@settings(max_examples=200)
def test_rounding_matches_python(maker, values, precision):
    """Rounding to a significand is to nearest with ties to even, for every precision and sign."""
    tensor = torch.tensor(values, dtype=torch.int64)
    assert integers.round_significand(tensor, precision).tolist() == [maker.round_to(v, precision) for v in values]


@given(quotient=st.integers(1, 1 << 12), shift=st.integers(1, 40), sign=st.sampled_from([-1, 1]))
@settings(max_examples=200)
def test_ties_go_to_even(quotient, shift, sign):
    """An exact half rounds to the even neighbour; one unit more or less rounds to the nearer."""
    p = quotient.bit_length()
    half = (quotient << shift) + (1 << (shift - 1))
    even = (quotient + quotient % 2) << shift
    got = integers.round_significand(torch.tensor([sign * half, sign * (half + 1)], dtype=torch.int64), p).tolist()
    assert got == [sign * even, sign * ((quotient + 1) << shift)]


@given(values=st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1, max_size=20))
@settings(max_examples=100)
def test_rounding_agrees_with_the_hardware_conversion(values):
    """float32's conversion of an int64 rounds to 24 bits as round_significand does."""
    tensor = torch.tensor(values, dtype=torch.int64)
    assert integers.round_significand(tensor, 24).tolist() == tensor.to(torch.float32).to(torch.int64).tolist()


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


def test_digest_depends_on_order():
    """Swapped elements, rotated elements and moved rows change it; a view of equal content does not."""
    tensor = patterns(torch.float32)
    made = integers.digest(tensor)
    swapped = tensor.clone()
    swapped[0, 1], swapped[3, 4] = tensor[3, 4].clone(), tensor[0, 1].clone()
    others = [swapped, tensor.roll(1), tensor.reshape(-1).roll(1), tensor.flip(0), tensor.T.contiguous()]
    assert made not in {integers.digest(t) for t in others}
    assert integers.digest(tensor.T.contiguous().T) == made
    assert integers.digest(tensor.T) == integers.digest(tensor.T.contiguous())


def test_digest_tells_signed_zeros_and_lengths_apart():
    """Bits count, not values: -0 is not 0, and a further zero is a change."""
    zero = torch.zeros(4)
    assert len({integers.digest(t) for t in (zero, -zero, torch.zeros(5), torch.zeros(0))}) == 4


def test_digest_of_more_than_one_chunk_is_the_digest_of_the_whole(maker, monkeypatch):
    """Chunking is invisible."""
    tensor = patterns(torch.bfloat16)
    made = integers.digest(tensor)
    monkeypatch.setattr(integers, "_CHUNK", 7)
    assert integers.digest(tensor) == made


def test_combined_digests_fit_a_prometheus_sample_and_depend_on_names():
    """The fingerprint is below 2**53, does not depend on the order given, and changes with any name or digest."""
    pairs = [("a", "00000000000000ff"), ("b", "ffffffffffffffff")]
    made = integers.combine(pairs)
    assert 0 <= made < 1 << 53
    assert integers.combine(pairs[::-1]) == made
    assert integers.combine([("a", "ffffffffffffffff"), ("b", "00000000000000ff")]) != made
    assert integers.combine(pairs[:1]) != made
