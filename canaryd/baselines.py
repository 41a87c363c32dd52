"""`canaryd baseline`: what is known of recorded cases, and an operator's word that new bits are right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from canaryd.baseline import EVERY, IDLE, LEARN, Baseline, accept, begun, key_of
from canaryd.model import Device, to_json
from canaryd.store import Store


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which baselines a command is about; "" for all."""

    device: str = ""
    """Uuid or name."""
    probe: str = ""
    case: str = ""
    """A case or the beginning of its path."""

    def picks(self, device: Device, probe: str, case: str) -> bool:
        """Whether a case of a device is meant."""
        named = self.device in ("", device.uuid, device.name)
        return named and self.probe in ("", probe) and f"{case}/".startswith(f"{self.case}/" if self.case else "")


def chosen(store: Store, selection: Selection) -> list[tuple[Device, Baseline]]:
    """Return the baselines that a selection picks, with their devices, in the order in which they were learnt."""
    devices = {r.device.uuid: r.device for r in store.devices()}
    return [
        (devices[b.device], b)
        for b in store.baselines()
        if b.device in devices and selection.picks(devices[b.device], b.probe, b.case)
    ]


def accepted(store: Store, selection: Selection, why: str) -> list[tuple[Device, Baseline, int]]:
    """Take every unknown vector that the selection picks into its baseline; return device, baseline and how many.

    A baseline that was learnt because the chain changed is accepted as meant, with no vector taken.

    Only vectors that were seen are taken; what they departed from stays known. A baseline that was not complete is so
    by that word: what looks broken is not learnt by itself.
    """
    devices = [r.device for r in store.devices()]
    taken = []
    for device in devices:
        known = {b.key: b for b in store.baselines(device.uuid)}
        counts: dict[str, int] = {}
        for run in store.runs(device.uuid):
            for recording in run.recordings:
                if not (recording.values or recording.tokens or recording.text or recording.finish):
                    continue  # known when it came: its baseline has it
                if not selection.picks(device, run.probe, recording.case):
                    continue
                own = known.get(key_of(run, recording)) or begun(run, recording)
                if recording.digest not in own.digests:
                    known[own.key] = accept(own, run, recording, why)
                    counts[str(own.key)] = counts.get(str(own.key), 0) + 1
        for own in list(known.values()):
            picked = str(own.key) not in counts and selection.picks(device, own.probe, own.case)
            if picked and _settled(list(known.values()), own):
                known[own.key], counts[str(own.key)] = replace(own, accepted=why), 0
        fresh = [b for b in known.values() if str(b.key) in counts]
        store.set_baselines(fresh)
        taken += [(device, b, counts[str(b.key)]) for b in fresh]
    return taken


def _settled(before: Sequence[Baseline], one: Baseline) -> bool:
    """Whether a baseline was learnt on another chain than one before it, and nobody has said that this was meant."""
    same = [b for b in before if b.complete and (b.probe, b.case) == (one.probe, one.case) and b.key != one.key]
    return one.complete and not one.accepted and any(b.first < one.first for b in same)


def table(found: Sequence[tuple[Device, Baseline]]) -> str:
    """Return baselines as text, one line each."""
    if not found:
        return "no baseline matches: they are learnt by runs of probes that record (docs/baselines.md)"
    rows = [("device", "probe", "case", "vectors", "learnt", "repeats", "until")]
    for device, b in found:
        repeats = "bit-stable" if b.stable("") else "bit-stable when idle" if b.stable(IDLE) else "varies"
        repeats = repeats if b.complete else "not known yet"
        learnt = f"{b.learnt.get(EVERY, 0)} of {LEARN}"
        rows.append((device.name, b.probe, b.case, str(len(b.known)), learnt, repeats, _moment(b.last)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def described(found: Iterable[tuple[Device, Baseline]]) -> str:
    """Return all that is known of baselines, as text."""
    lines = []
    for device, b in found:
        lines += [f"{device.name}  {b.probe} (version {b.probe_version})  {b.case}"]
        chain = [(link, value) for link, value in (*b.chain.items(), *b.stack.items())]
        lines += [f"  {link}: {value}" for link, value in chain]
        for condition, count in sorted(b.learnt.items()):
            noise = b.noise(condition)
            varies = "varies, by how much is not known yet" if noise is None else f"varies by up to {noise:.3g} nats"
            steady = "bit-stable" if b.stable(condition) else varies
            if b.under(condition) != condition:
                steady = "too few to be compared by themselves"
            lines += [f"  {condition or 'all together'}: {count} recordings, {steady}"]
        for k in b.known:
            times = ", ".join(f"{n} {condition}".strip() for condition, n in sorted(k.counts.items()))
            lines += [f"  {k.recording.digest}  {times} times, last {_moment(k.last)}  {k.recording.text[:60]!r}"]
        lines += [f"  accepted by hand: {b.accepted}"] if b.accepted else []
        lines += [""]
    return "\n".join(lines).rstrip() or table(())


def document(found: Iterable[tuple[Device, Baseline]]) -> dict[str, Any]:
    """Return baselines as JSON data."""
    listed = [{"name": d.name, "complete": b.complete, "stable": b.stable(""), **to_json(b)} for d, b in found]
    return {"schema": "canaryd.baselines/1", "baselines": listed}


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, tz=timezone.utc).astimezone():%Y-%m-%d %H:%M:%S}"
