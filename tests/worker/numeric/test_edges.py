"""Edges of size, scaled down: right here, known without the large product, and one wrong element anywhere is found."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from canaryd.facts import Comparison, Skipped, Subject
from canaryd.judge.characterised import class_of
from canaryd.probe import Context, Skip
from canaryd.worker.numeric import edges, verify
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.operands import Product, build
from canaryd.worker.numeric.reproducer import exhibit
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, bits
from canaryd.worker.runtime.torch import Torch
from probes import exact_attention, exact_matmul
from tests.worker.numeric.cuda import HOPPER, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

EVERY = (*edges.PRODUCTS, *edges.ATTENTIONS)
HERE = ("", "MATH", "FLASH_ATTENTION")
"""Kernels of attention that torch has on a processor."""


def scaled(edge):
    """The same edge with sizes that a test can compute in full."""
    most = (3, 37, 29, 65) if isinstance(edge, edges.Multiplied) else (2, 40, 40, 64)
    small = replace(edge, sizes=tuple(map(min, edge.sizes, most)))
    return replace(small, kernel="") if getattr(edge, "kernel", "") not in HERE else small


SMALL = [scaled(edge) for edge in EVERY]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Results of a test have many blocks, as those of an edge have, and few last keys."""
    monkeypatch.setattr(edges, "BLOCK", 200)
    monkeypatch.setattr(edges, "LAST", 4)


def context(*cases, device=None, **more):
    return Context(**{"device": device or cpu(), "level": "deep", "seed": 7, "budget": 60.0, "cases": cases, **more})


def case_of(edge, compute=None):
    """Return an edge as a case, whatever the machine's memory."""
    right = edge.computes(cpu())
    measure = partial(edges.measure, edge, "")
    build = partial(edge.build, cpu())
    return Case(edge.name, build, compute or right, characterised=False, measure=measure)


def verified(case, **more):
    session = Session(context(**more))
    return [f for f in verify.verify_case(session, case, 0.0) if isinstance(f, Comparison)]


def held(edge, seed=5):
    session = Session(context())
    pools = edge.build(cpu(), seed)
    return session, edge.hold(session, pools, seed)


def shape_of(edge):
    """The shape of an edge's result."""
    first, second, third, fourth = edge.sizes
    if isinstance(edge, edges.Attended):
        return 1, first, second, fourth
    return (first, second, third) if first else (second, third)


def index_of(at, shape):
    """The index of the element number `at` in row-major order."""
    index = []
    for size in shape[::-1]:
        at, rest = divmod(at, size)
        index.append(rest)
    return tuple(index[::-1])


def whole(known, right):
    """Put the right blocks together."""
    result = torch.zeros(known.shape, dtype=right(next(edges.blocks(known.shape))).dtype)
    for part in edges.blocks(known.shape):
        result[part] = right(part)
    return result


@pytest.mark.parametrize("edge", SMALL, ids=lambda e: e.name)
def test_an_edge_is_right_here_and_accuses_nobody_untested(edge):
    """Once each, compared in whole; nobody knows yet that healthy devices pass, and its class is its own."""
    (found,) = verified(case_of(edge))
    assert not found.wrong
    assert (found.trials, found.characterised, found.subject) == (1, False, Subject.DEVICE)
    assert "/edge-" in class_of(found.case)


@pytest.mark.parametrize("edge", [e for e in SMALL if isinstance(e, edges.Multiplied)], ids=lambda e: e.name)
def test_the_table_gives_the_whole_product(edge):
    """Against an exact product of the very operands; no element is zero, and all blocks are on the host alike."""
    _, known = held(edge)
    a, b, *addend = (each.to(torch.float64) for each in known.operands)
    product = a @ b.mT + (addend[0].unsqueeze(-2) if addend else 0)
    assert bool((product != 0).all())
    assert torch.equal(whole(known, known.right), bits(product.to(known.operands[0].dtype)))
    assert torch.equal(whole(known, known.right), whole(known, known.right_on_host))


@pytest.mark.parametrize("edge", [e for e in SMALL if isinstance(e, edges.Attended)], ids=lambda e: e.name)
def test_the_pool_gives_the_whole_attention(edge):
    """Against softmax in float64; the last keys are asked for, and a mask decides between a key and its twin."""
    _, known = held(edge)
    query, key, value, mask = (each.to(torch.float64) for each in known.operands)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores + (mask if mask.numel() else 0), -1)
    assert torch.equal(whole(known, known.right), bits((weights @ value).to(known.operands[0].dtype)))
    assert bool((weights.argmax(-1)[..., 1::2] >= edge.sizes[2] - 4).all())
    if mask.numel():
        unmasked = (torch.softmax(scores, -1) @ value).to(known.operands[0].dtype)
        assert bool((bits(unmasked) != whole(known, known.right)).any(-1).all())
    assert edge.packed is not known.operands[0].is_contiguous()


@pytest.mark.parametrize(
    "edge", [*SMALL[3:5], replace(SMALL[len(edges.PRODUCTS)], sizes=(2, 6, 40, 64))], ids=lambda e: e.name
)
def test_one_wrong_bit_of_any_element_is_found(edge):
    """Every element in turn, in its lowest bit: no sampling."""
    session, known = held(edge)
    right = whole(known, known.right).view(known.operands[0].dtype)
    flat = bits(right).view(-1)
    for at in range(flat.numel()):
        flat[at] ^= 1
        found, blind = edges.compare(session, known, right, 0)
        assert (found.wrong, found.total, blind) == (1, flat.numel(), "")
        assert found.first[0][0] == index_of(at, known.shape)
        flat[at] ^= 1


@pytest.mark.parametrize("edge", SMALL, ids=lambda e: e.name)
@pytest.mark.parametrize("where", ["first", "last", "random"])
def test_a_fault_is_found_named_and_repeated(edge, where):
    """At the first, the last and a random element: one wrong element at its index, in each of the fresh uploads."""
    shape = shape_of(edge)
    total = math.prod(shape)
    at = {"first": 0, "last": total - 1, "random": 7919 % total}[where]

    def wrong(operands, out):
        result = edge.computes(cpu())(operands, out)
        bits(result).view(-1)[at] ^= 4
        return result

    found = verified(case_of(edge, wrong))
    assert len(found) == 4
    seen = found[-1].evidence
    assert (seen.wrong, seen.total, dict(seen.bits)) == (1, total, {"2": 1})
    assert seen.first[0][0] == index_of(at, shape)
    assert (seen.repeats, seen.repeats_wrong, seen.repeats_alike) == (3, 3, 3)


def test_no_right_result_is_left_behind():
    """A result is overwritten after its comparison: a kernel that then writes nothing leaves nothing right."""
    kept = []

    def compute(operands, out):
        kept.append(edges.CALLS["matmul"](*operands))
        return kept[-1]

    (found,) = verified(case_of(SMALL[0], compute))
    assert not found.wrong
    assert bool((bits(kept[0]) == -1).all())


def test_a_comparison_that_sees_nothing_accuses_itself(monkeypatch):
    """One bit of a right result is flipped on purpose; a device that calls it equal is blind, and a wrong one too."""
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    right, erred = verified(case_of(SMALL[0]))
    assert not right.wrong
    assert erred.subject is Subject.COMPARATOR
    assert "flipped on purpose" in erred.evidence.pattern


def test_no_error_of_the_host_passes_for_one_of_the_device(monkeypatch):
    """A device that calls all blocks different, while the host finds the first one equal, has a wrong comparison."""
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    right, erred = verified(case_of(SMALL[0]))
    assert not right.wrong
    assert erred.subject is Subject.COMPARATOR
    assert "the host finds" in erred.evidence.pattern


def listed(device, found, **more):
    facts = list(edges.cases(context(device=device, **more), found))
    return [f.name for f in facts if isinstance(f, Case)], {f.case: f.reason for f in facts if isinstance(f, Skipped)}


def test_the_memory_is_asked_first_and_what_is_missing_is_told(monkeypatch):
    """With what it takes: too little memory, a server on the device, or a processor's share of the host's memory."""
    monkeypatch.setattr(Torch, "memory", lambda *_: (3 << 30, 141 << 30))
    ran, left_out = listed(HOPPER, EVERY)
    assert ran
    assert len(ran) + len(left_out) == len(EVERY)
    result = next(reason for case, reason in left_out.items() if "edge-matmul-result/" in case)
    assert re.fullmatch(r"it takes 4,\d\d\d MiB of memory; at most 2,048 MiB may be taken", result)
    monkeypatch.setattr(Torch, "memory", lambda *_: (140 << 30, 141 << 30))
    assert listed(HOPPER, EVERY, budget=240.0) == ([e.name for e in (*EVERY[7:], *EVERY[:7])], {})
    ran, left_out = listed(HOPPER, EVERY, room=1 << 30)
    assert not ran
    assert all(re.search(r"takes [\d,]+ MiB of memory, and a server uses", reason) for reason in left_out.values())
    ran, left_out = listed(HOPPER, EVERY, budget=20.0)
    assert len(ran) == 5
    assert all("are left for it" in reason for reason in left_out.values())


def test_a_processor_takes_small_and_quick_edges(monkeypatch):
    """An eighth of the memory that is free, and ten seconds each; another runtime takes none."""
    monkeypatch.setattr(edges, "available", lambda: 8 << 30)
    ran, left_out = listed(cpu(), EVERY, budget=1000.0)
    assert any("edge-baddbmm-inner/" in name for name in ran)
    assert all(size_of(name) <= 1 << 30 for name in ran)
    assert "at most 1,024 MiB may be taken" in next(r for case, r in left_out.items() if "-result/" in case)
    monkeypatch.setattr(edges, "available", lambda: 1 << 50)
    monkeypatch.setattr(edges, "LONGEST", 0.1)
    _, left_out = listed(cpu(), EVERY, budget=1000.0)
    assert re.search(r"would take about [\d.]+ s; 0.1 s are left", left_out[edges.ATTENTIONS[1].name])
    mlx = replace(cpu(), backend="mlx-cpu")
    assert listed(mlx, EVERY) == ([], {"edges of size": "they are tested through torch alone"})


def size_of(name):
    return next(edge.size(cpu()) for edge in EVERY if edge.name == name)


def test_edges_belong_to_level_deep_and_to_those_who_ask(monkeypatch):
    """Not to quick and standard; to all cases ("*", as characterise asks) and to retests by name, at any level."""
    monkeypatch.setattr(Torch, "memory", lambda *_: (140 << 30, 141 << 30))
    for level in ("quick", "standard"):
        assert listed(HOPPER, EVERY, level=level) == ([], {})
        assert len(listed(HOPPER, EVERY, level=level, cases=("*",), budget=240.0)[0]) == len(EVERY)
        assert listed(HOPPER, EVERY, level=level, cases=(EVERY[3].name,))[0] == [EVERY[3].name]
        assert listed(HOPPER, EVERY, level=level, cases=("float32/dense/square",)) == ([], {})


@pytest.mark.parametrize(("probe", "edge"), [(exact_matmul, SMALL[3]), (exact_attention, SMALL[-4])])
@pytest.mark.parametrize("drill", ["", "flip", "consistent"])
def test_a_probe_runs_an_edge_that_is_asked_for(monkeypatch, probe, edge, drill):
    """Alone, with an injected fault found; the dossier says that its operands are no files."""
    monkeypatch.setattr(edges, "PRODUCTS" if probe is exact_matmul else "ATTENTIONS", (edge,))
    found = [f for f in probe.run(context(edge.name, drill=drill, level="quick")) if isinstance(f, Comparison)]
    assert {f.case for f in found} == {edge.name}
    assert any(f.wrong for f in found) is bool(drill)
    with pytest.raises(Skip, match="too large for files"):
        exhibit(probe.SPEC.name, edge.name, 1, cpu())


def test_an_edge_without_memory_ends_no_run(monkeypatch):
    """Asked for by name it is skipped with what it takes; so is one whose memory runs out after all."""
    monkeypatch.setattr(edges, "PRODUCTS", SMALL[:1])
    monkeypatch.setattr(edges, "available", lambda: 0)
    facts = []
    with pytest.raises(Skip, match="MiB of memory; at most 0 MiB may be taken"):
        facts += exact_matmul.run(context(SMALL[0].name))

    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(Skip, match="MiB of memory, which ran out"):
        list(verify.verify_all(context(), [case_of(SMALL[0], full)], [], None))


def test_its_time_is_kept_free_and_it_comes_last():
    """The other cases share what is left, so that no edge is left out for lack of time; a crash loses no other case."""
    edge = replace(case_of(SMALL[0]), seconds=150.0)
    spec = Product("dense", FORMATS["float32"], FORMATS["float32"], 24, 8, 8, 16)
    others = [Case(f"float32/dense/{n}", partial(build, spec), lambda ab, _: torch.matmul(*ab)) for n in range(40)]
    clock = iter(range(1_000_000))
    ctx = context(clock=lambda: float(next(clock)), budget=200.0)
    facts = list(verify.verify_all(ctx, [edge, *others], [], None))
    ran = [f.case for f in facts if isinstance(f, Comparison)]
    assert ran[-1] == edge.name
    assert any(f.late for f in facts if isinstance(f, Skipped))


def test_the_table_has_every_edge_and_its_report():
    """K and a side beyond 32,768, 2**31 elements, a million rows, addends, 65,536 keys, heads of 256 in one array."""
    assert len({edge.name for edge in EVERY}) == len({class_of(edge.name) for edge in EVERY}) == len(EVERY)
    assert all(re.search(r"[a-z]+ .*\d{3,}", edge.reports) for edge in EVERY)
    sizes = [(edge, *edge.sizes) for edge in edges.PRODUCTS]
    assert {edge.call for edge, *_ in sizes} == set(edges.CALLS)
    for reaches in (
        lambda batch, M, N, K: K > 32_768,
        lambda batch, M, N, K: N > 32_768,
        lambda batch, M, N, K: M > 1_000_000,
        lambda batch, M, N, K: max(1, batch) * M * N > 2**31,
        lambda batch, M, N, K: max(1, batch) * M * K > 2**31,
        lambda batch, M, N, K: max(1, batch) * M * K > 2**32,
    ):
        assert any(reaches(*each) for _, *each in sizes)
    assert all(S > 65_536 or (D == 256 and edge.packed) for edge in edges.ATTENTIONS for _, _, S, D in [edge.sizes])


@pytest.mark.parametrize("edge", EVERY, ids=lambda e: e.name)
def test_a_gpu_takes_every_edge_in_full_size(monkeypatch, edge):
    """On fake tensors, which have a format and a place and no data: operands, call, and the blocks of its answers."""
    stand_in(monkeypatch, torch)
    monkeypatch.setattr(edges, "BLOCK", 1 << 24)
    session = Session(context(device=HOPPER))
    pools = edge.build(HOPPER, 1)
    assert pools.witnessed
    with fake(torch):
        known = edge.hold(session, pools, 1)
        result = edge.computes(HOPPER)(known.operands, None)
        parts = list(edges.blocks(known.shape))
        assert (result.shape, result.dtype) == (known.shape, FORMATS[edge.form].dtype)
        assert {each.device.type for each in (*known.operands, result)} == {"cuda"}
        assert max(math.prod(s.stop - s.start for s in part) for part in parts) <= edges.BLOCK
        for part in (parts[0], parts[-1]):
            assert known.right(part).shape == result[part].shape == known.right_on_host(part).shape
        edges.spoil(result)


PEAK = r"""
import pathlib, re, sys
from canaryd.probe import Context
from canaryd.worker.numeric import edges
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu

def peak():  # of this process alone: ru_maxrss begins with that of its parent
    return int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) << 10

def run(edge):
    session = Session(Context(device=cpu(), level="deep", seed=1, budget=60.0))
    pools = edge.build(cpu(), 1)
    held = edge.hold(session, pools, 1)
    found = edges.compare(session, held, edge.computes(cpu())(held.operands, None), 1)
    assert found == (None, ""), found

edge = next(e for e in (*edges.PRODUCTS, *edges.ATTENTIONS) if e.name == sys.argv[1])
run(edges.replace(edge, sizes=tuple(min(size, 128) for size in edge.sizes)))
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = peak()
run(edge)
print(peak() - before, edge.size(cpu()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak")
@pytest.mark.parametrize(
    "name",
    ["edge-addmm-rows/", *(pytest.param(n, marks=pytest.mark.slow) for n in ("edge-addmm-inner/", "edge-keys/"))],
)
def test_an_edge_takes_no_more_memory_than_it_says(name):
    """Its peak in a process of its own, in full size, after all that loads at the first call."""
    edge = next(edge for edge in EVERY if name in edge.name)
    ran = subprocess.run([sys.executable, "-c", PEAK, edge.name], check=True, capture_output=True, text=True)
    took, said = map(int, ran.stdout.split())
    assert 0 < took <= said


def test_a_wrong_edge_is_told_although_memory_runs_out_in_its_repeat(monkeypatch):
    """What another program takes meanwhile hides nothing that was found."""
    edge, calls = edges.PRODUCTS[0], []

    def wrong(a, b):
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError
        found = torch.matmul(a, b.mT)
        found.view(-1)[5] += 1
        return found

    monkeypatch.setitem(edges.CALLS, edge.call, wrong)
    ctx = Context(device=cpu(), level="deep", seed=3, budget=60.0, cases=(edge.name,))
    found = list(verify.verify_all(ctx, list(edges.cases(ctx, [edge])), [], None))
    assert [c.wrong_trials for c in found if isinstance(c, Comparison)] == [1]
