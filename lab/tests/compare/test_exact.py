"""What people read of `canaryd capture --exact`."""

import pytest
from canaryd_lab.compare import exact

from canaryd.codec import to_json
from canaryd.model import Device

DEVICE = Device(uuid="GPU-1", backend="cuda", index=3, model="H100")
FORMATS = ("float64", "float32", "bfloat16", "float16")


def ran(**changes):
    """One inference without a fault."""
    usual = {"dtype": "float32", "path": "forced", "kernel": "eager", "values": 491_904, "loose": 0, "wrong": 0}
    return {**usual, "faults": 0, "places": [], "fault": None, "again": "", "weights": [], **changes}


def wrong(**changes):
    """One with a fault."""
    place = {"layer": "2", "operator": "down", "step": "forced", "position": 31}
    evidence = {"wrong": 1, "total": 9216, "first": [[[0, 31, 187], "0x40a00000", "0x44a00000"]]}
    fault = {"place": place, "where": {"position": 31, "element": 187}, "wanted": "5.0", "got": "1280.0", "bits": [26]}
    return ran(wrong=77, faults=1, fault={**fault, "evidence": evidence, **changes}, again="right")


def answer(*found, **changes):
    """An answer of the worker."""
    verdict = "wrong" if any(r["fault"] for r in found) else "right"
    usual = {"schema": "canaryd.exact_capture/1", "verdict": verdict, "device": to_json(DEVICE), "seed": 5, "drill": ""}
    return {**usual, "ran": list(found), "refused": [], "file": "", "bytes": 0, "seconds": 4.0, **changes}


def test_a_fault_is_told_in_six_lines():
    """The verdict, the place, the values, whether it stays, how often, what to do."""
    assert exact.text(answer(ran(), wrong(), ran()), 80).split("\n") == [
        "FAULT: cuda:3, layer 2, down projection.",
        "  position 31, element 187, bit 26: wanted 5, got 1280",
        "  1 of 9,216 values wrong; all its inputs are right.",
        "  A second run was right: the fault is transient.",
        "  1 of 3 inferences wrong; first: float32, in one pass, eager.",
        "Do now: canaryd check --device cuda:3 --level deep",
    ]


def test_a_healthy_device_is_told_in_three_lines():
    """What was right, what ran, and which kernels the device does not take."""
    found = [ran(dtype=form, kernel=kernel) for form in FORMATS for kernel in ("eager", "math")]
    refused = [{"dtype": form, "kernel": "cudnn_attention", "reason": "none"} for form in FORMATS]
    refused.append({"dtype": "float64", "kernel": "flash_attention", "reason": "none"})
    assert exact.text(answer(*found, refused=refused), 80).split("\n") == [
        "NO FAULT: cuda:3, all 3,935,232 values of 8 inferences are right.",
        "  float64, float32, bfloat16, float16; attention: eager, math.",
        "  Kernels that this device does not take: cuDNN, flash (float64).",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_longest_answer_fits(width):
    """Six lines of the terminal's width, whatever the place and the values."""
    place = {"layer": "2", "operator": "scores", "step": "11", "position": 31}
    where = {"head": 3, "position": 31, "key": 30}
    evidence = {"wrong": 1_000, "total": 5_184, "first": [[[0, 1, 1, 31, 30], "0x1", "0x2"]]}
    changes = {"place": place, "where": where, "evidence": evidence, "bits": [51, 52]}
    found = wrong(wanted="-1838.646484375", got="-1.2944909260659989e-114", **changes)
    found |= {"dtype": "bfloat16", "path": "decode", "kernel": "efficient_attention", "again": "same"}
    lines = exact.text(answer(*[found] * 32), width).split("\n")
    assert len(lines) <= 6
    assert max(map(len, lines)) <= width


def test_what_cannot_be_shown_short_is_shown_whole():
    """Values that six digits do not tell apart; many bits; a place outside the layers; a weight; a drill."""
    found = wrong(wanted="5.0", got="5.000000000000001", bits=[0])
    assert "bit 0: wanted 5.0, got 5.000000000000001" in exact.text(answer(found), 80)
    assert "element 187, 6 bits: wanted 5, got nan" in exact.text(answer(wrong(bits=[*range(6)], got="nan")), 80)
    place = {"layer": "head", "operator": "word", "step": "3", "position": 31}
    told = exact.text(answer(wrong(place=place, where={"position": 31}, wanted="7", got="9", bits=[1, 2, 3])), 80)
    assert told.startswith("FAULT: cuda:3, choice of the word.\n  position 31, 3 bits: wanted 7, got 9\n")
    evidence = {"first": [[[3, 7], "0x1", "0x2"]]}
    broken = {**wrong(), "weights": [["model.norm.weight", evidence]]}
    assert "Wrong in the device's memory: model.norm.weight[3, 7]" in exact.text(answer(broken), 80)
    drill = exact.text(answer(wrong(), drill="2.down"), 80)
    assert drill.endswith("DRILL: one value was changed on purpose at 2.down.")


def test_every_operator_has_a_name():
    """None is told by a word with an underscore."""
    for operator in ("attention_norm", "rotated_key", "inner_norm", "middle", "keys", "norm", "word", "logits"):
        place = {"layer": "1", "operator": operator, "step": "0", "position": 1}
        assert "_" not in exact.text(answer(wrong(place=place)), 80).split("\n")[0]
