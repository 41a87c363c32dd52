"""Compare a capture of the exact canary with the proved results, and find the operators that were wrong themselves.

An operator is at fault at a position if its result is wrong and everything that it read is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.facts import Evidence
from canaryd.worker.exact_canary.shape import Shape
from canaryd.worker.numeric import evidence
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.exact_canary.truth import Truth, axis_of

LISTED = 64
"""Maximum number of wrong places that are listed."""
INPUTS = {
    **dict.fromkeys(("query", "key", "value"), ("attention_norm",)),
    "rotated_query": ("query",),
    "rotated_key": ("key",),
    "keys": ("rotated_key",),
    "values": ("value",),
    "scores": ("rotated_query", "keys"),
    "softmax": ("scores",),
    "mixed": ("softmax", "values"),
    "output": ("mixed",),
    "middle": ("output",),
    "inner_norm": ("middle",),
    **dict.fromkeys(("gate", "up", "router"), ("inner_norm",)),
    "share": ("router",),
    "active": ("gate", "up"),
    "down": ("active",),
    "out": ("middle", "down"),
}
"""Operator of a layer → the operators of that layer whose results it reads; `_reads` handles all others."""
FUSED = ("rotated_query", "keys", "values")
"""Operators whose results the mixture reads if one kernel computes scores, softmax and mixture."""
OF_ALL_POSITIONS = ("keys", "values")
AXES = {
    **dict.fromkeys(("rotated_query", "rotated_key", "keys", "values"), ("", "head", "position", "element")),
    "word": ("", "position"),
}
"""Operator → what each axis of its result counts; operators that are not listed: position and element. The first axis
is the single row of the batch."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A position at which an operator's result is wrong although everything that it read is right."""

    layer: str
    """Layer of the operator: "0" is the first layer, "0.expert2" an expert in it; "input" is before the layers, "head"
    after them."""
    operator: str
    step: str
    """"forced" for one pass over the text, otherwise the number of decoding's forward pass; 0 is the prompt."""
    position: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first wrong operator in the order of computation, with its wrong elements."""

    place: Place
    where: Mapping[str, int]
    """Name of an axis (what it counts) → index of the first wrong element on it; positions count from the start of the
    text."""
    wanted: str
    """The right value of the first wrong element, in Python's notation."""
    got: str
    bits: tuple[int, ...]
    """Bits in which the wrong value differs from the right one; 0 is the lowest."""
    evidence: Evidence
    """All elements that this operator itself made wrong. Their indices are those of the captured tensor."""


@dataclass(frozen=True)
class Examined:
    """The result of comparing one inference with the proved results."""

    values: int
    """Number of values compared."""
    loose: int
    """Number of compared values whose right value is known only within a tolerance."""
    wrong: int
    """Number of wrong values, including values that are wrong because an input was wrong."""
    places: tuple[Place, ...]
    """The first `LISTED` places at which an operator itself was wrong, in the order of computation."""
    count: int
    """Number of all places at which an operator itself was wrong."""
    fault: Fault | None


def examine(kept: Mapping[str, Any], truth: Truth, form: str) -> Examined:
    """Return the comparison of an inference's tensors with the truth; `form`: the format of results or exponentials."""
    bad: dict[str, Any] = {}
    places: list[Place] = []
    values = loose = wrong = count = 0
    fault = None
    fused = not any(name.endswith("/softmax") for name in kept)
    for name, got in kept.items():
        _, step, layer, operator = name.split("/")
        place = operator if layer in ("input", "head") else f"{layer}.{operator}"
        end = len(truth.tokens) if step == "forced" else len(truth.prompt) + int(step)
        value, slack = truth.expected(place, form, end, tuple(got.shape))
        off = ~((got.to(torch.float64) - value).abs() <= slack)  # NaN is wrong
        values, loose, wrong = values + off.numel(), loose + int((slack > 0).sum()), wrong + int(off.sum())
        if not bool(off.any()):
            continue
        axis = axis_of(place)
        at = torch.zeros(len(truth.tokens), dtype=torch.bool)
        at[end - off.shape[axis] : end] = off.movedim(axis, 0).flatten(1).any(1)
        own = at & ~_inherited(place, bad, _reads(place, truth.model.shape, fused=fused)) if bad else at
        bad[place] = bad.get(place, False) | at
        found = own.nonzero().view(-1).tolist()
        count += len(found)
        places += [Place(layer=layer, operator=operator, step=step, position=position) for position in found]
        if found and fault is None:
            start = end - off.shape[axis]
            shown = [1] * off.dim()
            shown[axis] = -1
            fault = _fault(places[-len(found)], start, got, value, off & own[start:end].view(shown))
    return Examined(values, loose, wrong, tuple(places[:LISTED]), count, fault)


def _reads(place: str, shape: Shape, *, fused: bool) -> list[str]:
    """Return the places whose results `place` reads; `fused`: whether one kernel computes the whole attention."""
    layer, _, operator = place.rpartition(".")
    if "." in layer:  # of an expert
        outer = layer.partition(".")[0]
        return [f"{layer if name in ('gate', 'up', 'active') else outer}.{name}" for name in INPUTS[operator]]
    if shape.experts and operator == "down":
        return [f"{layer}.expert{e}.{name}" for e in range(shape.experts) for name in ("down", "share")]
    if not layer:
        return {"norm": [f"{shape.layers - 1}.out"], "logits": ["norm"], "word": ["logits"]}.get(operator, [])
    names = FUSED if fused and operator == "mixed" else INPUTS.get(operator, ())
    stream = f"{int(layer) - 1}.out" if int(layer) else "embedding"
    return [f"{layer}.{name}" for name in names] + [stream] * (operator in ("attention_norm", "middle"))


def _inherited(place: str, bad: Mapping[str, Any], reads: list[str]) -> Any:
    """Return, per position, whether a place read a wrong value, or was wrong at an earlier step (in the cache)."""
    found = torch.zeros_like(next(iter(bad.values())))
    for read in (*reads, place):
        if read in bad:
            everywhere = read != place and read.rpartition(".")[2] in OF_ALL_POSITIONS
            found |= bad[read].any() if everywhere else bad[read]
    return found


def _fault(place: Place, start: int, got: Any, value: Any, off: Any) -> Fault:
    """Return the fault of `place` from its result `got`, the right `value`, and `off`, which marks wrong elements."""
    # A right 0 may have either sign: it gets that of the wrong value, so that the bits are those that were flipped.
    value = torch.where(value == 0, torch.copysign(value, got.to(torch.float64)), value)
    want = torch.where(off, value, got.to(torch.float64)).to(got.dtype)
    found = evidence.collect(want, got)
    index, wanted, seen = found.first[0]
    differ = int(wanted, 16) ^ int(seen, 16)
    return Fault(
        place=place,
        where=_where(place.operator, index, start, got.shape),
        wanted=repr(want[index].item()),
        got=repr(got[index].item()),
        bits=tuple(bit for bit in range(got.element_size() * 8) if differ >> bit & 1),
        evidence=found,
    )


def _where(operator: str, index: tuple[int, ...], start: int, sizes: tuple[int, ...]) -> dict[str, int]:
    if operator in ("scores", "softmax"):
        _, kv_head, query, position, key = index
        return {"head": kv_head * sizes[2] + query, "position": start + position, "key": key}
    names = AXES.get(operator, ("", "position", "element"))
    return {name: i + (start if name == "position" else 0) for name, i in zip(names, index, strict=True) if name}
