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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canaryd.facts import DTYPES, Recording, beginning
from canaryd.free_memory import of_host
from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.canary import checkpoint
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.tensors import bits, torch, torch_device
from canaryd.worker.runtime import interface
from canaryd.worker.telemetry.sysfs import only, path_setting

ATTENTION = "sdpa"
"""The implementation of attention in transformers: its default, and its fastest."""
PATHS = ("decode", "forced")
"""Two ways to run a text: decode it token by token from the KV cache, or score a given continuation in one pass."""
MEMORY = 0.9
"""Share of the free memory that a model may take (ours)."""
HEADROOM = 512 << 20
"""Bytes to keep for kernels, workspaces and fragmentation, besides weights and cache (ours)."""
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


def read_settings(given: Mapping[str, Any]) -> ModelSettings:
    """Return the settings; raise `ValueError` for a wrong one, `Skip` if no model is named."""
    only(given, "model_canary", "directory", "dtype", "prompts")
    if not given.get("directory"):
        raise Skip("no model is named: set probes.model_canary.settings.directory to a Hugging Face directory")
    dtype = given.get("dtype", "")
    if dtype not in ("", *DTYPES):
        raise ValueError(f"dtype: got {dtype!r}, wanted one of {', '.join(DTYPES)}")
    prompts = path_setting(given, "prompts", "/etc/canaryd/prompts.json") if given.get("prompts") else None
    return ModelSettings(path_setting(given, "directory", "/models/mine"), dtype, prompts)


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

    def struck(self, fault: faults.Fault, choice: int) -> Inferred:
        """Return a copy with a fault in the logits of the continuation; `choice` picks the place."""
        logits = self.logits.clone()
        fault.change(bits(logits[-len(self.tokens) :]).view(-1), choice)
        return replace(self, logits=logits)


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
                attn_implementation=ATTENTION,
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

    def score(self, prompt: Tokenized, continuation: Sequence[int]) -> Inferred:
        """Score prompt and continuation in one pass."""
        answer = self.model(input_ids=self._ids([*prompt.ids, *continuation[:-1]]), use_cache=False)
        return Inferred(tuple(continuation), answer.logits[0].cpu())

    def close(self) -> None:
        """Free the model's memory: other probes share this process, and a server may share the device."""
        kind = self.model.device.type
        del self.model
        gc.collect()
        if kind != "cpu":
            getattr(torch, kind).empty_cache()

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


def chain_of(links: Mapping[str, str], model: Checkpoint, prompt: Tokenized) -> dict[str, str]:
    """Return the chain of one prompt: the checkpoint's links without "template", and "prompt", "settings", "server"."""
    settings = {"dtype": model.dtype, "attention": ATTENTION, "tokens": prompt.count}
    return {
        **{link: value for link, value in links.items() if link != "template"},
        "prompt": _sha(json.dumps(prompt.ids)),
        "settings": _sha(json.dumps(settings, sort_keys=True)),
        "server": model.server,
    }


def check_memory(model: Checkpoint, device: Device, need: int) -> None:
    """Raise `Skip` unless `need` bytes fit on the device, and the weights on the host, which loads them first."""
    places = [(f"on {device.name}", need, device_memory(device))]
    if device.backend != "cpu":
        places.append(("on the host, where it is loaded first", model.weights(), host_memory()))
    for place, wanted, free in places:
        if wanted > free * MEMORY:
            raise Skip(
                f"{model.settings.directory} in {model.dtype} needs {_gib(wanted)} {place}; {_gib(free)} are free,"
                f" and the model may take {MEMORY:g} of that: free some memory, or choose a smaller model"
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
