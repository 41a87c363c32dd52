"""What OpenAI-compatible servers make of the same request: one small adapter each, and how to tell which one answers.

An adapter is data: which fields it may be sent beside the portable ones, where it keeps its version, whether it can be
told to leave its prefix cache alone. Sources: docs/canaries.md, which also says which were run and which only recorded.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from canaryd.model import printable
from canaryd.probe import Skip
from canaryd.worker.endpoint.client import Reply, first_choice

Get = Callable[[str], Reply]
"""Asks for a path below the server's root; any status comes back as a reply."""

TOP = 5
"""Alternatives asked for at each position: the most that every server gives (TGI and MindIE stop at 5)."""
SEED = 1
"""Sampling seed; at temperature 0 it chooses nothing, but mlx_lm.server batches requests that have none."""

MOST_REQUESTS = 10**9
"""Requests being served at once: what is beyond is no number of them."""
READS = 4
"""Times that a configuration is read until two reads in a row agree."""
VOLATILE = frozenset(
    {
        # llama-server's state of a slot, which older versions mix with its settings; a seed that is drawn at the start
        *("id", "id_task", "is_processing", "next_token", "prompt", "seed"),
        # vLLM's sizes that follow from the memory that was free at the start
        *(
            "num_gpu_blocks",
            "num_cpu_blocks",
            "kv_cache_memory_bytes",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
        ),
    }
)
"""Names that are left out of a server's configuration at any depth: they change by themselves."""

_LEGACY: Mapping[str, Any] = MappingProxyType({"logprobs": TOP, "seed": SEED})
_CHAT: Mapping[str, Any] = MappingProxyType({"logprobs": True, "top_logprobs": TOP, "seed": SEED})
_SEED: Mapping[str, Any] = MappingProxyType({"seed": SEED})
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One server's ways. Fields are sent in addition to model, prompt or messages, max_tokens, temperature, stream."""

    name: str
    completions: Mapping[str, Any] = field(default_factory=lambda: _LEGACY)
    chat: Mapping[str, Any] = field(default_factory=lambda: _CHAT)
    cold: str = ""
    """Field that keeps a request off the prefix cache: "cache_prompt" (false) or "cache_salt" (a fresh one); or ""."""
    cold_apis: tuple[str, ...] = ("completions", "chat")
    forced: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    """Fields with which completions score the prompt itself, beside max_tokens 1; empty where that is not offered."""
    greedy_is_best: bool = False
    """True: the reported token is not the generated one; that is the best of the alternatives."""
    versions: tuple[tuple[str, str], ...] = ()
    """(path, key) where the version may be."""
    template: tuple[str, str] | None = None
    """(path, key) where the chat template is."""
    render: str = ""
    """Path that applies the chat template to messages, and answers {"prompt": …}."""
    tokenize: tuple[str, str] | None = None
    """(path, field of the text) that answers with token ids."""
    metrics: tuple[str, ...] = ()
    """Names on /metrics whose sum is the number of requests being served or waiting."""
    slots: str = ""
    """Path that lists slots with "is_processing"."""
    info: str = ""
    """Name on /metrics whose labels are the server's own configuration."""
    configured: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """(paths, keys): the first path that answers says under these keys what the server was told at its start."""
    started: str = ""
    """Name on /metrics of the time when the server started, in seconds since the epoch."""
    digests: str = ""
    """Path that lists models with "digest"."""
    lists_all: bool = True
    """Whether a model that the list lacks is not served either."""

    def fields(self, api: str) -> Mapping[str, Any]:
        """Return what an API of this server may be sent beside the portable fields, most dispensable last."""
        return self.completions if api == "completions" else self.chat

    def version(self, get: Get) -> str:
        """Return the version that the server gives itself, "" where it gives none."""
        return next((text for path, key in self.versions if (text := _text(get(path).data, key))), "")

    def running(self, get: Get) -> int | None:
        """Return how many requests the server serves or keeps waiting now; None where it does not say."""
        if self.slots and isinstance(slots := get(self.slots).data, list):
            return sum(bool(slot.get("is_processing")) for slot in slots if isinstance(slot, dict))
        return _sum(get("/metrics").text, self.metrics) if self.metrics else None

    def start(self, get: Get) -> float | None:
        """Return when the server started, in seconds since the epoch; None where it does not say."""
        samples = _samples(get("/metrics").text, (self.started,)) if self.started else []
        return samples[0] if samples else None

    def configuration(self, get: Get) -> str:
        """Return 8 hex digits over what the server says of its own configuration.

        "" where it says nothing, and where no two of `READS` reads in a row agree: what changes by itself is none.
        """
        before = self._configuration(get)
        for _ in range(READS - 1):
            if not before:
                break
            now = self._configuration(get)
            if now == before:
                return digest(now)[:8]
            before = now
        return ""

    def _configuration(self, get: Get) -> Any:
        if self.info:
            return _labels(get("/metrics").text, self.info)
        paths, keys = self.configured
        for path in paths:
            if isinstance(data := get(path).data, dict):
                return _lasting({key: data[key] for key in keys if key in data})
        return None


VLLM = Dialect(
    name="vllm",
    completions={**_LEGACY, "return_token_ids": True},
    chat={**_CHAT, "return_token_ids": True},
    cold="cache_salt",
    forced={"prompt_logprobs": TOP, "return_token_ids": True},
    versions=(("/version", "version"),),
    tokenize=("/tokenize", "prompt"),
    metrics=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    info="vllm:cache_config_info",
    started="process_start_time_seconds",
)
SGLANG = Dialect(
    name="sglang",
    completions={**_LEGACY, "return_token_ids": True},
    chat={**_CHAT, "return_prompt_token_ids": True},
    cold="cache_salt",
    forced={"echo": True, "logprobs": TOP},
    versions=(("/server_info", "version"), ("/get_server_info", "version")),
    tokenize=("/tokenize", "prompt"),
    metrics=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    configured=(
        ("/server_info", "/get_server_info"),
        (
            *("model_path", "tokenizer_path", "revision", "dtype", "quantization", "kv_cache_dtype", "context_length"),
            *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend"),
            *("tp_size", "pp_size", "dp_size", "ep_size", "page_size", "chunked_prefill_size", "max_prefill_tokens"),
            *("max_running_requests", "schedule_policy", "disable_radix_cache", "disable_cuda_graph"),
            *("enable_mixed_chunk", "enable_torch_compile", "enable_deterministic_inference"),
            *("speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens"),
        ),
    ),
)
TRTLLM = Dialect(  # extra=forbid: one field that it does not know, and the request is refused
    name="trtllm",
    cold="cache_salt",
    cold_apis=("chat",),
    versions=(("/version", "version"),),
)
MINDIE = Dialect(name="mindie")
LLAMA_SERVER = Dialect(
    name="llama-server",
    cold="cache_prompt",
    versions=(("/props", "build_info"),),
    template=("/props", "chat_template"),
    render="/apply-template",
    tokenize=("/tokenize", "content"),
    metrics=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    slots="/slots",
    configured=(("/props",), ("default_generation_settings", "total_slots", "model_path")),
)
LLAMA_CPP_PYTHON = Dialect(
    name="llama-cpp-python",
    forced={"echo": True, "logprobs": TOP},
    tokenize=("/extras/tokenize", "input"),
)
MLX_LM = Dialect(
    name="mlx-lm",
    completions=_CHAT,  # a number for logprobs is refused
    greedy_is_best=True,
    lists_all=False,  # it lists what is in the Hugging Face cache
)
OLLAMA = Dialect(
    name="ollama",
    completions=_SEED,  # logprobs are taken and then left out of the answer
    versions=(("/api/version", "version"),),
    digests="/api/tags",
)
TGI = Dialect(
    name="tgi",
    completions=_SEED,
    versions=(("/info", "version"),),
    tokenize=("/tokenize", "inputs"),
)
TRANSFORMERS = Dialect(
    name="transformers",
    completions=_NONE,  # it drops logprobs; a seed would reset the sampling of everybody else's requests
    chat=_NONE,
    lists_all=False,  # a local directory is not in the list
)
GENERIC = Dialect(name="generic")

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        *(VLLM, SGLANG, TRTLLM, MINDIE, LLAMA_SERVER, LLAMA_CPP_PYTHON, MLX_LM, OLLAMA, TGI, TRANSFORMERS, GENERIC),
    )
}

_OWNERS = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "tensorrt_llm": TRTLLM,
    "MindIE Server": MINDIE,
    "llamacpp": LLAMA_SERVER,
    "library": OLLAMA,
}
"""`owned_by` of the listed models → server."""
_ANSWERS = (
    ("/props", "default_generation_settings", LLAMA_SERVER),
    ("/server_info", "version", SGLANG),
    ("/get_server_info", "version", SGLANG),
    ("/api/version", "version", OLLAMA),
    ("/info", "model_id", TGI),
)
"""(path, key of its JSON, server): asked in this order."""
_PATHS = (
    ("/extras/tokenize", LLAMA_CPP_PYTHON),
    ("/_internal/tokenize", TRTLLM),
    ("/load_model", TRANSFORMERS),
)
"""(path that FastAPI's /openapi.json describes, server)."""
_FINGERPRINTS = (
    (re.compile(r"vllm-"), VLLM),
    (re.compile(r"fp_ollama$"), OLLAMA),
    (re.compile(r"b\d+-"), LLAMA_SERVER),
    (re.compile(r"\d+\.\d+[^-]*-\d+\.\d+[^-]*-(Linux|macOS|Darwin)"), MLX_LM),
    (re.compile(r"\d+\.\d+\.\d+[^-]*-(sha-|native|dev)"), TGI),
)
"""Beginning of `system_fingerprint` → server."""


def recognise(models: Reply, get: Get, ask: Callable[[], Any]) -> Dialect:
    """Return which server answers; `GENERIC` where nothing tells.

    From what is certain to what is weak: the list of models and its headers, paths that one server alone has, the
    fingerprint in the answer to one small request, which `ask` sends.
    """
    if models.server.startswith("llama.cpp"):
        return LLAMA_SERVER
    for model in listed(models.data):
        if (owner := str(model.get("owned_by"))) in _OWNERS:
            return _OWNERS[owner]
    for path, key, dialect in _ANSWERS:
        if isinstance(data := get(path).data, dict) and data.get(key):
            return dialect
    described = get("/openapi.json").data
    paths = described.get("paths") if isinstance(described, dict) else None
    for path, dialect in _PATHS:
        if isinstance(paths, dict) and path in paths:
            return dialect
    answer = ask()
    fingerprint = _text(answer, "system_fingerprint")
    for pattern, dialect in _FINGERPRINTS:
        if pattern.match(fingerprint):
            return dialect
    return TRANSFORMERS if _text(answer, "model").endswith("@main") else GENERIC


def listed(data: Any) -> list[Mapping[str, Any]]:
    """Return the entries of /v1/models; none where the server gives no such list."""
    entries = data.get("data") if isinstance(data, dict) else None
    known = entries if isinstance(entries, list) else []
    return [entry for entry in known if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _text(data: Any, key: str) -> str:
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else ""


def _sum(exposition: str, names: tuple[str, ...]) -> int | None:
    """Return the sum of a Prometheus page's samples of these names; None where it has none of them."""
    samples = _samples(exposition, names)
    return int(min(sum(samples), MOST_REQUESTS)) if samples else None


def _samples(exposition: str, names: tuple[str, ...]) -> list[float]:
    number = r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?"
    found = re.findall(rf"^(?:{'|'.join(names)})(?:\{{.*\}})? +({number})(?![^\s])", exposition, re.MULTILINE)
    return [value for value in map(float, found) if math.isfinite(value)]


def _labels(exposition: str, name: str) -> list[list[list[str]]]:
    """Return the lasting labels of each sample of a Prometheus page's metric, all in order of the alphabet."""
    samples = re.findall(rf"^{name}\{{(.*)\}} ", exposition, re.MULTILINE)
    pairs = [re.findall(r'\b(\w+)="((?:[^"\\]|\\.)*)"', sample) for sample in samples]
    return sorted(sorted([key, value] for key, value in sample if key not in VOLATILE) for sample in pairs)


def _lasting(value: Any) -> Any:
    """Return JSON data without what is `VOLATILE`, in order of the alphabet."""
    if isinstance(value, dict):
        return {key: _lasting(value[key]) for key in sorted(value) if key not in VOLATILE}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


# --- Answers ---------------------------------------------------------------------------------------------------------

UNTHINKABLE = -9999.0
"""What servers write for a log probability of minus infinity; llama-server writes the lowest float32."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """One token of an answer, as it was delivered."""

    token: str
    """Its id as text where the server gives ids, else its text."""
    value: float | None = None
    """Natural logarithm of its probability; may be NaN or infinite."""
    top: tuple[tuple[str, float | None], ...] = ()
    """The most probable tokens with theirs, in the server's order."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a server made of one request, whatever its dialect."""

    text: str
    finish: str = ""
    positions: tuple[Position, ...] = ()
    scored: bool = False
    """Whether it gave log probabilities at all."""
    forced: bool = False
    """True: these are the tokens of the prompt, of which the first has no probability."""
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    fingerprint: str = ""
    sent: str = ""
    """The fields of the request that it answers, as text; of a salt that it had one."""

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

        None with fewer alternatives than were asked for: tokens of equal text collide in some dialects, and one of the
        two best may be missing.
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


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:16]


def parse(dialect: Dialect, data: Any, *, forced: bool = False) -> Answer:
    """Return a server's answer, taken apart; raise `Skip` for a shape that is not known.

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
            text=_said(choice, message),
            finish=str(choice.get("finish_reason") or ""),
            positions=positions,
            scored=scores is not None,
            forced=forced,
            prompt_ids=tuple(choice.get("prompt_token_ids") or data.get("prompt_token_ids") or ()),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            fingerprint=_text(data, "system_fingerprint"),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration, OverflowError):
        keys = ", ".join(sorted(map(str, data))) if isinstance(data, dict) else type(data).__name__
        keys = printable(keys)[:200]
        raise Skip(f"the answer of this {dialect.name} server has a shape that is not known; it holds {keys}") from None


def _said(choice: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    """Return the text; a model that reasons aloud is recorded with its reasoning, which the tokens are part of."""
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
    """Return the position with the token that greedy decoding takes: the best, of equals the one with the lowest id."""
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
    return value if value is not None and math.isfinite(value) and value > UNTHINKABLE else None


def _margin(top: tuple[tuple[str, float | None], ...]) -> float | None:
    known = sorted((value for _, raw in top if (value := _finite(raw)) is not None), reverse=True)
    return known[0] - known[1] if len(top) >= TOP and len(known) > 1 else None
