"""Which kernels a case runs: asked of torch's profiler once per software, whatever becomes of the worker."""

import contextlib
import sys
from functools import partial
from subprocess import run
from types import SimpleNamespace

import pytest

from canaryd.probe import Context
from canaryd.worker.numeric import launches
from canaryd.worker.numeric.launches import Launches, launched
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from tests.command import ROOT
from tests.worker.numeric.cuda import HOPPER, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


@pytest.fixture
def asked(monkeypatch):
    """A profiler that names the kernel that a call appends, on a machine with one CUDA device; what it was asked."""
    stand_in(monkeypatch, torch)
    seen = []

    @contextlib.contextmanager
    def profile(*, use_cpu, use_device, use_kineto):
        assert (use_cpu, use_device, use_kineto) == (False, "cuda", True)
        found, begun = [], len(seen)
        yield SimpleNamespace(function_events=found)
        found += [SimpleNamespace(name=name, device_type="DeviceType.CUDA") for name in seen[begun:] if name]

    monkeypatch.setattr(torch.autograd.profiler, "profile", profile)
    return seen


def worker(monkeypatch, memory, device=HOPPER):
    """The launches of a new worker."""
    monkeypatch.setattr(launches, "_IN_PROCESS", {})
    return Launches(Session(Context(device=device, level="quick", seed=1, budget=1.0, memory=str(memory))))


def test_each_case_is_asked_once_per_stack(monkeypatch, tmp_path, asked):
    """Another worker knows what the first one learnt, until the software changes."""
    first = worker(monkeypatch, tmp_path)
    for case, kernel in (("gemm", "sm90_xmma"), ("softmax", "vectorised"), ("gemm", "sm90_xmma")):
        first.ask(case, partial(asked.append, kernel))
    first.keep()
    assert asked == ["sm90_xmma", "sm90_xmma", "vectorised", "vectorised"]
    second = worker(monkeypatch, tmp_path)
    second.ask("gemm", partial(asked.append, "other"))
    assert (len(asked), second.known) == (4, first.known)
    assert second.known["gemm"].endswith(" sm90_xmma")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1")
    third = worker(monkeypatch, tmp_path)
    third.ask("gemm", partial(asked.append, "sm90_cutlass"))
    assert third.known["gemm"].endswith(" sm90_cutlass")


def test_what_could_not_be_learnt_is_asked_again(monkeypatch, tmp_path, asked):
    """Once per worker: a profiler that was in use may be free later. A damaged file is no answer either."""
    first = worker(monkeypatch, tmp_path)
    for _ in range(2):
        first.ask("gemm", partial(asked.append, ""))
    first.keep()
    assert (len(asked), first.unnamed) == (2, "torch's profiler lists no kernel of the call")
    (file,) = tmp_path.iterdir()
    for content in (file.read_text(), "{", '{"stack": 1}'):
        file.write_text(content)
        again = worker(monkeypatch, tmp_path)
        again.ask("gemm", partial(asked.append, "sm90_xmma"))
        assert again.known["gemm"].endswith(" sm90_xmma")


def test_a_profiler_that_loses_kernels_names_none(monkeypatch, tmp_path, asked):
    """CUPTI of CUDA 12.6 to 13.0 loses the first of a session: half a list would make two equal GPUs differ."""
    first = worker(monkeypatch, tmp_path)
    listed = iter(("", "sm90_xmma"))
    first.ask("gemm", lambda: asked.append(next(listed)))
    assert (first.known["gemm"], first.unnamed) == ("", "torch's profiler lost kernels of the call")


def test_without_a_directory_a_process_asks_once(monkeypatch, asked):
    """As a check without a state directory does."""
    monkeypatch.setattr(launches, "_IN_PROCESS", {})
    context = Context(device=HOPPER, level="quick", seed=1, budget=1.0)
    for _ in range(2):
        found = Launches(Session(context))
        found.ask("gemm", partial(asked.append, "sm90_xmma"))
        found.keep()
    assert asked == ["sm90_xmma"] * 2


def test_a_processor_is_not_asked(monkeypatch, tmp_path):
    """Its kernels are not launched on a device."""
    found = worker(monkeypatch, tmp_path, cpu())
    found.ask("gemm", partial(pytest.fail, "asked"))
    assert found.known == {}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_kernels_of_a_call_are_named_or_the_reason_is():
    """A CPU runs none on a device."""
    names, why = launched(cpu(), partial(torch.add, torch.ones(3), 1.0))
    assert names == ""
    assert why.startswith("torch's profiler")


PROFILE_THE_PROCESSOR = """
import functools, sys, torch
from canaryd.worker.numeric.launches import launched
from canaryd.worker.numeric.stack import cpu
profile = torch.autograd.profiler.profile
seen = []
def of_the_processor(*, use_cpu, use_device, **more):
    seen.append(profile(use_cpu=True, use_device=None, **more))
    return seen[0]
torch.autograd.profiler.profile = of_the_processor
print(launched(cpu(), functools.partial(torch.add, torch.ones(3), 1.0)))
print([event.name for event in seen[0].function_events])
print(sorted({name.partition(".")[2].partition(".")[0] for name in sys.modules} & {"_dynamo", "_inductor"}))
"""
"""Torch's profiler from start to end, of the processor instead of a GPU; then what of torch's compiler is loaded."""


def test_asking_for_kernels_does_not_load_torchs_compiler():
    """Its import takes most of what the kernels of a quick run take to be learnt."""
    answer = run([sys.executable, "-c", PROFILE_THE_PROCESSOR], capture_output=True, text=True, check=True, cwd=ROOT)
    kernels, operators, compiler = answer.stdout.splitlines()[-3:]
    assert kernels == str(("", "torch's profiler lists no kernel of the call"))
    assert operators.count("aten::add") == 2
    assert compiler == "[]"
