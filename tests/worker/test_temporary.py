"""Temporary directories of processes that end in every way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.command import ROOT, environment, eventually

HOLDS = """
import sys, time
from pathlib import Path
from canaryd.worker.temporary import temporary_directory

with temporary_directory("canaryd-test-") as directory:
    Path(directory, "inside").mkdir()
    Path(directory, "inside", "file").write_text("x")
    print(directory, flush=True)
    if sys.argv[1:]:
        time.sleep(600)
"""


def begun(tmp_path, code, *arguments):
    """A process in a group of its own, whose temporary files are below `tmp_path`, once it has said a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process, process.stdout.readline().strip()


def test_a_directory_ends_with_its_block(tmp_path):
    """It is gone when the block is."""
    process, directory = begun(tmp_path, HOLDS)
    assert Path(directory).parent == tmp_path
    assert process.communicate()[0] == ""
    assert (process.returncode, list(tmp_path.iterdir())) == (0, [])


def test_a_killed_group_leaves_no_directory(tmp_path):
    """As the supervisor ends a worker."""
    process, _ = begun(tmp_path, HOLDS, "stay")
    assert list(tmp_path.iterdir())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert eventually(lambda: list(tmp_path.iterdir()) == [])
