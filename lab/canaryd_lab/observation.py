"""Observations of `canaryd characterise`: plain data of the standard library, because workers import it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from canaryd.facts import Sentence


class Claim(str, enum.Enum):
    """The requirement on an observation of `canaryd characterise`."""

    STRICT = "strict"
    """The result must be right: every healthy device gives this answer."""
    CONTROL = "control"
    """The result must be wrong, because a fault was injected; if it is not, all other results are worthless."""
    OPEN = "open"
    """The result is only measured: a switch allows other bits, or there is no right answer."""


class Seen(str, enum.Enum):
    """The outcome of an observation of `canaryd characterise`."""

    RIGHT = "right"
    WRONG = "wrong"
    MEASURED = "measured"
    """A number or a recording, which cannot be wrong."""
    REFUSED = "refused"
    """The device has no kernel for this problem; `detail` is torch's message."""
    NOT_OFFERED = "not_offered"
    """The device or stack has no such switch, library or tool."""
    LEFT_OUT = "left_out"
    """The probe left it out: there is no kernel, or the time was spent; `detail` is the probe's reason."""
    NOT_REACHED = "not_reached"
    """The part's time was spent before this observation."""
    RAISED = "raised"
    """An error was raised; `error` gives its kind."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One attempt of `canaryd characterise` on a device. A fact."""

    name: str
    """The attempt's name, e.g. "bfloat16/dense/nt/deep"."""
    claim: Claim
    seen: Seen
    error: str = ""
    """Kind of the error: "device", "memory", "other" (unforeseen), or "harness" (the host's own mistake)."""
    detail: Sentence = ""
    values: Mapping[str, float | int | str] = field(default_factory=dict)
    """Measured values; the suffix of a name is its unit, e.g. "raw_flops_per_second"."""
