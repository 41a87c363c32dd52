"""Read and check configuration files; print the example and the JSON schema."""

from __future__ import annotations

import dataclasses
import os
import shutil
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from canaryd.config import permissions
from canaryd.config.schema import Each, Notes, Section, document, example_lines
from canaryd.config.settings import Config
from canaryd.config.values import KEY_FILE, PATH

SYSTEM_FILE = Path("/etc/canaryd/canaryd.yaml")
MAX_FILE_BYTES = 1 << 20
MADE = ("state_dir",)
"""Settings that name a directory which canaryd creates if it is missing."""


class ConfigError(Exception):
    """Raised if the configuration cannot be used; `problems` has one line per mistake, in file order."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: Path | None, *, system_file: Path = SYSTEM_FILE) -> Config:
    """Return the settings in `path`, else in the file of $CANARYD_CONFIG, else in `system_file`, else the defaults.

    Raises `ConfigError` with all mistakes at once, each as "FILE:LINE: setting: what was given; what to write".
    """
    named = os.environ.get("CANARYD_CONFIG", "")
    file = path or (Path(named) if named else system_file)
    by = "" if path or not named else " (named by $CANARYD_CONFIG)"
    try:
        data = _read(file, by)
    except FileNotFoundError:
        if path or named:
            raise ConfigError([f"{file}: no such file{by}; name an existing file, or leave it out"]) from None
        return Config()
    notes = Notes()
    node = document(data, notes)
    config = (Section(Config).read(node, "", notes) if node else None) or Config()
    _check_rules(config, notes)
    if notes.problems:
        raise ConfigError(notes.told(file))
    return dataclasses.replace(config, file=file)


def _read(file: Path, by: str) -> bytes:
    """Return the content of a configuration file; `by` names the source of its path in messages.

    Raises `FileNotFoundError`. Raises `ConfigError` if the file cannot be read, is too large, or can be written by
    users other than root and this one, because it names programs to run and decides who can read the stored results.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        doubt = permissions.doubt(file)
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise ConfigError([f"{file}: is a directory{by}; name a YAML file"]) from None
    except OSError as error:
        raise ConfigError(
            [f"{file}: cannot read it{by}: {error.strerror}; make it readable or name another file"]
        ) from error
    if doubt:
        raise ConfigError([f"{file}{by}: {doubt}"])
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{file}: larger than 1 MiB{by}; name a configuration file of canaryd"])
    return data


def _check_rules(config: Config, notes: Notes) -> None:
    """Note settings that contradict other settings, except settings that are already noted as wrong."""
    wrong = {where for _, where, _ in notes.problems}
    for where, text in list(_contradictions(config, notes.lines, wrong)):
        if where not in wrong:
            notes.add_at(where, text)


def _contradictions(config: Config, given: Collection[str], wrong: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (setting, message) for contradictions. `given`: the file's settings. `wrong`: those with noted mistakes."""
    if config.worker.python and config.worker.command:
        yield "worker.python", "worker.python and worker.command are both set; remove one"
    if config.store.keep_failures < config.store.keep_successes:
        yield "store.keep_failures", 'failures would be deleted before the other runs; write at least "45d"'
    for name, endpoint in config.endpoints.each.items():
        where = f"endpoints.{name}"
        if not endpoint.url and f"{where}.url" not in wrong and any(n.startswith(f"{where}.") for n in given):
            yield where, 'url is missing; write e.g. url: "http://127.0.0.1:8000/v1"'
        for unused in (f"{where}.{setting}" for setting in ("directory", "prompts")):
            if endpoint.exact is not None and unused in given:
                yield unused, "has no use beside exact, which names the checkpoint and its prompts; remove one of them"


ANSWERS = "expected.json"
"""File of an exact canary with the right answers; canaryd/worker/exact_canary/expected.py reads it."""


def missing_files(config: Config) -> list[str]:
    """Return a line for each setting whose file or program is missing; `load` does not check that."""
    missing = [
        f"{where}: {value} does not exist; create it, or correct the setting"
        for where, value in _named_files(config, "")
        if not value.exists()
    ]
    missing += [
        f"endpoints.{name}.exact: {endpoint.exact} holds no {ANSWERS}; write it with canaryd canary export"
        for name, endpoint in config.endpoints.each.items()
        if endpoint.exact and endpoint.exact.exists() and not (endpoint.exact / ANSWERS).exists()
    ]
    command = config.worker.command
    if command and shutil.which(command[0]) is None:
        missing.append(f"worker.command: {command[0]} cannot be run here; name a program that can")
    return missing


def _named_files(section: Any, where: str) -> Iterator[tuple[str, Path]]:
    default = type(section)()
    for setting in dataclasses.fields(section):
        kind, value = setting.metadata.get("kind"), getattr(section, setting.name)
        name = f"{where}{setting.name}"
        if isinstance(kind, Each):
            for each, settings in value.items():
                yield from _named_files(settings, f"{where}{each}.")
        elif isinstance(kind, Section):
            yield from _named_files(value, f"{name}.")
        elif kind in (PATH, KEY_FILE) and value and value != getattr(default, setting.name) and name not in MADE:
            yield name, value


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the configuration file, for editors. `load` checks more."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "canaryd.yaml"}
    return {**head, **Section(Config).schema()}


def example() -> str:
    """Return a commented configuration file with every setting; deploy/canaryd.yaml is this text."""
    head = """\
        # The configuration of canaryd: /etc/canaryd/canaryd.yaml, or the file that $CANARYD_CONFIG or --config names.
        # It shows every setting with its default, or with an example where the text names the default.
        # To change a setting, delete the "#" before its name. Then run: canaryd config check
        # Write durations as "90s", "15m", "2h" or "30d", and sizes as "256MiB".
        """
    return textwrap.dedent(head) + "\n".join(example_lines(Config, "")) + "\n"
