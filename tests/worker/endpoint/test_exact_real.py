"""The exact canary through real servers that others wrote: 0 wrong answers, alone and under load, and faults are seen.

`scripts/servers` installs the servers; those that are not there are skipped aloud (docs/testing.md).
"""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="the exact canary is made with torch")
pytestmark = [pytest.mark.servers, pytest.mark.torch]

from canaryd.facts import Comparison  # noqa: E402
from canaryd.worker.exact_canary.construct import construct  # noqa: E402
from canaryd.worker.exact_canary.expected import load  # noqa: E402
from canaryd.worker.exact_canary.export import export  # noqa: E402
from canaryd.worker.exact_canary.shape import TINY  # noqa: E402
from tests.command import ROOT  # noqa: E402
from tests.servers import serving  # noqa: E402
from tests.worker.endpoint.served import context, probe  # noqa: E402

ENGINES = ("mlx", "transformers")
"""Servers that read a Llama checkpoint as it is, and were tried."""
CLIENTS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An exported exact canary."""
    path = tmp_path_factory.mktemp("exact") / "canary"
    export(construct(TINY, 1), path)
    return path


def ask(server, directory, seed):
    """Return the comparisons of a run at level standard."""
    settings = {"exact": str(directory), "model": server.model, "timeout": 60.0}
    given = context(server.url, level="standard", seed=seed, budget=60.0, settings=settings)
    return [fact for fact in probe("exact_endpoint").run(given) if isinstance(fact, Comparison)]


@pytest.mark.parametrize("name", ENGINES)
def test_a_real_server_answers_rightly_alone_and_beside_others(directory, tmp_path, name):
    """Every answer, in words and in what it prints of its log probabilities, also while eight clients are served."""
    prompts = [question.text for question in load(directory).questions]
    with serving(name, directory, tmp_path) as server:
        alone = ask(server, directory, seed=0)
        over = threading.Event()

        def client(number: int) -> None:
            while not over.is_set():
                prompt = " ".join(prompts[number].split()[: 5 + 2 * number])
                server.ask("completions", {"prompt": prompt, "max_tokens": 5 + 4 * number, "temperature": 0})

        threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            beside = ask(server, directory, seed=1)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    for compared in (alone, beside):
        assert sum(c.trials for c in compared) == 60
        assert [c for c in compared if c.wrong] == []


@pytest.mark.parametrize("name", ENGINES)
def test_wrong_products_of_a_real_server_are_seen_at_once(directory, tmp_path, name):
    """One product in fifty has one wrong bit, inside the server's own process: the first run accuses."""
    broken = {"PYTHONPATH": str(ROOT / "tests/faulty_server"), "CANARYD_TEST_FAULT_RATE": "0.02"}
    with serving(name, directory, tmp_path, **broken) as server:
        compared = ask(server, directory, seed=0)
    wrong = [c for c in compared if c.wrong]
    assert wrong
    assert all(c.characterised for c in wrong)
