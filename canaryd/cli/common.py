"""What several commands share: opening the store, progress, signals, exit codes."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from canaryd.config.settings import Config
from canaryd.engine.engine import Engine, Progress
from canaryd.model import Device, Outcome
from canaryd.store.locks import Busy
from canaryd.store.retention import Retention
from canaryd.store.store import Store

ANSWER_PATIENCE = 3600.0
"""Seconds that a capture or a comparison may take: a large model is read from a disk."""


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives, which win over the file."""
    given = {"state_dir": options.state_dir.absolute()} if options.state_dir else {}
    return given | ({"listen": options.listen} if getattr(options, "listen", None) else {})


def complain(*lines: str) -> None:
    """Print lines to standard error, each after "canaryd: "."""
    for line in lines:
        print(f"canaryd: {line}", file=sys.stderr)


def may_write(option: str, path: Path) -> bool:
    """Whether a file can be written, as far as can be told beforehand; complain where not."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        complain(f"{option} {path}: cannot be written; name a file in a directory that exists and is yours")
        return False
    return True


def write_file(option: str, path: Path, text: str) -> None:
    """Write the text of a file option; complain where the disk refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        complain(f"{option} {path}: not written: {error.strerror}")


def open_store(settings: Config) -> Store:
    """Open the store that the settings name."""
    return Store.open(
        settings.state_dir,
        max_bytes=settings.store.max_size,
        keep=Retention(successes=settings.store.keep_successes, failures=settings.store.keep_failures),
    )


class Teller:
    """Progress on standard error: one moving line on a terminal, a plain line per finished probe elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        """Show progress, or the result of a finished probe."""
        name = f"{progress.device.name} {progress.probe}"
        if progress.instruction_set:
            name += f" [{progress.instruction_set}]"
        if progress.done is not None:
            done = progress.done
            wrong = f", {len(done.wrong)} comparisons WRONG" if done.wrong else ""
            why = f": {done.detail.splitlines()[-1]}" if done.detail and done.outcome.value != "completed" else ""
            confirming = " (confirmation)" if done.confirms else ""
            looked = f"{done.trials:,} results" if done.trials or not done.recordings else ""
            if done.recordings:
                looked += f"{', ' * bool(looked)}{len(done.recordings):,} recordings"
            self._line(f"{name}{confirming}: {done.outcome.value}, {looked} in {done.seconds:.1f} s{wrong}{why}")
        else:
            self.moving(progress.fraction, f"{name} {progress.text}")

    def moving(self, fraction: float, text: str) -> None:
        """Show a progress bar; nothing where this is no terminal."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            filled = round(20 * fraction)
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {text}"
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)

    def waiting(self, holder: str) -> None:
        """Say which process holds the device."""
        self._line(f"waiting: {holder}")

    def wipe(self) -> None:
        """Remove the progress bar."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr)

    def _line(self, text: str) -> None:
        self.wipe()
        print(text, file=sys.stderr, flush=True)


def device_names(devices: dict[str, Any]) -> str:
    """Return the names of devices, for a message."""
    return ", ".join(d.name for d in devices.values()) or "none"


def stop_on_signals(engine: Engine) -> None:
    """Stop the engine on SIGINT and SIGTERM."""

    def stop(number: int, frame: Any) -> None:  # noqa: ARG001  the signature is Python's
        # In a thread of its own: the engine's lock may be held by the code that this signal interrupted.
        threading.Thread(target=engine.stop, args=(f"interrupted by {signal.Signals(number).name}",)).start()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def make_engine(settings: Config) -> Engine:
    """Return an engine that knows the devices and probes of this host."""
    engine = Engine(settings, open_store(settings))
    stop_on_signals(engine)
    engine.discover()
    return engine


def ask(engine: Engine, device: Device, module: str, arguments: dict[str, Any], wait: float) -> dict[str, Any] | None:
    """Return what a module of the worker answers; None, with a complaint, where it does not."""
    teller = Teller()
    try:
        outcome, answer, detail = engine.answer(
            device,
            module,
            arguments,
            timeout=ANSWER_PATIENCE,
            wait=wait,
            on_wait=teller.waiting,
            on_progress=lambda fraction, text: teller.moving(fraction, f"{module} {text}"),
        )
    except Busy as busy:
        outcome, answer, detail = Outcome.ERRORED, {}, str(busy)
    if outcome is Outcome.COMPLETED:
        teller.wipe()
        return answer
    teller.wipe()
    complain(f"{module}: {outcome.value}: {detail or 'no reason given'}")
    return None
