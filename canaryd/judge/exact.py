"""Rules about exact goldens: mismatches, goldens in doubt, comparators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from canaryd.facts import Doubt, Subject
from canaryd.formatting import HOUR, MINUTE, format_duration
from canaryd.judge.case import Case, cured, record, scene, since_onset
from canaryd.judge.cause import Mismatch, decide, names
from canaryd.judge.cells import name_cells
from canaryd.judge.characterised import By, learns
from canaryd.judge.confirmation import crowded
from canaryd.judge.findings import UNCHARACTERISED, make_finding, proofs, strongest
from canaryd.judge.node import find_mismatches, is_inconstant
from canaryd.judge.phrases import count, describe, find_cause, first_of, identical, whom_to_tell
from canaryd.judge.statistics import RULE_OF_THREE
from canaryd.judge.wrong import retests, wrong_results
from canaryd.model import Cause, Elsewhere, Finding, Outcome, Run, State, Tally, WrongResults

DOUBTS = {
    Doubt.MADE_TWICE: "This CPU computed the reference twice and got two results",
    Doubt.ARITHMETIC: "Integer and float64 arithmetic of this CPU disagree",
    Doubt.DIGEST: "The reference computed on this CPU differs from the shipped one",
}
"""Doubt → first words of the finding about the golden."""
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
    for mismatches in case.standing(Subject.DEVICE, case.accusations):
        probe = mismatches[-1].run.probe
        tally = (facts := wrong_results(case, mismatches, began=_began(case, mismatches))).probes[probe]
        text = f"{probe} computed {tally.wrong:,} of {tally.of:,} results wrong"
        if tally.cells:
            text = f"{probe} found {tally.wrong:,} of {tally.of:,} sweeps of memory wrong ({name_cells(tally.cells)})"
        if case.device.is_endpoint:
            text = f"The server answered {tally.wrong:,} of {tally.of:,} exact questions wrong"
        yield _suspicion(case, "exact-mismatch", text, mismatches, facts)


def golden_disagreement(case: Case) -> Iterator[Finding]:
    """Yield a finding against the CPU if this host made a golden in two ways with two results, for any device's run."""
    for mismatches in case.standing(Subject.HOST, case.accusations):
        text = DOUBTS.get(mismatches[-1].comparison.doubt, "The reference computed on this CPU is in doubt")
        facts = wrong_results(case, mismatches, began=_began(case, mismatches))
        yield _suspicion(case, "golden-disagreement", text, mismatches, facts)


def _began(case: Case, mismatches: Sequence[Mismatch]) -> float:
    """Return the time (epoch s) of the first mismatch, or of the first one of the confirmed fault with these."""
    lead = strongest(mismatches)
    groups = (accusations for accusations, _ in case.confirmed if any(m is lead for m in accusations))
    return min(mismatches[0].run.started, *(m.run.started for group in groups for m in group[:1]), math.inf)


def confirmed(case: Case) -> Iterator[Finding]:
    """Yield a finding that makes the device faulty, as its wrong results repeat. The cause decides only what to do."""
    for mismatches, grounds in case.confirmed:
        lead = strongest(mismatches)
        probes = names({m.run.probe for m in mismatches})
        facts = replace(wrong_results(case, mismatches, grounds), elsewhere=_elsewhere(case, mismatches))
        what = "answers" if case.device.is_endpoint else "memory" if facts.cells else "results"
        yield make_finding(
            "exact-mismatch-confirmed",
            State.FAULTY,
            lead.cause,
            f"Wrong {what} in {probes}, confirmed: {grounds[0].why}",
            _remedy(case, lead, facts.elsewhere),
            mismatches,
            (
                *(f"Confirmed: {ground.why}." for ground in grounds),
                lead.why,
                *_proven(case, mismatches),
                f"Newest: {describe(mismatches[-1])}.",
            ),
            facts,
        )


def _remedy(case: Case, lead: Mismatch, elsewhere: Elsewhere | None) -> str:
    """Return what to do about a confirmed fault; `lead` is the mismatch that gives its cause."""
    if case.device.is_endpoint:
        return f"Do not use its answers. {_about_server(lead.cause)}"
    if lead.cause is Cause.HARDWARE:
        return f"Take it out of service, then {whom_to_tell(case.device)}: canaryd report {case.device.name} -o DIR"
    if lead.cause is Cause.SOFTWARE:
        return "Do not send it back: change the driver or the libraries. It clears when the new ones pass"
    return f"Do not use its results. {find_cause(case.device, elsewhere)}"


def host_in_doubt(case: Case) -> Iterator[Finding]:
    """Yield a finding that accuses the host, if its CPU was wrong at about the same time as this accelerator."""
    doubted = [m for m in case.accusations if m.host_in_doubt]
    if list(case.standing(Subject.DEVICE, doubted)):
        cpus = names(f"{d.name} ({d.model})" for d in case.devices.values() if d.backend == "cpu")
        window = format_duration(case.policy.repeat_window)
        yield make_finding(
            "host-in-doubt",
            State.UNKNOWN,
            Cause.HARDWARE,
            f"The host's CPU was wrong too, within {window} of this device's mismatch",
            CPU_FIRST,
            doubted,
            (
                "Its mismatches of that time do not confirm a fault of this device.",
                f"CPU: {cpus or 'not in the list of devices'}.",
                f"Newest: {describe(doubted[-1])}.",
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
        newest = f"Newest: {describe(mismatches[-1])}."
        yield make_finding("golden-in-doubt", state, Cause.HARNESS, text, action, mismatches, (newest,))


def comparator_disagreement(case: Case) -> Iterator[Finding]:
    """Yield a finding if device and host compared the same bytes and disagree. Only repetition accuses the device.

    Chance that this repeats on a healthy device: 1.9e-9 in 30 days (ours).
    """
    for mismatches in case.standing(Subject.COMPARATOR, find_mismatches(case.runs, Subject.COMPARATOR)):
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
            why, action = f"{names(others)} began to do so too: what they share may be at fault.", CPU_FIRST
        elif repeated:
            why = "It happened repeatedly, so the device or its connection to the host is wrong."
            action = "Take it out of service"
        yield make_finding(
            "comparator-disagreement",
            State.SUSPECT,
            Cause.HARDWARE if repeated and not others else Cause.UNDETERMINED,
            "Device and host compared the same bytes and disagree",
            action,
            mismatches,
            (why, f"Newest: {describe(mismatches[-1])}."),
            wrong_results(case, mismatches),
        )


def uncharacterised_mismatch(case: Case) -> Iterator[Finding]:
    """Yield a finding that makes a device unknown: it was wrong where no such device has passed on this software.

    The finding says which test shows whether the device is at fault. If identical devices give the same wrong bits,
    the software or the design of the model is.
    """
    mismatches = [m for m in case.node.missed[case.device.uuid] if m.proof is None]
    if case.device.is_endpoint:  # a server that was wrong everywhere and then right was served in another way
        mismatches = [m for m in mismatches if not _right_since(case, m.run)]
    # Two servers that are alike wrong may have the same setting, which says nothing about their software.
    alike = {id(m): frozenset() if case.device.is_endpoint else _alike(case, m) for m in mismatches}
    for shared in (True, False):
        side = [m for m in mismatches if bool(alike[id(m)]) is shared]
        for listed in case.standing(Subject.DEVICE, side):
            if not shared:
                yield _unproven(case, listed)
            elif not cured(case, [m for m in listed if m.run.stack_id == listed[-1].run.stack_id]):
                yield _shared(case, listed, frozenset().union(*(alike[id(m)] for m in listed)))


def _right_since(case: Case, run: Run) -> bool:
    """Return whether a later whole run of the same probe compared results and found nothing wrong."""
    later = (r for r in case.scheduled(run.probe) if r.started > run.started and r.outcome is Outcome.COMPLETED)
    return any(r.trials and not r.wrong for r in later)


def _unproven(case: Case, mismatches: Sequence[Mismatch]) -> Finding:
    newest, backend = mismatches[-1], case.device.backend
    facts = replace(wrong_results(case, mismatches), elsewhere=_elsewhere(case, mismatches))
    told = f"Newest: {describe(newest)}."
    if not learns(case.device.kind):
        text = f"{newest.run.probe} gave an unexpected result, but this test is not proven on {backend} devices"
        action = f"Repeat the test on {identical(case.device, facts.elsewhere)}"
        return make_finding(UNCHARACTERISED, State.UNKNOWN, Cause.HARNESS, text, action, mismatches, (told,), facts)
    if case.device.is_endpoint:
        return _never_right(case, mismatches, facts)
    before = case.node.claims.before(case.device.kind, newest.run, newest.comparison.case)
    return make_finding(
        UNCHARACTERISED,
        State.UNKNOWN,
        Cause.UNDETERMINED,
        f"{newest.run.probe} gave wrong results, and no {case.device.model} has passed this test on this software yet",
        f"Do not rely on its results; repeat the test on {identical(case.device, facts.elsewhere)}",
        mismatches,
        (
            "Either this device is wrong, or the software is, or the test does not hold for its kernels.",
            *([INCONSTANT] if is_inconstant(mismatches) else []),
            *([_changed_since(before.stack, newest.run)] if before else []),
            SETTLED.format(case.device.model),
            told,
        ),
        facts,
    )


def _never_right(case: Case, mismatches: Sequence[Mismatch], facts: WrongResults) -> Finding:
    """Return the finding about a server whose answers were never right. They are also wrong if its format rounds."""
    cause, why, rivals = decide(scene(case, mismatches))
    found = make_finding(
        UNCHARACTERISED,
        State.UNKNOWN,
        cause,
        "Every answer of the server was wrong so far",
        "Serve the exact canary without further quantisation; check that endpoints.NAME.exact names the same one",
        mismatches,
        (
            "Possible: a format that rounds, another checkpoint, a bug of the engine, a fault of a device.",
            why,
            f"Newest: {describe(mismatches[-1])}.",
        ),
        facts,
    )
    return replace(found, rivals=rivals)


def _about_server(cause: Cause) -> str:
    """Return what to do about a server with wrong answers."""
    if cause is Cause.SOFTWARE:
        return "Restart the server; if it stays wrong, change the engine or its settings"
    return "Run canaryd check --level deep: it tests the devices that serve it"


def _changed_since(before: Mapping[str, str], run: Run) -> str:
    """Return a sentence that says that the test passed on the software `before`, and what has changed since."""
    changed = [f"{link} {before[link]}" for link in sorted(before) if before[link] != run.stack.get(link)]
    former = ", ".join(changed) or "software"
    return f"This test passed on other software; going back to the former {former} settles it too."


def _shared(case: Case, mismatches: Sequence[Mismatch], alike: Collection[str]) -> Finding:
    newest = mismatches[-1]
    text = f"{newest.run.probe} gave wrong results, and identical devices give the same: {names(alike)}"
    return make_finding(
        UNCHARACTERISED,
        State.UNKNOWN,
        Cause.SOFTWARE,
        text,
        "Do not send it back: report a bug, or change the driver or the libraries",
        mismatches,
        (
            f"No {case.device.model} has passed this test on this software.",
            "The software, the model's design or the test is wrong, not this device alone.",
            f"Newest: {describe(newest)}.",
        ),
        wrong_results(case, mismatches),
    )


def _alike(case: Case, mismatch: Mismatch) -> frozenset[str]:
    """Return the names of siblings that gave the same wrong bits for the same data."""
    return frozenset(case.node.devices[uuid].name for uuid in case.node.gave_alike(mismatch))


def _proven(case: Case, mismatches: Sequence[Mismatch]) -> Iterator[str]:
    """Yield, for each kind of proof, a sentence with the test cases that it proves exact; nothing for a processor."""
    if case.is_cpu or case.device.is_endpoint:
        return
    found = proofs([m for m in mismatches if m.comparison.subject is Subject.DEVICE])
    for by, group in itertools.groupby(found.items(), key=lambda item: item[1].by):
        listed = list(group)
        known = case.node.devices
        who = sorted({known[u].name if u in known else u for _, proof in listed for u in proof.devices})
        classes = first_of([name for name, _ in listed], 1)
        yield f"Proven exact ({classes}): {PROVEN[by].format(first_of(who, NAMED))}."


def _suspicion(case: Case, rule: str, seen: str, mismatches: Sequence[Mismatch], facts: WrongResults) -> Finding:
    lead = strongest(mismatches)
    runs = count(facts.runs, "run")
    newest = f"Newest: {describe(mismatches[-1])}."
    if any(m is lead for accusations, _ in case.confirmed for m in accusations):
        message, action = f"{seen}; {runs} failed (part of the confirmed fault)", ""
        evidence: tuple[str, ...] = (*_proven(case, mismatches), newest)
    else:
        again = retests(case, [m for m in mismatches if _root(m) == _root(mismatches[-1])])
        to_come = max(0, case.policy.confirm_runs - again.of)
        facts = replace(facts, to_come=to_come, elsewhere=_elsewhere(case, mismatches))
        message, action = f"{seen}; {runs} failed", _next_step(case, lead, facts)
        evidence = (lead.why, *_progress(case, mismatches, facts.retests), *_proven(case, mismatches), newest)
    return make_finding(rule, State.SUSPECT, lead.cause, message, action, mismatches, evidence, facts)


def _elsewhere(case: Case, mismatches: Sequence[Mismatch]) -> Elsewhere | None:
    """Return options that repeat the newest mismatch on a sound sibling or on another node; None for an endpoint."""
    if case.device.is_endpoint:
        return None
    run = mismatches[-1].run
    siblings = (
        other.name
        for uuid, other in sorted(case.devices.items())
        if other.kind == case.device.kind and other.physical != case.device.physical and not case.node.missed[uuid]
    )
    return Elsewhere(
        device=next(siblings, case.device.backend),
        probe=run.probe,
        case=mismatches[-1].comparison.case,
        seed=run.seed,
        level=run.level,
        instruction_set=run.instruction_set,
        intensity=run.intensity,
        seconds=_long_enough(case, mismatches),
    )


def _long_enough(case: Case, mismatches: Sequence[Mismatch]) -> float:
    """Return the seconds for which to repeat the newest mismatch's test, so that it fails at least once with 95 %.

    The other device is assumed to be as fast and to fail as often (rule of three, for results and for uploads). 0.0
    means that one run is enough.
    """
    run, subject = mismatches[-1].run, mismatches[-1].comparison.subject
    alike = [m for m in mismatches if m.run.probe == run.probe and m.comparison.subject is subject]
    here = since_onset(case, alike)
    each = ((here.results, here.wrong, run.trials), (here.uploads, here.failed, run.uploads))
    runs = max((RULE_OF_THREE * of / wrong / done for of, wrong, done in each if wrong and done), default=0.0)
    seconds = runs * run.seconds
    step = next((s for s in (HOUR, MINUTE) if seconds > s), 1.0)
    return 0.0 if runs <= 1.0 else math.ceil(seconds / step) * step


def _root(mismatch: Mismatch) -> str:
    """Return the id of the run that a mismatch's run retests, or the id of that run itself if it is no retest."""
    return mismatch.run.confirms or mismatch.run.id


def _next_step(case: Case, lead: Mismatch, facts: WrongResults) -> str:
    """Return what to do about a suspect device: wait for retests that are to come, else act according to the cause."""
    if facts.to_come > 0:
        return f"Wait for {count(facts.to_come, 'automatic retest')}"
    if case.device.is_endpoint:
        return _about_server(lead.cause)
    if lead.cause is Cause.UNDETERMINED:
        return find_cause(case.device, facts.elsewhere)
    if lead.cause is Cause.SOFTWARE:
        return "Do not send it back: change the driver or the libraries"
    return "Do not rely on its results; canaryd keeps retesting it"


def _progress(case: Case, mismatches: Sequence[Mismatch], again: Tally) -> Iterator[str]:
    """Yield sentences about the result of the retests, and about the time at which the suspicion ends."""
    if passed := again.of - again.wrong:
        yield f"{passed} of {again.of} retests passed, which does not clear the device."
    before, _ = record(case, mismatches)
    uploads = math.ceil(RULE_OF_THREE * before.uploads / before.failed)
    results = math.ceil(RULE_OF_THREE * before.results / before.wrong)
    clean = f"{count(uploads, 'clean upload')} and {count(results, 'clean result')}"
    yield f"Clears after {format_duration(case.policy.watch)} with {clean}."
