"""A server's answer in one form, whatever its dialect: tokens, log probabilities, text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.facts import printable
from canaryd.probe import Skip
from canaryd.worker.endpoint.client import first_choice
from canaryd.worker.endpoint.dialects import TOP, Dialect, digest, text_of

MINUS_INFINITY = -9999.0
"""Servers write this for a log probability of minus infinity; llama-server writes the lowest float32."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """One token of an answer, as the server sent it."""

    token: str
    """Its id as text where the server gives ids, else its text."""
    value: float | None = None
    """Natural logarithm of its probability; may be NaN or infinite."""
    top: tuple[tuple[str, float | None], ...] = ()
    """The most probable tokens with theirs, in the server's order."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one request, in the same form for every dialect."""

    text: str
    finish: str = ""
    positions: tuple[Position, ...] = ()
    scored: bool = False
    """Whether the server gave log probabilities."""
    forced: bool = False
    """True: these are the tokens of the prompt, of which the first has no probability."""
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    fingerprint: str = ""
    sent: str = ""
    """The fields of the request, as text."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return one token per position."""
        return tuple(position.token for position in self.positions)

    @property
    def values(self) -> tuple[float | None, ...]:
        """Return the log probability per position, None where it is none; empty where nothing was scored."""
        return tuple(_finite(position.value) for position in self.positions) if self.scored else ()

    @property
    def margins(self) -> tuple[float | None, ...]:
        """Return the best log probability minus the second best, per position; empty where nothing was scored.

        None with fewer alternatives than requested: in some dialects tokens of equal text collide, so one of the two
        best may be missing.
        """
        return tuple(_margin(position.top) for position in self.positions) if self.scored else ()

    @property
    def nonfinite(self) -> int:
        """Return how many log probabilities, alternatives included, are missing, NaN, infinite or the sentinel."""
        if not self.scored:
            return 0
        kept = self.positions[1:] if self.forced else self.positions
        return sum(_finite(value) is None for p in kept for value in (p.value, *(value for _, value in p.top)))

    @property
    def digest(self) -> str:
        """Return 16 hex digits over text, end, tokens and all values; the order of alternatives does not count."""
        exact = [
            [p.token, repr(p.value), sorted([token, repr(value)] for token, value in p.top)] for p in self.positions
        ]
        return digest([self.text, self.finish, exact])


def parse(dialect: Dialect, data: Any, *, forced: bool = False) -> Answer:
    """Parse a server's answer; raise `Skip` for an unknown shape.

    Three shapes of log probabilities (docs/canaries.md): the legacy one of parallel lists, the chat one of a list of
    objects, with or without ids, and the mapping of ids that scores a prompt.
    """
    choice = first_choice(data)
    try:
        scores = (
            _prompt_positions(choice, data) if forced and "prompt_logprobs" in dialect.forced else _positions(choice)
        )
        positions = scores or ()
        if dialect.greedy_is_best:
            positions = tuple(_best(position) for position in positions)
        ids = choice.get("token_ids") or ()
        if not forced and ids and len(ids) == len(positions or ids):
            rest = positions or tuple(Position(token="") for _ in ids)
            positions = tuple(Position(token=str(i), value=p.value, top=p.top) for i, p in zip(ids, rest, strict=True))
        message = choice.get("message") or {}
        usage = data.get("usage") or {}
        return Answer(
            text=_text(choice, message),
            finish=str(choice.get("finish_reason") or ""),
            positions=positions,
            scored=scores is not None,
            forced=forced,
            prompt_ids=tuple(choice.get("prompt_token_ids") or data.get("prompt_token_ids") or ()),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            fingerprint=text_of(data, "system_fingerprint"),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration, OverflowError):
        keys = ", ".join(sorted(map(str, data))) if isinstance(data, dict) else type(data).__name__
        keys = printable(keys)[:200]
        raise Skip(f"the answer of this {dialect.name} server has an unknown shape, with the keys {keys}") from None


def _text(choice: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    """Return the text, with the reasoning of a model that gives it, because the tokens cover both."""
    if "text" in choice:
        return str(choice["text"] or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if "content" not in message:
        raise KeyError("content")
    return str(reasoning) + str(message["content"] or "")


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
            token=str(token), value=_number(value), top=tuple((str(k), _number(v)) for k, v in (top or {}).items())
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    )


def _position(item: Mapping[str, Any]) -> Position:
    top = tuple((_token(entry), _number(entry["logprob"])) for entry in item.get("top_logprobs") or ())
    return Position(token=_token(item), value=_number(item["logprob"]), top=top)


def _prompt_positions(choice: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[Position, ...] | None:
    """Return the prompt's own tokens from [null, {"572": {"logprob": …, "rank": …}, …}, …]: first the token itself."""
    entries = choice.get("prompt_logprobs") or data.get("prompt_logprobs")
    if not entries:
        return None
    ids = [str(i) for i in choice.get("prompt_token_ids") or data.get("prompt_token_ids") or ()]
    positions = []
    for index, entry in enumerate(entries):
        if entry is None:
            positions.append(Position(token=ids[index] if ids else ""))
            continue
        own = ids[index] if ids and ids[index] in entry else next(iter(entry))
        top = tuple(
            (key, _number(value["logprob"])) for key, value in entry.items() if (value.get("rank") or TOP) <= TOP
        )
        positions.append(Position(token=own, value=_number(entry[own]["logprob"]), top=top))
    return tuple(positions)


def _best(position: Position) -> Position:
    """Return the position with the token of greedy decoding: the best, among equals the one with the lowest id."""
    known = [
        (-value, int(token), token) for token, value in position.top if value is not None and _finite(value) is not None
    ]
    if not known:
        return position
    value, _, token = min(known)
    return Position(token=token, value=-value, top=position.top)


def _token(entry: Mapping[str, Any]) -> str:
    return str(entry["id"]) if "id" in entry else str(entry["token"])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > MINUS_INFINITY else None


def _margin(top: tuple[tuple[str, float | None], ...]) -> float | None:
    known = sorted((value for _, raw in top if (value := _finite(raw)) is not None), reverse=True)
    return known[0] - known[1] if len(top) >= TOP and len(known) > 1 else None
