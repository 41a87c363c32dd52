"""The data that canaryd stores and concludes: device, event, run, finding, acknowledgement, verdict.

All classes are frozen and need only the standard library, because a worker under another interpreter imports this
file. The data that workers report is in canaryd.facts; canaryd.codec converts data of both modules to JSON and back.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from canaryd.facts import Cell, Comparison, Place, Reading, Recording, Sentence, Skipped, Subject, Unread, stack_id


class Outcome(str, enum.Enum):
    """How the worker process of a run ended. It says nothing about the device's numbers."""

    COMPLETED = "completed"
    """The probe ran to its end; its comparisons say whether the numbers were right."""
    SKIPPED = "skipped"
    """The probe cannot run here and gave the reason (no torch, no such kernel). Nothing was measured."""
    ERRORED = "errored"
    """The probe raised an exception, or no worker could be started for it."""
    CRASHED = "crashed"
    """The worker died (signal, abort, unexpected exit) before it answered."""
    TIMED_OUT = "timed_out"
    """The worker overran its deadline and was killed with its process group."""
    OUT_OF_MEMORY = "out_of_memory"
    """Host or device memory ran out."""
    DEVICE_ERROR = "device_error"
    """The device itself failed while it computed (uncorrectable memory error, illegal address, launch failure)."""
    UNKILLABLE = "unkillable"
    """The worker survived SIGKILL (uninterruptible sleep); it was abandoned, not waited for."""
    GARBLED = "garbled"
    """The worker's answer did not follow the protocol."""


class Reason(str, enum.Enum):
    """The reason why a run did not complete, if more is known than its outcome."""

    NONE = ""
    STOPPED = "stopped"
    """canaryd itself ended the run early. Such a run is no evidence and is not stored."""
    DEVICE_LOST = "device_lost"
    """The driver says that the device no longer answers."""
    NO_CASE = "no_case"
    """The probe has none of the requested cases. If a person typed them, the run is no evidence and is not stored."""
    BUDGET = "budget"
    """The time budget, or another user of the device, prevented the run. That is neither a fault nor evidence."""


class State(str, enum.Enum):
    """A device's state: the answer to "can I trust this device's numbers?". `severity` orders the states."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"
    SUSPECT = "suspect"
    FAULTY = "faulty"

    @property
    def severity(self) -> int:
        """Number that orders the states: 0 for healthy, the best, to 4 for faulty, the worst."""
        return list(State).index(self)


class Cause(str, enum.Enum):
    """What is at fault: hardware, software and so on. `NONE` means that there is nothing to explain."""

    NONE = "none"
    HARDWARE = "hardware"
    SOFTWARE = "software"
    ENVIRONMENT = "environment"
    HARNESS = "harness"
    UNDETERMINED = "undetermined"


TORCH = "torch"
"""The runtime of every device whose backend does not name another runtime."""
RUNTIMES = (TORCH, "mlx", "onnx", "webgpu", "jax")
"""Software through which a device is reached. Each has a file in canaryd/worker/runtime."""
ENDPOINT = "endpoint"
"""The backend of a model server, which is tested like a device."""
EXACT_ENDPOINT = "exact_endpoint"
"""Word in `ProbeSpec.backends` for servers of an exact canary: a model for which the right answers are known."""
UNDRIVEN, KERNEL_DRIVER = "undriven", "kernel_driver"
"""`Device.detail` keys of a PCI function that looks like an accelerator: why it has no driver; its kernel driver."""
UNIDENTIFIED = "unidentified"
"""`Device.detail` key, used with `UNDRIVEN`, of a device that its driver counts but cannot identify."""
ON_THE_BUS = "PCI-"
"""Prefix of the uuid of an unknown device at a PCI address; the address follows."""
UNSEEN, UNSEEN_CODE = "unseen", "unseen_code"
"""`Device.detail` keys of a GPU that its driver lists but torch does not: torch's reason in words; CUDA's error."""
SHARED = "shared_uuid"
"""`Device.detail` key of a device for which torch reports the uuid of another device; the value is that uuid."""
NO_CUDA, NO_CUDA_CODE = "no_cuda", "no_cuda_code"
"""`Run.stack` keys of a worker whose torch finds no GPU: torch's reason in words; CUDA's error code."""
PROHIBITED, EXCLUSIVE = "prohibited", "exclusive"
"""GPU compute modes: the mode in which no process can compute; the prefix of modes in which only one process can."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device under test, usually an accelerator. `uuid` identifies it; `index` does not, because it can change."""

    uuid: str
    """Serial-like identity, e.g. "GPU-5f1c…" or "CPU-90ab…"."""
    backend: str
    """"cpu", "cuda", "rocm", "mps", "xpu" or "npu"; "mlx-cpu", "onnx-cuda" and so on for another runtime than torch;
    "endpoint" for a server that answers on behalf of devices."""
    index: int
    """The backend's own number of the device at discovery. It can change later; the uuid cannot."""
    model: str
    """The vendor's product name."""
    weak_identity: bool = False
    """Whether the uuid does not name the physical part (a virtual machine's CPU). Such a device gets no RMA dossier."""
    instruction_sets: tuple[str, ...] = ()
    """For CPUs and MLX: execution paths that the runtime can be forced to use. The default or strict path is first."""
    detail: Mapping[str, str] = field(default_factory=dict)
    """Further details: serial number, bus address, driver, memory, visible cores."""
    torch_index: int | None = None
    """The device's index in the torch under test, or None if that torch does not reach the device."""
    parent: str = ""
    """The uuid of the device that this one is an instance of (MIG); "" for a whole device."""
    card: str = ""
    """The uuid under which torch or the vendor's driver reports the same physical part; "" if that is this device's own
    uuid, or if the part is not known."""

    computes_here = True
    """Whether its tests compute on this host: they take its time and memory, and can load it for a retest."""
    is_hardware = True
    """Whether it is a part that can vanish, be at fault and be returned."""
    has_witnesses = True
    """Whether devices of its kind are evidence on it; else its recordings are, once they are complete and confirmed."""

    def __new__(cls, *, backend: str = "", **_: Any) -> Device:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Return a device, or a `ModelServer` if the backend says so: stored rows and messages name no class."""
        return super().__new__(ModelServer if backend == ENDPOINT else cls)

    @property
    def kind(self) -> tuple[str, str]:
        """The pair (backend, model). Devices of equal kind are compared with each other."""
        return self.backend, self.model

    @property
    def is_whole(self) -> bool:
        """Whether this is a whole card or processor, not an instance (MIG), and reached through its primary runtime."""
        return not (self.parent or self.card)

    @property
    def part(self) -> str:
        """The uuid of the physical part, the same for all instances of a divided device and for all its runtimes."""
        return self.parent or self.physical

    @property
    def physical(self) -> str:
        """The uuid for locks and budgets, equal for all runtimes of a device: only one of them computes at a time."""
        return self.card or self.uuid

    @property
    def runtime(self) -> str:
        """The runtime through which the device is tested: one of `RUNTIMES`."""
        name, dash, _ = self.backend.partition("-")
        return name if dash else TORCH

    @property
    def unit(self) -> str:
        """The unit on which the runtime computes: "cpu", "cuda", "coreml"; for torch the backend."""
        return self.backend.partition("-")[2] or self.backend

    @property
    def torch_place(self) -> tuple[str, int]:
        """The type and index of this device in torch, as found at discovery; torch calls ROCm "cuda"."""
        index = self.index if self.torch_index is None else self.torch_index
        return "cuda" if self.backend == "rocm" else self.backend, index

    @property
    def is_accelerator(self) -> bool:
        """Whether it is neither a processor nor a server."""
        return self.unit not in ("cpu", ENDPOINT)

    @property
    def is_reached(self) -> bool:
        """Whether probes can run on it. A processor always counts: its runs report that torch is missing."""
        return self.unit == "cpu" or self.runtime != TORCH or self.torch_index is not None

    @property
    def tested_as(self) -> tuple[str, ...]:
        """The words of which `ProbeSpec.backends` must have one, so that the probe tests it."""
        return self.backend, "*"

    @property
    def name(self) -> str:
        """The name that people type: "cpu:0", "cuda:3", "cuda:3.1" for a device's instance, "endpoint:main"."""
        instance = self.detail.get("instance", "")
        return f"{self.backend}:{self.index}" + (f".{instance}" if instance else "")


class ModelServer(Device):
    """A model server of the configuration. It is tested like a device, and computes on devices of this host or not."""

    computes_here, is_hardware, has_witnesses, is_reached = False, False, False, True

    @property
    def tested_as(self) -> tuple[str, ...]:
        """The word that `ProbeSpec.backends` must have; "*" means the backends of this host."""
        return (EXACT_ENDPOINT if self.detail.get("exact") else ENDPOINT,)

    @property
    def name(self) -> str:
        """The name that people type: "endpoint:main"."""
        return self.uuid


def is_served(uuid: str) -> bool:
    """Return whether a uuid is that of an endpoint."""
    return uuid.startswith(f"{ENDPOINT}:")


class EventKind:
    """Kinds of events that canaryd itself finds. Events of the kernel log have the kinds of `LogRecord.kind`."""

    COUNTER, COUNTER_FELL, FLAG, CONDITION = "counter", "counter-fell", "flag", "condition"
    """Kinds of events about a reading: a counter rose; a counter fell; a flag changed; a condition held for a while."""
    RESET, BOOT, CHANGE, RELEASE = "reset", "boot", "change", "release"
    """Kinds of events: the device was reset; the host booted; the software changed; canaryd released the devices."""
    OFF_BUS = "off-bus"
    """The device does not answer on its bus, according to the driver or the kernel log."""
    FILES = "files"
    """The files of the software (`Event.name`: its `Run.stack_id`) were compared with what was installed: `Files`."""


class Files(enum.Enum):
    """Whether the compiled files of the software under test are those that pip installed."""

    AS_INSTALLED = "as installed"
    ALTERED = "altered"
    MISREAD = "misread"
    """A file held other bytes at the first reading only: memory or disk."""
    NOT_COMPARED = "not compared"
    """There is no record of them, or the comparison did not end."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a device: an Xid, a counter that rose, a reset, a driver that changed.

    Equal events within an hour are stored as one event with a count.
    """

    device: str
    """`Device.uuid`."""
    kind: str
    """One of `EventKind`, or a `LogRecord.kind`."""
    name: str
    """A name within the kind: a `Reading.key`, a component, a code. Equal device, kind and name are one event."""
    first: float
    """Time of the first occurrence, in seconds since the epoch."""
    last: float
    count: float = 1.0
    """Number of occurrences; for a counter, the total amount by which it rose."""
    before: str = ""
    """The value before the event; for an Xid, its first place on the chip."""
    after: str = ""
    """The value after the event; for an Xid, its newest place on the chip."""
    detail: Sentence = ""
    """The newest occurrence in words, for people. Every fact in it is also in a field."""
    code: int | None = None
    """The number of an Xid or SXid; None for other kinds."""
    reading: str = ""
    """Name of the reading that rose, fell or changed, or "" if the event does not come from a reading."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of that reading."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Values decoded from the newest line of the kernel log (`LogRecord.fields`)."""


MPS_CLIENT, IN_USE, IN_USE_ALONE = "mps_client", "in_use", "in_use_alone"
"""`Run.environment` keys. MPS_CLIENT: the worker shared its GPU through NVIDIA's MPS. IN_USE: the load by other
processes just before a run timed out. IN_USE_ALONE: the same value, set only if no identical device was as busy."""


NOTHING: Mapping[str, Any] = types.MappingProxyType({})
"""An empty mapping that all runs without data share: thousands of separate ones would take more than a megabyte."""


class _Known:
    """Slots that cache values computed from a run. An instance dictionary would take more memory than the run."""

    __slots__ = ("_stack_id", "_trials", "_wrong")
    _stack_id: str
    _trials: int
    _wrong: tuple[Comparison, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(_Known):
    """One execution of one probe on one device: outcome, facts, environment. A stored run never changes."""

    id: str
    """Unique id; ids sort by start time. See `new_run_id` of the supervisor."""
    device: str
    """`Device.uuid`."""
    probe: str
    probe_version: int
    started: float
    """Start time, in seconds since the epoch."""
    seconds: float
    """Wall time of the probe in seconds, without the worker's start."""
    outcome: Outcome
    level: str = "standard"
    seed: int = 0
    instruction_set: str = ""
    """For CPUs only: the execution path that the worker had to use."""
    readings: tuple[Reading, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    recordings: tuple[Recording, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    absent: Mapping[str, Sentence] = field(default_factory=lambda: NOTHING)
    """Name of a reading → the reason why it could not be read."""
    codes: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Name of an absent reading → the driver's error code, if there was one."""
    unread: tuple[Unread, ...] = ()
    """For a poll: the readings that the driver failed to give this time, although it gave them in an earlier poll."""
    stack: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """The software that can influence the result: torch, driver, BLAS, flags, visible cores, instruction set."""
    environment: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """The conditions of the run: host, load, and temperature and clocks if known."""
    detail: Sentence = ""
    """A traceback, a signal, or the last lines that the worker printed; "" if there is nothing to report."""
    reason: Reason = Reason.NONE
    """The reason why the run did not complete, if more is known than the outcome."""
    clock: float | None = None
    """The time that the clock showed (seconds since the epoch), if the store took it for wrong and set `started`
    itself; None if `started` is the time of the clock."""
    repro: str = ""
    """A command that repeats this run on any machine with such a device."""
    drill: str = ""
    """Name of the injected fault if this run is a drill, else ""."""
    confirms: str = ""
    """Id of the run whose mismatch this run must confirm, or ""."""
    trigger: str = ""
    """The event that caused this run before its scheduled time, e.g. "Xid 31"; "" for a scheduled run."""
    cases: tuple[str, ...] = ()
    """The cases to which the run was limited; empty for a whole run."""
    unknown: tuple[str, ...] = ()
    """The cases whose recorded results were not in the baseline (the results known so far) when the run was stored."""
    learnt: tuple[str, ...] = ()
    """The cases whose results in this run became part of a baseline. They match that baseline by construction."""
    baselining: bool = False
    """Whether the run repeated its cases to collect all results that sound hardware gives: no baseline was complete."""
    intensity: str = ""
    """The way in which a retest loaded the device, one of `INTENSITIES`; "" for a normal run."""

    @property
    def whole(self) -> bool:
        """Whether the run tested everything that its probe normally tests. Only such a run shows the device's state."""
        return not (self.confirms or self.cases or self.intensity)

    @property
    def wrong(self) -> tuple[Comparison, ...]:
        """The comparisons that found a wrong bit."""
        try:
            return self._wrong
        except AttributeError:
            object.__setattr__(self, "_wrong", tuple(c for c in self.comparisons if c.wrong))
            return self._wrong

    @property
    def failed(self) -> bool:
        """Whether the run found a wrong or unknown result, or did not complete. A skipped run did not fail."""
        return bool(self.wrong or self.unknown) or self.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED)

    @property
    def trials(self) -> int:
        """Number of the device's results that were compared in this run."""
        try:
            return self._trials
        except AttributeError:
            object.__setattr__(self, "_trials", sum(c.trials for c in self.comparisons if c.subject is Subject.DEVICE))
            return self._trials

    @property
    def uploads(self) -> int:
        """Number of uploads of operands whose results were compared in this run."""
        return sum(c.uploads for c in self.comparisons if c.subject is Subject.DEVICE)

    @property
    def stack_id(self) -> str:
        """Twelve hex digits that are equal for equal stacks."""
        try:
            return self._stack_id
        except AttributeError:
            object.__setattr__(self, "_stack_id", stack_id(self.stack))
            return self._stack_id


INTENSITIES = ("repeated", "content", "steady", "pulsed", "idle")
"""Ways in which a retest loads the device more than a normal run: the same bytes many times; other content; steady
load; load that comes and goes; a test after the device was idle."""


class Suspect(str, enum.Enum):
    """Another possible explanation of wrong results, besides the cause that was found."""

    HOST = "host"
    SOFTWARE = "software"
    REFERENCE = "reference"
    DEVICE = "device"


class Shown(str, enum.Enum):
    """The kind of evidence for or against another explanation."""

    NOTHING = ""
    RIGHT = "right"
    """The devices in `Rival.by` computed the same data correctly. If `by` is empty, another result was right."""
    RARER = "rarer"
    """The devices in `Rival.by` fail far less often."""
    ALIKE = "alike"
    """The devices in `Rival.by` give the same wrong bits."""
    TOGETHER = "together"
    """The devices in `Rival.by` began to fail at about the same time."""
    PASSED = "passed"
    """The host's CPU passed the same tests at about the same time."""
    ELSEWHERE = "elsewhere"
    """The device itself computes correctly on other software."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another explanation for a finding, and the evidence that rejects it or leaves it open."""

    cause: Cause
    why: Sentence
    rejected: bool
    """Whether the explanation was rejected; otherwise it is still open."""
    what: Suspect | None = None
    """The explanation; None in findings about recordings, and in findings that an older release stored."""
    shown: Shown = Shown.NOTHING
    """The kind of evidence: against the explanation if it is rejected, for it if it is still open."""
    by: tuple[str, ...] = ()
    """Names of the devices that gave the evidence."""
    of: int = 0
    """For `Shown.RARER`: number of the results of these devices if none was ever wrong; else 0."""


class Ground(str, enum.Enum):
    """The kind of repetition that confirmed a fault."""

    RETESTS = "retests"
    """All the required retests failed."""
    DAY = "day"
    """Two independent runs failed within a day."""
    WEEK = "week"
    """Three runs failed within a week."""
    PLACE = "place"
    """Two results were wrong at the same place, such as one core, or one bit of one column."""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The confirmation of a fault."""

    ground: Ground
    why: Sentence
    """The confirmation in words, without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A number of things (`of`), and the number of wrong ones among them (`wrong`)."""

    wrong: int = 0
    of: int = 0


@dataclass(frozen=True, kw_only=True)
class PlaceTally:
    """Number of results that one place computed in the failed runs (`of`), and of wrong ones among them (`wrong`)."""

    place: Place
    wrong: int
    of: int


@dataclass(frozen=True, kw_only=True)
class ProbeTally:
    """The wrong results of one probe on one device."""

    wrong: int
    of: int
    """Number of results of this probe since the fault was first seen, those of clean runs too."""
    runs: int
    """Number of runs with a wrong result, including retests."""
    retests: Tally
    """Tally of the completed retests of these runs: how many there were, and how many failed too."""
    places: tuple[PlaceTally, ...] = ()
    """Single cores or SMs that computed in these runs, even without a wrong result, by number; empty if none is
    known."""
    bits: tuple[int, ...] = ()
    """Positions of all bits that were seen flipped (0 = lowest), ascending."""
    bits_by_type: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Number type of wrong results ("bfloat16", or its width, "32 bits"; "not known") → those of its flipped bits.
    Empty without bits, and in records of releases that did not note it."""
    cells: tuple[Cell, ...] = ()
    """Kinds of fault of the wrong words of memory, in the order of `Cell`; empty if memory was not under test."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Options of `canaryd check` that repeat a fault, on the device itself or on another one."""

    device: str
    """Name of a sound identical device of this node, or a backend (such as "cuda") for a device of another node."""
    probe: str
    case: str
    seed: int
    level: str
    instruction_set: str = ""
    intensity: str = ""
    seconds: float = 0.0
    """Seconds for which to repeat the test. A fault as frequent as here then shows with a probability of 95 %. The time
    is 0.0 if one run is enough."""
    here: str = ""
    """Name of the device on which the test was wrong."""


@dataclass(frozen=True, kw_only=True)
class WrongResults:
    """A summary of wrong results: the numbers that every report gives."""

    probes: Mapping[str, ProbeTally]
    """Name of the probe → its wrong results; never empty."""
    why: Sentence = ""
    """The evidence for the cause, or the test that would show the cause."""
    confirmed: tuple[Confirmation, ...] = ()
    """The confirmations; empty while the fault is not confirmed."""
    to_come: int = 0
    """Number of automatic retests that have not run yet."""
    doubt: str = ""
    """Reason to doubt goldens that this CPU made, a value of `Doubt`, if that is a part of the fault; else ""."""
    elsewhere: Elsewhere | None = None
    """Options that repeat the fault. They are chosen once and stay the same, but for the other device and the time."""
    files: Files | None = None
    """Whether the software's files are those that were installed; None if nobody has looked yet."""

    @property
    def all(self) -> Tally:
        """Number of results of all probes together, and of wrong ones among them."""
        return added(self.probes.values())

    @property
    def runs(self) -> int:
        """Number of runs with a wrong result, including retests."""
        return sum(t.runs for t in self.probes.values())

    @property
    def retests(self) -> Tally:
        """Tally of the completed retests of all probes' runs: how many there were, and how many failed too."""
        return added(t.retests for t in self.probes.values())

    @property
    def places(self) -> tuple[PlaceTally, ...]:
        """Single cores or SMs that computed in these runs, even without a wrong result, by number."""
        at: dict[Place, list[PlaceTally]] = {}
        for found in (p for t in self.probes.values() for p in t.places):
            at.setdefault(found.place, []).append(found)
        sums = ((place, added(found)) for place, found in at.items())
        listed = (PlaceTally(place=place, wrong=t.wrong, of=t.of) for place, t in sums)
        return tuple(sorted(listed, key=lambda p: (p.place.unit, p.place.numbers)))

    @property
    def bits(self) -> tuple[int, ...]:
        """Positions of all bits that were seen flipped (0 = lowest), ascending."""
        return tuple(sorted({bit for t in self.probes.values() for bit in t.bits}))

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Kinds of fault of the wrong words of memory; empty unless every probe tested memory."""
        found = {cell for t in self.probes.values() for cell in t.cells}
        return tuple(c for c in Cell if c in found) if all(t.cells for t in self.probes.values()) else ()


def added(tallies: Iterable[Tally | ProbeTally | PlaceTally]) -> Tally:
    """Return the sum of tallies."""
    every = list(tallies)
    return Tally(wrong=sum(t.wrong for t in every), of=sum(t.of for t in every))


@dataclass(frozen=True, kw_only=True)
class Characterised:
    """The proof that a class of test cases is exact on healthy devices, so that a wrong result accuses the device."""

    name: str
    """The class: the case without its sizes, e.g. "bfloat16/cancel/decode/nt"."""
    by: str
    """The kind of proof, such as "shipped" or "sibling": a value of `By` in canaryd/judge/characterised.py."""
    devices: tuple[str, ...] = ()
    """Uuids of the devices that gave the class's golden; empty for "shipped"."""


class Whose(str, enum.Enum):
    """What a finding points to: the device, or something behind it."""

    DEVICE = "device"
    HOST = "host"
    SHARED = "shared part"
    SOFTWARE = "software"
    ENDPOINT = "endpoint"


class Part(str, enum.Enum):
    """A part that several devices of a host share."""

    SUPPLY = "power supply"
    COOLING = "cooling"
    RISER = "riser"
    SWITCH = "PCIe switch"
    FABRIC = "NVLink fabric"
    HIVE = "XGMI hive"
    DRIVER = "driver"
    MEMORY = "host memory"


class Remedy(str, enum.Enum):
    """A remedy that can reach more than one device: a reset, another driver or its new start, a reboot."""

    RESET, DRIVER, REBOOT = "reset", "driver", "reboot"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, and what to do now."""

    rule: str
    """Stable kebab-case name of the judge's rule, e.g. "exact-mismatch-confirmed"."""
    state: State
    """The state that the device would have if this were its only finding."""
    cause: Cause
    message: Sentence
    """What was observed: one short sentence."""
    action: Sentence = ""
    """What to do now: one short sentence; "" if there is nothing to do."""
    evidence: tuple[Sentence, ...] = ()
    """The evidence, one sentence each: elements, bits, confirmation, dates. Shown on request."""
    probe: str = ""
    repro: str = ""
    runs: tuple[str, ...] = ()
    """Ids of the runs that are the evidence."""
    rivals: tuple[Rival, ...] = ()
    """The other causes that were considered."""
    characterised: tuple[Characterised, ...] = ()
    """The proofs that the wrong test cases are exact on healthy devices, at most 16, one for each class of cases."""
    acknowledged: bool = False
    """Whether the finding would make the device suspect, but an operator has acknowledged it."""
    since: float = 0.0
    """Start of the first run of the evidence, in seconds since the epoch; 0.0 if there is no such run."""
    wrong: WrongResults | None = None
    """The summary of the wrong results; None if the finding is about something else."""
    subject: Whose | None = None
    """What the finding points to; None if that is nothing, or in findings that an older release stored."""
    parts: tuple[Part, ...] = ()
    """For a shared part: which parts may be at fault."""
    shared_by: tuple[str, ...] = ()
    """For a shared part or the host: names of the devices that have the trouble together, this one among them."""
    remedy: Remedy | None = None
    """The kind of remedy that `action` asks for; None if it reaches this device alone."""
    reach: tuple[str, ...] = ()
    """Names of all devices that the action reaches, this one among them; empty if there is nothing to do."""


class AckKind:
    """Kinds of statements that an operator can make about a device."""

    ACKNOWLEDGED, SOFTWARE, REPAIRED, REPLACED = "acknowledged", "software", "repaired", "replaced"


@dataclass(frozen=True, kw_only=True)
class Ack:
    """An operator's statement about a device: a known fault, a fault of the software, a repair or a replacement."""

    device: str
    """`Device.uuid`."""
    kind: str
    """One of `AckKind`."""
    at: float
    """Time of the statement, in seconds since the epoch."""
    reason: str
    until: float = 0.0
    """Time at which an acknowledgement ends (seconds since the epoch); 0.0 for other statements, which never end."""
    by: str = ""
    """The user who made the statement, as far as the system knows."""
    rules: tuple[str, ...] = ()
    """The rules that made the device suspect at the time of the statement: only these are acknowledged."""
    void: bool = False
    """Whether the statement never counts, because canaryd found it dated in the future: the clock was wrong."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A device's state and cause, with the findings that are the reasons."""

    device: str
    state: State
    cause: Cause
    findings: tuple[Finding, ...]
    decided: float
    """Time of the decision, in seconds since the epoch."""
    since: float
    """Time at which the device entered this state, in seconds since the epoch."""
    drill: bool = False

    @property
    def doubted(self) -> bool:
        """Whether a finding, even an acknowledged one, accuses the device. Then it is no reference for others."""
        return self.state.severity >= State.SUSPECT.severity or any(f.acknowledged for f in self.findings)
