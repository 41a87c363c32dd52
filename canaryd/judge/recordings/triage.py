"""Triage of a wrong answer: what kind of fault it shows, the most likely causes, and what to test next.

By rule, from recordings alone (`triage`). A rule that also fires on a known answer is ignored: a healthy tiny model
with random weights writes gibberish. docs/baselines.md gives every threshold with its source.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from canaryd.facts import LINKS, Recording
from canaryd.judge.recordings import cases

SENTINEL = -9999.0
"""What some servers write for a log probability that is not finite (ROCm/vllm#572)."""
ZEROS = 8
"""Repetitions of token 0 ("!" in many vocabularies) at the end, which argmax over NaN may give (vllm#53480). Ours."""
EARLY = 4
"""An answer that stops by itself at less than 1/4 of the shortest known length stopped too early. Ours."""
LOOP_LENGTH, LOOP_SHARE = 48, 0.25
"""Characters, and share of the answer, that a loop at its end covers at least. Ours."""
DISTINCT = 0.35
"""Share of different groups of four words below which an answer of 40 or more words repeats itself. Ours."""
REPLACED, CONTROLS = 0.02, 0.01
"""Share of U+FFFD, and of control, private and unassigned characters (3 of them at least). Ours."""
ENTROPY_LOW, ENTROPY_HIGH = 1.5, 5.7
"""Bits per character: over 64 characters of any text, over 128 of an ASCII text. Ours; docs/baselines.md measures."""
MIXED, SWITCHES = 0.05, 0.5
"""Share of words that mix scripts no language mixes; share of script changes from word to word. Ours."""
UNLIKE, OVERLAP, VARIED = 0.3, 0.1, 0.93
"""Drop of the share of word-like words; share of words of the known answer; share of different words. Ours."""
MARKS = 0.3
"""Punctuation marks per word above which a text may be code or a list; its words are not compared. Ours."""
DOUBT = 2.0
"""Nats by which the mean log probability of the answer is below the known one. Ours."""
NEAR_TIE = 0.13
"""Nats: twice the 6.2e-2 by which prefill and decode in bfloat16 differed; both candidates may move."""

_LEAK = re.compile(
    r"<\|(?:im_start|im_end|endoftext|eot_id|begin_of_text|start_header_id|end_header_id|user|assistant|system|end)\|>"
    r"|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<\uff5c[^\uff5c]+\uff5c>"
    r"|\{%-? ?(?:for message|if messages)|\{\{ ?messages"
)
_META = re.compile(
    r"(?i)\A\W*(?:(?:okay|ok|alright|hmm|so)\W+)?the user (?:wants|asked|is asking|has not|said)\b"
    r"|(?m:^(?:#+ ?(?:instruction|response):|assistant)\s*$|^(?:human|assistant): )"
    r"|\b(?:my|your|the system) prompt (?:says|tells|asks|is empty|seems|appears|was)|\byou are a helpful assistant\b"
)
_EAST = {"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "FULLWIDTH", "BOPOMOFO"}
_USUAL_MIXES = ({"EAST", "LATIN"}, {"GREEK", "LATIN"})

Certainty = Literal["certain", "likely", "possible"]
Scope = Literal["", "one device", "some devices", "all devices", "several devices together"]
"""Who else shows a symptom; "" for unknown."""


@dataclass(frozen=True, kw_only=True)
class LikelyCause:
    """One likely cause, at a boundary that is a key of `NEXT`."""

    boundary: str
    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What kind of fault an answer shows, and what to do about it."""

    name: str
    """Of `BROKEN`, or "coherent but different"."""
    certainty: Certainty
    evidence: str
    """What was seen, with its numbers."""
    scope: Scope
    causes: tuple[LikelyCause, ...]
    """The likeliest first."""
    next_boundary: str
    command: str
    """What to run next."""


@dataclass(frozen=True)
class _Rule:
    name: str
    certainty: Certainty
    find: Callable[[Recording, Sequence[Recording]], str]
    """Returns the evidence for the symptom; "" where there is none."""
    causes: tuple[str, ...]
    """Keys of `CAUSES`, the likeliest first."""
    always: bool = False
    """Whether it counts even where a known answer shows it too."""


CAUSES: Mapping[str, LikelyCause] = {
    key: LikelyCause(boundary=boundary, what=what, why=why)
    for key, boundary, what, why in (
        (
            "checkpoint",
            "checkpoint",
            "weights damaged or of another version",
            "one flipped exponent bit moves every logit",
        ),
        ("dtype", "checkpoint", "overflow: float16 where the model needs bfloat16", "above 65,504 is Inf"),
        ("tokenizer", "tokenizer", "tokenizer of another model or version", "correct ids become wrong text"),
        ("template", "template", "chat template missing, changed or doubled", "the model continues the template"),
        ("stop", "template", "stop tokens or their settings changed", "the answer ends immediately or never"),
        ("sampling", "server", "sampling settings changed", "wrong temperature or penalty"),
        ("server", "server", "server upgraded or in a bad state", "a bad cache entry stays until a restart"),
        ("batch", "server", "another batch, cache or kernel path", "rounding decides near ties"),
        ("attention", "attention kernel", "attention or KV cache computes wrongly", "earlier tokens are read wrongly"),
        ("rope", "attention kernel", "positions wrong (rope_theta, scaling)", "fluent at first, wrong later"),
        ("peer", "all-reduce/multi-device", "transfers between devices lose data", "peer copies, IOMMU, links"),
        ("device", "device", "the device computes wrongly", "exact tests show it"),
    )
}
SHOWN_BY: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "checkpoint": (("checkpoint",),),
    "dtype": (("dtype",),),
    "tokenizer": (("tokenizer",), ("prompt",)),
    "template": (("template",), ("prompt",)),
    "stop": (("settings", "server"),),
    "sampling": (("settings", "server"),),
}
"""Cause → links that would have changed with it. It is not named where all links of one group are known to be equal."""
DIFFERENT = ("server", "template", "checkpoint", "attention", "device", "peer")
_CAPTURE = "canaryd capture --device {device} --out suspect.safetensors"
NEXT: Mapping[str, str] = {
    **dict.fromkeys(("checkpoint", "tokenizer", "template", "server"), f"{_CAPTURE} --model MODEL_DIR"),
    "attention kernel": f"{_CAPTURE} --operators",
    "all-reduce/multi-device": "canaryd check --level deep",
    "device": "canaryd check --level deep --device {device}",
}
"""Boundary → command. A capture runs the model without its server; compared with the CPU's it shows where they differ
first."""


# --- Evidence for each symptom ---------------------------------------------------------------------------------------


def _nonfinite(now: Recording, known: Sequence[Recording]) -> str:
    bad = [v for v in now.values if v is not None and (not math.isfinite(v) or v <= SENTINEL)]
    if bad:
        return f"{len(bad)} of {len(now.values)} log probabilities are not finite"
    given = any(v is not None for v in now.values)
    lost = [i for i, v in enumerate(now.values) if v is None and i and given]  # position 0 often has none
    if lost:
        return f"{len(lost)} of {len(now.values)} log probabilities are missing, the first at position {lost[0]}"
    if now.values and not given and any(v is not None for k in known for v in k.values):
        return "no log probabilities, although the known answer has them"
    zeros = len(now.tokens) - len("".join("0" if t in ("0", "!") else " " for t in now.tokens).rstrip("0"))
    zeros = max(zeros, len(now.text.rstrip()) - len(now.text.rstrip().rstrip("!")))
    return f"ends in {zeros} repetitions of token 0 or '!'" if zeros >= ZEROS else ""


def _nothing(now: Recording, known: Sequence[Recording]) -> str:
    numbers = (now.tokens or now.values) and not any(k.text.strip() for k in known)  # a canary without a tokenizer
    if not numbers and not now.text.strip():
        return f"no text in {len(now.tokens)} tokens"
    lengths = [len(k.tokens) or len(k.text) for k in known if bool(k.tokens) == bool(now.tokens)]
    length = len(now.tokens) or len(now.text)
    if lengths and now.finish == "stop" and length * EARLY < min(lengths):
        return f"stopped by itself after {length} of at least {min(lengths)} known tokens"
    return ""


def _meta(now: Recording, _: Sequence[Recording]) -> str:
    found = _LEAK.search(now.text) or _META.search(now.text)
    return f"{found[0].strip()!r} at character {found.start()}" if found else ""


def _loop(now: Recording, _: Sequence[Recording]) -> str:
    tail = now.text.strip()[-1024:]
    for period in range(1, len(tail) // 3 + 1):
        length = period
        while length < len(tail) and tail[-1 - length] == tail[-1 - length + period]:
            length += 1
        enough = length >= period * (6 if period < 16 else 3) and length >= LOOP_LENGTH
        if enough and length >= LOOP_SHARE * len(tail):
            return f"ends in {length // period} repetitions of {tail[-period:]!r}"
    words = re.findall(r"\w+", now.text)
    groups = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    if len(words) >= 40 and len(set(groups)) < DISTINCT * len(groups):
        return f"only {len(set(groups))} of {len(groups)} groups of four words are different"
    return ""


def _gibberish(now: Recording, known: Sequence[Recording]) -> str:
    text = now.text
    replaced, controls = text.count("\ufffd"), sum(map(_control, text))
    for count, limit, kind in ((replaced, REPLACED, "U+FFFD"), (controls, CONTROLS, "control or unassigned")):
        if count >= 3 and count > limit * len(text):
            return f"{count} of {len(text)} characters are {kind}"
    bits = _entropy(text)
    if len(text) >= 64 and bits < ENTROPY_LOW:
        return f"{bits:.2f} bits per character: too few different characters"
    if len(text) >= 128 and text.isascii() and bits > ENTROPY_HIGH:
        return f"{bits:.2f} bits per character: too many different characters for text or code"
    words = re.findall(r"\w+", text)
    scripts = [found for word in words if (found := _scripts(word))]
    mixed = sum(len(s) > 1 and s not in _USUAL_MIXES for s in scripts)
    if mixed >= 3 and mixed > MIXED * len(scripts):
        return f"{mixed} of {len(scripts)} words mix scripts that no language mixes"
    switches = sum(a != b for a, b in itertools.pairwise(scripts))
    if len(scripts) >= 24 and len(set().union(*scripts)) >= 4 and switches > SWITCHES * len(scripts):
        return f"the script changes {switches} times in {len(scripts)} words"
    return _unlike(now, known)


def _unlike(now: Recording, known: Sequence[Recording]) -> str:
    """Compare with known answers: how word-like the words are, how many are known, and the mean log probability."""
    words, usual = ([w for r in rs for w in re.findall(r"\b[^\W\d]+\b", r.text)] for rs in ([now], known))
    marks = sum(not c.isalnum() and not c.isspace() for c in now.text)
    if len(words) >= 20 and len(usual) >= 20 and marks <= MARKS * len(words):
        likeness, before = (fmean(map(_wordlike, ws)) for ws in (words, usual))
        if likeness < before - UNLIKE:
            return f"{likeness:.0%} of its words look like words ({before:.0%} in the known answer)"
        shared, varied = fmean(w.lower() in {u.lower() for u in usual} for w in words), len(set(words)) / len(words)
        if len(words) >= 30 and shared < OVERLAP and varied > VARIED:
            return f"{shared:.0%} of its words are in the known answer, and {varied:.0%} are different from each other"
    sure = [v for v in now.values if v is not None]
    were = [v for k in known for v in k.values if v is not None]
    if len(sure) >= 16 and were and fmean(sure) < fmean(were) - DOUBT:
        return f"mean log probability {fmean(sure):.2f} ({fmean(were):.2f} in the known answer)"
    return ""


def _entropy(text: str) -> float:
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def _control(c: str) -> bool:
    return c not in "\n\r\t" and unicodedata.category(c) in ("Cc", "Cs", "Co", "Cn")


def _scripts(word: str) -> set[str]:
    names = {unicodedata.name(c, "?").partition(" ")[0] for c in word if c.isalpha()}
    return {"EAST" if name in _EAST else name for name in names}


def _wordlike(word: str) -> bool:
    """Whether it is a pronounceable word, or a word of another script, and not pieces of tokens."""
    if not word.isascii() or not word.isalpha():
        return not word.isascii()
    joined = re.search(r"[a-z][A-Z]|[A-Z]{2,}[a-z]{2,}|(?i:[bcdfghjklmnpqrstvwxz]{5})", word)
    return not joined and len(word) <= 18 and (len(word) < 3 or bool(re.search(r"(?i)[aeiouy]", word)))


# --- The rules -------------------------------------------------------------------------------------------------------

RULES: tuple[_Rule, ...] = (
    _Rule("non-finite logits", "certain", _nonfinite, ("dtype", "server", "attention", "checkpoint", "device", "peer"),
          always=True),
    _Rule("nothing generated", "certain", _nothing, ("stop", "template", "tokenizer", "server", "device")),
    _Rule("meta text", "likely", _meta, ("template", "stop", "tokenizer", "server")),
    _Rule("repetition loop", "likely", _loop, ("sampling", "attention", "template", "rope", "device")),
    _Rule("gibberish", "likely", _gibberish, ("tokenizer", "checkpoint", "attention", "peer", "device", "server")),
)  # fmt: skip

BROKEN = frozenset(rule.name for rule in RULES)
"""Symptoms that no healthy stack shows; answers that are only different are not among them."""


def triage(
    now: Recording,
    known: Sequence[Recording] = (),
    *,
    others: Mapping[str, str] | None = None,
    devices: int = 1,
    device: str = "DEVICE",
) -> Symptom | None:
    """Return the symptom of an answer; None where it has none.

    `known`: right answers of the same case. `others`: other devices or endpoints that answered the same case → the name
    of their symptom, "" for none. `devices`: how many devices compute `now` together. `device`: the name to put
    into the command.
    """
    others = others or {}
    excluded = _excluded(now, known)
    for rule in RULES:
        evidence = rule.find(now, known)
        if evidence and (rule.always or not any(rule.find(k, ()) for k in known)):
            causes = [key for key in rule.causes if key not in excluded]
            return _symptom(
                rule.name, rule.certainty, evidence, causes, _changed_link(now, known), others, devices, device
            )
    if known and not any(now.text == k.text and now.tokens in (k.tokens, ()) for k in known):
        position, unit, margin = _first_difference(now, known)
        tie = margin is not None and margin < NEAR_TIE
        at = "unknown margin" if margin is None else f"margin {margin:.3g} nats"
        return _symptom(
            "coherent but different",
            "possible" if tie or margin is None else "likely",
            f"differs from the known answer from {unit} {position} on, {at}{', a near tie' if tie else ''}",
            (*(("batch",) if tie else ()), *(key for key in DIFFERENT if key not in excluded)),
            _changed_link(now, known),
            others,
            devices,
            device,
        )
    return None


def _symptom(
    name: str, certainty: Certainty, evidence: str, causes: Sequence[str], changed: str,
    others: Mapping[str, str], devices: int, device: str,
) -> Symptom:  # fmt: skip
    """Return the symptom with its scope, its causes in order and the next command."""
    wrong = [bool(symptom) for symptom in others.values()]
    scope: Scope = ""
    first = last = ""
    if wrong and all(wrong):
        scope, last = "all devices", "device"
    elif wrong and not any(wrong) and devices > 1:
        scope, first, last = "several devices together", "all-reduce/multi-device", "device"
    elif wrong and not any(wrong):
        scope, first = "one device", "device"
    elif wrong:
        scope = "some devices"
    ordered = [CAUSES[key] for key in causes]
    if first and first not in [cause.boundary for cause in ordered]:
        ordered.append(next(cause for cause in CAUSES.values() if cause.boundary == first))
    if devices == 1:
        ordered = [cause for cause in ordered if cause.boundary != "all-reduce/multi-device"]
    ordered.sort(key=lambda c: (c.boundary == last) - (c.boundary == first))  # stable: otherwise the table's order
    if changed:
        near = changed if changed in NEXT else "template" if changed == "prompt" else "server"
        near = "checkpoint" if changed in ("config", "dtype") else near
        why = "the known answer was made with another one"
        ordered.insert(0, LikelyCause(boundary=near, what=f"the {changed} changed", why=why))
    boundary = ordered[0].boundary
    return Symptom(name=name, certainty=certainty, evidence=evidence, scope=scope, causes=tuple(ordered),
                   next_boundary=boundary, command=NEXT[boundary].format(device=device))  # fmt: skip


def _excluded(now: Recording, known: Sequence[Recording]) -> set[str]:
    """Return the causes that cannot be: their links are those of every known answer, or the request used none."""
    chains = [k.chain for k in known]
    equal = {
        link for link, value in now.chain.items() if value and chains and all(c.get(link) == value for c in chains)
    }
    found = {key for key, groups in SHOWN_BY.items() if any(equal.issuperset(group) for group in groups)}
    return found if cases.is_templated(now.case) else {*found, "template"}


def _changed_link(now: Recording, known: Sequence[Recording]) -> str:
    """Return the first link that differs from the chain of every known answer; "" where one has the same chain."""
    firsts = [[x for x in LINKS if x in now.chain and x in k.chain and now.chain[x] != k.chain[x]][:1] for k in known]
    return min((first[0] for first in firsts), key=LINKS.index) if firsts and all(firsts) else ""


def _first_difference(now: Recording, known: Sequence[Recording]) -> tuple[int, str, float | None]:
    """Return where the answer first differs from the nearest known one, the unit, and the known margin there."""
    tokens = bool(now.tokens) and all(k.tokens for k in known)

    def common(k: Recording) -> int:
        a, b = (now.tokens, k.tokens) if tokens else (now.text, k.text)
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    nearest = max(known, key=common)
    position = common(nearest)
    margins = [r.margins[position] for r in (nearest, now) if tokens and position < len(r.margins)]
    return position, "token" if tokens else "character", next((m for m in margins if m is not None), None)
