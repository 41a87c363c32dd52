"""Ask the cases of an endpoint canary, one at a time or several at once, and turn the answers into facts."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from canaryd.facts import ENDPOINT_REPEATS, ENDPOINT_SERVER, ENDPOINT_STARTED, reading_key
from canaryd.files import keep, recall
from canaryd.probe import Absent, Context, Fact, Reading, Skip, Skipped
from canaryd.worker.endpoint.answers import Answer
from canaryd.worker.endpoint.canary import Endpoint, new_salt, wanted
from canaryd.worker.endpoint.client import Refused
from canaryd.worker.endpoint.dialects import GENERIC, digest
from canaryd.worker.endpoint.prompts import Prompt

MOST_POSITIONS = 100_000
"""Maximum number of tokens that one run records: about 5 MB of messages (ours). The shipped prompts of a baseline
have 20,000."""
BLIND = "the server gives no logprobs: only the text is compared, so other faults are not seen"
UNKNOWN = "canaryd does not know this server: it compares the answers, and cannot see version, configuration or load"
Item = tuple[str, Prompt]
"""One thing to ask: (API, prompt)."""


def names(item: Item) -> tuple[str, ...]:
    """Return the names of the cases that get an item's answers: "fresh" and "warm"."""
    api, prompt = item
    return tuple(f"{api}/{prompt.name}/{mode}" for mode in ("fresh", "warm"))


class Recorder:
    """Asks items, yields the answers as facts, and keeps the answers for the readings."""

    def __init__(self, ctx: Context, endpoint: Endpoint) -> None:
        self.ctx, self.endpoint = ctx, endpoint
        self.recorded = 0
        self._positions = 0
        self.nonfinite = 0
        self.answers: dict[Item, Answer] = {}
        """Newest answer of each item."""
        self.refused: dict[Item, str] = {}
        """Items that the server declines, with the reason; they are not asked again."""
        self.strained = ""
        """Why nothing further is asked: what failed after the first recordings; "" for nothing."""

    @property
    def spent(self) -> bool:
        """Whether the run must end, because its time is spent or because it has recorded `MOST_POSITIONS` tokens."""
        return self.ctx.left <= 0 or self._positions >= MOST_POSITIONS

    def alone(self, item: Item) -> Iterator[Fact]:
        """Ask one item while canaryd sends no other request; yield its answers, or reasons of a refusal, as facts."""
        if item in self.refused:
            return
        before = self.endpoint.running()
        try:
            answers = self._exchange(item)
        except Refused as refused:
            self.refused[item] = str(refused)
            yield from (Skipped(case=name, reason=str(refused)) for name in names(item) if wanted(self.ctx, name))
            return
        after = self.endpoint.running()
        known = before is not None and after is not None
        yield from self._facts(item, answers, "" if not known else "loaded" if before or after else "idle")

    def together(self, items: Sequence[Item]) -> Generator[Fact, None, list[Item]]:
        """Ask several items at the same time; yield the answers as facts, and return the items that failed.

        `strained` has the reason of a failure. Load is its cause: the server answered these items when they were asked
        alone.
        """
        with ThreadPoolExecutor(len(items)) as pool:
            asked = [(item, pool.submit(self._exchange, item)) for item in items]
        failed = []
        for item, future in asked:
            try:
                answers = future.result()
            except Skip as error:
                failed.append(item)
                self.strained = f"the server did not answer {len(items)} requests at once: {error}"
            else:
                yield from self._facts(item, answers, "loaded")
        return failed

    def latencies(self, api: str) -> Iterator[Fact]:
        """Yield two readings, the seconds to the first token and per further token, or the reason for their absence."""
        labels = {"api": api}
        why = self.strained  # a failure under load may last and would distort the measurement
        if not why:
            try:
                first, between = self.endpoint.latency(api)
            except Skip as error:
                why = self.strained = str(error)
        if why:
            for name in ("endpoint_first_token_seconds", "endpoint_token_seconds"):
                yield Absent(name=reading_key(name, labels), reason=why)
            return
        yield Reading(name="endpoint_first_token_seconds", value=first, unit="seconds", labels=labels)
        if between is None:
            reason = "the answer ended before all tokens came"
            yield Absent(name=reading_key("endpoint_token_seconds", labels), reason=reason)
        else:
            yield Reading(name="endpoint_token_seconds", value=between, unit="seconds", labels=labels)

    def readings(self) -> Iterator[Fact]:
        """Yield readings of the server and of its answers, or the reasons for their absence."""
        endpoint = self.endpoint
        yield Reading(name="switches", value=endpoint.switches())
        if endpoint.dialect is GENERIC:
            yield Absent(name=ENDPOINT_SERVER, reason=UNKNOWN)
        if endpoint.started is None:
            reason = f"the server ({endpoint.dialect.name}) does not report when it started"
            yield Absent(name=ENDPOINT_STARTED, reason=reason)
        else:
            yield Reading(name=ENDPOINT_STARTED, value=endpoint.started, unit="seconds")
        if endpoint.repeats:
            yield Reading(name=ENDPOINT_REPEATS, value=endpoint.repeats)
        for (api, prompt), answer in self.answers.items():
            if answer.prompt_tokens is not None:
                labels = {"api": api, "prompt": prompt.name}
                yield Reading(name="endpoint_prompt_tokens", value=answer.prompt_tokens, unit="1", labels=labels)
        scored = {api for (api, _), answer in self.answers.items() if answer.scored}
        for api in dict.fromkeys(api for api, _ in self.answers):
            if api not in scored:
                yield Absent(name=f"endpoint_logprobs{{api={api}}}", reason=BLIND)
        if scored:
            yield Reading(name="endpoint_nonfinite", value=self.nonfinite, unit="1")
        else:
            yield Absent(name="endpoint_nonfinite", reason=BLIND)

    def _exchange(self, item: Item) -> list[Answer]:
        """Return an item's answers: one that bypasses the prefix cache, and one from a warm cache."""
        api, prompt = item
        salt = new_salt()
        answers = [self.endpoint.ask(api, prompt, fresh=fresh, salt=salt) for fresh in (True, False)]
        self.endpoint.refuse_replays(api, prompt, salt, answers)
        return answers

    def _facts(self, item: Item, answers: list[Answer], condition: str) -> Iterator[Fact]:
        self.answers[item] = answers[0]
        for name, given in zip(names(item), answers, strict=True):
            if wanted(self.ctx, name):
                answer = injected(given, self.ctx.drill) if self.ctx.drill else given
                self.recorded += 1
                self._positions += len(answer.positions)
                self.nonfinite += answer.nonfinite
                yield self.endpoint.recording(name, *item, answer, condition)


class Progress:
    """The stored number of rounds that an interrupted run has done to learn a baseline; the file outlives the worker.

    A later run continues from there if the endpoint reports the same version and configuration. If the file cannot be
    read or written, a run starts again, which only costs time.
    """

    def __init__(self, memory: str, endpoint: Endpoint) -> None:
        settings = endpoint.settings
        self._kept = memory, f"baselining-{digest([settings.url, endpoint.model])}"
        self._about = digest([endpoint.version, endpoint.configuration, endpoint.links])

    def rounds(self) -> int:
        """Return the number of rounds that an interrupted run has done, or 0 if no run was interrupted."""
        try:
            about, rounds = recall(*self._kept)
        except (ValueError, TypeError):
            return 0
        return rounds if about == self._about and isinstance(rounds, int) and rounds > 0 else 0

    def keep(self, rounds: int) -> None:
        """Store the number of rounds that a run has done when it ends early; 0 removes the stored number."""
        keep(*self._kept, [self._about, rounds] if rounds else None)


def injected(answer: Answer, fault: str) -> Answer:
    """Return the answer with a wrong bit in one log probability, or in its text if nothing was scored, for a drill.

    It is the same bit of the same position whatever the fault's name, because a retest must meet the same fault again.
    The text names the fault.
    """
    at = [i for i, position in enumerate(answer.positions) if position.value is not None]
    if not at:
        place = len(answer.text) // 2
        return replace(answer, text=f"{answer.text[:place]}[drill: {fault}]{answer.text[place:]}")
    middle = at[len(at) // 2]
    positions = list(answer.positions)
    (raw,) = struct.unpack("<I", struct.pack("<f", positions[middle].value))
    positions[middle] = replace(positions[middle], value=struct.unpack("<f", struct.pack("<I", raw ^ 1))[0])
    return replace(answer, positions=tuple(positions), text=f"[drill: {fault} at position {middle}] {answer.text}")
