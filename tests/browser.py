"""The page of a golden pack in a real browser: what it shows, and the result file that it gives."""

from __future__ import annotations

import html
import re
import subprocess
import threading
from pathlib import Path

from tests.http_server import Handler, listening
from tests.programs import CHROMIUM, needed

SOFTWARE = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
"""Options with which Chromium computes WebGPU by SwiftShader."""
PROCESSOR = ("--disable-gpu", "--virtual-time-budget=600000")


def program() -> str:
    """Return the path of Chromium, or skip the test."""
    return needed(*CHROMIUM, untested="the pack's page was not run in a browser")


def browse(address: str, profile: Path, *options: str) -> tuple[str, Path]:
    """Return the text that the page at an address shows, and the result file that it gives, beside `profile`."""
    command = [program(), "--headless", "--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += [f"--user-data-dir={profile}", *options, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    shown = done.stdout.partition("</main>")[0]
    found = re.search(r'<pre id="result"[^>]*>(.+?)</pre>', shown, re.DOTALL)
    if found is None:
        raise AssertionError(re.sub(r"<[^>]+>", " ", shown)[-500:])
    out = profile.with_suffix(".json")
    out.write_text(html.unescape(found[1]))
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", shown.partition('<pre id="result"')[0])).split()), out


def by_webgpu(page: Path, profile: Path, fragment: str = "#run") -> tuple[str, Path]:
    """Return the same of a page that WebGPU computes, from a server: headless Chromium gives it to files too late.

    An image that comes only after the page has its result holds the browser until then.
    """
    text = page.read_text().replace("</main>", '</main><img alt="" src="/wait">', 1)
    watch = "<script>new MutationObserver(() => fetch('/done')).observe(document.getElementById('result'),"
    text = text.replace("</body>", watch + "{childList: true})</script></body>")
    ended = threading.Event()

    class Server(Handler):
        def respond(self) -> None:
            """Give the page, and hold or release the image."""
            if self.path == "/wait":
                ended.wait(240)
            if self.path == "/done":
                ended.set()
            self.reply(200, text.encode() if self.path == "/" else b"", {"Content-Type": "text/html"})

    with listening(Server) as address:
        return browse(f"http://{address}/{fragment}", profile, *SOFTWARE)
