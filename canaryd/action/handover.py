"""`canaryd report --for PROVIDER`: a dossier as the command or list that a provider takes. Nothing is sent."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from canaryd.action.machine import Machine
from canaryd.dossier.perishable import BMC_LOG, BUG_REPORT, IN_LOG, RECORDS, where
from canaryd.facts import printable
from canaryd.judge.incidents import WRONG
from canaryd.model import ENDPOINT, Cause, State
from canaryd.report.terminal import state_note

Json = dict[str, Any]
LOG = "log.txt"
BLANK = "FILL_IN_"
"""Beginning of every word that stands for what canaryd cannot know."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """A dossier and its machine."""

    document: Json
    """dossier.json."""
    place: str
    """Path of the dossier's directory."""
    machine: Machine

    @property
    def lead(self) -> Json:
        """The worst incident."""
        return dict(self.document["verdict"]["incidents"][0])

    @property
    def wrong(self) -> bool:
        """Whether the incident is about wrong results."""
        return any(rule in WRONG for rule in self.lead["rules"])

    @property
    def confirmed(self) -> bool:
        """Whether this is a confirmed fault of the hardware."""
        verdict = self.document["verdict"]
        return (verdict["state"], verdict["cause"]) == (State.FAULTY.value, Cause.HARDWARE.value)


class Perishable(NamedTuple):
    """Something that a reboot, a reset or another host destroys."""

    what: str
    taken: str
    """Where it already is; "" if nobody took it."""
    take: str
    """How to take it: a command or a sentence."""

    def __str__(self) -> str:
        return f"{self.what}: {self.taken}" if self.taken else f"{self.what}: NOT TAKEN: {self.take}"


class Blank(NamedTuple):
    """Something that canaryd cannot know."""

    word: str
    """Stands in the command, with `BLANK` before it."""
    what: str
    """What to write instead, and where to find it."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What a provider takes, filled in."""

    command: tuple[str, ...] = ()
    """Arguments of the command that sends it; () for a list that goes into a form."""
    body: Json | None = None
    """The JSON object that the command's last argument becomes, or None."""
    lines: tuple[str, ...] = ()
    blanks: tuple[Blank, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: tuple[Perishable, ...] = ()
    """More to take before a reboot, for this provider alone."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command."""
        return self.command + (() if self.body is None else (json.dumps(self.body, ensure_ascii=False),))


def refusal(title: str, document: Json, *, suspicion: bool, physical: bool) -> str:
    """Return why a provider does not get this report, and what is missing; or "".

    `suspicion`: whether it takes a suspicion too. `physical`: whether it must be told which part it is.
    """
    verdict, identity = document["verdict"], document["identity"]
    if identity["backend"] == ENDPOINT:
        return f"{identity['name']} is a model server: {title} takes faults of hardware"
    state, cause = State(verdict["state"]), Cause(verdict["cause"])
    states, causes = ((State.FAULTY, State.SUSPECT), (Cause.HARDWARE, Cause.UNDETERMINED))
    missing = [] if state in states[: 1 + suspicion] else ["a confirmed fault"]
    missing += [] if cause in causes[: 1 + suspicion] else ["evidence that the hardware is its cause"]
    if physical and not missing and document["kind"] != "rma":
        missing.append(f"an RMA dossier, but {document['why_not_rma']}")
    if not missing:
        return ""
    lead = next(iter(verdict["incidents"]), None)
    todo = f". {lead['action']} {lead['command']}".rstrip() if lead and lead["action"] else ""
    note = state_note(state.value, cause)
    return printable(f"{identity['name']} is {note}: nothing to report to {title}. Missing: {', '.join(missing)}{todo}")


def perishable(case: Handover) -> tuple[Perishable, ...]:
    """Return what a reboot destroys, and where the dossier has it."""
    names = {
        "lines of the kernel log": (LOG, "journalctl -k -b > kernel.txt"),
        "event log of the BMC": (BMC_LOG, ""),
        "error records of the firmware (CPER)": (RECORDS, IN_LOG),
    }
    if case.document["identity"]["backend"] == "cuda":
        names = {"bug report of the driver": (BUG_REPORT, "As root: nvidia-bug-report.sh"), **names}
    found = []
    for what, (name, take) in names.items():
        here, why = where(case.document, name)
        taken = f"in the dossier, {case.place}/{name}" if here else ""
        found.append(Perishable(what, taken, ". ".join(filter(None, (why, take)))))
    return tuple(found)


def text(title: str, case: Handover, form: Filled) -> str:
    """Return what to read and what to type: comments of a shell, then the command or the list."""
    lines = [f"For {title}, filled in by canaryd. Nothing was sent.", "Take first, since a reboot destroys it:"]
    lines += [f"- {each}" for each in (*form.evidence, *perishable(case))]
    if form.blanks:
        lines.append("Fill in what canaryd cannot know:")
        lines += [f"- {BLANK}{blank.word}: {blank.what}" for blank in form.blanks]
    comments = [f"# {printable(line)}" for line in (*lines, *form.notes)]
    return "\n".join([*comments, *([_shell(form.argv)] if form.command else []), *map(printable, form.lines)])


def _shell(argv: Sequence[str]) -> str:
    """Return a command to type; text that only the user's shell knows ("$NAME") stays for it to fill in."""
    whole = [f'"{word}"' if word.startswith(("$", "Authorization: ")) else shlex.quote(word) for word in argv]
    return " ".join(whole)
