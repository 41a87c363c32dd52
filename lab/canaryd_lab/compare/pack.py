"""Judge the result file of a golden pack: the verdict is right, wrong, or skipped with a reason, for every case.

The file's digest detects edits and errors of transmission. It is no signature, so it does not detect a forger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canaryd.codec import canonical
from canaryd.facts import printable
from canaryd.formatting import wrapped
from canaryd.model import State

PACK, RESULT = "canaryd.pack/1", "canaryd.pack-result/1"
LARGEST = 16 << 20
"""Maximum bytes of a file that is read (ours): the results of 29 cases with 64 elements each take some kB."""
WIDTH = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}
"""Format → number of bytes of one element."""
SHOWN = 3
"""Maximum number of wrong cases that the text lists (ours)."""


class Refused(Exception):
    """A pack or a result file cannot be judged; the text says why and what to do."""


@dataclass(frozen=True)
class Judged:
    """The verdict on one result file."""

    state: State
    device: str
    runtime: str
    right: Sequence[Mapping[str, Any]]
    wrong: Sequence[Mapping[str, Any]]
    skipped: Sequence[Mapping[str, Any]]
    unproven: bool
    """Whether nothing shows that the device computed the results."""


def _read(path: Path, schema: str, seal: str) -> dict[str, Any]:
    """Return a JSON object from a file, after checking that its member `seal` is the digest of its other members."""
    try:
        if path.stat().st_size > LARGEST:
            raise Refused(f"{path}: larger than {LARGEST >> 20} MiB; name a file that a pack's runner wrote")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}; name a readable file") from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise Refused(f"{path}: not a file of schema {schema}; name one that canaryd or a pack's runner wrote")
    rest = {name: value for name, value in document.items() if name != seal}
    if document.get(seal) != hashlib.sha256(canonical(rest)).hexdigest():
        raise Refused(f"{path}: edited or damaged: its content does not have its digest; copy or make it again")
    return document


def judge(results: Path, directory: Path) -> Judged:
    """Return the verdict on a result file, according to the pack in `directory`; raise `Refused` if there is none."""
    found = _read(results, RESULT, "digest")
    pack = _read(directory / "pack.json", PACK, "id")
    if found.get("pack") != pack["id"]:
        raise Refused(f"{results}: made with another pack; name the directory of its pack with --pack")
    if found.get("demonstration"):
        raise Refused(f"{results}: a demonstration with an injected fault is no evidence; run the pack without it")
    cases = {case["name"]: case for case in pack["cases"]}
    try:
        told = {entry["name"]: entry for entry in found["cases"]}
        device, runtime = str(found["device"]), str(found["runtime"])
        if set(told) != set(cases) or len(found["cases"]) != len(cases):
            raise Refused(f"{results}: does not name each case of the pack once; run the pack again")
        by: dict[str, list[Mapping[str, Any]]] = {"right": [], "wrong": [], "skipped": []}
        for name, entry in told.items():
            if why := _contradiction(entry, cases[name], directory):
                raise Refused(f"{results}: {name}: {why}; run the pack again")
            by[entry["status"]].append(entry)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused(f"{results}: lacks what a result file has; make it with the pack's own runner") from None
    unproven = found.get("placement") != "proven"
    state = State.UNKNOWN if unproven or not by["right"] else State.HEALTHY
    state = State.FAULTY if by["wrong"] and not unproven else state
    return Judged(state, device, runtime, by["right"], by["wrong"], by["skipped"], unproven)


def _contradiction(entry: Mapping[str, Any], case: Mapping[str, Any], directory: Path) -> str:
    """Return the way in which an entry of the result file contradicts itself or the pack, or "" if it does not."""
    status = entry["status"]
    if status == "skipped":
        return "" if entry["reason"] else "skipped without a reason"
    if status not in ("right", "wrong"):
        return "its status is none of right, wrong, skipped"
    expected = case["expected"]
    is_right = entry["digest"] == expected["sha256"]
    runs, wrong_runs = int(entry["runs"]), int(entry["wrong_runs"])
    if is_right != (status == "right") or (wrong_runs > 0) == is_right or not 0 <= wrong_runs <= runs or runs < 1:
        return f"called {status}, which its digest or its counts contradict"
    if is_right:
        return "called right with wrong elements" if entry["elements"] or entry["wrong_elements"] else ""
    return _wrong_elements(entry, expected, directory)


def _wrong_elements(entry: Mapping[str, Any], expected: Mapping[str, Any], directory: Path) -> str:
    """Return the error in an entry's list of wrong elements, or in its digest if the list is complete; "" if none."""
    file, width = directory / Path(expected["file"]).name, WIDTH[expected["dtype"]]
    try:
        data = bytearray(file.read_bytes())
    except OSError as error:
        raise Refused(f"{file}: cannot be read: {error.strerror}; copy the pack again") from None
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise Refused(f"{file}: damaged: it does not have its digest; copy the pack again")
    seen = set()
    for index, want, got in entry["elements"]:
        at = int(index) * width
        if not 0 <= at < len(data) or index in seen or int.from_bytes(data[at : at + width], "little") != int(want, 16):
            return f"element {index} is not what the pack expects there"
        seen.add(index)
        if want == got or not 0 <= int(got, 16) < 1 << 8 * width:
            return f"element {index} is listed as wrong and is not"
        data[at : at + width] = int(got, 16).to_bytes(width, "little")
    if not 1 <= len(seen) <= int(entry["wrong_elements"]):
        return "the number of its wrong elements is contradictory"
    if len(seen) == entry["wrong_elements"] and hashlib.sha256(data).hexdigest() != entry["digest"]:
        return "its wrong elements do not give the result that it names"
    return ""


def text(judged: Judged) -> str:
    """Return the verdict and its reason as text, as wide as this terminal."""
    runs = sum(int(entry["runs"]) for entry in (*judged.right, *judged.wrong))
    wrong = sum(int(entry["wrong_runs"]) for entry in judged.wrong)
    word = f"{judged.state.value.upper()}  "
    lines = wrapped(word, f"{judged.device} through {judged.runtime}")
    counts = f"{runs:,} results of {len(judged.right) + len(judged.wrong)} cases, {wrong:,} wrong."
    lines += wrapped("  ", counts if runs else "Nothing was computed.")
    if judged.unproven:
        why = "Nothing shows that this device computed them: the runtime may have used the processor."
        lines += wrapped("  ", why)
    for entry in judged.wrong[:SHOWN]:
        index, want, got = entry["elements"][0]
        flipped = int(want, 16) ^ int(got, 16)
        bits = ", ".join(str(bit) for bit in range(64) if flipped >> bit & 1)
        what = f"{entry['name']}: {entry['wrong_elements']:,} wrong elements, the first {index}: expected {want},"
        lines += wrapped("  ", f"{what} got {got} (bits {bits}).")
    if judged.state is State.FAULTY:
        lines += wrapped("Do now: ", "do not use its results; run the pack on an identical device.")
    if judged.skipped:
        lines += wrapped("  ", f"Not checked: {len(judged.skipped)} cases:")
        reasons: dict[str, list[str]] = {}
        for entry in judged.skipped:
            reasons.setdefault(str(entry["reason"]), []).append(entry["name"].partition("/")[0])
        for reason, formats in reasons.items():
            lines += wrapped("    ", f"{', '.join(dict.fromkeys(formats))}: {reason}")
    return "\n".join(map(printable, lines))
