"""Incidents: one fault is one of them, two faults are two, and its numbers are those of the runs."""

import pytest

from canaryd.judge.incidents import incidents, notes
from canaryd.model import Cause, Event, Finding, Ground, Outcome, Shown, State, Suspect, Verdict
from tests.judge.evidence_scenarios import happened
from tests.judge.made import (
    CPU,
    DAY,
    GPU,
    HOUR,
    MINUTE,
    NOW,
    TWIN,
    ask,
    confirmations,
    fresh,
    host,
    right,
    run,
    signs,
    wrong,
)
from tests.judge.telemetry import made as telemetry
from tests.places import line, place

PROBES = ("exact_attention", "exact_matmul", "recorded_kernels")


def everywhere(*ages, bit="7", core="core 1", of=GPU):
    """Return runs of every probe that are wrong in one bit: 2 of 8 results on one core, none of 8 on another."""
    clean = right(seed=50, trials=8, place=place("core 0"))
    return [
        run(
            age - n, wrong(age, 8, 2, bits=(bit,), place=place(core), lines={"row": line(n)}), clean, probe=probe, of=of
        )
        for age in ages
        for n, probe in enumerate(PROBES)
    ]


def test_one_fault_that_every_probe_sees_is_one_incident():
    """Counted over probes and runs; the finding that confirms it, and those that only suspect, are one thing."""
    verdict = ask(*everywhere(3 * HOUR, HOUR), wanted=dict.fromkeys(PROBES, 900.0))
    (incident,) = incidents(verdict)
    assert len(verdict.findings) == 1 + len(PROBES)
    assert sorted(f.rule for f in incident.findings) == sorted(f.rule for f in verdict.findings)
    assert (incident.state, incident.cause) == (State.FAULTY, Cause.UNDETERMINED)
    assert incident.lead.rule == "exact-mismatch-confirmed"
    assert incident.since == NOW - 3 * HOUR
    found = incident.wrong
    assert {name: (t.wrong, t.of) for name, t in found.probes.items()} == dict.fromkeys(PROBES, (4, 32))
    assert (found.all.wrong, found.all.of, found.runs) == (12, 96, 6)
    assert [(str(p.place), p.wrong, p.of) for p in found.places] == [("core 0", 0, 48), ("core 1", 12, 48)]
    assert found.bits == (7,)
    assert [c.ground for c in found.confirmed] == [Ground.DAY, Ground.PLACE]


@pytest.mark.parametrize("ages", [(3 * HOUR, HOUR), (HOUR,)])
def test_results_from_before_it_began_are_not_counted(ages):
    """Neither in the incident nor in a finding of its: what was clean before says nothing of how often it fails."""
    before = [run(age, right(seed=9, trials=90), probe=probe) for age in (9 * HOUR, 8 * HOUR) for probe in PROBES]
    known, alone = (ask(*runs, *everywhere(*ages), wanted=dict.fromkeys(PROBES, 900.0)) for runs in (before, []))
    (incident,), (other,) = incidents(known), incidents(alone)
    assert (incident.wrong.all, incident.since) == (other.wrong.all, other.since)
    assert [f.message for f in incident.findings] == [f.message for f in other.findings]
    for finding in incident.findings:
        assert {p: incident.wrong.probes[p] for p in finding.wrong.probes} == finding.wrong.probes


def test_before_it_is_confirmed_it_is_one_incident_too():
    """Each probe suspects the device by itself: their counts add up."""
    (incident,) = incidents(ask(*everywhere(HOUR, core="device"), wanted=dict.fromkeys(PROBES, 900.0)))
    assert incident.state is State.SUSPECT
    assert incident.rules == ("exact-mismatch",)
    assert (incident.wrong.all.wrong, incident.wrong.all.of, incident.wrong.runs) == (6, 48, 3)
    assert incident.wrong.confirmed == ()
    assert incident.wrong.bits == (7,)


@pytest.mark.parametrize(("failed", "clean"), [(3, 0), (3, 2), (1, 2), (0, 0)])
def test_retests_are_counted(failed, clean):
    """Those that failed, of all that ended."""
    (incident,) = incidents(ask(*confirmations(failed, clean=clean)[: 1 + failed + clean], fresh()))
    assert (incident.wrong.retests.wrong, incident.wrong.retests.of) == (failed, failed + clean)
    assert bool(incident.wrong.confirmed) is (failed == 3)


def test_a_run_that_repeats_what_another_computed_wrong_is_no_retest():
    """It is wrong by itself here, and says nothing of how often the other fails."""
    again = run(HOUR - MINUTE, wrong(seed=9), confirms="of-the-twin")
    theirs = run(HOUR, wrong(), of=TWIN, id="of-the-twin")
    (incident,) = incidents(ask(again, fresh(), peers=[(TWIN, [theirs])]))
    assert (incident.wrong.retests.wrong, incident.wrong.retests.of) == (0, 0)
    (other,) = incidents(ask(theirs, fresh(of=TWIN), of=TWIN, peers=[(GPU, [again])]))
    assert (other.wrong.retests.wrong, other.wrong.retests.of) == (0, 0)


def test_a_host_whose_gpus_fail_together_is_not_acquitted_by_its_cpu():
    """Its memory, power or PCIe may be what they share, though its CPU computes right."""
    cpu = (CPU, [run(HOUR, right(), of=CPU)])
    (alone,) = incidents(ask(run(HOUR, wrong()), fresh(), peers=[cpu]))
    assert Suspect.HOST in {r.what for r in alone.lead.rivals if r.rejected}
    twin = (TWIN, [run(HOUR, wrong(seed=5, first=()), of=TWIN)])
    (both,) = incidents(ask(run(HOUR, wrong()), fresh(), peers=[cpu, twin]))
    assert Suspect.HOST in {r.what for r in both.lead.rivals if not r.rejected}


def test_a_rival_says_what_it_is_and_who_rejects_it():
    """A sibling that is right shares kernel, reference and host: it rejects all three."""
    (incident,) = incidents(ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN)])]))
    found = {r.what: (r.rejected, r.shown, r.by) for r in incident.lead.rivals}
    assert found == dict.fromkeys((Suspect.HOST, Suspect.SOFTWARE, Suspect.REFERENCE), (True, Shown.RIGHT, ("cuda:1",)))


@pytest.mark.parametrize(
    ("theirs", "device"),
    [([run(9 * DAY, right(seed=99), of=TWIN)], "cuda:1"), (None, "cuda")],
    ids=["sibling", "alone"],
)
def test_what_finds_the_cause_can_be_typed_elsewhere(theirs, device):
    """A sibling is named where there is one; else a backend, which another node has too."""
    verdict = ask(*confirmations(3), fresh(), peers=[(TWIN, theirs)] if theirs else [])
    (incident,) = incidents(verdict)
    found, newest = incident.wrong.elsewhere, confirmations(3)[-1]
    assert (found.device, found.probe, found.case) == (device, newest.probe, newest.wrong[-1].case)
    assert (found.seed, found.level) == (newest.seed, newest.level)


@pytest.mark.parametrize(("clean", "seconds"), [(0, 0.0), (4, 60.0), (49, 600.0), (898, 10_800.0)])
def test_a_rare_fault_is_looked_for_long_enough_elsewhere(clean, seconds):
    """Right there by chance would accuse a sound part: the test lasts until a fault as frequent shows with 95 %."""
    several = wrong(trials=30, wrong_trials=3, uploads=30), wrong(seed=2), wrong(seed=3)
    runs = [run(9 * DAY - n, right()) for n in range(50)]  # of before it began
    runs.append(run(2 * HOUR, *([wrong()] if clean else several)))
    runs += [run(HOUR - n / 10, right()) for n in range(clean)]
    (incident,) = incidents(ask(*runs))
    assert incident.wrong.elsewhere.seconds == seconds


def test_two_faults_of_one_device_are_two_incidents():
    """Wrong results do not explain heat, nor a memory error of the device's own counters."""
    hot = [
        Event(device=GPU.uuid, kind="condition", name="throttle_active{reason=hw_thermal}", first=NOW - 600,
              last=NOW - 60, count=300.0, reading="throttle_active", labels={"reason": "hw_thermal"})
    ]  # fmt: skip
    verdict = ask(run(HOUR, wrong()), fresh(), signs=signs(events=[*hot, *happened("xid", "48", 2, code=48)]))
    found = {i.lead.rule: i.state for i in incidents(verdict)}
    assert found.pop("exact-mismatch") is State.SUSPECT
    assert found.pop("throttled") is State.DEGRADED
    assert len(found) == 1, found
    assert [i.wrong is not None for i in incidents(verdict)].count(True) == 1


def test_what_follows_from_wrong_results_is_part_of_them():
    """An error of the device in the same day is; the same error a week before the first wrong result is not."""
    broke = {"outcome": Outcome.DEVICE_ERROR, "detail": "illegal address"}
    (incident,) = incidents(ask(run(HOUR, wrong()), run(2 * HOUR, **broke), fresh()))
    assert incident.rules == ("exact-mismatch", "device-error")
    before = Finding(
        rule="device-error", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message="", since=NOW - 8 * DAY
    )
    verdict = ask(run(HOUR, wrong()), fresh())
    apart = Verdict(**{**vars(verdict), "findings": (*verdict.findings, before)})
    assert [i.rules for i in incidents(apart)] == [("exact-mismatch",), ("device-error",)]


def test_wrong_results_of_the_software_are_an_incident_of_their_own():
    """Bits that a sibling gives too are one fault, the device's own another: as the judge tells them apart."""
    alike = wrong(seed=7, first=(((1, 1), "0x0", "0x1"),))
    own = [run(HOUR * n, wrong(seed=8, first=(((2, n), "0x0", "0x8"),))) for n in (1, 3)]
    shared = [run(HOUR * n + 1, alike, of=GPU, probe="exact_attention") for n in (1, 3)]
    theirs = [run(2 * HOUR, alike, of=TWIN, probe="exact_attention"), run(2 * HOUR, right(seed=8), of=TWIN)]
    wanted = {"exact_matmul": 900.0, "exact_attention": 900.0}
    verdict = ask(*own, *shared, fresh(), peers=[(TWIN, theirs)], wanted=wanted)
    assert [(i.state, i.cause) for i in incidents(verdict)] == [
        (State.FAULTY, Cause.HARDWARE),
        (State.FAULTY, Cause.SOFTWARE),
    ]
    assert [set(i.wrong.probes) for i in incidents(verdict)] == [{"exact_matmul"}, {"exact_attention"}]


def test_a_golden_and_a_result_of_one_processor_are_one_incident():
    """A core that makes references wrong computes results wrong too."""
    runs = [run(HOUR, wrong(place=place("core 3")), of=CPU), run(2 * HOUR, host(), of=CPU)]
    (incident,) = incidents(ask(*runs, of=CPU, wanted={"exact_matmul": 900.0}))
    assert {"exact-mismatch", "golden-disagreement"} <= set(incident.rules)


def test_a_device_that_is_gone_is_one_incident():
    """That nothing is measured any more follows from it."""
    verdict = ask(run(9 * HOUR, right()), gone_since=NOW - HOUR)
    assert {f.rule for f in verdict.findings} == {"device-vanished", "stale-evidence"}
    (incident,) = incidents(verdict)
    assert incident.lead.rule == "device-vanished"


@pytest.mark.parametrize(
    ("lead", "follows"),
    [
        ("gpu-lost", ("keeps-failing", "not-completed", "pcie-aer", "kernel-pcie")),
        ("keeps-failing", ("not-completed", "stale-evidence", "no-evidence")),
        ("pcie-aer", ("kernel-pcie",)),
    ],
)
def test_what_follows_from_a_lost_or_silent_device_is_part_of_it(lead, follows):
    """One event of the device is one thing to know, whatever else notices it."""
    found = [
        Finding(rule=rule, state=State.SUSPECT, cause=Cause.UNDETERMINED, message=rule) for rule in (lead, *follows)
    ]
    given = {"device": GPU.uuid, "state": State.SUSPECT, "cause": Cause.UNDETERMINED, "decided": NOW, "since": NOW}
    (incident,) = incidents(Verdict(**given, findings=tuple(found)))
    assert incident.lead.rule == lead


def test_equal_findings_about_several_probes_are_one_incident():
    """Five probes that have not run yet are one thing to know."""
    verdict = ask(wanted=dict.fromkeys(PROBES, 900.0))
    (incident,) = incidents(verdict)
    assert (incident.rules, incident.probes) == (("no-evidence",), PROBES)
    assert "where one runs" in incident.lead.action  # no daemon may run: waiting alone would bring nothing


def test_a_probe_that_was_skipped_does_not_wait_for_its_first_run():
    """Its newest run says why it has no result; another probe's is another thing to know."""
    skipped = run(MINUTE, outcome=Outcome.SKIPPED, detail="no torch")
    verdict = ask(skipped, wanted=dict.fromkeys((skipped.probe, "memory_sweep"), 900.0))
    found = [(i.rules, i.probes, i.cause) for i in incidents(verdict)]
    assert found == [
        (("not-completed", "no-evidence"), (skipped.probe,), Cause.ENVIRONMENT),
        (("no-evidence",), ("memory_sweep",), Cause.UNDETERMINED),
    ]


def test_a_healthy_device_has_no_incident():
    """Notes are none."""
    note = Finding(rule="a-note", state=State.HEALTHY, cause=Cause.NONE, message="persistence is off")
    verdict = ask(run(MINUTE, right()))
    assert incidents(verdict) == ()
    noted = Verdict(**{**vars(verdict), "findings": (note,)})
    assert (incidents(noted), notes(noted)) == ((), (note,))


def test_no_finding_is_lost_or_told_twice():
    """Whatever was found: each finding that is no note stands in exactly one incident."""
    from tests.judge.scenarios import SCENARIOS

    for name, scenario in SCENARIOS.items():
        verdict = scenario()[0]
        told = [f for i in incidents(verdict) for f in i.findings]
        held = [f for f in verdict.findings if f.state is not State.HEALTHY]
        assert sorted(map(id, told)) == sorted(map(id, held)), name
        assert (
            max((i.state for i in incidents(verdict)), key=lambda s: s.severity, default=State.HEALTHY) is verdict.state
        )


def test_what_is_worse_than_an_acknowledged_fault_is_another():
    """It was not acknowledged with it, and would be hidden behind it."""
    fault = Finding(rule="gpu-lost", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message="m", action="a", since=NOW)
    worse = Finding(rule="pcie-aer", state=State.SUSPECT, cause=Cause.UNDETERMINED, message="m", action="a", since=NOW)
    given = {"device": GPU.uuid, "state": State.SUSPECT, "cause": Cause.UNDETERMINED, "decided": NOW, "since": NOW}
    assert [i.rules for i in incidents(Verdict(**given, findings=(fault, worse)))] == [("pcie-aer",), ("gpu-lost",)]


def test_an_error_of_the_hosts_memory_is_one_incident():
    """The processor raises an exception where it reads what was lost: one part, one ticket."""
    seen = (telemetry.event("mce", "memory"), telemetry.rise("machine_check_exceptions_total"))
    given = {"device": CPU.uuid, "state": State.SUSPECT, "cause": Cause.HARDWARE, "decided": NOW, "since": NOW}
    (incident,) = incidents(Verdict(**given, findings=tuple(telemetry.findings(telemetry.sign(*seen)))))
    assert incident.rules == ("host-uncorrected-error", "machine-check")
