"""The alarm that arrives: a real canaryd, Debian's Prometheus and Alertmanager on the shipped rules, and a webhook."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import ROOT, Daemon, canaryd, configure, eventually, running
from tests.daemon.test_telemetry import Site, state_of
from tests.http_server import Handler
from tests.programs import needed

DEPLOY = ROOT / "deploy"
REPEAT = 2
"""Seconds after which a warning would be told again, so that what arrives shows whether it is inhibited."""
WITHIN = 40.0


def free_ports(count: int) -> list[int]:
    """Return ports that are free now: Prometheus and Alertmanager cannot be asked which one they took."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


# --- The shipped files at the speed of a test -------------------------------------------------------------------------


def quick(duration: str) -> str:
    """Return a shipped `for` 20 times shorter: "2m" → "6s". Prometheus alone takes 5 s to look at its first target."""
    seconds = {"m": 3, "h": 180}
    return f"{int(duration[:-1]) * seconds[duration[-1]]}s"


def hurried_rules(path: Path) -> dict[str, Any]:
    """Return a shipped file of rules, its expressions untouched: groups once a second, each `for` 20 times shorter."""
    content = yaml.safe_load(path.read_text())
    for group in content["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = quick(rule["for"])
    return dict(content)


def hurried_prometheus(canaryd_port: int, alertmanager_port: int) -> dict[str, Any]:
    """Return the shipped configuration with the test's addresses, scraping and evaluating once a second."""
    content = shipped_prometheus(canaryd_port, alertmanager_port)
    content["global"] = dict.fromkeys(content["global"], "1s")
    content["scrape_configs"][0]["scrape_interval"] = "1s"
    return content


def shipped_prometheus(canaryd_port: int, alertmanager_port: int) -> dict[str, Any]:
    """Return the shipped configuration with the test's addresses."""
    content = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = (each for each in content["scrape_configs"] if each["job_name"] == "canaryd")
    content["scrape_configs"] = [job]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{canaryd_port}"]}]
    content["alerting"]["alertmanagers"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{alertmanager_port}"]}]
    return dict(content)


def hurried_alertmanager(port: int) -> dict[str, Any]:
    """Return the shipped configuration, routes and inhibition untouched, with short waits and the test's webhook."""
    content = shipped_alertmanager(port)
    for route in (content["route"], *content["route"]["routes"]):
        for key in ("group_wait", "group_interval"):
            if key in route:
                route[key] = "1s"
        if route["receiver"] == "canaryd-warning":
            route["repeat_interval"] = f"{REPEAT}s"
    return content


def shipped_alertmanager(port: int) -> dict[str, Any]:
    """Return the shipped configuration with the test's webhook."""
    content = yaml.safe_load((DEPLOY / "alertmanager/alertmanager.yml").read_text())
    for receiver in content["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", hook["url"])
    return dict(content)


# --- What arrives -----------------------------------------------------------------------------------------------------


class Webhook(ThreadingHTTPServer):
    """Keeps every notification that arrives, in order."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, Mapping[str, Any]]] = []
        """(path, what Alertmanager sent)"""
        super().__init__(("127.0.0.1", 0), _Hook)

    def told(self, path: str, alertname: str, status: str = "firing") -> list[Mapping[str, Any]]:
        """Return the alerts of this name and status in the notifications to a receiver."""
        return [
            alert
            for to, message in list(self.arrived)
            for alert in message["alerts"]
            if (to, alert["labels"]["alertname"], alert["status"]) == (path, alertname, status)
        ]

    def names(self, path: str) -> set[str]:
        """Return the names of all alerts that a receiver was told of."""
        return {
            alert["labels"]["alertname"]
            for to, message in list(self.arrived)
            if to == path
            for alert in message["alerts"]
        }


class _Hook(Handler):
    server: Webhook

    def respond(self) -> None:
        self.server.arrived.append((self.path, self.document()))
        self.reply(200)


def ask(url: str) -> Any:
    """Return the answer of Prometheus's or Alertmanager's API, [] while it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return []


@contextlib.contextmanager
def service(log: Path, *argv: object) -> Iterator[None]:
    """Run a program beside the test; its output goes to a file."""
    with log.open("w") as output:
        process = subprocess.Popen([*map(str, argv)], stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)


class Chain:
    """Prometheus, Alertmanager and the webhook, on the way from one canaryd."""

    def __init__(self, directory: Path) -> None:
        self.hook = Webhook()
        self.port, self.prometheus, self.alertmanager = free_ports(3)
        self._programs = (
            needed(name, untested="no alarm was seen to arrive") for name in ("prometheus", "prometheus-alertmanager")
        )
        self._directory = directory

    def _write(self, name: str, content: Mapping[str, Any]) -> Path:
        path = self._directory / name
        path.write_text(json.dumps(content))  # JSON is YAML
        return path

    @contextlib.contextmanager
    def running(self, *, hurried: bool = True) -> Iterator[None]:
        """Start all three, and stop them; `hurried` or at the speed of the shipped files."""
        config = (hurried_prometheus if hurried else shipped_prometheus)(self.port, self.alertmanager)
        alerting = (hurried_alertmanager if hurried else shipped_alertmanager)(self.hook.server_port)
        for name in config["rule_files"]:
            path = DEPLOY / "prometheus" / name
            self._write(name, hurried_rules(path) if hurried else yaml.safe_load(path.read_text()))
        main, alerts = self._write("prometheus.yml", config), self._write("am.yml", alerting)
        prometheus, alertmanager = self._programs
        listen = "--web.listen-address=127.0.0.1:{}".format
        thread = threading.Thread(target=self.hook.serve_forever, daemon=True)
        with contextlib.ExitStack() as stack:
            thread.start()
            stack.callback(self.hook.server_close)
            stack.callback(self.hook.shutdown)
            stack.enter_context(
                service(
                    self._directory / "am.log",
                    alertmanager,
                    f"--config.file={alerts}",
                    f"--storage.path={self._directory / 'am'}",
                    listen(self.alertmanager),
                    "--cluster.listen-address=",
                )
            )
            stack.enter_context(
                service(
                    self._directory / "prometheus.log",
                    prometheus,
                    f"--config.file={main}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    listen(self.prometheus),
                )
            )
            yield

    def scraped(self) -> bool:
        """Whether Prometheus has read canaryd."""
        answer = ask(f"http://127.0.0.1:{self.prometheus}/api/v1/query?query=canaryd_build_info")
        return bool(answer and answer["data"]["result"])

    def inhibited(self, alertname: str) -> bool:
        """Whether Alertmanager has this alert and holds it back for another."""
        alerts = ask(f"http://127.0.0.1:{self.alertmanager}/api/v2/alerts?active=true")
        return any(a["labels"]["alertname"] == alertname and a["status"]["inhibitedBy"] for a in alerts)


# --- The story --------------------------------------------------------------------------------------------------------


def test_the_alarm_arrives_once_stands_and_ends(tmp_path):
    """A drill, a suspicion, a fault, a silent daemon, a repair: each is told where it belongs, and how often.

    One story, because starting all of it takes most of the time. The processor is the device, so the alerts are those
    of a host.
    """
    chain = Chain(tmp_path)
    state = tmp_path / "state"

    def wrong(runs: int) -> Path:
        settings = {"log": str(tmp_path / "log"), "seconds": 1.5, "wrong": runs}
        return configure(tmp_path, "records", each={"records": {"settings": settings}})

    config = wrong(0)
    listen = "--listen", f"127.0.0.1:{chain.port}"
    hook = chain.hook
    with contextlib.ExitStack() as stack:
        # The daemon first: a target that is not there yet is a silent daemon to a rule that waits two seconds.
        daemon = stack.enter_context(running(Daemon(config, state, *listen)))
        eventually(lambda: daemon.value("canaryd_device_state", state="healthy") == 1)
        stack.enter_context(chain.running())
        eventually(chain.scraped)

        # A drill reaches its own receiver and nobody else.
        common = "--config", config, "--state-dir", state
        drilled = canaryd("drill", "--probe", "records", *common)
        assert drilled.code == 2
        (end,) = re.findall("the alert CanarydDrill ends at about .+", " ".join(drilled.err.split()))
        assert end in " ".join(canaryd("status", *common).out.split())  # one time on both
        (drill, *_) = eventually(lambda: hook.told("/drill", "CanarydDrill"), WITHIN)
        assert drill["labels"]["severity"] == "drill"
        assert [m["alerts"] for to, m in hook.arrived if to != "/drill"] == []

        # A mismatch is told at once as a suspicion, and once confirmed as one page.
        wrong(10**6)
        daemon.send(signal.SIGHUP)
        (suspect, *_) = eventually(lambda: hook.told("/warning", "CanarydHostSuspect"), WITHIN)
        assert "exact-mismatch (suspect" in suspect["annotations"]["findings"]
        (page, *_) = eventually(lambda: hook.told("/page", "CanarydHostFaulty"), WITHIN)
        assert page["labels"]["severity"] == "critical"
        assert page["startsAt"] > suspect["startsAt"]
        assert "exact-mismatch-confirmed (faulty" in page["annotations"]["findings"]
        told = page["annotations"]["wrong"] + page["annotations"]["repeat"]
        repeat = f"canaryd check --probe records --device {page['labels']['device']}"
        assert re.fullmatch(rf"records: [1-9]\d* of \d+ results wrong since its first test\. {repeat}", told)

        # The suspicion still stands and would be told every two seconds, but the page speaks for it.
        eventually(lambda: chain.inhibited("CanarydHostSuspect"), WITHIN)
        before = len(hook.told("/warning", "CanarydHostSuspect"))

        # A daemon that falls silent ends no alarm, and is one itself.
        daemon.end(signal.SIGKILL)
        daemon.close()
        # Told again and again: warnings do repeat, so the suspicion would have been told again too.
        eventually(lambda: len(hook.told("/warning", "CanarydDown")) > 2, WITHIN)
        assert len(hook.told("/warning", "CanarydHostSuspect")) - before <= 1  # one may have been under way
        assert not hook.told("/page", "CanarydHostFaulty", "resolved")
        assert not hook.told("/warning", "CanarydHostSuspect", "resolved")

        # It comes back, the part was repaired: everything resolves.
        wrong(0)
        said = ("--repaired", "--reason", "a test", "--config", config, "--state-dir", state)
        assert canaryd("ack", page["labels"]["device"], *said).code == 0
        stack.enter_context(running(Daemon(config, state, *listen)))
        eventually(lambda: hook.told("/warning", "CanarydDown", "resolved"), WITHIN)
        eventually(lambda: hook.told("/page", "CanarydHostFaulty", "resolved"), WITHIN)
        eventually(lambda: hook.told("/warning", "CanarydHostSuspect", "resolved"), WITHIN)

    # One page for one cause.
    assert hook.names("/page") == {"CanarydHostFaulty"}
    assert [message["status"] for path, message in hook.arrived if path == "/page"] == ["firing", "resolved"]
    assert hook.names("/drill") == {"CanarydDrill"}
    assert "error expanding" not in json.dumps([message for _, message in hook.arrived])


@pytest.mark.slow
def test_a_lost_gpu_is_told_within_a_minute(tmp_path):
    """At the speed of the shipped files: sweep, scrape, evaluation and the wait of its group are 55 s at most."""
    chain = Chain(tmp_path)
    site = Site(tmp_path / "site", gpus=2, period="15s")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(site.daemon("--listen", f"127.0.0.1:{chain.port}"))
        stack.enter_context(chain.running(hurried=False))
        for uuid in site.uuids:
            eventually(lambda uuid=uuid: state_of(daemon, uuid)[0] == "healthy", WITHIN)
        eventually(chain.scraped, WITHIN)
        site.machine.set(0, "lost", 1)
        begun = time.monotonic()
        (alarm, *_) = eventually(lambda: chain.hook.told("/warning", "CanarydDeviceSuspect"), 2 * WITHIN)
        assert time.monotonic() - begun <= 60.0
        assert alarm["labels"]["device"] == site.uuids[0]
        assert "gpu-lost (suspect, hardware)" in alarm["annotations"]["findings"]
