"""The rule for what a vendor's own self-test says of a device. A pass acquits nobody."""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.judge.case import Case
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.phrases import count
from canaryd.model import Cause, Finding, Outcome, State

PROBE, STATUS, MESSAGE = "vendor_selftest", "vendor_selftest", "vendor_selftest_message"
SHOWN = 8
"""Failed tests that a finding names."""


def vendor_selftest(case: Case) -> Iterator[Finding]:
    """The newest self-test that gave results has a failed test: suspect, until a later one has none.

    The tool judges by its own limits, of speed and settings too, so the cause stays undetermined: exact goldens decide
    whether the device computes wrong numbers.
    """
    runs = [r for r in case.runs if r.probe == PROBE and r.outcome is Outcome.COMPLETED]
    if not runs:
        return
    run = min(runs, key=lambda r: age(r, case.now))
    results = [r for r in run.readings if r.name == STATUS]
    failed = [r for r in results if r.value == "fail"]
    if not failed:
        return
    told = {r.labels.get("test"): str(r.value) for r in run.readings if r.name == MESSAGE}
    names = [str(r.labels.get("test")) for r in failed]
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    tool = failed[0].labels.get("tool", "its tool")
    yield make_finding(
        "vendor-selftest",
        State.SUSPECT,
        Cause.UNDETERMINED,
        f"The vendor's self-test ({tool}) failed {count(len(failed), 'test')} of {len(results)}: {listed}",
        "Take it out of service; send the vendor the tool's output and what canaryd report writes",
        run,
        [*(f"{name}: {told[name]}" for name in names[:SHOWN] if told.get(name)), "Clears when a later one passes."],
    )
