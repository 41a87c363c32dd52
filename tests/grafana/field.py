"""A small fleet with a story to show: real daemons on stand-in GPUs, scraped by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.command import ROOT, Daemon, eventually
from tests.daemon.test_telemetry import BROKEN, Site, state_of
from tests.prometheus import prometheus
from tests.worker.telemetry.trees import plant
from tools.grafana_queries import Api

PROBE = Path(__file__).parent / "probes/says_all.py"
RULES = [ROOT / "deploy/prometheus" / name for name in ("canaryd.rules.yml", "canaryd-fleet.rules.yml")]
WRONG, DISSENTER, DRIFTING, DRILLED, HOT, FAILING = 3, 6, 5, 1, 4, 7
"""GPUs of the first node and what becomes of them."""

PRESSURE = "some avg10=0.80 avg60=1.20 avg300=0.90 total=1\nfull avg10=0.10 avg60=0.20 avg300=0.10 total=1"


def sound(slow: float = 1.0) -> dict[str, Any]:
    """Return what a healthy GPU says; `slow` stretches its times."""
    return {
        "wrong": False,
        "fails": False,
        "fingerprint": 123456789012345,
        "digest": "00000000000000aa",
        "logit": -0.5,
        "readings": [
            *(["kernel_seconds", slow * s, {"kind": k}] for k, s in (("matmul", 0.004), ("attention", 0.0021))),
            *(["recorded_error_ratio", 0.31, {"kind": k}] for k in ("matmul", "attention")),
            ["endpoint_first_token_seconds", 0.061 * slow, {"api": "completions"}],
            ["endpoint_token_seconds", 0.011 * slow, {"api": "completions"}],
        ],
    }


class Node:
    """One machine with a canaryd of its own."""

    def __init__(self, directory: Path, name: str, gpus: int) -> None:
        self.name = name
        self.site = Site(directory / name, gpus=gpus)
        machine = self.site.machine
        for gpu in range(gpus):
            uuid = f"GPU-{name.encode().hex()[-8:]:0>8}-0000-4000-8000-00000000000{gpu:x}"
            machine.set(gpu, "uuid", uuid)
            machine.uuids[gpu] = uuid
            machine.set(gpu, "utilization.gpu", 40 + 5 * gpu)
            machine.set(gpu, "temperature", 55 + gpu)
            machine.set(gpu, "temperature_margin", 32 - gpu)
            machine.set(gpu, "power", 410000 + 9000 * gpu)
            machine.set(gpu, "clock.sm", 1755 - 15 * gpu)
        self.site.seen_by_torch.write_text(",".join(machine.uuids))
        self.uuids = machine.uuids
        waiting = {f"pressure/{what}": PRESSURE for what in ("cpu", "memory", "io")}
        plant(self.site.proc, {**waiting, "meminfo": "MemTotal: 98304000 kB\nMemAvailable: 73728000 kB"})
        self.said: dict[str, Any] = {"all": sound()}
        self.script = self.site.directory / "said.json"
        self.say()
        config = json.loads(self.site.config.read_text())
        shutil.copy(PROBE, self.site.directory / "probes.d")
        config["probes"]["says_all"] = {"period": "10s", "settings": {"file": str(self.script)}}
        config["devices"] = {"expected": gpus}
        config["budget"] = {"share": 1, "busy": 1}  # minutes stand for days here
        self.site.config.write_text(json.dumps(config))

    def say(self, gpu: int | None = None, **changed: Any) -> None:
        """Let a GPU, or all of them, say something else from now on."""
        key = "all" if gpu is None else self.uuids[gpu]
        self.said[key] = self.said.get(key, {}) | changed
        fresh = self.script.with_suffix(".new")
        fresh.write_text(json.dumps(self.said))
        fresh.replace(self.script)

    def tell_a_story(self) -> None:
        """Let something happen to some GPUs and to the driver's number."""
        machine = self.site.machine
        self.say(WRONG, wrong=True)
        self.say(DRIFTING, digest="00000000000000bb", logit=-0.62)
        self.say(FAILING, fails=True)
        self.say(HOT, readings=sound(slow=1.6)["readings"])
        machine.set(HOT, "temperature", 88)
        machine.set(HOT, "temperature_margin", -3)
        machine.set(HOT, "reasons", "0x40")
        machine.set(HOT, "throttle_ns.hw_thermal", 100 * 10**9)
        machine.set(HOT, "clock.sm", 990)
        machine.set(2, "volatile.corrected.dram", 1500)
        machine.set(2, "aggregate.corrected.dram", 1500)
        machine.set(0, "pcie_replays", 12)
        self.site.say_of_the_host(corrected=20)
        self.site.hear(
            BROKEN.format("12", 31, "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted"),
            BROKEN.format("13", 48, "An uncorrectable double bit error (DBE) has been detected on GPU"),
            "EDAC MC0: 20 CE memory read error on A1 (channel:0 slot:0 page:0x1f2e3d offset:0x0 grain:32)",
        )

    def upgrade(self, daemon: Daemon) -> None:
        """Let the driver be another, which a reload makes the daemon see."""
        self.site.machine.set(None, "driver", "590.44.01")
        daemon.send(signal.SIGHUP)


def scraped(directory: Path, targets: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration that scrapes these addresses, by name, each second, and votes by the shipped rules."""
    rules = [directory / path.name for path in RULES]
    for path, shipped in zip(rules, RULES, strict=True):
        path.write_text(re.sub(r"(?m)^( *interval:) .*$", r"\1 1s", shipped.read_text()))
    statics = [{"targets": [address], "labels": {"instance": name}} for name, address in targets.items()]
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "canaryd", "static_configs": statics}],
    }


@contextlib.contextmanager
def fleet(directory: Path, *, before: float = 20.0, after: float = 30.0) -> Iterator[tuple[Api, list[Node]]]:
    """Run two nodes with 8 and 3 GPUs under a Prometheus, healthy for `before` s, then troubled for `after` s."""
    nodes = [Node(directory, "node-a", 8), Node(directory, "node-b", 3)]
    # From the start: a fingerprint that becomes another is none until enough runs in a row give it.
    nodes[0].say(DISSENTER, fingerprint=123456789012346)
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(node.site.daemon()) for node in nodes]
        targets = {
            node.name: daemon.address.removeprefix("http://") for node, daemon in zip(nodes, daemons, strict=True)
        }
        running = stack.enter_context(prometheus(directory / "prometheus", scraped(directory, targets)))
        api = Api(f"http://{running.address}")
        for node, daemon in zip(nodes, daemons, strict=True):
            for uuid in node.uuids:
                eventually(lambda d=daemon, u=uuid: state_of(d, u)[0] == "healthy", within=120)
                eventually(lambda d=daemon, u=uuid: d.value("canaryd_drift_ratio", device=u) == 0.0)
        time.sleep(before)
        first, daemon = nodes[0], daemons[0]
        first.tell_a_story()
        drill = first.site.run("drill", "--probe", "says_all", "--device", first.uuids[DRILLED])
        assert "drill" in (drill.out + drill.err).lower(), drill
        first.upgrade(daemon)
        first.site.run("ack", first.uuids[HOT], "--reason", "its fan is on order")
        nodes[1].site.run("release", "--for", "10s")
        eventually(lambda: state_of(daemon, first.uuids[WRONG]) == ("faulty", "hardware"), within=120)
        eventually(lambda: state_of(daemon, first.uuids[HOT])[0] not in ("", "healthy"))
        errored = {"device": first.uuids[FAILING], "probe": "says_all", "outcome": "errored"}
        eventually(lambda: (daemon.value("canaryd_probe_runs_total", **errored) or 0) > 1)
        eventually(lambda: (daemon.value("canaryd_drift_ratio", device=first.uuids[DRIFTING]) or 0.0) > 0)
        eventually(lambda: daemon.value("canaryd_stack_changes_total", device=first.uuids[0], component="driver") == 1)
        eventually(lambda: daemon.value("canaryd_drill_device_state", device=first.uuids[DRILLED]) is not None)
        eventually(lambda: daemon.value("canaryd_device_acknowledged", device=first.uuids[HOT]) == 1)
        eventually(lambda: daemon.value("canaryd_xid_errors_total", device=first.uuids[WRONG], xid="48") == 1)
        eventually(lambda: api.get("query", query="canaryd:fleet_outlier")["result"])
        time.sleep(after)
        yield api, nodes
