"""`canaryd run` and `canaryd release`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import time

from canaryd.cli.arguments import USAGE, Commands, duration, listen
from canaryd.cli.common import complain, open_record, open_store, overrides, say
from canaryd.config.settings import Config
from canaryd.daemon import systemd
from canaryd.formatting import format_duration, format_time, time_zone
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.store import notes
from canaryd.store.locks import Busy
from canaryd.store.notes import RELEASE_NOTE, RELEASED_NOTE

RELEASE_PATIENCE = 30.0
"""Seconds that `canaryd release` waits until the daemon and all other commands have released the devices."""


def add_parsers(commands: Commands) -> None:
    """Add the parsers of these commands."""
    command = commands.add(
        *("run", run_command),
        "run the daemon: test on a schedule, serve metrics",
        "Run the daemon in the foreground: test every device on a schedule, serve metrics and a page.",
        epilog="exit status: 0 stopped by SIGTERM or SIGINT while it served, 64 usage or configuration error, or the "
        "address is taken",
    )
    command.add_argument(
        "--listen", type=listen, metavar="HOST:PORT", help="address of metrics and page (default: 127.0.0.1:19469)"
    )

    command = commands.add(
        *("release", release_command),
        "let go of every device for a while, e.g. for a driver upgrade",
        "Ask the daemon to let go of every device for a while. Nothing is tested until that time is over.",
        epilog="exit status: 0 released, or no daemon runs, 3 not released, or there is no record, 64 usage or "
        "configuration error",
    )
    command.add_argument(
        "--for", dest="seconds", type=duration, default=600.0, metavar="10m", help="for how long (default: 10m)"
    )
    command.add_argument("--end", action="store_true", help="end a release early")


def run_command(options: argparse.Namespace, settings: Config) -> int:
    """Run the daemon and return the exit code."""
    from canaryd.daemon.daemon import Daemon  # noqa: PLC0415  a check need not pay for the scheduler and the exposition

    manager = systemd.take(os.environ)
    faulthandler.enable()  # a watchdog ends a hung daemon by SIGABRT: the log then shows where each thread was
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    store = open_store(settings)
    for problem in store.problems:
        logging.getLogger("canaryd").warning("%s", problem)
    try:
        return Daemon(settings, options.config, store, overrides(options), manager=manager).run()
    except OSError as error:
        complain(error.strerror or str(error))
        return USAGE


def release_command(options: argparse.Namespace, settings: Config) -> int:
    """Ask the daemon to release every device, wait until it has, and return the exit code."""
    with open_record(settings, to_change=True) as store:
        if not settings.state_dir.exists():
            complain(f"release: nothing is recorded in {settings.state_dir}: name the daemon's with --state-dir")
            return exit_code(State.UNKNOWN)
        if not notes.daemon_runs(store):
            say(f"nothing to release: no daemon runs on {settings.state_dir}")
            return 0
        until = 0.0 if options.end else time.time() + options.seconds
        store.set_note(RELEASE_NOTE, str(until))
    wanted = "" if options.end else str(until)
    with open_record(settings) as store:
        deadline = time.monotonic() + RELEASE_PATIENCE
        while store.note(RELEASED_NOTE) != wanted:
            if time.monotonic() > deadline:
                complain(f"release: the daemon did not answer within {RELEASE_PATIENCE:.0f} s; see its log")
                return exit_code(State.UNKNOWN)
            time.sleep(0.1)
        try:
            for device in {r.device.physical for r in store.devices()} if not options.end else ():
                with store.lock(device, deadline - time.monotonic()):
                    pass  # another command let go of it too
        except Busy as busy:
            complain(f"release: the daemon has let go, but another command still uses a device: {busy}")
            return exit_code(State.UNKNOWN)
    if options.end:
        print("release ended: devices are tested again")
    else:
        end = f"{format_time(until)} {time_zone()}"
        say(f"released for {format_duration(options.seconds)}, until {end}: no device is touched")
    return 0
