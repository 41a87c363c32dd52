"""The words of canaryd as types: device, run, comparison, finding, verdict.

Everything here is plain, frozen data of the standard library alone, because the same file is read by the daemon and by
a worker that runs under somebody else's interpreter. `to_json` and `from_json` are the only codec: the worker protocol,
the store and `--json` all use it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

SHARED = 64
"""Characters of the longest text that `shared` looks up (ours)."""


class Outcome(str, enum.Enum):
    """What became of the worker process that was asked for a run; says nothing about the device's numbers."""

    COMPLETED = "completed"
    """The probe ran to its end; its comparisons say whether the numbers were right."""
    SKIPPED = "skipped"
    """The probe could not apply here and said why (no torch, no such kernel); nothing was measured."""
    ERRORED = "errored"
    """The probe raised an exception, or no worker could be started for it."""
    CRASHED = "crashed"
    """The worker died (signal, abort, unexpected exit) before it answered."""
    TIMED_OUT = "timed_out"
    """The worker overran its deadline and was killed with its group."""
    OUT_OF_MEMORY = "out_of_memory"
    """Host or device memory ran out."""
    UNKILLABLE = "unkillable"
    """The worker survived SIGKILL (uninterruptible sleep); it was abandoned, not waited for."""
    GARBLED = "garbled"
    """The worker answered something that is not the protocol."""


Sentence = Annotated[str, "sentence"]
"""Text for people. No rule, state or page may depend on its wording; a test changes every one of them."""


class Reason(str, enum.Enum):
    """Why a run did not complete, where more is known than its outcome."""

    NONE = ""
    STOPPED = "stopped"
    """canaryd itself cut the run short: no evidence, and not stored."""
    DEVICE_LOST = "device_lost"
    """The driver says that the device no longer answers."""


class State(str, enum.Enum):
    """May I trust this device's numbers? Ordered from best to worst by `severity`."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"
    SUSPECT = "suspect"
    FAULTY = "faulty"

    @property
    def severity(self) -> int:
        """Rank for "the worst wins": healthy 0 … faulty 4."""
        return list(State).index(self)


class Cause(str, enum.Enum):
    """Whose fault it is. `NONE` only where there is nothing to explain."""

    NONE = "none"
    HARDWARE = "hardware"
    SOFTWARE = "software"
    ENVIRONMENT = "environment"
    HARNESS = "harness"
    UNDETERMINED = "undetermined"


class Subject(str, enum.Enum):
    """What a comparison examined."""

    DEVICE = "device"
    """The result that the device under test computed."""
    HOST = "host"
    """The golden itself, made twice on the host, on two cores where it has them (or in two ways), that must agree."""
    COMPARATOR = "comparator"
    """The device's comparison of result and golden, repeated by the host on the same bytes."""


class Doubt(str, enum.Enum):
    """What put a golden or a comparison in doubt: for comparisons whose subject is not the device."""

    NONE = ""
    MADE_TWICE = "made_twice"
    """The host made operands or golden twice and got two results."""
    ARITHMETIC = "arithmetic"
    """Integer and float64 arithmetic of the host gave two goldens."""
    DIGEST = "digest"
    """The golden differs from the one that ships with canaryd."""
    COMPARATOR = "comparator"
    """Device and host compared the same bytes and disagree."""
    UNKNOWN = "unknown"
    """A record of release 0.1.0 that does not tell."""


class Exactness(str, enum.Enum):
    """How a golden is right (docs/goldens.md)."""

    UNIVERSAL = "U"
    """Every partial sum and the output are exactly representable: one bit pattern on every healthy device."""
    ROUNDED = "R"
    """The sum is exact and rounded once to the output type: assumes one round-to-nearest-even."""
    MARGIN = "M"
    """Decided by a margin that no healthy device's rounding crosses; no bit pattern is prescribed."""


ENDPOINT = "endpoint"
"""The backend of a server that answers on behalf of devices."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Keyed by `uuid`, never by index."""

    uuid: str
    """Serial-like identity, e.g. "GPU-5f1c…" or "CPU-90ab…"."""
    backend: str
    """"cpu", "cuda", "rocm", "mps", "xpu" or "npu"; "endpoint" for a server that answers on behalf of devices."""
    index: int
    """The backend's own ordinal at the time of discovery; it may change, the uuid may not."""
    model: str
    """The vendor's product name."""
    weak_identity: bool = False
    """True where the uuid does not name the physical part (a virtual machine's CPU): never yields an RMA dossier."""
    instruction_sets: tuple[str, ...] = ()
    """CPUs only: execution paths that torch can be told to use, the native one first."""
    detail: Mapping[str, str] = field(default_factory=dict)
    """Further identity: serial, bus address, driver, memory, visible cores."""
    torch_index: int | None = None
    """How torch under the stack under test numbers it; None where that torch does not reach it."""
    parent: str = ""
    """The uuid of the device that this one is an instance of (MIG); "" for a whole device."""

    @property
    def kind(self) -> tuple[str, str]:
        """What siblings share: backend and model."""
        return self.backend, self.model

    @property
    def part(self) -> str:
        """The uuid of the physical part: instances of one divided device share it."""
        return self.parent or self.uuid

    @property
    def is_endpoint(self) -> bool:
        """Whether it is a server and no part of this host."""
        return self.backend == ENDPOINT

    @property
    def name(self) -> str:
        """What people type: "cpu:0", "cuda:3", "cuda:3.1" for an instance of a divided device, "endpoint:main"."""
        if self.is_endpoint:
            return self.uuid
        instance = self.detail.get("instance", "")
        return f"{self.backend}:{self.index}" + (f".{instance}" if instance else "")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A fact with a unit. What could not be read is not a Reading: it is an entry of `Run.absent`, with its reason."""

    name: str
    value: float | int | str | bool
    unit: str = ""
    """Base unit ("seconds", "bytes", "celsius", "1") or "" for text."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What tells readings of one name apart, e.g. {"sensor": "core"}."""

    @functools.cached_property
    def key(self) -> str:
        """The name with its labels, as Prometheus would write it without quotes: "temperature_celsius{sensor=core}"."""
        return reading_key(self.name, self.labels)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where something was computed, in the vendor's own terms. `str(place)` is how people read it."""

    unit: str = ""
    """"core", "sm", "threads", "thread" or "device"; "" where it is not known."""
    numbers: tuple[int, ...] = ()
    """Which cores or SMs; of "threads", how many. A golden that one core made twice names that core twice."""

    @property
    def core(self) -> int | None:
        """The single core; None where there were several or it is not known."""
        return self.numbers[0] if self.unit == "core" and len(self.numbers) == 1 else None

    def __str__(self) -> str:
        """Return e.g. "core 3", "cores 2 and 5", "core 3 twice", "SM 17", "all 2 threads", "device"."""
        if self.unit == "threads":
            return f"all {self.numbers[0]} threads" if self.numbers else "several threads"
        if self.unit == "thread":
            return "one thread"
        unit = {"sm": "SM"}.get(self.unit, self.unit)
        if len(self.numbers) < 2:
            return f"{unit} {self.numbers[0]}" if self.numbers else unit
        if len(set(self.numbers)) == 1:
            return f"{unit} {self.numbers[0]} twice"
        return f"{unit}s {', '.join(map(str, self.numbers[:-1]))} and {self.numbers[-1]}"


@dataclass(frozen=True, kw_only=True)
class Span:
    """What the wrong indices along one axis share."""

    first: int
    last: int
    distinct: int
    """How many different indices there are."""
    period: int = 0
    """The largest power of two by which all of them leave the same remainder; 0 where there is none."""

    @property
    def shared(self) -> bool:
        """Whether all wrong indices are one line or one residue: a place that two faults could share."""
        return self.distinct == 1 or self.period > 0

    def __str__(self) -> str:
        """Return e.g. "17", "= 3 mod 16", "0…31 (32 distinct)"."""
        if self.distinct == 1:
            return str(self.first)
        if self.period:
            return f"= {self.first % self.period} mod {self.period}"
        return f"{self.first}…{self.last} ({self.distinct} distinct)"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one wrong result looked like: enough to see the pattern, and to recompute the inputs from the seed."""

    wrong: int
    """Elements whose bits differ."""
    total: int
    """Elements compared."""
    first: tuple[tuple[tuple[int, ...], str, str], ...]
    """Up to 64 wrong elements, in order: (index, expected bits as hex, observed bits as hex)."""
    bits: Mapping[str, int]
    """Bit position (0 = lowest) → in how many wrong elements it was flipped, over at most 65,536 of them."""
    zeroed: int
    """Wrong elements whose observed bits are all zero (or only the sign)."""
    nonfinite: int
    """Wrong elements observed as NaN or infinity."""
    lines: Mapping[str, Span]
    """Axis of the result ("row", "column", …) → what the wrong indices share along it."""
    pattern: Sentence
    """The difference in words."""
    repeats: int = 0
    """Fresh uploads of the same operands that were tried afterwards."""
    repeats_wrong: int = 0
    """How many of these were wrong too."""
    repeats_alike: int | None = None
    """How many were wrong in the same elements with the same bits; None where that was not compared."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One golden against what was computed, over one upload of the operands. A fact: only the judge concludes."""

    case: str
    """Stable name of what was run, e.g. "bfloat16/cancel/decode/nt"."""
    shape: str
    """Sizes, e.g. "M=32 N=1024 K=256"."""
    seed: int
    """Seed of the operands; with `case` and `shape` it reproduces them bit for bit."""
    exactness: Exactness
    subject: Subject = Subject.DEVICE
    place: Place = Place()
    """Where it ran, as far as known; of a golden, which cores made it."""
    doubt: Doubt = Doubt.NONE
    """What was in doubt, where the subject is not the device."""
    trials: int = 1
    """Results compared with this upload."""
    wrong_trials: int = 0
    """Results with at least one wrong bit."""
    evidence: Evidence | None = None
    """Present exactly when `wrong_trials` > 0."""
    digest: str = ""
    """64-bit order-sensitive digest (hex) of the first observed result; "" where it was not taken."""
    uploads: int = 1
    """Uploads that it stands for: several where clean ones were summed up."""
    characterised: bool = True
    """False where exactness of this class has not been shown on a healthy device of this backend: cannot accuse."""

    @property
    def wrong(self) -> bool:
        """True when any trial had a wrong bit."""
        return self.wrong_trials > 0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a case gave whose right answer nobody knows beforehand: compared with what it gave before. A fact."""

    case: str
    """Stable name of what was run, e.g. "completions/reef/fresh"."""
    digest: str
    """64-bit digest (hex) over everything exact: tokens, and all raw values as they were delivered."""
    chain: Mapping[str, str] = field(default_factory=dict)
    """Link → fingerprint: what may change the bits for a good reason, beside the run's stack. See `LINKS`."""
    condition: str = ""
    """"idle" or "loaded" where it is known whether others were served at the same time; "" where not."""
    tokens: tuple[str, ...] = ()
    """What was generated, one entry per position: ids as text, or the tokens' own text where there are no ids; empty
    for a kernel's result."""
    values: tuple[float | None, ...] = ()
    """Natural logarithm of each token's probability; of a kernel's result one value per tile, row by row. None where it
    is not given or not finite."""
    margins: tuple[float | None, ...] = ()
    """The best token's log probability minus the second best's, per position; None where not known."""
    text: str = ""
    """It in words, at most 4,096 characters."""
    finish: str = ""
    """Why it ended: "length", "stop", …"""

    @property
    def of_kernel(self) -> bool:
        """Whether it is a kernel's result, and no answer that a person could read."""
        return bool(self.values) and not (self.tokens or self.text or self.finish)

    @functools.cached_property
    def chain_id(self) -> str:
        """Twelve hex digits that equal chains share."""
        return stack_id(self.chain)


LINKS = ("dtype", "checkpoint", "config", "tokenizer", "template", "prompt", "settings", "server", "client", "kernel")
"""The chain of boundaries from weights to answer, in the order in which a change is looked for; another dtype also
changes the bytes of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A part of a probe that was not run, and why."""

    case: str
    reason: Sentence


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One line of the kernel log that touches the health of a device, taken apart but not judged."""

    boot: str
    """The kernel's boot id."""
    sequence: int
    """The record's number within that boot."""
    at: float
    """Seconds since the epoch."""
    kind: str
    """"xid", "sxid", "mce", "edac", "aer", "pcie", "off-bus", "oom", "nvme", "amdgpu", "thermal", …"""
    name: str = ""
    """Within the kind: the Xid's code, the severity of an AER report."""
    bus_id: str = ""
    """The PCI function it names, e.g. "0000:65:00.0"; "" where it names none."""
    text: str = ""
    """The line without names of processes."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What was decoded from it, e.g. {"link": "12", "unit": "RLW_SRC_TRACK"}."""


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """How far the kernel log has been read."""

    boot: str
    sequence: int
    """Number of the newest record that was read; -1 before the first."""
    lost: int = 0
    """Records that went by unread, since this reader began."""
    garbled: int = 0
    """Lines that are no records, since this reader began."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a device: an Xid, a counter that rose, a reset, a driver that changed.

    Equal ones within an hour are one event with a count.
    """

    device: str
    """`Device.uuid`."""
    kind: str
    """"counter", "counter-fell", "flag", "condition", "reset", "boot", "change", or a `LogRecord.kind`."""
    name: str
    """Within the kind: a `Reading.key`, a component, a code. Events of equal device, kind and name are merged."""
    first: float
    """Seconds since the epoch."""
    last: float
    count: float = 1.0
    """Occurrences; for a counter, by how much it rose."""
    before: str = ""
    """The value before; for an Xid, its first place on the chip."""
    after: str = ""
    """The value after; for an Xid, its newest place on the chip."""
    detail: Sentence = ""
    """The newest one in words. For people: every fact in it is in a field too."""
    code: int | None = None
    """The number of an Xid or SXid; None for other kinds."""
    reading: str = ""
    """Name of the reading that shows it: what rose, fell or changed; "" where no reading does."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of that reading."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What was decoded from the newest line of the kernel log (`LogRecord.fields`)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution of one probe on one device: outcome, facts, environment. Stored; never changed afterwards."""

    id: str
    """Sorts by start time; see `new_run_id` of the supervisor."""
    device: str
    """`Device.uuid`."""
    probe: str
    probe_version: int
    started: float
    """Seconds since the epoch."""
    seconds: float
    """Wall time of the probe, the worker's start excluded."""
    outcome: Outcome
    level: str = "standard"
    seed: int = 0
    instruction_set: str = ""
    """CPUs only: the execution path the worker was told to use."""
    readings: tuple[Reading, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    recordings: tuple[Recording, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    absent: Mapping[str, Sentence] = field(default_factory=dict)
    """Reading name → why it could not be read."""
    stack: Mapping[str, str] = field(default_factory=dict)
    """The software the result may depend on: torch, driver, BLAS, flags, visible cores, instruction set."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Conditions: host, load, temperature, clocks where known."""
    detail: Sentence = ""
    """Traceback, signal, the last lines of what the worker printed; "" when there is nothing to say."""
    reason: Reason = Reason.NONE
    """Why it did not complete, where more is known than the outcome."""
    clock: float | None = None
    """What the clock showed, in seconds since the epoch, where the store did not believe it and dated the run by its
    own time; None where `started` is what the clock showed."""
    repro: str = ""
    """A command that repeats this run."""
    drill: str = ""
    """Name of the injected fault when this run is a drill; drills are a world of their own."""
    confirms: str = ""
    """Id of the run whose mismatch this run was started to confirm."""
    trigger: str = ""
    """What called for this run before its time, e.g. "Xid 31"; "" for the clock."""
    cases: tuple[str, ...] = ()
    """The cases it was limited to; empty for a whole run."""
    unknown: tuple[str, ...] = ()
    """The cases whose recordings were beyond what was known of them when the run was stored."""
    learnt: tuple[str, ...] = ()
    """The cases whose recordings a baseline was learnt from: they say nothing beside it."""
    baselining: bool = False
    """Whether it was asked to show every legitimate mode, for the judge had no complete baseline."""
    intensity: str = ""
    """How a retest loaded the device: one of `INTENSITIES`; "" for a run as usual."""

    @property
    def whole(self) -> bool:
        """Whether it looked at all that its probe looks at: only then does it stand for the device's state."""
        return not (self.confirms or self.cases or self.intensity)

    @property
    def wrong(self) -> tuple[Comparison, ...]:
        """Comparisons that found a wrong bit."""
        return tuple(c for c in self.comparisons if c.wrong)

    @property
    def trials(self) -> int:
        """Results of the device that were compared in this run."""
        return sum(c.trials for c in self.comparisons if c.subject is Subject.DEVICE)

    @functools.cached_property
    def stack_id(self) -> str:
        """Twelve hex digits that equal stacks share."""
        return stack_id(self.stack)


INTENSITIES = ("repeated", "content", "steady", "pulsed", "idle")
"""How a retest asks harder than the run that called for it: the same bytes many times, other content, under steady
load, under load that comes and goes, and after the device has idled."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another explanation of what a finding says, and why it was rejected or is still open."""

    cause: Cause
    why: Sentence
    rejected: bool
    """False while it is open."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, and what to do now."""

    rule: str
    """Stable kebab-case name of the judge's rule, e.g. "exact-mismatch-confirmed"."""
    state: State
    """The state this finding alone calls for."""
    cause: Cause
    message: Sentence
    """What was seen: one short sentence."""
    action: Sentence = ""
    """What to do now: one short sentence; "" where there is nothing to do."""
    evidence: tuple[Sentence, ...] = ()
    """What it rests on, one sentence each: elements, bits, confirmation, dates. Shown on request."""
    probe: str = ""
    repro: str = ""
    runs: tuple[str, ...] = ()
    """Ids of the runs it rests on."""
    rivals: tuple[Rival, ...] = ()
    """The other causes that were considered."""
    acknowledged: bool = False
    """Whether it would be suspect but for an operator who knows of it."""


@dataclass(frozen=True, kw_only=True)
class Ack:
    """An operator's word about a device: that a fault is known, or that the part was repaired or replaced."""

    device: str
    """`Device.uuid`."""
    kind: str
    """"acknowledged", "repaired" or "replaced"."""
    at: float
    """Seconds since the epoch."""
    reason: str
    until: float = 0.0
    """When an acknowledgement ends; 0.0 for what does not end."""
    by: str = ""
    """Who said so, as far as the system knows."""
    rules: tuple[str, ...] = ()
    """The rules that spoke of a suspicion when it was said: what is acknowledged."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A device's state and cause, with the findings that led there."""

    device: str
    state: State
    cause: Cause
    findings: tuple[Finding, ...]
    decided: float
    """When, in seconds since the epoch."""
    since: float
    """When the device entered this state."""
    drill: bool = False

    @property
    def doubted(self) -> bool:
        """Whether something speaks against the device, known to an operator or not: it is nobody's standard."""
        return self.state.severity >= State.SUSPECT.severity or any(f.acknowledged for f in self.findings)


def printable(text: str) -> str:
    """Return a text that is safe on a terminal and in a log: what a part calls itself may hold control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def whole(value: Any, depth: int = 100) -> Any:
    """Return JSON data whose texts can be stored: JSON can spell half a surrogate pair, and UTF-8 cannot write it.

    Raises `ValueError` for what is nested deeper than `depth`: whoever walks through it later would fail.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, (dict, list)) and not depth:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {whole(k): whole(v, depth - 1) for k, v in value.items()}
    return [whole(v, depth - 1) for v in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=4096)
def _known(text: str) -> str:
    return text


def shared(text: str) -> str:
    """Return an equal text, the same object as often as it can be: what run after run says is kept once.

    `sys.intern` would do, but some releases of Python 3.12 never give back what it has seen.
    """
    return _known(text) if len(text) <= SHARED else text


def reading_key(name: str, labels: Mapping[str, str]) -> str:
    """Return what tells a reading from every other, e.g. "temperature_celsius{sensor=core}"."""
    inside = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def stack_id(stack: Mapping[str, str]) -> str:
    """Return twelve hex digits that equal stacks share (SHA-256 of the sorted items)."""
    canonical = json.dumps(sorted(stack.items()), separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
