"""What probe authors may use of the worker: names and arguments that were promised."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest

from canaryd.model import Outcome
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker import toolkit

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "writing-a-probe.md"
EXAMPLE = DOCS / "examples" / "prefix_sum.py"
PROMISED = {
    "Bound": "magnitude, limit",
    "Case": "name, build, compute, characterised=True, struck=0, fixed=False, product=None, stem='', measure=None, "
    "seconds=0.0, repeats=False",
    "Problem": "operands, golden, exactness, bound, shape, witnessed=True, operations=0",
    "chosen": "ctx, name",
    "collect": "golden, observed, origin=()",
    "derive": "seed, name",
    "need_torch": "",
    "refusal": "device, problem, compute",
    "strict_switches": "",
    "synchronize": "device",
    "torch_device": "device",
    "upload": "tensors, device",
    "verify_all": "ctx, fresh, fixed, shipped, refused=()",
}
"""Name → arguments with their defaults. A name may be added and an optional argument appended; nothing else changes."""


def arguments(promised: object) -> str:
    """Write a callable's arguments as the list above does."""
    parameters = inspect.signature(promised).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


def test_the_names_are_those_that_were_promised():
    """A probe that was written against an older release still finds everything; `torch` is the only other name."""
    assert sorted([*PROMISED, "torch"]) == toolkit.__all__


@pytest.mark.parametrize("name", PROMISED)
def test_arguments_are_those_that_were_promised(name):
    """In this order, with these names and defaults."""
    assert arguments(getattr(toolkit, name)) == PROMISED[name]


def test_the_page_for_authors_describes_every_name_and_no_other_module_of_the_worker():
    """docs/writing-a-probe.md names each of them; whatever else it imports from the worker might move."""
    page = PAGE.read_text()
    section = page.partition("\n## The toolkit\n")[2].partition("\n## ")[0]
    named = [
        name for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)", cell)
    ]
    assert sorted(named) == toolkit.__all__
    assert set(re.findall(r"canaryd\.worker\.\w[\w.]*", page)) == {"canaryd.worker.toolkit"}


@pytest.mark.torch
@pytest.mark.parametrize("drill", ["", "flip", "consistent"])
def test_the_numeric_example_finds_what_it_is_meant_to_find(tmp_path, drill):
    """docs/examples/prefix_sum.py uses the toolkit alone; clean on a healthy CPU, wrong with an injected fault."""
    pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
    shutil.copy(EXAMPLE, tmp_path)
    path = tmp_path / EXAMPLE.name
    with Series(WorkerSpec()) as series:
        described = series.describe([path])
        spec = described.probes[path]
        (cpu,) = (device for device in described.devices if device.backend == "cpu")
        run = series.run(RunRequest(probe_path=path, spec=spec, device=cpu, level="quick", seed=3, drill=drill), 120.0)
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert {c.case for c in run.comparisons} == {"int64/prefix_sum/fresh@4096"}
    assert bool(run.wrong) is bool(drill)
