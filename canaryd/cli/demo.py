"""`canaryd demo`: what a broken GPU looks like in every report, from a recording of a made-up node."""

from __future__ import annotations

import argparse
import gzip
import sqlite3
import tempfile
from pathlib import Path

from canaryd.cli.arguments import USAGE, Commands
from canaryd.cli.common import complain, say, use_color
from canaryd.config.settings import Config
from canaryd.dossier import write
from canaryd.dossier.document import DossierError
from canaryd.engine.check import Result
from canaryd.model import State
from canaryd.report import check, status, status_page, status_text
from canaryd.store.store import Store

RECORDING = Path(__file__).parent / "demo.sql.gz"
"""A database as SQL: `python -m tests.story.demo` plays the story and writes it."""
WHAT = "DEMO: a recording of a made-up node. Nothing of this machine is read, tested or stored."


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("demo", demo_command),
        "show what a broken GPU looks like in check, status, page and report",
        "Show what a broken GPU looks like in check, status, page and report, from a recording. Touches no device.",
        epilog="exit status: 0 shown, 64 usage error, or DIR cannot be written",
    )
    command.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="directory for the page and the report (default: a new one)"
    )


def demo_command(options: argparse.Namespace, settings: Config) -> int:
    """Print what `check` and `status` say of the recorded node, write page and report, and return the exit code."""
    del settings
    out = (options.out or Path(tempfile.mkdtemp(prefix="canaryd-demo-"))).absolute()
    with tempfile.TemporaryDirectory(prefix="canaryd-") as directory:
        config = Config(state_dir=Path(directory))
        _play_back(config.state_dir / "canaryd.db")
        with Store.open(config.state_dir, for_reading=True) as store:
            now = max(verdict.decided for verdict in store.verdicts().values()) + 60.0
            found = status.gather(store, config, now, daemon=True)
            (broken,) = (d.device for d in found.devices if d.verdict.state is State.FAULTY)
            say(f"{WHAT}\n\n$ canaryd check --level quick")
            print(check.as_text(_checked(store, found), color=use_color()))
            say("\n$ canaryd status")
            print(status_text.as_text(found, color=use_color()))
            try:
                made = write.write(store, config, None, broken, out, redact=False, now=now, root=None)
                page = out / "status.html"
                page.write_bytes(
                    status_page.render(found).replace(b"<header", f"<p><b>{WHAT}</b></p><header".encode(), 1)
                )
            except (DossierError, OSError) as error:
                complain(f"demo: {error}")
                return USAGE
    say(f"\nthe page that a daemon serves:     {page}")
    say(f"canaryd report {broken.name}, for a vendor: {made / 'dossier.html'}")
    say("to test this machine:              canaryd check --level quick")
    return 0


def _play_back(path: Path) -> None:
    """Write the recorded database."""
    database = sqlite3.connect(path)
    database.executescript(gzip.decompress(RECORDING.read_bytes()).decode())
    database.close()


def _checked(store: Store, found: status.Status) -> Result:
    """Return the result of a check that found what is on record."""
    newest = [run for d in found.devices for run in store.runs(d.device.uuid, since=found.now - 1860.0)]
    return Result(
        level="quick",
        started=0.0,
        seconds=sum(run.seconds for run in newest),
        devices=[d.device for d in found.devices],
        verdicts={d.device.uuid: d.verdict for d in found.devices},
    )
