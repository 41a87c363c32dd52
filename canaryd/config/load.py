"""Read and check configuration files; print the example and the JSON schema."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canaryd.config import permissions
from canaryd.config.schema import (
    Notes,
    Section,
    document,
    example_lines,
)
from canaryd.config.settings import Config, EndpointConfig
from canaryd.model import printable

SYSTEM_FILE = Path("/etc/canaryd/canaryd.yaml")
MAX_FILE_BYTES = 1 << 20


class ConfigError(Exception):
    """The configuration cannot be used; `problems` holds one line per mistake, in file order."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


_RULES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (
        ("worker.python", "worker.command"),
        lambda c: c.worker.python is not None and bool(c.worker.command),
        "worker.python and worker.command are both given; choose one",
    ),
    (
        ("store.keep_successes", "store.keep_failures"),
        lambda c: c.store.keep_failures < c.store.keep_successes,
        "failures would be forgotten before successes; make store.keep_failures at least store.keep_successes",
    ),
    (
        ("store.keep_failures", "judge.watch", "judge.week", "judge.repeat_window"),
        lambda c: c.store.keep_failures < max(c.judge.watch, c.judge.week, c.judge.repeat_window),
        "failures would be forgotten while they still count; make store.keep_failures as long as judge's windows",
    ),
    (
        ("budget.evidence", "judge.stale_after"),
        lambda c: c.budget.evidence is not None and c.budget.evidence >= c.judge.stale_after,
        "evidence would be unknown before a run is forced; make budget.evidence shorter than judge.stale_after",
    ),
    (
        ("judge.repeat_gap", "judge.repeat_window"),
        lambda c: c.judge.repeat_gap >= c.judge.repeat_window,
        "no two mismatches could ever count; make judge.repeat_gap shorter than judge.repeat_window",
    ),
)
"""What settings owe each other: (settings, is it broken?, message). Reported at the last of them in the file."""


def load(path: Path | None, *, system_file: Path = SYSTEM_FILE) -> Config:
    """Read `path`; without one, the file that $CANARYD_CONFIG names, else `system_file` if it exists, else defaults.

    Raises `ConfigError` with every mistake at once, each as "FILE:LINE: setting: what was given; what to write".
    """
    named = os.environ.get("CANARYD_CONFIG", "")
    file = path or (Path(named) if named else system_file)
    by = "" if path or not named else " (named by $CANARYD_CONFIG)"
    if not path and not named:
        try:
            file.stat()
        except FileNotFoundError:
            return Config()
        except OSError:
            pass  # told below, as of any other file
    data = read_bytes(file, by)
    notes = Notes()
    node = document(data, notes)
    config = (Section(Config).read(node, "", notes) if node else None) or Config()
    _check_rules(config, notes)
    raise_problems(file, notes)
    return dataclasses.replace(config, file=file)


def read_bytes(file: Path, by: str = "") -> bytes:
    """Return what a configuration file holds; `by` says who named it.

    Raises `ConfigError` where it cannot be read, is no configuration by its size, or where others than root and this
    user could have written it: it names programs to run, or decides who may read the evidence.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        doubt = permissions.doubt(file)
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such file{by}; name an existing one, or none for the defaults"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{file}: a directory{by}; name a YAML file"]) from None
    except OSError as error:
        raise ConfigError(
            [f"{file}: cannot be read{by}: {error.strerror}; make it readable or name another"]
        ) from error
    if doubt:
        raise ConfigError([f"{file}{by}: {doubt}"])
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{file}: larger than 1 MiB{by}; this cannot be a configuration of canaryd"])
    return data


def raise_problems(file: Path, notes: Notes) -> None:
    """Raise `ConfigError` with all that was noted about a file, in its order; do nothing where nothing was."""
    if notes.problems:
        in_order = sorted(notes.problems, key=lambda problem: problem[0])
        said = (f"{file}:{line}: {f'{where}: ' if where else ''}{text}" for line, where, text in in_order)
        raise ConfigError(list(map(printable, said)))


def _check_rules(config: Config, notes: Notes) -> None:
    wrong = {where for _, where, _ in notes.problems}
    for name, endpoint in config.endpoints.each.items():
        where = f"endpoints.{name}"
        if not endpoint.url and endpoint != EndpointConfig() and f"{where}.url" not in wrong:
            notes.problems.append(
                (notes.lines[where], where, 'url is missing; write e.g. url: "http://127.0.0.1:8000/v1"')
            )
    for names, broken, message in _RULES:
        given = [(notes.lines[name], name) for name in names if name in notes.lines]
        if given and not wrong.intersection(names) and broken(config):
            notes.problems.append((*max(given), message))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the configuration file, for editors; `load` checks more than it can."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "canaryd.yaml"}
    return {**head, **Section(Config).schema()}


def example() -> str:
    """Return a commented configuration file: every setting with its default; deploy/canaryd.yaml is this text."""
    head = """\
        # The configuration of canaryd: /etc/canaryd/canaryd.yaml, or the file that $CANARYD_CONFIG or --config names.
        # Every setting stands here with its default, or with an example where the default says little.
        # To set one, delete the "#" that touches it. Then: canaryd config check
        # Durations are written "90s", "15m", "2h" or "30d"; sizes "256MiB".
        """
    return textwrap.dedent(head) + "\n".join(example_lines(Config, "")) + "\n"
