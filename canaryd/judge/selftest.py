"""The rule for what a vendor's own self-test says of a device. A pass acquits nobody."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from canaryd.judge.case import Case
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.phrases import count
from canaryd.model import Cause, Finding, Outcome, Run, State

PROBE, STATUS, MESSAGE = "vendor_selftest", "vendor_selftest", "vendor_selftest_message"
SHOWN = 8
"""Failed tests that a finding names."""


def vendor_selftest(case: Case) -> Iterator[Finding]:
    """The newest self-test that gave results has a failed test: suspect, until a later one has none.

    The tool judges by its own limits, of speed and settings too, so the cause stays undetermined: exact goldens decide
    whether the device computes wrong numbers. The finding rests on the first run in a row with the same failed tests,
    so what is acknowledged stays so when it fails again.
    """
    runs = [r for r in case.runs if r.probe == PROBE and r.outcome is Outcome.COMPLETED]
    runs.sort(key=lambda r: age(r, case.now))
    if not runs or not (names := _failed(runs[0])):
        return
    newest, first = runs[0], [*itertools.takewhile(lambda r: _failed(r) == names, runs)][-1]
    results = [r for r in newest.readings if r.name == STATUS]
    told = {r.labels.get("test"): str(r.value) for r in newest.readings if r.name == MESSAGE}
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    tool = results[0].labels.get("tool", "its tool")
    yield make_finding(
        "vendor-selftest",
        State.SUSPECT,
        Cause.UNDETERMINED,
        f"The vendor's self-test ({tool}) failed {count(len(names), 'test')} of {len(results)}: {listed}",
        "Take it out of service; send the vendor the tool's output and what canaryd report writes",
        first,
        [*(f"{name}: {told[name]}" for name in names[:SHOWN] if told.get(name)), "Clears when a later one passes."],
    )


def _failed(run: Run) -> list[str]:
    """Return the names of the tests that failed."""
    return [str(r.labels.get("test")) for r in run.readings if r.name == STATUS and r.value == "fail"]
