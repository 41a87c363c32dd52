"""The user's own Hugging Face model in this process: check that it fits, load it, run it.

Only this module needs transformers; it is imported when a model is loaded, always offline. The device computes raw
logits only; digests and probabilities are computed on the host.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canaryd.facts import DTYPES, Reading, Recording, beginning
from canaryd.free_memory import of_host
from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.canary import checkpoint
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.numeric.tensors import bits, torch, torch_device
from canaryd.worker.runtime import interface
from canaryd.worker.telemetry.sysfs import path_setting

ATTENTION = ("sdpa", "eager")
PATHS = ("decode", "forced")
"""Two ways to run a text: decode it token by token from the KV cache, or score a given continuation in one pass."""
MEMORY = 0.9
"""Share of the free memory that a model may take by default (ours)."""
HEADROOM = 512 << 20
"""Bytes to keep for kernels, workspaces and fragmentation, besides weights and cache (ours)."""
TRIES = 64
"""Maximum number of weights that a drill changes, one after the other, until one changes the logits (ours)."""
TEXT = 4096
"""Maximum number of characters of a recording's text; the rest is cut off."""
QUOTED = 200
"""Maximum number of characters that a message quotes of an error text of transformers."""

_ITEMS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSettings:
    """The section probes.model_canary.settings of the configuration."""

    directory: Path
    dtype: str
    """One of `DTYPES`, or "" for the dtype that the checkpoint has."""
    prompts: Path | None
    """A file of prompts, or None for the shipped prompts."""
    memory: float
    """Share of the device's free memory that the model may take, above 0 and at most 1."""
    attention: str


def read_settings(given: Mapping[str, Any]) -> ModelSettings:
    """Return the settings; raise `ValueError` for a wrong one, `Skip` if no model is named."""
    known = {"directory", "dtype", "prompts", "memory", "attention"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{unknown[0]}: model_canary has no such setting; it has {', '.join(sorted(known))}")
    if not given.get("directory"):
        raise Skip("no model is named: set probes.model_canary.settings.directory to a Hugging Face directory")
    dtype, attention = given.get("dtype", ""), given.get("attention", ATTENTION[0])
    for name, value, choices in (("dtype", dtype, ("", *DTYPES)), ("attention", attention, ATTENTION)):
        if value not in choices:
            raise ValueError(f"{name}: got {value!r}, wanted one of {', '.join(map(repr, choices))}")
    memory = given.get("memory", "")
    if memory == "":
        memory = MEMORY
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory <= 1:
        raise ValueError(f"memory: got {memory!r}, wanted a share of the free memory such as 0.5")
    prompts = path_setting(given, "prompts", "/etc/canaryd/prompts.json") if given.get("prompts") else None
    return ModelSettings(path_setting(given, "directory", "/models/mine"), dtype, prompts, float(memory), attention)


@dataclass(frozen=True)
class Tokenized:
    """A prompt as tokens of this model's tokenizer."""

    name: str
    ids: tuple[int, ...]
    count: int
    """Number of tokens to decode after the prompt."""


@dataclass(frozen=True)
class Inferred:
    """The result of one inference as host tensors."""

    tokens: tuple[int, ...]
    """The continuation: chosen by the model when decoding, given by the caller when scoring."""
    logits: Any
    """Raw logits in the model's format: (tokens, vocabulary) when decoding, (positions, vocabulary) when scoring."""
    hidden: tuple[Any, ...] = ()
    """Per layer the state at the last position, with the embedding's state first; empty if not requested."""


class Checkpoint:
    """A directory that transformers can load, with its tokenizer; the weights are not loaded yet."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.transformers = _transformers()
        try:
            self.stored = sum(file.stat().st_size for file in checkpoint.weights(settings.directory))
        except checkpoint.BadCheckpoint as error:
            raise Skip(str(error)) from error
        except OSError as error:
            raise Skip(f"{error.filename or settings.directory}: cannot be read: {error.strerror}") from error
        with self._refusing("configuration"):
            self.config = self._load(self.transformers.AutoConfig)
        self.quantised = getattr(self.config, "quantization_config", None) is not None
        # Without these files transformers makes an empty tokenizer, for which all texts are the same.
        if not any((settings.directory / name).is_file() for name in checkpoint.VOCABULARIES):
            names = ", ".join(checkpoint.VOCABULARIES)
            raise Skip(f"{settings.directory}: has no tokenizer; wanted one of {names}")
        with self._refusing("tokenizer"):
            self.tokenizer = self._load(self.transformers.AutoTokenizer)
        self.dtype = settings.dtype or self._own_dtype()

    def tokens(self, name: str, text: str, count: int) -> Tokenized:
        """Return a prompt as token ids, with the special tokens that the tokenizer adds before plain text."""
        return Tokenized(name, tuple(self.tokenizer(text)["input_ids"]), count)

    def room(self, prompt: Tokenized) -> str:
        """Return the reason why this model cannot run a prompt, or "" if it can."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        length = len(prompt.ids) + prompt.count
        if not prompt.ids:
            return "its tokenizer gives no token for this prompt"
        return f"{length} tokens, but the model takes at most {longest}" if longest and length > longest else ""

    def need(self, prompts: Sequence[Tokenized]) -> int:
        """Return the bytes that the model needs on its device: weights, KV cache, logits and states of one prompt.

        This is an estimate: weights from the sizes of their files, cache and states from the sizes in config.json, and
        `HEADROOM` for the kernels.
        """
        item, text = _ITEMS[self.dtype], self.config.get_text_config()
        length = max(len(p.ids) + p.count for p in prompts)
        hidden, layers = _size(text, "hidden_size"), _size(text, "num_hidden_layers")
        heads = _size(text, "num_attention_heads") or 1
        cache = (
            2 * layers * (_size(text, "num_key_value_heads") or heads) * (_size(text, "head_dim") or hidden // heads)
        )
        states = layers * hidden + 2 * _size(text, "vocab_size")
        return self.weights() + length * item * (cache + states) + HEADROOM

    def weights(self) -> int:
        """Return the bytes of all weights in `dtype`, or in the stored format if the model is quantised.

        Files whose format config.json does not give count as 16-bit, the narrowest format.
        """
        if self.quantised:
            return self.stored
        return self.stored * _ITEMS[self.dtype] // _ITEMS.get(self._named(), 2)

    def load(self, device: Device) -> Model:
        """Return the model on its device; raise `Skip` if it cannot be loaded or if some of its weights are missing."""
        directory, wanted = self.settings.directory, getattr(torch, self.dtype)
        with self._refusing("weights"):
            model, report = self._load(
                self.transformers.AutoModelForCausalLM,
                dtype=wanted,
                attn_implementation=self.settings.attention,
                output_loading_info=True,
            )
        # transformers fills missing weights with random numbers, different ones each time.
        missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        if missing:
            raise Skip(f"{directory}: lacks {len(missing)} of the model's weights, for example {missing[0]}")
        kinds = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())
        if not self.quantised and kinds.most_common(1)[0][0] != self.dtype:
            raise Skip(f"{directory}: transformers loaded {dict(kinds)} instead of {self.dtype}")
        return Model(model.to(torch_device(device)).eval(), self.tokenizer)

    @property
    def server(self) -> str:
        """Name and version of the software that computes, for the chain of a recording."""
        return f"transformers {self.transformers.__version__}"

    def _load(self, loader: Any, **more: Any) -> Any:
        return loader.from_pretrained(
            str(self.settings.directory), local_files_only=True, trust_remote_code=False, **more
        )

    def _named(self) -> str:
        """Return the number format in config.json, or "" if there is none."""
        return str(getattr(self.config.get_text_config(), "dtype", None) or "").removeprefix("torch.")

    def _own_dtype(self) -> str:
        if self._named() not in DTYPES:
            raise Skip(f"{self.settings.directory}: names no floating-point format that runs here; set dtype")
        return self._named()

    @contextlib.contextmanager
    def _refusing(self, part: str) -> Iterator[None]:
        """Turn errors of transformers while it loads `part` into `Skip`, except errors about memory."""
        try:
            yield
        except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError, RuntimeError) as error:
            if "memory" in str(error):
                raise
            text = beginning(str(error), QUOTED)
            if getattr(getattr(self, "config", None), "auto_map", None) or "trust_remote_code" in str(error):
                text = "it needs code from the checkpoint, which canaryd never runs"
            raise Skip(f"{self.settings.directory}: {self.server} cannot load its {part}: {text}") from error


class Model:
    """A model on its device."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def decode(self, prompt: Tokenized) -> Inferred:
        """Prefill the prompt, then decode greedily from the KV cache; an end-of-text token does not stop decoding."""
        cache, step, tokens, logits = None, self._ids(prompt.ids), [], []
        for _ in range(prompt.count):
            answer = self.model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            logits.append(answer.logits[:, -1])
            step = logits[-1].argmax(-1, keepdim=True)
            tokens.append(step)
        return Inferred(tuple(torch.cat(tokens, 1)[0].tolist()), torch.cat(logits).cpu())

    def score(self, prompt: Tokenized, continuation: Sequence[int], *, hidden: bool = False) -> Inferred:
        """Score prompt and continuation in one pass; `hidden` asks for each layer's state at the last position too."""
        ids = self._ids([*prompt.ids, *continuation[:-1]])
        answer = self.model(input_ids=ids, use_cache=False, output_hidden_states=hidden)
        states = tuple(state[0, -1].cpu() for state in answer.hidden_states) if hidden else ()
        return Inferred(tuple(continuation), answer.logits[0].cpu(), states)

    def strike(self, fault: faults.Fault, seed: int, prompts: Sequence[Tokenized]) -> str:
        """Put a drill's fault into one weight so that every prompt's last logits change; return the weight's name.

        The same seed changes the same weight. Raises `Skip` if none of `TRIES` weights changes the logits.
        """
        named = [(n, p) for n, p in self.model.named_parameters() if p.is_floating_point() and p.is_contiguous()]
        before = [self._last(prompt) for prompt in prompts]
        for attempt in range(TRIES):
            name, parameter = named[mix64(seed + attempt) % len(named)]
            kept = parameter.data
            parameter.data = kept.clone()  # loaded weights may be the mapped file itself
            fault.change(bits(parameter.data).view(-1), mix64(seed - attempt) >> 1)
            if all(self._last(prompt) != was for prompt, was in zip(prompts, before, strict=True)):
                return str(name)
            parameter.data = kept
        raise Skip(f"the fault {fault.name!r} was not injected: it changed no result in any of {TRIES} weights")

    def close(self) -> None:
        """Free the model's memory: other probes share this process, and a server may share the device."""
        kind = self.model.device.type
        del self.model
        gc.collect()
        if kind != "cpu":
            getattr(torch, kind).empty_cache()

    def _last(self, prompt: Tokenized) -> str:
        return digest(self.score(prompt, (0,)).logits[-1])

    def _ids(self, ids: Sequence[int]) -> Any:
        return torch.tensor([list(ids)], device=self.model.device)


def recording(case: str, seen: Inferred, chain: Mapping[str, str], text: str) -> Recording:
    """Return the recording of the inference `seen`; its digest covers the tokens and every bit of the logits.

    Probabilities are computed in float32 on the host, at the positions that chose or scored the continuation.
    """
    logits = seen.logits[-len(seen.tokens) :].to(torch.float32)
    chances = torch.log_softmax(logits, -1)
    values = chances.gather(-1, torch.tensor(seen.tokens)[:, None])[:, 0]
    best = chances.topk(2, -1).values
    return Recording(
        case=case,
        digest=_sha(f"{digest(seen.logits)} {seen.tokens}"),
        chain=chain,
        tokens=tuple(map(str, seen.tokens)),
        values=_finite(values),
        margins=_finite(best[:, 0] - best[:, 1]),
        text=text[:TEXT],
        finish="length",
    )


def layers(seen: Inferred, dtype: str, prompt: str) -> Iterator[Reading]:
    """Yield a reading for each layer: a digest of its output at the last position. Layer 0 is the embedding."""
    for number, state in enumerate(seen.hidden):
        labels = {"layer": str(number), "dtype": dtype, "prompt": prompt}
        yield Reading(name="model_layer_digest", value=digest(state), labels=labels)


def chain_of(links: Mapping[str, str], model: Checkpoint, prompt: Tokenized) -> dict[str, str]:
    """Return the chain of one prompt: the checkpoint's links without "template", and "prompt", "settings", "server"."""
    settings = {"dtype": model.dtype, "attention": model.settings.attention, "tokens": prompt.count}
    return {
        **{link: value for link, value in links.items() if link != "template"},
        "prompt": _sha(json.dumps(prompt.ids)),
        "settings": _sha(json.dumps(settings, sort_keys=True)),
        "server": model.server,
    }


def check_memory(model: Checkpoint, device: Device, need: int) -> None:
    """Raise `Skip` unless `need` bytes fit on the device, and the weights on the host, which loads them first."""
    share = model.settings.memory
    places = [(f"on {device.name}", need, device_memory(device))]
    if device.backend != "cpu":
        places.append(("on the host, where it is loaded first", model.weights(), host_memory()))
    for place, wanted, free in places:
        if wanted > free * share:
            raise Skip(
                f"{model.settings.directory} in {model.dtype} needs {_gib(wanted)} {place}; {_gib(free)} are free,"
                f" and the model may take {share:g} of that (memory): free some memory, or choose a smaller model"
            )


def device_memory(device: Device) -> int:
    """Return the bytes of memory that are free on a device; raise `Skip` if the number is unknown."""
    target = torch_device(device)
    if target.type == "cpu":
        return host_memory()
    if target.type == "mps":  # one memory for host and device
        return min(host_memory(), int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()))
    free, _ = interface.of(device).memory(device)
    if free is None:
        raise Skip(f"this torch does not report the free memory of {device.name}: no model is loaded beside a server")
    return free


def host_memory() -> int:
    """Return the bytes that new programs can use without swapping: MemAvailable, or psutil's number elsewhere."""
    if (free := of_host()) is not None:
        return free
    try:
        return int(importlib.import_module("psutil").virtual_memory().available)
    except ImportError as error:
        raise Skip("free memory is unknown here without psutil: install psutil beside torch") from error


def _transformers() -> Any:
    # Read when the library is imported; another probe that imported it before was offline as well.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        raise Skip(
            f"transformers cannot be imported ({error}): pip install 'canaryd[model]' into worker.python"
        ) from error
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _finite(values: Any) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"
