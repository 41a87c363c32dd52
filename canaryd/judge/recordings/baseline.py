"""Baselines: what a case gave while it was being learnt, and how far a new recording is from that.

Serving has a few legitimate modes (prefix cache empty or filled, alone or batched with others). Each mode repeats
exactly, and two modes differ by more than many faults do. So a baseline is neither an average nor a tolerance: it is
the set of exact vectors that were seen. Everything here is pure; docs/baselines.md has the statistics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from canaryd.facts import LINKS, Exactness, Recording, stack_id
from canaryd.judge.recordings import cases
from canaryd.judge.statistics import rate_bound
from canaryd.model import ENDPOINT, Run

LEARN = 30
"""Samples that make a baseline (ours: 29 in a row without a new vector bound the rate of new ones by 9.8 %)."""
STEADY = 12
"""Samples in a row without a new vector that make a case bit-stable (ours). A mode that stays hidden occurs in at most
22 % of runs (95 %)."""
SLACK = 3.0
"""Tolerance of an unsteady case, in distances between its modes: other loads have other modes (ours). False alarms:
2.7e-4 per unknown vector by re-runs."""
EVERY = ""
"""The condition that stands for all conditions together."""
IDLE, LOADED = "idle", "loaded"
"""Conditions of a server during a request: it served nobody else, or it did."""


class Key(NamedTuple):
    """What tells a baseline from every other baseline of its device."""

    probe: str
    probe_version: int
    case: str
    stack_id: str
    chain_id: str


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One exact vector, and how often it was seen while the baseline was being learnt."""

    recording: Recording
    counts: Mapping[str, int]
    """Condition → times."""
    first: float
    last: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What one case gave on one device, stack and chain. Stored and exported as JSON: field names never change."""

    device: str
    """`Device.uuid`."""
    probe: str
    probe_version: int
    case: str
    stack: Mapping[str, str]
    chain: Mapping[str, str]
    known: tuple[Mode, ...] = ()
    learnt: Mapping[str, int] = field(default_factory=dict)
    """Condition → samples that it was learnt from; `EVERY` for all together."""
    steady: Mapping[str, int] = field(default_factory=dict)
    """Condition → how many of them came after the last new vector."""
    first: float = 0.0
    last: float = 0.0
    """When learning began and ended, in seconds since the epoch."""
    passed: Mapping[str, int] = field(default_factory=dict)
    """Condition → runs with known vectors since then; `EVERY` for all together."""
    strange: int = 0
    """Runs with unknown vectors since then; re-runs are not counted."""
    beside: int = 0
    """Runs with known vectors since then, beside unknown ones of another case that repeats exactly."""
    calm: Mapping[str, int] = field(default_factory=dict)
    """`passed` as it was at the first unknown vector: unknown vectors are judged by this record."""
    since: int = 0
    """Runs with known vectors since the newest unknown one."""
    strange_at: float = 0.0
    """When the newest unknown vector came."""
    used: float = 0.0
    """When it was last compared with or learnt from."""
    accepted: str = ""
    """Why an operator added an unknown vector to it; "" where that never happened."""
    imported_kind: tuple[str, str] | None = None
    """Backend and model of the device on another host that it was imported from; None for a baseline of this host."""
    processes: int = 0
    """Runs, each in its own process, that it was learnt from since the last one that brought a new vector."""
    last_run: str = ""
    """Id of the newest of them."""
    referenced: bool = False
    """Whether a reference confirmed the same results, within an error bound, in every run it was learnt from."""

    @staticmethod
    def upgrade_json(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON of a stored or exported baseline with the fields of today.

        Release 0.1.0 wrote `imported`, "BACKEND MODEL" or "", where `imported_kind` stands now, and `pinned`.
        """
        data = {name: value for name, value in data.items() if name != "pinned"}
        older = data.get("imported")
        if not isinstance(older, str):
            return data
        newer = {name: value for name, value in data.items() if name != "imported"}
        backend, _, model = older.partition(" ")
        return {"imported_kind": [backend, model], **newer} if older else newer

    @property
    def imported(self) -> bool:
        """Whether it is of a device on another host."""
        return self.imported_kind is not None

    @functools.cached_property
    def key(self) -> Key:
        """What tells it from every other baseline of its device."""
        return Key(self.probe, self.probe_version, self.case, stack_id(self.stack), stack_id(self.chain))

    @functools.cached_property
    def digests(self) -> frozenset[str]:
        """The digests of the known vectors."""
        return frozenset(mode.recording.digest for mode in self.known)

    @property
    def is_endpoint(self) -> bool:
        """Whether a server gave the results, rather than a device of this host."""
        return self.device.startswith(f"{ENDPOINT}:")

    @property
    def is_text_only(self) -> bool:
        """Whether answers came without log probabilities: faults that change no word stay unseen."""
        answers = [mode.recording for mode in self.known]
        return bool(answers) and all((a.text or a.tokens) and not a.values for a in answers)

    @property
    def complete(self) -> bool:
        """Whether it has enough samples to call any other vector unknown."""
        return self.learnt.get(EVERY, 0) >= LEARN

    @property
    def trials(self) -> int:
        """Runs compared with it, up to the newest one with an unknown vector."""
        return self.passed.get(EVERY, 0) - self.since + self.strange

    def effective_condition(self, condition: str) -> str:
        """Return the condition to compare under: the given one where it has enough samples, else all together."""
        return condition if self.learnt.get(condition, 0) >= STEADY else EVERY

    def stable(self, condition: str) -> bool:
        """Whether the case repeats known vectors under this condition, so that any other vector means something.

        Idle, or on a server that nobody else uses: when it repeated them long enough. Where others may be served at the
        same time, only when our own load brought no vector that did not come without load as well: a few loads do not
        show every mode of a server that batches.
        """
        condition = self.effective_condition(condition)
        if condition != IDLE:
            loaded = {m.recording.digest for m in self.known if LOADED in m.counts}
            alone = {m.recording.digest for m in self.known if {*m.counts} - {LOADED}}
            idle = any(IDLE in m.counts for m in self.known)
            if not loaded <= alone or (idle and not loaded):
                return False
        return self.clean_samples(condition) >= STEADY

    def clean_samples(self, condition: str) -> int:
        """Return how many samples in a row brought no new vector, up to the first unknown one."""
        condition = self.effective_condition(condition)
        clean = self.calm if self.strange else self.passed
        return self.steady.get(condition, 0) + clean.get(condition, 0)

    def independent_samples(self, condition: str) -> int:
        """Return how many of the clean samples count as independent of each other.

        A worker's results may depend on its process (addresses, choice of kernels), so each process of a device counts
        once. A server is one process for all requests, and each of its answers counts.
        """
        if self.is_endpoint:
            return self.clean_samples(condition)
        clean = self.calm if self.strange else self.passed
        return max(1, self.processes + clean.get(self.effective_condition(condition), 0))

    def noise(self, condition: str) -> float | None:
        """Return the largest distance of a vector from its nearest neighbour, in nats, without the farthest vector.

        The farthest one may be a passing fault that was learnt. None where fewer than three vectors can be compared.
        """
        condition = self.effective_condition(condition)
        if condition not in self._noises:
            self._noises[condition] = self._noise(condition)
        return self._noises[condition]

    @functools.cached_property
    def _noises(self) -> dict[str, float | None]:
        return {}

    def _noise(self, condition: str) -> float | None:
        mine = [m.recording for m in self.known if condition == EVERY or condition in m.counts]
        pairs = [(a, _nearest(a, [b for b in mine if b is not a])) for a in mine]
        # Vectors that do not even share the first token cannot be compared.
        nearest = sorted(
            _distance(b, a)[0] for a, b in pairs if b is not None and (_common_prefix(a, b) or not a.tokens)
        )
        finite = [d for d in nearest if math.isfinite(d)]
        return finite[-2] if len(finite) > 2 else None

    def rate(self, condition: str, others: Iterable[Baseline] = ()) -> float:
        """Return an upper bound of the rate at which a healthy device gives a vector as far out as an unknown one.

        A stable case: n independent samples in a row without a new vector bound the rate of new ones by
        1 - 0.05^(1/n) at 95 % (the rule of three). Stable baselines among `others` count as well: of a server its other
        cases, of a device the same case of its siblings. An unsteady case: among m + 1 exchangeable samples the last is
        one of the two farthest out with a probability of 2 / (m + 1).
        """
        condition = self.effective_condition(condition)
        if self.stable(condition):
            # The cases of one worker share its process and are not independent of each other.
            apart = [b for b in others if (b.key != self.key if self.is_endpoint else b.device != self.device)]
            pool = [self, *(b for b in apart if b.complete and b.stable(condition))]
            return rate_bound(sum(b.independent_samples(condition) for b in pool))
        return min(1.0, 2 / (self.learnt.get(condition, 0) + 1))


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How an unknown vector differs from the nearest known one."""

    distance: float
    """Largest difference of log probabilities on the common prefix, in nats; infinite where values are lost."""
    position: int | None
    """First token that differs, or first character of an answer that is text alone; None where all are equal."""
    margin: float | None
    """By how much the known vector preferred its own token there, in nats."""
    noise: float | None
    """As `Baseline.noise`."""
    is_outlier: bool
    """Whether it is more than noise: always on a bit-stable case."""
    nearest: Recording
    """The nearest known vector."""

    def sentence(self) -> str:
        """Return the difference as one sentence."""
        noise = f" (known results differ by {self.noise:.3g})" if self.noise else ""
        if self.nearest.of_kernel:
            return f"{self._of_tiles(noise)}."
        if not self.nearest.tokens:
            return f"{self._of_text()}; there are no log probabilities to compare."
        tokens = "All tokens are equal"
        if self.position is not None:
            margin = f" (the known one led by {self.margin:.3g} nats)" if self.margin is not None else ""
            tokens = f"Token {self.position + 1} differs{margin}"
        if not self.nearest.values:
            return f"{tokens}."
        if math.isinf(self.distance):
            return f"{tokens}; a log probability is missing or not finite."
        return f"{tokens}; log probabilities differ by up to {self.distance:.3g} nats{noise}."

    def _of_text(self) -> str:
        if self.position is None:
            return "The text is equal, the answer is not"
        return f"The text differs from character {self.position + 1} on"

    def _of_tiles(self, noise: str) -> str:
        if self.position is None:
            return "Bits differ; the mean of every tile is the same"
        tile = f"tile {self.position} of {len(self.nearest.values)}"
        if math.isinf(self.distance):
            return f"{tile.capitalize()} is not finite"
        return f"The mean of {tile} differs most, by {self.distance:.3g}{noise}"


def key_of(run: Run, recording: Recording) -> Key:
    """Return the key of the baseline that a recording belongs to."""
    return Key(run.probe, run.probe_version, recording.case, run.stack_id, recording.chain_id)


def empty_baseline(run: Run, recording: Recording) -> Baseline:
    """Return a baseline without samples for the case, stack and chain of a recording."""
    return Baseline(
        device=run.device,
        probe=run.probe,
        probe_version=run.probe_version,
        case=recording.case,
        stack=run.stack,
        chain=recording.chain,
        first=run.started,
    )


def learn(before: Baseline | None, run: Run, recording: Recording) -> Baseline:
    """Return the baseline with one more sample; a complete one is returned unchanged."""
    before = before or empty_baseline(run, recording)
    if before.complete:
        return before
    conditions = dict.fromkeys((EVERY, recording.condition))
    learnt, steady = dict(before.learnt), dict(before.steady)
    for condition in conditions:
        seen = any(m.recording.digest == recording.digest and _seen_under(m, condition) for m in before.known)
        learnt[condition] = learnt.get(condition, 0) + 1
        steady[condition] = steady.get(condition, 0) + 1 if seen else 0
    known = _with_sample(before.known, run, recording)
    processes = before.processes + (run.id != before.last_run)
    return replace(
        before,
        processes=processes if len(known) == len(before.known) else 0,
        last_run=run.id,
        known=known,
        learnt=learnt,
        steady=steady,
        last=run.started,
        used=run.started,
        referenced=_meets_reference(run, recording) and (before.referenced or not before.known),
    )


def _meets_reference(run: Run, recording: Recording) -> bool:
    """Whether the run compared the same case with a reference, by a margin or an error bound, and it passed."""
    compared = [c for c in run.comparisons if cases.is_within(recording.case, c.case)]
    bounded = [c for c in compared if c.exactness is Exactness.MARGIN and c.trials]
    return bool(bounded) and not any(c.wrong for c in compared)


def count_run(before: Baseline, run: Run, condition: str, *, strange: bool, beside: bool = False) -> Baseline:
    """Return a complete baseline with one more run counted: with a known vector, or with an unknown (`strange`) one.

    `beside`: another case of the run, one that repeats exactly, gave an unknown vector. Not for re-runs.
    """
    if strange:
        calm = before.calm if before.strange else before.passed
        newest = max(before.strange_at, run.started)
        return replace(before, strange=before.strange + 1, calm=calm, since=0, strange_at=newest, used=run.started)
    passed = dict(before.passed)
    for each in dict.fromkeys((EVERY, condition)):
        passed[each] = passed.get(each, 0) + 1
    since, shared = before.since + 1, before.beside + beside
    return replace(before, passed=passed, since=since, beside=shared, used=run.started)


def accept(before: Baseline, run: Run, recording: Recording, why: str) -> Baseline:
    """Return the baseline with an unknown vector that an operator accepted; it is complete from then on."""
    learnt = {**before.learnt, EVERY: max(LEARN, before.learnt.get(EVERY, 0))}
    known = _with_sample(before.known, run, recording)
    return replace(
        before, known=known, learnt=learnt, strange=0, beside=0, calm={}, since=0, strange_at=0.0, accepted=why
    )


def _seen_under(mode: Mode, condition: str) -> bool:
    return condition == EVERY or condition in mode.counts


def _with_sample(known: tuple[Mode, ...], run: Run, recording: Recording) -> tuple[Mode, ...]:
    """Return the modes with one more sample counted."""
    condition, at = recording.condition, run.started
    for number, mode in enumerate(known):
        if mode.recording.digest == recording.digest:
            counts = {**mode.counts, condition: mode.counts.get(condition, 0) + 1}
            again = replace(mode, counts=counts, first=min(mode.first, at), last=max(mode.last, at))
            return (*known[:number], again, *known[number + 1 :])
    return (*known, Mode(recording=recording, counts={condition: 1}, first=at, last=at))


def deviation(baseline: Baseline, recording: Recording) -> Deviation | None:
    """Return how a recording differs from the known vectors; None where it is one of them.

    Raises `ValueError` where the baseline has no vector.
    """
    if recording.digest in baseline.digests:
        return None
    nearest = _nearest(recording, [m.recording for m in baseline.known])
    if nearest is None:
        raise ValueError(f"{baseline.case}: a baseline without a vector")
    distance, position = _distance(nearest, recording)
    margin = nearest.margins[position] if position is not None and position < len(nearest.margins) else None
    noise = baseline.noise(recording.condition)
    return Deviation(
        distance=distance,
        position=position,
        margin=margin,
        noise=noise,
        is_outlier=baseline.stable(recording.condition) or _exceeds_noise(nearest, distance, margin, noise),
        nearest=nearest,
    )


def _exceeds_noise(known: Recording, distance: float, margin: float | None, noise: float | None) -> bool:
    """Whether an unsteady case is outside its tolerance: in value, or by another token that was no near tie.

    Two logits that may each be off by the tolerance can change places where they are within twice of it. Without values
    there is no noise to measure, so text alone is never an outlier. A lost value always is one.
    """
    if not known.values or (noise is None and math.isfinite(distance)):
        return False
    tolerance = SLACK * (noise or 0.0)
    return distance > tolerance or (margin is not None and margin > 2 * tolerance)


def _nearest(recording: Recording, others: Iterable[Recording]) -> Recording | None:
    """Return the vector with the longest common prefix, and of several the nearest in value."""
    return min(others, key=lambda k: (-_common_prefix(k, recording), _distance(k, recording)[0]), default=None)


def _common_prefix(a: Recording, b: Recording) -> int:
    """Return how many tokens at the start are equal, or characters where neither has tokens."""
    ones, others = _units(a, b)
    pairs = enumerate(zip(ones, others, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(ones), len(others)))


def _units(a: Recording, b: Recording) -> tuple[Sequence[str], Sequence[str]]:
    return (a.tokens, b.tokens) if a.tokens or b.tokens else (a.text, b.text)


def _distance(a: Recording, b: Recording) -> tuple[float, int | None]:
    """Return the largest difference on the common prefix, in nats, and the first token that differs.

    Of a kernel's result: the largest difference of a tile's mean, and which tile that is. Where there is nothing to
    compare by (no tokens, no values), any difference of the digests is infinite.
    """
    if not a.tokens and not b.tokens and a.values and len(a.values) == len(b.values):
        return _distance_of_tiles(a.values, b.values)
    common = _common_prefix(a, b)
    position = common if common < max(map(len, _units(a, b))) else None
    if not a.tokens or len(a.values) < common or len(b.values) < common:
        return (0.0 if a.digest == b.digest else math.inf), position
    pairs = list(zip(a.values[:common], b.values[:common], strict=True))
    if any(x is not None and (y is None or not math.isfinite(y)) for x, y in pairs):
        return math.inf, position
    return max((abs(x - y) for x, y in pairs if x is not None and y is not None), default=0.0), position


def _distance_of_tiles(a: Sequence[float | None], b: Sequence[float | None]) -> tuple[float, int | None]:
    pairs = zip(a, b, strict=True)
    apart = [0.0 if x == y else math.inf if x is None or y is None else abs(x - y) for x, y in pairs]
    farthest = max(apart)
    return farthest, apart.index(farthest) if farthest else None


class LinkChange(NamedTuple):
    """One link of the chain or stack that differs; "" for a value that is not known."""

    link: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.link} ({self.before or 'unknown'} → {self.after or 'unknown'})"


def changed_links(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[LinkChange, ...]:
    """Return the links that differ, in the order from weights to answer, the stack's last."""
    order = [*LINKS, *sorted((before.keys() | after.keys()) - {*LINKS})]
    changes = (LinkChange(link, before.get(link, ""), after.get(link, "")) for link in order)
    return tuple(change for change in changes if change.before != change.after)
