"""Baselines: what a case gave while it was learnt, and how far what it gives now is from that.

Serving has a few legitimate modes (prefix cache cold or warm, alone or batched with others). Each repeats to the bit,
and they differ from each other by more than many faults do. So a baseline is neither an average nor a tolerance: it is
the set of exact vectors that were seen. Everything here is pure; docs/baselines.md has the statistics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from canaryd.judge.statistics import rate_bound
from canaryd.model import ENDPOINT, LINKS, Exactness, Recording, Run, stack_id

LEARN = 30
"""Recordings from which a baseline is learnt (ours: 29 in a row without a new vector bound its rate by 9.8 %)."""
STEADY = 12
"""Recordings in a row without a new vector from which a case is called bit-stable (ours). A mode that stays hidden
comes in at most 22 % of runs (95 %)."""
SLACK = 3.0
"""Times the distance between modes that an unsteady case may stray: other loads have modes of their own (ours). False
alarms: 2.7e-4 per unknown vector by re-runs."""
EVERY = ""
"""The condition that stands for all of them."""
IDLE, LOADED = "idle", "loaded"
"""Conditions under which a server was asked: nobody else was served, or others were."""

Key = tuple[str, int, str, str, str]
"""Probe, its version, case, id of the stack, id of the chain."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """One exact vector, and how often it was seen while the baseline was learnt."""

    recording: Recording
    counts: Mapping[str, int]
    """Condition → times."""
    first: float
    last: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What one case gave on one device, stack and chain."""

    device: str
    probe: str
    probe_version: int
    case: str
    stack: Mapping[str, str]
    chain: Mapping[str, str]
    known: tuple[Known, ...] = ()
    learnt: Mapping[str, int] = field(default_factory=dict)
    """Condition → recordings that it was learnt from; `EVERY` for all together."""
    steady: Mapping[str, int] = field(default_factory=dict)
    """Condition → how many of them came after the last one that was new."""
    first: float = 0.0
    last: float = 0.0
    """When it was learnt, from and to, in seconds since the epoch."""
    passed: Mapping[str, int] = field(default_factory=dict)
    """Condition → runs with known bits since then; `EVERY` for all together."""
    strange: int = 0
    """Runs with bits beyond what is known since then; re-runs are not counted."""
    calm: Mapping[str, int] = field(default_factory=dict)
    """What `passed` was when the first of them came: the record by which they are judged."""
    since: int = 0
    """Runs with known bits since the newest of them."""
    strange_at: float = 0.0
    """When the newest of them came."""
    used: float = 0.0
    """When it was last needed."""
    accepted: str = ""
    """Why an operator took an unknown vector into it; "" where that never happened."""
    imported: str = ""
    """Backend and model of the device of another host that it is of, as "cuda NVIDIA H200"; "" for one of this host."""
    processes: int = 0
    """Runs, each a process of its own, that it was learnt from since the last one that brought a new vector."""
    last_run: str = ""
    """The newest of them, by id."""
    referenced: bool = False
    """Whether, all the while it was learnt, a reference confirmed the same results to within a bound."""
    pinned: str = ""
    """Why an operator fixed it: no vector is added, and it is kept for good; "" where that never happened."""

    @functools.cached_property
    def key(self) -> Key:
        """What tells it from every other baseline of its device."""
        return self.probe, self.probe_version, self.case, stack_id(self.stack), stack_id(self.chain)

    @functools.cached_property
    def digests(self) -> frozenset[str]:
        """The digests that pass at once."""
        return frozenset(k.recording.digest for k in self.known)

    @property
    def served(self) -> bool:
        """Whether a server gave it."""
        return self.device.startswith(f"{ENDPOINT}:")

    @property
    def complete(self) -> bool:
        """Whether enough was seen to call anything else unknown."""
        return self.learnt.get(EVERY, 0) >= LEARN

    def under(self, condition: str) -> str:
        """Return the condition to compare under: the given one where enough was learnt under it, else all."""
        return condition if self.learnt.get(condition, 0) >= STEADY else EVERY

    def stable(self, condition: str) -> bool:
        """Whether the case repeats known bits under this condition, so that any other bits mean something.

        Idle, or on a server that nobody else uses: when it did so for long enough. Where others may be served at the
        same time, only when our own load brought no vector that did not come alone as well: of a server that batches,
        no few loads show what every other load will give.
        """
        condition = self.under(condition)
        if condition != IDLE:
            loaded = {k.recording.digest for k in self.known if LOADED in k.counts}
            alone = {k.recording.digest for k in self.known if {*k.counts} - {LOADED}}
            idle = any(IDLE in k.counts for k in self.known)
            if not loaded <= alone or (idle and not loaded):
                return False
        return self.record(condition) >= STEADY

    def record(self, condition: str) -> int:
        """Return for how many recordings in a row no new vector came, up to the first that was strange."""
        condition = self.under(condition)
        clean = self.calm if self.strange else self.passed
        return self.steady.get(condition, 0) + clean.get(condition, 0)

    def independent(self, condition: str) -> int:
        """Return how many of these may be counted as independent of each other.

        What a worker computes may stick to its process (addresses, which kernel was chosen), so of a device's own
        results each process counts once. A server is one process whoever asks, and each of its answers counts.
        """
        if self.served:
            return self.record(condition)
        clean = self.calm if self.strange else self.passed
        return max(1, self.processes + clean.get(self.under(condition), 0))

    def noise(self, condition: str) -> float | None:
        """Return how far, in nats, a vector is from its nearest neighbour at most, the farthest one left out.

        That one may be a passing fault that was learnt. None where fewer than three vectors tell.
        """
        condition = self.under(condition)
        if condition not in self._noises:
            self._noises[condition] = self._noise(condition)
        return self._noises[condition]

    @functools.cached_property
    def _noises(self) -> dict[str, float | None]:
        return {}

    def _noise(self, condition: str) -> float | None:
        mine = [k.recording for k in self.known if condition == EVERY or condition in k.counts]
        pairs = [(a, _nearest(a, [b for b in mine if b is not a])) for a in mine]
        # Where not even the first token is shared there is nothing to measure by.
        nearest = sorted(_distance(b, a)[0] for a, b in pairs if b is not None and (_common(a, b) or not a.tokens))
        finite = [d for d in nearest if math.isfinite(d)]
        return finite[-2] if len(finite) > 2 else None

    def rate(self, condition: str, others: Iterable[Baseline] = ()) -> float:
        """Return an upper bound of the chance that a healthy device gives a vector as far out as an unknown one.

        A stable case: n independent recordings in a row without a new vector bound the rate of new ones by
        1 - 0.05^(1/n) at 95 % (the rule of three); of a server those of `others` count as well, where they are stable
        too. An unsteady one: among m + 1 exchangeable recordings the last is one of the two farthest out with a chance
        of 2 / (m + 1).
        """
        condition = self.under(condition)
        if self.stable(condition):
            pool = [self]
            if self.served:  # the cases of one worker share its process, and tell no more than one of them
                pool += [b for b in others if b.key != self.key and b.complete and b.stable(condition)]
            return rate_bound(sum(b.independent(condition) for b in pool))
        return min(1.0, 2 / (self.learnt.get(condition, 0) + 1))


@dataclass(frozen=True, kw_only=True)
class Departure:
    """How an unknown vector differs from the nearest known one."""

    distance: float
    """Largest difference of log probabilities on the common prefix, in nats; infinite where values are lost."""
    position: int | None
    """First token that differs; None where all are equal."""
    margin: float | None
    """By how much the known vector preferred its own token there, in nats."""
    noise: float | None
    """As `Baseline.noise`."""
    beyond: bool
    """Whether it is more than noise: always on a bit-stable case."""
    known: Recording
    """The nearest known vector."""

    def __str__(self) -> str:
        if not self.known.tokens:
            return self._of_tiles()
        tokens = "every token is the same"
        if self.position is not None:
            margin = f", where the known one led by {self.margin:.3g}" if self.margin is not None else ""
            tokens = f"token {self.position + 1} is another{margin}"
        if not self.known.values:
            return tokens
        if math.isinf(self.distance):
            return f"{tokens}, and a log probability is missing or not finite"
        noise = f" (known ones differ by {self.noise:.3g})" if self.noise else ""
        return f"{tokens}, log probabilities differ by up to {self.distance:.3g}{noise}"

    def _of_tiles(self) -> str:
        """Return in words how the result of a kernel differs."""
        if self.position is None:
            return "the bits are others, the mean of every tile is the same"
        if math.isinf(self.distance):
            return f"tile {self.position} of {len(self.known.values)} is not finite"
        noise = f" (known ones differ by {self.noise:.3g})" if self.noise else ""
        return f"tile {self.position} of {len(self.known.values)} differs most, its mean by {self.distance:.3g}{noise}"


def key_of(run: Run, recording: Recording) -> Key:
    """Return the key of the baseline that a recording belongs to."""
    return run.probe, run.probe_version, recording.case, run.stack_id, recording.chain_id


def begun(run: Run, recording: Recording) -> Baseline:
    """Return the empty baseline that a recording belongs to."""
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
    """Return the baseline with one more recording in it; a complete one is returned as it is."""
    before = before or begun(run, recording)
    if before.complete:
        return before
    conditions = dict.fromkeys((EVERY, recording.condition))
    learnt, steady = dict(before.learnt), dict(before.steady)
    for condition in conditions:
        seen = any(k.recording.digest == recording.digest and _met(k, condition) for k in before.known)
        learnt[condition] = learnt.get(condition, 0) + 1
        steady[condition] = steady.get(condition, 0) + 1 if seen else 0
    known = _counted(before.known, run, recording)
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
        referenced=_confirmed(run, recording) and (before.referenced or not before.known),
    )


def _confirmed(run: Run, recording: Recording) -> bool:
    """Whether the run held the same case against a reference, by a margin or a bound, and it passed."""
    of = [c for c in run.comparisons if f"{recording.case}/".startswith(f"{c.case}/")]
    held = [c for c in of if c.exactness is Exactness.MARGIN and c.trials]
    return bool(held) and not any(c.wrong for c in of)


def count(before: Baseline, run: Run, condition: str, *, strange: bool) -> Baseline:
    """Return a complete baseline with one more run counted that is no re-run: of known bits, or of `strange` ones."""
    if strange:
        calm = before.calm if before.strange else before.passed
        newest = max(before.strange_at, run.started)
        return replace(before, strange=before.strange + 1, calm=calm, since=0, strange_at=newest, used=run.started)
    passed = dict(before.passed)
    for each in dict.fromkeys((EVERY, condition)):
        passed[each] = passed.get(each, 0) + 1
    return replace(before, passed=passed, since=before.since + 1, used=run.started)


def accept(before: Baseline, run: Run, recording: Recording, why: str) -> Baseline:
    """Return the baseline with an unknown vector taken into it by an operator's word; it is complete by that word."""
    learnt = {**before.learnt, EVERY: max(LEARN, before.learnt.get(EVERY, 0))}
    known = _counted(before.known, run, recording)
    return replace(before, known=known, learnt=learnt, strange=0, calm={}, since=0, strange_at=0.0, accepted=why)


def _met(known: Known, condition: str) -> bool:
    return condition == EVERY or condition in known.counts


def _counted(known: tuple[Known, ...], run: Run, recording: Recording) -> tuple[Known, ...]:
    condition, at = recording.condition, run.started
    for number, one in enumerate(known):
        if one.recording.digest == recording.digest:
            counts = {**one.counts, condition: one.counts.get(condition, 0) + 1}
            again = replace(one, counts=counts, first=min(one.first, at), last=max(one.last, at))
            return (*known[:number], again, *known[number + 1 :])
    return (*known, Known(recording=recording, counts={condition: 1}, first=at, last=at))


def departure(baseline: Baseline, recording: Recording) -> Departure | None:
    """Return how a recording differs from what is known; None where exactly these bits are known."""
    if recording.digest in baseline.digests:
        return None
    nearest = _nearest(recording, [k.recording for k in baseline.known])
    if nearest is None:
        raise ValueError(f"{baseline.case}: a baseline without a vector")
    distance, position = _distance(nearest, recording)
    margin = nearest.margins[position] if position is not None and position < len(nearest.margins) else None
    noise = baseline.noise(recording.condition)
    return Departure(
        distance=distance,
        position=position,
        margin=margin,
        noise=noise,
        beyond=baseline.stable(recording.condition) or _strays(nearest, distance, margin, noise),
        known=nearest,
    )


def _strays(known: Recording, distance: float, margin: float | None, noise: float | None) -> bool:
    """Whether an unsteady case went farther than its noise: in value, or to another token that was no near tie.

    Two logits that may each be off by the tolerance can change places where they are within twice of it. Text alone
    cannot tell: without values there is nothing to measure the noise by. A lost value is no matter of noise.
    """
    if not known.values or (noise is None and math.isfinite(distance)):
        return False
    tolerance = SLACK * (noise or 0.0)
    return distance > tolerance or (margin is not None and margin > 2 * tolerance)


def _nearest(recording: Recording, others: Iterable[Recording]) -> Recording | None:
    """Return the vector that a recording follows longest, and of several the nearest in value."""
    return min(others, key=lambda k: (-_common(k, recording), _distance(k, recording)[0]), default=None)


def _common(a: Recording, b: Recording) -> int:
    pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))


def _distance(a: Recording, b: Recording) -> tuple[float, int | None]:
    """Return the largest difference on the common prefix, in nats, and where the tokens part.

    Of a kernel's result: the largest difference of a tile's mean, and which tile that is. Where there is nothing to
    compare by (no tokens, no values), any difference of the digests is infinite.
    """
    if not a.tokens and not b.tokens and a.values and len(a.values) == len(b.values):
        return _distance_of_tiles(a.values, b.values)
    common = _common(a, b)
    position = common if common < max(len(a.tokens), len(b.tokens)) else None
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


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the links that differ as (link, before, after), in the order from weights to answer, the stack's last."""
    order = [*LINKS, *sorted((before.keys() | after.keys()) - {*LINKS})]
    pairs = [(link, before.get(link, ""), after.get(link, "")) for link in order]
    return [pair for pair in pairs if pair[1] != pair[2]]


def spoken(links: Iterable[tuple[str, str, str]]) -> str:
    """Return changed links in words: "tokenizer (1f… → 9c…), server (vllm 0.31 → vllm 0.32)"."""
    return ", ".join(f"{link} ({before or 'not known'} → {after or 'not known'})" for link, before, after in links)
