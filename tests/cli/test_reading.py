"""Commands that read the record: what they cannot read they say, and they create, rename and mend nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import time
from pathlib import Path

import pytest

from canaryd.cli.main import main
from canaryd.model import Cause, Device, State, Verdict
from canaryd.store.database import DATABASE, Database
from canaryd.store.notes import DAEMON_LOCK
from canaryd.store.store import Store
from tests.command import canaryd, configure, in_turn, open_to_all

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
NOBODY = 65534
AS_ANOTHER = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: to become another user needs root")
SHOWING = (
    *(("status",), ("status", "--json"), ("status", "-v"), ("history",), ("history", "--json"), ("gate",)),
    *(("baseline", "list"), ("baseline", "export"), ("devices",), ("probes",)),
)
"""Commands that only show something."""
CHANGING = (
    ("report", "cuda:9"),
    ("ack", "cpu:0", "--reason", "seen"),
    ("baseline", "accept", "cpu:0", "--reason", "right"),
    ("release",),
    ("release", "--end"),
)
"""Commands that need a record and make none."""


@pytest.fixture
def place():
    """A directory that every user may enter, unlike pytest's own."""
    with open_to_all() as path:
        yield path


def recorded(state: Path) -> Path:
    """Leave a record of a healthy device."""
    with Store.open(state) as store:
        now = time.time()
        store.see_device(CPU, now)
        store.set_verdict(
            Verdict(device=CPU.uuid, state=State.HEALTHY, cause=Cause.NONE, findings=(), decided=now, since=now)
        )
    return state


def held(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return what is in a directory: each path with its mode and content."""
    return {
        str(p.relative_to(path)): (p.stat().st_mode, b"" if p.is_dir() or p.name.endswith("-shm") else p.read_bytes())
        for p in sorted(path.rglob("*"))
    }


def asked(commands, config, state, **extra):
    """Yield each command and its answer."""
    common = ("--config", config, "--state-dir", state)
    yield from zip(commands, in_turn(*((*command, *common) for command in commands), **extra), strict=True)


def test_a_mistyped_state_directory_is_not_made(tmp_path):
    """Nothing at all is created, and nothing is healthy."""
    state = tmp_path / "var/lib/canraryd"
    config = configure(tmp_path, "passes")
    (tmp_path / "a").write_text("{}")
    before = held(tmp_path)
    for command, answer in asked([*SHOWING, *CHANGING, ("compare", tmp_path / "a", tmp_path / "a")], config, state):
        assert held(tmp_path) == before, command
        if command[0] in {"status", "release"} or (command[0] == "baseline" and command not in CHANGING):
            assert answer.code == 3, answer
        elif command[0] in {"ack", "report"} or "cpu:0" in command:
            assert answer.code == 64, answer
        if command[0] == "ack":
            assert "nothing is recorded yet: start the daemon" in answer.err
        if command[0] == "release" or (command[0] == "baseline" and command not in CHANGING):
            assert f"nothing is recorded in {state}" in answer.err


@pytest.mark.parametrize("daemon", [True, False])
def test_reading_leaves_a_record_as_it_is(tmp_path, daemon):
    """Beside a daemon and without one: no file is made, changed or removed."""
    state = recorded(tmp_path / "state")
    config = configure(tmp_path, "passes")
    with contextlib.ExitStack() as stack:
        if daemon:
            stack.enter_context(stack.enter_context(Store.open(state)).lock(DAEMON_LOCK))
        before = held(state)
        for command, answer in asked(SHOWING, config, state):
            assert held(state) == before, command
            assert answer.code == 3 * (command == ("probes",)), answer  # this interpreter has no torch
            if command == ("status", "--json"):
                assert answer.document["daemon_running"] is daemon


@pytest.mark.parametrize("content", [b"", b"rubbish" * 4096])
def test_a_damaged_record_is_said_and_left_as_it_is(tmp_path, content):
    """No command that reads may rename it: that is the daemon's business, and a check's."""
    state = tmp_path / "state"
    state.mkdir()
    (state / DATABASE).write_bytes(content)
    for command, answer in asked([*SHOWING, *CHANGING], configure(tmp_path, "passes"), state):
        if command == ("probes",):  # they are on no record
            continue
        assert answer.code == (0 if command == ("gate",) else 3), answer  # it only logs by default
        assert f"cannot read {state / DATABASE}: " in " ".join(f"{answer.out} {answer.err}".split())
        assert "--json" not in command or answer.document["problems"]
    assert (state / DATABASE).read_bytes() == content
    assert [path.name for path in state.iterdir()] == [DATABASE]


@AS_ANOTHER
@pytest.mark.parametrize("closed", ["directory", "files"])
def test_a_record_that_this_user_may_not_read_is_not_empty(place, closed):
    """Exit 3 with what cannot be read, as whom, and how; nobody is told to start a daemon, no device is tested."""
    state = recorded(place / "state")
    config = configure(place, "passes")
    with Store.open(state) as store, store.lock(DAEMON_LOCK):
        for path in state.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        state.chmod(0o700 if closed == "directory" else 0o755)
        answers = list(asked([*SHOWING, *CHANGING, ("check",), ("drill",)], config, state, user=NOBODY))
    for command, answer in answers:
        if command == ("probes",):
            continue
        told = " ".join(f"{answer.out} {answer.err}".split())
        assert "start the daemon" not in told.lower(), answer
        assert re.search(f"cannot read {state}(/locks)? as user nobody: use sudo", told), answer
        assert answer.code == (0 if command == ("gate",) else 3), answer
        if "--json" in command:
            assert answer.document["problems"]
        elif command not in {("gate",), ("check",), ("drill",)}:
            assert (answer.out, answer.err.count("\n")) == ("", 1), answer


@AS_ANOTHER
def test_a_user_without_a_name_is_told_by_number(place):
    """As in a container whose user is in no file."""
    state = recorded(place / "state")
    state.chmod(0o700)
    ((_, answer),) = asked([("status",)], configure(place), state, user=54321)
    assert (answer.code, answer.err) == (3, f"canaryd: cannot read {state} as user 54321: use sudo\n")


@AS_ANOTHER
def test_commands_name_sudo_where_this_user_may_only_read(place):
    """What would test a device there needs it; root himself types it nowhere."""
    state, config = recorded(place / "state"), configure(place, "passes")
    for path in (state, *state.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    ((_, told),) = asked([("status",)], config, state, user=NOBODY)
    ((_, plain),) = asked([("status",)], config, state)
    assert "sudo canaryd run --config " in told.out
    assert "canaryd run --config " in plain.out
    assert "sudo" not in plain.out


@AS_ANOTHER
def test_a_directory_behind_a_closed_one_is_unreadable(place):
    """Where even its name cannot be looked up."""
    state = recorded(place / "closed/state")
    (place / "closed").chmod(0o700)
    for command, answer in asked([("status",), ("release",), ("check",)], configure(place), state, user=NOBODY):
        assert answer.code == 3, command
        assert f"canaryd: cannot read {state}" in answer.err
        assert "as user nobody: use sudo\n" in answer.err


@AS_ANOTHER
def test_a_state_directory_that_cannot_be_made_says_nothing_of_a_daemon(place):
    """A daemon serves without a record there, and nothing on disk shows it; one that could be made has no daemon."""
    config, closed, absent = configure(place, "passes"), place / "closed/x", place / "open/x"
    for path, mode in ((closed.parent, 0o755), (absent.parent, 0o777)):
        path.mkdir()
        path.chmod(mode)
    told, plain = in_turn(*(("status", "--config", config, "--state-dir", d) for d in (closed, absent)), user=NOBODY)
    assert told.code == plain.code == 3
    text = " ".join(told.out.split())
    assert f"{closed} does not exist, and user nobody cannot make it Do now: A daemon may run all the same" in text
    assert "its /readyz says so. To keep a record, use sudo, or name another directory with --state-dir." in text
    assert "daemon: not known without a state directory;" in text
    assert "not running" not in text
    assert "daemon: not running on this state directory;" in " ".join(plain.out.split())


@AS_ANOTHER
@pytest.mark.parametrize("daemon", [True, False])
def test_a_check_without_a_right_to_the_locks(place, daemon):
    """Beside a daemon it refuses, as a capture does: both would use one device. Without one it keeps nothing."""
    state = recorded(place / "state")
    config = configure(place, "passes")
    with contextlib.ExitStack() as stack:
        if daemon:
            stack.enter_context(stack.enter_context(Store.open(state)).lock(DAEMON_LOCK))
        for path in (state, *state.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (place / "out").mkdir()
        (place / "out").chmod(0o777)
        others = [
            ("capture", "--exact", "--out", place / "out/a"),
            ("characterise", "--device", "cpu:0", "--part", "identity"),
        ]
        answers = list(asked([("check",), *(others if daemon else ())], config, state, user=NOBODY))
    for command, answer in answers:
        if daemon:
            assert (answer.code, answer.out) == (3, ""), command
            assert "cannot lock cpu:0 beside the daemon as user nobody: use sudo" in answer.err, command
        else:
            assert "cannot lock" not in answer.err
            assert "what this check found is not kept: " in " ".join(answer.out.split())


def test_two_readers_are_no_daemon(tmp_path):
    """Each looks whether a daemon holds its lock, and neither takes the other for one."""
    state = recorded(tmp_path / "state")
    with Store.open(state) as store, store.lock(DAEMON_LOCK):
        pass
    with (state / f"locks/{DAEMON_LOCK}.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a reader does for a moment
        assert canaryd("status", "--json", "--state-dir", state).document["daemon_running"] is False


@pytest.mark.parametrize("freed", [True, False], ids=["at the end", "never"])
def test_what_is_said_of_a_record_that_another_process_locks_is_true(tmp_path, monkeypatch, capsys, freed):
    """A command tries once more when it closes the record, and only then says whether its word is stored."""
    state = recorded(tmp_path)
    monkeypatch.setattr("canaryd.store.database.BUSY_TIMEOUT", 1.0)
    monkeypatch.setattr("canaryd.report.terminal._REPLACED", {})  # where this command's record lies is for it alone
    failed = Database._refuse
    with contextlib.closing(sqlite3.connect(state / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def fail(store, error):
            failed(store, error)
            if freed and other.in_transaction:
                other.execute("ROLLBACK")

        monkeypatch.setattr(Database, "_refuse", fail)
        code = main(["ack", "cpu:0", "--reason", "seen", "--state-dir", str(state)])
    told = capsys.readouterr()
    with Store.open(state) as store:
        assert [a.reason for a in store.acks()] == ["seen"] * freed
    assert code == (0 if freed else 3)
    assert ("acknowledged until" in told.out, "ack: not stored" in told.err) == (freed, not freed)
    assert "waiting in memory" not in told.err, "the command has ended"
