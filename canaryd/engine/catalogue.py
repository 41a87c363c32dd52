"""Finds probe files without importing any: the catalogue, an operator's directories, enabled entry points.

What a file says of itself (its `SPEC`) only a worker can tell, because only a worker may import it; `load` joins both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from canaryd.config import permissions
from canaryd.probe import ProbeSpec

GROUP = "canaryd.probes"
"""Entry-point group of third-party probes; each value names a module that holds one probe."""


@dataclass(frozen=True, kw_only=True)
class ProbeFile:
    """A probe as found on disk."""

    name: str
    """File stem, or the entry point's name; what its `SPEC.name` must be."""
    path: Path
    source: str
    """"builtin", "directory" or "entry point"."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A probe that can be run."""

    spec: ProbeSpec
    file: ProbeFile


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why something is not in the catalogue; the rest of the catalogue is not affected."""

    where: str
    """A path, or the name of an entry point."""
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def builtin_directory() -> Path:
    """Return the directory of canaryd's own probes: the checkout's where there is one, else the wheel's."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "probes").is_dir():
        return checkout / "probes"
    return package / "probes.d"


def find(
    directories: Iterable[Path], enabled: Collection[str] = (), *, builtin: Path | None = None
) -> tuple[list[ProbeFile], list[Problem]]:
    """List probes: the built-in ones, those in an operator's `directories`, and `enabled` entry points.

    Installed is not enabled: an entry point is listed only if its name is in `enabled`. Nothing is imported. Of two
    probes of one name the first found is kept. `builtin` replaces canaryd's own directory.
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
            message = f"the name {candidate.name!r} is taken by {first}, which is kept; rename one of the two"
            problems.append(Problem(where=str(candidate.path), message=message))
        else:
            found[candidate.name] = candidate
    return list(found.values()), problems


def load(
    files: Iterable[ProbeFile], described: Mapping[Path, ProbeSpec | str]
) -> tuple[dict[str, Entry], list[Problem]]:
    """Join probe files with what a worker says of them: path → its spec, or what is wrong with it."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for file in files:
        spec = described.get(file.path, "the worker said nothing about it")
        if isinstance(spec, str):
            problems.append(Problem(where=str(file.path), message=spec))
        elif spec.name != file.name:
            message = f"its SPEC.name is {spec.name!r}, but it was found as {file.name!r}; the two must be equal"
            problems.append(Problem(where=str(file.path), message=message))
        else:
            entries[file.name] = Entry(spec=spec, file=file)
    return entries, problems


def _in_directory(directory: Path, source: str) -> Iterator[ProbeFile | Problem]:
    if source == "directory" and (problem := _untrusted(directory)):
        yield problem
        return
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        yield Problem(where=str(directory), message=f"cannot be listed: {error.strerror}")
        return
    probes = [path for path in paths if path.suffix == ".py" and not path.name.startswith(("_", "."))]
    if source == "directory" and (problems := _beside(directory, probes)):
        yield from problems
        return
    for path in probes:
        if source == "directory" and (problem := _untrusted(path)):
            yield problem
        elif path.is_file():
            yield ProbeFile(name=path.stem, path=path, source=source)


def _beside(directory: Path, probes: Collection[Path]) -> list[Problem]:
    """Return what is wrong with files that are no probes: any probe may read them, so none of them is safe."""
    message = "every probe beside it may read it, so none in {} is used: {}"
    others = [Path(folder, name) for folder, below, names in os.walk(directory) for name in (*below, *names)]
    return [
        Problem(where=problem.where, message=message.format(directory, problem.message))
        for path in sorted(others)
        if path not in probes and path.exists() and (problem := _untrusted(path))
    ]


def _untrusted(path: Path) -> Problem | None:
    """Return a problem where somebody other than root and the daemon's user could have written what is at `path`."""
    try:
        doubt = permissions.doubt(path)
    except OSError as error:
        doubt = f"cannot be read: {error.strerror}"
    return Problem(where=str(path), message=doubt) if doubt else None


def _at(point: EntryPoint) -> ProbeFile | Problem:
    """Return the file of an entry point's module, found part by part: importing would run strangers' code here."""
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
