"""One serving endpoint: its dialect, the fields that it accepts, cold and warm requests, the provenance of its answers.

A field that the server refuses is not sent again, so that the rest can still be recorded. The link "settings" of an
answer's chain names the accepted fields: if a server begins to refuse one, the chain shows a change of software.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from canaryd.facts import Recording, printable
from canaryd.probe import Context, Skip
from canaryd.worker.endpoint.answers import Answer, parse
from canaryd.worker.endpoint.client import GATEWAY, QUOTED, Client, Refused, Replayed, first_choice
from canaryd.worker.endpoint.dialects import DIALECTS, Dialect, digest, listed, recognise
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.settings import APIS, Settings

CLIENT = 1
"""Version of the requests and of the digests of answers; it must be raised by every change that alters recordings."""
PATHS = {"completions": "/completions", "chat": "/chat/completions"}
LISTED = 8
"""Maximum number of model names that a message lists."""
MAX_TEXT, MAX_TOKEN = 4096, 64
"""Maximum characters of a text and of a token in a recording; the recording's digest covers all characters."""
SPARE = 8
"""Tokens that an answer may have beyond the requested number: special tokens that begin or end a text (ours)."""
TIMED_TEXT = "Count from one to thirty in words, one number after the other, and nothing else."
TIMED_TOKENS = 16


class Endpoint:
    """One server: its dialect, the fields that it accepts, and its answers."""

    def __init__(self, settings: Settings, *, memory: str = "", thorough: bool = False) -> None:
        """Connect to the server and find its dialect, version and model; raise `Skip` if that fails.

        `memory` and `thorough` are passed to `checkpoint.links`, which makes the digests of the server's checkpoint.
        """
        self.settings = settings
        self._client = Client(url=settings.url, key=settings.key, ca_file=settings.ca_file, timeout=settings.timeout)
        models = self._client.api("/models")
        below = "" if settings.url.endswith("/v1") else f"{settings.url}/v1"
        if below and listed(self._client.get("/v1/models").data):
            raise Skip(f'url: {settings.url} is not the full address of its API; write "{below}"')
        if models.status == 404:
            raise Skip(f"GET {settings.url}/models: 404: no OpenAI-compatible API there; correct url")
        if models.status < 400 or models.status in GATEWAY:
            models.json()  # a web page is not the API, and a proxy alone is no server
        self.models = [str(entry["id"]) for entry in listed(models.data)]
        self.dialect: Dialect = (
            DIALECTS[settings.dialect] if settings.dialect else recognise(models, self._client.get, self._smallest)
        )
        self.model = self._choose()
        self.version = printable(self.dialect.version(self._client.get))[:80]
        self.configuration = self.dialect.configuration(self._client.get)
        self.started = self.dialect.start(self._client.get)
        """When the server started, in seconds since the epoch; None if unknown."""
        self.repeats = settings.repeats or self.dialect.promise(self._client.get)
        """When it gives equal bits to equal requests, as `ENDPOINT_REPEATS` says it; "" if unknown."""
        self.dropped: dict[str, set[str]] = {api: set() for api in APIS}
        self._prompts: dict[tuple[str, str], Any] = {}
        self.links = self._links(memory, thorough=thorough)

    def cold(self, api: str) -> str:
        """Return the field that makes a request to this API bypass the prefix cache, or "" if the server has none."""
        field_name = self.dialect.cold if api in self.dialect.cold_apis else ""
        return "" if field_name in self.dropped[api] else field_name

    def ask(self, api: str, prompt: Prompt, *, fresh: bool, salt: str = "") -> Answer:
        """Return the greedy answer to a prompt: its continuation, or a chat's reply if `api` is "chat".

        A `fresh` request bypasses the prefix cache if the server can do this. Any other request finds the cache entries
        of a fresh request with the same `salt`. Raises `Refused` if the server declines the request, else `Skip`.
        """
        extra = dict(self.dialect.fields(api))
        if cold := self.cold(api):
            extra[cold] = salt if cold == "cache_salt" else not fresh
        base = self._base(api, prompt.text, prompt.tokens)
        data, sent = self._send(api, base, extra)
        known = self.settings.exact is not None
        return replace(parse(self.dialect, data, tokens=prompt.tokens + SPARE, known=known), sent=sent)

    def refuse_replays(self, api: str, prompt: Prompt, salt: str, answers: Sequence[Answer]) -> None:
        """Raise `Replayed` if the server answered the second of two equal requests from a cache of whole answers.

        Such an answer is no evidence, because no device computed it. `answers`: both answers. Raises as `ask` does too.
        """
        first, again = (answer.request for answer in answers)
        if first and first == again and self._replays(api, prompt, salt, first):
            raise Replayed(f"POST {self.settings.url}{PATHS[api]}")

    def _replays(self, api: str, prompt: Prompt, salt: str, request: str) -> bool:
        """Return whether the server gives the id `request` again for this prompt, but another id for another prompt.

        Equal ids alone prove nothing: they may be small random numbers (Ollama's have three digits) or always equal.
        """
        once = self.ask(api, prompt, fresh=False, salt=salt).request
        other = self.ask(api, replace(prompt, text=TIMED_TEXT, tokens=TIMED_TOKENS), fresh=True, salt=new_salt())
        more = self.ask(api, prompt, fresh=False, salt=salt).request  # after the other: an id may be a clock's seconds
        return once == more == request != other.request

    def formats(self) -> dict[str, str]:
        """Return the number formats in which the server says that it computes and caches; see `Dialect.formats`."""
        return self.dialect.formats(self._client.get)

    def running(self) -> int | None:
        """Return the number of requests that the server serves or queues now, or None if unknown."""
        return self.dialect.running(self._client.get)

    def latency(self, api: str) -> tuple[float, float | None]:
        """Return the seconds to the first token and the seconds per token after it, from two small requests.

        Both bypass the prefix cache if the server can do this, so that both take the time for the prompt. The second
        value is None if the answer ended before all tokens came. Raises the exceptions of `ask`.
        """
        cold, replies = self.cold(api), []
        for tokens in (1, TIMED_TOKENS):
            fresh = {cold: new_salt() if cold == "cache_salt" else False} if cold else {}
            replies.append(self._client.api(PATHS[api], {**self._base(api, TIMED_TEXT, tokens), **fresh}))
        one, whole = (reply.seconds for reply in replies)
        finishes = [first_choice(reply.json()).get("finish_reason") for reply in replies]
        return one, max(0.0, whole - one) / (TIMED_TOKENS - 1) if finishes[-1] == "length" else None

    def recording(self, case: str, api: str, prompt: Prompt, answer: Answer, condition: str) -> Recording:
        """Return the recording of an answer, with its chain."""
        return Recording(
            case=case,
            digest=answer.digest,
            chain=self._chain(api, prompt, answer),
            condition=condition,
            tokens=tuple(token[:MAX_TOKEN] for token in answer.tokens),
            values=answer.values,
            margins=answer.margins,
            text=answer.text[:MAX_TEXT],
            finish=answer.finish,
        )

    def switches(self) -> str:
        """Return a text with the dialect and, for each API, the non-portable fields that canaryd sends."""
        parts = [f"dialect={self.dialect.name}"]
        for api in self.settings.apis:
            fields = {k: v for k, v in self.dialect.fields(api).items() if k not in self.dropped[api]}
            parts += [f"{api}.{name}={json.dumps(value)}" for name, value in fields.items()]
            parts.append(f"{api}.cold={self.cold(api) or 'not offered'}")
        return " ".join(parts)

    def _chain(self, api: str, prompt: Prompt, answer: Answer) -> dict[str, str]:
        server = [self.dialect.name, self.version, printable(answer.fingerprint)[:120], self.configuration]
        links = dict(self.links)
        if answer.model and not _same(answer.model, self.model):  # a proxy's second choice
            links["checkpoint"] = f"{links.get('checkpoint', '')} {printable(answer.model)[:120]}".strip()
        return {
            **links,
            "prompt": digest([prompt.text, self._rendered(api, prompt, answer)]),
            "settings": answer.sent,
            "server": " ".join(part for part in dict.fromkeys(server) if part),
            "client": f"canaryd {CLIENT} {self.dialect.name}",
        }

    def _rendered(self, api: str, prompt: Prompt, answer: Answer) -> Any:
        """Return the token ids of the rendered prompt, their number if the server gives no ids, or None if unknown."""
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
                messages = {"messages": [{"role": "user", "content": text}]}
                rendered = self._client.post(self.dialect.render, messages).data
            text = rendered.get("prompt", "") if isinstance(rendered, dict) else ""
        if not path or not text:
            return None
        body: dict[str, Any] = {name: text, "model": self.model}
        if name == "content":
            body["add_special"] = True  # llama-server omits them by default, but puts them before a completion
        data = self._client.post(path, body).data
        items = data.get("tokens") if isinstance(data, dict) else data
        given = [item.get("id") if isinstance(item, dict) else item for item in items or ()]
        ids = [i for i in given if isinstance(i, int)]
        return ids if ids and len(ids) == len(given) else None

    def _links(self, memory: str, *, thorough: bool) -> dict[str, str]:
        """Return the links of the chain that are the same for every request, from the checkpoint and from the server.

        The server's links take precedence: they describe the loaded model. The directory can already hold another one.
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
        """Return the model's name; raise `Skip` if the name is ambiguous or the model is not served."""
        wanted, there = self.settings.model, self.models
        names = ", ".join(map(printable, there[:LISTED])) + (", …" if len(there) > LISTED else "")
        if wanted:
            if there and self.dialect.lists_all and not any(_same(name, wanted) for name in there):
                raise Skip(f"model: {wanted!r} is not served; the server lists {names}")
            return wanted
        if len(there) == 1:
            return there[0]
        if there:
            raise Skip(f"model: not set, and the server lists {len(there)}: {names}; choose one")
        raise Skip("model: not set, and the server lists none; set the name that its clients use")

    def _smallest(self) -> Any:
        """Return the answer to a request for one token, or {} if all APIs decline the request."""
        name = self.settings.model or (self.models[0] if len(self.models) == 1 else "")
        for api in self.settings.apis:
            body = {k: v for k, v in self._base(api, "a", 1, name).items() if v != ""}
            try:
                return self._client.api(PATHS[api], body).json()
            except Refused:
                continue
        return {}

    def _base(self, api: str, text: str, tokens: int, model: str | None = None) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        model = self.model if model is None else model
        return {"model": model, **content, "max_tokens": tokens, "temperature": 0, "stream": False}

    def _send(self, api: str, base: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[Any, str]:
        """Send a request; return (JSON of the answer, fields sent, as text). Refused fields of `extra` are left out."""
        dropped, first = set(self.dropped[api]), None
        while True:
            sent = {name: value for name, value in extra.items() if name not in dropped}
            try:
                data = self._client.api(PATHS[api], {**base, **sent}).json()
            except Refused as refused:
                first = first or refused
                named = [name for name in sent if re.search(rf"\b{name}\b", refused.words)]
                if not named and (refused.status not in (400, 422) or not sent):
                    raise self._explained(first) from None
                dropped.add((named or list(sent))[-1])
            else:
                self.dropped[api] |= dropped
                return data, _fields_sent({**base, **sent})

    def _explained(self, refused: Refused) -> Skip:
        """Return the exception for a refusal: `Skip` if the model is missing or the server failed, else `refused`."""
        about_model = re.search(r"\bmodels?\b.*\b(not|unknown|invalid)\b|\bno such model", refused.words, re.IGNORECASE)
        if refused.status == 404 and (about_model or (self.models and self.model not in self.models)):
            names = ", ".join(map(printable, self.models[:LISTED])) or "none"
            return Skip(f"model: {self.model!r} is not served ({refused.words[:QUOTED]}); the server lists {names}")
        return Skip(str(refused)) if refused.status >= 500 and refused.status != 501 else refused


def _same(listed_name: str, wanted: str) -> bool:
    """Return whether two names mean the same model: "qwen" is Ollama's "qwen:latest" and transformers' "qwen@main"."""
    return listed_name in (wanted, f"{wanted}:latest", f"{wanted}@main")


def _fields_sent(body: Mapping[str, Any]) -> str:
    """Return the fields of a request as text, without the prompt and with "(new)" instead of a cache salt."""
    fields = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
    return " ".join(f"{k}={'(new)' if k == 'cache_salt' else json.dumps(v)}" for k, v in fields.items())


def wanted(ctx: Context, case: str) -> bool:
    """Return whether a run includes a case: `ctx.cases` is empty, or has its name or the part before a slash."""
    return not ctx.cases or any(case == want or case.startswith(f"{want}/") for want in ctx.cases)


def new_salt() -> str:
    """Return a cache salt that was never used before; one made from the seed would recur when the run is repeated."""
    return secrets.token_hex(8)
