"""Programs that tests run, and that need not be installed here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
HEADLESS = ("--headless", "--no-sandbox", "--disable-gpu")


def find(*names: str) -> str | None:
    """Return the path of the first program that is installed, beside this Python or for everyone; None without one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def needed(*names: str, untested: str) -> str:
    """Return the path of the first program that is installed; without one, skip the test, and say what it left out.

    The skip is unittest's, which pytest takes for its own: a benchmark needs no pytest.
    """
    if found := find(*names):
        return found
    raise unittest.SkipTest(f"NOT TESTED: {names[0]} is not installed here: {untested}")


def accepted(*argv: object) -> str:
    """Return what a validator printed; it must be content."""
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def linted(page: str) -> str:
    """Return what `promtool check metrics` says of a page; "" is praise."""
    argv = [needed("promtool", untested="the exposition was not linted"), "check", "metrics"]
    done = subprocess.run(argv, input=page, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode == 0) == (done.stdout + done.stderr == ""), done.returncode
    return done.stdout + done.stderr


def opened(address: str, profile: Path, *options: str) -> str:
    """Return the document that a browser without a window made of an address."""
    argv = [needed(*CHROMIUM, untested="no browser opened the page"), *HEADLESS, f"--user-data-dir={profile}"]
    return accepted(*argv, "--dump-dom", *options, address)


def measured(page: str, directory: Path, size: tuple[int, int], script: str, *options: str) -> Any:
    """Return what a script, a function of a document, says of a page in a frame of so many pixels.

    The script measures what the page itself must not; and a window has a least width, which a frame has not.
    """
    (directory / "page.html").write_text(page)
    (directory / "frame.html").write_text(
        f"""<iframe id="f" src="page.html" style="width:{size[0]}px;height:{size[1]}px;border:0"></iframe>
        <p id="out"></p><script>document.getElementById("f").onload = e =>
        document.getElementById("out").textContent = JSON.stringify(({script})(e.target.contentDocument))</script>"""
    )
    shown = opened(f"file://{directory}/frame.html", directory / "profile", "--allow-file-access-from-files", *options)
    found = re.search(r'<p id="out">([^<]+)</p>', shown)
    assert found, shown
    return json.loads(found[1])
