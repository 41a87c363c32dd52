"""The software under test: what may choose another kernel belongs to it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from canaryd.model import Device
from canaryd.worker.numeric.stack import CHOOSERS, library_version, stack

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


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_version_of_a_loaded_library_is_its_own(tmp_path):
    """CuBLAS is upgraded without torch; the library itself says which one it is."""
    library = tmp_path / "a b" / "libcublas.so.12"
    library.parent.mkdir()
    source = tmp_path / "cublas.c"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    maps = Path("/proc/self/maps").read_text()
    assert library_version(maps, "libcublas.so", "cublasGetProperty") == "12.8.4"
    assert library_version(maps, "libcublas.so", "cublasGetVersion") == "not given"
    assert library_version("", "libcublas.so", "cublasGetProperty") == "not given"
    assert library_version(f"7f00 r 0 0 1 {tmp_path}/libcublas.so.13", "libcublas.so", "x") == "not given"
    del loaded
