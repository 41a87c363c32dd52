"""`canaryd demo` shows a broken GPU, from a recording, on every surface."""

from __future__ import annotations

import gzip
import json
import os

from canaryd.cli.demo import RECORDING
from canaryd.store.migrations import MIGRATIONS
from tests.command import canaryd


def test_a_demo_shows_a_broken_gpu_and_touches_nothing(tmp_path):
    """Check, status, page and report say the same, and that it is a demo; the record of this machine stays."""
    state = tmp_path / "state"
    shown = canaryd("demo", "-o", tmp_path / "out", "--state-dir", state)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("DEMO: a recording of a made-up node.")
    told = " ".join(shown.out.split())
    assert told.count("FAULTY cuda:3 NVIDIA H100 80GB HBM3 (demo)") == 2
    (count,) = {part.partition(",")[0] for part in told.split("Wrong results in exact_matmul: ")[1:]}
    page = (tmp_path / "out/status.html").read_text()
    (report,) = (tmp_path / "out").glob("canaryd-dossier-*/dossier.html")
    for text in (page, report.read_text()):
        assert "(demo)" in text
        assert f"Wrong results in exact_matmul: {count}" in " ".join(text.split())
    document = json.loads(report.with_name("dossier.json").read_text())
    (results,) = (test["results"] for test in document["probes"] if test["probe"] == "exact_matmul")
    assert f"{results['wrong']} of {results['total']}" == count
    assert sum(failure["results"]["wrong"] for failure in document["failures"]) == results["wrong"]
    assert "<b>DEMO" in page
    assert any("no machine is asked" in each["why"] for each in document["absent"] if each["file"] == "bmc-sel.txt")
    assert not state.exists()


def test_a_demo_whose_directory_cannot_be_written_says_so(tmp_path):
    """And names it."""
    (tmp_path / "file").touch()
    answer = canaryd("demo", "-o", tmp_path / "file" / "out")
    assert answer.code == 64
    assert f"{tmp_path}/file/out: cannot be made: {os.strerror(20)}" in answer.err


def test_the_recording_is_as_this_release_stores_it():
    """Otherwise the demo converts it each time: write it anew with python -m tests.story.demo."""
    assert f"pragma user_version={max(MIGRATIONS)};" in gzip.decompress(RECORDING.read_bytes()).decode()
