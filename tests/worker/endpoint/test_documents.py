"""JSON of a hostile server: refused before it costs memory, and where two readers would read two things."""

from __future__ import annotations

import subprocess
import sys

import pytest

from canaryd.worker.endpoint.documents import MAX_VALUES, read

WORST = 256
"""MiB that the worst document may take: a quarter of what a worker has (`canaryd.worker.limits.ENDPOINT_MEMORY`)."""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"a": 1, "b": {"a": 1}}', ""),
        ('{"a": 1, "a": 1}', "has an object with two values of one name"),
        ('{"b": [{"a": 1, "a": 2}]}', "has an object with two values of one name"),
        ("[" * 101 + "]" * 101, "is nested too deeply"),
        ("[" * 50_000 + "]" * 50_000, "is nested too deeply"),
        ("[" + "0," * MAX_VALUES + "0]", "has more than 1,000,000 values"),
        ("null", "is null"),
        ("{", "is not JSON, or incomplete"),
        ("", "is not JSON, or incomplete"),
        ("9" * 5000, "is not JSON, or incomplete"),
    ],
)
def test_what_is_wrong_is_said(text, wrong):
    """Either data or the reason why there is none."""
    data, said = read(text)
    assert said == wrong
    assert (data is None) == bool(wrong)


@pytest.mark.parametrize("unit", ["{},", '{"a":1},', "[0],", '{"a":{}},', '["x1"],', "1.5,"])
def test_the_largest_documents_fit_into_a_worker(unit):
    """As many values as are allowed, of the kinds that take the most memory."""
    script = (
        "import sys; from canaryd.worker.endpoint.documents import MAX_VALUES, read\n"
        "def peak(): return int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]) >> 10\n"
        "unit = sys.argv[1]; each = sum(map(unit.count, ',:[{'))\n"
        "before = peak()\n"
        "data, wrong = read('[' + unit * (MAX_VALUES // each - 2) + '0]')\n"
        "assert not wrong, wrong\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= WORST
