"""What root may do in a state directory of another user, who may put anything in its way: real commands of root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import pytest

from canaryd.files import keep, owners_rights, recall
from canaryd.report import boundary
from canaryd.store.store import Store
from tests.command import eventually, in_turn, open_to_all
from tests.daemon.test_telemetry import Site
from tests.store.made import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: what root opens of another user's takes root")

OWNER, GROUP = 65534, 65533
CREATED = 0x100 | 0x80
"""IN_CREATE and IN_MOVED_TO (inotify(7))."""


@pytest.fixture(scope="module")
def place():
    """A directory that every user may enter, unlike pytest's own."""
    with open_to_all() as path:
        yield path


@pytest.fixture(scope="module")
def site(place):
    """A machine with one GPU, whose driver's answers are kept in the state directory."""
    return Site(place / "site", 1)


@pytest.fixture
def outside(place):
    """Files that are root's, in a directory that is root's."""
    directory = place / "outside"
    directory.mkdir()
    for name, mode in (("closed", 0o600), ("shown", 0o644)):
        (directory / name).write_text(f"root's {name} file\n")
        (directory / name).chmod(mode)
    yield directory
    shutil.rmtree(directory)


def owned(state: Path) -> Path:
    """Make a state directory with a record, all of it the owner's."""
    with Store.open(state) as store:
        store.set_note("known", "nothing")
    for path in (state, *state.rglob("*")):
        os.chown(path, OWNER, GROUP)
    return state


def held(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return all that somebody could have changed: names, owners, rights, contents."""
    found = {}
    for path in (directory, *directory.rglob("*")):
        told = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(told.st_mode) else b""
        found[str(path)] = (told.st_mode, told.st_uid, told.st_gid, told.st_mtime_ns, content)
    return found


class Watched:
    """Every name that appears below a directory, for however short a time: the kernel tells."""

    def __init__(self, directory: Path) -> None:
        self._libc, self._directory, self._watched = ctypes.CDLL(None), directory, {}
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        for path in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), CREATED)
            self._watched[number] = path

    def names(self) -> set[str]:
        """Return them, relative to the directory."""
        found = {str(path.relative_to(self._directory)) for path in self._directory.rglob("*")}
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 20):
                while data:
                    number, _, _, length = struct.unpack_from("iIII", data)
                    name = data[16 : 16 + length].rstrip(b"\0").decode()
                    found.add(str((self._watched[number] / name).relative_to(self._directory)))
                    data = data[16 + length :]
        os.close(self._fd)
        return found


COMMANDS = (
    *(("check",), ("ack", "cpu:0", "--reason", "seen"), ("baseline", "accept", "cpu:0", "--reason", "right")),
    *(("status",), ("history",), ("gate",), ("release", "--end")),
    ("check", "--boundary", "begin", "--label", "4711"),
)
DIRECTORIES = ("locks", "memory", boundary.DIRECTORY)


@pytest.fixture(scope="module")
def written(site):
    """Return each name that a daemon and commands of root give a file below the state directory, and see its owner."""
    state = owned(site.state)
    for name in ("locks", "memory"):
        (state / name).mkdir()
        os.chown(state / name, OWNER, GROUP)
    watched = Watched(state)
    with site.daemon() as daemon:
        eventually(lambda: list((state / "memory").iterdir()))
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        assert site.run("release", "--for", "1m").code == 0
        assert daemon.end()[0] == 0
    in_turn(*((*command, "--config", site.config, "--state-dir", state) for command in COMMANDS))
    (state / "canaryd.db").write_bytes(b"rubbish" * 4096)
    assert "was lost" in site.run("check").out
    for path in state.rglob("*"):
        assert (path.stat().st_uid, path.stat().st_gid) == (OWNER, GROUP), path
    names = watched.names()
    parts = ("canaryd.db-wal", "canaryd.db-shm", "canaryd.db.new")
    files = ("locks/telemetry.lock", "locks/daemon.lock", f"memory/nvml-{site.uuids[0]}.json", "boundaries/4711.json")
    assert names >= {"canaryd.db", "canaryd.db.lock", "locks", "memory", *parts, *files}
    return sorted({name for name in names if not Path(name).name.startswith(".")})  # not those that chance chooses


def plant(kind: str, path: Path, outside: Path) -> None:
    """Put something in the way of a file or directory, as its owner could."""
    path.parent.mkdir(exist_ok=True)
    os.chown(path.parent, OWNER, GROUP)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path, 0o444)  # where SQLite may not write, it opens for reading, and would wait for a writer
    elif kind == "hard link":
        os.link(outside / "closed", path)
        return
    else:
        path.symlink_to(outside if path.name in DIRECTORIES else outside / kind)
    os.chown(path, OWNER, GROUP, follow_symlinks=False)


def use(state: Path, names: Sequence[str]) -> str:
    """Read and write all that canaryd keeps under these names; return what it says of what it could not."""
    said = []
    for for_reading in (True, False):
        with Store.open(state, for_reading=for_reading) as store:
            stored = store.add_run(run("a"))
            for name in names:
                place, _, rest = name.partition("/")
                if place == "locks":
                    with store.lock(unquote(rest.removesuffix(".lock"))):
                        pass
                elif place in DIRECTORIES:
                    keep(f"{state}/{place}", rest.removesuffix(".json"), 1)
                    recall(f"{state}/{place}", rest.removesuffix(".json"))
            said = [*store.problems, store.problem]
    with contextlib.suppress(OSError):
        boundary.keep_dossier(Path(__file__), "4711", state)
    assert stored or store.problem
    return " ".join(said)


def test_root_changes_nothing_that_the_owner_could_not(place, site, outside, written):
    """Whatever of canaryd's is replaced by whatever: root's files stay, none appears, and no command waits for ever."""
    before = held(outside)
    for kind in ("closed", "shown", "absent", "hard link", "pipe"):
        for number, name in enumerate(written):
            if kind == "hard link" and name in DIRECTORIES:
                continue
            for with_record in (True, False):
                state = place / f"{kind} {number} {with_record}"
                if with_record:
                    owned(state)
                else:
                    state.mkdir()
                    os.chown(state, OWNER, GROUP)
                plant(kind, state / name, outside)
                said = use(state, written)
                assert held(outside) == before, (kind, name)
                # What stands in the way of a file that is made anew, or only saves time, is no problem.
                if name in ("canaryd.db.lock", "locks") or name.startswith("locks/"):
                    assert f"{state}/{name}" in said, (kind, name)
                elif name == "canaryd.db":
                    assert f"{state}/canaryd.db: " in said or kind == "absent", (kind, name)


def test_only_this_thread_and_only_meanwhile(place, outside):
    """Neither root's user nor its groups count there; another thread keeps both, and so does this one afterwards."""
    state, groups = place / "state", os.getgroups()
    state.mkdir()
    os.chown(state, OWNER, GROUP)
    os.chown(outside / "closed", OWNER + 1, 4)
    (outside / "closed").chmod(0o040)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as other:
        other.submit(int).result()  # the thread is there
        os.setgroups([4])
        stack.callback(os.setgroups, groups)
        with owners_rights(state):
            assert (os.getgroups(), other.submit(os.getgroups).result()) == ([], [4])
            with pytest.raises(PermissionError):
                (outside / "closed").read_bytes()
            assert other.submit((outside / "closed").read_bytes).result()
        assert os.getgroups() == [4]
        assert (outside / "closed").read_bytes()


def test_commands_of_root_say_what_stands_in_their_way(place, site, outside, written):
    """Workers too leave root's files alone; a test is done without locks, and without a record nothing is healthy."""
    before = held(outside)
    states = [owned(place / f"commands {number}") for number in range(3)]
    for name in written:
        if name.startswith(("locks/", "memory/")):
            plant("shown", states[0] / name, outside)
    for name in ("locks", "memory"):
        plant("shown", states[1] / name, outside)
    plant("closed", states[2] / "canaryd.db", outside)
    commands = (("check", "--config", site.config, "--state-dir", state) for state in states)
    checks = in_turn(*commands, timeout=120, **site.machine.environment)
    assert held(outside) == before
    told = ["".join(f"{answer.out}{answer.err}".split()) for answer in checks]
    assert (
        "".join(f"cannot read {states[0]}/canaryd.db: {states[0]}/locks/daemon.lock: it is a link".split()) in told[0]
    )
    assert "".join(f"{states[1]}/locks/{site.uuids[0]}.lock: no lock".split()) in told[1]
    assert "".join(f"Permission denied to user {OWNER}, whose rights root takes in {states[2]}".split()) in told[2]
    assert [answer.code for answer in checks] == [3, 0, 3]
