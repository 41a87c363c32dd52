"""What people read of a comparison: the terminal's table and the page."""

import math
import re

import pytest
from canaryd_lab.compare import captures

from tests.pages import Page


def header(**changes):
    """One side of a result."""
    usual = {"device": "CPU-1", "device_model": "EPYC", "backend": "cpu", "environment": {"torch": "2.9"}}
    usual |= {"dtype": "float32", "model": "canary", "digest": "ab" * 8, "path": "forced", "canaryd": "0.1"}
    return {**usual, "date": "2026-01-02T03:04:05+00:00", "drill": "", "operators": "yes", **changes}


def row(layer, operator, size=None, **changes):
    """One tensor: equal, or with a relative error of `size`."""
    usual = {"prompt": "pier", "step": "forced", "layer": layer, "operator": operator, "departs": "", "excess": None}
    if size is None:
        return {**usual, "equal": True, **changes}
    first = {"index": [0, 3], "a": "1.5", "b": "3.0", "a_bits": "0x3fc00000", "b_bits": "0x40400000"}
    numbers = {"differing": 1, "total": 7040, "first": first, "nonfinite": [0, 0], "absent": ""}
    numbers |= {"relative_l2": size, "cosine": 1 - size**2, "max_abs": 1.5, "ulp": 8388608}
    return {**usual, "equal": False, **numbers, **changes}


def result(kind="fault", rows=(), **changes):
    """A result whose verdict names the first row that departs."""
    at = next((r for r in rows if r["departs"]), None)
    verdict = {"kind": kind, "why": "said so", "departs": at["departs"] if at else ""}
    names = {"first_layer": "layer", "first_operator": "operator", "prompt": "prompt", "step": "step"}
    verdict |= {name: at[key] if at else None for name, key in names.items()}
    usual = {"schema": "canaryd.compare/1", "a": header(), "b": header(), "rule": "replay", "notes": [], "tokens": []}
    return {**usual, "rows": list(rows), "verdict": verdict, **changes}


FAULT = [
    row("input", "embedding"),
    *(row(str(i), operator) for i in range(2) for operator in ("query", "out")),
    row("2", "scores", 1e-2, departs="B", excess=93.0),
    row("2", "out", 3e-2, excess=0.3),
    row("head", "logits", 1e-2, excess=0.2),
]


def test_the_place_is_marked_and_equal_stretches_are_one_line():
    """With the first element that differs, its values and bits."""
    lines = captures.table(result(rows=FAULT)).split("\n")
    assert lines[0] == "FAULT: said so"
    assert "  input.embedding … 1.out: 5 equal" in lines
    (marked,) = [line for line in lines if line.startswith(">")]
    assert re.fullmatch(r"> 2 +scores +0\.01 +0\.0001 +8,388,608 +1\.5 +93 B", marked)
    assert lines[lines.index(marked) + 1] == "    1 of 7,040 elements differ, the first at [0, 3]:"
    assert lines[lines.index(marked) + 2] == "    1.5 (0x3fc00000) in A, 3.0 (0x40400000) in B"


def test_a_table_fits_a_terminal_and_cannot_steer_it():
    """At most 80 or 100 columns, however long the names are; control characters in a file are not printed."""
    long = "x" * 300
    rows = [row(long, long, 0.5, departs="A or B", excess=1e300), *FAULT]
    given = result(rows=rows, a=header(device_model="\x1b[2J" + long), notes=[f"{long} \x07 b"])
    for width, limit in ((80, 80), (120, captures.WIDTH), (None, captures.WIDTH)):
        text = captures.table(given, width)
        assert max(map(len, text.split("\n"))) <= limit
        assert not {"\x1b", "\x07"} & set(text)
        assert re.search(r" inf A or B$", text, re.MULTILINE)


def test_other_passes_are_one_line_each():
    """Equal ones are one line together; those beyond rounding are counted."""
    rows = [*FAULT]
    rows += [{**r, "step": step} for step in ("0", "1", "2") for r in (row("0", "query"), row("0", "out"))]
    rows += [{**row("0", "out", 0.25, departs="A", excess=7.0), "step": "3"}]
    lines = captures.table(result(rows=rows)).split("\n")
    assert lines[-2:] == [
        "  pier 0 … pier 2: 6 tensors equal",
        "  pier 3: 1 of 1 differ, rel. L2 up to 0.25 at 0.out, 1 beyond rounding",
    ]


def test_what_does_not_exist_is_a_dash_with_a_reason():
    """A tensor that is not finite has no relative error."""
    nothing = {"relative_l2": None, "cosine": None, "ulp": None, "max_abs": None, "nonfinite": [0, 3]}
    broken = row("2", "scores", 1.0, departs="B", excess=1e300) | nothing | {"absent": "not every element is finite"}
    lines = captures.table(result(rows=[broken])).split("\n")
    assert re.fullmatch(r"> 2 +scores +- +- +- +- +inf B", lines[-4])
    assert lines[-1] == "    not every element is finite: 0 not finite in A, 3 in B"


@pytest.mark.parametrize("kind", ["equal", "different model", "incomparable", "rounding"])
def test_every_verdict_has_its_word(kind):
    """Without rows as well; tokens and notes stand below it."""
    token = {"prompt": "pier", "position": 4, "a": 65, "b": 66}
    given = result(kind, notes=["dtype differs"], tokens=[token])
    text = captures.table(given)
    assert text.startswith(kind.upper() + ": said so")
    assert "note: dtype differs" in text
    assert "token: prompt pier, position 4: 65 in A, 66 in B" in text
    assert f">{kind.upper()}<" in captures.page(given)


def test_the_page_is_whole_and_needs_nothing_else():
    """Every tag is closed, nothing is fetched, no script; light and dark."""
    page = captures.page(result(rows=FAULT))
    parsed = Page(page)
    assert parsed.addresses == []
    assert "script" not in parsed.tags
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "fault at 2.scores" in parsed.words


def test_what_files_say_of_themselves_is_only_text():
    """Names of prompts, operators, devices and notes may hold anything."""
    evil = '<img src=x onerror="alert(1)">&"\''
    rows = [row("0", evil, 0.5, departs="B", excess=3.0, prompt=evil), row(evil, "out", 0.5, prompt=evil)]
    token = {"prompt": evil, "position": 4, "a": 65, "b": 66}
    sides = {
        which: header(**dict.fromkeys(("device", "device_model", "model", "drill", "dtype"), evil)) for which in "ab"
    }
    given = result(rows=[*rows, row("0", "out", step=evil)], notes=[evil], tokens=[token], **sides)
    given["verdict"]["why"] = evil
    parsed = Page(captures.page(given))
    assert "img" not in parsed.tags
    assert "".join(parsed.words).count(evil) >= 3


def test_the_plot_shows_every_tensor_at_its_height():
    """A decade is one step; equal tensors lie on the floor, those that are not finite at the ceiling."""
    rows = [
        *(row("0", "a", 1e-6), row("0", "b", 1e-4), row("0", "c", 1e-2), row("1", "d")),
        row("1", "e", 1.0, departs="B", excess=1e300) | {"relative_l2": None},
    ]
    circles = [each for each in Page(captures.page(result(rows=rows))).elements if each[0] == "circle"]
    x, y = ([float(attributes[name]) for _, attributes in circles] for name in ("cx", "cy"))
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[3] == captures.H - captures.BOTTOM
    assert y[4] == captures.TOP
    assert x == sorted(x)
    assert [attributes["fill"] for _, attributes in circles] == ["var(--c0)"] * 4 + ["var(--bad)"]
    assert all(map(math.isfinite, x + y))
