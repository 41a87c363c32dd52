"""Declare, read and describe settings: strict YAML, with every mistake noted at its line.

A dataclass whose fields are made by `setting` and `section` is a schema: each field has its kind, its default as YAML
text, and a description. Validation, defaults, the JSON Schema and the commented example are made from these.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from canaryd.facts import printable
from canaryd.formatting import did_you_mean
from canaryd.hidden import bare

MAX_DEPTH = 32
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


# --- Strict YAML -----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """A YAML loader without the parts of YAML 1.1 that settings do not need: aliases, tags, dates, octal numbers."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own attribute
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return one composed node. Raises `MarkedYAMLError` for YAML that a configuration file does not need."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self.depth += 1
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            # Not repeated, here and below: it may be a password without its quotes.
            problem = "an alias (*…) is not supported; put the text in quotes, or write the value out"
        elif event.tag is not None:
            problem = "a tag (!…) is not supported; put the text in quotes, or write a plain value"
        elif self.depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} levels deep; use fewer levels"
        elif isinstance(event, yaml.ScalarEvent) and re.search(r"[\0\ud800-\udfff]", event.value):
            problem = "a text contains a NUL or an unpaired surrogate; remove it"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    ("bool", rf"(?i:{'|'.join(_TRUE + _FALSE)})", "tTyYoOfFnN"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"(?i:[-+]?\.inf|\.nan)", "-+."),
    ("null", r"(?i:~|null|)", "~nN\0"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), ["" if c == "\0" else c for c in _first]
    )


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    except (OverflowError, ValueError) as error:  # PyYAML asks Python for the character of any number after \U
        problem = 'a text contains "\\U" with a number of no character; write at most "\\U0010FFFF"'
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=loader.get_mark()) from error


def _type(node: yaml.Node) -> str:
    """Return the type of a node: "str", "bool", "int", "float", "null", "seq" or "map"."""
    return str(node.tag).rpartition(":")[2]


def _given(node: yaml.Node) -> str:
    """Return the first half of a message "…; wanted …": it says what the file has, such as "a list is given"."""
    kind = _type(node)
    if kind == "str":
        return f"{quoted(node.value)} is text"
    if kind in ("bool", "int", "float"):
        return f"{quoted(node.value)[1:-1]} is {'a boolean' if kind == 'bool' else 'a number'}"
    return {"null": "nothing", "seq": "a list", "map": "a mapping"}[kind] + " is given"


def _join(where: str, key: str) -> str:
    name = key if re.fullmatch(r"[\w.-]{1,60}", key) else quoted(key)
    return f"{where}.{name}" if where else name


def _is_heading(node: yaml.Node) -> bool:
    """Return whether a node contains no settings. In the example file all settings of a section are commented out."""
    return _type(node) == "null" or (
        isinstance(node, yaml.MappingNode) and all(_is_heading(value) for _, value in node.value)
    )


class Notes:
    """Mistakes found while a file is read, as (line, setting, message), and the line of each setting."""

    def __init__(self) -> None:
        self.problems: list[tuple[int, str, str]] = []
        self.lines: dict[str, int] = {}

    def add(self, node: yaml.Node, where: str, message: str) -> None:
        """Note a mistake in the setting `where`, at the node's line."""
        self.problems.append((node.start_mark.line + 1, where, message))

    def add_at(self, where: str, message: str) -> None:
        """Note a mistake at the line of the setting `where`, or of its section if the setting is not in the file."""
        places = (where, where.rpartition(".")[0], where.partition(".")[0])
        line = next((self.lines[place] for place in places if place in self.lines), 1)
        self.problems.append((line, where, message))

    def told(self, file: Path) -> list[str]:
        """Return the mistakes in the order of their lines, each as "FILE:LINE: setting: message"."""
        found = sorted(self.problems, key=lambda problem: problem[0])
        return [printable(f"{file}:{line}: {f'{where}: ' if where else ''}{text}") for line, where, text in found]

    def items(self, node: yaml.MappingNode, where: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yield (key as typed, key node, value node). Note a mistake for a key that is given twice or is not a name.

        If a key is given twice, its empty sections are skipped: in the shipped file all settings are commented out.
        """
        first: dict[str, int] = {}
        times = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.add(key, where, f"{_given(key)} as a key; wanted a name")
            elif times[key.value] > 1 and _is_heading(value):
                continue
            elif key.value in first:
                self.add(key, _join(where, key.value), f"given twice, on lines {first[key.value]} and {line}; keep one")
            else:
                first[key.value] = line
                yield key.value, key, value


def document(data: bytes, notes: Notes) -> yaml.Node | None:
    """Return the file's only document as a node, or None if the file is empty or has a mistake, which is noted."""
    try:
        return _compose(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
    except yaml.reader.ReaderError as error:
        text = data.decode("utf-8-sig")
        line = text.count("\n", 0, error.position) + 1
        problem = f"not YAML: it contains the control character {ord(text[error.position]):#04x}; remove it"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = ", ".join(filter(None, (error.context, error.problem)))
        advice = "; indent with spaces" if "'\\t'" in reason else ""
        problem = f"cannot read this YAML: {reason}{advice}"
    notes.problems.append((line, "", problem))
    return None


# --- Kinds of settings -----------------------------------------------------------------------------------------------


class _Kind(Protocol):
    """The type of a setting. Subclasses read and describe values."""

    def read(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        """Return the value of the setting `where` from its YAML node, None if it is unusable; note each mistake."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the allowed values."""


@dataclass(frozen=True)
class Scalar:
    """A setting with one value, of one of the named YAML types."""

    wanted: str
    parse: Callable[[str], Any]
    """Function that returns the value of a text as typed. A `ValueError` from it contains the whole message."""
    json: Mapping[str, Any]
    types: tuple[str, ...] = ("str",)

    def read(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        """Return the value parsed from the text as typed."""
        if _type(node) not in self.types:
            notes.add(node, where, f"{_given(node)}; wanted {self.wanted}")
            return None
        try:
            return self.parse(node.value)
        except ValueError as error:
            notes.add(node, where, str(error))
            return None

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the value."""
        return dict(self.json)


@dataclass(frozen=True)
class ListOf:
    """A setting with a list of values; it is read as a tuple."""

    item: Scalar

    def read(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        """Return the items as a tuple. All of them are read, so that all mistakes are noted."""
        if not isinstance(node, yaml.SequenceNode):
            return notes.add(node, where, f"{_given(node)}; wanted a list in [brackets], each item {self.item.wanted}")
        return tuple(self.item.read(item, f"{where}[{i}]", notes) for i, item in enumerate(node.value))

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the list."""
        return {"type": "array", "items": self.item.schema()}


@dataclass(frozen=True)
class Variables:
    """A setting with a mapping whose names follow a pattern, such as environment variables."""

    value: Scalar
    name: str = "[A-Za-z_][A-Za-z0-9_]*"
    wanted: str = "a mapping of variables to text"
    advice: str = "not a variable's name; write letters, digits and _"

    def read(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        """Return the names with their values."""
        if not isinstance(node, yaml.MappingNode):
            return notes.add(node, where, f"{_given(node)}; wanted {self.wanted}")
        values = {}
        for key, key_node, value in notes.items(node, where):
            if not re.fullmatch(self.name, key):
                notes.add(key_node, _join(where, key), self.advice)
            values[key] = self.value.read(value, _join(where, key), notes)
        return values

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of names and values."""
        names = {"pattern": f"^{self.name}$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": self.value.schema()}


@dataclass(frozen=True)
class Free:
    """A setting that only a probe understands: a mapping of values that JSON can store. The worker gets it as JSON."""

    def read(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        """Return the mapping as Python data; note a mistake for anything that JSON cannot store."""
        if not isinstance(node, yaml.MappingNode):
            return notes.add(node, where, f"{_given(node)}; wanted a mapping of the probe's own settings")
        return self._plain(node, where, notes)

    def _plain(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        if isinstance(node, yaml.MappingNode):
            return {k: self._plain(v, _join(where, k), notes) for k, _, v in notes.items(node, where)}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, f"{where}[{i}]", notes) for i, item in enumerate(node.value)]
        convert: dict[str, Callable[[str], Any]] = {
            "str": str,
            "bool": read_boolean,
            "null": lambda _: None,
            "int": read_integer,
        }
        try:
            return convert.get(_type(node), read_number)(node.value)
        except ValueError as error:
            return notes.add(node, where, str(error))

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of any mapping."""
        return {"type": "object"}


@dataclass(frozen=True)
class Section:
    """A setting that is a mapping with known keys: the settings of one dataclass."""

    cls: type[Any]

    def read(self, node: yaml.Node, where: str, notes: Notes) -> Any:
        """Return the dataclass with the known settings; note unknown keys as mistakes."""
        settings = _settings(self.cls)
        each = next((f for f in settings.values() if isinstance(f.metadata["kind"], Each)), None)
        known = sorted(name for name, f in settings.items() if f is not each)
        if _type(node) == "null":  # a heading whose settings are all commented out
            return self.cls()
        if not isinstance(node, yaml.MappingNode):
            return notes.add(node, where, f"{_given(node)}; wanted a mapping with any of: {', '.join(known)}")
        beyond = (
            f"{', and ' if known else ''}{each.metadata['kind'].of} by name (a-z, 0-9, _)" if each is not None else ""
        )
        if any(isinstance(f.metadata["kind"], Free) for f in settings.values()):
            beyond = ", and under settings the probe's own"
        values: dict[str, Any] = {}
        named: dict[str, Any] = {}
        for key, key_node, value in notes.items(node, where):
            place = _join(where, key)
            if key in known:
                read = _read_setting(settings[key], value, place, notes)
                values |= {} if read is None else {key: read}
            elif each is not None and re.fullmatch(Each.name, key):
                notes.lines[place] = key_node.start_mark.line + 1
                named[key] = each.metadata["kind"].read(value, place, notes) or each.metadata["kind"].cls()
            else:
                inside = [name for name in known if key in _inside(settings[name].metadata["kind"])]
                hint = f"; indent it below {' or '.join(inside)}" if inside else did_you_mean(key, known)
                hint = hint or f"; known settings: {', '.join(known)}{beyond}"
                gone = getattr(self.cls, "GONE", {}).get(key)
                notes.add(key_node, place, gone or f"unknown setting{hint}")
        return self.cls(**values, **({each.name: named} if each is not None else {}))

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the section and all its settings."""
        properties: dict[str, Any] = {}
        extra: dict[str, Any] = {"additionalProperties": False}
        for name, setting in _settings(self.cls).items():
            kind, default = setting.metadata["kind"], setting.metadata.get("default")
            if isinstance(kind, Each):
                extra = {"propertyNames": {"pattern": f"^{kind.name}$"}, "additionalProperties": kind.schema()}
                continue
            wanted = {"anyOf": [kind.schema(), {"type": "null"}]} if default == "null" else kind.schema()
            if default not in (None, "null"):
                wanted["default"] = yaml.safe_load(default)
            properties[name] = {"description": setting.metadata["doc"], **wanted}
        return {"type": ["object", "null"], "properties": properties, **extra}


@dataclass(frozen=True)
class Each(Section):
    """A section whose keys are names given by the user. The value of each name has the settings of `cls`."""

    of: str = "probes"
    """Word for messages that says what the names stand for, such as "probes"."""
    name = "[a-z][a-z0-9_]{0,62}"


def _inside(kind: Any) -> Collection[str]:
    return _settings(kind.cls) if isinstance(kind, Section) else ()


def _settings(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls) if "kind" in f.metadata}


def _read_setting(setting: dataclasses.Field[Any], node: yaml.Node, where: str, notes: Notes) -> Any:
    notes.lines[where] = node.start_mark.line + 1
    kind: _Kind = setting.metadata["kind"]
    if _type(node) == "null" and not isinstance(kind, Section):
        if setting.metadata["default"] != "null":
            notes.add(node, where, "no value is given; write one, or remove the line for the default")
        return None
    return kind.read(node, where, notes)


def setting(kind: _Kind, default: str, doc: str, *, sample: str = "", factory: Callable[[], Any] | None = None) -> Any:
    """Return a dataclass field for a setting. `default` and `sample` are YAML text; the example file shows `sample`."""
    notes = Notes()
    node = _compose(default)
    assert node is not None, doc
    value = None if _type(node) == "null" else kind.read(node, doc, notes)
    assert not notes.problems, notes.problems
    metadata = {"kind": kind, "default": default, "doc": doc, "sample": sample}
    unhashable = isinstance(kind, (Variables, Free))
    return field(default_factory=factory or (lambda: value), hash=False if unhashable else None, metadata=metadata)


def section(cls: type[Any], doc: str) -> Any:
    """Return a dataclass field for a section of the file: a mapping with the settings of `cls`."""
    return field(default_factory=cls, metadata={"kind": Section(cls), "doc": doc})


SPELLED = ("str", "bool", "int", "float")
"""YAML types whose text `parse` gets exactly as typed, so that its message can say that a bare 900 has no unit."""


def read_filled(text: str) -> str:
    """Return the text. Raises `ValueError` if it is empty."""
    if not text:
        raise ValueError('"" is empty; write a value or remove it')
    return text


def read_boolean(text: str) -> bool:
    """Return the boolean value of a text that YAML accepts as a boolean."""
    return text.lower() in _TRUE


def read_integer(text: str) -> int:
    """Return a text as a whole number. Raises `ValueError` for a text of more than 19 characters."""
    if len(text) > 19:  # beyond 64 bits, JSON readers disagree
        raise ValueError(f"{quoted(text)[1:-1]} is too long for a whole number; write at most 19 digits")
    return int(text)


def read_number(text: str) -> float:
    """Return a text as a number. Raises `ValueError` if it is not finite."""
    number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(number):
        raise ValueError(f"{quoted(text)[1:-1]} is not a finite number; write e.g. 0.1")
    return number


def quoted(text: str) -> str:
    """Return a text in quotes for a one-line message: escaped, shortened, and without a password before an "@"."""
    text = bare(text)
    return printable(json.dumps(text if len(text) <= 60 else text[:59] + "…", ensure_ascii=False))


BOOLEAN = Scalar("true or false", read_boolean, {"type": "boolean"}, ("bool",))


def example_lines(cls: type[Any], indent: str) -> Iterator[str]:
    """Yield the lines of an example file for the settings of `cls`: text begins with "# ", each setting with "#"."""
    for name, setting in _settings(cls).items():
        meta = setting.metadata
        section = isinstance(meta["kind"], Section)
        yield from [""] if not indent else []
        yield from textwrap.wrap(meta["doc"], 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if section:
            yield f"{indent}{meta.get('sample') or name}:"
            yield from example_lines(meta["kind"].cls, indent + "  ")
        else:
            yield f"{indent}#{name}: {meta['sample'] or meta['default']}"
