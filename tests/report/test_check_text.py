"""What `canaryd check` prints of a device about which something was known before."""

from dataclasses import replace

import pytest

from canaryd.engine.check import Result, all_gaps, lacking
from canaryd.formatting import format_time
from canaryd.model import Cause, Finding, State
from canaryd.report.check import as_json, as_text
from tests.mixed_machine import GPU, fault
from tests.mixed_machine import verdict as told_of
from tests.pages import unwrapped
from tests.report.statuses import NOW, mismatch, run

KNOWN = NOW - 7200


def checked(verdict, *runs):
    """Return the result of a check that began at `NOW` and ran these."""
    found = replace(verdict, device=GPU.uuid)
    of = [replace(r, device=GPU.uuid) for r in runs]
    return Result(level="quick", started=NOW, devices=[GPU], verdicts={GPU.uuid: found}, runs={GPU.uuid: of})


def of_earlier():
    return told_of(replace(fault(cause=Cause.UNDETERMINED), since=KNOWN))


def clean(results):
    """Return a run with so many results, none of them wrong."""
    (comparison,) = mismatch(1).comparisons
    return run(1, comparisons=(replace(comparison, trials=results, wrong_trials=0, evidence=None),))


def test_a_clean_repeat_on_a_faulty_node_says_what_it_found():
    """Under the lines about the fault, which stays: else a clean repeat reads like one that was wrong again."""
    result = checked(of_earlier(), clean(488))
    when = format_time(KNOWN, seconds=False)
    assert f"This check: 488 results, 0 wrong. The fault of {when} stays on record." in unwrapped(as_text(result))
    (device,) = as_json(result)["devices"]
    assert (device["results"], device["wrong"], device["recordings"], device["differ"]) == (488, 0, 0, 0)


def test_a_healthy_device_says_what_fault_its_results_would_have_shown():
    """The rate that so many clean results exclude at 95 %, in a sentence with one number of its own."""
    healthy = replace(of_earlier(), state=State.HEALTHY, cause=Cause.NONE, findings=())
    result = replace(checked(healthy, clean(299)), rules_out={GPU.uuid: {clean(1).probe: 0.01}})
    assert "would have caught any fault that hits at least 1 in 100 results (95 %)" in unwrapped(as_text(result))


def test_a_repeat_that_is_wrong_again_counts_its_own_results():
    """The verdict counts all that is on record."""
    wrong = replace(mismatch(2), comparisons=tuple(replace(c, trials=12) for c in mismatch(2).comparisons))
    result = checked(of_earlier(), wrong)
    text = unwrapped(as_text(result))
    assert "This check: 12 results, 1 wrong." in text
    assert "stays on record" not in text
    assert (as_json(result)["devices"][0]["results"], as_json(result)["devices"][0]["wrong"]) == (12, 1)


@pytest.mark.parametrize("drill", [True, False])
def test_a_fault_that_this_check_found_needs_no_second_count(drill):
    """Its lines are about this check, as those of a drill are."""
    verdict = told_of(replace(fault(), since=NOW + 1))
    assert "This check:" not in as_text(checked(replace(verdict, drill=drill), mismatch(1)))


def test_what_was_not_tested_says_how_to_test_it():
    """In words of the reader: no names of probes; the command is whole, since the status says it too."""
    gaps = list(map(str, all_gaps("quick", lacking({"cpu:0": ()}), [GPU])))
    assert "links: not tested on cpu:0" in gaps
    levels = [gap for gap in gaps if "--level" in gap]
    assert len(levels) >= 2
    assert all("canaryd check --level " in gap for gap in levels)


def test_a_check_without_a_result_says_so():
    """What is unknown may be so because of the record, or because nothing ran."""
    finding = Finding(rule="stale-evidence", state=State.UNKNOWN, cause=Cause.ENVIRONMENT, message="too old")
    unknown = replace(of_earlier(), state=State.UNKNOWN, findings=(finding,))
    assert "This check: no result." in unwrapped(as_text(checked(unknown)))
    assert "This check: 1 result, 0 wrong." in unwrapped(as_text(checked(unknown, clean(1))))
