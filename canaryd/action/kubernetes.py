"""Ask the API server of Kubernetes with the account of a pod."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token and the certificate of the API server."""
PATIENCE = 10.0
"""Seconds to wait for an answer."""


class ApiError(RuntimeError):
    """Raised if a server gives no usable answer."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for the API server alone."""

    def redirect_request(self, *_: object) -> None:
        """Follow nothing: the answer is an error."""


def in_pod(environ: Mapping[str, str]) -> str:
    """Return the address of the API server, as every pod is told it."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class Api:
    """An API server."""

    address: str
    account: Path = ACCOUNT

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Return the object that the server answers. Raises `ApiError`."""
        try:
            token = (self.account / "token").read_text(encoding="utf-8").strip()  # it is renewed every hour
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(self.address + path, data, headers, method=method)  # noqa: S310  our address
            handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
            if self.address.startswith("https:"):
                context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
                handlers.append(urllib.request.HTTPSHandler(context=context))
            with urllib.request.build_opener(*handlers).open(request, timeout=PATIENCE) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ApiError(f"{method} {path}: {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{method} {path}: {error}") from error
        except ValueError as error:  # its words may hold the token
            raise ApiError(
                f"{method} {path}: the token or the answer cannot be used ({type(error).__name__})"
            ) from None
        if not isinstance(found, dict):
            raise ApiError(f"{method} {path}: the answer is no object")
        return found

    def items(self, path: str) -> list[Json]:
        """Return all objects of a list. Raises `ApiError`, also for a list that goes on: it would count too few."""
        found = self.call("GET", path)
        items = found.get("items")
        if not isinstance(items, list) or (found.get("metadata") or {}).get("continue"):
            raise ApiError(f"GET {path}: no whole list")
        return items
