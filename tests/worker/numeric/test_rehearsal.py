"""A rehearsal without a GPU: every case of every numeric probe runs on torch's fake tensors of a CUDA device.

What is run: operands made and copied to the device, the operation, the comparison on the device, the copy back. What
reads a value of the device (`tolist`, `item`, `int`) ends with torch's `DataDependentOutputException`; the tests ask
for exactly that, so everything before the read is checked. Kernels of a real device may refuse more: test_refusals.py.
"""

import importlib.util
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from canaryd.probe import Context, Device
from canaryd.worker.exact_canary import cases
from canaryd.worker.numeric import attention, characterised, indexing, products, sizes, stack
from canaryd.worker.numeric import cases as numeric_cases
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.faults import FAULTS, Injector
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import build, make_pools
from canaryd.worker.numeric.recording import Made, Recorder
from canaryd.worker.numeric.serving_kernels import every_kernel
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import FORMATS, form_of, strict_switches, upload
from canaryd.worker.runtime import interface
from tests.command import ROOT
from tests.worker.numeric.cuda import DEVICES, HOPPER, MI300X, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
pytestmark = pytest.mark.torch

LEVELS = ("quick", *(pytest.param(level, marks=pytest.mark.slow) for level in ("standard", "deep")))
"""`.ci/full` rehearses the kernels of quick in the sizes and layouts of the other levels."""
SLOW = 1e6
"""A speed at which a probe chooses its smallest sizes: what a kernel takes does not depend on more."""


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """A machine with one CUDA device that computes nothing."""
    if torch.cuda._is_compiled() and not torch.cuda.is_available():
        pytest.skip("a torch that was built with CUDA asks for a driver; the build for CPUs does not")
    stand_in(monkeypatch, torch)
    with strict_switches():
        yield


def context(device, level, seed=0):
    return Context(device=device, level=level, seed=seed, budget=1.0)


REHEARSED, COMPARED = set(), set()
"""What was run by call and operands, and what was compared by kind of result: fake tensors know no more than that."""
KINDS = {}
"""Question → kinds of its operands and golden: levels and devices ask much alike."""


def size_of(n):
    """Return what kernels ask of a size or a stride: whether it is 1, more than 16, whole sixteenths."""
    return n == 1, n > 16, n % 16 == 0


def call_of(compute):
    """Return what tells one way to compute from another."""
    if isinstance(compute, partial):
        return compute.func, compute.args, frozenset(compute.keywords.items())
    return getattr(compute, "__code__", compute)


def rehearse(device, case, problem):
    """Run one exact case as `verify` does, up to where a value is read."""
    with fake(torch):
        operands = upload(problem.operands, device)
        (golden,) = upload((problem.golden,), device)
        for operand, host in zip(operands, problem.operands, strict=True):
            assert (operand.device.type, operand.stride()) == ("cuda", host.stride())
        first = numeric_cases.first_result(device, case.compute, operands)
        for result in (first, case.compute(operands, first)):
            assert result.device.type == "cuda"
            assert (result.shape, result.dtype) == (golden.shape, golden.dtype), case.name
            assert result.is_contiguous()
        kind = (golden.dtype, golden.dim(), golden.numel() % 8, operands[case.struck].dtype)  # 8: bytes of a word
        if kind not in COMPARED:
            COMPARED.add(kind)
            Injector(FAULTS["stuck"], 1, interface.of(device)).before(case.name, operands, case.struck)
            compare(device, case.name, golden, first)


def rehearse_gather(device, product):
    """Gather two turns of a product's operands and golden, the second into the memory of the first."""
    right, pools = build(product, 1), make_pools(product, 1)
    with fake(torch):
        gatherer = Gatherer(interface.of(device), device, product, pools, 1)
        for turn in range(2):
            operands, golden = gatherer.gather(turn)
            for there, here in zip((*operands, golden), (*right.operands, right.golden), strict=True):
                assert there.device.type == "cuda"
                assert (there.shape, there.dtype) == (here.shape, here.dtype)
                assert there.stride() == here.stride() or 1 in here.shape  # one row lies as one column does


def compare(device, name, golden, result):
    """Compare a result with its golden where it lies, spoil it, and copy it back."""
    for read in (partial(digest, result), partial(interface.of(device).agree, [result, result], golden)):
        with pytest.raises(fake_tensor.DataDependentOutputException):
            read()
    interface.of(device).spoil([result])
    Injector(FAULTS["consistent"], 1, interface.of(device)).after(name, result)
    assert (result.cpu().shape, result.cpu().dtype) == (golden.shape, golden.dtype)


def rehearse_all(device, cases, question_of, kind_of=int):
    """Run each case whose call and kinds of operands were not run before; return how many cases that covers.

    Sizes and strides of one `kind_of` are alike to the kernels.
    """
    covered = 0
    for case in cases:
        question = question_of(case)
        problem = None
        if question not in KINDS:
            problem = question()
            KINDS[question] = [(t.shape, t.dtype, t.stride()) for t in (*problem.operands, problem.golden)]
        kinds = tuple((*map(kind_of, shape), dtype, *map(kind_of, stride)) for shape, dtype, stride in KINDS[question])
        if (call_of(case.compute), kinds) not in REHEARSED:
            rehearse(device, case, problem or question())
            REHEARSED.add((call_of(case.compute), kinds))
        covered += 1
    return covered


class Question:
    """A builder of a problem that is equal to another of the same builder and arguments."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __call__(self):
        return self.made[0](*self.made[1])

    def __eq__(self, other):
        return self.made == other.made

    def __hash__(self):
        return hash(self.made)


def is_unsound(kernel, _, mask, sizes):
    """What no healthy device need answer rightly: cuDNN, one query, a causal mask (`attention.attend`)."""
    return kernel == "CUDNN_ATTENTION" and mask == "causal" and sizes[3] == 1


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
@pytest.mark.parametrize("level", LEVELS)
def test_every_attention_case_runs(probes, device, level):
    """Every kernel, format, content, mask and size, as zeros of their shapes; at quick as the real operands too."""
    module = probes["exact_attention"]
    cases = [case for question, case in module.every_case(context(device, level)) if not is_unsound(*question)]
    blank = rehearse_all(device, cases, lambda case: Question(attention.blank, replace(case.build.args[0], content="")))
    assert blank == len(cases) > 100
    if level == "quick":
        real = rehearse_all(device, cases, lambda case: Question(case.build.func, *case.build.args, 1))
        assert real == len(cases)


@pytest.mark.parametrize(
    ("number", "chip", "mask", "queries", "why"),
    [
        (90701, (9, 0), "float", 16, "cuDNN 9.7.1 has errors in its attention: tested from 9.10.2 on"),
        (91001, (9, 0), "none", 16, "cuDNN 9.10.1 has errors"),
        (92000, (10, 3), "none", 16, "cuDNN's attention is wrong on healthy Blackwell GPUs (pytorch issue 193893)"),
        (91002, (9, 0), "causal", 1, "cuDNN may be wrong for one query under a causal mask"),
        (91002, (9, 0), "causal", 2, ""),
        (91900, (9, 0), "none", 1, ""),
        (90100, (8, 0), "none", 16, "cuDNN 9.1.0 has errors"),
    ],
)
def test_cudnn_accuses_no_device_where_healthy_ones_are_wrong(probes, monkeypatch, number, chip, mask, queries, why):
    """NVIDIA's own notes and open issues say where its attention errs; there the case is skipped with that reason."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: chip)
    refuses = partial(probes["exact_attention"].refuses, HOPPER)
    with fake(torch):
        said = refuses("CUDNN_ATTENTION", "bfloat16", mask, (1, 4, 2, queries, 64, 64))
        assert why in said
        assert bool(why) == bool(said)
        assert not refuses("FLASH_ATTENTION", "bfloat16", "none", (1, 4, 2, queries, 64, 64))


def test_a_problem_that_cudnn_cannot_plan_is_put_to_it_once(probes, monkeypatch):
    """Torch keeps the plan that failed, and the process dies of it the second time: another round asks the same."""
    asked = []
    monkeypatch.setattr(attention, "_UNPLANNED", {})

    def attention_of(query, key, value, **more):
        asked.append((query.shape, key.shape, more["is_causal"]))
        raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention_of)
    refuses = partial(probes["exact_attention"].refuses, HOPPER, "CUDNN_ATTENTION", "bfloat16")
    with fake(torch):
        for mask in ("none", "causal", "none", "causal"):
            assert "No valid execution plans built" in refuses(mask, (1, 4, 2, 8, 24, 64))
    assert len(asked) == len(set(asked)) == 2
    host = stack.cpu()
    for _ in range(2):
        assert probes["exact_attention"].refuses(host, "CUDNN_ATTENTION", "bfloat16", "none", (1, 4, 2, 8, 24, 64))
    assert len(asked) == 4  # of a processor nothing is kept: what it lacks, a GPU may have


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
@pytest.mark.parametrize("level", LEVELS)
def test_every_product_runs(probes, device, level):
    """Every pair of formats, content, kind of shape and layout, and the int8 products."""
    module = probes["exact_matmul"]
    labels = [products.label_of(*pair) for pair in module.format_pairs(device)]
    labels += [f"{left}>int32/{content}" for left, content in module.int8_pairs(device)]
    fresh, fixed = module.every_case(context(device, level, seed=5), dict.fromkeys(labels, SLOW))
    assert {c.name for c in fixed} == {c.name for c in module.fixed_cases(device)}
    seen = [{part.partition("@")[0] for part in case.name.split("/")} for case in fresh]
    for label in labels:
        assert any(label.split("/")[0] in parts for parts in seen)
    if level == "deep":
        for kind, layout in itertools.product(sizes.KINDS, products.LAYOUTS):
            assert any({kind, layout} <= parts for parts in seen)
    cases = [*fixed, *fresh]
    ran = rehearse_all(device, cases, lambda case: Question(case.build.func, *case.build.args, 1), size_of)
    assert ran == len(cases)
    gathered = {(c.product.source.name, c.product.layout): c.product for c in fresh if c.product}
    assert {layout for _, layout in gathered} == set(products.LAYOUTS) or level != "deep"
    for asked, product in gathered.items():
        if (asked, product.batch) not in REHEARSED:
            rehearse_gather(device, product)
            REHEARSED.add((asked, product.batch))


@pytest.mark.parametrize("pair", products.FORMAT_PAIRS, ids=lambda pair: products.label_of(*pair))
def test_a_product_is_written_where_it_is_told_to(pair):
    """New memory and a copy would take a part of the device's time in each product."""
    product = numeric_cases.product_case(HOPPER, *pair, "permute", "square", "nt", (64, 64, 128, 0)).product
    problem = build(product, 1)
    with fake(torch):
        operands = upload(problem.operands, HOPPER)
        first = products.multiply(*pair, operands, None)
        assert products.multiply(*pair, operands, first) is first


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
@pytest.mark.parametrize("level", LEVELS)
def test_every_integer_operation_runs(probes, device, level):
    """Every operation, with as many elements as the level has."""
    module = probes["exact_integer"]
    cases = [*module.every_case(context(device, level)), *module.fixed_cases(device)]
    ran = rehearse_all(device, cases, lambda case: Question(stretched, *case.build.args))
    assert ran == len(cases) == 2 * len(indexing.OPERATIONS)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
def test_what_rounds_nothing_is_shipped_as_characterised(probes, device):
    """Integer, int8 and index operations and permutations accuse from the first run; all else needs evidence."""
    integers, products = (probes[name].fixed_cases(device) for name in ("exact_integer", "exact_matmul"))
    assert all(case.characterised for case in integers)
    for case in products:
        assert case.characterised is (case.name.startswith("int8") or "/permute/" in case.name), case.name
    assert not any(case.characterised for _, case in probes["exact_attention"].every_case(context(device, "quick")))


@pytest.mark.parametrize(("value", "shipped"), [("1", False), ("0", True)])
def test_a_switch_that_the_environment_overrides_ships_nothing(probes, monkeypatch, value, shipped):
    """`worker.env` may turn TF32 on for every product: a healthy device is then wrong in float32 permutations."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    permutations = [c for c in probes["exact_matmul"].fixed_cases(HOPPER) if "/permute/" in c.name]
    assert permutations
    assert all(case.characterised is shipped for case in permutations)
    assert ("overrides" in stack.stack(HOPPER, "")) is not shipped
    cpu = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC", detail={"architecture": "x86_64"})
    assert is_characterised(cpu, "float32") is shipped


@pytest.mark.parametrize(("capability", "kept"), [("8.0", 22), ("9.0", 24), ("10.3", 24), ("11.0", 22), ("12.0", 22)])
def test_tensor_cores_that_nobody_measured_get_a_margin(capability, kept):
    """A product that a healthy unit rounds now and then would be met at first, and accuse it later."""
    device = replace(HOPPER, detail={"capability": capability})
    assert characterised.accumulator(device, "bfloat16").bits == kept
    assert characterised.accumulator(device, "float32").bits == 24


@pytest.mark.parametrize(
    ("source", "target", "batch", "kept"),
    [
        ("bfloat16", "bfloat16", 0, 24), ("bfloat16", "bfloat16", 4, 8), ("float16", "float16", 4, 11),
        ("bfloat16", "float32", 4, 24), ("float32", "float32", 4, 24), ("float8_e4m3fn", "bfloat16", 0, 8),
        ("float8_e4m3fn", "float32", 0, 13),
    ],
)  # fmt: skip
def test_sums_fit_the_result_where_torch_lets_cublas_share_them_out_in_its_format(source, target, batch, kept):
    """The switches against it hold for products of two 16-bit matrices, not for batches and scaled products."""
    case = numeric_cases.product_case(HOPPER, source, target, "dense", "batched", "nt", (64, 64, 128, batch))
    assert case.product.accumulator == kept


def test_ascend_rounds_no_operands_under_the_strict_switches(monkeypatch):
    """HF32 keeps 11 bits of a float32 operand. A torch_npu without the switch is recorded as such."""
    matmul = SimpleNamespace(allow_hf32=True)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(matmul=matmul), raising=False)
    with strict_switches() as record:
        assert matmul.allow_hf32 is False
    assert matmul.allow_hf32 is True
    assert (record["npu.matmul.allow_hf32"], record["npu.conv.allow_hf32"]) == ("False", "absent")


def stretched(name, n):
    """Return a problem of n elements, of the right shapes alone where making the golden would take a second."""
    small = indexing.build(name, min(n, 8192), 1)
    times = n // min(n, 8192)
    operands = tuple(t.repeat(times, *(1,) * (t.dim() - 1)) for t in small.operands)
    return replace(small, operands=operands, golden=small.golden.repeat(times, *(1,) * (small.golden.dim() - 1)))


@pytest.mark.parametrize("device", [HOPPER, MI300X], ids=lambda d: d.model)
def test_every_recorded_kernel_runs(device):
    """Operands, fresh uploads at their offsets, results, and the shapes of reference and bound."""
    recorder, ran = Recorder(Session(context(device, "quick")), ""), 0
    kernels = every_kernel(device)
    for kernel in kernels:
        ran += 1
        if (call_of(kernel.compute), kernel.name) in REHEARSED:
            continue  # its name has format and sizes: as on the device before
        REHEARSED.add((call_of(kernel.compute), kernel.name))
        with fake(torch):
            made = Made.__new__(Made)  # its fingerprint would read the operands
            made.kernel, made.operands = kernel, kernel.build(kernel.seed)
            operands = recorder._upload(made, 0)
            result = kernel.compute(*operands)
            assert result.device.type == "cuda"
            assert result.is_contiguous()
            form = form_of(result.dtype)
            for bound in kernel.judged(made.operands, form):
                assert (bound.shape, bound.dtype) == (result.cpu().shape, torch.float64), kernel.name
    assert ran == len(kernels) == len({k.name for k in kernels})


def test_every_inference_of_the_exact_canary_runs():
    """Every format, path, number of rows and kernel: deep has those of all levels."""
    module = importlib.import_module("probes.exact_canary")
    deep = module.every_inference(context(HOPPER, "deep"))
    assert {(i.form, i.path, i.rows, i.kernel) for i in deep} >= {
        (i.form, i.path, i.rows, i.kernel)
        for level in ("quick", "standard")
        for i in module.every_inference(context(HOPPER, level))
    }
    assert {i.path for i in deep} == {*cases.PATHS}
    built = {}
    # A kernel asks nothing of a format that the eager path does not, and one row is no other kernel.
    told_apart = [
        i for i in deep if (i.form == "bfloat16" or i.kernel == "eager") and (i.rows > 1 or i.path == "decode")
    ]
    for inference in [replace(i, steps=2) for i in told_apart]:  # all steps after the first are alike
        case = cases.case(HOPPER, inference, 1, module.MODELS)
        # The right answer takes longest; its shape is the same for all formats and kernels of a model.
        key = (inference.shape, inference.path, inference.rows, inference.kernel == "math")
        problem = built[key] = built.get(key) or case.build(0)
        *weights, tokens = problem.operands
        form = FORMATS[inference.form].dtype
        with fake(torch):
            result = case.compute(upload((*(w.to(form) for w in weights), tokens), HOPPER), None)
            assert (result.shape, result.dtype) == (problem.golden.shape, form)
            assert result.device.type == "cuda"
    assert len(deep) > len(built) > 4


def test_no_numeric_probe_is_left_out():
    """What is not rehearsed here has tests of its own: in test_NAME.py, or in tests/worker/memory, units or links.

    `model_canary` runs the user's own model through the same calls, and needs one: it has no cases of its own.
    """
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests/worker").rglob("test_*.py")}
    every = {p.stem: importlib.import_module(f"probes.{p.stem}") for p in Path(ROOT / "probes").glob("*.py")}
    numeric = {name for name, probe in every.items() if probe.SPEC.numeric}
    rehearsed = {"exact_attention", "exact_matmul", "exact_integer", "recorded_kernels", "exact_canary"}
    elsewhere = {"model_canary", "memory_sweep", "exact_units", "host_transfer", "collectives"}
    assert numeric - tested == rehearsed | elsewhere, "write tests/worker/numeric/test_NAME.py"
