"""The worker's entry, a script for any interpreter from Python 3.10 on, with or without canaryd installed there.

A probe runs in the environment of the serving software, so the script makes only the modules in `OPEN` importable, from
its own directory. Then it starts `canaryd.worker.runner`.
`--fd` is the descriptor that the protocol is written to, `--nonce` the word that starts each of its lines; `--member`
starts a process of a group (`canaryd.worker.links`). Arguments are parsed by hand: telemetry starts a worker every
15 s, and argparse would be an eighth of its cost.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

OPEN = (
    "canaryd.codec",
    "canaryd.facts",
    "canaryd.files",
    "canaryd.free_memory",
    "canaryd.hidden",
    "canaryd.model",
    "canaryd.probe",
    "canaryd.worker",
)
"""Modules of canaryd that a worker may import, besides everything below `canaryd.worker`."""
OOM_SCORE = 500
"""Value of `oom_score_adj` of a worker (proc(5)): when memory runs out, the kernel kills it before a server next to it.
Our choice."""


class Fence:
    """An import hook that refuses the daemon's modules, so that no probe depends on them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise `ModuleNotFoundError` if the module belongs to the daemon; return None to leave it to other finders."""
        del path, target
        if name.startswith("canaryd.") and name not in OPEN and not name.startswith("canaryd.worker."):
            raise ModuleNotFoundError(
                f"{name} belongs to the daemon; a probe may import canaryd.probe and canaryd.worker.toolkit", name=name
            )


def go_first() -> None:
    """Set `oom_score_adj` to `OOM_SCORE`, because this process inherited the daemon's protection from kills."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):  # not Linux, or not permitted
        if int(score.read_text(encoding="ascii")) < OOM_SCORE:
            score.write_text(str(OOM_SCORE), encoding="ascii")


def main() -> None:
    """Prepare the interpreter and answer requests until standard input ends."""
    go_first()
    if sys.version_info < (3, 10):  # noqa: UP036 - the interpreter of `worker.python` may be older
        sys.exit(f"canaryd: the worker needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
    member = sys.argv[1:] == ["--member"]
    if not member and (len(sys.argv) != 5 or sys.argv[1:4:2] != ["--fd", "--nonce"] or not sys.argv[2].isdigit()):
        sys.exit("canaryd: only canaryd starts a worker, with --fd DESCRIPTOR --nonce WORD")
    here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if p and Path(p).resolve() != here]  # our file names must not shadow other modules
    sys.dont_write_bytecode = True  # leave no files in a probe's directory
    sys.meta_path.insert(0, Fence())
    spec = importlib.util.spec_from_file_location("canaryd", here.parent / "__init__.py")
    if spec is None or spec.loader is None:
        sys.exit(f"canaryd: {here.parent} is not canaryd's package; reinstall canaryd")
    package = importlib.util.module_from_spec(spec)
    sys.modules["canaryd"] = package
    spec.loader.exec_module(package)
    if member:
        importlib.import_module("canaryd.worker.links.member").main()
    importlib.import_module("canaryd.worker.runner").serve(int(sys.argv[2]), sys.argv[4])


if __name__ == "__main__":
    main()
