"""The command `canaryd characterise`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from pathlib import Path

from canaryd.cli.arguments import USAGE, Commands, add_json, add_wait
from canaryd.cli.check import FAULTS
from canaryd.cli.common import (
    ProgressPrinter,
    complain,
    is_released,
    make_engine,
    one_device,
    open_store,
    refuse_beside_daemon,
    say,
    stopped_by_release,
)
from canaryd.config.settings import Config
from canaryd.judge.phrases import count
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.report.terminal import typed
from canaryd.store.locks import Busy
from canaryd.store.store import Store
from canaryd_lab.characterise import acceptance
from canaryd_lab.characterise.characterisation import Characterisation, NoSuchPart, Options
from canaryd_lab.characterise.conversation import Conversation
from canaryd_lab.characterise.document import Document
from canaryd_lab.characterise.results import Directory, NotOurs, Part, Result, Status

CHARACTERISE_EXIT_STATUS = (
    "exit status: 0 everything was right; 1 a strict result was wrong, an injected fault was missed, or something"
    " broke; 3 parts are left, or nothing could be done; 64 usage or configuration error"
)
BAD = 1
"""Exit status if a result was wrong."""


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("characterise", characterise_command),
        "find out what a new accelerator computes exactly",
        "Find out what a device and its software compute exactly, part by part, and write a page.",
        epilog=CHARACTERISE_EXIT_STATUS,
    )
    command.add_argument("--device", required=True, metavar="DEV", help="the device: uuid, cpu:0 or cuda:3")
    command.add_argument(
        "--minutes", type=minutes, default=10.0, metavar="10", help="how long it may take (default: 10)"
    )
    command.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue in this directory: parts that ended are not repeated"
    )
    command.add_argument(
        "--slice", type=slice_, default=(1, 1), metavar="1/4", help="only every fourth part, beginning with the first"
    )
    command.add_argument(
        "--part", action="append", default=[], metavar="NAME", help="only this part, or those below it; repeatable"
    )
    command.add_argument(
        "--drill",
        choices=(*FAULTS, "blind"),
        default="",
        metavar="FAULT",
        help=f"inject a fault by software ({', '.join(FAULTS)} or blind): exit status 1 is expected",
    )
    add_wait(command)
    command.add_argument(
        "--accept",
        action="store_true",
        help="trust the kinds of tests that were always right: they may accuse a device now (docs/lab.md)",
    )
    add_json(command)


def minutes(text: str) -> float:
    """Return the number of minutes in the text of an option."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes; write for example 10")
    return value


def slice_(text: str) -> tuple[int, int]:
    """Return the two numbers in the text of an option: (1, 4) for "1/4"."""
    found = re.fullmatch(r"([1-9][0-9]{0,2})/([1-9][0-9]{0,2})", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a slice; write for example 1/4, then 2/4")
    return int(found[1]), int(found[2])


class Printer(ProgressPrinter):
    """Shows the progress of the parts of a characterisation, in the same format as the progress of a check."""

    part, done = "environment", 0.0
    """The current part, and the share of all parts that are done."""

    def begin(self, part: Part, number: int, of: int) -> None:
        """Show which part begins: part `number` of `of` parts."""
        self.part, self.done = part.name, number / max(1, of)
        self.moving(self.done, part.name)

    def progress(self, fraction: float, text: str) -> None:
        """Show the worker's current activity."""
        del fraction
        self.moving(self.done, f"{self.part} {text}")

    def ended(self, result: Result) -> None:
        """Show the result of a part."""
        self.clear()
        why = result.detail.strip().splitlines()[-1][:200] if result.status.bad and result.detail.strip() else ""
        seen = f", {len(result.observations):,} observations" if result.status is not Status.NOT_TRIED else ""
        say(
            f"{result.name}: {result.status.value.replace('_', ' ')}{seen} in {result.seconds:.1f} s"
            f"{f': {why}' if why else ''}",
            sys.stderr,
        )


def characterise_command(options: argparse.Namespace, settings: Config) -> int:
    """Characterise one device; return the exit code."""
    if mistake := _mistake(options):
        complain(mistake)
        return USAGE
    begun, store = time.monotonic(), open_store(settings)
    if is_released("characterise", store):
        return exit_code(State.UNKNOWN)
    engine = make_engine(settings, store)
    there = {u: d for u, d in engine.devices.items() if d.computes_here and d.is_reached}
    device = one_device("characterise", options.device, there)
    if device is None:
        complain(*engine.problems)
        return exit_code(State.UNKNOWN) if engine.failing else USAGE
    refuse_beside_daemon(store, [device])
    printer = Printer()
    spent = (time.monotonic() - begun) / 60.0
    wanted = Options(
        minutes=max(0.05, options.minutes - spent),
        slice=options.slice,
        directory=options.resume,
        only=tuple(options.part),
    )
    talk = Conversation(
        engine, device, drill=options.drill, scale=min(4.0, options.minutes * options.slice[1] / 10.0),
        on_progress=printer.progress,
    )  # fmt: skip
    work = Characterisation(talk, wanted, on_part=printer.begin, on_result=printer.ended)
    try:
        with stopped_by_release(engine), engine.locked(device, options.wait, printer.waiting):
            document = work.run()
        accepted = _accept(store, document, work) if options.accept else True
    except Busy as busy:
        complain(f"characterise: {busy}")
        return exit_code(State.UNKNOWN)
    except NoSuchPart as error:
        complain(f"--part {error}")
        return USAGE
    except NotOurs as error:
        complain(f"--resume {options.resume}: {error}; name another directory")
        return USAGE
    except FileExistsError as error:
        complain(f"characterise: {error.args[0]} exists; go on with --resume DIR, or remove it")
        return USAGE
    except OSError as error:
        complain(f"characterise: cannot write {error.filename}: {error.strerror}")
        return USAGE
    except RuntimeError as error:
        complain(f"characterise: no worker answers: {error}", *engine.problems)
        return exit_code(State.UNKNOWN)
    finally:
        printer.clear()
        store.close()
    code = _concluded(document, work, options)
    return code if accepted else code or exit_code(State.UNKNOWN)


def _mistake(options: argparse.Namespace) -> str:
    """Return a sentence on a mistake in the options that shows before a worker starts, or "" if there is none."""
    if options.accept and options.drill:
        return "--accept: a drill shows nothing of the device; leave --drill out"
    try:
        if options.resume:
            Directory(options.resume).compare({"drill": options.drill})
    except NotOurs as error:
        return f"--resume {options.resume}: {error}; name another directory"
    return ""


def _accept(store: Store, document: Document, work: Characterisation) -> bool:
    """Mark the classes of cases that were right as accepted in the store; return whether there was any."""
    if document["verdict"] != "right":
        complain(f"--accept: nothing was accepted, because this characterisation is {document['verdict']}")
        return False
    found = acceptance.records(work.conversation.device, work.directory.results())
    classes = sum(len(met.accepted) for met in found)
    if not classes or not store.set_met(found):
        complain(f"--accept: nothing was accepted: {store.refused or 'no case of a probe was right'}")
        return False
    say(f"{classes:,} classes accepted for {document['device']['model']}; baseline export has them", sys.stderr)
    return True


def _concluded(document: Document, work: Characterisation, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        strict, controls = document["strict"], document["controls"]
        say(
            f"{document['verdict'].upper()}  {work.conversation.device.name}  {count(len(document['parts']), 'part')}:"
            f" {strict['right']:,} strict results right, {strict['wrong']:,} wrong, {strict['raised']:,} errors;"
            f" controls: {controls['failed_as_they_must']:,} failed as they must, {controls['did_not_fail']:,} did not"
        )
        say(f"{work.base}.html")
    if work.left:
        names = ", ".join(p.name for p in work.left[:6]) + (", …" if len(work.left) > 6 else "")
        again = f" --slice {options.slice[0]}/{options.slice[1]}" if options.slice[1] > 1 else ""
        if stopped := work.conversation.engine.stopping:
            complain(f"characterise: stopped: {stopped}")
        complain(f"not done yet: {count(len(work.left), 'part')} ({names}); to continue:")
        # A command stands on one line, whatever its length, so that it can be copied.
        resume = (
            f"canaryd characterise --device {options.device} --resume {shlex.quote(str(work.directory.path))}{again}"
        )
        print(typed(resume), file=sys.stderr, flush=True)
    if document["verdict"] in ("invalid", "wrong", "unclassified", "failed"):
        return BAD
    return exit_code(State.UNKNOWN) if work.left or document["verdict"] == "incomplete" else 0
