"""Measure endpoint canaries on a real server: false alarms over many clean runs, and the fraction of flipped bits seen.

The server is third-party software, installed as scripts/servers does it, with the tests' tiny checkpoint. Three parts:

clean: runs one after the other, then as many beside four clients with requests of other lengths. An alarm is a verdict
suspect, faulty or degraded.
faults: matrix products inside the server's process are wrong at 1 in 500, 1 in 50, and always. An error is a verdict
healthy although recordings of the same check are unknown.
flips: copies of the checkpoint with one exponent bit of one random weight flipped, each served and tested once against
the same baseline and thresholds. canaryd does not know the checkpoint, so only the answer can show the flip.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import common
from canaryd.judge.recordings.baseline import EVERY
from canaryd.model import Outcome, Run, State
from tests import checkpoints
from tests.engines import NAMED
from tests.servers import KINDS
from tests.watched import Watched

FAULTY = common.ROOT / "tests/faulty_server"
PYTHON = ("mlx", "transformers")
"""Servers in whose process `FAULTY` can make products wrong."""
RATES = {"1 in 500": 1 / 500, "1 in 50": 1 / 50, "always": 1.0}
ALARMS = (State.DEGRADED, State.SUSPECT, State.FAULTY)


def clean(watched: Watched, runs: int) -> tuple[Counter[str], list[str]]:
    """Test the endpoint `runs` times; return (counts of states and of unknown vectors, lines about alarms)."""
    seen: Counter[str] = Counter()
    alarms = []
    for _ in range(runs):
        made = watched.ask()
        seen["runs"] += 1
        seen["confirmations"] += len(made) - 1
        seen["unknown vectors"] += sum(len(r.unknown) for r in made)
        seen["not completed"] += sum(r.outcome is not Outcome.COMPLETED for r in made)
        seen[watched.state.value] += 1
        if watched.state in ALARMS:
            alarms += [f"{rule}: {f.message}" for rule, f in watched.found().items() if f.state in ALARMS]
    return seen, alarms


def faults(watched: Watched, rate: float, checks: int) -> Counter[str]:
    """Make the fraction `rate` of the server's matrix products wrong; return the counts over `checks` checks."""
    watched.server.stop()
    sound = watched.server.environment
    watched.server.environment = sound | {"PYTHONPATH": str(FAULTY), "CANARYD_TEST_FAULT_RATE": str(rate)}
    watched.server.start()
    seen: Counter[str] = Counter()
    for _ in range(checks):
        made = watched.ask()
        unknown = any(r.unknown or r.outcome is not Outcome.COMPLETED for r in made)
        seen[watched.state.value] += 1
        seen["checks"] += 1
        seen["with unknown vectors"] += unknown
        seen["healthy all the same"] += unknown and watched.state is State.HEALTHY
    watched.server.stop()
    watched.server.environment = sound
    watched.server.start()
    return seen


def flips(watched: Watched, count: int) -> list[dict[str, Any]]:
    """Serve `count` copies with one flipped bit each; return for each copy the flip and the outcome of one run."""
    keep = watched.checkpoint.with_name("kept")
    shutil.copytree(watched.checkpoint, keep)
    found = []
    for seed in range(count):
        watched.server.stop()
        shutil.rmtree(watched.checkpoint)
        shutil.copytree(keep, watched.checkpoint)
        what = checkpoints.flip_bit(watched.checkpoint, seed)
        watched.server.start()
        first = once(watched)
        found.append({"seed": seed, "flipped": what, "outcome": first.outcome.value, "unknown": list(first.unknown)})
        print(f"{seed + 1} of {count}: {what}: {'seen' if first.unknown else first.outcome.value}", flush=True)
    watched.server.stop()
    shutil.rmtree(watched.checkpoint)
    shutil.copytree(keep, watched.checkpoint)
    watched.server.start()
    return found


def once(watched: Watched) -> Run:
    """Return the first run of one test; its other runs are confirmations."""
    return watched.ask()[0]


def main() -> None:
    """Measure and write the report; exit with 1 on an alarm, a missed fault, or too few flips seen."""
    parser = common.options(__doc__)
    parser.add_argument("--server", choices=KINDS, default="llama")
    parser.add_argument("--runs", type=int, default=500, help="clean runs of each kind (default: %(default)s)")
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--checks", type=int, default=20, help="checks of each rate of faults (default: %(default)s)")
    arguments = parser.parse_args()
    broken = arguments.server in PYTHON
    facts = common.machine()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="canaryd-served-") as directory:
        watched = Watched(arguments.server, Path(directory), told=False)
        watched.server.start()
        try:
            watched.learn()
            baselines = watched.engine.store.baselines(NAMED)
            rows = [
                [b.case, b.learnt[EVERY], len(b.known), "bit-stable" if b.stable("") else f"{b.noise(''):.2g}"]
                for b in baselines
            ]
            quiet, alarms = clean(watched, arguments.runs)
            with watched.load(threads=4):
                busy, more = clean(watched, arguments.runs)
            hurt = {told: faults(watched, rate, arguments.checks) for told, rate in RATES.items()} if broken else {}
            seen = flips(watched, arguments.flips)
        finally:
            watched.server.stop()
    alarms += more
    caught = sum(bool(f["unknown"]) for f in seen)
    kinds = ["runs", "healthy", "unknown", "degraded", "suspect", "unknown vectors", "confirmations", "not completed"]
    body = common.table(["case", "learnt", "vectors", "noise in nats"], rows) + "\n"
    body += common.table(
        ["clean runs", *kinds],
        [["one after the other", *(quiet[k] for k in kinds)], ["beside four clients", *(busy[k] for k in kinds)]],
    )
    body += f"\nAlarms: {len(alarms)} in {quiet['runs'] + busy['runs']} clean runs.\n"
    lied = sum(h["healthy all the same"] for h in hurt.values())
    if hurt:
        states = ["checks", "with unknown vectors", "healthy", "unknown", "suspect", "faulty", "healthy all the same"]
        rows = [[told, *(h[k] for k in states)] for told, h in hurt.items()]
        body += "\n" + common.table(["wrong products", *states], rows)
    body += "".join(f"\n- {alarm}" for alarm in list(dict.fromkeys(alarms))[:10])
    body += f"\n{caught} of {len(seen)} checkpoints with one flipped exponent bit gave unknown bits.\n"
    body += "".join(f"\n- not seen: {f['flipped']} ({f['outcome']})" for f in seen if not f["unknown"])
    common.write(
        arguments.out,
        f"served-{arguments.server}",
        f"Endpoint canaries on {KINDS[arguments.server].program}",
        {**facts, "seconds": f"{time.monotonic() - started:.0f}"},
        body + "\n",
        {"quiet": quiet, "busy": busy, "alarms": alarms, "faults": hurt, "flips": seen},
    )
    sys.exit(0 if not alarms and not lied and caught >= 0.9 * len(seen) else 1)


if __name__ == "__main__":
    main()
