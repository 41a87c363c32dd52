"""A real HTTP server that replays what servers answered: bodies trimmed from real ones, see docs/canaries.md."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from canaryd.facts import Recording
from canaryd.model import Device
from canaryd.probe import Context
from tests.http_server import Handler, listening

PROBES = Path(__file__).resolve().parents[3] / "probes"
PROBE = PROBES / "endpoint_canary.py"
PORTABLE = {"model", "prompt", "messages", "max_tokens", "temperature", "stream"}


class Served:
    """Routes "GET /path" or "POST /path" → JSON, bytes, or a function of the request's JSON that gives either.

    A tuple is (status, headers, body). What is not routed is 404. `requests` keeps what came: (route, body, headers).
    """

    def __init__(self, routes: Mapping[str, Any], *, server: str = "uvicorn") -> None:
        self.routes = dict(routes)
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        outer = self

        class Replay(Handler):
            server_version, sys_version = server, ""

            def respond(self) -> None:
                route, body = f"{self.command} {self.path}", self.document()
                outer.requests.append((route, body, dict(self.headers)))
                answer = outer.routes.get(route, (404, {}, {"error": "Not Found"}))
                answer = answer(body) if callable(answer) else answer
                status, headers, content = answer if isinstance(answer, tuple) else (200, {}, answer)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.reply(status, data, headers)

        self.handler, self.url = Replay, ""

    def asked(self, api: str) -> list[dict[str, Any]]:
        """Return the bodies of the requests to an API's path, e.g. "/completions"."""
        return [body for route, body, _ in self.requests if route == f"POST /v1{api}"]


@contextlib.contextmanager
def served(routes: Mapping[str, Any], *, server: str = "uvicorn") -> Iterator[Served]:
    """Serve routes until the end of the block."""
    replay = Served(routes, server=server)
    with listening(replay.handler) as address:
        replay.url = f"http://{address}/v1"
        yield replay


def context(url: str, *, level: str = "quick", seed: int = 0, budget: float = 30.0, **fields: Any) -> Context:
    """Return what the probe is given for an endpoint; `settings` come on top of the address."""
    device = Device(uuid="endpoint:main", backend="endpoint", index=0, model=url)
    settings = {"url": url, **fields.pop("settings", {})}
    return Context(device=device, level=level, seed=seed, budget=budget, settings=settings, **fields)


def recordings(facts: list[Any]) -> dict[str, list[Recording]]:
    """Return the recordings by case."""
    found: dict[str, list[Recording]] = {}
    for fact in facts:
        if isinstance(fact, Recording):
            found.setdefault(fact.case, []).append(fact)
    return found


# --- What servers answer ---------------------------------------------------------------------------------------------


def only(allowed: set[str], answer: Any, complain: Any) -> Any:
    """Return a route that answers a copy of `answer`, or refuses a request with a field beyond the portable ones."""

    def route(body: dict[str, Any]) -> Any:
        unknown = sorted(set(body) - PORTABLE - allowed)
        return complain(unknown[0]) if unknown else copy.deepcopy(answer)

    return route


def extra_forbidden(name: str) -> Any:
    """Return FastAPI's refusal of a field, which echoes the whole request."""
    error = {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted", "input": "x"}
    return 422, {}, {"detail": [error]}


def chat(choice: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Return a chat answer around `logprobs`."""
    message = {"role": "assistant", "content": choice.pop("text")}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, **choice}], **rest}


def completion(choice: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Return a completion around `text` and `logprobs`."""
    return {"object": "text_completion", "choices": [{"index": 0, **choice}], **rest}


def models(*names: str, owner: str = "") -> dict[str, Any]:
    """Return a list of models."""
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner} for name in names]}


VLLM_TOP = [
    {"thod": -4.39196252822876, " W": -4.50133752822876, "a": -4.6, "b": -4.7, "c": -4.8},
    {"bj": -4.180643081665039, "d": -4.3, "e": -4.4, "f": -4.5, "g": -4.6},
]
VLLM_LEGACY = {
    "text_offset": [0, 4],
    "token_logprobs": [-4.39196252822876, -4.180643081665039],
    "tokens": ["thod", "bj"],
    "top_logprobs": VLLM_TOP,
}
RANGE = {
    "token": " range",
    "logprob": -4.480612754821777,
    "bytes": [32, 114, 97, 110, 103, 101],
    "top_logprobs": [
        {"token": " range", "logprob": -4.480612754821777, "bytes": [32, 114, 97, 110, 103, 101]},
        {"token": "env", "logprob": -4.683737754821777, "bytes": [101, 110, 118]},
        *({"token": t, "logprob": -5.0, "bytes": None} for t in "xyz"),
    ],
}
VLLM_METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
"""
ONLY = {
    "id": 1001,
    "token": " only",
    "bytes": [32, 111, 110, 108, 121],
    "logprob": -3.933040142059326,
    "top_logprobs": [
        {"id": 1001, "token": " only", "bytes": None, "logprob": -3.933040142059326},
        {"id": 372, "token": " co", "bytes": [32, 99, 111], "logprob": -4.451022624969482},
        *({"id": i, "token": "", "bytes": [], "logprob": -6.0} for i in (7, 8, 9)),
    ],
}
MLX_WRONG = {
    "id": 511,
    "token": "thod",
    "logprob": -4.8125,
    "top_logprobs": [
        {"id": 511, "token": "thod", "logprob": -4.8125},
        {"id": 182, "token": "÷", "logprob": -4.65625},
        {"id": 753, "token": "ĠW", "logprob": -4.375},
        {"id": 90, "token": "a", "logprob": -5.0},
        {"id": 91, "token": "b", "logprob": -5.0},
    ],
}
COLLIDING = {
    "text_offset": [40],
    "token_logprobs": [-4.37767219543457],
    "tokens": ["q"],
    "top_logprobs": [
        {"q": -4.37767219543457, "---": -4.720351219177246, "": -5.064188003540039, " stream": -5.078561782836914}
    ],
}
BARE_LEGACY = {"tokens": ["q"], "token_logprobs": [-4.5], "top_logprobs": [dict.fromkeys("qrstu", -4.5)]}
LENGTH = {"finish_reason": "length"}
USAGE = {"prompt_tokens": 14, "completion_tokens": 2, "total_tokens": 16}


def _vllm() -> dict[str, Any]:
    both = {"model": "tiny", "system_fingerprint": "vllm-0.32.0-180f2252", "usage": USAGE}
    choice = {"text": "thodbj", "logprobs": VLLM_LEGACY, "token_ids": [511, 512], "prompt_token_ids": [5, 6], **LENGTH}
    said = chat({"text": " range", "logprobs": {"content": [RANGE]}, "token_ids": [77], **LENGTH}, **both)
    return {
        "GET /v1/models": models("tiny", owner="vllm"),
        "GET /version": {"version": "0.32.0"},
        "GET /metrics": VLLM_METRICS,
        "POST /v1/completions": lambda _: completion(dict(choice), **both),
        "POST /v1/chat/completions": {**said, "prompt_logprobs": None, "prompt_token_ids": [1, 2, 3]},
    }


def _llama() -> dict[str, Any]:
    both = {
        "model": "tiny",
        "system_fingerprint": "b0-unknown",
        "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 2}},
        "timings": {"cache_n": 2, "prompt_n": 1},
    }
    return {
        "GET /v1/models": models("tiny", owner="llamacpp"),
        "GET /props": {"default_generation_settings": {}, "build_info": "b0-unknown", "chat_template": "{{ x }}"},
        "GET /slots": [{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}],
        "POST /tokenize": lambda body: {"tokens": [3, 1, 4] if "content" in body else []},
        "POST /apply-template": {"prompt": "<|im_start|>user"},
        "POST /v1/completions": completion({"text": " only", "logprobs": {"content": [ONLY]}, **LENGTH}, **both),
        "POST /v1/chat/completions": chat({"text": " only", "logprobs": {"content": [ONLY]}, **LENGTH}, **both),
    }


def _mlx() -> dict[str, Any]:
    both = {"model": "tiny", "system_fingerprint": "0.32.2-0.32.4-Linux-6.18.44-x86_64", "usage": USAGE}
    scores = {"content": [MLX_WRONG]}

    def refusing(answer: Any) -> Any:
        def route(body: dict[str, Any]) -> Any:
            if not isinstance(body.get("logprobs", False), bool):
                return 400, {}, {"error": "logprobs must be of type bool"}
            return answer

        return route

    return {
        "GET /v1/models": models("tiny"),
        "POST /v1/completions": refusing(completion({"text": "W", "logprobs": scores, **LENGTH}, **both)),
        "POST /v1/chat/completions": refusing(chat({"text": "W", "logprobs": scores, **LENGTH}, **both)),
    }


def _plain(**both: Any) -> dict[str, Any]:
    """Legacy lists on completions, objects without ids in the chat."""
    return {
        "POST /v1/completions": completion({"text": "q", "logprobs": BARE_LEGACY, **LENGTH}, usage=USAGE, **both),
        "POST /v1/chat/completions": chat(
            {"text": " range", "logprobs": {"content": [RANGE]}, **LENGTH}, usage=USAGE, **both
        ),
    }


def _trtllm() -> dict[str, Any]:
    plain = _plain(model="tiny")
    salted = {"logprobs", "top_logprobs", "seed", "cache_salt"}
    return {
        "GET /v1/models": models("tiny"),
        "GET /openapi.json": {"paths": {"/v1/completions": {}, "/_internal/tokenize": {}}},
        "GET /version": {"version": "1.2.0"},
        "POST /v1/completions": only({"logprobs", "seed"}, plain["POST /v1/completions"], extra_forbidden),
        "POST /v1/chat/completions": only(salted, plain["POST /v1/chat/completions"], extra_forbidden),
    }


def _text_only(**both: Any) -> dict[str, Any]:
    return {
        "POST /v1/completions": completion({"text": "syools", **LENGTH}, usage=USAGE, **both),
        "POST /v1/chat/completions": chat({"text": "syools", **LENGTH}, usage=USAGE, **both),
    }


def recorded(name: str) -> dict[str, Any]:
    """Return the routes of a server that answers as `name` was recorded to answer."""
    plain = _plain(model="tiny")
    if name == "llama-cpp-python":
        collided = completion({"text": "q", "logprobs": COLLIDING, **LENGTH}, model="tiny", usage=USAGE)
        return {
            **plain,
            "GET /v1/models": models("tiny", owner="me"),
            "GET /openapi.json": {"paths": {"/extras/tokenize": {}}},
            "POST /extras/tokenize": {"tokens": [1, 2]},
            "POST /v1/completions": collided,
        }
    if name == "sglang":
        return {
            **plain,
            "GET /v1/models": models("tiny", owner="sglang"),
            "GET /server_info": {"version": "0.5.23", "model_path": "/m"},
            "POST /v1/completions": plain["POST /v1/completions"],
        }
    if name == "ollama":
        text_only = _text_only(model="tiny", system_fingerprint="fp_ollama")
        return {
            "GET /v1/models": models("tiny:latest", owner="library"),
            "GET /api/version": {"version": "0.12.9"},
            "GET /api/tags": {"models": [{"name": "tiny:latest", "digest": "c0ffee"}]},
            "POST /v1/completions": text_only["POST /v1/completions"],
            "POST /v1/chat/completions": {**plain["POST /v1/chat/completions"], "system_fingerprint": "fp_ollama"},
        }
    if name == "tgi":
        text_only = _text_only(model="tiny", system_fingerprint="3.3.4-sha-1234567")
        return {
            "GET /v1/models": models("tiny", owner="tiny"),
            "GET /info": {"model_id": "tiny", "version": "3.3.4", "sha": "1234567"},
            "POST /tokenize": [{"id": 7, "text": "a"}, {"id": 8, "text": "b"}],
            "POST /v1/completions": text_only["POST /v1/completions"],
            "POST /v1/chat/completions": plain["POST /v1/chat/completions"],
        }
    if name == "transformers":
        text_only = _text_only(model="/srv/tiny@main")
        return {
            "GET /v1/models": (500, {}, {"detail": "Internal Server Error"}),
            "GET /openapi.json": {"paths": {"/load_model": {}, "/reset": {}}},
            **{route: only(set(), answer, extra_forbidden) for route, answer in text_only.items()},
        }
    if name in ("mindie", "generic"):
        return {**plain, "GET /v1/models": models("tiny", owner="MindIE Server" if name == "mindie" else "somebody")}
    return {"vllm": _vllm, "llama-server": _llama, "mlx-lm": _mlx, "trtllm": _trtllm}[name]()
