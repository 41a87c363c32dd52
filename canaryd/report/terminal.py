"""How verdicts and findings look on a terminal, the same in every command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from canaryd.facts import printable
from canaryd.formatting import wrapped
from canaryd.model import Cause, Finding, Rival, State, Verdict

Line = tuple[str, str]
"""(role, text): the role chooses the colour, and "" has none."""
COLOURS = {"bad": "\x1b[31m", "calm": "\x1b[33m", "good": "\x1b[32m", "head": "\x1b[1m"}
RESET = "\x1b[0m"
ROLES: Mapping[State, str] = {State.HEALTHY: "good", State.SUSPECT: "bad", State.FAULTY: "bad"}
"""State → role; every other state is "calm"."""
NAME_THEIR_PROBE = frozenset(
    {
        *("not-completed", "device-error", "no-evidence", "stale-evidence", "checked-nothing", "telemetry-stale"),
        *("unjudged", "exact-mismatch", "exact-mismatch-confirmed", "keeps-failing"),
    }
)
"""Rules whose messages name the probe, so that it need not stand before them."""
CANARYD = "canaryd itself"
"""Cause `harness` in words."""


def paint(lines: Iterable[Line], *, color: bool) -> str:
    """Return lines as one text that is safe on a terminal; in colours if `color`."""
    safe = ((role, printable(text)) for role, text in lines)
    return "\n".join(
        f"{COLOURS[role]}{text}{RESET}" if color and role in COLOURS and text else text for role, text in safe
    )


def paragraph(lead: str, text: str, width: int | None = None, role: str = "") -> list[Line]:
    """Return a text as wrapped lines of one role; see `wrapped`."""
    return [(role, line) for line in wrapped(lead, text, width)]


def role_of(state: State) -> str:
    """Return the role of a state."""
    return ROLES.get(state, "calm")


def cause_note(cause: Cause) -> str:
    """Return a cause as it stands in brackets after a state: "faulty (hardware)", "suspect (cause undetermined)"."""
    return "cause undetermined" if cause is Cause.UNDETERMINED else cause_words(cause)


def headline(verdict: Verdict) -> str:
    """Return state and cause: "FAULTY, cause: hardware"."""
    cause = "" if verdict.cause is Cause.NONE else f", cause: {cause_words(verdict.cause)}"
    return f"{'DRILL, not the device: ' if verdict.drill else ''}{verdict.state.value.upper()}{cause}"


def cause_words(cause: Cause) -> str:
    """Return a cause as people read it: `harness` is "canaryd itself"."""
    return CANARYD if cause is Cause.HARNESS else cause.value


def rival_words(rival: Rival) -> str:
    """Return another explanation as one line: "not the host's memory (hardware): its CPU passed the same tests".

    What it is comes first: "not hardware (…)" would contradict a fault of other hardware.
    """
    kind, cause = "not" if rival.rejected else "maybe", cause_words(rival.cause)
    what, _, reason = rival.why.partition(": ")
    return f"{kind} {what} ({cause}): {reason}" if reason else f"{kind} {cause}: {rival.why}"


def finding_lines(findings: Iterable[Finding], *, verbose: bool, width: int | None = None) -> Iterator[Line]:
    """Yield each finding: what was seen, what to do, and with `verbose` the evidence and other explanations.

    A command stands on a line of its own, whatever its length, and once for all findings.
    """
    commands: set[str] = set()
    for finding in findings:
        yield from paragraph("  - ", f"{label(finding)}: {finding.message}", width)
        if finding.action:
            yield from paragraph("    Do now: ", finding.action, width)
        if verbose:
            for sentence in finding.evidence:
                yield from paragraph("    ", sentence, width)
            for rival in finding.rivals:
                yield from paragraph("    ", rival_words(rival), width)
        if finding.repro and finding.repro not in commands:
            commands.add(finding.repro)
            yield "", "    To repeat the test:"
            yield "", f"    {finding.repro}"


def label(finding: Finding) -> str:
    """Return state, cause and probe of a finding: "faulty (hardware), exact_matmul"; "note" where nothing is wrong."""
    kind = "note" if finding.state is State.HEALTHY else f"{finding.state.value} ({cause_note(finding.cause)})"
    return kind if not finding.probe or finding.rule in NAME_THEIR_PROBE else f"{kind}, {finding.probe}"
