"""The configuration: defaults, strict reading, exact messages, the schema and the example."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from canaryd.config.load import ConfigError, example, json_schema, load
from canaryd.config.schema import Section, quoted
from canaryd.config.settings import (
    Config,
    EndpointConfig,
    EndpointsConfig,
    ProbesConfig,
    ProbeSettings,
    default_state_dir,
)
from canaryd.config.values import parse_duration, parse_listen, parse_size

ROOT = Path(__file__).parents[2]
BAD = sorted((Path(__file__).parents[1] / "data" / "bad-config").glob("*.yaml"))

SCHEMA_CANNOT_TELL = {
    "exact-beside-directory",
    # two settings against each other
    "python-and-command",
    "keep-failures-shorter",
    "keep-failures-watch",
    # bounds inside a text
    "duration-century",
    "listen-ipv4-bad",
    "listen-port-range",
    "size-small",
    "size-zero",
    # JSON has no NaN
    "fraction-nan",
    # values inside a probe's own settings
    "probe-settings-infinite",
    "deep",
    "nul",
    # what a YAML library hides from a schema
    "alias-bomb",
    "count-octal",
    "duplicate-in-settings",
    "duplicate-top",
}

FULL = """
listen: "[::1]:0"
state_dir: /srv/canaryd
worker:
  command: [docker, exec, -i, vllm, python3]
  env: {OMP_NUM_THREADS: "4", EMPTY: ""}
probes:
  directories: [/srv/probes]
  exact_matmul: {enabled: yes, period: 30m, timeout: 90s, level: deep}
  acme_ring:
    enabled: off
    settings: {on: 1, when: 2026-01-02, mode: 0755, ratio: 1e-3, deep: [{a: null}, true, text]}
  bare:
schedule: {level: quick}
judge: {stale_after: 1d}
store: {keep_failures: 800d, max_size: 1.5GiB}
devices: {include: [cuda, "cpu:0"], expected: 8}
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("CANARYD_CONFIG", raising=False)


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "canaryd.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def is_yaml(path: Path) -> bool:
    try:
        yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, OverflowError):
        return False
    return True


def problems(path: Path | None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


# --- Good files ------------------------------------------------------------------------------------------------------


def test_full_file(tmp_path):
    """Every kind of setting can be given, and a probe's own settings arrive as the plain values that were typed."""
    path = write(tmp_path, FULL)
    loaded = load(path)
    assert loaded.listen == ("::1", 0)
    assert loaded.state_dir == Path("/srv/canaryd")
    assert loaded.worker.command == ("docker", "exec", "-i", "vllm", "python3")
    assert loaded.worker.env == {"OMP_NUM_THREADS": "4", "EMPTY": ""}
    own = {"on": 1, "when": "2026-01-02", "mode": "0755", "ratio": 0.001, "deep": [{"a": None}, True, "text"]}
    assert loaded.probes == ProbesConfig(
        directories=(Path("/srv/probes"),),
        each={
            "exact_matmul": ProbeSettings(enabled=True, period=1800.0, timeout=90.0, level="deep"),
            "acme_ring": ProbeSettings(enabled=False, settings=own),
            "bare": ProbeSettings(),
        },
    )
    assert loaded.judge.stale_after == 86400.0
    assert loaded.store.max_size == 3 << 29
    assert loaded.devices.include == ("cuda", "cpu:0")
    assert loaded.devices.expected == 8
    assert loaded.file == path


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "---\n", "{}\n", "worker:\nprobes:\n", "\ufeff{}\r\n", "~\n"]
)
def test_empty_files(tmp_path, text):
    """A file that sets nothing is fine and means the defaults."""
    assert load(write(tmp_path, text)) == Config()


def test_null_means_default_only_where_that_is_the_default(tmp_path):
    """`null` is accepted for a setting that has no value by default."""
    assert load(write(tmp_path, "worker: {python: null}\ndevices: {expected: ~}\n")) == Config()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("127.0.0.1:19469", ("127.0.0.1", 19469)),
        ("[::1]:19469", ("::1", 19469)),
        (":19469", ("", 19469)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)
def test_listen_forms(tmp_path, text, wanted):
    """Address, bracketed IPv6, name, and a leading colon for every interface."""
    assert parse_listen(text) == wanted
    assert load(write(tmp_path, f'listen: "{text}"\n')).listen == wanted


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("15m", 900.0), ("2h", 7200.0), ("30d", 2592000.0), ("1.5h", 5400.0)]
)
def test_durations(text, seconds):
    """Seconds, minutes, hours and days, whole or decimal."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_listen, ("", ":", "host:", "host:+1", "host:\uff11", "[::1:1", "[]:1", "a b:1", "[host]:1", "::1")),
        (parse_listen, ("a..b:1", ".a:1", f"{'a' * 64}:1", f"{'a' * 300}:1")),
        (parse_duration, ("", "s", "1e3s", "1 m", "15M", "1h30m", "\u0663s", "nan", "infs", "1.s", "9" * 500 + "s")),
    ],
)
def test_what_is_refused(parse, texts):
    """No compounds, spaces, other digits or numbers that overflow; each is refused with a sentence that repeats it."""
    for text in texts:
        with pytest.raises(ValueError, match=re.escape(quoted(text))):
            parse(text)


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_a_sentence(text):
    """The parsers return something usable or raise a message of one line, whatever they are given."""
    for parse in (parse_duration, parse_size, parse_listen):
        said, value = "", None
        try:
            value = parse(text)
        except ValueError as error:
            said = str(error)
        assert ("write" in said and "\n" not in said) or value is not None


@given(st.binary(max_size=200) | st.text("{}[]:,-#&*!|>'\"%@` \n\tablisten01", max_size=60).map(str.encode))
def test_any_file_is_a_configuration_or_a_list_of_problems(tmp_path_factory, data):
    """No content of a file makes `load` fail otherwise than with problems that name file and line."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    found = [f"{path}:1: x"]
    try:
        load(path)
    except ConfigError as error:
        found = error.problems
    assert found
    assert all(re.match(rf"{re.escape(str(path))}:\d+: \S", problem) for problem in found)


# --- Bad files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_bad_file(path):
    """A bad file gives exactly the messages that its first lines announce, in file order."""
    wants = re.findall(r"^# wants: (.*)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    assert wants
    assert problems(path) == [f"{path}:{want}" for want in wants]


def test_named_file_must_exist(tmp_path, monkeypatch):
    """A file named on the command line or in the environment must be there; the message says who named it."""
    path = tmp_path / "nowhere.yaml"
    advice = "name an existing file, or leave it out"
    assert problems(path) == [f"{path}: no such file; {advice}"]
    monkeypatch.setenv("CANARYD_CONFIG", str(path))
    assert problems(None) == [f"{path}: no such file (named by $CANARYD_CONFIG); {advice}"]


def test_which_file_is_read(tmp_path, monkeypatch):
    """The argument wins over $CANARYD_CONFIG, which wins over the system's file, which may be missing."""
    system, named, given_ = (tmp_path / name for name in ("system", "named", "given"))
    assert load(None, system_file=system) == Config()
    for port, path in enumerate((system, named, given_), 1):
        path.write_text(f'listen: ":{port}"\n')
    assert load(None, system_file=system).listen == ("", 1)
    monkeypatch.setenv("CANARYD_CONFIG", str(named))
    assert load(None, system_file=system).listen == ("", 2)
    assert load(given_, system_file=system).listen == ("", 3)
    monkeypatch.setenv("CANARYD_CONFIG", "")
    assert load(None, system_file=system).file == system


def test_unreadable_files(tmp_path):
    """A directory, a link to itself and an endless file are refused with a reason, not with a traceback."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert problems(tmp_path) == [f"{tmp_path}: is a directory; name a YAML file"]
    advice = "make it readable or name another file"
    assert problems(loop) == [f"{loop}: cannot read it: {os.strerror(errno.ELOOP)}; {advice}"]
    assert problems(Path("/dev/zero")) == ["/dev/zero: larger than 1 MiB; name a configuration file of canaryd"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission(tmp_path):
    """A file without read permission is named with the system's reason."""
    path = write(tmp_path, "{}")
    path.chmod(0)
    assert problems(path) == [f"{path}: cannot read it: Permission denied; make it readable or name another file"]


# --- State directory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "environ", "wanted"),
    [
        (0, {"HOME": "/root", "XDG_STATE_HOME": "/x"}, ""),
        (1000, {"HOME": "/home/a"}, "/home/a/.local/state/canaryd"),
        (1000, {"HOME": "/home/a", "XDG_STATE_HOME": "/x"}, "/x/canaryd"),
        (1000, {"HOME": "/home/a", "XDG_STATE_HOME": "relative"}, "/home/a/.local/state/canaryd"),
        (1000, {}, ""),
    ],
)
def test_default_state_dir(uid, environ, wanted, monkeypatch, tmp_path):
    """Root keeps state in /var/lib, people in their state directory; all share the system's once it is there."""
    system = tmp_path / "canaryd"
    monkeypatch.setattr("canaryd.config.settings.STATE_DIRECTORY", system)
    assert default_state_dir(uid, environ) == Path(wanted or system)
    system.mkdir()
    assert default_state_dir(uid, environ) == system


# --- Comparing, schema, example --------------------------------------------------------------------------------------


def test_a_reload_sees_what_changed(tmp_path):
    """Configurations and their sections compare by value and hash alike, wherever they were read from."""
    first = load(write(tmp_path, FULL))
    (tmp_path / "other.yaml").write_text(FULL)
    again = load(tmp_path / "other.yaml")
    assert first == again
    assert hash(first) == hash(again)
    changed = load(write(tmp_path, FULL.replace("on: 1", "on: 2").replace("expected: 8", "expected: 7")))
    differing = [
        f.name for f in dataclasses.fields(Config) if f.compare and getattr(first, f.name) != getattr(changed, f.name)
    ]
    assert differing == ["probes", "devices"]


def test_json_schema_accepts_good_files(tmp_path):
    """The schema is a valid draft 2020-12 schema and accepts what `load` accepts."""
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in (FULL, example(), "", "worker:\n"):
        validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize("path", [p for p in BAD if is_yaml(p)], ids=lambda p: p.stem)
def test_json_schema_refuses_bad_files(path):
    """The schema refuses every bad file that YAML can load, but for the rules that no schema can state."""
    document = yaml.safe_load(path.read_bytes())
    valid = jsonschema.Draft202012Validator(json_schema()).is_valid(document)
    assert valid == (path.stem in SCHEMA_CANNOT_TELL)


def test_example_is_shipped():
    """deploy/canaryd.yaml is what `canaryd config example` prints."""
    assert (ROOT / "deploy" / "canaryd.yaml").read_text() == example()


def test_example_sets_nothing(tmp_path):
    """The example as it stands means the defaults."""
    loaded = load(write(tmp_path, example()))
    probes, endpoints = {"exact_matmul": ProbeSettings()}, {"main": EndpointConfig()}
    assert loaded == dataclasses.replace(
        Config(), probes=ProbesConfig(each=probes), endpoints=EndpointsConfig(each=endpoints)
    )


SETTING_LINES = [i for i, line in enumerate(example().splitlines()) if re.match(r" *#\w", line)]


@pytest.mark.parametrize("number", SETTING_LINES, ids=lambda i: example().splitlines()[i].strip(" #"))
def test_each_line_of_the_example_can_be_uncommented(tmp_path, number):
    """Deleting one "#" gives a valid file, which changes nothing unless the text above it says what the default is."""
    lines = example().splitlines()
    first = lines.index("endpoints:")
    if first < number < lines.index("", first):  # an endpoint without its address is a mistake
        lines = [line.replace("#", "") if "#url:" in line else line for line in lines]
    untouched = load(write(tmp_path, "\n".join(lines)))
    lines[number] = lines[number].replace("#", "", 1)
    loaded = load(write(tmp_path, "\n".join(lines)))
    told = "".join(itertools.takewhile(lambda line: re.match(" *# ", line), reversed(lines[:number])))
    assert loaded == untouched or "Default: " in told


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [b for page in PAGES for b in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)]
SECTIONS = {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("block", [b for b in BLOCKS if {*re.findall(r"^(\w+):", b, re.MULTILINE)} <= SECTIONS])
def test_each_block_of_the_documentation_can_be_appended_to_the_shipped_file(tmp_path, block):
    """The shipped file has the headings already, with nothing below them."""
    loaded = load(write(tmp_path, example() + block))
    assert loaded != load(write(tmp_path, example()))
    assert loaded == dataclasses.replace(load(write(tmp_path, block + example())), file=loaded.file)


@pytest.mark.parametrize("first", ["store: {max_size: 1GiB}", "store:\n  max_size: 1GiB"])
def test_a_section_with_a_setting_is_given_once(tmp_path, first):
    """Which of two would count is anybody's guess."""
    with pytest.raises(ConfigError, match="store: given twice, on lines 1 and"):
        load(write(tmp_path, f"{first}\nstore:\n  keep_failures: 401d\n"))


def test_example_and_schema_have_every_setting():
    """No setting is missing from the example or from the schema."""

    def leaves(cls) -> list[str]:
        kinds = [(f.name, f.metadata["kind"]) for f in dataclasses.fields(cls) if "kind" in f.metadata]
        return [n for name, kind in kinds for n in (leaves(kind.cls) if isinstance(kind, Section) else [name])]

    def properties(schema: dict) -> list[str]:
        below = [properties(s) if "properties" in s else [name] for name, s in schema["properties"].items()]
        each = schema["additionalProperties"]
        return [name for names in below for name in names] + (properties(each) if each else [])

    shown = re.findall(r"^ *#(\w+):", example(), re.MULTILINE)
    assert shown == leaves(Config)
    assert sorted(properties(json_schema())) == sorted(shown)


def test_license_is_apache_2():
    """LICENSE is the unchanged text of the Apache License 2.0."""
    text = (ROOT / "LICENSE").read_text()
    assert text.strip().startswith("Apache License\n")
    assert text.rstrip().endswith("limitations under the License.")
    assert "Copyright [yyyy] [name of copyright owner]" in text
