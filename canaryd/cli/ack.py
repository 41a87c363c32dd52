"""`canaryd ack`: an operator acknowledges a fault or its cause, or records a repair or a replacement."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from canaryd.cli.arguments import USAGE, Commands, duration
from canaryd.cli.common import complain, one_device, open_record, say
from canaryd.config.settings import Config
from canaryd.engine.counts import known_of
from canaryd.engine.evidence import NEWEST
from canaryd.formatting import format_time, time_zone
from canaryd.judge import acks, software
from canaryd.judge.brief import fold
from canaryd.judge.case import Case
from canaryd.judge.node import node
from canaryd.model import Ack, AckKind, Device, State, Verdict
from canaryd.store.locks import user_name
from canaryd.store.store import Store

DEFAULT = 7 * 86_400.0
"""Default time in seconds for which a fault is acknowledged."""
LONGEST = 400 * 86_400.0
"""Longest time in seconds for which a fault can be acknowledged: failures are kept for this time."""


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("ack", ack_command),
        "acknowledge a known fault, a repair or a replacement",
        "Mute a known fault, or record a repair or a replacement. What is muted stays on record.",
        epilog="exit status: 0 stored, 3 not stored, or the record cannot be read, 64 usage or configuration error",
    )
    command.add_argument("device", metavar="DEV", help="uuid or name")
    command.add_argument(
        "--reason", required=True, metavar="TEXT", help="required: why, e.g. the ticket; kept as evidence"
    )
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--for",
        dest="seconds",
        type=duration,
        default=DEFAULT,
        metavar="7d",
        help="mute a fault or suspicion for this long (default: 7d)",
    )
    kind.add_argument("--end", action="store_true", help="end an acknowledgement early")
    kind.add_argument("--software", action="store_true", help="the software was at fault, and it has been changed")
    kind.add_argument("--repaired", action="store_true", help="the part was repaired: test it from scratch")
    kind.add_argument("--replaced", action="store_true", help="the part was replaced by another one")


def ack_command(options: argparse.Namespace, settings: Config) -> int:
    """Store an operator's acknowledgement and return the exit code."""
    with open_record(settings, to_change=True) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        device = one_device("ack", options.device, known)
        if device is None:
            return USAGE
        now = time.time()
        given = acks.heeded(store.acks(device.uuid), now)
        if mistake := _mistake(options, acks.standing(device, given, now)):
            complain(f"ack: {mistake}")
            return USAGE
        if options.software and (why := software.missing(_case(store, settings, device, known, now))):
            complain(f"ack: --software is refused: {why}")
            return USAGE
        verdict = store.verdict(device.uuid)
        suspicions = [f for f in verdict.findings if f.state is State.SUSPECT or f.acknowledged] if verdict else []
        said = (k for k in (AckKind.REPAIRED, AckKind.REPLACED, AckKind.SOFTWARE) if getattr(options, k))
        kind = next(said, AckKind.ACKNOWLEDGED)
        until = now if options.end else now + options.seconds
        ack = Ack(
            device=device.uuid,
            kind=kind,
            at=now,
            until=until if kind == AckKind.ACKNOWLEDGED else 0.0,
            reason=options.reason.strip(),
            by=os.environ.get("SUDO_USER") or user_name(),
            rules=tuple(dict.fromkeys(f.rule for f in suspicions)) if kind == AckKind.ACKNOWLEDGED else (),
        )
        store.add_ack(ack)
    say(f"{device.name} {device.uuid}: {_effect(ack, device, verdict)}")
    return 0


def _mistake(options: argparse.Namespace, current: Ack | None) -> str:
    """Return a sentence about a mistake in the options, or "". `current`: the acknowledgement in force, or None."""
    if not options.reason.strip():
        return "give the reason with --reason; it is kept as evidence"
    if options.end and current is None:
        return f"{options.device} has no acknowledgement to end"
    if options.seconds > LONGEST:
        return f"--for: at most {LONGEST / 86_400:.0f}d"
    return ""


def _case(store: Store, settings: Config, device: Device, known: Mapping[str, Device], now: float) -> Case:
    """Return the judge's case for a device: stored runs, on all devices, of the probes that failed on this device."""
    given = acks.heeded(store.acks(), now)
    probes = sorted({r.probe for r in store.runs(device.uuid, failed=True) if r.wrong})
    cuts = {uuid: acks.cut(of, [a for a in given if a.device == uuid]) for uuid, of in known.items()}
    runs, counted = {}, {}
    for uuid, cut in cuts.items():
        clean = (fold(r) for probe in probes for r in store.runs(uuid, probe, failed=False, limit=NEWEST))
        runs[uuid] = [r for r in (*store.runs(uuid, failed=True), *clean) if r.started > cut]
        counted[uuid] = [t for t in store.tallies(uuid) if t.first > cut]
    among = node(known, runs, now, counted)
    among = replace(among, stacks=store.stacks(), known={uuid: known_of(store, uuid, cuts) for uuid in known})
    return Case(device=device, node=among, wanted={}, policy=settings.judge, now=now)


def _effect(ack: Ack, device: Device, verdict: Verdict | None) -> str:
    """Return a sentence about what a statement changes; `verdict`: the device's newest verdict, or None without one."""
    if ack.kind == AckKind.REPAIRED:
        return "repaired; earlier failures no longer count. It is unknown until every probe has run on it again"
    if ack.kind == AckKind.SOFTWARE:
        return "software; the wrong results no longer count while other software runs. They stay in its history"
    if ack.kind == AckKind.REPLACED and device.weak_identity:
        return "replaced; earlier results no longer count. It is unknown until every probe has run again"
    if ack.kind == AckKind.REPLACED:
        return "replaced; once it is gone, it is not reported as missing. While it is still found, its record counts"
    if ack.until <= ack.at:
        return "the acknowledgement has ended"
    known = f"acknowledged until {format_time(ack.until)} {time_zone()}"
    if verdict is None or verdict.state is State.HEALTHY:
        # The fleet comparison may accuse a device against which its own node knows nothing.
        muted = "the page of the fleet comparison, and alerts that it is unknown, degraded or stale"
        later = "A suspicion or fault that comes later still alerts"
        return f"{known}, but this node knows no fault of it. Muted until then: {muted}. {later}"
    muted = f"{known}: pages about what is known now are muted"
    return f"{muted}. Suspect is shown as unknown until then; faulty is still shown as faulty"
