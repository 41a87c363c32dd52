"""The rule for what a vendor's own self-test says of a device. A pass acquits nobody."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from canaryd.facts import SELF_TEST
from canaryd.judge.case import Case
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.laws import together_with
from canaryd.judge.phrases import count, first_of
from canaryd.model import Cause, Finding, Outcome, Run, State

PROBE, MESSAGE = "vendor_selftest", "vendor_selftest_message"
SHOWN = 8
"""Failed tests that a finding names."""


def vendor_selftest(case: Case) -> Iterator[Finding]:
    """The newest self-test that gave results has a failed test: suspect, until a later one has none.

    The tool judges by its own limits, of speed and settings too, so the cause stays undetermined: exact goldens decide
    whether the device computes wrong numbers. What identical devices began to fail with it, and none passes, accuses no
    device. The finding rests on the first run in a row with the same failed tests, so what is acknowledged stays so
    when it fails again.
    """
    runs = _completed(case, case.runs)
    if not runs or not (names := _results(runs[0], "fail")):
        return
    newest, first = runs[0], _first(runs)
    results = [r for r in newest.readings if r.name == SELF_TEST]
    told = {r.labels.get("test"): str(r.value) for r in newest.readings if r.name == MESSAGE}
    listed = first_of(names, SHOWN)
    tool = results[0].labels.get("tool", "its tool")
    company = _company(case, first, names)
    action = "Take it out of service; send the vendor the tool's output and what canaryd report writes"
    if company:
        action = "Check what they share: the tool's version and settings, the driver, power and cooling"
    yield make_finding(
        "vendor-selftest",
        State.UNKNOWN if company else State.SUSPECT,
        Cause.UNDETERMINED,
        f"The vendor's self-test ({tool}) failed {count(len(names), 'test')} of {len(results)}: {listed}",
        action,
        first,
        [
            f"{count(len(company), 'identical device')} began to fail the same tests at that time, and none passes."
            if company
            else "",
            *(f"{name}: {told[name]}" for name in names[:SHOWN] if told.get(name)),
            "Clears when a later one passes.",
        ],
        company=together_with(company),
    )


def _company(case: Case, first: Run, names: Sequence[str]) -> list[str]:
    """Return the siblings that began to fail all these tests at about the same time; none where one passes any of them.

    A pass counts from `repeat_window` before the first failure on: an older one may be of another driver or tool.
    """
    found = []
    for uuid, peer in case.peers.items():
        runs = _completed(case, peer)
        if runs and case.devices[uuid].kind == case.device.kind:
            recent = age(runs[0], case.now) <= age(first, case.now) + case.policy.repeat_window
            if recent and not {*names}.isdisjoint(_results(runs[0], "pass")):
                return []
            together = abs(_first(runs).started - first.started) <= case.policy.repeat_window
            if together and {*names} <= {*_results(runs[0], "fail")}:
                found.append(case.devices[uuid].name)
    return found


def _completed(case: Case, runs: Sequence[Run]) -> list[Run]:
    """Return the self-tests that gave results, newest first."""
    found = (r for r in runs if r.probe == PROBE and r.outcome is Outcome.COMPLETED)
    return sorted(found, key=lambda r: age(r, case.now))


def _first(runs: Sequence[Run]) -> Run:
    """Return the oldest of the newest runs that failed the same tests."""
    return [*itertools.takewhile(lambda r: _results(r, "fail") == _results(runs[0], "fail"), runs)][-1]


def _results(run: Run, result: str) -> list[str]:
    """Return the names of the tests that had a result."""
    return [str(r.labels.get("test")) for r in run.readings if r.name == SELF_TEST and r.value == result]
