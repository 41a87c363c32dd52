"""`canaryd status` and `canaryd release` beside a daemon."""

import json
import os
import subprocess
import sys
import time

import pytest

from canaryd.cli.main import main
from canaryd.report.status_text import as_text as status_text
from canaryd.store.notes import DAEMON_LOCK, RELEASE_NOTE
from canaryd.store.store import Store
from tests.command import ROOT, Daemon, canaryd, configure, eventually, running
from tests.report.statuses import NOW, ask


def test_a_running_daemon_and_a_release_are_told(store):
    """Whoever holds the daemon's lock is the daemon; a release is told until it is over."""
    store.set_note(RELEASE_NOTE, str(NOW + 60))
    with store.lock(DAEMON_LOCK), Store.open(store.state_dir, now=lambda: NOW) as other:
        found = ask(other)
        assert found.daemon
        assert found.released_until == NOW + 60
        assert "released until" in status_text(found)
        assert "daemon: running" in status_text(found)
    assert ask(store, now=NOW + 61).released_until == 0.0
    assert "not running" in status_text(ask(store))


def test_nothing_to_release_without_a_daemon(tmp_path):
    """Between two commands nothing is held: said, and no error."""
    (tmp_path / "state").mkdir()
    answer = canaryd("release", "--config", configure(tmp_path, "passes"), "--state-dir", tmp_path / "state")
    assert answer.code == 0
    assert "no daemon runs" in answer.out


def test_a_release_waits_for_a_check(tmp_path):
    """A check beside the daemon uses devices too: it ends, and says why."""
    log = tmp_path / "log"
    each = {"records": {"period": "1h", "settings": {"log": str(log), "seconds": 8.0}}}
    config, state = configure(tmp_path, "records", each=each), tmp_path / "state"
    common = ("--config", config, "--state-dir", state)
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        check = subprocess.Popen(
            [sys.executable, "-m", "canaryd", "check", "--for", "2m", *map(str, common)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        eventually(lambda: log.read_text().count("begin") == 2)
        assert canaryd("release", *common).code == 0
        begun = log.read_text().split("begin")[-1].split()
        with pytest.raises(ProcessLookupError):
            os.kill(int(begun[0]), 0)
        told = check.communicate(timeout=60)[0]
        assert check.returncode == 3
        assert "devices are released" in " ".join(told.split())
        assert log.read_text().count("begin") == 2
        assert daemon.end()[0] == 0


def test_a_release_tells_who_still_uses_a_device(tmp_path, monkeypatch, capsys):
    """It does not say that no device is touched."""
    monkeypatch.setattr("canaryd.cli.daemon.RELEASE_PATIENCE", 5.0)
    monkeypatch.setattr("canaryd.report.terminal._REPLACED", {})  # where this command's record lies is for it alone
    config, state = configure(tmp_path, "passes"), tmp_path / "state"
    with running(Daemon(config, state)) as daemon, Store.open(state) as store:
        device = eventually(store.devices)[0].device
        with store.lock(device.physical, timeout=60, doing="testing"):
            code = main(["release", "--config", str(config), "--state-dir", str(state)])
        assert daemon.end()[0] == 0
    told = capsys.readouterr()
    assert (code, "no device is touched" in told.out) == (3, False)
    assert "testing" in told.err


def test_a_daemon_releases_and_takes_back(tmp_path):
    """`canaryd release` returns when nothing is held; polls stop, and go on after `--end`."""
    said = tmp_path / "said.json"
    said.write_text(json.dumps({"readings": [["persistence_mode", 0, {}]]}))
    config = configure(tmp_path, "says", each={"says": {"settings": {"file": str(said)}}})
    state = tmp_path / "state"
    common = ("--config", config, "--state-dir", state)
    pids = tmp_path / "said.json.pids"
    with running(Daemon(config, state)) as daemon:
        eventually(pids.exists)
        eventually(lambda: "canaryd_device_handles_held 1.0" in daemon.get("/metrics")[1])
        answer = canaryd("release", "--for", "10m", *common)
        assert (answer.code, answer.err) == (0, "")
        assert "canaryd_released 1.0" in daemon.get("/metrics")[1]
        before = pids.read_text()
        document = canaryd("status", "--json", *common).document
        assert document["daemon_running"]
        assert document["released_until"] > time.time() + 500
        assert canaryd("release", "--end", *common).code == 0
        eventually(lambda: pids.read_text() != before)
        assert "canaryd_released 0.0" in daemon.get("/metrics")[1]
