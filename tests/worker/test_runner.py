"""The worker alone, spoken to over its pipes as the supervisor does."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canaryd.codec import to_json
from canaryd.model import Device
from canaryd.supervisor.remote import own_files
from canaryd.worker.__main__ import OPEN
from tests.command import PATIENCE, soon

ENTRY = Path(__file__).parents[2] / "canaryd" / "worker" / "__main__.py"
PROBES = Path(__file__).parents[1] / "probes"
DEVICE = to_json(Device(uuid="CPU-test", backend="cpu", index=0, model="a processor"))


class Worker:
    """A bare worker process with its protocol."""

    def __init__(self, cwd: Path) -> None:
        ours, theirs = os.pipe()
        argv = [sys.executable, str(ENTRY), "--fd", str(theirs), "--nonce", "abc"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[theirs], start_new_session=True, cwd=cwd
        )
        os.close(theirs)
        self.protocol = os.fdopen(ours, "rb")

    def send(self, **message) -> None:
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def run(self, path: Path, **fields) -> None:
        common = {
            "level": "quick",
            "seed": 1,
            "budget": 1.0,
            "settings": {},
            "cases": [],
            "drill": "",
            "baselining": False,
            "peers": [],
            "memory": "",
            "intensity": "",
            "beside": {},
        }
        wanted = {"id": "r1", "device": DEVICE, "instruction_set": "", "timeout": 20.0} | common | fields
        self.send(op="run", probe=str(path), **wanted)

    def answers(self, last: str) -> list[dict]:
        """Read messages up to the first of kind `last`."""
        messages: list[dict] = []
        while not messages or messages[-1]["kind"] != last:
            line = self.protocol.readline()
            assert line, "the worker ended its protocol"
            if line != b"\n":
                nonce, _, body = line.partition(b" ")
                assert nonce == b"abc"
                messages.append(json.loads(body))
        return messages


@pytest.fixture
def worker(tmp_path):
    one = Worker(tmp_path)
    assert one.answers("ready")[0]["python"].startswith("3.")
    yield one
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()
    for pipe in (one.process.stdin, one.process.stdout, one.process.stderr, one.protocol):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def probe_of(directory: Path, *body: str, imports: str = "os") -> Path:
    """Write a probe whose `run` has these lines; return its path."""
    path = directory / "made.py"
    head = f"import {imports}\nfrom canaryd.probe import ProbeSpec, Reading, Skip\n"
    head += "SPEC = ProbeSpec(name='made', summary='x', numeric=False)\ndef run(ctx):\n"
    path.write_text(head + "".join(f"    {line}\n" for line in body))
    return path


def test_a_run_is_facts_then_one_result(worker):
    """Facts travel as they are yielded; the result closes the run."""
    worker.run(PROBES / "passes.py", id="r9")
    *facts, result = worker.answers("result")
    kinds = [message.get("type", message["kind"]) for message in facts]
    assert kinds == ["progress", "readings", "Comparison", "Skipped", "readings"]
    assert {message["id"] for message in facts} == {"r9"}
    assert (result["id"], result["outcome"], result["detail"]) == ("r9", "completed", "")
    assert result["seconds"] >= 0


def test_the_end_of_input_ends_the_process_at_once(worker):
    """Even in the middle of a probe that never ends."""
    worker.run(PROBES / "hangs.py")
    worker.answers("progress")
    worker.process.stdin.close()
    begun = time.monotonic()
    worker.process.wait(PATIENCE)
    assert time.monotonic() - begun < soon(2)


def test_a_worker_ends_itself_when_nobody_kills_it(worker):
    """The second line of defence works with the interpreter lock held, and says where the probe hung."""
    worker.run(PROBES / "hangs_holding_gil.py", timeout=-4.5)
    begun = time.monotonic()
    assert worker.process.wait(PATIENCE) == 1
    assert time.monotonic() - begun < soon(4)
    assert b"hangs_holding_gil.py" in worker.process.stderr.read()


def test_the_self_destruction_is_disarmed_by_the_answer(worker):
    """An answered run does not end a worker that then waits for the next request."""
    worker.run(PROBES / "passes.py", timeout=-4.7)
    worker.answers("result")
    time.sleep(0.6)
    assert worker.process.poll() is None


def test_what_a_probe_prints_is_not_protocol(worker):
    """Standard output belongs to the probe."""
    worker.run(PROBES / "prints_at_import.py")
    assert worker.answers("result")[-1]["outcome"] == "completed"
    os.killpg(worker.process.pid, signal.SIGKILL)
    out, err = worker.process.communicate()
    assert out.startswith(b"hello from the import")
    assert b"\xff\xfe not text" in err


def test_probes_leave_nothing_in_their_directory(worker, tmp_path):
    """No byte code is written beside an operator's probes."""
    shutil.copy(PROBES / "passes.py", tmp_path / "passes.py")
    worker.run(tmp_path / "passes.py")
    worker.answers("result")
    assert [path.name for path in tmp_path.iterdir()] == ["passes.py"]


def test_a_module_in_the_working_directory_shadows_nothing(tmp_path):
    """A file called random.py where somebody stands is not what a probe imports, nor is a file of ours."""
    for name in ("random.py", "queue.py", "canaryd.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    probe = probe_of(
        *(tmp_path, "try:", "    import runner", "except ModuleNotFoundError:", "    raise Skip('not there')"),
        "yield Reading(name='x', value=1)",
        imports="random",
    )
    one = Worker(tmp_path)
    one.run(probe)
    assert one.answers("result")[-1]["outcome"] == "skipped"
    one.process.communicate()
    one.protocol.close()


def test_a_long_traceback_keeps_its_end(worker, tmp_path):
    """The last lines name the error; the message stays small."""
    worker.run(probe_of(tmp_path, "raise ValueError('a' * 1_000_000 + ' the end')", "yield"))
    detail = worker.answers("result")[-1]["detail"]
    assert len(detail) <= 16_384
    assert detail.endswith("the end\n")


def test_an_error_without_a_message_says_where_it_was_raised(worker, tmp_path):
    """Its type alone would leave nothing to search for; one with a message stays as it is."""
    (tmp_path / "broken.py").write_text("def look():\n    raise AttributeError\nlook()\n")
    (tmp_path / "telling.py").write_text("raise AttributeError('no such core')\n")
    worker.send(op="describe", probes=[str(tmp_path / "broken.py"), str(tmp_path / "telling.py")], torch=False)
    errors = [message["error"] for message in worker.answers("described") if message["kind"] == "probe"]
    assert errors == [f"AttributeError ({tmp_path}/broken.py:2, in look)", "AttributeError: no such core"]


def test_what_a_worker_may_import_goes_along_behind_a_command():
    """`capture --exact` in a container would end with ModuleNotFoundError."""
    wanted = {f"{name.replace('.', '/')}.py" for name in OPEN if name != "canaryd.worker"}
    assert wanted <= set(own_files())


def test_core_dumps_are_off(worker, tmp_path):
    """One byte: 0 would still feed a dump collector."""
    asks = "yield Reading(name='core', value=resource.getrlimit(resource.RLIMIT_CORE)[0])"
    worker.run(probe_of(tmp_path, asks, imports="resource"))
    wanted = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    assert worker.answers("result")[0]["values"][0][1] == wanted


@pytest.mark.torch
def test_a_retest_under_load_says_under_which_conditions_it_ran(worker):
    """Seconds under load and idle and the speed of the load come as readings, before the result."""
    worker.run(PROBES / "fails_under_load.py", intensity="pulsed", timeout=60.0)
    *facts, result = worker.answers("result")
    assert result["outcome"] == "completed", result["detail"]
    told = {reading[0] for message in facts if message["kind"] == "readings" for reading in message["values"]}
    assert told == {"load_seconds", "pause_seconds", "load_duty", "load_speed"}


@pytest.mark.torch
def test_a_probe_that_does_not_pace_its_trials_is_found_out(worker):
    """An absence with its reason, not seconds of a load that was not there; without a retest nothing is said."""
    for intensity, expected in (("steady", ["load_seconds", "pause_seconds"]), ("repeated", []), ("", [])):
        worker.run(PROBES / "surroundings.py", intensity=intensity, timeout=60.0)
        *facts, result = worker.answers("result")
        assert result["outcome"] == "completed", result["detail"]
        values = [reading for message in facts if message["kind"] == "readings" for reading in message["values"]]
        assert [reading[0] for reading in values if len(reading) == 3] == expected


def test_a_probe_that_computes_nothing_is_never_loaded(worker):
    """It runs under an interpreter that may have no torch."""
    worker.run(PROBES / "passes.py", intensity="steady")
    *facts, result = worker.answers("result")
    assert (result["outcome"], result["detail"]) == ("completed", "")
    assert "load_seconds" not in str(facts)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("CUDA error: no kernel image is available for execution on the device\\nCUDA kernel errors might", "skipped"),
        ("CUDA error: uncorrectable ECC error encountered; no kernel image is available", "device_error"),
    ],
)
def test_a_library_that_was_built_for_other_devices_is_one_sentence(worker, tmp_path, error, outcome):
    """Not an error of each probe with its traceback. What the device itself reports is never taken for that."""
    (tmp_path / "uploads.py").write_text(
        "from canaryd.probe import ProbeSpec\n"
        'SPEC = ProbeSpec(name="uploads", summary="Meets a device that torch was not built for")\n'
        f"def run(ctx):\n    raise RuntimeError('{error}')\n    yield\n"
    )
    worker.run(tmp_path / "uploads.py", device=DEVICE | {"backend": "cuda", "detail": {"capability": "12.0"}})
    result = worker.answers("result")[-1]
    assert result["outcome"] == outcome
    if outcome == "skipped":
        assert result["detail"] == (
            "a library that the worker loads has no kernels for compute capability 12.0: CUDA error: no kernel image is"
            " available for execution on the device. Install one that was built for this device"
        )
