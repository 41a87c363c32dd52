"""Write the dossier: page, JSON, evidence, vendor logs, and one archive of all of it."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.dossier import ocp, page
from canaryd.dossier.advice import EXHIBITS
from canaryd.dossier.document import SCHEMA, DossierError, OutputError, gather, torch_name
from canaryd.dossier.places import COPIED, enough_runs, failing_core
from canaryd.dossier.redact import Redactor, clean, cleaned, without_processes
from canaryd.dossier.text import flipped
from canaryd.engine.engine import Engine
from canaryd.facts import Subject
from canaryd.formatting import format_utc
from canaryd.model import Device, EventKind, Outcome
from canaryd.store.locks import Busy
from canaryd.store.store import Store
from canaryd.supervisor.environment import INSTRUCTION_SETS, SCRUBBED, STRICT

TOOL_PATIENCE = {"nvidia-smi": 30.0, "nvidia-bug-report.sh": 300.0}
"""Vendor's tool → seconds that it may take; a broken device can hang it (ours)."""
QUIET_EVENTS = (
    *(EventKind.COUNTER, EventKind.COUNTER_FELL, EventKind.FLAG, EventKind.CONDITION, EventKind.CHANGE),
    *(EventKind.RESET, EventKind.BOOT, EventKind.RELEASE),
)
"""Kinds of events that do not come from the kernel log."""


def write(
    store: Store,
    config: Config,
    engine: Engine | None,
    device: Device,
    out: Path,
    *,
    redact: bool,
    now: float,
    drill: bool = False,
    wait: float = 60.0,
) -> Path:
    """Write the dossier of a device to a new directory below `out`, and the same as one archive; return the directory.

    Without an engine nothing is judged again and no operands are written; the dossier says so. Raises `DossierError`
    (`OutputError` where `out` is wrong) where it cannot be written, and leaves nothing half-written.
    """
    document = gather(store, config, device, now=now, drill=drill, engine=engine)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    slug = "endpoint" if redact and device.backend == "endpoint" else re.sub(r"[^A-Za-z0-9.]+", "-", device.name)
    name = f"canaryd-dossier-{slug}-{stamp}"
    target, archive = out / name, out / f"{name}.tar.gz"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be made: {error.strerror}; name another directory with -o") from error
    try:
        for path in (target, archive):
            if path.exists():
                raise OutputError(f"{path}: already exists and is never overwritten; name another directory with -o")
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=out) as part:
            inside = Path(part) / name
            inside.mkdir()
            _fill(inside, document, store, engine, device, redact=redact, wait=wait)
            packed = Path(part) / archive.name
            _pack(inside, packed, int(now))
            inside.rename(target)
            packed.rename(archive)
    except OSError as error:
        raise DossierError(
            f"{out}: cannot write the dossier: {error.strerror or error}; name another directory with -o"
        ) from error
    return target


def _fill(
    directory: Path,
    document: dict[str, Any],
    store: Store,
    engine: Engine | None,
    device: Device,
    *,
    redact: bool,
    wait: float,
) -> None:
    contents: list[tuple[str, str]] = [
        ("dossier.html", "the page to read; needs no network"),
        ("dossier.json", f"the same facts as JSON ({SCHEMA}; docs/dossier.schema.json of canaryd)"),
        ("ocp.jsonl", "the same facts as OCP Test & Validation output, version 2.0"),
    ]
    absent: list[tuple[str, str]] = []
    _write_evidence(directory, document, engine, device, contents, absent, wait)
    redactor = Redactor(store, document) if redact else None
    sanitise: Callable[[str], str] = (lambda t: redactor.text(clean(t))) if redactor else clean
    log = _log(store, device) if document["kind"] != "drill" else ""
    if log:
        (directory / "log.txt").write_text(sanitise(log), encoding="utf-8")
        contents.append(("log.txt", "lines of the kernel log about this device, as far as canaryd kept them"))
    else:
        absent.append(("log.txt", "no kernel log line about this device is on record"))
    _vendor_tools(directory, device, sanitise, contents, absent, redact=redact)
    contents.append(("SHA256SUMS", "checksums of all other files: sha256sum -c SHA256SUMS"))
    document["contents"] = [{"file": f, "what": what} for f, what in contents]
    document["absent"] = [{"file": f, "why": why} for f, why in absent]
    document["redacted"] = redact
    published = cleaned(document)
    if redactor:
        published = redactor.value(published)
    text = json.dumps(published, indent=1, ensure_ascii=False, allow_nan=False)
    (directory / "dossier.json").write_text(text + "\n", encoding="utf-8")
    (directory / "dossier.html").write_text(page.page(published), encoding="utf-8")
    (directory / "ocp.jsonl").write_text(ocp.lines(published), encoding="utf-8")
    _write_checksums(directory)


def _write_evidence(
    directory: Path,
    document: dict[str, Any],
    engine: Engine | None,
    device: Device,
    contents: list[tuple[str, str]],
    absent: list[tuple[str, str]],
    wait: float,
) -> None:
    """Write operands and scripts of the first failing cases; each case without them says why."""
    written = 0
    for failure in document["failures"]:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{failure['probe']}-{failure['case']}").strip("-")
        part = f"evidence/{written + 1}-{name}"
        folder = directory / part
        if written >= EXHIBITS:
            failure["exhibit_absent"] = f"only the first {EXHIBITS} failing cases have one"
            continue
        folder.mkdir(parents=True)
        (folder / "wrong.csv").write_text(_table(failure), encoding="utf-8")
        contents.append((f"{part}/wrong.csv", f"the recorded wrong elements of {failure['case']}"))
        files, why = _exhibit(folder, failure, document, engine, device, wait)
        if why and engine and engine.stopping:
            raise DossierError(f"{device.name}: no report is written: {engine.stopping}")
        failure["exhibit"] = part
        failure["exhibit_absent"] = why
        purpose = {"golden.npy": "the right result", "reproduce.py": "repeats the computation; needs torch only"}
        contents += [(f"{part}/{f}", purpose.get(f, "operand")) for f in files]
        if why:
            absent.append((f"{part}/reproduce.py", why))
        written += 1
    if not document["failures"]:
        why = "there is no failing exact case"
        if any(p["unknown"] for p in document["probes"]):
            why += "; canaryd baseline export prints the baseline of a recorded case"
        absent.append(("evidence/", why))


def _exhibit(
    folder: Path,
    failure: Mapping[str, Any],
    document: Mapping[str, Any],
    engine: Engine | None,
    device: Device,
    wait: float,
) -> tuple[list[str], str]:
    """Let a worker write operands, golden and script; return the files, or why there are none."""
    if failure["subject"] != Subject.DEVICE.value:
        return [], "the fault is in the reference or the comparison, and only canaryd repeats these"
    if engine is None:
        return [], "no worker with torch was available; run canaryd report on the host itself"
    hosts = [d for d in engine.devices.values() if d.backend == "cpu"]
    if not hosts:
        return [], "no worker with torch was available on this host"
    arguments = {
        "device": to_json(device),
        "probe": failure["probe"],
        "case": failure["case"],
        "shape": failure["shape"],
        "seed": failure["seed"],
        "expected": [[e["index"], e["expected"]] for e in failure["elements"]],
        "out": str(folder.absolute()),
        "on": torch_name(device),
        "environment": {
            **{k: v for k, v in STRICT.items() if k.startswith("CU")},
            **INSTRUCTION_SETS.get(failure["instruction_set"], {}),
        },
        "unset": SCRUBBED,
        "runs": enough_runs(failure, document),
        "copied": COPIED,
        "core": failing_core(failure),
    }
    try:
        outcome, answer, detail = engine.answer(hosts[0], "reproducer", arguments, timeout=600.0, wait=wait)
    except Busy as busy:
        return [], f"the host was busy: {busy}"
    if outcome is not Outcome.COMPLETED:
        for path in folder.glob("*.npy"):
            path.unlink()
        return [], detail.strip().rpartition("\n")[2] or outcome.value
    return list(answer["files"]), ""


def _table(failure: Mapping[str, Any]) -> str:
    rows = io.StringIO()
    out = csv.writer(rows, lineterminator="\n")
    out.writerow(("run", "index", "expected", "observed", "flipped_bits"))
    for e in failure["elements"]:
        index = " ".join(map(str, e["index"]))
        bits = " ".join(map(str, flipped(e["expected"], e["observed"])))
        out.writerow((e["run"], index, e["expected"], e["observed"], bits))
    return rows.getvalue()


def _log(store: Store, device: Device) -> str:
    events = [
        e
        for e in store.events(device=device.uuid)
        if e.kind not in QUIET_EVENTS and (e.kind, e.name) != (EventKind.OFF_BUS, "driver")  # a poll said that
    ]
    lines = []
    for e in events:
        times = f" x{e.count:g}" if e.count > 1 else ""
        lines.append(
            f"{format_utc(e.first)} … {format_utc(e.last)}{times}  {e.kind} {e.name}  {e.detail}".replace("\n", " ")
        )
    return "\n".join(lines) + "\n" if lines else ""


def _vendor_tools(
    directory: Path,
    device: Device,
    sanitise: Callable[[str], str],
    contents: list[tuple[str, str]],
    absent: list[tuple[str, str]],
    *,
    redact: bool,
) -> None:
    """Add the output of NVIDIA's tools where they are installed, cleaned like every other text."""
    if device.backend != "cuda":
        absent.append(("nvidia-smi-q.txt", "this is not an NVIDIA device"))
        return
    uuid = device.part
    tool = shutil.which("nvidia-smi")
    if tool is None:
        absent.append(("nvidia-smi-q.txt", "nvidia-smi is not installed here"))
    else:
        output, why = _run([tool, "-q", "-i", uuid], TOOL_PATIENCE["nvidia-smi"])
        if why:
            absent.append(("nvidia-smi-q.txt", why))
        else:
            (directory / "nvidia-smi-q.txt").write_text(sanitise(without_processes(output)), encoding="utf-8")
            contents.append(("nvidia-smi-q.txt", "nvidia-smi -q of this device, without its processes"))
    name, tool = "nvidia-bug-report.log.gz", shutil.which("nvidia-bug-report.sh")
    if tool is None or redact or os.geteuid() != 0:
        why = "nvidia-bug-report.sh is not installed here" if tool is None else "nvidia-bug-report.sh needs root"
        absent.append((name, "it names the whole machine and cannot be redacted" if redact else why))
        return
    with tempfile.TemporaryDirectory() as aside:
        made = Path(aside) / name
        _, why = _run([tool, "--output-file", str(made)], TOOL_PATIENCE["nvidia-bug-report.sh"], cwd=aside)
        try:
            text = gzip.decompress(made.read_bytes()).decode("utf-8", "replace")
        except (OSError, EOFError) as error:
            absent.append((name, why or f"nvidia-bug-report.sh left no report: {error}"))
            return
    # The report is the vendor's own format; only what canaryd recognises as private is removed.
    data = sanitise(without_processes(text)).encode()
    (directory / name).write_bytes(gzip.compress(data, mtime=0))
    contents.append((name, "NVIDIA's own report of this host, without processes; read it before you send it"))


def _run(argv: Sequence[str], patience: float, cwd: str | None = None) -> tuple[str, str]:
    """Return the output of a tool, or why there is none; a tool that hangs in the driver is abandoned."""
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
    try:
        output, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5.0)
        return "", f"{name} did not end within {patience:g} s"
    text = output.decode("utf-8", "replace")
    if process.returncode:
        return "", f"{name} ended with status {process.returncode}: {text.strip().partition(chr(10))[0][:200]}"
    return text, ""


def _write_checksums(directory: Path) -> None:
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sums = [f"{hashlib.sha256((directory / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (directory / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _pack(directory: Path, archive: Path, at: int) -> None:
    """Pack a directory so that equal contents give equal bytes: sorted names, one time, no owner."""
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=at, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted((directory, *directory.rglob("*"))):
            info = tarfile.TarInfo(str(path.relative_to(directory.parent)))
            info.mtime = at
            if path.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            else:
                info.size, info.mode = path.stat().st_size, 0o644
                with path.open("rb") as file:
                    tar.addfile(info, file)
