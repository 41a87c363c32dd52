"""What Prometheus reads: the exposition, and the HTTP server that hands it out.

`render` turns a snapshot of the evidence into bytes whenever the evidence changes; a scrape only sends prepared bytes.
Only the classic text format is written: OpenMetrics would carry the same numbers, and `choose_encoder` of
prometheus_client raises on an Accept header such as "application/openmetrics-text;version=x".
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.utils import floatToGoString

from canaryd.model import Cause, Device, Outcome, Reading, Run, State, Verdict
from canaryd.readings import READINGS, metric
from canaryd.recorded import Drift

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of what `render` and `process_metrics` return."""

PLAIN_TEXT = "text/plain; charset=utf-8"
"""Media type of the server's own short answers."""

SECURITY = (
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options: nosniff",
)
"""Headers of every answer: whatever a device calls itself, a browser runs and fetches nothing."""

STACK_KEYS = ("torch", "cuda", "cudnn", "driver", "blas", "onednn", "instruction_set", "kernel")
"""The parts of a stack that `canaryd_stack_info` names; the `stack` label stands for all of them."""

_DEVICE = ("device", "index", "model")
_PROBE = (*_DEVICE, "probe")


class Family(NamedTuple):
    """One metric: its Prometheus type, its labels in the order that `_Page.add` takes them, and its HELP text."""

    type: str
    labels: tuple[str, ...]
    help: str


FAMILIES: Mapping[str, Family] = {
    "canaryd_build_info": Family("gauge", ("version",), "Always 1; the labels say which canaryd runs."),
    "canaryd_device_present": Family("gauge", _DEVICE, "1 while the device is found, 0 after it vanished."),
    "canaryd_device_info": Family(
        "gauge",
        (*_DEVICE, "name", "backend", "serial", "bus_id", "identity", "parent"),
        "Always 1; identity is weak where the device label does not name the physical part; parent is the device "
        "that an instance belongs to.",
    ),
    "canaryd_devices_expected": Family(
        "gauge", (), "Accelerators that the configuration expects; absent when it does not say."
    ),
    "canaryd_device_state": Family(
        "gauge", (*_DEVICE, "state"), "1 for the state that the device is in, 0 for every other state."
    ),
    "canaryd_device_cause": Family(
        "gauge", (*_DEVICE, "cause"), "1 for the cause of the state that the device is in, 0 for every other cause."
    ),
    "canaryd_finding": Family(
        "gauge",
        (*_DEVICE, "rule", "state", "cause"),
        "Always 1; one series for each rule of the judge that speaks now; state healthy is a note.",
    ),
    "canaryd_device_verdict_timestamp_seconds": Family(
        "gauge", _DEVICE, "When the device was last judged, since the epoch; absent before the first verdict."
    ),
    "canaryd_stack_info": Family(
        "gauge",
        (*_DEVICE, "stack", *STACK_KEYS),
        "Always 1; the software under the newest runs, one series for each distinct stack.",
    ),
    "canaryd_probe_runs_total": Family(
        "counter", (*_PROBE, "outcome"), "Runs by what became of the worker process; says nothing about the numbers."
    ),
    "canaryd_probe_mismatches_total": Family("counter", _PROBE, "Comparisons that found a wrong bit."),
    "canaryd_probe_trials_total": Family("counter", _PROBE, "Results of the device that were compared with a golden."),
    "canaryd_probe_duration_seconds": Family(
        "gauge", _PROBE, "Wall time of the newest run, the worker's start excluded."
    ),
    "canaryd_probe_last_success_timestamp_seconds": Family(
        "gauge",
        _PROBE,
        "Start of the newest run that completed with every bit right, or of the newest poll that completed.",
    ),
    "canaryd_golden_fingerprint": Family(
        "gauge", (*_PROBE, "stack"), "An integer below 2^53 that equal results on equal stacks share."
    ),
    "canaryd_recordings": Family(
        "gauge",
        (*_PROBE, "reading", "status"),
        "Cases without a golden by what the newest run gave: known bits, unknown ones, or still learning.",
    ),
    "canaryd_drift_ratio": Family(
        "gauge",
        (*_PROBE, "reading"),
        "Largest distance of a recording from the nearest known one over its tolerance: 0 while the bits are known, "
        "+Inf where a bit-stable case gave others.",
    ),
    "canaryd_recording_token_agreement": Family(
        "gauge", (*_PROBE, "reading"), "Smallest share of tokens before the first that differs from the nearest known."
    ),
    "canaryd_recording_first_difference": Family(
        "gauge", (*_PROBE, "reading"), "Earliest token that differs, from 0 on; absent where none does."
    ),
    "canaryd_fault_rate_upper_bound": Family(
        "gauge", _PROBE, "Wrong results per compared result that the evidence does not rule out."
    ),
    "canaryd_drill_device_state": Family(
        "gauge", (*_DEVICE, "state"), "Like canaryd_device_state, from injected faults only; absent without a drill."
    ),
    "canaryd_drill_runs_total": Family("counter", _PROBE, "Runs with an injected fault; counted nowhere else."),
    "canaryd_drill_mismatches_total": Family(
        "counter", _PROBE, "Comparisons that found a wrong bit under an injected fault; counted nowhere else."
    ),
    "canaryd_xid_errors_total": Family(
        "counter", (*_DEVICE, "xid"), "Xid messages of the NVIDIA driver in the kernel log, by code."
    ),
    "canaryd_sxid_errors_total": Family(
        "counter", (*_DEVICE, "sxid"), "SXid messages of NVSwitches in the kernel log, by code; of the host's device."
    ),
    "canaryd_kernel_log_events_total": Family(
        "counter", (*_DEVICE, "kind", "name"), "Other lines of the kernel log that touch a device's health."
    ),
    "canaryd_stack_changes_total": Family(
        "counter",
        (*_DEVICE, "component"),
        "Changes of driver, firmware, place or software that an inventory found, by component.",
    ),
    "canaryd_readings_absent": Family(
        "gauge", _PROBE, "Readings that the device does not give; canaryd check --json says which and why."
    ),
    **{metric(name): Family(kind.type, (*_DEVICE, *kind.labels), kind.help) for name, kind in READINGS.items()},
    "canaryd_kernel_log_readable": Family("gauge", (), "1 while the kernel log is read, 0 while it cannot be."),
    "canaryd_kernel_log_lost_records_total": Family(
        "counter", (), "Records of the kernel log that went by unread, since the daemon started."
    ),
    "canaryd_device_handles_held": Family(
        "gauge", (), "1 while a worker holds a driver between polls because it has no persistence."
    ),
    "canaryd_released": Family("gauge", (), "1 while `canaryd release` keeps canaryd away from every device."),
    "canaryd_store_problem": Family("gauge", (), "1 while runs cannot be stored as they should be, 0 otherwise."),
    "canaryd_workers_abandoned_total": Family(
        "counter", (), "Workers that survived SIGKILL and were given up, since the daemon started."
    ),
    "canaryd_config_last_reload_successful": Family("gauge", (), "1 if the configuration was read without problems."),
    "canaryd_config_last_reload_success_timestamp_seconds": Family(
        "gauge", (), "When the configuration in use was read, since the epoch."
    ),
}
"""Every metric that `render` may write, in this order. docs/metrics.md repeats it; a test compares the two."""


XIDS = ("13", "31", "43", "45", "48", "62", "63", "64", "74", "79", "92", "94", "95", "119", "120", "140", "143", "154")
"""Codes that every NVIDIA device counts from 0 on, so that `increase()` sees the first one; others appear with it."""
COMPONENTS = ("bus_id", "driver", "serial", "torch", "vbios")
"""Components whose changes every device counts from 0 on."""


@dataclass(frozen=True, kw_only=True)
class PollView:
    """What is shown of one telemetry probe on one device."""

    seconds: float | None
    """Wall time of the newest poll."""
    last_success: float | None
    """Start of the newest poll that completed, since the epoch."""
    absent: int
    """Readings that it says the device does not give."""


@dataclass(frozen=True, kw_only=True)
class DeviceView:
    """All that is shown of one device."""

    device: Device
    present: bool
    verdict: Verdict | None
    """None is shown as unknown, cause undetermined."""
    drill_verdict: Verdict | None
    last_runs: Mapping[str, Run]
    """Probe → its newest run, drills left out."""
    last_success: Mapping[str, float]
    """Probe → seconds since the epoch."""
    fault_rate: Mapping[str, float]
    """Probe → upper bound of wrong results per compared result."""
    fingerprints: Mapping[tuple[str, str], int]
    """(probe, stack id) → an integer that a float holds exactly."""
    probes: Sequence[str] = ()
    """Probes planned for the device. Their counters show 0 before the first run, so that `increase()` sees a first
    mismatch; probes that any other field or counter names need not be repeated."""
    polls: Mapping[str, PollView] = field(default_factory=dict)
    """By telemetry probe."""
    drifts: Sequence[Drift] = ()
    """How far the newest recordings are from what is known."""
    readings: Sequence[Reading] = ()
    """What fresh polls and the newest runs say; of a name that is no metric, or with other labels, nothing is shown."""

    def __post_init__(self) -> None:
        where = f"view of {self.device.uuid}"
        for key, value in self.fingerprints.items():
            if not 0 <= value < 2**53:
                raise ValueError(f"{where}: fingerprint {key} is {value}; wanted an integer in [0, 2^53)")
        if any(run.drill for run in self.last_runs.values()) or (self.verdict and self.verdict.drill):
            raise ValueError(
                f"{where}: a drill among the real evidence; hand drills over as drill_verdict and counters"
            )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The evidence at one moment."""

    version: str
    devices: Sequence[DeviceView]
    counters: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    """The store's persistent counters: (name, label items) → count."""
    store_problem: str
    """A sentence, "" when all is well."""
    abandoned_workers: int
    config_reload_ok: bool
    config_reloaded: float
    """Seconds since the epoch."""
    expected_devices: int | None
    log_readable: bool = False
    log_lost: int = 0
    handles_held: bool = False
    released: bool = False


class _Page:
    """The series of one exposition, gathered by family.

    Written by hand: a node with 8 GPUs has two thousand series, and the client library's writer, which takes every
    label of every one of them apart again, would be a third of all that the daemon does.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in FAMILIES}

    def add(self, name: str, value: float, *labels: str) -> None:
        self._lines[name].append(_LINES[name] % (*map(_escaped, labels), floatToGoString(value)))  # type: ignore[no-untyped-call]

    def add_set(self, name: str, chosen: enum.Enum, *labels: str) -> None:
        """Add one series for each member of the enumeration of `chosen`: 1 for `chosen`, 0 for the others."""
        for member in type(chosen):
            self.add(name, member is chosen, *labels, member.value)

    def text(self) -> str:
        """Return the families that have series, in the order of `FAMILIES`, each behind its HELP and TYPE."""
        return "".join(
            f"# HELP {name} {FAMILIES[name].help}\n# TYPE {name} {FAMILIES[name].type}\n{''.join(lines)}"
            for name, lines in self._lines.items()
            if lines
        )


_LINES: Mapping[str, str] = {
    name: name + ("{" + ",".join(f'{label}="%s"' for label in f.labels) + "}" if f.labels else "") + " %s\n"
    for name, f in FAMILIES.items()
}


def render(snapshot: Snapshot) -> bytes:
    """Write `snapshot` in the text format of Prometheus (`CONTENT_TYPE`).

    A vanished device keeps its presence, its identity and the verdict on it, for an alarm must not end because the part
    is gone; counters of devices that are not in the snapshot are left out.
    """
    page = _Page()
    page.add("canaryd_build_info", 1, snapshot.version)
    page.add("canaryd_store_problem", bool(snapshot.store_problem))
    page.add("canaryd_workers_abandoned_total", snapshot.abandoned_workers)
    page.add("canaryd_config_last_reload_successful", snapshot.config_reload_ok)
    page.add("canaryd_config_last_reload_success_timestamp_seconds", snapshot.config_reloaded)
    page.add("canaryd_kernel_log_readable", snapshot.log_readable)
    page.add("canaryd_kernel_log_lost_records_total", snapshot.log_lost)
    page.add("canaryd_device_handles_held", snapshot.handles_held)
    page.add("canaryd_released", snapshot.released)
    if snapshot.expected_devices is not None:
        page.add("canaryd_devices_expected", snapshot.expected_devices)
    counted: dict[str, set[str]] = {}
    tallies: dict[str, list[tuple[str, dict[str, str], float]]] = {}
    for (name, items), count in snapshot.counters.items():
        of = dict(items)
        if "probe" in of:
            counted.setdefault(of["device"], set()).add(of["probe"])
        else:
            tallies.setdefault(of.get("device", ""), []).append((name, of, count))
    for view in snapshot.devices:
        device = view.device
        labels = (device.uuid, str(device.index), device.model)
        identity = "weak" if device.weak_identity else "strong"
        page.add("canaryd_device_present", view.present, *labels)
        page.add(
            "canaryd_device_info",
            1,
            *labels,
            device.name,
            device.backend,
            device.detail.get("serial", ""),
            device.detail.get("bus_id", ""),
            identity,
            device.parent,
        )
        _add_verdict(page, view, labels)
        if view.present:
            _add_tallies(page, device, tallies.get(device.uuid, []), labels)
            _add_telemetry(page, view, snapshot.counters, labels)
            probes = counted.get(device.uuid, set()).union(
                view.probes, view.last_runs, view.last_success, view.fault_rate
            )
            _add_evidence(page, view, sorted(probes - view.polls.keys()), snapshot.counters, labels)
    return page.text().encode()


def _add_verdict(page: _Page, view: DeviceView, labels: tuple[str, str, str]) -> None:
    verdict = view.verdict
    page.add_set("canaryd_device_state", verdict.state if verdict else State.UNKNOWN, *labels)
    page.add_set("canaryd_device_cause", verdict.cause if verdict else Cause.UNDETERMINED, *labels)
    if verdict:
        for rule, state, cause in sorted({(f.rule, f.state.value, f.cause.value) for f in verdict.findings}):
            page.add("canaryd_finding", 1, *labels, rule, state, cause)
        page.add("canaryd_device_verdict_timestamp_seconds", verdict.decided, *labels)


def _add_tallies(
    page: _Page,
    device: Device,
    tallies: Sequence[tuple[str, Mapping[str, str], float]],
    labels: tuple[str, str, str],
) -> None:
    """Add the counters of what happened: from 0 on where that is known beforehand."""
    xids = dict.fromkeys(XIDS, 0.0) if device.backend == "cuda" and not device.parent else {}
    components = {key: 0.0 for key in COMPONENTS if key in device.detail}
    for name, of, count in tallies:
        if name == "xid_errors":
            xids[of["xid"]] = count
        elif name == "sxid_errors":
            page.add("canaryd_sxid_errors_total", count, *labels, of["sxid"])
        elif name == "kernel_log_events":
            page.add("canaryd_kernel_log_events_total", count, *labels, of["kind"], of["name"])
        elif name == "stack_changes":
            components[of["component"]] = count
    for xid, count in sorted(xids.items()):
        page.add("canaryd_xid_errors_total", count, *labels, xid)
    for component, count in sorted(components.items()):
        page.add("canaryd_stack_changes_total", count, *labels, component)


def _add_telemetry(
    page: _Page,
    view: DeviceView,
    counters: Mapping[tuple[str, frozenset[tuple[str, str]]], float],
    labels: tuple[str, str, str],
) -> None:
    for probe, poll in sorted(view.polls.items()):
        _add_outcomes(page, view.device, probe, counters, labels)
        page.add("canaryd_readings_absent", poll.absent, *labels, probe)
        if poll.seconds is not None:
            page.add("canaryd_probe_duration_seconds", poll.seconds, *labels, probe)
        if poll.last_success is not None:
            page.add("canaryd_probe_last_success_timestamp_seconds", poll.last_success, *labels, probe)
    for reading in {r.key: r for r in view.readings}.values():  # two series of one name would cost the whole page
        kind = READINGS.get(reading.name)
        if kind and reading.labels.keys() == {*kind.labels} and isinstance(reading.value, (int, float)):
            page.add(
                metric(reading.name), float(reading.value), *labels, *(reading.labels[label] for label in kind.labels)
            )


def _add_outcomes(
    page: _Page,
    device: Device,
    probe: str,
    counters: Mapping[tuple[str, frozenset[tuple[str, str]]], float],
    labels: tuple[str, str, str],
) -> None:
    for outcome in Outcome:
        of = {"device": device.uuid, "probe": probe, "outcome": outcome.value}
        runs = counters.get(("probe_runs", frozenset(of.items())), 0)
        page.add("canaryd_probe_runs_total", runs, *labels, probe, outcome.value)


def _add_evidence(
    page: _Page,
    view: DeviceView,
    probes: Sequence[str],
    counters: Mapping[tuple[str, frozenset[tuple[str, str]]], float],
    labels: tuple[str, str, str],
) -> None:
    if view.drill_verdict:
        page.add_set("canaryd_drill_device_state", view.drill_verdict.state, *labels)
    for stack_id, stack in sorted({run.stack_id: run.stack for run in view.last_runs.values() if run.stack}.items()):
        page.add("canaryd_stack_info", 1, *labels, stack_id, *(stack.get(key, "") for key in STACK_KEYS))
    for probe in probes:
        of = {"device": view.device.uuid, "probe": probe}
        _add_outcomes(page, view.device, probe, counters, labels)
        for name in ("probe_mismatches", "probe_trials", "drill_runs", "drill_mismatches"):
            page.add(f"canaryd_{name}_total", counters.get((name, frozenset(of.items())), 0), *labels, probe)
        if probe in view.last_runs:
            page.add("canaryd_probe_duration_seconds", view.last_runs[probe].seconds, *labels, probe)
        if probe in view.last_success:
            page.add("canaryd_probe_last_success_timestamp_seconds", view.last_success[probe], *labels, probe)
        if probe in view.fault_rate:
            page.add("canaryd_fault_rate_upper_bound", view.fault_rate[probe], *labels, probe)
    for drift in view.drifts:
        for status, count in drift.status.items():
            page.add("canaryd_recordings", count, *labels, drift.probe, drift.reading, status)
        if drift.status["known"] or drift.status["unknown"]:
            page.add("canaryd_drift_ratio", drift.ratio, *labels, drift.probe, drift.reading)
            page.add("canaryd_recording_token_agreement", drift.agreement, *labels, drift.probe, drift.reading)
        if drift.first is not None:
            page.add("canaryd_recording_first_difference", drift.first, *labels, drift.probe, drift.reading)
    for (probe, stack_id), fingerprint in sorted(view.fingerprints.items()):
        page.add("canaryd_golden_fingerprint", fingerprint, *labels, probe, stack_id)


@functools.lru_cache(maxsize=4096)
def _escaped(label: str) -> str:
    """Return a label's value as the format wants it, without lone surrogates: one of them would cost the whole page."""
    clean = label.encode("utf-8", "replace").decode()
    return clean.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


_PROCESS = CollectorRegistry()
ProcessCollector(registry=_PROCESS)


def process_metrics() -> bytes:
    """Return the daemon's own `process_*` metrics as of now.

    Appended to the prepared page on each scrape: reading them takes about 0.06 ms and never waits for a device.
    """
    return generate_latest(_PROCESS)


Route = Callable[[str], tuple[int, str, bytes]]
"""Takes the Accept header ("" without one); returns status, content type and body. It must not wait for anything."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may cost the others. Times in seconds."""

    connections: int = 64
    head: float = 5.0
    """From a request's first byte to its blank line; also the silence allowed after connecting."""
    idle: float = 30.0
    """Silence allowed between two requests of one connection."""
    write: float = 10.0
    """For a whole answer."""
    patience: float = 1.0
    """An answer that takes longer than this loses its connection when another client needs the place."""


_LIMITS = Limits()
_MAX_REQUEST_LINE = 8 * 1024
_MAX_HEAD = 32 * 1024


class Server:
    """A small HTTP/1.1 server that answers GET and HEAD from prepared bytes.

    Each connection has a thread and deadlines of its own, so that a slow or silent client holds up nobody else. When
    all places are taken, a newcomer gets that of the client that has kept us waiting longest.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], limits: Limits = _LIMITS) -> None:
        """Bind to `host` (IPv4, IPv6 or a name) and `port` (0: any free one); `routes` maps paths to answers.

        Raises `OSError` that says which address cannot be had and what to do.
        """
        self._listener = _Listener(host, port, routes, limits)
        self._thread = threading.Thread(target=self._listener.serve_forever, name="canaryd-http", daemon=True)

    @property
    def port(self) -> int:
        """The port that is bound."""
        port: int = self._listener.socket.getsockname()[1]
        return port

    @property
    def refused(self) -> int:
        """Connections closed unanswered so far because every place was taken."""
        return self._listener.refused

    def start(self) -> None:
        """Begin to answer, in threads of our own."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and hang up on every client; takes up to half a second."""
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()
        self._listener.hang_up()


_ADVICE = {
    errno.EADDRINUSE: "another process, perhaps another canaryd, listens there: stop it or choose another port",
    errno.EADDRNOTAVAIL: "this machine does not have that address: choose one of its own",
    errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE: choose a higher port",
}


class _Listener(socketserver.ThreadingTCPServer):
    # ThreadingHTTPServer, minus its look-up of the host's full name, which may wait for a name server.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], limits: Limits) -> None:
        self.routes = routes
        self.limits = limits
        self.refused = 0
        self._lock = threading.Lock()
        # Connection → (is it being answered?, since when), the longest unchanged first.
        self._places: dict[socket.socket, tuple[bool, float]] = {}
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__((str(address[0]), port), _Connection)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            advice = _ADVICE.get(error.errno or 0, "choose another address")
            raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}; {advice}") from error

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # out of file descriptors, the pending connection would otherwise wake us in a busy loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            admitted = len(self._places) < self.limits.connections or self._evict()
            if admitted:
                self._places[request] = (False, time.monotonic())
            else:
                self.refused += 1
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _evict(self) -> bool:
        now = time.monotonic()
        for request, (answering, since) in self._places.items():
            if not answering or now - since > self.limits.patience:
                del self._places[request]
                _hang_up(request)
                return True
        return False

    def turn(self, request: socket.socket, *, answering: bool) -> bool:
        """Note that a connection is now being answered, or waited for; False when it has lost its place."""
        with self._lock:
            if self._places.pop(request, None) is None:
                return False
            self._places[request] = (answering, time.monotonic())
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # forgotten before it is closed: _evict must never meet a reused descriptor
            self._places.pop(request, None)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        with self._lock:
            for request in self._places:
                _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (socketserver's signature)
        log.error("answering %s failed", client_address, exc_info=True)  # noqa: LOG014  (called while handling)


def _hang_up(request: socket.socket) -> None:
    """Make the thread that reads from or writes to `request` give up at once."""
    with contextlib.suppress(OSError):  # the client was faster
        request.shutdown(socket.SHUT_RDWR)


class _BadRequestError(Exception):
    """The message is the answer to the client."""


class _Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    keep_alive: bool


def _parse(head: bytes) -> _Request:
    first, *lines = re.split("\r?\n", head.decode("latin-1"))
    if len(first) > _MAX_REQUEST_LINE:
        raise _BadRequestError(f"request line longer than {_MAX_REQUEST_LINE} bytes")
    match = re.fullmatch(r"([!-~]+) ([!-~]+) HTTP/1\.([0-9])", first)
    if not match:
        raise _BadRequestError('malformed request line; wanted "GET /metrics HTTP/1.1"')
    headers: dict[str, str] = {}
    for line in lines:
        field = re.fullmatch(r"([!-9;-~]+):[ \t]*(.*?)[ \t]*", line)
        if not field:
            raise _BadRequestError('malformed header; wanted "Name: value"')
        name = field[1].lower()
        headers[name] = f"{headers[name]}, {field[2]}" if name in headers else field[2]
    # A body is never read, so what follows it could not be told from the next request.
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    keep_alive = match[3] != "0" and "close" not in headers.get("connection", "").lower() and not body
    return _Request(match[1], match[2].partition("?")[0], headers, keep_alive)


class _Connection(socketserver.BaseRequestHandler):
    """One client, in a thread of its own: all that waits for the client happens from `handle` on, never earlier."""

    server: _Listener
    request: socket.socket

    def handle(self) -> None:
        self._received = b""
        patience = self.server.limits.head
        with contextlib.suppress(OSError):  # gone, too slow, or evicted: there is nobody to tell
            while self._exchange(patience) and self.server.turn(self.request, answering=False):
                patience = self.server.limits.idle
            self._linger()

    def _exchange(self, patience: float) -> bool:
        """Answer one request, waiting `patience` for it to begin; True if another may follow."""
        request = None
        try:
            head = self._read_head(patience)
            if head is None or not self.server.turn(self.request, answering=True):
                return False
            request = _parse(head)
        except _BadRequestError as error:
            status, content_type, body = 400, PLAIN_TEXT, f"bad request: {error}\n".encode()
        else:
            status, content_type, body = self._answer(request)
        keep_alive = request is not None and request.keep_alive
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            *SECURITY,
            *(["Allow: GET, HEAD"] if status == HTTPStatus.METHOD_NOT_ALLOWED else []),
            f"Connection: {'keep-alive' if keep_alive else 'close'}",
        ]
        if request is not None and request.method == "HEAD":
            body = b""
        self.request.settimeout(self.server.limits.write)  # sendall takes it for the whole, not for each part
        self.request.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return keep_alive

    def _answer(self, request: _Request) -> tuple[int, str, bytes]:
        if request.method not in ("GET", "HEAD"):
            return 405, PLAIN_TEXT, b"method not allowed: use GET or HEAD\n"
        route = self.server.routes.get(request.path)
        if route is None:
            return 404, PLAIN_TEXT, f"not found: there is {', '.join(sorted(self.server.routes))}\n".encode()
        try:
            return route(request.headers.get("accept", ""))
        except Exception:
            log.exception("%s failed", request.path)
            return 500, PLAIN_TEXT, b"internal error: see the log of canaryd\n"

    def _read_head(self, patience: float) -> bytes | None:
        """Return the next request up to its blank line; None when the client has nothing (more) to say in time."""
        limits = self.server.limits
        deadline = time.monotonic() + (limits.head if self._received else patience)
        while not (end := re.search(b"\r?\n\r?\n", self._received)):
            if len(self._received) > _MAX_REQUEST_LINE and b"\n" not in self._received:
                raise _BadRequestError(f"request line longer than {_MAX_REQUEST_LINE} bytes")
            if len(self._received) > _MAX_HEAD:
                raise _BadRequestError(f"headers longer than {_MAX_HEAD} bytes")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            self.request.settimeout(remaining)
            chunk = self.request.recv(8192)
            if not chunk:
                return None
            if not self._received:
                deadline = time.monotonic() + limits.head
            self._received = (self._received + chunk).lstrip(b"\r\n")
        head, self._received = self._received[: end.start()], self._received[end.end() :]
        return head

    def _linger(self) -> None:
        """Say that we are done and read on for a moment: closing over unread bytes would tear up the answer."""
        self.request.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + self.server.limits.patience
        while (remaining := deadline - time.monotonic()) > 0:
            self.request.settimeout(remaining)
            if not self.request.recv(65536):
                return
