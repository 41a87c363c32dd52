"""The command line: the only module that parses arguments, prints and exits."""

from __future__ import annotations

import argparse
import faulthandler
import getpass
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from canaryd import (
    __version__,
    acks,
    baselines,
    check,
    comparison,
    config,
    dossier,
    gate,
    history,
    judge,
    notify,
    privileges,
    report,
    scores,
    status,
    web_config,
)
from canaryd.config import Config, ConfigError
from canaryd.engine import Engine, Progress, choose
from canaryd.model import INTENSITIES, Ack, Cause, Device, Outcome, State, to_json
from canaryd.probe import LEVELS
from canaryd.store import Busy, Retention, Store, StoreTooNew
from canaryd.supervise import INSTRUCTION_SETS
from canaryd.watch import RELEASE_NOTE, RELEASED_NOTE, released_until
from canaryd.wording import columns, moment

USAGE = 64
"""Exit status of a usage or configuration error (EX_USAGE of sysexits.h)."""
ANSWER_PATIENCE = 3600.0
"""Seconds that a capture or a comparison may take: a large model is read from a disk."""
RELEASE_PATIENCE = 30.0
"""Seconds that `canaryd release` waits for the daemon's answer."""
HISTORY = 30 * 86_400.0
"""Seconds back that `canaryd history` looks unless another time is given."""
ACK = 7 * 86_400.0
"""Seconds for which a fault is acknowledged unless another time is given."""
LONGEST_ACK = 400 * 86_400.0
"""Seconds for which a fault may be acknowledged: as long as failures are kept."""
FAULTS = ("flip", "zero", "swap", "nan", "stuck", "consistent")
"""Faults that `canaryd drill` can inject; canaryd/worker/inject.py says what each does."""
COMPARED = "exit status: 0 compared, no fault; 2 a fault; 3 not comparable, or it could not be done; 64 usage error"
GATED = "exit status where enforcement acts: 0 pass, 2 fail, 3 unknown; where it only logs: 0; 64 usage error"
EPILOG = "exit status: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown, 64 usage or configuration error"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    common = _Parser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration (default: /etc/canaryd/canaryd.yaml)"
    )
    common.add_argument("--state-dir", type=Path, metavar="DIR", help="where runs and verdicts are kept")
    top = _Parser(prog="canaryd", description="Tells whether it was the machine.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"canaryd {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("check", parents=[common], epilog=EPILOG, help="test every device now, one verdict each")
    one.add_argument("--level", choices=LEVELS, default="standard", help="how hard to look (default: standard)")
    one.add_argument("--for", dest="seconds", type=_duration, default=0.0, metavar="30m", help="repeat for so long")
    one.add_argument("--json", action="store_true", help="print one JSON object (docs/check-json.md)")
    one.add_argument("--report", type=Path, metavar="FILE", help="write that JSON object to a file as well")
    one.add_argument(
        "--textfile", type=Path, metavar="FILE", help="write metrics for node_exporter as well (docs/remote.md)"
    )
    _selection(one)
    one.add_argument("--case", action="append", default=[], metavar="CASE", help="only this case or prefix; repeatable")
    one.add_argument("--seed", type=_seed, metavar="N", help="repeat a run with its seed")
    sets = [name for name in INSTRUCTION_SETS if name]
    one.add_argument("--instruction-set", choices=sets, default="", help="CPU: only this execution path")

    one.add_argument("--intensity", choices=INTENSITIES, default="", help="ask as a retest does (docs/retest.md)")

    drill = commands.add_parser(
        "drill", parents=[common], epilog=EPILOG, help="inject a software fault and watch the alarm arrive"
    )
    drill.add_argument("--fault", choices=FAULTS, default="flip", help="what to break (default: flip)")
    drill.add_argument("--json", action="store_true", help="print one JSON object")
    _selection(drill)

    daemon = commands.add_parser("run", parents=[common], help="the daemon: test on a schedule and serve metrics")
    daemon.add_argument("--listen", type=_listen, metavar="HOST:PORT", help="where /metrics is served")

    settings = commands.add_parser("config", parents=[common], help="check, or print an example or the schema")
    settings.add_argument("what", choices=("check", "example", "schema"))

    one = commands.add_parser("status", parents=[common], epilog=EPILOG, help="what the store knows; touches no device")
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser(
        "gate", parents=[common], epilog=GATED, help="may this node take work? For drains, taints and prologs"
    )
    one.add_argument(
        "--on",
        action="append",
        choices=[s.value for s in gate.ACTS_ON],
        metavar="STATE",
        help="fail on this state and worse: degraded, suspect, faulty (default); unknown fails only if named",
    )
    one.add_argument(
        "--cause",
        action="append",
        choices=[c.value for c in Cause if c is not Cause.NONE],
        metavar="CAUSE",
        help="fail for this cause; repeatable (default: hardware, environment, undetermined)",
    )
    one.add_argument(
        "--device", action="append", default=[], metavar="DEV", help="only these: uuid, cuda:3, a backend, or 0,1"
    )
    one.add_argument(
        "--max-age", type=_duration, default=0.0, metavar="2h", help="a device whose newest test is older is unknown"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser(
        "release", parents=[common], help="let go of every device for a while, as for a driver upgrade"
    )
    one.add_argument("--for", dest="seconds", type=_duration, default=600.0, metavar="10m", help="how long")
    one.add_argument("--end", action="store_true", help="end a release early")

    one = commands.add_parser("capture", parents=[common], help="write what a device computes, layer by layer")
    one.add_argument(
        "--device", default="", metavar="DEV", help="uuid, cpu:0 or cuda:3 (default: the only one, or the CPU)"
    )
    one.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")
    one.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face directory (default: the built-in canary)"
    )
    one.add_argument(
        "--dtype", default="float32", metavar="TYPE", help="float64, float32 (default), bfloat16 or float16"
    )
    one.add_argument("--prompt", action="append", default=[], metavar="NAME", help="only this prompt; repeatable")
    one.add_argument("--operators", action="store_true", help="every operator's result, not only each layer's")
    one.add_argument("--decode", action="store_true", help="decode token by token instead of scoring in one pass")
    one.add_argument("--drill", default="", metavar="PLACE", help="corrupt one element there, e.g. 2.down")
    one.add_argument("--wait", type=_duration, default=600.0, metavar="10m", help="for a device that is being tested")

    one = commands.add_parser(
        "compare",
        parents=[common],
        epilog=COMPARED,
        help="where two captures part, or whether two files of scores differ",
    )
    one.add_argument("a", type=Path, metavar="A", help="a capture, or a result of lm-eval, evalscope or opencompass")
    one.add_argument("b", type=Path, metavar="B")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--report", type=Path, metavar="FILE", help="write a page with a plot as well (captures only)")

    one = commands.add_parser("baseline", parents=[common], help="what is known of recorded cases, and what is right")
    one.add_argument("what", choices=("list", "show", "accept", "pin", "unpin", "export", "import"))
    one.add_argument(
        "device",
        nargs="?",
        default="",
        metavar="DEV",
        help="uuid or name; default: every one. import: the file that export wrote",
    )
    one.add_argument("--probe", default="", metavar="NAME", help="only this probe")
    one.add_argument("--case", default="", metavar="CASE", help="only this case, or those below it")
    one.add_argument(
        "--reason", default="", metavar="TEXT", help="accept, pin: why these bits are right; kept with them"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser(
        "report", parents=[common], help="the dossier of a device: page, JSON, evidence, one archive"
    )
    one.add_argument("device", metavar="DEV", help="uuid or name")
    one.add_argument(
        "-o", "--out", type=Path, default=Path(), metavar="DIR", help="where it is written (default: here)"
    )
    one.add_argument("--redact", action="store_true", help="pseudonyms for hosts, serials, uuids, paths and addresses")
    one.add_argument("--drill", action="store_true", help="report the drills of the last hour instead")
    one.add_argument("--json", action="store_true", help="print dossier.json")

    one = commands.add_parser("history", parents=[common], help="what happened to devices, and how they changed")
    one.add_argument("device", nargs="?", default="", metavar="DEV", help="uuid or name; default: every one")
    one.add_argument("--since", type=_duration, default=HISTORY, metavar="30d", help="how far back (default: 30d)")
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser("fleet", parents=[common], epilog=EPILOG, help="what a Prometheus knows of all nodes")
    one.add_argument("--prometheus", required=True, metavar="URL", help="its address, e.g. http://prometheus:9090")
    one.add_argument("--token-file", type=Path, metavar="FILE", help="a bearer token, or a line that begins with Basic")
    one.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates (PEM) that vouch for the server")
    one.add_argument("--timeout", type=_duration, default=60.0, metavar="60s", help="for all questions together")
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser("ack", parents=[common], help="say that a fault is known, or a part repaired or replaced")
    one.add_argument("device", metavar="DEV", help="uuid or name")
    one.add_argument("--reason", default="", metavar="TEXT", help="why, and where it is followed up; kept as evidence")
    kind = one.add_mutually_exclusive_group()
    kind.add_argument("--for", dest="seconds", type=_duration, default=ACK, metavar="7d", help="how long it is known")
    kind.add_argument("--end", action="store_true", help="end an acknowledgement early")
    kind.add_argument("--repaired", action="store_true", help="the part was repaired: it begins anew")
    kind.add_argument("--replaced", action="store_true", help="the part was taken out for another")

    commands.add_parser("probes", parents=[common], help="list the catalogue: what each probe stresses")
    commands.add_parser("devices", parents=[common], help="list devices with their identity")
    return top


def _selection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", action="append", default=[], metavar="DEV", help="uuid, cpu:0, cuda:3 or a backend"
    )
    command.add_argument("--probe", action="append", default=[], metavar="NAME", help="only this probe; repeatable")
    command.add_argument(
        "--wait", type=_duration, default=600.0, metavar="10m", help="for a device that is being tested"
    )


def _duration(text: str) -> float:
    try:
        return config.parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; write a whole number from 0 to 2**53 - 1")
    return int(text)


def _listen(text: str) -> tuple[str, int]:
    try:
        return config.parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    privileges.withdraw()
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without "…" must cost no more than that character
    try:
        outcome = _command(options)
        if sys.stdout is not None:  # a daemon may be started without it
            sys.stdout.flush()  # here, where a reader that went away is expected
    except ConfigError as error:
        _complain(*error.problems)
        return USAGE
    except StoreTooNew as error:
        _complain(str(error))
        return USAGE
    except BrokenPipeError:
        # The reader went away (| head): nothing to tell it. Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return outcome


def _command(options: argparse.Namespace) -> int:
    if options.command == "config":
        return _config(options)
    settings = replace(config.load(options.config), **_overrides(options))
    if settings.state_dir.exists() and not settings.state_dir.is_dir():
        _complain(f"{settings.state_dir}: is no directory; name one for --state-dir or state_dir")
        return USAGE
    commands = {
        "check": _check,
        "drill": _check,
        "run": _run,
        "status": _status,
        "gate": _gate,
        "release": _release,
        "capture": _capture,
        "compare": _compare,
        "baseline": _baseline,
        "report": _report,
        "history": _history,
        "fleet": _fleet,
        "ack": _ack,
        "probes": _probes,
        "devices": _devices,
    }
    return commands[options.command](options, settings)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives, which win over the file."""
    given = {"state_dir": options.state_dir.absolute()} if options.state_dir else {}
    return given | ({"listen": options.listen} if getattr(options, "listen", None) else {})


def _complain(*lines: str) -> None:
    for line in lines:
        print(f"canaryd: {line}", file=sys.stderr)


def _may_write(option: str, path: Path) -> bool:
    """Whether a file can be written, as far as can be told beforehand; complain where not."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        _complain(f"{option} {path}: cannot be written; name a file in a directory that exists and is yours")
        return False
    return True


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _complain(f"{option} {path}: not written: {error.strerror}")


def _config(options: argparse.Namespace) -> int:
    if options.what == "example":
        print(config.example(), end="")
    elif options.what == "schema":
        print(json.dumps(config.json_schema(), indent=2))
    else:
        loaded = config.load(options.config)
        if loaded.web_config:
            web_config.WebConfig(loaded.web_config)
        print(f"{loaded.file or 'no configuration file: defaults'}: ok")
    return 0


def _open(settings: Config) -> Store:
    return Store.open(
        settings.state_dir,
        max_bytes=settings.store.max_size,
        keep=Retention(successes=settings.store.keep_successes, failures=settings.store.keep_failures),
    )


# -- check and drill --------------------------------------------------------------------------------------------------


class _Teller:
    """Progress on standard error: one moving line on a terminal, a plain line per finished probe elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        name = f"{progress.device.name} {progress.probe}"
        if progress.instruction_set:
            name += f" [{progress.instruction_set}]"
        if progress.done is not None:
            done = progress.done
            wrong = f", {len(done.wrong)} comparisons WRONG" if done.wrong else ""
            why = f": {done.detail.splitlines()[-1]}" if done.detail and done.outcome.value != "completed" else ""
            confirming = " (confirmation)" if done.confirms else ""
            looked = f"{done.trials:,} results" if done.trials or not done.recordings else ""
            if done.recordings:
                looked += f"{', ' * bool(looked)}{len(done.recordings):,} recordings"
            self._line(f"{name}{confirming}: {done.outcome.value}, {looked} in {done.seconds:.1f} s{wrong}{why}")
        else:
            self.moving(progress.fraction, f"{name} {progress.text}")

    def moving(self, fraction: float, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            filled = round(20 * fraction)
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {text}"
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)

    def waiting(self, holder: str) -> None:
        self._line(f"waiting: {holder}")

    def wipe(self) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr)

    def _line(self, text: str) -> None:
        self.wipe()
        print(text, file=sys.stderr, flush=True)


def _check(options: argparse.Namespace, settings: Config) -> int:
    into: Path | None = getattr(options, "report", None)
    prom: Path | None = getattr(options, "textfile", None)
    if into and not _may_write("--report", into):
        return USAGE
    if prom and not _may_write("--textfile", prom):
        return USAGE
    store = _open(settings)
    _complain(*store.problems)
    if (until := released_until(store, time.time())) and status.daemon_runs(store):
        left = until - time.time()
        _complain(f"devices are released for another {left:.0f} s and are not touched: wait, or canaryd release --end")
        return judge.exit_code(State.UNKNOWN)
    teller = _Teller()
    engine = Engine(settings, store, listener=teller)
    _stop_on_signals(engine)
    engine.discover()
    devices, missing = choose(engine.devices, options.device)  # one that has vanished is tried, and so unknown
    unknown = [p for p in options.probe if p not in engine.entries]
    if options.command == "drill" and not options.device:
        devices = [d for d in devices if not d.is_endpoint]
    complaints = [f"--device {m}: no such device here; there are {_names(engine.devices)}" for m in missing]
    complaints += [f"--probe {p}: no such probe; there are {', '.join(sorted(engine.entries))}" for p in unknown]
    if complaints and not engine.stopping:
        _complain(*complaints, *engine.problems)
        return USAGE
    asked = check.Options(
        level="quick" if options.command == "drill" else options.level,
        devices=tuple(options.device),
        probes=tuple(options.probe) or (_drilled(devices) if options.command == "drill" else ()),
        cases=tuple(getattr(options, "case", ())),
        seed=getattr(options, "seed", None),
        instruction_set=getattr(options, "instruction_set", ""),
        intensity=getattr(options, "intensity", ""),
        seconds=getattr(options, "seconds", 0.0),
        drill=options.fault if options.command == "drill" else "",
        wait=options.wait,
    )
    engine.only, engine.cases, engine.intensity = frozenset(asked.probes), asked.cases, asked.intensity
    result = check.run(engine, asked, devices, teller.waiting)
    store.close()
    document = report.as_json(result)
    if into:
        _write("--report", into, json.dumps(document, indent=2) + "\n")
    if prom:
        from canaryd import textfile  # noqa: PLC0415  a check need not pay for the exposition

        try:
            textfile.write(prom, textfile.render(result, judge.exit_code(result.state)))
        except OSError as error:
            _complain(f"--textfile {prom}: not written: {error.strerror}")
    print(json.dumps(document, indent=2) if options.json else report.as_text(result))
    if options.command == "drill" and not check.alarmed(result):
        _complain(
            f"drill: the fault {options.fault!r} raised no alarm: it met no result, or it is within what the probe"
            " allows; take --probe exact_matmul, or another --fault"
        )
        return judge.exit_code(State.UNKNOWN)
    return judge.exit_code(result.state)


def _drilled(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the probes that a drill runs unless others are named."""
    served = [d.is_endpoint for d in devices]
    return ("exact_matmul",) * (not all(served)) + ("endpoint_canary",) * any(served)


def _names(devices: dict[str, Any]) -> str:
    return ", ".join(d.name for d in devices.values()) or "none"


def _stop_on_signals(engine: Engine) -> None:
    def stop(number: int, frame: Any) -> None:  # noqa: ARG001  the signature is Python's
        # In a thread of its own: the engine's lock may be held by the code that this signal interrupted.
        threading.Thread(target=engine.stop, args=(f"interrupted by {signal.Signals(number).name}",)).start()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


# -- the daemon, and lists --------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, settings: Config) -> int:
    from canaryd.daemon import Daemon  # noqa: PLC0415  a check need not pay for the scheduler and the exposition

    manager = notify.take(os.environ)
    if sys.stderr is not None:  # a daemon may be started without it
        faulthandler.enable()  # a watchdog ends a daemon that hangs by SIGABRT: its log then says where each thread was
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    store = _open(settings)
    for problem in store.problems:
        logging.getLogger("canaryd").warning("%s", problem)
    try:
        return Daemon(settings, options.config, store, _overrides(options), manager=manager).run()
    except OSError as error:
        _complain(error.strerror or str(error))
        return USAGE


def _engine(settings: Config) -> Engine:
    engine = Engine(settings, _open(settings))
    _stop_on_signals(engine)
    engine.discover()
    return engine


def _status(options: argparse.Namespace, settings: Config) -> int:
    with _open(settings) as store:
        found = status.gather(store, settings)
    print(json.dumps(report.status_json(found), indent=2) if options.json else report.status_text(found))
    return judge.exit_code(found.state)


def _gate(options: argparse.Namespace, settings: Config) -> int:
    words = tuple(word for given in options.device for word in given.split(",") if word)
    if options.device and not words:
        _complain("--device: names none; leave it out to ask about every device")
        return USAGE
    question = gate.Question(
        on=tuple(State(s) for s in options.on or [State.FAULTY.value]),
        causes=tuple(Cause(c) for c in options.cause or [c.value for c in gate.CAUSES]),
        devices=words,
        max_age=options.max_age,
    )
    answer, silence = gate.ask(settings, question), gate.silenced(settings, os.environ)
    if options.json:
        print(json.dumps(gate.as_json(answer, question, silence), indent=2))
    else:
        print(gate.as_text(answer, question, silence))
    return gate.exit_code(answer, silence)


def _release(options: argparse.Namespace, settings: Config) -> int:
    """Ask the daemon to let go of every device, and return when it has."""
    with _open(settings) as store:
        if not status.daemon_runs(store):
            print(f"no daemon runs on {settings.state_dir}: nothing of canaryd holds a device between two commands")
            return 0
        until = 0.0 if options.end else time.time() + options.seconds
        if not store.set_note(RELEASE_NOTE, str(until)):
            _complain(f"the daemon could not be asked: {store.problem}")
            return judge.exit_code(State.UNKNOWN)
        wanted = "" if options.end else str(until)
        deadline = time.monotonic() + RELEASE_PATIENCE
        while store.note(RELEASED_NOTE) != wanted:
            if time.monotonic() > deadline:
                _complain(f"the daemon has not answered within {RELEASE_PATIENCE:.0f} s: look at its log")
                return judge.exit_code(State.UNKNOWN)
            time.sleep(0.1)
    print(
        "devices are tested again" if options.end else f"released for {options.seconds:.0f} s: canaryd holds no device"
    )
    return 0


# -- captures, scores, baselines --------------------------------------------------------------------------------------


def _capture(options: argparse.Namespace, settings: Config) -> int:
    if not _may_write("--out", options.out):
        return USAGE
    engine = _engine(settings)
    there = {u: d for u, d in engine.devices.items() if not d.is_endpoint and engine.reached(d)}
    found, missing = choose(there, [options.device] if options.device else [])
    if len(found) > 1 and not options.device:
        found = [d for d in found if d.backend != "cpu"] if len(found) == 2 else []
    if missing or len(found) != 1:
        _complain(f"--device {options.device or 'is not given'}: name one of {_names(there)}", *engine.problems)
        return USAGE
    arguments = {
        "device": to_json(found[0]),
        "out": str(options.out.absolute()),
        "model": str(options.model.absolute()) if options.model else "",
        "dtype": options.dtype,
        "prompts": options.prompt,
        "operators": options.operators,
        "forced": not options.decode,
        "drill": options.drill,
    }
    answer = _ask(engine, found[0], "capture", arguments, options.wait)
    if answer is None:
        return judge.exit_code(State.UNKNOWN)
    print(
        f"{options.out}: {answer['tensors']:,} tensors of {found[0].name}, {answer['bytes']:,} bytes,"
        f" in {answer['seconds']:.1f} s"
    )
    return 0


def _ask(engine: Engine, device: Device, module: str, arguments: dict[str, Any], wait: float) -> dict[str, Any] | None:
    """Return what a module of the worker answers; None, with a complaint, where it does not."""
    teller = _Teller()
    try:
        outcome, answer, detail = engine.answer(
            device,
            module,
            arguments,
            timeout=ANSWER_PATIENCE,
            wait=wait,
            on_wait=teller.waiting,
            on_progress=lambda fraction, text: teller.moving(fraction, f"{module} {text}"),
        )
    except Busy as busy:
        outcome, answer, detail = Outcome.ERRORED, {}, str(busy)
    if outcome is Outcome.COMPLETED:
        teller.wipe()
        return answer
    teller.wipe()
    _complain(f"{module}: {outcome.value}: {detail or 'no reason given'}")
    return None


def _compare(options: argparse.Namespace, settings: Config) -> int:
    """Compare captures in a worker, which has torch; files of scores right here."""
    if options.report and not _may_write("--report", options.report):
        return USAGE
    unread = [path for path in (options.a, options.b) if not path.exists()]
    if unread:
        _complain(*(f"{path}: no such file" for path in unread))
        return USAGE
    captures = [_is_capture(path) for path in (options.a, options.b)]
    if captures.count(True) == 1:
        other = options.b if captures[0] else options.a
        _complain(f"{other}: is no capture, and the other one is: give two captures, or two results of an evaluation")
        return USAGE
    if not captures[0]:
        return _compare_scores(options)
    engine = _engine(settings)
    cpu = next((d for d in engine.devices.values() if d.backend == "cpu"), None)
    if cpu is None:
        _complain("compare: worker.python cannot be started, and it does the arithmetic", *engine.problems)
        return judge.exit_code(State.UNKNOWN)
    arguments = {"a": str(options.a.absolute()), "b": str(options.b.absolute())}
    answer = _ask(engine, cpu, "compare", arguments, wait=600.0)
    if answer is None:
        return judge.exit_code(State.UNKNOWN)
    if options.report:
        _write("--report", options.report, comparison.page(answer))
    print(json.dumps(answer, indent=2) if options.json else comparison.table(answer))
    return {"equal": 0, "rounding": 0, "fault": judge.exit_code(State.SUSPECT)}.get(
        answer["verdict"]["kind"], judge.exit_code(State.UNKNOWN)
    )


def _is_capture(path: Path) -> bool:
    """Whether a file begins like a safetensors file: the length of a header, and an object."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and head[:1] != b"{"


def _compare_scores(options: argparse.Namespace) -> int:
    if options.report:
        _complain("--report: is for captures; of scores there is the table, and --json")
        return USAGE
    try:
        result = scores.compare(scores.load(options.a), scores.load(options.b))
    except scores.ScoreError as error:
        _complain(str(error))
        return USAGE
    print(json.dumps(to_json(result), indent=2) if options.json else scores.text(result))
    return 0 if result.comparable else judge.exit_code(State.UNKNOWN)


def _baseline(options: argparse.Namespace, settings: Config) -> int:
    selection = baselines.Selection(device=options.device, probe=options.probe, case=options.case)
    why = options.reason.strip()
    if options.what in ("accept", "pin") and not (options.device and why):
        _complain(f"baseline {options.what}: name the device, and say why with --reason; both are kept as evidence")
        return USAGE
    if options.what == "import":
        return _import_baselines(options, settings)
    with _open(settings) as store:
        named = {b.device: b.device for b in store.baselines()} | {
            r.device.uuid: r.device.name for r in store.devices()
        }
        if options.device and options.device not in {*named, *named.values()}:
            known = ", ".join(sorted({*named.values()})) or "none"
            _complain(f"baseline {options.what} {options.device}: no such device here; there are {known}")
            return USAGE
        if options.what in ("accept", "pin", "unpin"):
            if not store.writable:
                _complain(f"baseline {options.what}: {store.problem or 'the store cannot be written'}")
                return judge.exit_code(State.UNKNOWN)
            return _accept(store, selection, why) if options.what == "accept" else _pin(store, selection, why)
        found = baselines.chosen(store, selection)
    if options.json or options.what == "export":
        print(json.dumps(baselines.document(found), indent=2))
    else:
        print((baselines.table if options.what == "list" else baselines.described)(found))
    return 0


def _accept(store: Store, selection: baselines.Selection, why: str) -> int:
    taken = baselines.accepted(store, selection, why)
    for device, one, count in taken:
        what = f"{count} vector{'s' * (count > 1)} known from now on" if count else "its new chain is accepted"
        print(f"{device.name} {one.probe} {one.case}: {what}")
    if taken:
        print("judged anew at the next run")
    else:
        print("nothing to accept: no unknown vector of a baseline that is not pinned matches")
    return 0


def _pin(store: Store, selection: baselines.Selection, why: str) -> int:
    for one in (changed := baselines.pinned(store, selection, why)):
        what = "pinned: no vector is added, and it is kept for good" if why else "no longer pinned"
        print(f"{one.device.name} {one.baseline.probe} {one.baseline.case}: {what}")
    if not changed:
        found = [one.baseline for one in baselines.chosen(store, selection)]
        learning = sum(not b.complete for b in found)
        what = f"{learning} of {len(found)} are still being learnt, and cannot be pinned yet" if learning else ""
        print(f"nothing changed: {what or 'no baseline matches that is not so already'} (canaryd baseline list)")
        return 0 if found and not learning else judge.exit_code(State.UNKNOWN)
    return 0


def _import_baselines(options: argparse.Namespace, settings: Config) -> int:
    if not options.device:
        _complain("baseline import: name the file that canaryd baseline export wrote, or - for standard input")
        return USAGE
    try:
        text = sys.stdin.read() if options.device == "-" else Path(options.device).read_text(encoding="utf-8")
        with _open(settings) as store:
            if not store.writable:
                _complain(f"baseline import: {store.problem or 'the store cannot be written'}")
                return judge.exit_code(State.UNKNOWN)
            fresh, known = baselines.imported(store, text)
    except (OSError, ValueError) as error:
        _complain(f"baseline import {options.device or '-'}: {error}")
        return USAGE
    print(f"{fresh} baselines taken in, {known} were known already{'; judged anew at the next run' if fresh else ''}")
    return 0


def _report(options: argparse.Namespace, settings: Config) -> int:
    """Write the dossier; a worker makes the operands of what failed once more, where one can be started."""
    engine = _engine(settings)
    known = {r.device.uuid: r.device for r in engine.store.devices()}  # gone ones too
    found, _ = choose(known, [options.device])
    if len(found) != 1:
        _complain(f"report {options.device}: names {len(found)} devices; there are {_names(known)}")
        return USAGE
    flags = {"redact": options.redact, "drill": options.drill}
    try:
        made = dossier.write(engine.store, settings, engine, found[0], options.out, now=time.time(), **flags)
    except dossier.DossierError as error:
        _complain(str(error))
        return judge.exit_code(State.UNKNOWN)
    print((made / "dossier.json").read_text(encoding="utf-8").rstrip() if options.json else made)
    return 0


def _history(options: argparse.Namespace, settings: Config) -> int:
    now = time.time()
    with _open(settings) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        found, missing = choose(known, [options.device] if options.device else [])
        if missing or (options.device and len(found) != 1):
            _complain(f"history {options.device}: names {len(found)} devices; there are {_names(known)}")
            return USAGE
        days = {uuid: store.days(uuid) for uuid in known}
        of = found[0].uuid if options.device else None
        told = history.gather(store, settings, of, now - options.since, now, days)
    if options.json:
        print(json.dumps(history.as_json(told), indent=2))
    else:
        print(history.as_text(told, columns(), color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


def _fleet(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    from canaryd import fleet  # noqa: PLC0415  no other command asks another machine

    files = {"token_file": options.token_file, "ca_file": options.ca_file}
    try:
        asked = fleet.Prometheus(options.prometheus, patience=options.timeout, **files)
    except (OSError, ValueError) as error:
        _complain(f"fleet: {error}")
        return USAGE
    try:
        found = fleet.gather(asked)
    except fleet.FleetError as error:
        _complain(f"fleet: {options.prometheus}: {error}")
        return judge.exit_code(State.UNKNOWN)
    print(json.dumps(fleet.as_json(found), indent=2) if options.json else fleet.as_text(found, columns()))
    return judge.exit_code(found.state)


def _ack(options: argparse.Namespace, settings: Config) -> int:
    """Keep an operator's word about a device."""
    with _open(settings) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        found, _ = choose(known, [options.device])
        kind = "repaired" if options.repaired else "replaced" if options.replaced else "acknowledged"
        if len(found) != 1:
            _complain(f"ack {options.device}: names {len(found)} devices; there are {_names(known)}")
            return USAGE
        if not options.reason.strip():
            _complain("ack: say why with --reason; it is kept as evidence")
            return USAGE
        now = time.time()
        if options.end and acks.standing(acks.heeded(store.acks(found[0].uuid), now), now) is None:
            _complain(f"ack {options.device}: no acknowledgement stands that could be ended")
            return USAGE
        if options.seconds > LONGEST_ACK:
            _complain(f"ack --for: at most {LONGEST_ACK / 86_400:.0f}d; what is known for longer should be repaired")
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
            _complain(f"ack: not kept: {store.problem or 'the store cannot be written'}")
            return judge.exit_code(State.UNKNOWN)
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


def _probes(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    engine = _engine(settings)
    for name, entry in sorted(engine.entries.items(), key=lambda item: item[1].spec.order):
        print(f"{name:<20} {entry.spec.summary}  ({entry.file.source}: {entry.file.path})")
    _complain(*engine.problems)
    return 0 if not engine.problems else judge.exit_code(State.UNKNOWN)


def _devices(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    engine = _engine(settings)
    found = [to_json(d) | {"present": u in engine.present} for u, d in engine.devices.items()]
    print(json.dumps(found, indent=2))
    _complain(*engine.problems)
    return 0 if found else judge.exit_code(State.UNKNOWN)


if __name__ == "__main__":
    sys.exit(main())
