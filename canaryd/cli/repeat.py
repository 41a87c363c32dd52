"""`canaryd check --repeat RUN`: what to test and how, from a run on record."""

from __future__ import annotations

import argparse
import re
import time

from canaryd.cli.common import complain
from canaryd.engine.schedule import cases_to_repeat
from canaryd.formatting import format_duration
from canaryd.model import Device, Run
from canaryd.store.store import Store

RUN_ID = re.compile(r"([0-9a-f]{12})-[0-9a-f]{10}")
"""`supervisor.protocol.new_run_id`: milliseconds since the epoch, and a random number."""
FROM_RUN = ("device", "probe", "case", "seed", "instruction_set", "intensity", "level")
"""Options of `check` that a run on record gives."""


def recorded(options: argparse.Namespace, store: Store, defaults: argparse.Namespace) -> Run | None:
    """Return the run that --repeat names, and set the options as it had them; None, with a complaint, for none."""
    name = options.repeat
    if given := [o for o in FROM_RUN if getattr(options, o) != getattr(defaults, o)]:
        words = ", ".join(f"--{o.replace('_', '-')}" for o in given)
        complain(f"check: --repeat tests as the run did; leave out {words}")
        return None
    run = store.run(name)
    if run is None:
        complain(f"check: --repeat {name}: {_why_not(name, store)}")
    elif run.drill:
        words = f"canaryd drill --fault {run.drill} --device {_name(run, store)} --probe {run.probe}"
        complain(f"check: --repeat {name}: that run is a drill; type {words}")
    else:
        options.device, options.probe, options.case = [run.device], [run.probe], list(cases_to_repeat(run))
        options.seed, options.level = run.seed, run.level
        options.instruction_set, options.intensity = run.instruction_set, run.intensity
        return run
    return None


def _why_not(name: str, store: Store) -> str:
    """Return why there is no such run on record, and what to do."""
    if store.unreadable:
        return store.unreadable
    if poll := store.poll(name):
        return f"that is a reading of {poll.probe}, not a test; canaryd check reads telemetry again"
    made = RUN_ID.fullmatch(name)
    if made is None:
        return 'that is not the id of a run, which is like "019d1f3c5a7b-0123456789"; canaryd status -v shows them'
    age = time.time() - int(made[1], 16) / 1000
    if age > store.keep.successes:
        kept = f"{format_duration(store.keep.successes)}, failures for {format_duration(store.keep.failures)}"
        return f"no such run is on record; clean runs are kept for {kept}"
    return f"no such run in {store.state_dir}; type it on the node that made it, with the same --state-dir"


def elsewhere(run: Run, store: Store) -> str:
    """Return why a run cannot be repeated on this host, which lacks its device."""
    return f"check: --repeat {run.id}: it tested {_name(run, store)} ({run.device}), which this host does not have"


def _name(run: Run, store: Store) -> str:
    known: dict[str, Device] = {r.device.uuid: r.device for r in store.devices()}
    return known[run.device].name if run.device in known else "another node's device"
