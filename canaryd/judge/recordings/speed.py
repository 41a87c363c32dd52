"""Judge the latency of endpoints: while they are idle, or beside replicas that are not slow."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from canaryd.judge import brief
from canaryd.judge.findings import finding
from canaryd.judge.phrases import listed
from canaryd.judge.recordings.baseline import IDLE, LOADED, STEADY
from canaryd.judge.recordings.record import Record
from canaryd.judge.telemetry.readings import in_words
from canaryd.model import Cause, Finding, Outcome, Run, State

SLOWER, BESIDE_SLOWER = 3.0, 10.0
"""Times the earlier median from which an endpoint is slow: while it serves nobody else; and, where it tells no queue,
while a replica is less than `SLOWER` times as slow as before (ours)."""
LATENCIES = dict(zip(brief.LATENCIES, (0.1, 0.01), strict=True))
"""Readings of an endpoint's speed, and by how many seconds one must have grown to matter (ours)."""


Series = tuple[str, str, str]
"""Probe, reading, and the reading with its labels."""


class _Speed(NamedTuple):
    """The newest latency of an endpoint beside its earlier one."""

    present: float
    """Median of the newest runs, in seconds."""
    usual: float
    """Median of the runs before, in seconds."""
    newest: Sequence[Run]


def slow(record: Record) -> Iterator[Finding]:
    """The same model and server answer several times slower than before: the results are right, but late.

    A server may be slow because it has other requests. So a server that reports its queue is judged while it is idle.
    One that does not is judged only if another endpoint with the same model and server is not slow.
    """
    now = record.policy.confirm_runs
    for series, runs in sorted(_measured(record.runs).items()):
        newest = [_conditions(run) for run, _ in runs[-now:]]
        idle = all(found == {IDLE} for found in newest)
        if not idle and any(found & {IDLE, LOADED} for found in newest):
            continue
        speed = _speed([(r, v) for r, v in runs if not idle or _conditions(r) == {IDLE}], now)
        if speed is None or not _is_slow(series, speed, SLOWER if idle else BESIDE_SLOWER):
            continue
        steady = [] if idle else _steady(record, series, speed)
        if idle or steady:
            usual = f", {speed.present / speed.usual:.1f} times the usual {speed.usual:.3g} s" if speed.usual else ""
            beside = f"Not slow then, with the same model and server: {listed(steady)}."
            yield finding(
                *("endpoint-slow", State.DEGRADED, Cause.ENVIRONMENT),
                f"Slow: {in_words(series[2])} is {speed.present:.3g} s{usual}.",
                "Look for other load, throttling or a lost cache.",
                "The server had no other requests at the time." if idle else beside,
                probe=series[0],
                runs=(speed.newest[-1].id,),
            )


def _measured(runs: Sequence[Run]) -> Mapping[Series, list[tuple[Run, float]]]:
    """Return the latencies of whole runs, oldest first, of the newest run's server and model."""
    values: dict[Series, list[tuple[Run, float]]] = defaultdict(list)
    for run in (r for r in runs if r.outcome is Outcome.COMPLETED and r.whole):
        for reading in (r for r in run.readings if r.name in LATENCIES):
            values[run.probe, reading.name, reading.key].append((run, float(reading.value)))
    return {key: [(r, v) for r, v in all_ if _served(r) == _served(all_[-1][0])] for key, all_ in values.items()}


def _speed(runs: Sequence[tuple[Run, float]], now: int) -> _Speed | None:
    """Return how fast an endpoint is now and was before; None where the runs are too few."""
    present, before = [v for _, v in runs[-now:]], [v for _, v in runs[:-now]]
    if len(present) < now or len(before) < STEADY:
        return None
    return _Speed(statistics.median(present), statistics.median(before), [run for run, _ in runs[-now:]])


def _is_slow(series: Series, speed: _Speed, times: float) -> bool:
    return speed.present > times * speed.usual and speed.present - speed.usual > LATENCIES[series[1]]


def _steady(record: Record, series: Series, mine: _Speed) -> list[str]:
    """Return the endpoints with the same chain that were measured at the same time and were not slow."""
    found, first, last = [], mine.newest[0], mine.newest[-1]
    for name, peer in sorted(record.peers.items()):
        runs = _measured(peer.runs).get(series, ()) if peer.device.is_endpoint else ()
        speed = _speed(runs, record.policy.confirm_runs)
        if speed is None or _served(speed.newest[-1]) != _served(last) or _is_slow(series, speed, SLOWER):
            continue
        if speed.newest[-1].started >= first.started and speed.newest[0].started <= last.started:
            found.append(name)
    return found


def _served(run: Run) -> object:
    """Return the links of a run's chain that decide how fast it is answered."""
    chain = run.recordings[0].chain if run.recordings else {}
    return tuple(chain.get(link, "") for link in ("dtype", "checkpoint", "config", "server", "client"))


def _conditions(run: Run) -> set[str]:
    return {r.condition for r in run.recordings}
