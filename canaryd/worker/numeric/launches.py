"""The names of the kernels that a call runs on a device: learnt from torch's profiler once, and kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

from canaryd.facts import stack_id
from canaryd.files import keep, recall
from canaryd.model import Device
from canaryd.worker.numeric.cases import QUOTED
from canaryd.worker.numeric.serving_kernels import MAKER
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import synchronize, torch

SHOWN = 200
"""Maximum number of characters of kernel names, after their digest, in a chain (the recorded settings of a result)."""


class Launches:
    """The names of the kernels that run for each recorded case on one device.

    A profiler takes longer to start than most cases take to run, so each case is profiled once per device and stack:
    equal stacks choose equal kernels. Without a directory that outlives the process it is profiled once per process.
    """

    def __init__(self, session: Session) -> None:
        self.known: dict[str, str] = {}
        """Case → digest and names of its kernels; "" where they could not be learnt."""
        self.unnamed = ""
        """Why the kernels of a case are not known; "" where all are."""
        self._device = session.ctx.device
        self._asks = self._device.backend in ("cuda", "rocm")
        self._stack, self._new = "", False
        self._kept = session.ctx.memory, f"kernels-{self._device.uuid}"
        if self._asks:
            self._stack = f"{MAKER}, {stack_id(session.runtime.stack(self._device, ''))}"
            self.known = _IN_PROCESS.setdefault((self._device.uuid, self._stack), {})
            self._recall()

    def ask(self, case: str, call: Callable[[], Any]) -> None:
        """Learn which kernels `call` runs, by two more calls, unless the kernels of this case are already known."""
        if not self._asks or case in self.known:
            return
        names, why = launched(self._device, call)
        self.known[case], self._new = names, True
        self.unnamed = self.unnamed or why

    def keep(self) -> None:
        """Write the learnt names to the file; if it cannot be written, the next process learns them again."""
        if self._new:
            kernels = {case: names for case, names in self.known.items() if names}
            keep(*self._kept, {"stack": self._stack, "kernels": kernels})

    def _recall(self) -> None:
        kept = recall(*self._kept)
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            if kept["stack"] == self._stack:
                found = {str(case): str(names) for case, names in kept["kernels"].items()}
                self.known.update({case: names for case, names in found.items() if case not in self.known})


_IN_PROCESS: dict[tuple[str, str], dict[str, str]] = {}
"""Kernel names learnt in this process: (uuid, software stack) → case → names."""


def launched(device: Device, call: Callable[[], Any]) -> tuple[str, str]:
    """Return (digest and names of the kernels, "" or the reason why they are unknown).

    The call runs twice and must show the same kernels twice, because CUPTI of CUDA 12.6 to 13.0 gives the first kernels
    of a session no time, and torch's profiler drops kernels without a time (pytorch issue 192021).
    """
    try:
        # Not `torch.profiler`, which wraps it and imports torch's compiler first: 4 s (ours, on an H200).
        with torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True) as seen:
            call()
            call()
            synchronize(device)
        names = sorted(e.name for e in seen.function_events if "CUDA" in str(e.device_type))
    except (RuntimeError, AssertionError) as error:
        # No device activity, or counters that are in use or forbidden.
        why = (str(error).splitlines() or ["no reason given"])[0]
        return "", f"torch's profiler: {why[:QUOTED]}"
    if not names:
        return "", "torch's profiler lists no kernel of the call"
    if names[::2] != names[1::2]:
        return "", "torch's profiler lost kernels of the call"
    text = " + ".join(names[::2])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {text[:SHOWN]}", ""
