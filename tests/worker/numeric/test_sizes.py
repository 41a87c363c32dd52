"""Sizes of products on accelerators: aligned as served models are, two waves of tiles, and exact at any length."""

from collections import Counter
from dataclasses import replace

import pytest

from canaryd.engine.budget import SMALL
from canaryd.facts import ALIGNED
from canaryd.probe import Context
from canaryd.worker.numeric.cases import product_case
from canaryd.worker.numeric.operands import CONTENTS, make_pools
from canaryd.worker.numeric.products import format_pairs, label_of
from canaryd.worker.numeric.sizes import FULL as ATTENDED
from canaryd.worker.numeric.sizes import LARGEST_K, RAGGED, TILE, choose
from canaryd.worker.runtime.interface import burst_bytes
from probes import exact_attention, exact_matmul
from tests.worker.numeric.cuda import AMPERE, HOPPER, MI300X

pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

UNITS = ((AMPERE, 108), (HOPPER, 132), (MI300X, 304))
FULL = ("square", "prefill", "batched", RAGGED)
FAST, SLOW = 2e14, 1e10
WORKSPACE = 32 << 20
"""Bytes of the library's workspace (CUBLAS_WORKSPACE_CONFIG)."""


def strides(product):
    """Return the strides of A, B and the result."""
    M, N, K = product.M, product.N, product.K
    return K if product.layout[0] == "n" else M, N if product.layout[1] == "n" else K, N


@pytest.mark.parametrize(("device", "units"), UNITS, ids=["A100", "H100", "MI300X"])
@pytest.mark.parametrize("level", ["quick", "standard", "deep"])
def test_most_products_are_those_that_serve(device, units, level):
    """Every stride in whole 64s but for the ragged ones, and two tiles of 128 x 128 and more for each unit."""
    device = replace(device, detail={**device.detail, "multiprocessors": str(units)})
    speeds = {label_of(*pair): FAST for pair in format_pairs(device)}
    seen = Counter()
    for seed in range(10):
        ctx = Context(device=device, level=level, seed=seed, budget=1.0)
        for case in exact_matmul.every_case(ctx, speeds)[0]:
            if (p := case.product) is None:
                continue
            kind = case.name.split("/")[2]
            seen[kind] += 1
            assert any(stride % ALIGNED for stride in strides(p)) is (kind == RAGGED), case.name
            assert kind != RAGGED or not p.source.name.startswith("float8") or not any(s % 16 for s in strides(p))
            tiles = max(1, p.batch) * -(-p.M // TILE) * -(-p.N // TILE)
            assert kind not in FULL or tiles >= 2 * units, case.name
    assert sum(seen[kind] for kind in FULL) >= 0.6 * seen.total()
    assert 0 < seen[RAGGED] <= 0.25 * seen.total()


@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("content", CONTENTS)
def test_the_longest_sums_stay_within_their_bound(source, content):
    """As on the device, whose pools have more rows: a bound that is broken would be refused here."""
    target = "bfloat16" if source.startswith("float8") else source
    for K in (2 * LARGEST_K, LARGEST_K - 63):
        case = product_case(HOPPER, source, target, content, "square", "nt", (6, 5, K, 0))
        made = make_pools(replace(case.product, pool=0).of_pools, 1)
        assert made.witnessed


def test_a_slow_device_gets_products_that_it_finishes():
    """They have fewer tiles: 4 ms of its time at quick, or one tile. Beside a server K stays that of quick."""
    slow = replace(HOPPER, detail={**HOPPER.detail, "multiprocessors": "132"})
    for device in (slow, HOPPER):  # the number of units is known, or not
        ctx = Context(device=device, level="quick", seed=1, budget=1.0)
        for kind in ("square", "prefill", "batched"):
            M, N, K, batch = choose(ctx, SLOW, kind, f"float32/dense/{kind}/nn")
            assert 2 * max(1, batch) * M * N * K <= 2 * max(SLOW * 0.004, 4 * 2 * TILE**2 * 128), kind
    beside = Context(device=slow, level="standard", seed=1, budget=1.0, room=1 << 30)
    alone = Context(device=slow, level="standard", seed=1, budget=1.0)
    sizes = [choose(ctx, FAST, "square", "bfloat16/dense/square/nn") for ctx in (beside, alone)]
    assert [K for _, _, K, _ in sizes] == [2048, LARGEST_K]


@pytest.mark.parametrize(("device", "units"), UNITS, ids=["A100", "H100", "MI300X"])
@pytest.mark.parametrize("level", ["quick", "standard", "deep"])
def test_a_small_run_keeps_to_its_memory(device, units, level):
    """Operands, golden, results, their comparison and the library's workspace; two waves but in the widest results."""
    device = replace(device, detail={**device.detail, "multiprocessors": str(units)})
    speeds = {label_of(*pair): FAST for pair in format_pairs(device)}
    for seed in range(3):
        ctx = Context(device=device, level=level, seed=seed, budget=1.0, room=SMALL)
        for case in exact_matmul.every_case(ctx, speeds)[0]:
            if (p := case.product) is None:
                continue
            batch, golden = max(1, p.batch), max(1, p.batch) * p.M * p.N * p.target.dtype.itemsize
            operands = batch * (p.M + p.N) * p.K * p.source.dtype.itemsize
            pools = batch * p.pool * (2 * p.K * p.source.dtype.itemsize + p.pool * p.target.dtype.itemsize)
            results = max(golden, burst_bytes(SMALL))
            assert operands + pools + golden + results + results // 8 + WORKSPACE <= SMALL, case.name
            tiles = batch * -(-p.M // TILE) * -(-p.N // TILE)
            wide = p.target.name == "float64" and units > 256
            assert wide or case.name.split("/")[2] not in FULL or tiles >= 2 * units, case.name


@pytest.mark.parametrize(("device", "units"), UNITS, ids=["A100", "H100", "MI300X"])
@pytest.mark.parametrize("level", ["quick", "standard", "deep"])
def test_prompts_of_attention_fill_every_unit_twice(device, units, level):
    """Unless a server keeps the memory; and a retest there has the sizes of what failed."""
    device = replace(device, detail={**device.detail, "multiprocessors": str(units)})
    kinds = Counter()
    for seed in range(6):
        for (_, _, _, sizes), case in exact_attention.every_case(free(device, level, seed)):
            kind, blocks = case.name.split("/")[2], sizes[1] * -(-sizes[3] // TILE)
            kinds[kind] += 1
            if kind in ATTENDED:
                assert (sizes[0] - 1) * blocks < 2 * units <= sizes[0] * blocks, case.name
    assert kinds["prefill"] * kinds["grouped"]
    failed = next(
        case.name for _, case in exact_attention.every_case(free(device, level, 3)) if "/prefill/" in case.name
    )
    beside = replace(free(device, level, 3), room=256 << 20)
    assert failed not in [case.name for _, case in exact_attention.every_case(beside)]
    again = replace(beside, cases=(f"{failed}#1g",))
    assert failed in [case.name for _, case in exact_attention.every_case(again)]


def free(device, level, seed):
    """Return the context of a run on a device that no server uses."""
    return Context(device=device, level=level, seed=seed, budget=1.0)
