"""The page of a golden pack in a real browser: sound and broken, by WebAssembly and by WebGPU in software."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from canaryd_lab.compare import pack

from canaryd.model import State
from tests import browser
from tests.command import ROOT

pytest.importorskip("torch", reason="torch is not installed in this interpreter")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A pack."""
    from canaryd_lab.worker.pack import export

    goldens = json.loads((ROOT / "probes/golden/exact_matmul.json").read_text())
    directory = tmp_path_factory.mktemp("made") / "pack"
    export.answer({"directory": str(directory), "goldens": goldens}, lambda _fraction, _text: None)
    return directory


@pytest.mark.slow
def test_a_sound_processor_is_healthy_in_the_page(made, tmp_path):
    """WebAssembly meets every fixed golden bit for bit; the file that the page gives is judged healthy."""
    address = (made / "index.html").as_uri() + "#run&unit=wasm"
    text, out = browser.browse(address, tmp_path / "p", *browser.PROCESSOR)
    assert "Healthy 115 results of 23 cases, 0 wrong. The processor was tested." in text
    judged = pack.judge(out, made)
    assert (judged.state, len(judged.right), len(judged.skipped)) == (State.HEALTHY, 23, 0)


def test_without_webgpu_the_page_says_that_the_processor_was_tested(made, tmp_path):
    """And an injected fault is named with its elements and bit; the result file of a demonstration is refused."""
    address = (made / "index.html").as_uri() + "#run&fault=flip"
    options = (*browser.PROCESSOR, "--disable-features=WebGPU")
    text, out = browser.browse(address, tmp_path / "p", *options)
    assert "Demonstration: " in text
    assert "Wrong results 115 results of 23 cases, 5 wrong. WebGPU is not available here" in text
    assert "The processor was tested." in text
    assert "8 of 7680 elements wrong in 5 of 5 results. First: row 40, column 17:" in text
    assert "Flipped: bit 22 (8 times)" in text
    with pytest.raises(pack.Refused, match="is no evidence"):
        pack.judge(out, made)


def test_webgpu_meets_the_same_goldens(made, tmp_path):
    """By SwiftShader, which is software, and the page says so; float64 is skipped with the reason."""
    text, out = browser.by_webgpu(made / "index.html", tmp_path / "p")
    if "WebGPU is not available here" in text:
        pytest.skip("this chromium has no WebGPU in software: the shader was not run")
    judged = pack.judge(out, made)
    assert "This adapter is software" in text
    assert (judged.state, len(judged.right), len(judged.skipped)) == (State.HEALTHY, 20, 3)
    assert {entry["reason"] for entry in judged.skipped} == {"WebGPU has no float64"}
