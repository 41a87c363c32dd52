"""Telemetry from a device's own words to the verdict, the metric and `canaryd status`: real daemons on the stand-in.

The vendor's library is `tests/nvml`, under the real pynvml. A host with that many GPUs needs a torch that sees them, or
no exact golden is asked for: `TORCH` is what canaryd asks of torch to list devices, and no more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canaryd.config.settings import Config, ProbesConfig, ProbeSettings, TelemetryConfig, WorkerConfig
from canaryd.engine.engine import Engine
from canaryd.judge.telemetry import signals
from canaryd.judge.telemetry.readings import READINGS, metric
from canaryd.model import Finding, Outcome, State
from canaryd.store.store import Store
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from probes.nvidia_telemetry import SPEC
from tests.command import BUILTIN, ROOT, Daemon, bare_python, canaryd, configure, eventually, in_turn, running, soon
from tests.nvml_stand_in import StandIn
from tests.pages import unwrapped
from tests.programs import linted
from tests.worker.telemetry.trees import plant

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
)

TORCH = {
    "torch/nn/__init__.py": "",
    "torch/nn/attention.py": "",
    "torch/__init__.py": """
import os
from types import SimpleNamespace as Names

__version__ = "2.9.0"

def _uuids():
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or open(os.environ["TORCH_STAND_IN"]).read()
    return [uuid for uuid in shown.split(",") if uuid]

def _properties(index):
    return Names(uuid=_uuids()[index].removeprefix("GPU-"), name="NVIDIA H200", total_memory=1 << 37, major=9, minor=0,
                 multi_processor_count=132, pci_domain_id=0, pci_bus_id=0x10 + index)

cuda = Names(is_available=lambda: bool(_uuids()), device_count=lambda: len(_uuids()), get_device_properties=_properties)
backends = Names(mps=Names(is_available=lambda: False), cpu=Names(get_cpu_capability=lambda: "AVX2"),
                 cudnn=Names(version=lambda: 91002))
version = Names(cuda="13.0", hip=None, git_version="0" * 40)
__config__ = Names(show=lambda: "BLAS_INFO=mkl")
get_num_threads = lambda: 1
""",
}
"""A torch on which nothing can be computed, but which lists the GPUs that stand in the file TORCH_STAND_IN."""
SWEEP = 5.0
"""Seconds between two sweeps: the daemon makes no faster ones."""
STALE = signals.stale_after(SWEEP)
BROKEN = "NVRM: Xid (PCI:0000:{}:00): {}, pid=4242, name=python3, {}"


class Site:
    """One machine of several GPUs, with its host's trees and its kernel's log, and a canaryd set up on it."""

    def __init__(self, directory: Path, gpus: int = 8, *, torch: bool = True, **nvidia: object) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.machine = StandIn(directory, gpus)
        self.uuids = self.machine.uuids
        self.state = directory / "state"
        self.log = directory / "kmsg"
        self.log.touch()
        self.sysfs, self.proc = directory / "sys", directory / "proc"
        self.say_of_the_host()
        for number in range(gpus):
            facts = {"vendor": "0x10de", "device": "0x2335", "class": "0x030200"}
            plant(self.sysfs / f"bus/pci/devices/0000:1{number:x}:00.0", facts)
        host = {"sysfs": str(self.sysfs), "proc": str(self.proc)}
        each = {
            "passes": {"period": "1h"},
            "nvidia_telemetry": {"period": "5s", "settings": {"sysfs": str(self.sysfs)}, **nvidia},
            "host_telemetry": {"period": "5s", "settings": host},
        }
        worker = {"python": bare_python()}
        if torch:
            plant(directory / "site", TORCH)
            self.seen_by_torch = directory / "seen_by_torch"
            self.seen_by_torch.write_text(",".join(self.uuids))
            worker["env"] = {"PYTHONPATH": str(directory / "site"), "TORCH_STAND_IN": str(self.seen_by_torch)}
        log = {"kernel_log": str(self.log)}
        self.config = configure(directory, "passes", each=each, worker=worker, telemetry=log)
        if torch:  # the probe stands for the exact goldens, which events call for
            probe = directory / "probes.d/passes.py"
            probe.write_text(probe.read_text().replace(", numeric=False", ""))
        self._sequence = itertools.count()

    def say_of_the_host(self, corrected: int = 0, uncorrected: int = 0, machine_checks: int = 0) -> None:
        """Write what the host counts of errors in its memory and its processors."""
        mc0 = self.sysfs / "devices/system/edac/mc/mc0"
        counts = {"dimm0/dimm_ce_count": f"{corrected}", "dimm0/dimm_ue_count": f"{uncorrected}"}
        plant(mc0, {**counts, "dimm0/dimm_label": "A1", "ce_noinfo_count": "0", "ue_noinfo_count": "0"})
        plant(self.proc, {"interrupts": f"           CPU0\n MCE:  {machine_checks}   Machine check exceptions"})

    def hide(self, *numbers: int) -> None:
        """Let torch see all GPUs but these."""
        self.seen_by_torch.write_text(",".join(u for n, u in enumerate(self.uuids) if n not in numbers))

    def leave_the_bus(self, number: int) -> None:
        """Let the PCI bus show a GPU no more."""
        shutil.rmtree(self.sysfs / f"bus/pci/devices/0000:1{number:x}:00.0")

    def hear(self, *texts: str) -> None:
        """Let the kernel say something."""
        with self.log.open("a") as log:
            log.writelines(f"4,{next(self._sequence)},{int(time.monotonic() * 1e6)},-;{text}\n" for text in texts)

    @contextlib.contextmanager
    def daemon(self, *arguments: str):
        """Run `canaryd run` on this machine."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.machine.environment.items():
                patch.setenv(name, value)
            process = Daemon(self.config, self.state, *arguments)
        with running(process):
            yield process

    def run(self, *arguments: object, there: bool = True):
        """Run another command on this machine; `there` says whether it has the vendor's library."""
        extra = self.machine.environment if there else {}
        return canaryd(*arguments, "--config", self.config, "--state-dir", self.state, **extra)

    def run_all(self, *commands: Sequence[object]):
        """Run other commands on this machine, one after the other in one process, which costs one start."""
        where = ("--config", self.config, "--state-dir", self.state)
        return in_turn(*((*command, *where) for command in commands), **self.machine.environment)

    def status(self) -> dict[str, dict]:
        """Return the devices of `canaryd status --json` by uuid."""
        return by_uuid(self.run("status", "--json"))

    def runs(self, device: str) -> list:
        """Return the stored runs of a device."""
        with Store.open(self.state) as store:
            return store.runs(device)

    def findings(self) -> dict[str, Sequence[Finding]]:
        """Return what the stored verdict on each device rests on: asked again and again, a command would cost more."""
        with Store.open(self.state) as store:
            return {uuid: verdict.findings for uuid, verdict in store.verdicts().items()}

    def rises(self, device: str) -> dict[str, float]:
        """Return by how much the store says that counters of a device rose."""
        with Store.open(self.state) as store:
            return risen((e.kind, e.name, e.count) for e in store.events(device=device))

    def triggers(self, device: str) -> str:
        """Return why exact goldens ran out of turn on a device."""
        return "; ".join(run.trigger for run in self.runs(device) if run.trigger)


def by_uuid(answer) -> dict[str, dict]:
    """Return the devices of a document by uuid."""
    return {d["device"]: d for d in answer.document["devices"]}


CHECK = ("check", "--level", "quick")
STATUS = ("status", "--json")


def success(daemon: Daemon, device: str, probe: str = "nvidia_telemetry") -> float:
    """Return when the newest poll of a device that completed was started; 0.0 for none."""
    return daemon.value("canaryd_probe_last_success_timestamp_seconds", device=device, probe=probe) or 0.0


def state_of(daemon: Daemon, device: str) -> tuple[str, str]:
    """Return the state and the cause that /metrics shows of a device."""
    page = daemon.get("/metrics")[1]
    found = []
    for what in ("state", "cause"):
        asked = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(f"canaryd_device_{what}{{"))
        samples = [s for f in text_string_to_metric_families(asked) for s in f.samples]
        found.append(next((s.labels[what] for s in samples if s.labels["device"] == device and s.value), ""))
    return found[0], found[1]


def shown(page: str, device: str) -> dict[tuple[str, frozenset], float]:
    """Return the readings that a page shows of a device: (metric, its own labels) → value."""
    names = {metric(name) for name in READINGS}
    return {
        (s.name, frozenset((k, v) for k, v in s.labels.items() if k not in ("device", "index", "model"))): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name in names and s.labels["device"] == device
    }


def risen(events: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Return by how much each counter rose, from events as (kind, name, count)."""
    total: Counter[str] = Counter()  # what happened in two hours of the clock is two events
    for kind, name, count in events:
        total[name] += count if kind == "counter" else 0
    return dict(+total)


# --- A GPU that falls off the bus -------------------------------------------------------------------------------------


HANDLES = ("nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByIndex_v2")


@pytest.mark.parametrize(
    ("where", "what"), [(("lost",), 1), pytest.param(HANDLES, 15, marks=pytest.mark.slow), (HANDLES, 999)]
)
def test_a_lost_gpu_is_known_after_one_poll(tmp_path, where, what):
    """Not present, suspect, hardware, with the part and its slot by name; its sibling stays as it is."""
    site = Site(tmp_path, gpus=2)
    lost, other = site.uuids
    with site.daemon() as daemon:
        for uuid in site.uuids:
            eventually(lambda uuid=uuid: state_of(daemon, uuid) == ("healthy", "none") and success(daemon, uuid))
        begun = time.monotonic()
        for key in where:
            site.machine.set(0, key, what)
        eventually(lambda: daemon.value("canaryd_device_present", device=lost) == 0, within=4 * SWEEP)
        eventually(lambda: state_of(daemon, lost) == ("suspect", "hardware"))
        assert time.monotonic() - begun < soon(2 * SWEEP + 3.0)  # one sweep comes every `SWEEP`
        found = next(f for f in site.status()[lost]["findings"] if f["rule"] == "gpu-lost")
        assert "serial 1650423000000, PCI address 0000:10:00.0" in " ".join(found["evidence"])
        assert state_of(daemon, other) == ("healthy", "none")
        assert daemon.value("canaryd_device_present", device=other) == 1


# --- A GPU that cannot be identified ----------------------------------------------------------------------------------

UNIDENTIFIED = {
    "lost": {"lost": 1},
    "handle": {"nvmlDeviceGetHandleByIndex_v2": 999, "nvmlDeviceGetHandleByPciBusId_v2": 999},
    "handle by number": {"nvmlDeviceGetHandleByIndex_v2": 999},
    "uuid": {"nvmlDeviceGetUUID": 999},
    "reset": {"nvmlDeviceGetUUID": 16},
    "empty": {"uuid": ""},
}
"""What the driver says of a GPU that it counts and cannot identify."""


def enforce(site: Site) -> None:
    """Let the gate act."""
    site.config.write_text(json.dumps(json.loads(site.config.read_text()) | {"enforcement": "act"}))


@pytest.mark.parametrize(
    ("gpus", "lost", "how", "on_the_bus"),
    [
        (8, range(8), "lost", True),
        pytest.param(2, [0], "lost", True, marks=pytest.mark.slow),
        (2, [0], "lost", False),
        (2, [1], "handle", True),
        pytest.param(2, [1], "handle", False, marks=pytest.mark.slow),
        pytest.param(2, [0], "handle by number", True, marks=pytest.mark.slow),
        (2, [0], "uuid", True),
        pytest.param(2, [0], "reset", True, marks=pytest.mark.slow),
        (2, [1], "empty", False),
    ],
)
def test_a_gpu_that_was_never_identified_is_lost_and_not_left_out(tmp_path, gpus, lost, how, on_the_bus):
    """Suspect and not known to the gate, by its address where anything tells it; the others stay as they are."""
    site = Site(tmp_path, gpus=gpus)
    enforce(site)
    for number in lost:
        for key, value in UNIDENTIFIED[how].items():
            site.machine.set(number, key, value)
        if not on_the_bus:
            site.leave_the_bus(number)
    site.hide(*lost)
    check, gate, status, document = site.run_all(CHECK, ("gate",), ("status",), STATUS)
    assert check.code == 2, check.out
    assert (gate.code, gate.out.partition(":")[0]) == (3, "unknown"), gate.out
    assert (status.code, status.out.startswith("NO, do not trust ")) == (2, True), status.out
    devices = {uuid: d for uuid, d in by_uuid(document).items() if d["backend"] == "cuda"}
    wanted = {site.uuids[n] for n in range(gpus) if n not in lost}
    assert {uuid for uuid, d in devices.items() if d["state"] == "healthy"} == wanted
    silent = {uuid: d for uuid, d in devices.items() if uuid not in wanted}
    assert sorted(d["index"] for d in silent.values()) == list(lost)
    if on_the_bus:
        assert set(silent) == {f"PCI-0000:1{number:x}:00.0" for number in lost}
    for device in silent.values():
        assert device["state"] == "suspect"
        assert "gpu-lost" in {f["rule"] for f in device["findings"]}


def test_what_the_kernel_says_of_an_unidentified_gpu_is_shown_and_stays_with_its_place(tmp_path):
    """The daemon shows it by its address with its Xid; once it answers, the GPU has the Xid, and nothing is missing."""
    site = Site(tmp_path, gpus=2)
    site.machine.lose(0)
    site.hide(0)
    place, (gpu, other) = "PCI-0000:10:00.0", site.uuids
    with site.daemon() as daemon:
        # No identical device can be named while nobody knows what it is.
        eventually(lambda: state_of(daemon, place) == ("suspect", "undetermined"))
        assert daemon.value("canaryd_device_present", device=place) == 0
        eventually(lambda: state_of(daemon, other) == ("healthy", "none"))
        site.hear("NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        eventually(lambda: 79 in {e["code"] for e in site.status()[place]["events"]})
        eventually(lambda: "Xid (PCI:0000:10:00): 79" in daemon.get("/")[1])
        site.machine.unset(0, "lost")
        site.hide()
        eventually(lambda: gpu in site.status())
        eventually(lambda: state_of(daemon, gpu) == ("suspect", "hardware"))
        eventually(lambda: daemon.value("canaryd_device_present", device=gpu) == 1)
        eventually(lambda: place not in site.status())
        eventually(lambda: daemon.value("canaryd_device_present", device=place) is None)
        rules = {f["rule"] for d in site.status().values() for f in d["findings"]}
        assert "device-vanished" not in rules


@pytest.mark.parametrize("on_the_bus", [True, False])
def test_a_known_gpu_that_cannot_be_identified_any_more_is_no_second_device(tmp_path, on_the_bus):
    """It is missed under its own name, by every later check too."""
    site = Site(tmp_path, gpus=2)
    enforce(site)
    check, status = site.run_all(CHECK, STATUS)
    assert check.code == 0
    known = set(by_uuid(status))
    site.machine.lose(0)
    site.hide(0)
    if not on_the_bus:
        site.leave_the_bus(0)
    *answers, gate = site.run_all(*[CHECK, STATUS] * 2, ("gate",))
    for check, status in (answers[:2], answers[2:]):
        assert check.code in (2, 3)
        assert set(by_uuid(status)) == known
    assert gate.code == 3


def test_a_gpu_that_came_back_leaves_no_trace_of_its_place(tmp_path):
    """What was listed by its address answers under its uuid: one healthy device, and no alarm."""
    site = Site(tmp_path, gpus=2)
    site.machine.set(0, "uuid", "")
    site.hide(0)
    assert site.run(*CHECK).code == 2
    site.machine.unset(0, "uuid")
    site.hide()
    check, document, status = site.run_all(CHECK, STATUS, ("status",))
    assert (check.code, status.code) == (0, 0)
    assert {u for u in by_uuid(document) if not u.startswith("CPU-")} == set(site.uuids)


def test_what_the_driver_does_not_count_is_not_called_lost(tmp_path):
    """Beside a lost and a divided GPU, one that no driver counts is unknown, and one without permission too."""
    site = Site(tmp_path, gpus=4)
    site.machine.set(None, "count", 3)
    site.machine.divide(0, 2)
    site.machine.lose(1)
    site.machine.fail(2, "nvmlDeviceGetHandleByIndex_v2", 4)
    site.hide(1, 2, 3)
    check, status = site.run_all(CHECK, STATUS)
    assert check.code == 2
    devices = by_uuid(status)
    states = {place: devices[f"PCI-0000:1{place}:00.0"]["state"] for place in range(1, 4)}
    assert states == {1: "suspect", 2: "unknown", 3: "unknown"}
    divided = [d for u, d in devices.items() if u == site.uuids[0] or u.startswith("MIG-")]
    assert [d["state"] for d in divided] == ["healthy"] * 3


def test_a_known_fault_outlives_the_part(tmp_path):
    """A failed remap is faulty, also when the part is gone and canaryd starts anew; only a repair ends it.

    The start itself never shows it healthy, with the part there or without.
    """
    site = Site(tmp_path, gpus=2)
    site.config.write_text(json.dumps(json.loads(site.config.read_text()) | {"enforcement": "act"}))
    other, broken = site.uuids
    seen: set[str] = set()

    def every_verdict(daemon: Daemon) -> bool:
        with Store.open(site.state) as store:
            verdict = store.verdicts()[broken]
        seen.add(verdict.state.value)
        return success(daemon, other) > begun and verdict.decided > begun

    def gate() -> int:
        return site.run("gate", "--device", broken).code

    with site.daemon() as daemon:
        for uuid in site.uuids:
            eventually(lambda uuid=uuid: state_of(daemon, uuid) == ("healthy", "none") and success(daemon, uuid))
        site.machine.set(1, "remapped.failed", 1)
        eventually(lambda: state_of(daemon, broken) == ("faulty", "hardware"))
    begun = time.time()
    with site.daemon() as daemon:
        eventually(lambda: every_verdict(daemon) and success(daemon, broken) > begun, every=0.01)
        assert seen == {"faulty"}
        site.machine.set(None, "count", 1)
        site.seen_by_torch.write_text(other)
        shutil.rmtree(site.sysfs / "bus/pci/devices/0000:11:00.0")
        daemon.send(signal.SIGHUP)
        eventually(lambda: not site.status()[broken]["present"], every=0.5)
        assert (state_of(daemon, broken), gate()) == (("faulty", "hardware"), 2)
    begun = time.time()
    with site.daemon() as daemon:
        eventually(lambda: every_verdict(daemon), every=0.01)
        assert seen == {"faulty"}
        told = site.status()[broken]
        assert (told["present"], told["state"], gate()) == (False, "faulty", 2)
        assert {"memory-failed", "device-vanished"} <= {f["rule"] for f in told["findings"]}
        assert state_of(daemon, broken) == ("faulty", "hardware")
        assert daemon.value("canaryd_device_present", device=broken) == 0
    check = site.run("check", "--level", "quick", "--json")
    assert check.code == 2
    assert {d["state"] for d in check.document["devices"] if d["device"] == broken} == {"faulty"}
    assert site.run("report", broken, "--out", tmp_path / "dossier").code == 0
    (dossier,) = (tmp_path / "dossier").glob("*/dossier.json")
    assert json.loads(dossier.read_text())["verdict"]["state"] == "faulty"
    with site.daemon() as daemon:
        eventually(lambda: state_of(daemon, broken) == ("faulty", "hardware"))
        site.run("ack", broken, "--repaired", "--reason", "a new board")
        eventually(lambda: state_of(daemon, broken)[0] == "unknown", within=60, every=0.5)
        assert gate() == 3


# --- Counters that fall silent ----------------------------------------------------------------------------------------

COUNTERS = (
    *("nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetSramEccErrorStatus"),
    *("nvmlDeviceGetRemappedRows", "nvmlDeviceGetRowRemapperHistogram"),
    *("nvmlDeviceGetNvLinkErrorCounter", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetFieldValues"),
)


def test_counters_that_fall_silent_are_told(tmp_path):
    """On the one device, after two polls, with the driver's code, by metric and status; what was counted stands.

    It outlasts a restart, and ends with the first poll that reads them. What is not supported any more is no finding.
    """
    site = Site(tmp_path, gpus=2)
    silent, other = site.uuids
    site.machine.set(0, "volatile.uncorrected.dram", 2)  # from the start: no rise tells of it
    wanted = {"device": silent, "rule": "readings-lost", "state": "degraded", "cause": "environment"}

    def rules(uuid: str) -> set[str]:
        return {f.rule for f in site.findings()[uuid]}

    def told(daemon: Daemon) -> bool:
        return daemon.value("canaryd_finding", **wanted) == 1

    with site.daemon() as daemon:
        eventually(lambda: state_of(daemon, silent) == ("suspect", "hardware") and success(daemon, silent))
        eventually(lambda: state_of(daemon, other) == ("healthy", "none") and success(daemon, other))
        polled, given = success(daemon, silent), len(shown(daemon.get("/metrics")[1], silent))
        for function in COUNTERS:
            site.machine.fail(0, function, 999)
            site.machine.fail(1, function, 3)
        eventually(lambda: told(daemon), within=5 * SWEEP)
        assert success(daemon, silent) - polled < 3 * SWEEP + 1  # the poll in which they fell silent may have begun
        assert len(shown(daemon.get("/metrics")[1], silent)) < given / 2
        assert state_of(daemon, silent) == ("suspect", "hardware")
        found = {f["rule"]: f for f in site.status()[silent]["findings"]}
        assert "uncorrected-error" in found
        assert "driver code 999" in found["readings-lost"]["message"]
        assert "ECC errors (uncorrected, dram) 2" in " ".join(found["readings-lost"]["evidence"])
        assert "readings-lost" not in rules(other)
    begun = time.time()
    with site.daemon() as daemon:
        eventually(lambda: success(daemon, silent) > begun)
        eventually(lambda: told(daemon))
        assert state_of(daemon, silent) == ("suspect", "hardware")
        assert state_of(daemon, other) == ("healthy", "none")
        for function in COUNTERS:
            site.machine.unset(0, function)
        eventually(lambda: "readings-lost" not in rules(silent), within=5 * SWEEP)
        eventually(lambda: not told(daemon), within=SWEEP)  # the page follows the stored verdict
        assert "uncorrected-error" in rules(silent)


# --- A call that hangs, and a divided GPU -----------------------------------------------------------------------------


def test_instances_are_devices_and_a_call_that_hangs_costs_a_worker(tmp_path):
    """Three GPUs, the first divided in two, under one daemon; the second begins to hang."""
    site = Site(tmp_path, gpus=3, timeout=f"{soon(2.0):g}s")
    site.machine.divide(0, 2)
    instances = [f"MIG-00000000-0000-4000-800{n}-000000000000" for n in range(2)]
    with site.daemon() as daemon:
        for uuid in (*site.uuids, *instances):
            eventually(lambda uuid=uuid: success(daemon, uuid))
        instances_are_devices_of_their_own(site, daemon, instances)
        a_call_that_hangs_costs_a_worker_and_nothing_else(site, daemon)


def instances_are_devices_of_their_own(site, daemon, instances):
    """They have their own readings and their own runs; the divided GPU is polled, and not asked to compute."""
    for instance in instances:
        eventually(lambda instance=instance: state_of(daemon, instance) == ("healthy", "none"))
        assert daemon.value("canaryd_device_info", device=instance, parent=site.uuids[0]) == 1
        assert daemon.value("canaryd_memory_total_bytes", device=instance) == 18253611008
        assert [run.outcome for run in site.runs(instance)] == [Outcome.COMPLETED]
    assert daemon.value("canaryd_memory_total_bytes", device=site.uuids[0]) == 150754820096
    assert daemon.value("canaryd_mig_enabled", device=site.uuids[0]) == 1
    site.hear(BROKEN.format("10", 31, "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"))
    for instance in instances:
        eventually(lambda instance=instance: site.triggers(instance) == "Xid 31")
    assert site.runs(site.uuids[0]) == []
    eventually(lambda: "xid" in {f["rule"] for f in site.status()[instances[1]]["findings"]})


def a_call_that_hangs_costs_a_worker_and_nothing_else(site, daemon):
    """/metrics answers meanwhile, other GPUs are read on, and of the one that hangs the last success stands still."""
    hung, sound = site.uuids[1:]
    site.machine.hang(1, "nvmlDeviceGetPowerUsage")
    seconds, holding = [], 0
    timed_out = {"device": hung, "probe": "nvidia_telemetry", "outcome": "timed_out"}

    def scraped() -> float | None:
        nonlocal holding
        begun = time.monotonic()
        found = daemon.value("canaryd_probe_runs_total", **timed_out)
        seconds.append(time.monotonic() - begun)
        holding += bool(site.machine.holders())
        return found

    eventually(scraped, every=0.05)
    assert holding  # of the scrapes while a worker hung
    assert statistics.median(seconds) < soon(0.1)
    assert max(seconds) < soon(1.0)
    stands = success(daemon, hung)
    before = success(daemon, sound)
    eventually(lambda: success(daemon, sound) > before)
    assert success(daemon, hung) == stands < success(daemon, sound) - SWEEP / 2


def test_what_hangs_is_stale_in_time(tmp_path, monkeypatch):
    """For two minutes the last readings stand; then they vanish, and the device is unknown with the reason."""
    machine = StandIn(tmp_path, gpus=2)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "kmsg"
    log.touch()
    each = {name: ProbeSettings(enabled=False) for name in BUILTIN}
    each["nvidia_telemetry"] = ProbeSettings(period=SWEEP, timeout=soon(0.5))
    config = Config(
        state_dir=tmp_path / "state",
        worker=WorkerConfig(python=bare_python()),
        probes=ProbesConfig(each=each),
        telemetry=TelemetryConfig(kernel_log=log),
    )
    with Store.open(config.state_dir) as store:
        engine = Engine(config, store)
        engine.discover()
        engine.sweep()
        machine.hang(1, "nvmlDeviceGetPowerUsage")
        engine.sweep()
        hung, sound = machine.uuids[1], machine.uuids[0]
        poll = engine.watch.polls(hung)["nvidia_telemetry"]
        assert poll.newest.outcome is Outcome.TIMED_OUT
        assert engine.watch.polls(sound)["nvidia_telemetry"].newest.outcome is Outcome.COMPLETED
        assert machine.holders() == {}
        rules = lambda uuid: {f.rule: f for f in engine.verdict(uuid).findings}  # noqa: E731
        last = poll.completed.started
        engine.clock = lambda: last + STALE - 1
        assert "telemetry-stale" not in rules(hung)
        assert engine.watch.readings(hung, engine.clock())
        later = engine.watch.polls(sound)["nvidia_telemetry"].completed.started  # it was polled a second time
        engine.clock = lambda: (last + later) / 2 + STALE
        assert "telemetry-stale" not in rules(sound)
        stale = rules(hung)["telemetry-stale"]
        assert stale.state is State.DEGRADED
        assert "the newest poll timed out" in stale.message
        assert engine.verdict(hung).state is State.UNKNOWN
        assert engine.watch.readings(hung, engine.clock()) == ()
        assert engine.watch.readings(sound, engine.clock())


# --- Without persistence ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_persistence_one_worker_holds_until_it_is_released(tmp_path):
    """Counts survive from poll to poll; a release lets go, which clears them, and no poll is made until its end."""
    site = Site(tmp_path, gpus=2, torch=False)
    site.machine.set("*", "persistence", 0)
    device = site.uuids[0]

    def errors() -> float | None:
        labels = {"device": device, "kind": "corrected", "location": "sram"}
        return daemon.value("canaryd_ecc_errors_total", **labels)

    with site.daemon() as daemon:
        eventually(lambda: daemon.value("canaryd_device_handles_held") == 1 and errors() == 0)
        (holder,) = eventually(site.machine.holders)
        assert holder in daemon.others()
        site.machine.set(0, "volatile.corrected.sram", 7)
        eventually(lambda: errors() == 7)
        before = success(daemon, device)
        eventually(lambda: success(daemon, device) > before + 1.5 * SWEEP)
        assert errors() == 7
        assert list(site.machine.holders()) == [holder]
        note = next(f for f in site.status()[device]["findings"] if f["rule"] == "noted")
        assert note["severity"] == "healthy"

        answer = site.run("release", "--for", "10m")
        assert (answer.code, answer.err) == (0, "")
        assert site.machine.holders() == {}
        eventually(lambda: daemon.value("canaryd_released") == 1)
        assert "released until" in site.run("status").out
        assert site.run("status", "--json").document["released_until"] > time.time() + 300
        before, end = success(daemon, device), time.monotonic() + 1.5 * SWEEP
        while time.monotonic() < end:
            assert site.machine.holders() == {}
            time.sleep(0.05)
        assert success(daemon, device) == before

        assert site.run("release", "--end").code == 0
        eventually(lambda: success(daemon, device) > before)
        assert len(eventually(site.machine.holders)) == 1
        eventually(lambda: daemon.value("canaryd_released") == 0)
        assert errors() == 0  # as on a real driver: this is what holding it prevents


# --- Killed and started again -----------------------------------------------------------------------------------------


def test_a_daemon_that_is_killed_counts_everything_once(tmp_path):
    """What was counted stays, what happened meanwhile is counted, and neither a second time."""
    site = Site(tmp_path, gpus=1, torch=False)
    (device,) = site.uuids

    def counted() -> tuple[float | None, ...]:
        return tuple(daemon.value("canaryd_xid_errors_total", device=device, xid=xid) for xid in ("31", "63", "64"))

    fault = BROKEN.format("10", "{}", "Ch 00000008")
    counter = "ecc_aggregate_errors_total{kind=corrected,location=dram}"
    with site.daemon() as daemon:
        eventually(lambda: success(daemon, device))
        site.hear(fault.format(31), fault.format(31))
        eventually(lambda: counted() == (2, 0, 0))
        site.machine.set(0, "aggregate.corrected.dram", 3)
        eventually(lambda: site.rises(device) == {counter: 3}, every=0.5)
        daemon.end(signal.SIGKILL)
        eventually(lambda: not daemon.others())
    site.hear(fault.format(63))
    site.machine.set(0, "aggregate.corrected.dram", 8)
    with site.daemon() as daemon:
        eventually(lambda: success(daemon, device) and counted() == (2, 1, 0) and site.rises(device) == {counter: 8})
        daemon.end(signal.SIGKILL)
    with site.daemon() as daemon:
        site.hear(fault.format(64))
        eventually(lambda: success(daemon, device) and counted() == (2, 1, 1))
        assert site.rises(device) == {counter: 8}
        told = site.status()[device]["events"]
        assert risen((e["kind"], e["name"], e["count"]) for e in told) == {counter: 8}


def test_what_the_kernel_said_before_the_first_start_is_counted(tmp_path):
    """The log is read from its beginning, and nothing of it is passed over while the devices are not yet known."""
    site = Site(tmp_path, gpus=1, torch=False)
    site.hear(BROKEN.format("10", 31, "Ch 00000008"), *["nothing of interest"] * 3)
    with site.daemon() as daemon:
        eventually(lambda: success(daemon, site.uuids[0]))
        eventually(
            lambda: daemon.value("canaryd_xid_errors_total", device=site.uuids[0], xid="31") == 1, within=3 * SWEEP
        )


# --- canaryd check ----------------------------------------------------------------------------------------------------


def test_a_check_tells_what_devices_say(tmp_path):
    """In text how many readings there are, in JSON each of them, with the absences and their reasons."""
    site = Site(tmp_path)
    site.machine.set(2, "remapped.pending", 1)
    report = tmp_path / "report.json"
    answer = site.run("check", "-v", "--level", "quick", "--report", report)
    assert answer.code == 1, answer.out
    document = json.loads(report.read_text())
    devices = {d["device"]: d for d in document["devices"]}
    assert devices.keys() > {*site.uuids}
    for uuid in site.uuids:
        told = devices[uuid]["telemetry"]["nvidia_telemetry"]
        assert told["completed"]
        assert {"name": "power_watts", "labels": {}, "value": 112.345} in told["readings"]
        assert told["absent"]["fan_ratio"] == "not supported by this device"
        line = f"nvidia_telemetry {len(told['readings']):,} readings; {len(told['absent'])} unavailable on this machine"
        assert unwrapped(answer.out).count(line) == len(site.uuids)
        assert devices[uuid]["state"] == ("degraded" if uuid == site.uuids[2] else "healthy")
    assert [f["rule"] for f in devices[site.uuids[2]]["findings"]] == ["memory-worn"]
    assert "A bad memory row will be replaced at the next reset" in unwrapped(answer.out)
    assert site.machine.holders() == {}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (None, "libnvidia-ml.so.1 is not here: no NVIDIA driver is installed"),
        pytest.param(9, "the NVIDIA driver is not loaded", marks=pytest.mark.slow),
        (18, "the driver was upgraded but the old kernel module is still loaded"),
        pytest.param(4, "no permission to use the NVIDIA driver: run as root", marks=pytest.mark.slow),
    ],
)
def test_a_gpu_that_cannot_be_asked_is_not_healthy(tmp_path, code, reason):
    """One clear line, and exit 3: the GPU is on the bus, whatever its driver says."""
    site = Site(tmp_path, gpus=1, torch=False)
    if code is not None:
        site.machine.fail(None, "nvmlInitWithFlags", code)
    report = tmp_path / "report.json"
    answer = site.run("check", "-v", "--level", "quick", "--report", report, there=code is not None)
    assert answer.code == 3, answer.out
    document = json.loads(report.read_text())
    by_backend = {d["backend"]: d for d in document["devices"]}
    for told in by_backend["cpu"]["findings"]:  # the host may say that devices are missing; of itself all is well
        assert (told["rule"], reason in told["message"]) == ("devices-unlisted", True)
    assert by_backend["cuda"]["device"] == "PCI-0000:10:00.0"
    assert by_backend["cuda"]["state"] == "unknown"
    (finding,) = by_backend["cuda"]["findings"]
    assert reason in finding["message"]
    assert "\n" not in finding["message"]
    skipped = [s["reason"] for s in by_backend["cuda"]["skipped"] if s["probe"] == "nvidia_telemetry"]
    assert len(skipped) == 1
    assert skipped[0].startswith(reason)
    lines = [line for line in answer.out.replace("\n   ", "").splitlines() if reason in unwrapped(line)]
    assert {"-", "skipped"} <= {line.split()[0] for line in lines} <= {"UNKNOWN", "-", "skipped", "problem:"}
    assert "verdict: UNKNOWN" in answer.out


# --- Eight GPUs under one daemon; last, so that it does not run beside all other tests --------------------------------


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Eight GPUs under one daemon, healthy but for a link that has lost half its lanes under load: (site, daemon)."""
    site = Site(tmp_path_factory.mktemp("fleet"))
    site.machine.set(5, "utilization.gpu", 90)
    site.machine.set(5, "pcie_width", 8)  # from the start: it takes a minute to be held against a device
    with site.daemon() as daemon:
        for uuid in site.uuids:
            eventually(lambda uuid=uuid: state_of(daemon, uuid) == ("healthy", "none") and success(daemon, uuid))
        yield site, daemon


def test_every_reading_of_every_gpu_is_exported(fleet):
    """What the probe yields and what /metrics shows are the same names, labels and values."""
    site, daemon = fleet
    page = daemon.get("/metrics")[1]
    series = Series(WorkerSpec(env=dict(site.machine.environment)))
    settings = {"sysfs": str(site.sysfs)}
    try:
        gpus = series.inventory({"nvidia": settings}).devices["nvidia"]
        assert [gpu.uuid for gpu in gpus] == site.uuids
        for gpu in gpus:
            request = RunRequest(
                probe_path=ROOT / "probes/nvidia_telemetry.py",
                spec=SPEC,
                device=gpu,
                level="quick",
                seed=0,
                settings=settings,
            )
            run = series.run(request, 20.0)
            assert run.outcome is Outcome.COMPLETED, run.detail
            direct = {(metric(r.name), frozenset(r.labels.items())): float(r.value) for r in run.readings}
            assert len(direct) > 100
            assert shown(page, gpu.uuid) == direct
            assert daemon.value("canaryd_readings_absent", device=gpu.uuid) == len(run.absent)
    finally:
        series.close()


def test_nothing_is_held_between_polls(fleet):
    """Where persistence is on, each sweep has a worker that ends with it; the daemon itself never holds anything."""
    site, daemon = fleet
    begun, idle, longest, holders = time.monotonic(), time.monotonic(), 0.0, set()
    while time.monotonic() - begun < 2.5 * SWEEP or (len(holders) < 2 and time.monotonic() - begun < 10 * SWEEP):
        held = site.machine.holders()
        holders |= held.keys()
        now = time.monotonic()
        longest = max(longest, now - idle)
        if held:
            idle = now
        time.sleep(0.05)
    assert len(holders) >= 2
    assert daemon.popen.pid not in holders
    assert longest > SWEEP / 2
    assert eventually(lambda: not site.machine.holders() and not holders.intersection(daemon.others()))
    eventually(lambda: daemon.value("canaryd_device_handles_held") == 0)


# --- Findings ---------------------------------------------------------------------------------------------------------

FINDINGS = {
    0: {"memory-failed": "faulty", "uncorrected-error": "suspect"},
    1: {"memory-failed": "faulty", "gpu-lost": "suspect"},
    2: {"memory-worn": "degraded", "xid": "healthy"},
    3: {"uncorrected-error": "suspect", "driver-advice": "suspect"},
    4: {"corrected-errors-rising": "degraded"},
    5: {"throttled": "degraded", "pcie-slow": "degraded"},
    6: {"link-errors": "degraded"},
    7: {"gpu-lost": "suspect"},
}
"""GPU → rule → how much it weighs; `provoke` brings each about."""
STATES = {
    **dict.fromkeys((0, 1), ("faulty", "hardware")),
    3: ("suspect", "undetermined"),  # its count rose between the same polls as the memory of GPU 0 failed
    7: ("suspect", "undetermined"),  # lost with GPU 1
    **dict.fromkeys((2, 4, 6), ("degraded", "hardware")),
    5: ("degraded", "environment"),
}
HOST = {
    "event-reported": "degraded",
    "machine-check": "suspect",
    "uncorrected-error": "suspect",
    "corrected-errors-rising": "degraded",
}
TRIGGERS = {0: "Xid 48", 2: "Xid 31", 3: "uncorrected ECC error", 4: "corrected errors jumped", 5: "throttled"}
"""GPU → why exact goldens are run on it out of turn."""


def provoke(site: Site) -> None:
    """Let something happen to every GPU and to the host."""
    machine = site.machine
    machine.set(0, "remapped.failed", 1)
    machine.set(1, "sram.threshold", 1)
    machine.set(2, "remapped.pending", 1)
    machine.set(3, "volatile.uncorrected.dram", 1)
    machine.set(3, "recovery_action", 1)
    machine.set(4, "volatile.corrected.dram", 1500)
    machine.set(5, "throttle_ns.hw_thermal", 100 * 10**9)
    machine.set(6, "nvlink.3.recovery", 1)
    machine.lose(7)
    site.say_of_the_host(corrected=20, uncorrected=1, machine_checks=1)
    site.hear(
        BROKEN.format("10", 48, "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer"),
        BROKEN.format("11", 79, "GPU has fallen off the bus."),
        BROKEN.format("12", 31, "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7"),
        "nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
        "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 1: be00000000000000",
        "EDAC MC0: 1 UE memory read error on A1 (channel:0 slot:0 page:0x1f2e3d offset:0x0 grain:32)",
    )


@pytest.fixture(scope="module")
def provoked(fleet):
    """The fleet after everything has happened: (site, daemon, uuid of the host)."""
    site, daemon = fleet
    host = next(uuid for uuid in site.status() if uuid.startswith("CPU-"))
    provoke(site)
    return site, daemon, host


def test_each_finding_reaches_verdict_metric_and_status(provoked):
    """Each rule is found where it was provoked, with its weight, and nowhere else."""
    site, daemon, host = provoked
    wanted = {site.uuids[gpu]: rules for gpu, rules in FINDINGS.items()} | {host: HOST}

    def all_there() -> bool:
        found = {u: {f.rule: f.state.value for f in findings} for u, findings in site.findings().items()}
        return all(rules.items() <= found[uuid].items() for uuid, rules in wanted.items())

    with contextlib.suppress(AssertionError):  # what is missing is told by the comparison
        eventually(all_there, within=100, every=0.5)
    assert {u: {f["rule"]: f["severity"] for f in d["findings"]} for u, d in site.status().items()} == wanted
    for gpu, state in STATES.items():
        eventually(lambda gpu=gpu, state=state: state_of(daemon, site.uuids[gpu]) == state)
    eventually(lambda: state_of(daemon, host) == ("suspect", "hardware"))

    def spelled_out() -> bool:
        shown, status = site.run_all(("status", "-v"), STATUS)
        return all(
            unwrapped(f["message"]) in unwrapped(shown.out) for d in by_uuid(status).values() for f in d["findings"]
        )

    assert eventually(spelled_out, every=0.5)
    for gpu, code in ((0, "48"), (1, "79"), (2, "31")):
        xids = {"device": site.uuids[gpu], "xid": code}
        eventually(lambda xids=xids: daemon.value("canaryd_xid_errors_total", **xids) == 1)
    eventually(lambda: daemon.value("canaryd_sxid_errors_total", device=host, sxid="20034") == 1)
    for kind in ("mce", "edac"):
        eventually(lambda kind=kind: daemon.value("canaryd_kernel_log_events_total", device=host, kind=kind) == 1)
    lost = site.status()[site.uuids[7]]
    assert "GPU is lost" in next(" ".join(f["evidence"]) for f in lost["findings"] if f["rule"] == "gpu-lost")
    assert daemon.value("canaryd_device_info", device=site.uuids[7], serial="1650423000007") == 1


def test_what_happened_calls_for_exact_goldens(provoked):
    """On the device that it happened to, once; the note on Xid 31 then tells device from application."""
    site, _, host = provoked
    for gpu, reason in TRIGGERS.items():
        eventually(lambda gpu=gpu, reason=reason: reason in site.triggers(site.uuids[gpu]))
        assert sum(bool(run.trigger) for run in site.runs(site.uuids[gpu])) == 1
    for gpu in {*FINDINGS} - {*TRIGGERS}:
        assert site.triggers(site.uuids[gpu]) == ""
    happened = eventually(lambda: site.triggers(host))  # whatever was told first, and what came in the same moment
    assert "machine check" in happened or "uncorrected ECC error" in happened

    passed = "Exact tests passed"
    eventually(lambda: any(passed in " ".join(f.evidence) for f in site.findings()[site.uuids[2]]), every=0.5)
    findings = site.status()[site.uuids[2]]["findings"]
    assert passed in next(" ".join(f["evidence"]) for f in findings if f["rule"] == "xid")


def test_another_driver_is_an_event_a_metric_and_a_trigger(provoked):
    """SIGHUP makes the daemon look again; what it explains later is told with before and after."""
    site, daemon, _ = provoked
    assert daemon.value("canaryd_stack_changes_total", device=site.uuids[6], component="driver") == 0
    site.machine.set(None, "driver", "590.44.01")
    site.seen_by_torch.write_text(",".join(site.uuids[:7]))
    daemon.send(signal.SIGHUP)
    for uuid in site.uuids[:7]:
        eventually(lambda uuid=uuid: daemon.value("canaryd_stack_changes_total", device=uuid, component="driver") == 1)
    eventually(lambda: "driver changed" in site.triggers(site.uuids[6]))
    devices = site.status()
    for uuid in site.uuids[:7]:
        note = next(f for f in devices[uuid]["findings"] if f["rule"] == "noted" and "driver" in f["message"])
        assert note["severity"] == "healthy"
        assert "driver changed: 580.95.05 → 590.44.01" in note["message"]
        event = next(e for e in devices[uuid]["events"] if e["kind"] == "change")
        assert (event["name"], event["before"], event["after"]) == ("driver", "580.95.05", "590.44.01")
    lost = devices[site.uuids[7]]
    assert not lost["present"]
    assert (lost["state"], lost["cause"]) == ("suspect", "undetermined"), "it was lost with another"
    assert "gpu-lost" in {f["rule"] for f in lost["findings"]}
    eventually(lambda: daemon.value("canaryd_device_present", device=site.uuids[7]) == 0)


def test_promtool_has_nothing_to_say(provoked):
    """With every reading, every kind of counter and a device that is gone on the page."""
    assert linted(provoked[1].get("/metrics")[1]) == ""
