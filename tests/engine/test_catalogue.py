"""Finding probes without importing them."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

import pytest

from canaryd.engine import catalogue
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series

MISBEHAVING = Path(__file__).parents[1] / "probes"
BOMB = "raise SystemExit('a probe was imported by the daemon')\n"


def directory(place: Path, *names: str) -> Path:
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in names:
        (place / name).write_text(BOMB)
        (place / name).chmod(0o644)
    return place


def test_the_checkouts_probes_are_the_builtin_ones():
    """Beside a checkout's pyproject.toml the directory probes/ wins."""
    assert catalogue.builtin_directory() == Path(__file__).parents[2] / "probes"


@pytest.mark.parametrize("vendor", ["amd", "apple", "ascend", "host", "intel", "nvidia"])
def test_a_probe_declares_the_settings_that_it_takes(vendor):
    """`canaryd config check` knows the same names as the run, which refuses others."""
    spec = runpy.run_path(str(catalogue.builtin_directory() / f"{vendor}_telemetry.py"))["SPEC"]
    with pytest.raises(ValueError, match="no such setting; it has ") as refused:
        importlib.import_module(f"canaryd.worker.telemetry.{vendor}").devices({"unheard": 1})
    assert str(refused.value).partition("it has ")[2] == ", ".join(sorted(spec.settings))


def test_probes_are_found_by_their_stems(tmp_path):
    """Files of Python count; what starts with "_" or ".", directories and data do not. Nothing is imported."""
    builtin = directory(tmp_path / "builtin", "b_probe.py", "a_probe.py", "_shared.py", ".hidden.py", "notes.txt")
    directory(builtin / "golden.py")
    files, problems = catalogue.find([], builtin=builtin)
    assert [(file.name, file.source) for file in files] == [("a_probe", "builtin"), ("b_probe", "builtin")]
    assert files[0].path == builtin / "a_probe.py"
    assert problems == []


def test_a_drop_in_directory_adds_probes(tmp_path):
    """Several directories are searched in their order, after the built-in one."""
    builtin = directory(tmp_path / "builtin", "one.py")
    dirs = [directory(tmp_path / "x", "three.py"), directory(tmp_path / "y", "two.py")]
    files, problems = catalogue.find(dirs, builtin=builtin)
    assert [(file.name, file.source) for file in files] == [
        ("one", "builtin"),
        ("three", "directory"),
        ("two", "directory"),
    ]
    assert problems == []


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_directory_that_others_can_write_is_refused(tmp_path, mode):
    """The daemon may run as root: whoever can write there would be root."""
    place = directory(tmp_path / "x", "mine.py")
    place.chmod(mode)
    files, (problem,) = catalogue.find([place], builtin=directory(tmp_path / "builtin"))
    assert files == []
    assert problem.where == str(place)
    assert "chmod go-w" in problem.message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_refused(tmp_path):
    """Owner root or the daemon's own user, for the directory and for each file, through symlinks too."""
    place = directory(tmp_path / "x", "good.py", "strange.py")
    elsewhere = directory(tmp_path / "y", "target.py")
    os.chown(place / "strange.py", 12345, -1)
    os.chown(elsewhere / "target.py", 12345, -1)
    (place / "linked.py").symlink_to(elsewhere / "target.py")
    files, problems = catalogue.find([place], builtin=directory(tmp_path / "builtin"))
    assert [file.name for file in files] == ["good"]
    assert [problem.where for problem in problems] == [str(place / "linked.py"), str(place / "strange.py")]
    assert all("belongs to user 12345" in problem.message for problem in problems)
    os.chown(place, 12345, -1)
    files, problems = catalogue.find([place], builtin=tmp_path / "builtin")
    assert (files, [problem.where for problem in problems]) == ([], [str(place)])


def test_what_is_not_there_is_a_problem(tmp_path):
    """A missing directory, a file for a directory and a dangling link are named; the rest is found."""
    place = directory(tmp_path / "x", "good.py")
    (place / "dangling.py").symlink_to(tmp_path / "nowhere")
    files, problems = catalogue.find(
        [tmp_path / "missing", place / "good.py", place], builtin=directory(tmp_path / "builtin")
    )
    assert [file.name for file in files] == ["good"]
    assert [Path(problem.where).name for problem in problems] == ["missing", "good.py", "dangling.py"]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with two probes in a package that must not be imported, and one whose module is gone."""
    site = tmp_path / "site"
    package = directory(site / "acme_probes" / "numeric", "__init__.py", "lasers.py", "masers.py")
    (package.parent / "__init__.py").write_text(BOMB)
    info = site / "acme_probes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-probes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[canaryd.probes]\nlasers = acme_probes.numeric.lasers\nmasers = acme_probes.numeric.masers\n"
        "gone = acme_probes.numeric.gone\nlost = nobody_at_all.gone\n"
    )
    monkeypatch.syspath_prepend(str(site))
    return package


def test_installed_is_not_enabled(installed, tmp_path):
    """An entry point counts only when the configuration names it; its file is found without importing a parent."""
    builtin = directory(tmp_path / "builtin", "one.py")
    assert [file.name for file in catalogue.find([], builtin=builtin)[0]] == ["one"]
    files, problems = catalogue.find([], {"lasers", "one", "not_installed"}, builtin=builtin)
    assert [(file.name, file.path, file.source) for file in files] == [
        ("one", builtin / "one.py", "builtin"),
        ("lasers", installed / "lasers.py", "entry point"),
    ]
    assert problems == []
    assert not any(name.startswith("acme_probes") for name in sys.modules)


def test_an_entry_point_without_a_file_is_a_problem(installed, tmp_path):
    """Half an uninstallation is told by name and module."""
    builtin = directory(tmp_path / "builtin")
    files, problems = catalogue.find([], {"gone", "lost", "masers"}, builtin=builtin)
    assert [file.name for file in files] == ["masers"]
    assert sorted(problem.where for problem in problems) == ["gone", "lost"]
    assert "acme_probes.numeric.gone" in "".join(problem.message for problem in problems)


def test_a_catalogue_of_misbehaving_probes_loads_its_good_ones():
    """Through a real worker: those that break at import are problems, all others are there."""
    files, problems = catalogue.find([], builtin=MISBEHAVING)
    assert problems == []
    with Series(WorkerSpec(), grace=0.5) as series:
        described = series.describe([file.path for file in files if file.name != "hangs_at_import"], timeout=20.0)
    entries, problems = catalogue.load(files, described.probes)
    broken = {Path(problem.where).stem for problem in problems}
    assert broken == {
        "bad_name",
        "bad_spec",
        "crashes_at_import",
        "exits_at_import",
        "hangs_at_import",
        "no_run",
        "raises_at_import",
        "wrong_name",
    }
    assert set(entries) == {file.name for file in files} - broken
