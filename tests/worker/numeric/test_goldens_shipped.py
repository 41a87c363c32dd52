"""The digests that ship: complete for this machine, equal to what it builds, and recomputed the second way."""

import json

import pytest

from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.stack import cpu
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
