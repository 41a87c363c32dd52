"""What several tests of the dossier share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from canaryd.model import Ack, Event, Outcome, State
from canaryd.store.store import Store
from tests.dossier.made import GPU, HOST, HOUR, NASTY, NOW, PEER, SIBLING, STACK, UUID, poll, run, verdict


@pytest.fixture
def store(tmp_path):
    """The record of a GPU that is wrong in 2 of 1,000 results, with a clean sibling, heat, an Xid and a new driver."""
    with Store.open(tmp_path / "state", now=lambda: NOW - 90) as opened:  # before the verdict
        opened.see_device(GPU, NOW - 40 * HOUR)
        opened.see_device(SIBLING, NOW - 40 * HOUR)
        old = {**STACK, "driver": "570.10.01"}
        for n in range(10):
            opened.add_run(run(n, wrong=int(n in (5, 7)), stack=old if n < 3 else STACK))
            opened.add_run(run(n + 100, device=PEER, started=NOW - HOUR * n))
            opened.add_poll(poll(n, 50.0 + n), {Outcome.COMPLETED: 1})
        xid = Event(
            device=UUID, kind="xid", name="31", code=31, first=NOW - 3 * HOUR, last=NOW - 3 * HOUR, detail=NASTY
        )
        told = f"on {HOST} (10.1.2.3) at PCI:0000:65:00: MMU fault, name=python3, /home/alice/train.py token=abcd1234"
        opened.add_events([xid, replace(xid, name="94", code=94, detail=told, first=NOW - HOUR, last=NOW - HOUR)])
        opened.add_ack(Ack(device=UUID, kind="acknowledged", at=NOW - 600, until=NOW + HOUR, reason="known", by="bob"))
        opened.set_verdict(verdict(state=State.SUSPECT, decided=NOW - 6 * HOUR, since=NOW - 6 * HOUR))
        opened.set_verdict(verdict())
        yield opened
