"""What goes out: the exposition, the textfile and the status page, whatever a part or a run calls itself.

The real parsers of prometheus_client give back the labels and values that were put in, text for text; the page's HTML
has no element and no attribute that its author did not write.
"""

from __future__ import annotations

import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as classic

from canaryd.engine.check import Result
from canaryd.facts import Reading, printable
from canaryd.judge.telemetry.readings import READINGS
from canaryd.judge.telemetry.signals import Poll
from canaryd.metrics.exposition import Family, Page
from canaryd.metrics.families import DeviceView, Snapshot, render
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Rival, Run, State, Verdict
from canaryd.report import status_page, textfile
from canaryd.report.status import DeviceStatus, Status
from tests import pages
from tests.fuzz.material import Choices, modes, seed, stretched
from tests.fuzz.properties import in_time

NOW = 1.79e9
FAMILIES = {
    "canaryd_x_seconds": Family("gauge", ("name", "other"), "Help."),
    "canaryd_y_total": Family("counter", ("name",), "Help."),
}


def _labels(data: bytes) -> None:
    choices = Choices(data)
    made = Page(FAMILIES)
    wanted: dict[tuple[str, ...], float] = {}
    named: set[str] = set()
    for _ in range(choices.below(4) + 1):
        labels = (choices.text(), choices.text())
        value = choices.number()
        try:
            value = float(value)
        except OverflowError:
            continue
        if labels in wanted:
            continue
        wanted[labels] = value
        made.add("canaryd_x_seconds", value, *labels)
        if labels[0] not in named:
            named.add(labels[0])
            made.add("canaryd_y_total", 1.0, labels[0])
    _parsed(made, wanted, choices)


def _long(data: bytes) -> None:
    data = stretched(data)
    text = data.decode("utf-8", "surrogateescape")
    made = Page(FAMILIES)
    made.add("canaryd_x_seconds", 1.0, text, "")
    with in_time(len(data) * 2):
        _parsed(made, {(text, ""): 1.0}, Choices(b""))


def _parsed(made: Page, wanted: dict[tuple[str, ...], float], choices: Choices) -> None:
    given = {tuple(whole(label) for label in labels): value for labels, value in wanted.items()}
    families = classic(made.text().decode())
    samples = [s for family in families for s in family.samples if s.name == "canaryd_x_seconds"]
    got = {(s.labels["name"], s.labels["other"]): s.value for s in samples}
    assert got.keys() == given.keys(), (got, given)
    assert all(got[k] == v or (got[k] != got[k] and v != v) for k, v in given.items()), (got, given)  # noqa: PLR0124


def whole(text: str) -> str:
    """A text as it leaves: a lone surrogate cannot."""
    return text.encode("utf-8", "replace").decode()


def _status(text: Any) -> Status:
    """A status in which everything that comes from outside is `text()`."""
    device = Device(uuid=text(), backend="cuda", index=0, model=text(), detail={"serial": text()})
    rival = Rival(cause=Cause.SOFTWARE, why=text(), rejected=True)
    finding = Finding(rule="exact-mismatch", state=State.SUSPECT, cause=Cause.HARDWARE, message=text(), probe=text(),
                      repro=text(), runs=(text(),), rivals=(rival,))  # fmt: skip
    verdict = Verdict(device=device.uuid, state=State.SUSPECT, cause=Cause.HARDWARE, findings=(finding,), decided=NOW,
                      since=NOW - 60)  # fmt: skip
    event = Event(device=device.uuid, kind="xid", name=text(), first=NOW - 60, last=NOW - 60, detail=text())
    ack = Ack(device=device.uuid, kind="repaired", at=NOW - 30, reason=text(), by=text())
    one = DeviceStatus(
        device=device, present=True, verdict=verdict, events=(event,), acks=(ack,), evidence={text(): NOW}
    )
    return Status(now=NOW, daemon=True, released_until=0.0, devices=(one,), problems=(text(),))


def _shapes(document: str) -> set[tuple[str, tuple[str, ...]]]:
    """Return the tags of a page with the names of their attributes."""
    return {(tag, tuple(given)) for tag, given in pages.Page(document).elements}


def _page(data: bytes) -> None:
    choices = Choices(data)
    document = status_page.render(_status(lambda: choices.text(60))).decode()
    found, usual = _shapes(document), _shapes(status_page.render(_status(lambda: "x")).decode())
    assert found <= usual, found - usual
    assert all(c.isprintable() or c == "\n" for c in document)


USUAL = {name: reading for name, reading in READINGS.items() if reading.type != "text"}


def _daemon(data: bytes) -> None:
    """The daemon's whole page of one device, and a check's textfile."""
    choices = Choices(data)
    status = _status(lambda: choices.text(40))
    one = status.devices[0]
    run = Run(id="01a20045-ffe1", device=one.device.uuid, probe=choices.text(), probe_version=1, started=NOW,
              seconds=1.0, outcome=Outcome.COMPLETED, stack={choices.text(): choices.text()})  # fmt: skip
    readings = []
    for _ in range(choices.below(4)):
        name = choices.of(list(USUAL))
        labels = {label: choices.text() for label in USUAL[name].labels}
        readings.append(Reading(name=name, value=choices.below(1 << 30), labels=labels))
    view = DeviceView(
        device=one.device,
        present=True,
        verdict=one.verdict,
        drill_verdict=None,
        last_runs={run.probe: run},
        last_success={run.probe: NOW},
        fault_rate={run.probe: 0.1},
        fingerprints={(run.probe, choices.text()): 7},
        stacks={run.stack_id: run.stack},
        polls={choices.text(): Poll(period=15.0, newest=run, completed=run)},
        readings=readings,
    )
    families = classic(render(Snapshot(values={}, devices=(view,), counters={})).decode())
    shown = [s for family in families for s in family.samples if s.name == "canaryd_device_present"]
    assert [s.labels["device"] for s in shown] == [whole(one.device.uuid)]
    assert [s.labels["model"] for s in shown] in ([whole(one.device.model)], [printable(one.device.model)])
    result = Result(
        devices=(one.device,), runs={one.device.uuid: (run,)}, verdicts={one.device.uuid: one.verdict},
        **{name: _empty(name) for name in Result.__dataclass_fields__ if name not in ("devices", "runs", "verdicts")},
    )  # fmt: skip
    states = [s for family in classic(textfile.render(result, 0).decode()) for s in family.samples]
    assert any(s.labels.get("device") == whole(one.device.uuid) for s in states)


def _empty(name: str) -> Any:
    kind = str(Result.__dataclass_fields__[name].type)
    if re.match(r"str", kind):
        return ""
    if re.match(r"float|int|bool", kind):
        return 0
    return () if re.match(r"tuple|Sequence|list", kind) else {}


target = modes(_labels, _long, _page, _daemon)


def seeds() -> list[bytes]:
    return [
        *(seed(mode, bytes((n + i * 7) % 256 for i in range(80))) for mode in (0, 2, 3) for n in range(0, 250, 12)),
        seed(1, b'a"b\\c\nd'),
        seed(1, b"\xed\xa0\x80"),
    ]
