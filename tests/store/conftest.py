"""What several tests of the store share."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from canaryd.model import State
from canaryd.store.store import Store
from tests.store.hosts import DAY, NOW, Host
from tests.store.made import HOLDER, WRITER, Clock, python


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of one mebibyte of its own."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("NOT TESTED: a filesystem of its own needs root and CAP_SYS_ADMIN to mount")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    with Store.open(tmp_path / "state", now=clock) as opened:
        yield opened


@pytest.fixture
def holder(store):
    process = python("-c", HOLDER, WRITER.parents[2], store.state_dir)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """Return the directory of a host with a day of clean runs, a learnt baseline, and a prune behind it."""
    place = tmp_path_factory.mktemp("lived")
    host = Host(place, NOW - DAY)
    host.live(DAY)
    host.store.prune(host.now)
    host.store.close()
    return place


@pytest.fixture
def host(tmp_path, lived):
    shutil.copy(lived / "canaryd.db", tmp_path)
    made = Host(tmp_path, NOW)
    assert made.verdict.state is State.HEALTHY
    yield made
    made.store.close()
