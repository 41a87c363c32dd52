"""Rivals of the accused: what was ruled out, and what speaks for it."""

from canaryd.model import Cause
from tests.judge.made import CPU, DAY, HOUR, TWIN, H, S, U, ask, fresh, right, run, wrong

# --- Rivals ---------------------------------------------------------------------------------------------------------


def rivals(verdict):
    found = next(f for f in verdict.findings if f.rule.startswith("exact-mismatch"))
    return {(r.cause, r.why.partition(":")[0]): r.rejected for r in found.rivals}


def test_a_sibling_that_is_right_rejects_every_rival():
    """It shares kernel, golden and host with the accused, and is right."""
    sibling = (TWIN, [run(HOUR, right(), of=TWIN)])
    found = rivals(ask(run(HOUR, wrong()), fresh(), peers=[sibling]))
    assert found == {(S, "a wrong kernel"): True, (Cause.HARNESS, "a wrong reference"): True, (H, NEAR): True}


def test_a_sibling_that_computed_the_same_is_not_said_to_be_missing():
    """It is right where this device is wrong now and then: that tells too little, and is no lack of a sibling."""
    sibling = (TWIN, [run(HOUR, right(), of=TWIN)])
    found = ask(run(2 * HOUR, right()), run(HOUR, wrong()), fresh(), peers=[sibling])
    kernel = next(r for r in found.findings[0].rivals if r.cause is S)
    assert (found.cause, kernel.rejected) == (U, False)
    assert kernel.why == "a wrong kernel: the identical devices have not run long enough to tell: cuda:1"


HOST, NEAR = "the host's memory, CPU or PCIe", "the host's memory or CPU"


def test_nothing_is_rejected_without_evidence():
    """A lone device: kernel, golden and host are all still open."""
    found = rivals(ask(run(HOUR, wrong()), fresh()))
    assert found == {(S, "a wrong kernel"): False, (Cause.HARNESS, "a wrong reference"): False, (H, HOST): False}


def test_a_host_that_computes_right_is_rejected_as_a_rival():
    """Its CPU ran exact goldens within a day of the mismatch, and they were right; earlier ones do not count."""
    for ago, known in ((HOUR, True), (3 * DAY, False)):
        host = (CPU, [run(ago, right(), of=CPU)])
        found = rivals(ask(run(HOUR, wrong()), fresh(), peers=[host]))
        assert ((H, NEAR) in found) is known


def test_a_golden_that_was_met_before_is_rejected_as_a_rival():
    """The device itself has given the right bits for these operands."""
    verdict = ask(run(HOUR, wrong(trials=10, wrong_trials=1)), fresh())
    assert rivals(verdict)[Cause.HARNESS, "a wrong reference"] is True


def test_software_names_the_device_as_the_rejected_rival():
    """Siblings that give the same wrong bits clear the device of being the only one."""
    verdict = ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, wrong(), of=TWIN)])])
    assert verdict.cause is S
    assert rivals(verdict)[H, "a fault of this device alone"] is True
