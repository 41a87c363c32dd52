"""What a serving endpoint says in JSON: every dialect's answers, lists, metrics and settings, and what is made of them.

Only `Skip`, one printable line. An answer's values are finite or None, margins not negative, its recording plain data
that a store and the protocol take; what was not scored has no values. Prompts are refused with all mistakes at once, or
are within their bounds. Symptoms are found in any text, in bounded time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canaryd.facts import Recording
from canaryd.judge.recordings import triage
from canaryd.probe import Skip
from canaryd.worker.endpoint import prompts
from canaryd.worker.endpoint.answers import Answer, parse
from canaryd.worker.endpoint.canary import Endpoint
from canaryd.worker.endpoint.client import Reply, _message, _without, read
from canaryd.worker.endpoint.dialects import DIALECTS, listed, recognise
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.recorder import injected
from canaryd.worker.endpoint.settings import APIS, Settings
from tests.fuzz.material import Choices, dumps, modes, seed, stretched, warped
from tests.fuzz.properties import finite, in_time, lines, one_line, plain, scratch
from tests.worker.endpoint.served import Served, recorded, served

NAMES = tuple(DIALECTS)
PROMPT = Prompt(name="reef", text="The diver sank slowly towards the reef. " * 3)
BODIES = [
    (name, body)
    for name in ("vllm", "llama-server", "mlx-lm", "tgi", "sglang", "transformers", "generic", "ollama")
    for route, body in recorded(name).items()
    if route.startswith("POST /v1/") and not callable(body)
]
METRICS = (
    '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\n'
    'vllm:num_requests_waiting{a="b",c="d\\"e"} 2e+1\nsglang:num_running_reqs 3\nprocess_start_time_seconds 1.7e9\n'
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="9"} 1.0\nllamacpp:requests_processing 1\n'
)


def _parsed(data: bytes) -> None:
    choices = Choices(data)
    name, body = choices.of(BODIES)
    dialect = DIALECTS[name if choices.flag() else choices.of(NAMES)]
    document = _parsed_json(warped(body, choices))
    try:
        answer = parse(dialect, document, tokens=64)
    except Skip as error:
        one_line(str(error))
        return
    sound(answer, choices)


def _parsed_json(document: Any) -> Any:
    """A document as the client reads it."""
    return read(dumps(document))[0]


def sound(answer: Answer, choices: Choices) -> None:
    for value in (*answer.values, *answer.margins):
        assert value is None or finite(value) is None
    assert all(margin is None or margin >= 0 for margin in answer.margins)
    assert len(answer.values) in (0, len(answer.positions))
    assert answer.scored or not answer.values
    assert answer.nonfinite >= 0
    assert re.fullmatch("[0-9a-f]{16}", answer.digest)
    made = recording(answer)
    plain(made)
    if choices.flag():
        plain(recording(injected(answer, choices.of(("flip", "zero", "swap", "nan", "stuck", "consistent")))))
    other = replace(made, text=choices.text(), tokens=made.tokens[: choices.below(3)])
    for known in ((), (made,), (other,)):
        symptom = triage.kind_of_wrong(made, known)
        if symptom is not None:
            plain(symptom.evidence)
            lines(symptom.evidence)


def recording(answer: Answer) -> Recording:
    return Recording(
        case="completions/reef/fresh",
        digest=answer.digest,
        tokens=answer.tokens,
        values=answer.values,
        margins=answer.margins,
        text=answer.text[:4096],
        finish=answer.finish,
    )


def _told(data: bytes) -> None:
    """Lists of models, versions, slots, settings and metrics, as `recognise` and the dialect's questions read them."""
    choices = Choices(data)
    documents = {
        "/props": {"default_generation_settings": {"n": [1, {"seed": 2}]}, "build_info": "b1", "total_slots": 1},
        "/slots": [{"id": 0, "is_processing": True}],
        "/server_info": {"version": "0.5", "dtype": "bf16"},
        "/version": {"version": "0.5"},
        "/api/version": {"version": "0.5"},
        "/info": {"model_id": "m", "version": "3"},
        "/openapi.json": {"paths": {"/extras/tokenize": {}}},
        "/v1/models": {"data": [{"id": "tiny", "owned_by": "vllm"}]},
    }
    given = {path: _parsed_json(warped(said, choices)) for path, said in documents.items() if choices.flag()}
    metrics = METRICS
    for _ in range(choices.below(4)):
        at = choices.below(len(metrics))
        metrics = metrics[:at] + choices.text() + metrics[at + choices.below(9) :]
    _questions(given, metrics, choices)


def _metrics(data: bytes) -> None:
    """A page of metrics of any text."""
    data = stretched(data)
    with in_time(len(data)):
        _questions({}, data.decode("utf-8", "replace"), Choices(b""))


def _questions(given: Mapping[str, Any], metrics: str, choices: Choices) -> None:
    def get(path: str) -> Reply:
        text = metrics if path == "/metrics" else ""
        return Reply(
            where=path,
            status=200,
            headers={"Server": choices.text()},
            body=bytearray(text.encode("utf-8", "replace")),
            data=given.get(path),
        )

    try:
        found = recognise(get("/v1/models"), get, lambda: given.get("/props"))
        for dialect in (found, *DIALECTS.values()):
            assert isinstance(dialect.version(get), str)
            running = dialect.running(get)
            assert running is None or (isinstance(running, int) and running >= 0), running
            start = dialect.start(get)
            assert start is None or finite(start, 0.0) is None
            assert re.fullmatch("([0-9a-f]{8})?", dialect.configuration(get))
    except Skip as error:
        one_line(str(error))
    assert all(isinstance(model["id"], str) for model in listed(given.get("/v1/models")))


PROMPTS = {"prompts": [{"name": "reef", "text": "x" * 80, "tokens": 64}, {"name": "sand", "text": "y" * 80}]}


def _prompt_file(data: bytes) -> None:
    """A file of prompts, spoilt or not."""
    choices = Choices(data)
    with scratch.fresh() as place:
        file = place / "prompts.json"
        file.write_bytes(choices.rest() if choices.flag() else dumps(warped(PROMPTS, choices)).encode())
        _prompts(file)


def _prompts(file: Path) -> None:
    try:
        found = prompts.load(file)
    except Skip as error:
        for problem in str(error).splitlines():
            one_line(problem)
        return
    assert 1 <= len(found) <= prompts.MAX_PROMPTS
    assert len({prompt.name for prompt in found}) == len(found)
    for prompt in found:
        assert prompts.NAME.fullmatch(prompt.name)
        assert prompts.SHORTEST <= len(prompt.text) <= prompts.LONGEST
        assert type(prompt.tokens) is int
        assert prompts.FEWEST <= prompt.tokens <= prompts.MOST
        json.dumps(prompt.text).encode()


_served: list[Served] = []


def _whole(data: bytes) -> None:
    """A whole endpoint over HTTP: recognised, asked, recorded, while some of its answers are spoilt."""
    if not _served:
        opened = contextlib.ExitStack()
        _served.append(opened.enter_context(served({})))
        atexit.register(opened.close)
    server = _served[0]
    choices = Choices(data)
    routes = recorded(choices.of(("vllm", "llama-server", "mlx-lm", "sglang", "generic")))
    for route, body in list(routes.items()):
        if isinstance(body, (dict, list)) and choices.flag():
            routes[route] = dumps(warped(body, choices)).encode("utf-8")
        elif isinstance(body, bytes) and choices.flag():
            routes[route] = choices.text(200).encode("utf-8", "replace") + body
    server.routes = routes
    server.requests.clear()
    try:
        endpoint = Endpoint(Settings.read({"url": server.url, "timeout": 20}))
        for api in APIS:
            made = endpoint.recording(
                f"{api}/reef", api, PROMPT, endpoint.ask(api, PROMPT, fresh=True, salt="s"), "idle"
            )
            plain(made)
            lines(made.chain["server"])
        endpoint.running()
        lines(endpoint.switches())
    except Skip as error:
        one_line(str(error))


def _said(data: bytes) -> None:
    """What a server says about a failure is repeated without what was sent."""
    choices = Choices(data)
    detail = {"detail": [{"loc": ["body", 1], "msg": "no"}], "error": {"message": "m", "detail": {"msg": "x"}}}
    said = _message(_parsed_json(warped(detail, choices)))
    assert isinstance(said, str)
    sent = choices.text(60) * 3
    kept = _without(choices.text() + sent + choices.text(), sent)
    assert len(sent) < 24 or sent not in kept


def _document(data: bytes) -> None:
    """Any JSON, as the answer to everything that a server is asked, in every dialect."""
    text = stretched(data).decode("utf-8", "replace")
    document = read(text)[0]
    with in_time(len(text) * 20):
        for dialect in DIALECTS.values():
            try:
                sound(parse(dialect, document, tokens=64), Choices(b""))
            except Skip as error:
                one_line(str(error))
        paths = ("/v1/models", "/props", "/slots", "/server_info", "/version", "/api/version", "/info", "/openapi.json")
        _questions(dict.fromkeys(paths, document), "", Choices(b""))
        assert isinstance(_message(document), str)


target = modes(_parsed, _told, _metrics, _prompt_file, _whole, _said, _document)


def seeds() -> list[bytes]:
    return [
        *(seed(mode, bytes([n]) + bytes(range(n, n + 50))) for mode in (0, 1, 3, 4, 5) for n in range(0, 200, 25)),
        seed(2, METRICS),
        *(seed(2, line) for line in METRICS.split("\n")),
        *(seed(6, dumps(body)) for _, body in BODIES),
    ]
