"""What the alerts about devices claim, held against the verdicts that raise them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import yaml

from canaryd.judge.incidents import WRONG
from canaryd.model import Cause, State, Verdict
from tests.command import ROOT
from tests.story.playing import Played

RULES = ROOT / "deploy/prometheus/canaryd.rules.yml"
TEXTS: Mapping[str, Mapping[str, str]] = {
    rule["alert"]: rule["annotations"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def wrong(verdict: Verdict) -> bool:
    """Return whether a finding of the verdict's own state is about wrong results."""
    return any(f.rule in WRONG for f in verdict.findings if f.state is verdict.state)


CLAIMS: Mapping[str, Callable[[Verdict], bool]] = {
    "(confirmed)": lambda v: v.state is State.FAULTY,
    "the fault is not confirmed": lambda v: v.state is State.SUSPECT,
    "gives wrong results because of its software": lambda v: wrong(v) and v.cause is Cause.SOFTWARE,
    "do not send the part back.": lambda v: v.cause is not Cause.HARDWARE,
    "has a hardware fault": lambda v: v.cause is Cause.HARDWARE,
    "the part is at fault, not its software": lambda v: v.cause is Cause.HARDWARE,
    "the cause is hardware": lambda v: v.cause is Cause.HARDWARE,
    "the cause is software": lambda v: v.cause is Cause.SOFTWARE,
    "the cause is not known yet": lambda v: v.cause not in (Cause.HARDWARE, Cause.SOFTWARE),
    "no wrong result is known": lambda v: not any(f.rule in WRONG for f in v.findings),
}
"""What a text may claim, in small letters → whether it is true of a verdict."""
DELICATE = ("confirmed", "hardware", "software", "wrong results", "processor", "memory", "cause", "part", "ended")
"""Words that no text about a device has outside of `CLAIMS`: each says something that can be untrue."""


def fired(verdict: Verdict) -> Iterator[str]:
    """Yield the alerts that a verdict raises and that no worse one mutes, as canaryd.rules.yml has them."""
    host, endpoint = verdict.device.startswith("CPU-"), verdict.device.startswith("endpoint:")
    if verdict.state is State.FAULTY:
        yield "CanarydHostFaulty" if host else "CanarydDeviceFaulty"
        if verdict.cause is Cause.SOFTWARE:
            yield "CanarydDeviceFaultySoftware"
        if verdict.cause is Cause.HARDWARE and not host:
            yield "CanarydDeviceFaultyHardware"
    if verdict.state is State.SUSPECT:
        yield "CanarydHostSuspect" if host else "CanarydEndpointDeparted" if endpoint else "CanarydDeviceSuspect"
    if verdict.state is State.DEGRADED and any(f.rule == "readings-lost" for f in verdict.findings):
        yield "CanarydReadingsLost"
    elif verdict.state is State.DEGRADED:
        yield "CanarydDeviceDegraded"


def rendered(text: str, cause: Cause) -> str:
    """Return a text as Prometheus renders it for a cause: its question for the cause, and names for the labels.

    tests/deploy/rules/annotations.yml has promtool render the same.
    """

    def chosen(found: re.Match[str]) -> str:
        known = cause in (Cause.HARDWARE, Cause.SOFTWARE)
        return found[1].replace('{{ . | first | label "cause" }}', cause.value) if known else found[2]

    text = re.sub(r"\{\{ with .*?\| query \}\}(.*?)\{\{ else\s*\}\}(.*?)\{\{ end \}\}", chosen, text, flags=re.DOTALL)
    return re.sub(r"\{\{.*?\}\}", "X", text, flags=re.DOTALL)


def untrue(verdict: Verdict, texts: Mapping[str, Mapping[str, str]] = TEXTS) -> list[str]:
    """Return what the alerts that a verdict raises claim wrongly, or claim without a test of it."""
    found = []
    for name in fired(verdict):
        told = rendered("\n".join((texts[name]["summary"], texts[name]["description"])), verdict.cause).lower()
        for claim, holds in CLAIMS.items():
            if claim in told and not holds(verdict):
                found.append(f'{name} says "{claim}" of {verdict.state} {verdict.cause}')
            told = told.replace(claim, "")
        told = "\n".join(line for line in told.splitlines() if not line.startswith("canaryd "))
        found += [f'{name} says "{word}" without a claim' for word in DELICATE if re.search(rf"\b{word}\b", told)]
    return found


def untrue_of(played: Played) -> list[str]:
    """Return what the alerts of a played story claim wrongly in any round."""
    every = (v for verdicts in played.verdicts.values() for v in verdicts if v is not None)
    return sorted({text for verdict in every for text in untrue(verdict)})
