"""The kernel's log: records taken apart, lines recognised, and a file or device followed without loss or repetition."""

from __future__ import annotations

import itertools
import json
import os
import pty
import shutil
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canaryd.facts import LogPosition, LogRecord
from canaryd.worker.telemetry import kernel_log
from canaryd.worker.telemetry.kernel_log import follow
from tests.command import soon
from tests.worker.telemetry.kernel_lines import DATA, ROOT, XID, line
from tests.worker.telemetry.trees import plant

BOOT = "0f0e0d0c-0b0a-4908-8706-050403020100"


@pytest.fixture
def boot_id(tmp_path) -> str:
    (tmp_path / "boot_id").write_text(f"{BOOT}\n")
    return str(tmp_path / "boot_id")


def feed(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(lines)


def read(
    path: Path, boot_id: str, after: int = -1, boot: str = BOOT, sysfs: str = "/nowhere"
) -> tuple[list[LogRecord], LogPosition]:
    """Read to the present end; return the records and the last position."""
    items = list(follow(str(path), boot=boot, after=after, until_end=True, boot_id=boot_id, sysfs=sysfs))
    position = items[-1]
    assert isinstance(position, LogPosition)
    return [i for i in items if isinstance(i, LogRecord)], position


class Live:
    """A follower that goes on, read step by step."""

    def __init__(self, path: Path, boot_id: str, beat: float = 0.01, **options) -> None:
        self.stopped = False
        self.stream = follow(str(path), boot_id=boot_id, beat=beat, stop=lambda: self.stopped, **options)

    def news(self) -> tuple[list[int], LogPosition]:
        """Return the numbers of the records up to where nothing more comes, and the position there."""
        numbers, idle = [], 0
        while idle < 3:
            item = next(self.stream)
            if isinstance(item, LogRecord):
                numbers.append(item.sequence)
                idle = 0
            else:
                idle, position = idle + 1, item
        return numbers, position


def test_a_whole_log(boot_id, log):
    """Health is picked out of the rest; forged, garbled and lost lines are told apart from it."""
    shutil.copy(DATA / "boot.kmsg", log)
    records, position = read(log, boot_id, boot="")
    assert [(r.sequence, r.kind, r.name) for r in records] == [
        (102, "xid", "79"),
        (103, "off-bus", ""),
        (106, "mce", "corrected"),
        (108, "mce", "logged"),
        (113, "nvme", "timeout"),
    ]
    assert position == LogPosition(boot=BOOT, sequence=113, lost=3, garbled=1)
    assert records[0].text == "NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus."
    assert {r.boot for r in records} == {BOOT}


def test_a_lost_gpu_keeps_its_name(boot_id, log):
    """The driver prints a GPU's uuid before its first Xid: it stays known, even for records after a restart."""
    shutil.copy(DATA / "boot.kmsg", log)
    records, _ = read(log, boot_id, after=102)
    assert (records[0].sequence, records[0].fields["uuid"]) == (103, "GPU-12345678-1234-1234-1234-123456789abc")


RING = "amdgpu: ring gfx_0.0.0 timeout, signaled seq=5131, emitted seq=5132"
PORT = "pcieport 0000:60:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible, (Unregistered Agent)"


def test_a_line_without_a_place_is_about_the_only_device_of_its_vendor(boot_id, log, tmp_path):
    """And about none where there are several, or where nothing shows what is on the bus."""
    feed(log, line(1, RING), line(2, "NVRM: RmInitAdapter failed! (0x26:0x38:1096)"))
    for place in ("0000:03:00.0", "0000:83:00.0"):
        plant(tmp_path / "bus/pci/devices" / place, {"vendor": "0x1002", "class": "0x120000"})
        records, _ = read(log, boot_id, sysfs=str(tmp_path))
        assert [r.bus_id for r in records] == [place if place == "0000:03:00.0" else "", ""]
    records, _ = read(log, boot_id)
    assert [r.bus_id for r in records] == ["", ""]


def test_a_line_about_a_port_names_what_is_below_it(boot_id, log, tmp_path):
    """A port has no finding of its own: what hangs below it has."""
    feed(log, line(1, PORT), line(2, PORT.replace("60:01", "60:02")))
    plant(tmp_path / "bus/pci/devices/0000:60:01.0/0000:61:00.0", {"vendor": "0x10de", "class": "0x030200"})
    records, _ = read(log, boot_id, sysfs=str(tmp_path))
    assert [r.fields.get("below", "") for r in records] == ["0000:61:00.0", ""]


@pytest.mark.parametrize("prefix", [8, 11, 12, 30, 14])
def test_what_a_process_writes_never_counts(boot_id, log, prefix):
    """The kernel gives its own records facility 0, and all others another one."""
    feed(log, line(1, prefix=prefix), line(2, "NVRM: GPU at PCI:0000:65:00: GPU-00000000-0000", prefix=prefix), line(3))
    records, _ = read(log, boot_id)
    assert [(r.sequence, "uuid" in r.fields) for r in records] == [(3, False)]


def test_the_time_of_a_record(boot_id, log):
    """The kernel's clock counts from boot; a record is never in the future."""
    now, since_boot = time.time(), time.monotonic()
    feed(log, line(1, usec=int((since_boot - 0.5) * 1e6)), line(2, usec=int((since_boot + 1e6) * 1e6)))
    records, _ = read(log, boot_id)
    assert records[0].at == pytest.approx(now - 0.5, abs=0.2)
    assert records[1].at == pytest.approx(now, abs=0.2)


def test_a_machine_check_counts_once(boot_id, log):
    """The announcement counts only where no line with the status follows, and it is not held back for ever."""
    announced = "mce: [Hardware Error]: Machine check events logged"
    status = "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 1: be00000000000000"
    feed(log, line(1, announced))
    live = Live(log, boot_id)
    assert live.news() == ([1], LogPosition(boot=BOOT, sequence=1))
    feed(log, line(2, announced), line(3, "[Hardware Error]: a detail"), line(4, status), line(5, status), line(6, "x"))
    assert live.news()[0] == [4, 5]
    feed(log, line(7, announced), line(8, XID), line(9, announced), line(10, announced))
    assert live.news()[0] == [7, 9, 10]


FIRMWARE = "{7}[Hardware Error]: "


def firmware(start: int, severity: str, *lines: str) -> list[str]:
    """The records of an error that the firmware reports through APEI, from number `start` on."""
    texts = ["Hardware error from APEI Generic Hardware Error Source: 1", f"event severity: {severity}", *lines]
    return [line(start + i, FIRMWARE + text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("severity", "name"), [("corrected", "correctable"), ("recoverable", "nonfatal"), ("fatal", "fatal")]
)
def test_an_error_that_the_firmware_found_on_pci_express_is_that_devices(boot_id, log, severity, name):
    """It is no machine check of the host's processor, whatever lies between its lines."""
    part = ("  section_type: PCIe error", "  version: 3.0", "  device_id: 0000:5e:00.0", "  class_code: 010802")
    feed(log, *firmware(1, severity, " Error 0, type: x"), line(4, "a line of another processor"))
    live = Live(log, boot_id)
    feed(log, *(line(5 + i, FIRMWARE + text) for i, text in enumerate(part)), line(9))
    assert live.news() == ([7, 9], LogPosition(boot=BOOT, sequence=9))
    found, _ = read(log, boot_id)
    assert (found[0].kind, found[0].name, found[0].bus_id) == ("aer", name, "0000:5e:00.0")
    assert "PCIe error" in found[0].text
    assert severity in found[0].text


def test_any_other_error_that_the_firmware_found_is_the_hosts(boot_id, log):
    """Memory, or a kind that is not told; a report with two sections counts for both."""
    memory = ("  section_type: memory error", "  physical_address: 0x0000000040fa6000")
    both = ("  section_type: PCIe error", "  device_id: 0000:5e:00.0", *memory)
    feed(log, *firmware(1, "recoverable", *memory), *firmware(5, "recoverable"), line(7))
    feed(log, *firmware(8, "corrected", *both), *firmware(14, "corrected"))
    records, position = read(log, boot_id)
    told = [(r.sequence, r.kind, r.name, r.fields.get("section", "")) for r in records]
    assert told == [
        (3, "mce", "memory", "memory error"),
        (6, "mce", "uncorrected", ""),
        (7, "xid", "7", ""),
        (11, "aer", "correctable", "PCIe error"),
        (12, "mce", "corrected", "memory error"),
        (15, "mce", "corrected", ""),
    ]
    assert position.sequence == 15
    assert [r.sequence for r in read(log, boot_id, after=position.sequence)[0]] == []


def test_an_error_in_memory_that_the_firmware_found_counts_once(boot_id, log):
    """Linux passes it on as a machine check of bank 255, which no processor has; a bank that exists counts."""
    relayed, own = (f"mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank {b}: 940000000000009f" for b in (255, 13))
    announced = "mce: [Hardware Error]: Machine check events logged"
    feed(log, *firmware(1, "corrected", "  section_type: memory error"), line(4, announced), line(5, relayed))
    feed(log, line(6, announced), line(7, own), line(8, "x"))
    assert [r.sequence for r in read(log, boot_id)[0]] == [3, 7]
    # Linux prints few reports of uncorrected errors at a time, and passes on those too that it does not print.
    uncorrected = "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 255: b40000000000009f"
    feed(log, line(9, announced), line(10, uncorrected))
    assert [(r.sequence, r.name) for r in read(log, boot_id)[0]][2:] == [(10, "memory")]


def test_a_report_of_the_firmware_names_the_module(boot_id, log):
    """In the firmware's words, by the slot that the board's table has, or by number; and each of two errors its own."""
    bare, named = "  node:6 card:1 module:0 rank:1 bank:2", "  DIMM location: not present. DMI handle: 0x1110"
    for start, lines in enumerate(
        (
            (" Error 0, type: corrected", " fru_text: D2", "  section_type: memory error", bare, named),
            ("  section_type: memory error", "  node: 6 card: 1 module: 0", "  DIMM location: CPU 1 DIMM 5"),
            ("  section_type: memory error", bare),
            (" Error 0, type: corrected", " fru_text: CPU2", "  section_type: general processor error"),
            (
                *(" Error 0, type: corrected", " fru_text: A1", "  section_type: memory error", bare),
                *(" Error 1, type: corrected", " fru_text: B1", "  section_type: memory error", bare),
            ),
        )
    ):
        feed(log, *firmware(20 * start, "corrected", *lines))
    records, _ = read(log, boot_id)
    place = "node 6 card 1 module 0"
    assert [(r.fields.get("dimm"), r.fields.get("controller")) for r in records] == [
        *(("D2", place), ("CPU 1 DIMM 5", place), ("unknown", place), (None, None), ("A1", place), ("B1", place)),
    ]
    assert records[0].text.endswith(f"event severity: corrected, memory error at D2, {place}")
    assert records[3].text.endswith("event severity: corrected, general processor error at CPU2")


def test_another_message_ends_a_report_of_the_firmware(boot_id, log):
    """Records keep their order, and the position passes none that waits: nothing counts twice after a restart."""
    part = ("  section_type: PCIe error", "  device_id: 0000:5e:00.0")
    logged = "mce: [Hardware Error]: Machine check events logged"
    feed(log, *firmware(1, "fatal", *part), line(5, logged), line(6, FIRMWARE + "  section_type: memory error"))
    stream = follow(str(log), boot_id=boot_id, beat=0.01)
    first, position = next(stream), next(stream)
    stream.close()
    assert (first.sequence, position.sequence) == (4, 4)
    assert [(r.sequence, r.name) for r in read(log, boot_id)[0]] == [(4, "fatal"), (5, "logged")]
    assert [r.sequence for r in read(log, boot_id, after=4)[0]] == [5]


def test_a_report_of_the_firmware_that_is_still_being_written_waits(boot_id, log):
    """Its lines arrive one by one: the severity alone says nothing yet, and the position does not pass it."""
    feed(log, *firmware(1, "fatal"))
    rest = [line(3, FIRMWARE + "  section_type: PCIe error"), line(4, FIRMWARE + "  device_id: 0000:5e:00.0")]
    looks = itertools.count()

    def stop() -> bool:
        if next(looks) == 2:  # after a look that found nothing
            feed(log, *rest)
        return False

    stream = follow(str(log), boot_id=boot_id, beat=0.2, stop=stop)
    assert next(stream) == LogPosition(boot=BOOT, sequence=1)
    record = next(item for item in stream if isinstance(item, LogRecord))
    stream.close()
    assert (record.kind, record.sequence) == ("aer", 4)


@pytest.mark.parametrize("task", ["gdscheck", "cache_mgr_event", "python3.11", "pt_main_thread", "VLLM::Worker_TP"])
def test_a_task_of_any_name_hangs_in_the_driver_that_its_trace_shows(boot_id, log, task):
    """One record for a task; one that hangs elsewhere, with a call into a driver left on its stack, is none."""
    blocked = f"INFO: task {task}:4711 blocked for more than 120 seconds."
    trace = ("      Tainted: P           OE     5.15.0", "Call Trace:", " <TASK>", " __schedule+0x24e/0x590")
    driver = (" os_acquire_rwlock_read+0x35/0x50 [nvidia]", " _nv051482rm+0x10/0x40 [nvidia]")
    elsewhere = (" rpc_wait_bit_killable+0x25/0xb0 [sunrpc]", " ? nvidia_ioctl+0x10/0x40 [nvidia]")
    uvm = (" uvm_va_space_mm_register+0x35/0x50 [nvidia_uvm 3f0c]",)
    for start, calls in enumerate((driver, elsewhere, uvm)):
        feed(log, *(line(10 * start + n, text) for n, text in enumerate((blocked, *trace, *calls))))
    records, position = read(log, boot_id)
    assert [(r.sequence, r.kind, r.name, r.fields) for r in records] == [
        (5, "hang", "nvidia", {"seconds": "120"}),
        (25, "hang", "nvidia", {"seconds": "120"}),
    ]
    assert not [r for r in records if task in r.text or "4711" in r.text]
    assert position.sequence == 25


def test_a_report_that_nothing_completes_ends_by_the_kernels_clock(boot_id, log):
    """Other lines that pour in keep it back for two seconds, and a start from any position counts it once."""
    reported = line(1, "mce: [Hardware Error]: Machine check events logged", usec=10_000_000)
    feed(log, reported, line(2, "x", usec=11_000_000))
    stream = follow(str(log), boot_id=boot_id, beat=0.01)
    assert next(stream) == LogPosition(boot=BOOT, sequence=0)
    feed(log, line(3, "x", usec=12_500_000))
    record = next(item for item in stream if isinstance(item, LogRecord))
    assert (record.sequence, next(stream).sequence) == (1, 3)
    stream.close()
    assert [[r.sequence for r in read(log, boot_id, after=n)[0]] for n in (0, 1)] == [[1], []]


def test_another_boot_is_read_from_its_start(boot_id, log):
    """A number is good for one boot only."""
    feed(log, line(1), line(2))
    assert [r.sequence for r in read(log, boot_id, after=1)[0]] == [2]
    assert [r.sequence for r in read(log, boot_id, after=1, boot="another")[0]] == [1, 2]


def test_a_replaced_file_is_read_from_its_start(boot_id, log):
    """After a rotation the rest of the old file comes first; numbers may start again, or go on."""
    feed(log, line(500))
    live = Live(log, boot_id)
    assert live.news()[0] == [500]
    feed(log, line(501))
    log.rename(log.with_suffix(".1"))
    feed(log.with_suffix(".1"), line(502))
    feed(log, line(503))
    assert live.news() == ([501, 502, 503], LogPosition(boot=BOOT, sequence=503))
    log.rename(log.with_suffix(".2"))
    feed(log, line(0), line(1))
    assert live.news() == ([0, 1], LogPosition(boot=BOOT, sequence=1))


def test_a_truncated_file_is_read_from_its_start(boot_id, log):
    """Also when it has grown beyond the old end again before anybody looked."""
    feed(log, line(500), line(501))
    live = Live(log, boot_id)
    assert live.news()[0] == [500, 501]
    log.write_text("")
    assert live.news()[0] == []
    feed(log, line(502))
    assert live.news()[0] == [502]
    log.write_text("".join(line(n) for n in range(100)))
    assert live.news() == (list(range(100)), LogPosition(boot=BOOT, sequence=99))


def test_a_file_that_was_replaced_while_nobody_looked(boot_id, log):
    """A file whose newest record is older than the position is another file: it counts from its start."""
    feed(log, line(0), line(1))
    assert [r.sequence for r in read(log, boot_id, after=500)[0]] == [0, 1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.integers(1, 200), max_size=12), st.integers(1, 12))
def test_restarts_neither_repeat_nor_lose_a_record(boot_id, log, sizes, count):
    """Wherever the feeder has come to, and wherever the reader is stopped."""
    log.write_text("")
    whole = "".join(line(n) for n in range(count))
    seen, after = [], -1
    for size in [*sizes, len(whole)]:
        feed(log, whole[:size])
        whole = whole[size:]
        records, position = read(log, boot_id, after=after)
        assert (position.lost, position.garbled) == (0, 0)
        seen += [r.sequence for r in records]
        after = position.sequence
    assert seen == list(range(count))


def test_an_idle_log_has_a_heartbeat(boot_id, log):
    """Whoever waits for news hears at least every beat that the reader lives."""
    feed(log, line(1))
    stream = follow(str(log), boot_id=boot_id, beat=0.2)
    assert isinstance(next(stream), LogRecord)
    first, began = next(stream), time.monotonic()
    second = next(stream)
    assert first == second == LogPosition(boot=BOOT, sequence=1)
    assert 0.1 < time.monotonic() - began < soon(2.0)


def test_a_log_that_is_not_there_is_said_and_never_passes_for_one_that_was_read(boot_id, log):
    """After a beat without it, and no position comes before: to the caller a position means that all is well."""
    stream = follow(str(log), boot_id=boot_id, beat=0.2)
    with pytest.raises(FileNotFoundError, match=r"/kmsg: no kernel log there; set telemetry.kernel_log to /dev/kmsg"):
        next(stream)


def test_a_log_that_goes_away_for_a_beat_is_said(boot_id, log):
    """What is fed to a path that nobody looks at any more would never be read."""
    feed(log, line(1))
    live = Live(log, boot_id)
    assert live.news()[0] == [1]
    log.unlink()
    with pytest.raises(FileNotFoundError, match="no kernel log there"):
        live.news()


@pytest.mark.parametrize("there", [True, False])
def test_a_log_that_comes_within_a_beat_is_read(boot_id, log, there):
    """A rotation leaves the path empty for a moment, and a feeder may start a moment later than canaryd."""
    live = Live(log, boot_id, beat=2.0)
    if there:
        feed(log, line(500))
        assert [next(live.stream), next(live.stream)][1] == LogPosition(boot=BOOT, sequence=500)
        log.unlink()
    later = threading.Timer(0.7, feed, (log, line(1)))
    later.start()
    found = next(live.stream)
    later.join()
    assert isinstance(found, LogRecord)
    assert found.sequence == 1


def test_a_line_that_is_news_is_dated_as_news(boot_id, log):
    """No time server corrects the clock of the stamps: after months it is minutes off, either way."""
    feed(log, line(1, usec=1))
    live = Live(log, boot_id)
    assert next(live.stream).at < time.time() - 60  # the machine runs for longer; from the backlog, so it may be old
    live.news()
    began = time.time()
    feed(log, line(2, usec=1), line(3, usec=int((time.monotonic() + 1e6) * 1e6)))
    found = [next(live.stream), next(live.stream)]
    assert [r.sequence for r in found] == [2, 3]
    for record in found:
        assert began - 1.5 < record.at <= time.time()


def test_the_present_end_is_reached_while_lines_pour_in(boot_id, log):
    """A check reads what is there when it begins, and does not run after a storm that is faster than it."""
    numbers = itertools.count(1)

    def stop() -> bool:
        number = next(numbers)
        feed(log, line(number))
        return number > 50

    feed(log, line(0))
    found = list(follow(str(log), boot_id=boot_id, until_end=True, stop=stop))
    assert next(numbers) < 10
    assert isinstance(found[-1], LogPosition)
    assert found[-1].sequence >= 0


def test_what_cannot_be_read_is_said(boot_id, log, tmp_path):
    """One clear error each, with the path."""
    with pytest.raises(
        FileNotFoundError, match=r"^/.*/kmsg: no kernel log there; set telemetry.kernel_log to /dev/kmsg"
    ):
        read(log, boot_id)
    with pytest.raises(ValueError, match=r"neither a character device nor a regular file"):
        read(tmp_path, boot_id)
    with pytest.raises(ValueError, match=r"/dev/null: this device has ended"):
        read(Path("/dev/null"), boot_id)
    feed(log, line(1))
    with pytest.raises(OSError, match=r"^/.*/none: cannot tell which boot this is.*\(No such file or directory\)"):
        read(log, str(tmp_path / "none"))


SYSLOG = "Sep 18 12:34:00 node kernel: [ 1234.567890] NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    "text", [SYSLOG, "[ 1234.567890] NVRM: Xid (PCI:0000:10:00): 79, x\n", '{"MESSAGE": "NVRM"}\n']
)
def test_lines_of_another_format_are_refused(boot_id, log, text):
    """What syslog, dmesg or the journal writes is read by nobody, so the log counts as not read from the first line."""
    feed(log, text)
    with pytest.raises(
        ValueError, match=r"/kmsg: its lines are no records of the kernel; wanted prio,number,.*, got '"
    ):
        read(log, boot_id)
    stream = follow(str(log), boot_id=boot_id, beat=0.01)
    with pytest.raises(ValueError, match="no records of the kernel"):
        next(stream)
    feed(log, line(1))
    assert [r.sequence for r in read(log, boot_id)[0]] == [1]


def test_a_log_that_changes_its_format_is_refused_when_what_it_told_has_counted(boot_id, log):
    """Some lines that are no records are garbled; where nothing else comes any more, it is another format."""
    feed(log, SYSLOG, line(1), *[SYSLOG] * 20)
    assert [r.sequence for r in read(log, boot_id)[0]] == [1]
    feed(log, SYSLOG)
    stream = follow(str(log), boot_id=boot_id, beat=0.01)
    assert [next(stream).sequence, next(stream).sequence] == [1, 1]  # the record, and the position after it
    with pytest.raises(ValueError, match="no records of the kernel"):
        list(itertools.islice(stream, 100))  # before it may come positions, if this machine is slow


def test_a_log_that_may_not_be_read(tmp_path):
    """One line names the permission that is missing; tried as another user where the tests run as root."""
    log = tmp_path / "kmsg"
    log.write_text(line(1))
    log.chmod(0)
    code = (
        "import os, sys\n"
        "from canaryd.worker.telemetry.kernel_log import follow\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        f"try: list(follow({str(log)!r}, until_end=True))\n"
        "except PermissionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "no permission to read the kernel log; run as root or with the capability CAP_SYSLOG" in done.stdout


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A character device that gives one line per read, as the kernel's log gives one record: a terminal."""
    master, slave = pty.openpty()
    modes = termios.tcgetattr(slave)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    yield master, os.ttyname(slave)
    os.close(master)
    os.close(slave)


def test_a_device_is_read_record_by_record(boot_id, terminal):
    """Up to its present end, and further when more comes; continuation lines belong to the record before."""
    master, path = terminal
    os.write(master, f"{line(1)} SUBSYSTEM=pci\n{line(2)}".encode())
    records, position = read(Path(path), boot_id)
    assert ([r.sequence for r in records], position.sequence, position.garbled) == ([1, 2], 2, 0)
    live = Live(Path(path), boot_id, boot=BOOT, after=2)
    assert live.news()[0] == []
    os.write(master, line(5).encode())
    assert live.news() == ([5], LogPosition(boot=BOOT, sequence=5, lost=2))


OVERRUN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>
ssize_t read(int fd, void *data, size_t size)
{
    static ssize_t (*real)(int, void *, size_t);
    static int reads;
    if (!real) real = dlsym(RTLD_NEXT, "read");
    if (isatty(fd) && ++reads == 2) { errno = EPIPE; return -1; }
    return real(fd, data, size);
}
"""


def test_a_device_that_never_runs_dry_is_read_for_a_while(boot_id, terminal, monkeypatch):
    """What was there when it was opened was read or overwritten long before."""
    monkeypatch.setattr(kernel_log, "STORM", 0.2)
    master, path = terminal
    began = time.monotonic()

    def stop() -> bool:
        os.write(master, line(1).encode())
        return time.monotonic() - began > 20

    list(follow(path, boot_id=boot_id, until_end=True, stop=stop))
    assert time.monotonic() - began < soon(10)


def test_an_overrun_is_survived_and_counted(boot_id, terminal, tmp_path):
    """The kernel answers EPIPE once when it has overwritten unread records, then gives the oldest that is left.

    A terminal cannot do that, so a preloaded `read` gives the error in the kernel's place.
    """
    compiler = shutil.which("cc")
    if not compiler or sys.platform != "linux":
        pytest.skip("no C compiler for the stand-in of an overrun")
    (tmp_path / "overrun.c").write_text(OVERRUN)
    library = tmp_path / "overrun.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "overrun.c", "-ldl"], check=True)
    master, path = terminal
    os.write(master, f"{line(1)}{line(7)}".encode())
    code = (
        "import json\n"
        "from canaryd.codec import to_json\n"
        "from canaryd.worker.telemetry.kernel_log import follow\n"
        f"print(json.dumps([to_json(i) for i in follow({path!r}, until_end=True, boot_id={boot_id!r})]))\n"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    items = json.loads(done.stdout)
    assert [i["sequence"] for i in items if "kind" in i] == [1, 7]
    assert items[-1] == {"boot": BOOT, "sequence": 7, "lost": 5, "garbled": 0}
