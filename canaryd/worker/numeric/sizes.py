"""Shapes and sizes of products, chosen from the time per case and the measured speed of the device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from canaryd.facts import ALIGNED
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.numeric.integers import below
from canaryd.worker.numeric.operands import Product, build
from canaryd.worker.numeric.products import LAYOUTS
from canaryd.worker.numeric.tensors import FORMATS, Format, has_events, timed
from canaryd.worker.runtime import interface

KINDS = ("square", "prefill", "decode", "batched", "long")  # those that share pools stand together
RAGGED = "ragged"
"""One more kind on accelerators, where the sizes of all others are multiples of `ALIGNED`. On processors any kind may
be ragged."""
SECONDS = {"quick": 0.004, "standard": 0.03, "deep": 0.1}
"""Level of thoroughness → seconds for one product: a small part of a case's time, so that every case can run."""
LARGEST = {"quick": 512, "standard": 2048, "deep": 4096}
"""Level → largest side of a square product. For a larger product, the host would take too long to make the golden."""
SIDE, SIDE_BY_EVENTS = 192, 1024
"""Sides of the cubic products that measure the speed: with the host's clock, and with the device's own clock. The
device's clock counts half microseconds, and a fast device finishes a product of side 192 too soon to be measured
well."""
CALL = 5e-5
"""Seconds that a library spends on one product apart from the computation (ours)."""
LONG = 5
"""Ratio of K to the sides of a "long" product. Libraries split such sums among several
blocks: MLX on Metal from a ratio of three (mlx/backend/metal/matmul.cpp)."""
LARGEST_LONG = 2048
"""Largest side of a "long" product: K is then 10240."""
TILE = 128
"""Rows and columns of the part of a result that one unit (SM or compute unit) computes at a time, in large products."""
WAVES = {"quick": 2, "standard": 2, "deep": 8}
"""Level → number of tiles per unit: with fewer than two, libraries choose other kernels than for served models."""
FULL = ("prefill", "grouped")
"""Kinds of attention with two blocks of `TILE` queries per unit; others have few, so that kernels split the keys."""
FEW = 16
"""Most tiles of a "long" product on accelerators: fewer than units, so that libraries split its sums."""
ROW = {"quick": 4 << 10, "standard": 32 << 10, "deep": 32 << 10}
"""Level → largest number of bytes of a row of A on accelerators; beside a server that of "quick". The larger K is, the
less of the time comparisons take (benchmarks.case_list), and the longer the host makes the pools."""
LARGEST_K = 16384
"""Largest K on accelerators; in "long" products twice as many."""


def measure_speed(device: Device, compute: Callable[..., Any], source: Format, target: Format) -> float:
    """Return the device's speed, in floating-point operations per second, for a cubic product of these formats.

    The best of three products counts, after one unmeasured product, which loads the kernels.
    """
    n = SIDE_BY_EVENTS if has_events(device) else SIDE
    product = Product("permute", source, target, 8, n, n, n, 0, "nt")
    runtime = interface.of(device)
    operands = runtime.upload(build(product, 1).operands, device)
    call, wait = partial(compute, operands, None), partial(runtime.synchronize, device)
    return 2.0 * n**3 / min([timed(device, call, wait)[1] for _ in range(4)][1:])


def shares_units(device: Device, source: Format, own: float, float32: float) -> bool:
    """Return whether a processor seems to compute a narrower format on its float32 units, because it is slower with it.

    `own` and `float32` are measured speeds in operations per second; 0 means not measured. Slower means that `own` is
    less than 3/4 of `float32`, and that the product takes longer by more than a call costs (ours): units for the
    format itself finish it within microseconds, most of which are the library's.
    """
    if device.backend != "cpu" or source.bits >= FORMATS["float32"].bits or not float32:
        return False
    return own < 0.75 * float32 and 2.0 * SIDE**3 * (1.0 / own - 1.0 / float32) > CALL


def shapes_of(device: Device, source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (kinds of shape, layouts) that are tested for a format; FP8 kernels need column-major B, and no batch."""
    kinds = KINDS if device.unit == "cpu" else (*KINDS, RAGGED)
    if source.startswith("float8"):
        return tuple(kind for kind in kinds if kind != "batched"), ("nt",)
    return kinds, LAYOUTS


def variants(ctx: Context, turn: int, source: str, *, shared: bool) -> list[tuple[str, str]]:
    """Return the (kind of shape, layout) pairs to test in this turn, by the level of thoroughness.

    "deep", or if cases are requested by name: all pairs; "standard": each kind once; "quick": one pair in every second
    turn. With `shared` (the processor computes the format on its float32 units), "deep" has each kind once, "standard"
    one pair, and "quick" one pair in every sixth turn: float32 tests these units too, and faster. An accelerator has
    no pair in every second turn of "standard", so that the host has time for its longer pools.
    """
    kinds, layouts = shapes_of(ctx.device, source)
    if ctx.cases or (ctx.level == "deep" and not shared):
        return [(k, la) for k in kinds for la in layouts]
    if ctx.level != "quick":
        if ctx.device.unit != "cpu":
            turn, left_out = divmod(turn, 2)
            few = ("decode", "long")[turn // len(layouts) % 2]  # of these two, which have few tiles, one in each turn
            kinds = () if left_out else tuple(kind for kind in kinds if kind != few)
        every = [(k, layouts[(turn + i) % len(layouts)]) for i, k in enumerate(kinds)]
        return [every[turn % len(every)]] if shared and ctx.level == "standard" else every
    # Of every turn, making the pools would take longer than multiplying.
    turn, left_out = divmod(turn, 6 if shared else 2)
    return [] if left_out else [(kinds[turn % len(kinds)], layouts[turn // len(kinds) % len(layouts)])]


def choose(ctx: Context, speed: float, kind: str, name: str) -> tuple[int, int, int, int]:
    """Return M, N, K and the batch (0 for none) of the case called `name`.

    A full name in `ctx.cases`, "name@64x48x256", contains its sizes: a confirmation must use the same operands at any
    speed. Otherwise the sizes follow from `speed` (operations per second) and the level's time for one product, and on
    an accelerator from the number of its units. On a processor they vary with the seed, and any may be ragged.
    """
    if asked := asked_for(ctx, name):
        return asked
    rows = (1, 2, 3, 4, 7, 8, 13, 16, 31, 32)
    m = 16 if name.startswith("float8") else rows[int(below(ctx.seed, f"rows {name}", (1,), len(rows)))]
    if ctx.device.unit != "cpu":
        return _on_units(ctx, speed, kind, name, m)
    side = (speed * SECONDS[ctx.level] / 2.0) ** (1 / 3)
    if kind == "long":
        n = max(48, int(min(side / LONG ** (1 / 3), LARGEST_LONG)) // 16 * 16)
        return n, n, LONG * n, 0
    # FP8 and int8 kernels want sixteenths; every other format also meets ragged edges.
    ragged = 0 if name.startswith("float8") else int(below(ctx.seed, f"ragged {name}", (1,), 16))
    n = max(48, int(min(side, LARGEST[ctx.level])) // 16 * 16)
    K = n - (0 if name.startswith("float8") else _cut(ctx.seed, stem(name)))
    if kind == "square":
        return n - ragged, n - ragged, K, 0
    if kind == "prefill":
        return max(32, n // 32 * 16) - ragged, n * 2 - ragged, K, 0
    if kind == "decode":
        return m, n * 2 - ragged, K, 0
    return max(32, n // 2) - ragged, max(32, n // 2), K, 4


def asked_for(ctx: Context, name: str) -> tuple[int, int, int, int] | None:
    """Return M, N, K and the batch (0 for none) that `ctx.cases` gives for the case called `name`, or None."""
    for want in ctx.cases:
        asked, _, sizes = want.partition("#")[0].partition("@")
        if asked == name and re.fullmatch(r"(\d+x)?\d+x\d+x\d+", sizes):
            *batch, M, N, K = map(int, sizes.split("x"))
            return M, N, K, batch[0] if batch else 0
    return None


def attended(ctx: Context, kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return B, H, G, L, S and D of an attention problem; a free accelerator gets so many of `FULL` that they fill it.

    A full name in `ctx.cases` contains its sizes: a retest beside a server computes the same operands.
    """
    for name, _, own in (want.partition("#")[0].partition("@") for want in ctx.cases):
        if kind in name.split("/") and re.fullmatch(r"\d+(x\d+){5}", own):
            return tuple(map(int, own.split("x")))
    B, H, G, L, S, D = sizes
    units = int(ctx.device.detail.get("multiprocessors", 0))
    if units and kind in FULL and not ctx.room:
        B = max(B, -(-WAVES["standard"] * units // (H * -(-L // TILE))))
    return B, H, G, L, S, D


def _on_units(ctx: Context, speed: float, kind: str, name: str, m: int) -> tuple[int, int, int, int]:
    """Return M, N, K and the batch of a case on an accelerator; `m`: rows of a "decode" product.

    A device that is too slow for `WAVES` gets fewer tiles, and a shorter K. Beside a server a result takes at most a
    sixth of the run's memory. Where the number of units is not known, the largest side is that of `LARGEST`.
    """
    formats, layout = name.partition("/")[0].split(">"), name.rpartition("/")[2]
    source, target = FORMATS[formats[0]], FORMATS[formats[-1]]
    work = speed * SECONDS[ctx.level] / 2.0
    wanted = WAVES[ctx.level] * int(ctx.device.detail.get("multiprocessors", 0)) or (LARGEST[ctx.level] // TILE) ** 2
    if ctx.room:
        wanted = min(wanted, ctx.room // (6 * TILE**2 * target.dtype.itemsize))
    longest = min(LARGEST_K, ROW["quick" if ctx.room else ctx.level] // source.dtype.itemsize)
    K = max(2, int(min(longest, max(work ** (1 / 3), work / (wanted * TILE**2)))) // ALIGNED) * ALIGNED
    tiles = max(1, min(wanted, int(work / (K * TILE**2))))
    if kind == "long":
        return *_grid(min(tiles, FEW)), 2 * K, 0
    if kind == "batched":
        return *_grid(-(-tiles // 4)), K, 4
    M, N = _grid(tiles, wider=4 if kind in ("prefill", "decode") else 1)
    if kind == RAGGED:  # FP8 kernels want sixteenths
        least, step = (16, 16) if source.name.startswith("float8") else (1, 2)
        cut = [least + step * int(n) for n in below(ctx.seed, f"ragged {name}", (3,), (ALIGNED - 1) // step)]
        M, N, K = M - cut[0], N - cut[1], K - cut[2]
    if kind == "decode":
        M = ALIGNED if layout[0] == "t" else m  # rows are a stride where A is stored by columns
    return M, N, K, 0


def _grid(tiles: int, wider: int = 1) -> tuple[int, int]:
    """Return the sides of a result of at least this many tiles, and few more; N is `wider` to 5 x `wider` times M."""
    most = max(1, math.isqrt(tiles // wider))
    rows = min(range(max(1, math.isqrt(tiles // (5 * wider))), most + 1), key=lambda n: (-(-tiles // n) * n, -n))
    return rows * TILE, -(-tiles // rows) * TILE


def stem(name: str) -> str:
    """Return the part of a case's name with format and content; cases with the same part and the same K share pools."""
    return "/".join(name.split("/")[:2])


def _cut(seed: int, stem: str) -> int:
    """Return a number to subtract from a K that is a multiple of 16, for ragged edges; 0 for half of the stems."""
    drawn = int(below(seed, f"ragged {stem}", (1,), 32))
    return drawn if drawn < 16 else 0
