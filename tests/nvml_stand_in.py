"""A machine with NVIDIA GPUs, as far as NVML tells: `tests/nvml/nvml.c`, compiled once, and what it answers from.

    machine = StandIn(tmp_path)                            # 8 healthy GPUs
    machine.set(3, "temperature", 91)                      # seen by running processes at their next call
    machine.fail(3, "nvmlDeviceGetName", 999)
    machine.hang(3, "nvmlDeviceGetPowerUsage")
    subprocess.run([...], env=os.environ | machine.environment)

The loader looks for the library before a process's first instruction, so only a new process sees the machine. The keys
are those of `defaults` in nvml.c.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvml/nvml.c"
NAME = "libnvidia-ml.so.1"


@functools.cache
def _compiled() -> Path | None:
    """Return the directory that holds the library, None where there is no C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    directory = Path(tempfile.mkdtemp(prefix="canaryd-nvml-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}"]
    subprocess.run([compiler, *options, "-o", str(directory / NAME), str(SOURCE)], check=True)
    return directory


class StandIn:
    """One machine. A GPU is named by its number, "3/0" is the first MIG instance of GPU 3, "*" all, None the driver.

    At most 16 GPUs.
    """

    def __init__(self, directory: Path, gpus: int = 8) -> None:
        library = _compiled()
        if library is None:
            pytest.skip("no C compiler here: the stand-in for NVML cannot be built")
        self.library = library / NAME
        self.scenario = directory / "nvml.txt"
        self.handle = directory / "nvidiactl"
        """What the library holds open as long as it is in use, as the real one does /dev/nvidiactl."""
        self.uuids = [f"GPU-00000000-0000-4000-8000-00000000000{gpu:x}" for gpu in range(gpus)]
        self._lines: dict[str, str] = {}
        self.set(None, "count", gpus)

    def set(self, gpu: int | str | None, key: str, value: object) -> None:
        """Say what a key is from now on."""
        self._lines[key if gpu is None else f"{gpu}.{key}"] = str(value)
        self._write()

    def unset(self, gpu: int | str | None, key: str) -> None:
        """Go back to the default."""
        self._lines.pop(key if gpu is None else f"{gpu}.{key}", None)
        self._write()

    def fail(self, gpu: int | str | None, function: str, code: int) -> None:
        """Let a function of NVML return a code from now on; `unset` mends it."""
        self.set(gpu, function, code)

    def hang(self, gpu: int | str | None, function: str) -> None:
        """Let a function never return; `unset` helps only who has not called it yet."""
        self.set(gpu, function, "hang")

    def crash(self, gpu: int | str | None, function: str) -> None:
        """Let a function abort its process."""
        self.set(gpu, function, "crash")

    def lose(self, gpu: int) -> None:
        """Let a GPU fall off the bus."""
        self.set(gpu, "lost", 1)

    def divide(self, gpu: int, instances: int) -> None:
        """Divide a GPU by MIG."""
        self.set(gpu, "mig_mode", 1)
        self.set(gpu, "mig_pending", 1)
        self.set(gpu, "mig_instances", instances)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process must have in its environment to find itself on this machine."""
        path = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": f"{self.library.parent}:{path}" if path else str(self.library.parent),
            "NVML_STAND_IN": str(self.scenario),
            "NVML_STAND_IN_HANDLE": str(self.handle),
        }

    def holders(self) -> dict[int, list[str]]:
        """Return the processes that hold this machine's driver: their ids → "library" mapped, "handle" open."""
        found: dict[int, list[str]] = {}
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                mine = f"NVML_STAND_IN={self.scenario}\0".encode() in (process / "environ").read_bytes()
                if mine and str(self.library) in (process / "maps").read_text():
                    found.setdefault(int(process.name), []).append("library")
                for descriptor in (process / "fd").iterdir():
                    if descriptor.readlink() == self.handle:
                        found.setdefault(int(process.name), []).append("handle")
        return found

    def _write(self) -> None:
        fresh = self.scenario.with_suffix(".new")
        fresh.write_text("".join(f"{key}={value}\n" for key, value in self._lines.items()))
        fresh.replace(self.scenario)
