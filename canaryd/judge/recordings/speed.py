"""Judge the latency of endpoints: while they are idle, or beside replicas that are not slow."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from canaryd.judge import brief
from canaryd.judge.findings import finding
from canaryd.judge.phrases import listed
from canaryd.judge.recordings.baseline import IDLE, LOADED
from canaryd.judge.recordings.record import Record
from canaryd.judge.telemetry.readings import in_words
from canaryd.model import Cause, Finding, Outcome, Run, State

NEWEST = 3
"""Runs whose median is the current latency: one slow run alone does not count (ours). If one run in 100 is slow by
chance, a look at three runs gives a false alarm with a probability of 3.0e-4."""
EARLIER = 10
"""Earlier runs that a comparison of latencies needs at least (ours)."""
SLOWER, BESIDE_SLOWER = 3.0, 10.0
"""Times the earlier median from which an endpoint is slow: while it serves nobody else; and, where it tells no queue,
while a replica is less than `SLOWER` times as slow as before (ours)."""
TOGETHER = 3600.0
"""Seconds within which two endpoints are compared: the newest runs of both are no farther apart (ours)."""
LATENCIES = dict(zip(brief.LATENCIES, (0.1, 0.01), strict=True))
"""Readings of an endpoint's speed, and by how many seconds one must have grown to matter (ours)."""


class _Series(NamedTuple):
    """One reading of one probe, by its labels."""

    probe: str
    name: str
    key: str


class _Speed(NamedTuple):
    """The newest latency of an endpoint beside its earlier one."""

    present: float
    """Median of the newest runs, in seconds."""
    usual: float
    """Median of the runs before, in seconds."""
    before: int
    """How many these are."""
    newest: Run

    @property
    def times(self) -> float:
        return self.present / self.usual if self.usual > 0 else float(self.present > 0)


def slow(record: Record) -> Iterator[Finding]:
    """The same model and server answer several times slower than before: the results are right, but late.

    A server may be slow because it has other requests. So a server that reports its queue is judged while it is idle.
    One that does not is judged only if another endpoint with the same model and server is not slow.
    """
    for series, runs in sorted(_measured(record.runs).items()):
        newest = [run for run, _ in runs[-NEWEST:]]
        if all(_conditions(run) == {IDLE} for run in newest):
            speed = _speed([(run, v) for run, v in runs if _conditions(run) == {IDLE}])
            if speed is not None and _is_slow(series, speed, SLOWER):
                yield _finding(series, speed, "The server had no other requests at the time.")
        elif not any(_conditions(run) & {IDLE, LOADED} for run in newest):
            speed = _speed(runs)
            if speed is None or not _is_slow(series, speed, BESIDE_SLOWER):
                continue
            if names := _steady(record, series, speed):
                yield _finding(series, speed, f"Not slow then, with the same model and server: {listed(names)}.")


def _finding(series: _Series, speed: _Speed, why: str) -> Finding:
    present, usual = f"{speed.present:.3g} s", f"{speed.usual:.3g} s"
    return finding(
        *("endpoint-slow", State.DEGRADED, Cause.ENVIRONMENT),
        f"Slow: {in_words(series.key)} is {present}, {speed.times:.1f} times the usual {usual}.",
        "Look for other load, throttling or a lost cache.",
        *(f"Medians of the newest {NEWEST} runs and of the {speed.before} runs before.", why),
        probe=series.probe,
        runs=(speed.newest.id,),
    )


def _measured(runs: Sequence[Run]) -> Mapping[_Series, list[tuple[Run, float]]]:
    """Return the latencies of whole runs, oldest first; those of the newest run's server and model only."""
    values: dict[_Series, list[tuple[Run, float]]] = defaultdict(list)
    for run in (r for r in runs if r.outcome is Outcome.COMPLETED and r.whole):
        for reading in run.readings:
            if reading.name in LATENCIES:
                values[_Series(run.probe, reading.name, reading.key)].append((run, float(reading.value)))
    return {
        series: [(run, v) for run, v in all_ if _serving_links(run) == _serving_links(all_[-1][0])]
        for series, all_ in values.items()
    }


def _speed(runs: Sequence[tuple[Run, float]]) -> _Speed | None:
    """Return how fast an endpoint is now and was before; None where the runs are too few."""
    now, before = [v for _, v in runs[-NEWEST:]], [v for _, v in runs[:-NEWEST]]
    if len(now) < NEWEST or len(before) < EARLIER:
        return None
    return _Speed(statistics.median(now), statistics.median(before), len(before), runs[-1][0])


def _is_slow(series: _Series, speed: _Speed, factor: float) -> bool:
    return speed.present > factor * speed.usual and speed.present - speed.usual > LATENCIES[series.name]


def _steady(record: Record, series: _Series, mine: _Speed) -> list[str]:
    """Return the endpoints with the same chain that were measured at the same time and were not slow."""
    found = []
    for name, peer in sorted(record.peers.items()):
        runs = _measured(peer.runs).get(series, ()) if peer.device.is_endpoint else ()
        speed = _speed(runs)
        same = speed is not None and _serving_links(speed.newest) == _serving_links(mine.newest)
        if speed is None or not same or abs(speed.newest.started - mine.newest.started) > TOGETHER:
            continue
        if not _is_slow(series, speed, SLOWER):
            found.append(name)
    return found


def _serving_links(run: Run) -> object:
    """Return the links of a run's chain that decide how fast it is answered."""
    chain = run.recordings[0].chain if run.recordings else {}
    return tuple(chain.get(link, "") for link in ("dtype", "checkpoint", "config", "server", "client"))


def _conditions(run: Run) -> set[str]:
    return {r.condition for r in run.recordings}
