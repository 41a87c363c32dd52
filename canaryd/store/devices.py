"""The tables of devices, of the verdicts on them, and of operators' acknowledgements."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from canaryd.model import Ack, Device, Verdict
from canaryd.store.database import Database
from canaryd.store.rows import ADD_ACK, ADD_DEVICE, add_verdict, pack, time_of

VOID_NOTE = "void acks"
"""Name of the note that lists the operators' statements dated in the future: device, kind and time of each, as JSON."""


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A device that was seen on this machine. Times are seconds since the epoch."""

    device: Device
    first_seen: float
    last_seen: float
    present: bool
    """Whether the device was there; False after an inventory that did not find it."""


class DeviceTables(Database):
    """The tables of devices, verdicts and acknowledgements."""

    @functools.cached_property
    def _decoded(self) -> dict[str, tuple[bytes, Verdict]]:
        """Device → its newest verdict as (packed bytes, decoded object)."""
        return {}

    def see_device(self, device: Device, now: float) -> bool:
        """Store that a device was present at `now` (epoch s). Return False if this is only in memory so far."""
        row = (device.uuid, now, now, True, pack(device))
        return self._write(lambda db: db.execute(ADD_DEVICE, row))

    def set_present(self, uuids: Collection[str], now: float, unseen: Collection[str] = ()) -> bool:
        """Store that of all known devices only `uuids` were present at `now`; return False if only in memory so far.

        The devices in `unseen` also count as present, because nobody looked for them.
        """
        with self._lock:
            rows = []
            for known in self.devices():
                uuid = known.device.uuid
                seen = now if uuid in uuids else known.last_seen
                rows.append((uuid, known.first_seen, seen, uuid in uuids or uuid in unseen, pack(known.device)))
            return self._write(lambda db: db.executemany(ADD_DEVICE, rows))

    def devices(self) -> list[DeviceRecord]:
        """Return every device ever seen here, sorted by uuid."""
        rows = self._read("SELECT uuid, body, first_seen, last_seen, present FROM devices ORDER BY uuid")
        return [
            DeviceRecord(device=device, first_seen=time_of(first), last_seen=time_of(last), present=bool(present))
            for uuid, body, first, last, present in rows
            for device in self._decode(Device, [(uuid, body)])
        ]

    # Verdicts

    def set_verdict(self, verdict: Verdict) -> bool:
        """Make `verdict` the newest of its device. Return False if it is only in memory so far.

        If the state or the cause changed, the history gains an entry; otherwise its last entry is replaced.
        """
        row = (verdict.device, verdict.drill, verdict.state.value, verdict.cause.value, verdict.decided, pack(verdict))
        return self._write(lambda db: add_verdict(db, row))

    def verdicts(self) -> dict[str, Verdict]:
        """Return device uuid → newest verdict."""
        newest = "SELECT max(number) FROM verdicts GROUP BY device"
        rows = self._read(f"SELECT device, body FROM verdicts WHERE number IN ({newest})")
        return {v.device: v for row in rows for v in self._decode_verdict(*row)}

    def verdict(self, device: str) -> Verdict | None:
        """Return the newest verdict on one device (its uuid), or None if there is none."""
        query = "SELECT device, body FROM verdicts WHERE device = ? ORDER BY number DESC LIMIT 1"
        return next((v for row in self._read(query, device) for v in self._decode_verdict(*row)), None)

    def verdict_history(self, device: str) -> list[Verdict]:
        """Return the verdicts on one device (its uuid), newest last; successive verdicts differ in state or cause."""
        query = "SELECT device, body FROM verdicts WHERE device = ? ORDER BY number"
        return self._decode(Verdict, self._read(query, device))

    def _decode_verdict(self, device: str, body: bytes) -> list[Verdict]:
        """Return [the verdict], or [] if it is damaged; a cache saves decoding, since pages often read verdicts."""
        decoded = self._decoded.get(device)
        if decoded is None or decoded[0] != body:
            found = self._decode(Verdict, [(device, body)])
            if not found:
                return []
            decoded = self._decoded[device] = (body, found[0])
        return [decoded[1]]

    # Acknowledgements

    def add_ack(self, ack: Ack) -> bool:
        """Store an operator's statement about a device for good. Return False if it is only in memory so far."""
        row = (ack.device, ack.kind, ack.at, pack(ack))
        return self._write(lambda db: db.execute(ADD_ACK, row))

    def acks(self, device: str | None = None) -> list[Ack]:
        """Return the operators' statements about a device, or about all devices if it is None, newest last."""
        rows = self._read("SELECT device, body FROM acks WHERE device = ? OR ? IS NULL ORDER BY number", device, device)
        void = self.parsed_note(VOID_NOTE, _parse_keys, _parse_keys("[]"))
        found = (replace(a, void=_key(a) in void) for a in self._decode(Ack, rows))
        return sorted(found, key=lambda a: a.at)

    def void_acks(self, acks: Iterable[Ack]) -> bool:
        """Mark operators' statements as void for good. Return False if this is only in memory so far."""
        keys = {_key(a) for a in self.acks() if a.void} | {_key(a) for a in acks}
        return self.set_note(VOID_NOTE, json.dumps(sorted(keys)))


def _parse_keys(text: str) -> set[tuple[str, str, float]]:
    return {(str(device), str(kind), float(at)) for device, kind, at in json.loads(text)}


def _key(ack: Ack) -> tuple[str, str, float]:
    return ack.device, ack.kind, ack.at
