"""The kernels of each class of products: named once, and told where another one served the class before."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from canaryd_lab.observation import Seen

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


def named(device, memory=""):
    """Return the observations of the part by name."""
    from canaryd_lab.worker.characterise.bench import Bench
    from canaryd_lab.worker.characterise.kernels import kernels

    bench = Bench(device, 600.0, memory=str(memory))
    kernels(bench)
    return {o.name: o for o in bench.seen}


def test_a_processor_has_no_names():
    """It is said once, and nothing is computed."""
    from canaryd.worker.numeric.stack import cpu

    assert [(name, o.seen) for name, o in named(cpu()).items()] == [("kernels", Seen.NOT_OFFERED)]


@pytest.fixture
def served(monkeypatch):
    """A list with the name of the one kernel that the profiler's stand-in names; products run on fake CUDA tensors."""
    from canaryd_lab.worker.characterise import kernels

    from tests.worker.numeric.cuda import fake, stand_in

    multiply = kernels._named

    def multiply_fakes(*of):
        with fake(torch):
            return multiply(*of)

    monkeypatch.setattr(kernels, "_named", multiply_fakes)

    stand_in(monkeypatch, torch)
    name = ["nvjet_sm90_a"]

    @contextlib.contextmanager
    def profile(**_):
        found = []
        yield SimpleNamespace(function_events=found)
        found += [SimpleNamespace(name=name[0], device_type="DeviceType.CUDA")] * 2

    monkeypatch.setattr(torch.autograd.profiler, "profile", profile)
    return name


def on_gpu(memory):
    """Return the observations of an H100."""
    from tests.worker.numeric.cuda import HOPPER

    return named(replace(HOPPER, detail={**HOPPER.detail, "multiprocessors": "132"}), memory)


def test_every_class_is_named(served, tmp_path):
    """Aligned and ragged, in every format and layout, with the sizes of serving."""
    found = on_gpu(tmp_path / "state/memory")
    some = {"bfloat16/square/nn", "bfloat16/ragged/tt", "float8_e4m3fn>bfloat16/square/nt", "int8>int32/square/nt"}
    assert some <= set(found)
    assert {o.seen for o in found.values()} == {Seen.MEASURED}
    assert {str(o.values["kernel"]).partition(" ")[2] for o in found.values()} == set(served)
    assert not any(int(n) % 64 for n in str(found["bfloat16/square/nn"].values["sizes"]).split("x"))


def test_a_change_of_the_kernel_within_a_class_is_said(served, tmp_path):
    """Against what the device had the last time, whatever changed in between."""
    on_gpu(tmp_path / "state/memory")
    assert not any("before" in o.values for o in on_gpu(tmp_path / "state/memory").values())
    served[0] = "nvjet_sm90_b"
    changed = on_gpu(tmp_path / "state/memory")["bfloat16/square/nn"]
    assert str(changed.values["before"]).endswith(" nvjet_sm90_a")
    assert changed.detail.startswith("another kernel than before")
