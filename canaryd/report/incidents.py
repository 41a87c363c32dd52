"""Describe incidents in words: every report has the same sentences, made from the same facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from canaryd.codec import finding_json, to_json
from canaryd.engine.check import NOT_EXAMINED
from canaryd.facts import Place
from canaryd.formatting import columns, format_time
from canaryd.judge.cells import name_cells
from canaryd.judge.findings import ACKNOWLEDGED, NO_EVIDENCE, REPLACED_IS_HERE, TEXT_ONLY
from canaryd.judge.incidents import WRONG, Incident, incidents, notes
from canaryd.judge.phrases import DOUBTS, identical, listed, recipient, repeating, whom_to_tell
from canaryd.judge.wrong import NO_TYPE
from canaryd.model import (
    Cause,
    Device,
    Elsewhere,
    Files,
    Finding,
    Ground,
    ProbeTally,
    Rival,
    Shown,
    State,
    Suspect,
    Verdict,
    Whose,
    WrongResults,
)
from canaryd.report.status import UNJUDGED_RULE, UNTENDED_RULE
from canaryd.report.terminal import Line, cause_words, finding_lines, paragraph, role_of, typed

STATE, INDENT = 9, " " * 9
"""Width of the column with the state; the spaces that fill this column in the lines below the first."""
NAMED = 2
"""Largest number of probes or devices that a sentence lists by name. Above it, only the number is given."""
NODE_NAMED = 4
"""Largest number of devices that a sentence about a whole node lists by name."""
PLACES_NAMED, BITS_NAMED = 4, 4
ALWAYS = "always "
TELLING = frozenset({ACKNOWLEDGED, REPLACED_IS_HERE, "budget-withheld", TEXT_ONLY})
"""Rules whose notes are always shown, although nothing is to be done: they limit what "healthy" means."""
COMMANDS = ("canaryd ", "journalctl ")
"""First words of a command that follows ": " at the end of an action."""
SHOWN: Mapping[Shown, tuple[str, str]] = {
    Shown.RIGHT: ("computes it right", "compute it right"),
    Shown.RARER: ("fails far less often", "fail far less often"),
    Shown.ALIKE: ("gives the same wrong bits", "give the same wrong bits"),
    Shown.TOGETHER: ("began to fail with it", "began to fail with it"),
}
"""Kind of evidence against another explanation → verb phrase for one device, and for several devices."""
BY_ITSELF: Mapping[Shown, str] = {
    Shown.RIGHT: "another result matched it",
    Shown.PASSED: "its CPU passed the same tests",
}
"""Kind of evidence against another explanation → clause for evidence that names no device."""


class Step(NamedTuple):
    """One thing to do."""

    text: str
    command: str = ""
    """The command to type for the step, or "" if there is none."""
    here: bool = True
    """Whether the command is for this node. Only such a command gets the options that select this node's store."""

    @property
    def shown(self) -> str:
        """The command to type. A command for this node also has the options that this user needs."""
        return typed(self.command) if self.here else self.command

    def __str__(self) -> str:
        return f"{self.text} {self.command}".rstrip()


# --- Sentences -------------------------------------------------------------------------------------------------------


def title(incident: Incident) -> str:
    """Return a clause that says what is wrong, the strongest fact first, without counts. It has no full stop."""
    lead = incident.lead
    if incident.wrong is None:
        more = len({f.message for f in incident.findings if f.rule == lead.rule}) - 1
        return lead.message.rstrip(".") + (f" (and {more} more of this kind)" if more else "")
    if lead.rule not in WRONG[:3]:  # the comparison, or a test that nobody has passed
        return lead.message.rstrip(".")
    what = f"{_wrong_what(incident.wrong)} in {_few(incident.probes, 'probes')}"
    doubt = incident.wrong.doubt
    return f"{DOUBTS[doubt]}; {what[0].lower()}{what[1:]}" if doubt else what


def headline(incident: Incident) -> str:
    """Return a clause that says what is wrong. It has no full stop and does not mention the cause."""
    if incident.wrong is None:
        return title(incident)
    tally = incident.wrong.all
    where, which = _places(incident.wrong), _bits(incident.wrong)
    if where.startswith(ALWAYS) and which.startswith(ALWAYS):
        which = which.removeprefix(ALWAYS)
    seen = [f"{tally.wrong:,} of {tally.of:,}", where, which]
    return f"{title(incident)}: {', '.join(filter(None, seen))}"


def brief(incident: Incident) -> str:
    """Return a clause that says what is wrong in fewer words than `headline`; it can follow a colon.

    Of devices that have the trouble together it is the same: without counts, and with what it points to.
    """
    what, together = title(incident), incident.blaming.shared_by
    if incident.wrong is not None:
        tally = "" if together else f" ({incident.wrong.all.wrong:,} of {incident.wrong.all.of:,})"
        what = f"{what[0].lower()}{what[1:]}{tally}"
    return f"{what}; this {_points_to(incident.blaming)}" if together else what


def _points_to(found: Finding, parts: str = "") -> str:
    """Return "points to …" about the host or a shared part; "" if a finding points to nothing of the kind."""
    if found.subject is Whose.SHARED:
        return f"points to what {_ranges(found.shared_by) or 'the devices here'} share{parts}, not to one device"
    return "points to the host, not to one device" if found.shared_by else ""


def _scope(found: Finding) -> Iterator[str]:
    """Yield sentences that say what a finding points to and what its remedy reaches, if that is more than a device."""
    if pointing := _points_to(found, f" ({listed([part.value for part in found.parts], 'or')})"):
        yield f"This {pointing}."
    if len(found.reach) > 1:
        yield f"The remedy reaches {_ranges(found.reach)}."


def _ranges(names: Sequence[str]) -> str:
    """Return names (in order) as a list for a sentence, numbers in a row as one range: "cpu:0 and cuda:0 to cuda:7"."""
    rows: list[list[str]] = []
    for name in names:
        backend, _, number = name.rpartition(":")
        follows = rows and number.isdecimal() and rows[-1][-1] == f"{backend}:{int(number) - 1}"
        rows[-1].append(name) if follows else rows.append([name])
    return listed([text for row in rows for text in ([f"{row[0]} to {row[-1]}"] if len(row) > 2 else row)])


def _wrong_what(wrong: WrongResults) -> str:
    """Return "Wrong results", or "Wrong memory (…)" with the kinds of fault if memory was tested."""
    return f"Wrong memory ({name_cells(wrong.cells)})" if wrong.cells else "Wrong results"


def describe(incident: Incident) -> str:
    """Return sentences that say what is wrong, its cause, and what it and its remedy reach beyond the device."""
    wrong = incident.wrong
    told = (_confirmed(wrong), _cause(incident, wrong)) if wrong else ()
    return " ".join(filter(None, (sentence(headline(incident)), *told, *_scope(incident.blaming))))


def step(incident: Incident, *devices: Device) -> Step:
    """Return what to do now about an incident of one device, or of several devices with equal incidents.

    The step has no text if there is nothing to do. It is the same in every report and in the first lines of a status.
    """
    lead, wrong = incident.lead, incident.wrong
    first, each = devices[0], " for each" if len(devices) > 1 and not devices[0].weak_identity else ""
    # What to do about a doubted comparison already names a command.
    there = lead.wrong.elsewhere if lead.wrong and lead.rule != WRONG[-1] else None
    if wrong and not first.is_hardware:
        return _parted(lead.action)
    if lead.state is State.FAULTY and wrong and incident.cause is Cause.HARDWARE:
        case = f"{out_of_service(devices)}, then {whom_to_tell(first)}{each}:"
        return Step(case, f"canaryd report {first.name} -o ./case")
    if lead.state is State.FAULTY and there and wrong and wrong.files is Files.ALTERED:
        again = replace(there, device=first.name)
        return _repeat(
            f"{out_of_service(devices)}. Install the software anew, then repeat the test here:", first, again
        )
    if lead.state is State.FAULTY and there and incident.cause is Cause.UNDETERMINED:
        return _repeat(f"{out_of_service(devices)}. Repeat the test on {identical(first, there)}:", first, there)
    if lead.state is State.FAULTY:
        return _parted(f"{precaution(incident.cause, devices)} {lead.action}".rstrip())
    if wrong and there and incident.cause in (Cause.UNDETERMINED, Cause.HARNESS) and not wrong.to_come:
        return _repeat(f"{lead.action}:", first, there)
    return _parted((incident.blaming if wrong else lead).action)


def awaits_tests(incident: Incident) -> bool:
    """Return whether the incident only says that a test or a judgement is still to come."""
    return incident.lead.rule in (NO_EVIDENCE, NOT_EXAMINED, UNJUDGED_RULE, UNTENDED_RULE)


def next_step(incident: Incident, device: Device) -> Step:
    """Return the step to do after `step` about a faulty device, such as sending the report to the vendor.

    The step has no text if the device is not faulty or no further step is needed.
    """
    if incident.state is not State.FAULTY or incident.wrong is None or not device.is_hardware:
        return Step("")
    if incident.cause is Cause.HARDWARE:
        return Step(f"Send the file that it names to {recipient(device)}.")
    if incident.cause is Cause.UNDETERMINED:
        files = incident.wrong.files
        if incident.blaming.shared_by:
            return Step(
                "Wrong there too: look at the software first. Right there: check what they share before an RMA."
            )
        if files is Files.ALTERED:
            return Step("Right then: its files were at fault. Wrong again: repeat the test on another node.")
        at_fault = f"{device.name} is at fault; write the report for {recipient(device)}:"
        if files is Files.NOT_COMPARED:
            at_fault = f"repeat it here in a fresh environment of the same software. Wrong again: {at_fault}"
        elif files is Files.AS_INSTALLED:
            at_fault = f"its software is as pip installed it, so {at_fault}"
        return Step(
            f"Wrong there too: look for a software fault first. Right there: {at_fault}",
            f"canaryd report {device.name} -o ./case",
        )
    return Step("")


def _parted(action: str) -> Step:
    """Return the sentence `action` as a step. A command after the last ": " becomes `Step.command`, for copying."""
    text, _, command = action.rpartition(": ")
    return Step(f"{text}:", command) if text and command.startswith(COMMANDS) else Step(sentence(action))


def _repeat(text: str, device: Device, there: Elsewhere) -> Step:
    """Return a step with `text` and the command that repeats a test on another device; `there` has its options."""
    return Step(text, repeating(there, there.device), here=there.device != device.backend)


def precaution(cause: Cause, devices: Sequence[Device]) -> str:
    """Return one sentence that says what to do immediately with faulty devices."""
    if cause in (Cause.HARDWARE, Cause.UNDETERMINED):
        return f"{out_of_service(devices)}."
    return f"Do not use the results of {names_of(devices)}."


def out_of_service(devices: Sequence[Device]) -> str:
    """Return a clause that says what to take out of service: for a processor, the whole node."""
    if processors := [d for d in devices if d.backend == "cpu"]:
        return f"Take this whole node out of service ({names_of(processors)} is its processor)"
    return f"Take {names_of(devices)} out of service"


def names_of(devices: Sequence[Device]) -> str:
    """Return the names of devices for a sentence: the first `NODE_NAMED` by name, and the number of the others."""
    names = [d.name for d in devices]
    if len(names) > NODE_NAMED + 1:
        names = [*names[:NODE_NAMED], f"{len(names) - NODE_NAMED} more"]
    return listed(names)


def sentence(text: str) -> str:
    """Return a clause with a full stop, unless it is empty, already has an end mark, or ends with a command.

    A command gets no full stop, because people copy it.
    """
    as_it_is = not text or text[-1] in ".:!?…" or text.rpartition(": ")[2].startswith(COMMANDS)
    return text if as_it_is else f"{text}."


def _few(names: Sequence[str], things: str) -> str:
    return listed(names) if len(names) <= NAMED else f"{len(names)} {things}"


def _bits(wrong: WrongResults) -> str:
    """Return the flipped bits as a clause, "" for none. Too many bits: only those of the probe with the fewest."""
    bits, tallies, where = wrong.bits, wrong.probes, ""
    if len(bits) > BITS_NAMED:
        bits = min((t.bits for t in wrong.probes.values() if t.bits), key=len)
        tallies = {name: t for name, t in wrong.probes.items() if t.bits == bits}
        where = f" in {_few([*tallies], 'probes')}"
    if len(bits) > BITS_NAMED:
        return f"in {len(wrong.bits)} different bits"
    types: dict[tuple[int, ...], list[str]] = {}
    for kind, some in _by_type(tallies.values()).items():
        types.setdefault(some, []).append(kind)
    told = [
        f"{'bit' if len(some) == 1 else 'bits'} {listed([*map(str, some)])}"
        + ("" if NO_TYPE in kinds else f" of {listed(kinds)}")
        for some, kinds in types.items()
    ]
    return f"{ALWAYS if len(bits) == 1 else ''}{', '.join(told)}{where}" if bits else ""


def _by_type(tallies: Iterable[ProbeTally]) -> dict[str, tuple[int, ...]]:
    """Return number type → all bits that were flipped in it; a record without types has its bits under `NO_TYPE`."""
    found: dict[str, set[int]] = {}
    for kind, bits in (item for t in tallies if t.bits for item in (t.bits_by_type or {NO_TYPE: t.bits}).items()):
        found.setdefault(kind, set()).update(bits)
    return {kind: tuple(sorted(found[kind])) for kind in sorted(found)}


def _places(results: WrongResults) -> str:
    """Return a clause that says which of the tested cores, SMs or links gave wrong results; "" if that is not known.

    A result that all cores computed together has no single place: the clause is about the other results.
    """
    places = results.places
    wrong = [p.place for p in places if p.wrong]
    placed = sum(p.wrong for p in places)
    if not wrong:
        return ""
    if len(wrong) == 1 and placed < results.all.wrong:
        return f"all {placed:,} single-{Place(unit=wrong[0].unit)} ones on {wrong[0]}" if len(places) > 1 else ""
    if len(wrong) == 1:
        return f"{ALWAYS if len(places) > 1 else 'on '}{wrong[0]}"
    unit = f"{Place(unit=wrong[0].unit)}s"
    if len(wrong) == len(places):
        return f"on both {unit}" if len(places) == 2 else f"on all {len(places)} {unit}"
    which = f" ({listed([' to '.join(map(str, p.numbers)) for p in wrong])})" if len(wrong) <= PLACES_NAMED else ""
    return f"on {len(wrong)} of {len(places)} {unit}{which}"


def _confirmed(wrong: WrongResults) -> str:
    again = wrong.retests
    if any(c.ground is Ground.RETESTS for c in wrong.confirmed) and again.wrong < again.of:
        return f"It fails in {again.wrong} of {again.of} retests: intermittent."
    if any(c.ground is Ground.RETESTS for c in wrong.confirmed):
        return f"{again.wrong} of {again.of} retests failed."
    if wrong.confirmed:
        return f"Confirmed: {wrong.confirmed[0].why}."
    return f"Not confirmed: {again.wrong} of {again.of} retests failed." if again.of else "Not confirmed yet."


def _cause(incident: Incident, wrong: WrongResults) -> str:
    """Return sentences about the cause and about each kind of evidence that rejects other explanations."""
    rejected: dict[tuple[Shown, tuple[str, ...], int], list[Suspect]] = {}
    for rival in _rivals(incident):
        if rival.rejected and rival.what is not None:
            rejected.setdefault((rival.shown, rival.by, rival.of), []).append(rival.what)
    reasons = [(f"not {_or(what)}", _reason(*key)) for key, what in rejected.items()]
    if incident.cause is Cause.UNDETERMINED or not reasons:
        known = "" if incident.cause is Cause.UNDETERMINED else f"Cause: {cause_words(incident.cause)}."
        found = incident.blaming.wrong  # the lead may know of no cause
        first = f"{known} {(found and found.why) or ('' if known else wrong.why)}".strip()
    else:
        (what, why), *reasons = reasons
        first = f"Cause: {cause_words(incident.cause)}, {what}: {why}."
    return " ".join([first, *(f"{what.capitalize()}: {why}." for what, why in reasons)]).strip()


def _rivals(incident: Incident) -> tuple[Rival, ...]:
    return next((f.rivals for f in incident.findings if f.rivals and f.cause is incident.cause), ())


def _reason(shown: Shown, by: Sequence[str], of: int) -> str:
    if not by:
        return BY_ITSELF[shown]
    if of:
        return f"{_few(by, 'identical devices')} never failed in {of:,} results"
    one, several = SHOWN[shown]
    return f"{_few(by, 'identical devices')} {one if len(by) == 1 else several}"


def _or(what: Sequence[Suspect]) -> str:
    """Return the rejected explanations as one phrase: "the software, reference or host", or "this device alone"."""
    if Suspect.DEVICE in what:
        return "this device alone"
    return f"the {listed([each.value for each in what], 'or')}"


# --- JSON ------------------------------------------------------------------------------------------------------------


def device_json(device: Device, verdict: Verdict) -> dict[str, Any]:
    """Return a device with its verdict as every `--json` prints it."""
    return {
        "device": device.uuid,
        "backend": device.backend,
        "index": device.index,
        "model": device.model,
        "state": verdict.state.value,
        "cause": verdict.cause.value,
        "incidents": incidents_json(verdict, device),
        "findings": [finding_json(f) for f in verdict.findings],
    }


def incidents_json(verdict: Verdict, device: Device) -> list[dict[str, Any]]:
    """Return the incidents of a device as every `--json` prints them, the worst first."""
    return [_json(i, step(i, device), next_step(i, device)) for i in incidents(verdict)]


def _json(incident: Incident, todo: Step, after: Step) -> dict[str, Any]:
    wrong = incident.wrong or WrongResults(probes={})
    retests = {"failed": wrong.retests.wrong, "completed": wrong.retests.of}
    return {
        "state": incident.state.value,
        "cause": incident.cause.value,
        "since": incident.since,
        "text": describe(incident),
        "action": todo.text,
        "command": todo.command,
        "next_action": after.text,
        "next_command": after.command,
        "repeat": incident.repeat,
        "acknowledged": any(f.acknowledged for f in incident.findings),
        "wrong": wrong.all.wrong,
        "results": wrong.all.of,
        "probes": {name: {"wrong": t.wrong, "results": t.of} for name, t in wrong.probes.items()},
        "places": [
            {"unit": p.place.unit, "numbers": list(p.place.numbers), "wrong": p.wrong, "results": p.of}
            for p in wrong.places
        ],
        "bits": list(wrong.bits),
        "bits_by_type": to_json(_by_type(wrong.probes.values())),
        "confirmed": [c.ground.value for c in wrong.confirmed],
        "retests": retests if incident.wrong else None,
        "rivals": [to_json(rival) for rival in _rivals(incident)],
        "rules": list(incident.rules),
        **{name: to_json(getattr(incident.blaming, name)) for name in ("subject", "parts", "shared_by", "reach")},
        "runs": list(incident.runs),
    }


# --- Terminal --------------------------------------------------------------------------------------------------------


def state_lines(
    device: Device,
    verdict: Verdict,
    *,
    verbose: bool,
    name: str = "",
    gone: bool = False,
    advised: bool = False,
) -> Iterator[Line]:
    """Yield lines about a device: its worst incident, then the others, then notes.

    `verbose`: every finding too. `name`: the names of all devices to which the lines apply, if there are several.
    `gone`: the device is not found now. `advised`: another line already says what to do about the worst incident.
    """
    found, who = incidents(verdict), name or device.name
    yield from _title_lines(device, verdict, found, who, gone=gone)
    for number, incident in enumerate(found):
        if number == 0:
            yield from paragraph(INDENT, describe(incident))
        else:
            state = incident.state
            said = f"{who}{_known_cause(incident)}: {describe(incident)}"
            yield from paragraph(f"{state.value.upper():<{STATE}}", said, role_of(state))
        if not (advised and number == 0) and not verdict.drill:
            yield from step_lines("Do now:  ", [step(incident, device), next_step(incident, device)])
        if verbose:
            yield from finding_lines(incident.findings, incident.repeat)
    yield from note_lines(verdict, verbose=verbose)


def shown_notes(verdict: Verdict) -> list[Finding]:
    """Return the notes that a report shows without -v: those with an action, and those whose rule is in `TELLING`."""
    return [f for f in notes(verdict) if f.action or f.rule in TELLING]


def note_lines(verdict: Verdict, *, verbose: bool) -> Iterator[Line]:
    """Yield lines with the notes on a device; with `verbose` all notes and their evidence."""
    for note in notes(verdict) if verbose else shown_notes(verdict):
        about = f"{note.probe}: " if note.probe else ""
        said = f"{about}{sentence(note.message)} {sentence(note.action)}".strip()
        yield from paragraph(f"{'note':<{STATE}}", said)
        for text in note.evidence if verbose else ():
            yield from paragraph(INDENT, text)


def _title_lines(device: Device, verdict: Verdict, found: Sequence[Incident], name: str, *, gone: bool) -> list[Line]:
    """Return the title: state, name, model, serial number (only if there is room) and start of the state."""
    since = format_time(found[0].since if found else verdict.since, seconds=False)
    ends = ["GONE"] * gone + ["drill, not the device" if verdict.drill else f"since {since}"]
    ends[-1] += _known_cause(found[0]) if found else ""
    serial = [f"serial {device.detail['serial']}"] if device.detail.get("serial") and name == device.name else []
    state, role = f"{verdict.state.value.upper():<{STATE}}", role_of(verdict.state)
    long, short = ("  ".join([name, device.model, *middle, *ends]) for middle in (serial, []))
    fits = STATE + len(long) <= columns()
    return [(role, state + long)] if fits else paragraph(state, short, role)


def _known_cause(incident: Incident) -> str:
    """Return the cause in brackets, or "" if it is not known or the incident's description names it."""
    silent = incident.wrong is not None or incident.cause in (Cause.NONE, Cause.UNDETERMINED) or awaits_tests(incident)
    return "" if silent else f" ({cause_words(incident.cause)})"


def step_lines(lead: str, steps: Iterable[Step]) -> Iterator[Line]:
    """Yield lines about what to do: sentences as a paragraph, each command on a line of its own."""
    sentences, hang = "", " " * len(lead)
    for todo in (s for s in steps if s.text):
        sentences = f"{sentences} {todo.text}".lstrip()
        if todo.command:
            yield from paragraph(lead, sentences)
            yield "head", f"{hang}{todo.shown}"
            lead, sentences = hang, ""
    if sentences:
        yield from paragraph(lead, sentences)
