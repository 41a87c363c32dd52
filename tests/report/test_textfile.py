"""`canaryd check` as a file for node_exporter: what is in it, and that nobody ever reads half of it."""

import os
import re
import stat
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canaryd.engine.check import Result
from canaryd.facts import Comparison, Exactness
from canaryd.files import write_whole
from canaryd.metrics.families import FAMILIES
from canaryd.model import Cause, Device, Finding, Outcome, Run, State, Verdict
from canaryd.report import textfile
from tests.programs import linted

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
NOW = 1_790_000_000.0


def device(index):
    return Device(uuid=f"GPU-{index}", backend="cuda", index=index, model='H100 "big"')


def run(of, probe, wrong=0, trials=100):
    comparison = Comparison(
        case="a", shape="", seed=1, exactness=Exactness.UNIVERSAL, trials=trials, wrong_trials=wrong
    )
    return Run(
        id="r1",
        device=of.uuid,
        probe=probe,
        probe_version=1,
        started=NOW,
        seconds=1.0,
        outcome=Outcome.COMPLETED,
        comparisons=(comparison,),
    )


def result():
    """Return the result of a check of three devices: a sound one, a faulty one, one that could not be examined."""
    good, bad, lost = map(device, range(3))
    finding = Finding(rule="exact-mismatch", state=State.SUSPECT, cause=Cause.HARDWARE, message="free words")
    verdicts = {
        d.uuid: Verdict(device=d.uuid, state=state, cause=cause, findings=findings, decided=NOW, since=NOW)
        for d, state, cause, findings in (
            (good, State.HEALTHY, Cause.NONE, ()),
            (bad, State.SUSPECT, Cause.HARDWARE, (finding, finding)),
        )
    }
    return Result(
        level="quick",
        started=NOW,
        seconds=12.5,
        devices=[good, bad, lost],
        verdicts=verdicts,
        runs={
            good.uuid: [run(good, "exact_matmul"), run(good, "exact_matmul"), run(good, "exact_integer")],
            bad.uuid: [run(bad, "exact_matmul", wrong=3)],
        },
        rules_out={good.uuid: {"exact_matmul": 0.015}},
        problems=["words of a problem"],
    )


def values(page):
    """Return {(name, label items)} → value."""
    families = text_string_to_metric_families(page.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def select(page, name, **labels):
    return [
        v for (n, found), v in values(page).items() if n == f"canaryd_check_{name}" and labels.items() <= set(found)
    ]


def test_it_says_what_the_check_found():
    """States, causes, rules, what was compared and ruled out, when, how long, and how it ended."""
    page = textfile.render(result(), 2)
    assert select(page, "exit_code") == [2.0]
    assert select(page, "start_time_seconds") == [NOW]
    assert select(page, "duration_seconds") == [12.5]
    assert select(page, "info", level="quick") == [1.0]
    assert select(page, "device_state", device="GPU-1", state="suspect") == [1.0]
    assert sum(select(page, "device_state", device="GPU-1")) == 1.0
    assert select(page, "device_cause", device="GPU-0", cause="none") == [1.0]
    assert select(page, "finding") == [1.0]
    assert select(page, "trials", device="GPU-0", probe="exact_matmul") == [200.0]
    assert select(page, "mismatches", device="GPU-1") == [3.0]
    assert select(page, "fault_rate_upper_bound") == [0.015]
    assert b"words" not in page


def test_what_was_not_examined_is_unknown():
    """A device without a verdict is unknown, and no 0 stands for what was not compared."""
    page = textfile.render(result(), 3)
    assert select(page, "device_state", device="GPU-2", state="unknown") == [1.0]
    assert select(page, "device_cause", device="GPU-2", cause="undetermined") == [1.0]
    assert not select(page, "trials", device="GPU-2")
    assert select(textfile.render(Result(level="quick", started=NOW), 3), "exit_code") == [3.0]


def test_no_name_is_the_daemons():
    """A node that runs both is not counted twice, and every metric shows in the example."""
    assert not textfile.FAMILIES.keys() & FAMILIES.keys()
    assert {name for name, _ in values(textfile.render(result(), 2))} == set(textfile.FAMILIES)


def test_promtool_has_nothing_to_say():
    """Prometheus's own linter accepts names, types and help texts."""
    assert linted(textfile.render(result(), 2).decode()) == ""


def test_it_replaces_the_file_in_one_step(tmp_path):
    """Whoever reads meanwhile finds the old page or the new one, whole; mode 0644 under any umask; no rest."""
    path = tmp_path / "canaryd.prom"
    pages = [b"a" * 1_000_000, b"b" * 1_000_000]
    write_whole(path, pages[0], textfile.MODE)
    odd, done = [], threading.Event()

    def read():
        while not done.is_set():
            if path.read_bytes() not in pages:
                odd.append(path.stat())

    reader = threading.Thread(target=read)
    reader.start()
    before = os.umask(0o077)
    try:
        for turn in range(50):
            write_whole(path, pages[turn % 2], textfile.MODE)
    finally:
        os.umask(before)
        done.set()
        reader.join(20)
    assert not odd
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    """A directory in the way, or none at all: an error that names it, the old state as it was."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_whole(tmp_path / "nowhere" / "canaryd.prom", b"", textfile.MODE)
    (tmp_path / "canaryd.prom").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "canaryd.prom", b"", textfile.MODE)
    assert [path.name for path in tmp_path.iterdir()] == ["canaryd.prom"]


def test_documentation():
    """docs/metrics.md names each metric with its labels, and no other."""
    found = re.findall(r"`(canaryd_check_\w+)(?:\{([\w,]+)\})?`", DOCS.read_text())
    assert dict(found) == {
        name: ",".join(label for label in labels if label not in ("device", "index", "model"))
        for name, (_, labels, _) in textfile.FAMILIES.items()
    }
