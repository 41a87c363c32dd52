"""Label the pod behind an endpoint, for gateways: `python3 -m canaryd.action.label`, a process and account of its own.

It asks the gate about the endpoint and the devices that serve it, by the rules of `/endpoints/NAME/ready`. A gateway
leaves out the pods with the value "false" (docs/enforcement.md). "pending" comes before: the pod serves on, and every
process that counts the others sees it. So two pods never leave at once as the last two.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from canaryd.action.kubernetes import ACCOUNT, Api, ApiError, in_pod
from canaryd.action.watch import Turns, asking, options
from canaryd.config import load
from canaryd.config.load import ConfigError
from canaryd.engine.endpoints import named
from canaryd.judge.phrases import count
from canaryd.model import State
from canaryd.report import gate
from canaryd.report.replica import ALSO, CAUSES

KEY = "canaryd.io/trusted"
TRUSTED, PENDING, OUT = "true", "pending", "false"
"""Values of the label; neither of a pod that is pending nor of one that is out may the answers be trusted."""
ENDED = ("Succeeded", "Failed")
"""Phases of a pod that has ended: another may have its address now."""


class Pod(NamedTuple):
    """What the API server says about a pod."""

    name: str
    uid: str
    label: str | None
    ready: bool


@dataclass(kw_only=True)
class Labeller(Turns):
    """The label of one pod."""

    api: Api
    question: gate.Question
    namespace: str
    selector: str
    """Labels of all pods that serve the model, as `kubectl get pods -l` takes them."""
    field: str
    """A field selector for the pod."""
    service: str = ""
    """The Service that the pod is behind, or ""."""

    def act(self, answer: gate.Answer, silence: str, _now: float) -> Iterator[str]:
        """Change the label as the gate's answer asks for, and yield a line for each change."""
        why = gate.in_words(answer, self.question, silence)
        if silence and answer.decision == gate.FAIL:
            yield f"would take the pod out: {why} (log only: {silence})"
        pod = self.pod()
        if silence:
            yield from self.change(pod, pod.label, None, f"enforcement is silenced ({silence})")
        elif answer.decision == gate.FAIL or (answer.decision == gate.UNKNOWN and pod.label in (PENDING, OUT)):
            yield from self.take_out(pod, why)
        elif answer.decision == gate.PASS:
            yield from self.change(pod, pod.label, TRUSTED, why)

    def take_out(self, pod: Pod, why: str) -> Iterator[str]:
        """Announce it, then count the others: of several pods that do so at once, the last to count sees them all."""
        announced = pod.label if pod.label in (PENDING, OUT) else PENDING
        yield from self.change(pod, pod.label, announced, why)
        others = [p for p in self.pods(self.selector) if p.ready and p.label not in (PENDING, OUT) and p.uid != pod.uid]
        yield from self.change(pod, announced, OUT if others else PENDING, why)
        if not others:
            yield f"{pod.name} stays in service: no other pod of {self.selector} is ready and trusted"

    def change(self, pod: Pod, before: str | None, value: str | None, why: str) -> Iterator[str]:
        """Write the label where it changes (None: no label), unless another pod has the name now."""
        if value != before:
            body = {"metadata": {"uid": pod.uid, "labels": {KEY: value}}}
            self.api.call("PATCH", self.path("pods", pod.name), body)
            yield f"{pod.name}: {KEY}={value}: {why}" if value else f"{pod.name}: {KEY} withdrawn: {why}"

    def pod(self) -> Pod:
        """Return the pod. Raises `ApiError` unless it is exactly one, and its Service answers from it alone."""
        found = self.pods(self.selector, self.field)
        if len(found) != 1:
            raise ApiError(f"{count(len(found), 'pod')} of {self.selector} with {self.field}; exactly one must match")
        if self.service:
            spec = self.api.call("GET", self.path("services", self.service)).get("spec") or {}
            labels = ",".join(f"{key}={value}" for key, value in (spec.get("selector") or {}).items())
            here = spec.get("internalTrafficPolicy") == "Local" and spec.get("clusterIP") != "None"
            if not (here and labels and self.pods(labels, self.field) == found):
                raise ApiError(f"Service {self.service} may answer from another pod than {found[0].name}")
        return found[0]

    def pods(self, selector: str, field: str = "") -> list[Pod]:
        """Return the pods that live. Raises `ApiError`."""
        path = f"{self.path('pods')}?{urlencode({'labelSelector': selector, 'fieldSelector': field})}"
        try:
            return [
                Pod(
                    name=meta["name"],
                    uid=meta["uid"],
                    label=(meta.get("labels") or {}).get(KEY),
                    ready=any((c["type"], c["status"]) == ("Ready", "True") for c in status.get("conditions") or ()),
                )
                for meta, status in ((each["metadata"], each["status"]) for each in self.api.items(path))
                if status.get("phase") not in ENDED and "deletionTimestamp" not in meta
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ApiError(f"a pod of {path} has another shape: {error!r}") from error

    def path(self, kind: str, name: str = "") -> str:
        """Return the path of objects, or of one, in the API."""
        return "/".join(["/api/v1/namespaces", quote(self.namespace), kind, *([quote(name)] if name else [])])


def place(url: str, namespace: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the field selector for an endpoint's pod, and its Service or "". Raises `ValueError` if nothing tells."""
    if name := environ.get("POD_NAME"):
        return f"metadata.name={name}", ""
    if not (node := environ.get("NODE_NAME")):
        raise ValueError("neither POD_NAME nor NODE_NAME is set; set one from metadata.name or spec.nodeName")
    here, host = f"spec.nodeName={node}", urlsplit(url).hostname or ""
    try:
        return f"status.podIP={ipaddress.ip_address(host)},{here}", ""
    except ValueError:
        service, _, rest = host.partition(".")
        if rest.partition(".")[0] != namespace:
            raise ValueError(f"{url} is neither a pod's address nor a Service of {namespace}") from None
        return here, service


def main(words: Sequence[str] | None = None) -> None:
    """Keep the label of one pod, for ever."""
    parser = options("label", "Label the pod behind an endpoint.")
    parser.add_argument("--endpoint", required=True, metavar="NAME", help="of the configuration")
    parser.add_argument("--namespace", required=True, help="of the pods")
    parser.add_argument("--selector", required=True, metavar="LABELS", help="of all pods that serve the model")
    parser.add_argument("--on", action="append", choices=list(ALSO), default=[], help="a state that counts too")
    parser.add_argument("--api", default=in_pod(os.environ), metavar="URL")
    parser.add_argument("--account", type=Path, default=ACCOUNT, metavar="DIR")
    given = parser.parse_args(words)
    if not given.selector or KEY in given.selector:
        parser.error(f"--selector {given.selector!r}: write labels that all pods of the model have, such as app=vllm")
    states = (State.FAULTY, *(ALSO[name] for name in given.on))
    question = gate.Question(on=states, causes=CAUSES, endpoint=given.endpoint)
    try:
        url = named(load.load(given.config))[given.endpoint].url
        field, service = place(url, given.namespace, os.environ)
    except KeyError:
        parser.error(f"--endpoint {given.endpoint}: the configuration has no such endpoint with a url")
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    Labeller(
        api=Api(address=given.api, account=given.account),
        ask=asking(given.config, question),
        question=question,
        namespace=given.namespace,
        selector=given.selector,
        field=field,
        service=service,
    ).run(given.every)


if __name__ == "__main__":
    main()
