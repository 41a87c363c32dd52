"""The canary model's goldens: reading them, and comparing an inference of a device with them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canaryd.facts import Comparison, Evidence, Exactness, Place, Reading, Recording, printable, reading_key
from canaryd.probe import Absent, Fact
from canaryd.worker.canary.fixed import COMPILING, FIXED, Decoder, cannot_be_fixed, compiler, time_limit, why_not
from canaryd.worker.canary.model import BadFile, Canary, decode, load, read_safetensors, score
from canaryd.worker.numeric import cases as numeric_cases
from canaryd.worker.numeric import evidence, measure
from canaryd.worker.numeric import verify as numeric_verify
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import bits, host_same_bits, on_core, torch, torch_device

PATHS = ("decode", "forced")
"""How a continuation comes about: token by token from the KV cache, or given and scored in one pass."""
ENOUGH = 3
"""Recordings of a case in one run while a baseline is learnt."""


@dataclass(frozen=True)
class Golden:
    """The shipped model and its expected answers. Host tensors."""

    model: Canary
    """In bfloat16, as the file has it."""
    checkpoint: str
    """First 16 hex digits of the SHA-256 of the weights' file."""
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
        stored = json.loads((directory / "golden.json").read_bytes())
        if not isinstance(stored, dict) or golden_digest(stored) != stored.get("sha256"):
            raise BadFile("golden.json does not have the digest that it contains")
        files = {name: (directory / f"{name}.safetensors").read_bytes() for name in ("weights", "reference")}
    except OSError as error:
        raise BadFile(f"{error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadFile(f"golden.json: {error}") from error
    for name, data in files.items():
        found, wanted = hashlib.sha256(data).hexdigest(), stored[f"{name}_sha256"]
        if found != wanted:
            raise BadFile(f"{name}.safetensors has SHA-256 {found[:16]}…, golden.json says {wanted[:16]}…")
    prompts = stored["prompts"]
    golden = Golden(
        model=load(files["weights"]),
        checkpoint=stored["weights_sha256"][:16],
        names=tuple(prompts),
        prompts=_tokens([p["text"] for p in prompts.values()]),
        tokens=_tokens([p["continuation"] for p in prompts.values()]),
        logits=read_safetensors(files["reference"])[0]["logits"],
        tolerance=stored["tolerance"],
        sensitive=_tokens([s["text"] for s in stored["sensitive"]]),
        rivals=tuple((first, second) for first, second in (s["rivals"] for s in stored["sensitive"])),
    )
    if not torch.equal(golden.logits.argmax(-1), golden.tokens):
        raise BadFile("reference.safetensors and golden.json do not have the same tokens")
    return golden


def _tokens(texts: list[str]) -> Any:
    return torch.tensor([list(text.encode("ascii")) for text in texts])


# ---------------------------------------------------------------------------------------------------------------------
# Comparing an inference with its golden.


@dataclass(frozen=True)
class Seen:
    """The result of one inference, with its golden."""

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
    """Of all logits' bits: one stack gives few, and a healthy device no new one (docs/canaries.md)."""

    @property
    def wrong(self) -> bool:
        """Whether a token or a logit is wrong."""
        return bool(self.tokens or self.logits)


def look(golden: Golden, rows: list[int], dtype: str, path: str, tokens: Any, logits: Any) -> Seen:
    """Compare the tokens and logits of prompts `rows`, come about by `path`.

    Decoding goes on from its own tokens: behind a row's first wrong one it answers another question, so only logits up
    to that position count. A forced path is given the right tokens, so all of its logits count.
    """
    wanted, reference = golden.tokens[rows], golden.logits[rows]
    tokens, raw = tokens.cpu(), logits.cpu()
    right, observed = tokens == wanted, raw.to(torch.float64)
    counts = torch.ones_like(right)
    if path != "forced":
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


def record(case: str, chain: Mapping[str, str], tokens: Any, logits: Any) -> Recording:
    """Return what stands for an inference where nobody knows the bits: a digest of all logits, the first row in full.

    Log probabilities are by a softmax in float64 on the host, natural logarithm.
    """
    chosen, raw = tokens[0].tolist(), logits[0].cpu().to(torch.float64)
    chances, best = torch.log_softmax(raw, -1).tolist(), raw.topk(2, -1).values
    values = [row[t] if 0 <= t < len(row) else math.nan for row, t in zip(chances, chosen, strict=True)]
    return Recording(
        case=case,
        digest=digest(logits.cpu()),
        chain=chain,
        tokens=tuple(map(str, chosen)),
        values=tuple(v if math.isfinite(v) else None for v in values),
        margins=tuple(m if math.isfinite(m) else None for m in (best[:, 0] - best[:, 1]).tolist()),
        text=printable("".join(chr(t) if 0 <= t < raw.shape[-1] else "?" for t in chosen)),
        finish="length",
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
    """One inference; or, without rows, the sensitive prompts, or a look at the weights that the device holds."""

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

    def __init__(self, session: Session, golden: Golden) -> None:
        self.session = session
        self.golden = golden
        self.models: dict[str, Canary] = {}
        self.modes: dict[tuple[tuple[str, str], ...], list[Seen]] = {}
        self.settings = ""
        """Fingerprint of what the probe has set; a link of every recording's chain."""
        self.exits = contextlib.ExitStack()
        """To be left at the end of the run: lets go of the compiler."""
        self._decoders: dict[tuple[str, str, int], Decoder] = {}
        self._compiling = COMPILING
        """Seconds left to torch.compile."""
        self._compiler: str | None = None
        """What compiles, by name and version; None until `canary.compiler` has been entered."""

    def prepare(self, dtype: str) -> None:
        """Put the model on the device and decode twice; raises what torch raises where the format is refused."""
        model = self._upload(dtype)
        decode(model, self._on(self.golden.prompts[:1]), 2)
        self.models[dtype] = model

    def make(self, task: Task) -> str:
        """Compile or capture what a task of a `FIXED` path needs, once; return why that cannot be, or ""."""
        key = (task.dtype, task.path, len(task.rows))
        if key in self._decoders or task.path not in FIXED:
            return ""
        try:
            if task.path == "compiled":
                self._decoders[key] = self._compiled(task)
            else:
                self._decoders[key] = self._decoder(task, self.models[task.dtype])
        except Exception as error:
            if not cannot_be_fixed(error):
                raise
            backend = self.session.ctx.device.backend
            return f"this torch on {backend} cannot: {why_not(error, numeric_cases.QUOTED)}"
        return ""

    def _compiled(self, task: Task) -> Decoder:
        if self._compiling <= 0:
            raise TimeoutError(f"torch.compile has used up its {COMPILING:g} s")
        clock, started = self.session.ctx.clock, self.session.ctx.clock()
        try:
            if self._compiler is None:
                self._compiler = self.exits.enter_context(compiler())
            with time_limit(self._compiling, "torch.compile"):
                return self._decoder(task, self.models[task.dtype])
        finally:
            self._compiling -= clock() - started

    def _decoder(self, task: Task, model: Canary) -> Decoder:
        prompts, rows = self._on(self.golden.prompts[list(task.rows)]), len(task.rows)
        decoder = Decoder(model, rows, prompts.shape[1], self.golden.tokens.shape[1])
        with on_core(self._place(task)):
            if task.path == "compiled":
                decoder.compile()
                decoder(prompts)  # compiles
            else:
                decoder.capture()
        return decoder

    def verify(self, task: Task, seconds: float) -> Iterator[Comparison | Recording]:
        """Repeat one inference for `seconds`, at least once; yield what became of its tokens and of its logits.

        Of equal vectors one recording is yielded, unless a baseline is being learnt: that counts them.
        """
        ctx, clock = self.session.ctx, self.session.ctx.clock
        started, answers = clock(), [self._infer(task, self.models[task.dtype])]
        while sum(s.wrong for s, _ in answers) < measure.WRONG_ENOUGH and (
            clock() - started < seconds or (ctx.baselining and len(answers) < ENOUGH and ctx.left > 0)
        ):
            answers.append(self._infer(task, self.models[task.dtype]))
        seen = [s for s, _ in answers]
        self.modes.setdefault(task.mode, []).extend(seen)
        again: list[Seen] = []
        if any(s.wrong for s in seen):  # fresh uploads tell a hit of the memory from a unit that errs
            again = [self._infer(task, self._upload(task.dtype))[0] for _ in range(numeric_verify.FRESH_UPLOADS)]
        place = self.session.place_of(self._place(task))
        for suffix, evidences, repeated in (
            ("", [s.tokens for s in seen], [s.tokens for s in again]),
            ("/logits", [s.logits for s in seen], [s.logits for s in again]),
        ):
            case = task.name + suffix
            if numeric_cases.chosen(ctx, case):
                wrong = [e for e in evidences if e]
                count = sum(1 for e in repeated if e)
                found = replace(wrong[0], repeats=len(again), repeats_wrong=count) if wrong else None
                comparison = self._comparison(case, Exactness.MARGIN, place, len(seen), len(wrong), found)
                yield replace(comparison, digest=seen[0].digest) if suffix else comparison
        if numeric_cases.chosen(ctx, f"{task.name}/logits"):
            recordings = [r for _, r in answers]
            yield from recordings if ctx.baselining else {r.digest: r for r in recordings}.values()

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
        read_back = self._comparison(f"{dtype}/weights", Exactness.UNIVERSAL, None, 1, len(wrong[:1]), found)
        device = self.session.ctx.device  # an accelerator only has to keep what was written
        known = device.backend != "cpu" or is_characterised(device, "float32")
        return replace(read_back, characterised=known)

    def readings(self) -> Iterator[Fact]:
        """Yield for how long the device worked, and how far each mode (dtype, path, batch) was from its goldens."""
        yield from self.session.times()
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

    def sensitive(self, task: Task) -> Iterator[Recording | Reading]:
        """Yield what the prompts with thin margins give: a recording, its tokens one a prompt; the rivals' distance.

        Any of it may differ between stacks; none of it is compared here.
        """
        ctx, dtype = self.session.ctx, task.dtype
        for number in range(ENOUGH if ctx.baselining else 1):
            if number and not ctx.left:
                break
            with on_core(self._place(task)), self.session.on_device():
                logits = self.models[dtype].forward(self._on(self.golden.sensitive)).cpu()
            last = logits[None, :, -1]
            recording = record(task.name, self._chain(dtype, self.golden.sensitive), last.argmax(-1), last)
            yield replace(recording, digest=digest(logits))
        for number, (first, second) in enumerate(self.golden.rivals):
            lead = logits[number, -1, first] - logits[number, -1, second]
            if bool(torch.isfinite(lead)):
                labels = {"dtype": dtype, "prompt": str(number)}
                yield Reading(name="canary_sensitive_margin", value=float(lead), unit="1", labels=labels)

    def _chain(self, dtype: str, prompts: Any) -> dict[str, str]:
        """Return what may change the bits for a good reason; the core is none, for it must not."""
        return {
            "checkpoint": self.golden.checkpoint,
            "dtype": dtype,
            "prompt": digest(prompts),
            "settings": self.settings,
        }

    def _place(self, task: Task) -> int | None:
        """Return where a task runs on a CPU; compiled code is made for one place, and all of a mode runs there."""
        return self.session.place(f"{task.dtype}/{task.path}" if task.path in FIXED else task.name)

    def _on(self, tensor: Any) -> Any:
        return tensor.to(torch_device(self.session.ctx.device))

    def _upload(self, dtype: str) -> Canary:
        model = self.golden.model.to(torch_device(self.session.ctx.device), dtype)
        self.session.injector.before(f"{dtype}/weights", (model.weights["embedding"],), 0)
        return model

    def _infer(self, task: Task, model: Canary) -> tuple[Seen, Recording]:
        rows = list(task.rows)
        wanted = self.golden.tokens[rows]
        with on_core(self._place(task)), self.session.on_device():
            prompts = self._on(self.golden.prompts[rows])
            if task.path in FIXED:
                made = self._decoders[task.dtype, task.path, len(rows)]
                tokens, logits = (made if made.model is model else self._decoder(task, model))(prompts)
            elif task.path == "decode":
                tokens, logits = decode(model, prompts, wanted.shape[1])
            else:
                tokens, logits = score(model, prompts, self._on(wanted))
        self.session.injector.after(task.name, tokens)
        self.session.injector.after(f"{task.name}/logits", logits)
        tokens, logits = tokens.cpu(), logits.cpu()
        chain = self._chain(task.dtype, self.golden.prompts[rows])
        if task.path == "compiled":
            chain["compiler"] = self._compiler or ""
        recording = record(f"{task.name}/logits", chain, tokens, logits)
        return look(self.golden, rows, task.dtype, task.path, tokens, logits), recording

    def _comparison(
        self, case: str, exactness: Exactness, place: Place | None, trials: int, wrong: int, found: Evidence | None
    ) -> Comparison:
        ctx = self.session.ctx
        return Comparison(
            case=case,
            shape=f"prompt={self.golden.prompts.shape[1]} tokens={self.golden.tokens.shape[1]}",
            seed=numeric_verify.FIXED_SEED,
            exactness=exactness,
            place=place or Place(unit="device" if ctx.device.backend != "cpu" else ""),
            trials=trials,
            wrong_trials=wrong,
            evidence=found,
            characterised=is_characterised(ctx.device, "float32"),
        )
