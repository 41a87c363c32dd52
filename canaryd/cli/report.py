"""`canaryd report`: the dossier of one device for a vendor case."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from canaryd.action import handover, machine
from canaryd.action.providers import PROVIDERS
from canaryd.cli.arguments import USAGE, Commands
from canaryd.cli.common import complain, make_engine, one_device, open_record, say
from canaryd.config.settings import Config
from canaryd.dossier import write
from canaryd.dossier.document import DossierError, OutputError
from canaryd.dossier.gather import gather
from canaryd.judge.verdict import exit_code
from canaryd.model import Device, State
from canaryd.store.store import Store


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("report", report_command),
        "write the report on a device for its vendor",
        "Write the report on a device for its vendor: a page, JSON and the evidence, in one archive.",
        epilog="exit status: 0 written, 3 the record cannot be read, or has nothing to report (--for: no confirmed "
        "fault of the hardware), 64 usage or configuration error, or DIR cannot be written",
    )
    command.add_argument("device", metavar="DEV", help="uuid or name")
    command.add_argument(
        "-o", "--out", type=Path, default=Path(), metavar="DIR", help="directory to write it to (default: this one)"
    )
    command.add_argument(
        "--redact", action="store_true", help="replace host names, serials, uuids, paths and addresses by pseudonyms"
    )
    command.add_argument(
        "--drill", action="store_true", help="report the last drill, and those of the hour before it, instead"
    )
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print dossier.json instead of the path")
    shown.add_argument(
        *("--for",), dest="provider", choices=tuple(PROVIDERS), help="print what this provider takes; sends nothing"
    )


def report_command(options: argparse.Namespace, settings: Config) -> int:
    """Write the dossier, print its path, and return the exit code.

    A worker recomputes the operands of the failures, if one can be started.
    """
    with open_record(settings) as store:
        recorded = {r.device.uuid for r in store.devices()}  # those that are gone too; nothing is known of others
        engine = make_engine(settings, store)
        known = {r.device.uuid: r.device for r in store.devices() if r.device.uuid in recorded}
        device = one_device("report", options.device, known)
        if device is None:
            return USAGE
        flags = {"redact": options.redact, "drill": options.drill}
        try:
            if why := _refused(options, store, settings, device):
                complain(f"report --for {options.provider}: {why}")
                return USAGE if options.redact or options.drill else exit_code(State.UNKNOWN)
            made = write.write(store, settings, engine, device, options.out, now=time.time(), **flags)
        except DossierError as error:
            complain(str(error))
            return USAGE if isinstance(error, OutputError) else exit_code(State.UNKNOWN)
    document = (made / "dossier.json").read_text(encoding="utf-8").rstrip()
    shown = _form(options.provider, document, made) if options.provider else document if options.json else made
    print(shown, flush=True)
    say(f"open:   {made / 'dossier.html'}", sys.stderr)
    say(f"attach: {made.with_name(f'{made.name}.tar.gz')}", sys.stderr)
    return 0


def _refused(options: argparse.Namespace, store: Store, settings: Config, device: Device) -> str:
    if not options.provider:
        return ""
    if options.redact or options.drill:
        return "leave out --redact and --drill: a provider needs the real names of a real fault"
    provider, document = PROVIDERS[options.provider], gather(store, settings, device, now=time.time())
    return handover.refusal(provider.title, document, suspicion=provider.suspicion, physical=provider.physical)


def _form(name: str, document: str, made: Path) -> str:
    provider, here = PROVIDERS[name], machine.read(Path("/"), os.environ)
    case = handover.Handover(document=json.loads(document), place=str(made.absolute()), machine=here)
    return handover.text(provider.title, case, provider.fill(case))
