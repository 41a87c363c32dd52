"""Faults that a drill puts into an endpoint's answer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from canaryd.worker.endpoint.answers import Answer, Position
from canaryd.worker.exact_canary.expected import spell, tokens_of
from canaryd.worker.exact_canary.shape import Plan


def injected(answer: Answer, fault: str) -> Answer:
    """Return an answer with a fault of `canaryd drill` in the probability of one token, or else in the text.

    Always at the same position, because a confirmation must meet the same fault again. The text names the fault.
    """
    at = [i for i, position in enumerate(answer.positions) if position.value is not None]
    if not at:
        place = len(answer.text) // 2
        return replace(answer, text=f"{answer.text[:place]}[drill: {fault}]{answer.text[place:]}")
    middle = len(at) // 2
    positions = list(answer.positions)
    for i in at[middle % 16 :: 16] if fault == "stuck" else at[middle : middle + 1]:
        positions[i] = _CHANGES[fault](positions[i])
    return replace(answer, positions=tuple(positions), text=f"[drill: {fault} at position {at[middle]}] {answer.text}")


def another_word(answer: Answer, program: Plan) -> Answer:
    """Return an exact canary's answer with one wrong word in the middle, whatever the drill's fault; without scores."""
    tokens = tokens_of(program, answer.text) or [0]
    tokens[len(tokens) // 2] ^= 1
    return replace(answer, text=spell(program, tokens), positions=(), scored=False)


def _bits(change: Callable[[int], int]) -> Callable[[Position], Position]:
    """Return a change of the float32 in which the probability was computed."""

    def changed(position: Position) -> Position:
        (raw,) = struct.unpack("<I", struct.pack("<f", position.value))
        return replace(position, value=struct.unpack("<f", struct.pack("<I", change(raw)))[0])

    return changed


_CHANGES: Mapping[str, Callable[[Position], Position]] = {
    "flip": _bits(lambda raw: raw ^ 1),
    "zero": lambda position: replace(position, value=0.0),
    "swap": lambda position: replace(position, token=f"{position.token}?"),
    "nan": lambda position: replace(position, value=float("nan")),
    "stuck": _bits(lambda raw: raw | 1),
    "consistent": _bits(lambda raw: raw ^ (1 << 23)),
}
