"""The worker that lists probes and devices."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from canaryd.probe import ProbeSpec
from canaryd.supervisor import series as supervisor_series
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series
from tests.command import soon
from tests.supervisor.workers import PROBES

# --- describe --------------------------------------------------------------------------------------------------------


def test_describe_tells_specs_and_what_is_wrong(series):
    """A broken probe hurts only itself."""
    names = ("passes", "raises_at_import", "exits_at_import", "bad_spec", "bad_name", "no_run", "wrong_name")
    described = series.describe([PROBES / f"{name}.py" for name in names])
    found = {path.stem: value for path, value in described.probes.items()}
    assert found["passes"] == ProbeSpec(name="passes", summary="A well-behaved probe", numeric=False)
    assert found["raises_at_import"] == "ImportError: no module named unobtainium"
    assert found["exits_at_import"] == "SystemExit: not today"
    assert "SPEC is dict" in str(found["bad_spec"])
    assert "snake case" in str(found["bad_name"])
    assert "no function run" in str(found["no_run"])
    assert isinstance(found["wrong_name"], ProbeSpec)


def test_describe_survives_probes_that_crash_or_hang(bare_python):
    """The culprit is named; those before and after it are described."""
    names = ("passes", "crashes_at_import", "skips", "hangs_at_import", "raises")
    with Series(WorkerSpec(python=bare_python), grace=0.5) as series:
        described = series.describe([PROBES / f"{name}.py" for name in names], timeout=soon(2.5))
    found = {path.stem: value for path, value in described.probes.items()}
    assert isinstance(found["passes"], ProbeSpec)
    assert isinstance(found["skips"], ProbeSpec)
    assert isinstance(found["raises"], ProbeSpec)
    assert "SIGSEGV" in str(found["crashes_at_import"])
    assert "did not answer before its deadline" in str(found["hangs_at_import"])


HANGS = "import time\nwhile True:\n    time.sleep(1)\n"
ABORTS = """import ctypes
import os
import sys
print("loading libraries", *range(100), sep="\\n", flush=True)
print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
print("  what():  std::bad_alloc", file=sys.stderr, flush=True)
os.abort()
"""


def interpreter(python: str, directory: Path, torch: str) -> WorkerSpec:
    """Return an interpreter whose torch is this text."""
    (directory / "torch.py").write_text(torch)
    return WorkerSpec(python=python, env={"PYTHONPATH": str(directory)})


@pytest.mark.parametrize(("torch", "words"), [(HANGS, "before its deadline"), (ABORTS, "SIGABRT; terminate called")])
def test_a_torch_that_hangs_or_aborts_is_one_cause(bare_python, tmp_path, torch, words):
    """It is asked once, in its own time; what needs no torch is described, and the cause is one line."""
    matmul = PROBES.parents[1] / "probes/exact_matmul.py"
    bare = tmp_path / "probes"
    bare.mkdir()
    (bare / "imports_torch.py").write_text("import torch\n")
    told: list[str] = []
    with Series(interpreter(bare_python, tmp_path, torch), grace=0.5) as series:
        begun = time.monotonic()
        paths = [matmul, PROBES / "passes.py", bare / "imports_torch.py"]
        described = series.describe(paths, timeout=60.0, import_timeout=soon(3.0), on_wait=told.append)
        assert time.monotonic() - begun < soon(30.0)
        assert series.workers_started == 2
    assert described.lost == f"torch of worker.python ({bare_python}) does not import"
    reason = described.torch_reason
    assert reason.startswith(f"{described.lost}: the worker ")
    assert words in reason
    assert "torch.py" in reason
    assert len(reason.splitlines()) == 1
    assert len(reason) < 1000
    assert [path.stem for path in described.probes] == ["passes"]
    assert described.torch is None
    assert [d.backend for d in described.devices] == ["cpu"]


def test_a_long_import_is_told_live_and_waited_for(bare_python, tmp_path, monkeypatch):
    """A slow disk is no fault: one line says what is waited for, with the interpreter's name."""
    monkeypatch.setattr(supervisor_series, "PATIENCE", 0.5)
    told: list[str] = []
    slow = "import time\ntime.sleep(2)\nraise ImportError('slow')\n"
    with Series(interpreter(bare_python, tmp_path, slow)) as series:
        described = series.describe([PROBES / "passes.py"], on_wait=told.append)
    assert told == [f"waiting for torch of worker.python ({bare_python}) to import, for at most 120 s"]
    assert described.lost == ""
    assert isinstance(described.probes[PROBES / "passes.py"], ProbeSpec)


def test_another_runtime_that_hangs_is_told_live(bare_python, tmp_path, monkeypatch):
    """As with torch: before the time limit ends it, one line says what is waited for."""
    monkeypatch.setattr(supervisor_series, "PATIENCE", 0.5)
    told: list[str] = []
    (tmp_path / "wgpu.py").write_text("import time\ntime.sleep(100)\n")
    with Series(WorkerSpec(python=bare_python, env={"PYTHONPATH": str(tmp_path)}), grace=0.5) as series:
        reach = series.reach("webgpu", timeout=3.0, on_wait=told.append)
    where = f"worker.python ({bare_python})"
    assert told == [f"waiting for webgpu of {where} to import and to list its devices, for at most 3 s"]
    assert reach.devices == ()
    assert "before its deadline" in reach.problem


@pytest.mark.torch
def test_describe_lists_the_devices():
    """The host's processors are always among them."""
    pytest.importorskip("canaryd.worker.numeric.stack")
    with Series(WorkerSpec()) as series:
        described = series.describe([])
    assert "cpu:0" in {device.name for device in described.devices}
    assert described.torch or described.torch_reason


def test_describe_without_torch_says_why(bare_python):
    """No torch is a reason, never a failure."""
    with Series(WorkerSpec(python=bare_python)) as series:
        described = series.describe([])
    assert described.torch is None
    assert described.torch_reason
