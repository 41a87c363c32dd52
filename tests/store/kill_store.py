"""Writes into a store and prints what is promised to be on disk, in a process of its own that tests can kill.

`kill_store.py DIR PREFIX [COUNT]` adds runs and prints each id; two may write at once.
`kill_store.py --engine DIR PREFIX [COMMIT]` does what a daemon does through a real engine: runs with recordings,
baselines, verdicts, events, polls and acks, one word and one name a line; it kills itself before commit number COMMIT.
`kill_store.py --full DIR` does the same while no file may grow, then when they may again, and prints all answers.
`kill_store.py --forks` reads such arguments, a JSON list a line, and forks a process for each; it imports canaryd once.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from canaryd.facts import Comparison, Exactness, Recording
from canaryd.model import Ack, Device, Event, Outcome, Run
from canaryd.store.store import Store

DEVICE = "CPU-1"
CASE = "gemm/decode"
KNOWN = Recording(case=CASE, digest="1" * 16, values=(0.5, 0.25))
STRANGE = Recording(case=CASE, digest="2" * 16, values=(0.5, 0.75))
COMPARISONS = tuple(
    Comparison(case=f"case {n}", shape="M=32 N=1024 K=256", seed=n, exactness=Exactness.UNIVERSAL) for n in range(20)
)


def run(name: str, started: float, **fields) -> Run:
    """Return a run of the one device that completed."""
    default = {"device": DEVICE, "probe": "exact_matmul", "probe_version": 1, "seconds": 0.1}
    return Run(id=name, started=started, outcome=Outcome.COMPLETED, **{**default, **fields})


def runs(state_dir: str, prefix: str, *count: str) -> None:
    """Add runs and print their ids."""
    with Store.open(Path(state_dir)) as store:
        for number in itertools.islice(itertools.count(), int(count[0]) if count else None):
            if not store.add_run(made := run(f"{prefix}-{number}", float(number), comparisons=COMPARISONS)):
                sys.exit(store.problem)
            print(made.id, flush=True)


def begin(state_dir: str):
    """Return an engine that knows the one device."""
    from canaryd.config.settings import Config
    from canaryd.engine.engine import Engine

    store = Store.open(Path(state_dir))
    store.see_device(Device(uuid=DEVICE, backend="cpu", index=0, model="a processor", weak_identity=True), time.time())
    engine = Engine(Config(state_dir=Path(state_dir)), store)
    engine.recall()
    engine.looked = True
    return engine


def turn(engine, name: str, number: int) -> Iterator[tuple[str, str, bool]]:
    """Write one of everything; yield what, its name, and whether that is promised to be on disk."""
    store, now = engine.store, time.time()
    learnt = any(b.complete for b in store.baselines(DEVICE))
    recording = STRANGE if learnt and number % 4 == 3 else KNOWN
    engine.add(run(name, now, probe="recorded", recordings=(recording,)))
    yield "run", name, not store.problem
    event = Event(device=DEVICE, kind="story", name=name, first=now, last=now)
    engine.watch.history.record([event], [("stories", {"device": DEVICE}, 1.0)], {"log": name})
    yield "event", name, not store.problem
    poll = run(f"poll-{name}", now, probe="host_telemetry")
    yield "poll", poll.id, store.add_poll(poll, {Outcome.COMPLETED: 1})
    word = Ack(device=DEVICE, kind="acknowledged", at=now, until=now + 60, reason=name)
    yield "ack", name, store.add_ack(word)


def through_engine(state_dir: str, prefix: str, commit: str = "0") -> None:
    """Take turns for ever, or until just before a commit."""
    engine = begin(state_dir)
    if int(commit):
        engine.store._file.set_trace_callback(deadly(int(commit)))
    for number in itertools.count():
        for what, name, promised in turn(engine, f"{prefix}-{number}", number):
            if not promised:
                sys.exit(engine.store.problem)
            print(what, name, flush=True)


def deadly(number: int) -> Callable[[str], None]:
    """Return what SQLite calls before each statement: before that many commits the process is killed."""
    left = itertools.count(number - 1, -1)

    def before(statement: str) -> None:
        if statement == "COMMIT" and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def answers(engine) -> dict[str, object]:
    """Return what the engine, its store and `canaryd status` say."""
    from canaryd.report.status import gather

    store = engine.store
    told = gather(store, engine.config)
    return {
        "runs": [r.id for r in store.runs()],
        "polls": [r.id for r in store.polls(DEVICE)],
        "events": sorted(e.name for e in store.events()),
        "acks": [a.reason for a in store.acks()],
        "counted": [b.learnt.get("", 0) + b.passed.get("", 0) + b.strange for b in store.baselines()],
        "strange": [b.strange for b in store.baselines()],
        "verdicts": [(v.state.value, v.cause.value) for v in store.verdict_history(DEVICE)],
        "found": sorted(f.rule for f in engine.verdict(DEVICE).findings),
        "problems": list(told.problems),
    }


def full(state_dir: str) -> None:
    """Take turns before, while and after no file may grow; print all answers of each time."""
    import resource

    engine = begin(state_dir)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    promised = []
    for when, limit, turns in (("before", hard, 20), ("during", 0, 15), ("after", hard, 1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        promised.append([p for n in range(turns) for _, _, p in turn(engine, f"{when}-{n}", n)])
        print(json.dumps(answers(engine) | {"promised": promised[-1]}), flush=True)
    engine.store.close()


def forks() -> None:
    """Fork a process for each line of input, one after the other; print its id, what it prints, and its status."""
    import canaryd.engine.engine  # noqa: F401 - so that no child does

    for line in sys.stdin:
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print("ended", os.waitstatus_to_exitcode(status), flush=True)
            continue
        print("begun", os.getpid(), flush=True)
        main(*json.loads(line))
        return


def main(first: str, *others: str) -> None:
    """Do what the arguments say."""
    modes = {"--engine": through_engine, "--full": full, "--forks": forks}
    modes[first](*others) if first in modes else runs(first, *others)


if __name__ == "__main__":
    main(*sys.argv[1:])
