"""Run one server as a child process, and leave no process of it behind.

    python guard.py BYTES PROGRAM ARGUMENT…

This script has a session of its own, so it survives the process that started it. It ends all processes of the server
in three cases: its standard input ends (the starter has ended or closed it), the server's first process ends, or the
processes together use more than BYTES of memory. Its exit status is the server's.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD = 0.5
"""Seconds between two checks of the server's processes (ours)."""
GRACE = 20.0
"""Seconds between SIGTERM to a server and SIGKILL (ours)."""


def main(most: int, argv: list[str]) -> int:
    """Run the server until it ends or must be ended; return its exit status, or 127 if it cannot be started."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # what bounds a worker would bound the server
    try:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return 127
    try:
        while server.poll() is None and not select.select([0], [], [], PERIOD)[0]:
            used = sum(map(_bytes, _group(server.pid)))
            if used > most:
                sys.stderr.write(f"stopped by canaryd: it used {used:,} bytes of memory, limit {most:,}\n")
                break
    finally:
        _end(server)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _end(server: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the server's process group; kill the processes that remain after `GRACE` seconds."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    while time.monotonic() < deadline and (server.poll() is None or any(_group(server.pid))):
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _group(number: int) -> Iterator[Path]:
    """Yield the /proc directory of each living process of the process group `number`; zombies count as dead."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and int(group) == number:
                yield stat.parent


def _bytes(process: Path) -> int:
    """Return the memory (bytes) of a process, without the pages of files (proc(5)); 0 if the process has ended."""
    with contextlib.suppress(OSError):
        kilobytes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
        return 1024 * sum(map(int, kilobytes))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
