"""`canaryd ack`: an operator acknowledges a fault, a repair or a replacement."""

from __future__ import annotations

import argparse
import getpass
import os
import time

from canaryd.cli.arguments import USAGE, Commands, duration
from canaryd.cli.common import complain, one_device, open_store
from canaryd.config.settings import Config
from canaryd.formatting import format_time
from canaryd.judge import acks
from canaryd.judge.verdict import exit_code
from canaryd.model import Ack, Device, State

DEFAULT = 7 * 86_400.0
"""Seconds for which a fault is acknowledged unless another time is given."""
LONGEST = 400 * 86_400.0
"""Seconds for which a fault may be acknowledged: as long as failures are kept."""


def add_parsers(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the parser of this command."""
    command = commands.add_parser(
        "ack",
        parents=[common],
        help="acknowledge a known fault, a repair or a replacement",
        description="Acknowledge a known fault, a repair or a replacement. A faulty device stays faulty.",
    )
    command.add_argument("device", metavar="DEV", help="uuid or name")
    command.add_argument("--reason", default="", metavar="TEXT", help="why, e.g. the ticket; kept as evidence")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--for",
        dest="seconds",
        type=duration,
        default=DEFAULT,
        metavar="7d",
        help="mute a suspicion for this long (default: 7d)",
    )
    kind.add_argument("--end", action="store_true", help="end an acknowledgement early")
    kind.add_argument("--repaired", action="store_true", help="the part was repaired: test it from scratch")
    kind.add_argument("--replaced", action="store_true", help="the part was replaced by another one")
    command.set_defaults(function=ack_command)


def ack_command(options: argparse.Namespace, settings: Config) -> int:
    """Store an operator's acknowledgement; return the exit code."""
    with open_store(settings) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        device = one_device("ack", options.device, known)
        if device is None:
            return USAGE
        now = time.time()
        if mistake := _mistake(options, acks.standing(acks.heeded(store.acks(device.uuid), now), now)):
            complain(f"ack: {mistake}")
            return USAGE
        verdict = store.verdict(device.uuid)
        suspicions = [f for f in verdict.findings if f.state is State.SUSPECT or f.acknowledged] if verdict else []
        kind = "repaired" if options.repaired else "replaced" if options.replaced else "acknowledged"
        until = now if options.end else now + options.seconds
        ack = Ack(
            device=device.uuid,
            kind=kind,
            at=now,
            until=until if kind == "acknowledged" else 0.0,
            reason=options.reason.strip(),
            by=os.environ.get("SUDO_USER") or getpass.getuser(),
            rules=tuple(dict.fromkeys(f.rule for f in suspicions)) if kind == "acknowledged" else (),
        )
        if not (store.writable and store.add_ack(ack)):
            complain(f"ack: not stored: {store.problem or 'cannot write to the store'}")
            return exit_code(State.UNKNOWN)
    print(f"{device.name} {device.uuid}: {_effect(ack, device)}")
    return 0


def _mistake(options: argparse.Namespace, current: Ack | None) -> str:
    """Return what is wrong with the options, as a sentence; `current` is the acknowledgement in force."""
    if not options.reason.strip():
        return "give the reason with --reason; it is kept as evidence"
    if options.end and current is None:
        return f"{options.device} has no acknowledgement to end"
    if options.seconds > LONGEST:
        return f"--for: at most {LONGEST / 86_400:.0f}d; repair or replace a part with a longer-lasting fault"
    return ""


def _effect(ack: Ack, device: Device) -> str:
    """Return what an acknowledgement changes, as a sentence."""
    if ack.kind == "repaired":
        return "repaired; earlier failures no longer count. It is unknown until every probe has run on it again"
    if ack.kind == "replaced" and device.weak_identity:
        return "replaced; earlier results no longer count. It is unknown until every probe has run again"
    if ack.kind == "replaced":
        return "replaced; its record still counts while it is found, and it is not missed once it is gone"
    if ack.until <= ack.at:
        return "the acknowledgement has ended"
    return f"acknowledged until {format_time(ack.until)}; until then suspect counts as unknown, faulty stays faulty"
