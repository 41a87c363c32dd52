"""Entry point of `canaryd` and `python -m canaryd`. An internal error exits with status 3, not with Python's 1."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import traceback
from typing import Any, TextIO

UNKNOWN = 3
"""Exit status of an internal error. Python's own status for an uncaught exception is 1, which means degraded here."""


class Lossy(io.FileIO):
    """A standard stream whose writes never raise. Data that cannot be written is dropped; `error`: the first error."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write data and return the number of bytes written. On an error, drop the data and return their size."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])  # another process has made it non-blocking
        except OSError as error:
            self.error = self.error or error
            return memoryview(data).nbytes
        return written


def main() -> int:
    """Run the command line and return its exit status. An internal error prints its traceback and returns `UNKNOWN`."""
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed one's number must not pass to a database
        pass
    os.close(unused)
    out, err = Lossy(1, "w", closefd=False), Lossy(2, "w", closefd=False)
    sys.stdout, sys.stderr = _text(out, sys.stdout), _text(err, sys.stderr)
    try:
        from canaryd.cli.main import main as command  # noqa: PLC0415  a broken installation must not exit with 1 either

        status = command()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:  # of a command that does not handle signals, or not yet
        status = 128 + signal.SIGINT
    except Exception:  # noqa: BLE001  the last resort of the process
        traceback.print_exc()
        print(
            "canaryd: internal error in canaryd or its installation; the state of this machine is unknown",
            file=sys.stderr,
        )
        status = UNKNOWN
    sys.stdout.flush()
    if out.error is None:
        return status
    if out.error.errno == errno.EPIPE:  # its reader went away (| head)
        return 128 + signal.SIGPIPE
    print(f"canaryd: cannot write the answer to standard output: {out.error.strerror}", file=sys.stderr)
    return status or UNKNOWN


def _text(raw: Lossy, replaced: TextIO | None) -> io.TextIOWrapper:
    """Return a text stream over `raw` with the encoding of `replaced`, or with UTF-8 if `replaced` is None (closed)."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=replaced.encoding if replaced else "utf-8",
        errors="backslashreplace",  # a locale without "…" must cost no more than that character
        line_buffering=raw.isatty() or raw.fileno() == 2,
    )


if __name__ == "__main__":
    sys.exit(main())
