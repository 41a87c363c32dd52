"""Format verdicts and findings for a terminal, the same in every command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from canaryd.facts import printable
from canaryd.formatting import wrapped
from canaryd.model import Cause, Finding, Rival, State, Verdict

Line = tuple[str, str]
"""(role, text): the role determines the colour; the role "" has no colour."""
COLOURS = {"bad": "\x1b[31m", "calm": "\x1b[33m", "good": "\x1b[32m", "head": "\x1b[1m"}
RESET = "\x1b[0m"
ROLES: Mapping[State, str] = {State.HEALTHY: "good", State.SUSPECT: "bad", State.FAULTY: "bad"}
"""State → role; every other state is "calm"."""

COMMANDS = (
    *("ack", "baseline", "canary", "capture", "characterise", "check", "compare", "config", "demo", "devices"),
    *("drill", "gate", "history", "pack", "probes", "prove", "release", "report", "run", "status"),
)
PRINTED = re.compile(
    rf"(?<![\w./-])(?<!sudo )canaryd ({'|'.join(COMMANDS)})\b(?! --(?:state-dir|config|help)\b| export wr)"
    r"((?: --[\w-]+(?: [^\s,;-][^\s,;]*)?)*)"
)
"""Pattern of a canaryd command in a text for people, with its options. It matches neither a path to the program nor the
words "canaryd baseline export wrote"."""
SYSTEMD = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
"""Directories in whose `systemd/system` units are installed (systemd.unit(5))."""
UNBROKEN = "\u00a0"
"""Character that looks like a space, and at which lines are never broken."""
_REPLACED: dict[str, str] = {}
"""What `type_with` set: "options" and "sudo" → text to add to commands; "start" → command that starts the daemon."""


def type_with(options: Sequence[str], roots: Sequence[str] = SYSTEMD, *, sudo: bool = False) -> None:
    """Set the options (such as --state-dir), and whether with `sudo`, of the commands that use this reader's store.

    Without options, the command that starts the daemon is systemd's, if its unit is installed below one of `roots`.
    """
    installed = any((Path(root) / "systemd/system/canaryd.service").is_file() for root in roots)
    _REPLACED["sudo"] = "sudo " if sudo else ""
    _REPLACED["options"] = shlex.join(options)
    _REPLACED["start"] = "systemctl start canaryd" if installed and not options else ""


def typed(text: str, space: str = " ") -> str:
    """Return a text with the options of this user in each command; `space` is put between the words of a command."""

    def command(found: re.Match[str]) -> str:
        start = _REPLACED.get("start") if found[1] == "run" else ""
        plain = start or f"canaryd {found[1]} {_REPLACED.get('options', '')}".rstrip()
        return f"{_REPLACED.get('sudo', '')}{plain}{found[2]}".replace(" ", space)

    return PRINTED.sub(command, text)


def paint(lines: Iterable[Line], *, color: bool) -> str:
    """Return lines as one text without control characters, in colours if `color`."""
    safe = ((role, printable(text)) for role, text in lines)
    return "\n".join(
        f"{COLOURS[role]}{text}{RESET}" if color and role in COLOURS and text else text for role, text in safe
    )


def paragraph(lead: str, text: str, role: str = "") -> list[Line]:
    """Return a text as wrapped lines with one role (colour). `lead` begins the first line; the others are indented.

    Commands in the text get this user's options and are never broken, because people copy them.
    """
    own = typed(text, UNBROKEN)
    return [(role, line.replace(UNBROKEN, " ")) for line in wrapped(lead, own, whole=own != text)]


def role_of(state: State) -> str:
    """Return the role (colour) of a state."""
    return ROLES.get(state, "calm")


def state_note(state: str, cause: Cause | str) -> str:
    """Return a state with its cause, as in every report: "faulty (hardware)"; only the state if there is no cause."""
    return state if cause == Cause.NONE else f"{state} ({cause_words(Cause(cause))})"


def verdict_note(verdict: Verdict) -> str:
    """Return a verdict's state and cause as text: "faulty (hardware)"."""
    return state_note(verdict.state.value, verdict.cause)


def cause_words(cause: Cause) -> str:
    """Return the words for a cause, such as "hardware", "canaryd itself" or "cause unknown"."""
    return {Cause.HARNESS: "canaryd itself", Cause.UNDETERMINED: "cause unknown"}.get(cause, cause.value)


def rival_words(rival: Rival) -> str:
    """Return another explanation and its evidence: "not the host's memory (hardware): its CPU passed the same tests".

    The explanation comes before its kind of cause: "not hardware (…)" would contradict a fault of other hardware.
    """
    kind, cause = "not" if rival.rejected else "maybe", cause_words(rival.cause)
    what, _, reason = rival.why.partition(": ")
    return f"{kind} {what} ({cause}): {reason}" if reason else f"{kind} {cause}: {rival.why}"


def finding_lines(findings: Sequence[Finding], repeat: str) -> Iterator[Line]:
    """Yield lines about each finding: message, what to do, evidence, other explanations and runs; then how to `repeat`.

    Text that several findings share is printed once. A command has a line of its own, whatever its length.
    """
    said: set[str] = set()
    for finding in findings:
        yield from paragraph("  - ", f"{rule_words(finding)}: {finding.message}")
        if finding.action and finding.action not in said:
            yield from paragraph("    Do now: ", finding.action)
        for sentence in (*finding.evidence, *map(rival_words, finding.rivals)):
            if sentence not in said:
                yield from paragraph("    ", sentence)
        if finding.runs:
            yield from paragraph("    Runs: ", ", ".join(finding.runs))
        said |= {finding.action, *finding.evidence, *map(rival_words, finding.rivals)}
    if repeat:
        yield "", "    To repeat the test:"
        yield "", f"    {typed(repeat)}"


def rule_words(finding: Finding) -> str:
    """Return the rule of a finding and the probe that it is about: "exact-mismatch (exact_matmul)"."""
    return finding.rule + (f" ({finding.probe})" if finding.probe else "")
