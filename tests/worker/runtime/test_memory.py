"""How much memory of a device is free and how much a run may take, where torch tells less than CUDA does."""

from types import SimpleNamespace

import pytest

from canaryd.model import Device
from canaryd.probe import Context, Skip
from canaryd.worker import limits
from canaryd.worker.canary import hugging_face
from canaryd.worker.memory import sweep
from canaryd.worker.numeric import tensors
from canaryd.worker.runtime.torch import RUNTIME

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

GIB = 1 << 30
XPU = Device(uuid="XPU-at-host-0", backend="xpu", index=0, torch_index=0, model="Arc 140V", weak_identity=True)
SILENT = (
    "The device (Intel(R) Graphics [0x64a0]) doesn't support querying the available free memory. You can file an issue"
    " at https://github.com/pytorch/pytorch/issues to help us prioritize its implementation."
)
"""What torch 2.7 to 2.14 say of integrated GPUs."""


@pytest.fixture
def xpu(monkeypatch):
    """torch.xpu of a machine with one device of 16 GiB, with `answers` in place of the usual ones; what was limited."""
    limited = []

    def make(*, limits_memory=True, error=None):
        def mem_get_info(device):
            if error is not None:
                raise error
            return 6 * GIB, 16 * GIB

        module = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_properties=lambda device: SimpleNamespace(total_memory=16 * GIB),
            mem_get_info=mem_get_info,
            memory_reserved=lambda device: GIB,
        )
        if limits_memory:
            module.set_per_process_memory_fraction = lambda fraction, device: limited.append(fraction)
        monkeypatch.setattr(torch, "xpu", module)
        tensors._index_now.cache_clear()
        return limited

    yield make
    tensors._index_now.cache_clear()


def test_a_device_that_tells_its_memory(xpu):
    """Free is also what torch has kept; the cap is a share of all."""
    limited = xpu()
    assert RUNTIME.memory(XPU) == (7 * GIB, 16 * GIB)
    limits.make_room(XPU, {"memory": GIB, "free": GIB, "small": 0})
    assert limited == [1 / 16]
    with pytest.raises(Skip, match="7168 of 16384 MiB"):
        limits.make_room(XPU, {"memory": 7 * GIB, "free": GIB, "small": 0})


def test_a_device_that_tells_no_free_memory_is_tested_nevertheless(xpu):
    """Integrated GPUs of Intel raise: every run beside a server and every sweep of memory ended with an error."""
    limited = xpu(error=RuntimeError(SILENT))
    assert RUNTIME.memory(XPU) == (None, None)
    limits.make_room(XPU, {"memory": GIB, "free": GIB, "small": 0})
    assert limited == [1 / 16]
    assert sweep._free(Context(device=XPU, level="deep", seed=1, budget=1.0)) == sweep.UNREPORTED
    with pytest.raises(Skip, match="does not report the free memory"):
        hugging_face.device_memory(XPU)


def test_a_torch_that_cannot_limit_memory_tests_without_a_limit(xpu):
    """The limit came to torch.xpu later than the question for free memory."""
    xpu(limits_memory=False)
    limits.make_room(XPU, {"memory": GIB, "free": GIB, "small": 0})


def test_a_lost_device_is_no_device_without_an_answer(xpu):
    """Only a refusal passes for one."""
    xpu(error=RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"))
    with pytest.raises(RuntimeError, match="DEVICE_LOST"):
        RUNTIME.memory(XPU)
