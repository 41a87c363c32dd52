"""The watch: polls, events, reboots and the kernel log, through real workers on a telemetry probe that reads a file."""

import json
import os
import subprocess
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.config.settings import Config, ProbesConfig, ProbeSettings, TelemetryConfig, WorkerConfig
from canaryd.daemon.inventory import Inventories
from canaryd.daemon.jobs import Jobs
from canaryd.daemon.logs import Warnings
from canaryd.daemon.rounds import Rounds
from canaryd.engine import events, kernel_log, polling
from canaryd.engine.engine import Engine
from canaryd.engine.inventory import bus_key
from canaryd.engine.kernel_log import addressee
from canaryd.facts import LogRecord
from canaryd.judge.telemetry.events import log_event
from canaryd.model import Ack, AckKind, Device, Event, Outcome, State
from canaryd.store.notes import LOG_NOTE, LOG_PROBLEM_NOTE
from canaryd.store.store import Store
from canaryd.supervisor import killed
from tests.command import BUILTIN, bare_python, catalogue, eventually, soon

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC")
GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="H100", detail={"bus_id": "00000000:65:00.0"})
MIG = Device(uuid="MIG-1", backend="cuda", index=0, model="H100", parent="GPU-1", detail={"bus_id": "0000:65:00.0"})
XID = "NVRM: Xid (PCI:0000:65:00): 79, pid=1, name=python3, GPU has fallen off the bus."


class Host:
    """An engine on a state directory, with one telemetry probe whose answers the test writes."""

    def __init__(self, directory):
        self.directory = directory
        self.file = directory / "said.json"
        self.log = directory / "kernel.log"
        self.log.touch()
        if not self.file.exists():
            self.say()
        each = {name: ProbeSettings(enabled=False) for name in BUILTIN}
        each["says"] = ProbeSettings(timeout=soon(0.5), settings={"file": str(self.file)})
        config = Config(
            state_dir=directory / "state",
            worker=WorkerConfig(python=bare_python()),
            probes=ProbesConfig(directories=(catalogue(directory / "probes.d", "says"),), each=each),
            telemetry=TelemetryConfig(kernel_log=self.log),
        )
        self.store = Store.open(config.state_dir)
        self.engine = Engine(config, self.store)
        self.engine.discover()
        self.watch = self.engine.watch
        self.device = next(d for d in self.engine.devices.values() if d.backend == "cpu")
        self.cpu = self.device.uuid

    def say(self, *readings, **more):
        spelled = [(name, value, *(labels or [{}])) for name, value, *labels in readings]
        self.file.write_text(json.dumps({"readings": spelled, **more}))

    def hear(self, *texts, start=0, priority=4):
        """Append kernel records to the log."""
        with self.log.open("a") as log:
            for number, text in enumerate(texts, start):
                log.write(f"{priority},{number},{int(time.monotonic() * 1e6)},-;{text}\n")

    def poll(self, *readings, **more):
        self.say(*readings, **more)
        self.engine.sweep()
        return self.watch.polls(self.cpu)["says"]

    def pids(self):
        return [int(pid) for pid in Path(f"{self.file}.pids").read_text().split()]

    def again(self):
        """Start canaryd anew on the same state directory."""
        self.close()
        self.__init__(self.directory)
        return self

    def close(self):
        self.watch.let_go()
        self.watch.disown()
        self.store.close()


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    yield made
    made.close()


def counter(store, name, /, **labels):
    return store.counters().get((name, frozenset(labels.items())), 0)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Polls


def test_a_poll_is_read_in_a_process_that_ends(host):
    """What a device says arrives with its absences; afterwards no process is left that could hold a driver."""
    poll = host.poll(("load_average", 0.5), absent={"fan_rpm": "no fan"})
    assert [(r.name, r.value) for r in poll.completed.readings] == [("load_average", 0.5)]
    assert poll.completed.absent == {"fan_rpm": "no fan"}
    assert [r.value for r in host.watch.readings(host.cpu, time.time())] == [0.5]
    assert all(gone(pid) for pid in host.pids())


def test_only_what_says_something_new_is_stored(host):
    """Polls that repeat themselves are counted, not kept; one that shows another counter is kept at once."""
    for _ in range(4):
        host.poll(
            ("edac_errors_total", 1, {"kind": "corrected", "controller": "mc0", "dimm": "A1"}), ("load_average", 1)
        )
    assert len(host.store.polls(host.cpu)) == 1
    assert host.watch.uncounted()
    host.poll(("edac_errors_total", 3, {"kind": "corrected", "controller": "mc0", "dimm": "A1"}), ("load_average", 2))
    assert len(host.store.polls(host.cpu)) == 2
    assert counter(host.store, "probe_runs", device=host.cpu, probe="says", outcome="completed") == 5
    (event,) = [e for e in host.watch.history.of(host.device) if e.kind == "counter"]
    assert (event.count, event.before, event.after) == (2, "1", "3")


def test_a_rise_across_a_restart_is_counted_once(host):
    """What rose while nobody looked is seen afterwards, and not again after the next restart."""
    dimm = {"kind": "corrected", "controller": "mc0", "dimm": "A1"}
    host.poll(("edac_errors_total", 1, dimm))
    again = host.again()
    again.poll(("edac_errors_total", 5, dimm))
    assert [e.count for e in again.watch.history.of(again.device) if e.kind == "counter"] == [4]
    third = again.again()
    third.poll(("edac_errors_total", 5, dimm))
    assert [e.count for e in third.watch.history.of(third.device) if e.kind == "counter"] == [4]


def test_what_telemetry_said_before_a_repair_is_not_recalled(host):
    """A part that was replaced is not judged by the flags of the one before."""
    host.poll(("row_remap_failed", 1.0))
    assert "memory-failed" in {f.rule for f in host.again().engine.verdict(host.cpu).findings}
    host.store.add_ack(Ack(device=host.cpu, kind=AckKind.REPLACED, at=time.time(), reason="a new board"))
    assert "memory-failed" not in {f.rule for f in host.again().engine.verdict(host.cpu).findings}
    assert host.watch.polls(host.cpu) == {}


def test_a_hung_driver_costs_a_worker_and_is_asked_less_and_less(host):
    """The worker is killed at its deadline; until the pause is over no other one is thrown after it."""
    poll = host.poll(hangs=True)
    assert (poll.newest.outcome, poll.completed, poll.failures) == (Outcome.TIMED_OUT, None, 1)
    assert all(gone(pid) for pid in host.pids())
    lane, before = host.watch._lanes[host.cpu, "says"], host.pids()
    first = lane.rest_until - time.monotonic()
    lane.rest_until += 600.0  # however slow this machine is
    assert host.poll(hangs=True).failures == 1
    assert host.pids() == before
    lane.rest_until = 0.0
    assert host.poll(hangs=True).failures == 2
    assert lane.rest_until - time.monotonic() > first
    lane.rest_until = 0.0
    assert host.poll(("load_average", 0.5)).failures == 0


def test_telemetry_that_stays_away_is_an_incident_of_its_own(host, monkeypatch):
    """One lost poll says nothing; when none has come for long enough, the verdict says which and why."""
    host.poll(("load_average", 0.5))
    host.poll(crashes=True)
    assert "telemetry-stale" not in {f.rule for f in host.engine.verdict(host.cpu).findings}
    host.engine.clock = lambda: time.time() + 600
    verdict = host.engine.verdict(host.cpu)
    stale = next(f for f in verdict.findings if f.rule == "telemetry-stale")
    assert stale.state is State.DEGRADED
    assert "says" in (stale.message + stale.probe)


def test_trouble_that_may_come_back_is_recalled_for_life(host):
    """Of each kind once alone and once in company between two remedies; what programs cause, and corrected, are not."""
    day, now = 86_400.0, time.time()

    def old(ago, kind, name, of=host.cpu, **changes):
        return Event(device=of, kind=kind, name=name, first=now - ago * day, last=now - ago * day, **changes)

    host.engine.store.add_events(
        [
            old(300, "boot", "clean"),
            old(200, "xid", "119", code=119),
            old(199, "xid", "119", code=119),
            old(198, "xid", "94", code=94),
            old(197, "xid", "31", code=31),
            old(196, "boot", "clean"),
            old(195, "boot", "clean"),
            old(194, "xid", "119", code=119),
            old(193, "counter", "a", labels={"kind": "uncorrected", "location": "dram"}),
            old(193, "counter", "b", labels={"kind": "corrected", "location": "dram"}),
            old(192, "change", "driver"),
            old(191, "change", "device"),
            old(190, "oom", "system"),
            old(189, "xid", "119", code=119),
            old(189, "xid", "119", of="GPU-2", code=119),
            old(188, "xid", "119", of="GPU-2", code=119),
            old(188.5, "xid", "119", of="GPU-2", code=119),
            old(187, "xid", "119", code=119),
            old(1, "xid", "31", code=31),
        ]
    )
    history = host.watch.history
    history.recall(now)
    lasting = ["xid 119", "xid 94", "boot clean", "xid 119", "counter a", "change driver", "xid 119"]
    device = next(d for d in host.engine.devices.values() if d.uuid == host.cpu)
    assert [f"{e.kind} {e.name}" for e in history.life(device)] == [*lasting, "xid 31"]
    assert [e.name for e in history.of(device)] == ["31"]
    other = replace(device, uuid="GPU-2", backend="cuda")
    assert [round((now - e.last) / day, 1) for e in history.life(other)] == [189.0, 188.5]


def test_what_came_back_after_each_reset_is_recalled_as_often(host):
    """A reset of the device parts its trouble as a reboot does, though both are older than a month."""
    day, now = 86_400.0, time.time()
    told = [("xid", "119"), ("reset", "driver or device")] * 2 + [("xid", "119")]
    for ago, (kind, name) in zip(range(200, 190, -2), told, strict=True):
        at, code = now - ago * day, 119 if kind == "xid" else None
        host.engine.store.add_events([Event(device=host.cpu, kind=kind, name=name, first=at, last=at, code=code)])
    host.watch.history.recall(now)
    assert [(e.kind, e.name) for e in host.watch.history.life(host.device)] == told


def test_a_driver_without_persistence_is_held(host):
    """Letting go would reset what is to be read: the worker stays, the next poll goes through it, `let_go` ends it."""
    host.poll(("persistence_mode", 0))
    assert host.watch.holding
    host.poll(("persistence_mode", 0))
    assert len(set(host.pids())) == 1
    assert not gone(host.pids()[0])
    host.watch.let_go()
    assert gone(host.pids()[0])
    host.poll(("persistence_mode", 1))
    assert not host.watch.holding
    assert all(gone(pid) for pid in host.pids())


def test_release_lets_go_and_touches_nothing(host):
    """Between `release` and `take_back` no worker is started and none is left."""
    host.poll(("persistence_mode", 0))
    host.engine.release("released for a test")
    assert all(gone(pid) for pid in host.pids())
    before = host.pids()
    host.engine.sweep()
    host.engine.discover()
    assert host.pids() == before
    host.engine.take_back()
    host.engine.sweep()
    assert len(host.pids()) == len(before) + 1


def test_a_value_that_is_missing_for_one_poll_is_not_forgotten(host):
    """Fields fail when things go wrong: a rise across the poll that lacked them is a rise all the same."""
    dimm = {"kind": "corrected", "controller": "mc0", "dimm": "A1"}
    host.poll(("edac_errors_total", 1, dimm))
    host.poll(("load_average", 1))
    host.poll(("edac_errors_total", 5, dimm))
    assert [e.count for e in host.watch.history.of(host.device) if e.kind == "counter"] == [4]
    again = host.again()
    again.poll(("load_average", 1))
    again.poll(("edac_errors_total", 6, dimm))
    assert sum(e.count for e in again.watch.history.of(again.device) if e.kind == "counter") == 5


def test_what_a_driver_fails_to_give_is_remembered_however_long(host, monkeypatch):
    """Beyond the polls that a start reads: a failed remap stays, and that nobody can read it is told."""
    monkeypatch.setattr(polling, "KEEP", 0.001)
    host.poll(("row_remap_failed", 1), ("load_average", 1))
    silent = {"absent": {"row_remap_failed": "an unknown error"}, "code": 999}
    for _ in range(25):
        host.poll(("load_average", 1), **silent)
    again = host.again()
    assert {f.rule for f in again.engine.verdict(again.cpu).findings} >= {"memory-failed", "readings-lost"}
    again.poll(("load_average", 1), **silent)
    assert {f.rule for f in again.engine.verdict(again.cpu).findings} >= {"memory-failed", "readings-lost"}
    again.poll(("row_remap_failed", 0), ("load_average", 1))
    assert not {f.rule for f in again.engine.verdict(again.cpu).findings} & {"memory-failed", "readings-lost"}


def test_an_outage_and_a_restart_wipe_nothing_out(host):
    """What a device said of itself before its driver went away is known after any number of failed polls."""
    host.poll(("row_remap_failed", 1))
    for _ in range(25):
        lane = host.watch._lanes[host.cpu, "says"]
        lane.poll = replace(lane.poll, newest=None)  # each failure a change, and so worth storing
        host.poll(skips="no driver")
    again = host.again()
    again.poll(skips="no driver")
    assert "memory-failed" in {f.rule for f in again.engine.verdict(again.cpu).findings}


# Events


def test_a_jump_in_corrected_errors_calls_for_exact_goldens(host):
    """A trigger names its reason and is there until somebody takes it."""
    dimm = {"kind": "uncorrected", "controller": "mc0", "dimm": "A1"}
    host.poll(("edac_errors_total", 0, dimm))
    assert host.watch.history.triggers == {}
    host.poll(("edac_errors_total", 1, dimm))
    assert host.watch.history.triggers[host.cpu]


def test_a_reboot_is_an_event_and_an_unclean_one_says_so(host, tmp_path):
    """A daemon that was not stopped before the machine started again was cut off with it."""
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    host.watch.history.record_boot([host.cpu], time.time(), boot_id=boot)
    host.watch.history.running = True
    host.watch.history.record_boot([host.cpu], time.time(), boot_id=boot)
    boot.write_text("two\n")
    host.watch.history.record_boot([host.cpu], time.time(), boot_id=boot)
    boots = [e for e in host.watch.history.of(host.device) if e.after == "two"]
    assert [(e.name, e.before, e.after) for e in boots] == [("unclean", "one", "two")]
    assert boots[0].last == pytest.approx(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), abs=5)
    host.watch.history.note_stop()
    boot.write_text("three\n")
    host.watch.history.record_boot([host.cpu], time.time(), boot_id=boot)
    assert "clean" in {e.name for e in host.watch.history.of(host.device) if e.kind == "boot" and e.after == "three"}


def test_changes_are_counted_by_component(host):
    """An inventory's change becomes an event, a count, and a reason to test."""
    now = time.time()
    event = Event(
        device=host.cpu,
        kind="change",
        name="driver",
        first=now,
        last=now,
        before="1",
        after="2",
        detail="driver: 1 → 2",
    )
    host.watch.history.record_changes([event])
    assert counter(host.store, "stack_changes", device=host.cpu, component="driver") == 1
    assert "driver" in host.watch.history.triggers[host.cpu]


def test_two_that_watch_do_not_count_twice(host):
    """Whoever comes second shows what it reads; the first alone records it."""
    dimm = {"kind": "corrected", "controller": "mc0", "dimm": "A1"}
    thermal = "CPU0: Core temperature above threshold, cpu clock throttled"
    host.poll(("edac_errors_total", 1, dimm))
    other = Host(host.directory)
    for watcher in (other, host):
        watcher.poll(("edac_errors_total", 1, dimm))
    host.hear(thermal)
    for watcher in (other, host):
        watcher.poll(("edac_errors_total", 4, dimm))
        watcher.engine.read_log(until_end=True)
    assert [r.value for r in other.watch.readings(other.cpu, time.time())] == [4]
    other.watch.history.recall(time.time())
    for watcher in (other, host):
        counts = {e.kind: e.count for e in watcher.watch.history.of(watcher.device) if e.kind in ("counter", "thermal")}
        assert counts == {"counter": 3, "thermal": 1}
    host.watch.disown()
    assert other.watch.own()
    other.close()


def test_what_rose_under_one_that_was_killed_is_counted_by_the_other(host):
    """It had seen the rise too, and left the record to the first: a check that ended before its second look."""
    dimm = {"kind": "corrected", "controller": "mc0", "dimm": "A1"}
    host.poll(("edac_errors_total", 1, dimm))
    other = Host(host.directory)
    other.poll(("edac_errors_total", 1, dimm))
    host.poll(("edac_errors_total", 2, dimm))
    for value in (2, 5):
        other.poll(("edac_errors_total", value, dimm))
    host.watch.disown()
    for _ in range(2):
        other.poll(("edac_errors_total", 5, dimm))
    assert sum(e.count for e in other.store.events() if e.kind == "counter") == 4
    other.close()


# The kernel log


def test_a_containers_own_boot_id_is_no_reboot(host, tmp_path):
    """systemd-nspawn mounts a new one for each container that it starts: the machine was up all the time."""
    boot, own = tmp_path / "boot_id", Path("/dev/shm", f"canaryd-{os.getpid()}")
    boot.write_text("one\n")
    host.watch.history.running = True
    host.watch.history.record_boot([host.cpu], time.time(), boot_id=boot)
    own.write_text("two\n")
    try:
        if subprocess.run(["mount", "--bind", own, boot], capture_output=True, check=False).returncode:
            pytest.skip("NOT TESTED: nothing can be mounted here")
        try:
            host.watch.history.record_boot([host.cpu], time.time(), boot_id=boot)
            assert boot.read_text() == "two\n"
            assert [e for e in host.watch.history.of(host.device) if e.kind == "boot" and e.after == "two"] == []
        finally:
            subprocess.run(["umount", boot], check=True)
    finally:
        own.unlink()


def test_a_line_is_counted_once_per_boot(host):
    """Read twice, or by the next canaryd, the same record of the same boot is the same event."""
    host.hear("CPU0: Core temperature above threshold, cpu clock throttled (total events = 1)", "nothing of interest")
    for _ in range(2):
        host.engine.read_log(until_end=True)
        assert not host.watch.kernel_log.problem
    again = host.again()
    again.engine.read_log(until_end=True)
    events = [e for e in again.watch.history.of(again.device) if e.kind == "thermal"]
    assert sum(e.count for e in events) == 1
    again.hear("CPU0: Core temperature above threshold, cpu clock throttled (total events = 2)", start=2)
    again.engine.read_log(until_end=True)
    (name,) = {e.name for e in events}
    assert counter(again.store, "kernel_log_events", device=again.cpu, kind="thermal", name=name) == 2


def test_the_firmware_names_the_memory_module(host):
    """Which module an operator replaces stands in the finding, and in the event of a corrected error."""
    for start, severity in ((0, "recoverable"), (8, "corrected")):
        report = (f"event severity: {severity}", f" Error 0, type: {severity}", "  fru_text: D2")
        report += ("  section_type: memory error", "  node:6 card:1 module:0 rank:1 bank:2 device:11")
        host.hear(*(f"{{{start}}}[Hardware Error]: {line}" for line in report), start=start)
    host.engine.read_log(until_end=True)
    (finding,) = (f for f in host.engine.verdict(host.cpu).findings if f.rule == "uncorrected-error")
    assert "memory module D2 (controller node 6 card 1 module 0)" in finding.message
    (corrected,) = (e for e in host.watch.history.of(host.device) if (e.kind, e.name) == ("mce", "corrected"))
    assert "memory error at D2, node 6 card 1 module 0" in corrected.detail


CORRECTED = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 6: cc59214000041152"
BY = "mce: [Hardware Error]: PROCESSOR {}:406e3 TIME 1702475172 SOCKET 0 APIC 3 microcode d6"


@pytest.mark.parametrize(
    ("texts", "count", "state"),
    [
        ([CORRECTED, "mce: [Hardware Error]: TSC 0 ADDR 143200200 MISC 7022004086", BY.format(0)], 25733, "degraded"),
        ([CORRECTED, BY.format(2)], 1, "healthy"),  # AMD has other fields in these bits
        ([CORRECTED.replace("cc59214", "8c00000"), BY.format(0)], 1, "healthy"),
        (["EDAC MC0: 7 CE memory read error on A1 (channel:0 page:0x1 offset:0x0 grain:32)"], 7, "healthy"),
    ],
)
def test_a_line_that_counts_errors_is_as_many(host, texts, count, state):
    """The kernel polls a processor's banks and logs each with its count: one line is not one error."""
    host.hear(*texts)
    host.engine.read_log(until_end=True)
    (event,) = (e for e in host.watch.history.of(host.device) if e.kind in ("mce", "edac"))
    assert event.count == count
    assert event.fields.get("threshold", "") == ("yellow" if count == 25733 else "")
    found = [f.state.value for f in host.engine.verdict(host.cpu).findings if f.rule == "corrected-errors-rising"]
    assert found == [state] * (state == "degraded")


DECODED = "[Hardware Error]: CPU:2 (19:1:1) MC21_STATUS[-|UE|MiscV|AddrV|-|-|SyndV|UECC|Poison|-|-]: 0xbc002800001b011b"
RAW = "mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 21: {}"


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        ([DECODED, "[Hardware Error]: Unified Memory Controller Ext. Error Code: 0"], "uncorrected-error"),
        ([DECODED, "[Hardware Error]: Northbridge Error (node 0): DRAM ECC error"], "uncorrected-error"),
        (
            [DECODED, "[Hardware Error]: IPID: 0x0001009600150f00, Syndrome: 0x4020"],
            "uncorrected-error",
        ),
        (
            [RAW.format("bc002800001b011b"), "mce: [Hardware Error]: TSC 0 ADDR 1 SYND 4020 IPID 9600150f00"],
            "uncorrected-error",
        ),
        ([RAW.format("bd80000000000090")], "uncorrected-error"),  # of Intel: a memory controller reads
        ([DECODED, "[Hardware Error]: L3 Cache Ext. Error Code: 2"], "machine-check"),
        ([DECODED, "[Hardware Error]: IPID: 0x000700b020350000, Syndrome: 0x0"], "machine-check"),
    ],
)
def test_a_bank_of_a_memory_controller_accuses_no_processor(host, texts, rule):
    """One finding, about the memory, with the module that EDAC names; other banks are the processor's."""
    edac = "EDAC MC0: 1 UE Cannot decode normalized address on mc#0csrow#1channel#2 (csrow:1 page:0x0)"
    host.hear("mce: [Hardware Error]: Machine check events logged", *texts, *([edac] if "uncorrected" in rule else []))
    host.engine.read_log(until_end=True)
    rules = {"uncorrected-error", "machine-check"}
    (finding,) = (f for f in host.engine.verdict(host.cpu).findings if f.rule in rules)
    assert finding.rule == rule
    assert ("mc#0csrow#1channel#2" in finding.message) == ("uncorrected" in rule)


@pytest.mark.parametrize(
    ("code", "pid", "kind"), [(43, 4242, "elsewhere"), (31, 4242, "elsewhere"), (43, 4243, "xid"), (79, 4242, "xid")]
)
def test_what_a_killed_worker_leaves_behind_accuses_nobody(host, code, pid, kind):
    """An Xid that names a worker of ours shortly after we killed it; what a process cannot cause is the device's."""
    killed.note(4242)
    host.hear(f"NVRM: Xid (PCI:0000:65:00): {code}, pid={pid}, name=python3, Ch 00000008")
    host.engine.read_log(until_end=True)
    (event,) = host.watch.history.of(replace(GPU, uuid="bus 0000:65:00"))
    assert (event.kind, event.code) == (kind, code)
    assert str(pid) not in f"{event.fields} {event.detail} {event.name}"


@pytest.mark.parametrize(("bus_id", "kind"), [("00000000:65:00.0", "elsewhere"), ("00000000:66:00.0", "xid")])
def test_a_killed_worker_in_a_container_is_known_by_its_place(host, monkeypatch, bus_id, kind):
    """The log names the host's ids, and canaryd knows others: an Xid of a process, there and then, is the worker's."""
    monkeypatch.setattr(killed, "_killed", deque())
    killed.note(7, bus_id, hidden=True)
    host.hear("NVRM: Xid (PCI:0000:65:00): 43, pid=4243, name=python3, Ch 00000008")
    host.engine.read_log(until_end=True)
    (event,) = host.watch.history.of(replace(GPU, uuid="bus 0000:65:00"))
    assert event.kind == kind


def test_what_a_user_writes_to_the_log_is_nothing(host):
    """A record of another facility than the kernel's is not evidence, whatever it says."""
    host.hear(XID, priority=12)
    host.engine.read_log(until_end=True)
    assert [e for e in host.watch.history.of(host.device) if e.kind == "xid"] == []


def test_a_log_that_cannot_be_read_is_said(host):
    """No file, no permission: one sentence, and nothing else suffers."""
    host.log.unlink()
    host.engine.read_log(until_end=True)
    assert str(host.log) in host.watch.kernel_log.problem
    assert "\n" not in host.watch.kernel_log.problem
    host.log.touch()
    host.engine.read_log(until_end=True)
    assert host.watch.kernel_log.problem == ""


def test_a_log_of_another_format_is_a_problem_and_no_silence(host):
    """The lines that syslog writes name a lost GPU, and no reader of ours would ever tell."""
    host.log.write_text(f"Sep 18 12:34:00 node kernel: [ 1234.567890] {XID}\n" * 3)
    host.engine.read_log(until_end=True)
    assert f"{host.log}: its lines are no records of the kernel" in host.watch.kernel_log.problem
    assert host.store.note(LOG_PROBLEM_NOTE) == host.watch.kernel_log.problem


@pytest.mark.parametrize("present", [True, False])
def test_a_position_that_rotted_is_not_known(host, present):
    """The log is not read, so that no line of this boot counts twice. After a reboot it is read again."""
    boot = events.BOOT_ID.read_text().strip() if present else "00000000-0000-4000-8000-000000000000"
    host.store.set_note(LOG_NOTE, f"{boot}:12\x035")
    host.hear("CPU0: Core temperature above threshold, cpu clock throttled (total events = 1)")
    host.engine.read_log(until_end=True)
    assert ("is damaged" in host.watch.kernel_log.problem) is present
    assert host.store.note(LOG_PROBLEM_NOTE) == host.watch.kernel_log.problem
    assert any(e.kind == "thermal" for e in host.watch.history.of(host.device)) is not present


@pytest.mark.parametrize("place", [0, 14, 23, 35, 36])
def test_a_position_whose_boot_id_rotted_counts_no_line_twice(host, place):
    """One wrong character, or no colon, leaves the boot id like no other boot's: reading goes on or is refused."""
    host.hear("CPU0: Core temperature above threshold, cpu clock throttled (total events = 1)")
    host.engine.read_log(until_end=True)
    note = host.store.note(LOG_NOTE)
    host.store.set_note(LOG_NOTE, f"{note[:place]}{chr(ord(note[place]) ^ 1)}{note[place + 1 :]}")
    host.engine.read_log(until_end=True)
    assert sum(e.count for e in host.watch.history.of(host.device) if e.kind == "thermal") == 1
    assert ("is damaged" in host.watch.kernel_log.problem) is (note[place] == ":")


def test_a_reader_of_the_log_that_failed_is_a_problem(host):
    """An error that is a mistake of canaryd: metric, note and log say that nothing follows the kernel log."""
    stop, shown = threading.Event(), []
    stop.set()

    def changed():
        shown.append(host.watch.kernel_log.problem)
        host.engine.stop()

    def fail():
        raise RuntimeError("a mistake")

    host.watch.kernel_log.on_records = fail
    host.hear(XID)
    rounds = Rounds(host.engine, host.store, changed)
    Inventories(host.engine, Jobs(), rounds, Warnings(), changed=changed, refresh=changed, stop=stop)._read_kernel_log()
    assert shown == ["it failed; see the log of canaryd"]
    assert host.store.note(LOG_PROBLEM_NOTE) == shown[0]


def test_the_log_is_followed_until_the_engine_stops(host):
    """Lines arrive while the follower runs; a stop ends it at once."""
    thread = threading.Thread(target=lambda: host.engine.read_log(until_end=False))
    thread.start()
    host.hear("CPU0: Core temperature above threshold, cpu clock throttled (total events = 1)")
    eventually(lambda: any(e.kind == "thermal" for e in host.watch.history.of(host.device)))
    host.engine.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "bus_id", "wanted"),
    [
        ("xid", "0000:65:00.0", "GPU-1"),
        ("xid", "0000:65:00", "GPU-1"),
        ("aer", "0000:65:00.0", "GPU-1"),
        ("xid", "0000:66:00", "bus 0000:66:00"),
        ("amdgpu", "", "CPU-1"),
        ("aer", "0000:66:00.0", "CPU-1"),
        ("mce", "", "CPU-1"),
        ("sxid", "0000:a9:00.0", "CPU-1"),
        ("oom", "garbage", "CPU-1"),
    ],
)
def test_a_line_belongs_to_the_device_at_that_place(kind, bus_id, wanted):
    """A whole device, not its instance. A GPU that is not watched is never the host; what fits no device is."""
    record = LogRecord(boot="b", sequence=1, at=0.0, kind=kind, name="79", bus_id=bus_id)
    assert addressee(record, [MIG, CPU, GPU]) == wanted
    assert addressee(record, []) == (f"bus {bus_key(bus_id)}" if kind == "xid" else "host")


def test_the_fault_of_another_part_is_told_and_accuses_nobody(host):
    """A network card's PCI Express error is no finding against the host's processor."""
    host.hear("pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error message received from 0000:17:00.0")
    host.hear("mlx5_core 0000:17:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer", start=1)
    host.engine.read_log(until_end=True)
    events = host.watch.history.of(host.device)
    assert "elsewhere" in {e.kind for e in events}
    assert "aer" not in {e.kind for e in events}
    new = LogRecord(boot="b", sequence=3, at=0.0, kind="a new kind", name="x", bus_id="0000:17:00.0")
    assert kernel_log._event(new, [MIG, CPU, GPU]).kind == "elsewhere"
    assert {f.state for f in host.engine.verdict(host.cpu).findings if f.rule.startswith("pcie")} <= {State.HEALTHY}


def test_a_line_of_a_clock_that_was_not_set_is_dated_now(host, monkeypatch):
    """An Xid dated 1970 would be older than anything, and one of 2055 would stay new for ever."""
    host.hear(XID)
    monkeypatch.setattr(kernel_log, "log_event", lambda r, d: replace(log_event(r, d), first=12.0, last=12.0))
    host.engine.read_log(until_end=True)
    (event,) = [e for e in host.watch.history.of(GPU) if e.kind == "xid"]
    assert event.last == pytest.approx(time.time(), abs=60)


def test_a_log_that_is_missing_is_said_while_it_is_followed(host):
    """A follower whose file is not there says so; it does not wait for ever as if all were well."""
    host.log.unlink()
    begun = time.monotonic()
    host.engine.read_log(until_end=False)
    assert time.monotonic() - begun < soon(30)
    assert str(host.log) in host.watch.kernel_log.problem
