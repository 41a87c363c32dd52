"""The kernel that names SMs: interpreted on the host, compiled for GPUs that are not here, and on a GPU where one is.

Compilation ends with the assembler's machine code, so the special registers exist and the instructions are the wanted
ones; what they do on a chip only the tests marked gpu can tell.
"""

import importlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from canaryd.facts import Comparison, Place, Reading, Skipped
from canaryd.probe import Context
from tests.worker.numeric.cuda import HOPPER

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd.worker.numeric.stack import cpu, discover  # noqa: E402
from canaryd.worker.units.processors import FIRST_TENSOR_CORES, Multiprocessors  # noqa: E402
from canaryd.worker.units.sweep import sweep_units  # noqa: E402
from canaryd.worker.units.tiles import Tiles  # noqa: E402

KERNEL = "canaryd.worker.units.kernel"
SMALL = (1, 16, 16, 32)
# Without bfloat16: the interpreter of Triton 3.9 multiplies its bit patterns as integers (numpy has no such format).
TILES = [
    Tiles("float16", "full", "dot", 22, *SMALL),
    Tiles("int8", "wide", "dot", 31, *SMALL),
    Tiles("float32", "dense", "fma", 24, *SMALL),
    Tiles("int32", "wide", "fma", 31, *SMALL),
]
SIX = replace(HOPPER, detail={**HOPPER.detail, "multiprocessors": "6"})
LANE = (torch.arange(256) % 32).view(16, 16).to(torch.int32)


def load(monkeypatch, interpret):
    """Import the kernel anew: whether it is interpreted is decided then."""
    pytest.importorskip("triton", reason="Triton is not installed in this interpreter")
    if interpret:
        pytest.importorskip("numpy", reason="NumPy, which Triton's interpreter needs, is not installed here")
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpret)))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    module = importlib.import_module(KERNEL)
    monkeypatch.setitem(sys.modules, KERNEL, module)  # taken out again after the test
    return module


@pytest.fixture
def interpreted(monkeypatch):
    """A GPU of six SMs whose kernel the host interprets; blocks go to SMs 5, 4, …, and again."""
    load(monkeypatch, interpret=True)
    return lambda kind=Multiprocessors: kind(SIX, lambda blocks: [5 - n % 6 for n in range(blocks)], LANE)


def swept(processor, seed=3, **more):
    ctx = Context(device=cpu(), level="quick", seed=seed, budget=0.001, cases=("*",), **more)
    return list(sweep_units(ctx, processor, TILES))


def comparisons(facts):
    return [f for f in facts if isinstance(f, Comparison)]


# --- Interpreted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", TILES, ids=lambda t: t.name)
def test_the_kernel_gives_the_golden_in_every_block(interpreted, tiles):
    """Through `tl.dot` and through products and sums; each block at its place, whatever the shift."""
    problem = tiles.build(5)
    for shift in (0, 1, 7):
        launch = interpreted().launch(tiles, problem.operands, 8, shift)
        assert torch.equal(launch.results, problem.golden.expand(8, *tiles.sizes))
        assert [launch.units[(n + shift) % 8] for n in range(8)] == [5, 4, 3, 2, 1, 0, 5, 4]


def test_a_clean_run_names_every_sm_and_nothing_wrong(interpreted):
    """All kinds of tiles; all six SMs seen."""
    facts = swept(interpreted())
    assert not any(c.wrong for c in comparisons(facts))
    assert {f.case for f in comparisons(facts)} == {tiles.name for tiles in TILES}
    assert {f.name: f.value for f in facts if isinstance(f, Reading)}["units_seen"] == 6
    assert [f for f in facts if isinstance(f, Skipped)] == []


@pytest.mark.parametrize("seed", range(2))
def test_a_drill_is_caught_and_placed(interpreted, seed):
    """One flipped bit in one block: the SM that computed it, the lane that held it, and the bit."""
    bad = [c for c in comparisons(swept(interpreted(), seed, drill="flip")) if c.wrong]
    (c,) = bad
    assert c.place.is_unit
    assert c.place.unit == "sm"
    ((row, column), _, _) = c.evidence.first[0]
    assert c.evidence.lines["lane"].first == int(LANE[row % 16, column])
    assert set(c.evidence.bits) == {"0"}


def test_a_broken_sm_is_named_though_no_class_is_characterised(interpreted):
    """SM 2 has a stuck bit in one lane; the other five compute the same bytes right."""

    class Broken(Multiprocessors):
        def launch(self, tiles, operands, blocks, shift):
            launch = super().launch(tiles, operands, blocks, shift)
            for block, unit in enumerate(launch.units):
                if unit == 2:
                    launch.results[block].view(-1).view(torch.int32 if launch.results.element_size() == 4 else None)[
                        17::32
                    ] ^= 1 << 5
            return launch

    found = comparisons(swept(interpreted(Broken)))
    assert {c.place for c in found if c.wrong} == {Place(unit="sm", numbers=(2,))}
    assert {c.evidence.lines["lane"].first for c in found if c.wrong} == {17}
    assert {n for c in found if not c.wrong for n in c.place.numbers} == {0, 1, 3, 4, 5}


# --- Compiled --------------------------------------------------------------------------------------------------------

WANTED = {
    80: {"dot": r"mma\.sync", "fma": r"fma\.rn\.f32|mad\.lo\.s32"},
    90: {"dot": r"wgmma\.mma_async", "fma": r"fma\.rn\.f32|mad\.lo\.s32"},
}
"""Compute capability, ten times → instructions that the assembly must have (NVIDIA PTX ISA)."""
KINDS = [
    ("bf16", "fp32", "dot"),
    ("fp16", "fp32", "dot"),
    ("i8", "i32", "dot"),
    ("fp32", "fp32", "fma"),
    ("i32", "i32", "fma"),
]


@pytest.mark.parametrize("chip", WANTED)
@pytest.mark.parametrize(("source", "target", "path"), KINDS, ids=str)
def test_the_kernel_compiles_for_a_gpu_to_what_it_is_to_test(monkeypatch, tmp_path, chip, source, target, path):
    """To tensor cores or to multiplications with additions; it reads SM and lane, the lane where the sums are held."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = load(monkeypatch, interpret=False)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    signature = {"a": f"*{source}", "b": f"*{source}", "out": f"*{target}", "lanes": "*i32", "units": "*i32"}
    constants = {"M": 64, "N": 64, "K": 128, "STEP": 64, "DOT": path == "dot", "ON_CHIP": True}
    signature |= {"shift": "i32", "rounds": "i32", **dict.fromkeys(constants, "constexpr")}
    made = build(
        ASTSource(kernel.exact_tiles, signature, constants),
        target=GPUTarget("cuda", chip, 32), options={"num_warps": kernel.WARPS},
    )  # fmt: skip
    assembly, layouts = made.asm["ptx"], made.asm["ttgir"]
    assert made.asm["cubin"]
    assert re.search(WANTED[chip][path], assembly)
    assert assembly.count("%smid") == 2
    assert "%laneid" in assembly
    (held,) = re.findall(r"%laneid.*-> tensor<64x64xi32, (#\w+)>", layouts)
    (stored,) = set(re.findall(r"%sums\w* : tensor<64x64x(?:f32|i32), (#\w+)>", layouts))
    assert held == stored


def test_the_shift_of_a_launch_compiles_nothing_anew(monkeypatch):
    """Triton makes a kernel of its own for arguments of 1 and for multiples of 16: seconds each, out of the budget."""
    kernel = load(monkeypatch, interpret=False)
    assert [p.name for p in kernel.exact_tiles.params if p.do_not_specialize] == ["shift"]


# --- What is skipped -------------------------------------------------------------------------------------------------


def test_without_triton_the_reason_names_the_remedy(monkeypatch):
    """Never a silent pass."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    facts = swept(Multiprocessors(SIX))
    skipped = [f for f in facts if isinstance(f, Skipped)]
    assert {f.case for f in skipped} == {tiles.name for tiles in TILES} | {"SMs never reached"}
    assert all("install triton beside torch" in f.reason for f in skipped[:-1])
    told = {f.name: f.value for f in facts if isinstance(f, Reading)}
    assert (told["units_seen"], told["units"], told["trials"]) == (0, 6, 0)


def unbuilt(interpreted, error):
    """Return a processor whose kernel cannot be built, and that kernel."""

    class Unbuilt:
        WARPS = 4

        class exact_tiles:  # noqa: N801  named as the kernel is
            def __class_getitem__(cls, grid):
                raise error

    processor = interpreted()
    processor.kernel = Unbuilt
    return processor, Unbuilt


@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler. Please specify via CC"), subprocess.CalledProcessError(1, "gcc")]
)
def test_without_a_compiler_the_reason_names_the_remedy(interpreted, error):
    """Triton builds a launcher with gcc and Python's headers; a failing device would raise something else."""
    processor, kernel = unbuilt(interpreted, error)
    skipped = {f.case: f.reason for f in swept(processor) if isinstance(f, Skipped)}
    assert all("gcc, python3-dev" in skipped[tiles.name] for tiles in TILES)
    kernel.exact_tiles.__class_getitem__ = classmethod(lambda _cls, _grid: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        swept(processor)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"), "libcuda.so cannot found!"),
        (PermissionError(13, "Permission denied", "/nonexistent/.triton"), "Permission denied"),
        (ImportError("cuda_utils.so: failed to map segment from shared object"), "failed to map segment"),
        (RuntimeError("0 active drivers ([]). There should only be one."), "0 active drivers"),
        (RuntimeError("out of resource: shared memory, Required: 99, Hardware limit: 64"), "out of resource"),
        (RuntimeError("PTXAS error: Internal Triton PTX codegen error"), "PTXAS error"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "kernel image is invalid"),
    ],
)
def test_what_triton_lacks_on_a_machine_is_no_fault_of_the_device(interpreted, error, reason):
    """Each of them ended the probe with an error, cause harness, in every round."""
    processor, _ = unbuilt(interpreted, error)
    skipped = {f.case: f.reason for f in swept(processor) if isinstance(f, Skipped)}
    assert all(reason in skipped[tiles.name] for tiles in TILES)


def test_older_tensor_cores_are_skipped_aloud(interpreted):
    """Triton multiplies without them before 8.0: that would test something else than it says."""
    old = interpreted()
    old.device = replace(SIX, detail={**SIX.detail, "capability": "7.5"})
    facts = swept(old)
    skipped = {f.case: f.reason for f in facts if isinstance(f, Skipped)}
    assert set(skipped) == {tiles.name for tiles in TILES if tiles.path == "dot"}
    assert all("8.0" in reason and "7.5" in reason for reason in skipped.values())
    assert {c.case for c in comparisons(facts)} == {tiles.name for tiles in TILES if tiles.path == "fma"}
    assert FIRST_TENSOR_CORES == (8, 0)


# --- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_sm_of_a_gpu_is_seen_and_right(maker):
    """The real kernel on the real chip: all SMs, all lanes, no wrong bit."""
    probe = maker.load("exact_units")
    device = next(d for d in discover()[0] if d.backend == "cuda")
    facts = list(probe.run(Context(device=device, level="standard", seed=1, budget=20.0)))
    told = {f.name: f.value for f in facts if isinstance(f, Reading)}
    skipped = [f.reason for f in facts if isinstance(f, Skipped)]
    assert told["units_seen"] == told["units"] == int(device.detail["multiprocessors"]), skipped
    assert not any(c.wrong for c in comparisons(facts))
    tiles = probe.every_kind(Context(device=device, level="quick", seed=1, budget=1.0))[0]
    operands = tuple(operand.to("cuda") for operand in tiles.build(1).operands)
    launch = probe.processor(device).launch(tiles, operands, told["units"], 0)
    assert set(launch.lanes.flatten().tolist()) == set(range(32))


@pytest.mark.gpu
def test_a_drill_on_a_gpu_names_one_sm(maker):
    """The SM that computed the struck block."""
    probe = maker.load("exact_units")
    device = next(d for d in discover()[0] if d.backend == "cuda")
    facts = list(probe.run(Context(device=device, level="quick", seed=1, budget=5.0, drill="flip")))
    (bad,) = [c for c in comparisons(facts) if c.wrong]
    assert bad.place.unit == "sm"
    assert bad.place.is_unit
