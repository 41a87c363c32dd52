"""Copy patterns from the host to a device and back, compare them at both ends, and find the wrong direction.

Each end computes the pattern itself. If words on the device are wrong, the device writes them again itself: if they are
right then, the copy was wrong, otherwise the memory. If words are right on the device but wrong on the host afterwards,
the copy to the host was wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from canaryd.facts import (
    DEVICE_SECONDS,
    SPEEDS,
    TRIALS,
    Comparison,
    Culprit,
    Evidence,
    Exactness,
    Place,
    Reading,
    Way,
    WrongTransfer,
)
from canaryd.probe import Context, Fact, NoCase
from canaryd.worker.links.patterns import PATTERNS, WORD, make
from canaryd.worker.numeric import evidence
from canaryd.worker.numeric.cases import selects
from canaryd.worker.numeric.characterised import is_settled
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import bits, host_same_bits, same_bits, synchronize, torch, torch_device

AGAIN = 3
"""Number of times that a wrong copy is repeated, to see whether the error persists."""
LOCKED = ("cuda",)
"""Types of torch devices for which the host's pages are locked, so that copies are as fast as the link."""
FLIPPED = 1 << 11
"""Mask of the bit that an injected fault flips."""
WAYS = {
    Way.TO_DEVICE: "on the way to the device",
    Way.TO_HOST: "on the way to the host",
    Way.BETWEEN: "on the way",
    Way.TOGETHER: "in a collective operation",
}
CULPRITS = {
    Culprit.TRANSFER: "both ends hold what they write themselves",
    Culprit.MEMORY: "the receiver's memory does not hold what it writes itself",
    Culprit.SOURCE: "the sender's memory no longer held it",
}
"""Culprit (memory, transfer or source) → what was observed, as a clause of the evidence."""
NAMES = {Way.TO_DEVICE: "to-device", Way.TO_HOST: "to-host"}
"""Direction of a copy → the word for it in the names of cases."""


class Copies:
    """Memory on both sides, and the copies between host and device. The probe copies only with `send` and `fetch`."""

    def __init__(self, device: Any, words: int) -> None:
        """Allocate `words` words on both sides; lock the host's pages if the backend can copy from locked pages."""
        locked = device.type in LOCKED
        self.host, self.back = (torch.empty(words, dtype=torch.int64, pin_memory=locked) for _ in range(2))
        self.there = torch.empty(words, dtype=torch.int64, device=device)

    def send(self) -> None:
        """Copy the host's words to the device."""
        self.there.copy_(self.host)

    def fetch(self) -> None:
        """Copy the device's words to the host."""
        self.back.copy_(self.there)

    def write(self, words: Any) -> None:
        """Let the device itself write words into its memory."""
        self.there.copy_(words)


@dataclass
class _Round:
    """The state of one run: the copies, the fastest times, and the wrong results."""

    ctx: Context
    copies: Copies
    trials: int = 0
    seconds: dict[Way, float] = field(default_factory=dict)
    """Direction → seconds of the fastest copy."""

    def copy(self, way: Way) -> None:
        """Copy once in one direction; keep the duration if it is the shortest."""
        synchronize(self.ctx.device)
        begun = time.perf_counter()
        (self.copies.send if way is Way.TO_DEVICE else self.copies.fetch)()
        synchronize(self.ctx.device)
        took = time.perf_counter() - begun
        self.seconds[way] = min(took, self.seconds.get(way, took))

    def there_and_back(self, name: str) -> Iterator[Comparison]:
        """Copy a pattern to the device and back; yield a comparison per copy, the second only if memory was right."""
        copies, seed = self.copies, derive(self.ctx.seed, name)
        words = copies.host.numel()
        copies.host.copy_(make(name, words, seed, copies.host.device))
        expected = make(name, words, seed, copies.there.device)
        copies.write(torch.bitwise_not(expected))  # what is left from before must not pass for what arrives
        copies.back.bitwise_not_()
        self.copy(Way.TO_DEVICE)
        arrived = same_bits(copies.there, expected)
        yield self._compared(Way.TO_DEVICE, name, None if arrived else self._wrong_there(expected))
        copies.write(expected)  # so that the way back is judged alone
        held = same_bits(copies.there, expected)
        self.copy(Way.TO_HOST)
        if held:  # else the memory is wrong, and the way to the device has said so
            returned = host_same_bits(copies.back, copies.host)
            yield self._compared(Way.TO_HOST, name, None if returned else self._wrong_back())

    def _wrong_there(self, expected: Any) -> Evidence:
        """Return the evidence of wrong words on the device, with the culprit: its memory or the transfer."""
        copies = self.copies
        seen = differences(expected, copies.there)
        copies.write(expected)
        culprit = Culprit.TRANSFER if same_bits(copies.there, expected) else Culprit.MEMORY

        def wrong() -> bool:
            copies.write(torch.bitwise_not(expected))
            copies.send()
            return not same_bits(copies.there, expected)

        return again(traced(seen, Way.TO_DEVICE, culprit), wrong)

    def _wrong_back(self) -> Evidence:
        copies = self.copies
        seen = evidence.collect(copies.host, copies.back)

        def wrong() -> bool:
            copies.back.bitwise_not_()
            copies.fetch()
            return not host_same_bits(copies.back, copies.host)

        return again(traced(seen, Way.TO_HOST, Culprit.TRANSFER), wrong)

    def _compared(self, way: Way, name: str, found: Evidence | None) -> Comparison:
        self.trials += 1
        words = self.copies.host.numel()
        return Comparison(
            case=f"{case_of(way, name)}@{words}",
            shape=f"words={words}",
            seed=self.ctx.seed,
            exactness=Exactness.UNIVERSAL,
            place=Place(unit="device"),
            wrong_trials=int(found is not None),
            evidence=found,
            characterised=is_settled(self.ctx.device),
        )


def differences(expected: Any, there: Any) -> Evidence:
    """Return the evidence of differences between two tensors on the device; only wrong words are copied to the host."""
    where = torch.nonzero(bits(expected) != bits(there)).reshape(-1)[: evidence.EXAMINED]
    found = evidence.collect(expected[where].cpu(), there[where].cpu())
    numbers = where.tolist()
    first = tuple(((numbers[at[0]],), want, have) for at, want, have in found.first)
    lines = {"element": evidence.span(numbers, expected.numel())}
    text = f"element {lines['element']}: {found.pattern.partition(': ')[2]}"
    return replace(found, total=expected.numel(), first=first, lines=lines, pattern=text)


def traced(seen: Evidence, way: Way, culprit: Culprit) -> Evidence:
    """Return the evidence `seen` with the direction of the transfer and the culprit added."""
    pattern = f"{WAYS[way]}, {CULPRITS[culprit]}: {seen.pattern}"
    return replace(seen, transfer=WrongTransfer(way=way, culprit=culprit), pattern=pattern)


def again(seen: Evidence, wrong: Callable[[], bool]) -> Evidence:
    """Return the evidence with the number of wrong repetitions; `wrong` repeats once and returns whether it erred."""
    return replace(seen, repeats=AGAIN, repeats_wrong=sum(wrong() for _ in range(AGAIN)))


def case_of(way: Way, name: str) -> str:
    """Return the name of the case that sends a pattern in one direction."""
    return f"int64/{name}/{NAMES[way]}"


def copy_patterns(ctx: Context, words: int) -> Iterator[Fact]:
    """Copy every pattern to the device and back until the time is over, each at least once; yield the facts of the run.

    `words`: words of 64 bits in one copy. Right copies of a pattern are counted in one comparison. Raises `NoCase` if
    no case has a requested name.
    """
    wanted = [case.partition("@")[0] for case in ctx.cases]  # whatever size they had
    asked = [n for n in PATTERNS if not wanted or any(selects(w, case_of(v, n)) for w in wanted for v in NAMES)]
    if not asked:
        raise NoCase(ctx.cases, (case_of(way, name) for name in PATTERNS for way in NAMES))
    began = ctx.clock()
    run = _Round(ctx, (Struck if ctx.drill else Copies)(torch_device(ctx.device), words))
    sums: dict[str, Comparison] = {}
    wrong: list[Comparison] = []
    turn = 0
    while len(wrong) < AGAIN and (turn < len(asked) or ctx.left > 0.0):
        name = asked[turn % len(asked)]
        turn += 1
        ctx.progress(min(1.0, 1.0 - ctx.left / ctx.budget), name)
        ctx.pace()
        for found in run.there_and_back(name):
            if found.wrong:
                wrong.append(found)
            elif (before := sums.get(found.case)) is not None:
                sums[found.case] = replace(before, trials=before.trials + 1, uploads=before.uploads + 1)
            else:
                sums[found.case] = found
    yield from (*wrong, *sums.values())
    yield Reading(name=TRIALS, value=run.trials, unit="1")
    yield Reading(name=DEVICE_SECONDS, value=ctx.clock() - began, unit="seconds")  # the link is in use nearly always
    for way, seconds in run.seconds.items():
        yield Reading(name=f"{SPEEDS}{way.value}", value=words * WORD / seconds, unit="bytes per second")


class Struck(Copies):
    """A fault to inject: a bit flips during the copy to the device."""

    def send(self) -> None:
        """Copy the host's words to the device and flip one bit there."""
        super().send()
        self.there[self.there.numel() // 3] ^= FLIPPED
