"""scripts/install and scripts/deb in a scratch root: what lies where, what an upgrade keeps, what a failure leaves.

tests/test_boot.py runs both on a booted machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from canaryd import __version__, config
from tests.boot.machine import copy_clone
from tests.command import ROOT, environment

UNITS = {
    "usr/local/lib/systemd/system/canaryd.service": "canaryd.service",
    "usr/local/lib/systemd/system/canaryd-check@.service": "canaryd-check@.service",
    "usr/local/lib/sysusers.d/canaryd.conf": "canaryd.sysusers",
    "usr/local/lib/tmpfiles.d/canaryd.conf": "canaryd.tmpfiles",
}
LEFT_OUT = {"psutil", "bcrypt"}
"""Compiled, and asked by no daemon on Linux without passwords."""
PACKAGES = {
    Requirement(line.split()[0])
    for line in (ROOT / "packaging/requirements.txt").read_text().splitlines()
    if not line.startswith("#")
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A directory of wheels as somebody without a network would carry them: docs/install.md has the command."""
    directory = tmp_path_factory.mktemp("wheels")
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "-w", directory]
    clone = copy_clone(tmp_path_factory.mktemp("source") / "canaryd")
    done = subprocess.run([*argv, clone, "hatchling"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip could not fetch the wheels of canaryd's dependencies: {done.stderr.strip().splitlines()[-1]}")
    return directory


def script(name: str, *arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts of this clone on this interpreter."""
    argv = [ROOT / "scripts" / name, *map(str, arguments)]
    variables = environment(PYTHON=sys.executable, **extra)
    return subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=500, check=False)


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


def test_an_installation_has_every_part_in_its_place(tmp_path, wheels):
    """Programs in /opt, units in /usr/local, a valid configuration in /etc; nothing was started, and it says so."""
    done = install(tmp_path, wheels)
    assert done.returncode == 0, done.stderr
    assert f"canaryd {__version__} is installed; nothing was started" in done.stdout
    for path, source in UNITS.items():
        assert (tmp_path / path).read_text() == (ROOT / "systemd" / source).read_text()
    assert (tmp_path / "usr/local/bin/canaryd").readlink() == Path("/opt/canaryd/bin/canaryd")
    assert (tmp_path / "etc/canaryd/canaryd.yaml").read_text() == config.example()
    assert (tmp_path / "etc/canaryd/probes.d").is_dir()
    program = tmp_path / "opt/canaryd/bin/canaryd"
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"canaryd {__version__}\n"
    yaml = tmp_path / "etc/canaryd/canaryd.yaml"
    subprocess.run([program, "config", "check", "--config", yaml], check=True, capture_output=True)


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
    assert config.load(file).worker.python == "/opt/canaryd-torch/bin/python3"
    file.write_text("")
    done = install(tmp_path, wheels, CANARYD_TORCH="tzlocal")
    assert done.returncode == 0
    assert "worker.python" in done.stdout
    assert file.read_text() == ""


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
    assert {each.name.lower() for each in wanted} - LEFT_OUT == set(carried) - {"tzlocal"}  # APScheduler's
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
    # The last two are what Debian's bcrypt imports: without them it is there and cannot be imported.
    assert linked >= {"bcrypt", "psutil", "six.py", "_cffi_backend.cpython-311-x86_64-linux-gnu.so"}
    if shutil.which("lintian") is None:
        pytest.skip("equal bytes; lintian is not installed (apt install lintian), so the package was not linted")
    argv = ["lintian", "--allow-root", "--fail-on", "error,warning", built[0]]
    linted = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
