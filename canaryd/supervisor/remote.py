"""Functions that prepare the files for a worker in another container or on another host (`worker.command`)."""

from __future__ import annotations

import base64
from pathlib import Path

MAX_SHIPPED = 64 * 1024 * 1024
"""Maximum bytes of one probe directory that are sent through `worker.command`."""
PACKAGE = Path(__file__).resolve().parents[1]
ENTRY = "canaryd/worker/__main__.py"
TEMPORARY = "canaryd/worker/temporary.py"
# Runs behind `worker.command`, where canaryd is not installed: unpacks the worker, runs it, and removes it, also where
# this process is killed (`temporary_directory`).
BOOTSTRAP = """
import sys
sys.path = [p for p in sys.path if p]
if sys.version_info < (3, 10):
    sys.exit("canaryd: the worker needs Python 3.10 or newer; %s is %s" % (sys.executable, sys.version.split()[0]))
import base64, json, os, signal, subprocess
signal.signal(signal.SIGTERM, lambda *_: None)
pipe = open(0, "rb", buffering=0, closefd=False)
size, packed = int(pipe.readline()), b""
while len(packed) < size:
    packed += pipe.read(size - len(packed)) or sys.exit("canaryd: standard input ended early")
head = json.loads(packed)
env = {k: v for k, v in os.environ.items() if k not in head["unset"]}
env.update(head["set"])
temporary = {"__name__": "temporary"}
exec(base64.b64decode(head["files"][head["temporary"]]), temporary)
with temporary["temporary_directory"]("canaryd-") as tree:
    for name, content in head["files"].items():
        path = os.path.join(tree, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    fd = os.dup(1)
    os.dup2(2, 1)
    argv = [sys.executable, os.path.join(tree, head["entry"]), "--fd", str(fd), "--nonce", head["nonce"]]
    code = subprocess.call(argv, env=env, pass_fds=[fd])
sys.exit(code if code >= 0 else 128 - code)
"""


def own_files() -> dict[str, str]:
    """Return the files of canaryd that a remote worker needs: path in the archive → content in base64."""
    modules = ("__init__", "codec", "facts", "files", "free_memory", "hidden", "model", "probe")
    paths = [PACKAGE / f"{name}.py" for name in modules]
    paths += [path for kind in ("*.py", "*.json") for path in (PACKAGE / "worker").rglob(kind)]
    return {str(path.relative_to(PACKAGE.parent)): base64.b64encode(path.read_bytes()).decode() for path in paths}


def pack(directory: Path, into: str) -> dict[str, str]:
    """Return all files of a probe's directory, data included: path below `into` → content in base64."""
    files, size = {}, 0
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            size += path.stat().st_size
            if size > MAX_SHIPPED:
                raise OSError(f"its files exceed {MAX_SHIPPED >> 20} MiB; keep probes in a directory of their own")
            files[f"{into}/{name}"] = base64.b64encode(path.read_bytes()).decode()
    return files
