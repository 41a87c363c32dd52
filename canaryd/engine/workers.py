"""The worker processes that run now, so that all of them can be stopped at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from canaryd.engine.host import Host
from canaryd.model import TORCH, Device
from canaryd.supervisor import process
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series

T = TypeVar("T")


class Workers:
    """Starts and ends series of runs. Any thread can call `stop` and `release`."""

    def __init__(self, host: Host) -> None:
        """Start no worker yet; `host` supplies the settings of workers."""
        self._host = host
        self._series: dict[Series, bool] = {}
        """Series at work → whether it may use a device."""
        self._spare: Series | None = None
        """One of them that has answered its question, and whose worker the next one that can use it takes over."""
        self._mutex = threading.Lock()
        """Guards `_series`. Never held while anything waits, so that `stop` acts at once."""
        self.released = ""
        """Why no device may be used at present; "" when devices may be used."""

    @property
    def halted(self) -> str:
        """The reason why no worker can be started at present, or "" if workers can be started."""
        return self._host.stopping or self.released

    @property
    def hold_devices(self) -> bool:
        """Whether a worker exists that is allowed to use a device, including one that survived SIGKILL."""
        with self._mutex:
            return any(self._series.values()) or bool(process.stuck())

    def start(
        self,
        instruction_set: str = "",
        on_progress: Callable[[float, str], None] | None = None,
        *,
        numeric: bool = True,
        device: Device | None = None,
        runtime: str = TORCH,
        uses_device: bool = True,
        nice: int = 0,
    ) -> Series:
        """Return a new series of runs. It uses the software under test if `numeric`, else canaryd's own interpreter.

        The software under test is that of the `device`, or of the `runtime` if no device is given.
        """
        settings = self._host.config.worker
        spec = WorkerSpec()
        if numeric:
            only = device if device is not None and device.computes_here else None
            python, command = settings.python or sys.executable, tuple(settings.command)
            if named := settings.runtimes.each.get(device.runtime if device else runtime):
                python, command = named, ()
            spec = WorkerSpec(python=python, command=command, env=settings.env, nice=nice, only=only)
        series = self._take_over(spec, instruction_set, on_progress)
        if series is None:
            series = Series(spec, instruction_set=instruction_set, on_progress=on_progress)
        with self._mutex:
            self._series[series] = uses_device
            if self._host.stopping or (self.released and uses_device):
                series.kill(self.halted)
        return series

    def _take_over(
        self, spec: WorkerSpec, instruction_set: str, on_progress: Callable[[float, str], None] | None
    ) -> Series | None:
        """Return the spare series if it fits a test with `spec` and `instruction_set`, or None."""
        spare = self._spare
        if spare is None or spec.only is None or spec.only.backend != "cpu":
            return None  # another runtime on the processor may reach accelerators that torch does not
        if not spare.serve(spec, instruction_set, on_progress):
            return None
        self._spare = None
        return spare

    def keep(self, series: Series) -> None:
        """Keep a series for later tests of the processor: importing torch takes seconds. It sees no accelerator."""
        self.end_spare()
        self._spare = series

    def end_spare(self) -> None:
        """Close the spare series if nothing has taken it over."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self.end(spare)

    def end(self, series: Series) -> None:
        """Close a series."""
        series.close()
        with self._mutex:
            self._series.pop(series, None)

    def ask(self, question: Callable[[Series], T], *, numeric: bool, runtime: str = TORCH) -> T:
        """Return the result of `question`, a function that is called with a new series; the series is then closed."""
        series = self.start(numeric=numeric, runtime=runtime)
        try:
            return question(series)
        finally:
            self.end(series)

    def stop(self, reason: str) -> None:
        """Kill every worker and never start another."""
        with self._mutex:
            self._host.stopping = reason
            for series in self._series:
                series.kill(reason)

    def release(self, reason: str) -> None:
        """Kill every worker that is allowed to use a device, and start no other one until `take_back` is called."""
        with self._mutex:
            self.released = reason
            for series, uses_device in self._series.items():
                if uses_device:
                    series.kill(reason)

    def take_back(self) -> None:
        """Allow workers to use devices again."""
        self.released = ""
