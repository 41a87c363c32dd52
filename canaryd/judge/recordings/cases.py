"""Split the stable names of recorded cases: "chat/reef/fresh" is a kind, a question and how it was asked."""

from __future__ import annotations

_CACHE_STATES = ("fresh", "warm")
"""Last parts of cases that ask one question with an empty and with a filled prefix cache."""


def kind_of(case: str) -> str:
    """Return the kind of a case: "chat" of "chat/reef/fresh"."""
    return case.partition("/")[0]


def is_templated(case: str) -> bool:
    """Whether a chat template may be part of the case: a continuation and a scored prompt go without."""
    return kind_of(case) not in ("completions", "forced")


def same_question(case: str) -> tuple[str, ...]:
    """Return the cases that ask the same question, with an empty or a filled cache; this one is among them."""
    question, _, state = case.rpartition("/")
    return tuple(f"{question}/{other}" for other in _CACHE_STATES) if state in _CACHE_STATES else (case,)


def is_within(case: str, path: str) -> bool:
    """Whether a case is the one at `path` or below it, as "chat/reef/fresh" is below "chat/reef"."""
    return f"{case}/".startswith(f"{path}/")
