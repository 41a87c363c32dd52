"""Events, causes and other explanations as a person reads them: words, not identifiers."""

import pytest

from canaryd.judge.telemetry.line_rules import LINES
from canaryd.judge.telemetry.readings import in_words
from canaryd.model import Cause, Event, Rival
from canaryd.report.events import describe_event
from canaryd.report.terminal import rival_words
from canaryd.worker.telemetry.kernel_messages import _LINES


def event(kind: str, name: str = "x", **what: object) -> Event:
    return Event(**{"device": "GPU-1", "kind": kind, "name": name, "first": 1.0, "last": 2.0} | what)


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (event("xid", "79", detail="off the bus", count=2), "NVIDIA error, Xid 79 (2 times): off the bus"),
        (event("off-bus", "driver", detail="GPU is lost"), "device lost: GPU is lost"),
        (event("change", "driver", before="570", after="580"), "changed: driver: 570 → 580"),
        (event("condition", "hot", detail="2 °C past its throttle point", count=15), "2 °C past its throttle point"),
        (event("a new kind of line", detail="refused"), "kernel log x: refused"),
        (event("counter", "pcie_replays_total", detail="PCIe replays rose by 3", count=3), "PCIe replays rose by 3"),
    ],
)
def test_an_event_is_shown_in_words(one, line):
    """Not as `counter ecc_errors_total{…}` or `condition hot`."""
    assert describe_event(one) == line


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("ecc_errors_total{kind=uncorrected,location=dram}", "ECC errors (uncorrected, dram)"),
        ("nvlink_up{link=3}", "NVLink up (link 3)"),
        ("persistence_mode", "persistence mode"),
    ],
)
def test_a_reading_has_words(key, words):
    """Events and findings show them; metrics and JSON keep the name."""
    assert in_words(key) == words


def test_a_row_and_the_lines_that_it_judges_have_one_name():
    """A row with a misspelt name would never speak, and a kind without a row (or a rule of its own) says nothing."""
    kinds = {kind for kind, _, _ in _LINES}
    assert {row for row in LINES if row.split()[0] in kinds} <= kinds | {f"{kind} {name}" for kind, name, _ in _LINES}
    assert kinds - LINES.keys() == {"off-bus", "mce", "thermal"}


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (
            Rival(cause=Cause.SOFTWARE, why="a wrong kernel: cuda:1 computes right", rejected=True),
            "not a wrong kernel (software): cuda:1 computes right",
        ),
        (Rival(cause=Cause.HARNESS, why="a bug", rejected=False), "maybe canaryd itself: a bug"),
    ],
)
def test_another_explanation_has_one_colon(one, line):
    """Cause, what is meant by it, and what speaks for or against it can be told apart."""
    assert rival_words(one) == line
