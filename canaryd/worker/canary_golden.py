"""The canary model's goldens: reading them, and comparing an inference of a device with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canaryd.model import Comparison, Evidence, Exactness, Reading, reading_key
from canaryd.probe import Absent, Fact
from canaryd.worker import canary, evidence, exact
from canaryd.worker.integers import digest
from canaryd.worker.tensors import bits, host_same_bits, on_core, torch, torch_device

PATHS = ("decode", "forced")
"""How a continuation comes about: token by token from the KV cache, or given and scored in one pass."""


@dataclass(frozen=True)
class Golden:
    """The model as shipped, and what it must answer. Host tensors."""

    model: canary.Canary
    """In bfloat16, as the file has it."""
    names: tuple[str, ...]
    """The robust prompts."""
    prompts: Any
    """Their tokens (names, P)."""
    tokens: Any
    """Their continuations (names, count)."""
    logits: Any
    """By which float64 chooses these (names, count, vocabulary)."""
    tolerance: Mapping[str, float]
    """Per format: the distance from `logits` that no healthy device reaches."""
    sensitive: Any
    """Prompts that end on a thin margin (prompts, length)."""
    rivals: tuple[tuple[int, int], ...]
    """The two best tokens at the end of each, in float64."""


def golden_digest(golden: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in golden.json but its own digest."""
    rest = {name: value for name, value in golden.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_golden(directory: Path) -> Golden:
    """Return model and goldens; raise `canary.BadFile` unless every digest holds and the logits choose the tokens."""
    try:
        said = json.loads((directory / "golden.json").read_bytes())
        if not isinstance(said, dict) or golden_digest(said) != said.get("sha256"):
            raise canary.BadFile("golden.json does not have the digest that stands in it")
        files = {name: (directory / f"{name}.safetensors").read_bytes() for name in ("weights", "reference")}
    except OSError as error:
        raise canary.BadFile(f"{error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise canary.BadFile(f"golden.json: {error}") from error
    for name, data in files.items():
        found, wanted = hashlib.sha256(data).hexdigest(), said[f"{name}_sha256"]
        if found != wanted:
            raise canary.BadFile(f"{name}.safetensors has SHA-256 {found[:16]}…, golden.json says {wanted[:16]}…")
    prompts = said["prompts"]
    golden = Golden(
        model=canary.load(files["weights"]),
        names=tuple(prompts),
        prompts=_tokens([p["text"] for p in prompts.values()]),
        tokens=_tokens([p["continuation"] for p in prompts.values()]),
        logits=canary.read_safetensors(files["reference"])[0]["logits"],
        tolerance=said["tolerance"],
        sensitive=_tokens([s["text"] for s in said["sensitive"]]),
        rivals=tuple((first, second) for first, second in (s["rivals"] for s in said["sensitive"])),
    )
    if not torch.equal(golden.logits.argmax(-1), golden.tokens):
        raise canary.BadFile("reference.safetensors and golden.json do not have the same tokens")
    return golden


def _tokens(texts: list[str]) -> Any:
    return torch.tensor([list(text.encode("ascii")) for text in texts])


# ---------------------------------------------------------------------------------------------------------------------
# Comparing an inference with its golden.


@dataclass(frozen=True)
class Seen:
    """What one inference gave, beside its golden."""

    tokens: Evidence | None
    """Present where a token is wrong."""
    logits: Evidence | None
    """Present where a logit is farther from its golden than the tolerance."""
    first: int | None
    """First position with a wrong token in any row."""
    agreement: float
    """Share of the tokens that are right, 0 … 1."""
    distance: float | None
    """Largest distance of a logit from its golden over the tolerance; None where a logit is not finite."""
    margin: float | None
    """Smallest lead of a position's best logit over its second; None where a logit is not finite."""
    digest: str
    """Of all logits' bits: one stack gives few, and a healthy device no new one (docs/canary.md)."""

    @property
    def wrong(self) -> bool:
        """Whether a token or a logit is wrong."""
        return bool(self.tokens or self.logits)


def look(golden: Golden, rows: list[int], dtype: str, path: str, tokens: Any, logits: Any) -> Seen:
    """Compare the tokens and logits of prompts `rows`; `path` "decode" or "forced".

    Decoding goes on from its own tokens: behind a row's first wrong one it answers another question, so only logits up
    to that position count. A forced path is given the right tokens, so all of its logits count.
    """
    wanted, reference = golden.tokens[rows], golden.logits[rows]
    tokens, raw = tokens.cpu(), logits.cpu()
    right, observed = tokens == wanted, raw.to(torch.float64)
    counts = torch.ones_like(right)
    if path == "decode":
        counts[:, 1:] = right[:, :-1].to(torch.int64).cumprod(1) == 1
    distance = torch.where(counts[..., None], (observed - reference).abs() / golden.tolerance[dtype], 0.0)
    finite = bool(torch.isfinite(distance).all())
    best = observed.topk(2, -1).values[counts]
    wrong = [int(p) for p in torch.nonzero(~right)[:, 1]]
    return Seen(
        tokens=_token_evidence(wanted, tokens, reference) if wrong else None,
        logits=_logit_evidence(reference.to(raw.dtype), raw, distance),
        first=min(wrong) if wrong else None,
        agreement=float(right.to(torch.float64).mean()),
        distance=float(distance.max()) if finite else None,
        margin=float((best[:, 0] - best[:, 1]).min()) if finite else None,
        digest=digest(raw),
    )


def _token_evidence(wanted: Any, tokens: Any, reference: Any) -> Evidence:
    wrong = torch.nonzero((wanted != tokens).T)  # by position first: what follows a wrong token is its consequence
    position, row = wrong[0].tolist()
    best = reference[row, position].topk(2).values
    text = (
        f"position {position} of row {row}: token {int(tokens[row, position])} instead of {int(wanted[row, position])},"
        f" which leads by {float(best[0] - best[1]):.1f} in float64; {len(wrong)} of {wanted.numel()} tokens differ"
    )
    return replace(evidence.collect(wanted, tokens), lines={}, pattern=text)  # a position is no physical place


def _logit_evidence(expected: Any, raw: Any, distance: Any) -> Evidence | None:
    outside = ~(distance <= 1.0)  # also where it is NaN
    wrong = torch.nonzero(outside)
    if not len(wrong):
        return None
    at = tuple(wrong[: evidence.FIRST].T)
    digits = raw.element_size() * 2
    where, mask = wrong[: evidence.FIRST].tolist(), (1 << digits * 4) - 1
    want, have = ([f"0x{value & mask:0{digits}x}" for value in bits(t)[at].tolist()] for t in (expected, raw))
    nonfinite = int((~torch.isfinite(raw[outside])).sum())
    row, position, token = wrong[0].tolist()
    text = f"position {position} of row {row}, token {token}: {float(raw[row, position, token]):.6g}"
    text += f" instead of {float(expected[row, position, token]):.6g}; "
    text += f"{nonfinite} logits not finite" if nonfinite else f"up to {float(distance.max()):.3g} times the tolerance"
    return Evidence(
        wrong=len(wrong),
        total=raw.numel(),
        first=tuple((tuple(index), w, h) for index, w, h in zip(where, want, have, strict=True)),
        bits={},  # within the tolerance any bit may differ
        zeroed=int((raw[outside] == 0).sum()),
        nonfinite=nonfinite,
        lines={},
        pattern=text,
    )


# ---------------------------------------------------------------------------------------------------------------------
# A run on a device.


@dataclass(frozen=True)
class Task:
    """One inference, or (without rows) a look at the weights that the device holds."""

    dtype: str
    path: str
    prompt: str = ""
    rows: tuple[int, ...] = ()
    """Prompts by number; the first is `prompt`."""

    @property
    def name(self) -> str:
        """The case; its logits are a case of their own, one level below."""
        return f"{self.dtype}/{self.path}/b{len(self.rows)}/{self.prompt}" if self.rows else f"{self.dtype}/{self.path}"

    @property
    def mode(self) -> tuple[tuple[str, str], ...]:
        """Labels of the readings that it contributes to."""
        return (("dtype", self.dtype), ("path", self.path), ("batch", str(len(self.rows))))


class Bench:
    """A device with the model on it, once per format, and what it has answered."""

    def __init__(self, session: exact.Session, golden: Golden) -> None:
        self.session = session
        self.golden = golden
        self.models: dict[str, canary.Canary] = {}
        self.modes: dict[tuple[tuple[str, str], ...], list[Seen]] = {}

    def prepare(self, dtype: str) -> None:
        """Put the model on the device and decode twice; raises what torch raises where the format is refused."""
        model = self._upload(dtype)
        canary.decode(model, self._on(self.golden.prompts[:1]), 2)
        self.models[dtype] = model

    def verify(self, task: Task, seconds: float) -> Iterator[Comparison]:
        """Repeat one inference for `seconds`, at least once; yield what became of its tokens and of its logits."""
        clock = self.session.ctx.clock
        started, seen = clock(), [self._infer(task, self.models[task.dtype])]
        while clock() - started < seconds and sum(s.wrong for s in seen) < exact.WRONG_ENOUGH:
            seen.append(self._infer(task, self.models[task.dtype]))
        self.modes.setdefault(task.mode, []).extend(seen)
        again: list[Seen] = []
        if any(s.wrong for s in seen):  # fresh uploads tell a hit of the memory from a unit that errs
            again = [self._infer(task, self._upload(task.dtype)) for _ in range(exact.FRESH_UPLOADS)]
        for suffix, exactness, evidences, repeated in (
            ("", Exactness.UNIVERSAL, [s.tokens for s in seen], [s.tokens for s in again]),
            ("/logits", Exactness.ROUNDED, [s.logits for s in seen], [s.logits for s in again]),
        ):
            if exact.chosen(self.session.ctx, task.name + suffix):
                found = next((e for e in evidences if e), None)
                if found:
                    count = sum(1 for e in repeated if e)
                    found = replace(found, reproduced=f"{count} of {len(again)} fresh uploads wrong")
                wrong = sum(1 for e in evidences if e)
                place = self.session.place_name(self.session.place(task.name))
                comparison = self._comparison(task.name + suffix, exactness, place, len(seen), wrong, found)
                yield replace(comparison, digest=seen[0].digest) if suffix else comparison

    def weights(self, dtype: str) -> Comparison:
        """Compare the weights that the device holds with those that it was given, bit for bit, on the host."""
        wrong: list[tuple[str, Evidence]] = []
        for name, given in self.golden.model.to("cpu", dtype).weights.items():
            held = self.models[dtype].weights[name].cpu()
            if not host_same_bits(held, given):
                wrong.append((name, evidence.collect(given, held)))
        found = None
        if wrong:
            name, found = wrong[0]
            text = f"weights {', '.join(n for n, _ in wrong)} changed in memory; {name}: {found.pattern}"
            found = replace(found, lines={}, pattern=text)
        return self._comparison(f"{dtype}/weights", Exactness.UNIVERSAL, "", 1, len(wrong[:1]), found)

    def readings(self) -> Iterator[Fact]:
        """Yield how far each mode (dtype, path, batch) was from its goldens."""
        for mode, seen in self.modes.items():
            labels = dict(mode)
            yield Reading(name="canary_token_agreement", value=min(s.agreement for s in seen), unit="1", labels=labels)
            worst: dict[str, list[float]] = {
                "canary_logit_distance": [-s.distance for s in seen if s.distance is not None],
                "canary_margin_min": [s.margin for s in seen if s.margin is not None],
            }
            for name, values in worst.items():
                if len(values) == len(seen):
                    yield Reading(name=name, value=abs(min(values)), unit="1", labels=labels)
                else:
                    yield Absent(name=reading_key(name, labels), reason="a logit is not finite")
            first = [s.first for s in seen if s.first is not None]
            if first:
                yield Reading(name="canary_first_difference", value=min(first), unit="1", labels=labels)
            else:
                yield Absent(name=reading_key("canary_first_difference", labels), reason="no token differed")

    def sensitive(self, dtype: str) -> Iterator[Reading]:
        """Yield what the prompts with thin margins give on this stack: a digest of all logits, the rivals' last ones.

        Any of it may differ between stacks; none of it is compared here.
        """
        logits = self.models[dtype].forward(self._on(self.golden.sensitive)).cpu()
        yield Reading(name="canary_sensitive_digest", value=digest(logits), labels={"dtype": dtype})
        for number, (first, second) in enumerate(self.golden.rivals):
            labels = {"dtype": dtype, "prompt": str(number)}
            a, b = logits[number, -1, first], logits[number, -1, second]
            text = f"{first}: {float(a)!r}, {second}: {float(b)!r}"
            yield Reading(name="canary_sensitive_logits", value=text, labels=labels)
            if bool(torch.isfinite(a - b)):
                yield Reading(name="canary_sensitive_margin", value=float(a - b), unit="1", labels=labels)

    def _on(self, tensor: Any) -> Any:
        return tensor.to(torch_device(self.session.ctx.device))

    def _upload(self, dtype: str) -> canary.Canary:
        model = self.golden.model.to(torch_device(self.session.ctx.device), dtype)
        self.session.injector.before(f"{dtype}/weights", model.weights["embedding"])
        return model

    def _infer(self, task: Task, model: canary.Canary) -> Seen:
        rows = list(task.rows)
        prompts, wanted = self._on(self.golden.prompts[rows]), self.golden.tokens[rows]
        with on_core(self.session.place(task.name)):
            if task.path == "decode":
                tokens, logits = canary.decode(model, prompts, wanted.shape[1])
            else:
                tokens, logits = canary.score(model, prompts, self._on(wanted))
        self.session.injector.after(task.name, tokens)
        self.session.injector.after(f"{task.name}/logits", logits)
        return look(self.golden, rows, task.dtype, task.path, tokens, logits)

    def _comparison(
        self, case: str, exactness: Exactness, place: str, trials: int, wrong: int, found: Evidence | None
    ) -> Comparison:
        ctx = self.session.ctx
        return Comparison(
            case=case,
            shape=f"prompt={self.golden.prompts.shape[1]} tokens={self.golden.tokens.shape[1]}",
            seed=exact.FIXED_SEED,
            exactness=exactness,
            place=place or ("device" if ctx.device.backend != "cpu" else ""),
            trials=trials,
            wrong_trials=wrong,
            evidence=found,
            characterised=exact.accumulator(ctx.device, "float32").characterised,
        )
