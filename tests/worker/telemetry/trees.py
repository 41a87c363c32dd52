"""Constructed /sys and /proc trees, commands that replay captures, and what every fact of telemetry must be."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from canaryd.codec import to_json
from canaryd.facts import Reading
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Device, Run
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = ROOT / "tests/data/vendors"
GARBAGE = ("", "   ", "\0\0", "N/A", "nan", "inf", "1e3", "12 34", "0x", "1_000", "٣", "9" * 400, b"\xff\xfe\x00")
"""What a file of one number may hold instead."""


def plant(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below `root`, text as the kernel ends it; "-> target" makes a symbolic link."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return root


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def checked(facts) -> tuple[dict[str, float], dict[str, str]]:
    """Return the readings by key and the reasons by name, after checking that each fact is one of the table's."""
    readings, absent = {}, {}
    for fact in facts:
        name = fact.name.partition("{")[0]
        assert name in READINGS, f"{name} is not in the table"
        json.dumps(to_json(fact), allow_nan=False)
        if isinstance(fact, Reading):
            assert set(fact.labels) == set(READINGS[name].labels), fact
            assert all(isinstance(value, str) and value for value in fact.labels.values()), fact
            assert type(fact.value) in (int, float), fact
            assert math.isfinite(fact.value), fact
            assert READINGS[name].type == "gauge" or fact.value >= 0, fact
            assert fact.key not in readings, f"{fact.key} twice"
            readings[fact.key] = fact.value
        else:
            assert len(fact.reason) > 5, fact
            assert fact.name not in absent, f"{fact.name} twice"
            absent[fact.name] = fact.reason
    assert not set(readings) & set(absent)
    return readings, absent


def unprivileged(code: str, *arguments: str) -> str:
    """Return what code prints in a process that is not root's; what it needs is imported while it still may."""
    drop = "import os\nif os.getuid() == 0:\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    code = code.replace("# drop\n", drop)
    assert drop in code
    argv = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def run_probe(
    name: str, device: Device, settings: dict | None = None, timeout: float = 30.0, env: dict | None = None
) -> Run:
    """Run a probe of the catalogue through the real supervisor."""
    probe = importlib.import_module(f"probes.{name}")
    request = RunRequest(probe_path=Path(probe.__file__), spec=probe.SPEC, device=device, level="quick", seed=1,
                         settings=settings or {})  # fmt: skip
    with Series(WorkerSpec(env=env or {}), grace=0.5) as series:
        return series.run(request, timeout)
