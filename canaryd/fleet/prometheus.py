"""A small client of the Prometheus HTTP API."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from canaryd.config.values import is_web_address, names_user
from canaryd.facts import printable
from canaryd.hidden import bare, hide, keep

PATIENCE = 60.0
"""Seconds for all queries together unless another time is given (measured: benchmarks/results/fleet_vote.md)."""
LARGEST = 64 * 1024**2
"""Bytes of one answer at most (ours): 10,000 nodes that are all suspect answer with about 10 MB."""
Labels = Mapping[str, str]


class FleetError(Exception):
    """Prometheus cannot be reached, or does not answer as Prometheus does; the message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(hide(message))


class Sample(NamedTuple):
    """One series of an answer at one moment."""

    labels: Labels
    value: float


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could carry the token to another host, so it is an error instead."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> NoReturn:
        del req, msg, headers
        fp.close()
        target = printable(bare(newurl))[:200]
        raise FleetError(f"answers {code}, a redirect to {target}; give the final address instead")


class Prometheus:
    """The query API of one Prometheus, or of a compatible server. Only GET requests are sent."""

    def __init__(
        self, url: str, *, token_file: Path | None = None, ca_file: Path | None = None, patience: float = PATIENCE
    ) -> None:
        """Raise ValueError where the address, the token file or the CA file is invalid. `patience`: seconds."""
        if names_user(url):
            raise ValueError("a password in the address is visible to every user of this machine; use --token-file")
        if not is_web_address(url):
            raise ValueError(f"{printable(url)!r} is not an address of a Prometheus; write e.g. http://HOST:9090")
        scheme = urllib.parse.urlsplit(url).scheme
        self.url = url.rstrip("/")
        self._authorization = _authorization(token_file) if token_file else ""
        if self._authorization and ca_file and scheme == "http":
            raise ValueError("--ca-file needs an https address; with http the token would be sent unencrypted")
        self._deadline = time.monotonic() + patience
        self.patience = patience
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if scheme == "https":
            try:
                context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
            except OSError as error:
                raise ValueError(f"--ca-file {ca_file}: {error}; wanted certificates in PEM") from error
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)
        self.at = 0.0
        """Prometheus's own time of the first answer, used for all later queries; 0.0 before."""
        self.warnings: dict[str, None] = {}
        """Warnings of answers that may be partial, each once."""

    def ask(self, query: str) -> list[Sample]:
        """Return the instant vector of a query; raise FleetError."""
        parameters = {"query": query, "timeout": f"{max(1.0, self._left()):.0f}s"} | (
            {"time": f"{self.at:.3f}"} if self.at else {}
        )
        code, body = self._get(f"{self.url}/api/v1/query?{urllib.parse.urlencode(parameters)}")
        answer = _parsed(code, body)
        for warning in answer.get("warnings") or ():
            self.warnings[f"the answer may be partial: {printable(str(warning))[:300]}"] = None
        try:
            if answer["data"]["resultType"] != "vector":
                raise FleetError(f"answers with a {printable(str(answer['data']['resultType']))[:40]}, wanted a vector")
            found = [_sample(entry) for entry in answer["data"]["result"]]
            if found and not self.at:
                self.at = _finite(answer["data"]["result"][0]["value"][0])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FleetError("answers JSON that is not a query result; is this the address of a Prometheus?") from error
        return found

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _get(self, url: str) -> tuple[int, bytes]:
        """Return status and body. A thread enforces the deadline: a server that sends single bytes never times out."""
        found: list[tuple[int, bytes] | Exception] = []

        def work() -> None:
            try:
                found.append(self._fetch(url))
            except Exception as error:  # noqa: BLE001  the waiting thread raises it again
                found.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(max(0.0, self._left()))
        if not found or isinstance(found[0], TimeoutError):  # the socket's own timeout may be a moment earlier
            raise FleetError(f"did not answer within {self.patience:g} s; allow more with --timeout")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _fetch(self, url: str) -> tuple[int, bytes]:
        headers = {"Accept": "application/json"} | (
            {"Authorization": self._authorization} if self._authorization else {}
        )
        request = urllib.request.Request(url, headers=headers)  # noqa: S310  the scheme was checked
        try:
            with contextlib.closing(self._open(request)) as answer:
                body = answer.read(LARGEST + 1)
                if len(body) > LARGEST:
                    raise FleetError(f"answers with more than {LARGEST // 1024**2} MiB")
                return answer.status or 0, body
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError) and error.reason.errno is None:
                raise error.reason from None
            raise FleetError(f"cannot be reached: {_reason(error.reason)}") from error
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FleetError(f"does not answer like a web server: {_reason(error)}") from error

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return self._opener.open(request, timeout=max(0.1, self._left()))
        except urllib.error.HTTPError as error:
            return error  # Prometheus explains its refusals in the body


def _authorization(path: Path) -> str:
    """Return the value of the Authorization header: the text of a file, as a bearer token unless it names a scheme."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"--token-file {path}: cannot be read: {_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--token-file {path}: is not ASCII: {_reason(error)}") from error
    if not text or not text.isprintable():
        raise ValueError(
            f"--token-file {path}: wanted one line with a token, or with 'Basic ' and base64 of user:password"
        )
    scheme, _, secret = text.partition(" ") if text.lower().startswith(("basic ", "bearer ")) else ("Bearer", "", text)
    keep(secret)
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            keep(base64.b64decode(secret).decode("ascii").partition(":")[2])
    return f"{scheme} {secret}"


def _reason(error: object) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(text or type(error).__name__)[:300]


def _parsed(code: int, body: bytes) -> dict[str, Any]:
    """Return the object of a successful answer; raise FleetError with the server's error, or what it sent instead."""
    try:
        answer = hide(json.loads(body))
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and answer.get("status") == "error":
        reason = printable(f"{answer.get('errorType', '')}: {answer.get('error', '')}")[:300]
        raise FleetError(f"answers {code}: {reason}")
    if code in (401, 403):
        raise FleetError(f"answers {code}: wrong or missing credentials; see --token-file")
    if code == 404:
        raise FleetError("answers 404: no query API at this address; does it need a path such as /prometheus?")
    if code != 200:
        raise FleetError(f"answers {code}")
    if not isinstance(answer, dict) or answer.get("status") != "success":
        kind = "HTML" if body.lstrip()[:1] == b"<" else "JSON of another kind" if answer is not None else "no JSON"
        raise FleetError(f"answers with {kind}, wanted JSON of the query API; is this the address of a Prometheus?")
    return answer


def _sample(entry: Any) -> Sample:
    labels = {str(k): str(v) for k, v in entry["metric"].items()}
    return Sample(labels, _finite(entry["value"][1]))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is neither a count nor a time")
    return number
