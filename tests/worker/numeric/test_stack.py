"""The software under test: what may choose another kernel belongs to it."""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from canaryd.engine.inventory import merge
from canaryd.model import Device
from canaryd.supervisor.protocol import Description, Listing
from canaryd.worker.numeric import tensors
from canaryd.worker.numeric.stack import CHOOSERS, discover, library_version, stack, surroundings
from canaryd.worker.numeric.tensors import torch_device

CUDA = Device(uuid="GPU-1", backend="cuda", index=0, model="Newcomer 1")
SOURCE = "int cublasGetProperty(int part, int *value) { *value = (int[]){12, 8, 4}[part]; return 0; }"


@pytest.mark.torch
@pytest.mark.parametrize("name", CHOOSERS)
def test_a_variable_that_chooses_kernels_makes_another_stack(monkeypatch, name):
    """What was met without it vouches for nothing with it; without any, the stack names none."""
    pytest.importorskip("torch")
    monkeypatch.delenv(name, raising=False)
    usual = stack(CUDA, "")
    assert "kernel_choice" not in usual
    monkeypatch.setenv(name, "7")
    assert stack(CUDA, "") == {**usual, "kernel_choice": f"{name}=7"}


@pytest.mark.torch
def test_confidential_computing_makes_another_stack():
    """It encrypts copies: their speed is compared with the like alone. Without it the stack is as it was."""
    pytest.importorskip("torch")
    usual = stack(CUDA, "")
    for state in ("on", "on, nvle", "off, protected_pcie"):
        device = replace(CUDA, detail={"confidential_computing": state})
        assert stack(device, "") == {**usual, "confidential_computing": state}
        assert surroundings(device) == {**surroundings(CUDA), "confidential_computing": state}
    assert stack(replace(CUDA, detail={"confidential_computing": "off"}), "") == usual


@pytest.mark.torch
def test_a_cudnn_that_does_not_fit_torch_leaves_no_run_without_its_stack(monkeypatch):
    """Torch raises at a process's first question alone: the first run of each worker had no stack, the others had."""
    torch = pytest.importorskip("torch")
    known = []

    def version():
        if not known:
            known.append(90701)
            raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 10, 2)")
        return known[0]

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    first = stack(CUDA, "")
    assert first["cudnn"] == "90701"
    assert stack(CUDA, "") == first


ONE, OTHER = "5d1a0b3e-0000-4000-8000-00000000beef", "5d1a0b3e-0000-4000-8000-00000000cafe"


def lists(monkeypatch, *told):
    """Let torch list GPUs with these uuids and buses."""
    torch = pytest.importorskip("torch")
    tensors._index_now.cache_clear()
    every = [
        SimpleNamespace(
            uuid=uuid, name="MI300X", total_memory=1, major=9, minor=4, multi_processor_count=38, pci_domain_id=0,
            pci_bus_id=bus,
        )
        for uuid, bus in told
    ]  # fmt: skip
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(every),
        "get_device_properties": lambda index: every[index],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return [d for d in discover()[0] if d.backend == "cuda"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("told", "named"),
    [
        (
            [(ONE, 100), (OTHER, 101), (OTHER, 101), (OTHER, 102)],
            [f"GPU-{ONE}", "-0000:65:00.0", "-0000:65:00.0-2", "-0000:66:00.0"],
        ),
        ([("", 100), ("", 101), ("", 101)], ["-0000:64:00.0", "-0000:65:00.0", "-0000:65:00.0-2"]),
    ],
)
def test_devices_with_one_uuid_are_told_apart(monkeypatch, told, named):
    """Devices are kept by uuid: of partitions with that of their card, one was tested. Others keep their names."""
    found = lists(monkeypatch, *told)
    for device, name in zip(found, named, strict=True):
        assert device.uuid.endswith(name)
        assert device.weak_identity == (not name.startswith("GPU-"))
    assert [torch_device(d).index for d in found] == [*range(len(told))]


@pytest.mark.torch
def test_partitions_of_a_card_that_the_vendor_lists_are_found(monkeypatch):
    """The vendor's card is the first of them, whatever its uuid; the others have numbers of their own."""
    found = [replace(d, backend="rocm") for d in lists(monkeypatch, (OTHER, 101), (OTHER, 101), (ONE, 102))]
    cards = [
        Device(uuid=uuid, backend="rocm", index=n, model="MI300X", detail={"bus_id": f"0000:{65 + n}:00.0"})
        for n, uuid in enumerate(("GPU-00c0ffee", "GPU-0badcafe"))
    ]
    described = Description(devices=tuple(found), stack={}, torch="2.13.0")
    listed = merge(described, Listing(devices={"amd": tuple(cards)}), {}).devices
    assert sorted(d.name for d in listed) == ["rocm:0", "rocm:1", "rocm:2"]
    assert sorted(torch_device(d).index for d in listed) == [0, 1, 2]
    assert [(d.index, torch_device(d).index) for d in listed if d.uuid in ("GPU-00c0ffee", f"GPU-{ONE}")] == [
        (0, 0),
        (1, 2),
    ]


@pytest.mark.torch
def test_torch_says_why_it_shows_no_gpu(monkeypatch):
    """What `is_available` turns into a bare False, as an NVLink fabric that is not ready."""
    torch = pytest.importorskip("torch")

    def init():
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    told = discover()[1]
    assert told["no_cuda"].endswith("Error 802: system not yet initialized")
    assert told["no_cuda_code"] == "802"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_version_of_a_loaded_library_is_its_own(tmp_path):
    """CuBLAS is upgraded without torch; the library itself says which one it is."""
    library = tmp_path / "a b" / "libcublas.so.12"
    library.parent.mkdir()
    source = tmp_path / "cublas.c"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    lines = Path("/proc/self/maps").read_text().splitlines(keepends=True)
    maps = "".join(line for line in lines if str(tmp_path) in line)  # a torch for CUDA has loaded its own
    assert library_version(maps, "libcublas.so", "cublasGetProperty") == "12.8.4"
    assert library_version(maps, "libcublas.so", "cublasGetVersion") == "not given"
    assert library_version("", "libcublas.so", "cublasGetProperty") == "not given"
    assert library_version(f"7f00 r 0 0 1 {tmp_path}/libcublas.so.13", "libcublas.so", "x") == "not given"
    del loaded
