"""Before a migration the store copies its database: the way back to the release that wrote it."""

import contextlib
import os
import resource
import shutil
import sqlite3
import stat
import subprocess

import pytest

from canaryd.model import Outcome, Run
from canaryd.store.database import StoreTooNew
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.store import Store

OLDER, NEWER = {5: MIGRATIONS[5]}, {**MIGRATIONS, 99: lambda db: None}
"""What release 0.1.0 knows, and what a release after this one might."""
DAEMON = 19469
"""A user's number that is not root's."""


def run(name):
    fields = {"device": "GPU-1", "probe": "exact_matmul", "probe_version": 1, "started": 1_790_000_000.0}
    return Run(id=name, seconds=1.0, outcome=Outcome.COMPLETED, **fields)


def release_0_1_0(place, size=0):
    """Make a database as release 0.1.0 left it, with a note of that size, part of it in the log; keep it open."""
    store = Store.open(place, migrations=OLDER)
    store.set_note("known", "faulty" + "x" * size)
    assert (place / "canaryd.db-wal").stat().st_size > size
    return store


def content(path):
    """Return version and notes of a database that lies alone."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return version, dict(db.execute("SELECT name, value FROM notes"))


def beside(place):
    """Return what lies in a state directory beside the database and its log."""
    names = {path.name for path in place.iterdir()} - {"canaryd.db", "canaryd.db-wal", "canaryd.db-shm"}
    return names - {"canaryd.db.lock"}


@contextlib.contextmanager
def no_file_above(size):
    """Refuse what would make any file of this process larger, as a quota does: free room is still told."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_migration_keeps_a_copy_with_what_the_log_held(tmp_path):
    """The older release opens the copy in the database's place and knows what it knew, while it was open elsewhere."""
    with release_0_1_0(tmp_path), Store.open(tmp_path) as store:
        assert store.add_run(run("new"))
        assert (store.problem, store.problems) == ("", [])
    assert beside(tmp_path) == {"canaryd.db.version-5"}
    assert content(tmp_path / "canaryd.db")[0] == max(MIGRATIONS)
    assert content(tmp_path / "canaryd.db.version-5")[0] == 5
    with pytest.raises(StoreTooNew, match=r"canaryd\.db\.version-5 is a copy from before the conversion"):
        Store.open(tmp_path, migrations=OLDER)
    (tmp_path / "canaryd.db.version-5").replace(tmp_path / "canaryd.db")
    with Store.open(tmp_path, migrations=OLDER) as store:
        assert store.note("known") == "faulty"
        assert store.set_note("still", "works")


def test_nothing_is_copied_without_a_migration(tmp_path):
    """A new database, one of this version, and one that is only read."""
    Store.open(tmp_path / "a").close()
    Store.open(tmp_path / "a").close()
    assert beside(tmp_path / "a") == set()
    release_0_1_0(tmp_path / "b").close()
    with Store.open(tmp_path / "b", for_reading=True) as store:
        assert store.unreadable.endswith("start the daemon or run canaryd check to convert it")
    assert beside(tmp_path / "b") == set()
    assert content(tmp_path / "b/canaryd.db")[0] == 5


def test_the_copy_has_owner_and_mode_of_the_database(tmp_path):
    """A check that root runs first after an upgrade leaves a copy that the daemon's release may put back."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can give files away")
    release_0_1_0(tmp_path).close()
    os.chown(tmp_path / "canaryd.db", DAEMON, DAEMON)
    (tmp_path / "canaryd.db").chmod(0o640)
    Store.open(tmp_path).close()
    told = (tmp_path / "canaryd.db.version-5").stat()
    assert (told.st_uid, told.st_gid, stat.S_IMODE(told.st_mode)) == (DAEMON, DAEMON, 0o640)


def test_only_the_copy_of_the_last_migration_stays(tmp_path):
    """It holds what the copy before it held; what a way back has set aside is nobody's copy and stays."""
    release_0_1_0(tmp_path).close()
    Store.open(tmp_path).close()
    (tmp_path / "canaryd.db.version-5.20261125T000000Z").touch()
    assert content(tmp_path / "canaryd.db.version-5")[0] == 5
    Store.open(tmp_path, migrations=NEWER).close()
    assert beside(tmp_path) == {f"canaryd.db.version-{max(MIGRATIONS)}", "canaryd.db.version-5.20261125T000000Z"}


def test_several_migrations_at_once_keep_one_copy_of_what_was_there(tmp_path):
    """A release that was skipped never wrote this database, so no copy of its version is made."""
    release_0_1_0(tmp_path).close()
    Store.open(tmp_path, migrations=NEWER).close()
    assert beside(tmp_path) == {"canaryd.db.version-5"}
    assert content(tmp_path / "canaryd.db")[0] == 99


def test_a_second_migration_from_the_same_version_replaces_its_copy(tmp_path):
    """After a way back the older release has gone on: what it recorded is in the next copy."""
    release_0_1_0(tmp_path).close()
    Store.open(tmp_path).close()
    (tmp_path / "canaryd.db.version-5").replace(tmp_path / "canaryd.db")
    with Store.open(tmp_path, migrations=OLDER) as store:
        store.set_note("later", "recorded")
    (tmp_path / "canaryd.db.version-5.new").write_bytes(b"left by a kill")
    Store.open(tmp_path).close()
    assert content(tmp_path / "canaryd.db.version-5")[1].keys() >= {"known", "later"}
    assert beside(tmp_path) == {"canaryd.db.version-5"}


def test_without_room_for_a_copy_nothing_is_converted_until_there_is(small_disk):
    """The store works from memory, says what is missing, and goes on with history and runs once there is room."""
    release_0_1_0(small_disk, 200_000).close()
    before = (small_disk / "canaryd.db").read_bytes()
    filler = small_disk / "others"
    filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
    with Store.open(small_disk) as store:
        assert "an older canaryd wrote it, and it cannot be copied to canaryd.db.version-5 beside it: " in store.problem
        assert "that and the conversion need " in store.problem
        assert "kB are free; make room; canaryd then copies and converts it" in store.problem
        assert not store.add_run(run("new"))
        assert [r.id for r in store.runs()] == ["new"]
        assert (small_disk / "canaryd.db").read_bytes() == before
        assert beside(small_disk) == {"others"}
        filler.unlink()
        assert store.add_run(run("newer"))
        assert [r.id for r in store.runs()] == ["new", "newer"]
        assert store.note("known").startswith("faulty")
    assert beside(small_disk) == {"canaryd.db.version-5"}


def test_a_copy_that_fails_half_way_leaves_no_trace(tmp_path):
    """A quota ends it where free room was told: the file of before stays, and the copy of before it too."""
    release_0_1_0(tmp_path, 300_000).close()
    (tmp_path / "canaryd.db.version-5").write_bytes(b"of before")
    before = (tmp_path / "canaryd.db").read_bytes()
    with no_file_above(100_000), Store.open(tmp_path) as store:
        assert "it cannot be copied to canaryd.db.version-5 beside it: " in store.problem
        assert not store.set_note("new", "one")
    assert (tmp_path / "canaryd.db").read_bytes() == before
    assert (tmp_path / "canaryd.db.version-5").read_bytes() == b"of before"
    assert beside(tmp_path) == {"canaryd.db.version-5"}


def test_a_directory_that_cannot_be_written_is_said_and_left_alone(small_disk):
    """Without a copy no migration, and no advice to start what runs already."""
    release_0_1_0(small_disk).close()
    before = (small_disk / "canaryd.db").read_bytes()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with Store.open(small_disk) as store:
        assert "an older canaryd wrote it: it can only be read here; run as its owner" in store.problem
        assert not store.set_note("new", "one")
        assert (small_disk / "canaryd.db").read_bytes() == before
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert store.set_note("newer", "one")
        assert (store.note("known"), store.note("new")) == ("faulty", "one")
    assert beside(small_disk) == {"canaryd.db.version-5"}


def test_a_conversion_that_fails_leaves_no_copy(small_disk):
    """The database is as it was: a copy would fill the disk, and each further try wants room for another."""
    release_0_1_0(small_disk).close()
    before = content(small_disk / "canaryd.db")

    def grows(db):
        db.execute("CREATE TABLE large AS SELECT zeroblob(900000)")

    with Store.open(small_disk, migrations={**OLDER, max(MIGRATIONS): grows}) as store:
        assert "full" in store.problem
        assert beside(small_disk) == set()
    assert content(small_disk / "canaryd.db") == before


def test_what_a_kill_left_goes_at_the_next_opening_that_writes(tmp_path):
    """Half a copy, and the copies before the last: by number, for version-10 sorts before version-5."""
    Store.open(tmp_path, migrations=NEWER).close()
    for name in ("5", "10", "10.new", "11", "11.20261125T000000Z", "100"):
        (tmp_path / f"canaryd.db.version-{name}").touch()
    Store.open(tmp_path, migrations=NEWER, for_reading=True).close()
    assert len(beside(tmp_path)) == 6
    Store.open(tmp_path, migrations=NEWER).close()
    assert beside(tmp_path) == {f"canaryd.db.version-{name}" for name in ("11", "11.20261125T000000Z", "100")}


def test_the_copy_gets_its_owner_where_modes_are_refused(tmp_path, monkeypatch):
    """As on a file system without modes: without the owner the daemon's release could not open the copy."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can give files away")
    release_0_1_0(tmp_path).close()
    os.chown(tmp_path / "canaryd.db", DAEMON, DAEMON)

    def refuse(fd, mode):
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refuse)
    Store.open(tmp_path).close()
    told = (tmp_path / "canaryd.db.version-5").stat()
    assert (told.st_uid, told.st_gid) == (DAEMON, DAEMON)


def test_the_copy_of_a_backup_that_was_put_back_stays(tmp_path):
    """A copy with a higher number, made before it, knows nothing of it."""
    Store.open(tmp_path, migrations=NEWER).close()
    (tmp_path / "canaryd.db").unlink()
    (tmp_path / "canaryd.db.version-7").touch()
    os.utime(tmp_path / "canaryd.db.version-7", (1, 1))
    release_0_1_0(tmp_path).close()
    for _ in range(2):
        Store.open(tmp_path, migrations=NEWER).close()
    assert beside(tmp_path) == {"canaryd.db.version-5", "canaryd.db.version-7"}
