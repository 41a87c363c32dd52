"""Write the dossier: page, JSON, evidence, vendor logs, and one archive of all of it."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
import time
from pathlib import Path

from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.dossier import ocp
from canaryd.dossier.advice import EXHIBITS
from canaryd.dossier.document import SCHEMA, DossierError, Json, OutputError
from canaryd.dossier.failures import COPIED
from canaryd.dossier.gather import gather, torch_name
from canaryd.dossier.page import flipped, page
from canaryd.dossier.perishable import Folder, server_names, take
from canaryd.dossier.redact import Redactor, cleaned
from canaryd.engine.engine import Engine
from canaryd.facts import Subject
from canaryd.formatting import format_utc
from canaryd.model import Device, EventKind, Outcome
from canaryd.store.locks import Busy
from canaryd.store.store import Store
from canaryd.supervisor.environment import INSTRUCTION_SETS, SCRUBBED, STRICT

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
    root: Path | None = Path("/"),
) -> Path:
    """Write the dossier of a device to a new directory below `out`, and also as one archive; return the directory.

    Without an engine no operands are written; the dossier says so. `wait`: seconds to wait for a busy device. `root`:
    the directory that stands for /, or None if no machine is asked. Raises `OutputError` if `out` cannot be used, or
    `DossierError` if the dossier cannot be written; then no incomplete files are left.
    """
    document = gather(store, config, device, now=now, drill=drill)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    shown = device.backend if redact and device.name == device.uuid else device.name  # the dossier hides the uuid
    name = f"canaryd-dossier-{re.sub(r'[^A-Za-z0-9.]+', '-', shown)}-{stamp}"
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
            _fill(inside, document, store, engine, device, redact=redact, wait=wait, root=root)
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
    document: Json,
    store: Store,
    engine: Engine | None,
    device: Device,
    *,
    redact: bool,
    wait: float,
    root: Path | None,
) -> None:
    identity = document["identity"]
    if device.is_hardware and root:
        identity["server"] = server_names(root) | identity["server"]
    redactor = Redactor(store, identity["host"], identity["server"]) if redact else None
    folder = Folder(path=directory, redactor=redactor)
    folder.contents.update(
        {
            "dossier.html": "the page to read; needs no network",
            "dossier.json": f"the same facts as JSON ({SCHEMA}; docs/dossier.schema.json of canaryd)",
            "ocp.jsonl": "the same facts as OCP Test & Validation output, version 2.0",
        }
    )
    take(folder, device, root, identity["server"])  # first: the operands below take minutes
    for number, failure in enumerate(document["failures"], 1):
        failure.update(_with_evidence(folder, number, failure, engine, device, wait))
    if not document["failures"]:
        unknown = any(p["unknown"] for p in document["probes"])
        folder.absent["evidence/"] = "there is no failing exact case" + (
            "; canaryd baseline export prints the baseline of a recorded case" * unknown
        )
    log = _log(store, device) if document["kind"] != "drill" else ""
    if log:
        folder.put("log.txt", "lines of the kernel log about this device, as far as canaryd kept them", log)
    else:
        folder.absent["log.txt"] = "no kernel log line about this device is on record"
    folder.contents["SHA256SUMS"] = "checksums of all other files: sha256sum -c SHA256SUMS"
    document |= {
        "redacted": redact,
        "contents": [{"file": name, "what": what} for name, what in folder.contents.items()],
        "absent": [{"file": name, "why": why} for name, why in folder.absent.items()],
    }
    published = cleaned(document)
    if redactor:
        published = redactor.value(published)
    text = json.dumps(published, indent=1, ensure_ascii=False, allow_nan=False)
    (directory / "dossier.json").write_text(text + "\n", encoding="utf-8")
    (directory / "dossier.html").write_text(page(published), encoding="utf-8")
    (directory / "ocp.jsonl").write_text(ocp.lines(published), encoding="utf-8")
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sums = [f"{hashlib.sha256((directory / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (directory / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _with_evidence(
    folder: Folder, number: int, failure: Json, engine: Engine | None, device: Device, wait: float
) -> Json:
    """Write operands and script of failing case `number`; return what the document says of them."""
    if number > EXHIBITS:
        return {"exhibit_absent": f"only the first {EXHIBITS} failing cases have one"}
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{failure['probe']}-{failure['case']}")[:100].strip("-")
    part = f"evidence/{number}-{name}"
    (folder.path / part).mkdir(parents=True)
    (folder.path / part / "wrong.csv").write_text(_table(failure), encoding="utf-8")
    folder.contents[f"{part}/wrong.csv"] = f"the recorded wrong elements of {failure['case']}"
    files, why = _exhibit(folder.path / part, failure, engine, device, wait)
    if why and engine and engine.stopping:
        raise DossierError(f"{device.name}: no report is written: {engine.stopping}")
    purpose = {"golden.npy": "the right result", "reproduce.py": "repeats the computation; needs torch only"}
    folder.contents.update({f"{part}/{file}": purpose.get(file, "operand") for file in files})
    if why:
        folder.absent[f"{part}/reproduce.py"] = why
        return {"exhibit": part, "exhibit_absent": why}
    core = "" if failure["core"] is None else f" --core {failure['core']}"
    return {"exhibit": part, "script": f"python3 {part}/reproduce.py {torch_name(device)} {failure['needed']}{core}"}


def _exhibit(folder: Path, failure: Json, engine: Engine | None, device: Device, wait: float) -> tuple[list[str], str]:
    """Write operands, golden and script into `folder`; return (names of the files, ""), or ([], reason why not)."""
    if failure["subject"] != Subject.DEVICE.value:
        return [], "the fault is in the reference or the comparison, and only canaryd repeats these"
    if engine is None:
        return [], "no worker with torch was available; run canaryd report on the host itself"
    hosts = [d for d in engine.devices.values() if d.backend == "cpu"]
    if not hosts:
        return [], "no worker with torch was available on this host"
    arguments = {
        "device": to_json(device),
        **{name: failure[name] for name in ("probe", "case", "shape", "seed", "core")},
        "expected": [[list(e["index"]), e["expected"]] for e in failure["elements"]],
        "out": str(folder.absolute()),
        "on": torch_name(device),
        "environment": {
            **{k: v for k, v in STRICT.items() if k.startswith("CU")},
            **INSTRUCTION_SETS.get(failure["instruction_set"], {}),
        },
        "unset": SCRUBBED,
        "runs": failure["needed"],
        "copied": COPIED,
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


def _table(failure: Json) -> str:
    rows = io.StringIO()
    out = csv.writer(rows, lineterminator="\n")
    out.writerow(("run", "index", "expected", "observed", "flipped_bits"))
    for e in failure["elements"]:
        bits = " ".join(map(str, flipped(e["expected"], e["observed"])))
        out.writerow((e["run"], " ".join(map(str, e["index"])), e["expected"], e["observed"], bits))
    return rows.getvalue()


def _log(store: Store, device: Device) -> str:
    lines = []
    for e in store.events(device=device.uuid):
        if e.kind not in QUIET_EVENTS and (e.kind, e.name) != (EventKind.OFF_BUS, "driver"):  # a poll said that
            times = f" x{e.count:g}" if e.count > 1 else ""
            said = f"{format_utc(e.first)} … {format_utc(e.last)}{times}  {e.kind} {e.name}  {e.detail}"
            lines.append(said.replace("\n", " ") + "\n")
    return "".join(lines)


def _pack(directory: Path, archive: Path, at: int) -> None:
    """Write a directory as an archive. Equal contents give equal bytes: sorted names, one time `at`, no owner."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime, info.mode = at, 0o755 if info.isdir() else 0o644
        return info

    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=at, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        tar.add(directory, directory.name, filter=plain)
