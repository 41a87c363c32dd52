"""Triage: which of five symptoms an answer shows that no healthy stack shows, and what to test next.

By rule, from recordings alone. A rule that also fires on a known answer is ignored: a healthy tiny model with random
weights writes gibberish. docs/baselines.md has the symptoms, docs/thresholds.md every number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import Baseline

SENTINEL = -9999.0
"""What some servers write for a log probability that is not finite (ROCm/vllm#572)."""
REPEATS = 8
"""Repetitions at the end: of token 0 ("!" in many vocabularies), which argmax over NaN may give (vllm#53480), or of any
part, if they cover a `QUARTER`. Ours."""
QUARTER = 0.25
"""Share of the shortest known answer below which one stopped too early; share of an answer that a loop covers. Ours."""
ODD = 0.02
"""Share of characters that no text has; one is allowed, for a sign that was cut in two. Ours."""

META = re.compile(
    r"<\|(?:im_start|im_end|endoftext|eot_id|begin_of_text|start_header_id|end_header_id|user|assistant|system|end)\|>"
    r"|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<\uff5c[^\uff5c]+\uff5c>"
    r"|\{%-? ?(?:for message|if messages)|\{\{ ?messages"
    r"|(?i:\A\W*(?:(?:okay|ok|alright|hmm|so)\W+)?the user (?:wants|asked|is asking|has not|said)\b)"
    r"|(?im:^(?:#+ ?(?:instruction|response):|assistant)\s*$|^(?:human|assistant): )"
    r"|(?i:\b(?:my|your|the system) prompt (?:says|tells|asks|is empty|seems|appears|was)\b)"
    r"|(?i:\byou are a helpful assistant\b)"
)
LOOP = re.compile(rf"\s*(.{{1,128}}?)\1{{{REPEATS - 1},}}", re.DOTALL)
"""Of a text that is read backwards."""
NO_TEXT = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff]")


def _nonfinite(now: Recording, known: Sequence[Recording]) -> str:
    bad = sum(v is not None and (not math.isfinite(v) or v <= SENTINEL) for v in now.values)
    given = any(v is not None for v in now.values)
    lost = sum(v is None for v in now.values[1:]) if given else 0  # position 0 often has none
    if bad or lost:
        return f"{bad + lost} of {len(now.values)} log probabilities are missing or not finite"
    if now.values and not given and any(v is not None for k in known for v in k.values):
        return "no log probabilities, although the known answer has them"
    last = {*now.tokens[-REPEATS:]} if len(now.tokens) >= REPEATS else {""}
    zeros = last <= {"0", "!"} or "".join(now.text.split()).endswith("!" * REPEATS)
    return "ends in repetitions of token 0 or '!'" if zeros else ""


def _nothing(now: Recording, known: Sequence[Recording]) -> str:
    numbers = (now.tokens or now.values) and not any(k.text.strip() for k in known)  # a canary without a tokenizer
    if not numbers and not now.text.strip():
        return f"no text in {len(now.tokens)} tokens"
    lengths = [len(k.tokens) or len(k.text) for k in known if bool(k.tokens) == bool(now.tokens)]
    length = len(now.tokens) or len(now.text)
    early = lengths and now.finish == "stop" and length < QUARTER * min(lengths)
    return f"stopped by itself after {length} of at least {min(lengths)} known tokens" if early else ""


def _meta(now: Recording, _: Sequence[Recording]) -> str:
    found = META.search(now.text)
    return f"{found[0].strip()!r} at character {found.start()}" if found else ""


def _loop(now: Recording, _: Sequence[Recording]) -> str:
    found = LOOP.match(now.text[::-1])
    long = found is not None and len(found[0]) >= QUARTER * len(now.text)
    return f"ends in repetitions of {found[1][::-1]!r}" if found and long else ""


def _gibberish(now: Recording, _: Sequence[Recording]) -> str:
    odd = len(NO_TEXT.findall(now.text))
    return f"{odd} of {len(now.text)} characters are in no text" if odd - 1 > ODD * len(now.text) else ""


class Symptom(NamedTuple):
    """A kind of wrong answer."""

    name: str
    certain: bool
    causes: tuple[str, ...]
    """Keys of `CAUSES`, the likeliest first."""
    find: Callable[[Recording, Sequence[Recording]], str]
    """Returns the evidence for it; "" where there is none."""


SYMPTOMS = (
    Symptom("non-finite logits", True, ("dtype", "server", "attention", "checkpoint", "device"), _nonfinite),
    Symptom("nothing generated", True, ("settings", "template", "tokenizer", "server", "device"), _nothing),
    Symptom("meta text", False, ("template", "settings", "tokenizer", "server"), _meta),
    Symptom("repetition loop", False, ("settings", "attention", "template", "device"), _loop),
    Symptom("gibberish", False, ("tokenizer", "checkpoint", "attention", "device", "server"), _gibberish),
)
_CAPTURE = "canaryd capture --device {device} --out suspect.safetensors"
_MODEL, _DEEP = f"{_CAPTURE} --model MODEL_DIR", "canaryd check --level deep --device {device}"


class LikelyCause(NamedTuple):
    """One likely cause of a wrong answer."""

    what: str
    links: tuple[str, ...]
    """Links that would have changed with it; it is not named where all are known to be equal. (): none shows it."""
    command: str
    """What to run next: a capture runs the model without its server; beside the CPU's it shows where they differ."""


CAUSES: Mapping[str, LikelyCause] = {
    "checkpoint": LikelyCause("weights damaged or of another version", ("checkpoint",), _MODEL),
    "dtype": LikelyCause("overflow: float16 where the model needs bfloat16", ("dtype",), _MODEL),
    "tokenizer": LikelyCause("tokenizer of another model or version", ("prompt",), _MODEL),
    "template": LikelyCause("chat template missing, changed or doubled", ("prompt",), _MODEL),
    "settings": LikelyCause("stop tokens or sampling changed", ("settings", "server"), _MODEL),
    "server": LikelyCause("server upgraded or in a bad state", (), _MODEL),
    "attention": LikelyCause("attention or KV cache computes wrongly", (), f"{_CAPTURE} --operators"),
    "device": LikelyCause("a device, or a transfer between devices, is wrong", (), _DEEP),
}


class Kind(NamedTuple):
    """What kind of wrong an answer is: a symptom that no healthy stack shows."""

    name: str
    certain: bool
    evidence: str
    causes: tuple[LikelyCause, ...]

    def next_test(self, devices: Sequence[str]) -> str:
        """Return the command that tests the likeliest cause, on the first of the devices."""
        return self.causes[0].command.format(device=next(iter(devices), "DEVICE"))


def kind_of_wrong(now: Recording, known: Sequence[Recording] = ()) -> Kind | None:
    """Return what kind of wrong an answer is; None where it shows nothing. `known`: right answers of the same case."""
    if now.of_kernel:
        return None
    for symptom in SYMPTOMS:
        found = symptom.find(now, known)
        if found and (symptom is SYMPTOMS[0] or not any(symptom.find(k, ()) for k in known)):
            return Kind(symptom.name, symptom.certain, found, _causes(symptom, now, known))
    return None


def _causes(symptom: Symptom, now: Recording, known: Sequence[Recording]) -> tuple[LikelyCause, ...]:
    same = {k for k, v in now.chain.items() if v and known and all(r.chain.get(k) == v for r in known)}
    bare = now.case.startswith("completions/")  # a continuation goes without a template
    named = [key for key in symptom.causes if not (CAUSES[key].links and same.issuperset(CAUSES[key].links))]
    return tuple(CAUSES[key] for key in named if key != "template" or not bare)


def certainly_broken(recording: Recording) -> bool:
    """Return whether an answer is broken beyond doubt."""
    found = kind_of_wrong(recording)
    return found is not None and found.certain


def known_answers(baseline: Baseline | None) -> list[Recording]:
    """Return the answers that a baseline knows."""
    return [mode.recording for mode in baseline.known] if baseline is not None else []
