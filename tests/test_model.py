"""The words and their one codec."""

import dataclasses
import json

import pytest

from canaryd.codec import from_json, to_json
from canaryd.facts import (
    Comparison,
    Doubt,
    Evidence,
    Exactness,
    Place,
    Reading,
    Recording,
    Span,
    Subject,
    beginning,
)
from canaryd.model import Device, ModelServer, Outcome, Reason, Run
from tests.places import line


def a_run(**changes: object) -> Run:
    evidence = Evidence(
        wrong=1,
        total=4,
        first=(((0, 1), "0x3f800000", "0x3f800001"),),
        bits={"0": 1},
        zeroed=0,
        nonfinite=0,
        lines={"row": line(0)},
        pattern="element [0, 1]: only bit 0 (lowest of the mantissa) is flipped",
    )
    wrong = Comparison(
        case="float32/dense", shape="M=2", seed=3, exactness=Exactness.UNIVERSAL, wrong_trials=1, evidence=evidence
    )
    facts: dict[str, object] = {
        "id": "1-a",
        "device": "CPU-1",
        "probe": "exact_matmul",
        "probe_version": 1,
        "started": 1.5,
        "seconds": 2.0,
        "outcome": Outcome.COMPLETED,
        "comparisons": (wrong,),
        "readings": (Reading(name="trials", value=3, unit="1"),),
    }
    return Run(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_run_survives_the_codec() -> None:
    """What goes through JSON comes back equal, enumerations, tuples and optional parts included."""
    run = a_run()
    assert from_json(Run, json.loads(json.dumps(to_json(run)))) == run


def test_a_stored_run_leaves_out_what_has_its_default() -> None:
    """A start reads thousands of runs, most fields of which say nothing; they come back all the same."""
    run = a_run(confirms="0-b", stack={"torch": "2.13"})
    sparse = json.loads(json.dumps(to_json(run, sparse=True)))
    assert from_json(Run, sparse) == run
    assert {"level", "drill", "absent", "reason"} & sparse.keys() == set()
    assert "uploads" not in sparse["comparisons"][0]
    assert "repeats" not in sparse["comparisons"][0]["evidence"]


def test_no_default_of_what_is_stored_changes() -> None:
    """A run on disk without a field has the default of the release that stored it: these are promises."""
    given = {
        kind: {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
        for kind in (Run, Comparison, Evidence, Place, Span, Reading, Recording)
    }
    nothing = dict.fromkeys(("instruction_set", "detail", "repro", "drill", "confirms", "trigger", "intensity"), "")
    lists = dict.fromkeys(
        ("readings", "comparisons", "recordings", "skipped", "cases", "unknown", "learnt", "unread"), ()
    )
    single = {"level": "standard", "seed": 0, "reason": Reason.NONE, "clock": None, "baselining": False}
    assert given == {
        Run: nothing | lists | single,
        Comparison: {
            "subject": Subject.DEVICE,
            "place": Place(),
            "doubt": Doubt.NONE,
            "trials": 1,
            "wrong_trials": 0,
            "evidence": None,
            "digest": "",
            "uploads": 1,
            "characterised": True,
            "peer": "",
        },
        Evidence: {"repeats": 0, "repeats_wrong": 0, "repeats_alike": None, "memory": None, "transfer": None},
        Place: {"unit": "", "numbers": ()},
        Span: {"period": 0},
        Reading: {"unit": ""},
        Recording: {"condition": "", "tokens": (), "values": (), "margins": (), "text": "", "finish": ""},
    }


@pytest.mark.parametrize("value", [2**60 + 1, 0.5, "text", True, -1])
def test_a_reading_keeps_its_type(value: object) -> None:
    """A value keeps its exact type: an integer of more than 53 bits does not become a float, nor a bool a number."""
    reading = from_json(Reading, json.loads(json.dumps(to_json(Reading(name="x", value=value)))))  # type: ignore[arg-type]
    assert reading.value == value
    assert type(reading.value) is type(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outcome": "fine"}, "Run.outcome: 'fine' is not one of"),
        ({"seconds": "two"}, "Run.seconds: wanted float, got str"),
        ({"comparisons": [{"case": 1}]}, r"Run.comparisons\[0\].case: wanted str, got int"),
        ({"surprise": 1}, "Run: unknown field 'surprise'"),
        ({"readings": 7}, "Run.readings: wanted a list, got int"),
        ({"readings": [{"name": "x", "value": []}]}, r"Run.readings\[0\].value: got list, wanted one of"),
        ({"stack": {"torch": 2}}, "Run.stack.torch: wanted str, got int"),
        ({"stack": []}, "Run.stack: wanted an object, got list"),
    ],
)
def test_what_is_not_a_run_is_refused_by_place(change: dict[str, object], message: str) -> None:
    """A wrong shape is a `ValueError` that names the place; an unknown field is not dropped in silence."""
    with pytest.raises(ValueError, match=message):
        from_json(Run, {**to_json(a_run()), **change})


def test_a_run_counts_device_results_only() -> None:
    """`trials` counts results of the device; `wrong` lists comparisons with a wrong bit."""
    run = a_run()
    assert run.trials == 1
    assert run.wrong == run.comparisons


@pytest.mark.parametrize(
    ("text", "length", "told"),
    [
        ("short", 5, "short"),
        ("two\n  words", 9, "two words"),
        ("no kernel for this shape", 12, "no kernel…"),
        ("no kernel, for this shape", 12, "no kernel…"),
        ("no kernel for", 10, "no kernel…"),
        ("abcdefghij", 5, "abcd…"),
    ],
)
def test_a_text_that_is_cut_ends_after_a_word(text, length, told):
    """On one line, with a sign that more followed; a single long word is cut where it must be."""
    assert beginning(text, length) == told
    assert len(told) <= length


@pytest.mark.parametrize(
    ("backend", "kind", "name", "tested_as"),
    [
        ("endpoint", ModelServer, "endpoint:main", ("exact_endpoint",)),
        ("cuda", Device, "cuda:0", ("cuda", "*")),
    ],
)
def test_a_stored_row_says_by_its_backend_what_it_is(backend, kind, name, tested_as):
    """Rows and messages name no class, so those of before load, and both kinds write the same fields."""
    row = to_json(Device(uuid="endpoint:main", backend=backend, index=0, model="m", detail={"exact": "/x"}))
    assert list(row) == [field.name for field in dataclasses.fields(Device)]
    loaded = from_json(Device, json.loads(json.dumps(row)))
    assert type(loaded) is kind
    assert to_json(loaded) == row
    assert (loaded.name, loaded.tested_as, loaded.is_reached) == (name, tested_as, backend == "endpoint")
