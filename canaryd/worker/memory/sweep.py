"""Test slices of memory with patterns of words, and yield the comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from canaryd.facts import (
    DEVICE_SECONDS,
    TRIALS,
    Cell,
    Comparison,
    Evidence,
    Exactness,
    Place,
    Reading,
    WrongMemory,
)
from canaryd.free_memory import available
from canaryd.probe import Context, Fact, NoCase, Skip
from canaryd.worker.memory import cells, faults, pages
from canaryd.worker.memory.slices import LARGEST, ROW, TILE, WORD, Expected, Slice, own_numbers, scratch_for
from canaryd.worker.numeric.cases import selects
from canaryd.worker.numeric.characterised import is_settled
from canaryd.worker.numeric.integers import stream
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import torch, torch_device
from canaryd.worker.runtime import interface

ALTERNATING = 0x5555555555555555
FIRST = 64
"""Number of wrong words that are reported with their bits."""
WRONG_ENOUGH = 8
"""Number of slices with wrong words after which a pattern stops."""
RESERVE = 512 << 20
"""Bytes of a device's memory that a sweep never takes: the driver and other processes need some."""
HOST_RESERVE = 2 << 30
"""Bytes of the host's memory that a sweep never takes, or an eighth of the free memory if that is more."""
UNREPORTED = 1 << 30
"""Maximum bytes that a sweep takes if the runtime reports no free memory: a server on the device may need the rest."""
OF_ROOM = 2
"""Divisor: beside a server a sweep takes the permitted memory divided by this, because torch itself needs some."""


@dataclass
class Sweep:
    """The state of one memory test: the slices under test, and the operations that patterns consist of."""

    ctx: Context
    slices: list[Slice]
    pause: float
    """Seconds of each pause without access to the memory in the pattern `retention`."""
    trials: int = 0
    bytes_read: int = 0
    wrong: dict[int, cells.Wrong] = field(default_factory=dict)
    """Number of a slice → the words that were wrong in the current pattern."""

    def fill(self, expected: Expected) -> Iterator[None]:
        """Write every word of every slice; yield after each slice."""
        for memory in self.slices:
            for part in memory.parts():
                self.ctx.pace()
                memory.write(part, expected)
            yield

    def look(self, number: int, memory: Slice, part: range, expected: Expected) -> None:
        """Read a group of rows of slice `number` once, compare it, and examine the wrong words."""
        self.ctx.pace()
        difference = memory.difference(part, expected)
        self.bytes_read += len(part) * ROW
        # Bytes, because a reduction of them is faster than one of words, and no sum can cancel.
        if bool(difference.view(torch.uint8).any()):
            self.wrong.setdefault(number, cells.Wrong(self.slices)).add(memory, part, expected, difference)

    def read(self, expected: Expected) -> Iterator[None]:
        """Compare every word of every slice; yield after each slice."""
        for number, memory in enumerate(self.slices):
            for part in memory.parts():
                self.look(number, memory, part, expected)
            yield


def address(sweep: Sweep) -> Iterator[None]:
    """Write its own number to each word, then compare: this finds two addresses in any slices that share a cell."""
    expected = own_numbers(sweep.slices[0].device)
    yield from sweep.fill(expected)
    yield from sweep.read(expected)


def inversions(sweep: Sweep) -> Iterator[None]:
    """Read and invert all rows in ascending, then in descending order (moving inversions), then read them again."""
    device = sweep.slices[0].device
    plain = Expected(torch.full((TILE,), ALTERNATING, dtype=torch.int64, device=device))
    inverse = plain.inverted()
    yield from sweep.fill(plain)
    for number, memory in enumerate(sweep.slices):
        for part in memory.parts():
            sweep.look(number, memory, part, plain)
            memory.write(part, inverse)
        yield
    for number, memory in reversed(list(enumerate(sweep.slices))):
        for part in reversed(memory.parts()):
            sweep.look(number, memory, part, inverse)
            memory.write(part, plain)
        yield
    yield from sweep.read(plain)


def random(sweep: Sweep) -> Iterator[None]:
    """Write random words and compare them twice; between the two reads of a word all other memory is read."""
    expected = _random_tile(sweep, "random")
    yield from sweep.fill(expected)
    yield from sweep.read(expected)
    yield from sweep.read(expected)


def retention(sweep: Sweep) -> Iterator[None]:
    """Write random words, then their complements; compare each after a pause without access."""
    plain = _random_tile(sweep, "retention")
    for expected in (plain, plain.inverted()):
        yield from sweep.fill(expected)
        sweep.slices[0].rest(sweep.pause)
        yield from sweep.read(expected)
        for number, found in sweep.wrong.items():
            if found.cells[Cell.FLIPPED]:
                again = min(cells.holds(sweep.slices[number], found, sweep.pause), found.cells[Cell.FLIPPED])
                found.cells[Cell.LEAKING] += again
                found.cells[Cell.FLIPPED] -= again
        yield


PATTERNS: dict[str, Callable[[Sweep], Iterator[None]]] = {
    "address": address,
    "inversions": inversions,
    "random": random,
    "retention": retention,
}


def _random_tile(sweep: Sweep, name: str) -> Expected:
    # Two streams: one alone never sets the highest bit.
    seed = derive(sweep.ctx.seed, name)
    tile = stream(seed, "low", (TILE,)) ^ (stream(seed, "high", (TILE,)) << 1)
    return Expected(tile.to(sweep.slices[0].device))


def sweep_memory(ctx: Context, most: int, pause: float) -> Iterator[Fact]:
    """Sweep at most `most` bytes of the device's memory; yield every fact of the run.

    `pause`: seconds of each pause in the pattern `retention`. Raises `Skip` if not even one row is free.
    """
    asked, began = _asked_for(ctx), ctx.clock()
    slices = allocate(ctx, most)
    locked = [m.lock() for m in slices]
    sweep = Sweep(ctx, slices, pause)
    if isinstance(slices[0], faults.Stuck):
        slices[0].arm(ctx.seed)
    for number, (case, name) in enumerate(asked):
        ctx.progress(number / len(asked), case)
        if ctx.left <= 0.0 and number and not ctx.drill:
            yield ctx.late(case)
            continue
        sweep.wrong = {}
        finished = _carry_out(sweep, PATTERNS[name](sweep))
        if not finished and not sweep.wrong:
            yield ctx.late(case, "its first pass was over")
            continue
        yield from _comparisons(sweep, case, finished=finished)
    yield Reading(name=TRIALS, value=sweep.trials, unit="1")
    yield Reading(name="memory_swept_bytes", value=sum(m.rows * ROW for m in slices), unit="bytes")
    yield Reading(name="memory_read_bytes", value=sweep.bytes_read, unit="bytes")
    yield Reading(name=DEVICE_SECONDS, value=ctx.clock() - began, unit="seconds")
    if slices[0].device.type == "cpu":
        held = sum(m.rows * ROW for m, lock in zip(slices, locked, strict=True) if lock)
        yield Reading(name="memory_locked_bytes", value=held, unit="bytes")


def _asked_for(ctx: Context) -> list[tuple[str, str]]:
    """Return (case, pattern) for each case that `ctx.cases` selects; raise `NoCase` if there is none.

    Sizes in names are ignored: the size follows from the free memory, so a retest can have another one.
    """
    names = [(f"int64/{name}/sweep", name) for name in PATTERNS]
    wanted = [case.partition("@")[0] for case in ctx.cases]
    asked = [(c, n) for c, n in names if not wanted or any(selects(w, c) for w in wanted)]
    if not asked:
        raise NoCase(ctx.cases, (case for case, _ in names))
    # Where a budget ends early, another run begins with another pattern. An injected fault shows in the first.
    turn = 0 if ctx.drill else ctx.seed % len(asked)
    return [*asked[turn:], *asked[:turn]]


def _carry_out(sweep: Sweep, pattern: Iterator[None]) -> bool:
    """Run a pattern over all slices; return True if it reached its end.

    Return False if the time ended first, or if enough slices were wrong. The run never stops inside a slice.
    """
    for _ in pattern:
        if len(sweep.wrong) >= WRONG_ENOUGH or (sweep.ctx.left <= 0.0 and len(sweep.slices) > 1):
            return False
    return True


def allocate(ctx: Context, most: int) -> list[Slice]:
    """Return slices of at most `LARGEST` bytes each: together `most` bytes, or less if less memory is free.

    Raises `Skip` if not even one row is free.
    """
    free = _free(ctx)
    limits = [most, ctx.room // OF_ROOM] if ctx.room else [most]
    rows = min([*limits, *([] if free is None else [free])]) // ROW
    if rows < 1:
        raise Skip(f"no memory to sweep: {free} bytes are free less the reserve, {most} were asked for")
    device, each = torch_device(ctx.device), LARGEST // ROW
    scratch = scratch_for(device, min(rows, each))
    slices: list[Slice] = []
    for first in range(0, rows, each):
        kind = faults.Stuck if ctx.drill and first == 0 else Slice
        try:
            slices.append(kind(min(each, rows - first), first, device, scratch))
        except RuntimeError:  # torch raises it where memory runs out, on every backend
            if not slices:
                raise
            break
    return slices


def _free(ctx: Context) -> int | None:
    """Return the bytes of the device's memory that are free beyond the reserve, or None if they are unknown."""
    if ctx.device.unit == "cpu":
        free = available()
        return None if free is None else free - max(HOST_RESERVE, free // 8)
    free, _ = interface.of(ctx.device).memory(ctx.device)
    return UNREPORTED if free is None else free - RESERVE


def _comparisons(sweep: Sweep, case: str, *, finished: bool) -> Iterator[Comparison]:
    """Yield one comparison for each wrong slice, and one for all right slices if the pattern reached every slice."""
    known = is_settled(sweep.ctx.device)

    def comparison(memory: Slice, **more: Any) -> Comparison:
        return Comparison(
            case=f"{case}@{memory.count}",
            shape=f"words={memory.count}",
            seed=sweep.ctx.seed,
            exactness=Exactness.UNIVERSAL,
            place=Place(unit="memory"),
            characterised=known,
            **more,
        )

    for number, found in sorted(sweep.wrong.items()):
        sweep.trials += 1
        yield comparison(sweep.slices[number], wrong_trials=1, evidence=_evidence(sweep, sweep.slices[number], found))
    right = [memory for number, memory in enumerate(sweep.slices) if finished and number not in sweep.wrong]
    for _, alike in itertools.groupby(sorted(right, key=lambda m: m.count), key=lambda m: m.count):
        first, *others = alike
        sweep.trials += 1 + len(others)
        yield comparison(first, trials=1 + len(others), uploads=1 + len(others))


def _evidence(sweep: Sweep, memory: Slice, found: cells.Wrong) -> Evidence:
    mask = (1 << 64) - 1
    every = zip(found.at, found.expected, found.bits, strict=True)
    words = [(at, want & mask, bits & mask) for at, want, bits in every]
    histogram = {str(bit): n for bit in range(64) if (n := sum(bits >> bit & 1 for _, _, bits in words))}
    place = _place(sweep, memory, found, words)
    return Evidence(
        wrong=found.count,
        total=memory.count,
        first=tuple(((at,), f"0x{want:016x}", f"0x{want ^ bits:016x}") for at, want, bits in words[:FIRST]),
        bits=histogram,
        zeroed=sum(want == bits for _, want, bits in words),
        nonfinite=0,
        lines={},
        pattern=_sentence(place, histogram),
        memory=place,
    )


def _place(sweep: Sweep, memory: Slice, found: cells.Wrong, words: Sequence[tuple[int, int, int]]) -> WrongMemory:
    offset = words[0][0] * WORD
    own = (memory.first * TILE) * WORD + offset
    at = memory.address + offset
    return WrongMemory(
        cells={cell.value: found.cells[cell] for cell in Cell if found.cells[cell]},
        rose=sum((bits & ~want).bit_count() for _, want, bits in words),
        fell=sum((bits & want).bit_count() for _, want, bits in words),
        allocation=memory.rows * ROW,
        offset=offset,
        address=at,
        physical=pages.physical_address(at) if sweep.ctx.device.backend == "cpu" else None,
        partner=None if found.partner is None else found.partner * WORD - own,
    )


def _sentence(place: WrongMemory, histogram: dict[str, int]) -> str:
    at, where = ("unknown" if a is None else f"{a:#x}" for a in (place.address, place.physical))
    turned = [f"{n} to {bit}" for n, bit in ((place.rose, 1), (place.fell, 0)) if n]
    kinds = ", ".join(f"{n} {cell}" for cell, n in place.cells.items())
    flipped = f"bit{'s' * (len(histogram) > 1)} {', '.join([*histogram][:8])}{'…' * (len(histogram) > 8)}"
    partner = "" if place.partner is None else f"; partner at {place.partner:+#x} bytes"
    return (
        f"first at offset {place.offset:#x} of the allocation (virtual address {at}, physical {where}): "
        f"{flipped} flipped ({', '.join(turned)}); {kinds}{partner}"
    )
