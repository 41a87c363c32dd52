"""Measure a start of the daemon with many stored failures: time until it serves and judges, and its largest memory.

The store has runs of eight GPUs: one of every probe per hour for 45 days, and counted for 400 days, with no failure,
one mismatch, or thousands of failures over 400 days. The runs are copies of a real check of this machine's processor,
under the names of GPUs. The daemon starts with this store but without GPUs, so it judges all of them from the stored
runs.
"""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks import common, footprint
from canaryd.facts import Evidence, Span
from canaryd.judge.tally import tally
from canaryd.model import Device, Run
from canaryd.store import rows
from canaryd.store.store import Store
from canaryd.supervisor.protocol import new_run_id

GPUS = 8
DAY = 86400.0
CLEAN_DAYS, FAILURE_DAYS = 45, 400
"""Days for which the store keeps clean runs, and failures and the counts of all (canaryd/store/retention.py)."""
PERIOD = 3600.0
"""Seconds between two runs of a probe on a device."""
BARS = {"serves": 1.0, "judges": 5.0, "MiB": 75.0}
"""Targets: seconds to the first answer, seconds to the verdict on every GPU, largest resident memory in MiB."""
COLUMNS = {
    "serves": "s until it serves",
    "judges": "s until it has judged",
    "itself": "of these after its workers have named the devices",
    "cpu": "CPU s of the daemon",
    "MiB": "largest MiB resident",
}
"""Figure → title of its column. In the first seconds a worker imports torch to look for devices."""
SETTLES = 5.0
"""Seconds after the verdicts in which memory can still grow before it is read."""
INVENTORY = 2
"""Number of workers of an inventory: one for the vendors' libraries, one for torch."""
PATIENCE = 300.0
"""Seconds after which a start counts as failed."""


def gpu(index: int) -> Device:
    """Return a GPU with this index; all eight are of one model."""
    uuid = f"GPU-{index:08x}-1f2e-4d3c-8b5a-0123456789ab"
    bus = f"00000000:{index:02x}:00.0"
    return Device(uuid=uuid, backend="cuda", index=index, model="NVIDIA H100 80GB HBM3", detail={"bus_id": bus})


def checked() -> list[Run]:
    """Return the runs of a quick check of this machine's processor, one per probe."""
    with tempfile.TemporaryDirectory(prefix="canaryd-") as state:
        words = ["check", "--device", "cpu:0", "--level", "quick", "--state-dir", state]
        subprocess.run([sys.executable, "-m", "canaryd", *words], cwd=common.ROOT, check=True, capture_output=True)
        with Store.open(Path(state), for_reading=True) as store:
            return list({run.probe: run for run in store.runs() if run.comparisons}.values())


def broken(run: Run, n: int) -> Run:
    """Return a copy of a run with one wrong comparison, as from a stuck bit; `n` seeds the choice of its elements."""
    chance = random.Random(n)
    chosen, column = chance.randrange(len(run.comparisons)), chance.randrange(1024)
    rows_ = sorted(chance.sample(range(3072), 16))
    right = [chance.getrandbits(32) & ~(1 << 16) for _ in rows_]
    found_at = zip(rows_, right, strict=True)
    wrong = tuple(((row, column), f"{bits:08x}", f"{bits | 1 << 16:08x}") for row, bits in found_at)
    lines = {
        "row": Span(first=rows_[0], last=rows_[-1], distinct=len(rows_)),
        "column": Span(first=column, last=column, distinct=1),
    }
    found = Evidence(
        wrong=len(wrong),
        total=3072 * 1024,
        first=wrong,
        bits={"16": len(wrong)},
        zeroed=0,
        nonfinite=0,
        lines=lines,
        pattern="bit 16 flips",
    )
    accused = replace(run.comparisons[chosen], wrong_trials=1, evidence=found, seed=chance.getrandbits(48))
    return replace(run, comparisons=(*run.comparisons[:chosen], accused, *run.comparisons[chosen + 1 :]))


def fill(state: Path, templates: Sequence[Run], failures: int) -> None:
    """Write the store: clean copies of `templates`, and this number of `failures` in all, spread over 400 days."""
    now, gpus = time.time(), [gpu(index) for index in range(GPUS)]
    with Store.open(state) as store:
        for part in gpus:
            store.see_device(part, now - PERIOD)
    failed = [
        (
            now - (failures - n) * FAILURE_DAYS * DAY / (failures + 1),
            broken(templates[n // GPUS % len(templates)], n),  # every probe fails on every GPU
            gpus[n % GPUS],
        )
        for n in range(failures)
    ]
    clean = (
        (now - hour * PERIOD, template, part)
        for hour in range(int(FAILURE_DAYS * DAY / PERIOD), 0, -1)
        for part in gpus
        for template in templates
    )
    stack = {"torch": "2.13.0+cu130", "driver": "580.95.05", "cuda": "13.0"}

    with contextlib.closing(sqlite3.connect(state / "canaryd.db")) as db, db:
        for at, run, part in sorted((*failed, *clean), key=lambda made: made[0]):
            named = replace(run, id=new_run_id(at), device=part.uuid, started=at, stack=stack, instruction_set="")
            if run.wrong or now - at <= CLEAN_DAYS * DAY:
                db.execute(rows.ADD_RUN, rows.run_row(named, at))
            counted = tally(named)
            (began,) = db.execute(rows.PART, rows.part_of(part.uuid, counted)).fetchone()
            db.execute(rows.ADD_TALLY, rows.tally_row(part.uuid, counted, began))


def start(state: Path) -> dict[str, float]:
    """Start the daemon with a state directory; return its figures by the names of `COLUMNS`, and "MiB"."""
    began, found = time.monotonic(), dict.fromkeys(COLUMNS, 0.0)
    workers, named = set[int](), 0.0
    with footprint.daemon(None, state) as (process, metrics):
        while not found["judges"]:
            alive = {child.pid for child in footprint.passing(process)}
            workers |= alive
            if len(workers) >= INVENTORY and not alive:
                named = named or time.monotonic()
            with contextlib.suppress(OSError):
                answer = urllib.request.urlopen(metrics, timeout=30)  # noqa: S310  an address of our own making
                judged = re.findall(rb'\ncanaryd_device_state_since_timestamp_seconds{.*"GPU-', answer.read())
                found["serves"] = found["serves"] or time.monotonic() - began
                found["judges"] = time.monotonic() - began if len(judged) == GPUS else 0.0
            if time.monotonic() - began > PATIENCE:
                raise TimeoutError(f"not judged after {PATIENCE:g} s")
            if process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(process.pid, msg="it ended")
            time.sleep(0.02)
        found["itself"] = began + found["judges"] - (named or began)
        used = process.cpu_times()
        found["cpu"] = used.user + used.system
        time.sleep(SETTLES)
        status = Path(f"/proc/{process.pid}/status").read_text()
    return found | {"MiB": int(status.split("VmHWM:")[1].split()[0]) / 1024}


def main() -> None:
    """Measure a start for each number of failures and write the report."""
    parser = common.options(__doc__)
    parser.add_argument(
        "--failures", type=int, nargs="+", default=[0, 1, 30_000], help="on record (default: 0 1 30000)"
    )
    arguments = parser.parse_args()
    facts, templates, found = common.machine(), checked(), {}
    for failures in arguments.failures:
        with tempfile.TemporaryDirectory(prefix="canaryd-") as state:
            fill(Path(state), templates, failures)
            found[failures] = start(Path(state))
            print(f"{failures:,} failures: {found[failures]}", flush=True)
    clean = int(CLEAN_DAYS * DAY / PERIOD) * GPUS * len(templates)
    rows_ = [
        [f"{failures:,}", *(f"{seen[name]:.1f} {_judge(seen[name], BARS.get(name))}" for name in COLUMNS)]
        for failures, seen in found.items()
    ]
    body = f"{clean:,} clean runs of {len(templates)} probes on {GPUS} GPUs in {CLEAN_DAYS} days, counted for "
    body += f"{FAILURE_DAYS}; and:\n\n"
    body += common.table(["failures", *COLUMNS.values()], rows_)
    common.write(
        arguments.out, "bad_record", "A start with a bad record", facts, body, {"found": found, "clean": clean}
    )


def _judge(value: float, bar: float | None) -> str:
    return "" if bar is None else f"({'reached' if value <= bar else 'missed'}: ≤ {bar:g})"


if __name__ == "__main__":
    main()
