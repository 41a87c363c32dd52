"""Fresh operands that the device gathers: they are the host's, each turn is another, and a wrong gather is seen."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from canaryd.facts import Comparison, Subject
from canaryd.judge.characterised import class_of
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.numeric import reproducer, verify
from canaryd.worker.numeric.cases import Case, restrict
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.operands import CONTENTS, Product, build, make_pools
from canaryd.worker.numeric.products import LAYOUTS, multiply
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, flat_bits, host_same_bits
from canaryd.worker.runtime.torch import Torch
from probes import exact_matmul
from tests import faulty_gathers
from tests.comparators import COMPARATORS

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

NAME = "float32/dense/square/nn@200x150x96"


def product(source="float32", layout="nn", content="dense", batch=0):
    return Product(content, FORMATS[source], FORMATS[source], FORMATS[source].bits, 200, 150, 96, batch, layout)


def case():
    spec = product()
    return Case(NAME, partial(build, spec), partial(multiply, "float32", "float32"), product=spec)


def verified(runtime, seconds):
    session = Session(Context(device=cpu(), level="quick", seed=7, budget=5.0))
    session.runtime = runtime
    found = [f for f in verify.verify_case(session, case(), seconds, "") if isinstance(f, Comparison)]
    return session, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("source", "batch"), [("float64", 0), ("float32", 0), ("bfloat16", 0), ("float32", 3)])
def test_the_device_gathers_what_the_host_does(source, batch, layout):
    """Bits and strides, of three turns in memory that the next turn uses again; and the golden is right."""
    spec = product(source, layout, batch=batch)
    gatherer = Gatherer(Torch(), cpu(), spec, make_pools(spec, 5), 5)
    seen = set()
    for turn in range(3):
        (a, b), golden = gatherer.gather(turn)
        right = build(spec, 5, turn)
        assert all(itertools.starmap(host_same_bits, zip((a, b, golden), (*right.operands, right.golden), strict=True)))
        assert [t.stride() for t in (a, b, golden)] == [t.stride() for t in (*right.operands, right.golden)]
        assert host_same_bits(torch.matmul(a, b), golden)
        seen.add(str(flat_bits(golden)[:64].tolist()))
    assert len(seen) == 3


class Broken(Torch):
    """The real runtime, with one gather that goes wrong."""

    def __init__(self, which):
        self.which, self.count = which, 0

    def run(self, operation, operands, out):
        result = super().run(operation, operands, out)
        if operation.name in ("rows", "columns"):
            self.count += 1
            if self.count == self.which:
                flat_bits(result)[17] ^= 1 << 20
        return result


# Four gathers a turn: A, B, columns of the answers, the golden; the third turn begins with the ninth.
@pytest.mark.parametrize(
    ("which", "said"), [(9, "operand A"), (10, "operand B"), (11, "the golden"), (12, "the golden")]
)
def test_a_wrong_gather_is_seen_and_named(which, said):
    """The turn is named in the case, and the host's own operands of that turn come out right three times."""
    _, found = verified(Broken(which), 60.0)  # it ends when it was wrong often enough
    clean, *elsewhere, wrong = found
    assert (clean.case, clean.wrong) == (NAME, False)
    assert not any(c.wrong for c in elsewhere)  # the other cores compute the host's operands of that turn
    assert wrong.case == f"{NAME}#2"
    assert wrong.subject is Subject.DEVICE
    assert wrong.wrong_trials
    assert f"the device gathered {said} wrongly" in wrong.evidence.pattern
    assert (wrong.evidence.repeats, wrong.evidence.repeats_wrong) == (3, 0)
    assert wrong.evidence.first if which < 11 else True


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("kind", faulty_gathers.GATHERS)
def test_every_faulty_gather_is_found_and_named(kind, turn):
    """Operands and golden have uploads of their own: what hits one of them does not hit the other."""
    runtime = faulty_gathers.GATHERS[kind](choice=3, turn=turn)
    _, found = verified(runtime, 60.0)
    (wrong,) = (c for c in found if c.wrong)
    assert (wrong.case, runtime.struck) == (f"{NAME}#{turn}", 1)
    said = "the golden" if kind == "wrong-column" else "operand A"
    assert wrong.evidence.pattern.startswith(f"the device gathered {said} wrongly")


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("kind", COMPARATORS)
def test_a_broken_comparator_hides_only_what_it_does_not_look_at_after_the_first_result(kind, after):
    """The host compares the first result of a case itself, and the comparator must see a bit flipped on purpose."""
    runtime, done = COMPARATORS[kind](choice=0), []

    def compute(operands, out):
        result = multiply("float32", "float32", operands, out)
        flat_bits(result)[5] ^= len(done) >= after
        done.append(result)
        return result

    session = Session(Context(device=cpu(), level="quick", seed=7, budget=5.0))
    session.runtime = runtime
    found = [f for f in verify.verify_case(session, replace(case(), compute=compute), 0.5) if isinstance(f, Comparison)]
    assert runtime.struck
    accused = {c.subject for c in found if c.wrong}
    if not after:
        assert accused == {Subject.DEVICE, Subject.COMPARATOR}
    else:  # the flipped bit lies outside of the tile here
        assert accused == ({Subject.COMPARATOR} if kind == "says equal" else set())


@pytest.mark.parametrize("seed", [7, 8])
def test_a_quick_run_has_fresh_operands_of_every_content(seed):
    """Each format leaves half of them out, not the same half as the next one, and the next run has the others."""
    speeds = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 1e11)

    def drawn(seed):
        context = Context(device=cpu(), level="quick", seed=seed, budget=3.0)
        fresh, _ = exact_matmul.every_case(context, speeds)
        return {tuple(case.name.split("/")[:2]) for case in fresh}

    first, second = drawn(seed), drawn(seed + 1)
    assert {content for _, content in first} == set(CONTENTS)
    assert first | second == set(itertools.product(speeds, CONTENTS))
    assert not first & second


@pytest.mark.parametrize(("level", "own", "lent"), [("quick", 3, 1), ("standard", 30, 6), ("deep", 120, 30)])
def test_a_format_without_units_of_its_own_has_fewer_cases(level, own, lent):
    """It is narrower than float32 and slower; six quick runs have every content of it. float64 is wider."""
    speeds = {"float64": 2e10, "float32": 1e11, "bfloat16": 8e10, "float16": 7e10}
    met, gpu = {}, Device(uuid="GPU-1", backend="cuda", index=0, model="H100")
    for seed in range(7, 13):
        context = Context(device=cpu(), level=level, seed=seed, budget=3.0)
        names = [case.name for case in exact_matmul.every_case(context, speeds)[0]]
        there = [case.name for case in exact_matmul.every_case(replace(context, device=gpu), speeds)[0]]
        assert sum(name.startswith("float16/") for name in there) > lent  # a GPU has units for it
        counts = Counter(name.split("/")[0] for name in names)
        assert counts == {"float64": own, "float32": own, "bfloat16": own, "float16": lent}
        met |= {name.split("/")[1]: seed for name in names if name.startswith("float16/")}
    assert set(met) == set(CONTENTS)


def test_a_turn_can_be_asked_for():
    """As a confirmation asks: the same bytes, which the host makes whole."""
    context = Context(device=cpu(), level="quick", seed=7, budget=0.2, cases=(f"{NAME}#3",))
    (kept,) = restrict(context, [case()])
    assert (kept.name, kept.product) == (f"{NAME}#3", None)
    (found,) = (f for f in verify.verify_case(Session(context), kept, 0.0, "") if isinstance(f, Comparison))
    assert (found.case, found.wrong) == (f"{NAME}#3", False)
    seed = verify.case_seed(context, case())
    assert host_same_bits(kept.build(seed).golden, build(product(), seed, 3).golden)
    made = reproducer.exhibit("exact_matmul", kept.name, seed, cpu())
    assert host_same_bits(made.problem.operands[0], build(product(), seed, 3).operands[0])
    assert class_of(kept.name) == class_of(NAME)
    context = replace(context, cases=(f"{NAME}#3g", f"{NAME}#4g"))  # wrong in a graph: in one again, and without
    names = [f"{NAME}#3", NAME, f"{NAME}#4"]
    assert [kept.name for kept in restrict(context, [case()])] == names
    made = reproducer.exhibit("exact_matmul", f"{NAME}#3g", seed, cpu())
    assert host_same_bits(made.problem.operands[0], build(product(), seed, 3).operands[0])
