"""A served exact canary as a device: right at once, wrong at once, and apart from the devices that serve it.

Real engine, store and workers, against a server that computes every answer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the server of these tests computes with torch")
pytestmark = pytest.mark.torch


from canaryd.model import Cause, Outcome, State  # noqa: E402
from tests import engines  # noqa: E402
from tests.command import configure  # noqa: E402
from tests.exact_server import exported, serving  # noqa: E402

NAMED = "endpoint:exact"
NORM = ("model.norm.weight", 7, 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An exported exact canary."""
    with exported(tmp_path_factory.mktemp("exact") / "canary") as path:
        yield path


class Host:
    """A host whose CPU serves an exact canary, and another model beside it."""

    def __init__(self, place, directory, url, **endpoint):
        others = {"plain": {"url": "http://127.0.0.1:9/v1", "model": "tiny"}}
        path = configure(
            place,
            each={name: {"enabled": True} for name in ("exact_endpoint", "endpoint_canary", "exact_integer")},
            endpoints={"exact": {"url": url, "exact": str(directory), "apis": ["completions"], **endpoint}, **others},
            state_dir=str(place / "state"),
        )
        self.engine = engines.start(path)

    def ask(self):
        return engines.ask(self.engine, NAMED, seed=2)

    def found(self, uuid=NAMED):
        return engines.rules(self.engine, uuid)

    @property
    def verdict(self):
        return self.engine.verdict(NAMED)

    @property
    def cpu(self):
        return engines.cpu(self.engine)


def test_an_endpoint_with_exact_has_a_probe_of_its_own(tmp_path, directory):
    """The others are recorded, and neither probe runs on both."""
    host = Host(tmp_path, directory, "http://127.0.0.1:9/v1")
    assert list(host.engine.periods(host.engine.devices[NAMED])) == ["exact_endpoint"]
    assert list(host.engine.periods(host.engine.devices["endpoint:plain"])) == ["endpoint_canary"]
    (run,) = host.ask()
    assert "refused" in run.detail
    assert host.verdict.state is State.UNKNOWN


@pytest.mark.slow
def test_a_run_killed_at_its_deadline_keeps_its_wrong_answers(tmp_path, directory):
    """The server answers wrongly twice, then keeps its clients waiting for longer than the run may take."""
    with serving(directory, flipped=NORM, hangs_after=12) as url:
        host = Host(tmp_path, directory, url, timeout="50s")
        entry = host.engine.entries["exact_endpoint"]
        # A run without a baseline has the deadline of level deep.
        spec = replace(entry.spec, timeout=10.0, budget=dict.fromkeys(entry.spec.budget, 2.0))
        host.engine.entries["exact_endpoint"] = replace(entry, spec=spec)
        runs = host.ask()
    assert runs[0].outcome is Outcome.TIMED_OUT
    assert [c.case for c in runs[0].wrong][:2] == ["completions/alone", "completions/again"]
    assert all(c.characterised for c in runs[0].wrong)
    assert host.verdict.state in (State.SUSPECT, State.FAULTY)


def test_the_first_right_answers_make_it_healthy(tmp_path, directory):
    """No baseline is awaited, and its software is recorded."""
    with serving(directory) as url:
        host = Host(tmp_path, directory, url)
        (run,) = host.ask()
    assert host.verdict.state is State.HEALTHY, host.found()
    assert run.trials == 12
    assert run.stack["server"] == "generic"


def test_the_first_wrong_answers_accuse_the_endpoint_alone(tmp_path, directory):
    """Confirmed by three retests; the device that serves it is tested deeply at once, and keeps its own state."""
    with serving(directory, flipped=NORM) as url:
        host = Host(tmp_path, directory, url)
        runs = host.ask()
    assert [bool(run.confirms) for run in runs] == [False, True, True, True]
    found = host.found()["exact-mismatch-confirmed"]
    assert (found.state, found.cause) == (State.FAULTY, Cause.UNDETERMINED)
    assert "Do not use its answers" in found.action
    assert any("not tested since" in text for text in found.evidence)
    assert not {"exact-mismatch", "endpoint-departed"} & set(host.found(host.cpu))
    plans = host.engine.experiments.retests(host.cpu)
    assert {step.trigger for plan in plans for step in plan.steps} == {f"{NAMED} departed"}
    assert {step.intensity for plan in plans for step in plan.steps} == {"content"}


def test_answers_that_were_never_right_are_unknown(tmp_path, directory):
    """A format that rounds looks like that: nobody is accused, and the device that serves it is tested deeply."""
    with serving(directory, quantised={"": 4}) as url:
        host = Host(tmp_path, directory, url)
        host.ask()
        found = host.found()["uncharacterised-mismatch"]
        assert (found.state, found.cause) == (State.UNKNOWN, Cause.UNDETERMINED)
        assert host.engine.experiments.retests(host.cpu)


def test_a_setting_makes_it_unknown(tmp_path, directory):
    """With the reason and what to do, and without an accusation of anybody."""
    with serving(directory, begin="anchor") as url:
        host = Host(tmp_path, directory, url)
        (run,) = host.ask()
    found = host.found()["not-completed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.ENVIRONMENT)
    assert "its tokenizer is another" in found.message
    assert found.action == (
        f"Correct the server or its settings as the reason says, then run: canaryd check --device {NAMED}"
    )
    assert not run.wrong


def test_wrong_after_right_is_faulty_even_where_everything_is_wrong(tmp_path, directory):
    """The server has shown that it can be right on this software."""
    with serving(directory) as url:
        host = Host(tmp_path, directory, url)
        host.ask()
        assert host.verdict.state is State.HEALTHY
    port = int(url.split(":")[2].split("/")[0])
    with serving(directory, port=port, quantised={"": 4}):
        host.ask()
    assert host.verdict.state is State.FAULTY, host.found()
    assert host.verdict.cause is Cause.UNDETERMINED
