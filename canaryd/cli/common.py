"""Functions that several commands share: opening the store, progress, errors, signals."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from canaryd.config.settings import Config
from canaryd.engine.check import gave
from canaryd.engine.engine import Engine, Progress, choose
from canaryd.formatting import columns, folded, format_duration
from canaryd.judge.coverage import OUTCOMES
from canaryd.judge.phrases import reason_of
from canaryd.model import Device, Outcome, Run
from canaryd.report.terminal import UNBROKEN, typed
from canaryd.store.locks import DISK_FULL, Unreadable, user_name
from canaryd.store.notes import daemon_runs, released_until
from canaryd.store.retention import Retention
from canaryd.store.store import Store

BAR = 10
"""Characters of a progress bar."""
KNOWN = 0.2
"""Share of the parts that must be done before their own time says how long the rest takes."""
RELEASE_PERIOD = 1.0
"""Seconds between two checks for a `canaryd release`."""


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives, which replace those of the configuration file."""
    given = {"state_dir": options.state_dir.absolute()} if options.state_dir else {}
    return given | ({"listen": options.listen} if getattr(options, "listen", None) else {})


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a text. Commands in the text get the options that this user must type, such as --state-dir.

    On a terminal long lines are folded. Elsewhere they stay whole, because programs read them.
    """
    stream = stream or sys.stdout
    watched = stream is not None and stream.isatty()
    text = folded(typed(text, UNBROKEN), columns()).replace(UNBROKEN, " ") if watched else typed(text)
    print(text, file=stream, flush=True)


def complain(*lines: str) -> None:
    """Print lines to standard error, each with the prefix "canaryd: "."""
    for line in lines:
        say(f"canaryd: {line}", sys.stderr)


def use_color() -> bool:
    """Return whether standard output is a terminal with colours and NO_COLOR is not set (no-color.org)."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def may_write(option: str, path: Path, *, pipes: bool = False) -> bool:
    """Return whether a file can probably be written; if not, print the reason. `option`: the option with the file name.

    A file is replaced as a whole, which needs write permission for its directory. A device such as /dev/null must never
    be replaced by a file. With `pipes` the path is written to and not replaced: it can also be a pipe or a device.
    """
    try:
        if pipes and path.exists():
            writable = not path.is_dir() and os.access(path, os.W_OK)
        else:
            plain = (path.is_file() or not path.exists()) and path.absolute().parts[1] not in ("dev", "proc")
            writable = plain and os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)  # noqa: PTH120  Path.resolve raises on loops
    except OSError:  # behind a directory that this user may not search
        writable = False
    if not writable:
        complain(f"{option} {path}: cannot be written; name a file in a directory that exists and is yours")
    return writable


def write_report(path: Path, text: str) -> bool:
    """Write the text for --report and return True; on failure, print the reason and return False."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        complain(f"--report {path}: not written: {error.strerror}")
        return False
    return True


def open_store(settings: Config, *, for_reading: bool = False) -> Store:
    """Open and return the store in the configured state directory; see `Store.open`."""
    return Store.open(
        settings.state_dir,
        max_bytes=settings.store.max_size,
        keep=Retention(successes=settings.store.keep_successes, failures=settings.store.keep_failures),
        for_reading=for_reading,
    )


def make_writable(refused: str) -> str:
    """Return why results were not stored, and what helps."""
    remedy = "make room" if DISK_FULL in refused else "use sudo" if os.geteuid() else "make it writable"
    return f"{refused}; {remedy}, or name another directory with --state-dir"


class Unstored(Exception):
    """Raised if a command could not store its change on disk; the message is the reason."""


@contextlib.contextmanager
def open_to_change(settings: Config) -> Iterator[Store]:
    """Open the store for a change. Raises `Unstored` at the end if the change is not on disk after the store is closed.

    The check comes last because closing the store writes again what the disk refused earlier.
    """
    with open_store(settings) as store:
        yield store
    if store.waiting:
        raise Unstored(f"not stored: {make_writable(store.refused)}")


@contextlib.contextmanager
def open_record(settings: Config, *, to_change: bool = False) -> Iterator[Store]:
    """Open the existing store without creating one: for reading, or with `to_change` for a change.

    Raises `Unreadable` if the store cannot be read, because a command must not treat it as empty. Raises `Unstored` if
    a change is not on disk at the end.
    """
    with open_store(settings, for_reading=True) as store:
        if store.unreadable:
            raise Unreadable(store.unreadable)
        if not (to_change and store.path.exists()):
            yield store
            if store.unreadable:
                raise Unreadable(store.unreadable)
            return
    with open_to_change(settings) as store:
        if store.unreadable:
            raise Unreadable(store.unreadable)
        yield store


def refuse_beside_daemon(store: Store, devices: Sequence[Device]) -> None:
    """Raise `Unreadable` if a daemon runs and this user has no permission for the lock files of the devices."""
    if daemon_runs(store) and (names := [d.name for d in devices if not store.may_lock(d.physical)]):
        raise Unreadable(f"cannot lock {', '.join(names)} beside the daemon as user {user_name()}: use sudo")


def is_released(command: str, store: Store) -> bool:
    """Return whether `canaryd release` keeps the devices free, so that no test can use them; if so, print a message."""
    now = time.time()
    if not (daemon_runs(store) and (until := released_until(store, now))):
        return False
    complain(
        f"{command}: devices are released for another {format_duration(until - now)} and must not be touched:"
        " wait, or type canaryd release --end"
    )
    return True


@contextlib.contextmanager
def stopped_by_release(engine: Engine) -> Iterator[None]:
    """Stop the engine within a second after `canaryd release` is typed, as long as this context is open."""
    done = threading.Event()

    def follow() -> None:
        while not (engine.stopping or done.wait(RELEASE_PERIOD)):
            if daemon_runs(engine.store) and released_until(engine.store, time.time()):
                engine.stop("devices are released (canaryd release)")

    thread = threading.Thread(target=follow, name="canaryd-release")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class ProgressPrinter:
    """Prints a line per run to standard error, and on a terminal how far all is; `least`: its least seconds."""

    def __init__(self, least: float = 0.0) -> None:
        self.terminal, self.least = sys.stderr.isatty(), least
        self.parts = self.finished = 0
        self.seconds, self.started = 0.0, time.monotonic()
        self.furthest = 0.0  # parts that come to the plan later do not send the bar back

    def expect(self, parts: int, seconds: float) -> None:
        """Count further parts, which usually take so many seconds."""
        if not self.parts:
            self.started = time.monotonic()
        self.parts, self.seconds = self.parts + parts, self.seconds + seconds

    def __call__(self, progress: Progress) -> None:
        """Show progress, or the result of a finished run."""
        name = f"{progress.device.name} {progress.probe}"
        if progress.instruction_set:
            name += f" [{progress.instruction_set}]"
        if progress.done is None:
            part, passed = min(self.finished + 1, self.parts), time.monotonic() - self.started
            share = min(
                (self.finished + progress.fraction) / max(1, self.parts), passed / max(passed, self.least, 1e-9)
            )
            # By the estimate at first, and by what has passed later.
            left = max(self.seconds, self.least) - passed if share < KNOWN else passed * (1 - share) / share
            about = f", about {max(1, round(left))} s left" if left > 0 else ""
            self.furthest = max(self.furthest, share)
            self.moving(self.furthest, f"part {part} of {self.parts}{about}: {name} {progress.text}")
        else:
            self.finished += 1
            self.parts = max(self.parts, self.finished + bool(progress.done.confirms))
            self._line(f"{name}{' (retest)' if progress.done.confirms else ''}: {_summary(progress.done)}")

    def moving(self, fraction: float, text: str) -> None:
        """Show a progress bar, on a terminal only."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"[{'#' * round(BAR * fraction):.<{BAR}}] {text}"
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)

    def complain(self, *lines: str) -> None:
        """Print lines as `complain` does, in place of the progress bar."""
        self.clear()
        complain(*lines)

    def waiting(self, holder: str) -> None:
        """Show which process holds the device for which this command waits."""
        self._line(f"waiting: {holder}")

    def clear(self) -> None:
        """Remove the progress bar."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr)

    def _line(self, text: str) -> None:
        self.clear()
        say(text, sys.stderr)


def _summary(run: Run) -> str:
    """Return the outcome of a run as one line."""
    why = f": {reason_of(run)}" if run.detail and run.outcome is not Outcome.COMPLETED else ""
    ended = "completed" if run.outcome is Outcome.COMPLETED else OUTCOMES[run.outcome][1]
    return f"{ended}, {gave(run)} in {run.seconds:.1f} s{why}"


def device_names(devices: Mapping[str, Device]) -> str:
    """Return the names of devices as a text for a message."""
    ordered = sorted(devices.values(), key=lambda d: (d.backend, d.index, d.name))
    return ", ".join(d.name for d in ordered) or "none"


def one_device(command: str, name: str, known: Mapping[str, Device]) -> Device | None:
    """Return the device of `known` with this name. If none or several have it, print a message and return None."""
    found, _ = choose(known, [name])
    if len(found) == 1:
        return found[0]
    if found:
        complain(f'{command}: "{name}" names {len(found)} devices; name one of {", ".join(d.name for d in found)}')
    else:
        here = f"this host has {device_names(known)}"
        here = here if known else "nothing is recorded yet: start the daemon (canaryd run), or run canaryd check"
        complain(f'{command}: no device "{name}"; {here}')
    return None


def stop_on_signals(engine: Engine, doing: str = "command") -> None:
    """Stop the engine on SIGINT (from a person at the terminal) and SIGTERM. `doing`: the command, for the message."""

    def stop(number: int, frame: Any) -> None:  # noqa: ARG001  the signature is Python's
        # In a thread of its own: the engine's lock may be held by the code that this signal interrupted.
        who = f"you interrupted the {doing}" if number == signal.SIGINT else f"SIGTERM ended the {doing}"
        threading.Thread(target=engine.stop, args=(who,)).start()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def make_engine(settings: Config, store: Store) -> Engine:
    """Return an engine that has discovered the devices and probes of this host."""
    engine = Engine(settings, store)
    stop_on_signals(engine)
    engine.discover(complain)
    return engine
