"""What a worker reports: readings, comparisons, recordings, log records. Plain data of the standard library alone."""

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
UNITS = ("core", "sm")
"""Of `Place.unit`: parts of a device that can be wrong alone."""
LISTED = 4
"""Units of a place that are listed; of more their number is told."""
Sentence = Annotated[str, "sentence"]
"""Text for people. No rule, state or page may depend on its wording; a test changes every one of them."""


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


TRIALS, FINGERPRINT, ENDPOINT_SERVER = "trials", "golden_fingerprint", "endpoint_server"
"""Readings: results that a run compared; what equal results share; the software that a server says it is."""
SELF_TEST = "vendor_selftest"
"""Reading: what a vendor's own self-test says of one of its tests."""
DEVICE_SECONDS, HOST_SECONDS = "device_seconds", "host_seconds"
"""Readings: how long a run used its device, and how long the processor while the device waited."""
SPEEDS = "speed_"
"""How readings of a speed begin, whatever they measure."""


DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Formats that the canary model runs in, widest first."""


class _Keyed:
    """The key of a reading, computed once; in a slot, because a dictionary would double its memory."""

    __slots__ = ("_key",)
    _key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(_Keyed):
    """A fact with a unit. What could not be read is listed in `Run.absent` instead, with its reason."""

    name: str
    value: float | int | str | bool
    unit: str = ""
    """Base unit ("seconds", "bytes", "celsius", "1") or "" for text."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What tells readings of one name apart, e.g. {"sensor": "core"}."""

    @property
    def key(self) -> str:
        """The name with its labels, as Prometheus would write it without quotes: "temperature_celsius{sensor=core}"."""
        try:
            return self._key
        except AttributeError:
            object.__setattr__(self, "_key", reading_key(self.name, self.labels))
            return self._key


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A reading that a device gave before, and that its driver failed to give in a poll."""

    reading: Reading
    """As it was last."""
    at: float
    """When the newest poll that had it began, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something was computed, in the vendor's own terms. `str(place)` is how people read it."""

    unit: str = ""
    """"core", "sm", "threads", "thread", "memory", "link" or "device"; "" where it is not known."""
    numbers: tuple[int, ...] = ()
    """Which cores or SMs: of a golden those that made it, of results those that computed equally many and were all
    right, or all wrong. Of "threads", how many; of a link its two ends, the sender first. A golden that one core made
    twice names that core twice."""

    @property
    def core(self) -> int | None:
        """The single core; None where there were several or it is not known."""
        return self.numbers[0] if self.unit == "core" and len(self.numbers) == 1 else None

    @property
    def is_unit(self) -> bool:
        """Whether it is a single core or SM."""
        return self.unit in UNITS and len(self.numbers) == 1

    def __str__(self) -> str:
        """Return e.g. "core 3", "cores 2 and 5", "core 3 twice", "SM 17", "131 SMs", "link 0 to 2", "device"."""
        if self.unit == "threads":
            several = f"all {self.numbers[0]} threads" if self.numbers else "several threads"
            return "the only thread" if self.numbers == (1,) else several
        if self.unit == "thread":
            return "one thread"
        unit = {"sm": "SM"}.get(self.unit, self.unit)
        if self.unit == "link" and self.numbers:
            ends = " to ".join(map(str, self.numbers))
            return f"link {ends}" if len(self.numbers) > 1 else f"links of {ends}"
        if len(self.numbers) < 2:
            return f"{unit} {self.numbers[0]}" if self.numbers else unit
        if len(set(self.numbers)) == 1:
            return f"{unit} {self.numbers[0]} twice"
        if len(self.numbers) > LISTED:
            return f"{len(self.numbers)} {unit}s"
        return f"{unit}s {', '.join(map(str, self.numbers[:-1]))} and {self.numbers[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
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


class Cell(str, enum.Enum):
    """What a wrong word of memory turned out to be."""

    STUCK = "stuck"
    """A bit of it has one value whatever is written."""
    ALIAS = "alias"
    """Another address reaches the same word."""
    COUPLED = "coupled"
    """It changes when another word is written."""
    LEAKING = "leaking"
    """It loses its value while nobody writes."""
    FLIPPED = "flipped"
    """It held something else, and was right once it was written again: a write that went wrong, or a passing flip."""
    TRANSFER = "transfer"
    """It was right when it was read again: the read went wrong, not the memory."""

    @property
    def lasts(self) -> bool:
        """Whether the memory itself is broken there."""
        return self not in (Cell.FLIPPED, Cell.TRANSFER)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongMemory:
    """Where in memory wrong words lie, and what they are."""

    cells: Mapping[str, int]
    """`Cell` → words, of those that were examined."""
    rose: int
    """Bits that were read 1 instead of 0, in the words that were examined."""
    fell: int
    """Bits that were read 0 instead of 1."""
    allocation: int
    """Bytes of the allocation."""
    offset: int
    """Bytes from the allocation's start to the first wrong word."""
    address: int | None
    """Virtual address of the first wrong word, in the address space of a process that has ended; None: not told."""
    physical: int | None = None
    """Physical address of the first wrong word on the host; None where the system does not tell it."""
    partner: int | None = None
    """Bytes from the first wrong word to the one that it is coupled with or an alias of; None where none was found."""


class Way(str, enum.Enum):
    """Which way data went that did not arrive as it was sent."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"
    BETWEEN = "between"
    """From one device to another, or from one core to another."""
    TOGETHER = "together"
    """Between all of a group in one operation."""


class Culprit(str, enum.Enum):
    """What was wrong with data that did not arrive as it was sent."""

    TRANSFER = "transfer"
    """The way: sender and receiver held the right data when they wrote it themselves."""
    MEMORY = "memory"
    """The memory at the receiving end: it did not hold what its own device wrote there either."""
    SOURCE = "source"
    """The sender no longer held what it had to send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongTransfer:
    """Where wrong data was on its way, and what was wrong."""

    way: Way
    culprit: Culprit


@dataclass(frozen=True, kw_only=True, slots=True)
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
    memory: WrongMemory | None = None
    """Where in memory, where memory itself was under test."""
    transfer: WrongTransfer | None = None
    """Which way, where transfers were under test."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """Whether canaryd ships this class as exact on this device; else a device must have met it before it accuses."""
    peer: str = ""
    """Uuid of the device at the other end, where data went between two devices; "" for everything else."""

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
    late: bool = False
    """Whether nothing but time was lacking: the budget was spent."""


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


def printable(text: str) -> str:
    """Return a text that is safe on a terminal and in a log: what a part calls itself may hold control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def beginning(text: str, length: int) -> str:
    """Return a text as one line of at most `length` characters; a longer one ends after a word, with "…"."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    head = line[: length - 1]
    words = head if line[length - 1] == " " else head.rpartition(" ")[0]
    return f"{(words or head).rstrip(' .,;:')}…"


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
    return _digest(tuple(sorted(stack.items())))


@functools.lru_cache(maxsize=512)
def _digest(items: tuple[tuple[str, str], ...]) -> str:
    """Return `stack_id` of sorted items. Kept: thousands of runs have the same few stacks."""
    return hashlib.sha256(json.dumps(items, separators=(",", ":")).encode()).hexdigest()[:12]
