"""Daily summaries of each device, and the findings from several weeks of summaries."""

from __future__ import annotations

from dataclasses import replace

from canaryd.engine.evidence import Acknowledgements
from canaryd.engine.host import Host
from canaryd.formatting import DAY, HOUR
from canaryd.judge import slower
from canaryd.judge.brief import sign
from canaryd.model import Device, Finding

BACK = 14
"""Days for which runs and polls are kept, so that a summary of each of these days can still be made."""
SEEN = 90 * DAY
"""Age in seconds up to which summaries are read; the rule in docs/judgement.md needs less."""


class Days:
    """The daily summaries of each device in memory, and the findings from them."""

    def __init__(self, host: Host, acknowledgements: Acknowledgements) -> None:
        """Start empty; no summary is read yet."""
        self._host = host
        self._acks = acknowledgements
        self._acks_version = acknowledgements.version
        self._courses: dict[str, dict[slower.Key, slower.Course]] = {}
        """Device → its readings day by day."""
        self._empty: set[tuple[str, int]] = set()
        """Devices and days of which nothing is on record, so that these are not looked at again."""
        self._found: dict[str, tuple[int, tuple[Finding, ...]]] = {}
        """Device → the day on which its days were judged, and what was found."""

    def sum_up(self) -> bool:
        """Store the summary of one past day of one device; return False if no past day lacks a summary.

        One call handles only one day, because reading its runs and polls takes a second. A day without runs and polls
        gets no summary: if the clock runs ahead, that day may still be in the future.
        """
        host = self._host
        today = int(host.clock() // DAY)
        first_seen = {r.device.uuid: r.first_seen for r in host.store.devices()}
        for uuid in list(host.devices):
            have = host.store.summed(uuid, (today - BACK) * DAY)
            for day in range(max(today - BACK, int(first_seen.get(uuid, 0.0) // DAY)), today):
                if day not in have and (uuid, day) not in self._empty:
                    return self._sum_up(uuid, day)
        return False

    def _sum_up(self, uuid: str, day: int) -> bool:
        """Store the summary of one day. Return False, and store nothing, if the store cannot be read completely."""
        store, begin, end = self._host.store, day * DAY, (day + 1) * DAY
        runs = [  # hour by hour: a whole day with comparisons and recordings takes tens of MiB
            replace(run, comparisons=(), recordings=(), readings=(*run.readings, *sign(run)))
            for hour in range(25)  # one hour more, because runs are stored after they started
            for run in store.runs(uuid, since=begin + hour * HOUR, until=begin + (hour + 1) * HOUR)
        ]
        polls = store.polls(uuid, since=begin, until=end)
        if store.unreadable:
            return False
        if not (runs or polls):
            self._empty.add((uuid, day))
            return True
        store.add_day(slower.summary(uuid, day, runs, polls))
        with self._host.mutex:
            self._courses.pop(uuid, None)
            self._found.clear()
        return True

    def _refresh(self) -> None:
        """Forget all cached summaries after a new acknowledgement: the days before a repair do not count."""
        if self._acks_version != self._acks.version:
            self._acks_version = self._acks.version
            self._found.clear()
            self._courses.clear()

    def _since(self, uuid: str) -> float:
        return max(self._host.clock() - SEEN, self._acks.evidence_since(uuid))

    def findings(self, device: Device) -> tuple[Finding, ...]:
        """Return the findings from comparing a device's days with its earlier days and with the days of its siblings.

        The findings are made once a day, and after an acknowledgement; docs/judgement.md has the rule. Days before a
        repair are left out.
        """
        host, now = self._host, self._host.clock()
        self._refresh()
        today = int(now // DAY)
        before: tuple[int, tuple[Finding, ...]] = self._found.get(device.uuid, (-1, ()))
        if before[0] != today:
            kin = host.kin(device.uuid)
            for uuid in kin - set(self._courses):
                self._courses[uuid] = slower.courses(host.store.days(uuid, self._since(uuid)))
            if host.store.unreadable:
                self._courses.clear()
                return before[1]  # read again at the next look
            peers = {host.devices[u].name: self._courses[u] for u in kin - {device.uuid}}
            self._found[device.uuid] = today, tuple(slower.findings(self._courses[device.uuid], peers, now))
        return self._found[device.uuid][1]
