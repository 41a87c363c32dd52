"""Digests of rows, which a device compares in its repeated turns in place of goldens, and where it does not."""

import pytest

from canaryd.facts import Subject
from canaryd.worker.numeric import repeating
from tests.worker.numeric.repeaters import BURST, NAME, Repeating, Replaying, broken, verified

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("batch", [0, 3])
def test_digests_of_rows_take_the_place_of_goldens(batch, layout):
    """Of every result that the device repeats; no golden is gathered for it, and right results are right."""

    class Watched(Repeating):
        gathered = ()

        def run(self, operation, operands, out):
            made = super().run(operation, operands, out)
            if self.launched and operation.name == "rows":
                self.gathered = {*self.gathered, tuple(made.shape)}
            return made

    runtime = Watched()
    session, found = verified(runtime, batch=batch, layout=layout)
    assert not any(c.wrong for c in found)
    assert session.digested == session.repeated >= 2 * BURST
    assert runtime.gathered
    assert not {shape for shape in runtime.gathered if shape[-2:] == (64, 72)}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (RuntimeError("_int_mm_out_cuda not compiled for CUDA 11.4"), "not compiled"),
        (lambda made: made.add_(1), "were wrong"),
        (lambda made: made.fill_(5), "those of wrong ones right"),
    ],
)
def test_a_device_without_right_digests_compares_goldens(broken, why, monkeypatch):
    """That its products of integers are refused or wrong says nothing about the case, and hides none of its faults."""
    multiplied = torch._int_mm
    made = []

    def wrong(*operands, out):
        if isinstance(broken, Exception):
            raise broken
        made.append(out)
        return broken(multiplied(*operands, out=out)) if len(made) > 1 else multiplied(*operands, out=out)

    monkeypatch.setattr(torch, "_int_mm", wrong)
    session, found = verified(Replaying(), drill="flip")
    assert why in session.undigested
    assert (session.digested, session.repeated >= BURST) == (0, True)
    assert [(c.case, c.subject, c.wrong_trials) for c in found if c.wrong] == [(f"{NAME}#1g", Subject.DEVICE, 1)]


def test_an_error_of_the_device_in_its_digests_is_no_excuse(monkeypatch):
    """Only a refusal falls back to goldens."""

    def broken(*operands, out):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "_int_mm", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        verified(Repeating())


def test_digests_that_cannot_be_captured_take_no_graph_away():
    """The second try compares goldens, in a graph; only if that fails too does the host start each operation."""

    class Strict(Replaying):
        def repeated(self, device, burst):
            _, right = burst()
            if right.dtype is torch.int32:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return super().repeated(device, burst)

    session, found = verified(Strict(), drill="flip")
    assert "capturing" in session.undigested
    assert (session.single_steps, session.digested, session.repeated >= BURST) == ("", 0, True)
    assert [(c.case, c.wrong_trials) for c in found if c.wrong] == [(f"{NAME}#1g", 1)]


@pytest.mark.parametrize(("takes", "digests"), [(1.4, True), (1.6, False)])
def test_a_device_with_slow_digests_compares_goldens(takes, digests, monkeypatch):
    """By its own clock, which a processor has not: the best of two counts, and little more is no loss."""
    seconds = iter([1.0, 9.0, 9.0, takes])

    def timed(device, call, wait):
        assert call() in ([True] * BURST, [False] * BURST)
        return None, next(seconds)

    monkeypatch.setattr(repeating, "has_events", lambda device: True)
    monkeypatch.setattr(repeating, "timed", timed)
    session, found = verified(Repeating())
    assert next(seconds, None) is None
    assert not any(c.wrong for c in found)
    assert (session.undigested, session.digested) == ("", session.repeated if digests else 0)


def test_wrong_digests_of_a_right_result_are_told_as_such():
    """The host finds the result right: the evidence says what the device saw."""

    class Wrong(Repeating):
        def run(self, operation, operands, out):
            made = super().run(operation, operands, out)
            if operation.name == "rows" and self.launched == 3 and made.dtype is torch.int32:
                made[0, 0] += 1
            return made

    _, found = verified(Wrong())
    (wrong,) = (c for c in found if c.wrong)
    assert (wrong.case, wrong.subject) == (f"{NAME}#2g", Subject.DEVICE)
    assert "other digests of rows, and the host's copy of the result is right" in wrong.evidence.pattern


def test_a_backend_whose_products_of_integers_crash_makes_no_digests(monkeypatch):
    """It is not even tried there: an error would be inherited by the next call."""
    monkeypatch.setattr(repeating, "UNFIT", ("cpu",))
    monkeypatch.delattr(torch, "_int_mm")
    session, found = verified(Repeating())
    assert not any(c.wrong for c in found)
    assert (session.digested, session.undigested, session.repeated > BURST) == (0, "", True)


@pytest.mark.parametrize("sizes", [(64, 71, 96), (16, 64, 96)], ids=["rows of 284 bytes", "pools of 16 rows"])
def test_rows_that_do_not_fit_are_compared_with_goldens(sizes, monkeypatch):
    """A served product may have few rows, and so have its pools. CUDA's products of integers need 17, of whole eights.

    This says nothing about the device: the next case is compared by digests.
    """
    multiplied = torch._int_mm

    def checked(a, b, *, out):
        if len(a) < 17 or a.shape[1] % 8:
            raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {len(a)}, or {a.shape[1]}")
        return multiplied(a, b, out=out)

    monkeypatch.setattr(torch, "_int_mm", checked)
    session, found = verified(Repeating(), sizes=sizes)
    assert not any(c.wrong for c in found)
    assert (session.digested, session.undigested, session.repeated > BURST) == (0, "", True)


@pytest.mark.parametrize("at", range(BURST))
def test_results_that_are_not_adjacent_are_compared_with_goldens(at):
    """The digests of one would overwrite those of another, and a wrong result would pass."""

    class Apart(Repeating):
        def room(self, like, count):
            return [torch.empty_like(like) for _ in range(count)]

    runtime = Apart()
    session, found = verified(runtime, compute=broken(runtime, 2, at))
    assert [(c.case, c.wrong_trials, c.evidence.wrong) for c in found if c.wrong] == [(f"{NAME}#2g", 1, 1)]
    assert (session.digested, session.undigested) == (0, "")
