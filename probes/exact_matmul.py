"""Matrix products with one right answer, in every format the device multiplies.

Stresses: the matrix units (tensor cores, AMX, AVX-512/AVX2 FMA), the vector units behind float32 and float64, the
operands' path through memory and caches. Every result is compared with its golden bit for bit, on the device.

Cannot see: faults that need full load or a temperature that this run did not reach; kernels that serving uses and
torch's matmul does not choose; errors rarer than the rate that the run's report rules out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from canaryd.probe import Context, Device, Fact, ProbeSpec, Reading, Skipped
from canaryd.worker.numeric.operands import CONTENTS, Product, build, build_int8
from canaryd.worker.numeric.sizes import choose, measure_speed
from canaryd.worker.numeric.stack import int8_pairs_saturate
from canaryd.worker.numeric.tensors import FORMATS, tf32_allowed
from canaryd.worker.numeric.verify import accumulator
from canaryd.worker.toolkit import Case, need_torch, refusal, torch, verify_all

SPEC = ProbeSpec(
    name="exact_matmul",
    summary="matrix products with one right answer, in every format",
    budget={"quick": 3.0, "standard": 30.0, "deep": 240.0},
    every_instruction_set=True,
    order=10,
)

# (operand format, result format): float32 results of narrow operands show the accumulator unrounded.
FORMAT_PAIRS = (
    ("float64", "float64"), ("float32", "float32"), ("tfloat32", "float32"),
    ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32"),
    ("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float32"), ("float8_e5m2", "bfloat16"),
)  # fmt: skip
KINDS = ("square", "prefill", "decode", "batched")
LAYOUTS = ("nn", "nt", "tn", "tt")
INT8_CONTENTS = ("narrow", "wide")
GOLDEN = Path(__file__).parent / "golden" / "exact_matmul.json"


def run(ctx: Context) -> Iterator[Fact]:
    """Verify fixed cases, then fresh ones: every format with every content; shapes and layouts in rotation."""
    need_torch()
    fixed: list[Case] = []
    fresh: list[Case] = []
    pairs = 0
    for source, target in FORMAT_PAIRS:
        label = _label(source, target)
        if why := unsupported(ctx.device, source, target):
            yield Skipped(case=label, reason=why)
            continue
        speed = measure_speed(ctx.device, partial(_compute, source, target), FORMATS[source], FORMATS[target])
        yield Reading(name=f"speed_{label}", value=speed, unit="flops per second")
        for content in CONTENTS:
            fixed.append(_fixed(ctx.device, source, target, content))
            for kind, layout in _variants(ctx, pairs, source):
                sizes = choose(ctx, speed, kind, f"{label}/{content}/{kind}/{layout}")
                fresh.append(product_case(ctx.device, source, target, content, kind, layout, sizes))
            pairs += 1
    yield from _int8(ctx, fixed, fresh)
    yield from verify_all(ctx, fresh, fixed, GOLDEN)


def fixed_cases(device: Device) -> list[Case]:
    """Return every fixed case of `device`, with formats that it cannot run; their digests ship with canaryd."""
    products = [_fixed(device, source, target, content) for source, target in FORMAT_PAIRS for content in CONTENTS]
    return products + [_int8_case(device, content, "fixed", (96, 80, 256)) for content in INT8_CONTENTS]


def _label(source: str, target: str) -> str:
    return source if source == target else f"{source}>{target}"


def _fixed(device: Device, source: str, target: str, content: str) -> Case:
    return product_case(device, source, target, content, "fixed", "nt", (96, 80, 256, 0))


def _variants(ctx: Context, turn: int, source: str) -> list[tuple[str, str]]:
    """Choose shape kinds and layouts: one in rotation at quick, every kind at standard, every pair at deep."""
    layouts = ("nt",) if source.startswith("float8") else LAYOUTS  # scaled products want B column-major
    kinds = ("square", "prefill", "decode") if source.startswith("float8") else KINDS
    turn += ctx.seed
    if ctx.level == "deep" or ctx.cases:
        return [(k, la) for k in kinds for la in layouts]
    if ctx.level == "standard":
        return [(k, layouts[(turn + i) % len(layouts)]) for i, k in enumerate(kinds)]
    return [(kinds[turn % len(kinds)], layouts[turn // len(kinds) % len(layouts)])]


def product_case(
    device: Device, source: str, target: str, content: str, kind: str, layout: str, sizes: tuple[int, int, int, int]
) -> Case:
    """Return one float product as a case; `sizes` are M, N, K and batch (0 for none); kind "fixed" has a fixed seed."""
    M, N, K, batch = sizes
    room = accumulator(device, source)
    product = Product(content, FORMATS[source], FORMATS[target], room.bits, M, N, K, batch, layout)
    where = f"fixed{room.bits}" if kind == "fixed" else kind
    name = f"{_label(source, target)}/{content}/{where}/{layout}@{f'{batch}x' if batch else ''}{M}x{N}x{K}"
    compute = partial(_compute, source, target)
    return Case(name, partial(build, product), compute, room.characterised, fixed=kind == "fixed")


def _compute(source: str, target: str, operands: tuple[Any, ...], out: Any) -> Any:
    a, b = operands
    if source.startswith("float8"):
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=FORMATS[target].dtype)  # noqa: SLF001
    if source == "tfloat32":
        with tf32_allowed():
            return torch.matmul(a, b)
    if source != target:
        return torch.mm(a, b, out_dtype=FORMATS[target].dtype)
    return torch.matmul(a, b, out=out) if out is not None else torch.matmul(a, b)


def unsupported(device: Device, source: str, target: str) -> str:
    """Return why this device cannot multiply these formats, or "" after it has done so once on a tiny product."""
    if source == "tfloat32" and device.backend != "cuda":
        return "TF32 is a format of NVIDIA's tensor cores"
    product = Product("permute", FORMATS[source], FORMATS[target], 8, 32, 32, 32, 0, "nt")
    return refusal(device, build(product, 1), partial(_compute, source, target))


def _int8(ctx: Context, fixed: list[Case], fresh: list[Case]) -> Iterator[Fact]:
    """Add int8 products with int32 results through `torch._int_mm`, where the device has them."""
    fresh_sizes = (64, 256, 512) if ctx.level == "quick" else (256, 512, 1024)
    for content in INT8_CONTENTS:
        why = int8_pairs_saturate() if content == "wide" and ctx.device.backend == "cpu" else ""
        tiny = _int8_case(ctx.device, content, "fresh", (32, 32, 32))
        if why := why or refusal(ctx.device, tiny.build(1), tiny.compute):
            yield Skipped(case=f"int8>int32/{content}", reason=why)
            continue
        fixed.append(_int8_case(ctx.device, content, "fixed", (96, 80, 256)))
        fresh.append(_int8_case(ctx.device, content, "fresh", fresh_sizes))


def _int8_case(device: Device, content: str, kind: str, sizes: tuple[int, int, int]) -> Case:
    M, N, K = sizes
    return Case(
        f"int8>int32/{content}/{kind}/nt@{M}x{N}x{K}",
        partial(build_int8, content, M, N, K, "nt"),
        lambda operands, out: torch._int_mm(*operands),  # noqa: ARG005, SLF001
        accumulator(device, "float64").characterised,
        fixed=kind == "fixed",
    )
