"""Read and check configuration files; print the example and the JSON schema."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from canaryd.config import permissions
from canaryd.config.schema import Each, Notes, Section, document, example_lines
from canaryd.config.settings import Config
from canaryd.config.values import PATH
from canaryd.facts import printable

SYSTEM_FILE = Path("/etc/canaryd/canaryd.yaml")
MAX_FILE_BYTES = 1 << 20
MADE = ("state_dir",)
"""Settings whose path canaryd makes where it is missing."""


class ConfigError(Exception):
    """The configuration cannot be used; `problems` has one line per mistake, in file order."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


_RULES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (
        ("worker.python", "worker.command"),
        lambda c: c.worker.python is not None and bool(c.worker.command),
        "worker.python and worker.command are both set; remove one",
    ),
    (
        ("store.keep_successes", "store.keep_failures"),
        lambda c: c.store.keep_failures < c.store.keep_successes,
        "failures would be deleted before successes; make store.keep_failures at least as long as store.keep_successes",
    ),
    (
        ("store.keep_failures",),
        lambda c: c.store.keep_failures < c.judge.watch,
        'failures would be deleted while they count; write at least "30d"',
    ),
)
"""Rules between settings: (settings, whether the rule is broken, message). Reported at the last of the settings."""


def load(path: Path | None, *, system_file: Path = SYSTEM_FILE) -> Config:
    """Read `path`, else the file that $CANARYD_CONFIG names, else `system_file`; without it, return the defaults.

    Raises `ConfigError` with all mistakes at once, each as "FILE:LINE: setting: what was given; what to write".
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
            pass  # reported below, as for any other file
    data = read_bytes(file, by)
    notes = Notes()
    node = document(data, notes)
    config = (Section(Config).read(node, "", notes) if node else None) or Config()
    _check_rules(config, notes)
    raise_problems(file, notes)
    return dataclasses.replace(config, file=file)


def read_bytes(file: Path, by: str = "") -> bytes:
    """Return the content of a configuration file; `by` says who named it.

    Raises `ConfigError` where the file cannot be read, is too large, or where users other than root and this one could
    have written it: it names programs to run, and decides who may read the evidence.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        doubt = permissions.doubt(file)
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such file{by}; name an existing file, or leave it out"]) from None
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


def raise_problems(file: Path, notes: Notes) -> None:
    """Raise `ConfigError` with all problems of a file in file order; do nothing where there are none."""
    if notes.problems:
        in_order = sorted(notes.problems, key=lambda problem: problem[0])
        lines = (f"{file}:{line}: {f'{where}: ' if where else ''}{text}" for line, where, text in in_order)
        raise ConfigError(list(map(printable, lines)))


def _check_rules(config: Config, notes: Notes) -> None:
    wrong = {where for _, where, _ in notes.problems}
    for name, endpoint in config.endpoints.each.items():
        where = f"endpoints.{name}"
        has_settings = any(line.startswith(f"{where}.") for line in notes.lines)
        if not endpoint.url and has_settings and f"{where}.url" not in wrong:
            notes.add_at(where, 'url is missing; write e.g. url: "http://127.0.0.1:8000/v1"')
        for unused in (name for name in ("directory", "prompts") if f"{where}.{name}" in notes.lines):
            if endpoint.exact is not None:
                text = "has no use beside exact, which names the checkpoint and its prompts; remove one of them"
                notes.add_at(f"{where}.{unused}", text)
        if endpoint.command is not None and (text := _bad_command(endpoint.command)):
            notes.add_at(f"{where}.command", text)
    for names, broken, message in _RULES:
        given = [(notes.lines[name], name) for name in names if name in notes.lines]
        if given and not wrong.intersection(names) and broken(config):
            notes.problems.append((*max(given), message))


def _bad_command(command: str) -> str:
    """Return what is wrong with a command that starts a server, "" for nothing."""
    sample = 'write e.g. command: "vllm serve {model} --port {port}"'
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"got {command!r:.200}, which is no shell command ({error}); {sample}"
    if not words:
        return f"got {command!r:.200}, which names no program; {sample}"
    found = set(re.findall(r"\{(\w+)\}", command))
    if missing := sorted({"model", "port"} - found):
        return f"has no {{{missing[0]}}}; {sample}"
    if unknown := sorted(found - {"model", "port"}):
        return f"has {{{unknown[0]}}}; wanted no other than {{model}} and {{port}}"
    return ""


ANSWERS = "expected.json"
"""The file of an exact canary that has its right answers; canaryd/worker/exact_canary/expected.py reads it."""


def missing_files(config: Config) -> list[str]:
    """Return a line for each setting that names a missing file or program; `load` does not check that."""
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
    commands: dict[str, Sequence[str]] = {"worker": config.worker.command}
    commands |= {f"endpoints.{name}": shlex.split(e.command or "") for name, e in config.endpoints.each.items()}
    missing += [
        f"{where}.command: {words[0]} cannot be run here; name a program that can"
        for where, words in commands.items()
        if words and shutil.which(words[0]) is None
    ]
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
        elif kind is PATH and value and value != getattr(default, setting.name) and name not in MADE:
            yield name, value


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the configuration file, for editors; `load` checks more."""
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
