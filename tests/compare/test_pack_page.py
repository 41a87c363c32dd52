"""The page of a golden pack in a real browser: sound and broken, by WebAssembly and by WebGPU in software."""

from __future__ import annotations

import contextlib
import html
import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from canaryd.compare import pack
from canaryd.model import State
from tests.command import ROOT

pytest.importorskip("torch", reason="torch is not installed in this interpreter")
pytestmark = pytest.mark.torch
SOFTWARE = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A pack."""
    from canaryd.worker.pack import export

    goldens = json.loads((ROOT / "probes/golden/exact_matmul.json").read_text())
    directory = tmp_path_factory.mktemp("made") / "pack"
    export.answer({"directory": str(directory), "goldens": goldens}, lambda _fraction, _text: None)
    return directory


def browse(address: str, profile: Path, *options: str) -> tuple[str, Path]:
    """Return the text that the page shows, and the result file that it gives."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium here: the pack's page was not run in a browser")
    command = [program, "--headless", "--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += [f"--user-data-dir={profile}", *options, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    shown = done.stdout.partition("</main>")[0]
    found = re.search(r'<pre id="result"[^>]*>(.+?)</pre>', shown, re.DOTALL)
    assert found, re.sub(r"<[^>]+>", " ", shown)[-500:]
    out = profile.with_suffix(".json")
    out.write_text(html.unescape(found[1]))
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", shown.partition('<pre id="result"')[0])).split()), out


def test_a_sound_processor_is_healthy_in_the_page(made, tmp_path):
    """WebAssembly meets every fixed golden bit for bit; the file that the page gives is judged healthy."""
    address = (made / "index.html").as_uri() + "#run&unit=wasm"
    text, out = browse(address, tmp_path / "p", "--disable-gpu", "--virtual-time-budget=600000")
    assert "Healthy 115 results of 23 cases, 0 wrong. The processor was tested." in text
    judged = pack.judge(out, made)
    assert (judged.state, len(judged.right), len(judged.skipped)) == (State.HEALTHY, 23, 0)


def test_without_webgpu_the_page_says_that_the_processor_was_tested(made, tmp_path):
    """And an injected fault is named with its elements and bit; the result file of a demonstration is refused."""
    address = (made / "index.html").as_uri() + "#run&fault=flip"
    options = ("--disable-gpu", "--disable-features=WebGPU", "--virtual-time-budget=600000")
    text, out = browse(address, tmp_path / "p", *options)
    assert "Demonstration: " in text
    assert "Wrong results 115 results of 23 cases, 5 wrong. WebGPU is not available here" in text
    assert "The processor was tested." in text
    assert "8 of 7680 elements wrong in 5 of 5 results. First: row 40, column 17:" in text
    assert "Flipped: bit 22 (8 times)" in text
    with pytest.raises(pack.Refused, match="is no evidence"):
        pack.judge(out, made)


def test_webgpu_meets_the_same_goldens(made, tmp_path):
    """By SwiftShader, which is software, and the page says so; float64 is skipped with the reason."""
    page = (made / "index.html").read_text().replace("</main>", '</main><img alt="" src="/wait">', 1)
    ended = threading.Event()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Give the page; an image that comes only after the test ended holds the browser until then."""
            if self.path == "/wait":
                ended.wait(60)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            if self.path == "/done":
                ended.set()
            with contextlib.suppress(OSError):
                self.wfile.write(page.encode() if self.path == "/" else b"")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    watch = "<script>new MutationObserver(() => fetch('/done')).observe(document.getElementById('result'),"
    page = page.replace("</body>", watch + "{childList: true})</script></body>")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text, out = browse(f"http://127.0.0.1:{server.server_port}/#run", tmp_path / "p", *SOFTWARE)
        server.shutdown()
    if "WebGPU is not available here" in text:
        pytest.skip("this chromium has no WebGPU in software: the shader was not run")
    judged = pack.judge(out, made)
    assert "This adapter is software" in text
    assert (judged.state, len(judged.right), len(judged.skipped)) == (State.HEALTHY, 20, 3)
    assert {entry["reason"] for entry in judged.skipped} == {"WebGPU has no float64"}
