"""Observations of `canaryd characterise`. Only the standard library is used, because workers import this module."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from canaryd.facts import Sentence


class Claim(str, enum.Enum):
    """What a result of `canaryd characterise` must be."""

    STRICT = "strict"
    """The result must be right: every healthy device gives this answer."""
    CONTROL = "control"
    """The result must be wrong, because a fault was injected; if it is right, no other result can be trusted."""
    OPEN = "open"
    """The result is only measured: a switch permits other bits, or no answer is the right one."""


class Seen(str, enum.Enum):
    """What happened in one attempt of `canaryd characterise`."""

    RIGHT = "right"
    WRONG = "wrong"
    MEASURED = "measured"
    """A number or a recording, which cannot be wrong."""
    REFUSED = "refused"
    """The device has no kernel for this problem; `detail` is torch's message."""
    NOT_OFFERED = "not_offered"
    """The device or stack has no such switch, library or tool."""
    LEFT_OUT = "left_out"
    """The probe left the case out: there is no kernel, or the time was spent. `detail` is the probe's reason."""
    NOT_REACHED = "not_reached"
    """The part's time was spent before this observation."""
    RAISED = "raised"
    """An error was raised; `error` gives its kind."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One attempt of `canaryd characterise` on a device, with its outcome."""

    name: str
    """The attempt's name, e.g. "bfloat16/dense/nt/deep"."""
    claim: Claim
    seen: Seen
    error: str = ""
    """Kind of the error: "device", "memory", "other" (unforeseen), or "harness" (the host's own mistake)."""
    detail: Sentence = ""
    values: Mapping[str, float | int | str] = field(default_factory=dict)
    """Measured values by name; a name ends with the unit, e.g. "raw_flops_per_second"."""
