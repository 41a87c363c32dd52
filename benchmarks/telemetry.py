"""Measure what telemetry costs: the parts of a sweep over 8 GPUs and the host, the whole daemon, and a scrape.

The GPUs are those of the tests' replacement for NVML, compiled here and read through NVIDIA's own binding. Three parts:

sweep: workers that do more and more of a sweep; the difference between two neighbours is the cost of one part.
daemon: `canaryd run` at the default period, exact probes off, measured sweep by sweep, then scraped many times.
account: the same daemon in this process, with a clock around its functions, to find the largest items of its own cost.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import http.client
import importlib.util
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import psutil

from benchmarks import common, footprint
from canaryd.config import load
from canaryd.daemon import daemon, inventory, publisher, release, rounds
from canaryd.engine import catalogue, engine, events, polling
from canaryd.judge import verdict as judge_verdict
from canaryd.metrics import families
from canaryd.model import Device, Outcome
from canaryd.probe import ProbeSpec
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from canaryd.supervisor import process as supervisor_process
from canaryd.supervisor import protocol as supervisor_protocol
from canaryd.supervisor import remote
from canaryd.supervisor import series as supervisor_series
from canaryd.supervisor.process import Worker
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.nvml_stand_in import StandIn

PERIOD = 15.0
"""Seconds between two sweeps by default."""
DAEMON_TARGET, WORKERS_TARGET = 0.5, 1.0
"""Largest average processor time in percent of one core: of the daemon itself, and of its workers."""
SCRAPE_TARGET = 20.0
"""Largest 99th percentile of a scrape's time, in milliseconds."""
SCRAPE_PAUSE = 0.12
"""Seconds between two scrapes, so that some scrapes happen during a sweep and some do not."""
BLOCK = 50
"""Number of scrapes that are kept or dropped together, depending on how much processor time others used."""
LASTING = 3.0
"""Age in seconds from which a worker counts as the log's reader, because a sweep's worker ends earlier."""
PATIENCE = 120.0
"""Maximum seconds for the daemon's inventory and first sweep."""

SPEC = """from canaryd.probe import ProbeSpec
SPEC = ProbeSpec(name="{name}", summary="part of a sweep", numeric=False)
"""
PROBE_DIRECTORY = "canaryd/probes.d"
PROBES = {
    "nothing": "def run(ctx):\n    yield from ()\n",
    "imports": "import canaryd.worker.telemetry.nvidia\ndef run(ctx):\n    yield from ()\n",
    "begins": "import canaryd.worker.telemetry.nvidia, pynvml\npynvml.nvmlInit()\ndef run(ctx):\n    yield from ()\n",
    **{
        f"reads_{vendor}": f"from canaryd.worker.telemetry.{vendor} import read\n"
        "def run(ctx):\n    for _ in read(ctx.device, ctx.settings):\n        pass\n    yield from ()\n"
        for vendor in ("nvidia", "host")
    },
}
"""Name of a probe that does a part of telemetry's work → its code after `SPEC`."""


# --- A sweep, part by part --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A worker that does a part of a sweep."""

    adds: str
    """The work that this step does in addition to that of the step before."""
    host: Path | None
    """Probe for the host; None if the step starts only an interpreter and no worker."""
    gpus: Path | None
    """Probe for the GPUs; None if the step leaves them out."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The processor time of one step, in milliseconds."""

    worker: float
    caller: float
    """Time of the thread that starts and asks the worker: the daemon's part of a sweep."""


def copy(folder: Path) -> None:
    """Make two copies of canaryd: one as pip installs it, and one as a checkout, whose workers have no byte code.

    The daemon imports the top-level modules itself, and so compiles them; a worker never writes byte code.
    """
    installed, checkout = folder / "installed", folder / "checkout"
    for tree in (installed, checkout):
        for part, place in (("canaryd", "canaryd"), ("probes", PROBE_DIRECTORY)):  # as in a wheel
            shutil.copytree(common.ROOT / part, tree / place, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(installed, quiet=1)
    compileall.compile_dir(checkout / "canaryd", maxlevels=0, quiet=1)


def steps(folder: Path, tree: Path) -> list[Step]:
    """Return the steps from an empty interpreter to the whole sweep; before the last one no reading is sent."""
    paths = {}
    for name, body in PROBES.items():
        paths[name] = folder / f"{name}.py"
        paths[name].write_text(SPEC.format(name=name) + body)
    compileall.compile_dir(folder, maxlevels=0, quiet=1)
    nothing, reads = paths["nothing"], paths["reads_nvidia"]
    return [
        Step(adds="process and interpreter", host=None, gpus=None),
        Step(adds="canaryd's imports, and one empty poll", host=nothing, gpus=None),
        Step(adds="8 empty polls more", host=nothing, gpus=nothing),
        Step(adds="canaryd's own module for NVIDIA", host=nothing, gpus=paths["imports"]),
        Step(adds="pynvml and nvmlInit", host=nothing, gpus=paths["begins"]),
        Step(adds="reading 8 GPUs", host=nothing, gpus=reads),
        Step(adds="reading the host, its module included", host=paths["reads_host"], gpus=reads),
        Step(
            adds="facts as JSON, through the pipe",
            host=tree / PROBE_DIRECTORY / "host_telemetry.py",
            gpus=tree / PROBE_DIRECTORY / "nvidia_telemetry.py",
        ),
    ]


def work(step: Step, tree: Path, host: Device, gpus: Sequence[Device]) -> Cost:
    """Do one step with the workers of the copy `tree`; return its cost. Exits the program if a poll fails."""
    todo = [(step.host, host), *((step.gpus, gpu) for gpu in gpus)]
    before, began = _children(), time.thread_time()
    if step.host is None:
        subprocess.run([sys.executable, "-c", "pass"], check=True, stdin=subprocess.DEVNULL)
    else:
        with patch.object(remote, "PACKAGE", tree / "canaryd"), Series(WorkerSpec()) as series:
            for path, device in todo:
                if path is None:
                    continue
                spec = ProbeSpec(name=path.stem, summary="part of a sweep", numeric=False)
                run = series.run(
                    RunRequest(probe_path=path, spec=spec, device=device, level="quick", seed=0), timeout=30.0
                )
                if run.outcome is not Outcome.COMPLETED:
                    raise SystemExit(f"{path.stem} on {device.name}: {run.outcome.value}: {run.detail}")
    return Cost(worker=1e3 * (_children() - before), caller=1e3 * (time.thread_time() - began))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def against(self, target: float, disturbed: str) -> str:
        """Return "reached" if the whole interval is at or below `target`, "missed" if above, else "not resolved"."""
        if disturbed:
            return f"not resolved (≤ {target:g})"
        word = "reached" if self.high <= target else "missed" if self.low > target else "not resolved"
        return f"{word} (≤ {target:g})"

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def median(values: Sequence[float]) -> Estimate:
    """Return the median of values with its interval."""
    low, high = common.interval(values)
    return Estimate(value=statistics.median(values), low=low, high=high)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of values with its interval, for averages over time."""
    low, high = common.interval(values, statistics.fmean)
    return Estimate(value=statistics.fmean(values), low=low, high=high)


def sweep(folder: Path, rounds: int) -> tuple[str, dict[str, Any]]:
    """Measure the parts of a sweep over `rounds` rounds; return a report and its data."""
    installed, checkout = folder / "installed", folder / "checkout"
    with Series(WorkerSpec()) as series:
        listing = series.inventory({"host": {}, "nvidia": {}})
    if set(listing.devices) != {"host", "nvidia"}:
        raise SystemExit(f"the inventory failed: {dict(listing.unavailable)}")
    gpus = listing.devices["nvidia"]
    host = next(d for d in listing.devices["host"] if d.backend == "cpu") if listing.devices["host"] else HOST
    ladder = steps(folder, installed)
    whole = ladder[-1]
    bare = replace(
        whole,
        host=checkout / PROBE_DIRECTORY / "host_telemetry.py",
        gpus=checkout / PROBE_DIRECTORY / "nvidia_telemetry.py",
    )
    work(whole, installed, host, gpus)  # the first one reads everything from the disk
    work(bare, checkout, host, gpus)

    def measure() -> tuple[list[Cost], Cost]:
        return [work(step, installed, host, gpus) for step in ladder], work(bare, checkout, host, gpus)

    had, disturbed = common.undisturbed(measure, rounds)
    found, without = [costs for costs, _ in had], [cost for _, cost in had]
    parts = [median([costs[0].worker for costs in found])]
    parts += [median([costs[n].worker - costs[n - 1].worker for costs in found]) for n in range(1, len(ladder))]
    total = median([costs[-1].worker for costs in found])
    caller = median([costs[-1].caller for costs in found])
    slow = median([cost.worker for cost in without])
    extra = median([cost.worker - costs[-1].worker for cost, costs in zip(without, found, strict=True)])
    limit = WORKERS_TARGET / 100 * PERIOD * 1e3
    body = "## One sweep of 8 GPUs and the host\n\n" + common.table(
        ["part", "processor time in ms", "share"],
        [
            *[
                [step.adds, part, f"{100 * part.value / total.value:.0f} %"]
                for step, part in zip(ladder, parts, strict=True)
            ],
            ["**the whole worker**, installed", total, total.against(limit, disturbed)],
            ["the same in a checkout without byte code", slow, slow.against(limit, disturbed)],
            ["that is more by", extra, ""],
            ["the caller's side: start, questions, answers", caller, ""],
        ],
    )
    body += (
        f"\nMedians of {len(had)} rounds with 95 % intervals; each round does every step once, a part is the\n"
        f"difference of two steps of one round. The limit is {WORKERS_TARGET:g} % of one core every {PERIOD:g} s, "
        f"{limit:g} ms.\nUsers have the first: pip compiles what it installs. "
        f"A worker never writes byte code, so in a checkout it\ncompiles its modules each time unless something else "
        f"has.\n{_told(disturbed)}\n"
    )
    data = {
        "disturbed": disturbed,
        "parts": {step.adds: vars(part) for step, part in zip(ladder, parts, strict=True)},
        "whole": vars(total),
        "without_byte_code": vars(slow),
        "caller": vars(caller),
        "worker_ms": [[cost.worker for cost in costs] for costs in found],
        "worker_ms_without_byte_code": [cost.worker for cost in without],
    }
    return body, data


HOST = Device(uuid="HOST", backend="cpu", index=0, model="host")
"""Device that stands for the host if its module lists no device: the module reads the machine, whatever the device."""


def _told(disturbed: str) -> str:
    """Return a sentence that says whether other processes disturbed the measurement (`disturbed`: a warning or "")."""
    return f"**The machine was {disturbed}: repeat.**\n" if disturbed else QUIET


QUIET = f"Others used less than {100 * common.DISTURBED:g} % of the machine's processor time during each.\n"


# --- The daemon -------------------------------------------------------------------------------------------------------


def configure(folder: Path, period: float) -> Path:
    """Write a configuration without exact probes, with an interpreter without torch for workers; return its path."""
    venv.create(folder / "bare", with_pip=False, symlinks=True)
    probes = [path.stem for path in (folder / "installed" / PROBE_DIRECTORY).glob("*.py")]
    off = [f"  {name}: {{enabled: false}}" for name in probes if not name.endswith("_telemetry")]
    on = [f'  {name}: {{period: "{period:g}s"}}' for name in probes if name.endswith("_telemetry")]
    lines = [f'worker: {{python: "{folder / "bare" / "bin" / "python"}"}}', "probes:", *off]
    path = folder / "canaryd.yaml"
    path.write_text("\n".join(lines + (on if period != PERIOD else [])) + "\n")
    return path


@dataclass
class Scraper:
    """A client that scrapes as Prometheus does, over one connection that it keeps."""

    address: str
    milliseconds: list[float] = field(default_factory=list)
    page: str = ""

    def __post_init__(self) -> None:
        """Prepare the connection; the first scrape opens it."""
        where = urlsplit(self.address)
        self._connection = http.client.HTTPConnection(where.netloc, timeout=10)

    def scrape(self) -> None:
        """Read the page once and record the time."""
        begun = time.perf_counter()
        self._connection.request("GET", "/metrics")
        self.page = self._connection.getresponse().read().decode()
        self.milliseconds.append(1e3 * (time.perf_counter() - begun))

    @property
    def series(self) -> int:
        """Number of series on the newest page."""
        return sum(bool(line) and not line.startswith("#") for line in self.page.splitlines())

    @property
    def polls(self) -> int:
        """Number of completed polls of GPUs on the newest page."""
        wanted = ("canaryd_probe_runs_total{", 'probe="nvidia_telemetry"', 'outcome="completed"')
        lines = [line for line in self.page.splitlines() if all(part in line for part in wanted)]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def wait_for_first_sweep(process: psutil.Process, address: str) -> list[psutil.Process]:
    """Wait until 8 GPUs have been polled and no sweep's worker runs; return the log's reader as [process], or []."""
    started = time.monotonic()
    while time.monotonic() - started < PATIENCE:
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid, msg="it ended")
        scraper = Scraper(address)
        with contextlib.suppress(OSError, http.client.HTTPException):
            scraper.scrape()
        workers = process.children()
        if scraper.polls >= 8 and all(time.time() - worker.create_time() > LASTING for worker in workers):
            return workers
        time.sleep(0.5)
    raise TimeoutError(f"8 GPUs were not polled within {PATIENCE:g} s")


def wait_for_sweep(process: psutil.Process, lasting: int, patience: float) -> None:
    """Wait until the worker of the next sweep has started and ended; `lasting`: number of workers that stay."""
    deadline, busy = time.monotonic() + patience, False
    while time.monotonic() < deadline:
        count = len(process.children())
        if busy and count <= lasting:
            return
        busy = busy or count > lasting
        time.sleep(0.02)
    raise TimeoutError(f"no sweep began and ended within {patience:g} s")


def serve(folder: Path, sweeps: int, scrapes: int, period: float) -> tuple[str, dict[str, Any]]:
    """Measure a real daemon over `sweeps` sweeps, then scrape it `scrapes` times; return a report and its data."""
    with patch.object(common, "ROOT", folder / "installed"), footprint.daemon(folder / "canaryd.yaml") as started:
        process, address = started
        readers = wait_for_first_sweep(process, address)
        ours = [process, *readers]
        calm, busy = Scraper(address), Scraper(address)

        def one_sweep() -> list[float]:
            before = _mark(process, readers)
            calm.scrape()
            wait_for_sweep(process, len(readers), 3 * period + 30)
            return [after - earlier for after, earlier in zip(_mark(process, readers), before, strict=True)]

        def many_scrapes() -> tuple[list[float], list[float]]:
            before, first = _mark(process, readers), len(busy.milliseconds)
            for _ in range(block):
                busy.scrape()
                time.sleep(SCRAPE_PAUSE)
            spent = [after - earlier for after, earlier in zip(_mark(process, readers), before, strict=True)]
            return busy.milliseconds[first:], spent

        wait_for_sweep(process, len(readers), 3 * period + 30)
        watched, disturbed = common.undisturbed(one_sweep, sweeps, ours)
        block = min(BLOCK, scrapes)
        blocks, scrapes_disturbed = common.undisturbed(many_scrapes, scrapes // block, ours)
        named = {"daemon": process, **{f"reader of the kernel log, {reader.pid}": reader for reader in readers}}
        held = {name: footprint.memory(one.pid) for name, one in named.items()}
    shares = [mean([100 * one[n] / one[0] for one in watched]) for n in (1, 2, 3)]
    milliseconds = [one for block_of, _ in blocks for one in block_of]
    extra = [used[1] - shares[0].value / 100 * used[0] for _, used in blocks]
    per_scrape = mean([1e3 * each / len(of) for each, (of, _) in zip(extra, blocks, strict=True)])
    cuts = statistics.quantiles(milliseconds, n=100, method="inclusive")
    verdict = "not resolved" if scrapes_disturbed else "reached" if cuts[98] <= SCRAPE_TARGET else "missed"
    body = f"## The daemon, a sweep every {period:g} s\n\n" + common.table(
        ["processor, in percent of one core", "mean", "target"],
        [
            ["the daemon itself", shares[0], shares[0].against(DAEMON_TARGET, disturbed)],
            ["its telemetry workers", shares[1], shares[1].against(WORKERS_TARGET, disturbed)],
            ["the reader of the kernel log", shares[2] if readers else "none: the log cannot be read here", ""],
        ],
    )
    body += (
        f"\nMeans over {len(watched)} sweeps ({sum(one[0] for one in watched):.0f} s), each from the end of one to the "
        "end of the next, with one scrape in each,\nand 95 % intervals. Exact probes are off; `worker.python` has no "
        "torch.\n"
        f"{_told(disturbed)}"
    )
    body += "\n" + common.table(
        ["memory in MiB", *held["daemon"]],
        [[name, *(f"{size:.1f}" for size in sizes.values())] for name, sizes in held.items()],
    )
    body += "\n" + common.table(
        [f"{len(milliseconds)} scrapes, {SCRAPE_PAUSE:g} s apart, sweeps among them", "figure", "target"],
        [
            ["median", f"{cuts[49]:.2f} ms", ""],
            ["99th percentile", f"{cuts[98]:.2f} ms", f"{verdict} (≤ {SCRAPE_TARGET:g})"],
            ["longest", f"{max(milliseconds):.2f} ms", ""],
            ["processor time of the daemon for one", f"{per_scrape} ms", ""],
            ["series", f"{busy.series:,}", ""],
            ["bytes", f"{len(busy.page.encode()):,}", ""],
        ],
    )
    body += f"\n{_told(scrapes_disturbed)}\n"
    names = ("daemon", "workers", "reader")
    data = {
        "percent": {name: vars(share) for name, share in zip(names, shares, strict=True)},
        "sweeps": [dict(zip(("seconds", *names), one, strict=True)) for one in watched],
        "disturbed": disturbed,
        "scrapes_disturbed": scrapes_disturbed,
        "memory": held,
        "scrapes_ms": milliseconds,
        "scrape_cpu_ms": vars(per_scrape),
        "series": busy.series,
        "bytes": len(busy.page.encode()),
    }
    return body, data


def _mark(process: psutil.Process, readers: Sequence[psutil.Process]) -> tuple[float, float, float, float]:
    """Return (monotonic time, processor seconds so far of the daemon, of its ended workers, of the log's readers)."""
    own = process.cpu_times()
    reading = [reader.cpu_times() for reader in readers]
    return (
        time.monotonic(),
        own.user + own.system,
        own.children_user + own.children_system,
        sum(times.user + times.system for times in reading),
    )


# --- The account of the daemon's own cost -----------------------------------------------------------------------------

ITEMS: Sequence[tuple[str, Any, str]] = (
    ("starting a process", supervisor_process, "_spawn"),
    ("ending a worker", supervisor_series.Series, "close"),
    ("waiting for answers, and reading the pipe", Worker, "receive"),
    ("lines of the protocol, JSON", Worker, "_take"),
    ("facts from JSON data, checked", supervisor_protocol, "from_json"),
    ("questions and the run around them", supervisor_series.Series, "run"),
    ("comparing a poll with the one before", polling, "changes"),
    ("what of a poll is worth keeping", polling, "judged_values"),
    ("store: polls", Store, "add_poll"),
    ("store: verdicts", Store, "set_verdict"),
    ("store: verdicts, reading", Store, "verdicts"),
    ("store: counters, reading", Store, "counters"),
    ("store: runs, reading", Store, "runs"),
    ("store: notes, reading", Store, "note"),
    ("store: events, reading", events.EventHistory, "recall"),
    ("judging", judge_verdict, "decide"),
    ("evidence for the judge", engine.Engine, "decide"),
    ("the page: views of the devices", publisher.Publisher, "_publish"),
    ("the page: rendering", families, "render"),
    ("the sweep around its polls", inventory.Inventories, "sweep"),
    ("the refresh around its parts", daemon.Daemon, "_refresh"),
    ("asking each device's queue what is due", rounds.Rounds, "tick"),
    ("looking for a release", release.Releases, "check"),
)
"""Functions around which a clock is put: (item, module or class, name of the function). The time of a function
excludes that of other such functions which it calls."""


class Account:
    """The processor seconds of this process, by item and thread."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], float] = defaultdict(float)
        self.calls: dict[tuple[int, str], int] = defaultdict(int)
        self._local = threading.local()

    def clock(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with a clock around it, which stops while another function with a clock runs inside."""

        def timed(*arguments: Any, **named: Any) -> Any:
            stack: list[float] = self._local.__dict__.setdefault("stack", [])
            stack.append(0.0)
            begun = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                spent = time.thread_time() - begun
                key = (threading.get_ident(), name)
                self.seconds[key] += spent - stack.pop()
                self.calls[key] += 1
                if stack:
                    stack[-1] += spent

        return timed

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Put a clock around every item of `ITEMS` within this context."""
        with contextlib.ExitStack() as patches:
            for name, place, attribute in ITEMS:
                patches.enter_context(patch.object(place, attribute, self.clock(name, getattr(place, attribute))))
            yield

    def snapshot(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return (item → seconds so far, item → calls). A thread's time outside of all clocks has the thread's name."""
        seconds: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        known: dict[int, float] = defaultdict(float)
        for (thread, name), spent in list(self.seconds.items()):
            seconds[name] += spent
            known[thread] += spent
            calls[name] += self.calls[thread, name]
        for running in threading.enumerate():
            if running.ident is not None and running is not threading.current_thread():
                whole = time.clock_gettime(time.pthread_getcpuclockid(running.ident))
                seconds[f"thread {_kind(running.name)}, the rest"] += whole - known[running.ident]
        seconds["all"] = time.process_time() - time.thread_time()
        return dict(seconds), dict(calls)


def _kind(name: str) -> str:
    return "of a pool" if name.startswith("ThreadPoolExecutor") else name


def account(folder: Path, settled: float, duration: float) -> tuple[str, dict[str, Any]]:
    """Run the daemon in this process; measure `duration` seconds after the first `settled`; return report and data."""
    settings = replace(load.load(folder / "canaryd.yaml"), listen=("127.0.0.1", 0), state_dir=folder / "account")
    store = Store.open(
        settings.state_dir,
        max_bytes=settings.store.max_size,
        keep=Retention(successes=settings.store.keep_successes, failures=settings.store.keep_failures),
    )
    books = Account()
    marks: list[tuple[float, dict[str, float], dict[str, int]]] = []

    def clerk() -> None:
        for pause in (settled, duration):
            time.sleep(pause)
            marks.append((time.monotonic(), *books.snapshot()))
        os.kill(os.getpid(), signal.SIGTERM)

    # What this process has loaded is none of the daemon's: it must not pay for looking through it.
    gc.collect()
    gc.freeze()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with (
        common.Bystanders() as others,
        books.around(),
        patch.object(remote, "PACKAGE", folder / "installed" / "canaryd"),
        patch.object(catalogue, "builtin_directory", lambda: folder / "installed" / PROBE_DIRECTORY),
    ):
        threading.Thread(target=clerk, name="clerk", daemon=True).start()
        daemon.Daemon(settings, None, store).run()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.unfreeze()
    (began, first, calls_then), (ended, last, calls_now) = marks
    spent = ended - began
    seconds = {name: last[name] - first.get(name, 0.0) for name in last}
    calls = {name: calls_now[name] - calls_then.get(name, 0) for name in calls_now}
    total = seconds.pop("all")
    sweeps = calls.get("the sweep around its polls", 0)
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    body = "## Where the daemon's own time goes\n\n" + common.table(
        ["item", "ms per minute", "share", "calls per minute", "ms per call"],
        [
            [
                name,
                f"{6e4 * used / spent:.1f}",
                f"{100 * used / total:.0f} %",
                f"{60 * calls[name] / spent:.0f}" if name in calls else "",
                f"{1e3 * used / calls[name]:.3f}" if calls.get(name) else "",
            ]
            for name, used in rows
            if used >= 0.005 * total
        ],
    )
    body += (
        f"\n{spent:.0f} s, {sweeps} sweeps, no scrape: {100 * total / spent:.2f} % of one core, the clocks' own cost "
        f"included.\nAn item is charged for what no other item within it is; below 0.5 % it is left out.\n"
        f"Others used {100 * others.share:.1f} % of the machine's processor time meanwhile"
        f"{': **disturbed, repeat**' if others.share >= common.DISTURBED else ''}.\n\n"
    )
    return body, {
        "seconds": spent,
        "sweeps": sweeps,
        "total": total,
        "items": dict(rows),
        "calls": calls,
        "bystanders": others.share,
    }


# --- Everything -------------------------------------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    parser = common.options(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the steps (default: %(default)d)")
    parser.add_argument("--sweeps", type=int, default=12, help="sweeps of the daemon (default: %(default)d)")
    parser.add_argument("--scrapes", type=int, default=500, help="scrapes of the daemon (default: %(default)d)")
    parser.add_argument("--period", type=float, default=PERIOD, help="seconds between sweeps (default: %(default)g)")
    parser.add_argument("--settled", type=float, default=40.0, help="seconds before the account (default: %(default)g)")
    parser.add_argument("--account", type=float, default=120.0, help="seconds of the account (default: %(default)g)")
    return parser.parse_args()


def main() -> None:
    """Measure the three parts and write the report."""
    arguments = _options()
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        sys.exit("no C compiler here: the stand-in for NVML cannot be built; install cc")
    if importlib.util.find_spec("pynvml") is None:
        sys.exit("no pynvml in this interpreter; install nvidia-ml-py")
    facts = common.machine()
    with tempfile.TemporaryDirectory(prefix="canaryd-") as name:
        folder = Path(name)
        os.environ.update(StandIn(folder).environment)
        copy(folder)
        configure(folder, arguments.period)
        measured = {
            "sweep": sweep(folder, arguments.rounds),
            "daemon": serve(folder, arguments.sweeps, arguments.scrapes, arguments.period),
            "account": account(folder, arguments.settled, arguments.account),
        }
    body = "".join(text for text, _ in measured.values())
    common.write(
        arguments.out, "telemetry", "What telemetry costs", facts, body, {part: d for part, (_, d) in measured.items()}
    )


if __name__ == "__main__":
    main()
