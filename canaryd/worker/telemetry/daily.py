"""What NVML says of a GPU that does not change: asked once a day, kept in a file between the sweeps' workers."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from canaryd.files import keep, recall
from canaryd.worker.telemetry.nvml import NOT_SUPPORTED, ask_text
from canaryd.worker.telemetry.sysfs import optional_text

DAY = 86_400.0
"""Seconds for which an answer is kept."""
STEADY = frozenset(
    f"nvmlDeviceGet{name}"
    for name in (
        *("TemperatureThreshold", "PowerManagementDefaultLimit", "PowerManagementLimitConstraints", "NumFans"),
        *("SupportedClocksEventReasons", "SupportedClocksThrottleReasons", "MaxClockInfo", "MaxPcieLinkGeneration"),
        "MaxPcieLinkWidth",
    )
)
"""Calls whose answer is the part's, the driver's or the slot's, and changes with neither load nor time."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Daily:
    """pynvml for one GPU, with the answers of `STEADY` calls remembered; everything else is pynvml's own."""

    def __init__(self, nvml: Any, directory: str, uuid: str) -> None:
        """Remember in `directory`; "" remembers nothing."""
        self._nvml = nvml
        self.remembers = bool(directory)
        self._kept = directory, f"nvml-{uuid}"
        self._driver = self._boot = ""
        self._known: dict[str, Any] = {}
        self._new = False

    def recall(self) -> None:
        """Read what was kept less than a day ago, under this driver and in this boot: the slot may be another."""
        self._driver = ask_text(self._nvml, "nvmlSystemGetDriverVersion")
        self._boot = optional_text(BOOT_ID)
        kept = recall(*self._kept)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            here = (kept["driver"], kept["boot"]) == (self._driver, self._boot)
            if here and 0 <= time.time() - kept["at"] < DAY:
                self._known = dict(kept["known"])

    def keep(self) -> None:
        """Keep what was learnt, where anything was; without the right to write it is asked again."""
        if self._new:
            kept = {"driver": self._driver, "boot": self._boot, "at": time.time(), "known": self._known}
            with contextlib.suppress(TypeError, ValueError):
                keep(*self._kept, kept)

    def noted(self, name: str) -> Any:
        """Return what was noted under a name; None for nothing."""
        return self._known.get(name)

    def note(self, name: str, value: Any) -> None:
        """Note plain data under a name."""
        self._known[name], self._new = value, True

    def __getattr__(self, name: str) -> Any:
        """Return pynvml's own, or a call of it that remembers."""
        if name == "nvmlSystemGetDriverVersion" and self._driver:
            return lambda: self._driver
        found = getattr(self._nvml, name)
        if name not in STEADY or not self.remembers:
            return found

        def remembered(handle: Any, *arguments: int) -> Any:
            key = " ".join(map(str, (name, *arguments)))
            if key not in self._known:
                try:
                    self.note(key, {"value": found(handle, *arguments)})
                except self._nvml.NVMLError as error:
                    if error.value != NOT_SUPPORTED:
                        raise
                    self.note(key, {"error": NOT_SUPPORTED})
            if "error" in (known := self._known[key]):
                raise self._nvml.NVMLError(known["error"])
            return known["value"]

        return remembered
