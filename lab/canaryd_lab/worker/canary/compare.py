"""Find the first difference of two captures, and decide whether it is rounding or a fault: `canaryd compare A B`.

One of two rules is used, the first if it applies (docs/lab.md):

same stack   Every bit must be equal. The fault is in the first operator that differs.
difference   Rounding makes differences of one size all over a tensor, which grow slowly from operator to operator. An
             element far outside, or a size that jumps, is a fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from canaryd.worker.numeric.tensors import FORMATS, bits, form_of, need_torch, torch
from canaryd_lab.worker.canary.capture import Capture, name_of, read

SCHEMA = "canaryd.compare/1"
PEAK = 16.0
"""Rule "difference": limit of the ratio of a tensor's largest difference to its noise; healthy stacks had up to 8.4."""
GROWTH = 4.0
"""Rule "difference": limit of the ratio of a tensor's noise to the largest noise before it; healthy: up to 2.0."""
SMALLEST = 32
"""Minimum number of elements of a tensor whose median is used as its noise."""
IRRELEVANT = ("python", "kernel", "visible_cores")
"""Facts of a stack that never change the bits of a result."""


def answer(arguments: Mapping[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Return the result of `compare` for the captures at the paths "a" and "b". Raises `ValueError` for bad files."""
    need_torch()
    captures = []
    for i, which in enumerate("ab"):
        progress(i / 3, f"reading {arguments[which]}")
        captures.append(read(Path(arguments[which])))
    progress(2 / 3, "comparing")
    return {**compare(*captures), "files": {which: arguments[which] for which in "ab"}}


def compare(a: Capture, b: Capture) -> dict[str, Any]:
    """Compare two captures tensor by tensor; return rows in computing order, notes and a verdict, as JSON data.

    A row has: prompt, step, layer, operator, equal, departs (the capture that is wrong: "", "A", "B", "both", "A or
    B"), excess (difference divided by what rounding explains: above 1 is a fault; None if not judged) and, unless the
    tensors are equal, the numbers of `_difference`.
    """
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "a": _header(a),
        "b": _header(b),
        "rule": "",
        "notes": _notes(a, b),
        "rows": [],
        "tokens": [],
    }
    if a.about["digest"] != b.about["digest"]:
        why = f"A is model {_model(a)}, B is model {_model(b)}; only captures of one model can be compared."
        return {**result, "verdict": _verdict("different model", why)}
    if a.about["path"] != b.about["path"]:
        why = f"A is {a.about['path']}, B is {b.about['path']}; they round differently by design. Capture both one way."
        return {**result, "verdict": _verdict("incomparable", why)}
    names = _common(a, b, result)
    if not names:
        why = "A and B have no tensor with the same name and shape and equal input tokens."
        return {**result, "verdict": _verdict("incomparable", why)}
    result["tokens"] = [found for prompt in _shared_prompts(a, b) if (found := _first_token(prompt, a, b))]
    result["rows"] = rows = [_row(name, a.tensors[name], b.tensors[name]) for name in names]
    same = _stack(a) == _stack(b)
    result["rule"] = "same stack" if same else "difference"
    if same:
        _judge_same(rows)
    else:
        _judge_difference(a, b, rows)
    _judge_tokens(a, b, rows)
    return {**result, "verdict": _conclude(result)}


def _header(capture: Capture) -> dict[str, Any]:
    about = capture.about
    device = json.loads(about["device"])
    return {
        "device": device["uuid"],
        "device_model": device["model"],
        "backend": device["backend"],
        "environment": json.loads(about["environment"]),
        **{name: about[name] for name in ("dtype", "model", "digest", "path", "date", "canaryd", "drill", "operators")},
    }


def _model(capture: Capture) -> str:
    return f"{capture.about['model']} ({capture.about['digest']})"


def _stack(capture: Capture) -> dict[str, str]:
    header = _header(capture)
    facts = {f"stack: {name}": value for name, value in header["environment"].items() if name not in IRRELEVANT}
    return {"device model": header["device_model"], "backend": header["backend"], "dtype": header["dtype"], **facts}


def _notes(a: Capture, b: Capture) -> list[str]:
    """Return sentences on what else differs between two captures, e.g. their stacks, and on what is not compared."""
    notes = [
        f"{which} is a drill: one element was changed at {c.about['drill']}"
        for which, c in (("A", a), ("B", b))
        if c.about["drill"]
    ]
    one, two = _stack(a), _stack(b)
    for name in dict.fromkeys((*one, *two)):
        here, there = one.get(name, "not recorded"), two.get(name, "not recorded")
        if here != there:
            notes.append(f"{name} differs: {here} in A, {there} in B")
    if _header(a)["device"] != _header(b)["device"]:
        notes.append(f"different devices: {_header(a)['device']} in A, {_header(b)['device']} in B")
    shared = set(_shared_prompts(a, b))
    for which, c in (("A", a), ("B", b)):
        alone = [prompt for prompt in c.prompts if prompt not in shared]
        if alone:
            notes.append(f"not compared: only {which} has the prompts {', '.join(alone)}")
    if a.about["operators"] != b.about["operators"]:
        which = "A" if a.about["operators"] == "yes" else "B"
        notes.append(f"not compared: only {which} has operators; hidden states and logits are compared")
    return notes


def _shared_prompts(a: Capture, b: Capture) -> list[str]:
    return [prompt for prompt in a.prompts if prompt in b.prompts]


def _common(a: Capture, b: Capture, result: dict[str, Any]) -> list[str]:
    """Return the names of comparable tensors in computing order; add a note to `result` for every other tensor."""
    names = []
    for prompt in _shared_prompts(a, b):
        one, two = a.tensors[f"{prompt}/input"], b.tensors[f"{prompt}/input"]
        if one.shape != two.shape or not torch.equal(one, two):
            result["notes"].append(f"not compared: prompt {prompt} has different tokens in A and B")
            continue
        first = _first_token(prompt, a, b)
        end = first["position"] if first and a.about["path"] == "decode" else None
        if end is not None:
            text = f"prompt {prompt} after step {end}: token {end} differs, so later steps have different inputs"
            result["notes"].append(f"not compared: {text}")
        for name, tensor in a.tensors.items():
            parts = name.split("/")
            if parts[0] != prompt or len(parts) != 4 or name not in b.tensors:
                continue
            if end is not None and int(parts[1]) > end:
                continue
            if tensor.shape != b.tensors[name].shape:
                result["notes"].append(
                    f"not compared: {name} has shape {[*tensor.shape]} in A, {[*b.tensors[name].shape]} in B"
                )
                continue
            names.append(name)
    return names


def _first_token(prompt: str, a: Capture, b: Capture) -> dict[str, Any] | None:
    one, two = (c.tensors[f"{prompt}/tokens"].flatten().tolist() for c in (a, b))
    for position, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return {"prompt": prompt, "position": position, "a": left, "b": right}
    return None


def _row(name: str, a: Any, b: Any) -> dict[str, Any]:
    prompt, step, layer, operator = name.split("/")
    row = {"prompt": prompt, "step": step, "layer": layer, "operator": operator, "departs": "", "excess": None}
    if a.dtype == b.dtype:
        equal = bool(torch.equal(bits(a), bits(b)))
    else:
        equal = bool(_agree(a.to(torch.float64), b.to(torch.float64)).all())
    return {**row, "equal": equal, **({} if equal else _difference(a, b))}


def _agree(a: Any, b: Any) -> Any:
    return (a == b) | (torch.isnan(a) & torch.isnan(b))


def _difference(a: Any, b: Any) -> dict[str, Any]:
    """Return numbers that describe the difference of two tensors of one shape; "absent" has the reason for each None.

    relative_l2: ‖a - b‖₂ / ‖a‖₂; cosine: of the angle between a and b; max_abs: largest |a - b|; all in float64.

    ulp: largest number of steps from one value to the other through the numbers of the narrower format (both are first
    rounded to it), which is the difference of the bit patterns in order of value (IEEE 754-2019, section 5.10).
    """
    x, y = a.to(torch.float64), b.to(torch.float64)
    unequal = bits(a) != bits(b) if a.dtype == b.dtype else ~_agree(x, y)
    first = torch.nonzero(unequal)[0]
    at = tuple(first.tolist())
    found: dict[str, Any] = {
        "differing": int(unequal.sum()),
        "total": x.numel(),
        "first": {
            "index": [*at],
            "a": repr(float(x[at])),
            "b": repr(float(y[at])),
            "a_bits": _hex(a[at]),
            "b_bits": _hex(b[at]),
        },
        "nonfinite": [int((~torch.isfinite(t)).sum()) for t in (x, y)],
        "relative_l2": None,
        "cosine": None,
        "max_abs": None,
        "ulp": None,
        "absent": "",
    }
    if any(found["nonfinite"]):
        found["absent"] = "not every element is finite"
        return found
    found["ulp"] = ulp_distance(a, b)
    largest = float(max(x.abs().max(), y.abs().max()))
    if largest == 0.0:
        found["max_abs"], found["absent"] = 0.0, "both are zero everywhere, with different signs"
        return found
    x, y = x / largest, y / largest  # squares of what a flipped exponent bit gives would overflow
    size, other = float(x.norm()), float(y.norm())
    found["max_abs"] = float((x - y).abs().max()) * largest
    if math.isinf(found["max_abs"]):
        found["max_abs"], found["absent"] = None, "the difference exceeds float64"
    if size == 0.0 or other == 0.0:
        zero = bool((x == 0).all() or (y == 0).all())
        found["absent"] = (
            "one of the two is zero everywhere" if zero else "one of the two is negligible next to the other"
        )
    else:
        ratio = float((x - y).norm()) / size
        if math.isfinite(ratio):
            found["relative_l2"] = ratio
        else:
            found["absent"] = "the relative difference exceeds float64"
        found["cosine"] = max(-1.0, min(1.0, float((x / size).flatten() @ (y / other).flatten())))
    return found


def ulp_distance(a: Any, b: Any) -> int:
    """Return the largest distance between elements of two finite tensors, in steps of the narrower format."""
    kind = min(a.dtype, b.dtype, key=lambda dtype: form_of(dtype).bits)
    top = 1 << (kind.itemsize * 8 - 1)
    x, y = (bits(t.to(kind).contiguous()).to(torch.int64).flatten() for t in (a, b))
    # Sign and magnitude, not two's complement: magnitudes count from zero, and both zeros are the same value.
    magnitudes = [torch.where(t < 0, t + (top if top < 1 << 63 else -top), t) for t in (x, y)]
    signs = [torch.where(t < 0, -1.0, 1.0).to(torch.float64) for t in (x, y)]
    apart = (magnitudes[0].to(torch.float64) * signs[0] - magnitudes[1].to(torch.float64) * signs[1]).abs()
    at = int(apart.argmax())  # float64 chooses; Python's integers then count exactly
    values = [int(m[at]) * int(s[at]) for m, s in zip(magnitudes, signs, strict=True)]
    return abs(values[0] - values[1])


def _hex(element: Any) -> str:
    width = element.element_size() * 8
    return f"0x{int(bits(element.reshape(1))[0]) & ((1 << width) - 1):0{width // 4}x}"


def _judge_same(rows: list[dict[str, Any]]) -> None:
    """Mark the first row that differs as the fault; the differences in later rows may be its consequences."""
    first = next((row for row in rows if not row["equal"]), None)
    if first:
        first["departs"] = "A or B"


def _name(row: Mapping[str, Any]) -> str:
    return name_of(row["prompt"], row["step"], row["layer"], row["operator"])


def _roundoff(kind: Any, longest: int) -> float:
    """Return the relative error of one operator by rounding: of its result, and of its sums of `longest` terms."""
    return math.ldexp(1.0, -kind.bits) + math.ldexp(math.sqrt(longest), -max(kind.bits, FORMATS["float32"].bits))


def _finite(value: float) -> float:
    return min(1e300, value)  # JSON has no infinity and no NaN; min returns 1e300 for both


def _judge_difference(a: Capture, b: Capture, rows: list[dict[str, Any]]) -> None:
    """Mark the rows whose differences are larger than rounding explains; this does not say which capture is wrong."""
    longest = max(t.shape[-1] for name, t in a.tensors.items() if name.count("/") == 3)
    before: dict[str, float] = {}
    for row in rows:
        x, y = a.tensors[_name(row)], b.tensors[_name(row)]
        u = max(_roundoff(form_of(t.dtype), longest) for t in (x, y))
        noise = before.setdefault(row["prompt"], u)
        peak, size = _peak(x.to(torch.float64), y.to(torch.float64), u)
        row["excess"] = max(_finite(peak / PEAK), _finite(size / noise / GROWTH))
        if row["excess"] > 1:
            row["departs"] = "A or B"
        before[row["prompt"]] = max(noise, size)


def _peak(a: Any, b: Any, u: float) -> tuple[float, float]:
    """Return (largest ratio of a difference to the noise, noise relative to the mean size of the rows).

    Noise is estimated by medians, which a few wrong elements do not change: 1.4826 times the median of |x| is the
    standard deviation of a normal x (P. J. Rousseeuw, C. Croux, J. Am. Stat. Assoc. 88, 1993, section 1). `u` is the
    roundoff.
    """
    off = (a - b).abs()
    off = torch.where(_agree(a, b), 0.0, off)
    if bool((~torch.isfinite(off)).any()):
        return math.inf, u
    row = a.square().mean(-1, keepdim=True).sqrt() + 1e-300
    live = (a != 0) | (b != 0)  # a masked element is zero in both and carries no information
    if int(live.sum()) < SMALLEST:
        return 0.0, 0.0
    size = _finite(1.4826 * float((off / row)[live].median()))
    relative = _finite(1.4826 * float((off / (a.abs() + 1e-300))[live].median()))
    noise = u * (a.abs() + row) + size * row + relative * a.abs()
    return float((off / noise).max()), size


def _judge_tokens(a: Capture, b: Capture, rows: list[dict[str, Any]]) -> None:
    """Add a row for the first step of each prompt whose chosen token is wrong: its logit is not the largest."""
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        slips = [_slip(c, prompt) for c in (a, b)]
        step = next((s for s in slips if s is not None), None)
        at = [i for i, row in enumerate(rows) if row["prompt"] == prompt and row["step"] == step]
        if at:  # after the first different token nothing is compared
            who = "both" if None not in slips else "B" if slips[0] is None else "A"
            row = {"prompt": prompt, "step": step, "layer": "head", "operator": "tokens", "equal": False}
            rows.insert(at[-1] + 1, {**row, "departs": who, "excess": None})


def _slip(capture: Capture, prompt: str) -> str | None:
    """Return the first step whose chosen token does not have the largest logit, or None if there is none."""
    tokens = capture.tensors[f"{prompt}/tokens"][0]
    forced = capture.about["path"] == "forced"
    steps = ["forced"] if forced else [str(i) for i in range(len(tokens))]
    names = [name_of(prompt, step, "head", "logits") for step in steps]
    if not capture.tensors.keys() >= set(names):
        return None
    held = [capture.tensors[name] for name in names]
    logits = held[0][0, -len(tokens) :] if forced else torch.stack([step[0, -1] for step in held])
    wrong = ~(logits.gather(1, tokens[:, None])[:, 0] >= logits.amax(1))
    return steps[0 if forced else int(torch.nonzero(wrong)[0])] if bool(wrong.any()) else None


def _verdict(kind: str, why: str, row: Mapping[str, Any] | None = None, *, operators: bool = True) -> dict[str, Any]:
    place = {"first_layer": row["layer"], "first_operator": row["operator"]} if row else {}
    if row and not operators and row["operator"] in ("out", "logits"):
        place["first_operator"] = None  # it may be any operator of the layer
    where = {"prompt": row["prompt"], "step": row["step"], "departs": row["departs"]} if row else {}
    empty = {"prompt": None, "step": None, "departs": "", "first_layer": None, "first_operator": None}
    return {**empty, "kind": kind, "why": why, **place, **where}


def _conclude(result: Mapping[str, Any]) -> dict[str, Any]:
    rows, rule = result["rows"], result["rule"]
    operators = result["a"]["operators"] == result["b"]["operators"] == "yes"
    at = next((row for row in rows if row["departs"]), None)
    if at is None:
        at = next((row for row in rows if not row["equal"]), None)
        if at is None and not result["tokens"]:
            return _verdict("equal", f"All {len(rows)} tensors are equal in every value.")
        if at is None:
            return _verdict("rounding", "All tensors are equal; tokens differ only between equally good ones.")
        worst = max((row["excess"] for row in rows if row["excess"] is not None), default=0.0)
        why = f"The largest difference is {worst:.2g} times what rounding explains (limit 1). First at {_place(at)}."
        return _verdict("rounding", why, at, operators=operators)
    if at["operator"] == "tokens":
        why = "the chosen token does not have the best logit"
    elif rule == "same stack" and not at["equal"]:
        why = "device model, stack and format are the same, so every bit must be equal"
    else:
        expected = "the rounding expected from the differences around and before it"
        why = f"the difference is {at['excess']:.3g} times {expected} (limit 1)"
    wrong = {
        "A": "A is wrong; B is consistent with its inputs.",
        "B": "B is wrong; A is consistent with its inputs.",
        "both": "Both are wrong; software that they share may be the cause.",
        "A or B": "A or B is wrong; a third capture can tell which.",
    }[at["departs"]]
    hint = "" if operators else " Capture with operators to find the operator of this layer."
    return _verdict("fault", f"{wrong} First at {_place(at)}: {why}.{hint}", at, operators=operators)


def _place(row: Mapping[str, Any]) -> str:
    return f"layer {row['layer']}, operator {row['operator']} (prompt {row['prompt']}, step {row['step']})"
