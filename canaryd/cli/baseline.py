"""`canaryd baseline`: list, accept, export, import baselines: past results of cases without a known right answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from canaryd.cli.arguments import USAGE, Commands, add_json
from canaryd.cli.common import complain, open_record, open_to_change, say
from canaryd.codec import from_json, to_json
from canaryd.config.settings import Config
from canaryd.facts import printable, whole
from canaryd.formatting import columns, did_you_mean, format_time
from canaryd.judge.characterised import Met
from canaryd.judge.clock import AHEAD
from canaryd.judge.recordings.baseline import IDLE, LEARN, Baseline, Key, accept, empty_baseline, is_within, key_of
from canaryd.judge.recordings.changed import witnesses
from canaryd.judge.verdict import exit_code
from canaryd.model import Device, State
from canaryd.store.store import Store

SCHEMA = "canaryd.baselines/1"
MOST = 10**9
"""Largest count allowed in an imported file: a larger one must be a mistake."""

DESCRIPTION = """\
Manage baselines: the earlier results of tests that have no known right answer.
Each new result is compared with them.

  list    one line per case              export  print the baselines as JSON
  accept  newer results are right too    import  read what export printed"""


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("baseline", baseline_command, "list, accept or move the baselines of recorded cases", DESCRIPTION),
        epilog="exit status: 0 done, 3 there is no record, or it cannot be read\n"
        "or written, 64 usage or configuration error",
    )
    command.add_argument("what", choices=("list", "accept", "export", "import"))
    command.add_argument(
        "device",
        nargs="?",
        default="",
        metavar="DEV",
        help="uuid or name (default: every device); for import: the exported file, or - for standard input",
    )
    command.add_argument("--probe", default="", metavar="NAME", help="only this probe")
    command.add_argument(
        "--case", default="", metavar="CASE", help="only this case, or those whose names continue with / after it"
    )
    command.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="for accept, required: why the results are right; kept as evidence",
    )
    add_json(command)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The baselines to which a command applies. An empty field sets no condition."""

    device: str = ""
    """Uuid or name of the device."""
    probe: str = ""
    case: str = ""
    """A whole case name, or the first parts of one."""

    def picks(self, device: Device, probe: str, case: str) -> bool:
        """Return whether the selection includes this case of this probe on this device."""
        named = self.device in ("", device.uuid, device.name)
        return named and self.probe in ("", probe) and (not self.case or is_within(case, self.case))


class Listed(NamedTuple):
    """A baseline, its device, and the other device (the witness) whose results confirm the baseline."""

    device: Device
    baseline: Baseline
    witness: str
    """Name of the witness, or "nobody" if no device confirms the baseline."""


def chosen(store: Store, selection: Selection) -> list[Listed]:
    """Return the selected baselines, imported ones too, in the order in which they were learnt."""
    devices = {r.device.uuid: r.device for r in store.devices()}
    by_key: dict[Key, list[tuple[Device, Baseline]]] = defaultdict(list)
    for baseline in store.baselines():
        backend, model = baseline.imported_kind or ("gone", "")
        elsewhere = Device(uuid=baseline.device, backend=backend, index=0, model=model, weak_identity=True)
        by_key[baseline.key].append((devices.get(baseline.device, elsewhere), baseline))
    return sorted(
        (
            Listed(device, b, _witness(device, b, same))
            for same in by_key.values()
            for device, b in same
            if selection.picks(device, b.probe, b.case)
        ),
        key=lambda listed: (listed.baseline.last, listed.baseline.key),
    )


def _witness(device: Device, one: Baseline, same: Sequence[tuple[Device, Baseline]]) -> str:
    others = [(d, b) for d, b in same if d.part != device.part and b.complete and d.kind == device.kind]
    return witnesses(one, [(d.uuid if b.imported else d.name, b) for d, b in others]) or "nobody"


def accept_unknown(store: Store, selection: Selection, why: str) -> list[tuple[Device, Baseline, int]]:
    """Add the selected results that are in no baseline to their baselines; return (device, baseline, number added).

    The results known so far stay known. An incomplete baseline becomes complete. A baseline that was learnt because the
    chain (model, settings, server and so on) changed is accepted even if no result is added.
    """
    changed = []
    for device in (r.device for r in store.devices()):
        known = {b.key: b for b in store.baselines(device.uuid)}
        counts: Counter[Key] = Counter()
        for run in store.runs(device.uuid):
            for recording in run.recordings:
                if not (recording.values or recording.tokens or recording.text or recording.finish):
                    continue  # only its digest was kept, because its baseline has it
                if not selection.picks(device, run.probe, recording.case):
                    continue
                own = known.get(key_of(run, recording)) or empty_baseline(run, recording)
                if recording.digest not in own.digests:
                    known[own.key] = accept(own, run, recording, why)
                    counts[own.key] += 1
        for own in list(known.values()):
            picked = own.key not in counts and selection.picks(device, own.probe, own.case)
            if picked and _awaits_acceptance(list(known.values()), own):
                known[own.key], counts[own.key] = replace(own, accepted=why), 0
        fresh = [b for b in known.values() if b.key in counts]
        store.set_baselines(fresh)
        changed += [(device, b, counts[b.key]) for b in fresh]
    return changed


def _awaits_acceptance(all_: Sequence[Baseline], one: Baseline) -> bool:
    """Return whether `one` was learnt after a change of model, settings or server, and is not accepted yet."""
    same = [b for b in all_ if b.complete and (b.probe, b.case) == (one.probe, one.case) and b.key != one.key]
    return one.complete and not one.accepted and any(b.first < one.first for b in same)


EXPORTED = "name the file that canaryd baseline export wrote"


def import_document(store: Store, text: str) -> tuple[int, int]:
    """Import a text that `document` made; return the number of new baselines and the number of baselines known already.

    A baseline of a device of this host becomes a baseline of that device. A baseline of another host's device only
    confirms baselines of devices of the same model. The same holds for the export's list of exact test cases. Raises
    `ValueError` for any other text and imports nothing.
    """
    try:
        data = whole(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON; {EXPORTED}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("baselines"), list):
        raise ValueError(f'no baselines; wanted an object with "schema": "{SCHEMA}", as canaryd baseline export writes')
    mine = {r.device.uuid for r in store.devices()}
    found = [_imported(number, one, mine) for number, one in enumerate(data["baselines"])]
    listed = data.get("met", [])
    if not isinstance(listed, list):
        raise ValueError("met: wanted a list")  # noqa: TRY004 - a file's, not ours
    met = [_imported_met(number, one, mine) for number, one in enumerate(listed)]
    have = {(b.device, b.key) for b in store.baselines()}
    fresh = [b for b in found if (b.device, b.key) not in have]
    store.set_baselines(fresh)
    store.set_met(met)
    return len(fresh), len(found) - len(fresh)


def _imported_met(number: int, data: object, mine: Collection[str]) -> Met:
    """Return entry `number` of an export's list of exact test cases; `mine`: uuids of this host's devices."""
    try:
        one = from_json(Met, data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"met[{number}]: {printable(str(error))[:300]}; export it again with this canaryd") from error
    words = (one.device, one.probe, *one.kind, *one.classes, *one.accepted, *one.accepted.values())
    times = (one.used, *one.classes.values())
    if not all(word.isprintable() for word in words) or not all(0 <= t <= time.time() + AHEAD for t in times):
        raise ValueError(f"met[{number}]: impossible names or times")
    return replace(one, imported=one.device not in mine)


def met_by(store: Store, selection: Selection) -> list[Met]:
    """Return the selected records of the classes of test cases for which a device gave the exact right answer."""
    named = {r.device.uuid: r.device.name for r in store.devices()}
    return [
        met
        for met in store.met()
        if selection.device in ("", met.device, named.get(met.device)) and selection.probe in ("", met.probe)
    ]


def _imported(number: int, data: object, mine: Collection[str]) -> Baseline:
    """Return entry `number` of an export's list of baselines; `mine`: uuids of this host's devices.

    Raises `ValueError` for impossible values, and for another host's device whose model is missing.
    """
    fields = {f.name for f in dataclasses.fields(Baseline)}
    where = f"baselines[{number}]"
    if not isinstance(data, dict):
        raise ValueError(f"{where}: wanted an object, got {type(data).__name__}")  # noqa: TRY004 - a file's, not ours
    try:
        one = from_json(Baseline, {k: v for k, v in data.items() if k in fields})
    except (TypeError, ValueError) as error:
        reason = printable(str(error))[:300]
        raise ValueError(f"{where}: {reason}; export it again with this canaryd") from error
    counts = [*one.learnt.values(), *one.steady.values(), *one.passed.values(), one.strange, one.beside, one.since]
    counts += [one.processes]
    times = [one.first, one.last, one.used, one.strange_at, *(t for k in one.known for t in (k.first, k.last))]
    values = [v for k in one.known for v in k.recording.values if v is not None]
    sound = bool(one.known) and all(0 <= n <= MOST for n in counts)
    if not (sound and all(map(math.isfinite, values)) and all(0 <= t <= time.time() + AHEAD for t in times)):
        named = printable(f"{one.probe} {one.case}")[:300]
        raise ValueError(f"{where}: {named}: no result, or impossible counts or times")
    if one.device in mine:
        return replace(one, imported_kind=None)
    kind = (str(data.get("backend", "")), str(data.get("model", "")))
    if not any(kind):
        raise ValueError(f"{where}: it does not say of what model its device is; export it again with this canaryd")
    return replace(one, imported_kind=kind)


LEAST_TELLING = ("last seen", "results", "confirmed by", "samples", "repeats")
"""Columns that a narrow terminal does not show. The first is left out first."""


def table(found: Sequence[Listed], width: int = 0) -> str:
    """Return baselines as text, one line each. Columns of `LEAST_TELLING` beyond `width` are left out; 0: no limit."""
    if not found:
        return "no baseline matches; canaryd learns baselines while it runs (docs/baselines.md)"
    rows = [_row(one) for one in found]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    left_out: list[str] = []
    while width and sum(w + 2 for w in widths.values()) - 2 > width and len(left_out) < len(LEAST_TELLING):
        left_out.append(LEAST_TELLING[len(left_out)])
        del widths[left_out[-1]]
    header = {name: name for name in rows[0]}
    lines = ["  ".join(row[name].ljust(w) for name, w in widths.items()).rstrip() for row in (header, *rows)]
    lines += [f"not shown: {', '.join(left_out)} (canaryd baseline export)"] if left_out else []
    return "\n".join(map(printable, lines))


def _row(one: Listed) -> dict[str, str]:
    b = one.baseline
    repeats = "bit-stable" if b.stable("") else "bit-stable when idle" if b.stable(IDLE) else "varies"
    return {
        "device": one.device.name,
        "probe": b.probe,
        "case": b.case,
        "results": str(len(b.known)),
        "samples": f"{b.samples} of {LEARN}",
        "repeats": f"{repeats if b.complete else 'unknown yet'}{', text alone' * b.is_text_only}",
        "confirmed by": one.witness,
        "last seen": format_time(b.last, seconds=False),
    }


def document(found: Sequence[Listed], met: Sequence[Met] = ()) -> dict[str, Any]:
    """Return baselines and the records of test cases with the exact right answer (`met`) as JSON data for an export."""
    listed = [
        {
            "name": d.name,
            "backend": d.backend,
            "model": d.model,
            "complete": b.complete,
            "stable": b.stable(""),
            "text_only": b.is_text_only,
            "witness": witness,
            "imported": " ".join(b.imported_kind or ()),
            **to_json(b),
        }
        for d, b, witness in found
    ]
    return {"schema": SCHEMA, "baselines": listed, "met": to_json(list(met))}


def baseline_command(options: argparse.Namespace, settings: Config) -> int:
    """List, accept, export or import baselines, and return the exit code."""
    selection = Selection(device=options.device, probe=options.probe, case=options.case)
    why = options.reason.strip()
    if options.what == "import":
        return _import_baselines(options, settings)
    accepts = options.what == "accept"
    if accepts and not (options.device and why):
        complain("baseline accept: name a device and give the reason with --reason; both are kept as evidence")
        return USAGE
    with open_record(settings, to_change=accepts) as store:
        if not (accepts or settings.state_dir.exists()):
            complain(f"baseline: nothing is recorded in {settings.state_dir}: name the daemon's with --state-dir")
            return exit_code(State.UNKNOWN)
        named = {b.device: b.device for b in store.baselines()} | {
            r.device.uuid: r.device.name for r in store.devices()
        }
        if options.device and options.device not in {*named, *named.values()}:
            known = ", ".join(sorted({*named.values()})) or "none"
            near = did_you_mean(options.device, [*named, *named.values()])
            complain(f'baseline {options.what}: no device "{options.device}"; baselines exist for {known}{near}')
            return USAGE
        accepted = accept_unknown(store, selection, why) if accepts else []
        found, met = chosen(store, selection), met_by(store, selection)
    if accepts:
        _tell_accepted(accepted)
    elif options.json or options.what == "export":
        print(json.dumps(document(found, met), indent=2))
    else:
        say(table(found, columns() if sys.stdout.isatty() else 0))
    return 0


def _tell_accepted(changed: Sequence[tuple[Device, Baseline, int]]) -> None:
    for device, one, count in changed:
        what = f"{count} result{'s' * (count > 1)} accepted" if count else "accepted with its changed model or software"
        say(f"{device.name} {one.probe} {one.case}: {what}")
    nothing = "nothing to accept: no selected case has a result that differs from its baseline"
    say("the next run updates the verdict" if changed else nothing)


def _import_baselines(options: argparse.Namespace, settings: Config) -> int:
    if not options.device:
        complain("baseline import: name the file that canaryd baseline export wrote, or - for standard input")
        return USAGE
    try:
        text = sys.stdin.read() if options.device == "-" else Path(options.device).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        complain(f"baseline import {options.device}: not text; {EXPORTED}")
        return USAGE
    except OSError as error:
        complain(f"baseline import {options.device}: {error.strerror}; {EXPORTED}")
        return USAGE
    with open_record(settings):
        pass  # a new host may have none, but one that cannot be read is not replaced
    try:
        with open_to_change(settings) as store:
            before = _classes(store)
            fresh, known = import_document(store, text)
            met = _classes(store) - before
    except ValueError as error:
        complain(f"baseline import {options.device}: {error}")
        return USAGE
    classes = f", {met} classes of exact tests that were met" * bool(met)
    follows = "; the next run updates the verdict" * bool(fresh or met)
    say(f"{fresh} baselines imported, {known} known already{classes}{follows}")
    return 0


def _classes(store: Store) -> int:
    return sum(len({*m.classes, *m.accepted}) for m in store.met())
