"""What a reboot destroys: taken from a stand-in BMC, firmware and rasdaemon, or named with what to type."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from canaryd.dossier import perishable
from canaryd.dossier.perishable import BMC_LOG, LARGEST, LONGEST, NEWEST, STORES, Folder, take
from canaryd.model import ENDPOINT, Device
from tests.dossier.made import GPU, HOST, NOW, PROCESSOR, tools, written
from tests.worker.telemetry.trees import plant

DATABASE = STORES[2]
SEL = f"   1 | 11/29/2026 | 03:12:44 UTC | Memory #0x53 of {HOST} | Uncorrectable ECC | Asserted"
PANIC = (
    b"Oops#1 Part1\n<4>CPU: 3 PID: 4711 Comm: train.py Tainted: P\n<0>Kernel panic - not syncing: Fatal machine check\n"
)
CPER = b"CPER\x01\x02\xff\xff\xff\xff\x03\x00"


def why(document: dict, name: str) -> str:
    (found,) = (each["why"] for each in document["absent"] if each["file"] == name)
    return found


@pytest.fixture
def bmc(tmp_path, monkeypatch):
    """Return a function that puts an ipmitool on the search path, and its device in the temporary root."""
    plant(tmp_path / "root", {"dev/ipmi0": ""})

    def put(body: str) -> None:
        monkeypatch.setenv("PATH", tools(tmp_path / "bin", ipmitool=body))

    return put


def test_the_log_of_the_bmc_is_taken(store, tmp_path, bmc):
    """By the one command that reads it; in a redacted dossier without names."""
    bmc(f'[ "$*" = "sel elist" ] && echo "{SEL}"')
    made, _, _ = written(store, tmp_path)
    assert (made / BMC_LOG).read_text() == f"{SEL}\n"
    made, _, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    text = (made / BMC_LOG).read_text()
    assert "Uncorrectable ECC" in text
    assert HOST not in text


def test_a_bmc_that_hangs_costs_its_deadline_and_leaves_no_process(store, tmp_path, bmc, monkeypatch):
    """The tool and what it started are killed; the dossier is written without its log."""
    bmc(f"sleep 600 & echo $! > {tmp_path}/child; echo begun; wait")
    monkeypatch.setitem(perishable.TOOL_PATIENCE, "ipmitool", 0.5)
    began = time.monotonic()
    _, document, _ = written(store, tmp_path)
    assert time.monotonic() - began < 20
    assert why(document, BMC_LOG).startswith("ipmitool did not end within 0.5 s. As root: ipmitool sel elist > ")
    status = Path("/proc") / (tmp_path / "child").read_text().strip() / "status"
    for _ in range(100):  # the kernel takes a moment, and in a container nobody may reap it
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the tool's child still runs")


def test_a_tool_that_prints_for_ever_is_stopped_too(store, tmp_path, bmc, monkeypatch):
    """Output is no sign of an end."""
    bmc("exec yes")
    monkeypatch.setitem(perishable.TOOL_PATIENCE, "ipmitool", 0.5)
    assert "did not end within 0.5 s" in why(written(store, tmp_path)[1], BMC_LOG)


def test_a_tool_that_fails_is_named_with_its_words(store, tmp_path, bmc):
    """And with the other way to the log."""
    bmc("echo 'Could not open device at /dev/ipmi0: No such device' >&2; exit 1")
    said = why(written(store, tmp_path)[1], BMC_LOG)
    assert said.startswith(
        "ipmitool ended with status 1: Could not open device at /dev/ipmi0: No such device. As root: "
    )
    assert said.endswith(perishable.REDFISH)


def test_of_a_long_log_the_newest_lines_are_kept(store, tmp_path, bmc):
    """Of 50 MB the last MiB, in whole lines; the first line says so."""
    bmc(f"yes '{SEL}' | head -c 50000000; echo; echo the newest")
    made, _, _ = written(store, tmp_path)
    first, *lines, last = (made / BMC_LOG).read_text().splitlines()
    assert first == "[canaryd left out all but the newest 1 MiB]"
    assert last == "the newest"
    assert set(lines[:-1]) == {SEL}
    assert LONGEST - 200 < (made / BMC_LOG).stat().st_size < LONGEST + 100


def test_without_tool_or_device_the_dossier_says_what_to_type(store, tmp_path, monkeypatch):
    """Never silent; the same for records, for rasdaemon and for the numbers of the server."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sha256sum").symlink_to(shutil.which("sha256sum"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    _, document, _ = written(store, tmp_path)
    typed = f"As root: ipmitool sel elist > {BMC_LOG}. Or from the BMC's network: {perishable.REDFISH}"
    assert why(document, BMC_LOG) == f"this machine has no /dev/ipmi0 (modprobe --all ipmi_si ipmi_devintf). {typed}"
    assert [why(document, f"records/{place}") for place in STORES] == ["there is none"] * 3
    assert "As root: grep -s . /sys/class/dmi/id/" in why(document, "numbers of the server")
    plant(tmp_path / "root", {"dev/ipmi0": ""})
    (tmp_path / "root" / STORES[0]).mkdir(parents=True)
    _, document, _ = written(store, tmp_path, now=NOW + 1)
    assert why(document, BMC_LOG) == f"ipmitool is not installed here. {typed}"
    assert why(document, f"records/{STORES[0]}") == "it is empty"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_what_only_root_may_read_is_named(tmp_path, monkeypatch):
    """As a user without rights."""
    root = plant(tmp_path / "root", {"dev/ipmi0": "", f"{STORES[0]}/dmesg-erst-1": "Oops", DATABASE: "SQLite"})
    for path in (root / "dev/ipmi0", root / STORES[0], root / DATABASE):
        path.chmod(0o600)
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", ipmitool="echo read"))
    above = [path for path in tmp_path.parents if path != Path("/") and path.stat().st_uid == 0]
    modes = {path: path.stat().st_mode for path in (tmp_path, *above)}
    folder = Folder(path=tmp_path, redactor=None)
    try:
        for path, mode in modes.items():
            path.chmod(mode | 0o011)
        tmp_path.chmod(0o777)
        os.seteuid(65534)
        take(folder, PROCESSOR, root, PROCESSOR.detail)
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
    assert not folder.contents
    assert folder.absent[BMC_LOG].startswith("this user may not use /dev/ipmi0. As root: ")
    assert folder.absent[f"records/{STORES[0]}"] == f"Permission denied. As root: cp -a /{STORES[0]} ."
    assert folder.absent[f"records/{DATABASE}"] == f"unable to open database file. As root: cp -a /{DATABASE} ."


def test_records_are_copied_with_their_checksums(store, tmp_path):
    """Text without processes, the rest byte by byte (`written` checks SHA256SUMS); no binary if it is redacted."""
    root = plant(tmp_path / "root", {f"{STORES[1]}/1790000000/dmesg.txt": f"<1>{HOST} Fatal"})
    for name, data in {"dmesg-efi-1": PANIC, "mce-erst-2": CPER}.items():
        (root / STORES[0]).mkdir(parents=True, exist_ok=True)
        (root / STORES[0] / name).write_bytes(data)
    made, _, _ = written(store, tmp_path)
    records = made / "records" / STORES[0]
    assert (records / "dmesg-efi-1").read_text() == PANIC.decode().replace("train.py", "[left out]")
    assert (records / "mce-erst-2").read_bytes() == CPER
    made, document, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    assert why(document, f"records/{STORES[0]}/mce-erst-2") == "it is binary and cannot be redacted"
    assert "Fatal" in (text := (made / "records" / STORES[1] / "1790000000/dmesg.txt").read_text())
    assert HOST not in text


def test_of_many_records_the_newest_are_taken(store, tmp_path):
    """By number and by size; the dossier says how many are left out, and how to take them."""
    many = {f"{STORES[0]}/dmesg-erst-{n}": "Oops" for n in range(NEWEST + 3)}
    root = plant(tmp_path / "root", many | {f"{STORES[1]}/{n}/dmesg.txt": "Oops" for n in range(3)})
    for n, name in enumerate(many):
        os.utime(root / name, (NOW + n, NOW + n))
    for n in range(3):
        path = root / STORES[1] / f"{n}/dmesg.txt"
        os.truncate(path, LARGEST if n == 1 else 100)
        os.utime(path, (NOW + n, NOW + n))
    made, document, _ = written(store, tmp_path)
    taken = {path.name for path in (made / "records" / STORES[0]).iterdir()}
    assert taken == {f"dmesg-erst-{n}" for n in range(3, NEWEST + 3)}
    assert (
        why(document, f"records/{STORES[0]}")
        == f"too many or too large: the oldest 3 left out. As root: cp -a /{STORES[0]} ."
    )
    assert [path.name for path in (made / "records" / STORES[1]).iterdir()] == ["2"]
    assert why(document, f"records/{STORES[1]}").startswith("too many or too large: the oldest 2 left out. ")


def test_the_database_of_rasdaemon_is_copied_while_it_is_open(store, tmp_path):
    """With what is committed. One that stays locked, is too large or is no database is named."""
    path = tmp_path / "root" / DATABASE
    path.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE mc_event (err_type TEXT)")
        db.execute("INSERT INTO mc_event VALUES ('Uncorrected')")
        made, _, _ = written(store, tmp_path)
        with contextlib.closing(sqlite3.connect(made / "records" / DATABASE)) as copy:
            assert copy.execute("SELECT * FROM mc_event").fetchall() == [("Uncorrected",)]
        _, document, _ = written(store, tmp_path, redact=True, now=NOW + 1)
        assert why(document, f"records/{DATABASE}") == "it is binary and cannot be redacted"
        db.execute("BEGIN EXCLUSIVE")
        _, document, _ = written(store, tmp_path, now=NOW + 2)
        assert why(document, f"records/{DATABASE}") == f"database is locked. As root: cp -a /{DATABASE} ."
    path.write_text("no database" * 100)
    assert "is not a database" in why(written(store, tmp_path, now=NOW + 3)[1], f"records/{DATABASE}")
    os.truncate(path, LARGEST + 1)
    assert "too many or too large: the oldest 1 left out" in why(
        written(store, tmp_path, now=NOW + 4)[1], f"records/{DATABASE}"
    )


def test_the_numbers_of_the_server_are_read_and_redacted(store, tmp_path):
    """Those that the record lacks, without placeholders; a short asset tag is a pseudonym too."""
    store.see_device(PROCESSOR, NOW)
    dmi = {"product_serial": "other", "chassis_serial": "C9471X0007", "chassis_asset_tag": "42\n"}
    plant(tmp_path / "root/sys/class/dmi/id", dmi | {"board_serial": "Default string"})
    _, document, page = written(store, tmp_path)
    known = {name: PROCESSOR.detail[name] for name in ("product_serial", "board_serial")}
    expected = known | {"chassis_serial": "C9471X0007", "chassis_asset_tag": "42"}
    assert {name: document["identity"]["server"][name] for name in expected} == expected
    assert "chassis serial C9471X0007" in page
    made, document, page = written(store, tmp_path, redact=True, now=NOW + 1)
    for name, number in expected.items():
        assert document["identity"]["server"][name].startswith("[serial ")
        assert name == "chassis_asset_tag" or number not in page + (made / "dossier.json").read_text()


def test_no_machine_is_asked_for_a_server_or_a_demonstration(tmp_path, bmc):
    """The log of another machine would be evidence of nothing."""
    bmc("echo asked")
    server = Device(uuid="endpoint-1", backend=ENDPOINT, index=0, model="vllm")
    for device, root in ((server, tmp_path / "root"), (GPU, None)):
        folder = Folder(path=tmp_path, redactor=None)
        take(folder, device, root, {})
        assert not folder.contents
        assert "no machine is asked" in folder.absent[BMC_LOG]
