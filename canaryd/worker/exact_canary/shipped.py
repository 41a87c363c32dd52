"""Read and check the exact canaries that canaryd ships, which the lab made and proved (docs/exact-canary.md).

`models.json` lists a file and its SHA-256 for each model. A file holds the weights, the logits of the words that the
program does not use, and the proved prompts, each with a digest of all its logits.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canaryd.probe import Skip
from canaryd.worker.exact_canary.expected import COST, RIGHT
from canaryd.worker.exact_canary.golden import codes, finals
from canaryd.worker.exact_canary.shape import Plan, Shape, plan
from canaryd.worker.numeric.tensors import torch

INDEX = "models.json"
DAMAGED = "This installation is damaged: install canaryd again"
UNUSED = "unused"
"""Name of the tensor (places + 1, unused words): logits of the unused words at each place and, last, at the anchor."""


@dataclass(frozen=True)
class Model:
    """A constructed model: sizes, program, codes of the places, and weights in bfloat16, the narrowest format."""

    shape: Shape
    program: Plan
    seed: int
    weights: dict[str, Any]


@dataclass(frozen=True)
class Shipped:
    """A model and the prompts proved for it."""

    model: Model
    unused: Any
    prompts: tuple[tuple[int, str], ...]
    """(seed of a proved prompt, digest of the logits at all positions of its longest text), one pair per prompt."""
    sums: int
    """Maximum number of significant bits that a partial sum needs in any of these prompts."""


def load(directory: Path, shape: Shape, seed: int, *, anchored: bool) -> Shipped:
    """Return the model of this shape that a seed chooses; raise `Skip` if the files are damaged."""
    try:
        entries = json.loads((directory / INDEX).read_bytes())
        able = [e for e in entries if (e["experts"], e["anchored"]) == (shape.experts, anchored)]
        return _read(directory, able[seed % len(able)], shape)
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, ZeroDivisionError, zlib.error) as error:
        why = f"{INDEX} or a file that it names is not what canaryd wrote ({type(error).__name__})"
    raise Skip(f"{directory}: {why}. {DAMAGED}")


def _read(directory: Path, entry: Mapping[str, Any], shape: Shape) -> Shipped:
    data = (directory / entry["file"]).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        wrong = f"has SHA-256 {found[:16]}…, {INDEX} says {str(entry['sha256'])[:16]}…"
        raise Skip(f"{directory / entry['file']} {wrong}. {DAMAGED}")
    tensors, texts = _tensors(zlib.decompress(data))
    unused = tensors.pop(UNUSED)
    model = Model(shape, plan(shape, anchored=entry["anchored"]), int(texts["seed"]), tensors)
    return Shipped(model, unused, tuple((int(s), str(d)) for s, d in json.loads(texts["prompts"])), int(texts["sums"]))


def _tensors(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (name → bfloat16 tensor, name → text) of a safetensors file; its SHA-256 was checked before."""
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:start]), bytearray(data[start:])
    texts, found = header.pop("__metadata__"), {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = torch.frombuffer(body, dtype=torch.uint8, count=end - begin, offset=begin).clone()  # aligned
        found[name] = raw.view(torch.bfloat16).view(entry["shape"])
    return found, texts


def logits(shipped: Shipped, words: list[int], count: int) -> Any:
    """Return the float64 logits (positions, vocabulary) of a text that ends with `count` - 1 generated words.

    They follow from the program: the word's place and the value of its state after the last layer. No weight is used;
    the logits of words that the program does not use come from the proved table.
    """
    program, layers = shipped.model.program, shipped.model.shape.layers
    after = [*finals(program, layers, words, count), program.values - 1]  # the anchor's state is all +1
    places = torch.tensor([-1 if w == program.anchor else w // program.values for w in words])
    code = torch.tensor([*codes(program, shipped.model.seed), program.places - 1])
    value = torch.tensor([after[place] for place in places])
    word = torch.arange(program.words)
    ones = torch.tensor([n.bit_count() for n in range(max(program.places, program.values))])
    wrong = ones[code[(word // program.values - 1) % program.places] ^ code[places][:, None]]
    wrong = wrong + ones[(word % program.values) ^ value[:, None]]
    return torch.cat((RIGHT - COST * wrong.to(torch.float64), shipped.unused[places].to(torch.float64)), 1)
