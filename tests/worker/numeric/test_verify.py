"""Exact probes end to end on the CPU: clean is clean, every fault is seen and named, every doubt names its subject."""

import json
from dataclasses import replace

import pytest

from canaryd.facts import Comparison, Reading, Skipped, Subject
from canaryd.probe import Context, NoCase, Skip
from canaryd.worker.numeric import cases as numeric_cases
from canaryd.worker.numeric import faults, indexing, making, measure, stress, tensors, verify
from canaryd.worker.numeric import operands as numeric_operands
from canaryd.worker.numeric import products as products_of_torch
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Product
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, bits, same_bits, words
from canaryd.worker.numeric.verify import verify_all
from canaryd.worker.runtime import interface
from canaryd.worker.runtime import torch as runtime_torch

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

# One case of each probe, small enough to repeat for every fault.
ONE = {
    "exact_matmul": "float32/full/batched/nn",
    "exact_attention": "float32/uniform/prefill/math/none",
    "exact_integer": "int64/scatter/fresh",
}
TWO_CORES = pytest.mark.skipif(len(tensors.visible_cores()) < 2, reason="needs two cores to choose from")


def context(*cases, drill="", seed=11, budget=0.2, level="quick", **more):
    return Context(device=cpu(), level=level, seed=seed, budget=budget, cases=cases, drill=drill, **more)


def comparisons(facts, subject=Subject.DEVICE):
    return [f for f in facts if isinstance(f, Comparison) and f.subject is subject]


def small(name="float32/dense/square/nn@24x20x64", *, fixed=False, seed_shift=0):
    """One product as a case of its own, without a probe."""
    spec = Product("dense", FORMATS["float32"], FORMATS["float32"], 24, 24, 20, 64)
    return Case(
        name,
        lambda seed: numeric_operands.build(spec, seed + seed_shift),
        lambda operands, out: torch.matmul(*operands),
        fixed=fixed,
    )


@pytest.mark.parametrize("name", ONE)
def test_a_clean_run_is_clean(probes, name):
    """Every fixed case and some fresh ones: nothing is wrong, nobody is doubted, and the shipped digests hold."""
    facts = list(probes[name].run(context(budget=1.5)))
    found = [f for f in facts if isinstance(f, Comparison)]
    assert {f.subject for f in found} == {Subject.DEVICE}
    assert not [f for f in found if f.wrong]
    readings = {f.name: f.value for f in facts if isinstance(f, Reading)}
    assert readings["trials"] == sum(f.trials for f in found) >= len(found)
    assert 0 <= readings["golden_fingerprint"] < 1 << 53
    known = json.loads(probes[name].GOLDEN.read_text())
    taken = {f.case: f.digest for f in found if f.digest}
    assert taken
    assert taken == {case: known[case] for case in taken}
    if name == "exact_integer":  # sizes of products follow the machine, these do not
        assert {f.case.split("/")[1] for f in found} == set(indexing.OPERATIONS)


def test_the_fingerprint_is_equal_for_equal_results_and_shows_a_wrong_one(probes):
    """Two clean runs of other seeds share it; a consistent fault changes it and does not make it vanish."""
    run = probes["exact_integer"].run

    def fingerprint(**more):
        facts = run(context(budget=0.05, **more))
        return next(f.value for f in facts if isinstance(f, Reading) and f.name == "golden_fingerprint")

    assert fingerprint(seed=1) == fingerprint(seed=2) != fingerprint(drill="consistent")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=pytest.mark.slow if name == "exact_matmul" and fault in ("zero", "nan") else ())
        for name in ONE
        for fault in faults.FAULTS
    ],
)
def test_every_drill_is_detected_and_named(probes, name, fault):
    """Each fault in each probe: seen, at the right element, with the right bit or kind, and its persistence told."""
    found = comparisons(probes[name].run(context(ONE[name], drill=fault, budget=0.05)))
    wrong = [f for f in found if f.wrong]
    assert wrong, f"{fault} was not detected"
    seen = wrong[-1].evidence  # the first upload's comparison comes last, after its fresh uploads
    index, expected, observed = seen.first[0]
    width = 4 * (len(expected) - 2)
    size = seen.total
    choice = mix64(11 + 1) >> 1
    shape = [int(part.partition("=")[2]) for part in wrong[-1].shape.split() if "=" in part]
    if fault in ("flip", "zero", "nan"):
        assert seen.wrong == 1
        assert flat_index(index, wrong[-1].case, shape) == choice % size
        assert (seen.repeats_wrong, seen.repeats) == (0, 3)
        assert wrong[-1].wrong_trials == 1
    if fault == "flip":
        assert dict(seen.bits) == {"0": 1}
        assert int(expected, 16) ^ int(observed, 16) == 1
        assert "bit 0" in seen.pattern
    elif fault == "zero":
        assert seen.zeroed == 1
        assert int(observed, 16) == 0
        assert "zero" in seen.pattern
    elif fault == "nan":
        assert int(observed, 16) == (1 << (width - 1)) - 1
        assert seen.nonfinite == (name != "exact_integer")
    elif fault == "swap":
        assert seen.wrong == 2
        assert seen.pattern.endswith("two values exchanged")
        assert seen.first[0][1:] == seen.first[1][:0:-1]
    elif fault == "consistent":
        assert dict(seen.bits) == {str(width - 2): 1}
        assert flat_index(index, wrong[-1].case, shape) == size // 2
        assert (seen.repeats_wrong, seen.repeats, seen.repeats_alike) == (3, 3, 3)
    elif fault == "stuck":
        assert (seen.repeats_wrong, seen.repeats, seen.repeats_alike) == (3, 3, 3)


def flat_index(index, case, shape):
    """Row-major position of `index` in the result of one of the ONE cases."""
    if case.startswith("int64"):
        return index[0]
    if "math" in case:
        _, H, _, L, _, D = shape
        sizes = (H, L, D)
        return ((index[0] * sizes[0] + index[1]) * sizes[1] + index[2]) * sizes[2] + index[3]
    _, M, N, _ = shape
    return (index[0] * M + index[1]) * N + index[2]


RESULT_FAULTS = {name: faults.FAULTS[name].change for name in ("flip", "zero", "swap", "nan")}
RESULT_FAULTS["any bit"] = faults.flip


def integers_of(tensor):
    """Raw bits as Python integers: what `observed` means here, without torch's comparison."""
    return bits(tensor).reshape(-1).tolist()


def test_a_golden_that_differs_from_the_shipped_digest_accuses_the_host(tmp_path):
    """The maker of the golden is named, the device is not judged by it."""
    case = small(fixed=True)
    file = tmp_path / "golden.json"
    file.write_text(json.dumps({case.name: "0123456789abcdef"}))
    facts = list(verify_all(context(), [], [case], file))
    (doubt,) = comparisons(facts, Subject.HOST)
    assert "shipped with canaryd has 0123456789abcdef" in doubt.evidence.pattern
    assert doubt.wrong
    assert not comparisons(facts)
    file.write_text(json.dumps({case.name: digest(case.build(verify.FIXED_SEED).golden)}))
    facts = list(verify_all(context(), [], [case], file))
    assert not comparisons(facts, Subject.HOST)
    assert [c.wrong for c in comparisons(facts)] == [False]


@TWO_CORES
@pytest.mark.parametrize("what", ["golden", "operand"])
def test_two_cores_that_disagree_accuse_the_host(monkeypatch, what):
    """A golden or an operand made differently on a second core is evidence against the host alone."""
    honest, made = small(), []

    def build(seed):
        problem = honest.build(seed)
        (core,) = tensors.visible_cores()
        made.append(core)
        if core == last:
            bits(problem.golden if what == "golden" else problem.operands[1]).view(-1)[7] ^= 1
        return problem

    last = tensors.visible_cores()[-1]
    monkeypatch.setattr(Session, "makers", lambda *_: (tensors.visible_cores()[0], last))
    facts = list(verify_all(context(), [replace(honest, build=build)], [], None))
    (doubt,) = comparisons(facts, Subject.HOST)
    assert not comparisons(facts)
    assert "this host computed operands and golden twice and got two results" in doubt.evidence.pattern
    assert doubt.evidence.wrong == (what == "golden")
    first, second = sorted(made)
    assert first != second == last
    assert str(doubt.place) == f"cores {first} and {last}"


@pytest.mark.skipif(not tensors.can_pin(), reason="this process cannot be held to one core")
@pytest.mark.parametrize("what", ["golden", "operand"])
def test_one_core_that_disagrees_with_itself_accuses_the_host(what):
    """Where a worker may use one core alone, what passes on it must not be charged to the device."""
    only = tensors.visible_cores()[0]
    honest, made = small(), []

    def build(seed):
        problem = honest.build(seed)
        made.append(tensors.visible_cores())
        if len(made) == 1:
            bits(problem.golden if what == "golden" else problem.operands[1]).view(-1)[7] ^= 1
        return problem

    with tensors.on_core(only):
        facts = list(verify_all(context(), [replace(honest, build=build)], [], None))
    (doubt,) = comparisons(facts, Subject.HOST)
    assert not comparisons(facts)
    assert made == [(only,), (only,)]
    assert str(doubt.place) == f"core {only} twice"
    (twice,) = [f.value for f in facts if isinstance(f, Reading) and f.name == "goldens_made_on_two_cores"]
    assert twice == 0


batched = Product("dense", FORMATS["float32"], FORMATS["float32"], 24, 6, 5, 32, 3)


def test_two_ways_of_arithmetic_that_disagree_accuse_the_host():
    """An unwitnessed golden is not used against the device."""
    honest = small()
    case = replace(honest, build=lambda seed: replace(honest.build(seed), witnessed=False))
    facts = list(verify_all(context(), [case], [], None))
    assert [d.evidence.pattern for d in comparisons(facts, Subject.HOST)] == [
        "integer and float64 arithmetic of this host disagree on the golden"
    ]
    assert not comparisons(facts)


@TWO_CORES
@pytest.mark.parametrize("bad", [0, -1])
def test_of_the_two_makers_the_one_whose_arithmetic_disagrees_is_named(monkeypatch, bad):
    """The other core made the golden in both ways alike: it must not be taken out of service."""
    honest, cores = small(), tensors.visible_cores()

    def build(seed):
        return replace(honest.build(seed), witnessed=tensors.visible_cores() != (cores[bad],))

    monkeypatch.setattr(Session, "makers", lambda *_: (cores[0], cores[-1]))
    (doubt,) = comparisons(verify_all(context(), [replace(honest, build=build)], [], None), Subject.HOST)
    assert str(doubt.place) == f"core {cores[bad]}"


@pytest.mark.parametrize("lie", [True, False])
def test_a_comparator_that_lies_is_found_out(monkeypatch, lie):
    """The host compares the first result itself: a device that sees equality in a wrong result, or the reverse."""
    monkeypatch.setattr(interface.named("torch"), "agree", lambda results, golden: [lie] * len(results))
    facts = list(verify_all(context(drill="consistent" if lie else ""), [small()], [], None))
    doubts = comparisons(facts, Subject.COMPARATOR)
    assert doubts
    words = ("differs", "equals") if lie else ("equals", "differs")
    assert doubts[0].evidence.pattern == f"the host finds that the result {words[0]}, the device that it {words[1]}"
    if lie:
        assert all(c.wrong for c in comparisons(facts))  # the lie does not hide the fault


def test_a_comparator_that_sees_no_difference_is_found_out_beside_right_results(monkeypatch):
    """Once per case a bit of a right result is flipped on purpose: a comparator must see it."""
    assert not comparisons(verify_all(context(), [small()], [], None), Subject.COMPARATOR)
    monkeypatch.setattr(interface.named("torch"), "agree", lambda results, golden: [True] * len(results))
    facts = list(verify_all(context(), [small()], [], None))
    (doubt,) = comparisons(facts, Subject.COMPARATOR)
    assert doubt.evidence.pattern == "one bit of a right result was flipped on purpose, and the device finds it equal"
    assert not any(c.wrong for c in comparisons(facts))


def test_where_the_time_ends_early_another_seed_begins_with_other_cases():
    """Of four cases each is the next to be run with some seed, beside the one that always runs."""
    cases, following = [small(f"float32/dense/{n}/nn@24x20x64") for n in range(4)], set()
    for seed in range(12):
        facts = verify_all(context(seed=seed, budget=0.0), cases, [], None)
        following.add(next(f.case for f in facts if isinstance(f, Skipped) and f.late))
    assert following == {case.name for case in cases}


def test_a_case_that_a_kernel_refuses_is_skipped_aloud_and_hurts_no_other():
    """A refusal becomes the reason of that case; every other case is verified."""

    def refuse(operands, out):
        raise RuntimeError("'this_op' not implemented for 'Half'\nsecond line")

    broken = replace(small("float32/broken/square/nn@1x1x1"), compute=refuse)
    facts = list(verify_all(context(budget=2.0), [broken, small()], [], None))
    said = "this torch on cpu does not support it: 'this_op' not implemented for 'Half'"
    assert [f.reason for f in facts if isinstance(f, Skipped)] == [said]
    assert [c.case for c in comparisons(facts)] == [small().name]


@pytest.mark.parametrize(
    "said",
    [
        "DefaultCPUAllocator: out of memory",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: an illegal memory access was encountered; the shape must be even",
        "something that nobody foresaw",
        "Unsupported hardware state: the device must be reset",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
    ],
)
def test_a_failing_device_is_never_a_skipped_case(said):
    """What is not plainly a refusal ends the run: a broken device must not look like a kernel that is not there."""

    def fail(operands, out):
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said[:20]):
        list(verify_all(context(), [replace(small(), compute=fail)], [], None))


@pytest.mark.parametrize("reuses", [True, False])
def test_a_kernel_that_writes_nothing_is_found_out(reuses):
    """From the second result on the memory of the last one holds no right answer that could pass for a new one."""
    kept = []

    def once(operands, out):
        if not kept:
            kept.append(torch.matmul(*operands))
        return out if reuses and out is not None else kept[0]  # the second call leaves its memory as it was

    (first, *_) = comparisons(verify_all(context(), [replace(small(), compute=once)], [], None))[::-1]
    assert first.wrong
    assert first.evidence.nonfinite == first.evidence.total


def test_a_drill_that_met_no_result_is_not_a_clean_drill():
    """A fault that was never injected shows nothing: the run is skipped with that reason."""

    def refuse(operands, out):
        raise NotImplementedError("no kernel")

    with pytest.raises(Skip, match="'flip' was not injected"):
        list(verify_all(context(drill="flip"), [replace(small(), compute=refuse)], [], None))


def test_a_spent_budget_is_said_aloud(probes):
    """Fixed cases and one fresh one always run; the others are skipped with the reason, none in silence."""
    facts = list(probes["exact_integer"].run(context(budget=1e-6)))
    (met,) = {c.case.split("/")[1] for c in comparisons(facts) if c.seed != verify.FIXED_SEED}
    assert len(comparisons(facts)) == len(indexing.OPERATIONS) + 1
    skipped = [f for f in facts if isinstance(f, Skipped)]
    assert {f.case.split("/")[1] for f in skipped} == set(indexing.OPERATIONS) - {met}
    assert all("budget of 1e-06 s was spent before its turn" in f.reason for f in skipped)


@pytest.mark.parametrize("intensity", stress.GROUP)
def test_a_retest_is_clean_on_a_healthy_device_and_says_its_conditions(probes, intensity):
    """Load and pauses leave goldens and results as they are, on one core and on all of them."""
    ctx = context("int64/scatter", "int64/sort", budget=2.0, intensity=intensity)
    tell = stress.install(ctx)
    cores, threads = tensors.visible_cores(), torch.get_num_threads()
    found = comparisons(probes["exact_integer"].run(ctx))
    assert found
    assert not [c for c in found if c.wrong]
    assert (tensors.visible_cores(), torch.get_num_threads()) == (cores, threads)
    seconds = {fact.name: fact.value for fact in tell()}
    assert seconds["pause_seconds" if intensity == "idle" else "load_seconds"] > 0


def test_an_unknown_case_or_fault_is_a_reason_to_skip():
    """What was asked for and what there is stand in the text."""
    with pytest.raises(Skip, match=r"no case matches a/bx; it has e.g. a/b"):
        numeric_cases.restrict(context("a/bx"), [replace(small(), name="a/b@1")])
    with pytest.raises(Skip, match="unknown fault 'melt'; there are flip, zero"):
        list(verify_all(context(drill="melt"), [small()], [], None))


def test_a_run_limited_to_cases_tries_no_other_format(probes):
    """A retest asks nothing else of a bad device. Where no format has such a case, the reason names some there are."""
    module = probes["exact_matmul"]
    ctx = context("float32/permute/fixed24", "float64/dense/decode/nn")
    facts = list(module.run(ctx))
    speeds = {f.name for f in facts if isinstance(f, Reading) and f.name.startswith("speed_")}
    assert speeds == {"speed_float32", "speed_float64"}
    assert not [f for f in facts if isinstance(f, Skipped)]
    whole = list(module.run(context("int8>int32")))
    assert {c.case.rpartition("/nt")[0] for c in comparisons(whole)} >= {"int8>int32/narrow/fresh"}
    assert not [f for f in whole if isinstance(f, Reading) and f.name.startswith("speed_")]
    for unknown in ("float33", "tfloat32"):  # no such format; one that processors lack
        with pytest.raises(NoCase, match=f"no case matches {unknown}; it has e.g. float"):
            list(module.run(context(unknown)))


def test_a_name_that_no_case_has_is_told_beside_those_that_ran():
    """Two cases asked for, one of them mistyped: the other runs, and nobody takes it for both."""
    facts = list(verify_all(context(small().name, "float32/dnse", budget=0.1), [small()], [], None))
    assert [f.reason for f in facts if isinstance(f, Skipped) and f.case == "float32/dnse"] == [
        "no case that this device supports has this name"
    ]
    assert [c.case for c in comparisons(facts)] == [small().name]


@pytest.mark.parametrize("name", ONE)
def test_a_confirmation_meets_the_same_operands(probes, name, monkeypatch):
    """Seed and full name of any comparison rebuild its operands bit for bit, at whatever speed and place."""
    module, made = probes[name], {}
    honest = making.make_twice

    def recording(session, case, seed, core, shipped):
        problem, doubts = honest(session, case, seed, core, shipped)
        made.setdefault((case.name, seed), []).append([integers_of(t) for t in (*problem.operands, problem.golden)])
        return problem, doubts

    for module_of in (making, verify):
        monkeypatch.setattr(module_of, "make_twice", recording)
    speeds = iter((2e9, 4e11))
    if name == "exact_matmul":
        monkeypatch.setattr(module, "measure_speed", lambda *_: next(speeds, 4e11))
        monkeypatch.setattr(products_of_torch, "FORMAT_PAIRS", (("float32", "float32"),))
    first = comparisons(module.run(context(budget=0.6)))
    fresh = [c for c in first if "fixed" not in c.case]
    assert fresh
    for chosen in (fresh[0], fresh[-1], first[0]):
        (again,) = comparisons(module.run(context(chosen.case, budget=0.01)))
        assert (again.case, again.seed, again.shape) == (chosen.case, chosen.seed, chosen.shape)
        versions = made[chosen.case, chosen.seed]
        assert len(versions) >= 2
        assert all(version == versions[0] for version in versions)


def threads_now():
    return torch.get_num_threads()


def look_and_fail(manager, look):
    """Enter, look, and leave by an exception."""
    with manager:
        look()
        raise KeyError


def state_of_switches():
    table = {
        name: getattr(owner, attribute)
        for name, owner, attribute, _ in tensors._switch_table()
        if hasattr(owner, attribute)
    }
    table["precision"] = torch.get_float32_matmul_precision()
    table["deterministic"] = torch.are_deterministic_algorithms_enabled()
    table["warn only"] = torch.is_deterministic_algorithms_warn_only_enabled()
    return table


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_every_switch_is_put_back_also_after_an_exception(precision):
    """Whatever stood before stands again, and inside everything is strict."""
    original, inside = state_of_switches(), {}
    try:
        for name, owner, attribute, strict in tensors._switch_table():
            if hasattr(owner, attribute) and "tf32" not in name:
                setattr(owner, attribute, not strict)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision(precision)
        before = state_of_switches()
        with pytest.raises(KeyError):
            look_and_fail(tensors.strict_switches(), lambda: inside.update(state_of_switches()))
        assert state_of_switches() == before
        assert inside["precision"] == "highest"
        assert inside["deterministic"] is True
        assert inside["warn only"] is False
        assert all(inside[name] == strict for name, _, _, strict in tensors._switch_table() if name in inside)
        with tensors.strict_switches() as record:
            assert set(record) >= {name for name, *_ in tensors._switch_table()}
    finally:
        for name, owner, attribute, _ in tensors._switch_table():
            if name in original:
                setattr(owner, attribute, original[name])
        torch.set_float32_matmul_precision(original["precision"])
        torch.use_deterministic_algorithms(original["deterministic"], warn_only=original["warn only"])
    assert state_of_switches() == original


def test_a_core_is_taken_and_given_back_also_after_an_exception():
    """Inside: one thread on that core. Outside: threads and cores as before."""
    if not tensors.can_pin():
        pytest.skip("this system does not let a process choose its core")
    cores = tensors.visible_cores()
    threads, inside = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            look_and_fail(tensors.on_core(cores[-1]), lambda: inside.append((tensors.visible_cores(), threads_now())))
        assert inside == [((cores[-1],), 1)]
        assert (tensors.visible_cores(), threads_now()) == (cores, 2)
        with tensors.on_core(None):
            assert (tensors.visible_cores(), threads_now()) == (cores, 2)
    finally:
        torch.set_num_threads(threads)


@TWO_CORES
def test_goldens_are_made_on_two_cores_away_from_the_one_under_test():
    """Where there are more than two cores, none of the makers is the accused."""
    session = replace_cores(Session(context()), (0, 1, 2, 3))
    for avoid in (0, 1, 2, 3, None):
        first, second = session.makers("a/case", avoid)
        assert first != second
        assert avoid not in (first, second)
    assert replace_cores(Session(context()), (5,)).makers("a/case", 5) == (5, 5)
    assert {session.makers(f"case {n}", 1, 2)[0] for n in range(20)} == {0, 3}
    pair = replace_cores(Session(context()), (0, 1))
    assert {pair.makers(f"case {n}", 0, 1)[0] for n in range(20)} == {1}


def replace_cores(session, cores):
    session.cores = cores
    return session


def test_missing_digests_are_said_aloud(tmp_path):
    """An installation without its digest file says so; it does not pass for one that was checked."""
    facts = list(verify_all(context(), [], [small(fixed=True)], tmp_path / "gone.json"))
    (absent,) = [f for f in facts if type(f).__name__ == "Absent"]
    assert "missing or empty" in absent.reason


def test_the_host_compares_away_from_the_accused_core(monkeypatch):
    """The second comparison must not run on the core that the first one ran on."""
    if len(tensors.visible_cores()) < 2 or not tensors.can_pin():
        pytest.skip("needs two cores to choose from")
    seen = []

    def watched(a, b):
        seen.append(tensors.visible_cores())
        return same_bits(a, b)

    monkeypatch.setattr(measure, "same_bits", watched)
    session = Session(context())
    core = session.cores[0]
    problem = small().build(1)
    measure.measure_whole(session, small(), problem, 1, core, 0.0)
    assert seen
    assert all(core not in cores for cores in seen)


@pytest.mark.parametrize("core", [0, None])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("size", [8, tensors.SMALL])
def test_host_and_processor_compare_in_different_ways(monkeypatch, core, threads, size):
    """One by memcmp and the other by torch, whichever is faster for the processor: a broken way cannot hide itself."""
    used = []
    for module, who in ((measure, "host"), (runtime_torch, "processor")):
        for name in ("same_bits", "host_same_bits"):
            monkeypatch.setattr(module, name, lambda a, b, way=(who, name): bool(used.append(way)) or same_bits(a, b))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if core is not None else threads)
    session = Session(context())
    result, golden = torch.zeros(size), torch.zeros(size)
    assert session.runtime.agree([result], golden) == [True]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert measure._host_agrees(session, small(), None if core is None else session.cores[0], result, golden)
    assert [who for who, _ in used] == ["processor", "host"]
    alone = core is not None or threads < 16 or size == 8
    assert [way for _, way in used] == (["host_same_bits", "same_bits"] if alone else ["same_bits", "host_same_bits"])


@pytest.mark.parametrize("size", [1, 7, 24])
@pytest.mark.parametrize("name", ["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64"])
def test_wide_words_hide_no_element(name, size):
    """One bit wrong in any element shows, whether the bytes fill whole words or not, and where a view begins inside."""
    right = torch.zeros(size + 1, dtype=torch.uint8 if name == "uint8" else getattr(torch, name))
    for first in (0, 1):
        for element in range(size):
            wrong = right.clone()
            bits(wrong)[first + element] ^= 1
            a, b = words(wrong[first : first + size], right[first : first + size])
            assert bool((a != b).any())
            assert a.element_size() == 8 or size % 8 or first  # fewer words to compare than elements
            a, b = words(right[first : first + size], right.clone()[first : first + size])
            assert not bool((a != b).any())
