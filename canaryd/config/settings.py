"""The configuration: what can be set, and the file that sets it, with every mistake reported at once with its line.

The frozen dataclasses below are the schema: validation, defaults, `json_schema()` and `example()` come from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.config.schema import (
    BOOLEAN,
    Each,
    Free,
    ListOf,
    Variables,
    section,
    setting,
)
from canaryd.config.values import (
    API,
    DEGREES,
    DIALECT,
    DURATION,
    ENFORCEMENT,
    FILLED,
    FRACTION,
    GRADE,
    HOURS,
    LEVEL,
    LISTEN,
    MEMORY,
    PATH,
    PROGRAM,
    SHARE,
    SIZE,
    URL,
    VARIABLE,
    whole,
)

STATE_DIRECTORY = Path("/var/lib/canaryd")
DROP_IN_DIRECTORY = Path("/etc/canaryd/probes.d")


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
        PROGRAM,
        "null",
        "Interpreter for numeric probes: the serving engine's own, which has torch. Default: canaryd's own.",
        sample='"/opt/vllm/bin/python3"',
    )
    command: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "Instead of python: a command that starts one elsewhere, as in a container. Default: none.",
        sample='["docker", "exec", "-i", "vllm", "python3"]',
    )
    env: Mapping[str, str] = setting(
        Variables(VARIABLE),
        "{}",
        "Variables to set for workers, on top of canaryd's own environment. Default: none.",
        sample='{LD_LIBRARY_PATH: "/opt/cuda/lib64"}',
    )
    grace: float = setting(DURATION, '"2s"', "How long a worker may take to end before it is killed.")


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
        DURATION, "null", "Time between two runs on one device. Default: the probe's own.", sample='"15m"'
    )
    timeout: float | None = setting(
        DURATION, "null", "Time beyond its budget after which it is killed. Default: the probe's own.", sample='"60s"'
    )
    level: str | None = setting(
        LEVEL, "null", "How hard to look: quick, standard or deep. Default: schedule.level.", sample="deep"
    )
    settings: Mapping[str, Any] = setting(
        Free(), "{}", "The probe's own settings, as its documentation names them. Default: none.", sample="{}"
    )


@dataclass(frozen=True, kw_only=True)
class ProbesConfig:
    """Where probes are found, and what is set for each by name."""

    directories: tuple[Path, ...] = setting(
        ListOf(PATH),
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
        URL,
        "null",
        "Where its OpenAI-compatible API is; this one has to be given.",
        sample='"http://127.0.0.1:8000/v1"',
        factory=str,
    )
    devices: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "The devices behind it, by uuid, name or backend. Default: all accelerators, or the CPU where there is none;"
        " none where the address is another host's.",
        sample='["cuda:0", "cuda:1"]',
    )
    model: str | None = setting(
        FILLED, "null", "The model to ask for. Default: the only one that the server lists.", sample='"qwen"'
    )
    directory: Path | None = setting(
        PATH,
        "null",
        "The checkpoint that it serves, a directory or a GGUF file: its digests tell a changed model from a fault."
        " Default: not known.",
        sample='"/srv/models/qwen"',
    )
    prompts: Path | None = setting(
        PATH, "null", "A file of prompts. Default: those that canaryd brings.", sample='"/etc/canaryd/prompts.json"'
    )
    apis: tuple[str, ...] = setting(
        ListOf(API), '["completions", "chat"]', "Which of its APIs to ask; one that it lacks is left out."
    )
    dialect: str | None = setting(
        DIALECT, "null", "Which server it is. Default: found out by asking it.", sample="vllm"
    )
    key_file: Path | None = setting(
        PATH,
        "null",
        "A file that holds the API key, and nothing else. Default: none is sent.",
        sample='"/etc/canaryd/key"',
    )
    ca_file: Path | None = setting(
        PATH, "null", "Certificates to trust for https. Default: the system's.", sample='"/etc/ssl/serving.pem"'
    )
    timeout: float = setting(DURATION, '"60s"', "How long one request may take.")


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
        LEVEL,
        "quick",
        "How hard probes look: quick, standard or deep. On CPUs quick takes one instruction set per round, in turn.",
    )
    jitter: float = setting(
        FRACTION, "0.1", "Fraction of its period by which a run may move, so that hosts do not march in step."
    )
    run_at_start: bool = setting(BOOLEAN, "true", "Whether every probe runs once as soon as the daemon starts.")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """What canaryd run may take of a device that serves; docs/budget.md has the reasons of each number."""

    share: float = setting(
        SHARE, "0.005", "Largest part of an hour that rounds may take of a device's time, or of a CPU's cores."
    )
    burst: float = setting(DURATION, '"0.05s"', "A run pauses whenever it has worked for this long.")
    memory: int = setting(
        MEMORY, '"1GiB"', "Memory that a worker may take; on an accelerator beside the driver's own context."
    )
    free: int = setting(MEMORY, '"512MiB"', "Memory that must be left free for the server in any case.")
    busy: float = setting(
        SHARE, "0.9", "A round waits while the device is in use for this part of the time or more; 1 is never."
    )
    power: float | None = setting(
        SHARE,
        "null",
        "A round waits while the device draws this part of its power limit or more. Default: it does not wait.",
        sample="0.95",
    )
    headroom: float = setting(
        DEGREES,
        "5",
        "A round waits while fewer degrees Celsius are left until the device slows itself down; 0 is never.",
    )
    quiet_hours: tuple[tuple[int, int], ...] = setting(
        ListOf(HOURS),
        "[]",
        "Hours of the day, in local time, in which rounds wait. Default: none.",
        sample='["08:00-20:00"]',
    )
    evidence: float | None = setting(
        DURATION,
        "null",
        "A round that waits for load, heat, hours or its share runs all the same when evidence is this old."
        " Default: three quarters of what judge.stale_after allows.",
        sample='"90m"',
    )


@dataclass(frozen=True, kw_only=True)
class JudgePolicy:
    """The judge's numbers; durations are in seconds. docs/thresholds.md: source and false-alarm chance of each."""

    stale_after: float = setting(
        DURATION, '"2h"', "A device whose newest evidence is older than this, and than three periods, is unknown."
    )
    confirm_runs: int = setting(
        whole(1, 100), "3", "A mismatch is confirmed when this many new processes all repeat it."
    )
    repeat_window: float = setting(DURATION, '"24h"', "Two mismatches within this time make a device faulty.")
    repeat_gap: float = setting(
        DURATION, '"60s"', "Mismatches less than this apart count as one: they may share a cause."
    )
    week_count: int = setting(whole(2, 1000), "3", "So many mismatches within judge.week make a device faulty.")
    week: float = setting(DURATION, '"7d"', "The window for judge.week_count.")
    watch: float = setting(DURATION, '"30d"', "A suspect device stays suspect for at least this long.")


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is made of what devices say about themselves; docs/thresholds.md has source and chance of each number."""

    kernel_log: Path = setting(
        PATH, '"/dev/kmsg"', "The kernel's log, or a file that is fed with records in its format."
    )
    keep: float = setting(
        DURATION, '"5m"', "A poll is stored at least this often, and whenever a counter or a flag has changed."
    )
    settle: float = setting(
        DURATION, '"1h"', "A condition that comes and goes is over when it has not been seen for this long."
    )
    throttle: float = setting(
        DURATION, '"60s"', "Time held down by heat or power within telemetry.settle that makes a device degraded."
    )
    corrected_per_day: int = setting(
        whole(1, 10**9), "1000", "Corrected errors of an accelerator's memory in a day that make it degraded."
    )
    dimm_corrected_per_day: int = setting(
        whole(1, 10**9), "10", "Corrected errors of a memory module of the host in a day that make it degraded."
    )
    xids: Mapping[str, str] = setting(
        Variables(
            GRADE,
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
        DURATION, '"45d"', "How long runs without a mismatch are kept; beyond judge.watch they can clear a suspect."
    )
    keep_failures: float = setting(DURATION, '"400d"', "How long mismatches and failed runs are kept.")
    max_size: int = setting(SIZE, '"256MiB"', "Size of the database beyond which the oldest successes go early.")


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Which devices are watched."""

    include: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "Devices to watch, by uuid, name or backend. Default: all that are found.",
        sample='["cuda", "cpu:0"]',
    )
    expected: int | None = setting(
        whole(0, 1024),
        "null",
        "How many accelerators should be found: whole ones, without the CPU. Default: any number will do.",
        sample="8",
    )
    absent: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "Devices taken out on purpose, by uuid: they are not missed while they are gone. Default: none.",
        sample='["GPU-5f1c0d6e-0000-0000-0000-000000000000"]',
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Equal, and of equal hash, when every setting is: a reload compares sections."""

    listen: tuple[str, int] = setting(
        LISTEN,
        '"127.0.0.1:19469"',
        'Address and port that serve metrics; ":19469" is every interface, and port 0 any free port.',
    )
    web_config: Path | None = setting(
        PATH,
        "null",
        "TLS and passwords for that address: a file in Prometheus's web.config.yml format. Default: neither.",
        sample='"/etc/canaryd/web.yml"',
    )
    state_dir: Path = setting(
        PATH,
        "null",
        "Directory of the database and the locks. Default: this for root, otherwise ~/.local/state/canaryd.",
        sample='"/var/lib/canaryd"',
        factory=lambda: default_state_dir(os.geteuid(), os.environ),
    )
    enforcement: str = setting(
        ENFORCEMENT,
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
