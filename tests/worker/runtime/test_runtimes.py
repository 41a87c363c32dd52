"""Other runtimes than torch under the exact probes: clean is clean, faults are found, placement is proven or not."""

import importlib
import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Comparison, Exactness, Reading, Skipped
from canaryd.judge.case import Case
from canaryd.judge.node import Node
from canaryd.judge.verdict import decide
from canaryd.model import Cause, Device, Outcome, State
from canaryd.probe import Context, Skip
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.numeric import characterised, faults, indexing, quantized
from canaryd.worker.numeric.attention import CONTENTS, MASKS
from canaryd.worker.numeric.cases import Case as Golden
from canaryd.worker.numeric.cases import product_case
from canaryd.worker.numeric.errors import ErrorKind, kind_of
from canaryd.worker.numeric.operands import Product, build
from canaryd.worker.numeric.tensors import FORMATS, bits, host_same_bits
from canaryd.worker.numeric.verify import FIXED_SEED, verify_all
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Elsewhere, Operation, Unsupported
from tests.command import ROOT, bare_python

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = [pytest.mark.torch, pytest.mark.runtimes]

PACKAGES = {"mlx": "mlx.core", "onnx": "onnxruntime", "webgpu": "wgpu", "jax": "jax"}
ONE = {
    "exact_matmul": "float64/full/batched/tn",
    "exact_attention": "float32/uniform/prefill",
    "exact_integer": "int64/scatter/fresh",
}
EACH_FAULT = [
    pytest.param(name, fault, marks=() if name == "exact_integer" or fault in ("flip", "stuck") else pytest.mark.slow)
    for name, fault in itertools.product(ONE, faults.FAULTS)
]
"""All by the probe that takes least; by the others one in the result and one in an operand, and all in `.ci/full`."""
NOWHERE = Device(
    uuid="ONNX-AZURE-1",
    backend="onnx-azure",
    index=0,
    model="a provider that computes nothing here",
    detail={"provider": "AzureExecutionProvider", "architecture": "x86_64"},
)
"""A provider that every onnxruntime for CPUs offers, and that takes no node of these graphs."""


@pytest.fixture(params=PACKAGES)
def device(request, monkeypatch):
    """The host's processor, through each runtime that this interpreter has."""
    pytest.importorskip(PACKAGES[request.param], reason=f"{request.param} is not installed in this interpreter")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    try:
        found = interface.named(request.param).devices()
    except Skip as why:
        pytest.skip(str(why))
    return next((d for d in found if d.unit == "cpu"), None) or pytest.skip(f"{request.param} has no processor here")


def computes(device, name):
    """Skip where a runtime has no case of a probe."""
    if device.runtime == "webgpu" and name == "exact_attention":
        pytest.skip("WGSL's exp has no one right answer")


def context(device, *cases, drill="", budget=0.2, seed=11):
    return Context(device=device, level="quick", seed=seed, budget=budget, cases=cases, drill=drill)


def comparisons(facts):
    return [f for f in facts if isinstance(f, Comparison)]


def case_of(probes, probe, device):
    """Name one small case of a probe; attention's name ends with the runtime's kernel."""
    if device.runtime == "webgpu" and probe == "exact_matmul":
        return "float32/full/batched/tn"
    if probe != "exact_attention":
        return ONE[probe]
    (kernel,) = interface.of(device).attention_kernels
    return f"{ONE[probe]}/{kernel.lower()}/none"


def run(series, probe, device, **more):
    """Run a probe through the real worker of a series."""
    path = ROOT / "probes" / f"{probe}.py"
    spec = series.describe([path]).probes[path]
    request = RunRequest(probe_path=path, spec=spec, device=device, level="quick", seed=1, budget=0.2, **more)
    return series.run(request, 120.0)


# --- Clean ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE)
def test_a_clean_run_is_clean_and_meets_the_shipped_digests(probes, device, name):
    """Through every runtime the same bytes give the same bits as through torch."""
    computes(device, name)
    facts = list(probes[name].run(context(device)))
    found = comparisons(facts)
    assert found
    assert not [c.case for c in found if c.wrong]
    known = json.loads(probes[name].GOLDEN.read_text())
    taken = {c.case: c.digest for c in found if c.digest}
    assert taken
    assert taken == {case: known[case] for case in taken}
    assert {c.place.unit for c in found} == {"device"}
    readings = {f.name: f.value for f in facts if isinstance(f, Reading)}
    assert json.loads(readings["switches"])
    assert "golden_fingerprint" in readings


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(1, 2, 2, 7, 33, 64), (2, 4, 1, 24, 24, 64)])
def test_masks_and_grouped_queries_are_torchs(probes, device, mask, shape):
    """Masks of other lengths than the queries are aligned at the top left, whatever the runtime's own does."""
    computes(device, "exact_attention")
    for content in CONTENTS:
        (kernel,) = interface.of(device).attention_kernels
        case = probes["exact_attention"].attention_case(device, kernel, "float32", content, mask, "prefill", shape)
        problem = case.build(5)
        runtime = interface.of(device)
        result = case.compute(runtime.upload(problem.operands, device), None)
        assert host_same_bits(runtime.download(result), problem.golden), case.name


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [0, 3])
def test_operands_stay_as_they_lie(probes, device, layout, batch):
    """A transposed operand is uploaded transposed, and the product is right."""
    sizes = (9, 11, 32, batch)
    case = product_case(device, "float32", "float32", "dense", "square", layout, sizes)
    problem, runtime = case.build(3), interface.of(device)
    operands = runtime.upload(problem.operands, device)
    for uploaded, host in zip(operands, problem.operands, strict=True):
        assert host_same_bits(runtime.download(uploaded).contiguous(), host.contiguous())
    assert host_same_bits(runtime.download(case.compute(operands, None)), problem.golden)


def test_a_case_is_characterised_for_the_version_that_was_shown(device):
    """The table names a package and a version; any other is characterised by evidence."""
    package, version = characterised.SHOWN.get(device.backend) or pytest.skip(f"{device.backend}: nothing ships yet")
    shown = device.detail["architecture"] == "x86_64" and device.detail[package] == version
    assert characterised.is_characterised(device, "float32") is shown
    other = Device(uuid="x", backend=device.backend, index=0, model="m", detail={**device.detail, package: "0.0.1"})
    assert not characterised.is_characterised(other, "float32")
    assert not characterised.is_settled(other)


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fault"), EACH_FAULT)
def test_every_fault_is_found(probes, device, name, fault):
    """Each class of fault in each probe, injected into the runtime's own array, is seen."""
    computes(device, name)
    found = comparisons(probes[name].run(context(device, case_of(probes, name, device), drill=fault, budget=0.05)))
    wrong = [c for c in found if c.wrong]
    assert wrong, f"{fault} was not found"
    evidence = wrong[-1].evidence
    if fault in ("flip", "zero", "nan"):
        assert evidence.wrong == 1
    if fault == "flip":
        assert dict(evidence.bits) == {"0": 1}


@pytest.mark.parametrize("name", indexing.OPERATIONS)
def test_an_operand_that_changed_changes_the_result(device, name):
    """The device computes from what was uploaded, not from the host's tensors: another operand, another result."""
    runtime, problem = interface.of(device), indexing.build(name, 256, FIXED_SEED)
    other = indexing.build(name, 256, FIXED_SEED + 1)
    try:
        first = runtime.run(Operation(name), runtime.upload(problem.operands, device), None)
    except Unsupported:
        pytest.skip(f"{device.runtime} has no {name}")
    second = runtime.run(Operation(name), runtime.upload(other.operands, device), None)
    assert host_same_bits(runtime.download(first), problem.golden)
    assert host_same_bits(runtime.download(second), other.golden)
    assert runtime.agree([first], *runtime.upload((problem.golden,), device)) == [True]
    assert runtime.agree([second], *runtime.upload((problem.golden,), device)) == [False]


@pytest.mark.parametrize("name", ["sort", "topk", "cumsum", "experts"])
def test_every_fault_in_sorts_and_scans_is_found(device, name):
    """At a size that is no power of two: a bit that changed, and two values that changed places."""
    if device.runtime == "webgpu":
        pytest.skip("WebGPU has none of them")
    runtime, problem = interface.of(device), indexing.build(name, 272, 9)
    (golden,) = runtime.upload((problem.golden,), device)
    for fault in faults.FAULTS.values():
        result = runtime.run(Operation(name), runtime.upload(problem.operands, device), None)
        assert runtime.agree([result], golden) == [True]
        assert runtime.agree([runtime.changed(result, fault.change, 9)], golden) == [False]


def test_what_was_compared_is_spoilt(device):
    """A kernel that writes nothing must not find the right answer in the memory of the result before."""
    runtime, problem = interface.of(device), indexing.build("gather", 256, 3)
    result = runtime.run(Operation("gather"), runtime.upload(problem.operands, device), None)
    runtime.spoil([result])
    if device.runtime == "jax":  # its memory is another array's now, with every bit inverted
        assert result.data.is_deleted()
        return
    assert bits(runtime.download(result)).eq(-1).all()


def test_devices_are_found_and_a_drill_is_pinned_to_one(device):
    """A worker finds them as this process does; `card` is the host's CPU as torch sees it, and is not accused."""
    with Series(WorkerSpec()) as series:
        reach = series.reach(device.runtime)
        cpu = next(d for d in series.describe([]).devices if d.backend == "cpu")
        bad = run(series, "exact_integer", device, drill="consistent", cases=(ONE["exact_integer"],))
    assert reach.problem == ""
    assert device.uuid in {d.uuid for d in reach.devices}
    assert {d.card for d in reach.devices if d.unit == "cpu"} == {cpu.uuid}
    assert bad.outcome is Outcome.COMPLETED, bad.detail
    assert bad.wrong
    assert bad.device == device.uuid != device.card
    assert {"mlx": "mlx", "onnx": "onnxruntime", "webgpu": "wgpu", "jax": "jaxlib"}[device.runtime] in bad.stack


# --- MLX --------------------------------------------------------------------------------------------------------------


def mlx():
    pytest.importorskip("mlx.core", reason="mlx is not installed in this interpreter")
    return interface.named("mlx").devices()[0]


WAYS = {"strict": ("0", "float32", "tfloat32"), "tf32": ("1", "tfloat32", "float32")}
"""Instruction set → value of the variable, float32's class that is tested, and the one that is left out."""


@pytest.mark.parametrize("way", [pytest.param("strict", marks=pytest.mark.slow), "tf32"])
def test_mlx_is_tested_strictly_and_as_it_serves(way):
    """Each way has a worker of its own, says so in its stack, and leaves the other way's operands out."""
    device, (value, given, left) = mlx(), WAYS[way]
    assert way in device.instruction_sets
    with Series(WorkerSpec(), instruction_set=way) as series:
        done = run(series, "exact_matmul", device)
    assert done.outcome is Outcome.COMPLETED, done.detail
    assert not done.wrong
    assert done.stack["MLX_ENABLE_TF32"] == value
    compared = {c.case.split("/")[0].partition(">")[0] for c in done.comparisons}
    assert given in compared
    assert left not in compared
    (why,) = [s.reason for s in done.skipped if s.case.partition(">")[0] == left]
    assert f"MLX_ENABLE_TF32={value}" in why


QUANTIZED = ("affine4x32>bfloat16", "affine8x128>float32", "mxfp4>float16", "mxfp8>float32", "nvfp4>float16")
"""Packings and formats; decode and prefill, either layout, between them every fault."""


@pytest.mark.parametrize("layout", quantized.LAYOUTS)
def test_mlx_multiplies_quantised_weights_exactly(layout):
    """Every mode, width, group and format, one row and several."""
    device = mlx()
    runtime = interface.of(device)
    for (packing, form), rows in itertools.product(quantized.pairs(device), (1, 33)):
        case = quantized.case(device, packing, form, "decode", layout, (rows, 128, 256))
        problem = case.build(rows)
        result = case.compute(runtime.upload(problem.operands, device), None)
        assert runtime.agree([result], *runtime.upload((problem.golden,), device)) == [True], case.name


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f in ("flip", "stuck") else pytest.mark.slow) for f in faults.FAULTS]
)
def test_every_fault_is_found_in_quantised_products(probes, fault):
    """In the stored codes or in the result, through the probe as the daemon runs it."""
    number = list(faults.FAULTS).index(fault)
    label, variants = QUANTIZED[number % len(QUANTIZED)], list(itertools.product(quantized.KINDS, quantized.LAYOUTS))
    # A bit that is stuck in codes may meet activations of 0 in one case: all of a format are tried.
    case = "/".join((label, "codes", *(variants[number % len(variants)] if fault != "stuck" else ())))
    found = comparisons(probes["exact_matmul"].run(context(mlx(), case, drill=fault, budget=0.05)))
    assert any(c.wrong and c.case.startswith(label) for c in found), f"{fault} was not found"


class DeviceOfJax:
    """What JAX tells of a device; jaxlib raises an error without a message for what it does not tell."""

    device_kind = "NVIDIA H200"
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")

    def __init__(self, **more):
        vars(self).update(more)

    def __getattr__(self, name):
        raise AttributeError


@pytest.mark.parametrize(
    ("told", "coordinates"),
    [
        ({"coords": (0, 0, 0)}, "(0, 0, 0)"),
        ({"coords": [1, 0, 2], "core_on_chip": 0}, "(1, 0, 2), core 0"),
        ({}, None),
    ],
)
def test_a_device_of_jax_has_the_coordinates_that_jax_tells(told, coordinates):
    """A TPU's core too; a GPU has coordinates and no core, a processor neither."""
    pytest.importorskip("jax", reason="jax is not installed in this interpreter")
    found = importlib.import_module("canaryd.worker.runtime.jax")._device("cuda", 0, DeviceOfJax(**told))
    assert (found.name, found.model) == ("jax-cuda:0", "NVIDIA H200")
    assert found.detail["platform_version"] == "PJRT C API cuda 13000"
    assert found.detail.get("coordinates") == coordinates


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fell_back():
    """A run of each probe on a provider that computes nothing here, by one worker."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed in this interpreter")
    with Series(WorkerSpec()) as series:
        return {name: run(series, name, NOWHERE) for name in ONE}


@pytest.mark.parametrize("name", ONE)
def test_a_provider_that_fell_back_is_no_evidence(fell_back, name):
    """The worker skips the run and names the nodes and who ran them; the judge says unknown, never healthy."""
    done = fell_back[name]
    assert done.outcome is Outcome.SKIPPED, done.detail
    assert not done.comparisons
    assert "AzureExecutionProvider did not take" in done.detail
    assert "ran on CPUExecutionProvider" in done.detail
    if name == "exact_matmul":
        assert "1:Gemm ran on CPUExecutionProvider" in done.detail
    node = Node(devices={NOWHERE.uuid: NOWHERE}, runs={NOWHERE.uuid: (done,)})
    verdict = decide(Case(device=NOWHERE, node=node, wanted={name: 1800.0}, policy=JudgePolicy(), now=done.started + 9))
    assert verdict.state is State.UNKNOWN
    assert verdict.cause is Cause.ENVIRONMENT
    assert any("did not take" in f.message for f in verdict.findings)


def test_a_session_without_a_record_of_placement_is_no_evidence(monkeypatch):
    """Where nothing was recorded nobody knows where a node ran, though the result may be right."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed in this interpreter")
    from canaryd.worker.runtime import onnx

    runtime = interface.named("onnx")
    device = next(d for d in runtime.devices() if d.unit == "cpu")
    monkeypatch.setattr(onnx, "RECORD", "session.log_id")  # an entry that records nothing
    problem = indexing.build("gather", 64, 1)
    operands = runtime.upload(problem.operands, device)
    with pytest.raises(Elsewhere, match="nothing proves where gather ran"):
        runtime.run(Operation("gather"), operands, None)


def test_unsigned_products_are_a_class_of_their_own(probes):
    """Processors without VNNI saturate uint8 x int8 by design: the wide content is left out there, with that reason."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed in this interpreter")
    device = next(d for d in interface.named("onnx").devices() if d.unit == "cpu")
    facts = list(probes["exact_matmul"].run(context(device, "uint8>int32", budget=0.3)))
    contents = {c.case.split("/")[1] for c in comparisons(facts)}
    left = {f.case: f.reason for f in facts if isinstance(f, Skipped)}
    assert "narrow" in contents
    assert ("wide" in contents) is ("uint8>int32/wide" not in left)
    assert all("saturate" in why for case, why in left.items() if case == "uint8>int32/wide")


# --- WebGPU -----------------------------------------------------------------------------------------------------------


def webgpu():
    pytest.importorskip("wgpu", reason="wgpu is not installed in this interpreter")
    try:
        return interface.named("webgpu").devices()[0]
    except Skip as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(
    ("value", "dtype", "why"),
    [
        (float("nan"), "float32", "NaN"),
        (float("inf"), "float16", "infinities"),
        (1e-40, "float32", "subnormals"),
        (1e-6, "float16", "subnormals"),
        (-0.0, "float32", "sign of zero"),
        (1.0, "float64", "no float64"),
        (1.0, "bfloat16", "no bfloat16"),
    ],
)
def test_content_beyond_the_language_is_refused(value, dtype, why):
    """What WGSL does not guarantee is unsupported, aloud, before anything is computed."""
    device = webgpu()
    tensor = torch.full((4,), value, dtype=getattr(torch, dtype))
    with pytest.raises(Unsupported, match=why):
        interface.of(device).upload((tensor,), device)


def test_a_golden_that_needs_rounding_is_refused():
    """Class R assumes round-to-nearest: it is skipped with the reason and never counted."""
    device = webgpu()
    product = Product("full", FORMATS["float32"], FORMATS["float16"], 24, 32, 32, 32, 0, "nt")
    case = Golden("float32>float16/full", partial(build, product), None, fixed=True)
    assert case.build(FIXED_SEED).exactness is Exactness.ROUNDED
    with pytest.raises(Skip, match="guarantees no rounding mode"):
        list(verify_all(context(device), [], [case], None))


def test_a_lost_device_is_an_error_of_the_device():
    """Wgpu's own text is in the table of messages: a device that is gone is no missing kernel."""
    runtime, device = interface.named("webgpu"), webgpu()
    operands = runtime.upload((torch.ones(4, 4), torch.ones(4, 4)), device)
    runtime._gpu.destroy()
    try:
        with pytest.raises(Exception, match="lost") as caught:
            runtime.run(Operation("matmul", "float32", "float32"), operands, None)
    finally:
        runtime._opened.clear()
    assert kind_of(caught.value) is ErrorKind.DEVICE


def test_a_software_renderer_is_no_accelerator():
    """Mesa's lavapipe is the host's processor, and says so wherever the device is named."""
    device = next((d for d in [webgpu()] if d.unit == "cpu"), None) or pytest.skip("no software renderer here")
    assert "software renderer on " in device.model
    assert device.weak_identity
    assert device.card.startswith("CPU-")
    assert "none of a GPU" in device.detail["units"]


# --- Interpreters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKAGES)
def test_an_interpreter_without_the_package_is_said_in_one_line(name):
    """No device, no traceback: what is missing and what to install."""
    with Series(WorkerSpec(python=bare_python())) as series:
        reach = series.reach(name)
    assert reach.devices == ()
    assert "\n" not in reach.problem
    assert f"{bare_python()} cannot import" in reach.problem
    assert "pip install" in reach.problem


def test_what_was_fetched_stays_as_it_was(device):
    """The host looks at a result while the device overwrites it."""
    runtime = interface.of(device)
    runtime.need(device)
    right = torch.arange(64, dtype=torch.float32).view(8, 8)
    (array,) = runtime.upload((right,), device)
    held = runtime.download(array)
    runtime.spoil([array])
    assert host_same_bits(held, right)
