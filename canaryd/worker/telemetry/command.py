"""Run a vendor's command with a deadline; every failure becomes an error with a reason."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from canaryd.worker.telemetry.sysfs import Unreadable


class NotInstalled(Unreadable):
    """The command is not installed."""


def command_setting(settings: Mapping[str, Any], name: str, default: str) -> str:
    """Return the setting `name`, a command's name or path, or `default`; raise `ValueError` for any other value."""
    given = settings.get(name, default)
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise ValueError(f"{name}: got {given!r}, wanted the name or path of a command such as {default!r}")
    return given


def not_started(program: str, error: OSError) -> Unreadable:
    """Return an `Unreadable` with the reason why a program was not started.

    If this user may not search a directory of PATH, the system's error for a missing program is "Permission denied".
    """
    import shutil  # noqa: PLC0415 - only where there is no command to ask

    unseen = isinstance(error, PermissionError) and os.sep not in program and not shutil.which(program, os.F_OK)
    if unseen or isinstance(error, FileNotFoundError):
        return NotInstalled(f"{program} is not installed, or not in PATH")
    return Unreadable(f"{program} cannot be started: {error.strerror or error}")


def output(argv: Sequence[str], timeout: float) -> str:
    """Return a command's standard output; raise `Unreadable` if it fails or takes more than `timeout` seconds."""
    import subprocess  # noqa: PLC0415 - only where there is a command to ask

    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # texts and decimal points as documented
        )
    except subprocess.TimeoutExpired:
        raise Unreadable(f"{' '.join(argv)} did not answer within {timeout:.1f} s") from None
    except OSError as error:
        raise not_started(argv[0], error) from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        text = (done.stderr.decode(errors="replace").strip() or text.strip() or "nothing").splitlines()[-1]
        raise Unreadable(f"{' '.join(argv)} failed with status {done.returncode} and said: {text[:200]}")
    return text
