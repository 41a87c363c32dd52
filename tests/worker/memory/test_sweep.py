"""Sweeps of memory: clean memory is clean, every fault is found and told from the others, on the host and elsewhere.

The faults are those of a stand-in for a faulty device below torch, of which the sweep's code knows nothing, and the one
of a drill.
"""

import pytest

from canaryd.facts import Cell, Comparison, Exactness, Place, Reading, Skipped
from canaryd.probe import Context, Skip
from canaryd.worker.memory import slices, sweep
from canaryd.worker.memory.slices import ROW, TILE, WORD, Expected, Slice, own_numbers
from canaryd.worker.numeric.characterised import SETTLED
from canaryd.worker.numeric.stack import cpu
from tests.faulty_memory import CELLS, faulty_device
from tests.worker.numeric.cuda import DEVICES, HOPPER, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

ROWS = 40
MIB = 1 << 20
PATTERNS = ("address", "inversions", "random", "retention")
SEEDS = range(8)
ALLOCATE = sweep.allocate


@pytest.fixture(scope="module")
def probe(maker):
    """The probe as a module."""
    return maker.load("memory_sweep")


def context(*cases, drill="", seed=11, budget=60.0, level="quick", device=None, **more):
    return Context(device=device or cpu(), level=level, seed=seed, budget=budget, cases=cases, drill=drill, **more)


def swept(ctx, rows=ROWS, pause=0.001):
    """The comparisons of a sweep, by pattern: (wrong, right)."""
    facts = list(sweep.sweep_memory(ctx, rows * ROW, pause))
    found = [f for f in facts if isinstance(f, Comparison)]
    assert [f for f in facts if isinstance(f, Skipped)] == []
    wrong = {c.case.split("/")[1]: c for c in found if c.wrong}
    return wrong, [c for c in found if not c.wrong]


def kinds(wrong):
    """What all wrong words turned out to be."""
    return {Cell(name) for c in wrong.values() for name in c.evidence.memory.cells}


@pytest.mark.parametrize("rows", [1, 15, 16, 17, ROWS])
def test_clean_memory_is_clean(rows):
    """Every pattern, whatever the size is of the groups that it is read in: no alarm."""
    for seed in SEEDS:
        wrong, right = swept(context(seed=seed), rows)
        assert wrong == {}
        assert sorted(c.case for c in right) == [f"int64/{name}/sweep@{rows * TILE}" for name in PATTERNS]
        for c in right:
            assert (c.trials, c.uploads, c.place, c.exactness) == (1, 1, Place(unit="memory"), Exactness.UNIVERSAL)


def test_the_probe_sweeps_what_its_level_says(probe):
    """A quick run takes 16 MiB; it tells how much it swept, read and could lock."""
    facts = list(probe.run(context(budget=60.0)))
    told = {f.name: f.value for f in facts if isinstance(f, Reading)}
    assert 0.99 * 16 * MIB < told["memory_swept_bytes"] <= 16 * MIB == probe.MOST["quick"]
    assert told["memory_read_bytes"] == 8 * told["memory_swept_bytes"]
    assert told["memory_locked_bytes"] in (0, told["memory_swept_bytes"])
    assert told["trials"] == 4
    assert probe.MOST["quick"] < probe.MOST["standard"] < probe.MOST["deep"]


@pytest.mark.parametrize(
    ("level", "setting", "wanted"),
    [("quick", 1 << 20, 256 * MIB), ("quick", 8, 8 * MIB), ("standard", 4096, 1024 * MIB)],
)
def test_a_quick_run_on_an_accelerator_goes_beyond_its_cache(monkeypatch, probe, level, setting, wanted):
    """16 MiB never left the 50 MB of an H100's L2; the setting still lowers it, and one slice is never cut short."""
    asked = []
    monkeypatch.setattr(probe, "sweep_memory", lambda _ctx, most, _pause: asked.append(most) or [])
    list(probe.run(context(device=HOPPER, level=level, settings={"mebibytes": setting})))
    assert asked == [wanted]
    assert probe.BEYOND_CACHES == slices.LARGEST


@pytest.mark.parametrize("name", ["flip", "zero", "swap", "nan", "stuck", "consistent"])
def test_a_drill_makes_one_bit_stick(name):
    """Whatever its name; at the word and the bit that the seed chooses, and no other word is accused."""
    for seed in SEEDS:
        wrong, right = swept(context(drill=name, seed=seed))
        assert kinds(wrong) == {Cell.STUCK}
        assert len(wrong) + len(right) == len(PATTERNS)
        assert {(c.evidence.wrong, *c.evidence.bits.values()) for c in wrong.values()} == {(1, 1)}
        assert {(c.evidence.memory.rose, c.evidence.memory.fell) for c in wrong.values()} == {(1, 0)}


def test_evidence_says_where(monkeypatch):
    """Offset in the allocation, virtual address, both bit patterns, direction, and all of it in words."""
    held = []
    monkeypatch.setattr(sweep, "allocate", lambda *given: held.append(ALLOCATE(*given)) or held[-1])
    wrong, _ = swept(context(drill="flip", seed=3))
    ((memory,),) = held
    c = wrong["inversions"]
    seen, where, word = c.evidence, c.evidence.memory, memory.word
    assert (seen.wrong, seen.total, seen.lines) == (1, ROWS * TILE, {})
    assert (where.allocation, where.offset) == (ROWS * ROW, word * WORD)
    assert where.address == memory.words.data_ptr() + word * WORD
    assert where.physical is None or where.physical % 8 == 0
    ((index, want, got),) = seen.first
    assert index == (word,)
    assert int(want, 16) | memory.bit == int(got, 16)
    for text in (f"offset {where.offset:#x}", f"virtual address {where.address:#x}", "1 to 1", "1 stuck"):
        assert text in seen.pattern


def test_an_alias_in_another_allocation_is_found(monkeypatch):
    """Own numbers go on from slice to slice, so that a word which holds another slice's number names it."""
    monkeypatch.setattr(sweep, "LARGEST", 4 * ROW)

    def allocate(*given):
        made = ALLOCATE(*given)
        word, other, third = 5000, 1234, made[2]
        for each in made:
            plain_write, plain_put = each.write, each.put

            def write(part, expected, each=each, plain=plain_write):
                plain(part, expected)
                share(each)

            def put(at, values, each=each, plain=plain_put):
                plain(at, values)
                share(each)

            each.write, each.put = write, put

        def share(written):
            source, target = ((third, other), (made[0], word))
            if written is made[0]:
                source, target = target, source
            target[0].flat[target[1]] = source[0].flat[source[1]]

        return made

    monkeypatch.setattr(sweep, "allocate", allocate)
    facts = [f for f in sweep.sweep_memory(context("int64/address"), 12 * ROW, 0.0) if isinstance(f, Comparison)]
    (wrong,) = (f for f in facts if f.wrong)
    assert wrong.evidence.memory.cells == {"alias": 1}
    assert wrong.evidence.memory.partner == (8 * TILE + 1234 - 5000) * WORD
    assert sum(f.trials for f in facts if not f.wrong) == 2


@pytest.mark.parametrize("place", [(17, 300_000, 0), (301_234, 90_001, 63), (8190, 8191, 31), (200_000, 199_999, 44)])
@pytest.mark.parametrize("name", ["", *CELLS])
def test_a_faulty_device_is_found_and_understood(monkeypatch, name, place):
    """The same faults below torch: the sweep runs as on a GPU, and knows nothing of them. None: no alarm."""
    word, other, bit = place
    device = faulty_device(name, word, other, (1 << bit) - (1 << 64) * (bit == 63), ROWS)
    monkeypatch.setattr(sweep, "torch_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(sweep, "_free", lambda _: None)
    monkeypatch.setattr(slices.time, "sleep", device.rested)
    with device:
        wrong, right = swept(context(device=HOPPER, seed=4))
    assert kinds(wrong) == ({CELLS[name]} if name else set())
    assert len(wrong) + len(right) == len(PATTERNS)
    for c in wrong.values():
        assert c.evidence.memory.physical is None
        assert c.characterised
        if name == "coupled":
            assert c.evidence.first[0][0] == (word,)
            assert c.evidence.memory.partner == (other - word) * WORD


@pytest.mark.parametrize(("pauses", "cell"), [({1, 2}, "flipped"), ({1, 2, 3, 4}, "leaking")])
def test_only_a_word_that_leaks_again_is_a_broken_cell(monkeypatch, pauses, cell):
    """What the next pause does not show again accuses no cell: of either polarity one pause is the first."""
    device, rests = faulty_device("leaking", 77, 0, 1 << 5, ROWS), []

    def sleep(seconds):
        rests.append(seconds)
        if len(rests) in pauses:
            device.rested(seconds)

    monkeypatch.setattr(sweep, "torch_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(sweep, "_free", lambda _: None)
    monkeypatch.setattr(slices.time, "sleep", sleep)
    with device:
        wrong, _ = swept(context("int64/retention", device=HOPPER, seed=4))
    assert wrong["retention"].evidence.memory.cells == {cell: 1}


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
def test_a_sweep_runs_on_a_gpu_as_far_as_that_can_be_rehearsed(monkeypatch, device):
    """Every write and comparison on torch's fake tensors of a CUDA device."""
    stand_in(monkeypatch, torch)
    assert device.backend in SETTLED
    with fake(torch):
        target = torch.device("cuda", 0)
        memory = Slice(3, 5, target, slices.scratch_for(target, 3))
        tile = torch.zeros(TILE, dtype=torch.int64, device=target)
        for expected in (own_numbers(target), Expected(tile), Expected(tile).inverted()):
            for part in memory.parts():
                memory.write(part, expected)
                found = memory.difference(part, expected)
                assert (found.shape, found.dtype, found.device.type) == ((3, TILE), torch.int64, "cuda")
        memory.invert(3, 9)


def test_what_is_taken_stays_within_what_is_free_and_within_the_budget(monkeypatch):
    """Beside a server half of `budget.memory`; never the reserve; in slices of at most 256 MiB."""
    assert sweep.LARGEST == 256 << 20

    def taken(free, most=1 << 50, **more):
        monkeypatch.setattr(sweep, "available", lambda: free)
        monkeypatch.setattr(sweep, "LARGEST", 4 * ROW)
        return [len(m.words) for m in sweep.allocate(context(**more), most)]

    free = sweep.HOST_RESERVE + 10 * ROW
    assert taken(free) == [4, 4, 2]
    assert taken(free, most=5 * ROW) == [4, 1]
    assert taken(free, room=6 * ROW) == [3]
    assert taken(None, most=3 * ROW) == [3]
    with pytest.raises(Skip, match="no memory to sweep"):
        taken(sweep.HOST_RESERVE + ROW - 1)


def test_what_the_budget_leaves_no_time_for_is_told():
    """The first pattern runs whatever the budget is; another seed begins with another pattern."""
    begun = set()
    for seed in range(4):
        facts = list(sweep.sweep_memory(context(seed=seed, budget=1e-9), ROW, 0.0))
        (compared,) = (f for f in facts if isinstance(f, Comparison))
        skipped = [f for f in facts if isinstance(f, Skipped)]
        assert [("budget" in f.reason) for f in skipped] == [True] * 3
        begun.add(compared.case)
    assert len(begun) == len(PATTERNS)


def test_a_sweep_that_was_not_all_over_counts_only_what_is_wrong(monkeypatch):
    """What was not read is not right."""
    monkeypatch.setattr(sweep, "LARGEST", 2 * ROW)
    facts = list(sweep.sweep_memory(context("int64/address", budget=1e-9), 6 * ROW, 0.0))
    assert [type(f) for f in facts if isinstance(f, (Comparison, Skipped))] == [Skipped]
