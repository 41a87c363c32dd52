"""`canaryd prove`: test a node cold, under full load and hot, before it takes work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from canaryd.engine import check
from canaryd.engine.engine import Engine
from canaryd.engine.host import Options
from canaryd.model import Device, Outcome, State

LOADS = ("steady", "pulsed")
"""The intensities under which all devices and cores are tested at once: heat, and power that comes and goes."""


def run(
    engine: Engine,
    options: Options,
    devices: Sequence[Device],
    on_wait: Callable[[str], None],
    on_plan: Callable[[int, float], None],
) -> list[check.Result]:
    """Test every device once, then all at once under each load until `options.seconds` are over, then once more, hot.

    Returns the results in this order: the verdicts of the last one count. It ends early where a device is suspect or
    faulty, or could not be tested: more load would prove nothing.
    """
    begun = time.monotonic()
    results = [check.run(engine, replace(options, seconds=0.0), devices, on_wait, on_plan)]
    for number, load in enumerate(LOADS):
        left = max(0.0, options.seconds - (time.monotonic() - begun)) / (len(LOADS) - number)
        if not _goes_on(results[-1]):
            return results
        wanted = replace(options, level="quick", intensity=load, seconds=left, at_once=True)
        results.append(check.run(engine, wanted, devices, on_wait, on_plan))
    if _goes_on(results[-1]):
        results.append(check.run(engine, replace(options, level="quick", seconds=0.0), devices, on_wait, on_plan))
    return results


def _goes_on(result: check.Result) -> bool:
    return result.state.severity < State.SUSPECT.severity and not result.missed and bool(result.devices)


def under_load(results: Sequence[check.Result], uuid: str) -> dict[str, int]:
    """Return load → results of a device that were compared under it; 0 where no run completed."""
    runs = [run for result in results for run in result.runs.get(uuid, ()) if run.outcome is Outcome.COMPLETED]
    return {load: sum(run.trials for run in runs if run.intensity == load) for load in LOADS}
