"""What may happen in a story: an event of each kind, and what it changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from canaryd.cli import baseline
from canaryd.engine import schedule
from canaryd.facts import LogRecord
from canaryd.model import Ack, Event, State
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from tests.story.catalogue import DAY, EXACT, LINKS

if TYPE_CHECKING:
    from tests.story.format import Happening
    from tests.story.host import Host


def _stack(host: Host, what: Happening, *, first: bool) -> None:
    """Other software, or another kernel; a driver is loaded anew, which begins its counters at 0."""
    for chip in host.of(what.device):
        chip.stack.update(what.stack)
        chip.kernel = what.kernel or chip.kernel
        if "driver" in what.stack:
            chip.counters = {k: v for k, v in chip.counters.items() if "aggregate" in k}
    host.engine.discover()


def _reboot(host: Host, what: Happening, *, first: bool) -> None:
    """The machine starts again; dated by the story, since the real watch would look at the real machine's start."""
    for chip in host.chips.values():
        chip.lost = False
        chip.counters = {k: v for k, v in chip.counters.items() if "aggregate" in k}
    at = host.now
    events = [
        Event(device=uuid, kind="boot", name="clean", first=at, last=at, detail="the machine was rebooted")
        for uuid in host.engine.devices
    ]
    host.now += 60.0
    host.restart()
    host.engine.watch.history.record(events)
    host.now -= 60.0


def _restart(host: Host, what: Happening, *, first: bool) -> None:
    """The daemon starts again."""
    host.restart()


def _damage(host: Host, what: Happening, *, first: bool) -> None:
    """The disk loses what is in the database, and the daemon starts again."""
    path = host.engine.store.path
    host.close()
    path.write_bytes(b"\xff" * path.stat().st_size)
    host.begin()


def _hide(host: Host, what: Happening, *, first: bool) -> None:
    """The daemon starts again while the database cannot be read, and can be read in the next round."""
    path = host.engine.store.path
    aside = path.with_suffix(".aside")
    if first:
        host.close()
        path.rename(aside)
        path.mkdir()
        host.begin()
    else:
        path.rmdir()
        aside.rename(path)


def _move(host: Host, what: Happening, *, first: bool) -> None:
    """A card sits in another slot: index and bus address are others."""
    for chip in host.of(what.device):
        chip.index, chip.bus_id = what.index, what.bus_id or f"0000:{what.index + 64:02x}:00.0"
    host.engine.discover()


def _vanish(host: Host, what: Happening, *, first: bool) -> None:
    """Devices are not found any more."""
    for chip in host.of(what.device):
        chip.present = False
    host.engine.discover()


def _return(host: Host, what: Happening, *, first: bool) -> None:
    """They are back."""
    for chip in host.of(what.device):
        chip.present = True
    host.engine.discover()


def _release(host: Host, what: Happening, *, first: bool) -> None:
    """An operator lets canaryd go of every device, and take them back a little later."""
    host.engine.release("released by the story")
    host.engine.take_back()


def _xid(host: Host, what: Happening, *, first: bool) -> None:
    """The driver logs an Xid; after Xid 79 the device answers no more until the machine is started again."""
    for chip in host.of(what.device):
        chip.lost |= what.xid == 79
        text = what.text or f"NVRM: Xid (PCI:{chip.bus_id}): {what.xid}"
        host.log.append(
            LogRecord(
                boot="story",
                sequence=host.count,
                at=host.now,
                kind="xid",
                name=str(what.xid),
                bus_id=chip.bus_id,
                text=text,
            )
        )


def _counters(host: Host, what: Happening, *, first: bool) -> None:
    """Counters of telemetry rise by so much."""
    for chip in host.of(what.device):
        for key, rise in what.counters.items():
            chip.counters[key] = chip.counters.get(key, 0.0) + rise


def _readings(host: Host, what: Happening, *, first: bool) -> None:
    """Gauges of telemetry say something else from now on; the driver refuses to give those that are .nan."""
    for chip in host.of(what.device):
        chip.readings.update(what.readings)


def _heat(host: Host, what: Happening, *, first: bool) -> None:
    """Devices get warmer, or cooler, by so many degrees."""
    if first:
        for chip in host.of(what.device):
            chip.heat += what.temperature


def _speed(host: Host, what: Happening, *, first: bool) -> None:
    """Devices compute so many times as fast from now on."""
    for chip in host.of(what.device):
        chip.speed = what.speed


def _ack(host: Host, what: Happening, *, first: bool) -> None:
    """An operator says something of devices."""
    for chip in host.of(what.device):
        until = host.now + what.days * DAY if what.days else 0.0
        with Store.open(host.config.state_dir, now=host.clock) as store:  # a process of its own, as canaryd ack is
            verdict = store.verdicts().get(chip.uuid)
            doubts = [f.rule for f in verdict.findings if f.state is State.SUSPECT or f.acknowledged] if verdict else []
            word = {"kind": what.kind, "at": host.now, "reason": what.reason, "until": until, "by": "story"}
            store.add_ack(Ack(device=chip.uuid, rules=tuple(doubts), **word))


def _clock(host: Host, what: Happening, *, first: bool) -> None:
    """The clock of the machine is set."""
    if first:
        host.now += what.seconds


def _drill(host: Host, what: Happening, *, first: bool) -> None:
    """An operator injects a fault by software."""
    for chip in host.of(what.device):
        device = host.engine.devices[chip.uuid]
        entries = [host.engine.entries[EXACT]]
        for plan in schedule.plan_round(
            device, entries, levels=host.engine.levels("quick"), seed=7, sets=("",), drill="bitflip"
        ):
            host.engine.carry_out(plan)


def _check(host: Host, what: Happening, *, first: bool) -> None:
    """An operator drains the machine and tests the links between its devices, or the cores of its processor."""
    engine = host.engine
    entry = engine.entries[LINKS]
    devices = [engine.devices[chip.uuid] for chip in host.of(what.device)]
    host.turn("check")
    step = schedule.Step(entry=entry, level="standard", seed=host.rng.getrandbits(53))
    engine.together = frozenset(d.uuid for d in devices)
    alone = (schedule.Plan(device=d, instruction_set="", steps=(step,)) for d in devices if d.backend == "cpu")
    for plan in (*alone, *schedule.plan_group(devices, entry, step)):
        engine.carry_out(plan)
    engine.together = frozenset()


def _clients(host: Host, what: Happening, *, first: bool) -> None:
    """An endpoint serves so many others from now on, and each waits for all."""
    for server in host.servers(what.device):
        server.clients = what.clients


def _serve(host: Host, what: Happening, *, first: bool) -> None:
    """An endpoint is started again, perhaps with other links of its chain."""
    for server in host.servers(what.device):
        server.links.update(what.links)
        server.started, server.launch = host.now, server.launch + 1


def _prune(host: Host, what: Happening, *, first: bool) -> None:
    """The clean runs on record become too old to be kept."""
    host.engine.store.keep = Retention(successes=0.0)
    host.engine.store.prune(host.now + 1.0)


def _import(host: Host, what: Happening, *, first: bool) -> None:
    """An operator imports here what `canaryd baseline export` prints on each other machine."""
    if host.of(what.device):
        for other in host.others:
            store, every = other.engine.store, baseline.Selection()
            exported = baseline.document(baseline.chosen(store, every), baseline.met_by(store, every))
            with Store.open(host.config.state_dir, now=host.clock) as here:  # the command is a process of its own
                baseline.import_document(here, json.dumps(exported))


DOINGS: Mapping[str, Callable[..., None]] = {
    "prune": _prune,
    "import": _import,
    "stack": _stack,
    "reboot": _reboot,
    "restart_daemon": _restart,
    "damage_store": _damage,
    "hide_store": _hide,
    "move": _move,
    "vanish": _vanish,
    "return": _return,
    "release": _release,
    "xid": _xid,
    "counters": _counters,
    "readings": _readings,
    "heat": _heat,
    "speed": _speed,
    "ack": _ack,
    "clock_jump": _clock,
    "drill": _drill,
    "check": _check,
    "clients": _clients,
    "serve": _serve,
}
"""What may happen; the docstring of each says what it does."""
