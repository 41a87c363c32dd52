"""A redacted dossier names nothing."""

from __future__ import annotations

import json
import re

import pytest

from canaryd.dossier import redact
from canaryd.store.store import Store
from tests.dossier.made import GPU, HOST, NOW, PEER, PROCESSOR, SERIAL, UUID, run, verdict, written


def test_a_redacted_dossier_names_nothing(store, tmp_path):
    """No host, serial, uuid, bus id, path or address in any file; the part's own facts stay, and the page says so."""
    store.see_device(PROCESSOR, NOW)
    made, document, page = written(store, tmp_path, redact=True)
    text = "\n".join(p.read_text() for p in made.rglob("*") if p.is_file()).lower()
    private = (UUID, PEER, UUID.partition("-")[2], SERIAL, HOST, "0000:65:00", "10.1.2.3", "/srv/models", "secret-name")
    private += ("S0815X4711", "UM239S001122", "80AD0122", "80AD0133")
    for name in private:
        assert name.lower() not in text, name
    assert "redacted: names of hosts" in text
    assert document["redacted"] is True
    assert document["identity"]["server"]["product"] == "Supermicro SYS-821GE-TNHR"
    assert (document["identity"]["model"], document["failures"][0]["bits"]) == ("NVIDIA H200", {"13": 2})
    assert document["identity"]["detail"]["vbios"] == "96.00.A5.00.01"
    assert "Redacted: " in page


@pytest.mark.parametrize("host", ["vm", "x", "device", "healthy", "state", "faulty"])
def test_no_name_of_a_host_is_too_short_or_too_plain(tmp_path, host):
    """Where a field holds it, it is a pseudonym; the words of the format are not."""
    with Store.open(tmp_path / "one", now=lambda: NOW) as one:
        one.see_device(GPU, NOW)
        one.add_run(run(1, wrong=1, environment={"hostname": host}))
        one.set_verdict(verdict())
        made, document, page = written(one, tmp_path, redact=True)
    assert re.fullmatch(r"\[host [0-9a-f]{8}\]", document["identity"]["host"])
    assert (document["verdict"]["state"], document["failures"][0]["subject"]) == ("faulty", "device")
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    about = lines[1]["testRunArtifact"]["testRunStart"]["dutInfo"]
    assert about["name"] == about["dutInfoId"] == document["identity"]["host"]
    assert f"<td>{document['identity']['host']}</td>" in page
    assert f"<td>{host}</td>" not in page


def test_equal_names_stay_equal_inside_and_differ_outside(store, tmp_path):
    """The part's uuid is one pseudonym wherever it stands; another dossier has another one."""
    first, one, _ = written(store, tmp_path, redact=True)
    _, other, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    assert re.fullmatch(r"\[uuid [0-9a-f]{8}\]", one["identity"]["uuid"])
    assert one["identity"]["uuid"] != other["identity"]["uuid"]
    assert one["peers"][0]["uuid"] not in (one["identity"]["uuid"], other["peers"][0]["uuid"])
    lines = [json.loads(line) for line in (first / "ocp.jsonl").read_text().splitlines()]
    assert lines[1]["testRunArtifact"]["testRunStart"]["metadata"]["uuid"] == one["identity"]["uuid"]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("bus 0000:65:00.0", "bus 00000000:65:00.0", True),
        ("bus 0000:65:00.0", "bus 0000:65:00", True),
        ("at 0000:65:00.0", "at 0000:66:00.0", False),
        ("GPU-12345678-1234-1234-1234-123456789abc", "12345678-1234-1234-1234-123456789ABC", True),
        (HOST, HOST.upper(), True),
        ("see fe80::1ff:fe23:4567:890a", "see fe80::1", False),
        ("ask kim.doe@corp.example", "(KIM.DOE@corp.example)", True),
        ("ask kim@corp.example", "ask lee@corp.example", False),
    ],
)
def test_a_thing_has_one_pseudonym_however_it_is_written(store, a, b, equal):
    """Domain, function, prefix and case do not make another thing."""
    redactor = redact.Redactor(store, HOST, salt=b"salt")
    one, other = re.search(r"\[\w+ \w+\]", redactor.text(a)), re.search(r"\[\w+ \w+\]", redactor.text(b))
    assert one
    assert other
    assert (one[0] == other[0]) == equal


def test_the_short_name_of_a_host_is_redacted_too(store):
    """The kernel log and the prompt of a shell write the first part of a name alone."""
    redactor = redact.Redactor(store, "hall3-node9.corp.example", salt=b"salt")
    assert "hall3" not in redactor.text("hall3-node9 kernel: NVRM: Xid 79, seen from root@hall3-node9")


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.9.0+cu130",
        "2026-11-21 19:27:40",
        "driver 580.65.06",
        "vbios 96.00.A5.00.01",
        "bits 3, 4 and/or 5",
        "std::x",
        "#1 SMP PREEMPT @0",
        "recorded_kernels@96x80x256",
        "torch@2.13.0 of systemd-coredump@3-1234-0.service",
    ],
)
def test_what_names_nothing_is_left_alone(store, text):
    """Versions, times and prose are no addresses."""
    redactor = redact.Redactor(store, HOST, salt=b"salt")
    assert redactor.text(text) == text
