"""The table of fixed goldens: which library computed a cell is what the libraries themselves print."""

import os
import sys

import pytest

pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]  # .ci/full makes the whole table, too

from benchmarks import runtimes  # noqa: E402  it needs torch


def test_a_column_of_torch_names_the_libraries():
    """MKL multiplies float32; without oneDNN no cell names it; every result and every control is right."""
    found = runtimes.column(sys.executable, "torch", runtimes.WITHOUT_ONEDNN)
    assert all(all(right) for right in found.rows.values())
    assert found.rows[runtimes.CONTROL]
    if found.stack["blas"] == "mkl":
        assert found.cell("product float32") == "6 of 6, MKL"
    assert "oneDNN" not in {name for by in found.by.values() for name in by}
    assert found.by["product float16"] == ["own"] * 6
    assert found.cell("product of nothing") == "none"


def test_what_a_library_prints_is_kept_apart(capfd):
    """What C code writes to the standard output is returned, and does not come out."""
    assert runtimes.printed(lambda: os.write(1, b"onednn_verbose,...\n")) == (19, "onednn_verbose,...\n")
    assert capfd.readouterr().out == ""
