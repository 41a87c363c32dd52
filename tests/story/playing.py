"""Play a story, and hold what the judge said against what the story expects."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canaryd.judge.incidents import incidents
from canaryd.model import Finding, State, Verdict
from tests.story.format import Expectation, Story, listed
from tests.story.host import Host


@dataclass
class Played:
    """What the judge said at the end of every round."""

    story: Story
    verdicts: dict[str, list[Verdict | None]]
    """Device → verdict by round; None while the device is not spoken of."""
    drills: dict[str, list[Verdict]]

    def failures(self) -> list[str]:
        """Return what was expected by the newest round and did not come, one sentence each."""
        every = [*self.verdicts]
        newest = max(map(len, self.verdicts.values()), default=self.story.rounds) - 1
        found = []
        for expected in self.story.expect:
            if newest < expected.due(self.story.rounds - 1):
                continue
            for name in listed(expected.device, every):
                found += [f"{name}: {text}" for text in self._against(expected, name)]
        return found

    def _against(self, expected: Expectation, name: str) -> Iterator[str]:
        told: Sequence[Verdict | None] = self.drills.get(name, []) if expected.drill else self.verdicts.get(name, [])
        if not told:
            yield "no verdict was given"
            return
        window = list(enumerate(told))[0 if expected.drill else expected.after :]
        for number, verdict in window:
            if verdict is None:
                continue
            where = f"at the end of round {number} it was {summary(verdict)}"
            if expected.always_below and verdict.state.severity >= State(expected.always_below).severity:
                yield f"wanted always below {expected.always_below}; {where}"
                break
            if expected.never and verdict.state is not State.HEALTHY and verdict.cause.value == expected.never:
                yield f"wanted never {expected.never}; {where}"
                break
            if expected.never_rule and any(f.rule == expected.never_rule for f in verdict.findings):
                yield f"wanted never {expected.never_rule}; {where}"
                break
        if expected.gone and (last := told[-1 if expected.at is None else expected.at]) is not None:
            yield f"wanted it to be gone; it was {summary(last)}"
        if not expected.wants_a_verdict:
            return
        if expected.by is not None:
            if not any(self._fits(expected, v) for n, v in window if n <= expected.by):
                last = told[min(expected.by, len(told) - 1)]
                yield f"wanted {_wish(expected)} by round {expected.by}; then it was {summary(last)}"
            return
        number = len(told) - 1 if expected.at is None else expected.at
        if not self._fits(expected, told[number]):
            yield f"wanted {_wish(expected)} at the end of round {number}; it was {summary(told[number])}"

    def _fits(self, expected: Expectation, verdict: Verdict | None) -> bool:
        return (
            verdict is not None
            and expected.state in ("", verdict.state.value)
            and expected.cause in ("", verdict.cause.value)
            and expected.incidents in (None, len(incidents(verdict)))
            and expected.subject in ("", *(i.blaming.subject for i in incidents(verdict)[:1]))
            and expected.reach in ((), *(i.blaming.reach for i in incidents(verdict)[:1]))
            and {*expected.rules} <= {f.rule for f in verdict.findings}
            and (not expected.says or any(expected.says in text for f in verdict.findings for text in words(f)))
        )


def _wish(expected: Expectation) -> str:
    words = [expected.state, expected.cause, *expected.rules, f'"{expected.says}"' if expected.says else ""]
    words += [expected.subject, *expected.reach]
    words.append("" if expected.incidents is None else f"{expected.incidents} incidents")
    return " ".join(filter(None, words))


def summary(verdict: Verdict | None) -> str:
    """Return a verdict in a few words."""
    if verdict is None:
        return "not spoken of"
    rules = ", ".join(dict.fromkeys(f.rule for f in verdict.findings)) or "nothing found"
    return f"{verdict.state.value} {verdict.cause.value} ({rules})"


def words(finding: Finding) -> tuple[str, ...]:
    """Return every sentence of a finding."""
    return finding.message, finding.action, *finding.evidence


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for the stores, in memory where there is such a place: thousands of commits wait for no disk."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="canaryd-story-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def play(
    story: Story,
    *,
    seed: int | None = None,
    watch: Callable[[int, Mapping[str, Verdict]], bool] = lambda _number, _verdicts: False,
    until_failed: bool = False,
    begin: Callable[[Sequence[Host]], None] = lambda _hosts: None,
    end: Callable[[Sequence[Host]], None] = lambda _hosts: None,
) -> Played:
    """Play a story from beginning to end; `watch` is told every round's verdicts, and ends it by returning True.

    With `until_failed` it also ends when something that was expected did not come. `begin` and `end` are given the
    hosts before the first round and after the last.
    """
    with scratch() as directory, contextlib.ExitStack() as open_:
        hosts = []
        for number in range(len(story.hosts)):
            host = Host(story, number, directory, story.seed if seed is None else seed)
            open_.callback(host.close)
            hosts.append(host)
        for host in hosts:
            host.others = [other for other in hosts if other is not host]
        begin(hosts)
        verdicts: dict[str, list[Verdict | None]] = {}
        drills: dict[str, list[Verdict]] = {}
        for number in range(story.rounds):
            now: dict[str, Verdict] = {}
            for host in hosts:
                now.update(host.play(number))
                for what in story.events:
                    if what.do == "drill" and what.at == number:
                        rehearsed = host.engine.decisions.rehearse(host.engine.store.drilled(host.now))
                        for chip in host.of(what.device):
                            told_of = [rehearsed[chip.uuid]] if chip.uuid in rehearsed else []  # its runs may be late
                            drills.setdefault(chip.name, []).extend(told_of)
            for name in {*verdicts, *now}:
                told = verdicts.setdefault(name, [None] * number)
                told.append(now.get(name))
            played = Played(story=story, verdicts=verdicts, drills=drills)
            if watch(number, now) or (until_failed and played.failures()):
                break
        end(hosts)
    return played
