"""The catalogue of Xids, NVLink 5 errors and SXids: complete, known words only, and the well-known codes pinned."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canaryd.config.values import GRADES
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.xids import catalogue, decode, explain, explain_sxid
from tests.command import ROOT

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
    assert {xid.immediate, xid.investigatory} - {""} <= {bucket[0] for bucket in DATA["buckets"]}
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
