"""Harmless explanations (excuses) of a wrong answer of a served exact canary: causes other than a wrong computation.

Each excuse is decided from all answers of a run on one API. If an excuse holds, the run proves nothing: it is skipped
with the reason, and the endpoint's state is unknown. docs/exact-canary.md names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from canaryd.facts import printable
from canaryd.worker.endpoint.marking import Fault, Marked, Sort
from canaryd.worker.exact_canary.expected import COST, Expected, spell
from canaryd.worker.exact_canary.golden import continuation

LAYERS = 8
"""Largest number of layers with which `_other_layers` tries to explain an answer (ours)."""
QUOTED = 60
"""Maximum number of characters of an answer that a reason quotes."""
EXACT = frozenset({"", "auto", "none", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "half", "float"})
"""Names of formats that represent every number of an exact canary."""
NAMES = {"awq": "awq", "w8a8": "compressed", "fp8": "compressed"}
"""Form of an export's weights → beginning of the server's name for it, e.g. awq_marlin or compressed-tensors."""


def excuse(expected: Expected, api: str, marked: Sequence[Marked], formats: Mapping[str, str]) -> str:
    """Return the reason why the answers of an API prove nothing although some are wrong; "" if no excuse holds.

    `formats` are the number formats that the server reports.
    """
    return (
        _other_words(expected, marked)
        or _other_prompt(expected, api, marked)
        or _ended_early(marked)
        or _rounding_format(expected, formats)
        or _other_layers(expected, marked)
        or _penalised(expected, marked)
        or _sampled(marked)
        or _changed_file(expected)
    )


def _other_words(expected: Expected, marked: Sequence[Marked]) -> str:
    foreign = next((m for m in marked if m.tokens is None), None)
    if foreign is None:
        return ""
    if foreign.answer.broken_off:  # within a word, maybe
        return f"an answer {foreign.answer.broken_off}"
    text = printable(foreign.answer.text)[:QUOTED]
    return (
        f'it answers with words that the exact canary does not have ("{text}"): another model or another tokenizer is '
        f"served; serve {expected.directory}"
    )


def _other_prompt(expected: Expected, api: str, marked: Sequence[Marked]) -> str:
    """Return this excuse as text if the prompt's token ids, or their number, show another prompt, otherwise ""."""
    for m in (m for m in marked if not m.right):
        ids, count, wanted = m.answer.prompt_ids, m.answer.prompt_tokens, len(m.question.prompt)
        if (ids and list(ids) != m.question.prompt) or (not ids and count not in (None, wanted)):
            seen = f"it reads {len(ids) or count} tokens in a prompt of {wanted} words"
            seen = "it reads other tokens than the prompt has" if (len(ids) or count) == wanted else seen
            if api == "chat":
                return (
                    f"{seen}: a chat template or a tokenizer adds to the messages; serve {expected.directory} with its "
                    "own template, or set apis: [completions]"
                )
            return f"{seen}: its tokenizer is another, or adds words; serve {expected.directory} with its own tokenizer"
    return ""


def _ended_early(marked: Sequence[Marked]) -> str:
    """Return this excuse as text if an answer is only too short and all its words are right, otherwise ""."""
    short = [m for m in marked if m.short]
    if not short or any(m.faults for m in marked):
        return ""
    tokens = short[0].tokens or []
    if broken := next((m.answer.broken_off for m in short if m.answer.broken_off), ""):
        return f"an answer {broken}"
    return (
        f"it ends an answer after {len(tokens)} of {len(short[0].question.tokens)} words: the server has a limit of "
        "tokens or a stop word; remove it"
    )


def _rounding_format(expected: Expected, formats: Mapping[str, str]) -> str:
    proved = NAMES.get(expected.quantization, "")  # for the weights that are served so
    found = {
        name: value
        for name, value in formats.items()
        if value.lower() not in EXACT and not (name == "quantization" and proved and value.lower().startswith(proved))
    }
    formats_found = ", ".join(f"{name} {value}" for name, value in sorted(found.items()))
    return f"the server says that it rounds ({formats_found}): serve the exact canary without that" if found else ""


def _other_layers(expected: Expected, marked: Sequence[Marked]) -> str:
    """Return this excuse as text if the answers are those of a model with another number of layers, otherwise ""."""
    for layers in range(1, LAYERS + 1):
        if layers != expected.shape.layers and all(
            m.tokens and m.tokens == continuation(expected.program, layers, m.question.prompt, len(m.tokens))
            for m in marked
        ):
            return (
                f"it answers as an exact canary with {layers} layers, and {expected.directory} has "
                f"{expected.shape.layers}: serve that one"
            )
    return ""


def _sampled(marked: Sequence[Marked]) -> str:
    """Return this excuse as text if the right word was the most probable but another was chosen, otherwise ""."""
    faults = [(m, f) for m in marked for f in m.faults if f.sort is Sort.CHOICE]
    if not faults:
        return ""
    return (
        "it computes the right word as the most probable and gives another, though temperature 0 was asked for: it "
        "samples, or its choice is wrong; let it choose the most probable word"
    )


def _penalised(expected: Expected, marked: Sequence[Marked]) -> str:
    """Return this excuse as text if a penalty explains all errors: only words of the context are wrong; else ""."""
    moved = _moved(expected, marked)
    if moved is None or len(moved) == 1:  # one word alone may be a fault of its own weights
        return ""
    what = "changes" if moved else "lowers"
    return f"it {what} the probability of words that came before: a repetition, presence or frequency penalty; set none"


def may_be_penalty(expected: Expected, marked: Sequence[Marked]) -> bool:
    """Return whether further answers may show a penalty: the only error so far is one wrong word of the context."""
    return len(_moved(expected, marked) or ()) == 1


def _moved(expected: Expected, marked: Sequence[Marked]) -> set[int] | None:
    """Return the words of the context whose probability is wrong; None if nothing is scored or other errors exist."""
    moved: set[int] = set()
    for m in marked:
        near = {fault.position for fault in m.faults if fault.sort is not Sort.CHANCE}
        for fault in m.faults:
            context = {*m.question.prompt, *m.question.tokens[: fault.position]}
            if fault.sort is not Sort.CHANCE:
                if fault.token not in context:
                    return None
                moved.add(fault.token)
            elif fault.position not in near and not _lost(expected, m, fault, context):
                return None
    return moved if any(m.scored and m.faults for m in marked) else None


def _lost(expected: Expected, m: Marked, fault: Fault, context: set[int]) -> bool:
    """Return whether a penalty on the words of `context` can explain the right word's gain of probability, `fault`."""
    costs = [cost for word in context if (cost := expected.cost(m.question.tokens[fault.position], word)) is not None]
    lost = math.fsum(math.exp(-cost) for cost in costs)
    return 0 < fault.got - fault.wanted <= lost + expected.shape.vocabulary * 2.0**-24


def _changed_file(expected: Expected) -> str:
    changed = expected.changed_file()
    return f"{changed}: write it again (canaryd canary export DIR) and restart the server" if changed else ""


def may_be_sampling(expected: Expected, marked: Sequence[Marked], repeated: Mapping[int, bool]) -> str:
    """Return this excuse as text if sampling can explain wrong words without log probabilities, otherwise "".

    Sampling mostly takes a word one bit from the right one (660 times as often as one two bits away at temperature 1)
    and rarely gives the same word again. `repeated`: number of a question → whether its wrong answer came again.
    """
    near = far = 0
    for m in (m for m in marked if m.faults):
        fault = m.faults[-1]
        cost = expected.cost(int(fault.wanted), int(fault.got))
        if m.scored or repeated.get(m.question.number, False):
            return ""
        near, far = near + (cost == COST), far + (cost != COST)
    if near == 0 or far > near:
        return ""
    m = next(m for m in marked if m.faults)
    wanted, got = (spell(expected.program, [int(token)]) for token in (m.faults[-1].wanted, m.faults[-1].got))
    return (
        f"it gave {got} for {wanted}, but not when asked again: it samples though temperature 0 was asked for, or it "
        "errs now and then; log probabilities would tell which, but it gives none"
    )
