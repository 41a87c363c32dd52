"""The software under test: what may choose another kernel belongs to it."""

import ctypes
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from canaryd.engine.inventory import merge
from canaryd.model import Device
from canaryd.supervisor.protocol import Description, Listing
from canaryd.worker.numeric import tensors
from canaryd.worker.numeric.stack import CHOOSERS, cpu, discover, library_version, stack
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
def test_torch_is_imported_once_and_never_searched_for_garbage():
    """Its hundred thousands of objects stay, and the garbage of a run is collected as ever."""
    pytest.importorskip("torch")
    code = "import gc; import canaryd.worker.numeric.tensors; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


@pytest.mark.torch
def test_the_cores_that_a_container_has_just_now_are_no_part_of_a_gpus_stack(monkeypatch):
    """A kubelet with static CPU management changes them whenever another pod comes or goes; a GPU's kernels do not."""
    torch = pytest.importorskip("torch")
    gpu, host = stack(CUDA, ""), stack(cpu(), "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1234)
    assert stack(CUDA, "") == gpu
    assert stack(cpu(), "") == {**host, "threads": "1234"}


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


@pytest.mark.torch
@pytest.mark.parametrize("native", [False, True])
def test_a_package_with_which_torch_writes_kernels_makes_another_stack(monkeypatch, tmp_path, native):
    """Torch 2.13 writes RMS norm and topk anew once CuTe DSL is there; a vLLM brings it. Older torches never do."""
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "_native", raising=False)
    if native:
        monkeypatch.setattr(torch, "_native", SimpleNamespace(), raising=False)
    gpu, host = stack(CUDA, ""), stack(cpu(), "")
    told = tmp_path / "nvidia_cutlass_dsl-4.4.77.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.4.77\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ("nvidia-cutlass-dsl=4.4.77" in stack(CUDA, "").get("kernel_packages", "")) is native
    assert (stack(CUDA, "") != gpu) is native
    assert stack(cpu(), "") == host


@pytest.mark.torch
@pytest.mark.parametrize(("told", "wanted"), [({}, None), ({"pci_domain_id": 1, "pci_bus_id": 101}, "0001:65:00.0")])
def test_a_place_that_torch_does_not_tell_is_not_made_up(monkeypatch, told, wanted):
    """Every GPU was at 0000:00:00.0, which stood in the dossier where NVML did not answer."""
    torch = pytest.importorskip("torch")
    props = SimpleNamespace(
        uuid="5d1a0b3e-0000-4000-8000-00000000beef", name="H100", total_memory=1, major=9, minor=0,
        multi_processor_count=132, **told,
    )  # fmt: skip
    answers = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": lambda _: props}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    (gpu,) = [d for d in discover()[0] if d.backend == "cuda"]
    assert gpu.detail.get("bus_id") == wanted


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
def test_a_device_with_a_uuid_of_its_own_is_found_by_it(monkeypatch):
    """Also where the vendor's driver gives no serial: its number may have moved, and another card has it now."""
    first, _ = lists(monkeypatch, (ONE, 100), (OTHER, 101))
    lists(monkeypatch, (OTHER, 101), (ONE, 100))
    assert torch_device(replace(first, backend="rocm", weak_identity=True)).index == 1


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
