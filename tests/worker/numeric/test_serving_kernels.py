"""Recorded kernels on the CPU: the same bits each time, within the bound on any data, every fault found by either."""

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from canaryd.facts import Comparison, Exactness, Reading, Recording, Skipped, Subject
from canaryd.probe import Context
from canaryd.worker.numeric import error_bounds, faults, serving_kernels
from canaryd.worker.numeric.serving_kernels import every_kernel
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import can_pin, form_of, strict_switches, visible_cores

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"gemm", "sdpa", "rmsnorm", "layernorm", "silu", "swiglu", "gelu", "rope", "softmax", "quantised", "fp8"}
FEW = ("gemm/float32", "softmax/bfloat16", "exp/float16")


@pytest.fixture(scope="module")
def probe(maker):
    return maker.load("recorded_kernels")


@pytest.fixture(scope="module")
def ran():
    """Every case that this CPU takes, with its operands, result, reference and tolerance."""
    found = {}
    with strict_switches(), torch.inference_mode():
        for kernel in every_kernel(cpu()):
            operands = kernel.build(kernel.seed)
            try:
                result = kernel.compute(*operands)
            except (RuntimeError, AttributeError):
                continue
            found[kernel.name] = kernel, operands, result, *kernel.judged(operands, form_of(result.dtype))
    return found


def context(*cases, seed=3, budget=600.0, level="quick", **more):
    return Context(device=cpu(), level=level, seed=seed, budget=budget, cases=cases, **more)


def of(kind, facts):
    return [fact for fact in facts if isinstance(fact, kind)]


def bit_sets(facts):
    found = defaultdict(set)
    for recording in of(Recording, facts):
        found[recording.case].add(recording.digest)
    return found


def test_a_clean_run_records_and_bounds_every_case(probe, ran):
    """One recording and one clean comparison a case; what is refused says so; a reading a kind."""
    facts = list(probe.run(context()))
    recordings, comparisons = of(Recording, facts), of(Comparison, facts)
    assert {r.case for r in recordings} == {c.case for c in comparisons} == set(ran)
    assert not [c for c in comparisons if c.wrong]
    assert {c.exactness for c in comparisons} == {Exactness.MARGIN}
    assert {s.case for s in of(Skipped, facts)} >= {f"sdpa/cudnn/{dtype}" for dtype in serving_kernels.DTYPES}
    for recording in recordings:
        assert len(recording.digest) == 16
        assert 1 <= len(recording.values) <= 64
        assert None not in recording.values
        assert set(recording.chain) == {"dtype", "prompt", "settings", "client"}
    readings = {r.key: r for r in of(Reading, facts)}
    for kind in KINDS | set(serving_kernels.SWEEPS):
        assert 0.0 < readings[f"recorded_error_ratio{{kind={kind}}}"].value < 1.0
        assert readings[f"kernel_seconds{{kind={kind}}}"].value > 0.0
    assert readings["trials"].value == len(recordings)


def test_bits_do_not_depend_on_run_process_core_or_threads(probe):
    """Other seeds mean other cores, other offsets, another order; another process begins anew."""
    wanted = bit_sets(probe.run(context(seed=1)))
    again = bit_sets(probe.run(context(seed=2)))
    assert again == wanted
    kept = bit_sets(probe.run(context("gemm", "sdpa/math", "quantised", level="deep", budget=2.0)))
    assert all(wanted[case] == digests for case, digests in kept.items())
    assert {len(digests) for digests in wanted.values()} == {1}
    script = (
        "import sys, json; sys.path[:0] = [{0!r}, {0!r} + '/probes']\n"
        "import recorded_kernels; from canaryd.model import Recording; from canaryd.probe import Context\n"
        "from canaryd.worker.numeric.stack import cpu\n"
        "ctx = Context(device=cpu(), level='quick', seed=9, budget=600.0)\n"
        "print(json.dumps({{f.case: f.digest for f in recorded_kernels.run(ctx) if isinstance(f, Recording)}}))\n"
    ).format(str(ROOT))
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert {case: {digest} for case, digest in json.loads(done.stdout).items()} == wanted


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_every_fault_of_a_drill_changes_the_bits(probe, fault):
    """By the digest always; by the bound where it is large enough."""
    wanted = bit_sets(probe.run(context(*FEW)))
    facts = list(probe.run(context(*FEW, drill=fault)))
    changed = [case for case, digests in bit_sets(facts).items() if digests != wanted[case]]
    always = faults.FAULTS[fault].always
    assert len(changed) == (len(wanted) if always else 1)
    wrong = [c for c in of(Comparison, facts) if c.wrong]
    assert {c.subject for c in wrong} <= {Subject.DEVICE}
    assert {c.case for c in wrong} <= set(changed)
    if fault in ("nan", "consistent"):
        assert len(wrong) == len(changed)
        assert wrong[0].evidence.wrong == 1
        assert (wrong[0].evidence.repeats_wrong, wrong[0].evidence.repeats) == (3 if always else 0, 3)
        assert wrong[0].place.unit in ("core", "thread")


def test_a_drill_finds_a_case_that_this_device_takes(probe):
    """Whatever case the seed chooses, refused ones included, the fault is injected."""
    cases = ("gemm/bfloat16>float32", "sdpa/cudnn/float32", "exp/float32")
    for seed in range(6):
        facts = list(probe.run(context(*cases, seed=seed, drill="nan", level="standard")))
        assert [c.case for c in of(Comparison, facts) if c.wrong] == ["exp/float32@64x512"]
        assert [r.values.count(None) for r in of(Recording, facts)] in ([1, 0], [0, 1])


@pytest.mark.parametrize("cores", [1, 2])
def test_a_wrong_host_accuses_itself(probe, monkeypatch, cores):
    """A reference that another core makes otherwise, or the only one at a second try, accuses no device."""
    if len(visible_cores()) < cores or not can_pin():
        pytest.skip(f"this process cannot be held to {cores} cores")
    calls = []
    honest = error_bounds.allowed

    def lying(bounded, form):
        calls.append(1)
        reference, tolerance = honest(bounded, form)
        return (reference * 2.0, tolerance) if len(calls) == 1 else (reference, tolerance)

    monkeypatch.setattr(error_bounds, "allowed", lying)
    before = visible_cores()
    os.sched_setaffinity(0, before[:cores])
    try:
        facts = list(probe.run(context("exp/float32")))
    finally:
        os.sched_setaffinity(0, before)
    (doubt,) = (c for c in of(Comparison, facts) if c.wrong)
    assert doubt.subject is Subject.HOST
    both = {f"cores {a} and {b}" for a, b in itertools.permutations(before[:2], 2)}
    assert str(doubt.place) in ({f"core {before[0]} twice"} if cores == 1 else both)


@pytest.mark.parametrize("seeds", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_bound_holds_for_other_operands(ran, seeds):
    """Seeds in turn over every kind and format, one thread."""
    cases = [kernel for kernel, *_ in ran.values() if not kernel.name.startswith("sdpa/default")]
    worst = defaultdict(float)
    with strict_switches(), torch.inference_mode():
        for seed in range(seeds):
            for kernel in cases[seed % 8 :: 8]:
                operands = kernel.build(seed)
                result = kernel.compute(*operands)
                reference, tolerance = kernel.judged(operands, form_of(result.dtype))
                ratio = float(((result.double() - reference).abs() / tolerance).max())
                worst[kernel.kind] = max(worst[kernel.kind], ratio)
    assert set(worst) == KINDS | set(serving_kernels.SWEEPS)
    assert max(worst.values()) <= 1.0, dict(worst)


def _wrong(ran, name, result):
    _, _, right, reference, tolerance = ran[next(n for n in ran if n.startswith(name))]
    assert result.dtype is right.dtype
    assert bool(((right.double() - reference).abs() <= tolerance).all())
    return int((~((result.double() - reference).abs() <= tolerance)).sum())


def _operands(ran, name):
    return ran[next(n for n in ran if n.startswith(name))][1]


def test_wrong_kernels_break_the_bound(ran):
    """Each does what a wrong kernel was once seen to do."""
    x, w = _operands(ran, "gemm/float32/prefill")
    assert _wrong(ran, "gemm/float32/prefill", x[:, 1:] @ w[:, 1:].T) > x.shape[0] * w.shape[0] * 0.8  # drops one k
    rounded = (x.bfloat16() @ w.bfloat16().T).float()
    assert _wrong(ran, "gemm/float32/prefill", rounded) > 1000  # computes in another format
    x, w = _operands(ran, "gemm/bfloat16/prefill")
    assert _wrong(ran, "gemm/bfloat16/prefill", x[:, 1:] @ w[:, 1:].T) > 1000
    for dtype in ("float32", "bfloat16"):
        (x,) = _operands(ran, f"softmax/{dtype}")
        grown = x.float().exp()
        assert _wrong(ran, f"softmax/{dtype}", (grown / grown.sum(-1, keepdim=True)).to(x.dtype)) > 0  # overflows
    x, weight = _operands(ran, "rmsnorm/float32")
    short = x * torch.rsqrt(x[:, :-1].square().mean(-1, keepdim=True) + serving_kernels.EPS) * weight
    assert _wrong(ran, "rmsnorm/float32", short) > x.numel() * 0.9
    x, weight, bias = _operands(ran, "layernorm/float32")
    unbiased = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + serving_kernels.EPS).sqrt() * weight + bias
    assert _wrong(ran, "layernorm/float32", unbiased) > x.numel() * 0.9
    (x,) = _operands(ran, "gelu/float32")
    assert _wrong(ran, "gelu/float32", torch.nn.functional.gelu(x, approximate="tanh")) > 1000
    x, cosine, sine = _operands(ran, "rope/float32")
    assert _wrong(ran, "rope/float32", x * cosine - error_bounds.rotate(x) * sine) > x.numel() * 0.9
    q, k, v = _operands(ran, "sdpa/flash/float32/causal")
    attend = torch.nn.functional.scaled_dot_product_attention
    assert _wrong(ran, "sdpa/flash/float32/causal", attend(q, k, v)) > q.numel() * 0.9  # no mask
    shifted = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
    assert _wrong(ran, "sdpa/flash/float32/causal", attend(q, k, v, attn_mask=shifted)) > q.numel() * 0.9
    q, k, v = _operands(ran, "sdpa/flash/float32/decode")
    assert _wrong(ran, "sdpa/flash/float32/decode", attend(q, k[:, :, 1:], v[:, :, 1:])) > 0  # forgets a key
