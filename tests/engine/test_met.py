"""What the engine learns from runs about classes of exact cases, and how seldom it writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from canaryd.config.settings import Config
from canaryd.engine.evidence import Acknowledgements, Evidence
from canaryd.engine.host import Host
from canaryd.engine.learning import Learning
from canaryd.facts import Comparison, Exactness
from canaryd.judge.characterised import By
from canaryd.model import Device, Outcome, Run
from canaryd.store.store import Store

NOW, DAY = 1_790_000_000.0, 86_400.0
GPU = Device(uuid="GPU-a", backend="cuda", index=0, model="Newcomer 1")
CPU = Device(uuid="CPU-a", backend="cpu", index=0, model="EPYC 9654")


def run(*cases, of=GPU, at=NOW, **fields):
    """Return a run that met these cases."""
    found = tuple(Comparison(case=c, shape="", seed=1, exactness=Exactness.UNIVERSAL) for c in cases)
    common = {"probe": "exact_matmul", "probe_version": 1, "seconds": 1.0, "outcome": Outcome.COMPLETED}
    common |= {"stack": {"driver": "580"}, "comparisons": found}
    return Run(id=f"r{at}", device=of.uuid, started=at, **{**common, **fields})


@pytest.fixture
def host(tmp_path):
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    return Host(Config(state_dir=tmp_path / "state"), store, devices={d.uuid: d for d in (GPU, CPU)})


def learning(host):
    acks = Acknowledgements(host)
    return Learning(host, Evidence(host, acks), acks)


def test_only_what_is_new_is_written_and_what_is_in_use_once_a_day(host):
    """A run that meets known classes costs no write; a record in use is dated once a day: it is never pruned."""
    met = learning(host)
    (first,) = met.meet(run("a@7", "b@7"))
    assert set(first.classes) == {"a@8", "b@8"}
    assert met.meet(run("a@8", at=NOW + 60)) == []
    (more,) = met.meet(run("c", at=NOW + 120))
    assert set(more.classes) == {"a@8", "b@8", "c"}
    (dated,) = met.meet(run("a", at=NOW + 2 * DAY))
    assert dated.used == NOW + 2 * DAY
    assert met.meet(run("a", at=NOW + 2 * DAY + 60)) == []
    (again,) = met.meet(run(at=NOW + 4 * DAY))
    assert again.used == NOW + 4 * DAY, "a run that is wrong in every class keeps its record too"


def test_processors_and_runs_without_software_teach_nothing(host):
    """Processors behave as the table that ships says."""
    met = learning(host)
    assert met.meet(run("a", of=CPU)) == met.meet(run("a", stack={})) == []
    assert met.meet(run("a", of=replace(GPU, uuid="GPU-gone"))) == []


def test_what_another_process_stored_is_read(host):
    """And what this one learnt is kept beside it."""
    met, other = learning(host), learning(host)
    host.store.set_met(other.meet(run("a")))
    assert met.claims.proof(GPU.kind, run(), "a") is None
    met.refresh()
    proof = met.claims.proof(GPU.kind, run(), "a")
    assert proof is not None
    assert proof.by is By.ITSELF
