"""The course of a story as a user sees it: one line whenever state, cause or the number of incidents changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from canaryd.judge.incidents import incidents
from canaryd.model import Verdict
from tests.story.format import STORIES, load
from tests.story.playing import Played, play

COURSES = Path(__file__).parent / "stories"
FILES = sorted(STORIES.glob("*.yaml"))


def course(played: Played) -> str:
    """Return the course of a story: round, hour, device, state, cause and number of incidents, a line per change."""
    lines = [line for name, told in sorted(played.verdicts.items()) for line in _changes(name, told)]
    hours = played.story.seconds / 3600
    return "".join(f"{n:5} {n * hours:9.2f} h  {name:14} {said}\n" for n, name, said in sorted(lines))


def _changes(name: str, told: list[Verdict | None]) -> Iterator[tuple[int, str, str]]:
    before = None
    for number, verdict in enumerate(told):
        said = "not spoken of"
        if verdict is not None:
            said = f"{verdict.state.value:9} {verdict.cause.value:13} {len(incidents(verdict))}"
        if said != before:
            yield number, name, said
        before = said


def written(path: Path) -> str:
    """Return the course that is promised for a story; "" where none is."""
    promised = COURSES / f"{path.stem}.txt"
    return promised.read_text() if promised.exists() else ""


def played(path: Path) -> str:
    """Return the course that a story takes now."""
    return course(play(load(path)))
