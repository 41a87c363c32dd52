"""The answers that a served exact canary must give: `expected.json` beside its checkpoint, checked before use.

It needs the standard library only: canaryd's own interpreter, without torch, asks the endpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canaryd.probe import Skip
from canaryd.worker.exact_canary.golden import codes, continuation, prompt
from canaryd.worker.exact_canary.shape import Plan, Shape, Unfit, plan

SCHEMA = "canaryd.exact/1"
FILE, WEIGHTS, GGUF = "expected.json", "model.safetensors", "model.gguf"
MAX_BYTES = 16 << 20
"""Largest accepted size of `expected.json` in bytes (ours); eight prompts take 30 kB."""
MOST_SAID = 4.0
"""Largest magnitude of the logit of a word that the program does not use."""
RIGHT, COST = 20.0, 8.0
"""Logit of the right word, and the amount by which each wrong bit of a word's place or value lowers its logit."""
SLACK = 1e-9
"""Tolerance when a stored log probability, which is correct to 1e-12, is compared with its bounds."""
WORD = re.compile(r"p(\d{1,9})v(\d{1,9})|(anchor)|unused(\d{1,9})")


def word(program: Plan, token: int) -> str:
    """Return the spelling of a token: "p7v12" is value 12 at place 7."""
    if token == program.anchor:
        return "anchor"
    if token > program.anchor:
        return f"unused{token}"
    return f"p{token // program.values}v{token % program.values}"


def spell(program: Plan, tokens: list[int]) -> str:
    """Return a text that the tokenizer splits into exactly the given tokens."""
    return " ".join(word(program, token) for token in tokens)


def tokens_of(program: Plan, text: str) -> list[int] | None:
    """Return the tokens of a text, which any white space may separate; None if the text has an unknown word."""
    found, at = [], 0
    text = "".join(text.split())
    while at < len(text):
        match = WORD.match(text, at)
        if match is None:
            return None
        place, value, anchor, unused = match.groups()
        token = program.anchor if anchor else int(unused) if unused else int(place) * program.values + int(value)
        if word(program, token) != match[0]:
            return None
        found.append(token)
        at = match.end()
    return found


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt and its one right answer."""

    number: int
    """The question's number, counted from 1."""
    text: str
    prompt: list[int]
    tokens: list[int]
    chances: list[float]
    """Natural logarithm of the probability of each right word."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A served exact canary: its program and the proved answers."""

    directory: Path
    shape: Shape
    program: Plan
    seed: int
    weights: str
    """SHA-256 of the checkpoint's weights when they were written."""
    quantization: str = ""
    """The form in which the matrices are quantised; "" if they are not."""
    questions: tuple[Question, ...]
    codes: list[int]

    def cost(self, right: int, other: int) -> float | None:
        """Return the right word's logit minus the logit of `other`, or None for a word that the program does not use.

        Each wrong bit of place or value costs 8, so differences between candidates are whole numbers.
        """
        program = self.program
        if other >= program.words:
            return None
        (here, value), (there, said) = divmod(right, program.values), divmod(other, program.values)
        places = self.codes[(here - 1) % program.places] ^ self.codes[(there - 1) % program.places]
        return COST * ((places.bit_count() if here != there else 0) + (value ^ said).bit_count())

    def changed_file(self) -> str:
        """Return a clause that says that the file of weights changed; "" if it did not, or if it cannot be read."""
        path = self.directory / (GGUF if (self.directory / GGUF).exists() else WEIGHTS)
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
        except OSError:
            return ""
        return "" if digest.hexdigest() == self.weights else f"{path} is not the file that canaryd wrote"


def load(directory: Path) -> Expected:
    """Read and verify the answers beside a checkpoint; raise `Skip` if an answer contradicts the seed stored with it.

    The seed alone determines prompts and words, so they are computed again and compared. A log probability must lie
    between the bounds that follow from the program: its own words have known logits, and all others lie between -4 and
    4.
    """
    path = directory / FILE
    remedy = "write the checkpoint again: canaryd canary export DIR"
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
        document = json.loads(data)
        found = _read(directory, document)
    except OSError as error:
        raise Skip(
            f"exact: {path}: cannot be read: {error.strerror}; name a directory of canaryd canary export"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Skip(f"exact: {path}: not what canaryd canary export writes; {remedy}") from None
    for question in found.questions:
        if (wrong := _disagreement(found, question)) is not None:
            raise Skip(f"exact: {path}: prompt {question.number} {wrong}, so the file is damaged; {remedy}")
    return found


def _read(directory: Path, document: Any) -> Expected:
    """Return the document as data; raise `ValueError` and similar errors if it has another structure."""
    if document["schema"] != SCHEMA or not document["prompts"]:
        raise ValueError
    try:
        shape = Shape(**document["shape"])
        program = plan(shape, anchored=bool(document["anchored"]))
    except Unfit as error:
        raise ValueError from error
    seed = document["seed"]
    if not isinstance(seed, int):
        raise TypeError
    questions = [
        Question(
            number=number,
            text=str(each["text"]),
            prompt=list(map(int, each["prompt"])),
            tokens=list(map(int, each["tokens"])),
            chances=list(map(float, each["log_probabilities"])),
        )
        for number, each in enumerate(document["prompts"], 1)
    ]
    return Expected(
        directory=directory,
        shape=shape,
        program=program,
        seed=seed,
        weights=str(document["weights"]),
        quantization=str(document.get("quantization", "")),
        questions=tuple(questions),
        codes=codes(program, seed),
    )


def _disagreement(expected: Expected, question: Question) -> str | None:
    """Return a clause that says how a question contradicts its seed, or None if it does not."""
    program, shape = expected.program, expected.shape
    if question.prompt != prompt(program, expected.seed + question.number - 1):
        return "is not the one of its seed"
    if question.text != spell(program, question.prompt):
        return "is not spelled as the tokenizer reads it"
    count = len(question.tokens)
    if not 0 < count <= program.steps or len(question.chances) != count:
        return "has no whole answer"
    if question.tokens != continuation(program, shape.layers, question.prompt, count):
        return "has another answer than the program"
    used = (program.place_bits + program.value_bits) * math.log1p(math.exp(-COST))
    rest = (shape.vocabulary - program.words) * math.exp(-RIGHT)
    low, high = (-math.log(math.exp(used) + rest * math.exp(sign * MOST_SAID)) for sign in (1, -1))
    if not all(low - SLACK <= chance <= high + SLACK for chance in question.chances):
        return "has log probabilities that the program cannot give"
    return None
