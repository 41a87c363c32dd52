"""Parts of a characterisation and their results; each result is written to its own file as soon as the part ends."""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.facts import Sentence
from canaryd.files import write_whole
from canaryd.model import Outcome
from canaryd_lab.observation import Claim, Observation, Seen


class Status(str, enum.Enum):
    """The result of a part in one word."""

    RIGHT = "right"
    """Every result in the part that must be right was right, and every injected fault was seen."""
    MEASURED = "measured"
    """The part ran, and it contains nothing that can be wrong."""
    NOT_TRIED = "not_tried"
    """No test in the part could be tried: the device or stack lacks what they need, or time was too short."""
    WRONG = "wrong"
    """A strict result was wrong."""
    INVALID = "invalid"
    """A control that must fail did not fail, so no result of this characterisation counts."""
    UNCLASSIFIED = "unclassified"
    """An error occurred, and it is unclear whether the device failed."""
    FAILED = "failed"
    """The device failed, or the worker did not end properly."""

    @property
    def bad(self) -> bool:
        """Whether a part with this status makes the characterisation fail."""
        return self in (Status.WRONG, Status.INVALID, Status.UNCLASSIFIED, Status.FAILED)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part (group of tests) of a characterisation before it runs."""

    name: str
    """The part's name, e.g. "exactness/bfloat16", also used for its file."""
    title: str
    rank: int
    """Place of the part in the order, lowest first: parts that say most about the device come first."""
    seconds: float
    """Maximum seconds that the part works if the user gives ten minutes for all parts."""
    workers: int = 0
    """Number of workers that the part starts itself."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One part of a characterisation after it ran."""

    name: str
    title: str
    rank: int
    started: float = 0.0
    """Start of the part (epoch s)."""
    seconds: float = 0.0
    outcome: Outcome
    """The outcome of the worker's run."""
    detail: Sentence = ""
    """The reason why the part did not complete, or a sentence on what it skipped."""
    observations: tuple[Observation, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def count(self, claim: Claim, *seen: Seen) -> int:
        """Return the number of observations that have this claim and one of the outcomes `seen`."""
        return sum(1 for o in self.observations if o.claim is claim and o.seen in seen)

    @property
    def status(self) -> Status:
        """The status of the part: the worst that its outcome or one of its observations gives."""
        if any(o.claim is Claim.CONTROL and o.seen in (Seen.RIGHT, Seen.RAISED) for o in self.observations):
            return Status.INVALID
        if self.count(Claim.STRICT, Seen.WRONG):
            return Status.WRONG
        errors = {o.error for o in self.observations if o.seen is Seen.RAISED}
        if errors & {"other", "harness"} or self.outcome is Outcome.ERRORED:
            return Status.UNCLASSIFIED
        if errors or self.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED):
            return Status.FAILED
        if self.count(Claim.STRICT, Seen.RIGHT) or self.count(Claim.CONTROL, Seen.WRONG):
            return Status.RIGHT
        if self.outcome is Outcome.SKIPPED or (self.observations and all(o.seen in UNTRIED for o in self.observations)):
            return Status.NOT_TRIED
        return Status.MEASURED


UNTRIED = (Seen.NOT_OFFERED, Seen.REFUSED, Seen.LEFT_OUT, Seen.NOT_REACHED)
"""Observations that say nothing about the device's results."""


class NotOurs(Exception):
    """A directory with results of another device or stack; the text says which."""


class Directory:
    """The results of one characterisation on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = path / "parts"

    def open(self, identity: Mapping[str, str]) -> None:
        """Create the directory or continue in it; raise `NotOurs` for one with another `identity`, or `OSError`."""
        self._parts.mkdir(parents=True, exist_ok=True)
        if not self.compare(identity):
            write(self.path / "identity.json", json.dumps(dict(identity), indent=2) + "\n")

    def compare(self, identity: Mapping[str, str]) -> bool:
        """Return whether the directory has an identity yet; raise `NotOurs` if it has another one than `identity`."""
        try:
            known = json.loads((self.path / "identity.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        for name, value in identity.items():
            if known.get(name) != value:
                raise NotOurs(f"its results are of {name} {known.get(name)!r}, not {value!r}")
        return True

    def results(self) -> list[Result]:
        """Return the results in all complete files, in the order of the parts; an incomplete file is ignored."""
        found = []
        for path in self._parts.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(from_json(Result, json.loads(path.read_text(encoding="utf-8"))))
        return sorted(found, key=lambda r: (r.rank, r.name))

    def add(self, result: Result) -> None:
        """Write a part's result to disk completely or not at all."""
        write(self._parts / f"{file_name(result.name)}.json", json.dumps(to_json(result), indent=1) + "\n")


def file_name(text: str) -> str:
    """Return a text in which every character that a file's name cannot have is replaced."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.") or "unnamed"


def write(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    write_whole(path, text.encode())


def sliced(parts: Iterable[Part], number: int, of: int) -> list[Part]:
    """Return every `of`-th part in the order of ranks, beginning with part `number` (the first is 1)."""
    ordered = sorted(parts, key=lambda p: (p.rank, p.name))
    return ordered[number - 1 :: of]
