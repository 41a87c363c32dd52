"""What the daemon publishes: facts gathered from the store for the metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from canaryd.engine import budget
from canaryd.judge.telemetry.signals import Poll
from canaryd.metrics import families
from canaryd.model import Ack, Device, Outcome, Reading, Run, State, Verdict, stack_id

STEADY = 5
"""Newest runs whose recorded fingerprints must agree to be shown: as many as are remembered with their recordings."""


def budget_view(account: budget.Account, uuid: str) -> families.BudgetView:
    """Return what the metrics page says about the budget of a device."""
    spent, skipped = account.totals(uuid)
    held = account.withheld(uuid)
    return families.BudgetView(spent=spent, skipped=skipped, withheld=held.wait.reason if held else "")


def poll_views(polls: Mapping[str, Poll], periods: Mapping[str, float]) -> dict[str, families.PollView]:
    """Return, per telemetry probe, what the metrics page says about its polls."""
    return {
        name: families.PollView(
            seconds=poll.newest.seconds if poll.newest else None,
            last_success=poll.completed.started if poll.completed else None,
            absent=len(poll.completed.absent) if poll.completed else 0,
            period=periods.get(name),
        )
        for name, poll in polls.items()
    }


Counts = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def sum_counts(*counts: Counts) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the sums of counters, label set by label set."""
    total: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def newest_readings(device: Device, runs: Iterable[Run]) -> Iterator[Reading]:
    """Yield what the newest whole run of each probe has read; on a CPU, of its own instruction set alone.

    What another one gives, a slower kernel's time say, would be another series, and no label tells the two apart.
    """
    ways = ("", *device.instruction_sets[:1])
    newest = {r.probe: r for r in runs if r.whole and r.outcome is Outcome.COMPLETED and r.instruction_set in ways}
    for run in newest.values():
        yield from run.readings


def is_acknowledged(ack: Ack | None, verdict: Verdict | None) -> bool:
    """Whether an acknowledgement stands for what the device is now: a fault that came after it is news."""
    news = ack is not None and verdict is not None and verdict.state is State.FAULTY and verdict.since > ack.at
    return ack is not None and not news


def fingerprints(runs: Iterable[Run]) -> dict[tuple[str, str], int]:
    """Return (probe, label) → the newest fingerprint of each instruction set, on the stack of its newest run.

    Equal labels promise equal values on healthy devices of one model. The label is the stack's id and the probe's
    version, since another version may have other cases; where recordings made the fingerprint it stands for the chain
    of each of them too, since another kernel may round otherwise. Bits that nobody prescribed may also vary on a
    healthy device: where the newest `STEADY` runs with a label do not all agree, or in one of them a case gave two
    results, there is none.
    """
    stacks: dict[tuple[str, str], str] = {}
    newest: dict[tuple[str, str], tuple[str, str]] = {}
    given: dict[tuple[str, str], list[int | None]] = {}
    for run in runs:
        if not run.whole or run.outcome is not Outcome.COMPLETED:
            continue
        lane, value, chains = (run.probe, run.instruction_set), _fingerprint(run), {}
        stacks[lane] = stack = label = f"{run.stack_id}-v{run.probe_version}"
        if run.recordings:
            chains = {r.case: r.chain_id for r in run.recordings}
            label = f"{stack_id({'stack': run.stack_id} | chains)}-v{run.probe_version}"
        varied = len({(r.case, r.digest) for r in run.recordings}) > len(chains)
        if value is not None or varied:
            newest[lane] = stack, label
            before = given.get((run.probe, label), []) if chains else []
            given[run.probe, label] = [*before, None if varied else value][-STEADY:]
    found = {}
    for lane, (stack, label) in newest.items():
        value, *others = {*given[lane[0], label]}
        if value is not None and not others and stack == stacks[lane]:
            found[lane[0], label] = value
    return found


def _fingerprint(run: Run) -> int | None:
    """Return a run's fingerprint; anybody's probe may yield anything under that name that a float cannot hold."""
    value = next((r.value for r in run.readings if r.name == "golden_fingerprint"), None)
    return value if type(value) is int and 0 <= value < 2**53 else None
