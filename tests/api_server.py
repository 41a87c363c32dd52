"""A small API server: a token, Kubernetes' own schemas, and the admission policies of deploy/kubernetes by CEL."""

from __future__ import annotations

import contextlib
import functools
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.command import ROOT
from tests.http_server import Handler, listening

try:
    import celpy
except ImportError:  # the policies are then not enforced, and their own tests say that they are skipped
    celpy = None  # type: ignore[assignment]

Json = dict[str, Any]
COMPONENTS = ROOT / "deploy/kubernetes/components"


def merge(into: Json, patch: Json) -> None:
    """Apply a merge patch (RFC 7386)."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


class Policy:
    """An admission policy as the API server applies it to one account: what is not shown to be allowed is refused."""

    def __init__(self, path: Path, account: str) -> None:
        documents = {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}
        policy, binding = documents["ValidatingAdmissionPolicy"], documents["ValidatingAdmissionPolicyBinding"]
        assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
        self.spec, self.account = policy["spec"], account
        assert self.spec["failurePolicy"] == "Fail"

    def refusal(self, operation: str, resource: str, new: Json | None, old: Json | None) -> str:
        """Return the message with which a request is refused, or "". `resource`: such as "resource.k8s.io/pods"."""
        group, _, kind = resource.rpartition("/")
        rules = self.spec["matchConstraints"]["resourceRules"]
        asked = [r for r in rules if group in r["apiGroups"] and kind in r["resources"]]
        if celpy is None or not any(operation in rule["operations"] for rule in asked):
            return ""
        request = {"operation": operation, "userInfo": {"username": self.account}}
        given = {"object": new, "oldObject": old, "request": request, "variables": {}}
        if not all(self._of(each["expression"], given) for each in self.spec["matchConditions"]):
            return ""
        for each in self.spec.get("variables", ()):
            given["variables"][each["name"]] = self._of(each["expression"], given)
        try:
            wrong = [v["message"] for v in self.spec["validations"] if not self._of(v["expression"], given)]
        except celpy.CELEvalError as error:
            return f"{error}"
        return "; ".join(wrong)

    @staticmethod
    def _of(expression: str, given: Json) -> Any:
        return _program(expression).evaluate(celpy.json_to_cel(given))


@functools.cache
def _program(expression: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression))


class ApiServer(ABC):
    """What every such server does; `answer` is its own."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.status = 200
        """What it answers to every GET, with nothing to read unless it is 200."""
        server = self

        class Asked(Handler):
            def respond(self) -> None:
                document = self.document()
                status, found = server.status if self.command == "GET" else 200, {}
                if self.headers["Authorization"] != "Bearer secret":
                    status = 401
                elif status == 200:
                    self.body = document or {}
                    url = urlsplit(self.path)
                    status, found = server.answer(self, url.path, dict(parse_qsl(url.query)))
                self.reply(status, json.dumps(found).encode())

        self._open = contextlib.ExitStack()
        self.address = f"http://{self._open.enter_context(listening(Asked))}"

    @abstractmethod
    def answer(self, request: Any, path: str, query: dict[str, str]) -> tuple[int, Json]:
        """Return the status and the object for a request with `command`, `headers` and `body`."""

    def close(self) -> None:
        """End it."""
        self._open.close()
