"""Digests of results: the proven bound, by all weights of small ones, and faults in results that they find or miss."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace

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
    made = digest.digest_of(way, 96, 4, seed=5)
    pieces = rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[way.piece]).tolist()
    weights = made._weights.view(-1, way.vectors).T.tolist() if way.piece > 1 else made._weights.T.tolist()
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

    class Sum:
        def rows(self, matrix):
            return matrix.view(torch.int16).sum(-1)[:, None]

    monkeypatch.setattr(digest, "digest_of", lambda *given: Sum())
    counts = {}
    digest.try_pair(*PAIR, seed=3, each=1, counts=counts)
    assert digest.total(counts, way="64 bits", kind="two elements of a row exchanged").missed
    assert {text.partition(" of ")[0] for text in digest.failures(counts)} == {"64 bits", "bytes"}


def test_a_right_turn_with_another_digest_ends_the_program(monkeypatch):
    """What is gathered for another turn gives other digests."""
    gather = digest.Gatherer.gather
    monkeypatch.setattr(digest.Gatherer, "gather", lambda self, turn: gather(self, turn + 1))
    with pytest.raises(SystemExit, match="a right turn of float32/dense has another digest"):
        digest.try_pair(*PAIR, seed=3, each=1, counts={})


@pytest.fixture
def fused():
    """Triton's interpreter, by which the host runs the digest in one kernel; all of Triton is loaded for it."""
    pytest.importorskip("triton", reason="Triton is not installed in this interpreter")
    pytest.importorskip("numpy", reason="NumPy, which Triton's interpreter needs, is not installed here")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("test_what_needs_tritons_interpreter_is_right_there runs it")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process that it starts")
def test_what_needs_tritons_interpreter_is_right_there(request):
    """The tests below, in a process that has it."""
    pytest.importorskip("triton", reason="Triton is not installed in this interpreter")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.path, "-k", "one_kernel or burst"]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(argv, cwd=request.config.rootpath, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_digest_in_one_kernel_is_that_of_integers_and_names_the_row(fused):
    """Over more than one block, and with every bit of an element flipped."""
    from benchmarks.digest_kernel import Fused

    matrix = torch.randint(-(1 << 15), 1 << 15, (5, 1500), dtype=torch.int16).view(torch.bfloat16)
    made = Fused(1500, 5, "cpu")
    pieces, weights = matrix.view(torch.int16).tolist(), made._weights.tolist()
    right = [sum((piece & 0xFFFF) * w for piece, w in zip(row, weights, strict=True)) for row in pieces]
    sums = made.rows(matrix)
    assert [(a - b) % (1 << 64) for a, b in zip(sums.flatten().tolist(), right, strict=True)] == [0] * 5
    for bit in range(16):
        changed = matrix.clone()
        changed.view(torch.int16)[3, 1234] ^= 1 << bit if bit < 15 else -(1 << 15)
        assert made.rows(changed).ne(sums).flatten().tolist() == [False, False, False, True, False]


class Again:
    """Work that is repeated on the processor, in place of a CUDA graph."""

    def __init__(self, device, work):
        self.work = work
        work()

    def launch(self):
        self.work()


@pytest.mark.parametrize("wrong", [0, 4])
def test_a_burst_that_is_verified_by_digest_finds_a_wrong_result(fused, monkeypatch, wrong):
    """On new operands in each burst; the host reads one number in the end."""
    from benchmarks import verified_gemm
    from benchmarks.digest_kernel import Fused
    from canaryd.probe import Context
    from canaryd.worker.numeric.cases import product_case
    from canaryd.worker.numeric.gathering import Gatherer
    from canaryd.worker.numeric.operands import make_pools
    from canaryd.worker.numeric.session import Session
    from canaryd.worker.numeric.stack import cpu
    from canaryd.worker.numeric.tensors import flat_bits

    monkeypatch.setattr(verified_gemm, "Graph", Again)
    session = Session(Context(device=cpu(), level="standard", seed=1, budget=60.0))
    case = product_case(cpu(), "bfloat16", "bfloat16", "dense", "square", "nn", (64, 48, 96, 0))
    calls = [None]  # none is counted while the bursts are captured

    def compute(operands, out):
        result = case.compute(operands, out)
        calls.extend([1] if calls[:1] != [None] else [])
        if calls[:1] == [1] and len(calls) == wrong:
            flat_bits(result)[7] ^= 1 << 3
        return result

    pools = make_pools(case.product.of_pools, 3)
    buffers = session.runtime.room(torch.empty(64, 48, dtype=torch.bfloat16), 2)
    gatherer = Gatherer(session.runtime, cpu(), case.product, pools, 3).digesting(Fused(48, 3, "cpu"))
    side = verified_gemm.Digested(session, replace(case, compute=compute), gatherer, buffers)
    calls.clear()
    with pytest.raises(SystemExit, match=r"^1 products") if wrong else contextlib.nullcontext():
        side.verified(5)
