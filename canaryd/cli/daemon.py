"""`canaryd run` and `canaryd release`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import time

from canaryd.cli.arguments import USAGE
from canaryd.cli.common import complain, open_store, overrides
from canaryd.config.settings import Config
from canaryd.daemon import systemd
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.store import notes
from canaryd.store.notes import RELEASE_NOTE, RELEASED_NOTE

RELEASE_PATIENCE = 30.0
"""Seconds that `canaryd release` waits for the daemon's answer."""


def run_command(options: argparse.Namespace, settings: Config) -> int:
    """Run the daemon; return the exit code."""
    from canaryd.daemon.daemon import Daemon  # noqa: PLC0415  a check need not pay for the scheduler and the exposition

    manager = systemd.take(os.environ)
    if sys.stderr is not None:  # a daemon may be started without it
        faulthandler.enable()  # a watchdog ends a daemon that hangs by SIGABRT: its log then says where each thread was
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
    """Ask the daemon to let go of every device, and return when it has."""
    with open_store(settings) as store:
        if not notes.daemon_runs(store):
            print(f"no daemon runs on {settings.state_dir}: nothing of canaryd holds a device between two commands")
            return 0
        until = 0.0 if options.end else time.time() + options.seconds
        if not store.set_note(RELEASE_NOTE, str(until)):
            complain(f"the daemon could not be asked: {store.problem}")
            return exit_code(State.UNKNOWN)
        wanted = "" if options.end else str(until)
        deadline = time.monotonic() + RELEASE_PATIENCE
        while store.note(RELEASED_NOTE) != wanted:
            if time.monotonic() > deadline:
                complain(f"the daemon has not answered within {RELEASE_PATIENCE:.0f} s: look at its log")
                return exit_code(State.UNKNOWN)
            time.sleep(0.1)
    print(
        "devices are tested again" if options.end else f"released for {options.seconds:.0f} s: canaryd holds no device"
    )
    return 0
