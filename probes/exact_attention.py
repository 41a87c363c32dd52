"""Scaled dot-product attention with one right answer, through every kernel that the device offers.

Stresses: both products of attention, the maximum, the exponential at 0 and far below it, online rescaling, masks,
grouped queries, and the reads of a long key/value cache. Rows are one-hot (the answer is one value) or uniform over
eight keys (the answer is their mean).

Cannot see: errors of the exponential between 0 and the gap (recorded_kernels does), kernels outside torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from canaryd.probe import Context, Device, Fact, ProbeSpec, Skipped
from canaryd.worker.numeric.attention import CONTENTS, MASKS, Attention, build
from canaryd.worker.numeric.tensors import FORMATS
from canaryd.worker.numeric.verify import accumulator
from canaryd.worker.toolkit import Case, need_torch, refusal, torch, verify_all

SPEC = ProbeSpec(
    name="exact_attention",
    summary="attention with one right answer, through every kernel",
    budget={"quick": 2.5, "standard": 20.0, "deep": 120.0},
    every_instruction_set=True,
    order=20,
)

FORMAT_NAMES = ("float64", "float32", "bfloat16", "float16")
KERNELS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
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
GOLDEN = Path(__file__).parent / "golden" / "exact_attention.json"


def run(ctx: Context) -> Iterator[Fact]:
    """Verify fixed cases, then fresh ones: every kernel, format and content; masks and shapes in rotation."""
    need_torch()
    fixed: list[Case] = []
    fresh: list[Case] = []
    turn = ctx.seed
    for kernel in KERNELS:
        for name in FORMAT_NAMES:
            if why := refuses(ctx.device, kernel, name, "none", grouped=False):
                yield Skipped(case=f"{kernel.lower()}/{name}", reason=why)
                continue
            refused = {(m, g): refuses(ctx.device, kernel, name, m, grouped=g) for m in MASKS for g in (False, True)}
            for (mask, grouped), why in refused.items():
                if why:
                    yield Skipped(case=f"{kernel.lower()}/{name}/{mask}{'/grouped' if grouped else ''}", reason=why)
            for content in CONTENTS:
                fixed.append(_fixed(ctx.device, kernel, name, content))
                turn += 1
                for kind, mask in _variants(ctx, turn):
                    sizes = SIZES[ctx.level][kind]
                    if not refused[mask, sizes[1] != sizes[2]]:
                        fresh.append(attention_case(ctx.device, kernel, name, content, mask, kind, sizes))
    yield from verify_all(ctx, fresh, fixed, GOLDEN)


def fixed_cases(device: Device) -> list[Case]:
    """Return every fixed case, with kernels that `device` lacks; their digests ship with canaryd."""
    return [_fixed(device, *choice) for choice in product(KERNELS, FORMAT_NAMES, CONTENTS)]


def _fixed(device: Device, kernel: str, form: str, content: str) -> Case:
    return attention_case(device, kernel, form, content, "none", "fixed", (1, 2, 2, 32, 64, 64))


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
    """Return one attention problem as a case; `sizes` are B, H, G, L, S and D; kind "fixed" has a fixed seed."""
    B, H, G, L, S, D = sizes
    spec = Attention(content, FORMATS[form], mask, B, H, G, L, S, D)
    name = f"{form}/{content}/{kind}/{kernel.lower()}/{mask}@{B}x{H}x{G}x{L}x{S}x{D}"
    sound = accumulator(device, form).characterised
    return Case(name, partial(build, spec), partial(_compute, kernel, mask), sound, struck=2, fixed=kind == "fixed")


def _compute(kernel: str, mask: str, operands: tuple[Any, ...], out: Any) -> Any:  # noqa: ARG001  SDPA has no out=
    query, key, value, allowed = operands
    options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if mask in ("bool", "float"):
        options["attn_mask"] = allowed
    attention = torch.nn.attention
    with attention.sdpa_kernel(getattr(attention.SDPBackend, kernel)):
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=mask == "causal", **options
        )
    return result.contiguous()


def refuses(device: Device, kernel: str, form: str, mask: str, *, grouped: bool) -> str:
    """Return why this kernel does not support this kind of problem here, or "" after it has solved a tiny one."""
    heads = (4, 2) if grouped else (2, 2)
    problem = build(Attention("onehot", FORMATS[form], mask, 1, *heads, 16, 32, 64), 1)
    return refusal(device, problem, partial(_compute, kernel, mask))
