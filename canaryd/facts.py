"""The data that a worker reports: readings, comparisons, recordings, log records. Uses the standard library only."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

SHARED = 64
"""Largest number of characters in a text that `shared` caches (ours)."""
PLACEHOLDERS = ("", "none", "unknown", "not specified", "not available", "default string", "no dimm", "0123456789")
"""Texts that firmware writes into an unused field, in lower case; also "To be filled by O.E.M."."""
UNITS = ("core", "sm")
"""Values of `Place.unit` for parts of a device that can be wrong while the other parts are right."""
LISTED = 4
"""Largest number of units that the text of a place lists by number. More units are shown as a count."""
Sentence = Annotated[str, "sentence"]
"""A text for people to read. No code can depend on the wording: a test replaces every such text."""


class Subject(str, enum.Enum):
    """What a comparison tested: the device's result, the golden (the known right result), or the comparison itself."""

    DEVICE = "device"
    """The result that the device under test computed."""
    HOST = "host"
    """The golden itself. The host computes it twice, on two cores or in two ways, and the two results must be equal."""
    COMPARATOR = "comparator"
    """The device's own comparison of result and golden. The host repeats this comparison on the same bytes."""


class Doubt(str, enum.Enum):
    """The reason to doubt a golden or a comparison. It is `NONE` if the comparison tested the device."""

    NONE = ""
    MADE_TWICE = "made_twice"
    """The host made the operands or the golden twice and got two results."""
    ARITHMETIC = "arithmetic"
    """The host's integer arithmetic and its float64 arithmetic gave different goldens."""
    DIGEST = "digest"
    """The golden differs from the one that ships with canaryd."""
    COMPARATOR = "comparator"
    """Device and host compared the same bytes and disagree."""
    UNKNOWN = "unknown"
    """A record of release 0.1.0, which does not contain the reason."""


class Exactness(str, enum.Enum):
    """The reason why a golden is the right answer for every healthy device (docs/goldens.md)."""

    UNIVERSAL = "U"
    """Every partial sum and the output are exactly representable: every healthy device gives the same bits."""
    ROUNDED = "R"
    """The sum is exact and is rounded once to the output type. The device must round to nearest, ties to even."""
    MARGIN = "M"
    """The margin of the right answer exceeds any healthy device's rounding error. The computed bits can differ."""


TRIALS, FINGERPRINT, ENDPOINT_SERVER = "trials", "golden_fingerprint", "endpoint_server"
"""Names of readings: number of compared results; a hash that is the same for equal results; the server's software."""
ENDPOINT_STARTED, ENDPOINT_REPEATS = "endpoint_start_time_seconds", "endpoint_repeats"
"""Names of readings of a server: its start time; what it promises: "always" (the same bits under any load and after
every start), "restarts" (the same bits after every start), or no such reading if it promises neither."""
SELF_TEST = "vendor_selftest"
"""Name of the reading with the result of one test of a vendor's own self-test."""
DEVICE_SECONDS, HOST_SECONDS = "device_seconds", "host_seconds"
"""Names of readings: seconds for which a run used its device; seconds of processor time while the device waited."""
ALIGNED = 64
"""A product is "aligned" if its strides are multiples of this many elements, else "ragged": kernels that load tiles
want 16 bytes."""
GRAPH = "g"
"""End of the name of a case that the device computed in a graph, without the host: "name#7g"."""
SPEEDS = "speed_"
"""Prefix of the names of all readings that measure a speed."""


DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Number formats in which the canary model runs, widest first."""


class _Keyed:
    """Base class with a slot that caches a reading's key. An instance dictionary would double the memory."""

    __slots__ = ("_key",)
    _key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(_Keyed):
    """A measured value with its unit. A value that could not be read is listed in `Run.absent` with the reason."""

    name: str
    value: float | int | str | bool
    unit: str = ""
    """The base unit ("seconds", "bytes", "celsius", "1"), or "" if the value is a text."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that distinguish readings of the same name, e.g. {"sensor": "core"}."""

    @property
    def key(self) -> str:
        """The name with its labels, as Prometheus writes it but without quotes: "temperature_celsius{sensor=core}"."""
        try:
            return self._key
        except AttributeError:
            object.__setattr__(self, "_key", reading_key(self.name, self.labels))
            return self._key


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A reading that a device gave earlier, but that its driver failed to give in this poll."""

    reading: Reading
    """The last value that was read."""
    at: float
    """Start of the newest poll that gave a value of the reading, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place where something was computed, in the vendor's own terms. `str(place)` is the text for people."""

    unit: str = ""
    """One of "core", "sm", "threads", "thread", "memory", "link" and "device"; or "" if it is not known."""
    numbers: tuple[int, ...] = ()
    """Numbers of the cores, SMs or devices. For a golden: the cores that made it, one number for each time. For
    results: the cores or SMs that computed them; those with equally many right results share one place. For
    "threads": the number of threads. For "link": sender and receiver."""

    @property
    def core(self) -> int | None:
        """The number of the core, or None if there were several cores or it is not known."""
        return self.numbers[0] if self.unit == "core" and len(self.numbers) == 1 else None

    @property
    def is_unit(self) -> bool:
        """Whether the place is one single core or SM."""
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
    """A summary of the indices of the wrong elements along one axis of the result."""

    first: int
    last: int
    distinct: int
    """Number of different indices."""
    period: int = 0
    """The largest power of two that divides every difference between two indices, or 0 if there is none."""

    @property
    def shared(self) -> bool:
        """Whether all wrong indices are equal, or have the same remainder when divided by `period`."""
        return self.distinct == 1 or self.period > 0

    def __str__(self) -> str:
        """Return the span as text: "17", "= 3 mod 16", "0…31 (32 distinct)"."""
        if self.distinct == 1:
            return str(self.first)
        if self.period:
            return f"= {self.first % self.period} mod {self.period}"
        return f"{self.first}…{self.last} ({self.distinct} distinct)"


class Cell(str, enum.Enum):
    """The kind of fault that a wrong word of memory has."""

    STUCK = "stuck"
    """A bit of the word always has the same value, whatever is written."""
    ALIAS = "alias"
    """Another address accesses the same word."""
    COUPLED = "coupled"
    """The word changes when another word is written."""
    LEAKING = "leaking"
    """The word loses its value although nobody writes."""
    FLIPPED = "flipped"
    """The word held a wrong value, and was right after it was written again: a failed write or a single bit flip."""
    TRANSFER = "transfer"
    """The word was right when it was read again: the first read was wrong, not the memory."""

    @property
    def lasts(self) -> bool:
        """Whether this kind means that the memory itself is broken."""
        return self not in (Cell.FLIPPED, Cell.TRANSFER)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongMemory:
    """The location of wrong words in memory, and their kinds of fault."""

    cells: Mapping[str, int]
    """Name of a `Cell` → number of words of this kind, among the words that were examined."""
    rose: int
    """Number of bits that were read as 1 instead of 0, in the examined words."""
    fell: int
    """Number of bits that were read as 0 instead of 1, in the examined words."""
    allocation: int
    """Size of the allocation in bytes."""
    offset: int
    """Offset of the first wrong word from the start of the allocation, in bytes."""
    address: int | None
    """Virtual address of the first wrong word, in a process that has ended; or None if the address is not known."""
    physical: int | None = None
    """Physical address of the first wrong word on the host, or None if the system does not reveal it."""
    partner: int | None = None
    """Distance in bytes from the first wrong word to the word that it is coupled with or an alias of; None if not
    found."""


class Way(str, enum.Enum):
    """The route of data that arrived wrong."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"
    BETWEEN = "between"
    """From one device to another device, or from one core to another core."""
    TOGETHER = "together"
    """Between all members of a group, in one collective operation."""


class Culprit(str, enum.Enum):
    """The part that caused wrong data in a transfer."""

    TRANSFER = "transfer"
    """The route. Sender and receiver are sound: each can write the right data to its own memory."""
    MEMORY = "memory"
    """The receiver's memory: it lost even the data that the receiver itself wrote there."""
    SOURCE = "source"
    """The sender: it no longer held the data that it had to send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongTransfer:
    """The route of wrong data, and the part that caused it."""

    way: Way
    culprit: Culprit


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Details of one wrong result: enough to see the pattern, and to recompute the inputs from the seed."""

    wrong: int
    """Number of elements whose bits differ from the golden."""
    total: int
    """Number of elements that were compared."""
    first: tuple[tuple[tuple[int, ...], str, str], ...]
    """The first wrong elements, at most 64, in order: (index, expected bits as hex, observed bits as hex)."""
    bits: Mapping[str, int]
    """Bit position (0 = lowest) → number of wrong elements with this bit flipped, among at most 65,536 elements."""
    zeroed: int
    """Number of wrong elements whose observed bits are all zero, apart from the sign bit."""
    nonfinite: int
    """Number of wrong elements that were observed as NaN or infinity."""
    lines: Mapping[str, Span]
    """Axis of the result ("row", "column", …) → summary of the wrong indices along this axis."""
    pattern: Sentence
    """The pattern of the difference, in words."""
    repeats: int = 0
    """Number of times that the same operands were uploaded and computed again after the wrong result."""
    repeats_wrong: int = 0
    """Number of these repeats that were wrong too."""
    repeats_alike: int | None = None
    """Number of repeats that were wrong in the same elements with the same bits, or None if that was not compared."""
    memory: WrongMemory | None = None
    """The location in memory, if memory itself was under test; else None."""
    transfer: WrongTransfer | None = None
    """The route of the data, if transfers were under test; else None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of one golden with the results from one upload of operands to the device, without a judgement."""

    case: str
    """Stable name of the test case, e.g. "bfloat16/cancel/decode/nt"."""
    shape: str
    """Sizes, e.g. "M=32 N=1024 K=256"."""
    seed: int
    """Seed of the operands. Seed, `case` and `shape` together reproduce the operands bit for bit."""
    exactness: Exactness
    subject: Subject = Subject.DEVICE
    place: Place = Place()
    """The place where the results were computed, or for a golden the cores that made it; `Place()` if not known."""
    doubt: Doubt = Doubt.NONE
    """The reason for doubt, if the comparison tested the golden or the comparator."""
    trials: int = 1
    """Number of results that were compared."""
    wrong_trials: int = 0
    """Number of results with at least one wrong bit."""
    evidence: Evidence | None = None
    """Details of a wrong result; None exactly if `wrong_trials` is 0."""
    digest: str = ""
    """64-bit order-sensitive digest (hex) of the first observed result, or "" if none was computed."""
    uploads: int = 1
    """Number of uploads of operands to the device: 1, or more if this is the sum of several clean comparisons."""
    characterised: bool = True
    """Whether canaryd knows that every healthy device of this kind gives the golden in this class of cases. If not,
    a wrong result accuses no device until some device has given the golden."""
    peer: str = ""
    """Uuid of the other device, if data was sent between two devices; else ""."""

    @property
    def wrong(self) -> bool:
        """Whether any result had a wrong bit."""
        return self.wrong_trials > 0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A result for which no right answer is known. It is compared with earlier results of the same case."""

    case: str
    """Stable name of the test case, e.g. "completions/reef/fresh"."""
    digest: str
    """64-bit digest (hex) of everything that must repeat exactly: tokens, and all raw values as they were delivered."""
    chain: Mapping[str, str] = field(default_factory=dict)
    """Name in `LINKS` → fingerprint of that part of the software. If one changed, a changed result is no fault."""
    condition: str = ""
    """"idle" or "loaded", depending on whether the server had other requests; "" if that is not known."""
    tokens: tuple[str, ...] = ()
    """The generated tokens, one per position: ids as text, or the tokens' own text if there are no ids. Empty for the
    result of a kernel."""
    values: tuple[float | None, ...] = ()
    """Natural logarithm of each token's probability, or for a kernel one value per tile, row by row. None if a value
    was not given or is not finite."""
    margins: tuple[float | None, ...] = ()
    """For each position, the best token's log probability minus the second best's; None where that is not known."""
    text: str = ""
    """The output in words, at most 4,096 characters."""
    finish: str = ""
    """The reason why the output ended: "length", "stop", …"""

    @property
    def of_kernel(self) -> bool:
        """Whether this is the result of a computation on the device, and not a model's answer in words."""
        return bool(self.values) and not (self.tokens or self.text or self.finish)

    @functools.cached_property
    def chain_id(self) -> str:
        """Twelve hex digits that are equal for equal chains."""
        return stack_id(self.chain)


LINKS = ("dtype", "checkpoint", "config", "tokenizer", "template", "prompt", "settings", "server", "client", "kernel")
"""Keys of `Recording.chain`, the causes that can change a recorded result without a fault. If several of them changed,
the first in this order explains the change. A change of dtype also changes the checkpoint's bytes."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A part of a probe that was not run, and the reason."""

    case: str
    reason: Sentence
    late: bool = False
    """Whether the case was left out only because the time budget was used up."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One line of the kernel log about the health of a device, parsed but not judged."""

    boot: str
    """The kernel's boot id."""
    sequence: int
    """The record's number within its boot."""
    at: float
    """Time of the record, in seconds since the epoch."""
    kind: str
    """"xid", "sxid", "mce", "edac", "aer", "pcie", "off-bus", "oom", "nvme", "amdgpu", "thermal", …"""
    name: str = ""
    """A name within the kind: the code of an Xid, the severity of an AER report."""
    bus_id: str = ""
    """The PCI function in the line, e.g. "0000:65:00.0", or "" if the line has none."""
    text: str = ""
    """The line, without names of processes."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Values decoded from the line, e.g. {"link": "12", "unit": "RLW_SRC_TRACK"}."""


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """The position up to which the kernel log has been read."""

    boot: str
    sequence: int
    """Number of the newest record that was read, or -1 before the first."""
    lost: int = 0
    """Number of records that the kernel overwrote before they were read, since this reader began."""
    garbled: int = 0
    """Number of lines since this reader began that are not valid records."""


def printable(text: str) -> str:
    """Return a text with "?" for every control character, because some control characters can harm a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def beginning(text: str, length: int) -> str:
    """Return a text as one line of at most `length` characters. A longer text is cut after a word, and "…" is added."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    head = line[: length - 1]
    words = head if line[length - 1] == " " else head.rpartition(" ")[0]
    return f"{(words or head).rstrip(' .,;:')}…"


def filled(text: str) -> str:
    """Return a text of the firmware with single blanks, or "" if it is a placeholder for an unused field."""
    text = " ".join(text.split())
    return "" if text.lower() in PLACEHOLDERS or "filled by" in text.lower() else text


def whole(value: Any, depth: int = 100) -> Any:
    """Return a copy of JSON data that UTF-8 can store. Each unpaired surrogate, which JSON allows, becomes "?".

    Raises `ValueError` if the data is nested deeper than `depth`: functions that walk through it later would fail.
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
    """Return a text equal to `text`. Equal texts give the same object where possible, and so take memory only once.

    `sys.intern` is not used: some releases of Python 3.12 never free the texts that it has seen.
    """
    return _known(text) if len(text) <= SHARED else text


def reading_key(name: str, labels: Mapping[str, str]) -> str:
    """Return the key of a reading: its name with its labels, e.g. "temperature_celsius{sensor=core}"."""
    inside = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def is_of_graph(case: str) -> bool:
    """Return whether a case's name says that the device computed it in a graph, without the host: "name#7g"."""
    return case.partition("#")[2].endswith(GRAPH)


def stack_id(stack: Mapping[str, str]) -> str:
    """Return twelve hex digits that are equal for equal stacks (SHA-256 of the sorted items)."""
    return _digest(tuple(sorted(stack.items())))


@functools.lru_cache(maxsize=512)
def _digest(items: tuple[tuple[str, str], ...]) -> str:
    """Return the `stack_id` of sorted items. It is cached: thousands of runs have the same few stacks."""
    return hashlib.sha256(json.dumps(items, separators=(",", ":")).encode()).hexdigest()[:12]
