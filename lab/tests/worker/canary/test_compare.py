"""Comparing captures: the numbers, what is not comparable, healthy stacks, and a campaign of injected faults."""

import dataclasses
import itertools
import json
import math
from collections import Counter

import pytest
from canaryd_lab.worker.canary import capture, compare
from canaryd_lab.worker.safetensors import write_safetensors

from canaryd.codec import to_json
from canaryd.facts import DTYPES
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import bits
from lab.tests.captures import exact

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

PROMPT = "exact"


def silent(fraction, text):
    assert 0 <= fraction <= 1
    assert text


@pytest.fixture(scope="module")
def take(tmp_path_factory):
    """Capture the exact canary, or a model of the user's, with these changes of the usual arguments, once."""
    directory, taken = tmp_path_factory.mktemp("captures"), {}

    def of(model="", **changes):
        key = json.dumps([model, changes], sort_keys=True)
        if key not in taken:
            path = directory / f"{len(taken)}.safetensors"
            taken[key] = recorded(path, model, **changes) if model else exact(path, **changes)
        return taken[key]

    return of


def recorded(path, model, *, dtype="float32", drill=""):
    """A capture of a Hugging Face directory."""
    usual = {"device": to_json(cpu()), "prompts": ["reef"], "operators": True, "forced": True}
    capture.answer({**usual, "out": str(path), "model": model, "dtype": dtype, "drill": drill}, silent)
    return capture.read(path)


def places(taken):
    """Every place (layer, operator) of a capture, in computing order."""
    return list(dict.fromkeys(tuple(name.split("/")[2:]) for name in taken.tensors if name.count("/") == 3))


def about(taken, **texts):
    """The same capture with other texts."""
    return dataclasses.replace(taken, about={**taken.about, **texts})


def holding(taken, **tensors):
    """The same capture with other tensors; "/" is written "__"."""
    changed = {name.replace("__", "/"): tensor for name, tensor in tensors.items()}
    assert set(changed) <= set(taken.tensors)
    return dataclasses.replace(taken, tensors={**taken.tensors, **changed})


def place(verdict):
    return verdict["first_layer"], verdict["first_operator"]


# --------------------------------------------------------------------------------------------------------------------
# Numbers.


def steps(a, b, dtype):
    """Count the numbers of a format from a to b, one by one."""
    a, b = (torch.tensor(v, dtype=dtype) for v in sorted((a, b)))
    count = 0
    while a < b:
        a = torch.nextafter(a, torch.tensor(math.inf, dtype=dtype))
        count += 1
    return count


@pytest.mark.parametrize(
    ("a", "b"), [(1.0, 1.0), (1.0, 1.5), (-1.0, -1.03125), (0.0, 1e-40), (-1e-40, 2e-40), (0.0, -0.0), (2.0, 1.9921875)]
)
def test_ulp_distance_counts_the_numbers_between(a, b):
    """As a walk from number to number does, over zero as well; both zeros are one place."""
    one, two = (torch.tensor([v, 1.0], dtype=torch.bfloat16) for v in (a, b))
    assert compare.ulp_distance(one, two) == steps(float(one[0]), float(two[0]), torch.bfloat16)
    assert compare.ulp_distance(one.to(torch.float64), two) == compare.ulp_distance(one, two)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ulp_distance_spans_the_whole_format(dtype):
    """From the lowest number to the highest, in Python's integers: nothing overflows."""
    top = torch.finfo(dtype).max
    inf = int(bits(torch.tensor([math.inf], dtype=dtype))[0])
    assert compare.ulp_distance(torch.tensor([top], dtype=dtype), torch.tensor([-top], dtype=dtype)) == 2 * (inf - 1)
    assert compare.ulp_distance(torch.tensor([0.0], dtype=dtype), torch.tensor([top], dtype=dtype)) == inf - 1


def test_a_row_says_how_two_tensors_differ(take):
    """Relative L2, cosine, largest difference, first element with its bits: against plain arithmetic."""
    clean = take()
    a = clean.tensors["exact/forced/1/up"]
    b = a.clone()
    b[0, 3, 7] += 0.5
    b[0, 9, 1] -= 0.25
    row = next(
        row for row in compare.compare(clean, holding(clean, exact__forced__1__up=b))["rows"] if not row["equal"]
    )
    assert (row["layer"], row["operator"], row["differing"], row["total"]) == ("1", "up", 2, a.numel())
    assert row["first"]["index"] == [0, 3, 7]
    assert float(row["first"]["b"]) - float(row["first"]["a"]) == pytest.approx(0.5, rel=1e-6)
    assert int(row["first"]["a_bits"], 16) == int(a.view(torch.int32)[0, 3, 7]) & 0xFFFFFFFF
    size = float(a.double().square().sum().sqrt())
    assert row["relative_l2"] == pytest.approx(math.hypot(0.5, 0.25) / size, rel=1e-5)
    assert row["max_abs"] == pytest.approx(0.5, rel=1e-6)
    dot = float((a.double() * b.double()).sum()) / size / float(b.double().square().sum().sqrt())
    assert row["cosine"] == pytest.approx(dot, abs=1e-14)
    assert row["ulp"] == compare.ulp_distance(a, b) > 0
    assert row["absent"] == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_what_is_not_finite_is_absent_and_never_a_number(take, value):
    """JSON takes every result; a value as large as the format is finite, and its square does not overflow."""
    clean = take()
    b = clean.tensors["exact/forced/1/up"].clone()
    b[0, 3, 7] = value
    for other in (clean, take(dtype="bfloat16")):
        result = compare.compare(other, holding(clean, exact__forced__1__up=b))
        json.dumps(result, allow_nan=False)
        row = next(r for r in result["rows"] if (r["layer"], r["operator"]) == ("1", "up"))
        finite = math.isfinite(value)
        assert (row["relative_l2"] is None) is not finite
        assert row["nonfinite"] == [0, 0 if finite else 1]
        assert bool(row["absent"]) is not finite
        assert (result["verdict"]["kind"], *place(result["verdict"])) == ("fault", "1", "up")
        assert result["verdict"]["departs"] == "A or B"


def test_zero_everywhere_has_no_relative_error(take):
    """Its reason stands where the number would."""
    clean = take()
    zeros = torch.zeros_like(clean.tensors["exact/forced/1/up"])
    result = compare.compare(holding(clean, exact__forced__1__up=zeros), clean)
    row = next(r for r in result["rows"] if not r["equal"])
    assert (row["relative_l2"], row["cosine"]) == (None, None)
    assert row["absent"] == "one of the two is zero everywhere"
    assert row["max_abs"] > 0
    assert result["verdict"]["departs"] == "A or B"


def test_zeros_of_other_signs_differ_by_nothing(take):
    """Their bits differ and their values do not; nothing of that is NaN, which no worker could send."""
    clean = take()
    zeros = torch.zeros_like(clean.tensors["exact/forced/1/up"])
    a, b = holding(clean, exact__forced__1__up=zeros), holding(clean, exact__forced__1__up=-zeros)
    result = compare.compare(a, b)
    json.dumps(result, allow_nan=False)
    (row,) = (r for r in result["rows"] if not r["equal"])
    assert (row["differing"], row["max_abs"], row["ulp"]) == (zeros.numel(), 0.0, 0)
    assert (row["relative_l2"], row["cosine"]) == (None, None)
    assert row["absent"] == "both are zero everywhere, with different signs"


@pytest.mark.parametrize("a", [0.0, -0.0, 5e-324, 1e-200, 1.0, 1e200, 1.7e308])
@pytest.mark.parametrize("b", [0.0, -0.0, 5e-324, -1e-200, 2.0, -1e200, -1.7e308, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_number_of_a_difference_is_finite_or_absent_with_its_reason(a, b, dtype):
    """Over the whole range of what a captured element may be."""
    one, two = (torch.tensor([[value, 0.0, value]], dtype=torch.float64).to(dtype) for value in (a, b))
    row = compare._row("exact/forced/1/up", one, two)
    json.dumps(row, allow_nan=False)
    if not row["equal"]:
        missing = [name for name in ("relative_l2", "cosine", "max_abs", "ulp") if row[name] is None]
        assert bool(missing) == bool(row["absent"])


@pytest.mark.parametrize("value", [1.0, 1e9, 1e200])
def test_noise_of_nothing_is_still_a_number(take, value):
    """Zero everywhere in one, far from it in the other, on two stacks: more than everything, and never NaN."""
    clean = take(dtype="float64")
    name = "exact/forced/1/up"
    zeros, huge = (torch.full_like(clean.tensors[name], number) for number in (0.0, value))
    a, b = holding(clean, exact__forced__1__up=zeros), holding(clean, exact__forced__1__up=huge)
    for one, two in ((a, b), (b, a)):
        rows = [
            compare._row(key, one.tensors[key], two.tensors[key]) for key in compare._common(one, two, {"notes": []})
        ]
        compare._judge_difference(one, two, rows)
        json.dumps(rows, allow_nan=False)
        (row,) = (row for row in rows if (row["layer"], row["operator"]) == ("1", "up"))
        assert row["excess"] > 1


# --------------------------------------------------------------------------------------------------------------------
# What is compared with what.


def test_equal_captures_are_equal(take, tmp_path):
    """Through files, as asked over the worker's protocol."""
    for name in "ab":
        exact(tmp_path / name)
    result = compare.answer({which: str(tmp_path / which) for which in "ab"}, silent)
    assert (result["verdict"]["kind"], result["rule"], result["notes"]) == ("equal", "same stack", [])
    assert len(result["rows"]) == 60
    assert all(row["equal"] for row in result["rows"])
    assert result["files"] == {which: str(tmp_path / which) for which in "ab"}


def test_a_bad_file_is_told_with_its_path(take, tmp_path):
    """The second one as well as the first."""
    exact(tmp_path / "a")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-5])
    (tmp_path / "c").write_bytes(write_safetensors({"x": torch.ones(1)}, {}))
    for bad, reason in (("b", "is not a complete safetensors"), ("c", "is not a capture"), ("d", "cannot be read")):
        for pair in ({"a": "a", "b": bad}, {"a": bad, "b": "a"}):
            with pytest.raises(ValueError, match=f"{bad} .*{reason}|{bad} {reason}"):
                compare.answer({which: str(tmp_path / name) for which, name in pair.items()}, silent)


def test_different_models_are_not_compared(take):
    """Whatever their tensors are called."""
    result = compare.compare(take(), about(take(), digest="0" * 16, model="/models/mine"))
    assert result["verdict"]["kind"] == "different model"
    assert "B is model /models/mine (0000000000000000)" in result["verdict"]["why"]
    assert result["rows"] == []


def test_other_paths_and_prompts_are_not_comparable(take):
    """One pass beside decoding; no prompt in common; other tokens under one name."""
    clean = take()
    result = compare.compare(clean, take(forced=False))
    assert result["verdict"]["kind"] == "incomparable"
    assert "A is forced, B is decode" in result["verdict"]["why"]
    renamed = {name.replace("exact/", "code/"): tensor for name, tensor in clean.tensors.items()}
    other = dataclasses.replace(about(clean, prompts='["code"]'), tensors=renamed)
    result = compare.compare(clean, other)
    assert result["verdict"]["kind"] == "incomparable"
    assert result["notes"] == [f"not compared: only {w} has the prompts {p}" for w, p in (("A", PROMPT), ("B", "code"))]
    other = clean.tensors["exact/input"] + 1
    result = compare.compare(clean, holding(clean, exact__input=other))
    assert result["verdict"]["kind"] == "incomparable"
    assert "prompt exact has different tokens in A and B" in result["notes"][0]


def test_what_differs_besides_is_noted(take):
    """Format, torch, device, prompts and operators that are in one alone, drills, shapes."""
    clean = take()
    stack = {**json.loads(clean.about["environment"]), "torch": "9.9"}
    device = {**json.loads(clean.about["device"]), "uuid": "CPU-other"}
    other = about(take(dtype="bfloat16", operators=False), environment=json.dumps(stack), device=json.dumps(device))
    notes = compare.compare(clean, other)["notes"]
    assert "dtype differs: float32 in A, bfloat16 in B" in notes
    assert f"stack: torch differs: {torch.__version__} in A, 9.9 in B" in notes
    assert f"different devices: {cpu().uuid} in A, CPU-other in B" in notes
    assert "not compared: only A has operators; hidden states and logits are compared" in notes
    assert "B is a drill: one element was changed at 2.up" in compare.compare(clean, take(drill="2.up"))["notes"]
    cut = holding(clean, exact__forced__2__down=clean.tensors["exact/forced/2/down"][:, :20].clone())
    result = compare.compare(clean, cut)
    assert "not compared: exact/forced/2/down has shape [1, 30, 256] in A, [1, 20, 256] in B" in result["notes"]
    assert len(result["rows"]) == 59


def test_facts_that_cannot_change_bits_do_not_make_another_stack(take):
    """Another kernel of the system on another host is no excuse; another number of threads is."""
    clean, struck = take(), take(drill="2.up")
    stack = json.loads(clean.about["environment"])
    for name, rule in (
        ("kernel", "same stack"),
        ("python", "same stack"),
        ("threads", "difference"),
        ("torch", "difference"),
    ):
        other = about(struck, environment=json.dumps({**stack, name: "other"}))
        assert compare.compare(clean, other)["rule"] == rule


def test_decoding_is_compared_up_to_the_first_other_token(take):
    """What follows answers other inputs; the token stands in the result."""
    clean = take(forced=False)
    tokens = clean.tensors["exact/tokens"].clone()
    tokens[0, 5] += 1
    result = compare.compare(clean, holding(clean, exact__tokens=tokens))
    assert result["tokens"] == [{"prompt": "exact", "position": 5, "a": int(tokens[0, 5]) - 1, "b": int(tokens[0, 5])}]
    assert {int(row["step"]) for row in result["rows"]} == set(range(6))
    assert "token 5 differs, so later steps have different inputs" in result["notes"][0]
    # All logits are equal, so the token was chosen wrongly.
    assert (result["verdict"]["kind"], result["verdict"]["step"], result["verdict"]["departs"]) == ("fault", "5", "B")
    assert place(result["verdict"]) == ("head", "tokens")


def test_a_tie_may_be_broken_either_way(take):
    """Two equally good tokens: the choice accuses nobody."""
    clean = take(forced=False)
    logits = clean.tensors["exact/5/head/logits"].clone()
    logits[0, 0, 7] = logits.max()
    tokens = clean.tensors["exact/tokens"].clone()
    tokens[0, 5] = 7
    tied = {"exact__5__head__logits": logits}
    result = compare.compare(holding(clean, **tied), holding(clean, **tied, exact__tokens=tokens))
    assert result["verdict"]["kind"] == "rounding"
    assert result["verdict"]["why"] == "All tensors are equal; tokens differ only between equally good ones."


# --------------------------------------------------------------------------------------------------------------------
# Healthy and spoilt ones.


@pytest.mark.parametrize("forced", [True, False])
def test_formats_differ_by_rounding_alone(take, forced):
    """No two formats of the exact canary are called a fault, with operators and without."""
    for operators in (True, False):
        found = [take(dtype=dtype, forced=forced, operators=operators) for dtype in DTYPES]
        for one, two in itertools.combinations(found, 2):
            result = compare.compare(one, two)
            assert (result["rule"], result["verdict"]["kind"]) in (("difference", "equal"), ("difference", "rounding"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_place_is_named_on_the_same_stack(take, dtype):
    """One element of each operator of a layer, spoilt once: layer and operator are named, and beside it a format."""
    clean = take(dtype=dtype)
    for where in places(clean):
        if where[0] in ("1", "head"):
            verdict = compare.compare(clean, take(dtype=dtype, drill=".".join(where)))["verdict"]
            assert (verdict["kind"], place(verdict), verdict["departs"]) == ("fault", where, "A or B")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_the_users_own_is_compared(take, tmp_path):
    """Formats differ by rounding; a drill in each layer is named, exactly on the same stack."""
    pytest.importorskip("transformers", reason="Hugging Face models are captured where transformers is installed")
    from tests.checkpoints import make

    model = str(make(tmp_path / "checkpoint"))
    clean = take(model=model)
    for dtype in ("float64", "bfloat16", "float16"):
        result = compare.compare(clean, take(model=model, dtype=dtype))
        assert (result["rule"], result["verdict"]["kind"]) == ("difference", "rounding"), dtype
    named = Counter()
    for where in [p for p in places(clean) if p[0].isdigit()][::3]:
        struck = take(model=model, drill=".".join(where))
        assert place(compare.compare(clean, struck)["verdict"]) == where
        verdict = compare.compare(take(model=model, dtype="bfloat16"), struck)["verdict"]
        named["rounding" if verdict["kind"] == "rounding" else place(verdict) == where] += 1
    print(f"\ndrills beside another format, place named: {dict(named)}")
    assert named[True] >= 0.5 * sum(named.values())
