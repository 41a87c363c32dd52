"""Classes of exact cases that a device has computed correctly, here or on another host: learnt from every run."""

from __future__ import annotations

from collections.abc import Iterable

from canaryd.engine.host import Host
from canaryd.formatting import DAY
from canaryd.judge.characterised import Claims, Line, Met, learns, met_in
from canaryd.model import Run


class MetClasses:
    """Records of each device's correctly computed classes of cases, as they are in the store."""

    def __init__(self, host: Host) -> None:
        """Start empty; `read` fills it."""
        self._host = host
        self._records: dict[Line, Met] = {}
        self._claims: Claims | None = None

    @property
    def claims(self) -> Claims:
        """All records, in a form that answers whether a class of cases is proven to be exact."""
        with self._host.mutex:
            if self._claims is None:
                self._claims = Claims(self._records.values())
            return self._claims

    def read(self) -> None:
        """Read all records from the store, including those of this process that are not on disk yet."""
        store = self._host.store
        found = {met.line: met for met in store.met()}
        if store.unreadable:
            return  # what was read before still holds
        with self._host.mutex:
            self._records, self._claims = found, None

    def learn(self, runs: Iterable[Run]) -> list[Met]:
        """Add the classes of cases that `runs` computed correctly; return the changed records, which the caller stores.

        A record changes at least once a day while its software is in use: it must outlive the mismatches that it
        explains.
        """
        changed: dict[Line, Met] = {}
        with self._host.mutex:
            for run in runs:
                device = self._host.devices.get(run.device)
                if device is None or not learns(device.kind) or run.drill or not run.stack:
                    continue
                line = Line(run.device, run.probe, run.probe_version, run.stack_id)
                known, names = self._records.get(line), met_in(run)
                fresh = names - known.classes.keys() if known else names
                if fresh or (known and run.started - known.used > DAY):
                    seen = Met(
                        device=run.device,
                        kind=device.kind,
                        probe=run.probe,
                        probe_version=run.probe_version,
                        stack=run.stack,
                        classes=dict.fromkeys(sorted(fresh), run.started),
                        used=run.started,
                    )
                    self._records[line] = changed[line] = known.merged(seen) if known else seen
            if changed:
                self._claims = None
        return list(changed.values())
