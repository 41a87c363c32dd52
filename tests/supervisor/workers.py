"""Series of tests/probes, and what tests ask of their workers."""

from __future__ import annotations

import time
from pathlib import Path

from canaryd.model import Device, Run
from canaryd.probe import ProbeSpec
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.command import soon

PROBES = Path(__file__).parents[1] / "probes"
DEVICE = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")
PATIENCE = 20.0


def request(name: str, **fields) -> RunRequest:
    fields = {"probe_path": PROBES / f"{name}.py", "device": DEVICE, "level": "quick", "seed": 7} | fields
    return RunRequest(spec=ProbeSpec(name=name, summary="under test", version=3), **fields)


def run_once(name: str, timeout: float = PATIENCE, spec: WorkerSpec | None = None, grace: float = 0.5, **fields) -> Run:
    with Series(spec or WorkerSpec(), grace=grace) as series:
        return series.run(request(name, **fields), timeout)


def readings(run: Run) -> dict:
    return {reading.name: reading.value for reading in run.readings}


def pid_in(run: Run, name: str = "pid") -> int:
    return int(readings(run)[name])


def gone(pid: int, within: float = 3.0) -> bool:
    """Tell whether a process has ended (a zombie has)."""
    end = time.monotonic() + soon(within)
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
