"""A server that a deep run starts itself: tested, stopped, and nothing of it is left, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the server of these tests computes with torch")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import export  # noqa: E402

from canaryd.facts import Comparison  # noqa: E402
from canaryd.probe import Skip  # noqa: E402
from canaryd.worker.endpoint.settings import Settings  # noqa: E402
from canaryd.worker.endpoint.starting import started  # noqa: E402
from canaryd.worker.exact_canary.shape import TINY  # noqa: E402
from tests.command import ROOT, eventually  # noqa: E402
from tests.worker.endpoint.served import context, probe  # noqa: E402

SERVER = (
    "import sys, tests.exact_server as s, pathlib, time\nwith s.serving(pathlib.Path(sys.argv[1]), int(sys.argv[2])"
)
STUBBORN = "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def command(code: str) -> str:
    """Return a command for a program in Python that is given the model and the port."""
    return f"env PYTHONPATH={ROOT} {sys.executable} -c '{code}' {{model}} {{port}}"


def ask(url, directory, level="deep", **settings):
    """Return the comparisons of a run."""
    given = context(
        url, level=level, budget=3.0, settings={"exact": str(directory), "apis": ["completions"], **settings}
    )
    return [fact for fact in probe("exact_endpoint").run(given) if isinstance(fact, Comparison)]


def running(text: str) -> list[str]:
    """Return the ids of living processes with a text among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(text.encode() in word for word in words) and path.parent.name != str(os.getpid()):
            found.append(path.parent.name)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An exported exact canary."""
    path = tmp_path_factory.mktemp("started") / "canary"
    export(construct(TINY, 3), path)
    return path


@pytest.mark.parametrize(
    ("traits", "wrong"),
    [pytest.param("", False, marks=pytest.mark.slow), (', flipped=("model.norm.weight", 7, 3)', True)],
)
def test_a_deep_run_starts_tests_and_stops_a_server(directory, traits, wrong):
    """Right answers and wrong ones are told as those of a server that runs by itself; nothing answers at `url`."""
    code = f"{SERVER}{traits}): time.sleep(600)"
    compared = ask("http://127.0.0.1:9/v1", directory, command=command(code.replace("'", '"')))
    assert sum(c.trials for c in compared) >= 30
    assert bool([c for c in compared if c.wrong]) is wrong
    assert running(str(directory)) == []


def test_other_levels_ask_the_server_at_its_address(directory):
    """A drained node is needed for a deep run alone."""
    with pytest.raises(Skip, match="refused"):
        ask("http://127.0.0.1:9/v1", directory, level="standard", command=command("raise SystemExit(3)"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(7 * 7, flush=True); raise SystemExit(3)", "ended with status 3: 49"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status 137: it said nothing"),
    ],
)
def test_a_server_that_does_not_start_is_told_with_its_last_output(directory, code, said):
    """At once, not at the end of its time."""
    begun = time.monotonic()
    with pytest.raises(Skip, match=said):
        ask("http://127.0.0.1:9/v1", directory, command=command(code))
    assert time.monotonic() - begun < 60


def test_a_program_that_is_not_there_is_told(directory):
    """By its name."""
    with pytest.raises(Skip, match="no-such-engine: No such file or directory"):
        ask("http://127.0.0.1:9/v1", directory, command="no-such-engine {model} {port}")


def test_a_server_that_never_answers_is_stopped_with_its_children(directory):
    """Also those that ignore a request to end."""
    child = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "stray-child"])'
    code = STUBBORN + child + "\ntime.sleep(600)"
    settings = Settings(url="http://127.0.0.1:9/v1", exact=directory, command=command(code))
    with pytest.raises(Skip, match="no answer within 2 s"), started(settings, 2.0, lambda *_: None):
        pass
    assert running("stray-child") == running(str(directory)) == []


def test_a_server_that_takes_too_much_memory_is_stopped(directory):
    """And the reason says so."""
    code = "import time; x = bytearray(300 << 20); time.sleep(600)"
    with pytest.raises(Skip, match=r"stopped by canaryd: it used [23].* bytes of memory, limit 209,715,200"):
        ask("http://127.0.0.1:9/v1", directory, command=command(code), memory=200 << 20)


def test_nothing_is_left_when_the_worker_is_killed(directory):
    """The guard notices that nobody holds it any more."""
    code = (
        "import pathlib, sys, time\n"
        "from canaryd.worker.endpoint.settings import Settings\n"
        "from canaryd.worker.endpoint.starting import started\n"
        "settings = Settings(url='x', exact=pathlib.Path(sys.argv[1]), command=sys.argv[2])\n"
        "with started(settings, 600.0, lambda *_: None): pass\n"
    )
    serving = command('import time; time.sleep(600) # "orphan"')
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(directory), serving],
        cwd=ROOT,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: len(running('# "orphan"')) > 1, within=30.0)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    eventually(lambda: not running(str(directory)), within=30.0)
