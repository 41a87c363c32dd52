"""`canaryd ack`: an operator acknowledges a fault, a repair or a replacement."""

from __future__ import annotations

import argparse
import getpass
import os
import time

from canaryd.cli.arguments import USAGE
from canaryd.cli.common import complain, device_names, open_store
from canaryd.config.settings import Config
from canaryd.engine.engine import choose
from canaryd.formatting import moment
from canaryd.judge import acks
from canaryd.judge.verdict import exit_code
from canaryd.model import Ack, State

LONGEST_ACK = 400 * 86_400.0
"""Seconds for which a fault may be acknowledged: as long as failures are kept."""


def ack_command(options: argparse.Namespace, settings: Config) -> int:
    """Keep an operator's word about a device."""
    with open_store(settings) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        found, _ = choose(known, [options.device])
        kind = "repaired" if options.repaired else "replaced" if options.replaced else "acknowledged"
        if len(found) != 1:
            complain(f"ack {options.device}: names {len(found)} devices; there are {device_names(known)}")
            return USAGE
        if not options.reason.strip():
            complain("ack: say why with --reason; it is kept as evidence")
            return USAGE
        now = time.time()
        if options.end and acks.standing(acks.heeded(store.acks(found[0].uuid), now), now) is None:
            complain(f"ack {options.device}: no acknowledgement stands that could be ended")
            return USAGE
        if options.seconds > LONGEST_ACK:
            complain(f"ack --for: at most {LONGEST_ACK / 86_400:.0f}d; what is known for longer should be repaired")
            return USAGE
        until = (now if options.end else now + options.seconds) if kind == "acknowledged" else 0.0
        who = os.environ.get("SUDO_USER") or getpass.getuser()
        verdict = store.verdict(found[0].uuid)
        doubts = [f for f in verdict.findings if f.state is State.SUSPECT or f.acknowledged] if verdict else []
        word = Ack(
            device=found[0].uuid,
            kind=kind,
            at=now,
            until=until,
            reason=options.reason.strip(),
            by=who,
            rules=tuple(dict.fromkeys(f.rule for f in doubts)) if kind == "acknowledged" else (),
        )
        if not (store.writable and store.add_ack(word)):
            complain(f"ack: not kept: {store.problem or 'the store cannot be written'}")
            return exit_code(State.UNKNOWN)
    said = {
        "acknowledged": "the acknowledgement has ended"
        if options.end
        else f"known until {moment(until)}: suspect by what was seen so far is unknown until then, faulty stays faulty",
        "repaired": "what it did before is history; it is unknown until every probe has run on it again",
        "replaced": "what was recorded under this name is history; it is unknown until every probe has run again"
        if found[0].weak_identity
        else "its record is kept and stands while it is still found; once it is gone it is not waited for",
    }
    print(f"{found[0].name} {found[0].uuid}: {said[kind]}")
    return 0
