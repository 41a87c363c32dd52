"""The rules of telemetry: from events and the newest polls to findings.

Everything is a pure function. `events.changes` and `events.log_event` turn polls and lines of the kernel log into
events; `RULES`, below, has every evaluator, and each has its rows beside it. docs/telemetry.md has the rules as a
table, each with its source and why it raises no false alarm. A finding whose state is healthy is a *note*: it is shown
and never counts against the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from canaryd.judge.telemetry.flag_rules import driver_advice, flags
from canaryd.judge.telemetry.line_rules import changed, reported
from canaryd.judge.telemetry.poll_rules import lanes_lost, nvlink_down, readings_lost, telemetry_stale
from canaryd.judge.telemetry.rate_rules import corrected_errors_rising, rates
from canaryd.judge.telemetry.return_rules import (
    gpu_lost,
    host_uncorrected,
    machine_check,
    pcie_uncorrected,
    uncorrected_error,
)
from canaryd.judge.telemetry.signals import Signs
from canaryd.judge.telemetry.xid_rules import xid
from canaryd.model import Finding

RULES: tuple[Callable[[Signs], Iterator[Finding]], ...] = (
    *(telemetry_stale, readings_lost, flags, driver_advice, rates, corrected_errors_rising),
    *(gpu_lost, uncorrected_error, host_uncorrected, machine_check, pcie_uncorrected, xid),
    *(lanes_lost, nvlink_down, reported, changed),
)
"""Every rule of telemetry. Their order has no effect."""


def findings(signs: Signs) -> Iterator[Finding]:
    """Yield the findings of every rule."""
    return itertools.chain.from_iterable(rule(signs) for rule in RULES)
