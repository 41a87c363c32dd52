"""Rules about exact goldens: mismatches, goldens in doubt, comparators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from canaryd.facts import Subject
from canaryd.formatting import format_duration
from canaryd.judge.case import Case, Mismatches
from canaryd.judge.cause import Mismatch, names
from canaryd.judge.cells import name_cells
from canaryd.judge.characterised import By, learns
from canaryd.judge.confirmation import crowded
from canaryd.judge.findings import UNCHARACTERISED, make_finding, proofs, strongest
from canaryd.judge.laws import together_with
from canaryd.judge.node import by_time, find_mismatches, is_inconstant
from canaryd.judge.phrases import DOUBTS, count, find_cause, first_of, identical, whom_to_tell
from canaryd.judge.statistics import RULE_OF_THREE
from canaryd.judge.wrong import retests, wrong_results
from canaryd.model import Cause, Finding, ModelServer, Outcome, Rival, Run, State, Tally, WrongResults

PROVEN = {
    By.SHIPPED: "it rounds nothing, so it is exact on devices of this kind",
    By.ACCEPTED: "an operator accepted it as exact on {}",
    By.ITSELF: "this device itself passed it before on this software",
    By.SIBLING: "an identical device of this host passed it on this software, {}",
    By.WITNESS: "an identical device of another host passed it on this software, {}",
    By.CONTRADICTION: "this device gives right and wrong results for the same bytes",
}
"""Kind of proof that a class of test cases is exact → words for it."""
SETTLED = (
    "To settle it, test another {} with the same software. If it is in another host, "
    "run canaryd baseline export there and canaryd baseline import here."
)
INCONSTANT = "Its wrong results differ for the same bytes: the device is broken, or a kernel is not deterministic."
CPU_FIRST = "Run canaryd check --device cpu first: it tests the CPU"
NAMED = 3
"""Most devices that one sentence lists by name."""


def exact_mismatch(case: Case) -> Iterator[Finding]:
    """Yield a finding for each probe with wrong results: the device is suspect until time and clean trials clear it."""
    for mismatches in case.suspected[Subject.DEVICE]:
        yield _suspicion(case, "exact-mismatch", mismatches)


def golden_disagreement(case: Case) -> Iterator[Finding]:
    """Yield a finding against the CPU if this host made a golden in two ways with two results, for any device's run."""
    for mismatches in case.suspected[Subject.HOST]:
        yield _suspicion(case, "golden-disagreement", mismatches)


def confirmed(case: Case) -> Iterator[Finding]:
    """Yield a finding that makes the device faulty, as its wrong results repeat. The cause decides only what to do."""
    for mismatches, grounds in case.confirmed:
        lead = strongest(mismatches)
        probes = names({m.run.probe for m in mismatches})
        facts = wrong_results(case, mismatches, case.fault(mismatches), grounds)
        what = "answers" if isinstance(case.device, ModelServer) else "memory" if facts.cells else "results"
        evidence = (*(f"Confirmed: {ground.why}." for ground in grounds), lead.why, *_proven(case, mismatches))
        yield make_finding(
            *("exact-mismatch-confirmed", State.FAULTY, lead.cause),
            f"Wrong {what} in {probes}, confirmed: {grounds[0].why}",
            _action(case, lead.cause, facts),
            *(mismatches, evidence, facts),
        )


def _action(case: Case, cause: Cause, facts: WrongResults) -> str:
    """Return what to do about wrong results: wait for retests that are to come, else act according to the cause."""
    firm = bool(facts.confirmed)
    if facts.to_come > 0:
        return f"Wait for {count(facts.to_come, 'automatic retest')}"
    if isinstance(case.device, ModelServer):
        action = "Run canaryd check --level deep: it tests the devices that serve it"
        if cause is Cause.SOFTWARE:
            action = "Restart the server; if it stays wrong, change the engine or its settings"
        return f"Do not use its answers. {action}" if firm else action
    if cause is Cause.SOFTWARE:
        action = "Do not send it back: change the driver or the libraries"
        return f"{action}. It clears when the new ones pass" if firm else action
    if cause is Cause.UNDETERMINED:
        action = find_cause(case.device, facts.elsewhere)
        return f"Do not use its results. {action}" if firm else action
    if firm:
        return f"Take it out of service, then {whom_to_tell(case.device)}: canaryd report {case.device.name} -o DIR"
    return "Do not rely on its results; canaryd keeps retesting it"


def host_in_doubt(case: Case) -> Iterator[Finding]:
    """Yield a finding that accuses the host, if its CPU was wrong at about the same time as this accelerator."""
    doubted = [m for m in case.accusations if m.host_in_doubt]
    if list(case.standing(Subject.DEVICE, doubted)):
        cpus = names(f"{d.name} ({d.model})" for d in case.devices.values() if d.backend == "cpu")
        window = format_duration(case.policy.repeat_window)
        yield make_finding(
            *("host-in-doubt", State.UNKNOWN, Cause.HARDWARE),
            f"The host's CPU was wrong too, within {window} of this device's mismatch",
            *(CPU_FIRST, doubted),
            (
                "Its mismatches of that time do not confirm a fault of this device.",
                f"CPU: {cpus or 'not in the list of devices'}.",
            ),
        )


def golden_in_doubt(case: Case) -> Iterator[Finding]:
    """Yield a finding for each newest run with a golden for which the host's CPU got two results.

    With such a golden nothing is compared. A run that compared other results still tests the device, so it is a note.
    """
    accusing, shared = case.node.host_mismatches
    for run in case.current:
        state = State.UNKNOWN
        if mismatches := [m for m in shared if m.run is run]:
            text = "The reference is wrong: several CPU cores fail on it alike"
            action = "Install canaryd again; if that does not help, report a bug"
        elif not case.is_cpu and (mismatches := [m for m in accusing if m.run is run]):
            text = f"{run.probe} proves nothing here: the host's CPU, which computes the reference, is suspect"
            action = CPU_FIRST
            if run.trials and run.outcome is Outcome.COMPLETED:
                state = State.HEALTHY
                text = f"Not tested by {run.probe}: what the host's CPU, which is suspect, has no reference for"
        else:
            continue
        yield make_finding("golden-in-doubt", state, Cause.HARNESS, text, action, mismatches)


def comparator_disagreement(case: Case) -> Iterator[Finding]:
    """Yield a finding if device and host compared the same bytes and disagree. Only repetition accuses the device.

    Chance that this repeats on a healthy device: 1.9e-9 in 30 days, at the AEGIS bound.
    """
    for mismatches in case.suspected[Subject.COMPARATOR]:
        doubted = any(case.host_in_doubt(m.run) for m in mismatches)
        others = {
            case.devices[uuid].name
            for uuid, runs in case.peers.items()
            for first in find_mismatches(runs, Subject.COMPARATOR)[:1]
            if abs(first.run.started - mismatches[0].run.started) <= case.policy.repeat_window
        }
        repeated = not doubted and crowded(mismatches, 2, case.policy.repeat_gap, case.policy.watch)
        apart = format_duration(case.policy.repeat_gap)
        why = f"It did not happen twice at least {apart} apart, so either side may be wrong."
        action = "Wait for the next run, or run it now: canaryd check"
        if doubted:
            why, action = "The host's CPU was wrong at about the same time.", CPU_FIRST
        elif others:
            why, action = "", CPU_FIRST
        elif repeated:
            why = "It happened repeatedly, so the device or its connection to the host is wrong."
            action = "Take it out of service"
        text, cause = "Device and host compared the same bytes and disagree", Cause.UNDETERMINED
        if repeated and not others:
            cause = Cause.HARDWARE
        facts = wrong_results(case, mismatches, case.fault(mismatches))
        with_it = together_with(others)
        yield make_finding(
            *("comparator-disagreement", State.SUSPECT, cause, text, action, mismatches, (why,), facts, with_it)
        )


def uncharacterised_mismatch(case: Case) -> Iterator[Finding]:
    """Yield a finding that makes a device unknown: it was wrong where no such device has passed on this software.

    The finding says which test shows whether the device is at fault. If identical devices give the same wrong bits,
    the software or the design of the model is.
    """
    shared, alone = _without_proof(case)
    every = sorted([*shared, *alone], key=lambda m: by_time(m.run))
    for listed in case.standing(Subject.DEVICE, shared):
        newest = [m for m in listed if m.run.stack_id == listed[-1].run.stack_id]
        if not Mismatches(case, newest).is_cured:
            alike = {uuid for m in listed for uuid in case.node.gave_alike(m)}
            yield _unproven(case, listed, every, names(case.node.devices[uuid].name for uuid in alike))
    yield from (_unproven(case, listed, every, "") for listed in case.standing(Subject.DEVICE, alone))


def _without_proof(case: Case) -> tuple[list[Mismatch], list[Mismatch]]:
    """Return the mismatches without proof: those that identical devices share, in the same bits, and the others."""
    mismatches = [m for m in case.node.missed[case.device.uuid] if m.proof is None]
    if not case.device.has_witnesses:
        # A server that was wrong everywhere and then right was served in another way. Two servers that are alike wrong
        # may have the same setting, which says nothing about their software.
        return [], [m for m in mismatches if not _right_since(case, m.run)]
    sides: dict[bool, list[Mismatch]] = {True: [], False: []}
    for mismatch in mismatches:
        sides[case.node.is_shared(mismatch)].append(mismatch)
    return sides[True], sides[False]


def _right_since(case: Case, run: Run) -> bool:
    """Return whether a later whole run of the same probe compared results and found nothing wrong."""
    later = (r for r in case.scheduled(run.probe) if r.started > run.started and r.outcome is Outcome.COMPLETED)
    return any(r.trials and not r.wrong for r in later)


def _unproven(case: Case, mismatches: Sequence[Mismatch], every: Sequence[Mismatch], alike: str) -> Finding:
    """Return the finding about some of `every` mismatch without a proof; `alike`: devices that give the same bits."""
    run, device = mismatches[-1].run, case.device
    facts = wrong_results(case, mismatches, every)
    rivals: tuple[Rival, ...] = ()
    cause, evidence = Cause.UNDETERMINED, [""]
    if alike:
        cause = Cause.SOFTWARE
        text = f"{run.probe} gave wrong results, and identical devices give the same: {alike}"
        action = "Do not send it back: report a bug, or change the driver or the libraries"
        evidence = [
            f"No {device.model} has passed this test on this software.",
            "The software, the model's design or the test is wrong, not this device alone.",
        ]
    elif not learns(device.kind):
        cause = Cause.HARNESS
        text = f"{run.probe} gave an unexpected result, but this test is not proven on {device.backend} devices"
        action = f"Repeat the test on {identical(device, facts.elsewhere)}"
    elif isinstance(device, ModelServer):  # its answers are also wrong if its format rounds
        cause, why, rivals = Mismatches(case, mismatches).decided
        text = "Every answer of the server was wrong so far"
        action = "Serve the exact canary without further quantisation; check that endpoints.NAME.exact names it"
        evidence = [
            "Possible: a format that rounds, another model, a bug of the engine, a fault of a device.",
            why,
        ]
    else:
        before = case.node.claims.before(device.kind, run, mismatches[-1].comparison.case)
        text = f"{run.probe} gave wrong results, and no {device.model} has passed this test on this software yet"
        action = f"Do not rely on its results; repeat the test on {identical(device, facts.elsewhere)}"
        evidence = [
            "Either this device is wrong, or the software is, or the test does not hold for its kernels.",
            INCONSTANT if is_inconstant(mismatches) else "",
            _changed_since(before.stack, run) if before else "",
            SETTLED.format(device.model),
        ]
    found = make_finding(UNCHARACTERISED, State.UNKNOWN, cause, text, action, mismatches, evidence, facts)
    return replace(found, rivals=rivals)


def _changed_since(before: Mapping[str, str], run: Run) -> str:
    """Return a sentence that says that the test passed on the software `before`, and what has changed since."""
    changed = [f"{link} {before[link]}" for link in sorted(before) if before[link] != run.stack.get(link)]
    former = ", ".join(changed) or "software"
    return f"This test passed on other software; going back to the former {former} settles it too."


def _proven(case: Case, mismatches: Sequence[Mismatch]) -> Iterator[str]:
    """Yield, for each kind of proof, a sentence with the test cases that it proves exact; nothing for a processor."""
    if case.is_cpu or not case.device.has_witnesses:
        return
    found = proofs([m for m in mismatches if m.comparison.subject is Subject.DEVICE])
    for by, group in itertools.groupby(found.items(), key=lambda item: item[1].by):
        listed = list(group)
        known = case.node.devices
        who = sorted({known[u].name if u in known else u for _, proof in listed for u in proof.devices})
        classes = first_of([name for name, _ in listed], 1)
        yield f"Proven exact ({classes}): {PROVEN[by].format(first_of(who, NAMED))}."


def _suspicion(case: Case, rule: str, mismatches: Sequence[Mismatch]) -> Finding:
    """Return the finding that wrong results or goldens of one probe make the device suspect."""
    lead, proven = strongest(mismatches), tuple(_proven(case, mismatches))
    facts = wrong_results(case, mismatches, case.fault(mismatches))
    message, action, evidence = f"{_seen(case, mismatches, facts)}; {count(facts.runs, 'run')} failed", "", proven
    if any(m is lead for accused, _ in case.confirmed for m in accused):
        message += " (part of the confirmed fault)"
    else:
        again = retests(case, [m for m in mismatches if _root(m) == _root(mismatches[-1])])
        to_come = max(0, case.policy.confirm_runs - again.of)
        facts = replace(facts, to_come=to_come)
        action = _action(case, lead.cause, facts)
        evidence = (lead.why, *_progress(case, mismatches, facts.retests), *proven)
    return make_finding(rule, State.SUSPECT, lead.cause, message, action, mismatches, evidence, facts)


def _seen(case: Case, mismatches: Sequence[Mismatch], facts: WrongResults) -> str:
    """Return a clause that says what was wrong, and in how many results."""
    probe, newest = mismatches[-1].run.probe, mismatches[-1].comparison
    if newest.subject is Subject.HOST:
        return DOUBTS[facts.doubt]
    tally = facts.probes[probe]
    wrong = f"{tally.wrong:,} of {tally.of:,}"
    if isinstance(case.device, ModelServer):
        return f"The server answered {wrong} exact questions wrong"
    if tally.cells:
        return f"{probe} found {wrong} sweeps of memory wrong ({name_cells(tally.cells)})"
    return f"{probe} computed {wrong} results wrong"


def _root(mismatch: Mismatch) -> str:
    """Return the id of the run that a mismatch's run retests, or the id of that run itself if it is no retest."""
    return mismatch.run.confirms or mismatch.run.id


def _progress(case: Case, mismatches: Sequence[Mismatch], again: Tally) -> Iterator[str]:
    """Yield sentences about the result of the retests, and about the time at which the suspicion ends."""
    if passed := again.of - again.wrong:
        yield f"{passed} of {again.of} retests passed, which does not clear the device."
    before = Mismatches(case, mismatches).accused
    uploads = math.ceil(RULE_OF_THREE * before.uploads / before.failed)
    results = math.ceil(RULE_OF_THREE * before.results / before.wrong)
    clean = f"{count(uploads, 'clean upload')} and {count(results, 'clean result')}"
    yield f"Clears after {format_duration(case.policy.watch)} with {clean}."
