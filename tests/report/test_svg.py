"""Plots: well-formed SVG that says in words what it shows, leaves gaps open, and lets nothing through from labels."""

import itertools
import re
import time
import xml.etree.ElementTree as ET

import pytest

from canaryd.report import svg
from canaryd.report.svg import Mark, plot

START = 1_790_000_000.0
HOUR, DAY = 3600.0, 86_400.0


def parsed(text):
    return ET.fromstring(text)


def own(*values, step=HOUR):
    return [(START + n * step, v) for n, v in enumerate(values)]


def texts(figure):
    return [t.text for t in figure.iter("text")]


def test_a_plot_says_what_it_shows():
    """Caption and label have range and last value with their unit; the axis has the unit once."""
    figure = parsed(plot("core", "celsius", own(60.0, 71.0, 65.0)))
    caption = figure.find("figcaption").text
    assert caption.startswith("core: 60 °C to 71 °C, last 65 °C")
    assert figure.find("svg").get("aria-label") == caption
    assert texts(figure).count("°C") == 1


def test_a_plot_without_values_is_a_sentence():
    """Absence is said, not drawn as zero."""
    figure = parsed(plot("core", "celsius", []))
    assert figure.find("svg") is None
    assert figure.find("figcaption").text == "core: no values in this time"
    assert parsed(plot("core", "celsius", own(float("nan")))).find("svg") is None


def test_labels_are_escaped():
    """A label from a log is no markup."""
    evil = '<script>alert("1")</script>'
    text = plot(evil, "1", own(1.0, 2.0), [Mark(at=START + HOUR, label=evil)])
    assert "<script" not in text
    assert [t for t in texts(parsed(text)) if t == evil] == [evil]


def test_gaps_stay_open_and_lone_values_are_dots():
    """No line over a time of which nothing is known."""
    points = [(START + n * HOUR, 1.0 + n) for n in (0, 1, 2, 30, 31, 90)]
    figure = parsed(plot("x", "1", points))
    assert [len(line.get("points").split()) for line in figure.iter("polyline")] == [3, 2]
    assert len(list(figure.iter("circle"))) == 1


def test_many_points_are_thinned_without_losing_a_peak():
    """4,000 polls are a few hundred points, and the highest one is among them."""
    values = [1.0] * 4000
    values[1777] = 9.0
    figure = parsed(plot("x", "1", own(*values, step=300.0)))
    (line,) = figure.iter("polyline")
    heights = [float(p.split(",")[1]) for p in line.get("points").split()]
    assert len(heights) <= 2 * svg.MOST + 2
    assert min(heights) == pytest.approx(svg.TOP)


def test_noise_does_not_fill_a_plot():
    """0.1 % of noise takes a fiftieth of the height, not all of it."""
    figure = parsed(plot("x", "1", own(1000.0, 1001.0, 1000.0)))
    (line,) = figure.iter("polyline")
    heights = [float(p.split(",")[1]) for p in line.get("points").split()]
    assert 0 < max(heights) - min(heights) < 5


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 5e15])
def test_any_constant_can_be_drawn(value):
    """Zero, negative, tiny and huge."""
    figure = parsed(plot("x", "1", own(value, value)))
    assert len(list(figure.iter("polyline"))) == 1
    assert 3 <= len([e for e in figure.iter("line") if e.get("class") == "grid"]) <= 9


def test_values_that_are_not_finite_are_gaps():
    """NaN and infinity have no place on an axis."""
    text = plot("x", "1", own(1.0, float("nan"), float("inf"), 2.0))
    assert "nan" not in text
    assert "inf" not in text


def test_marks_have_lines_and_labels_that_do_not_overlap():
    """Of marks close together each has its line and title, and as many labels as there is room."""
    marks = [Mark(at=START + n * 60, label=f"Xid {n} on this device", role="bad") for n in range(5)]
    marks.append(Mark(at=START - DAY, label="before"))
    figure = parsed(plot("x", "1", own(1.0, 2.0, 3.0), marks))
    lines = [e for e in figure.iter("line") if "mark" in e.get("class")]
    assert len(lines) == 5
    assert all(re.match(r"\d{4}-\d\d-\d\d .* Xid", e.find("title").text) for e in lines)
    places = sorted((float(e.get("x")), len(e.text)) for e in figure.iter("text") if "mark" in (e.get("class") or ""))
    assert places
    for (left, letters), (right, _) in itertools.pairwise(places):
        assert left + 7 * letters < right
    assert all(x >= 0 and x + 7 * letters <= svg.W for x, letters in places)


def test_a_label_leaves_the_unit_of_the_axis_alone():
    """A mark at the very beginning has its label right of the unit."""
    figure = parsed(plot("x", "celsius", own(1.0, 2.0), [Mark(at=START, label="verdict")]))
    (unit,) = (t for t in figure.iter("text") if t.text == "°C")
    (label,) = (t for t in figure.iter("text") if t.text == "verdict")
    assert unit.get("text-anchor") == "end"
    assert float(unit.get("x")) < svg.LEFT <= float(label.get("x"))


def test_the_range_is_that_of_the_values():
    """What happened hours before a minute of values does not squeeze them; what happened close by is shown."""
    line = own(1.0, 2.0, 3.0, step=30.0)
    old, near = Mark(at=START - 6 * HOUR, label="old"), Mark(at=START - 45.0, label="near")
    marks = [old, near, Mark(at=START + 110.0, label="after")]
    for shown, first, last in (([old], START, START + 60.0), (marks, START - 45.0, START + 110.0)):
        figure = parsed(plot("x", "1", line, shown))
        (drawn,) = figure.iter("polyline")
        places = [float(p.split(",")[0]) for p in drawn.get("points").split()]
        across = (svg.W - svg.LEFT - svg.RIGHT) / (last - first)
        assert places[0] == pytest.approx(svg.LEFT + (START - first) * across, abs=0.1)
        assert places[-1] - places[0] == pytest.approx(60.0 * across, abs=0.1)
        assert places[-1] - places[0] > (svg.W - svg.LEFT - svg.RIGHT) / 3
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", t) for t in texts(figure) if t.count(":") and t != "near")
    times = [t for t in figure.iter("text") if t.text.count(":") == 2]
    assert len(times) >= 2
    assert all(float(t.get("x")) + 7 * len(t.text) / 2 <= svg.W for t in times)


@pytest.mark.parametrize(("span", "wanted"), [(6 * HOUR, "15:00"), (50 * DAY, "29 Oct")])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "Europe/Berlin"])
def test_the_time_axis_is_in_utc(zone, span, wanted, monkeypatch):
    """Whole hours and days of UTC wherever it is drawn: who reads it is elsewhere."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        made = plot("x", "1", [(START, 1), (START + span, 2)])
    time.tzset()
    labels = re.findall("middle.>([^<]*)<", made)
    assert 2 <= len(labels) <= svg.TICKS + 1
    assert wanted in labels
    assert all(re.fullmatch(r"\d\d:\d\d|\d\d \w+", label) for label in labels)


def test_the_style_takes_its_colours_from_the_page():
    """Dark and light without a script, and nothing from the network."""
    assert "currentColor" in svg.STYLE
    assert "prefers-color-scheme: dark" in svg.STYLE
    assert "http" not in svg.STYLE + plot("x", "1", own(1.0, 2.0))
