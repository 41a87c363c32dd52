"""Scaled dot-product attention with one right answer, through every kernel that the device offers.

Stresses: both products of attention, the maximum, the exponential at 0 and far below it, online rescaling, masks,
grouped queries, and the reads of a long key/value cache. In some cases a row of weights has a single 1 (the answer is
one value), in others it is uniform over eight keys (the answer is their mean).

Cannot see: errors of the exponential between these arguments (recorded_kernels does), kernels outside the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from canaryd.probe import Context, Device, Fact, ProbeSpec, Skipped
from canaryd.worker.numeric import edges
from canaryd.worker.numeric.attention import CONTENTS, MASKS, Attention, blank, build, value_bits
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.served import ATTENDED, served_attention
from canaryd.worker.numeric.sizes import attended
from canaryd.worker.numeric.tensors import FORMATS
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation
from canaryd.worker.toolkit import Case, chosen, need_torch, refusal, verify_all

SPEC = ProbeSpec(
    name="exact_attention",
    summary="attention with one right answer, through every kernel",
    version=2,
    budget={"quick": 1.0, "standard": 20.0, "deep": 120.0},
    runtimes=("torch", "mlx", "onnx", "jax"),  # WGSL leaves the error of exp open: WebGPU has no one right answer
    every_instruction_set=True,
    order=20,
    settings=("shapes_of",),
)

# (B, H, G, L, S, D): G < H is grouped-query, L ≪ S decodes, a long S forces rescaling over many blocks.
SIZES = {
    "quick": {"prefill": (1, 2, 2, 48, 48, 64), "grouped": (1, 4, 2, 32, 65, 64), "decode": (2, 2, 2, 3, 320, 64)},
    "standard": {
        "prefill": (2, 4, 4, 129, 129, 64), "grouped": (1, 8, 2, 96, 200, 128), "decode": (2, 4, 1, 1, 1024, 128),
        "long": (1, 2, 2, 16, 4096, 64),
    },
    "deep": {
        "prefill": (2, 8, 8, 384, 384, 128), "grouped": (2, 16, 4, 200, 512, 128), "decode": (4, 16, 2, 7, 2048, 128),
        "long": (1, 4, 4, 32, 8192, 64),
    },
}  # fmt: skip
FIXED = (1, 2, 2, 32, 64, 64)
GOLDEN = Path(__file__).parent / "golden" / "exact_attention.json"


Question = tuple[str, str, str, tuple[int, ...]]
"""A problem that one kernel must solve: (kernel, format, mask, sizes)."""


def run(ctx: Context) -> Iterator[Fact]:
    """Verify fixed cases, then fresh ones: every kernel, format and content; masks and shapes take turns."""
    need_torch()
    served = list(served_attention(ctx))
    yield from (left_out for left_out in served if isinstance(left_out, Skipped))
    cases = every_case(ctx) + served_cases(ctx, [sizes for sizes in served if not isinstance(sizes, Skipped)])
    # Masks and sizes are refused at their turn: cuDNN makes a plan for each, which takes up to 400 ms (on an H200).
    asked = dict.fromkeys(question[:2] for question, case in cases if chosen(ctx, case.name))
    refused = {which: why for which in asked if (why := refuses(ctx.device, *which, "none", FIXED))}
    for (kernel, form), why in refused.items():
        yield Skipped(case=f"{kernel.lower()}/{form}", reason=why)
    taken = [case for question, case in cases if question[:2] not in refused]
    fixed = [case for case in taken if case.fixed]
    fresh = [case for case in taken if not case.fixed]
    for edge in edges.cases(ctx, edges.ATTENTIONS):
        if isinstance(edge, Skipped):
            yield edge
        else:
            fresh.append(edge)
    yield from verify_all(ctx, fresh, fixed, GOLDEN, list(refused.values()))


def every_case(ctx: Context) -> list[tuple[Question, Case]]:
    """Return (question for a kernel, case) for every case of a run, even if the device lacks the kernel."""
    cases: list[tuple[Question, Case]] = []
    turn = ctx.seed
    for kernel, form, content in product(_kernels(ctx.device), ATTENDED, CONTENTS):
        turn += 1
        variants = [(kind, mask, attended(ctx, kind, SIZES[ctx.level][kind])) for kind, mask in _variants(ctx, turn)]
        for kind, mask, sizes in [("fixed", "none", FIXED), *variants]:
            case = attention_case(ctx.device, kernel, form, content, mask, kind, sizes)
            cases.append(((kernel, form, mask, sizes), case))
    return cases


def served_cases(ctx: Context, served: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[tuple[Question, Case]]:
    """Return (question, case) for served models' attention: for every kernel with one content, in a retest with all."""
    cases = []
    for turn, (kernel, (form, kind, sizes)) in enumerate(product(_kernels(ctx.device), served)):
        mask = "causal" if kind.endswith("prefill") else "none"
        for content in CONTENTS if ctx.cases else [CONTENTS[(ctx.seed // 2 + turn) % len(CONTENTS)]]:
            case = attention_case(ctx.device, kernel, form, content, mask, kind, sizes)
            cases.append(((kernel, form, mask, sizes), case))
    return cases


def fixed_cases(device: Device) -> list[Case]:
    """Return every fixed case, even for kernels that `device` lacks; the right results' digests ship with canaryd."""
    choices = product(_kernels(device), ATTENDED, CONTENTS)
    return [attention_case(device, *choice, "none", "fixed", FIXED) for choice in choices]


def _kernels(device: Device) -> tuple[str, ...]:
    return interface.of(device).attention_kernels


def _variants(ctx: Context, turn: int) -> list[tuple[str, str]]:
    kinds = list(SIZES[ctx.level])
    if ctx.level == "deep" or ctx.cases:
        return [(kind, mask) for kind in kinds for mask in MASKS]
    if ctx.level == "standard":
        return [(kind, MASKS[(turn + i) % len(MASKS)]) for i, kind in enumerate(kinds)]
    return [(kinds[turn % len(kinds)], MASKS[turn // len(kinds) % len(MASKS)])]


def attention_case(
    device: Device, kernel: str, form: str, content: str, mask: str, kind: str, sizes: tuple[int, ...]
) -> Case:
    """Return one attention problem as a case. `sizes`: B, H, G, L, S and D; kind "fixed" always has the same seed."""
    B, H, G, L, S, D = sizes
    bits = value_bits(device, form, kernel)
    spec = Attention(content, FORMATS[form], mask, B, H, G, L, S, D, bits)
    where = f"fixed{bits}" if kind == "fixed" and bits < FORMATS[form].bits else kind
    name = f"{form}/{content}/{where}/{kernel.lower()}/{mask}@{_text(sizes)}"
    sound, compute = is_characterised(device, form), attend(device, kernel, form, mask)
    return Case(name, partial(build, spec), compute, sound, struck=2, fixed=kind == "fixed", repeats=True)


def _text(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def attend(device: Device, kernel: str, form: str, mask: str) -> Callable[[tuple[Any, ...], Any], Any]:
    """Return a function of ((query, key, value, mask), out) that computes attention with one kernel."""
    return partial(interface.of(device).run, Operation("attention", form, form, kernel, mask))


def refuses(device: Device, kernel: str, form: str, mask: str, sizes: tuple[int, ...]) -> str:
    """Return the reason why the kernel refuses a problem of these sizes; "" if it computes one with zeros."""
    problem = blank(Attention("onehot", FORMATS[form], mask, *sizes))
    return refusal(device, problem, attend(device, kernel, form, mask))
