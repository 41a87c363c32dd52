"""One message of the kernel is recognised and taken apart, and names no process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from canaryd.worker.telemetry import kernel_messages
from canaryd.worker.telemetry.kernel_log import classify, parse
from tests.worker.telemetry.kernel_lines import DATA


def cases() -> Iterator[tuple[str, str]]:
    """Yield what each message of the fixture is to be, and the message."""
    for line in (DATA / "messages.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            wanted, _, message = line.partition(": ")
            yield wanted, message


CASES = list(cases())


def taken(message: str) -> kernel_messages.Message | None:
    """Return what becomes of a message that the kernel printed."""
    record = parse(f"4,1,1,-;{message}")
    assert record
    return classify(record.text)


def fields(message: str) -> dict[str, str]:
    found = taken(message)
    assert found
    return found.fields


@pytest.mark.parametrize(("wanted", "message"), CASES, ids=[f"{w}: {m[:60]}" for w, m in CASES])
def test_a_message_is_recognised(wanted, message):
    """Every form of the fixture has its kind, name and place on the bus, and what does not count is None."""
    found = taken(message)
    got = "-" if found is None else " ".join(part or "-" for part in (found.kind, found.name, found.bus_id))
    assert got == wanted


@pytest.mark.parametrize(("wanted", "message"), CASES, ids=[f"{w}: {m[:60]}" for w, m in CASES])
def test_no_process_is_named(wanted, message):
    """Neither name nor number of a process stays in the text or in a field."""
    found = taken(message)
    if found:
        assert not re.search(r"trainer|4711|4712|cache_mgr|Worker|nvidia-smi|<unknown>", f"{found.text} {found.fields}")


def test_nothing_but_the_process_is_cut():
    """The rest of a message stays as it was printed."""
    found = taken("Out of memory: Killed process 4711 (a) (b) total-vm:132kB, anon-rss:8kB")
    assert found
    assert found.text == "Out of memory: Killed process total-vm:132kB, anon-rss:8kB"
    found = taken("NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    assert found
    assert found.text == "NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus."


def test_an_nvlink_error_is_taken_apart():
    """Xid 144 to 150 have unit, severity, link, and their words as they were printed."""
    line = "NVRM: Xid (PCI:0019:01:00): 145, pid=1, name=a, RLW_RXPIPE Nonfatal XC1 i0 Link 07 (0x040980c2 0x8 0x1 0x0)"
    assert fields(line) == {
        "unit": "RLW_RXPIPE",
        "severity": "non-fatal",
        "cross_contained": "1",
        "injected": "0",
        "link": "7",
        "intr_info": "0x040980c2",
        "error_status": "0x8",
        "debug": "0x1 0x0",
    }


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0x2 (Node Reboot Required) to 0x0 (None)", "none"),
        ("0x0 (None) to 0x1 (GPU Reset Required)", "reset"),
        ("0x0 (None) to 0x1 (PF FLR)", "reset"),
        ("0x0 (None) to 0x2 (OS Reboot)", "reboot"),
        ("0x0 (None) to 0x3 (Drain P2P)", "drain-p2p"),
        ("0x0 (None) to 0x4 (Drain and Reset)", "drain-and-reset"),
        ("0x0 (None) to 0x5 (Recover IMEX Domain)", "recover-imex-domain"),
        ("0x0 (None) to 0x5 (GPU Reset Bus)", "bus-reset"),
        ("0x0 (None) to 0x6 (Bus Reset)", "bus-reset"),
        ("0x0 (None) to 0x7 (System Reboot)", "system-reboot"),
        ("0x0 (None) to 0x9 (Something New)", "0x9"),
    ],
)
def test_xid_154_names_its_action(text, action):
    """By its number: the words differ between drivers."""
    assert fields(f"NVRM: Xid (PCI:0000:65:00): 154, GPU recovery action changed from {text}")["action"] == action


def test_details_become_fields():
    """Place on the chip, link, instance, register, memory module: what the daemon needs to tell repeats apart."""
    assert fields("NVRM: Xid (PCI:0000:65:00): 13, Graphics SM Warp Exception on (GPC 9, TPC 5, SM 0): x") == {
        "gpc": "9",
        "tpc": "5",
        "sm": "0",
    }
    assert fields("NVRM: Xid (PCI:0000:65:00 GPU-I:05 GPU-CI:00): 43, x") == {"instance": "5", "compute_instance": "0"}
    assert fields("NVRM: Xid (PCI:0000:65:00): 74, NVLink: fatal error detected on link 6(0x10000, 0x0)") == {
        "link": "6",
        "registers": "0x10000 0x0",
    }
    assert fields("nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up") == {
        "switch": "1",
        "severity": "fatal",
        "link": "63",
    }
    place = "page:0x12 offset:0x0 grain:64 syndrome:0x0)"
    for middle, dimm in (
        ("memory read error on DIMM_B1 (channel:0 slot:0", "DIMM_B1"),
        ("on mc#2row#0 (row:0", "mc#2row#0"),
    ):
        wanted = {"controller": "2", "count": "7", "dimm": dimm}
        assert fields(f"EDAC MC2: 7 CE {middle} {place}") == wanted
