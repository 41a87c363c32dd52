"""Incidents: one fault is one of them, two faults are two, and its numbers are those of the runs."""

import pytest

from canaryd.judge.incidents import incidents
from canaryd.model import Cause, Event, Finding, Ground, Outcome, State, Suspect, Verdict
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
    right,
    run,
    signs,
    wrong,
)
from tests.judge.telemetry import made
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


@pytest.mark.parametrize(("failed", "clean"), [(3, 0), (3, 2), (1, 2), (0, 0)])
def test_retests_are_counted(failed, clean):
    """Those that failed, of all that ended."""
    (incident,) = incidents(ask(*confirmations(failed, clean=clean)[: 1 + failed + clean], fresh()))
    assert (incident.wrong.retests.wrong, incident.wrong.retests.of) == (failed, failed + clean)
    assert bool(incident.wrong.confirmed) is (failed == 3)


def test_a_host_whose_gpus_fail_together_is_not_acquitted_by_its_cpu():
    """Its memory, power or PCIe may be what they share, though its CPU computes right."""
    cpu = (CPU, [run(HOUR, right(), of=CPU)])
    (alone,) = incidents(ask(run(HOUR, wrong()), fresh(), peers=[cpu]))
    assert Suspect.HOST in {r.what for r in alone.lead.rivals if r.rejected}
    twin = (TWIN, [run(HOUR, wrong(seed=5, first=()), of=TWIN)])
    (both,) = incidents(ask(run(HOUR, wrong()), fresh(), peers=[cpu, twin]))
    assert Suspect.HOST in {r.what for r in both.lead.rivals if not r.rejected}


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


def test_a_probe_that_was_skipped_does_not_wait_for_its_first_run():
    """Its newest run says why it has no result; another probe's is another thing to know."""
    skipped = run(MINUTE, outcome=Outcome.SKIPPED, detail="no torch")
    verdict = ask(skipped, wanted=dict.fromkeys((skipped.probe, "memory_sweep"), 900.0))
    found = [(i.rules, i.probes, i.cause) for i in incidents(verdict)]
    assert found == [
        (("not-completed", "no-evidence"), (skipped.probe,), Cause.ENVIRONMENT),
        (("no-evidence",), ("memory_sweep",), Cause.UNDETERMINED),
    ]


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


def test_a_link_explains_no_memory():
    """Who reseats the link must still read of the memory."""
    found = made.findings(made.sign(made.event("amdgpu", "bad-pages"), made.rise(made.LINK("recovery_failed"), ago=60)))
    given = {"device": GPU.uuid, "state": State.DEGRADED, "cause": Cause.HARDWARE, "decided": NOW, "since": NOW}
    assert len(incidents(Verdict(**given, findings=tuple(found)))) == 2
