"""Kernels that take some problems and not others: what one refuses is skipped with its reason, and ends no probe."""

import re
from dataclasses import replace
from functools import partial

import pytest

from canaryd.facts import Comparison, Skipped
from canaryd.probe import Context, NoCase, Skip
from canaryd.worker.numeric import attention, operands, verify
from canaryd.worker.numeric import cases as numeric_cases
from canaryd.worker.numeric import tensors as numeric_tensors
from canaryd.worker.numeric.integers import significant_bits
from canaryd.worker.numeric.reproducer import exhibit
from canaryd.worker.numeric.serving_kernels import every_kernel
from canaryd.worker.numeric.stack import cpu, float8
from canaryd.worker.numeric.tensors import FORMATS, bits
from tests.worker.numeric.cuda import AMPERE, HOPPER, MI300X, attention_rules

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*Triggered internally")]


@pytest.fixture
def cuda_rules(monkeypatch):
    """Refuse on this CPU what CUDA's attention kernels refuse, in their words, and compute the rest with its own."""
    enabled = []

    class Enable:
        def __init__(self, kernel):
            self.kernel = kernel

        def __enter__(self):
            enabled.append(self.kernel.name)

        def __exit__(self, *_):
            enabled.pop()

    rules = attention_rules(torch, lambda: enabled[-1] if enabled else "")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", rules)
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", Enable)


def context(*cases, level="quick", **more):
    return Context(device=cpu(), level=level, seed=7, budget=0.01, cases=cases, **more)


def test_a_flash_kernel_is_tested_with_a_causal_mask_where_it_takes_one(probes, cuda_rules):
    """Serving's prefill is causal with as many queries as keys; only other lengths are refused, with torch's reason."""
    module = probes["exact_attention"]
    facts = list(
        module.run(context("bfloat16/onehot/prefill/flash_attention", "bfloat16/onehot/decode/flash_attention"))
    )
    ran = {f.case.partition("@")[0] for f in facts if isinstance(f, Comparison)}
    assert "bfloat16/onehot/prefill/flash_attention/causal" in ran
    assert "bfloat16/onehot/decode/flash_attention/none" in ran
    refused = {f.case.partition("@")[0]: f.reason for f in facts if isinstance(f, Skipped)}
    causal = refused["bfloat16/onehot/decode/flash_attention/causal"]
    assert "does not support the is_causal flag when seqlen_q != seqlen_k" in causal
    assert "non-null attn_mask" in refused["bfloat16/onehot/prefill/flash_attention/bool"]
    assert not any(f.wrong for f in facts if isinstance(f, Comparison))


def test_a_run_whose_every_case_is_refused_at_its_turn_is_skipped(probes, cuda_rules):
    """With the reason, for each case and for the run: it has shown nothing."""
    facts = []
    with pytest.raises(Skip, match=r"supports no case that was asked for: .*non-null attn_mask"):
        facts += probes["exact_attention"].run(context("bfloat16/rising/prefill/flash_attention/bool"))
    (skipped,) = (f for f in facts if isinstance(f, Skipped))
    assert skipped.case.startswith("bfloat16/rising/prefill/flash_attention/bool@")
    assert "non-null attn_mask" in skipped.reason


@pytest.mark.parametrize(
    ("probe", "asked", "why"),
    [
        ("exact_matmul", "float8_e4m3fn-mxfp8>bfloat16", "are for NVIDIA GPUs alone"),
        ("exact_matmul", "float4_e2m1fn-nvfp4>float32/dense/decode/nt", "are for NVIDIA GPUs alone"),
        ("exact_matmul", "tfloat32>float32/dense", "TF32 is a format of NVIDIA's tensor cores"),
        ("exact_attention", "float64/onehot/fixed/flash_attention", "dtype: {Half, BFloat16}"),
    ],
)
def test_a_requested_format_that_the_device_lacks_is_refused_by_its_reason(probes, cuda_rules, probe, asked, why):
    """It is no mistyped name: the run is skipped with the request and the device's reason, and names no other case."""
    with pytest.raises(Skip, match=f"supports no {re.escape(asked)}: .*{re.escape(why)}") as skipped:
        list(probes[probe].run(context(asked)))
    assert not isinstance(skipped.value, NoCase)


def test_no_refusing_kernel_ends_the_attention_probe(probes, cuda_rules):
    """Formats that a kernel lacks are skipped as one each; the rest runs, cuDNN's kernel in no fixed order."""
    facts = list(probes["exact_attention"].run(context()))
    refused = {f.case: f.reason for f in facts if isinstance(f, Skipped) and "budget" not in f.reason}
    assert {"flash_attention/float64", "flash_attention/float32", "efficient_attention/float64"} <= set(refused)
    assert "dtype: {Half, BFloat16}" in refused["flash_attention/float32"]
    ran = [f.case.partition("@")[0].split("/") for f in facts if isinstance(f, Comparison)]
    assert {words[3] for words in ran} == {"math", "flash_attention", "efficient_attention", "cudnn_attention"}
    assert {words[0] for words in ran if words[3] == "cudnn_attention"} == {"bfloat16", "float16"}
    assert [f.name for f in facts if getattr(f, "name", "") == "golden_fingerprint"]


def test_a_kernel_that_larger_products_lack_ends_no_run(probes, monkeypatch):
    """A tiny product may run where the one that measures speed has no kernel: that format is skipped by its reason."""
    real = torch.matmul

    def larger_refused(a, b, **more):
        if a.dtype is torch.float64 and a.shape[-2] >= 192:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
        return real(a, b, **more)

    monkeypatch.setattr(torch, "matmul", larger_refused)
    facts = list(probes["exact_matmul"].run(context("float32/dense/decode/nt", "float64/dense/decode/nt")))
    assert any(isinstance(f, Comparison) and f.case.startswith("float32/") for f in facts)
    refused = {f.case: f.reason for f in facts if isinstance(f, Skipped)}
    assert "no kernel image is available" in refused["float64"]


def problem_of_a_product():
    product = operands.Product("dense", FORMATS["float32"], FORMATS["float32"], 24, 8, 8, 16)
    return partial(operands.build, product)


def case(name, compute=None, **more):
    return numeric_cases.Case(name, problem_of_a_product(), compute or (lambda ab, out: torch.matmul(*ab)), **more)


def refuse(ab, out):
    raise RuntimeError("self.size(0) needs to be greater than 16, but got 8")


def test_a_case_that_is_refused_is_left_out_of_the_fingerprint():
    """It is skipped with its reason; the fingerprint is made of the fixed cases that this device takes."""
    facts = list(
        verify.verify_all(context(), [case("a@1")], [case("b@1", fixed=True), case("c@1", refuse, fixed=True)], None)
    )
    assert [f.case for f in facts if isinstance(f, Skipped)] == ["c@1"]
    assert {f.case for f in facts if isinstance(f, Comparison)} == {"a@1", "b@1"}
    assert [f for f in facts if getattr(f, "name", "") == "golden_fingerprint"]


def test_a_refusal_after_a_wrong_result_loses_nothing():
    """Once the device has computed a case, no words of it make a skipped case: the mismatch is told."""
    uploads = []

    def late(ab, out):
        if out is None:  # the first call of an upload; how many follow is a matter of time
            uploads.append(1)
            if len(uploads) > 1:
                raise RuntimeError("mat2 must be contiguous")
        return bits(torch.matmul(*ab)).bitwise_xor(1).view(torch.float32)

    facts = list(verify.verify_all(context(), [case("a@1", late)], [], None))
    assert any(isinstance(f, Comparison) and f.wrong for f in facts)
    assert not [f for f in facts if isinstance(f, Skipped)]


def test_memory_efficient_float32_meets_no_more_bits_than_it_carries(probes):
    """On an accelerator it multiplies by three TF32 products: values of at most 20 bits, under a name of their own."""
    module = probes["exact_attention"]
    for form, kernel, device, wanted in (
        ("float32", "EFFICIENT_ATTENTION", HOPPER, 20),
        ("float32", "EFFICIENT_ATTENTION", MI300X, 20),
        ("float32", "EFFICIENT_ATTENTION", cpu(), 24),
        ("float32", "MATH", HOPPER, 24),
        ("bfloat16", "EFFICIENT_ATTENTION", HOPPER, 8),
        ("float64", "MATH", HOPPER, 53),
    ):
        for content in attention.CONTENTS:
            made = module.attention_case(device, kernel, form, content, "none", "fixed", module.FIXED)
            values = made.build(3).operands[2].to(torch.float64).to(torch.int64)  # they are integers
            widest = significant_bits(values)
            assert widest <= wanted
            assert ("fixed20" in made.name) is (wanted == 20)
            again = exhibit("exact_attention", made.name, verify.FIXED_SEED, device).problem
            assert numeric_tensors.host_same_bits(again.golden, made.build(verify.FIXED_SEED).golden)


def test_fp8_is_of_the_kind_that_the_device_multiplies(probes):
    """AMD's MI300 family has the fnuz kind, everything else the OCP's."""
    assert float8(MI300X, "float8_e4m3fn") == "float8_e4m3fnuz"
    assert float8(MI300X, "float8_e5m2") == "float8_e5m2fnuz"
    assert float8(MI300X, "bfloat16") == "bfloat16"
    newer = replace(MI300X, detail={"capability": "9.5"})
    for device in (HOPPER, AMPERE, cpu(), newer):
        assert float8(device, "float8_e4m3fn") == "float8_e4m3fn"
    sources = {source for source, _ in probes["exact_matmul"].format_pairs(MI300X)}
    assert {s for s in sources if s.startswith("float8")} == {"float8_e4m3fnuz", "float8_e5m2fnuz"}
    recorded = {k.dtype for k in every_kernel(MI300X) if k.kind == "fp8"}
    assert recorded == {"float8_e4m3fnuz", "float8_e5m2fnuz"}
    for kernel in (k for k in every_kernel(MI300X) if k.kind == "fp8"):
        x, w, *_ = kernel.build(kernel.seed)
        assert bool(torch.isfinite(x.to(torch.float32)).all())
        assert w.dtype == torch.float8_e4m3fnuz


@pytest.mark.parametrize(
    ("version", "device", "fits"),
    [
        ("2.5.1+cu124", HOPPER, False), ("2.6.0", HOPPER, True), ("2.5.1+rocm6.2", MI300X, False),
        ("2.10.0a0+git1", HOPPER, True), ("2.5.1", cpu(), False), ("2.6.0+cpu", cpu(), True), ("1.13.1", cpu(), False),
    ],
)  # fmt: skip
def test_a_torch_that_is_too_old_is_named_in_one_sentence(monkeypatch, version, device, fits):
    """The probe is skipped with the version that is there and the one that is needed."""
    monkeypatch.setattr(torch, "__version__", version)
    numeric_tensors.need_version.cache_clear()
    try:
        if fits:
            numeric_tensors.need_version(device.backend)
            return
        oldest = ".".join(map(str, numeric_tensors.OLDEST))
        with pytest.raises(Skip) as skip:
            numeric_tensors.torch_device(device)
        assert str(skip.value) == (
            f"torch {version} is too old for {device.backend}: point worker.python at {oldest} or newer"
        )
    finally:
        numeric_tensors.need_version.cache_clear()
