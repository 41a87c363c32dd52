"""Run the exact canary on one device and compare every operator's result with the proved one (docs/lab.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.facts import DTYPES, Evidence
from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.exact_canary.cases import EAGER, PATHS, Inference, kernels, steps
from canaryd.worker.exact_canary.run import Runner, Watch
from canaryd.worker.exact_canary.shape import EXPERTS, TINY, Shape
from canaryd.worker.numeric import evidence
from canaryd.worker.numeric.cases import why_refused
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.tensors import host_same_bits, need_torch, torch
from canaryd.worker.runtime import interface
from canaryd_lab.worker.canary.capture import Progress, Recorder, environment, file_to_write, name_of, place_of, write
from canaryd_lab.worker.exact_canary.examine import Examined, Fault, Place, examine
from canaryd_lab.worker.exact_canary.truth import Truth, truth

SCHEMA = "canaryd.exact_capture/1"
PROMPT = "exact"
"""Name of the one prompt in a capture."""
MODEL = "exact canary"
"""Beginning of the model's name in a capture; the kind of attention follows."""
ROUTED = (".shares", ".chosen")
"""Suffixes of the router's results. Their order is arbitrary, so the share of each expert is compared instead."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One inference, compared with the proved results."""

    dtype: str
    path: str
    """"decode": the prompt, then word by word; "forced": prompt and continuation in one pass."""
    kernel: str
    values: int
    loose: int
    wrong: int
    """Number of wrong values, including values that are wrong because an input was wrong."""
    faults: int
    """Number of places that are wrong although everything that they read is right."""
    places: tuple[Place, ...] = ()
    """The first 64 wrong places whose inputs are right, in the order of computation."""
    fault: Fault | None = None
    """The first wrong operator whose inputs are right, or None if there is none."""
    again: str = ""
    """Outcome of a second run: "same" fault, "other" fault or "right"; "" if the first run had no wrong value."""
    weights: tuple[tuple[str, Evidence], ...] = ()
    """(name, evidence) for each weight that differed when it was read back from the device after the inference."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Inferences that the device cannot run, with the reason."""

    dtype: str
    kernel: str
    reason: str


@dataclass
class Session:
    """The inferences of an exact canary on one device, and what they found."""

    device: Device
    strike: Watch | None = None
    """Function that changes a result before it is recorded, to inject a fault; None for no fault."""
    drill: str = ""
    """Place such as "2.down" whose result a drill changes once, in the first inference that has it; "" for none."""
    places: list[str] = field(default_factory=list)
    """Places seen so far."""
    struck: bool = False
    wrong: Recorder | None = None
    """Recorder of the first inference with a wrong value; None if no value was wrong."""

    def __post_init__(self) -> None:
        """Raise `Skip` if the exact canary does not run through the device's runtime."""
        self.runtime, self.operators = interface.of(self.device), interface.operators_of(self.device)

    def run(self, inference: Inference, known: Truth, weights: Mapping[str, Any]) -> Ran:
        """Run one inference; return its comparison with `known`, the proved results; repeat it if a value is wrong."""
        recorder = Recorder(operators=True, drill="" if self.struck else self.drill)
        found = self.once(inference, known, weights, recorder)
        self.struck |= recorder.struck
        self.places += [place for place in recorder.places if place not in self.places]
        again, broken = "", []
        if found.fault:
            self.wrong = self.wrong or recorder
            second = self.once(inference, known, weights, Recorder(operators=True)).fault
            again = "right" if second is None else "same" if second == found.fault else "other"
            for name, weight in weights.items():
                got = self.runtime.download(weight)
                right = known.model.weights[name].to(got.dtype)
                if not host_same_bits(right, got):
                    broken.append((name, evidence.collect(right, got)))
        return Ran(
            dtype=inference.form,
            path=inference.path,
            kernel=inference.label,
            values=found.values,
            loose=found.loose,
            wrong=found.wrong,
            faults=found.count,
            places=found.places,
            fault=found.fault,
            again=again,
            weights=tuple(broken),
        )

    def once(self, inference: Inference, known: Truth, weights: Mapping[str, Any], recorder: Recorder) -> Examined:
        """Run one inference; return its comparison with `known`, the proved results; fill `recorder` with a capture."""
        recorder.prompt, recorder.step = PROMPT, "forced" if inference.path == "forced" else "-1"
        words = known.values["word"].to(torch.int64)

        def watch(name: str, array: Any) -> Any:
            if name.endswith(ROUTED):
                return array
            if name == "embedding" and inference.path == "decode":  # a forward pass begins with it
                recorder.step = str(int(recorder.step) + 1)
            found = self.runtime.download(array)
            tensor = self.strike(name, found) if self.strike else found
            if name != "word":
                tensor = recorder.see(*place_of(name), tensor)
                return array if tensor is found else self._uploaded(tensor)
            recorder.keep(name_of(PROMPT, recorder.step, "head", "word"), tensor)
            at = len(known.prompt) - 1 + int(recorder.step)
            return self._uploaded(words[:, at : at + 1])  # whatever was chosen, the next pass has the right word

        kernel = "" if inference.kernel == EAGER else inference.kernel.upper()
        runner = Runner(inference.shape, weights, kernel, watch, self.operators)
        given = torch.tensor([known.prompt if inference.path == "decode" else known.tokens])
        tokens, decodes = self._uploaded(given), inference.path == "decode"
        self.operators.run(lambda: runner.decode(tokens, known.steps)[1] if decodes else runner.forward(tokens))
        form = self.operators.exponential if inference.form == "float64" else inference.form
        found = examine(recorder.kept, known, form)
        _complete(recorder, given)
        return found

    def _uploaded(self, tensor: Any) -> Any:
        return self.runtime.upload((tensor.contiguous(),), self.device)[0]


def _complete(recorder: Recorder, given: Any) -> None:
    """Add the given and the chosen tokens to a recorder, so that its tensors are a complete capture."""
    chosen = [recorder.kept.pop(name) for name in [*recorder.kept] if name.endswith("/word")]
    best = torch.cat(chosen, 1) if chosen else recorder.kept[f"{PROMPT}/forced/head/logits"].argmax(-1)
    recorder.keep(f"{PROMPT}/input", given)
    recorder.keep(f"{PROMPT}/tokens", best)


def inferences(device: Device, forms: tuple[str, ...]) -> list[Inference]:
    """Return every inference of these formats: models with an anchor come first, those with experts last."""
    count = steps(TINY, "quick")
    found = [Inference(form, path, 1, kernel, count) for form, kernel, path in product(forms, kernels(device), PATHS)]
    found.sort(key=lambda inference: not inference.anchored)
    count = steps(EXPERTS, "quick")
    return found + [Inference(form, path, 1, EAGER, count, EXPERTS) for form, path in product(forms, PATHS)]


def every(session: Session, forms: tuple[str, ...], seed: int, progress: Progress) -> Iterator[Ran | Refused]:
    """Run all inferences of these formats; yield the result of each."""
    known: dict[tuple[Shape, bool], Truth] = {}
    refused: set[tuple[str, str]] = set()
    uploaded, weights = ("", (TINY, False)), {}
    todo = inferences(session.device, forms)
    for number, inference in enumerate(todo):
        form, key = inference.form, (inference.shape, inference.anchored)
        progress(number / len(todo), inference.name.partition("@")[0])
        if (form, inference.label) in refused:
            continue
        if key not in known:
            known[key] = truth(seed, inference.steps, anchored=inference.anchored, shape=inference.shape)
        try:
            if uploaded != (form, key):
                weights = _upload(known[key], form, session.device)
                uploaded = (form, key)
            found = session.run(inference, known[key], weights)
        except Exception as error:
            if not is_refusal(error):
                raise
            refused.add((form, inference.label))
            yield Refused(dtype=form, kernel=inference.label, reason=why_refused(session.device, error))
        else:
            yield found


def _upload(known: Truth, form: str, device: Device) -> dict[str, Any]:
    """Return a model's weights on the device, converted to the format `form`."""
    host = known.model.weights
    cast = tuple(w.to(getattr(torch, form)) for w in host.values())
    return dict(zip(host, interface.of(device).upload(cast, device), strict=True))


def answer(arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Run the exact canary as requested; return the results as JSON data (docs/lab.md).

    Arguments: device (a `Device` as JSON), dtype ("" for all), seed (of model and prompt), out ("" or the path for the
    first wrong inference), drill ("" or the place to change). Raises `ValueError` for a wrong argument, `Skip` if
    nothing runs here or the host contradicts itself.
    """
    need_torch()
    started = time.monotonic()
    if arguments["dtype"] not in ("", *DTYPES):
        raise ValueError(f"dtype {arguments['dtype']!r}: wanted one of {', '.join(DTYPES)}")
    out = file_to_write(arguments["out"]) if arguments["out"] else None
    forms = (arguments["dtype"],) if arguments["dtype"] else DTYPES
    session = Session(from_json(Device, arguments["device"]), drill=arguments["drill"])
    with session.runtime.strict(session.device) as switches:
        found = list(every(session, forms, arguments["seed"], progress))
    ran = [item for item in found if isinstance(item, Ran)]
    refused = [item for item in found if isinstance(item, Refused)]
    if not ran:
        raise Skip(refused[0].reason)
    if session.drill and not session.struck:
        raise ValueError(f"drill {session.drill!r}: no such place; there are {', '.join(session.places)}")
    first = next((item for item in ran if item.fault), None)
    written = 0
    if out and first and session.wrong:
        written = _write(out, session.wrong, session.device, first, arguments["seed"], switches)
    return {
        "schema": SCHEMA,
        "verdict": "wrong" if first else "right",
        "device": arguments["device"],
        "seed": arguments["seed"],
        "drill": session.drill,
        "ran": to_json(ran),
        "refused": to_json(refused),
        "file": str(out) if written else "",
        "bytes": written,
        "seconds": round(time.monotonic() - started, 3),
    }


def _write(out: Path, recorder: Recorder, device: Device, first: Ran, seed: int, switches: dict[str, str]) -> int:
    """Write the capture of the first wrong inference; return its size in bytes."""
    texts = {
        "device": json.dumps(to_json(device)),
        "environment": json.dumps(environment(device, switches)),
        "dtype": first.dtype,
        "model": f"{MODEL}, attention {first.kernel}",
        "digest": f"seed {seed}",
        "prompts": json.dumps([PROMPT]),
        "path": first.path,
    }
    return write(out, recorder, texts)
