"""Locks of devices."""

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from canaryd.store.locks import Busy, Flag, reason


def test_a_held_device_names_its_holder(store, holder):
    """`Busy` gives the process and its command; other devices are free."""
    with pytest.raises(Busy) as caught, store.lock("GPU-1"):
        pass
    assert f"GPU-1.lock: held by pid {holder.pid}: " in str(caught.value)
    assert str(store.state_dir) in str(caught.value)
    with store.lock("GPU-2"), store.lock("../odd name"):
        pass
    assert store.problems == []


def test_the_lock_of_a_killed_holder_is_free_at_once(store, holder):
    """The waiting process is told once whom it waits for, and goes on when that one is killed."""
    told = []

    def on_wait(text):
        told.append(text)
        holder.send_signal(signal.SIGKILL)

    with store.lock("GPU-1", timeout=20, on_wait=on_wait):
        assert [text.split(":")[0] for text in told] == [f"pid {holder.pid}"]


def test_a_lock_excludes_threads_of_the_same_process(store):
    """The daemon's own threads do not share a device either; after its release the lock can be taken again."""
    with store.lock("GPU-1"), pytest.raises(Busy, match=f"pid {os.getpid()}"), store.lock("GPU-1", timeout=0.1):
        pass
    with store.lock("GPU-1"):
        pass


def test_an_error_under_the_lock_is_not_taken_for_a_lock_problem(store):
    """What goes wrong while the device is held reaches the caller as it is, and the lock is released."""
    with pytest.raises(OSError, match="mine"), store.lock("GPU-1"):
        raise OSError("mine")
    with store.lock("GPU-1"):
        assert store.problems == []


def test_a_full_disk_is_said_whatever_the_error_is_called(tmp_path):
    """SQLite calls it an I/O error where it cannot map its index."""
    error = sqlite3.OperationalError("disk I/O error")
    assert reason(tmp_path / "canaryd.db", error) == "disk I/O error"
    assert reason(Path("/proc/canaryd.db"), error) == "its disk is full (0 bytes free): disk I/O error"
    assert reason(tmp_path / "gone/canaryd.db", error) == "disk I/O error"


def test_a_flag_that_is_lowered_is_seen_so(tmp_path):
    """A daemon that can store again is not called unable to for as long as it runs."""
    flag = Flag(tmp_path)
    flag.fly(True)
    assert Flag.flies(tmp_path)
    flag.fly(False)
    assert not Flag.flies(tmp_path)
