"""Run one server as a child, and leave nothing of it behind.

    python guard.py BYTES PROGRAM ARGUMENT…

It runs in a session of its own, so it goes on when its starter is killed. It ends all processes of the server when its
standard input ends (the starter has ended, or closed it), when the server's first process ends, or when they use more
than BYTES of memory together. Its exit status is the server's.
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
"""Seconds between two looks (ours)."""
GRACE = 20.0
"""Seconds that a server has to end by itself (ours)."""


def main(most: int, argv: list[str]) -> int:
    """Run the server until it ends or has to; return its exit status, 127 where it cannot be started."""
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
    """Ask the group to end, and kill what is left of it."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    while time.monotonic() < deadline and (server.poll() is None or any(_group(server.pid))):
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _group(number: int) -> Iterator[Path]:
    """Yield the /proc directories of a process group's living processes; zombies are dead."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and int(group) == number:
                yield stat.parent


def _bytes(process: Path) -> int:
    """Return the memory that a process holds, without the pages of files (proc(5)); 0 for one that has ended."""
    with contextlib.suppress(OSError):
        kilobytes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
        return 1024 * sum(map(int, kilobytes))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
