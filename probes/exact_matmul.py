"""Matrix products with one right answer, in every format that the device multiplies.

Stresses: the matrix units (tensor cores, AMX, AVX-512/AVX2 FMA), the vector units behind float32 and float64, the
operands' path through memory and caches. Every result is compared with its golden bit for bit, on the device.

Cannot see: faults that need full load or a temperature that this run did not reach; faults of kernels that serving uses
but the runtime's matmul does not choose; errors rarer than the rate that the run's report excludes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from canaryd.probe import Context, Device, Fact, ProbeSpec, Reading, Skipped
from canaryd.worker.numeric import edges, grouped, quantized, scaled
from canaryd.worker.numeric.cases import product_case, why_refused
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.operands import CONTENTS, Product, build, build_int8
from canaryd.worker.numeric.products import computing, format_pairs, int8_pairs, label_of
from canaryd.worker.numeric.served import served_cases
from canaryd.worker.numeric.sizes import choose, measure_speed, shares_units, variants
from canaryd.worker.numeric.stack import int8_pairs_saturate
from canaryd.worker.numeric.tensors import FORMATS
from canaryd.worker.toolkit import Case, chosen, need_torch, refusal, verify_all

SPEC = ProbeSpec(
    name="exact_matmul",
    summary="matrix products with one right answer, in every format",
    version=2,
    runtimes=("*",),
    budget={"quick": 3.0, "standard": 30.0, "deep": 240.0},
    every_instruction_set=True,
    order=10,
    settings=("shapes_of",),
)

FIXED = (96, 80, 256)
INT8_SIZES = {"quick": (64, 256, 512), "standard": (256, 512, 1024), "deep": (256, 512, 1024)}
GOLDEN = Path(__file__).parent / "golden" / "exact_matmul.json"


def run(ctx: Context) -> Iterator[Fact]:
    """Verify fixed cases, then fresh ones: for each format, as many contents, shapes and layouts as time allows."""
    need_torch()
    speeds: dict[str, float] = {}
    refused: list[str] = []
    asked = partial(_is_asked, ctx)
    yield from _try(ctx, asked, speeds, refused)
    if not (speeds or refused):  # the sentence that no case matches names some that there are
        yield from _try(ctx, lambda label: not asked(label), speeds, [])
    fresh, fixed = every_case(ctx, speeds)
    served = list(served_cases(ctx, speeds))
    yield from (s for s in served if isinstance(s, Skipped) and (s.case == "served" or asked(s.case.split("/")[0])))
    at_edges = list(edges.cases(ctx, edges.PRODUCTS))
    yield from (left_out for left_out in at_edges if isinstance(left_out, Skipped))
    fresh += (case for case in (*served, *at_edges) if isinstance(case, Case))
    yield from verify_all(ctx, fresh, fixed, GOLDEN, refused)


def _is_asked(ctx: Context, label: str) -> bool:
    """Return whether a run may need a case of this format; a retest needs only the formats of the suspected cases."""
    return chosen(ctx, f"{label}/") or any(want.startswith(f"{label}/") for want in ctx.cases)


def _try(ctx: Context, wanted: Callable[[str], bool], speeds: dict[str, float], refused: list[str]) -> Iterator[Fact]:
    """Multiply once in each wanted format; add its speed to `speeds`, or the reason of a refusal to `refused`.

    Grouped products and products with scales are left out at level "quick", unless cases are requested by name.
    """
    device = ctx.device
    for source, target in (pair for pair in format_pairs(device) if wanted(label_of(*pair))):
        label = label_of(source, target)
        if why := unsupported(device, source, target):
            refused.append(why)
            yield Skipped(case=label, reason=why)
            continue
        try:
            speeds[label] = measure_speed(device, computing(device, source, target), FORMATS[source], FORMATS[target])
        except Exception as error:
            if not is_refusal(error):
                raise
            refused.append(why_refused(device, error))  # another kernel than the tiny product's
            yield Skipped(case=label, reason=refused[-1])
            continue
        yield Reading(name=f"speed_{label}", value=speeds[label], unit="flops per second")
    tiny = {
        f"{left}>int32/{content}": _int8_case(device, left, content, "fresh", (32, 32, 32))
        for left, content in int8_pairs(device)
    }
    tiny |= {
        quantized.label_of(*pair): quantized.case(device, *pair, "decode", "nt", (1, 128, 128))
        for pair in quantized.pairs(device)
    }
    if ctx.level != "quick" or ctx.cases:
        tiny |= scaled.tiny_cases(device) | grouped.tiny_cases(device)
    for label in filter(wanted, tiny):
        saturates = label.endswith(">int32/wide") and device.unit == "cpu" and int8_pairs_saturate()
        if why := saturates or refusal(device, tiny[label].build(1), tiny[label].compute):
            refused.append(why)
            yield Skipped(case=label, reason=why)
        else:
            speeds[label] = 0.0


def every_case(ctx: Context, speeds: Mapping[str, float]) -> tuple[list[Case], list[Case]]:
    """Return (fresh cases, fixed cases) of the formats in `speeds`; the speeds choose the sizes of float products."""
    fixed = [case for case in fixed_cases(ctx.device) if any(case.name.startswith(f"{label}/") for label in speeds)]
    pairs = [pair for pair in format_pairs(ctx.device) if label_of(*pair) in speeds]
    fresh = []
    step = len(CONTENTS) | 1  # odd: contents that one format leaves out, the next one has
    for (number, pair), (place, content) in itertools.product(enumerate(pairs), enumerate(CONTENTS)):
        shared = shares_units(ctx.device, FORMATS[pair[0]], speeds[label_of(*pair)], speeds.get("float32", 0.0))
        for kind, layout in variants(ctx, ctx.seed + number * step + place, pair[0], shared=shared):
            sizes = choose(ctx, speeds[label_of(*pair)], kind, f"{label_of(*pair)}/{content}/{kind}/{layout}")
            fresh.append(product_case(ctx.device, *pair, content, kind, layout, sizes))
    integers = ((left, content) for left, content in int8_pairs(ctx.device) if f"{left}>int32/{content}" in speeds)
    fresh += (_int8_case(ctx.device, *pair, "fresh", INT8_SIZES[ctx.level]) for pair in integers)
    for module in (quantized, scaled, grouped):
        fresh += module.fresh_cases(ctx, speeds)
    return fresh, fixed


def fixed_cases(device: Device) -> list[Case]:
    """Return every fixed case for `device`, even in formats that it cannot run; their digests ship with canaryd."""
    products = itertools.product(format_pairs(device), CONTENTS)
    cases = [product_case(device, *pair, content, "fixed", "nt", (*FIXED, 0)) for pair, content in products]
    cases += (_int8_case(device, *pair, "fixed", FIXED) for pair in int8_pairs(device))
    return cases + quantized.fixed_cases(device)


def unsupported(device: Device, source: str, target: str) -> str:
    """Return the reason why the device cannot multiply this pair of formats; "" if it computes a tiny product."""
    product = Product("permute", FORMATS[source], FORMATS[target], 8, 32, 32, 32, 0, "nt")
    return refusal(device, build(product, 1), computing(device, source, target))


def _int8_case(device: Device, left: str, content: str, kind: str, sizes: tuple[int, int, int]) -> Case:
    return Case(
        f"{left}>int32/{content}/{kind}/nt@{'x'.join(map(str, sizes))}",
        partial(build_int8, content, *sizes, "nt", left=left),
        computing(device, left, "int32"),
        is_characterised(device, "float64", rounds_nothing=True),
        fixed=kind == "fixed",
    )
