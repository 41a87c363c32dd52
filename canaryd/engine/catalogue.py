"""Find probe files without importing them.

The files come from canaryd itself, from the operator's directories, and from enabled entry points. Only a worker
imports a probe file and reads its `SPEC`. `load` joins the files with the specs that a worker read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from canaryd.config import permissions
from canaryd.formatting import did_you_mean
from canaryd.probe import ProbeSpec

GROUP = "canaryd.probes"
"""Entry-point group of third-party probes; each value names a module with one probe."""


@dataclass(frozen=True, kw_only=True)
class ProbeFile:
    """A probe file."""

    name: str
    """Stem of the file name, or name of the entry point. It must equal the file's `SPEC.name`."""
    path: Path
    source: str
    """Kind of place where the file was found: "builtin", "directory" or "entry point"."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A probe that can run: its file and its spec."""

    spec: ProbeSpec
    file: ProbeFile


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The reason why one probe is missing from the catalogue; the other probes still work."""

    where: str
    """Path of the file or directory, or name of the entry point."""
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def builtin_directory() -> Path:
    """Return the directory of canaryd's own probes: in the checkout if there is one, else in the installed wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "probes").is_dir():
        return checkout / "probes"
    return package / "probes.d"


def find(
    directories: Iterable[Path], enabled: Collection[str] = (), *, builtin: Path | None = None
) -> tuple[list[ProbeFile], list[Problem]]:
    """Return the probe files, and the problems of places and files that cannot be used. Nothing is imported.

    The files are the built-in probes, those in `directories`, and installed entry points whose names are in `enabled`.
    Of two probes with one name the first is kept. `builtin` replaces canaryd's own directory.
    """
    problems: list[Problem] = []
    found: dict[str, ProbeFile] = {}
    candidates = [
        *_in_directory(builtin or builtin_directory(), "builtin"),
        *(result for directory in directories for result in _in_directory(directory, "directory")),
        *(_at(point) for point in entry_points(group=GROUP) if point.name in enabled),
    ]
    for candidate in candidates:
        if isinstance(candidate, Problem):
            problems.append(candidate)
        elif candidate.name in found:
            first = found[candidate.name].path
            message = f"the name {candidate.name!r} is already used by {first}, which is kept; rename one of the two"
            problems.append(Problem(where=str(candidate.path), message=message))
        else:
            found[candidate.name] = candidate
    return list(found.values()), problems


def load(
    files: Iterable[ProbeFile], described: Mapping[Path, ProbeSpec | str]
) -> tuple[dict[str, Entry], list[Problem]]:
    """Return (probe name → usable probe, problems); `described`: path → spec that a worker read, or error."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for file in files:
        spec = described.get(file.path, "the worker did not describe it")
        if isinstance(spec, str):
            problems.append(Problem(where=str(file.path), message=spec))
        elif spec.name != file.name:
            message = f"its SPEC.name is {spec.name!r}, but the probe is named {file.name!r}; make the two equal"
            problems.append(Problem(where=str(file.path), message=message))
        else:
            entries[file.name] = Entry(spec=spec, file=file)
    return entries, problems


def unknown(named: Iterable[str], files: Iterable[ProbeFile]) -> list[str]:
    """Return a line for each probe name in the configuration that no file provides."""
    known = {file.name for file in files}
    return [
        f"probes.{name}: no probe of that name was found{did_you_mean(name, known)}"
        for name in named
        if name not in known
    ]


def unknown_settings(entry: Entry, given: Iterable[str]) -> list[str]:
    """Return a line for each configured setting that a probe lacks; one of a third party may declare none."""
    name, known = entry.spec.name, entry.spec.settings
    if not known and entry.file.source != "builtin":
        return []
    has = f"; {name} has {', '.join(known) or 'none'}"
    return [
        f"probes.{name}.settings.{each}: no such setting{did_you_mean(each, known) or has}"
        for each in given
        if each not in known
    ]


ABSENT = "there is no such directory; create it, or correct probes.directories"


def _in_directory(directory: Path, source: str) -> Iterator[ProbeFile | Problem]:
    if source == "directory" and not os.path.lexists(directory):
        yield Problem(where=str(directory), message=ABSENT)
        return
    if source == "directory" and (problem := _untrusted(directory)):
        yield problem
        return
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        yield Problem(where=str(directory), message=f"cannot list it: {error.strerror}")
        return
    probes = [path for path in paths if path.suffix == ".py" and not path.name.startswith(("_", "."))]
    if source == "directory" and (problems := _unsafe_neighbours(directory, probes)):
        yield from problems
        return
    for path in probes:
        if source == "directory" and (problem := _untrusted(path)):
            yield problem
        elif path.is_file():
            yield ProbeFile(name=path.stem, path=path, source=source)


def _unsafe_neighbours(directory: Path, probes: Collection[Path]) -> list[Problem]:
    """Return a problem for each file beside `probes` that another user could have written: a probe may read it."""
    message = "the probes beside it may read it, so no probe in {} is used: {}"
    others = [Path(folder, name) for folder, below, names in os.walk(directory) for name in (*below, *names)]
    return [
        Problem(where=problem.where, message=message.format(directory, problem.message))
        for path in sorted(others)
        if path not in probes and path.exists() and (problem := _untrusted(path))
    ]


def _untrusted(path: Path) -> Problem | None:
    """Return a problem if users other than root and the daemon's user could have written the file, else None."""
    try:
        doubt = permissions.doubt(path)
    except OSError as error:
        doubt = f"cannot read it: {error.strerror}"
    return Problem(where=str(path), message=doubt) if doubt else None


def _at(point: EntryPoint) -> ProbeFile | Problem:
    """Return the file of an entry point's module, or a problem. The module is not imported: it is foreign code."""
    search: list[str] | None = None
    origin = None
    parts = point.module.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)
        origin = spec.origin if spec else None
        search = list(spec.submodule_search_locations or []) if spec else []
    if origin is None or not origin.endswith(".py"):
        message = f"entry point of {GROUP}: its module {point.module} has no Python file on sys.path; reinstall it"
        return Problem(where=point.name, message=message)
    return ProbeFile(name=point.name, path=Path(origin), source="entry point")
