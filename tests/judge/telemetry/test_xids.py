"""The catalogue of Xids, NVLink 5 errors and SXids: complete, known words only, and the well-known codes pinned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canaryd.config.values import GRADES
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.xids import BUCKETS, catalogue, decode, explain, explain_sxid
from tests.command import ROOT, environment

DATA = json.loads((ROOT / "canaryd/judge/telemetry/xid_catalogue.json").read_text())
ROWS, XIDS = DATA["nvlink5"], catalogue()
MNEMONICS = {row[0]: row[1] for row in DATA["xids"]}
NATURES = {"application", "either", "hardware", "driver", "link", "thermal-power", "informational", "unused"}


# --- Xids ------------------------------------------------------------------------------------------------------------


def test_the_catalogue_is_complete():
    """Every code from 1 to 172, once."""
    assert list(XIDS) == list(range(1, 173))
    assert all(XIDS[code].code == code for code in XIDS)


@pytest.mark.parametrize("code", XIDS)
def test_every_entry_speaks_in_known_words(code):
    """Buckets, natures and grades are those that are explained; there is a mnemonic and one short title."""
    xid = XIDS[code]
    assert {xid.immediate, xid.investigatory} - {""} <= set(BUCKETS)
    assert xid.nature in NATURES
    assert xid.grade in (*GRADES, xids.UNKNOWN)
    assert MNEMONICS[code].replace(" / ", "_").replace("_", "").isalnum()
    assert 0 < len(xid.title) <= 70
    assert xid.advice
    assert not xid.advice.endswith(".")


@pytest.mark.parametrize(
    ("code", "immediate", "grade", "nature"),
    [
        (8, "RESTART_APP", "application", "either"),
        (13, "RESTART_APP", "application", "either"),
        (31, "RESTART_APP", "application", "either"),
        (43, "IGNORE", "none", "either"),
        (45, "WORKFLOW_XID_45", "application", "either"),
        (48, "WORKFLOW_XID_48", "reset", "hardware"),
        (54, "CHECK_MECHANICALS", "inspect", "thermal-power"),
        (62, "RESET_GPU", "reset", "driver"),
        (63, "IGNORE", "none", "hardware"),
        (64, "RESET_GPU", "reset", "hardware"),
        (74, "WORKFLOW_NVLINK_ERR", "reset", "link"),
        (78, "UPDATE_SWFW", "application", "driver"),
        (79, "RESTART_BM", "reboot", "hardware"),
        (92, "IGNORE", "none", "hardware"),
        (94, "RESTART_APP", "application", "hardware"),
        (95, "RESET_GPU", "reset", "hardware"),
        (119, "RESET_GPU", "reset", "driver"),
        (120, "RESET_GPU", "reset", "driver"),
        (140, "RESET_GPU", "reset", "hardware"),
        (142, "CONTACT_SUPPORT", "inspect", "either"),
        (143, "RESET_GPU", "reset", "hardware"),
        (149, "WORKFLOW_NVLINK5_ERR", "reset", "link"),
        (151, "RESTART_VM", "reboot", "driver"),
        (154, "XID_154", "none", "informational"),
        (159, "CHECK_UVM", "reset", "link"),
        (163, "", "none", "thermal-power"),
        (167, "", "inspect", "link"),
        (170, "", "unknown", "link"),
        (172, "", "reset", "hardware"),
    ],
)
def test_the_well_known_codes(code, immediate, grade, nature):
    """NVIDIA's bucket as it is, our grade from it, and our reading of whose fault it is."""
    xid = explain(code)
    assert (xid.immediate, xid.grade, xid.nature) == (immediate, grade, nature)


def test_no_xid_alone_calls_for_a_replacement():
    """By NVIDIA's RMA policy the field diagnostic decides."""
    assert "rma" not in {xid.grade for xid in XIDS.values()}


def test_an_unused_code_is_unknown():
    """The catalogue begins with Ampere; what an older GPU means by such a code it does not say."""
    unused = [xid for xid in XIDS.values() if xid.nature == "unused"]
    assert len(unused) == 62
    assert {xid.grade for xid in unused} == {"unknown"}
    assert "older GPU" in explain(56).advice


@pytest.mark.parametrize("code", [173, 999, 10**9, 0, -1])
def test_a_code_that_is_not_in_the_catalogue(code):
    """It is unknown, never harmless, and never an error."""
    xid = explain(code)
    assert (xid.code, xid.grade, xid.immediate) == (code, "unknown", "")
    assert xid.advice == "this code is not in canaryd's copy, which ends at 172"


def test_the_advice_names_both_actions():
    """What to do at once, and how to find the cause."""
    assert explain(79).advice == "restart the machine; to find the cause: contact the vendor's support"
    assert explain(63).advice == "nothing to do"
    assert explain(154).advice == "follow the action that the message names"


# --- NVLink 5 --------------------------------------------------------------------------------------------------------


def example(row: list, encoding: str) -> tuple[int, str, str, str]:
    """Return a message's parts that fit a row: every free bit is 1, so that a wrong mask shows."""
    code, unit, v1, v2, statuses, *_ = row
    info = int((v1 if encoding == "V1" else v2).replace("-", "1"), 2)
    return code, unit.split("/")[0], f"0x{info:08x}", (statuses or ["0xdeadbeef"])[0]


@pytest.mark.parametrize(("encoding", "driver"), [("V1", "570.86.15"), ("V2", "575.57.08"), ("V2", "580.65.06")])
def test_every_row_of_the_table_is_found(encoding, driver):
    """In the encoding of its driver, by an example with every free bit set."""
    for row in ROWS:
        found = decode(*example(row, encoding), driver)
        assert (row[5], row[7], row[8]) in {(r.bucket, r.severity, r.origin) for r in found.rows}, row
        assert {r.encoding for r in found.rows} == {encoding}
        assert not found.assumed


def test_the_table_is_whole():
    """95 rows of NVIDIA's, of which three have a second pattern; every pattern has 32 places; all words are known."""
    assert len(ROWS) == 95 + 3
    for _code, _unit, v1, v2, _statuses, bucket, investigatory, severity, origin in ROWS:
        assert {len(v1), len(v2)} == {32}
        assert set(v1 + v2) <= set("01-")
        assert {bucket, investigatory} <= set(BUCKETS)
        assert severity in ("Non-fatal", "Fatal", "Link Fatal")
        assert origin in ("HW", "SW", "HW/SW", "FW", "NA")


@pytest.mark.parametrize(
    ("message", "encoding", "bucket", "grade"),
    [
        ((149, "NETIR_LINK_EVT", "0x004505c6", "0x00000000"), "V1", "RESET_GPU", "reset"),
        ((149, "NETIR_LINK_EVT", "0x026001c6", "0x00000000"), "V1", "IGNORE", "none"),
        ((149, "NETIR_LINK_EVT/NETIR_LINK_DOWN", "0x01000011", "0x00000000"), "V2", "RESET_GPU", "reset"),
        ((149, "NETIR_BER_EVENT", "0x00086226", "0x00000001"), "V1", "IGNORE", "none"),
        ((145, "RLW_SRC_TRACK", "0x00000007", "0x00000001"), "V2", "RESET_GPU", "reset"),
        ((145, "RLW_SRC_TRACK", "0x040988e2", "0x00000008"), "V1", "XID_154_EVAL", "application"),
        ((145, "RLW_RXPIPE", "0x040980c2", "0x00000008"), "V1", "IGNORE", "none"),
        ((144, "SAW_MVB", "0x00000001", "0x00000008"), "V2", "IGNORE", "none"),
        ((146, "TLW_TX_PIPE1", "0x0000000d", "0x00000004"), "V2", "RESET_GPU", "reset"),
    ],
)
def test_real_messages_are_decoded(message, encoding, bucket, grade):
    """Without the driver's version the new encoding is tried first, then the old one, and the answer says so."""
    found = decode(*message)
    assert [(r.encoding, r.bucket) for r in found.rows] == [(encoding, bucket)]
    assert (found.grade, found.assumed) == (grade, True)
    assert f"(read as {encoding}, driver unknown)" in str(found)


def test_the_second_pattern_of_a_row_decides():
    """One bit of IntrInfo makes RLW_RXPIPE's errors call for a reset."""
    assert decode(145, "RLW_RXPIPE", "0x00000006", "0x1", "575.57").grade == "none"
    assert decode(145, "RLW_RXPIPE", "0x00000086", "0x1", "575.57").grade == "reset"
    assert decode(145, "RLW_RXPIPE", "0x000000c2", "0x1", "570.86").grade == "none"
    assert decode(145, "RLW_RXPIPE", "0x000004c2", "0x1", "570.86").grade == "reset"


def test_several_error_bits_are_several_rows():
    """The worst of them is what has to be done."""
    found = decode(145, "RLW_SRC_TRACK", "0x00000007", "0x00000003", "580.65")
    assert [r.bucket for r in found.rows] == ["RESET_GPU", "IGNORE"]
    assert found.grade == "reset"


@pytest.mark.parametrize(
    "message",
    [
        (144, "SAW_EGR", "0x00000004", "0x00000001", ""),
        (145, "RLW_SRC_TRACK", "0x00000007", "0x00000001", "570.86"),
        (149, "NETIR", "0x000fe406", "", ""),
        (145, "RLW_SRC_TRACK", "0x00000007", "0x00000000", ""),
        (31, "", "0x00000007", "0x00000001", ""),
        (149, "NETIR", "0xfffffffff", "zero", "new"),
    ],
)
def test_what_the_table_does_not_have_is_unknown(message):
    """A unit or bit that is not in it, another driver's encoding, a message that was cut short."""
    found = decode(*message)
    assert (found.rows, found.grade, str(found)) == ((), "unknown", "not in NVIDIA's table for Xid 144 to 150")


@given(st.integers(), st.text(), st.text() | st.from_regex(r"0x[0-9a-f]{1,8}", fullmatch=True), st.text(), st.text())
def test_no_message_makes_it_raise(code, unit, intr_info, error_status, driver):
    """Whatever stood in the kernel's log."""
    assert decode(code, unit, intr_info, error_status, driver).grade in (*GRADES, xids.UNKNOWN)
    assert explain(code).grade
    assert explain_sxid(code)


# --- SXids, and what it all costs ------------------------------------------------------------------------------------


def test_an_sxid_is_listed_or_unknown():
    """By the lists of NVIDIA's Fabric Manager guide."""
    lists = {code: listed for code, listed, _ in DATA["sxids"]}
    assert [lists[code] for code in (12028, 20034, 22003, 10004)] == ["non-fatal", "fatal", "always-fatal", "notable"]
    assert all(explain_sxid(code) == title != "" for code, _, title in DATA["sxids"])
    assert explain_sxid(99999) == explain_sxid(-1) == explain_sxid(None) == "not in NVIDIA's public lists"


def test_nothing_is_loaded_before_it_is_asked_for():
    """The daemon imports it always and needs it seldom."""
    code = (
        "import tracemalloc; from canaryd.judge.telemetry import xids\n"
        "before = xids._data.cache_info().currsize\n"
        "tracemalloc.start(); xids.explain(79); xids.decode(149, '', '0x0', '0x0'); xids.explain_sxid(20034)\n"
        "print(before, xids._data.cache_info().currsize, tracemalloc.get_traced_memory()[0])\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    before, after, held = (int(word) for word in done.stdout.split())
    assert (before, after) == (0, 1)
    assert held < 512 * 1024


def test_the_data_is_read_as_what_it_is():
    """One line per entry, so that a change shows as one; the file names nothing twice."""
    text = Path(xids.__file__).with_name("xid_catalogue.json").read_text()
    data = json.loads(text)
    assert len(text.splitlines()) == sum(len(rows) + 2 for rows in data.values())
    codes = [row[0] for row in data["sxids"]]
    assert codes == sorted(set(codes))
