"""Why a vendor's command was not started, for a user who may not search every directory of PATH."""

import os
import subprocess
import sys

import pytest

from tests.command import ROOT, environment, open_to_all

NOBODY = 65534
ASKS = """
import os, shutil, subprocess, sys
from canaryd.worker.telemetry import ascend, interface
if os.geteuid() == 0:  # whom no directory is closed to
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
try:
    ascend.devices({})
except interface.Unavailable as why:
    print(type(why).__name__, why)
"""


@pytest.fixture
def place():
    """Return a directory that every user may enter. It contains one that only root may enter."""
    with open_to_all() as path:
        (path / "open").mkdir()
        (path / "closed").mkdir(mode=0)
        yield path
        (path / "closed").chmod(0o700)


def asked(place):
    """What the listing of NPUs says in a process whose PATH begins with the closed directory."""
    search = os.pathsep.join([f"{place}/closed", f"{place}/open"])
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(NOBODY)],
        cwd=ROOT,
        env=environment(PATH=search),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_command_in_no_directory_that_can_be_searched_is_not_installed(place):
    """Though the system's own word is "Permission denied": root's PATH has directories that others may not search."""
    assert asked(place) == "NotHere npu-smi is not installed, or not in PATH"


def test_a_command_that_may_not_be_executed_is_named(place):
    """It is there, so its devices may be; a file of another user is no less there."""
    (place / "open/npu-smi").write_text("#!/bin/sh\n")
    assert asked(place) == "Unavailable npu-smi cannot be started: Permission denied"
