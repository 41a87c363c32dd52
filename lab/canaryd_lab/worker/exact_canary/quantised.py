"""Store the matrices of an exact canary in few bits without rounding a weight: AWQ, MLX's formats, W8A8, FP8.

A weight is a number times its row's scale, a power of two. The weight's code gives the number: code - zero, where zero
is the middle of the codes, or the code read as FP8 (E4M3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.worker.exact_canary.shape import Unfit
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.quantized import packed
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.exact_canary.matrix import Digits, units


@dataclass(frozen=True)
class Form:
    """A form in which a checkpoint stores matrices in few bits."""

    bits: int
    """Number of bits of a code."""
    group: int = 0
    """Number of inputs that share a scale; 0 if a whole row shares one."""
    head: bool = False
    """Whether the head is also stored in this form."""
    experts: bool = False
    """Whether the engines that were tried can load a mixture of experts in this form."""
    inputs: bool = False
    """Whether the engine rounds inputs to int8, with a scale that is known in advance."""
    floats: bool = False
    """Whether codes are FP8 numbers (E4M3) instead of whole numbers."""

    @property
    def whole(self) -> int:
        """Number of bits, sign included, of the integers from which weights are constructed."""
        return 1 + SIGNIFICANT if self.floats else self.bits


SIGNIFICANT = 4
"""Number of significant bits of an FP8 number (E4M3)."""
RAISED = 8
"""Factor for all numbers in E4M3. With it they reach 120, and every bit of the exponent is 1 in some code."""
AWQ, MXFP8, W8A8, FP8 = "awq", "mlx-mxfp8", "w8a8", "fp8"
FORMS = {
    AWQ: Form(4, 128),
    "mlx-4bit": Form(4, 64, head=True, experts=True),
    "mlx-8bit": Form(8, 64, head=True, experts=True),
    MXFP8: Form(8, 32, head=True, experts=True, floats=True),
    W8A8: Form(8, inputs=True),
    FP8: Form(8, experts=True, floats=True),
}
"""Name → form. Groups are the defaults of AutoAWQ and `mlx_lm.convert`; W8A8 and FP8 are as in compressed-tensors."""
READS: dict[str, Callable[[Digits], float]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), lambda _: 1 / 2),
    "o_proj": lambda digits: digits.offered,
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), lambda _: 1 / 4),
    **dict.fromkeys(("down_proj", "w2"), lambda digits: digits.open),
}
"""Operator whose weights are stored in few bits → function that gives the unit of its inputs."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order in which a word of AWQ holds eight neighbouring outputs: the output's number for each place, lowest place
first."""
LARGEST_INPUT = 127
"""Largest magnitude of an input in int8."""


@dataclass(frozen=True)
class Stored:
    """One matrix (rows, inputs) stored in few bits."""

    codes: Any
    """Codes, 0 or larger: int64 (rows, inputs)."""
    scales: Any
    """Scales as float64 (rows, groups)."""
    bits: int
    """Number of bits of a code."""
    unit: float = 0.0
    """Scale of the inputs; 0 if the engine does not round inputs."""
    floats: bool = False
    """Whether codes are FP8 numbers (E4M3) instead of whole numbers."""

    @property
    def zero(self) -> int:
        """The code that stands for the number 0."""
        return 0 if self.floats else 1 << self.bits - 1

    @property
    def fp8(self) -> Any:
        """The codes as a tensor of FP8 numbers (E4M3)."""
        return self.codes.to(torch.uint8).view(torch.float8_e4m3fn)

    @property
    def wide(self) -> Any:
        """The scales repeated for every weight (rows, inputs)."""
        return self.scales.repeat_interleave(self.codes.shape[1] // self.scales.shape[1], 1)

    @property
    def values(self) -> Any:
        """The values of the stored weights, float64 (rows, inputs)."""
        return (self.fp8.to(torch.float64) if self.floats else self.codes - self.zero) * self.wide

    @property
    def largest(self) -> Any:
        """The largest number that a kernel can make of a code, for every group: its scale times the largest code."""
        return self.scales * (torch.finfo(torch.float8_e4m3fn).max if self.floats else (1 << self.bits) - 1)

    def apart(self, x: Any) -> Any:
        """Return the largest partial sum (…, rows) of a group, for kernels that sum codes and zeros separately.

        `x` are magnitudes of inputs (…, inputs). Returns zeros for integer products and FP8, which have no zero to
        subtract.
        """
        if self.unit or self.floats:
            return torch.zeros(len(x), len(self.codes))
        groups = self.scales.shape[1]
        sizes = ((self.codes + self.zero) * self.wide).view(len(self.codes), groups, -1)
        parts = x.view(len(x), groups, -1)
        return torch.stack([parts[:, i] @ sizes[:, i].T for i in range(groups)]).amax(0)

    def takes(self, x: Any) -> bool:
        """Return whether the engine's rounding of inputs leaves all of `x` (float64) unchanged."""
        whole = x / self.unit if self.unit else torch.zeros(1)
        return bool((whole == whole.round()).all()) and float(whole.abs().max()) <= LARGEST_INPUT


def store(name: str, weight: Any, form: Form) -> Stored:
    """Return a matrix in few bits; raise `Inexact` unless every weight is a multiple of its row's unit."""
    inputs = weight.shape[1]
    if inputs % (form.group or inputs):
        raise Inexact(f"{name}: {inputs} inputs are no whole number of groups of {form.group}")
    digits = Digits.quantised(form.whole)
    levels = digits.levels * (RAISED if form.floats else 1)
    scale = units(weight.abs().amax(1, keepdim=True).to(torch.float64), levels)
    scale = scale.where(scale > 0, 1.0)
    number = weight / scale + 0.0  # no -0: its code is NaN in formats of FP8 that have none
    if form.floats:
        codes = number.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int64)
    else:
        codes = number.round().to(torch.int64) + (1 << form.bits - 1)
    scales = scale.expand(-1, inputs // (form.group or inputs)).contiguous()
    operator = name.split(".")[-2]
    unit = READS[operator](digits) if form.inputs and operator in READS else 0.0
    found = Stored(codes, scales, form.bits, unit, form.floats)
    if not bool((found.values == weight).all()):
        raise Inexact(f"{name}: a weight is off the grid of {'FP8' if form.floats else f'{form.bits} bits'}")
    return found


def stored(weights: Mapping[str, Any], form: str) -> dict[str, Stored]:
    """Return name → matrix that a form stores in few bits; raise `Unfit` if the form cannot store experts."""
    if not FORMS[form].experts and any(".experts." in name for name in weights):
        others = [name for name, each in FORMS.items() if each.experts]
        raise Unfit(f"{form}: not for a mixture of experts; take {', '.join(others[:-1])} or {others[-1]}")
    operators = (*READS, "lm_head") if FORMS[form].head else tuple(READS)
    found = {name: name.split(".")[-2] for name in weights if name.endswith(".weight")}
    return {name: store(name, weights[name], FORMS[form]) for name, operator in found.items() if operator in operators}


def tensors(weights: Mapping[str, Any], few: Mapping[str, Stored], form: str) -> dict[str, Any]:
    """Return name → tensor of a checkpoint: `few` in their form, all others in float32, which engines convert."""
    found = {name: weight.to(torch.float32) for name, weight in weights.items() if name not in few}
    layout = {AWQ: _awq, MXFP8: _mxfp8, W8A8: _w8a8, FP8: _fp8}.get(form, _mlx)
    for name, each in few.items():
        found |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in layout(each)}
    return found


def _mlx(each: Stored) -> Iterator[tuple[str, Any]]:
    yield "weight", packed(each.bits, each.codes).view(torch.uint32)
    yield "scales", each.scales.to(torch.float32)
    yield "biases", (-each.zero * each.scales).to(torch.float32)


def _mxfp8(each: Stored) -> Iterator[tuple[str, Any]]:
    yield "weight", packed(each.bits, each.codes).view(torch.uint32)
    yield "scales", (torch.frexp(each.scales).exponent + 126).to(torch.uint8)  # E8M0: 127 for 1


def _awq(each: Stored) -> Iterator[tuple[str, Any]]:
    zeros = torch.full_like(each.scales, each.zero, dtype=torch.int64)
    for part, codes in (("qweight", each.codes), ("qzeros", zeros)):
        ordered = codes.T.reshape(codes.shape[1], -1, len(AWQ_ORDER))[..., torch.tensor(AWQ_ORDER)]
        yield part, packed(each.bits, ordered.reshape(codes.shape[1], -1))
    yield "scales", each.scales.T.to(torch.float32)


def _w8a8(each: Stored) -> Iterator[tuple[str, Any]]:
    yield "weight", (each.codes - each.zero).to(torch.int8)
    yield "weight_scale", each.scales.to(torch.float32)
    yield "input_scale", torch.tensor([each.unit])


def _fp8(each: Stored) -> Iterator[tuple[str, Any]]:
    yield "weight", each.fp8
    yield "weight_scale", each.scales.to(torch.float32)


def settings(form: str) -> dict[str, Any]:
    """Return the entries that a form needs in `config.json`."""
    how = FORMS[form]
    if form == AWQ:
        awq = {"quant_method": "awq", "version": "gemm", "zero_point": True}
        return {"quantization_config": {**awq, "bits": how.bits, "group_size": how.group}}
    if form in (W8A8, FP8):
        kind = "float" if how.floats else "int"
        number = {"num_bits": how.bits, "type": kind, "symmetric": True, "dynamic": False}
        group = {
            "targets": ["Linear"],
            "weights": {**number, "strategy": "channel"},
            "input_activations": {**number, "strategy": "tensor"} if how.inputs else None,
        }
        state = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized"}
        state |= {"quantization_status": "compressed"}
        return {"quantization_config": {**state, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}}
    mode = {"mode": "mxfp8"} if form == MXFP8 else {}
    return {"quantization": {"group_size": how.group, "bits": how.bits, **mode}}
