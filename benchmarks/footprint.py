"""Measure what the daemon uses at rest: memory, threads, open files, processor time; and what each dependency adds.

Starts `canaryd run` with its own state directory, waits until the workers of the first round have ended, and watches
the daemon, with a scrape every 15 seconds as from Prometheus. No file of torch or of a vendor's library can be mapped
into the daemon. `--beside DIR` names a checkout of another version, whose daemon is measured next.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common

MEMORY_TARGET = 60.0
"""Largest resident memory in MiB."""
PROCESSOR_TARGET = 0.5
"""Largest processor time in percent of one core."""
SCRAPE_PERIOD = 15.0
"""Seconds between two scrapes."""
FOREIGN = re.compile(r"torch|libcuda|nvidia-ml|amdsmi|librocm|libhsa|numpy", re.IGNORECASE)
"""Pattern for names of files that must never be mapped into the daemon."""
DEPENDENCIES = {
    "prometheus-client": "prometheus_client",
    "APScheduler": "apscheduler.schedulers.background",
    "PyYAML": "yaml",
}
"""Distribution → its module that the daemon imports."""


@contextlib.contextmanager
def daemon(
    config: Path | None, record: Path | None = None, tree: Path = common.ROOT
) -> Iterator[tuple[psutil.Process, str]]:
    """Run a daemon within this context; yield (its process, address of its metrics page). SIGTERM ends the daemon.

    `record`: the state directory to use (default: an empty one). `tree`: the checkout to run.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="canaryd-") as empty:
        state = record or Path(empty)
        words = ["--listen", address, "--state-dir", str(state), *(["--config", str(config)] if config else [])]
        log = state / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "canaryd", "run", *words],
                cwd=tree,
                env=os.environ | common.UNIT | {"PYTHONPATH": str(tree)},
                stdout=file,
                stderr=file,
            )
        try:
            yield psutil.Process(process.pid), f"http://{address}/metrics"
        except (psutil.NoSuchProcess, OSError, TimeoutError) as error:
            raise SystemExit(f"canaryd run: {error}; its last words:\n{log.read_text()[-2000:]}") from error
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_answer(process: psutil.Process, metrics: str) -> float:
    """Wait until the daemon answers a scrape; return the seconds since the start of its process."""
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(metrics, timeout=10) as answer:  # noqa: S310  ours
            answer.read()
            return time.time() - process.create_time()
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid, msg="it ended")
        time.sleep(0.005)


def wait_for_rest(process: psutil.Process, quiet: float, patience: float) -> float:
    """Wait until the daemon has had workers, and then none for `quiet` seconds; return the seconds until then.

    Raises `TimeoutError` after `patience` seconds.
    """
    started = time.monotonic()
    busy = None
    while busy is None or time.monotonic() - busy < quiet:
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid, msg="it ended")
        if passing(process):
            busy = time.monotonic()
        if time.monotonic() - started > patience:
            state = "never started a worker" if busy is None else "still has workers"
            raise TimeoutError(f"it {state} after {patience:g} s")
        time.sleep(0.05)
    return time.monotonic() - started - quiet


def passing(process: psutil.Process) -> list[psutil.Process]:
    """Return the daemon's workers, except the reader of the kernel log, which never ends."""
    return [child for child in process.children() if not reads_log(child.pid)]


def reads_log(pid: int) -> bool:
    """Return whether a process has the kernel log open."""
    with contextlib.suppress(OSError):
        return any(fd.readlink() == Path("/dev/kmsg") for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def memory(pid: int | str) -> dict[str, float]:
    """Return a process's resident, proportional, private and anonymous memory in MiB, by name."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(size) / 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {
        "resident": sizes["Rss"],
        "proportional": sizes["Pss"],
        "private": sizes["Private_Clean"] + sizes["Private_Dirty"],
        "anonymous": sizes["Anonymous"],
    }


def rest(process: psutil.Process, metrics: str, duration: float) -> dict[str, float]:
    """Watch the daemon for `duration` seconds; return by name: percent of one core, figures of scrapes and workers."""
    before, started = process.cpu_times(), time.monotonic()
    scrapes: list[float] = []
    size = workers = 0
    while time.monotonic() - started < duration:
        if len(scrapes) * SCRAPE_PERIOD <= time.monotonic() - started:
            begun = time.perf_counter()
            with urllib.request.urlopen(metrics, timeout=10) as answer:  # noqa: S310  an address of our own making
                size = len(answer.read())
            scrapes.append(time.perf_counter() - begun)
        workers = max(workers, len(passing(process)))
        time.sleep(min(1.0, duration / 4))
    after, spent = process.cpu_times(), time.monotonic() - started
    used = after.user + after.system - before.user - before.system
    return {
        "processor percent": 100 * used / spent,
        "seconds": spent,
        "scrapes": len(scrapes),
        "longest scrape in ms": 1e3 * max(scrapes),
        "bytes per scrape": size,
        "workers meanwhile": workers,
    }


def weigh(modules: list[str]) -> float:
    """Return the resident memory in MiB of a fresh interpreter that has imported `modules`."""
    code = "import sys, importlib; [importlib.import_module(m) for m in sys.argv[1:]];"
    code += "print(open('/proc/self/smaps_rollup').read())"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    match = re.search(r"^Rss:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    assert match is not None
    return int(match.group(1)) / 1024


def observed(arguments: argparse.Namespace, tree: Path) -> dict[str, Any]:
    """Run the daemon of a checkout until it rests, watch it, and return the measurements by name."""
    with daemon(arguments.config, tree=tree) as (process, metrics):
        answered = wait_for_answer(process, metrics)
        round_took = wait_for_rest(process, arguments.quiet, arguments.patience)
        watched = rest(process, metrics, arguments.seconds)
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        mapped = {line.split()[-1] for line in maps if "/" in line}
        return {
            "memory": memory(process.pid),
            "counts": {"threads": process.num_threads(), "open files": process.num_fds()},
            "rest": watched,
            "foreign": sorted(name for name in mapped if FOREIGN.search(name)),
            "first_answer_seconds": answered,
            "first_round_seconds": round_took,
        }


def main() -> None:
    """Measure and write the report; exit with 1 if a foreign file is mapped into the daemon."""
    parser = common.options(__doc__)
    parser.add_argument("--config", type=Path, help="configuration of the daemon (default: none)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch it (default: %(default)g)")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds without workers that end the first round")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds that the first round may take")
    parser.add_argument("--beside", type=Path, help="checkout of another version, watched next")
    arguments = parser.parse_args()
    facts = common.machine()
    found = observed(arguments, common.ROOT)
    held, watched, foreign = found["memory"], found["rest"], found["foreign"]
    others = [observed(arguments, arguments.beside.resolve())] if arguments.beside else []
    bare = weigh([])
    whole = weigh(list(DEPENDENCIES.values()))
    alone = {name: weigh([module]) - bare for name, module in DEPENDENCIES.items()}
    on_top = {name: whole - weigh([m for m in DEPENDENCIES.values() if m != own]) for name, own in DEPENDENCIES.items()}
    processor = watched["processor percent"]
    body = common.table(
        ["at rest", "figure", "target", *([arguments.beside.name] if others else [])],
        [
            *[
                [
                    f"{name} memory",
                    f"{size:.1f} MiB",
                    _judge(size, MEMORY_TARGET) if name == "resident" else "",
                    *(f"{other['memory'][name]:.1f} MiB" for other in others),
                ]
                for name, size in held.items()
            ],
            [
                "processor",
                f"{processor:.2f} %",
                _judge(processor, PROCESSOR_TARGET),
                *(f"{other['rest']['processor percent']:.2f} %" for other in others),
            ],
            *[
                [name, count, "", *(other["counts"][name] for other in others)]
                for name, count in found["counts"].items()
            ],
            [
                "first answer after",
                f"{found['first_answer_seconds']:.2f} s",
                "",
                *(f"{other['first_answer_seconds']:.2f} s" for other in others),
            ],
            [
                "torch, numpy or vendor libraries mapped",
                ", ".join(foreign) or "none",
                "missed" if foreign else "reached",
                *(", ".join(other["foreign"]) or "none" for other in others),
            ],
        ],
    )
    body += (
        f"\nThe first round took {found['first_round_seconds']:.0f} s; then watched for {watched['seconds']:.0f} s "
        f"with {watched['scrapes']} scrapes of {watched['bytes per scrape']:,} bytes\n(the longest took "
        f"{watched['longest scrape in ms']:.1f} ms); {watched['workers meanwhile']} workers ran meanwhile.\n\n"
    )
    # They share much of the standard library: what one adds depends on whether the others are there.
    body += common.table(
        ["dependency", "adds alone", "adds to the others"],
        [
            *[[name, f"{alone[name]:.1f} MiB", f"{on_top[name]:.1f} MiB"] for name in DEPENDENCIES],
            [f"all, to an interpreter of {bare:.1f} MiB", f"{whole - bare:.1f} MiB", ""],
        ],
    )
    dependencies = {"bare": bare, "whole": whole, "alone": alone, "on_top": on_top}
    write = {**found, "dependencies": dependencies, "beside": others}
    name = "footprint-beside" if others else "footprint"
    common.write(arguments.out, name, "The daemon at rest", facts, body, write)
    sys.exit(1 if foreign else 0)


def _judge(value: float, target: float) -> str:
    return f"{'reached' if value <= target else 'missed'} (≤ {target:g})"


if __name__ == "__main__":
    main()
