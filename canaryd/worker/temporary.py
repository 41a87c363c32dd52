"""A temporary directory that is removed completely, however the process that made it ends.

Python removes its temporary directories only at a regular end of a process; canaryd kills a hanging worker by SIGKILL.
With `worker.command` this file runs before canaryd's package is present, so it imports nothing from the package.
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
"""Program that removes a directory when its standard input ends: then the process that started it has ended."""


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[str]:
    """Yield the path of a new directory, which is removed at the end of the block or of this process."""
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
