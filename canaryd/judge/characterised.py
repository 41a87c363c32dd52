"""The proof that a class of test cases is exact: which device gave its golden bit for bit, and on which software.

An exact golden is a claim about a kernel: this operation, format and content give one bit pattern on this stack.
A device that gave the golden is evidence for the claim. Only agreement with the golden counts, so a device that is
wrong from its first day cannot prove its own wrong answer. docs/goldens.md has the rules.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from canaryd.facts import ALIGNED, Subject, is_of_graph, shared, stack_id
from canaryd.model import Run

SIZES = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*")
"""Matches the sizes of a case, which follow "@" in its name."""
PRODUCT = re.compile(r".*/[nt][nt]@(?:[0-9]+x)?[0-9]+x[0-9]+x[0-9]+")
"""Matches the name of a matrix product: it ends with the layouts of A and B and the sizes M, N and K."""
Kind = tuple[str, str]
"""Backend and model: `Device.kind`."""


class By(str, enum.Enum):
    """Kinds of proof that a class of test cases is exact. If several apply, the first of these counts."""

    SHIPPED = "shipped"
    """The class rounds nothing, or healthy devices gave its golden before this release."""
    ACCEPTED = "characterise"
    """An operator accepted the class as exact."""
    ITSELF = "itself"
    """This device has given the golden on this software stack."""
    SIBLING = "sibling"
    """Another device of this host, of the same backend and model, has given the golden on this software stack."""
    WITNESS = "witness"
    """A device of another host, of the same backend and model, has given the golden on this software stack."""
    CONTRADICTION = "contradiction"
    """This device gave right and wrong results for the same bytes, so the golden holds."""


@functools.lru_cache(maxsize=4096)
def class_of(case: str) -> str:
    """Return the class of a case: its name, in which each of the sizes after "@" is rounded up to a power of two.

    Libraries choose a kernel by size, so a proof for one size says nothing about the kernels for other sizes. Sizes
    vary with the seed, so exact sizes would hardly ever repeat. They also choose by strides, so the class of a product
    ends with "/aligned" or "/ragged", and what ran in a graph has "/graph" behind that. Any other text after "@" is
    left out, and so is the number of a repeated gather, "#7".
    """
    whole = case.partition("#")[0]
    name, _, sizes = whole.partition("@")
    if SIZES.fullmatch(sizes):
        numbers = [int(size) for size in sizes.split("x")]
        layout = name[-2:]
        name += "@" + "x".join(str(1 << max(0, number - 1).bit_length()) for number in numbers)
        if PRODUCT.fullmatch(whole):
            M, N, K = numbers[-3:]
            strides = K if layout[0] == "n" else M, N if layout[1] == "n" else K, N
            name += "/ragged" if any(stride % ALIGNED for stride in strides) else "/aligned"
    return shared(f"{name}/graph" if is_of_graph(case) else name)


class Line(NamedTuple):
    """The key of a `Met`: device, probe, its version, software stack."""

    device: str
    probe: str
    probe_version: int
    stack_id: str


@dataclass(frozen=True, kw_only=True)
class Met:
    """The classes of a probe in which a device gave the golden on one stack. Stored as JSON: names never change."""

    device: str
    """`Device.uuid`."""
    kind: Kind
    probe: str
    probe_version: int
    stack: Mapping[str, str]
    classes: Mapping[str, float] = field(default_factory=dict)
    """Class → time (s since the epoch) at which the device first gave its golden."""
    accepted: Mapping[str, str] = field(default_factory=dict)
    """Class → an operator's reason to accept it as exact, for all devices of the same backend and model."""
    imported: bool = False
    """Whether the device belongs to another host."""
    used: float = 0.0
    """Time at which the device last ran the probe on this stack, in seconds since the epoch, to the day."""

    @functools.cached_property
    def line(self) -> Line:
        """The key of these data."""
        return Line(self.device, self.probe, self.probe_version, stack_id(self.stack))

    def merged(self, other: Met) -> Met:
        """Return one `Met` with everything from both; the two must have the same key."""
        met = {c: min(at, other.classes.get(c, at)) for c, at in self.classes.items()}
        return replace(
            self,
            classes={**other.classes, **met},
            accepted={**self.accepted, **other.accepted},
            imported=self.imported and other.imported,
            used=max(self.used, other.used),
        )


def met_in(run: Run) -> frozenset[str]:
    """Return the classes in which every comparison of a run was right.

    They are empty for a run without a stack, because the software of such a run is not known.
    """
    if not run.stack:
        return frozenset()
    wrong = {class_of(c.case) for c in run.wrong}
    right = (c for c in run.comparisons if c.subject is Subject.DEVICE and c.trials and not c.wrong)
    return frozenset(name for c in right if c.case != FOLDED and (name := class_of(c.case)) not in wrong)


FOLDED = "*"
"""Name of the case of a comparison that is the sum of a clean run's comparisons; the single cases are not known."""


def learns(kind: Kind) -> bool:
    """Return whether devices of a kind need proof that a class is exact. Only processors do not."""
    return kind[0] != "cpu"


class Proof(NamedTuple):
    """The proof that a class is exact on a device."""

    by: By
    devices: tuple[str, ...] = ()
    """The uuids of the devices that gave the class's golden; empty if no device had to."""


class Claims:
    """Every `Met`: all classes of test cases in which devices gave the golden."""

    def __init__(self, records: Iterable[Met] = ()) -> None:
        """Store the data of devices of this host and of others."""
        self._records: dict[tuple[Kind, str, int], list[Met]] = defaultdict(list)
        for met in records:
            self._records[met.kind, met.probe, met.probe_version].append(met)
        self._asked: dict[tuple[Line, str], Proof | None] = {}

    def proof(self, kind: Kind, run: Run, case: str) -> Proof | None:
        """Return the proof that the case's class is exact on the run's stack, or None if no device gave the golden."""
        if not run.stack:
            return None
        name = class_of(case)
        asked = Line(run.device, run.probe, run.probe_version, run.stack_id), name
        if asked not in self._asked:
            self._asked[asked] = self._proof(kind, run, name)
        return self._asked[asked]

    def _proof(self, kind: Kind, run: Run, name: str) -> Proof | None:
        same = [m for m in self._of(kind, run) if m.line.stack_id == run.stack_id]
        if accepted := tuple(sorted(m.device for m in same if name in m.accepted)):
            return Proof(By.ACCEPTED, accepted)
        met = [m for m in same if name in m.classes]
        if any(m.device == run.device for m in met):
            return Proof(By.ITSELF, (run.device,))
        for by, elsewhere in ((By.SIBLING, False), (By.WITNESS, True)):
            if found := tuple(sorted(m.device for m in met if m.imported is elsewhere)):
                return Proof(by, found)
        return None

    def met_since(self, kind: Kind, run: Run, case: str) -> float:
        """Return the time (epoch s) at which the run's device first gave the golden of the case's class, or inf."""
        name, of_run = class_of(case), (run.device, run.stack_id)
        mine = (m for m in self._of(kind, run) if run.stack and (m.device, m.line.stack_id) == of_run)
        return min((m.classes[name] for m in mine if name in m.classes), default=math.inf)

    def before(self, kind: Kind, run: Run, case: str) -> Met | None:
        """Return the newest `Met` on other software that has the case's class, or None if there is none."""
        name = class_of(case)
        other = (m for m in self._of(kind, run) if name in m.classes and m.line.stack_id != run.stack_id)
        return max(other, key=lambda m: m.used, default=None)

    def _of(self, kind: Kind, run: Run) -> list[Met]:
        return self._records.get((kind, run.probe, run.probe_version), [])
