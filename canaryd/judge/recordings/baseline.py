"""Baselines: what a case gave while it was being learnt, and how far a new recording is from that.

Serving has a few legitimate modes (prefix cache empty or filled, alone or batched with others). Each repeats exactly,
and two differ by more than many faults do. So a baseline is the set of exact vectors that were seen, neither an average
nor a tolerance. Everything here is pure; docs/baselines.md has the statistics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from canaryd.facts import Exactness, Recording, stack_id
from canaryd.judge.statistics import rate_bound
from canaryd.model import Run, is_served

LEARN = 30
"""Samples that make a baseline (ours: 29 in a row without a new vector bound the rate of new ones by 9.8 %)."""
STEADY = 12
"""Samples in a row without a new vector that make a case bit-stable (ours). A mode that stays hidden occurs in at most
22 % of runs (95 %)."""
SLACK = 3.0
"""Tolerance of an unsteady case, in distances between its modes: other loads have other modes (ours). False alarms:
2.7e-4 per unknown vector by re-runs."""
LAUNCH = "launch"
"""The link of the chain that names the start of a server; see `launches`."""
EVERY = ""
"""The condition that stands for all conditions together."""
IDLE, LOADED = "idle", "loaded"
"""Conditions of a server during a request: it served nobody else, or it did."""
CACHES = ("fresh", "warm")
"""Last parts of cases that ask one question with an empty and with a filled prefix cache, as in "chat/reef/fresh"."""


class Key(NamedTuple):
    """What tells a baseline from every other baseline of its device."""

    probe: str
    probe_version: int
    case: str
    stack_id: str
    chain_id: str


class Difference(NamedTuple):
    """How an unknown vector differs from the nearest known one."""

    nearest: Recording
    common: int
    """Tokens at the start that are equal, or characters where neither has tokens."""
    distance: float
    """Largest difference of log probabilities on the common prefix, in nats; infinite where values are lost."""
    position: int | None
    """First token, character or tile that differs; None where all are equal."""

    @property
    def margin(self) -> float | None:
        """By how much the nearest vector preferred its own token there, in nats."""
        at = self.position
        return self.nearest.margins[at] if at is not None and at < len(self.nearest.margins) else None

    def exceeds(self, noise: float | None) -> bool:
        """Whether it is more than the noise of an unsteady case: in value, or by another token that was no near tie.

        Two logits that may each be off by the tolerance can change places where they are within twice of it. Without
        values there is no noise to measure, so text alone never exceeds it. A lost value always does.
        """
        if not self.nearest.values or (noise is None and math.isfinite(self.distance)):
            return False
        tolerance = SLACK * (noise or 0.0)
        return self.distance > tolerance or (self.margin is not None and self.margin > 2 * tolerance)

    def sentence(self, noise: float | None) -> str:
        """Return the difference as one sentence."""
        near, _, distance, at = self
        size = f"by up to {distance:.3g}" if math.isfinite(distance) else "by what is missing or not finite"
        known = f" (known results differ by {noise:.3g})" if noise else ""
        if near.of_kernel:
            if at is None:
                return "Bits differ; the mean of every tile is the same."
            return f"Bits differ; tile {at} of {len(near.values)} most, {size}{known}."
        if not near.tokens:
            text = (
                "The text is equal, the answer is not" if at is None else f"The text differs from character {at + 1} on"
            )
            return f"{text}; there are no log probabilities to compare."
        led = f" (the known one led by {self.margin:.3g} nats)" if self.margin is not None else ""
        tokens = "All tokens are equal" if at is None else f"Token {at + 1} differs{led}"
        return f"{tokens}; log probabilities differ {size} nats{known}." if near.values else f"{tokens}."


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One exact vector, and how often it was seen while the baseline was being learnt."""

    recording: Recording
    counts: Mapping[str, int]
    """Condition → times."""
    first: float
    last: float
    """Seconds since the epoch."""

    def seen_under(self, condition: str) -> bool:
        """Whether it was seen under this condition."""
        return condition == EVERY or condition in self.counts


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
    far: int = 0
    """Those of them whose vectors no load explains: farther from all known ones than these are from each other."""
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
    launches: tuple[int, ...] = ()
    """When the server started under which known vectors were met, in seconds since the epoch, the newest last."""
    referenced: bool = False
    """Whether a reference confirmed the same results, within an error bound, in every run it was learnt from."""

    @property
    def imported(self) -> bool:
        """Whether it is of a device on another host."""
        return self.imported_kind is not None

    @functools.cached_property
    def key(self) -> Key:
        """What tells it from every other baseline of its device."""
        return Key(self.probe, self.probe_version, self.case, stack_id(self.stack), stack_id(self.chain))

    @functools.cached_property
    def any_launch(self) -> Key:
        """Its key without the launch of the server."""
        return self.key._replace(chain_id=stack_id({k: v for k, v in self.chain.items() if k != LAUNCH}))

    @functools.cached_property
    def digests(self) -> frozenset[str]:
        """The digests of the known vectors."""
        return frozenset(mode.recording.digest for mode in self.known)

    @property
    def is_text_only(self) -> bool:
        """Whether answers came without log probabilities: faults that change no word stay unseen."""
        answers = [mode.recording for mode in self.known]
        return bool(answers) and all((a.text or a.tokens) and not a.values for a in answers)

    @property
    def samples(self) -> int:
        """Samples that it was learnt from."""
        return self.learnt.get(EVERY, 0)

    @property
    def complete(self) -> bool:
        """Whether it has enough samples to call any other vector unknown."""
        return self.samples >= LEARN

    @property
    def compared(self) -> int:
        """Runs compared with it."""
        return self.passed.get(EVERY, 0) + self.strange

    @property
    def trials(self) -> int:
        """Runs compared with it, up to the newest one with an unknown vector."""
        return self.compared - self.since

    def effective_condition(self, condition: str) -> str:
        """Return the condition to compare under: the given one where it has enough samples, else all together."""
        return condition if self.learnt.get(condition, 0) >= STEADY else EVERY

    def compares(self, recording: Recording) -> bool:
        """Return whether a recording may be compared: one under load does not count where there are idle samples."""
        return self.effective_condition(IDLE) != IDLE or recording.condition != LOADED

    def stable(self, condition: str) -> bool:
        """Return whether the case repeats known vectors under this condition, so that any other means something.

        Where others may be served at the same time, only if our own load brought no vector that did not come without
        load as well: a few loads do not show every mode of a server that batches.
        """
        condition = self.effective_condition(condition)
        if condition != IDLE:
            loaded = {m.recording.digest for m in self.known if LOADED in m.counts}
            alone = {m.recording.digest for m in self.known if {*m.counts} - {LOADED}}
            if not loaded <= alone or (not loaded and any(IDLE in m.counts for m in self.known)):
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
        if is_served(self.device):
            return self.clean_samples(condition)
        clean = self.calm if self.strange else self.passed
        return max(1, self.processes + clean.get(self.effective_condition(condition), 0))

    def noise(self, condition: str) -> float | None:
        """Return the largest distance of a vector from its nearest neighbour, in nats, without the farthest vector.

        The farthest one may be a passing fault that was learnt. None where fewer than three vectors can be compared.
        """
        return self._noises.get(self.effective_condition(condition))

    @functools.cached_property
    def _noises(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for condition in self.learnt:
            vectors = [m.recording for m in self.known if m.seen_under(condition)]
            near = (_from_nearest([b for b in vectors if b is not a], a) for a in vectors if len(vectors) > 1)
            # Vectors that do not even share the first token cannot be compared.
            finite = sorted(
                f.distance for f in near if math.isfinite(f.distance) and (f.common or not f.nearest.tokens)
            )
            found[condition] = finite[-2] if len(finite) > 2 else None
        return found

    def difference(self, recording: Recording) -> Difference | None:
        """Return how a recording differs from the nearest known vector; None where it is a known one."""
        known = recording.digest in self.digests
        return None if known else _from_nearest((m.recording for m in self.known), recording)

    def departs(self, recording: Recording) -> bool:
        """Return whether a recording is unknown by more than noise: any unknown one of a case that is bit-stable."""
        found = self.difference(recording)
        condition = recording.condition
        return found is not None and (self.stable(condition) or found.exceeds(self.noise(condition)))

    def rate(self, condition: str, others: Iterable[Baseline] = ()) -> float:
        """Return an upper bound of the rate at which a healthy device gives a vector as far out as an unknown one.

        A stable case: n independent samples in a row without a new vector bound the rate of new ones by
        1 - 0.05^(1/n) at 95 %. Stable baselines among `others` count as well: of a server its other cases, of a device
        the same case of its siblings. An unsteady case: `rate_of_far`.
        """
        condition = self.effective_condition(condition)
        if not self.stable(condition):
            return self.rate_of_far(condition)
        # The cases of one worker share its process and are not independent of each other.
        apart = [b for b in others if (b.key != self.key if is_served(self.device) else b.device != self.device)]
        pool = [self, *(b for b in apart if b.complete and b.stable(condition))]
        return rate_bound(sum(b.independent_samples(condition) for b in pool))

    def rate_of_far(self, condition: str = EVERY) -> float:
        """Return the rate of vectors outside the noise: of m + 1 exchangeable ones the last is one of the two farthest.

        Its chance is 2 / (m + 1).
        """
        return min(1.0, 2 / (self.learnt.get(condition, 0) + 1))


def key_of(run: Run, recording: Recording) -> Key:
    """Return the key of the baseline that a recording belongs to."""
    return Key(run.probe, run.probe_version, recording.case, run.stack_id, recording.chain_id)


def is_within(case: str, path: str) -> bool:
    """Return whether a case is the one at `path` or below it, as "chat/reef/fresh" is below "chat/reef"."""
    return f"{case}/".startswith(f"{path}/")


def known_digests(baselines: Mapping[Key, Baseline], key: Key) -> frozenset[str]:
    """Return the digests that pass for a case: its own, and those of the same question with an empty or filled cache.

    A server whose cache cannot be bypassed evicts entries at any time, and then answers one case as the other.
    """
    question, _, cache = key.case.rpartition("/")
    cases = [f"{question}/{other}" for other in CACHES] if cache in CACHES else [key.case]
    found = (baselines.get(key._replace(case=case)) for case in cases)
    return frozenset().union(*(b.digests for b in found if b is not None))


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
    learnt, steady = dict(before.learnt), dict(before.steady)
    for condition in dict.fromkeys((EVERY, recording.condition)):
        seen = any(m.recording.digest == recording.digest and m.seen_under(condition) for m in before.known)
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
    compared = [c for c in run.comparisons if is_within(recording.case, c.case)]
    bounded = [c for c in compared if c.exactness is Exactness.MARGIN and c.trials]
    return bool(bounded) and not any(c.wrong for c in compared)


def count_run(
    before: Baseline, run: Run, condition: str, *, strange: Recording | None = None, beside: bool = False
) -> Baseline:
    """Return a complete baseline with one more run counted: with a known vector, or with an unknown (`strange`) one.

    `beside`: another case of the run, one that repeats exactly, gave an unknown vector. Not for re-runs.
    """
    if strange is not None:
        found = before.difference(strange)
        far = before.stable(EVERY) or (found is not None and found.exceeds(before.noise(EVERY)))
        calm = before.calm if before.strange else before.passed
        made = replace(before, strange=before.strange + 1, far=before.far + far, calm=calm, since=0)
        return replace(made, strange_at=max(before.strange_at, run.started), used=run.started)
    passed = {**before.passed, **{c: before.passed.get(c, 0) + 1 for c in (EVERY, condition)}}
    since, shared = before.since + 1, before.beside + beside
    return replace(before, passed=passed, since=since, beside=shared, used=run.started)


def accept(before: Baseline, run: Run, recording: Recording, why: str) -> Baseline:
    """Return the baseline with an unknown vector that an operator accepted; it is complete from then on."""
    learnt = {**before.learnt, EVERY: max(LEARN, before.samples)}
    known = _with_sample(before.known, run, recording)
    clean = replace(before, strange=0, far=0, beside=0, calm={}, since=0, strange_at=0.0)
    return replace(clean, known=known, learnt=learnt, used=max(before.used, run.started), accepted=why)


def _with_sample(known: tuple[Mode, ...], run: Run, recording: Recording) -> tuple[Mode, ...]:
    """Return the modes with one more sample counted."""
    condition, at = recording.condition, run.started
    for number, mode in enumerate(known):
        if mode.recording.digest == recording.digest:
            counts = {**mode.counts, condition: mode.counts.get(condition, 0) + 1}
            again = replace(mode, counts=counts, first=min(mode.first, at), last=max(mode.last, at))
            return (*known[:number], again, *known[number + 1 :])
    return (*known, Mode(recording=recording, counts={condition: 1}, first=at, last=at))


def _from_nearest(others: Iterable[Recording], recording: Recording) -> Difference:
    """Return how a vector differs from the one with the longest common prefix, and of several the nearest in value."""
    return min((_difference(k, recording) for k in others), key=lambda d: (-d.common, d.distance))


def _difference(a: Recording, b: Recording) -> Difference:
    """Return how one vector differs from another, on the common prefix of their tokens.

    Of a kernel's result: by the largest difference of a tile's mean. Where there is nothing to compare by (no tokens,
    no values), any difference of the digests is infinite.
    """
    ones, others = (a.tokens, b.tokens) if a.tokens or b.tokens else (a.text, b.text)
    tiles = not ones and not others and a.values and len(a.values) == len(b.values)
    pairs = enumerate(zip(ones, others, strict=False))
    common = next((i for i, (x, y) in pairs if x != y), min(len(ones), len(others)))
    position = common if common < max(len(ones), len(others)) else None
    if not tiles and (not a.tokens or min(len(a.values), len(b.values)) < common):
        return Difference(a, common, 0.0 if a.digest == b.digest else math.inf, position)
    values = zip(a.values, b.values, strict=False) if tiles else zip(a.values[:common], b.values[:common], strict=True)
    apart = [_apart(x, y, tiles=bool(tiles)) for x, y in values]
    farthest = max(apart, default=0.0)
    if tiles:
        position = apart.index(farthest) if farthest else None
    return Difference(a, common, farthest, position)


def _apart(x: float | None, y: float | None, *, tiles: bool) -> float:
    """Return how far two values are apart; infinite where one is lost, which no first token's value is."""
    if x == y or (x is None and not tiles):
        return 0.0
    far = math.inf if x is None or y is None else abs(x - y)
    return far if math.isfinite(far) else math.inf
