"""Programs that tests run, and that need not be installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

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
