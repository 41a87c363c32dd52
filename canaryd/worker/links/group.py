"""A group of processes, one for each device or core, that send data to each other and test their links.

The processes belong to the worker's process group, so a signal that kills the worker kills them too. A process also
ends when the worker closes the pipe to its standard input. They connect through a store that listens on the loopback
address only.
"""

from __future__ import annotations

import itertools
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.facts import SPEEDS, TRIALS, Comparison, Culprit, Evidence, Exactness, Place, Reading
from canaryd.free_memory import available
from canaryd.model import Device
from canaryd.probe import Context, Fact, NoCase, Skip
from canaryd.worker.links.member import LIBRARIES
from canaryd.worker.links.patterns import PATTERNS, WORD
from canaryd.worker.links.transfers import AGAIN, traced
from canaryd.worker.numeric.cases import selects
from canaryd.worker.numeric.characterised import is_settled
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.numeric.tensors import can_pin, torch, visible_cores
from canaryd.worker.visible import environment_of

START = 100.0
"""Seconds for all members together to import torch and to connect (ours): a slow import takes 12."""
MEMBER = {True: 288 << 20, False: 800 << 20}
"""Whether a member computes on the CPU → bytes of host memory that it takes. torch 2.13 alone: 278 MiB, measured; with
`engine.room.CONTEXT` for a vendor's runtime."""
STEP = 30.0
"""Seconds after which the members abandon a step. The worker waits twice as long per step before it gives up."""
CORES = 4
"""Number of a processor's cores that send data to each other: 4 cores, spread over all cores, have 12 links."""
ENTRY = Path(__file__).resolve().parents[1] / "__main__.py"

Step = tuple[Any, ...]
"""One step of the members: the name of a method of `member.Member`, then its arguments."""


@dataclass(frozen=True)
class End:
    """A device or a core that sends and receives."""

    name: str
    number: int
    """Number of this end in a `Place`: the device's number in the group, or the core's number."""
    device: Device
    core: int | None = None


def ends_of(ctx: Context) -> list[End]:
    """Return the group's devices as ends, or `CORES` cores of a processor; raise `Skip` for a single accelerator."""
    if ctx.device.unit != "cpu":
        devices = (ctx.device, *ctx.peers)
        if len(devices) < 2:
            raise Skip("there is no second device of this backend, so there is no link between devices")
        return [End(d.name, n, d) for n, d in enumerate(devices)]
    cores = visible_cores()
    if len(cores) < 2 or not can_pin():
        return [End(f"process {n}", n, ctx.device) for n in range(2)]
    count = min(CORES, len(cores))
    chosen = [cores[n * (len(cores) - 1) // (count - 1)] for n in range(count)]
    return [End(f"core {core}", core, ctx.device, core) for core in chosen]


def need_memory(ends: Sequence[End]) -> None:
    """Raise `Skip` where the members would need more memory than the host or the container has left."""
    need = sum(MEMBER[end.device.unit == "cpu"] for end in ends)
    if (free := available()) is not None and free < need:
        raise Skip(f"{len(ends)} processes need {need >> 20:,} MiB of memory, and {free >> 20:,} MiB are available")


def need_library(backend: str) -> None:
    """Raise `Skip` where this torch has no library for sending between devices of this backend."""
    library = LIBRARIES[backend]
    if not (torch.distributed.is_available() and torch.distributed.is_backend_available(library)):
        raise Skip(f"this torch has no {library}, by which devices send to each other")


class Group:
    """The member processes; leaving this context manager ends them."""

    def __init__(self, ends: Sequence[End], seed: int, words: int, wrong_link: tuple[int, int] | None) -> None:
        """Start one process per end; `wrong_link`: (sender, receiver) ranks of the link with the injected fault."""
        self.ends = ends
        self._answers: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        limit = timedelta(seconds=START)
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._members: list[subprocess.Popen[str]] = []
        for rank, end in enumerate(ends):
            who = {
                "rank": rank, "size": len(ends), "port": port, "seed": seed, "words": words, "limit": STEP,
                "device": to_json(end.device), "core": end.core, "wrong_link": wrong_link,
            }  # fmt: skip
            member = subprocess.Popen(
                [sys.executable, str(ENTRY), "--member"],
                env={**environment_of(end.device), **LOOPBACK},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._members.append(member)
            threading.Thread(target=self._listen, args=(rank, member), daemon=True).start()
            self._tell(rank, who)

    def __enter__(self) -> Group:  # noqa: PYI034 - typing.Self came with Python 3.11
        try:
            self._collect("ready", START)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.wait()
            for pipe in (member.stdin, member.stdout):
                if pipe is not None:
                    pipe.close()

    def _listen(self, rank: int, member: subprocess.Popen[str]) -> None:
        assert member.stdout is not None
        try:
            for line in member.stdout:
                self._answers.put((rank, json.loads(line)))
        except ValueError:  # closed by `__exit__`
            return
        self._answers.put((rank, None))

    def _tell(self, rank: int, what: Any) -> None:
        pipe = self._members[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps(what) + "\n")
        pipe.flush()

    def _collect(self, last: str, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        """Return (rank, answer) for all answers of all members, until each member has sent one with the key `last`.

        Answers with this key are not returned. Raises `RuntimeError` if a member fails or ends, or if the answers take
        longer than `seconds`.
        """
        waiting, found = set(range(len(self.ends))), []
        deadline = time.monotonic() + seconds
        while waiting:
            try:
                rank, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                names = ", ".join(self.ends[rank].name for rank in sorted(waiting))
                raise RuntimeError(f"no answer from {names} within {seconds:g} s: a link or a device hangs") from None
            name = self.ends[rank].name
            if answer is None:
                raise RuntimeError(f"the process of {name} ended with status {self._members[rank].wait()}")
            if "error" in answer:
                raise RuntimeError(f"{name}: {answer['error']}")
            if last in answer:
                waiting.discard(rank)
            else:
                found.append((rank, answer))
        return found

    def do(self, steps: Sequence[Step]) -> list[dict[int, dict[str, Any]]]:
        """Make all members do the steps; return one dictionary per step: rank of a member → the member's answer."""
        for rank in range(len(self.ends)):
            self._tell(rank, steps)
        found: list[dict[int, dict[str, Any]]] = [{} for _ in steps]
        for rank, answer in self._collect("done", 2 * STEP * len(steps)):
            found[answer.pop("step")][rank] = answer
        return found


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make the libraries connect over the loopback interface."""


@dataclass
class _Found:
    """The collected results of one run."""

    ctx: Context
    ends: Sequence[End]
    words: int
    trials: int = 0
    right: dict[tuple[str, Place], int] = field(default_factory=dict)
    """Case and place (the link or the member) → number of right results."""
    wrong: list[Comparison] = field(default_factory=list)
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    """(rank of the sender, rank of the receiver) → seconds of the fastest transfer."""

    def take(self, step: Step, answers: dict[int, dict[str, Any]]) -> None:
        """Count the results of one step from the members' answers."""
        for rank, answer in answers.items():
            if "evidence" not in answer:
                continue
            link = self._link(step, rank)
            if "seconds" in answer:
                key = (step[2], step[3])
                self.seconds[key] = min(answer["seconds"], self.seconds.get(key, answer["seconds"]))
            self.trials += 1
            if answer["evidence"] is None:
                key = (case_of(step), link)
                self.right[key] = self.right.get(key, 0) + 1
                continue
            seen = from_json(Evidence, answer["evidence"])
            source = answers.get(step[2], {}) if step[0] == "send" else {}
            if not source.get("source_held", True) and seen.transfer:
                seen = traced(replace(seen, pattern=seen.pattern.partition(": ")[2]), seen.transfer.way, Culprit.SOURCE)
            self.wrong.append(self._comparison(case_of(step), link, wrong_trials=1, evidence=seen))

    def _link(self, step: Step, rank: int) -> Place:
        """Return the place that a step tests: the ends of its link, or the member `rank` if the step has no link."""
        ranks = step[2:4] if step[0] == "send" else (rank,)
        return Place(unit="link", numbers=tuple(self.ends[r].number for r in ranks))

    def comparisons(self) -> Iterator[Comparison]:
        """Yield the comparisons with wrong results, then those with right ones.

        A wrong result of an operation of all members does not show which link is wrong. If transfers also found wrong
        links, the result counts against one of them at the member with this result. If that member has none, the result
        is left out.
        """
        links = {c.place for c in self.wrong if len(c.place.numbers) == 2}
        for c in self.wrong:
            if len(c.place.numbers) == 2 or not links:
                yield c
                continue
            mine = sorted((link for link in links if c.place.numbers[0] in link.numbers), key=lambda p: p.numbers)
            yield from (replace(c, place=link) for link in mine[:1])
        for (case, place), trials in self.right.items():
            yield self._comparison(case, place, trials=trials, uploads=trials)

    def _comparison(self, case: str, place: Place, **more: Any) -> Comparison:
        return Comparison(
            case=f"{case}@{self.words}",
            shape=f"words={self.words}",
            seed=self.ctx.seed,
            exactness=Exactness.UNIVERSAL,
            place=place,
            characterised=is_settled(self.ctx.device),
            **more,
        )


def case_of(step: Step) -> str:
    """Return the name of the case of a step."""
    if step[0] == "reduce":
        return f"{step[2]}/{step[1]}/all-reduce"
    return f"int64/{step[1]}/{'send' if step[0] == 'send' else 'all-gather'}"


def steps_of(count: int, formats: Sequence[str]) -> list[Step]:
    """Return the steps of a round of `count` members: every pattern over every link, then operations of all members."""
    pairs = list(itertools.permutations(range(count), 2))
    alone: list[Step] = [("send", name, *pair) for name in PATTERNS for pair in pairs]  # first: they name the link
    together: list[Step] = [("gather", name) for name in PATTERNS]
    return [*alone, *together, *(("reduce", "random", kind) for kind in formats)]


def send_around(ctx: Context, words: int, formats: Sequence[str]) -> Iterator[Fact]:
    """Let all ends send to each other in rounds until the time is over, at least once; yield every fact of the run.

    `words`: words of 64 bits in each transfer; `formats`: number formats of the sums. Raises `Skip` if there are not
    two ends, or if this torch has no library for them. Raises `NoCase` if no case has a requested name, and
    `RuntimeError` if a member fails or hangs.
    """
    need_library(ctx.device.backend)
    ends = ends_of(ctx)
    every = steps_of(len(ends), formats)
    wanted = [case.partition("@")[0] for case in ctx.cases]  # whatever size they had
    steps = [s for s in every if not wanted or any(selects(w, case_of(s)) for w in wanted)]
    if not steps:
        raise NoCase(ctx.cases, dict.fromkeys(map(case_of, every)))
    pairs = list(itertools.permutations(range(len(ends)), 2))
    struck = pairs[mix64(ctx.seed) % len(pairs)] if ctx.drill else None
    found = _Found(ctx, ends, words)
    need_memory(ends)
    with Group(ends, ctx.seed, words, struck) as group:
        until = ctx.clock() + ctx.budget  # the start of the processes is no work
        while True:
            ctx.progress(0.5, f"{len(ends)} ends, {len(steps)} steps")
            for step, answers in zip(steps, group.do(steps), strict=True):
                found.take(step, answers)
            if found.wrong or ctx.clock() >= until:
                break
        found.wrong = list(_repeated(group, found, steps))
    yield from found.comparisons()
    yield Reading(name=TRIALS, value=found.trials, unit="1")
    yield Reading(name="links", value=len(pairs), unit="1")
    yield from _speeds(found)


def _repeated(group: Group, found: _Found, steps: Sequence[Step]) -> Iterator[Comparison]:
    """Yield a comparison for each wrong result; the first `AGAIN` of them include how many repetitions were wrong."""
    for c in found.wrong[:AGAIN]:
        assert c.evidence is not None
        numbers = [end.number for end in found.ends]
        ranks = tuple(numbers.index(n) for n in c.place.numbers)
        mine = [s for s in steps if f"{case_of(s)}@{found.words}" == c.case and (len(ranks) == 1 or s[2:] == ranks)]
        seen = [answers[ranks[-1]] for answers in group.do(mine * AGAIN)]
        wrong = sum(answer["evidence"] is not None for answer in seen)
        yield replace(c, evidence=replace(c.evidence, repeats=len(seen), repeats_wrong=wrong))
    yield from found.wrong[AGAIN:]


def _speeds(found: _Found) -> Iterator[Reading]:
    """Yield the speed of every link, from its fastest transfer. Only speeds between devices are followed over time."""
    name = "core_link_speed" if found.ctx.device.unit == "cpu" else f"{SPEEDS}between"
    for (sender, receiver), seconds in sorted(found.seconds.items()):
        labels = {"from": found.ends[sender].name, "to": found.ends[receiver].name}
        yield Reading(name=name, value=found.words * WORD / seconds, unit="bytes per second", labels=labels)
