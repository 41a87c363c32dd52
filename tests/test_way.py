"""The way of the data, as docs/architecture.md lists it: traced while a wrong result and a reading pass the daemon."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from canaryd.daemon.publisher import Publisher
from tests.command import ROOT
from tests.engine.test_engine import carry_out, settings, start
from tests.engine.test_polling import Host

TOOLS = ("codec",)
"""Modules that every way uses."""
WORKER = ("probes/", "worker/")
"""How the names of the modules begin that run in a worker, which are not traced here."""


def listed(column: int) -> tuple[list[str], set[str]]:
    """Return the forms and the daemon's modules in a column of the table, without what writes the page."""
    rows = [line.split("|") for line in (ROOT / "docs/architecture.md").read_text().splitlines()]
    forms, modules = (next(row[column] for row in rows if row[1:2] == [f" {name} "]) for name in ("forms", "modules"))
    named = re.findall(r"`([\w/]+)`", modules.partition(";")[0])
    return re.findall(r"`(\w+)`", forms), {name for name in named if not name.startswith(WORKER)}


@contextmanager
def traced(forms: list[str], rule: str) -> Iterator[dict[str, list[str]]]:
    """Fill form → the modules on the call stack when it is first made; of findings only those of `rule` count."""
    made: dict[str, list[str]] = {}

    def stack(frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            if "/canaryd/" in frame.f_code.co_filename:
                yield frame.f_code.co_filename.rpartition("/canaryd/")[2].removesuffix(".py")
            frame = frame.f_back

    def trace(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and frame.f_code.co_filename == "<string>":  # what dataclasses and named tuples generate
            form = frame.f_locals.get("self", value)
            name = type(form).__name__
            if name in forms and name not in made:
                findings = getattr(form, "findings", (form,))
                if any(getattr(finding, "rule", rule) == rule for finding in findings):
                    made[name] = [*stack(frame.f_back)]

    sys.setprofile(trace)
    try:
        yield made
    finally:
        sys.setprofile(None)


def compare(made: dict[str, list[str]], forms: list[str], modules: set[str]) -> None:
    assert made.keys() == {*forms}
    assert {module for passed in made.values() for module in passed} - {*TOOLS} == modules


def test_a_wrong_result_takes_the_way_that_is_listed(tmp_path):
    """From the worker's message to what the page is written from: twelve forms at most, and fifteen modules."""
    forms, modules = listed(2)
    assert (len(forms) <= 12, len(modules) < 15) == (True, True)
    engine = start(settings(tmp_path, "mismatches"))
    publisher = Publisher(engine, engine.store)
    engine.listener = lambda progress: publisher.changed() if progress.done else None
    with traced(forms, "exact-mismatch") as made:
        carry_out(engine)
    compare(made, forms, modules)


def test_a_reading_takes_the_way_that_is_listed(tmp_path):
    """From the worker's message to the finding: eight forms at most, and with the worker's twelve modules."""
    forms, modules = listed(3)
    assert (len(forms) <= 8, len(modules) <= 9) == (True, True)
    host = Host(tmp_path)
    host.say(("retired_pages", 70, {"cause": "double_bit"}))
    with traced(forms, "memory-failed") as made:
        host.engine.sweep()
    host.close()
    compare(made, forms, modules)
