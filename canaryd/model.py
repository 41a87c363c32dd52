"""What canaryd keeps and concludes: device, event, run, finding, acknowledgement, verdict.

Plain, frozen data of the standard library alone, because a worker under another interpreter reads the same file. What
workers report is in canaryd.facts; canaryd.codec is the only way to JSON and back.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from canaryd.facts import Cell, Comparison, Place, Reading, Recording, Sentence, Skipped, Subject, Unread, stack_id


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
    DEVICE_ERROR = "device_error"
    """The device itself failed while it computed (uncorrectable memory error, illegal address, launch failure)."""
    UNKILLABLE = "unkillable"
    """The worker survived SIGKILL (uninterruptible sleep); it was abandoned, not waited for."""
    GARBLED = "garbled"
    """The worker answered something that is not the protocol."""


class Reason(str, enum.Enum):
    """Why a run did not complete, where more is known than its outcome."""

    NONE = ""
    STOPPED = "stopped"
    """canaryd itself cut the run short: no evidence, and not stored."""
    DEVICE_LOST = "device_lost"
    """The driver says that the device no longer answers."""
    NO_CASE = "no_case"
    """The probe has none of the cases that were asked for. Where a person typed them: no evidence, and not stored."""
    BUDGET = "budget"
    """The budget, or another user of the device, prevented the run: neither a fault nor evidence."""


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


TORCH = "torch"
"""The runtime of every device whose backend names no other."""
RUNTIMES = (TORCH, "mlx", "onnx", "webgpu", "jax")
"""Ways to a device, each one file of canaryd/worker/runtime."""
ENDPOINT = "endpoint"
"""The backend of a server that answers on behalf of devices."""
EXACT_ENDPOINT = "exact_endpoint"
"""What probes name among their backends to test a server of an exact canary, whose right answers are known."""
UNDRIVEN, KERNEL_DRIVER = "undriven", "kernel_driver"
"""`Device.detail` keys of a PCI function that looks like an accelerator: why nothing drives it; its kernel driver."""
UNIDENTIFIED = "unidentified"
"""`Device.detail` key, beside `UNDRIVEN`, of a device that its driver counts and cannot identify."""
ON_THE_BUS = "PCI-"
"""Beginning of the uuid that stands for what is at an address of the PCI bus; the address follows."""
UNSEEN, UNSEEN_CODE = "unseen", "unseen_code"
"""`Device.detail` keys of a GPU that its driver lists and torch does not show: why, in torch's words; CUDA's error."""
SHARED = "shared_uuid"
"""`Device.detail` key of a device to which torch gives the uuid of another one: that uuid."""
NO_CUDA, NO_CUDA_CODE = "no_cuda", "no_cuda_code"
"""Parts of the stack that a worker tells where its torch shows no GPU: why, in torch's words; CUDA's error."""
PROHIBITED, EXCLUSIVE = "prohibited", "exclusive"
"""A compute mode in which nobody may compute; the beginning of those in which one process may."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Keyed by `uuid`, never by index."""

    uuid: str
    """Serial-like identity, e.g. "GPU-5f1c…" or "CPU-90ab…"."""
    backend: str
    """"cpu", "cuda", "rocm", "mps", "xpu" or "npu"; "mlx-cpu", "onnx-cuda" and so on where another runtime than torch
    reaches it; "endpoint" for a server that answers on behalf of devices."""
    index: int
    """The backend's own ordinal at the time of discovery; it may change, the uuid may not."""
    model: str
    """The vendor's product name."""
    weak_identity: bool = False
    """True where the uuid does not name the physical part (a virtual machine's CPU): never yields an RMA dossier."""
    instruction_sets: tuple[str, ...] = ()
    """CPUs and MLX: execution paths that the runtime can be told to use, its own choice or the strict one first."""
    detail: Mapping[str, str] = field(default_factory=dict)
    """Further identity: serial, bus address, driver, memory, visible cores."""
    torch_index: int | None = None
    """How torch under the stack under test numbers it; None where that torch does not reach it."""
    parent: str = ""
    """The uuid of the device that this one is an instance of (MIG); "" for a whole device."""
    card: str = ""
    """The uuid of the device that is the same physical part, seen by torch or the vendor's driver; "" for that device
    itself, and where nobody can tell."""

    @property
    def kind(self) -> tuple[str, str]:
        """What siblings share: backend and model."""
        return self.backend, self.model

    @property
    def is_whole(self) -> bool:
        """Whether it is a card or a processor itself: no instance of one, and none through another runtime."""
        return not (self.parent or self.card)

    @property
    def part(self) -> str:
        """The uuid of the physical part: instances of one divided device share it, and runtimes that reach it."""
        return self.parent or self.physical

    @property
    def physical(self) -> str:
        """The uuid under which it is locked and budgeted: of two runtimes on one device only one computes at a time."""
        return self.card or self.uuid

    @property
    def runtime(self) -> str:
        """The runtime through which it is tested: one of `RUNTIMES`."""
        name, dash, _ = self.backend.partition("-")
        return name if dash else TORCH

    @property
    def unit(self) -> str:
        """What its runtime drives: "cpu", "cuda", "coreml"; for torch the backend."""
        return self.backend.partition("-")[2] or self.backend

    @property
    def is_endpoint(self) -> bool:
        """Whether it is a server and no part of this host."""
        return self.backend == ENDPOINT

    @property
    def tested_as(self) -> str:
        """What a probe names among its backends to test it: the backend, or `EXACT_ENDPOINT`."""
        return EXACT_ENDPOINT if self.is_endpoint and self.detail.get("exact") else self.backend

    @property
    def name(self) -> str:
        """What people type: "cpu:0", "cuda:3", "cuda:3.1" for an instance of a divided device, "endpoint:main"."""
        if self.is_endpoint:
            return self.uuid
        instance = self.detail.get("instance", "")
        return f"{self.backend}:{self.index}" + (f".{instance}" if instance else "")


class EventKind:
    """Kinds of events that canaryd finds itself; those of lines of the kernel log are `LogRecord.kind`."""

    COUNTER, COUNTER_FELL, FLAG, CONDITION = "counter", "counter-fell", "flag", "condition"
    """Of a reading: it rose, fell or changed, or it held for a while."""
    RESET, BOOT, CHANGE, RELEASE = "reset", "boot", "change", "release"
    """Of the device, the host, a part of the stack, and canaryd's hold on the devices."""
    OFF_BUS = "off-bus"
    """The device does not answer on its bus: the driver says so, or the kernel log."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a device: an Xid, a counter that rose, a reset, a driver that changed.

    Equal ones within an hour are one event with a count.
    """

    device: str
    """`Device.uuid`."""
    kind: str
    """One of `EventKind`, or a `LogRecord.kind`."""
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


MPS_CLIENT, IN_USE, IN_USE_ALONE = "mps_client", "in_use", "in_use_alone"
"""In `Run.environment`: the worker shared its GPU with other processes through NVIDIA's MPS; how busy others kept the
accelerator just before a run that timed out; the same, where no identical one is known to have been as busy."""


NOTHING: Mapping[str, Any] = types.MappingProxyType({})
"""The mapping of every run that has none of its own: thousands of empty ones take more than a megabyte."""


class _Known:
    """What a run knows of itself once it was asked: in slots, because a dictionary of its own takes more than a run."""

    __slots__ = ("_stack_id", "_wrong")
    _stack_id: str
    _wrong: tuple[Comparison, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(_Known):
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
    absent: Mapping[str, Sentence] = field(default_factory=lambda: NOTHING)
    """Reading name → why it could not be read."""
    codes: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Reading name → the driver's code for that, where it gave one."""
    unread: tuple[Unread, ...] = ()
    """Of a poll: the readings that the driver failed to give, though it gave them before."""
    stack: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """The software the result may depend on: torch, driver, BLAS, flags, visible cores, instruction set."""
    environment: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Conditions: host, load, temperature, clocks where known."""
    detail: Sentence = ""
    """Traceback, signal, the last lines of what the worker printed; "" when there is nothing to say."""
    reason: Reason = Reason.NONE
    """Why it did not complete, where more is known than the outcome."""
    clock: float | None = None
    """What the clock showed, in seconds since the epoch, where the store did not believe it and dated the run by its
    own time; None where `started` is what the clock showed."""
    repro: str = ""
    """A command that repeats this run on any machine with such a device."""
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
    def repeat(self) -> str:
        """The command that repeats this run where it is on record; `repro` does so elsewhere, and for a drill."""
        return self.repro if self.drill else f"canaryd check --repeat {self.id}"

    @property
    def wrong(self) -> tuple[Comparison, ...]:
        """Comparisons that found a wrong bit."""
        try:
            return self._wrong
        except AttributeError:
            object.__setattr__(self, "_wrong", tuple(c for c in self.comparisons if c.wrong))
            return self._wrong

    @property
    def failed(self) -> bool:
        """Whether it found something wrong or unknown, or did not come to its end; skipping is no failure."""
        return bool(self.wrong or self.unknown) or self.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED)

    @property
    def trials(self) -> int:
        """Results of the device that were compared in this run."""
        return sum(c.trials for c in self.comparisons if c.subject is Subject.DEVICE)

    @property
    def uploads(self) -> int:
        """Uploads of operands to the device whose results were compared in this run."""
        return sum(c.uploads for c in self.comparisons if c.subject is Subject.DEVICE)

    @property
    def stack_id(self) -> str:
        """Twelve hex digits that equal stacks share."""
        try:
            return self._stack_id
        except AttributeError:
            object.__setattr__(self, "_stack_id", stack_id(self.stack))
            return self._stack_id


INTENSITIES = ("repeated", "content", "steady", "pulsed", "idle")
"""How a retest asks harder than the run that called for it: the same bytes many times, other content, under steady
load, under load that comes and goes, and after the device has idled."""


class Suspect(str, enum.Enum):
    """What else than the cause that was found could explain wrong results."""

    HOST = "host"
    SOFTWARE = "software"
    REFERENCE = "reference"
    DEVICE = "device"


class Shown(str, enum.Enum):
    """What speaks for or against another explanation."""

    NOTHING = ""
    RIGHT = "right"
    """`Rival.by` computed the same data correctly; nobody named: another result matched the reference."""
    RARER = "rarer"
    """`Rival.by` fail far less often."""
    ALIKE = "alike"
    """`Rival.by` give the same wrong bits."""
    TOGETHER = "together"
    """`Rival.by` began to fail at about the same time."""
    PASSED = "passed"
    """The host's CPU passed the same tests at about the same time."""
    ELSEWHERE = "elsewhere"
    """The device computes correctly on other software."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another explanation of what a finding says, and why it was rejected or is still open."""

    cause: Cause
    why: Sentence
    rejected: bool
    """False while it is open."""
    what: Suspect | None = None
    """Which explanation it is; None in findings of recordings, and in those that an older release stored."""
    shown: Shown = Shown.NOTHING
    """What speaks against it, or for it while it is open."""
    by: tuple[str, ...] = ()
    """Names of the devices that show it."""


class Ground(str, enum.Enum):
    """On what ground a fault counts as confirmed."""

    RETESTS = "retests"
    """Every retest that is asked for failed."""
    DAY = "day"
    """Two independent runs failed within a day."""
    WEEK = "week"
    """Three runs failed within a week."""
    PLACE = "place"
    """It failed twice at the same place."""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """How a fault was confirmed."""

    ground: Ground
    why: Sentence
    """The same in words, without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How many of several were wrong."""

    wrong: int = 0
    of: int = 0


@dataclass(frozen=True, kw_only=True)
class PlaceTally:
    """How many results of one place were wrong, in the runs that failed."""

    place: Place
    wrong: int
    of: int


@dataclass(frozen=True, kw_only=True)
class ProbeTally:
    """The wrong results of one probe on one device."""

    wrong: int
    of: int
    """Results up to the newest wrong one, under the same conditions."""
    runs: int
    """Runs with a wrong result, retests included."""
    retests: Tally
    """Completed retests of these runs, and how many of them failed too."""
    places: tuple[PlaceTally, ...] = ()
    """Single cores or SMs that computed in these runs, sound ones too, by number; empty where none is known."""
    bits: tuple[int, ...] = ()
    """Every flipped bit that was recorded (0 = lowest), ascending."""
    cells: tuple[Cell, ...] = ()
    """What wrong words of memory turned out to be, in the order of `Cell`; empty where memory was not under test."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """How to repeat a wrong result on another device: the options of `canaryd check`."""

    device: str
    """Name of an identical device of this node against which nothing speaks, or a backend: any node has its own."""
    probe: str
    case: str
    seed: int
    level: str
    instruction_set: str = ""
    intensity: str = ""
    seconds: float = 0.0
    """For how long, so that a fault as frequent as here is missed with a probability of 5 %; 0.0 where one run is
    enough."""


@dataclass(frozen=True, kw_only=True)
class WrongResults:
    """What wrong results amount to: the numbers that every report gives of them."""

    probes: Mapping[str, ProbeTally]
    """Never empty."""
    why: Sentence = ""
    """What the cause rests on, or what would settle it."""
    confirmed: tuple[Confirmation, ...] = ()
    """Empty while it is not confirmed."""
    to_come: int = 0
    """Automatic retests that are still to come."""
    elsewhere: Elsewhere | None = None
    """How to find the cause on another device; None where that would not tell."""

    @property
    def all(self) -> Tally:
        """The results of all probes."""
        return _sum(self.probes.values())

    @property
    def runs(self) -> int:
        """Runs with a wrong result, retests included."""
        return sum(t.runs for t in self.probes.values())

    @property
    def retests(self) -> Tally:
        """Completed retests of these runs, and how many of them failed too."""
        return _sum(t.retests for t in self.probes.values())

    @property
    def places(self) -> tuple[PlaceTally, ...]:
        """Single cores or SMs that computed in these runs, by number."""
        at: dict[Place, list[PlaceTally]] = {}
        for found in (p for t in self.probes.values() for p in t.places):
            at.setdefault(found.place, []).append(found)
        sums = ((place, _sum(found)) for place, found in at.items())
        listed = (PlaceTally(place=place, wrong=t.wrong, of=t.of) for place, t in sums)
        return tuple(sorted(listed, key=lambda p: (p.place.unit, p.place.numbers)))

    @property
    def bits(self) -> tuple[int, ...]:
        """Every flipped bit that was recorded (0 = lowest), ascending."""
        return tuple(sorted({bit for t in self.probes.values() for bit in t.bits}))

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What wrong words of memory turned out to be; empty unless every probe tested memory."""
        found = {cell for t in self.probes.values() for cell in t.cells}
        return tuple(c for c in Cell if c in found) if all(t.cells for t in self.probes.values()) else ()


def _sum(tallies: Iterable[Tally | ProbeTally | PlaceTally]) -> Tally:
    every = list(tallies)
    return Tally(wrong=sum(t.wrong for t in every), of=sum(t.of for t in every))


@dataclass(frozen=True, kw_only=True)
class Characterised:
    """By what a class of exact cases counts as exact, so that a mismatch accuses the device."""

    name: str
    """The class: the case without its sizes, e.g. "bfloat16/cancel/decode/nt"."""
    by: str
    """"shipped", "characterise" (accepted by an operator), "itself", "sibling", "witness" or "contradiction"."""
    devices: tuple[str, ...] = ()
    """Uuids of the devices that met it; empty for "shipped"."""


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
    characterised: tuple[Characterised, ...] = ()
    """By what the classes that it accuses the device of count as exact; at most 16 of them."""
    acknowledged: bool = False
    """Whether it would be suspect but for an operator who knows of it."""
    since: float = 0.0
    """When the first run that it rests on began, in seconds since the epoch; 0.0 where it rests on none."""
    wrong: WrongResults | None = None
    """What the wrong results amount to that it rests on; None where it is about something else."""


class AckKind:
    """What an operator may say of a device."""

    ACKNOWLEDGED, SOFTWARE, REPAIRED, REPLACED = "acknowledged", "software", "repaired", "replaced"


@dataclass(frozen=True, kw_only=True)
class Ack:
    """An operator's word on a device: a fault is known or was the software's, or the part was repaired or replaced."""

    device: str
    """`Device.uuid`."""
    kind: str
    """One of `AckKind`."""
    at: float
    """Seconds since the epoch."""
    reason: str
    until: float = 0.0
    """When an acknowledgement ends; 0.0 for what does not end."""
    by: str = ""
    """Who said so, as far as the system knows."""
    rules: tuple[str, ...] = ()
    """The rules that spoke of a suspicion when it was said: what is acknowledged."""
    void: bool = False
    """Whether it was dated in the future when canaryd read it: the clock had run ahead, and it never counts."""


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
