"""The configuration: what can be set, and the file that sets it, with every mistake reported at once with its line.

The frozen dataclasses below are the schema: validation, defaults, `json_schema()` and `example()` come from them.
"""
# ruff: noqa: RUF009  `setting` and `section` return `dataclasses.field(…)`

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from canaryd import trust
from canaryd.model import printable
from canaryd.probe import LEVELS
from canaryd.schema import (
    BOOLEAN,
    SPELLED,
    Each,
    Free,
    ListOf,
    Notes,
    Scalar,
    Section,
    Variables,
    document,
    example_lines,
    quoted,
    read_filled,
    read_integer,
    read_number,
    section,
    setting,
)

STATE_DIRECTORY = Path("/var/lib/canaryd")
SYSTEM_FILE = Path("/etc/canaryd/canaryd.yaml")
DROP_IN_DIRECTORY = Path("/etc/canaryd/probes.d")
MAX_FILE_BYTES = 1 << 20
MAX_SECONDS = 36500 * 86400.0  # a century: beyond it, timers and timestamps of the standard library overflow
MAX_BYTES = 1 << 50
GRADES = ("none", "application", "reset", "reboot", "inspect", "rma")
"""What an Xid may call for, from nothing to a return of the part; docs/kernel-log.md explains them."""

DIALECTS = (
    *("vllm", "sglang", "trtllm", "mindie", "llama-server", "llama-cpp-python", "mlx-lm", "ollama", "tgi"),
    *("transformers", "generic"),
)
"""Servers whose ways an endpoint canary knows; docs/endpoint.md has them."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class ConfigError(Exception):
    """The configuration cannot be used; `problems` holds one line per mistake, in file order."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# --- Values as people spell them -------------------------------------------------------------------------------------


def parse_duration(text: str) -> float:
    """Return the seconds that "90s", "15m", "2h" or "30d" stands for, or raise `ValueError` saying what to write."""
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not match:
        raise ValueError(f'{quoted(text)} is not a duration; write e.g. "15m"')
    if float(match[1]) <= 0:
        raise ValueError(f'{quoted(text)} is not a positive duration; write e.g. "15m"')
    if not match[2]:
        raise ValueError(f"{quoted(text)} has no unit; write {quoted(text + 's')}")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{quoted(text)} is longer than a century; write at most {quoted(_spoken(MAX_SECONDS))}")
    return seconds


def parse_size(text: str) -> int:
    """Return the bytes that e.g. "256MiB" stands for (KiB, MiB, GiB, TiB), or raise `ValueError`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(KiB|MiB|GiB|TiB)", text)
    if not match:
        raise ValueError(f'{quoted(text)} is not a size; write e.g. "256MiB"')
    size = float(match[1]) * _SIZES[match[2]]
    if not 1024 <= size <= MAX_BYTES:
        raise ValueError(f'{quoted(text)} is out of range; write at least "1KiB" and at most "1024TiB"')
    return int(size)


def parse_listen(text: str) -> tuple[str, int]:
    """Return (host, port) of "127.0.0.1:19469", "[::1]:19469", "name:19469" or ":19469"; raise `ValueError` otherwise.

    The host is "" for all interfaces, which has to be asked for with a leading colon. Port 0 means any free port.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f'{quoted(text)} is not HOST:PORT; write e.g. "127.0.0.1:19469"')
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{quoted(text)}: {quoted(port)} is not a port; write a number from 0 (any free) to 65535")
    if re.fullmatch(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*", host):
        raise ValueError(f'{quoted(text)}: write an IPv6 address in brackets, e.g. "[::1]:{port}"')
    if not _is_host(host):
        raise ValueError(f"{quoted(text)}: {quoted(host)} is not a host name or address; write e.g. 127.0.0.1")
    return host.strip("[]"), int(port)


def _is_host(host: str) -> bool:
    try:
        if host.startswith("[") and host.endswith("]"):
            ipaddress.IPv6Address(host[1:-1])
            return True
        if re.fullmatch(r"[0-9.]+", host):
            ipaddress.IPv4Address(host)
            return True
    except ValueError:
        return False
    return bool(re.fullmatch(r"[A-Za-z0-9._-]*", host))


def _store_size(text: str) -> int:
    if (size := parse_size(text)) < 1 << 20:
        raise ValueError(f'{quoted(text)} is too small for the store to work in; write at least "1MiB"')
    return size


def _absolute(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError(f'{quoted(text)} is not an absolute path; write e.g. "/var/lib/canaryd"')
    return Path(text)


def _program(text: str) -> str:
    if not text or ("/" in text and not text.startswith("/")):
        raise ValueError(
            f'{quoted(text)} is neither an absolute path nor a command name; write e.g. "/opt/bin/python3"'
        )
    return text


def _choice(what: str, known: Sequence[str], types: tuple[str, ...]) -> Scalar:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{quoted(text)} is not {what}; write one of {', '.join(known)}")
        return text

    return Scalar(f"one of {', '.join(known)}", parse, {"enum": list(known)}, types)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:  # not repeated: it may be a password
        raise ValueError("the address holds a name or a password; put the key into a file and name it in key_file")
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or not text.isprintable() or " " in text:
        raise ValueError(f'{quoted(text)} is not the address of an API; write e.g. "http://127.0.0.1:8000/v1"')
    return text.rstrip("/")


def _half(text: str) -> float:
    if not 0 <= (number := read_number(text)) <= 0.5:
        raise ValueError(f"{text} is out of range; write a number from 0 to 0.5")
    return number


def _between(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not low <= (number := read_number(text)) <= high:
            raise ValueError(f"{text} is out of range; write a number from {low:g} to {high:g}")
        return number

    return parse


def parse_hours(text: str) -> tuple[int, int]:
    """Return the minutes of the day at which "22:00-06:00" begins and ends, or raise `ValueError` saying what to write.

    An end before the beginning is of the next day; "00:00-24:00" is the whole day.
    """
    match = re.fullmatch(r"([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})", text)
    begin, end = (60 * int(match[i]) + int(match[i + 1]) for i in (1, 3)) if match else (0, 0)
    if not match or max(int(match[2]), int(match[4])) > 59 or begin >= 1440 or end > 1440 or begin == end:
        raise ValueError(f'{quoted(text)} is not a time of day; write e.g. "08:00-20:00" or "22:00-06:00"')
    return begin, end


def _spoken(seconds: float) -> str:
    unit = next((u for u, size in reversed(_UNITS.items()) if seconds % size == 0), "s")
    return f"{seconds / _UNITS[unit]:g}{unit}"


def _whole(low: int, high: int) -> Scalar:
    def parse(text: str) -> int:
        number = read_integer(text)
        if not low <= number <= high:
            raise ValueError(f"{text} is out of range; write a whole number from {low} to {high}")
        return number

    return Scalar("a whole number", parse, {"type": "integer", "minimum": low, "maximum": high}, ("int",))


_DURATION = Scalar(
    'a duration, e.g. "15m"',
    parse_duration,
    {"type": "string", "pattern": r"^(?=.*[1-9])[0-9]+(\.[0-9]+)?[smhd]$"},
    SPELLED,
)
_BYTES = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]iB)$"}
_SIZE = Scalar('a size, e.g. "256MiB"', _store_size, _BYTES, SPELLED)
_MEMORY = Scalar('a size, e.g. "1GiB"', parse_size, _BYTES, SPELLED)
_LISTEN = Scalar(
    'HOST:PORT in quotes, e.g. "127.0.0.1:19469"',
    parse_listen,
    {"type": "string", "pattern": r"^(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]*):[0-9]{1,5}$"},
    SPELLED,
)
_LEVEL = _choice("a level", LEVELS, SPELLED)
_GRADE = _choice("a grade", GRADES, SPELLED)
_FRACTION = Scalar("a number", _half, {"type": "number", "minimum": 0, "maximum": 0.5}, ("int", "float"))
_SHARE = Scalar("a number", _between(0.0001, 1), {"type": "number", "minimum": 0.0001, "maximum": 1}, ("int", "float"))
_DEGREES = Scalar("a number", _between(0, 100), {"type": "number", "minimum": 0, "maximum": 100}, ("int", "float"))
_HOURS = Scalar(
    'hours of the day, e.g. "08:00-20:00"',
    parse_hours,
    {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]-[0-2][0-9]:[0-5][0-9]$"},
    ("str",),
)
_PATH = Scalar("an absolute path", _absolute, {"type": "string", "pattern": "^/"})
_PROGRAM = Scalar("an absolute path or a command's name", _program, {"type": "string", "pattern": "^(/.*|[^/]+)$"})


class _Unsaid(Scalar):
    """A text that may be a secret: a mistake does not repeat it."""

    def read(self, node: Any, where: str, notes: Notes) -> Any:
        noted = len(notes.problems)
        value = super().read(node, where, notes)
        if notes.problems[noted:]:
            del notes.problems[noted:]
            notes.add(node, where, f"not text; wanted {self.wanted}")
        return value


_VARIABLE = _Unsaid("text (in quotes)", str, {"type": "string"})
_URL = Scalar("an address (in quotes)", _url, {"type": "string", "pattern": "^https?://[^/]+"})
_APIS = ("completions", "chat")
_ENFORCEMENT = _choice("a way to enforce", ("log", "act"), ("str",))
_API = _choice("an API", _APIS, ("str",))
_DIALECT = _choice("a dialect", DIALECTS, ("str",))
_FILLED = Scalar("text (in quotes)", read_filled, {"type": "string", "minLength": 1})


# --- The schema ------------------------------------------------------------------------------------------------------


def default_state_dir(uid: int, environ: Mapping[str, str]) -> Path:
    """Return where runs are kept: /var/lib/canaryd for root, for users without a home, and for all once it is there.

    A command that a person runs beside the daemon then meets the daemon's locks and history; where it may not write, it
    runs unrecorded and says so.
    """
    if STATE_DIRECTORY.exists():
        return STATE_DIRECTORY
    state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if uid != 0 and state.startswith("/"):  # the XDG specification tells to ignore a relative one
        return Path(state, "canaryd")
    if uid != 0 and home.startswith("/"):
        return Path(home, ".local/state/canaryd")
    return STATE_DIRECTORY


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How workers are started. At most one of `python` and `command` is given."""

    python: str | None = setting(
        _PROGRAM,
        "null",
        "Interpreter for numeric probes: the serving engine's own, which has torch. Default: canaryd's own.",
        sample='"/opt/vllm/bin/python3"',
    )
    command: tuple[str, ...] = setting(
        ListOf(_FILLED),
        "[]",
        "Instead of python: a command that starts one elsewhere, as in a container. Default: none.",
        sample='["docker", "exec", "-i", "vllm", "python3"]',
    )
    env: Mapping[str, str] = setting(
        Variables(_VARIABLE),
        "{}",
        "Variables to set for workers, on top of canaryd's own environment. Default: none.",
        sample='{LD_LIBRARY_PATH: "/opt/cuda/lib64"}',
    )
    grace: float = setting(_DURATION, '"2s"', "How long a worker may take to end before it is killed.")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """One probe's section; None leaves the probe's own choice."""

    enabled: bool | None = setting(
        BOOLEAN,
        "null",
        "Whether to run it. Default: yes, but no for a probe that another Python package brings.",
        sample="false",
    )
    period: float | None = setting(
        _DURATION, "null", "Time between two runs on one device. Default: the probe's own.", sample='"15m"'
    )
    timeout: float | None = setting(
        _DURATION, "null", "Time beyond its budget after which it is killed. Default: the probe's own.", sample='"60s"'
    )
    level: str | None = setting(
        _LEVEL, "null", "How hard to look: quick, standard or deep. Default: schedule.level.", sample="deep"
    )
    settings: Mapping[str, Any] = setting(
        Free(), "{}", "The probe's own settings, as its documentation names them. Default: none.", sample="{}"
    )


@dataclass(frozen=True, kw_only=True)
class ProbesConfig:
    """Where probes are found, and what is set for each by name."""

    directories: tuple[Path, ...] = setting(
        ListOf(_PATH),
        f'["{DROP_IN_DIRECTORY}"]',
        "Directories of further probes, owned by root or canaryd's user. Default: this one, where it exists.",
        factory=lambda: (DROP_IN_DIRECTORY,) if os.path.isdir(DROP_IN_DIRECTORY) else (),  # noqa: PTH112  never raises
    )
    each: Mapping[str, ProbeSettings] = field(
        default_factory=dict,
        hash=False,
        metadata={"kind": Each(ProbeSettings), "doc": "One section per probe, by its name.", "sample": "exact_matmul"},
    )


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """One server that answers on behalf of devices of this host."""

    url: str = setting(
        _URL,
        "null",
        "Where its OpenAI-compatible API is; this one has to be given.",
        sample='"http://127.0.0.1:8000/v1"',
        factory=str,
    )
    devices: tuple[str, ...] = setting(
        ListOf(_FILLED),
        "[]",
        "The devices behind it, by uuid, name or backend. Default: all accelerators, or the CPU where there is none;"
        " none where the address is another host's.",
        sample='["cuda:0", "cuda:1"]',
    )
    model: str | None = setting(
        _FILLED, "null", "The model to ask for. Default: the only one that the server lists.", sample='"qwen"'
    )
    directory: Path | None = setting(
        _PATH,
        "null",
        "The checkpoint that it serves, a directory or a GGUF file: its digests tell a changed model from a fault."
        " Default: not known.",
        sample='"/srv/models/qwen"',
    )
    prompts: Path | None = setting(
        _PATH, "null", "A file of prompts. Default: those that canaryd brings.", sample='"/etc/canaryd/prompts.json"'
    )
    apis: tuple[str, ...] = setting(
        ListOf(_API), '["completions", "chat"]', "Which of its APIs to ask; one that it lacks is left out."
    )
    dialect: str | None = setting(
        _DIALECT, "null", "Which server it is. Default: found out by asking it.", sample="vllm"
    )
    key_file: Path | None = setting(
        _PATH,
        "null",
        "A file that holds the API key, and nothing else. Default: none is sent.",
        sample='"/etc/canaryd/key"',
    )
    ca_file: Path | None = setting(
        _PATH, "null", "Certificates to trust for https. Default: the system's.", sample='"/etc/ssl/serving.pem"'
    )
    timeout: float = setting(_DURATION, '"60s"', "How long one request may take.")


@dataclass(frozen=True, kw_only=True)
class EndpointsConfig:
    """The serving endpoints that are asked, by name; a name under which nothing is set is a heading, no endpoint."""

    each: Mapping[str, EndpointConfig] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "kind": Each(EndpointConfig, of="endpoints"),
            "doc": "One section per server, by a name of yours.",
            "sample": "main",
        },
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """When probes run, and how hard they look."""

    level: str = setting(
        _LEVEL,
        "quick",
        "How hard probes look: quick, standard or deep. On CPUs quick takes one instruction set per round, in turn.",
    )
    jitter: float = setting(
        _FRACTION, "0.1", "Fraction of its period by which a run may move, so that hosts do not march in step."
    )
    run_at_start: bool = setting(BOOLEAN, "true", "Whether every probe runs once as soon as the daemon starts.")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """What canaryd run may take of a device that serves; docs/budget.md has the reasons of each number."""

    share: float = setting(
        _SHARE, "0.005", "Largest part of an hour that rounds may take of a device's time, or of a CPU's cores."
    )
    burst: float = setting(_DURATION, '"0.05s"', "A run pauses whenever it has worked for this long.")
    memory: int = setting(
        _MEMORY, '"1GiB"', "Memory that a worker may take; on an accelerator beside the driver's own context."
    )
    free: int = setting(_MEMORY, '"512MiB"', "Memory that must be left free for the server in any case.")
    busy: float = setting(
        _SHARE, "0.9", "A round waits while the device is in use for this part of the time or more; 1 is never."
    )
    power: float | None = setting(
        _SHARE,
        "null",
        "A round waits while the device draws this part of its power limit or more. Default: it does not wait.",
        sample="0.95",
    )
    headroom: float = setting(
        _DEGREES,
        "5",
        "A round waits while fewer degrees Celsius are left until the device slows itself down; 0 is never.",
    )
    quiet_hours: tuple[tuple[int, int], ...] = setting(
        ListOf(_HOURS),
        "[]",
        "Hours of the day, in local time, in which rounds wait. Default: none.",
        sample='["08:00-20:00"]',
    )
    evidence: float | None = setting(
        _DURATION,
        "null",
        "A round that waits for load, heat, hours or its share runs all the same when evidence is this old."
        " Default: three quarters of what judge.stale_after allows.",
        sample='"90m"',
    )


@dataclass(frozen=True, kw_only=True)
class JudgePolicy:
    """The judge's numbers; durations are in seconds. docs/thresholds.md: source and false-alarm chance of each."""

    stale_after: float = setting(
        _DURATION, '"2h"', "A device whose newest evidence is older than this, and than three periods, is unknown."
    )
    confirm_runs: int = setting(
        _whole(1, 100), "3", "A mismatch is confirmed when this many new processes all repeat it."
    )
    repeat_window: float = setting(_DURATION, '"24h"', "Two mismatches within this time make a device faulty.")
    repeat_gap: float = setting(
        _DURATION, '"60s"', "Mismatches less than this apart count as one: they may share a cause."
    )
    week_count: int = setting(_whole(2, 1000), "3", "So many mismatches within judge.week make a device faulty.")
    week: float = setting(_DURATION, '"7d"', "The window for judge.week_count.")
    watch: float = setting(_DURATION, '"30d"', "A suspect device stays suspect for at least this long.")


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is made of what devices say about themselves; docs/thresholds.md has source and chance of each number."""

    kernel_log: Path = setting(
        _PATH, '"/dev/kmsg"', "The kernel's log, or a file that is fed with records in its format."
    )
    keep: float = setting(
        _DURATION, '"5m"', "A poll is stored at least this often, and whenever a counter or a flag has changed."
    )
    settle: float = setting(
        _DURATION, '"1h"', "A condition that comes and goes is over when it has not been seen for this long."
    )
    throttle: float = setting(
        _DURATION, '"60s"', "Time held down by heat or power within telemetry.settle that makes a device degraded."
    )
    corrected_per_day: int = setting(
        _whole(1, 10**9), "1000", "Corrected errors of an accelerator's memory in a day that make it degraded."
    )
    dimm_corrected_per_day: int = setting(
        _whole(1, 10**9), "10", "Corrected errors of a memory module of the host in a day that make it degraded."
    )
    xids: Mapping[str, str] = setting(
        Variables(
            _GRADE,
            "[0-9]{1,5}",
            "a mapping of Xid codes to grades",
            'not an Xid; write its number in quotes, e.g. "31"',
        ),
        "{}",
        "Xids to be graded otherwise than NVIDIA's catalogue says. Default: none.",
        sample='{"31": none}',
    )


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How long runs are kept. Sizes are in bytes."""

    keep_successes: float = setting(
        _DURATION, '"45d"', "How long runs without a mismatch are kept; beyond judge.watch they can clear a suspect."
    )
    keep_failures: float = setting(_DURATION, '"400d"', "How long mismatches and failed runs are kept.")
    max_size: int = setting(_SIZE, '"256MiB"', "Size of the database beyond which the oldest successes go early.")


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Which devices are watched."""

    include: tuple[str, ...] = setting(
        ListOf(_FILLED),
        "[]",
        "Devices to watch, by uuid, name or backend. Default: all that are found.",
        sample='["cuda", "cpu:0"]',
    )
    expected: int | None = setting(
        _whole(0, 1024),
        "null",
        "How many accelerators should be found: whole ones, without the CPU. Default: any number will do.",
        sample="8",
    )
    absent: tuple[str, ...] = setting(
        ListOf(_FILLED),
        "[]",
        "Devices taken out on purpose, by uuid: they are not missed while they are gone. Default: none.",
        sample='["GPU-5f1c0d6e-0000-0000-0000-000000000000"]',
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Equal, and of equal hash, when every setting is: a reload compares sections."""

    listen: tuple[str, int] = setting(
        _LISTEN,
        '"127.0.0.1:19469"',
        'Address and port that serve metrics; ":19469" is every interface, and port 0 any free port.',
    )
    web_config: Path | None = setting(
        _PATH,
        "null",
        "TLS and passwords for that address: a file in Prometheus's web.config.yml format. Default: neither.",
        sample='"/etc/canaryd/web.yml"',
    )
    state_dir: Path = setting(
        _PATH,
        "null",
        "Directory of the database and the locks. Default: this for root, otherwise ~/.local/state/canaryd.",
        sample='"/var/lib/canaryd"',
        factory=lambda: default_state_dir(os.geteuid(), os.environ),
    )
    enforcement: str = setting(
        _ENFORCEMENT,
        "log",
        "What canaryd gate does about a faulty device: log says what it would do, act fails (docs/enforcement.md).",
    )
    worker: WorkerConfig = section(WorkerConfig, "Workers: the processes that touch the hardware.")
    probes: ProbesConfig = section(ProbesConfig, "Probes: where they are found, and a section for each by name.")
    endpoints: EndpointsConfig = section(EndpointsConfig, "Endpoints: servers that are asked canary prompts.")
    schedule: ScheduleConfig = section(ScheduleConfig, "Schedule: when probes run, and how hard they look.")
    budget: BudgetConfig = section(BudgetConfig, "Budget: what canaryd run may take of devices that serve.")
    judge: JudgePolicy = section(JudgePolicy, "Judge: how mismatches become verdicts.")
    telemetry: TelemetryConfig = section(TelemetryConfig, "Telemetry: what is made of what devices say of themselves.")
    store: StoreConfig = section(StoreConfig, "Store: how long runs are kept.")
    devices: DevicesConfig = section(DevicesConfig, "Devices: which are watched.")
    file: Path | None = field(default=None, compare=False)
    """The file it was read from; None where defaults alone hold."""


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


# --- Public functions ------------------------------------------------------------------------------------------------


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
        doubt = trust.doubt(file)
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
