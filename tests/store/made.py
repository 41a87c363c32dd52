"""Runs, devices, verdicts and events as tests of the store make them."""

import random
import subprocess
import sys
from pathlib import Path

from canaryd.facts import Comparison, Evidence, Exactness
from canaryd.model import Cause, Device, Event, Outcome, Run, State, Verdict
from canaryd.store.database import PASSED_NOTE
from canaryd.store.store import Store

NOW = 1_790_000_000.0
WRITER = Path(__file__).with_name("kill_store.py")
EVIDENCE = Evidence(
    wrong=1, total=64, first=(((3, 5), "3f80", "3f81"),), bits={"0": 1}, zeroed=0, nonfinite=0, lines={}, pattern="one"
)


def comparison(**changes):
    fields = {"case": "bfloat16/cancel", "shape": "M=8 N=8 K=8", "seed": 7, "exactness": Exactness.UNIVERSAL}
    return Comparison(**{**fields, **changes})


WRONG = comparison(trials=4, wrong_trials=1, evidence=EVIDENCE)


def run(name="r1", **changes):
    fields = {"device": "GPU-1", "probe": "exact_matmul", "probe_version": 1, "started": NOW, "seconds": 1.5}
    return Run(id=name, **{**fields, "outcome": Outcome.COMPLETED, **changes})


def failure(name, **changes):
    return run(name, **{"comparisons": (WRONG,), **changes})


def device(uuid="GPU-1", **changes):
    return Device(
        **{"uuid": uuid, "backend": "cuda", "index": 0, "model": "H100", "detail": {"serial": "1"}, **changes}
    )


def verdict(state=State.HEALTHY, cause=Cause.NONE, decided=NOW, **changes):
    fields = {"device": "GPU-1", "findings": (), "since": NOW, **changes}
    return Verdict(state=state, cause=cause, decided=decided, **fields)


def event(**changes):
    fields = {"device": "GPU-1", "kind": "xid", "name": "31", "first": NOW, "last": NOW}
    return Event(**{**fields, **changes})


def ids(runs):
    return [r.id for r in runs]


def python(*args, **options):
    # -S: the writers need the standard library only, and start in half the time.
    command = [sys.executable, "-S", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def junk(size):
    return random.Random(size).randbytes(size)


class Clock:
    """A clock that the test sets."""

    def __init__(self, now=NOW):
        self.now = now

    def __call__(self):
        return self.now


def count(store, name, by=1, **labels):
    return store.add_events([], [(name, labels, by)])


def counter(store, name, **labels):
    return store.counters().get((name, frozenset(labels.items())), 0)


def passed(store, now):
    """Let time pass for a store as if it had been pruned hour by hour."""
    store.set_note(PASSED_NOTE, repr(now))


def fill(state_dir, runs, **options):
    """Write many runs in few transactions: they gather in memory while a file is in the way."""
    state_dir.write_text("in the way")
    with Store.open(state_dir, **options) as store:
        for each in runs:
            assert not store.add_run(each)
        state_dir.unlink()


HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from canaryd.store.store import Store
with Store.open(Path(sys.argv[2])).lock("GPU-1"):
    print("held", flush=True)
    time.sleep(60)
"""
