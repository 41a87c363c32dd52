"""Write the results of a device, operator by operator, into one safetensors file (docs/lab.md)."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import canaryd
from canaryd import __version__
from canaryd.codec import from_json, to_json
from canaryd.facts import DTYPES, beginning, printable
from canaryd.files import write_whole
from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.canary import hugging_face
from canaryd.worker.canary.checkpoint import links
from canaryd.worker.endpoint.prompts import load
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.tensors import (
    as_text,
    bits,
    form_of,
    need_torch,
    strict_switches,
    torch,
)
from canaryd.worker.runtime import interface
from canaryd_lab.worker.safetensors import BadFile, read_safetensors, write_safetensors

SCHEMA = "canaryd.capture/1"
HIDDEN = ("embedding", "out", "logits")
"""Operators that are kept if only hidden states are captured: before the first layer, after each layer, the logits."""
ABOUT = (
    *("schema", "canaryd", "date", "device", "environment", "dtype", "model", "digest"),
    *("prompts", "path", "operators", "drill", "order"),
)
"""Names of the texts (facts about the run) that every capture has."""
SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Environment variables that select a CPU's kernels; they belong to the stack of a capture."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Capture:
    """The results of one device: host tensors in computing order, with names made by `name_of`."""

    tensors: Mapping[str, Any]
    about: Mapping[str, str]
    """Name in `ABOUT` → text."""

    @property
    def prompts(self) -> list[str]:
        """The prompts, in the order of the file."""
        names: list[str] = json.loads(self.about["prompts"])
        return names


def place_of(point: str) -> tuple[str, str]:
    """Return (layer, operator) of a place in the exact canary: "2.query" → ("2", "query")."""
    layer, dot, operator = point.rpartition(".")
    return (layer, operator) if dot else ("input" if point == "embedding" else "head", point)


def name_of(prompt: str, step: str, layer: str, operator: str) -> str:
    """Return a tensor's name. `step`: "forced", or the number of a forward pass of decoding, where 0 is the prompt."""
    return f"{prompt}/{step}/{layer}/{operator}"


@dataclass
class Recorder:
    """Keeps the tensors that a model passes to it; as a drill, it changes one element of one tensor, once."""

    operators: bool
    drill: str = ""
    """Place at which a tensor is changed, such as "2.query"; "" for none."""
    kept: dict[str, Any] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    """All places seen so far."""
    struck: bool = False
    prompt: str = ""
    step: str = ""

    def keep(self, name: str, tensor: Any) -> None:
        """Keep a copy of a tensor on the host, under its complete name."""
        self.kept[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)

    def see(self, layer: str, operator: str, tensor: Any) -> Any:
        """Record a tensor and return it. If the drill is for this place, a changed copy is recorded and returned."""
        place = f"{layer}.{operator}"
        if place not in self.places:
            self.places.append(place)
        if place == self.drill and not self.struck:
            tensor, self.struck = _spoilt(tensor), True
        if self.operators or operator in HIDDEN:
            self.keep(name_of(self.prompt, self.step, layer, operator), tensor)
        return tensor


def _spoilt(tensor: Any) -> Any:
    """Return a copy with one exponent bit of the largest element flipped (the lowest), so that it doubles or halves."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    at = int(copy.abs().argmax())
    bits(copy).view(-1)[at] ^= 1 << form_of(copy.dtype).bits - 1
    return copy


def files() -> Path:
    """Return the path of the file with the prompts of captures, in the checkout or in the wheel."""
    package = Path(canaryd.__file__).resolve().parent
    probes = package.parent / "probes"
    return (probes if probes.is_dir() else package / "probes.d") / "endpoint" / "prompts.json"


def record_directory(
    checkpoint: hugging_face.Checkpoint,
    device: Device,
    names: Sequence[str],
    recorder: Recorder,
    *,
    forced: bool,
    progress: Progress,
) -> None:
    """Run the shipped prompts `names` through a Hugging Face model, and pass its tensors to the recorder.

    Operators are the leaf modules of every decoder layer, under their own names, and the layer itself as "out". With
    `forced`, a prompt is processed in one pass. Raises `Skip` if the model does not run or fit here.
    """
    prompts = []
    for prompt in load(files()):
        if prompt.name in names:
            prompts.append(checkpoint.tokens(prompt.name, prompt.text, 1 if forced else prompt.tokens))
            if reason := checkpoint.room(prompts[-1]):
                raise Skip(f"{checkpoint.settings.directory}: prompt {prompt.name}: {reason}")
    hugging_face.check_memory(checkpoint, device, checkpoint.need(prompts))
    model = checkpoint.load(device)
    _hook(model.model, recorder)
    for done, asked in enumerate(prompts):
        progress(done / len(prompts), f"prompt {asked.name}")
        recorder.prompt, recorder.step = asked.name, "forced" if forced else "-1"
        recorder.keep(f"{asked.name}/input", torch.tensor([asked.ids]))
        seen = model.score(asked, (0,)) if forced else model.decode(asked)
        recorder.keep(f"{asked.name}/tokens", seen.logits.argmax(-1)[None])
    model.close()


def _hook(model: Any, recorder: Recorder) -> None:
    """Let every leaf module and every layer of a model pass its output to the recorder."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    if not lists:
        raise Skip(f"{type(model).__name__} has no list of layers to record")
    prefix = next(iter(lists)) + "."
    known = {model.get_input_embeddings(): "embedding", model.get_output_embeddings(): "logits"}
    part = "input"

    def begin(_module: Any, _given: Any) -> None:
        nonlocal part
        part = "input"
        if recorder.step != "forced":
            recorder.step = str(int(recorder.step) + 1)

    def passing(layer: str, operator: str) -> Callable[[Any, Any, Any], Any]:
        def hook(_module: Any, _given: Any, output: Any) -> Any:
            nonlocal part
            part = "head" if layer else part
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, torch.Tensor):
                return output
            seen = recorder.see(layer or part, operator, first)
            return (seen, *output[1:]) if isinstance(output, tuple) else seen

        return hook

    model.register_forward_pre_hook(begin)
    for name, module in model.named_modules():
        leaf = next(module.children(), None) is None
        if name.startswith(prefix):
            layer, _, operator = name.removeprefix(prefix).partition(".")
            if leaf or not operator:
                module.register_forward_hook(passing(layer, operator or "out"))
        elif leaf:
            module.register_forward_hook(passing("", known.get(module, name.rpartition(".")[2])))


@dataclass(frozen=True)
class _Request:
    """The checked arguments of a capture."""

    device: Device
    out: Path
    directory: Path
    """Directory of a Hugging Face checkpoint."""
    dtype: str
    names: tuple[str, ...]
    """Names of prompts in the shipped file."""
    forced: bool

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> _Request:
        """Return a request from plain data; raise `ValueError` for the first wrong argument."""
        dtype = arguments["dtype"]
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: wanted one of {', '.join(DTYPES)}")
        shipped = tuple(prompt.name for prompt in load(files()))
        names = tuple(arguments["prompts"]) or shipped
        unknown = [name for name in names if name not in shipped]
        if unknown:
            raise ValueError(f"prompt {unknown[0]!r}: wanted one of {', '.join(shipped)}")
        return cls(
            device=from_json(Device, arguments["device"]),
            out=file_to_write(arguments["out"]),
            directory=Path(arguments["model"]),
            dtype=dtype,
            names=names,
            forced=bool(arguments["forced"]),
        )


def file_to_write(name: str) -> Path:
    """Return the path of a file to write; raise `ValueError` if it is a directory or if its parent does not exist."""
    out = Path(name)
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "is a directory" if out.is_dir() else f"{out.absolute().parent} is not a directory"
        raise ValueError(f"{out}: {what}; wanted the path of a file to write")
    return out


def answer(arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Capture as requested; return the "file", its "bytes", the number of its "tensors", and "seconds".

    Arguments: device (a `Device` as JSON), out (path), model (a Hugging Face directory), dtype, prompts (names; [] for
    all), operators (false: hidden states and logits alone), forced (one pass over the prompt, no decoding), drill
    ("" or the place to change). Raises `ValueError` for a wrong argument, `Skip` if the model cannot run here.
    """
    need_torch()
    started = time.monotonic()
    request = _Request.read(arguments)
    settings = {"directory": str(request.directory), "dtype": request.dtype}
    checkpoint = hugging_face.Checkpoint(hugging_face.read_settings(settings))
    digest = links(request.directory)["checkpoint"]
    recorder = Recorder(operators=bool(arguments["operators"]), drill=arguments["drill"])
    switches = _compute(request, checkpoint, recorder, progress)
    texts = {
        "device": json.dumps(to_json(request.device)),
        "environment": json.dumps(environment(request.device, switches, checkpoint)),
        "dtype": request.dtype,
        "model": str(request.directory),
        "digest": digest,
        "prompts": json.dumps(request.names),
        "path": "forced" if request.forced else "decode",
    }
    size = write(request.out, recorder, texts)
    return {
        "file": str(request.out),
        "bytes": size,
        "tensors": len(recorder.kept),
        "seconds": round(time.monotonic() - started, 3),
    }


def _compute(
    request: _Request, checkpoint: hugging_face.Checkpoint, recorder: Recorder, progress: Progress
) -> dict[str, str]:
    """Run the model with the recorder attached; return the switches that were set."""
    device, names, forced = request.device, request.names, request.forced
    with strict_switches() as switches, torch.inference_mode():
        try:
            record_directory(checkpoint, device, names, recorder, forced=forced, progress=progress)
        except RuntimeError as error:
            if is_refusal(error):
                reason = beginning(str(error), 300)
                raise Skip(f"{device.model} does not run {request.dtype}: {reason}") from error
            raise
    if recorder.drill and not recorder.struck:
        raise ValueError(f"drill {recorder.drill!r}: no such place; there are {', '.join(recorder.places)}")
    return switches


def environment(
    device: Device, switches: dict[str, str], checkpoint: hugging_face.Checkpoint | None = None
) -> dict[str, str]:
    """Return name → value of all facts that may change the bits, except device, dtype and model."""
    chosen = {name: os.environ.get(name, "unset") for name in SWITCHES}
    facts = interface.of(device).stack(device, "") | {"switches": as_text(switches), "kernels": as_text(chosen)}
    if checkpoint:
        facts |= {"server": checkpoint.server, "attention": hugging_face.ATTENTION}
    return facts


def write(path: Path, recorder: Recorder, texts: Mapping[str, str]) -> int:
    """Write a capture of the recorder's tensors and of `texts`; return its size in bytes. Raises `ValueError`."""
    about = {
        "schema": SCHEMA,
        "canaryd": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "operators": "yes" if recorder.operators else "no",
        "drill": recorder.drill,
        "order": json.dumps(list(recorder.kept)),
        **texts,
    }
    data = write_safetensors(recorder.kept, about)
    write_file(path, data)
    return len(data)


def write_file(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; raise `ValueError` if that fails, and leave no partial file."""
    parent = path.absolute().parent
    try:
        write_whole(path, data)
    except OSError as error:
        full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "cannot be written"
        raise ValueError(f"{path}: {full}: {error.strerror}; the capture has {len(data):,} bytes") from error
    folder = os.open(parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _rows_of_logits(held: Mapping[str, torch.Tensor], prompt: str, *, forced: bool) -> bool:
    """Return whether a prompt's logits are all [batch, position, vocabulary] and the vocabulary includes its tokens."""
    tokens = held[f"{prompt}/tokens"]
    logits = [t for name, t in held.items() if name.startswith(f"{prompt}/") and name.endswith("/head/logits")]
    if not all(t.dim() == 3 and t.is_floating_point() and t.numel() for t in logits):
        return False
    if forced and any(t.shape[1] < tokens.shape[1] for t in logits):
        return False
    return len({t.shape[2] for t in logits}) < 2 and all(
        bool(((tokens >= 0) & (tokens < t.shape[2])).all()) for t in logits
    )


def read(path: Path) -> Capture:
    """Return a capture from its file; raise `ValueError` with one line for any other file."""
    try:
        return _read(path)
    except ValueError as error:  # the message may quote an untrusted file
        raise ValueError(printable(str(error))[:1000]) from error


def _read(path: Path) -> Capture:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        tensors, about = read_safetensors(data)
    except BadFile as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    schema = about.get("schema", "")
    missing = [name for name in ABOUT if name not in about]
    if schema != SCHEMA or missing:
        reason = f"its schema is {schema!r}" if schema else "it has no schema"
        raise ValueError(
            f"{path} is not a capture of canaryd: {reason if schema != SCHEMA else f'it lacks {missing[0]}'}"
        )
    try:
        texts = {name: json.loads(about[name]) for name in ("device", "environment", "order", "prompts")}
        json.dumps([texts, about, [*tensors]], ensure_ascii=False).encode()  # raises for half a surrogate pair
        from_json(Device, texts["device"])
        from_json(dict[str, str], texts["environment"])
        order, prompts = (from_json(tuple[str, ...], texts[name]) for name in ("order", "prompts"))
        held = {name: tensors[name] for name in order}
        named = {name: held[name] for prompt in prompts for name in (f"{prompt}/input", f"{prompt}/tokens")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a capture of canaryd: its texts and tensors disagree: {error}") from error
    if any(tensor.dtype != torch.int64 or tensor.dim() != 2 for tensor in named.values()):
        raise ValueError(f"{path} is not a capture of canaryd: its tokens are not rows of integers")
    if not all(_rows_of_logits(held, prompt, forced=about["path"] == "forced") for prompt in prompts):
        raise ValueError(
            f"{path} is not a capture of canaryd: its logits are not rows over a vocabulary with its tokens"
        )
    return Capture(held, about)
