"""Draw the pictures of the documentation, and note from which sources: `scripts/pictures`.

docs/pictures/sources.json has the SHA-256 of each picture and of what it was drawn from; a test compares both. The
status page is that of `tests/mixed_machine.py`; a dashboard is drawn from its JSON and a real Prometheus that scrapes
two daemons with stand-in GPUs (`tests/grafana/field.py`, some minutes).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from canaryd.report import status_page
from tests.command import ROOT
from tests.mixed_machine import mixed_machine
from tests.programs import CHROMIUM, HEADLESS, find

PICTURES = ROOT / "docs/pictures"
SOURCES = PICTURES / "sources.json"
STATUS, FLEET = "status-page.png", "dashboard-fleet.png"
DASHBOARD = ROOT / "grafana/dashboards/canaryd-fleet.json"
WIDTH, HEIGHT = 1280, 840
"""Pixels of the browser's window."""


def status_html() -> str:
    """Return the status page of the machine on which much is wrong, as it is at any time and on any host."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        with tempfile.TemporaryDirectory() as directory:
            page = status_page.render(mixed_machine(Path(directory) / "state")).decode()
    finally:
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
        time.tzset()
    return page.replace(f"canaryd on {socket.gethostname()}", "canaryd on node17")


def sources() -> dict[str, str]:
    """Return the SHA-256 of what each picture is drawn from."""
    given = {STATUS: status_html().encode(), FLEET: DASHBOARD.read_bytes()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in given.items()}


def digests() -> dict[str, str]:
    """Return the SHA-256 of each picture."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(PICTURES.glob("*.png"))}


def draw_status() -> None:
    """Draw the status page in a browser."""
    browser = find(*CHROMIUM)
    if browser is None:
        sys.exit("scripts/pictures: wanted chromium to draw with; install it")
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        page.write_text(status_html())
        argv = [browser, *HEADLESS, "--hide-scrollbars"]
        argv += [f"--user-data-dir={directory}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run(
            [*argv, f"--screenshot={PICTURES / STATUS}", page.as_uri()], check=True, timeout=120, capture_output=True
        )


def draw_fleet() -> None:
    """Draw the dashboard from a real Prometheus."""
    from tests.grafana.field import fleet

    with tempfile.TemporaryDirectory() as directory, fleet(Path(directory)) as (api, nodes):
        argv = [sys.executable, "-m", "tools.grafana_preview", "--prometheus", api.url, "--out", directory]
        argv += ["--since", "0.03", "--scrape", "1", "--set", f"instance={nodes[0].name}", "canaryd-fleet"]
        subprocess.run(argv, cwd=ROOT, check=True, timeout=300)
        shutil.copy(Path(directory) / "canaryd-fleet.png", PICTURES / FLEET)


def main() -> None:
    """Draw the pictures whose source has changed, or those that are named."""
    parser = argparse.ArgumentParser(prog="scripts/pictures", description="draw the pictures of the documentation")
    parser.add_argument("names", nargs="*", metavar="PICTURE", help=f"{STATUS}, {FLEET} (default: those out of date)")
    wanted = parser.parse_args().names
    noted = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    now = sources()
    for name, draw in ((STATUS, draw_status), (FLEET, draw_fleet)):
        if name in wanted or (not wanted and noted.get(name, {}).get("source") != now[name]):
            draw()
            noted[name] = {"source": now[name], "picture": digests()[name]}
            SOURCES.write_text(json.dumps(noted, indent=1) + "\n")
            print(f"drew docs/pictures/{name}")


if __name__ == "__main__":
    main()
