"""Run a busy daemon for hours and check that nothing grows.

`canaryd run` has its own state directory, and 8 GPUs from the tests' replacement for NVML. Much happens: three numeric
probes in turn without a pause or a budget, telemetry every 15 s, a probe that hangs and one that crashes, lines in the
kernel log, counters that rise, a GPU that falls off the bus, a scrape every 5 s, `canaryd status`, SIGHUP, drills.
Every 30 s the daemon is measured from outside. At the end each quantity is judged by its trend after the warm-up.

Exits with 1 if something grows or goes wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common, footprint
from benchmarks.telemetry import Scraper
from canaryd.config.values import parse_duration
from tests.nvml_stand_in import StandIn

PROBES = common.ROOT / "tests/probes"
SAMPLE, SCRAPE = 30.0, 5.0
"""Seconds between two samples, and between two scrapes."""
WARM_UP = 3600.0
"""Seconds at the start that are not judged (or half of a shorter run). In this time the store fills up to the 50
kept runs of each probe and instruction set: a round takes about 24 s, and three sets take turns."""
STORE = 3 << 20
"""Maximum size of the database in bytes (`store.max_size`)."""
GROWN_BY = 1.96
"""Standard normal quantile of the two-sided 95 % interval of a slope."""
LEAVE = 20.0
"""Maximum seconds for the daemon's stop."""
XID = "NVRM: Xid (PCI:0000:1{gpu:x}:00): {xid}, pid=4242, name=python3, Ch 00000008"
XIDS = (31, 43, 13, 94)
LOST = 3
"""Index of the GPU that falls off the bus repeatedly."""
COUNTER = re.compile(r"^(canaryd_\w+_total(?:\{.*\})?) (\S+)$", re.MULTILINE)
TROUBLE = re.compile(r"Traceback|the daemon goes on| CRITICAL | ERROR ")


# --- What is judged ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A measured quantity that must not grow."""

    name: str
    unit: str
    growth: float
    """Largest allowed growth per hour, in units of the quantity (ours)."""
    most: float = math.inf
    """Largest allowed value."""
    why: str = ""


MIB = float(1 << 20)
QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        name="resident memory",
        unit="MiB",
        growth=2.0,
        most=1.25 * footprint.MEMORY_TARGET,
        why="a quarter more than at rest: here the record is full, and something always goes on",
    ),
    Quantity(name="proportional memory", unit="MiB", growth=2.0),
    Quantity(
        name="anonymous memory",
        unit="MiB",
        growth=2.0,
        why="after an hour the record is full",
    ),
    Quantity(name="threads", unit="1", growth=0.5, most=64.0, why="36 of the pools and a few lasting ones"),
    Quantity(name="open files", unit="1", growth=0.5, most=200.0),
    Quantity(name="child processes", unit="1", growth=0.5, most=12.0),
    Quantity(name="zombies that stay", unit="1", growth=0.0, most=0.0, why="seen in two samples running"),
    Quantity(
        name="database",
        unit="MiB",
        growth=math.inf,
        most=2 * STORE / MIB,
        why=f"store.max_size, {STORE / MIB:g} MiB, to which it is pruned every hour, and what an hour adds",
    ),
    Quantity(name="write-ahead log", unit="MiB", growth=math.inf, most=8.0, why="SQLite begins anew at 4 MiB"),
    Quantity(name="rest of the state directory", unit="MiB", growth=0.05, most=1.0),
    Quantity(name="log", unit="MiB", growth=2.0, why="a line a run, and here a run every few seconds"),
    Quantity(name="series", unit="1", growth=20.0, most=20_000.0, why="outcomes and events that were not seen before"),
    Quantity(name="scrape latency", unit="ms", growth=5.0, why="the median of the scrapes since the last sample"),
)


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The growth per hour: median of the slopes of all pairs of samples, and its 95 % interval."""

    median: float
    low: float
    high: float


def slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Return the growth per hour of (seconds, value) points by the method of Theil and Sen, with Sen's interval.

    The interval's ends are the pairs' slopes at the ranks that follow from Kendall's variance (P. K. Sen, 1968; R. O.
    Gilbert, 1987, § 16.5). It assumes independent samples, so it is rather too narrow for slowly varying ones.
    """
    pairs = sorted(3600.0 * (b - a) / (after - before) for (before, a), (after, b) in itertools.combinations(points, 2))
    count = len(points)
    reach = GROWN_BY * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(pairs) - reach) / 2))
    high = min(len(pairs) - 1, math.ceil((len(pairs) + reach) / 2))
    return Slope(median=statistics.median(pairs), low=pairs[low], high=pairs[high])


def judged(quantity: Quantity, found: Slope, largest: float) -> str:
    """Return "too much", "holds" or "grows", or "not resolved" if the bound lies in the interval."""
    if largest > quantity.most:
        return "too much"
    if found.high <= quantity.growth:
        return "holds"
    return "grows" if found.low > quantity.growth else "not resolved"


# --- The machine and the daemon on it ---------------------------------------------------------------------------------


def configure(folder: Path) -> Path:
    """Write a configuration with short periods and return its path. It is JSON, which is valid YAML."""
    probes = folder / "probes.d"
    probes.mkdir(mode=0o755)
    for name in ("hangs", "crashes"):
        (probes / f"{name}.py").write_text((PROBES / f"{name}.py").read_text())
    off = [p.stem for p in (common.ROOT / "probes").glob("[!_]*.py") if not p.stem.endswith("_telemetry")]
    each: dict[str, Any] = {name: {"enabled": False} for name in off}
    each |= {
        "exact_integer": {"period": "10s"},
        "exact_attention": {"period": "10s"},
        "recorded_kernels": {"period": "10s"},
        "hangs": {"period": "10m", "timeout": "5s"},
        "crashes": {"period": "7m"},
        "directories": [str(probes)],
    }
    (folder / "kmsg").touch()
    settings = {
        "probes": each,
        "budget": {"share": 1, "busy": 1},
        "telemetry": {"kernel_log": str(folder / "kmsg")},
        "store": {"max_size": f"{STORE >> 20}MiB"},
    }
    path = folder / "canaryd.yaml"
    path.write_text(json.dumps(settings, indent=1))
    return path


@dataclass
class Soak:
    """The daemon, the actions on it, and the measurements of it."""

    folder: Path
    machine: StandIn
    process: psutil.Popen
    address: str
    config: Path
    samples: list[dict[str, float]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Things that went wrong, one sentence each."""
    done: dict[str, int] = field(default_factory=dict)
    """Kind of action → number of times."""
    scrapes: list[float] = field(default_factory=list)
    """Milliseconds of every scrape."""
    recent: list[float] = field(default_factory=list)
    commands: list[tuple[str, frozenset[int], subprocess.Popen[bytes]]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    """Counters that were on an earlier page but are not on the newest one."""
    zombies: frozenset[int] = frozenset()
    sequence: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        """Create the only scraper."""
        self.scraper = Scraper(self.address)

    @property
    def state(self) -> Path:
        """The daemon's state directory."""
        return self.folder / "state"

    # -- what is done to it

    def scrape(self) -> None:
        """Scrape once and record the time, or the failure."""
        try:
            self.scraper.scrape()
        except (OSError, http.client.HTTPException) as error:
            self.wrong.append(f"a scrape failed: {error!r}")
            self.scraper = Scraper(self.address)
            return
        self.recent.append(self.scraper.milliseconds[-1])

    def command(self, *words: str, good: frozenset[int]) -> None:
        """Start a canaryd command beside the daemon; `good`: the expected exit statuses."""
        argv = [sys.executable, "-m", "canaryd", *words, "--config", str(self.config), "--state-dir", str(self.state)]
        with (self.folder / "commands.log").open("ab") as log:
            started = subprocess.Popen(argv, cwd=common.ROOT, stdout=log, stderr=log)
        self.commands.append((words[0], good, started))

    def status(self) -> None:
        """Start `canaryd status`, as an operator would."""
        self.command("status", good=frozenset({0, 1, 2, 3}))

    def drill(self) -> None:
        """Start a drill on the CPU's exact integers; its fault must be found."""
        self.mark("drill")
        self.command("drill", "--device", "cpu:0", "--probe", "exact_integer", good=frozenset({2}))

    def reload(self) -> None:
        """Send SIGHUP to the daemon."""
        self.mark("SIGHUP")
        self.process.send_signal(signal.SIGHUP)

    def hear(self) -> None:
        """Write a line about an Xid to the kernel log."""
        number = next(self.sequence)
        text = XID.format(gpu=number % len(self.machine.uuids), xid=XIDS[number % len(XIDS)])
        with (self.folder / "kmsg").open("a") as log:
            log.write(f"4,{number},{int(time.monotonic() * 1e6)},-;{text}\n")

    def weather(self) -> None:
        """Set random temperatures of all GPUs."""
        for gpu in range(len(self.machine.uuids)):
            self.machine.set(gpu, "temperature", random.randint(40, 80))

    def lose(self) -> None:
        """Remove one GPU from the bus until the next `regain`."""
        self.mark("GPU lost")
        self.machine.lose(LOST)

    def regain(self) -> None:
        """Return the removed GPU to the bus."""
        self.machine.unset(LOST, "lost")

    def mark(self, label: str) -> None:
        """Record the present time of an action, under a label."""
        self.marks.append((time.time(), label))

    # -- what is seen of it

    def reap(self) -> None:
        """Check the exit status of each command that has ended."""
        for entry in list(self.commands):
            name, good, process = entry
            if (code := process.poll()) is not None:
                self.commands.remove(entry)
                if code not in good:
                    self.wrong.append(f"canaryd {name} ended with {code}")

    def sample(self) -> None:
        """Measure every quantity once."""
        pid, recent, self.recent = self.process.pid, self.recent, []
        self.scrapes += recent
        memory = footprint.memory(pid)
        children = self.process.children()
        zombies = frozenset(c.pid for c in children if _status(c) == psutil.STATUS_ZOMBIE)
        size = {path.name: _size(path) for path in self.state.rglob("*")}
        database, log = size.pop("canaryd.db", 0.0), size.pop("canaryd.db-wal", 0.0)
        self._count()
        self.samples.append(
            {
                "at": time.time(),
                "resident memory": memory["resident"],
                "proportional memory": memory["proportional"],
                "anonymous memory": memory["anonymous"],
                "threads": float(self.process.num_threads()),
                "open files": float(self.process.num_fds()),
                "child processes": float(len(children)),
                "zombies that stay": float(len(zombies & self.zombies)),
                "database": database / MIB,
                "write-ahead log": log / MIB,
                "rest of the state directory": sum(size.values()) / MIB,
                "log": _size(self.folder / "log") / MIB,
                "series": float(self.scraper.series),
                "scrape latency": statistics.median(recent) if recent else math.nan,
            }
        )
        self.zombies = zombies

    def _count(self) -> None:
        """Compare the counters of the newest page with earlier ones: no counter falls, and none disappears.

        Counters of the lost GPU may be missing until it is back; at the end none may be missing.
        """
        now = {name: float(value) for name, value in COUNTER.findall(self.scraper.page)}
        for name, before in self.counters.items():
            if now.get(name, before) < before:
                self.wrong.append(f"{name} was {before:g} and is {now[name]:g}")
        gone = self.counters.keys() - now.keys()
        for name in sorted(gone - self.gone):
            if self.machine.uuids[LOST] not in name:
                self.wrong.append(f"{name} was {self.counters[name]:g} and is gone")
        self.gone = frozenset(gone)
        self.counters |= now

    def finish(self) -> None:
        """Stop the daemon, and search its log for lines that must not be there."""
        self.wrong += [f"{name} went with the lost GPU and did not come back" for name in sorted(self.gone)]
        for _, _, command in self.commands:
            command.kill()
            command.wait()
        begun = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.terminate()
        try:
            code = self.process.wait(LEAVE)
            if code != 0:
                self.wrong.append(f"the daemon ended with {code}")
        except psutil.TimeoutExpired:
            self.wrong.append(f"the daemon did not end within {LEAVE:g} s")
            self.process.kill()
            self.process.wait()
        self.done["seconds of the stop"] = math.ceil(time.monotonic() - begun)
        lines = [
            line for line in (self.folder / "log").read_text(errors="replace").splitlines() if TROUBLE.search(line)
        ]
        self.wrong += [f"in the log: {line}" for line in lines]


def _size(path: Path) -> float:
    with contextlib.suppress(OSError):
        if path.is_file():
            return float(path.stat().st_size)
    return 0.0


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.status())
    return ""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Soak]:
    """Start the daemon, wait until it answers, and yield it; stop it at the end."""
    machine = StandIn(folder)
    os.environ.update(machine.environment)
    config = configure(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["run", "--config", str(config), "--state-dir", str(folder / "state"), "--listen", address]
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "canaryd", *words],
            cwd=common.ROOT,
            env=os.environ | common.UNIT,
            stdout=log,
            stderr=log,
        )
    soak = Soak(folder, machine, process, f"http://{address}/metrics", config)
    try:
        for _ in range(300):
            if process.poll() is not None:
                sys.exit(f"canaryd run ended at once:\n{(folder / 'log').read_text()[-2000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                soak.scraper = Scraper(soak.address)
                soak.scraper.scrape()
                break
            time.sleep(0.1)
        yield soak
    finally:
        soak.finish()


def watch(soak: Soak, duration: float) -> None:
    """Act on the daemon and sample it for `duration` seconds."""
    acts: list[tuple[str, float, float, Callable[[], None]]] = [
        # name, first after, then every: seconds
        ("scrapes", 0.0, SCRAPE, soak.scrape),
        ("samples", SAMPLE, SAMPLE, soak.sample),
        ("changes of temperature", 10.0, 10.0, soak.weather),
        ("lines of the kernel log", 20.0, 60.0, soak.hear),
        ("canaryd status", 60.0, 180.0, soak.status),
        ("SIGHUP", 300.0, 600.0, soak.reload),
        ("drills", 90.0, 900.0, soak.drill),
        ("GPUs lost", 240.0, 1200.0, soak.lose),
        ("GPUs back", 320.0, 1200.0, soak.regain),
    ]
    begun = time.monotonic()
    due = {name: begun + first for name, first, _, _ in acts}
    soak.done |= dict.fromkeys(due, 0)
    while time.monotonic() < begun + duration:
        if soak.process.poll() is not None:
            soak.wrong.append(f"the daemon ended by itself with {soak.process.returncode}")
            return
        for name, _, period, act in acts:
            if time.monotonic() >= due[name]:
                try:
                    act()
                except (psutil.Error, OSError):
                    if soak.process.poll() is None:  # else it ended in mid-look, which is said above
                        raise
                soak.done[name] += 1
                due[name] = max(due[name] + period, time.monotonic())
        soak.reap()
        time.sleep(max(0.0, min(due.values()) - time.monotonic()))


# --- The report -------------------------------------------------------------------------------------------------------


class TooFewError(Exception):
    """Raised if there are too few samples to judge; the message also says what went wrong before."""


def report(soak: Soak, duration: float) -> tuple[str, dict[str, Any], bool]:
    """Return (body of the report, its data, whether all is well).

    Raises `TooFewError` if there are too few samples: the soak was short, or the daemon ended early.
    """
    warm_up = min(WARM_UP, duration / 2)
    judged_from = (soak.samples[0]["at"] if soak.samples else 0.0) + warm_up
    rows, data, good = [], {}, not soak.wrong
    for quantity in QUANTITIES:
        points = [(s["at"], s[quantity.name]) for s in soak.samples if s["at"] >= judged_from]
        points = [(at, value) for at, value in points if math.isfinite(value)]
        if len(points) < 3:
            few = f"{len(points)} samples of {quantity.name} after the first {warm_up / 60:.0f} min are too few"
            raise TooFewError("\n".join([*soak.wrong, f"{few} to judge; soak for longer"]))
        values = [value for _, value in points]
        found = slope(points)
        verdict = judged(quantity, found, max(values))
        good = good and verdict in ("holds", "not resolved")
        unit = "" if quantity.unit == "1" else f" {quantity.unit}"
        bound = "" if math.isinf(quantity.growth) else f"≤ {quantity.growth:g}{unit} an hour"
        limit = "" if math.isinf(quantity.most) else f"≤ {quantity.most:g}{unit}"
        rows.append(
            [
                quantity.name,
                f"{values[0]:.4g} → {values[-1]:.4g}{unit}",
                f"{max(values):.4g}{unit}",
                f"{found.median:+.3g} ({found.low:+.3g} to {found.high:+.3g})",
                ", ".join(filter(None, (bound, limit))) + (f": {quantity.why}" if quantity.why else ""),
                verdict if verdict == "holds" else f"**{verdict}**",
            ]
        )
        data[quantity.name] = {**dataclasses.asdict(found), "largest": max(values), "verdict": verdict}
    scrapes = sorted(soak.scrapes)
    p99 = scrapes[math.ceil(0.99 * len(scrapes)) - 1]
    runs = sum(v for name, v in soak.counters.items() if name.startswith("canaryd_probe_runs_total"))
    lost = sum(
        v
        for n, v in soak.counters.items()
        if n.startswith("canaryd_probe_runs_total") and 'outcome="completed"' not in n
    )
    acts = ", ".join(f"{count:,} {name}" for name, count in soak.done.items())
    body = (
        f"{duration / 3600:.2f} h, of which the first {warm_up / 60:.0f} min are not judged. Done to it: {acts}.\n"
        f"It counted {runs:,.0f} runs and polls, {lost:,.0f} of which did not complete, as wanted of those that hang, "
        f"crash or\nfind a GPU lost. Scrapes: median {statistics.median(scrapes):.1f} ms, "
        f"99th percentile {p99:.1f} ms, longest {scrapes[-1]:.1f} ms.\n\n"
        + common.table(["quantity", "first → last", "largest", "growth an hour (95 %)", "bound", "verdict"], rows)
        + "\nGrowth is the Theil-Sen slope with Sen's interval. A quantity holds when the whole interval is within its "
        "bound,\nand grows when none of it is.\n\n"
        + ("Went wrong: nothing.\n" if not soak.wrong else "Went wrong:\n\n")
        + "".join(f"- {sentence}\n" for sentence in soak.wrong)
    )
    kept = {"warm_up": warm_up, "quantities": data, "done": soak.done, "wrong": soak.wrong, "p99_ms": p99}
    return body, {**kept, "samples": soak.samples, "marks": soak.marks}, good


def main() -> None:
    """Run the soak and write the report; exit with 1 if something grows or went wrong."""
    parser = common.options(__doc__)
    parser.add_argument("--for", dest="duration", type=_duration, default=7200.0, help="e.g. 2h (default: 2h)")
    arguments = parser.parse_args()
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        sys.exit("no C compiler here: the stand-in for NVML cannot be built; install cc")
    facts = common.machine()
    with tempfile.TemporaryDirectory(prefix="canaryd-soak-") as name, started(Path(name)) as soak:
        watch(soak, arguments.duration)
    facts["load at end"] = f"{os.getloadavg()[0]:.2f}"
    try:
        body, data, good = report(soak, arguments.duration)
    except TooFewError as error:
        sys.exit(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    common.write(arguments.out, "soak", "Hours of a busy daemon", facts, body, data)
    sys.exit(0 if good else 1)


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
