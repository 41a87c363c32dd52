"""A temporary directory of which nothing is left, however the process that made it ends.

Python removes its temporary directories only where it ends by itself; canaryd ends a worker that hangs by SIGKILL.
Behind `worker.command` this file runs before canaryd's package is there, so it imports nothing of it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

REMOVER = """
import sys
sys.path = [p for p in sys.path if p]
import shutil, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Removes a directory when its standard input ends, which it does with the process that holds the other end."""


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[str]:
    """Give the path of a new directory, removed at the end of the block or of this process."""
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as directory,
        subprocess.Popen(
            [sys.executable, "-S", "-c", REMOVER, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the SIGKILL that ends a worker's process group passes it by
        ),
    ):
        yield directory
