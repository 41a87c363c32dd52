"""One fault has one count and one command to repeat it, on every surface, whatever is asked first.

Real processes: checks of a probe that is wrong as it is told, the commands that read the record, and a daemon.
"""

from __future__ import annotations

import html
import json
import re
import shlex

import pytest

from canaryd.store.store import Store
from tests.command import Daemon, canaryd, configure, eventually, in_turn, running

CLEAN = [["a", "device", 40, 0], ["b", "device", 8, 0], ["c", "device", 8, 0]]
ONE_CASE = [["a", "device", 40, 3], ["b", "device", 8, 6], ["c", "device", 8, 0]]
OTHER_CASE = [["a", "device", 40, 9], ["b", "device", 8, 0], ["c", "device", 8, 8]]
GOLDEN = [["a", "device", 18, 18], ["a", "host", 1, 1], ["b", "device", 4, 0]]
COMPARATOR = [["a", "device", 18, 18], ["b", "comparator", 1, 1]]
FAULTS = {
    "a part of some results": ([ONE_CASE], "b", "Wrong results in errs"),
    "all results, and a reference": (
        *([GOLDEN], "a"),
        "Integer and float64 arithmetic of this CPU disagree; wrong results in errs",
    ),
    "all results, and a comparison": ([COMPARATOR], "a", "Wrong results in errs"),
    "now and then, and later other cases": (
        *([CLEAN, ONE_CASE, CLEAN, ONE_CASE, CLEAN, CLEAN, OTHER_CASE], "b"),
        "Wrong results in errs",
    ),
}
"""Fault → what each run of the probe compares, the case that fails most at first, and the strongest fact."""


def number(text):
    return int(text.replace(",", ""))


def of(text):
    """Return the counts that a text gives of the fault."""
    found = {tuple(map(number, pair)) for pair in re.findall(r"errs(?: \(|: )([\d,]+) of ([\d,]+)", text)}
    assert len(found) == 1, f"{found} {text}"
    return found.pop()


def commands(text):
    """Return what a text names to repeat the fault here, as it stands there, each once."""
    return set(re.findall(r"(?:sudo )?canaryd check [^\n]*--device cpu:0 [^\n]*--seed [^\n]+", text))


def stripped(page):
    """Return a page as text, each part on a line of its own."""
    return html.unescape(re.sub(r"<[^>]+>", "\n", re.sub(r"(?s)<style>.*?</style>", "", page)))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_surface_gives_one_count_and_one_command(tmp_path, fault):
    """Progress, check, status, history, page, metrics and dossier; also when it has failed again, in other cases."""
    runs, most, first = FAULTS[fault]
    each = {"errs": {"period": "30d", "settings": {"log": str(tmp_path / "log"), "runs": runs}}}
    config, state = configure(tmp_path, "errs", each=each), tmp_path / "state"
    common = ("--config", config, "--state-dir", state)
    own, progress, told = shlex.join(map(str, common)), "", set()
    for options in ((), (), ("--probe", "errs")):
        checked = canaryd("check", "-v", *options, "--report", tmp_path / "check.json", *common)
        progress += checked.err
        if checked.code == 0:  # the fault that comes now and then
            continue
        out = tmp_path / f"report-{len(progress)}"
        asked = (("status", "-v"), ("history", "-v"), ("status", "--json"), ("history", "--json"))
        answers = in_turn(*((*command, *common) for command in asked), ("report", "cpu:0", "-o", out, *common))
        (made,) = out.glob("*/dossier.json")
        dossier = json.loads(made.read_text())
        # The device is locked, so that the daemon tests nothing before it is asked.
        uuid = dossier["identity"]["uuid"]
        with Store.open(state) as store, store.lock(uuid), running(Daemon(config, state)) as daemon:
            eventually(lambda: "errs: " in daemon.get("/")[1])
            page = stripped(daemon.get("/")[1])
            wrong, results = (
                int(daemon.value(f"canaryd_probe_{name}_total", probe="errs")) for name in ("mismatches", "trials")
            )
        shown = {"check": checked.out, "status": answers[0].out, "history": answers[1].out, "page": page}
        shown["dossier"] = stripped(made.with_name("dossier.html").read_text())
        documents = [json.loads((tmp_path / "check.json").read_text()), answers[2].document, answers[3].document]
        incidents = [d["devices"][0]["incidents"][0] for d in documents] + [dossier["verdict"]["incidents"][0]]

        ran = [
            (number(of), number(wrong or "0"))
            for of, wrong in re.findall(r"errs.*: completed, ([\d,]+) results(?:, ([\d,]+) WRONG)?", progress)
        ]
        before = sum(of for of, _ in ran[: next(n for n, (_, wrong) in enumerate(ran) if wrong)])
        (tested,) = (p["results"] for p in dossier["probes"] if p["probe"] == "errs")
        counts = {
            "progress": (sum(wrong for _, wrong in ran), sum(of for of, _ in ran) - before),
            "metrics": (wrong, results - before),
            "test in the dossier": (tested["wrong"], tested["total"]),
            **{surface: of(text) for surface, text in shown.items()},
            **{f"JSON {n}": (i["wrong"], i["results"]) for n, i in enumerate(incidents)},
        }
        assert len(set(counts.values())) == 1, json.dumps(counts)
        assert counts["check"][0] <= counts["check"][1]

        repeated = {surface: commands(text) for surface, text in shown.items()}
        assert all(repeated.values()), repeated
        assert all(own in command for name in repeated.keys() - {"dossier"} for command in repeated[name]), repeated
        now = {command.replace(f" {own}", "") for found in repeated.values() for command in found}
        assert now == {i["repeat"] for i in incidents}, (now, incidents)
        assert len(now) == 1, now
        told.add(now.pop().partition(" --for ")[0])
        for text in (" ".join(text.split()) for text in shown.values()):
            assert first in text
            assert "bit 3 of 16 bits" in text
    assert len(told) == 1, told
    assert f" --case {most} " in told.pop()
