"""The pages and log lines of the daemon. Pages are prepared when evidence changes; a request only copies bytes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from canaryd.daemon import snapshot
from canaryd.daemon.snapshot import Health, device_view, newest_evidence, sum_counts
from canaryd.engine import endpoints
from canaryd.engine.engine import Engine
from canaryd.facts import printable
from canaryd.judge.findings import NO_EVIDENCE
from canaryd.metrics import families
from canaryd.metrics.exposition import Exposition
from canaryd.model import State, Verdict
from canaryd.report import gate, status, status_page
from canaryd.report.replica import replica
from canaryd.report.terminal import state_note
from canaryd.store.locks import Flag
from canaryd.store.store import Store
from canaryd.supervisor import process
from canaryd.web.server import PLAIN_TEXT, Answer, Request, Route
from canaryd.web.tls import Tls

log = logging.getLogger("canaryd")


class Publisher:
    """Prepares the answers of all HTTP routes, the status line, and the log lines about changes of a device."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store
        self.tls: Tls | None = None
        """What clients are let in by; None for plain HTTP."""
        self.config_ok = True
        """Whether the configuration was read without problems last."""
        self.config_read = time.time()
        """When the configuration in force was read, in seconds since the epoch."""
        self.summary = ""
        """The status line for the service manager."""
        self._unstored = Flag(store.state_dir)
        """Tells readers of the store that what they read may be old."""
        self._page = Exposition(b"")
        self._status: status.Status
        self._health = Health()
        self._replicas: dict[str, tuple[str, ...]] = {}
        """Name of an endpoint → its uuid and those of the devices that serve it."""
        self._silence = ""
        """Why enforcement is off, or "" if it is on."""
        self._logged: dict[str, Verdict] = {}
        """Device → the verdict that was logged last."""
        self._counting = threading.Lock()
        self._changes = 0
        self._publishing = threading.Lock()
        """A page from older evidence must not replace one from newer."""
        self._published = 0
        """Number of the last change that is published."""

    def changed(self) -> None:
        """Publish the present evidence; if several threads report changes at once, one page serves them all."""
        with self._counting:
            self._changes += 1
            change = self._changes
        with self._publishing:
            if self._published < change:
                newest = self._changes
                self._publish()
                self._published = newest

    def _publish(self) -> None:
        engine, store, now = self._engine, self._store, time.time()
        if self.tls:
            self.tls.refresh()
        evidence = {uuid: newest_evidence(engine, uuid) for uuid in engine.devices}
        found = status.gather(store, engine.config, now, daemon=True, evidence=evidence, itself=True)
        shown = {d.device.uuid: d for d in found.devices}
        verdicts = {uuid: d.verdict for uuid, d in shown.items() if d.judged}
        self._log_changes(verdicts)
        self.summary = self._status_line(verdicts)
        self._health = snapshot.health(engine, now)
        self._unstored.fly(bool(store.problem))
        log_reader, expected = engine.watch.kernel_log, engine.config.devices.expected
        values = {
            "canaryd_store_problem": bool(store.problem),
            "canaryd_workers_abandoned_total": process.abandoned(),
            "canaryd_config_last_reload_successful": self.config_ok and not (self.tls and self.tls.problems),
            "canaryd_config_last_reload_success_timestamp_seconds": self.config_read,
            "canaryd_kernel_log_readable": not log_reader.problem,
            "canaryd_kernel_log_lost_records_total": log_reader.lost["lost"],
            "canaryd_device_handles_held": engine.watch.holding,
            "canaryd_released": bool(engine.released),
            "canaryd_budget_share_ratio": engine.config.budget.share,
            **({} if expected is None else {"canaryd_devices_expected": expected}),
        }
        rehearsed = engine.decisions.rehearse(store.drilled(now))
        devices = [
            replace(device_view(engine, device, shown.get(uuid), now), drill_verdict=rehearsed.get(uuid))
            for uuid, device in sorted(engine.devices.items())
        ]
        counters = sum_counts(store.counters(), store.drills.counters(), engine.watch.uncounted())
        self._page = families.page_of(families.Snapshot(values=values, devices=devices, counters=counters))
        self._status = found
        self._silence = gate.silenced(engine.config, os.environ)
        self._replicas = {
            name: endpoints.parts(engine.config, name, engine.devices.values())
            for name in endpoints.named(engine.config)
        }

    def _status_line(self, verdicts: Mapping[str, Verdict]) -> str:
        problem = "" if self.config_ok else "the new configuration is bad, the old one is in force"
        parts = (snapshot.summary(self._engine, verdicts), self._engine.released, self._store.problem, problem)
        return "; ".join(filter(None, parts))

    def _log_changes(self, verdicts: Mapping[str, Verdict]) -> None:
        """Log each change of a device's state or cause, and each finding that is new."""
        for uuid, verdict in verdicts.items():
            if uuid not in self._engine.devices:
                continue
            before, name = self._logged.get(uuid), self._engine.devices[uuid].name
            self._logged[uuid] = verdict
            if before is None or (before.state, before.cause) != (verdict.state, verdict.cause):
                was = f"{before.state.value} → " if before else ""
                now = state_note(verdict.state.value, verdict.cause)
                log.log(_level(verdict.state), "%s %s: %s%s", name, uuid, was, now)
            known = {(f.rule, f.probe, f.state) for f in before.findings} if before else set()
            new = [f for f in verdict.findings if (f.rule, f.probe, f.state) not in known]
            # On the first day no test has run yet, and one line says so.
            if waiting := [f for f in new if f.rule == NO_EVIDENCE and f.probe]:
                names = ", ".join(f.probe for f in waiting)
                log.warning("%s %s: no run has completed yet of %s", name, NO_EVIDENCE, names)
            for finding in (f for f in new if f not in waiting):
                log.log(_level(finding.state), "%s %s: %s", name, finding.rule, printable(finding.message))

    def routes(self) -> dict[str, Route]:
        """Return the path of each HTTP page → the function that answers it."""

        def health(_: object) -> Answer:
            found = self._health
            text = "ok\n" if found.healthy else "".join(f"{reason}\n" for reason in found.reasons)
            return Answer(200 if found.healthy else 503, PLAIN_TEXT, text.encode())

        def ready(_: object) -> Answer:
            waits = self._health.waits
            return Answer(503 if waits else 200, PLAIN_TEXT, f"{waits or 'ready'}\n".encode())

        return {
            "/": lambda _: Answer(200, status_page.CONTENT_TYPE, status_page.render(self._status)),
            "/metrics": lambda request: self._page.answer(request.headers),
            "/healthz": health,
            "/readyz": ready,
            "/endpoints/": self._replica,
        }

    def _replica(self, request: Request) -> Answer:
        """Answer /endpoints/NAME/ready, and /endpoints/NAME/agent in the words of HAProxy's agent checks."""
        name, _, what = request.path.removeprefix("/endpoints/").rpartition("/")
        if name not in self._replicas or what not in ("ready", "agent"):
            there = ", ".join(f"/endpoints/{each}/ready" for each in self._replicas) or "no endpoint is configured"
            return Answer(404, PLAIN_TEXT, f"not found: {there}\n".encode())
        try:
            ready, reason = replica(self._status, self._replicas[name], request.query, self._silence)
        except ValueError as error:
            return Answer(400, PLAIN_TEXT, f"{error}\n".encode())
        if what == "agent":
            return Answer(200, PLAIN_TEXT, b"up\n" if ready else f"down #{reason}\n".encode(), bare=True)
        return Answer(200 if ready else 503, PLAIN_TEXT, f"{reason}\n".encode())


def _level(state: State) -> int:
    return logging.INFO if state is State.HEALTHY else logging.WARNING
