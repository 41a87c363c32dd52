"""A serving endpoint as a canary sees it: settings, negotiation, requests cold and warm, the chain of what it says.

What a server refuses is dropped and not sent again, so that the rest can still be recorded; what was sent stands in the
link "settings", so that a server that begins to refuse shows as a change of software.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canaryd.model import Recording, printable, reading_key
from canaryd.probe import Absent, Context, Fact, Reading, Skip, Skipped
from canaryd.worker.endpoint.client import SAID, Client, Refused, first_choice
from canaryd.worker.endpoint.dialects import DIALECTS, Answer, Dialect, Position, digest, listed, parse, recognise
from canaryd.worker.endpoint.prompts import Prompt

CLIENT = 1
"""Version of what this file asks and of how it digests answers; raised when either changes the recordings."""
APIS = ("completions", "chat")
PATHS = {"completions": "/completions", "chat": "/chat/completions"}
LISTED = 8
"""Names of models that a message repeats."""
MAX_TEXT = 4096
TIMED_TEXT = "Count from one to thirty in words, one number after the other, and nothing else."
TIMED_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """An endpoint's section of the configuration."""

    url: str
    model: str = ""
    dialect: str = ""
    apis: tuple[str, ...] = APIS
    directory: Path | None = None
    prompts: Path | None = None
    key: str = field(default="", repr=False)
    ca_file: str = ""
    timeout: float = 60.0
    """Seconds per request."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """Return settings out of plain data, None and "" meaning not set; raise `Skip` with every mistake at once."""
        problems = []
        texts = {name: given.get(name) or "" for name in ("url", "model", "dialect", *_FILES)}
        for name, value in texts.items():
            if not isinstance(value, str):
                problems.append(f"{name}: got {type(value).__name__}, wanted a text")
            elif name in _FILES and value and not value.startswith("/"):
                problems.append(f"{name}: got {value!r:.200}, wanted an absolute path")
        if not texts["url"]:
            problems.append('url: not given, wanted e.g. "http://127.0.0.1:8000/v1"')
        if isinstance(texts["dialect"], str) and texts["dialect"] and texts["dialect"] not in DIALECTS:
            problems.append(f"dialect: got {texts['dialect']!r:.200}, wanted one of {', '.join(DIALECTS)}")
        apis = given.get("apis") or APIS
        if not isinstance(apis, (list, tuple)) or not set(map(str, apis)) <= set(APIS):
            problems.append(f"apis: got {apis!r:.200}, wanted a list out of {', '.join(APIS)}")
        timeout = given.get("timeout") or 60.0
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 86400:
            problems.append(f"timeout: got {timeout!r:.200}, wanted seconds from above 0 to 86400")
        if problems:
            raise Skip("; ".join(problems))
        return cls(
            url=texts["url"].rstrip("/"),
            model=texts["model"],
            dialect=texts["dialect"],
            apis=tuple(apis),
            directory=Path(texts["directory"]) if texts["directory"] else None,
            prompts=Path(texts["prompts"]) if texts["prompts"] else None,
            key=_key(Path(texts["key_file"])) if texts["key_file"] else "",
            ca_file=texts["ca_file"],
            timeout=float(timeout),
        )


_FILES = ("directory", "prompts", "key_file", "ca_file")


def _key(path: Path) -> str:
    """Return the API key that a file holds; raise `Skip`, never with the key, where it cannot be used."""
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise Skip(f"key_file: {path}: cannot be read: {error.strerror}") from None
    if mode & 0o004:
        raise Skip(f"key_file: {path}: everybody may read it: chmod o-r {path}")
    text = data.decode("ascii", errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]{1,4096}", text):
        raise Skip(f"key_file: {path}: {len(data)} bytes, wanted one key in one line of printable ASCII")
    return text


class Endpoint:
    """One server, asked: which it is, what it takes, and what it answers."""

    def __init__(self, settings: Settings, *, memory: str = "", thorough: bool = False) -> None:
        """Reach the server, find out its dialect, version and model; raise `Skip` where that is not possible.

        `memory` and `thorough` are for the digests of its checkpoint (`checkpoint.links`).
        """
        self.settings = settings
        self._client = Client(url=settings.url, key=settings.key, ca_file=settings.ca_file, timeout=settings.timeout)
        models = self._client.api("/models")
        below = "" if settings.url.endswith("/v1") else f"{settings.url}/v1"
        if below and listed(self._client.get("/v1/models").data):
            raise Skip(f'url: {settings.url} is not the whole address of its API; write "{below}", which answers')
        if models.status == 404:
            raise Skip(f"GET {settings.url}/models: 404: there is no OpenAI-compatible API; mend url")
        if models.status < 400:
            models.json()  # a web page is not the API
        self.models = [str(entry["id"]) for entry in listed(models.data)]
        self.dialect: Dialect = (
            DIALECTS[settings.dialect] if settings.dialect else recognise(models, self._client.get, self._smallest)
        )
        self.model = self._choose()
        self.version = printable(self.dialect.version(self._client.get))[:80]
        self.configuration = self.dialect.configuration(self._client.get)
        self.started = self.dialect.start(self._client.get)
        """When the server started, in seconds since the epoch; None where it does not say."""
        self.dropped: dict[str, set[str]] = {api: set() for api in APIS}
        self._prompts: dict[tuple[str, str], Any] = {}
        self.links = self._links(memory, thorough=thorough)

    def cold(self, api: str) -> str:
        """Return the field that keeps a request to this API off the prefix cache, "" where there is none."""
        field_name = self.dialect.cold if api in self.dialect.cold_apis else ""
        return "" if field_name in self.dropped[api] else field_name

    @property
    def scores_prompts(self) -> bool:
        """Whether the server offers the log probabilities of a prompt's own tokens."""
        return bool(self.dialect.forced) and "completions" in self.settings.apis

    def ask(self, api: str, prompt: Prompt, *, fresh: bool, salt: str = "") -> Answer:
        """Return the greedy continuation of a prompt, or the answer to it in a chat.

        `fresh`: off the prefix cache where the server can do that. A request that is not fresh finds what a fresh one
        with the same `salt` left. Raises `Refused` for a request that the server declines, `Skip` for all else.
        """
        extra = dict(self.dialect.fields(api))
        if cold := self.cold(api):
            extra[cold] = salt if cold == "cache_salt" else not fresh
        base = self._base(api, prompt.text, prompt.tokens)
        data, sent = self._send(api, base, extra)
        return replace(parse(self.dialect, data), sent=sent)

    def score(self, prompt: Prompt) -> Answer:
        """Return the log probabilities of a prompt's own tokens, off the prefix cache; raises as `ask` does."""
        base = {**self._base("completions", prompt.text, 1), **self.dialect.forced}
        extra = {self.dialect.cold: new_salt()} if self.cold("completions") == "cache_salt" else {}
        data, sent = self._send("completions", base, extra)
        return replace(parse(self.dialect, data, forced=True), sent=sent)

    def running(self) -> int | None:
        """Return how many requests the server serves or keeps waiting now; None where it does not say."""
        return self.dialect.running(self._client.get)

    def latency(self, api: str) -> tuple[float, float | None]:
        """Return the seconds to the first token and between two, of a small streamed request of its own.

        The second is None where fewer than two tokens came. Raises as `ask` does.
        """
        body = {**self._base(api, TIMED_TEXT, TIMED_TOKENS), "stream": True}
        times = []
        for at, event in self._client.stream(PATHS[api], body):
            choice = first_choice(event)
            delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else {}
            if choice.get("text") or any((delta or {}).get(k) for k in ("content", "reasoning_content", "reasoning")):
                times.append(at)
        if not times:
            raise Refused(f"POST {self.settings.url}{PATHS[api]}", 200, "a stream without a token")
        return times[0], (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def recording(self, case: str, api: str, prompt: Prompt, answer: Answer, condition: str) -> Recording:
        """Return the fact that an answer is, with the chain that led to it; `api` is "forced" for a scored prompt."""
        return Recording(
            case=case,
            digest=answer.digest,
            chain=self._chain(api, prompt, answer),
            condition=condition,
            tokens=answer.tokens,
            values=answer.values,
            margins=answer.margins,
            text=answer.text[:MAX_TEXT],
            finish=answer.finish,
        )

    def switches(self) -> str:
        """Return what is sent beside the portable fields, per API, as text."""
        said = [f"dialect={self.dialect.name}"]
        for api in self.settings.apis:
            fields = {k: v for k, v in self.dialect.fields(api).items() if k not in self.dropped[api]}
            said += [f"{api}.{name}={json.dumps(value)}" for name, value in fields.items()]
            said.append(f"{api}.cold={self.cold(api) or 'not offered'}")
        return " ".join([*said, f"forced={' '.join(self.dialect.forced) if self.scores_prompts else 'not offered'}"])

    def _chain(self, api: str, prompt: Prompt, answer: Answer) -> dict[str, str]:
        said = [self.dialect.name, self.version, printable(answer.fingerprint)[:120], self.configuration]
        return {
            **self.links,
            "prompt": digest([prompt.text, self._rendered("chat" if api == "chat" else "completions", prompt, answer)]),
            "settings": answer.sent,
            "server": " ".join(part for part in dict.fromkeys(said) if part),
            "client": f"canaryd {CLIENT} {self.dialect.name}",
        }

    def _rendered(self, api: str, prompt: Prompt, answer: Answer) -> Any:
        """Return what the server made of the prompt's text: its token ids, or else their number."""
        if answer.prompt_ids:
            return list(answer.prompt_ids)
        if (api, prompt.name) not in self._prompts:
            self._prompts[api, prompt.name] = self._tokenized(api, prompt.text)
        return self._prompts[api, prompt.name] or answer.prompt_tokens

    def _tokenized(self, api: str, text: str) -> list[int] | None:
        path, name = self.dialect.tokenize or ("", "")
        if path and api == "chat":
            rendered = None
            if self.dialect.render:
                said = {"messages": [{"role": "user", "content": text}]}
                rendered = self._client.post(self.dialect.render, said).data
            text = rendered.get("prompt", "") if isinstance(rendered, dict) else ""
        if not path or not text:
            return None
        body: dict[str, Any] = {name: text, "model": self.model}
        if name == "content":
            body["add_special"] = True  # llama-server leaves them out by default, and puts them before a completion
        data = self._client.post(path, body).data
        items = data.get("tokens") if isinstance(data, dict) else data
        given = [item.get("id") if isinstance(item, dict) else item for item in items or ()]
        ids = [i for i in given if isinstance(i, int)]
        return ids if ids and len(ids) == len(given) else None

    def _links(self, memory: str, *, thorough: bool) -> dict[str, str]:
        """Return the links that do not depend on the request: of the checkpoint's directory, and as the server says.

        The server's own word goes first: it tells what is loaded, the directory what the next start will load.
        """
        links: dict[str, str] = {}
        if self.settings.directory is not None:
            from canaryd.worker.canary import checkpoint  # noqa: PLC0415 - only where there is one

            try:
                links.update(checkpoint.links(self.settings.directory, memory=memory, thorough=thorough))
            except checkpoint.BadCheckpoint as error:
                raise Skip(f"directory: {error}") from None
        if self.dialect.template:
            path, key = self.dialect.template
            data = self._client.get(path).data
            if isinstance(data, dict) and isinstance(data.get(key), str):
                links["template"] = digest(data[key])
        if self.dialect.digests:
            data = self._client.get(self.dialect.digests).data
            for entry in (data.get("models") if isinstance(data, dict) else None) or ():
                if isinstance(entry, dict) and _same(str(entry.get("name")), self.model) and entry.get("digest"):
                    links["checkpoint"] = digest(entry["digest"])
        return links

    def _choose(self) -> str:
        """Return the model's name; raise `Skip` where it is not known which one is meant."""
        wanted, there = self.settings.model, self.models
        names = ", ".join(map(printable, there[:LISTED])) + (", …" if len(there) > LISTED else "")
        if wanted:
            if there and self.dialect.lists_all and not any(_same(name, wanted) for name in there):
                raise Skip(f"model: {wanted!r} is not served; the server lists {names}")
            return wanted
        if len(there) == 1:
            return there[0]
        if there:
            raise Skip(f"model: not given, and the server lists {len(there)}: {names}; choose one")
        raise Skip("model: not given, and the server lists none; give the name that its clients use")

    def _smallest(self) -> Any:
        """Return the answer to a request for one token, {} where both APIs decline it."""
        name = self.settings.model or (self.models[0] if len(self.models) == 1 else "")
        for api in self.settings.apis:
            body = {k: v for k, v in self._base(api, "a", 1, name).items() if v != ""}
            try:
                return self._client.api(PATHS[api], body).json()
            except Refused:
                continue
        return {}

    def _base(self, api: str, text: str, tokens: int, model: str | None = None) -> dict[str, Any]:
        said = {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        model = self.model if model is None else model
        return {"model": model, **said, "max_tokens": tokens, "temperature": 0, "stream": False}

    def _send(self, api: str, base: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the JSON of an answer and what was sent; drop what is refused of `extra`, remembering what helped."""
        dropped, first = set(self.dropped[api]), None
        while True:
            sent = {name: value for name, value in extra.items() if name not in dropped}
            try:
                data = self._client.api(PATHS[api], {**base, **sent}).json()
            except Refused as refused:
                first = first or refused
                named = [name for name in sent if re.search(rf"\b{name}\b", refused.said)]
                if not named and (refused.status not in (400, 422) or not sent):
                    raise self._explained(first) from None
                dropped.add((named or list(sent))[-1])
            else:
                self.dropped[api] |= dropped
                return data, _spoken({**base, **sent})

    def _explained(self, refused: Refused) -> Skip:
        """Return a refusal as it is to be told: of the model, of this request, or of every request."""
        about_model = re.search(r"\bmodels?\b.*\b(not|unknown|invalid)\b|\bno such model", refused.said, re.IGNORECASE)
        if refused.status == 404 and (about_model or (self.models and self.model not in self.models)):
            names = ", ".join(map(printable, self.models[:LISTED])) or "none"
            return Skip(f"model: {self.model!r} is not served ({refused.said[:SAID]}); the server lists {names}")
        return Skip(str(refused)) if refused.status >= 500 and refused.status != 501 else refused


def _same(listed_name: str, wanted: str) -> bool:
    """Return whether two names mean one model; Ollama's "qwen" is "qwen:latest"."""
    return listed_name in (wanted, f"{wanted}:latest")


def _spoken(body: Mapping[str, Any]) -> str:
    """Return the fields of a request as text: all but the prompt, and of a salt only that there is one."""
    fields = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
    return " ".join(f"{k}={'(new)' if k == 'cache_salt' else json.dumps(v)}" for k, v in fields.items())


def new_salt() -> str:
    """Return a cache salt that no request has had: from the seed it would repeat with the run, and not be cold."""
    return secrets.token_hex(8)


# --- Recording -------------------------------------------------------------------------------------------------------

Item = tuple[str, Prompt]
"""What is asked: an API, or "forced" for the prompt's own tokens, and a prompt."""


def names(item: Item) -> tuple[str, ...]:
    """Return the cases of an item."""
    api, prompt = item
    if api == "forced":
        return (f"forced/{prompt.name}",)
    return tuple(f"{api}/{prompt.name}/{mode}" for mode in ("fresh", "warm"))


class Recorder:
    """Asks items and yields what came as facts; keeps what the readings are made of."""

    def __init__(self, ctx: Context, endpoint: Endpoint) -> None:
        self.ctx, self.endpoint = ctx, endpoint
        self.recorded = 0
        self.nonfinite = 0
        self.answers: dict[Item, Answer] = {}
        """The latest of each item."""
        self.refused: dict[Item, str] = {}
        """Items that the server declines, with its words; they are not asked again."""
        self.strained = ""
        """What went wrong under our own load; "" where nothing did."""

    def wanted(self, case: str) -> bool:
        """Return whether a case was asked for, by its name or by the part of it before a slash."""
        return not self.ctx.cases or any(case == want or case.startswith(f"{want}/") for want in self.ctx.cases)

    def alone(self, item: Item) -> Iterator[Fact]:
        """Ask one item with no other request of ours beside it."""
        if item in self.refused:
            return
        before = self.endpoint.running()
        try:
            answers = self._exchange(item)
        except Refused as refused:
            self.refused[item] = str(refused)
            yield from (Skipped(case=name, reason=str(refused)) for name in names(item) if self.wanted(name))
            return
        after = self.endpoint.running()
        known = before is not None and after is not None
        yield from self._facts(item, answers, "" if not known else "loaded" if before or after else "idle")

    def together(self, items: Sequence[Item]) -> Generator[Fact, None, list[Item]]:
        """Ask several items at the same time; return those that failed, with the reason in `strained`.

        Every failure is one of the load, whatever it looks like: the items were answered when they were asked alone.
        """
        with ThreadPoolExecutor(len(items)) as pool:
            asked = [(item, pool.submit(self._exchange, item)) for item in items]
        failed = []
        for item, future in asked:
            try:
                answers = future.result()
            except Skip as error:
                failed.append(item)
                self.strained = f"the server did not take {len(items)} requests of ours at once: {error}"
            else:
                yield from self._facts(item, answers, "loaded")
        return failed

    def latencies(self, api: str) -> Iterator[Fact]:
        """Yield the seconds to the first token and between tokens, or why there are none."""
        labels = {"api": api}
        why = self.strained  # what the server suffers from may last, and would be measured
        if not why:
            try:
                first, between = self.endpoint.latency(api)
            except Refused as refused:
                why = f"it does not stream: {refused}"
        if why:
            for name in ("endpoint_first_token_seconds", "endpoint_token_seconds"):
                yield Absent(name=reading_key(name, labels), reason=why)
            return
        yield Reading(name="endpoint_first_token_seconds", value=first, unit="seconds", labels=labels)
        if between is None:
            reason = "fewer than two tokens came"
            yield Absent(name=reading_key("endpoint_token_seconds", labels), reason=reason)
        else:
            yield Reading(name="endpoint_token_seconds", value=between, unit="seconds", labels=labels)

    def _exchange(self, item: Item) -> list[Answer]:
        """Return the answers for the cases of an item: a warm one follows a fresh one to the same request."""
        api, prompt = item
        if api == "forced":
            return [self.endpoint.score(prompt)]
        salt = new_salt()
        return [self.endpoint.ask(api, prompt, fresh=fresh, salt=salt) for fresh in (True, False)]

    def _facts(self, item: Item, answers: list[Answer], condition: str) -> Iterator[Fact]:
        self.answers[item] = answers[0]
        for name, given in zip(names(item), answers, strict=True):
            if self.wanted(name):
                answer = injected(given, self.ctx.drill) if self.ctx.drill else given
                self.recorded += 1
                self.nonfinite += answer.nonfinite
                yield self.endpoint.recording(name, *item, answer, condition)


class Progress:
    """How many rounds of requests alone a baselining has had, in a file of `Context.memory` that outlives the worker.

    A later run goes on from there, as long as the endpoint says the same of itself. What cannot be read or written
    makes a run begin anew, which costs time and spoils nothing.
    """

    def __init__(self, memory: str, endpoint: Endpoint) -> None:
        settings = endpoint.settings
        name = f"baselining-{digest([settings.url, endpoint.model])}.json"
        self._file = Path(memory) / name if memory else None
        self._about = digest([endpoint.version, endpoint.configuration, endpoint.links])

    def rounds(self) -> int:
        """Return how many rounds an earlier run has had, 0 where none was cut short."""
        if self._file is None:
            return 0
        try:
            about, rounds = json.loads(self._file.read_text())
        except (OSError, ValueError, TypeError):
            return 0
        return rounds if about == self._about and isinstance(rounds, int) and rounds > 0 else 0

    def keep(self, rounds: int) -> None:
        """Remember the rounds of a run that is cut short; 0 to forget."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if rounds:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                fresh = self._file.with_name(f"{self._file.name}.{os.getpid()}")
                fresh.write_text(json.dumps([self._about, rounds]))
                fresh.replace(self._file)
            else:
                self._file.unlink()


# --- Drills ----------------------------------------------------------------------------------------------------------


def injected(answer: Answer, fault: str) -> Answer:
    """Return an answer with a fault of `canaryd drill` in the probability of one token, or in the text without any.

    Always at the same position: a run that confirms must meet the same fault again. The text says what was done.
    """
    at = [i for i, position in enumerate(answer.positions) if position.value is not None]
    if not at:
        place = len(answer.text) // 2
        return replace(answer, text=f"{answer.text[:place]}[drill: {fault}]{answer.text[place:]}")
    middle = len(at) // 2
    positions = list(answer.positions)
    for i in at[middle % 16 :: 16] if fault == "stuck" else at[middle : middle + 1]:
        positions[i] = _CHANGES[fault](positions[i])
    return replace(answer, positions=tuple(positions), text=f"[drill: {fault} at position {at[middle]}] {answer.text}")


def _bits(change: Callable[[int], int]) -> Callable[[Position], Position]:
    """Return a change of the float32 that the probability was computed in."""

    def changed(position: Position) -> Position:
        (raw,) = struct.unpack("<I", struct.pack("<f", position.value))
        return replace(position, value=struct.unpack("<f", struct.pack("<I", change(raw)))[0])

    return changed


_CHANGES: Mapping[str, Callable[[Position], Position]] = {
    "flip": _bits(lambda raw: raw ^ 1),
    "zero": lambda position: replace(position, value=0.0),
    "swap": lambda position: replace(position, token=f"{position.token}?"),
    "nan": lambda position: replace(position, value=float("nan")),
    "stuck": _bits(lambda raw: raw | 1),
    "consistent": _bits(lambda raw: raw ^ (1 << 23)),
}


# --- Description -----------------------------------------------------------------------------------------------------


def describe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server is and what it honours, from a few small requests; raise `Skip` where it cannot be asked."""
    endpoint = Endpoint(Settings.read(given))
    prompt = Prompt(name="describe", text=TIMED_TEXT, tokens=TIMED_TOKENS)
    apis: dict[str, Any] = {}
    for api in endpoint.settings.apis:
        try:
            answer = endpoint.ask(api, prompt, fresh=True, salt=new_salt())
        except Refused as refused:
            apis[api] = {"refused": str(refused)}
            continue
        apis[api] = {
            "logprobs": answer.scored,
            "alternatives": max((len(position.top) for position in answer.positions), default=0),
            "fields": {k: v for k, v in endpoint.dialect.fields(api).items() if k not in endpoint.dropped[api]},
            "dropped": sorted(endpoint.dropped[api]),
            "prefix_cache_off_by": endpoint.cold(api),
            "fingerprint": answer.fingerprint,
        }
    return {
        "url": endpoint.settings.url,
        "dialect": endpoint.dialect.name,
        "version": endpoint.version,
        "model": endpoint.model,
        "models": endpoint.models,
        "apis": apis,
        "scores_prompts": endpoint.scores_prompts,
        "running": endpoint.running(),
        "links": endpoint.links,
    }
