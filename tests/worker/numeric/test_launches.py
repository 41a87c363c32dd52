"""Which kernels a case runs: asked of torch's profiler once per software, whatever becomes of the worker."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest

from canaryd.probe import Context
from canaryd.worker.numeric import launches
from canaryd.worker.numeric.launches import Launches, launched
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
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


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_kernels_of_a_call_are_named_or_the_reason_is():
    """A CPU runs none on a device."""
    names, why = launched(cpu(), partial(torch.add, torch.ones(3), 1.0))
    assert names == ""
    assert why.startswith("torch's profiler")
