"""Bursts that a device repeats by itself: a wrong result is found with its bits, and one that compares nothing too."""

from dataclasses import replace
from functools import partial

import pytest

from canaryd.facts import Comparison, Skipped, Subject
from canaryd.judge.characterised import class_of, met_in
from canaryd.judge.node import contradictions, find_mismatches
from canaryd.model import Outcome, Run
from canaryd.probe import Context
from canaryd.worker.numeric import verify
from canaryd.worker.numeric.attention import Attention
from canaryd.worker.numeric.attention import build as build_attention
from canaryd.worker.numeric.cases import Case, product_case, restrict
from canaryd.worker.numeric.faults import FAULTS
from canaryd.worker.numeric.gathering import PRODUCTS
from canaryd.worker.numeric.operands import SHEET, Product, build
from canaryd.worker.numeric.products import multiply
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu, discover
from canaryd.worker.numeric.tensors import FORMATS, flat_bits
from canaryd.worker.runtime.interface import Operation
from canaryd.worker.runtime.torch import BURST as OF_GPU
from canaryd.worker.runtime.torch import Torch
from tests.worker.numeric.repeaters import BURST, NAME, Again, Repeating, Replaying, broken, verified

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

BEFORE = 1 + 5 * OF_GPU
"""Number of results on a GPU before the first turn in a graph: one alone, a burst by the host, and for each of two
graphs a burst aside and one with a wrong golden."""


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("turn", [1, 2, 5])
def test_a_wrong_result_of_a_burst_is_found_with_its_bits(turn, at):
    """Of any place in any burst; what it computed is still there although the next burst was launched before."""
    runtime = Repeating()
    _, found = verified(runtime, compute=broken(runtime, turn, at))
    wrong = [c for c in found if c.wrong]
    assert [c.case for c in wrong] == [f"{NAME}#{turn}g"]
    assert (wrong[0].subject, wrong[0].wrong_trials) == (Subject.DEVICE, 1)
    assert "wrongly" not in wrong[0].evidence.pattern
    assert (wrong[0].evidence.first[0][0], dict(wrong[0].evidence.bits)) == ((0, 5), {"20": 1})
    assert (wrong[0].evidence.repeats, wrong[0].evidence.repeats_wrong) == (BURST, 0), "once more in the graph"
    assert wrong[0].evidence.pattern.endswith("wrong in 0 of 3 repeats without a graph")
    assert (found[0].case, found[0].wrong) == (NAME, False)


def test_what_is_wrong_in_a_graph_alone_is_not_right_and_wrong_on_the_same_bytes():
    """A bug of graphs: wrong whenever the device repeats, and right when the host starts the same product."""
    runtime = Repeating()

    def compute(operands, out):
        result = multiply("float32", "float32", operands, out)
        if runtime.launched > 1 and out is not None and out.data_ptr() in {r.data_ptr() for r in repeated}:
            flat_bits(result)[5] ^= 1 << 20
        repeated.extend([] if out is None else [result])
        return result

    repeated = []
    _, found = verified(runtime, compute=compute)
    wrong = [c for c in found if c.wrong]
    assert wrong
    assert all(class_of(c.case).endswith("/graph") and c.trials == c.wrong_trials for c in wrong)
    assert all(c.evidence.repeats == c.evidence.repeats_wrong == BURST for c in wrong)
    run = Run(id="r", device="GPU-a", probe="exact_matmul", probe_version=2, started=1.0, seconds=1.0,
              outcome=Outcome.COMPLETED, stack={"torch": "2"}, comparisons=tuple(found))  # fmt: skip
    assert not contradictions(find_mismatches([run], Subject.DEVICE))
    assert met_in(run) == {class_of(NAME)}, "the host's own products were right"


def test_a_right_turn_that_was_asked_for_by_name_is_told_by_its_name():
    """An identical device was wrong in it: only the same operands in a graph show that this one is right there."""
    session, found = verified(Repeating(), cases=(f"{NAME}#3g",))
    assert [(c.case, c.wrong) for c in found] == [(NAME, False), (f"{NAME}#1g", False), (f"{NAME}#3g", False)]
    assert [c.trials for c in found][2] == BURST
    assert sum(c.trials for c in found) == session.trials


def test_a_burst_of_the_wrong_operands_says_so():
    """The gather of one turn errs: the device is wrong, and what it gathered is named."""

    class Wrong(Repeating):
        def run(self, operation, operands, out):
            result = super().run(operation, operands, out)
            if operation.name == "rows" and self.launched == 3 and out is not None and not self.struck:
                self.struck = True
                flat_bits(result)[3] ^= 1 << 21
            return result

    runtime = Wrong()
    runtime.struck = False
    _, found = verified(runtime)
    (wrong,) = (c for c in found if c.wrong)
    assert (wrong.case, wrong.subject) == (f"{NAME}#2g", Subject.DEVICE)
    assert wrong.evidence.pattern.startswith("the device gathered operand A wrongly")


@pytest.mark.parametrize(("lie", "said"), [(0, "was flipped on purpose"), (2, "4 of 4 results with nothing")])
def test_a_repetition_that_compares_nothing_is_found_out(lie, said):
    """It says equal to everything, or its answers are those that stood there before: told once, and not counted."""

    class Lying(Repeating):
        def said(self, found):
            return [lie if lie == 0 or self.launched > 4 else each for each in found]

    session, found = verified(Lying())
    accused = [c for c in found if c.subject is Subject.COMPARATOR]
    assert [said in c.evidence.pattern for c in accused] == [True]
    assert not any(c.wrong for c in found if c.subject is Subject.DEVICE)
    assert sum(c.trials for c in found if c.subject is Subject.DEVICE) == session.trials


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_kernel_that_writes_nothing_is_found_in_every_turn(turn):
    """What lies there is of another turn, from the first on."""
    runtime = Repeating()

    def compute(operands, out):
        if runtime.launched >= turn + 1 and out is not None:
            return out
        return multiply("float32", "float32", operands, out)

    _, found = verified(runtime, compute=compute)
    assert any(c.wrong for c in found if c.case == f"{NAME}#{turn}g")


@pytest.mark.parametrize(
    ("cannot", "room"),
    [
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), 0),
        (None, 1 << 16),
    ],
)
def test_without_repetition_the_host_hands_every_turn_on(cannot, room):
    """What cannot be captured, or too little room beside a server."""
    runtime = Repeating(cannot=cannot)
    session, (found,) = verified(runtime, room=room)
    assert (found.case, found.wrong, runtime.launched) == (NAME, False, 0)
    assert session.gathers > 2
    assert (session.single_steps == "", runtime.cannot_repeat == "") == (2 * (cannot is None,))
    again, _ = verified(runtime, room=room)
    assert again.single_steps == session.single_steps  # the next run says why, too


@pytest.mark.parametrize("seconds", [0.0, 0.5])
@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if not fault.always])
def test_a_drill_strikes_inside_the_graph(fault, seconds):
    """The replay carries the fault, in one launch alone, and the alarm is that of a real wrong bit in a graph."""
    runtime = Replaying()
    session, found = verified(runtime, drill=fault, seconds=seconds)
    (wrong,) = (c for c in found if c.wrong)
    assert (wrong.case, wrong.subject, wrong.wrong_trials) == (f"{NAME}#1g", Subject.DEVICE, 1)
    assert (wrong.evidence.repeats, wrong.evidence.repeats_wrong) == (BURST, 0)
    assert wrong.evidence.wrong == (2 if fault == "swap" else 1)
    assert session.injector.spent
    assert runtime.launched >= 4, "two with a wrong golden, the struck one, and the same once more"


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.always])
def test_a_fault_that_is_always_there_is_found_before_there_is_a_graph(fault):
    """As a broken unit is: the first result is wrong already."""
    runtime = Replaying()
    _, found = verified(runtime, drill=fault)
    assert [c.wrong_trials >= 3 for c in found if c.wrong]
    assert not any("#" in c.case for c in found if c.wrong)
    assert runtime.launched == 0


def test_where_nothing_can_be_captured_a_drill_strikes_the_next_turn():
    """Also where the time is over: a drill without a fault would say nothing."""
    runtime = Repeating(cannot=RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    session, found = verified(runtime, drill="zero", seconds=0.0)
    assert [(c.case, c.wrong_trials) for c in found if c.wrong] == [(f"{NAME}#1", 1)]
    assert session.injector.spent


def test_a_confirmation_of_a_drill_is_struck_too():
    """It asks for the case of the graph by its name, which means one turn, and what a graph would repeat."""
    spec = Product("dense", *[FORMATS["float32"]] * 2, 24, 64, 72, 96, 0, "nn")
    case = Case(NAME, partial(build, spec), partial(multiply, "float32", "float32"), product=spec)
    ctx = Context(device=cpu(), level="quick", seed=7, budget=0.3, drill="zero", cases=(f"{NAME}#1g",))
    facts = list(verify.verify_all(ctx, [case], [], None))
    compared = [c for c in facts if isinstance(c, Comparison) and c.subject is Subject.DEVICE]
    assert {c.case for c in compared} == {NAME, f"{NAME}#1"}
    assert sum(c.wrong_trials for c in compared) == 1
    assert not [f for f in facts if isinstance(f, Skipped)]


def test_a_retest_under_load_repeats_too():
    """Load and pauses come between launches, while nothing of the case is left to do."""
    runtime, left = Repeating(), []
    Again.flying = 0

    def pace():
        left.append(Again.flying)

    session, found = verified(runtime, intensity="idle", pace=pace)
    assert not any(c.wrong for c in found)
    assert runtime.launched > 4
    assert len(left) > runtime.launched - 4
    assert set(left) == {0}
    assert session.repeated > BURST


def test_an_error_of_the_device_is_no_excuse():
    """Only what a capture refuses falls back to the host."""
    with pytest.raises(RuntimeError, match="illegal memory access"):
        verified(Repeating(cannot=RuntimeError("CUDA error: an illegal memory access was encountered")))


def test_the_hosts_own_look_comes_before_the_verdict(monkeypatch):
    """The first result is looked at while the next turns run; what it finds still counts."""
    runtime = Repeating()
    done = []

    def compute(operands, out):
        result = multiply("float32", "float32", operands, out)
        done.append(1)
        if len(done) == 1:
            flat_bits(result)[5] ^= 1 << 20
        return result

    seen = []
    agree = runtime.agree

    def blind_once(results, golden):
        seen.append(1)
        return [True] * len(results) if len(seen) == 1 else agree(results, golden)

    monkeypatch.setattr(runtime, "agree", blind_once)
    _, found = verified(runtime, compute=compute)
    wrong = [c for c in found if c.wrong]
    assert {c.subject for c in wrong} == {Subject.DEVICE, Subject.COMPARATOR}
    assert all(c.case == NAME for c in wrong)
    assert runtime.launched > 2
    assert f"{NAME}#1g" in [c.case for c in found if not c.wrong]


@pytest.fixture
def gpu():
    """A device that repeats by CUDA graphs."""
    return next(d for d in discover()[0] if d.backend in ("cuda", "rocm"))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("batch", [0, 2])
def test_a_gpu_repeats_bursts_and_is_right(gpu, layout, batch):
    """Far more results than Python could hand over one by one, and none of them by the host."""
    session, found = verified(Torch(), layout=layout, batch=batch, device=gpu, seconds=1.0)
    assert [(c.case, c.wrong, c.subject) for c in found] == [(n, False, Subject.DEVICE) for n in (NAME, f"{NAME}#1g")]
    assert session.single_steps == ""
    assert session.undigested == ""
    assert session.gathers > SHEET + 2
    assert sum(c.trials for c in found) == session.trials > PRODUCTS * SHEET


@pytest.mark.gpu
@pytest.mark.parametrize("at", [19, OF_GPU + 22])
def test_a_wrong_result_in_a_graph_is_found_with_its_bits(gpu, at):
    """The fault counts the results by itself, on the device: the host sees none of them."""
    counted = torch.zeros(1, dtype=torch.int32, device="cuda")

    def compute(operands, out):
        result = multiply("float32", "float32", operands, out)
        counted.add_(1)
        flat_bits(result)[5:6] ^= (counted == BEFORE + at).int() << 20
        return result

    _, found = verified(Torch(), compute=compute, device=gpu)
    wrong = [c for c in found if c.wrong]
    assert [c.subject for c in wrong] == [Subject.DEVICE]
    assert (wrong[0].wrong_trials, wrong[0].case.partition("#")[0]) == (1, NAME)
    assert int(wrong[0].case.partition("#")[2].removesuffix("g")) > 0
    assert (wrong[0].evidence.first[0][0], dict(wrong[0].evidence.bits)) == ((0, 5), {"20": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if not fault.always])
def test_a_drill_strikes_inside_a_gpus_graph(gpu, fault):
    """The same as on the stand-in: no operator of a fault may ask the host while it is captured."""
    session, found = verified(Torch(), drill=fault, device=gpu)
    assert [(c.case, c.wrong_trials) for c in found if c.wrong] == [(f"{NAME}#1g", 1)]
    assert session.single_steps == ""


@pytest.mark.gpu
@pytest.mark.parametrize("at", [19, OF_GPU + 3])
def test_the_bits_of_a_wrong_fp8_result_are_its_own(gpu, at):
    """Its kernel chooses the memory of its results, which the next turn may take; of both repeaters."""
    case = product_case(gpu, "float8_e4m3fn", "bfloat16", "dense", "square", "nt", (512, 512, 512, 0))
    counted = torch.zeros(1, dtype=torch.int32, device="cuda")

    def compute(operands, out):
        result = case.compute(operands, out)
        counted.add_(1)
        flat_bits(result)[5:6] ^= ((counted == BEFORE + at).int() << 3).to(torch.int16)
        return result

    session = Session(Context(device=gpu, level="quick", seed=7, budget=5.0))
    found = verify.verify_case(session, replace(case, compute=compute), 0.5)
    (wrong,) = (c for c in found if isinstance(c, Comparison) and c.wrong)
    assert (wrong.subject, wrong.wrong_trials, session.single_steps) == (Subject.DEVICE, 1, "")
    assert (wrong.evidence.first[0][0], dict(wrong.evidence.bits)) == ((0, 5), {"3": 1})


ATTENDED = "float32/onehot/prefill/math/none@2x2x2x16x16x64"


def attended(runtime, *, compute=None, drill="", device=None, seconds=3.0):
    """Verify one attention problem, whose one upload the device repeats."""
    form, kernel = FORMATS["float32"], "MATH"
    spec = Attention("onehot", form, "none", 2, 2, 2, 16, 16, 64)
    ran = partial(runtime.run, Operation("attention", "float32", "float32", kernel, "none"))
    case = Case(ATTENDED, partial(build_attention, spec), compute(ran) if compute else ran, struck=2, repeats=True)
    session = Session(Context(device=device or cpu(), level="quick", seed=7, budget=5.0, drill=drill))
    session.runtime = runtime
    session.injector.arm([ATTENDED])
    found = [f for f in verify.verify_case(session, case, seconds) if isinstance(f, Comparison)]
    return session, found


def flipping(number):
    """Return a change of attention that flips one bit of result `number`, counted on the device."""

    def changed(ran):
        counted = []

        def compute(operands, out):
            result = ran(operands, out)
            counted.extend([] if counted else [torch.zeros(1, dtype=torch.int32, device=result.device)])
            counted[0].add_(1)
            flat_bits(result)[5:6] ^= (counted[0] == number).int() << 20
            return result

        return compute

    return changed


def test_attention_is_repeated_from_one_upload():
    """Right results of one upload have one name, and one more for the graph; nothing was gathered."""
    runtime = Replaying()
    session, found = attended(runtime)
    assert [(c.case, c.wrong) for c in found] == [(ATTENDED, False), (f"{ATTENDED}#1g", False)]
    assert (session.gathers, session.repeated > BURST, runtime.launched > 3) == (0, True, True)
    assert class_of(found[1].case).endswith("/graph")


def test_a_wrong_result_of_repeated_attention_is_found_with_its_bits():
    """Once per upload; then once more in the graph, and three times without."""
    runtime = Replaying()
    _, found = attended(runtime, compute=flipping(60))
    (wrong,) = (c for c in found if c.wrong)
    assert (wrong.case, wrong.wrong_trials, wrong.trials) == (f"{ATTENDED}#1g", 1, BURST)
    assert (wrong.evidence.first[0][0][-1], dict(wrong.evidence.bits)) == (5, {"20": 1})
    assert (wrong.evidence.repeats, wrong.evidence.repeats_wrong) == (BURST, 0)
    assert wrong.evidence.pattern.endswith("wrong in 0 of 3 repeats without a graph")


def test_attention_that_writes_nothing_is_found_although_the_right_answer_stays_the_same():
    """The memory of each result, the kernel's own and the copy, holds ones before the next launch."""
    calls, right = [], []

    def idle(ran):
        def compute(operands, out):
            calls.append(1)
            if len(calls) <= 1 + 2 * BURST:  # the first turn, which the host starts
                right[:] = [ran(operands, out)]
                return right[0].clone()
            return right[0]

        return compute

    _, found = attended(Replaying(), compute=idle)
    assert [c.wrong_trials for c in found if c.wrong and c.case == f"{ATTENDED}#1g"] == [BURST]


def test_attention_in_another_order_of_elements_leaves_no_right_answer_behind(monkeypatch):
    """As torch's memory-efficient kernel gives it: what is copied out of the kernel's memory is spoiled there too."""
    right, kept = torch.nn.functional.scaled_dot_product_attention, []

    def writes_once(*operands, **options):
        if not kept:
            kept.append(right(*operands, **options).transpose(1, 2).contiguous())
        return kept[0].transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", writes_once)
    _, found = attended(Replaying())
    assert any(c.wrong for c in found)


def test_a_drill_of_attention_strikes_inside_the_graph():
    """As one of products does."""
    session, found = attended(Replaying(), drill="flip")
    assert [(c.case, c.wrong_trials) for c in found if c.wrong] == [(f"{ATTENDED}#1g", 1)]
    assert session.injector.spent


def test_attention_that_failed_in_a_graph_is_retested_by_its_name():
    """The one upload has no other draw: the case itself is meant."""
    case = Case(ATTENDED, partial(build_attention, None), multiply, repeats=True)
    ctx = Context(device=cpu(), level="quick", seed=7, budget=5.0, cases=(f"{ATTENDED}#1g",))
    assert restrict(ctx, [case]) == [case]


@pytest.mark.gpu
def test_a_gpu_repeats_attention(gpu):
    """And finds a wrong bit there."""
    session, found = attended(Torch(), device=gpu)
    assert [(c.case, c.wrong) for c in found] == [(ATTENDED, False), (f"{ATTENDED}#1g", False)]
    assert session.single_steps == ""
    _, found = attended(Torch(), device=gpu, compute=flipping(BEFORE + 3 * OF_GPU))
    assert [(c.case, c.wrong_trials) for c in found if c.wrong] == [(f"{ATTENDED}#1g", 1)]
