"""Describe incidents in words: every report has the same sentences, made from the same facts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from canaryd.codec import finding_json, to_json
from canaryd.engine.check import NOT_EXAMINED
from canaryd.facts import Place
from canaryd.formatting import HOUR, MINUTE, columns, format_time
from canaryd.judge.cells import name_cells
from canaryd.judge.findings import ACKNOWLEDGED, NO_EVIDENCE, REPLACED_IS_HERE, TEXT_ONLY
from canaryd.judge.incidents import WRONG, Incident, incidents, notes
from canaryd.judge.phrases import identical, listed, recipient, whom_to_tell
from canaryd.model import Cause, Device, Elsewhere, Finding, Ground, Rival, Shown, State, Suspect, Verdict, WrongResults
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
    Shown.RIGHT: ("computes it correctly", "compute it correctly"),
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


def headline(incident: Incident) -> str:
    """Return a clause that says what is wrong. It has no full stop and does not mention the cause."""
    lead = incident.lead
    if incident.wrong is None:
        more = len({f.message for f in incident.findings if f.rule == lead.rule}) - 1
        return lead.message.rstrip(".") + (f" (and {more} more of this kind)" if more else "")
    tally = incident.wrong.all
    where, which = _places(incident.wrong), _bits(incident.wrong)
    if where.startswith(ALWAYS) and which.startswith(ALWAYS):
        which = which.removeprefix(ALWAYS)
    seen = [f"{tally.wrong:,} of {tally.of:,}", where, which]
    what = f"{_wrong_what(incident.wrong)} in {_few(incident.probes, 'probes')}"
    if lead.rule not in WRONG[:2]:  # not the results of the device, or of a test that nobody has passed
        what = lead.message.rstrip(".")
    return f"{what}: {', '.join(filter(None, seen))}"


def brief(incident: Incident) -> str:
    """Return a clause that says what is wrong in fewer words than `headline`; it can follow a colon."""
    if incident.wrong is None or incident.lead.rule not in WRONG[:2]:
        return headline(incident)
    tally = incident.wrong.all
    what = _wrong_what(incident.wrong).lower()
    return f"{what} in {_few(incident.probes, 'probes')} ({tally.wrong:,} of {tally.of:,})"


def _wrong_what(wrong: WrongResults) -> str:
    """Return "Wrong results", or "Wrong memory (…)" with the kinds of fault if memory was tested."""
    return f"Wrong memory ({name_cells(wrong.cells)})" if wrong.cells else "Wrong results"


def describe(incident: Incident) -> str:
    """Return sentences that say what is wrong, how it was confirmed, its cause, and the rejected explanations."""
    wrong = incident.wrong
    if wrong is None:
        return sentence(headline(incident))
    return " ".join(filter(None, (f"{headline(incident)}.", _confirmed(wrong), _cause(incident, wrong))))


def step(incident: Incident, *devices: Device) -> Step:
    """Return what to do now about an incident of one device, or of several devices with equal incidents.

    The step has no text if there is nothing to do. It is the same in every report and in the first lines of a status.
    """
    lead, wrong = incident.lead, incident.wrong
    first, each = devices[0], " for each" if len(devices) > 1 and not devices[0].weak_identity else ""
    there = lead.wrong.elsewhere if lead.wrong else None
    if first.is_endpoint and wrong:
        return _parted(lead.action)
    if lead.state is State.FAULTY and wrong and incident.cause is Cause.HARDWARE:
        case = f"{out_of_service(devices)}, then {whom_to_tell(first)}{each}:"
        return Step(case, f"canaryd report {first.name} -o ./case")
    if lead.state is State.FAULTY and there and incident.cause is Cause.UNDETERMINED:
        return _repeat(f"{out_of_service(devices)}. Repeat the test on {identical(first, there)}:", first, there)
    if lead.state is State.FAULTY:
        return _parted(f"{precaution(incident.cause, devices)} {lead.action}".rstrip())
    if wrong and there and incident.cause in (Cause.UNDETERMINED, Cause.HARNESS) and not wrong.to_come:
        return _repeat(f"{lead.action}:", first, there)
    return _parted((_blaming(incident) if wrong else lead).action)


def awaits_tests(incident: Incident) -> bool:
    """Return whether the incident only says that a test or a judgement is still to come."""
    return incident.lead.rule in (NO_EVIDENCE, NOT_EXAMINED, UNJUDGED_RULE, UNTENDED_RULE)


def next_step(incident: Incident, device: Device) -> Step:
    """Return the step to do after `step` about a faulty device, such as sending the report to the vendor.

    The step has no text if the device is not faulty or no further step is needed.
    """
    if incident.state is not State.FAULTY or incident.wrong is None or device.is_endpoint:
        return Step("")
    if incident.cause is Cause.HARDWARE:
        return Step(f"Send the file that it names to {recipient(device)}.")
    if incident.cause is Cause.UNDETERMINED:
        return Step(
            "Wrong there too: look for a software fault first. "
            f"Right there: {device.name} is at fault; write the report for {recipient(device)}:",
            f"canaryd report {device.name} -o ./case",
        )
    return Step("")


def _parted(action: str) -> Step:
    """Return the sentence `action` as a step. A command after the last ": " becomes `Step.command`, for copying."""
    text, _, command = action.rpartition(": ")
    return Step(f"{text}:", command) if text and command.startswith(COMMANDS) else Step(sentence(action))


def _repeat(text: str, device: Device, there: Elsewhere) -> Step:
    """Return a step with `text` and the command that repeats a test on another device; `there` has its options."""
    words = ["canaryd", "check", "--device", there.device, "--probe", there.probe, "--case", there.case]
    words += ["--seed", str(there.seed), "--level", there.level]
    words += ["--instruction-set", there.instruction_set] if there.instruction_set else []
    words += ["--intensity", there.intensity] if there.intensity else []
    words += ["--for", _as_typed(there.seconds)] if there.seconds else []
    return Step(text, shlex.join(words), here=there.device != device.backend)


def _as_typed(seconds: float) -> str:
    """Return a duration as an option accepts it: "90s", "15m", "2h"."""
    size, unit = next(((s, u) for s, u in ((HOUR, "h"), (MINUTE, "m")) if not seconds % s), (1, "s"))
    return f"{seconds / size:.0f}{unit}"


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
    bits, where = wrong.bits, ""
    if len(bits) > BITS_NAMED:
        bits = min((t.bits for t in wrong.probes.values() if t.bits), key=len)
        where = f" in {_few([name for name, t in wrong.probes.items() if t.bits == bits], 'probes')}"
    if len(bits) > BITS_NAMED:
        return f"in {len(wrong.bits)} different bits"
    return f"{f'{ALWAYS}bit' if len(bits) == 1 else 'bits'} {listed([*map(str, bits)])}{where}" if bits else ""


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
    rejected: dict[tuple[Shown, tuple[str, ...]], list[Suspect]] = {}
    for rival in _rivals(incident):
        if rival.rejected and rival.what is not None:
            rejected.setdefault((rival.shown, rival.by), []).append(rival.what)
    reasons = [(f"not {_or(what)}", _reason(*key)) for key, what in rejected.items()]
    if incident.cause is Cause.UNDETERMINED or not reasons:
        known = "" if incident.cause is Cause.UNDETERMINED else f"Cause: {cause_words(incident.cause)}."
        found = _blaming(incident).wrong  # the lead may know of no cause
        first = f"{known} {(found and found.why) or ('' if known else wrong.why)}".strip()
    else:
        (what, why), *reasons = reasons
        first = f"Cause: {cause_words(incident.cause)}, {what}: {why}."
    return " ".join([first, *(f"{what.capitalize()}: {why}." for what, why in reasons)]).strip()


def _blaming(incident: Incident) -> Finding:
    """Return the incident's first finding that has the incident's state and cause."""
    return next(f for f in incident.findings if f.state is incident.state and f.cause is incident.cause)


def _rivals(incident: Incident) -> tuple[Rival, ...]:
    return next((f.rivals for f in incident.findings if f.rivals and f.cause is incident.cause), ())


def _reason(shown: Shown, by: Sequence[str]) -> str:
    if not by:
        return BY_ITSELF[shown]
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
        "confirmed": [c.ground.value for c in wrong.confirmed],
        "retests": retests if incident.wrong else None,
        "rivals": [to_json(rival) for rival in _rivals(incident)],
        "rules": list(incident.rules),
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
            yield from finding_lines(incident.findings)
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
