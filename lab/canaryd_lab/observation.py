"""What `canaryd characterise` observes. Plain data of the standard library, because workers import it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from canaryd.facts import Sentence


class Claim(str, enum.Enum):
    """What an observation of `canaryd characterise` has to be."""

    STRICT = "strict"
    """It must be right: every healthy device gives this answer."""
    CONTROL = "control"
    """It must be wrong: a fault was put in on purpose, and one that is not seen makes the rest worthless."""
    OPEN = "open"
    """It is only measured: a switch allows other bits, or there is no right answer."""


class Seen(str, enum.Enum):
    """What came of an observation of `canaryd characterise`."""

    RIGHT = "right"
    WRONG = "wrong"
    MEASURED = "measured"
    """A number, or a recording; nothing in it can be wrong."""
    REFUSED = "refused"
    """There is no kernel for this problem here; `detail` is what torch says."""
    NOT_OFFERED = "not_offered"
    """This device or stack has no such switch, library or tool."""
    LEFT_OUT = "left_out"
    """Its probe left it out: there is no kernel for it, or time was spent; `detail` is the probe's reason."""
    NOT_REACHED = "not_reached"
    """The time of its part was spent before its turn."""
    RAISED = "raised"
    """An error; `error` says what it means."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One thing that `canaryd characterise` tried on a device. A fact."""

    name: str
    """What was tried, e.g. "bfloat16/dense/nt/deep"."""
    claim: Claim
    seen: Seen
    error: str = ""
    """Of an error: "device", "memory", "other" (nobody foresaw it), or "harness" (the host's own mistake)."""
    detail: Sentence = ""
    values: Mapping[str, float | int | str] = field(default_factory=dict)
    """What was measured; the unit is the end of the name, e.g. "raw_flops_per_second"."""
