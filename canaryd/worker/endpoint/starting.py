"""Start a server by the command in the settings, wait until it answers, and stop it, on nodes that serve no users."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from canaryd.facts import printable
from canaryd.probe import Skip
from canaryd.worker.endpoint import guard
from canaryd.worker.endpoint.canary import Endpoint
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.settings import Settings
from canaryd.worker.exact_canary.expected import GGUF

QUOTED = 600
"""Maximum number of characters of a server's last output that an error message quotes."""
PAUSE = 0.5
"""Seconds between two attempts to reach a server that is starting (ours)."""
STOPPING = guard.GRACE + 10.0
MEMORY_SHARE = 0.8
"""Share of the host's memory that a started server may use if the settings give no limit (ours)."""


@contextlib.contextmanager
def started(settings: Settings, within: float, progress: Callable[[float, str], None]) -> Iterator[Settings]:
    """Run the server until the end of the `with` block; yield `settings` with the server's address.

    Raises `Skip` with the server's last output if the server does not answer within `within` seconds.
    """
    model = settings.exact / GGUF if settings.exact and (settings.exact / GGUF).exists() else settings.exact
    port = _free_port()
    argv = [part.replace("{model}", str(model)).replace("{port}", str(port)) for part in shlex.split(settings.command)]
    most = settings.memory or int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(most), *argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # what kills this worker does not kill the guard, which then ends the server
        )
        try:
            there = replace(settings, url=f"http://127.0.0.1:{port}/v1")
            _await(there, server, log, within, progress)
            try:
                yield there
            except Skip as error:
                if server.poll() is None:
                    raise
                raise Skip(f"{error}; the server ended with status {server.returncode}: {_last(log)}") from error
        finally:
            assert server.stdin
            server.stdin.close()
            server.wait(STOPPING)


def _await(
    settings: Settings,
    server: subprocess.Popen[bytes],
    log: IO[bytes],
    within: float,
    progress: Callable[[float, str], None],
) -> None:
    end, last = time.monotonic() + within, ""
    while True:
        progress(0.0, f"waiting for {Path(shlex.split(settings.command)[0]).name} to start")
        try:
            Endpoint(settings).ask(settings.apis[0], Prompt(name="start", text="anchor p0v0", tokens=1), fresh=False)
        except Skip as error:
            last = str(error)
        else:
            return
        if server.poll() is not None:
            raise Skip(f"command: the server ended with status {server.returncode}: {_last(log)}")
        if time.monotonic() > end:
            raise Skip(f"command: no answer within {within:.0f} s ({last}): {_last(log)}")
        time.sleep(PAUSE)


def _last(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - QUOTED))
    return printable(log.read().decode(errors="replace").strip()) or "it said nothing"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
