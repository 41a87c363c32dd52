"""Compare an answer of a served exact canary with the one right answer: words, ranks, differences, log probabilities.

The logits are exact, so the words are exact. The differences between candidates' logits are exact too: 8 for each wrong
bit. The engine computes its printed log probabilities with its own log-softmax, in its own format. The printed values
show their precision, and no comparison is more precise.
"""

from __future__ import annotations

import enum
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from canaryd.worker.endpoint.answers import MINUS_INFINITY, Answer, Position, finite
from canaryd.worker.exact_canary.expected import COST, MOST_SAID, RIGHT, Expected, Question, tokens_of

FORMATS = (8, 11, 24)
"""Significand bits of bfloat16, float16 and float32, the formats in which an engine may compute its log-softmax."""
DECIMALS = 7
"""Maximum decimals of a printed number that counts as rounded; a float32 printed in full has more decimals."""


class Sort(enum.Enum):
    """The kind of an error in an answer."""

    WORD = "another word"
    CHOICE = "the right word is the most probable, and another was chosen"
    CHANCE = "another log probability of the right word"
    LEAD = "another difference between the right word and a candidate"


class Fault(NamedTuple):
    """One error in an answer."""

    sort: Sort
    position: int
    wanted: float
    """The right value: a token, a log probability, or a difference of two log probabilities."""
    got: float
    candidate: int | None = None
    """The alternative token whose log probability is wrong; None for other errors, or if the model lacks this token."""

    @property
    def token(self) -> int | None:
        """The wrong token: the generated one, or the alternative whose log probability is wrong; None if unknown."""
        return int(self.got) if self.sort in (Sort.WORD, Sort.CHOICE) else self.candidate


@dataclass(frozen=True, kw_only=True)
class Marked:
    """An answer and its errors up to the first wrong word. After that word the model continues another text."""

    question: Question
    answer: Answer
    tokens: list[int] | None
    """The answer's tokens; None if the text has words that this model does not have."""
    faults: tuple[Fault, ...] = ()
    fine: bool = False
    """Whether a word after the first was right to the last bit of float32, which is impossible if the server rounds."""
    scored: bool = False
    """Whether log probabilities were compared."""

    @property
    def short(self) -> bool:
        """Whether the answer has fewer words than requested."""
        return self.tokens is not None and len(self.tokens) < len(self.question.tokens)

    @property
    def right(self) -> bool:
        """Whether the answer is complete and has no error."""
        return self.tokens is not None and not self.faults and not self.short

    @property
    def look(self) -> object:
        """A value (tokens, errors) that is equal for two answers that are wrong in the same way."""
        return self.tokens, self.faults


class Printing(NamedTuple):
    """The precision with which an engine prints numbers."""

    bits: int
    step: float
    """The value of one unit of the last printed decimal; 0 if the engine does not round to decimals."""

    def unit(self, size: float) -> float:
        """Return the distance between two neighbouring printed numbers at the magnitude `size`."""
        return math.ldexp(1.0, math.frexp(max(abs(size), 2.0**-14))[1] - self.bits) + self.step


def printing(values: Iterable[float]) -> Printing:
    """Return the coarsest precision to which all values can have been rounded."""
    given = list(values)
    for bits in FORMATS:
        if all(_fits(value, bits) for value in given):
            return Printing(bits, 0.0)
    decimals = max(len(text.partition(".")[2]) for text in map(_plain, given))
    return Printing(FORMATS[-1], 10.0**-decimals if decimals <= DECIMALS else 0.0)


def _fits(value: float, bits: int) -> bool:
    return math.ldexp(math.frexp(value)[0], bits).is_integer()


def _plain(value: float) -> str:
    return f"{value:.17f}" if "e" in repr(value) else repr(value)


def mark(expected: Expected, question: Question, answer: Answer) -> Marked:
    """Return an answer with all its errors, found by comparing it with the right answer to `question`."""
    tokens = tokens_of(expected.program, answer.text) if answer.text else _named(expected, answer)
    if tokens is None:
        return Marked(question=question, answer=answer, tokens=None)
    scores = _Scores(expected, answer, len(tokens))
    tokens = tokens[: len(question.tokens)]
    faults: list[Fault] = []
    for at, (wanted, got) in enumerate(zip(question.tokens, tokens, strict=False)):
        seen = scores.faults(at, wanted, question.chances[at])
        faults += seen
        if got != wanted:
            chosen = at in scores.looked and not seen
            faults.append(Fault(Sort.CHOICE if chosen else Sort.WORD, at, wanted, got))
            break
    return Marked(
        question=question,
        answer=answer,
        tokens=tokens,
        faults=tuple(faults),
        fine=scores.fine,
        scored=bool(scores.looked),
    )


def _named(expected: Expected, answer: Answer) -> list[int] | None:
    """Return the numbers of the tokens of an answer that has no text; None if one of the tokens is unknown."""
    found = [_token(expected, position.token) for position in answer.positions]
    return None if any(token is None for token in found) else [token for token in found if token is not None]


def _token(expected: Expected, given: str) -> int | None:
    """Return the number of a token that a server gives as id or as text, or None if the model lacks the token."""
    if given.isdecimal():
        return int(given) if int(given) < expected.shape.vocabulary else None
    found = tokens_of(expected.program, re.sub("[\u2581\u0120]", " ", given))
    return found[0] if found is not None and len(found) == 1 else None


@dataclass
class _Scores:
    """The log probabilities of an answer, compared with the right ones position by position."""

    expected: Expected
    answer: Answer
    words: int
    looked: set[int] = field(default_factory=set)
    fine: bool = False

    def __post_init__(self) -> None:
        """Find the precision with which the engine prints."""
        positions = self.answer.positions if self.answer.scored else ()
        # Where there are more tokens than words, nobody could say which belongs to which.
        self.positions: tuple[Position, ...] = positions if len(positions) == self.words else ()
        if all(p.value == MINUS_INFINITY and not p.top for p in self.positions):
            self.positions = ()  # vLLM writes it where a token has no log probability
        given = [v for p in self.positions for v in (p.value, *(value for _, value in p.top)) if finite(v) is not None]
        self.printing = printing([v for v in given if v is not None]) if given else Printing(FORMATS[-1], 0.0)
        self.neighbours = self.expected.program.place_bits + self.expected.program.value_bits
        # After the choice: the chosen word is certain and nothing else is possible. That says nothing of the logits.
        self.certain = all(
            p.value == 0.0 and all(v is not None and (v == 0.0 or v <= MINUS_INFINITY) for _, v in p.top)
            for p in self.positions
        )

    def faults(self, at: int, wanted: int, chance: float) -> list[Fault]:
        """Return the errors at position `at`, where `wanted` is right with the log probability `chance`."""
        if at >= len(self.positions) or self.certain:
            return []
        position = self.positions[at]
        candidates = {_token(self.expected, token): value for token, value in position.top if finite(value) is not None}
        impossible = sum(finite(value) is None for _, value in position.top)
        own = candidates.get(wanted)
        if own is None and _token(self.expected, position.token) == wanted:
            own = position.value
        if own is None and not candidates:
            return []  # only the chosen word has a value, and it is another word
        self.looked.add(at)
        if own is None or finite(own) is None:
            return [Fault(Sort.CHANCE, at, chance, -math.inf if own is None else own)]
        found = []
        if abs(own - chance) > self._slack():
            found.append(Fault(Sort.CHANCE, at, chance, own))
        others = [(value, token) for token, value in candidates.items() if token != wanted and value is not None]
        for rank, (value, token) in enumerate(sorted(others, key=lambda other: -other[0])):
            found += self._compared(at, wanted, own, token, value, rank)
        found += [Fault(Sort.LEAD, at, COST, math.inf)] * impossible
        # The first word comes from the prompt's own keys and values: a cache that rounds shows from the second on.
        in_full = at > 0 and len(candidates) > 1 and self.printing.bits == FORMATS[-1]
        self.fine = self.fine or (in_full and not found)
        return found

    def _compared(self, at: int, wanted: int, own: float, token: int | None, value: float, rank: int) -> list[Fault]:
        """Return the errors of the alternative `token`, which has the log probability `value` and this `rank`.

        `own` is the log probability of the right word, `wanted`. A rank is wrong if only a nearer word can have it.
        """
        cost = None if token is None else self.expected.cost(wanted, token)
        lead = own - value
        tolerance = self.printing.unit(own) + self.printing.unit(value)
        # Servers add the chosen word where it is not among the best.
        near = rank < self.neighbours and _token(self.expected, self.answer.positions[at].token) != token
        if cost is None:
            far = not near and lead >= RIGHT - MOST_SAID - tolerance
            return [] if far else [Fault(Sort.LEAD, at, COST, lead, token)]
        right = abs(lead - cost) <= tolerance and (cost == COST or not near)
        return [] if right else [Fault(Sort.LEAD, at, cost, lead, token)]

    def _slack(self) -> float:
        """Return the largest allowed error of the right word's log probability.

        It is the sum of two terms: one unit of the printed format at the size of the logits, because the logarithm of
        the sum is subtracted there; and half a unit of float32 for each addition to a sum below 2.
        """
        return self.printing.unit(RIGHT) + self.expected.shape.vocabulary * 2.0**-24


def hexadecimal(fault: Fault) -> tuple[str, str]:
    """Return (right value, actual value) of an error in hexadecimal digits: token numbers, or the bits of float64."""
    if fault.sort in (Sort.WORD, Sort.CHOICE):
        return f"{int(fault.wanted):x}", f"{int(fault.got):x}"
    return struct.pack(">d", fault.wanted).hex(), struct.pack(">d", fault.got).hex()
