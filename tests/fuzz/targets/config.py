"""The configuration file: `config.load`, and values as people spell them.

Only `ConfigError`; every problem is one printable line that begins with the file and a line that the file has. What is
accepted is within its bounds, loads again to an equal configuration of equal hash, and is plain JSON where it travels.
"""
# ruff: noqa: PT017  a refusal is examined where it is caught: most inputs are none

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from canaryd.codec import to_json
from canaryd.config import load, schema, values
from canaryd.config.schema import quoted
from canaryd.config.settings import Config
from tests.fuzz.material import LETTERS, Choices, modes, seed
from tests.fuzz.properties import one_line, scratch

ROOT = Path(__file__).resolve().parents[3]


def _load(data: bytes) -> None:
    with scratch.fresh() as place:
        file = place / "c.yaml"
        file.write_bytes(data)
        try:
            found = load.load(file)
        except load.ConfigError as error:
            assert error.problems
            for problem in error.problems:
                one_line(problem)
                assert problem.startswith(f"{file}:"), problem
                number = problem[len(f"{file}:") :].partition(":")[0]
                if "larger than" not in problem:
                    assert 1 <= int(number) <= data.count(b"\n") + data.count(b"\r") + 3 * len(data) // 2 + 2, problem
            return
        again = load.load(file)
        assert again == found
        assert hash(again) == hash(found)
    bounded(found)
    for settings in found.probes.each.values():
        json.dumps(to_json(settings.settings), allow_nan=False).encode()


def bounded(value: object) -> None:
    """Durations, sizes and counts are positive and finite; hosts and paths are text without a NUL."""
    for setting in dataclasses.fields(value):  # type: ignore[arg-type]
        kind, given = setting.metadata.get("kind"), getattr(value, setting.name)
        if dataclasses.is_dataclass(given):
            bounded(given)
        elif setting.name == "each":
            for one in given.values():
                bounded(one)
        elif kind is values.DURATION and given is not None:
            assert 0 < given <= values.MAX_SECONDS, (setting.name, given)
        elif kind is values.SIZE:
            assert 1 << 20 <= given <= values.MAX_BYTES, (setting.name, given)
        elif kind is values.LISTEN:
            host, port = given
            assert 0 <= port <= 65_535
            assert "\0" not in host
        elif kind is values.PATH and given is not None:
            assert given.is_absolute(), given
            assert "\0" not in str(given)
        elif kind is values.URL and given:
            assert "@" not in given.split("/")[2], "a password would stand in a log"


def _value(data: bytes) -> None:
    choices = Choices(data)
    text = choices.text() if choices.flag() else choices.rest().decode("utf-8", "replace")
    for parse in (values.parse_duration, values.parse_size, values.parse_listen, values._url, values._absolute):
        try:
            found = parse(text)
        except ValueError as error:
            one_line(str(error))
        else:
            assert not isinstance(found, float) or (found > 0 and math.isfinite(found))
            assert not isinstance(found, int) or found > 0
    one_line(quoted(text))


DURATIONS = ("1s", "15m", "2h", "30d", "0s", "-1s", "1e5s", "99999999999d", "0.0000001s", "15", "1 h", "१s")


def _built(data: bytes) -> None:
    """A file of settings that exist, with values that mostly do."""
    choices = Choices(data)
    said = []
    for _ in range(choices.below(6) + 1):
        name, kind = choices.of(SETTINGS)
        value = choices.of(DURATIONS) if choices.flag() else choices.text()
        if choices.flag() and kind:
            value = kind
        *sections, last = name.split(".")
        indents = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
        shown = value if choices.flag() else json.dumps(value)
        said += [*indents, f"{'  ' * len(sections)}{last}: {shown}"]
    _load("\n".join(said).encode("utf-8", "surrogatepass"))


def _settings(cls: type, where: str = "") -> list[tuple[str, str]]:
    found = []
    for setting in dataclasses.fields(cls):
        kind = setting.metadata.get("kind")
        name = f"{where}{setting.name}"
        if isinstance(kind, schema.Each):
            found += _settings(kind.cls, f"{where}main.")
        elif isinstance(kind, schema.Section):
            found += _settings(kind.cls, f"{name}.")
        elif kind is not None:
            found.append((name, setting.metadata["sample"] or setting.metadata["default"]))
    return found


SETTINGS = _settings(Config)

target = modes(_load, _built, _value)


def seeds() -> list[bytes]:
    example = load.example()
    active = "\n".join(line.replace("#", "", 1) if line.lstrip().startswith("#") and not line.lstrip().startswith("# ")
                       else line for line in example.split("\n"))  # fmt: skip
    files = [file.read_bytes() for file in sorted((ROOT / "tests/data/bad-config").glob("*.yaml"))]
    return [
        *(seed(0, file) for file in (example, active, *files)),
        *(seed(1, bytes(range(n, n + 30))) for n in range(0, 200, 20)),
        *(
            seed(2, b"\x01" + text.encode())
            for text in ("15m", "256MiB", "[::1]:80", "http://a:1/v1", "/x", LETTERS[:40])
        ),
    ]
