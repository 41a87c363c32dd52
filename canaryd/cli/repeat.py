"""`canaryd check --repeat RUN`: repeat a recorded run."""

from __future__ import annotations

import argparse

from canaryd.cli.common import complain
from canaryd.engine.schedule import cases_to_repeat
from canaryd.model import Run
from canaryd.store.store import Store

FROM_RUN = ("device", "probe", "case", "seed", "instruction_set", "intensity", "level")
"""Options of `check` whose values come from the recorded run."""


def recorded(options: argparse.Namespace, store: Store) -> Run | None:
    """Return the run of --repeat, and set `options` to its values. If there is none, print why and return None."""
    given = [o for o in FROM_RUN if getattr(options, o) != options.parser.get_default(o)]
    run = store.run(options.repeat)
    if given:
        words = ", ".join(f"--{o.replace('_', '-')}" for o in given)
        complain(f"check: --repeat tests as the run did; leave out {words}")
    elif run is None:
        absent = f"no such test on record in {store.state_dir}; canaryd status -v shows the ids of tests"
        complain(f"check: --repeat {options.repeat}: {store.unreadable or absent}")
    elif run.drill:
        complain(f"check: --repeat {run.id}: that was canaryd drill --fault {run.drill} --probe {run.probe}")
    else:
        options.device, options.probe, options.case = [run.device], [run.probe], list(cases_to_repeat(run))
        options.seed, options.level = run.seed, run.level
        options.instruction_set, options.intensity = run.instruction_set, run.intensity
        return run
    return None
