"""Standard streams that are closed, full, non-blocking, or whose reader went away: an answer or its loss, no crash."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import PATIENCE, ROOT, Process, configure, environment

LOST = 3
"""What a command that did well ends with where its answer could not be written."""
GONE = 141
"""128 + SIGPIPE, as of any program in a pipe."""


def shell(line: str, state: Path) -> tuple[int, str, str]:
    """Run a line of shell, in which $canaryd is canaryd and $state a path; return its status and what it printed."""
    extra = environment(canaryd=f"{sys.executable} -m canaryd", state=str(state))
    argv = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(argv, cwd=ROOT, env=extra, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    assert "Exception ignored" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--help >/dev/full", LOST),
        ("--version 2>&1 | true", GONE),
        ("--version >&- 2>&-", 0),
        ("config example >/dev/full", LOST),
        ("status --state-dir $state >/dev/full 2>&1", LOST),
        ("status --state-dir $state 2>&- >&-", 3),
        ("history --state-dir $state >&-", 0),
        ("gate --state-dir $state 2>/dev/full", 0),
        ("no-such-command 2>/dev/full", 64),
        ("no-such-command 2>&1 | true", 64),
        ("config check --config /nonexistent/canaryd.yaml 2>&-", 64),
    ],
)
def test_no_stream_makes_a_command_crash(tmp_path, line, status):
    """The exit status is the command's own; an answer that is lost is never 0."""
    code, out, err = shell(f"$canaryd {line}", tmp_path / "state")
    assert code == status, err
    assert ("cannot write the answer to standard output: No space left on device" in err) is line.endswith(
        " >/dev/full"
    )
    if "2>&-" in line:
        assert out == ""


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&-", "2>/dev/full", "2> >(true)"])
def test_a_check_goes_on_when_nobody_reads_its_progress(tmp_path, redirection):
    """Its run is stored."""
    config, state = configure(tmp_path, "passes"), tmp_path / "state"
    code, *_ = shell(f"$canaryd check --config {config} --state-dir $state {redirection}", state)
    assert code == (LOST if redirection.startswith(">/dev/full") else 0)
    _, out, _ = shell(f"$canaryd status --json --config {config} --state-dir $state", state)
    assert '"healthy"' in out


def test_a_report_that_is_lost_is_never_0(tmp_path):
    """The next program of a script would take the file of the last check for that of this one."""
    config, state = configure(tmp_path, "passes"), tmp_path / "state"
    line = f"$canaryd check --config {config} --state-dir $state"
    code, out, err = shell(f"{line} --report /dev/full", state)
    assert "verdict: HEALTHY" in out
    assert (code, "canaryd: --report /dev/full: not written: No space left on device\n" in err) == (LOST, True), err
    code, out, _ = shell(f"{line} --report >(cat >&2)", state)  # a pipe is written to, not replaced
    assert (code, "verdict: HEALTHY" in out) == (0, True)


def test_a_pipe_that_another_process_made_non_blocking():
    """The reader is waited for, and gets everything."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    argv = [sys.executable, "-m", "canaryd", "config", "example"]
    with (
        subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=writing) as process,
        os.fdopen(reading, "rb") as pipe,
    ):
        os.close(writing)
        written = pipe.read().lstrip(b"x")
        assert process.wait(60) == 0
    assert written.count(b"\n") > 100


def test_an_interrupted_command_ends_without_a_traceback(tmp_path):
    """At any moment, also before or after it handles signals itself: as the shell expects, 128 + SIGINT."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with contextlib.closing(Process("config", "check", "--config", pipe)) as reading:
        with pipe.open("w"):  # once it reads
            reading.send(signal.SIGINT)
            time.sleep(0.5)
        # A signal that comes just before the system call ends it no more; the end of the pipe does.
        assert (reading.popen.wait(PATIENCE), reading.lines) == (130, [])
