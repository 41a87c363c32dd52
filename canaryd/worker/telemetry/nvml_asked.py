"""NVML's answers about one GPU in one poll: each call is made once, and calls with constant answers once a day.

The file with the answers of a day outlives the worker processes that write it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from canaryd.files import keep, recall
from canaryd.worker.telemetry.interface import DeviceLost
from canaryd.worker.telemetry.nvml import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LOST,
    NOT_SUPPORTED,
    OLD_PACKAGE,
    REASONS,
    Check,
    Missing,
    ask_nvml,
    ask_text,
    parse_count,
)
from canaryd.worker.telemetry.sysfs import optional_text

DAY = 86_400.0
"""Seconds for which a constant answer is kept."""
PREFIX = "nvmlDeviceGet"
STEADY = (
    *("TemperatureThreshold", "PowerManagementDefaultLimit", "PowerManagementLimitConstraints", "NumFans"),
    *("SupportedClocksEventReasons", "SupportedClocksThrottleReasons", "MaxClockInfo", "MaxPcieLinkGeneration"),
    "MaxPcieLinkWidth",
)
"""Calls whose answer depends only on the GPU model, the driver or the slot, not on load or time."""
VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Names of the members of nvmlValue_t, by the number of their type in nvmlValueType_t."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Asked:
    """NVML's answers about one GPU in this poll. Its methods take names of calls without `PREFIX`."""

    def __init__(self, nvml: ModuleType, handle: Any, memory: str = "", uuid: str = "") -> None:
        """Load answers of this driver and boot, less than a day old, from the directory `memory`; "" keeps none."""
        self.nvml, self.handle, self.remembers = nvml, handle, bool(memory)
        self.driver = ask_text(nvml, "nvmlSystemGetDriverVersion")
        self._answers: dict[Any, Any] = {}
        self._kept = memory, f"nvml-{uuid}"
        self._here = {"driver": self.driver, "boot": optional_text(BOOT_ID)}  # after a boot the slot may be another
        self._known: dict[str, Any] = {}
        self._new = False
        kept = recall(*self._kept)
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            if self._here.items() <= kept.items() and 0 <= time.time() - kept["at"] < DAY:
                self._known = dict(kept["known"])

    def keep(self) -> None:
        """Write the learnt answers to the file; if it cannot be written, the next process asks again."""
        if self._new:
            with contextlib.suppress(TypeError, ValueError):
                keep(*self._kept, {**self._here, "at": time.time(), "known": self._known})

    def daily(self, name: str, learn: Callable[[], Any]) -> Any:
        """Return the result of `learn` (plain data), which is called once a day; otherwise return the stored result."""
        if name not in self._known:
            self._known[name], self._new = learn(), True
        return self._known[name]

    def once(self, key: Any, ask: Callable[[], Any]) -> Any:
        """Return the result of `ask`, or raise its `Missing`; call `ask` only once per `key` in this poll."""
        if key not in self._answers:
            try:
                self._answers[key] = ask()
            except Missing as missing:
                self._answers[key] = missing
        if isinstance(answer := self._answers[key], Missing):
            raise answer
        return answer

    def call(self, names: str | tuple[str, ...], *arguments: Any) -> Any:
        """Return the answer of the first call in `names` that pynvml and driver know, or else raise `Missing`."""
        missing = Missing(OLD_PACKAGE)
        for name in (names,) if isinstance(names, str) else names:
            try:
                return self.once((name, arguments), partial(self._ask, name, *arguments))
            except Missing as error:
                missing = error
                if error.code != FUNCTION_NOT_FOUND:
                    break
        raise missing

    def _ask(self, name: str, *arguments: Any) -> Any:
        ask = partial(ask_nvml, self.nvml, f"{PREFIX}{name}", self.handle, *arguments)
        if name not in STEADY or not self.remembers:
            return ask()

        def learn() -> dict[str, Any]:
            try:
                return {"value": ask()}
            except Missing as missing:
                if missing.code != NOT_SUPPORTED:
                    raise
                return {"error": NOT_SUPPORTED}

        found = self.daily(" ".join(map(str, (f"{PREFIX}{name}", *arguments))), learn)
        if "error" in found:
            raise Missing(REASONS[NOT_SUPPORTED], NOT_SUPPORTED)
        return found["value"]

    def value(
        self,
        names: str | tuple[str, ...],
        *arguments: Any,
        check: Check = parse_count,
        part: int | str | None = None,
    ) -> Any:
        """Return a call's answer, or its item (int) or member (str) `part`, converted by `check` to base units."""
        given = self.call(names, *arguments)
        if part is not None:
            given = given[part] if isinstance(part, int) else getattr(given, part)
        return check(given)

    def field(self, wanted: Iterable[tuple[int, int]], number: int, link: int = 0, check: Check = parse_count) -> Any:
        """Return the value of one field of a link (0: of the GPU); one call reads all `wanted` (number, link) pairs."""
        fields = tuple(wanted)
        given = dict(zip(fields, self.call("FieldValues", fields), strict=True))[number, link]
        if given.nvmlReturn == GPU_IS_LOST:
            raise DeviceLost(LOST)
        if given.nvmlReturn == 2:  # NVML_ERROR_INVALID_ARGUMENT
            raise Missing("the driver does not know this field", FUNCTION_NOT_FOUND)
        if given.nvmlReturn:
            raise Missing(REASONS.get(given.nvmlReturn, f"NVML: error {given.nvmlReturn}"), given.nvmlReturn)
        if given.valueType >= len(VALUES):
            raise Missing(f"the driver gave a value of an unknown type ({given.valueType})")
        return check(getattr(given.value, VALUES[given.valueType]))
