"""Digests of results: the proven bound, by all weights of small ones, and faults in results that they find or miss."""

import itertools
import random

import pytest

from benchmarks import digest
from canaryd.worker.numeric.tensors import FORMATS

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

PAIR = ("float32", "float32")
FLIPPED_SIGNS = {"signs of two elements of a row", "all signs of a row"}


@pytest.mark.parametrize(("width", "total"), [(3, 6), (3, 4), (3, 3)])
def test_the_bound_holds_for_all_odd_weights_and_is_reached(width, total):
    """Pieces of `width` bits in sums of `total` bits: one wrong piece is always found, of two the share is proven."""
    weights = range(1, 1 << total, 2)
    differences = [d for d in range(1 - (1 << width), 1 << width) if d]
    assert all(w * d % (1 << total) for w, d in itertools.product(weights, differences))
    missed = {
        (d, e): sum((v * d + w * e) % (1 << total) == 0 for v, w in itertools.product(weights, weights))
        for d, e in itertools.product(differences, differences)
    }
    assert max(missed.values()) / len(weights) ** 2 == 2.0 ** (width - total)


def test_two_wrong_bytes_are_missed_by_one_in_64_weights_at_most():
    """Of each vector of "bytes"."""
    weights = torch.arange(-63, 64, 2)
    rng = random.Random(1)
    differences = [d for d in range(-255, 256) if d]
    for _ in range(500):
        d, e = rng.choice(differences), rng.choice(differences)
        missed = (weights[:, None] * d + weights * e == 0).float().mean()
        assert missed <= 1 / 64


@pytest.mark.parametrize("way", digest.WAYS, ids=lambda way: way.name)
def test_sums_are_those_of_integers(way):
    """Of the largest and the smallest pieces too: kernels that saturate or stop at 16 bits would break the bound."""
    rows = torch.randint(-(1 << 31), 1 << 31, (24, 96), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    extremes = [0x7F7F7F7F, -0x7F7F7F80, 0x7FFF7FFF, -0x7FFF8000, -1, -(1 << 31), (1 << 31) - 1, 0]
    rows[: len(extremes)] = torch.tensor(extremes)[:, None]
    made = digest.Digest(way, 96, 4, seed=5)
    pieces, weights = rows.view(made._pieces).tolist(), made._weights.view(-1, way.vectors).T.tolist()
    for row, found in zip(pieces, made.rows(rows).view(24, -1).tolist(), strict=True):
        right = [sum(t * w for t, w in zip(row, vector, strict=True)) for vector in weights]
        assert [(a - b) % (1 << way.sum) for a, b in zip(found, right, strict=True)] == [0] * way.vectors


def test_every_fault_is_found_and_its_place_named_but_for_signs_in_32_bits():
    """An even number of flipped signs in a row of float32 cancels in sums of 32 bits, always; in others it does not."""
    counts = {}
    digest.try_pair(*PAIR, seed=3, each=2, counts=counts)
    assert digest.failures(counts) == []
    kinds = {kind for *_, kind in counts}
    assert len(kinds) >= 12
    assert kinds > FLIPPED_SIGNS
    for way, kind in itertools.product(digest.WAYS, kinds):
        count = digest.total(counts, way=way.name, kind=kind)
        assert count.rows >= count.tried > 0
        if way.bound(FORMATS["float32"].dtype.itemsize):
            assert (count.missed, count.unnamed, count.misplaced) == (0, 0, 0)
        elif kind in FLIPPED_SIGNS:
            assert count.missed == count.tried


def test_a_digest_that_misses_faults_fails(monkeypatch):
    """A plain sum does not see an exchange in a row: the program would end with 1."""

    class Sum(digest.Digest):
        def rows(self, matrix):
            return matrix.view(self._pieces).sum(-1)

    monkeypatch.setattr(digest, "Digest", Sum)
    counts = {}
    digest.try_pair(*PAIR, seed=3, each=1, counts=counts)
    assert digest.total(counts, way="64 bits", kind="two elements of a row exchanged").missed
    assert {text.partition(" of ")[0] for text in digest.failures(counts)} == {"64 bits", "bytes"}


def test_a_right_turn_with_another_digest_ends_the_program(monkeypatch):
    """What is gathered for another turn gives other digests."""
    gather = digest.Digesting.gather
    monkeypatch.setattr(digest.Digesting, "gather", lambda self, turn: gather(self, turn + 1))
    with pytest.raises(SystemExit, match="a right turn of float32/dense has another digest"):
        digest.try_pair(*PAIR, seed=3, each=1, counts={})
