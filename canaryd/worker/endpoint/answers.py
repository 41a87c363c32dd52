"""A server's answer in one form for every dialect: tokens, log probabilities, text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.facts import printable
from canaryd.probe import Skip
from canaryd.worker.endpoint.client import first_choice
from canaryd.worker.endpoint.dialects import TOP, Dialect, digest, text_of

MINUS_INFINITY = -9999.0
"""The value that servers write for a log probability of minus infinity; llama-server writes the lowest float32."""
LONGEST_TOKEN = 256
"""Maximum number of characters of a token (ours); the longest of OpenAI's and Qwen's vocabularies have 128."""
ENDED = ("abort", "cancelled", "error", "timeout")
"""Finish reasons with which a server says that it broke the answer off itself. vLLM, SGLang and TensorRT-LLM send them,
for example when they pause, sleep or stop. Such an answer has HTTP status 200."""
MOST_ALTERNATIVES = 50
"""Maximum number of alternative tokens at one position of an answer: ten times as many as requested (ours)."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """One token of an answer, as the server sent it."""

    token: str
    """The token's id as text if the server gives ids, otherwise its text."""
    value: float | None = None
    """Natural logarithm of the token's probability, possibly NaN or infinite; None if the server gave none."""
    top: tuple[tuple[str, float | None], ...] = ()
    """The most probable tokens at this position, each with its log probability, in the server's order."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one request, in the same form for every dialect."""

    text: str
    finish: str = ""
    positions: tuple[Position, ...] = ()
    scored: bool = False
    """Whether the server gave log probabilities with this answer."""
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    fingerprint: str = ""
    model: str = ""
    """The name of the model that answered, as the server gives it."""
    request: str = ""
    """The id that the server gave this answer; "" if the server gives no ids."""
    sent: str = ""
    """The fields of the request that was answered, as text, without the prompt."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return one token per position."""
        return tuple(position.token for position in self.positions)

    @property
    def values(self) -> tuple[float | None, ...]:
        """Return the log probability per position, None where the server gave none; empty if nothing was scored."""
        return tuple(finite(position.value) for position in self.positions) if self.scored else ()

    @property
    def margins(self) -> tuple[float | None, ...]:
        """Return the best log probability minus the second best, per position; empty if nothing was scored.

        The value is None at a position with fewer alternatives than requested: in some dialects tokens of equal text
        share one entry, so one of the two best may be missing.
        """
        return tuple(_margin(position.top) for position in self.positions) if self.scored else ()

    @property
    def nonfinite(self) -> int:
        """Return the number of log probabilities, those of alternatives included, that are missing, NaN or infinite."""
        if not self.scored:
            return 0
        return sum(finite(value) is None for p in self.positions for value in (p.value, *(value for _, value in p.top)))

    @property
    def broken_off(self) -> str:
        """Return a clause that says how many tokens came before the server broke off its answer; "" if it did not."""
        if self.finish.lower() not in ENDED:
            return ""
        given = f"after {len(self.positions):,} tokens " if self.positions else ""
        return f'was broken off {given}by the server itself ("{self.finish}"): it stops, sleeps, pauses or fails'

    @property
    def digest(self) -> str:
        """Return 16 hex digits over text, finish reason, tokens and values, whatever the order of alternatives."""
        exact = [
            [p.token, repr(p.value), sorted([token, repr(value)] for token, value in p.top)] for p in self.positions
        ]
        return digest([self.text, self.finish, exact])


def parse(dialect: Dialect, data: Any, *, tokens: int, known: bool = False) -> Answer:
    """Return a server's answer in the common form.

    Raises `Skip` for an unknown shape, for more than `tokens` tokens, and for an answer that the server broke off. A
    broken-off answer is returned if the right values are `known`, because its beginning can be compared.
    """
    choice = first_choice(data)
    try:
        scores = _positions(choice)
        positions = _without_end(scores or (), choice.get("finish_reason"))
        if dialect.greedy_is_best:
            positions = tuple(_best(position) for position in positions)
        ids = (choice.get("token_ids") or ())[: len(positions) if scores else None]
        if ids and len(ids) == len(positions or ids):
            rest = positions or tuple(Position(token="") for _ in ids)
            positions = tuple(
                Position(token=str(_whole(i)), value=p.value, top=p.top) for i, p in zip(ids, rest, strict=True)
            )
        message = choice.get("message") or {}
        usage = data.get("usage") or {}
        answer = Answer(
            text=_text(choice, message),
            finish=_texts(choice.get("finish_reason"))[:LONGEST_TOKEN],
            positions=positions,
            scored=scores is not None,
            prompt_ids=tuple(map(_whole, choice.get("prompt_token_ids") or data.get("prompt_token_ids") or ())),
            prompt_tokens=None if usage.get("prompt_tokens") is None else _whole(usage["prompt_tokens"]),
            fingerprint=text_of(data, "system_fingerprint"),
            model=text_of(data, "model"),
            request=text_of(data, "id"),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration, OverflowError):
        keys = ", ".join(sorted(map(str, data))) if isinstance(data, dict) else type(data).__name__
        keys = printable(keys)[:200]
        raise Skip(f"the answer of this {dialect.name} server has an unknown shape, with the keys {keys}") from None
    if wrong := _too_much(answer, tokens) or ("" if known else answer.broken_off):
        raise Skip(f"the answer of this {dialect.name} server {wrong}")
    return answer


def _too_much(answer: Answer, tokens: int) -> str:
    """Return a clause that says why the answer is longer than `tokens` tokens can be, or "" if it is not."""
    if len(answer.positions) > tokens:
        return f"has {len(answer.positions):,} tokens; at most {tokens:,} were asked for"
    if len(answer.text) > tokens * LONGEST_TOKEN:
        return f"has {len(answer.text):,} characters; at most {tokens:,} tokens were asked for"
    return ""


def _text(choice: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    """Return the answer's text, preceded by the model's reasoning if there is one, because the tokens cover both."""
    if "text" in choice:
        return _texts(choice["text"])
    return _texts(message.get("reasoning_content") or message.get("reasoning")) + _texts(message["content"])


def _positions(choice: Mapping[str, Any]) -> tuple[Position, ...] | None:
    scores = choice.get("logprobs")
    if not scores:
        return None
    if isinstance(scores, list):  # TGI: numbers alone
        return tuple(Position(token="", value=_number(value)) for value in scores)
    if scores.get("content") is not None:
        return tuple(_position(item) for item in scores["content"])
    tokens, values = scores["tokens"], scores["token_logprobs"]
    tops = scores.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        Position(
            token=_named(token), value=_number(value), top=_few((str(k), _number(v)) for k, v in (top or {}).items())
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    )


def _without_end(positions: tuple[Position, ...], finish: Any) -> tuple[Position, ...]:
    """Return the positions without the token that ends a text, which some servers list last, without a value."""
    last = positions[-1] if positions and finish == "stop" else None
    ends = last is not None and not (last.token or last.top) and finite(last.value) is None
    return positions[:-1] if ends else positions


def _position(item: Mapping[str, Any]) -> Position:
    top = _few((_token(entry), _number(entry["logprob"])) for entry in item.get("top_logprobs") or ())
    return Position(token=_token(item), value=_number(item["logprob"]), top=top)


def _best(position: Position) -> Position:
    """Return the position with its most probable alternative as token; of equally probable ones the lowest id."""
    known = [
        (-value, int(token), token) for token, value in position.top if value is not None and finite(value) is not None
    ]
    if not known:
        return position
    value, _, token = min(known)
    return Position(token=token, value=-value, top=position.top)


def _token(entry: Mapping[str, Any]) -> str:
    return str(_whole(entry["id"])) if "id" in entry else _named(entry["token"])


def _named(token: Any) -> str:
    if not isinstance(token, str) or len(token) > LONGEST_TOKEN:
        raise TypeError("not a token")
    return token


def _texts(value: Any) -> str:
    if not isinstance(value, (str, type(None))):
        raise TypeError("not a text")
    return value or ""


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise TypeError("not a count or an id")
    return value


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float, type(None))) or isinstance(value, bool):
        raise TypeError("not a number")
    return None if value is None else float(value)


def _few(top: Iterable[tuple[str, float | None]]) -> tuple[tuple[str, float | None], ...]:
    found = tuple(top)
    if len(found) > MOST_ALTERNATIVES:
        raise ValueError("too many alternatives")
    return found


def finite(value: float | None) -> float | None:
    """Return a log probability, or None for NaN, an infinity, or the value that servers write for minus infinity."""
    return value if value is not None and math.isfinite(value) and value > MINUS_INFINITY else None


def _margin(top: tuple[tuple[str, float | None], ...]) -> float | None:
    known = sorted((value for _, raw in top if (value := finite(raw)) is not None), reverse=True)
    return known[0] - known[1] if len(top) >= TOP and len(known) > 1 else None
