"""Every fuzz target, for a moment: its seeds, every input that once was a finding, and a few hundred spoilt ones.

The same inputs each time. `scripts/fuzz` looks further, guided by coverage (docs/testing.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import time
from pathlib import Path

import pytest

from tests.fuzz.__main__ import HERE, REGRESSIONS, TARGETS, seeds
from tests.fuzz.material import Choices, dumps, loaded, mutated, stretched, warped

SEED = 20_261_121
INPUTS = 300
"""Spoilt inputs for each target."""
SECONDS = 0.7
"""Of processor time for each target, after which no further input is begun: a slow machine tries fewer."""
NEEDS = {"captures": "torch"}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds(name):
    """What its module promises holds for its seeds, for former findings, and for what is made of them."""
    needed = NEEDS.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed in this interpreter")
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    given = seeds(module, name)
    former = len(list((REGRESSIONS / name).glob("*")))
    rng = random.Random(SEED)
    begun = time.process_time()
    inputs = [*given[len(given) - former :], *rng.sample(given, min(len(given), 60))]
    inputs += [mutated(rng.choice(given), given, rng) for _ in range(INPUTS)]
    done = 0
    try:
        for data in inputs:
            if done > former and time.process_time() - begun > SECONDS:
                break
            module.target(data)
            done += 1
    finally:
        getattr(module, "stop", lambda: None)()
    assert done > former


def test_every_target_says_what_must_hold():
    """In its module's docstring."""
    for name in TARGETS:
        text = (HERE / "targets" / f"{name}.py").read_text()
        assert re.match(r'"""[^"]{150,}"""', text), name


def test_former_findings_belong_to_targets():
    """A directory of regressions whose target is gone would never run."""
    assert {path.name for path in REGRESSIONS.iterdir()} <= set(TARGETS)


def test_a_target_can_fail(monkeypatch):
    """With the parser's guards gone, the input that found their lack is found again."""
    from canaryd.config import schema
    from tests.fuzz.targets import config as target

    monkeypatch.setattr(schema, "printable", lambda text: text)
    with pytest.raises(AssertionError, match="not printable"):
        target.target(b'ajudge:\n  stale_after: "\\x7f"\n')


def test_material_is_the_same_for_the_same_bytes():
    """A finding is one input, and not the moment."""
    document = {"a": [1, {"b": "text"}], "c": None}
    for n in range(50):
        data = random.Random(n).randbytes(40)
        one, two = (dumps(warped(document, Choices(data))) for _ in range(2))
        assert one == two
        assert loaded(warped(document, Choices(data))) == loaded(warped(document, Choices(data))) or "NaN" in one
    assert document == {"a": [1, {"b": "text"}], "c": None}


def test_a_short_input_asks_for_a_long_one():
    """The fuzzer's inputs are short; what grows faster than its input shows with a part of them repeated."""
    long = stretched(b"\xff\x00\x00\x14" + b"ab" * 8)
    assert len(long) > 1_000_000
    assert stretched(b"ab" * 8) == b"ab" * 8


def test_the_driver_knows_its_targets():
    """Each file of tests/fuzz/targets is one."""
    assert {path.stem for path in Path(HERE, "targets").glob("*.py")} == set(TARGETS)
