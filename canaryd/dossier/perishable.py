"""Take what a reboot destroys: output of vendors' tools, event log of the BMC, error records of firmware and kernel."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from canaryd.dossier.redact import SERVER_NUMBERS, Redactor, clean, without_processes
from canaryd.facts import filled
from canaryd.files import allowed
from canaryd.model import Device

TOOL_PATIENCE = {"nvidia-smi": 30.0, "nvidia-bug-report.sh": 300.0, "ipmitool": 120.0}
"""Tool → seconds after which the tool is stopped, because a broken device or a BMC can block it (ours)."""
LONGEST = 1 << 20
"""Number of newest bytes of a tool's output that are kept."""
SMI, BUG_REPORT, BMC_LOG, RECORDS = "nvidia-smi-q.txt", "nvidia-bug-report.log.gz", "bmc-sel.txt", "records"
STORES = ("sys/fs/pstore", "var/lib/systemd/pstore", "var/lib/rasdaemon/ras-mc_event.db")
"""Where records of the firmware (CPER) and of kernel crashes wait, where systemd-pstore moves them, and what rasdaemon
recorded of errors of memory, PCIe and processors."""
NEWEST, LARGEST = 64, 16 << 20
"""Number and bytes of the newest records that are taken from each of these."""
IN_LOG = 'The kernel log can have them: journalctl -k -b --grep "Hardware Error"'
REDFISH = "curl --user NAME https://BMC/redfish/v1/Systems/ID/LogServices/ID/Entries"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The directory of a dossier, and the list of its files."""

    path: Path
    redactor: Redactor | None
    contents: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, what: str, text: str) -> None:
        """Write a text, without secrets and users, to the file `name`; `what` describes it in the list of files."""
        text = clean(text)
        self._write(name, what, (self.redactor.text(text) if self.redactor else text).encode())

    def copy(self, name: str, what: str, data: bytes) -> None:
        """Write the bytes of a file: text as `put` does, others as they are, but not into a redacted dossier."""
        text = data.decode("utf-8", "replace")
        if not {"\0", "\ufffd"} & set(text):
            self.put(name, what, text)
        elif self.redactor:
            self.absent[name] = "it is binary and cannot be redacted"
        else:
            self._write(name, what, data)

    def _write(self, name: str, what: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(data)
        self.contents[name] = what


def take(folder: Folder, device: Device, root: Path | None, server: Mapping[str, str]) -> None:
    """Add what a reboot of the device's machine destroys; for what cannot be had, say why and what to type.

    `root`: the directory that stands for /, or None if no machine is asked. `server`: what is known of the machine.
    """
    if root is None or not device.is_hardware:
        why = "no machine is asked: a server can be on another, and a demonstration has none"
        folder.absent.update(dict.fromkeys((SMI, BUG_REPORT, BMC_LOG, f"{RECORDS}/"), why))
        return
    if not server.keys() & {*SERVER_NUMBERS}:
        why = "its firmware tells this user none. As root: grep -s . /sys/class/dmi/id/*_serial"
        folder.absent["numbers of the server"] = why
    _bmc_log(folder, root)
    for place in STORES:
        _records(folder, root, place)
    _vendor_tools(folder, device)


def where(document: Mapping[str, Any], name: str) -> tuple[bool, str]:
    """Return whether a dossier has this file, or files of this folder, and why something of it is missing, or ""."""
    has, lacks = ([e for e in document[key] if e["file"].partition("/")[0] == name] for key in ("contents", "absent"))
    return bool(has), "; ".join(f"{e['file']}: {e['why']}" if "/" in e["file"] else e["why"] for e in lacks)


def server_names(root: Path) -> dict[str, str]:
    """Return the numbers of the machine (`SERVER_NUMBERS`) as its firmware tells them; most are told to root alone."""
    found = {}
    for name in SERVER_NUMBERS:
        with contextlib.suppress(OSError):
            found[name] = filled((root / "sys/class/dmi/id" / name).read_text(encoding="utf-8", errors="replace"))
    return {name: number for name, number in found.items() if number}


def _bmc_log(folder: Folder, root: Path) -> None:
    tool, ipmi, output = shutil.which("ipmitool"), root / "dev/ipmi0", ""
    if not ipmi.exists():
        why = "this machine has no /dev/ipmi0 (modprobe --all ipmi_si ipmi_devintf)"
    elif tool is None:
        why = "ipmitool is not installed here"
    elif not allowed(ipmi, os.R_OK | os.W_OK):
        why = "this user may not use /dev/ipmi0"
    else:
        output, why = _run([tool, "sel", "elist"], TOOL_PATIENCE["ipmitool"])
    if why:
        folder.absent[BMC_LOG] = f"{why}. As root: ipmitool sel elist > {BMC_LOG}. Or from the BMC's network: {REDFISH}"
    else:
        folder.put(BMC_LOG, "event log of the BMC of the machine that wrote this, newest last", output)


def _records(folder: Folder, root: Path, place: str) -> None:
    taken: dict[Path, bytes] = {}
    by_hand = f"As root: cp -a /{place} ."
    try:
        taken, left = _newest(root / place, folder.path)
        why = "" if taken else "it is empty"
        if left:
            why = f"too many or too large: the oldest {left} left out. {by_hand}"
    except FileNotFoundError:
        why = "there is none"
    except (OSError, sqlite3.Error) as error:
        why = f"{getattr(error, 'strerror', error)}. {by_hand}"
    for path, data in taken.items():
        folder.copy(f"{RECORDS}/{path.relative_to(root)}", "record of errors of hardware, or of a kernel crash", data)
    if why:
        folder.absent[f"{RECORDS}/{place}"] = why


def _newest(place: Path, folder: Path) -> tuple[dict[Path, bytes], int]:
    """Return the newest files of a directory and of those in it, or a file itself, and the number of others."""
    if not place.is_file():
        next(place.iterdir(), None)  # raises the error that rglob passes over
    found = [path for path in (place, *place.rglob("*")) if path.is_file()]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    sizes = itertools.accumulate(path.stat().st_size for path in found[:NEWEST])
    taken = {path: _read(path, folder) for path, size in zip(found, sizes, strict=False) if size <= LARGEST}
    return taken, len(found) - len(taken)


def _read(path: Path, folder: Path) -> bytes:
    """Return the bytes of a file; of a database those of one moment, though others may write to it."""
    if path.suffix != ".db":
        return path.read_bytes()
    with (
        tempfile.TemporaryDirectory(dir=folder) as aside,
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
        contextlib.closing(sqlite3.connect(Path(aside) / "copy")) as copy,
    ):
        source.execute("BEGIN")
        source.execute("SELECT * FROM sqlite_master")  # fails if it is locked: `backup` would try for ever
        source.backup(copy)
        return (Path(aside) / "copy").read_bytes()


def _vendor_tools(folder: Folder, device: Device) -> None:
    """Add the output of NVIDIA's diagnostic tools for an NVIDIA device, if the tools are installed."""
    if device.backend != "cuda":
        folder.absent[SMI] = "this is not an NVIDIA device"
        return
    if tool := shutil.which("nvidia-smi"):
        output, why = _run([tool, "-q", "-i", device.part], TOOL_PATIENCE["nvidia-smi"])
        if why:
            folder.absent[SMI] = why
        else:
            folder.put(SMI, "nvidia-smi -q of this device, without its processes", without_processes(output))
    else:
        folder.absent[SMI] = "nvidia-smi is not installed here"
    tool = shutil.which("nvidia-bug-report.sh")
    if tool is None or folder.redactor or os.geteuid() != 0:
        why = "nvidia-bug-report.sh is not installed here" if tool is None else "nvidia-bug-report.sh needs root"
        folder.absent[BUG_REPORT] = "it names the whole machine and cannot be redacted" if folder.redactor else why
        return
    with tempfile.TemporaryDirectory() as aside:
        made = Path(aside) / BUG_REPORT
        _, why = _run([tool, "--output-file", str(made)], TOOL_PATIENCE["nvidia-bug-report.sh"], cwd=aside)
        try:
            text = gzip.decompress(made.read_bytes()).decode("utf-8", "replace")
        except (OSError, EOFError) as error:
            folder.absent[BUG_REPORT] = why or f"nvidia-bug-report.sh left no report: {error}"
            return
    # The report is the vendor's own format; only what canaryd recognises as private is removed.
    data = gzip.compress(clean(without_processes(text)).encode(), mtime=0)
    folder.copy(BUG_REPORT, "NVIDIA's own report of this host, without processes; read it before you send it", data)


def _run(argv: Sequence[str], patience: float, cwd: str | None = None) -> tuple[str, str]:
    """Return (output of a tool, reason why there is none or ""). A tool that hangs in the driver is not waited for."""
    name = Path(argv[0]).name
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return "", f"{name} could not be started: {error.strerror}"
    newest, cut, ends = b"", False, time.monotonic() + patience
    try:
        with cast("IO[bytes]", process.stdout) as pipe:
            while (left := ends - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
                if not (part := os.read(pipe.fileno(), 1 << 16)):
                    break
                cut = cut or len(newest) + len(part) > LONGEST
                newest = (newest + part)[-LONGEST:]
            process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        return "", f"{name} did not end within {patience:g} s"
    text = newest.decode("utf-8", "replace")
    if process.returncode:
        return "", f"{name} ended with status {process.returncode}: {text.strip().partition(chr(10))[0][:200]}"
    if cut:
        text = f"[canaryd left out all but the newest {LONGEST >> 20} MiB]\n{text.partition(chr(10))[2]}"
    return text, ""
