"""What the tests of the vendors' telemetry share: trees, commands that replay captures, and the rules of every fact."""

from __future__ import annotations

import importlib.util
import math
import shlex
from pathlib import Path

from canaryd.facts import Reading
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Device, Run
from canaryd.probe import Absent
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = ROOT / "tests/data/vendors"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below `root`; "-> target" makes a symbolic link."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text.removeprefix("-> "))
        else:
            path.write_text(text)
    return root


def command(path: Path, answers: dict[str, Path | str], log: Path | None = None) -> str:
    """Write a command that answers to its arguments with a file, or with a line of shell; anything else fails."""
    lines = ["#!/bin/sh", f'echo "$*" >> {shlex.quote(str(log))}' if log else ":", 'case "$*" in']
    for arguments, answer in answers.items():
        action = f"cat {shlex.quote(str(answer))}" if isinstance(answer, Path) else answer
        lines.append(f"{shlex.quote(arguments)}) {action};;")
    lines += ['*) echo "This device does not support $*." >&2; exit 1;;', "esac"]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def checked(facts) -> tuple[dict[str, float], dict[str, str]]:
    """Return readings by key and absences by name, after holding each against READINGS."""
    readings: dict[str, float] = {}
    absent: dict[str, str] = {}
    for fact in facts:
        name = fact.name.partition("{")[0]
        kind = READINGS[name]
        if isinstance(fact, Reading):
            assert set(fact.labels) == set(kind.labels), fact
            assert all(isinstance(value, str) and value for value in fact.labels.values()), fact
            assert isinstance(fact.value, (int, float)), fact
            assert math.isfinite(fact.value), fact
            assert kind.type == "gauge" or fact.value >= 0, fact
            assert fact.key not in readings, fact
            readings[fact.key] = fact.value
        else:
            assert isinstance(fact, Absent)
            assert fact.reason, fact
            assert fact.name not in absent, fact
            absent[fact.name] = fact.reason
    assert not set(readings) & set(absent)
    return readings, absent


def run_probe(name: str, device: Device, settings: dict | None = None) -> Run:
    """Run a probe of the catalogue through the real supervisor."""
    path = ROOT / "probes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"vendor_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with Series(WorkerSpec()) as series:
        request = RunRequest(
            probe_path=path, spec=module.SPEC, device=device, level="quick", seed=1, settings=settings or {}
        )
        return series.run(request, 30.0)
