"""A small model server that serves an exact canary with torch, and can be wrong in every way that a server can be.

It speaks HTTP on the loopback and computes every answer, in threads as it is asked. Its traits are faults of the
computation (a flipped bit in a live weight, products that err now and then) and settings that change healthy answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from canaryd_lab.worker.exact_canary.construct import construct
from canaryd_lab.worker.exact_canary.export import export
from canaryd_lab.worker.safetensors import read_safetensors

from canaryd.worker.exact_canary.expected import Expected, load, spell, tokens_of
from canaryd.worker.exact_canary.run import Runner
from canaryd.worker.exact_canary.shape import TINY
from tests.http_server import Handler, listening

GENERATED: dict[tuple[object, ...], dict[tuple[int, ...], list[tuple[int, Any]]]] = {}
"""What a model is → prompt → the words that follow it: a server that computes as one before it need not do so again."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → an integer of that size."""


@dataclass(kw_only=True)
class Traits:
    """What a server is like."""

    form: str = "bfloat16"
    """The format of its weights and activations."""
    printed: str = "float32"
    """The format in which it takes its log-softmax."""
    subtracts: bool = False
    """Whether it rounds the logarithm of the sum before it subtracts, as mlx-lm does."""
    logits: bool = False
    """Whether it prints logits instead of log probabilities."""
    decimals: int | None = None
    """Decimals of what it prints; None for all."""
    scored: bool = True
    """Whether it gives log probabilities."""
    best: int = 5
    """Candidates that it prints for each word."""
    certain: bool = False
    """Whether it prints probabilities after its choice."""
    flipped: tuple[str, int, int] | None = None
    """Weight, element, bit: flipped in memory after the checkpoint was loaded."""
    rate: float = 0.0
    """Share of its intermediate results with one flipped bit."""
    quantised: Mapping[str, int] = field(default_factory=dict)
    """Part of a weight's name → significand bits to which it is rounded."""
    noise: float = 0.0
    """By how much its last norm is off, the same in every answer, as a format that rounds makes it (in float32)."""
    begin: str = ""
    """Words that its tokenizer puts before every prompt."""
    template: str = ""
    """Words that its chat template puts before every message."""
    penalty: float = 0.0
    """A presence penalty that it applies by default."""
    repetition: float = 1.0
    """A repetition penalty that it applies by default."""
    raw: bool = False
    """Whether it prints log probabilities before its penalties, as vLLM and llama.cpp do by default."""
    scale: float = 1.0
    """By what it multiplies logits."""
    temperature: float = 0.0
    """At which it samples, whatever was asked."""
    most: int = 1000
    """Most words that it generates."""
    spoken: str = ""
    """What it answers instead."""
    counts: bool = True
    """Whether it tells how many tokens a prompt has."""
    at_once: int = 1000
    """Requests that it takes at the same time; 503 beyond that."""
    dies_after: int = 10**9
    """Answers after which it gives 503 for ever."""
    hangs_after: int = 10**9
    """Answers after which it keeps every client waiting."""
    cached: bool = False
    """Whether a cache of whole answers stands before it: equal requests get the first one's answer, with its id."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """What /server_info says, as SGLang's does."""

    @property
    def computing(self) -> tuple[object, ...]:
        """The traits on which words and logits depend where chance has no part in them."""
        changed = (self.flipped, dict(self.quantised), self.noise)
        return (self.form, *changed, self.penalty, self.repetition, self.raw, self.scale)


class Model:
    """An exact canary in memory, with the server's traits."""

    def __init__(self, directory: Path, traits: Traits) -> None:
        self.expected: Expected = load(directory)
        self.traits = traits
        self.chance = random.Random(5)
        self.lock = threading.Lock()
        stored = (directory / "model.safetensors").read_bytes()
        self.known = GENERATED.setdefault((hashlib.sha256(stored).digest(), *map(str, traits.computing)), {})
        weights, _ = read_safetensors(stored)
        self.weights = {name: w.to(getattr(torch, traits.form)) for name, w in weights.items()}
        for part, bits in traits.quantised.items():
            for name in (n for n in self.weights if part in n):
                self.weights[name] = rounded(self.weights[name], bits)
        if traits.noise:
            norm = self.weights["model.norm.weight"]
            self.weights["model.norm.weight"] = norm * (1 + traits.noise * torch.linspace(-1, 1, len(norm))).to(norm)
        if traits.flipped:
            name, element, bit = traits.flipped
            self.weights[name] = self.weights[name].clone()
            flip(self.weights[name], element, bit)
        self.runner = Runner(self.expected.shape, self.weights, watch=self.watch if traits.rate else None)

    def watch(self, _: str, tensor: Any) -> Any:
        """Flip a bit of the exponent of one element now and then."""
        if self.chance.random() >= self.traits.rate:
            return tensor
        wrong = tensor.clone()
        flip(wrong, self.chance.randrange(wrong.numel()), {2: 9, 4: 25, 8: 54}[wrong.element_size()])
        return wrong

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text; an unknown word is the last one of the vocabulary."""
        found = [tokens_of(self.expected.program, word) for word in text.split()]
        return [token for each in found for token in (each or [self.expected.shape.vocabulary - 1])]

    def generate(self, prompt: list[int], count: int) -> list[tuple[int, Any]]:
        """Return the words that follow a prompt, each with the logits (vocabulary,) that it was chosen by."""
        if self.traits.rate or self.traits.temperature:
            return self._generate(prompt, count)
        with self.lock:
            if len(self.known.get(tuple(prompt), ())) < count:
                self.known[tuple(prompt)] = self._generate(prompt, count)
            return self.known[tuple(prompt)][:count]

    def _generate(self, prompt: list[int], count: int) -> list[tuple[int, Any]]:
        cache = self.runner.operators.cache(*self.runner.cached(1, len(prompt) + count))
        found: list[tuple[int, Any]] = []
        given = prompt
        with torch.inference_mode():
            while len(found) < count:
                logits = self.runner.forward(torch.tensor([given]), cache, last=1)[0, -1] * self.traits.scale
                before = sorted({*prompt, *(t for t, _ in found)})
                computed, logits = logits, logits.clone()
                logits[before] -= self.traits.penalty
                factor = torch.where(logits[before] > 0, 1 / self.traits.repetition, self.traits.repetition)
                logits[before] *= factor.to(logits)
                token = int(logits.argmax())
                if self.traits.temperature:
                    chances = torch.softmax(logits.double() / self.traits.temperature, -1).tolist()
                    (token,) = self.chance.choices(range(len(chances)), chances)
                found.append((token, computed if self.traits.raw else logits))
                given = [token]
        return found


def rounded(weight: Any, bits: int) -> Any:
    """Return a weight with significands of so many bits."""
    mantissa, exponent = torch.frexp(weight.double())
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent).to(weight.dtype)


def flip(tensor: Any, element: int, bit: int) -> None:
    """Flip one bit of one element in place."""
    tensor.view(INTEGERS[tensor.element_size()]).view(-1)[element] ^= 1 << bit


class Api:
    """The OpenAI-compatible interface of a model."""

    def __init__(self, model: Model) -> None:
        self.model, self.traits = model, model.traits
        self.busy = self.answered = 0
        self.lock = threading.Lock()
        self.kept: dict[str, Any] = {}

    def get(self, path: str) -> Any:
        """Return the answer to a GET, None for 404."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "exact", "object": "model", "owned_by": "somebody"}]}
        return dict(self.traits.reports) or None if path == "/server_info" else None

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a POST, None for 404, a number for that status."""
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return None
        with self.lock:
            self.busy += 1
            self.answered += 1
            refused = self.busy > self.traits.at_once or self.answered > self.traits.dies_after
        try:
            if self.answered > self.traits.hangs_after:
                time.sleep(60.0)
            if not self.traits.cached:
                return 503 if refused else self.answer(path, body)
            request = f"{path} {json.dumps(body, sort_keys=True)}"
            return self.kept.setdefault(request, {**self.answer(path, body), "id": f"cmpl-{len(self.kept)}"})
        finally:
            with self.lock:
                self.busy -= 1

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Generate, and say it as this path does."""
        chat = path.endswith("chat/completions")
        text = body["messages"][0]["content"] if chat else body["prompt"]
        prompt = self.model.tokens(f"{self.traits.begin} {self.traits.template if chat else ''} {text}")
        said = self.model.generate(prompt, min(body["max_tokens"], self.traits.most))
        words = [spell(self.model.expected.program, [token]) for token, _ in said]
        spoken = self.traits.spoken or " ".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": spoken}} if chat else {"text": spoken}
        if self.traits.scored and body.get("logprobs"):
            scores = [self.scored(token, logits) for token, logits in said]
            choice["logprobs"] = {"content": scores} if chat else legacy(scores)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)} if self.traits.counts else {}
        return {"object": "text_completion", "model": "exact", "choices": [choice], "usage": usage}

    def scored(self, token: int, logits: Any) -> dict[str, Any]:
        """Return a word with its log probability and those of the five best."""
        if self.traits.certain:
            logits = torch.where(torch.arange(len(logits)) == token, logits, -1e5)
        printed = logits.to(getattr(torch, self.traits.printed))
        if self.traits.logits:
            values = printed.double()
        elif self.traits.subtracts:
            values = (printed - torch.logsumexp(printed, -1)).double()
        else:
            values = torch.log_softmax(printed, -1).double()
        best = torch.topk(values, self.traits.best)

        def entry(number: int) -> dict[str, Any]:
            value = float(values[number])
            value = value if self.traits.decimals is None else round(value, self.traits.decimals)
            return {"token": spell(self.model.expected.program, [number]), "logprob": value}

        return {**entry(token), "top_logprobs": [entry(int(number)) for number in best.indices]}


def legacy(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return scores as completions give them: parallel lists."""
    return {
        "tokens": [s["token"] for s in scores],
        "token_logprobs": [s["logprob"] for s in scores],
        "top_logprobs": [{t["token"]: t["logprob"] for t in s["top_logprobs"]} for s in scores],
    }


@contextlib.contextmanager
def exported(path: Path) -> Iterator[Path]:
    """Export a tiny exact canary into a directory; until the end of the block torch computes in one thread.

    A pool of threads waits for its cores more than it computes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    export(construct(TINY, 3), path)
    yield path
    torch.set_num_threads(threads)


@contextlib.contextmanager
def serving(directory: Path, port: int = 0, **traits: Any) -> Iterator[str]:
    """Serve the exact canary in a directory until the end of the block; yields the address of its API."""
    api = Api(Model(directory, Traits(**traits)))

    class Canary(Handler):
        def respond(self) -> None:
            answer = api.get(self.path) if self.command == "GET" else api.post(self.path, self.document())
            status = 404 if answer is None else answer if isinstance(answer, int) else 200
            self.reply(status, json.dumps(answer if status == 200 else {"error": "refused"}).encode())

    with listening(Canary, port) as address:
        yield f"http://{address}/v1"
