"""The digests that ship: complete for this machine, equal to what it builds, and recomputed the second way."""

import json
from dataclasses import replace

import pytest

from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import bits
from canaryd.worker.numeric.verify import FIXED_SEED

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

PROBES = ("exact_matmul", "exact_attention", "exact_integer")


def shipped(probes, name):
    return json.loads(probes[name].GOLDEN.read_text())


@pytest.mark.parametrize("name", PROBES)
def test_every_fixed_case_of_this_cpu_has_the_digest_that_was_shipped(probes, name):
    """What this machine builds from the fixed seed is what the package says it must be."""
    known = shipped(probes, name)
    cases = probes[name].fixed_cases(cpu())
    assert cases
    assert {case.name: digest(case.build(FIXED_SEED).golden) for case in cases} == {
        case.name: known[case.name] for case in cases
    }


@pytest.mark.parametrize("name", PROBES)
def test_the_file_holds_exactly_the_fixed_cases_of_all_backends(maker, probes, name):
    """No case lacks a digest, none is left over, and the file is sorted with one case to a line."""
    names = [case.name for case in maker.fixed_cases(name)]
    text = probes[name].GOLDEN.read_text()
    assert list(shipped(probes, name)) == sorted(names)
    assert text.count("\n") == len(names) + 2


@pytest.mark.parametrize("name", PROBES)
def test_a_sample_is_recomputed_the_second_way(maker, probes, name):
    """Plain integers confirm a spread of cases bit for bit, and give the digest that was shipped."""
    cases = list(maker.fixed_cases(name))
    for case in cases[:: max(1, len(cases) // 9)]:
        assert maker.confirm(name, case.name, case.build(FIXED_SEED)) == shipped(probes, name)[case.name]


@pytest.mark.parametrize("name", PROBES)
def test_the_recomputation_notices_one_bit(maker, probes, name):
    """One flipped bit in the golden, or in an operand, is not confirmed."""
    case = probes[name].fixed_cases(cpu())[-3]
    problem = case.build(FIXED_SEED)
    golden = problem.golden.clone()
    bits(golden).view(-1)[17] ^= 1
    with pytest.raises(maker.Wrong, match=f"{case.name}: 1 elements differ, first 17"):
        maker.confirm(name, case.name, replace(problem, golden=golden))
    struck = problem.operands[case.struck].clone()
    bits(struck).view(-1)[:] ^= 2  # every element: attention reads only the keys that somebody asks for
    operands = tuple(struck if i == case.struck else t for i, t in enumerate(problem.operands))
    with pytest.raises(maker.Wrong, match="differ"):
        maker.confirm(name, case.name, replace(problem, operands=operands))


def test_decoding_and_encoding_agree_with_torch(maker):
    """Every float16, bfloat16 and FP8 pattern decodes to torch's value; rounding to each result format is torch's."""
    for form in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, form)
        width = torch.zeros(1, dtype=dtype).element_size() * 8
        raw = torch.arange(1 << width).to(bits(torch.zeros(1, dtype=dtype)).dtype)
        values = raw.view(dtype).to(torch.float64)
        for pattern, value in list(zip(range(1 << width), values.tolist(), strict=True))[::7]:
            try:
                m, e = maker.decode(pattern, form)
            except maker.Wrong:
                assert not -float("inf") < value < float("inf")
            else:
                assert m * 2.0**e == value
    for number in (1, 3, 255, 257, 259, 2049, 2051, (1 << 24) + 1, (1 << 24) + 3, 65_519, -131_071, (1 << 53) - 1):
        for form in ("float64", "float32", "bfloat16", "float16"):
            made = torch.tensor([number], dtype=torch.float64).to(getattr(torch, form))
            if bool(torch.isfinite(made)):
                assert maker.encode(number, 0, form) == maker.raw_of(made)[0]
            else:
                with pytest.raises(maker.Wrong, match="too large"):
                    maker.encode(number, 0, form)
