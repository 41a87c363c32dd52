"""What several tests of the supervisor share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series


@pytest.fixture
def series():
    with Series(WorkerSpec(), grace=0.5) as one:
        yield one


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    """An interpreter that has nothing installed, canaryd included."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = str(place / "bin" / "python")
    bare = subprocess.run([python, "-c", "import canaryd"], cwd="/", capture_output=True, check=False)
    assert bare.returncode == 1
    return python
