"""Store the matrices of an exact canary in few bits, without rounding a weight: AWQ's format and MLX's.

A weight is scale * (code - zero): the scale is a power of two of its row, the zero the middle of the codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.worker.exact_canary.matrix import units
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.quantized import packed
from canaryd.worker.numeric.tensors import torch
from canaryd.worker.runtime.interface import Packing

AWQ, MLX_4, MLX_8 = "awq", "mlx-4bit", "mlx-8bit"
PACKINGS = {AWQ: Packing("affine", 4, 128), MLX_4: Packing("affine", 4, 64), MLX_8: Packing("affine", 8, 64)}
"""Bits and group of each form, as AutoAWQ and `mlx_lm.convert` have them where nothing else is asked for."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Operators whose weights are stored in few bits; in MLX's format the head is, too."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs stands in each place of AWQ's words, from the lowest on."""


@dataclass(frozen=True)
class Stored:
    """One matrix (rows, inputs) in few bits."""

    codes: Any
    """Int64 (rows, inputs), from 0 on."""
    scales: Any
    """Float64 (rows, groups)."""
    packing: Packing

    @property
    def zero(self) -> int:
        """The code of 0."""
        return 1 << self.packing.bits - 1

    @property
    def wide(self) -> Any:
        """The scale of every weight (rows, inputs)."""
        return self.scales.repeat_interleave(self.packing.group, 1)

    @property
    def values(self) -> Any:
        """What is stored, float64."""
        return (self.codes - self.zero) * self.wide

    @property
    def largest(self) -> Any:
        """Scale times the largest code, of every group: as large as anything that a kernel makes of a code."""
        return self.scales * ((1 << self.packing.bits) - 1)

    def apart(self, x: Any) -> Any:
        """Return how large partial sums become in the group (…, rows) where a kernel sums codes and zeros apart.

        It takes scale and zero out of the sum of a group, at most; `x` are magnitudes of inputs (…, inputs).
        """
        sizes = ((self.codes + self.zero) * self.wide).view(len(self.codes), -1, self.packing.group)
        parts = x.view(len(x), -1, self.packing.group)
        return torch.stack([parts[:, i] @ sizes[:, i].T for i in range(sizes.shape[1])]).amax(0)


def store(name: str, weight: Any, packing: Packing) -> Stored:
    """Return a matrix in few bits; raise `Inexact` unless every weight lies on the grid of its group.

    The groups of a row have the same scale: the smallest with which codes reach the row's largest weight.
    """
    if weight.shape[1] % packing.group:
        raise Inexact(f"{name}: {weight.shape[1]} inputs are no whole number of groups of {packing.group}")
    zero = 1 << packing.bits - 1
    scale = units(weight.abs().amax(1, keepdim=True).to(torch.float64), zero - 1)
    whole = weight / torch.where(scale == 0, 1.0, scale)
    if not bool((whole == whole.round()).all()):
        raise Inexact(f"{name}: a weight is off the grid of {packing.bits} bits")
    scales = scale.where(scale > 0, 1.0).expand(-1, weight.shape[1] // packing.group)
    return Stored(whole.to(torch.int64) + zero, scales.contiguous(), packing)


def stored(weights: Mapping[str, Any], form: str) -> dict[str, Stored]:
    """Return the matrices that a form stores in few bits, by the names of their weights."""
    operators = LINEAR if form == AWQ else (*LINEAR, "lm_head")
    found = {name: name.split(".")[-2] for name in weights if name.endswith(".weight")}
    return {
        name: store(name, weights[name], PACKINGS[form]) for name, operator in found.items() if operator in operators
    }


def tensors(weights: Mapping[str, Any], few: Mapping[str, Stored], form: str) -> dict[str, Any]:
    """Return the tensors of a checkpoint in a form, as `stored` gave its matrices.

    What is not in few bits is float32: an engine takes it into its own format, and MLX computes in that of the file.
    """
    found = {name: weight for name, weight in weights.items() if name not in few}
    layout = _awq if form == AWQ else _mlx
    for name, each in few.items():
        found |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in layout(each)}
    return found


def _mlx(each: Stored) -> Iterator[tuple[str, Any]]:
    yield "weight", packed(each.packing, each.codes).view(torch.uint32)
    yield "scales", each.scales.to(torch.float32)
    yield "biases", (-each.zero * each.scales).to(torch.float32)


def _awq(each: Stored) -> Iterator[tuple[str, Any]]:
    zeros = torch.full_like(each.scales, each.zero, dtype=torch.int64)
    for part, codes in (("qweight", each.codes), ("qzeros", zeros)):
        ordered = codes.T.reshape(codes.shape[1], -1, len(AWQ_ORDER))[..., torch.tensor(AWQ_ORDER)]
        yield part, packed(each.packing, ordered.reshape(codes.shape[1], -1))
    yield "scales", each.scales.T.to(torch.float32)


def settings(form: str) -> dict[str, Any]:
    """Return what `config.json` says of a form."""
    packing = PACKINGS[form]
    if form == AWQ:
        awq = {"quant_method": "awq", "version": "gemm", "zero_point": True}
        return {"quantization_config": {**awq, "bits": packing.bits, "group_size": packing.group}}
    return {"quantization": {"group_size": packing.group, "bits": packing.bits}}
