"""Whether an endpoint's answers may be trusted: what `/endpoints/NAME/ready` tells a load balancer."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection
from typing import NamedTuple

from canaryd.facts import printable
from canaryd.model import Cause, State
from canaryd.report import gate
from canaryd.report.status import Status

CAUSES = tuple(cause for cause in Cause if cause is not Cause.HARNESS)
"""Causes that take a replica out; software too, unlike for a node, since another replica may have other software."""
ALSO = {state.value: state for state in (State.DEGRADED, State.UNKNOWN, State.SUSPECT)}
"""States that a load balancer may name beside `faulty`."""


class Replica(NamedTuple):
    """Whether to send requests to an endpoint."""

    ready: bool
    reason: str
    """One line."""


def replica(found: Status, parts: Collection[str], query: str, silence: str) -> Replica:
    """Return whether an endpoint may take requests: `parts` are its uuid and those of the devices that serve it.

    `query`: "on=suspect", "on=unknown" or both name states that count beside `faulty`. With a reason for `silence`
    (`gate.silenced`) it always may. Raises `ValueError` for any other query.
    """
    asked = urllib.parse.parse_qsl(query, keep_blank_values=True)
    if wrong := [f"{key}={value}" for key, value in asked if key != "on" or value not in ALSO]:
        raise ValueError(f"{printable(wrong[0])}: not understood; write on=suspect, on=unknown or on=degraded")
    question = gate.Question(
        on=(State.FAULTY, *(ALSO[value] for _, value in asked)), causes=CAUSES, devices=tuple(parts)
    )
    answer = gate.settled(gate.decide(found, question, {}), question)
    would = answer.decision == gate.FAIL and silence
    reason = gate.in_words(answer, question, silence) + (f" (log only: {printable(silence)})" if would else "")
    return Replica(bool(silence) or answer.decision != gate.FAIL, reason)
