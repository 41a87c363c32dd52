"""What the fleet votes on: equal labels promise equal values; another kernel, or bits that vary, are no vote."""

from dataclasses import replace

import pytest

from canaryd.daemon.snapshot import STEADY, fingerprints, last_success
from canaryd.facts import Reading, Recording
from canaryd.model import Device, Outcome, Run

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC", instruction_sets=("native", "avx2"))
STACK = {"torch": "2.13", "driver": "580"}
CHAIN = {"dtype": "float32", "kernel": "sm90_gemm"}


def recordings(*, chain=CHAIN, **digests):
    return tuple(
        Recording(case=f"gemm/{case}", digest=digest, chain=chain, values=(1.0,))
        for case, each in digests.items()
        for digest in each.split()
    )


def run(number, fingerprint, recorded=(), **changes):
    readings = () if fingerprint is None else (Reading(name="golden_fingerprint", value=fingerprint),)
    fields = {"device": CPU.uuid, "probe": "recorded_kernels", "probe_version": 1, "seconds": 1.0, "stack": STACK}
    return Run(
        id=f"r{number:03d}",
        started=float(number),
        readings=readings,
        recordings=recorded,
        **{**fields, "outcome": Outcome.COMPLETED, **changes},
    )


def label(found):
    """Return the label of the only fingerprint."""
    ((_, name),) = found
    return name


def test_exact_probes_are_labelled_by_the_stack():
    """The newest value counts at once, however often it changed; the label names stack and version of the probe."""
    runs = [run(0, 1, probe="exact_matmul"), run(1, 2, probe="exact_matmul")]
    assert fingerprints(runs) == {("exact_matmul", f"{runs[0].stack_id}-v1"): 2}


def test_another_version_of_a_probe_is_no_rival():
    """While a fleet is upgraded, node by node, the new version's cases are not wrong bits of the old one's."""
    old, new = run(0, 1, probe="exact_matmul"), run(1, 2, probe="exact_matmul", probe_version=2)
    assert fingerprints([old, new]) == {("exact_matmul", f"{new.stack_id}-v2"): 2}
    assert fingerprints([old, replace(new, readings=())]) == {}  # the old version's value is of the past


@pytest.mark.parametrize(
    "changed",
    [
        run(0, 1, recordings(a="aa", b="bb", chain={**CHAIN, "kernel": "sm90_gemm_splitk"})),
        run(0, 1, recordings(a="aa", b="bb"), stack={**STACK, "driver": "590"}),
        run(0, 1, recordings(a="aa")),
        run(0, 1, recordings(a="aa", c="bb")),
        run(0, 1, recordings(a="aa", b="bb"), probe_version=2),
    ],
    ids=["kernel", "driver", "a case less", "another case", "version"],
)
def test_what_may_change_the_bits_changes_the_label(changed):
    """Another kernel, another driver, other cases: no vote between the two."""
    assert label(fingerprints([changed])) != label(fingerprints([run(0, 1, recordings(a="aa", b="bb"))]))


def test_recorded_bits_that_changed_are_withheld_until_they_are_steady():
    """One run with another value is no vote; when the newest runs agree on it, it is."""
    runs = [run(0, 1, recordings(a="aa"))] + [run(n, 2, recordings(a="bb")) for n in range(1, STEADY)]
    assert fingerprints(runs) == {}
    runs.append(run(STEADY, 2, recordings(a="bb")))
    assert [*fingerprints(runs).values()] == [2]


@pytest.mark.parametrize(
    "changes", [{"outcome": Outcome.CRASHED}, {"cases": ("gemm/a",)}, {"confirms": "r0"}, {"intensity": "steady"}]
)
def test_only_whole_completed_runs_vote(changes):
    """Runs of a few cases, retests and crashes have no fingerprint."""
    assert fingerprints([run(0, 1, recordings(a="aa"), **changes)]) == {}


@pytest.mark.parametrize("value", [-1, 2**53, 1.0, True, "12"])
def test_what_a_float_cannot_hold_is_no_fingerprint(value):
    """Anybody's probe may yield anything under that name."""
    assert fingerprints([run(0, value)]) == {}


def test_each_instruction_set_votes_by_itself():
    """Their bits differ for good reasons: two lanes, two labels, whichever ran last."""
    sets = [
        (run(n, n, recordings(a="aa"), instruction_set=s, stack={**STACK, "instruction_set": s}))
        for n, s in enumerate(("native", "avx2"))
    ]
    assert sorted(fingerprints(sets).values()) == [0, 1]
    assert fingerprints(sets) == fingerprints(sets[::-1])


@pytest.mark.parametrize(
    ("readings", "changes", "found"),
    [
        ((Reading(name="speed_copy", value=9.0),), {}, {"fan": 5.0}),
        ((Reading(name="switches", value="none"),), {}, {}),
        ((Reading(name="trials", value=0),), {}, {}),
        ((), {}, {}),
        ((Reading(name="speed_copy", value=9.0),), {"outcome": Outcome.CRASHED}, {}),
    ],
)
def test_a_probe_of_judged_readings_alone_succeeds(readings, changes, found):
    """It is evidence to the judge; without a last success the alert CanarydProbeStale would fire for ever."""
    assert last_success([replace(run(5, None, probe="fan", **changes), readings=readings)]) == found
