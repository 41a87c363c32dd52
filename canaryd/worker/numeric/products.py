"""Products of matrices on a device: pairs of formats, layouts, and the call of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import FORMATS, allowing, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation

FORMAT_PAIRS = (
    ("float64", "float64"), ("float32", "float32"), ("tfloat32", "float32"),
    ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32"),
    ("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float32"), ("float8_e5m2", "bfloat16"),
)  # fmt: skip
"""Pairs of operand format and result format. float32 results of narrow operands show the unrounded partial sums."""
INT8_CONTENTS = ("narrow", "wide")
LAYOUTS = ("nn", "nt", "tn", "tt")
"""Memory layouts of A and B, one letter each: "n" row by row, "t" column by column."""


def format_pairs(device: Device) -> list[tuple[str, str]]:
    """Return (operand format, result format) of every tested product; FP8 is in the variant that the device has."""
    return [(float8(device, source), target) for source, target in FORMAT_PAIRS]


def int8_pairs(device: Device) -> list[tuple[str, str]]:
    """Return (format of A, content class) of every tested integer product; the format of B is always int8."""
    return list(itertools.product(interface.of(device).left_integers, INT8_CONTENTS))


def multiply(source: str, target: str, operands: tuple[Any, ...], out: Any, *, fast: bool = False) -> Any:
    """Return the product of two operands on their device; it can overwrite `out`. `fast`: FP8's fast accumulation.

    FP8 operands may be followed by their float32 scales: (M, 1) of the rows of A, and (1, N) of the columns of B.
    """
    a, b, *scales = operands
    kept = out if a.device.type == "cuda" else None  # of other backends not every product takes one
    if source == "int8":
        return torch._int_mm(a, b, out=kept)  # noqa: SLF001
    if source == "uint8":
        raise NotImplementedError("torch multiplies no uint8 matrices")
    if source.startswith("float8"):
        scale_a, scale_b = scales or [torch.ones((), device=a.device)] * 2
        scaled = partial(torch._scaled_mm, a, b, scale_a=scale_a, scale_b=scale_b, use_fast_accum=fast)  # noqa: SLF001
        # New memory would be filled with NaN first, because the strict switches ask for deterministic algorithms.
        return scaled(out_dtype=FORMATS[target].dtype) if kept is None else scaled(out_dtype=kept.dtype, out=kept)
    if source == "tfloat32":
        if torch.version.hip or a.device.type != "cuda":
            raise NotImplementedError("TF32 is a format of NVIDIA's tensor cores")
        with allowing("allow_tf32"):  # 11 significant bits, in this class alone
            return torch.matmul(a, b, out=out)
    if source != target:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=FORMATS[target].dtype, out=kept)
    return torch.matmul(a, b, out=out)


RECIPES = {
    "1x128": ("BlockWise1x128", "BlockWise1x128", ""),
    "128x128": ("BlockWise1x128", "BlockWise128x128", ""),
    "mxfp8": ("BlockWise1x32", "BlockWise1x32", "float8_e8m0fnu"),
    "mxfp4": ("BlockWise1x32", "BlockWise1x32", "float8_e8m0fnu"),
    "nvfp4": ("BlockWise1x16", "BlockWise1x16", "float8_e4m3fn"),
}
"""Name of a scaling by blocks → torch's recipes for A and B, and the format of scales that come as bytes, or ""."""


def multiply_blocks(scaling: str, target: str, operands: tuple[Any, ...]) -> Any:
    """Return the product of operands with a scale for each block along K (`canaryd.worker.numeric.scaled.build`)."""
    a, b, *scales = operands
    if a.device.type != "cuda" or torch.version.hip:
        raise NotImplementedError("products with scales of blocks are for NVIDIA GPUs alone")
    api = torch.nn.functional
    recipe_a, recipe_b, form = RECIPES[scaling]
    if scaling.endswith("fp4"):
        a, b = (side.view(torch.float4_e2m1fn_x2) for side in (a, b))
    if form:
        scales[:2] = (scale.view(getattr(torch, form)) for scale in scales[:2])
    levels = len(scales) // 2  # the second is one scale of a whole operand
    kinds_a, kinds_b = (
        [getattr(api.ScalingType, recipe), api.ScalingType.TensorWise][:levels] for recipe in (recipe_a, recipe_b)
    )
    swizzle = [api.SwizzleType.SWIZZLE_32_4_4, api.SwizzleType.NO_SWIZZLE][:levels] if form else None
    out = FORMATS[target].dtype
    return api.scaled_mm(a, b, scales[::2], kinds_a, scales[1::2], kinds_b, swizzle, swizzle, output_dtype=out)


def label_of(source: str, target: str) -> str:
    """Return the label of a pair of formats for the names of cases."""
    return source if source == target else f"{source}>{target}"


def computing(device: Device, source: str, target: str) -> Callable[[tuple[Any, ...], Any], Any]:
    """Return the function that computes a product on the device, from (operands, a result to overwrite or None)."""
    return partial(interface.of(device).run, Operation("matmul", source, target))
