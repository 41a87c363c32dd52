"""The settings of canaryd, as frozen dataclasses.

Validation, defaults, `json_schema()` and `example()` are made from these dataclasses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.schema import BOOLEAN, Each, Free, ListOf, Variables, section, setting
from canaryd.config.values import (
    API,
    DIALECT,
    DURATION,
    ENFORCEMENT,
    FILLED,
    GRADE,
    HOURS,
    KEY_FILE,
    LEVEL,
    LISTEN,
    MEMORY,
    PATH,
    PROGRAM,
    REPEATS,
    REQUEST_TIMEOUT,
    SHARE,
    SIZE,
    URL,
    VARIABLE,
    whole,
)
from canaryd.model import RUNTIMES

STATE_DIRECTORY = Path("/var/lib/canaryd")
DROP_IN_DIRECTORY = Path("/etc/canaryd/probes.d")


def default_state_dir(uid: int, environ: Mapping[str, str]) -> Path:
    """Return the directory for stored results: /var/lib/canaryd if it exists, else a path in the user's home.

    Root, and a user without a home, always get /var/lib/canaryd. Once it exists, a person's command shares locks and
    history with the daemon. A command that cannot write there says that its results are not stored.
    """
    if STATE_DIRECTORY.exists():
        return STATE_DIRECTORY
    state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if uid != 0 and state.startswith("/"):  # the XDG specification: ignore a relative path
        return Path(state, "canaryd")
    if uid != 0 and home.startswith("/"):
        return Path(home, ".local/state/canaryd")
    return STATE_DIRECTORY


def _runtime(packages: str, name: str, directory: str) -> Any:
    doc = f"Python interpreter with {packages} and torch. Default: no device is tested through {name}."
    return setting(PROGRAM, "null", doc, sample=f'"/opt/{directory}/bin/python3"')


@dataclass(frozen=True, kw_only=True)
class RuntimesConfig:
    """Runtimes besides torch, each with the Python interpreter that has it."""

    mlx: str | None = _runtime("mlx", "MLX", "mlx")
    onnx: str | None = _runtime("onnxruntime, onnx", "ONNX Runtime", "onnx")
    webgpu: str | None = _runtime("wgpu", "WebGPU", "wgpu")
    jax: str | None = _runtime("jax", "JAX", "jax")

    @property
    def each(self) -> Mapping[str, str]:
        """Runtime → its interpreter, for the runtimes that are configured."""
        return {name: python for name in RUNTIMES if (python := getattr(self, name, None))}


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How to start workers. At most one of `python` and `command` is given."""

    python: str | None = setting(
        PROGRAM,
        "null",
        "Python interpreter for numeric probes: that of the serving engine, with torch. Default: canaryd's own.",
        sample='"/opt/vllm/bin/python3"',
    )
    command: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "Instead of python: a command that starts an interpreter elsewhere, such as in a container. Default: none.",
        sample='["docker", "exec", "-i", "vllm", "python3"]',
    )
    runtimes: RuntimesConfig = section(
        RuntimesConfig, "Runtimes to test devices through in addition to torch. docs/vendors.md#runtimes"
    )
    env: Mapping[str, str] = setting(
        Variables(VARIABLE),
        "{}",
        "Environment variables for workers, in addition to canaryd's own environment. Default: none.",
        sample='{LD_LIBRARY_PATH: "/opt/cuda/lib64"}',
    )


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Settings of one probe; None means the probe's own default."""

    enabled: bool | None = setting(
        BOOLEAN,
        "null",
        "Whether to run the probe. Default: yes, except for probes that other Python packages install.",
        sample="false",
    )
    period: float | None = setting(
        DURATION, "null", "Time between two runs on one device. Default: the probe's own.", sample='"15m"'
    )
    timeout: float | None = setting(
        DURATION, "null", "Time that a run may take beyond its budget. Default: the probe's own.", sample='"60s"'
    )
    level: str | None = setting(
        LEVEL, "null", "How thoroughly to test: quick, standard or deep. Default: schedule.level.", sample="deep"
    )
    settings: Mapping[str, Any] = setting(
        Free(), "{}", "Settings that only this probe has; see its documentation. Default: none.", sample="{}"
    )


@dataclass(frozen=True, kw_only=True)
class ProbesConfig:
    """The directories of probes, and the settings of each probe by name."""

    directories: tuple[Path, ...] = setting(
        ListOf(PATH),
        f'["{DROP_IN_DIRECTORY}"]',
        "Directories with more probes, owned by root or canaryd's user. Default: this one, if it exists.",
        factory=lambda: (DROP_IN_DIRECTORY,) if os.path.isdir(DROP_IN_DIRECTORY) else (),  # noqa: PTH112  never raises
    )
    each: Mapping[str, ProbeSettings] = field(
        default_factory=dict,
        hash=False,
        metadata={"kind": Each(ProbeSettings), "doc": "One section per probe, by its name.", "sample": "exact_matmul"},
    )

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of the probes that are explicitly enabled."""
        return tuple(name for name, probe in self.each.items() if probe.enabled)


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Settings of one model server."""

    url: str = setting(
        URL, "null", "Address of its OpenAI-compatible API; required.", sample='"http://127.0.0.1:8000/v1"', factory=str
    )
    devices: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "Devices of this host that serve it, by uuid, name or backend. Default: all accelerators, else the CPU;"
        " no device if the address is another host's.",
        sample='["cuda:0", "cuda:1"]',
    )
    model: str | None = setting(
        FILLED, "null", "The model to ask for. Default: the only model that the server lists.", sample='"qwen"'
    )
    directory: Path | None = setting(
        PATH,
        "null",
        "The checkpoint that it serves, a directory or a GGUF file. Its digests tell a changed model from a fault, and"
        " exact_matmul tests the sizes of its weights. Default: unknown.",
        sample='"/srv/models/qwen"',
    )
    prompts: Path | None = setting(
        PATH, "null", "A file with prompts. Default: canaryd's own prompts.", sample='"/etc/canaryd/prompts.json"'
    )
    exact: Path | None = setting(
        PATH,
        "null",
        "The directory of the exact canary that it serves, as canaryd canary export wrote it: every answer is compared"
        " with the one right answer, and nothing is learnt. Default: it serves another model.",
        sample='"/srv/exact"',
    )
    apis: tuple[str, ...] = setting(
        ListOf(API), '["completions", "chat"]', "Which of its APIs to test; an API that it lacks is skipped."
    )
    dialect: str | None = setting(DIALECT, "null", "The server software. Default: detected.", sample="vllm")
    repeats: str | None = setting(
        REPEATS,
        "null",
        'Which of its answers must have equal bits: "always" (whatever else it serves, after every start, as with'
        ' VLLM_BATCH_INVARIANT=1), or "restarts" (after every start). Default: what its own pages say, else those'
        " between two starts.",
        sample="always",
    )
    key_file: Path | None = setting(
        KEY_FILE, "null", "A file that contains only the API key. Default: no key is sent.", sample='"/etc/canaryd/key"'
    )
    ca_file: Path | None = setting(
        PATH, "null", "CA certificates to trust for https. Default: the system's.", sample='"/etc/ssl/serving.pem"'
    )
    timeout: float = setting(REQUEST_TIMEOUT, '"60s"', "Time limit of one request.")


@dataclass(frozen=True, kw_only=True)
class EndpointsConfig:
    """The model servers to test, by name. A name without settings is ignored."""

    each: Mapping[str, EndpointConfig] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "kind": Each(EndpointConfig, of="endpoints"),
            "doc": "One section per server, by a name of your choice.",
            "sample": "main",
        },
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The times at which probes run, and how thoroughly they test."""

    level: str = setting(
        LEVEL,
        "quick",
        "How thoroughly to test: quick, standard or deep. On CPUs quick tests one instruction set per round, in turn.",
    )


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Limits on what `canaryd run` takes from a device that serves. docs/budget.md explains each."""

    share: float = setting(
        SHARE, "0.005", "Largest fraction of an hour of device time, or of a CPU's cores, that rounds may use."
    )
    memory: int = setting(
        MEMORY, '"1GiB"', "Memory that a worker may use; on an accelerator in addition to the driver's own context."
    )
    busy: float = setting(
        SHARE,
        "0.9",
        "Rounds wait while the device is in use for at least this fraction of the time; with 1 they never wait.",
    )
    quiet_hours: tuple[tuple[int, int], ...] = setting(
        ListOf(HOURS),
        "[]",
        "Hours of the day, in local time, in which rounds wait. Default: none.",
        sample='["08:00-20:00"]',
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Settings for reading and judging telemetry. docs/thresholds.md has source and false-alarm rate of each number."""

    kernel_log: Path = setting(PATH, '"/dev/kmsg"', "The kernel log, or a file with records in its format.")
    xids: Mapping[str, str] = setting(
        Variables(
            GRADE, "[0-9]{1,5}", "a mapping of Xid codes to grades", 'not an Xid; write its number in quotes, e.g. "31"'
        ),
        "{}",
        "Xids to grade differently from NVIDIA's catalogue. Default: none.",
        sample='{"31": none}',
    )
    settle: ClassVar[float] = 3600.0
    """Seconds without a new sighting after which a condition that comes and goes has ended."""
    throttle: ClassVar[float] = 60.0
    """Seconds of throttling by heat or power, within `settle` seconds, that make a device degraded."""
    corrected_per_day: ClassVar[int] = 1000
    """Corrected memory errors of an accelerator in a day that make the accelerator degraded."""
    dimm_corrected_per_day: ClassVar[int] = 10
    """Corrected errors of one memory module in a day that make the host degraded."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How long runs are kept. Sizes are in bytes."""

    keep_failures: float = setting(
        DURATION, '"400d"', "How long mismatches and failed runs are kept; other runs are kept for 45 days."
    )
    keep_successes: ClassVar[float] = 45 * 86_400.0
    """Seconds for which other runs are kept: longer than a suspect device is watched."""
    max_size: int = setting(SIZE, '"256MiB"', "Size of the database above which old successes are deleted early.")


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Settings that select the devices to test."""

    include: tuple[str, ...] = setting(
        ListOf(FILLED), "[]", "Devices to watch, by uuid, name or backend. Default: all.", sample='["cuda", "cpu:0"]'
    )
    expected: int | None = setting(
        whole(0, 1024),
        "null",
        "How many accelerators this host has, without the CPU; a divided GPU counts as one. Default: any number.",
        sample="8",
    )
    absent: tuple[str, ...] = setting(
        ListOf(FILLED),
        "[]",
        "Devices that you removed on purpose, by uuid; they are not reported as missing. Default: none.",
        sample='["GPU-5f1c0d6e-0000-0000-0000-000000000000"]',
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """TLS for the address of metrics and pages. Without a certificate the address uses plain HTTP."""

    cert_file: Path | None = setting(
        PATH, "null", "The certificate with its chain, PEM. Default: no TLS.", sample='"/etc/canaryd/server.crt"'
    )
    key_file: Path | None = setting(
        KEY_FILE, "null", "Its key, PEM without a password. Default: none.", sample='"/etc/canaryd/server.key"'
    )
    client_ca_file: Path | None = setting(
        PATH,
        "null",
        "Only clients with a certificate that one of these authorities signed are let in. Default: all clients.",
        sample='"/etc/canaryd/clients.crt"',
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Two configurations are equal if all their settings are equal; `file` does not count."""

    GONE: ClassVar[Mapping[str, str]] = {
        "web_config": "no setting any more; name certificate, key and client CA under tls (cert_file, key_file,"
        " client_ca_file), and let a proxy ask for passwords, as docs/security.md shows",
    }
    """Setting of an earlier release → message about what to do instead."""

    listen: tuple[str, int] = setting(
        LISTEN,
        '"127.0.0.1:19469"',
        'Address and port for metrics and pages; ":19469" means all interfaces, port 0 any free port.',
    )
    tls: TlsConfig = section(
        TlsConfig, "TLS for that address. Files that have changed are read again within 15 seconds."
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
        "What canaryd gate does about a faulty device: log only reports it, act fails (docs/enforcement.md).",
    )
    worker: WorkerConfig = section(WorkerConfig, "Workers: the processes that use the hardware.")
    probes: ProbesConfig = section(ProbesConfig, "Probes: where they are found, and a section for each, by name.")
    endpoints: EndpointsConfig = section(EndpointsConfig, "Endpoints: model servers to test with canary prompts.")
    schedule: ScheduleConfig = section(ScheduleConfig, "Schedule: when probes run, and how thoroughly they test.")
    budget: BudgetConfig = section(BudgetConfig, "Budget: what canaryd run may take from devices that serve.")
    judge: JudgePolicy = section(JudgePolicy, "Judge: how mismatches become verdicts.")
    telemetry: TelemetryConfig = section(TelemetryConfig, "Telemetry: how readings and the kernel log are judged.")
    store: StoreConfig = section(StoreConfig, "Store: how long runs are kept.")
    devices: DevicesConfig = section(DevicesConfig, "Devices: which ones canaryd watches.")
    file: Path | None = field(default=None, compare=False)
    """The configuration file that was read, or None for the defaults."""
