"""The dialects of OpenAI-compatible servers: one small adapter for each, and the way to recognise a server.

An adapter is data: the fields that a server accepts besides the portable ones, the path of its version, the field that
bypasses its prefix cache. `DIALECTS` of canaryd/config/values.py must list its name. Sources, and the servers that
were run or only recorded: docs/canaries.md.
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

from canaryd.worker.endpoint.client import Reply

Get = Callable[[str], Reply]
"""A function that requests a path below the server's root and returns the reply, whatever its status."""

TOP = 5
"""Alternatives requested at each position: the largest number that every server gives (TGI and MindIE give 5)."""
SEED = 1
"""Sampling seed; at temperature 0 it changes nothing, but mlx_lm.server batches requests without a seed."""

LONGEST_NAME = 256
"""Maximum number of characters of a model's name (ours)."""
MOST_SAMPLES, LONGEST_SAMPLE = 16, 8192
"""Maximum samples read of one metric (a server has one per engine), and maximum characters of each (ours)."""
MOST_REQUESTS = 10**9
"""Largest plausible number of requests being served."""
ROUNDING = ("quantization", "kv_cache_dtype", "cache_dtype")
"""Names under which servers report number formats that may round."""
READS = 4
"""Maximum number of times that a configuration is read until two consecutive reads agree."""
VOLATILE = frozenset(
    {
        # llama-server's state of a slot, which older versions mix with its settings; a seed drawn at the start
        *("id", "id_task", "is_processing", "next_token", "prompt", "seed"),
        # vLLM's sizes, which follow from the memory that was free at the start
        *("num_gpu_blocks", "num_cpu_blocks", "kv_cache_memory_bytes", "kv_cache_size_tokens"),
        "kv_cache_max_concurrency",
    }
)
"""Names left out of a server's configuration at any depth, because their values change on their own."""

_LEGACY: Mapping[str, Any] = MappingProxyType({"logprobs": TOP, "seed": SEED})
_CHAT: Mapping[str, Any] = MappingProxyType({"logprobs": True, "top_logprobs": TOP, "seed": SEED})
_SEED: Mapping[str, Any] = MappingProxyType({"seed": SEED})
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One kind of server. Its request fields are sent besides model, prompt or messages, and other portable fields."""

    name: str
    completions: Mapping[str, Any] = field(default_factory=lambda: _LEGACY)
    chat: Mapping[str, Any] = field(default_factory=lambda: _CHAT)
    cold: str = ""
    """Field that bypasses the prefix cache: "cache_prompt" (false), "cache_salt" (a fresh value), or "" (none)."""
    cold_apis: tuple[str, ...] = ("completions", "chat")
    greedy_is_best: bool = False
    """True if the server can report a wrong token; the generated token is then the most probable alternative."""
    versions: tuple[tuple[str, str], ...] = ()
    """Places where the version may be found: (path, key of its JSON)."""
    template: tuple[str, str] | None = None
    """Place of the chat template: (path, key of its JSON)."""
    render: str = ""
    """Path of a request that applies the chat template to messages and returns {"prompt": …}."""
    tokenize: tuple[str, str] | None = None
    """(path that returns the token ids of a text, field of the request that holds the text)."""
    metrics: tuple[str, ...] = ()
    """Names of metrics on /metrics whose sum is the number of requests being served or waiting."""
    slots: str = ""
    """Path that lists the server's slots for requests, each with a flag "is_processing"."""
    info: str = ""
    """Name of the metric on /metrics whose labels are the server's own configuration."""
    configured: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """(paths, keys): the start options are the values of these keys in the JSON of the first path that answers."""
    started: str = ""
    """Name of the metric on /metrics that holds the server's start time (epoch s)."""
    repeats: tuple[tuple[str, str], ...] = ()
    """(key, promise): what a true value on `configured`'s page promises, one of `ENDPOINT_REPEATS`."""
    untuned: bool = False
    """Whether the server chooses its kernels by rule, so that every start gives the same answers."""
    digests: str = ""
    """Path that lists the models, each with the "digest" of its files."""
    lists_all: bool = True
    """Whether /v1/models lists every model that the server serves."""

    def fields(self, api: str) -> Mapping[str, Any]:
        """Return the fields that this server accepts besides the portable ones; the least important field is last."""
        return self.completions if api == "completions" else self.chat

    def version(self, get: Get) -> str:
        """Return the version that the server reports, or "" if it reports none."""
        return next((text for path, key in self.versions if (text := text_of(get(path).data, key))), "")

    def running(self, get: Get) -> int | None:
        """Return the number of requests that the server serves or queues now, or None if unknown."""
        if self.slots and isinstance(slots := get(self.slots).data, list):
            return sum(bool(slot.get("is_processing")) for slot in slots if isinstance(slot, dict))
        samples = _samples(get("/metrics").text, self.metrics) if self.metrics else []
        return int(min(sum(samples), MOST_REQUESTS)) if samples else None

    def start(self, get: Get) -> float | None:
        """Return the time at which the server started (epoch s), or None if unknown."""
        samples = _samples(get("/metrics").text, (self.started,)) if self.started else []
        return samples[0] if samples else None

    def configuration(self, get: Get) -> str:
        """Return a digest (8 hex digits) of the configuration that the server reports.

        Returns "" if the server reports none, or if no two consecutive reads of `READS` agree.
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

    def promise(self, get: Get) -> str:
        """Return when the server gives equal bits to equal requests, as `ENDPOINT_REPEATS` says it; "" for unknown."""
        pages = (get(path).data for path in (self.configured[0] if self.repeats else ()))
        data = next((page for page in pages if isinstance(page, dict)), {})
        return next((told for key, told in self.repeats if data.get(key) is True), "restarts" if self.untuned else "")

    def formats(self, get: Get) -> dict[str, str]:
        """Return name → number format in which the server says that it computes or caches; {} if it reports none."""
        found = self._configuration(get)
        pairs = list(found.items()) if isinstance(found, dict) else [pair for sample in found or () for pair in sample]
        return {name: str(value or "") for name, value in pairs if name in ROUNDING}

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
    repeats=(("enable_deterministic_inference", "always"), ("disable_flashinfer_autotune", "restarts")),
)
TRTLLM = Dialect(  # extra=forbid: it refuses a request with an unknown field
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
    untuned=True,
)
LLAMA_CPP_PYTHON = Dialect(
    name="llama-cpp-python",
    untuned=True,
    tokenize=("/extras/tokenize", "input"),
)
MLX_LM = Dialect(
    name="mlx-lm",
    completions=_CHAT,  # it refuses a number for logprobs
    greedy_is_best=True,
    untuned=True,
    lists_all=False,  # it lists what is in the Hugging Face cache
)
OLLAMA = Dialect(
    name="ollama",
    completions=_SEED,  # it accepts logprobs and omits them from the answer
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
    completions=_NONE,  # it ignores logprobs; a seed would reset the sampling of all other requests
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
"""`owned_by` of a listed model → the server's dialect."""
_ANSWERS = (
    ("/props", "default_generation_settings", LLAMA_SERVER),
    ("/server_info", "version", SGLANG),
    ("/get_server_info", "version", SGLANG),
    ("/api/version", "version", OLLAMA),
    ("/info", "model_id", TGI),
)
"""Signs of a server: (path, key of the JSON that this path returns, the server's dialect), requested in this order."""
_PATHS = (
    ("/extras/tokenize", LLAMA_CPP_PYTHON),
    ("/_internal/tokenize", TRTLLM),
    ("/load_model", TRANSFORMERS),
)
"""Signs of a server: (path that only this server lists in FastAPI's /openapi.json, the server's dialect)."""
_FINGERPRINTS = (
    (re.compile(r"vllm-"), VLLM),
    (re.compile(r"fp_ollama$"), OLLAMA),
    (re.compile(r"b\d+-"), LLAMA_SERVER),
    (re.compile(r"\d+\.\d+[^-]*-\d+\.\d+[^-]*-(Linux|macOS|Darwin)"), MLX_LM),
    (re.compile(r"\d+\.\d+\.\d+[^-]*-(sha-|native|dev)"), TGI),
)
"""Beginning of `system_fingerprint` → the server's dialect."""


def recognise(models: Reply, get: Get, ask: Callable[[], Any]) -> Dialect:
    """Return the dialect of the server that answers, or `GENERIC` if the server is not recognised.

    Strong signs are checked first: the list `models` and its headers, and paths that only one server has. The last
    sign is the fingerprint in the answer to one small request; `ask` sends this request and returns its JSON.
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
    fingerprint = text_of(answer, "system_fingerprint")
    for pattern, dialect in _FINGERPRINTS:
        if pattern.match(fingerprint):
            return dialect
    return TRANSFORMERS if text_of(answer, "model").endswith("@main") else GENERIC


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:16]


def listed(data: Any) -> list[Mapping[str, Any]]:
    """Return the entries of /v1/models, or [] if the server gives no such list."""
    entries = data.get("data") if isinstance(data, dict) else None
    known = entries if isinstance(entries, list) else []
    return [entry for entry in known if isinstance(entry, dict) and 0 < len(text_of(entry, "id")) <= LONGEST_NAME]


def text_of(data: Any, key: str) -> str:
    """Return the text under a key of `data`, or "" if there is none."""
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else ""


def _samples(exposition: str, names: tuple[str, ...]) -> list[float]:
    """Return the value of every sample of the metrics `names` on a Prometheus page."""
    number = r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?"
    found = re.findall(rf"^(?:{'|'.join(names)})(?:\{{.*\}})? +({number})(?![^\s])", exposition, re.MULTILINE)
    return [value for value in map(float, found) if math.isfinite(value)]


def _labels(exposition: str, name: str) -> list[list[list[str]]]:
    """Return the labels of each sample of a Prometheus metric as [[name, value], …], without those in `VOLATILE`."""
    samples = re.findall(rf"^{name}\{{(.*)\}} ", exposition, re.MULTILINE)[:MOST_SAMPLES]
    pairs = [re.findall(r'\b(\w+)="((?:[^"\\]|\\.)*)"', sample[:LONGEST_SAMPLE]) for sample in samples]
    return sorted(sorted([key, value] for key, value in sample if key not in VOLATILE) for sample in pairs)


def _lasting(value: Any) -> Any:
    """Return JSON data without the keys in `VOLATILE`; the other keys are sorted."""
    if isinstance(value, dict):
        return {key: _lasting(value[key]) for key in sorted(value) if key not in VOLATILE}
    return [_lasting(item) for item in value] if isinstance(value, list) else value
