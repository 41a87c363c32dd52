"""Wrong inputs to the command line and the configuration: one sentence each, with what to do, and nothing is made."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.cli.test_reading import AS_ANOTHER, NOBODY, held, place, recorded  # noqa: F401  a fixture
from tests.command import ROOT, bare_python, canaryd, catalogue, configure, environment, in_turn


class Wrong(NamedTuple):
    """What is typed, and what has to be answered."""

    words: tuple[str, ...]
    """"@NAME" is a file of the test's directory, "@config" and "@state" a good configuration and a record."""
    said: tuple[str, ...]
    """Parts of the one sentence: where and what was given, what was wanted or is to be done."""
    code: int = 64


RECORD = ("--config", "@config", "--state-dir", "@state")
OWN = ("--config", "@config", "--state-dir", "@own")
URL = "endpoints:\n  main:\n    url: http://127.0.0.1:1\n"
FILES: dict[str, str | bytes] = {
    "file": "x",
    "empty": "",
    "binary": bytes(range(128, 256)) * 8,
    "object.json": "{}",
    "tab.yaml": "judge:\n\tstale_after: 30d\n",
    "twice.yaml": "judge:\n  stale_after: 3h\n  stale_after: 2h\n",
    "key.yaml": "judge:\n  stale_aftr: 3h\n",
    "own.yaml": "probes:\n  memory_sweep:\n    mebibytes: 8\n",
    "every.yaml": "probes:\n  memory_sweep:\n    every: 1h\n",
    "sweep.yaml": "probes:\n  memory_sweep:\n    settings:\n      mebibyte: 8\n",
    "none.yaml": "probes:\n  exact_integer:\n    settings: {x: 1}\n",
    "section.yaml": "jugde:\n  stale_after: 3h\n",
    "unindented.yaml": "schedule:\nlevel: quick\n",
    "secret.yaml": URL + "    key_file: sk-12345\n",
    "type.yaml": "devices:\n  expected: many\n",
    "level.yaml": "schedule:\n  level: quik\n",
    "listen.yaml": "listen: 19469\n",
    "relative.yaml": "state_dir: canaryd\n",
    "duration.yaml": "judge:\n  stale_after: 30\n",
    "no-url.yaml": "endpoints:\n  main:\n    model: x\n",
    "bad-url.yaml": "endpoints:\n  main:\n    url: localhost\n",
    "exact.yaml": URL + "    exact: @directory\n",
    "no-exact.yaml": URL + "    exact: @absent\n",
    "no-key.yaml": URL + "    key_file: @absent\n",
    "probe.yaml": "probes:\n  exact_matmull:\n    period: 1h\n",
    "no-drop-ins.yaml": "probes:\n  directories: [@absent]\n",
    "drop-in.yaml": "worker:\n  python: @python\nprobes:\n  directories: [@drop-ins]\n",
    "command.yaml": "worker:\n  command: [dokcer, exec]\n",
    "text.yaml": "worker:\n  python: @file\n",
    "python.yaml": "worker:\n  python: @absent\n",
    "web.yaml": "web_config: /etc/canaryd/web.yml\n",
    "tls.yaml": "tls:\n  cert_file: @absent\n  key_file: @absent\n",
    "half-tls.yaml": "tls:\n  client_ca_file: @absent\n",
}
"""Name → content; "@NAME" is a path of the test's directory."""


def config(name: str, *said: str, code: int = 64) -> Wrong:
    return Wrong(("config", "check", "--config", f"@{name}"), said, code)


TABLE = (
    Wrong(("chekc",), ("'chekc'", "choose from", "check")),
    Wrong(("status", "--jsn"), ("unrecognized arguments: --jsn", "canaryd --help")),
    Wrong(("check", "--level", "quik"), ("--level", "'quik'", "choose from", "standard")),
    Wrong(("check", "--for", "1yr"), ("--for", '"1yr" is not a duration', 'write e.g. "15m"')),
    Wrong(("check", "--wait", "30"), ("--wait", '"30" of what?', "write 30d for days")),
    Wrong(("check", "--seed", "1e3"), ("--seed", "'1e3' is not a seed", "write a whole number")),
    Wrong(("check", "--instruction-set", "avx9"), ("--instruction-set", "'avx9'", "choose from", "avx2")),
    Wrong(("status", "--since", "3"), ("unrecognized arguments: --since 3; type",)),
    Wrong(("drill", "--fault", "flop"), ("--fault", "'flop'", "choose from", "flip")),
    Wrong(("check", "--for=-5m"), ("--for", '"-5m" is not a positive duration', 'write e.g. "15m"')),
    Wrong(("check", "quick"), ("unrecognized arguments: quick; did you mean --level quick?\n",)),
    Wrong(("config", "check", "x.yaml"), ("unrecognized arguments: x.yaml; did you mean --config x.yaml?\n",)),
    Wrong(("status", "cpu:0"), ("unrecognized arguments: cpu:0; type",)),
    Wrong(("pack", "verify", "@absent"), ("pack verify: @absent: cannot be read", "name a readable file")),
    Wrong(("report", "CPU-1", "-o", "@file/x", *RECORD), ("@file/x: cannot be made", "name another directory with -o")),
    Wrong(("status", "--state-dir", "@damaged"), ("canaryd.db: file is not a database; canaryd check --st",), code=3),
    Wrong(("history", "--since", "soon"), ("--since", '"soon" is not a duration')),
    Wrong(("release", "--for", "x"), ("--for", '"x" is not a duration')),
    Wrong(("report",), ("required: DEV", "canaryd report --help")),
    Wrong(("gate", "--on", "faluty"), ("--on", "'faluty'", "choose from", "faulty")),
    Wrong(("baseline", "lst"), ("'lst'", "choose from", "list")),
    Wrong(("config", "exmple"), ("'exmple'", "choose from", "example")),
    Wrong(("run", "--listen", "19469"), ("--listen", '"19469" is not HOST:PORT', 'write e.g. "127.0.0.1:19469"')),
    Wrong(("run", "--listen", "127.0.0.1:99999"), ("--listen", '"99999" is not a port')),
    Wrong(("run", "--listen", "@port", *RECORD), ("Address already in use", "choose another port")),
    Wrong(("run", "--listen", "192.0.2.1:9", *RECORD), ("192.0.2.1:9", "choose an address of this machine")),
    Wrong(("check", "--device", "cpu0", *RECORD), ("--device cpu0", "this host has cpu:0")),
    Wrong(
        ("check", "--probe", "pases", *RECORD),
        ('--probe pases: no such probe; did you mean "passes"?\n',),
    ),
    Wrong(
        ("check", "--probe", "unlike", *RECORD),
        ("--probe unlike: no such probe; to list them, type canaryd probes --config",),
    ),
    Wrong(("drill", "--device", "cuda:9", *RECORD), ("--device cuda:9: no such device", "this host has")),
    Wrong(("check", "--report", "@absent/x", *RECORD), ("--report", "cannot be written", "name a file in a directory")),
    Wrong(("check", "--textfile", "@directory", *RECORD), ("--textfile", "cannot be written", "name a file")),
    Wrong(("status", "--state-dir", ""), ("--state-dir", "names no directory", "canaryd status --help")),
    Wrong(("status", "--state-dir", "@file"), ("@file: not a directory", "give a directory with --state-dir")),
    Wrong(("history", "cuda:3", *RECORD), ('history: no device "cuda:3"', "this host has")),
    Wrong(("ack", "cuda:3", "--reason", "known", *RECORD), ('ack: no device "cuda:3"', "this host has")),
    Wrong(("report", "cuda:3", "-o", "@case", *RECORD), ('report: no device "cuda:3"', "this host has")),
    Wrong(("status", "--state-dir", "@absent", "--config", "@absent.yaml"), ("@absent.yaml: no such file", "name an")),
    Wrong(("compare", "@absent", "@object.json"), ("@absent: no such file",)),
    Wrong(("compare", "@binary", "@binary"), ("@binary: not UTF-8 text", "give a result file")),
    Wrong(("compare", "@empty", "@empty"), ("@empty: invalid JSON at line 1",)),
    Wrong(("compare", "@directory", "@directory"), ("@directory: no result file", "wanted results_*.json")),
    Wrong(("compare", "@object.json", "@object.json"), ("@object.json: unknown format", "wanted lm-eval")),
    Wrong(("baseline", "import", "@absent", *RECORD), ("import @absent: No such file", "name the file")),
    Wrong(("baseline", "import", "@binary", *RECORD), ("import @binary: not text", "canaryd baseline export wrote")),
    Wrong(("baseline", "import", "@empty", *RECORD), ("import @empty: not JSON", "canaryd baseline export wrote")),
    Wrong(("baseline", "import", "@directory", *RECORD), ("import @directory: Is a directory", "name the file")),
    Wrong(("baseline", "import", "@object.json", *RECORD), ("import @object.json: no baselines", "wanted an object")),
    Wrong(("canary", "export", "@file", *RECORD), ("@file: not a directory", "name a new one")),
    Wrong(("canary", "export", "@new", "--like", "@binary", *RECORD), ("--like @binary: not a JSON object", "name a")),
    Wrong(("characterise", "--device", "cpu:0", "--part", "widht", *OWN), ("--part widht", "choose from")),
    Wrong(("capture", "-o", "@new", "--dtype", "int8"), ("--dtype", "'int8'", "choose from", "float32")),
    Wrong(
        ("capture", "--exact", "-o", "@new", "--device", "", *OWN), ('capture: no single device ""; name one of cpu:0',)
    ),
    Wrong(("--json", "status"), ("unrecognized arguments: --json; type",)),
    config("absent.yaml", "@absent.yaml: no such file", "name an existing file"),
    config("directory", "@directory: is a directory", "name a YAML file"),
    config("binary", "@binary:1: byte 0x80 is not UTF-8", "save the file as UTF-8"),
    config("tab.yaml", "@tab.yaml:2: cannot read this YAML", "indent with spaces"),
    config("twice.yaml", "@twice.yaml:3: judge.stale_after: given twice, on lines 2 and 3", "keep one"),
    config("key.yaml", "@key.yaml:2: judge.stale_aftr: unknown setting", 'did you mean "stale_after"?'),
    config("section.yaml", "@section.yaml:1: jugde: unknown setting", 'did you mean "judge"?'),
    config("unindented.yaml", "@unindented.yaml:2: level: unknown setting", "indent it below schedule"),
    config("secret.yaml", "endpoints.main.key_file: wanted the absolute path of a file", "what is there is not shown"),
    config("type.yaml", '@type.yaml:2: devices.expected: "many" is text', "wanted a whole number"),
    config("level.yaml", '@level.yaml:2: schedule.level: "quik" is not a level', "write one of quick, standard, deep"),
    config("listen.yaml", '@listen.yaml:1: listen: "19469" is not HOST:PORT', "write e.g."),
    config("relative.yaml", 'state_dir: "canaryd" is not an absolute path', "write e.g."),
    config("duration.yaml", '@duration.yaml:2: judge.stale_after: "30" of what?', "write 30d for days"),
    config("no-url.yaml", "@no-url.yaml:2: endpoints.main: url is missing", "write e.g."),
    config("bad-url.yaml", 'endpoints.main.url: "localhost" is not the address of an API', "write e.g."),
    config("exact.yaml", "endpoints.main.exact: @directory holds no expected.json", "canaryd canary export", code=3),
    config("no-exact.yaml", "endpoints.main.exact: @absent does not exist", "create it, or correct", code=3),
    config("no-key.yaml", "endpoints.main.key_file: @absent does not exist", "create it, or correct", code=3),
    config("probe.yaml", "probes.exact_matmull: no probe of that name", 'did you mean "exact_matmul"?', code=3),
    config("own.yaml", "@own.yaml:3: probes.memory_sweep.mebibytes: unknown setting", "under settings the probe's own"),
    config("every.yaml", "@every.yaml:3: probes.memory_sweep.every: unknown setting; known settings: enabled"),
    config(
        "sweep.yaml",
        'probes.memory_sweep.settings.mebibyte: no such setting; did you mean "mebibytes"?',
        code=3,
    ),
    config("none.yaml", "probes.exact_integer.settings.x: no such setting; exact_integer has none", code=3),
    config("no-drop-ins.yaml", "@absent: there is no such directory", "correct probes.directories", code=3),
    config("drop-in.yaml", "raises_at_import.py", code=3),
    config("python.yaml", "worker.python: @absent cannot be run", "name another one"),
    config("text.yaml", "worker.python: @file cannot be run", "name another one"),
    config("command.yaml", "worker.command: dokcer cannot be run here", "name a program that can", code=3),
    config("web.yaml", ":1: web_config: no setting any more", "under tls", "let a proxy ask for passwords"),
    config("tls.yaml", "tls.key_file: OpenSSL cannot use @absent", "no such file", "name a certificate and its key"),
    config("half-tls.yaml", "TLS needs both tls.cert_file and tls.key_file", "name both"),
)
MAY_WRITE = {"capture", "check", "drill", "run", "characterise"}
"""Commands that may make their record before they know of a mistake, unless the words alone show it."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The files of the table, a good configuration and a record."""
    directory = tmp_path_factory.mktemp("wrong")
    (directory / "directory").mkdir()
    (directory / "damaged").mkdir()
    (directory / "damaged/canaryd.db").write_bytes(bytes(range(256)) * 64)
    catalogue(directory / "drop-ins", "raises_at_import")
    for name, content in FILES.items():
        path = directory / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(spelled(content.replace("@python", str(bare_python())), directory))
    configure(directory, "passes").rename(directory / "config")
    recorded(directory / "state")
    return directory


def spelled(text: str, directory: Path) -> str:
    """Return a text of the table with its paths."""
    return re.sub(r"@(?=[a-z])", f"{directory}/", text)


@pytest.fixture(scope="module")
def answers(directory):
    """What each row of the table was answered, and whether the directory stayed as it was."""
    found = {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        typed = [[spelled(port if w == "@port" else w, directory) for w in wrong.words] for wrong in TABLE]
        before = held(directory)
        reading = [
            n for n, wrong in enumerate(TABLE) if wrong.words[0] not in MAY_WRITE or "--config" not in wrong.words
        ]
        found |= dict(zip(reading, in_turn(*(typed[n] for n in reading)), strict=True))
        unchanged = held(directory) == before
        others = [n for n in range(len(TABLE)) if n not in found and typed[n][0] != "run"]
        found |= dict(zip(others, in_turn(*(typed[n] for n in others)), strict=True))
        found |= {n: canaryd(*typed[n]) for n in range(len(TABLE)) if n not in found}
    return found, unchanged


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[" ".join(wrong.words[:4]) for wrong in TABLE])
def test_a_wrong_input_is_one_clear_sentence(directory, answers, number):
    """Where, what was given, what was wanted, what to do; the right exit status, and nothing on standard output."""
    wrong, answer = TABLE[number], answers[0][number]
    assert (answer.code, answer.out) == (wrong.code, ""), answer
    told = answer.err.splitlines()
    # A missing torch may be why a device or a probe is missing, so the message names torch too.
    told = [line for line in told if "cannot import torch" not in line]
    assert len(told) == 1 or (wrong.words[0] == "compare" and len(set(told)) == 1), told
    assert told[0].startswith("canaryd")
    for part in wrong.said:
        assert spelled(part, directory) in f"{told[0]}\n", told


def test_commands_that_read_make_nothing_of_a_wrong_input(answers):
    """No file is made, changed or removed; there are more than forty rows."""
    assert answers[1]
    assert len(TABLE) > 40


def test_a_state_directory_that_does_not_exist_is_named(directory):
    """Not to be taken for a node that was never tested."""
    (answer,) = in_turn(("status", "--state-dir", directory / "absent"))
    assert answer.code == 3
    assert f"no device has been tested yet: {directory}/absent does not exist" in " ".join(answer.out.split())


@AS_ANOTHER
def test_a_file_that_this_user_may_not_read(place):  # noqa: F811  the fixture
    """A configuration: as whom, and what to do."""
    path = place / "closed.yaml"
    path.write_text("judge:\n  stale_after: 3h\n")
    path.chmod(0o600)
    (answer,) = in_turn(("config", "check", "--config", path), user=NOBODY)
    assert (answer.code, answer.out) == (64, "")
    assert re.fullmatch(rf"canaryd: {path}: cannot read it.*; make it readable or name another file\n", answer.err)
    assert [p.name for p in place.iterdir()] == ["closed.yaml"]


@AS_ANOTHER
@pytest.mark.parametrize("written", [("check", "--report"), ("check", "--textfile"), ("capture", "--exact", "--out")])
def test_a_file_behind_a_closed_directory_cannot_be_written(place, written):  # noqa: F811  the fixture
    """Where even its name cannot be looked up."""
    (place / "closed").mkdir(mode=0o700)
    (answer,) = in_turn((*written, place / "closed/x", "--state-dir", place / "state"), user=NOBODY)
    told = f"canaryd: {written[-1]} {place}/closed/x: cannot be written; name a file in a directory that exists and is"
    assert (answer.code, answer.out, answer.err) == (64, "", f"{told} yours\n")


@pytest.mark.parametrize(
    "written", [("check", "--textfile"), ("capture", "--model", ".", "--out"), ("capture", "--exact", "--out")]
)
def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path, written):
    """`--textfile /dev/null`, typed as root, must not make /dev/null a file for every program of this machine."""
    os.mkfifo(tmp_path / "pipe")
    answer = canaryd(*written, tmp_path / "pipe", "--state-dir", tmp_path / "state")
    told = f"canaryd: {written[-1]} {tmp_path}/pipe: cannot be written; name a file in a directory that exists and is"
    assert (answer.code, answer.out, answer.err) == (64, "", f"{told} yours\n")
    assert [p.name for p in tmp_path.iterdir() if p.is_fifo()] == ["pipe"]


def test_a_working_directory_that_is_gone_is_said(tmp_path):
    """As after an upgrade that replaced it: a path from / still works, another one has no meaning."""
    line = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && {sys.executable} -m canaryd status"
    for state, code, told in (
        (tmp_path / "state", 3, ""),
        ("state", 64, "canaryd: the working directory does not exist: change to another one, or name paths from /\n"),
    ):
        argv = ["bash", "-c", f"{line} --state-dir {state}"]
        done = subprocess.run(argv, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, told)


@AS_ANOTHER
def test_what_this_user_may_not_read_is_not_compared(place):  # noqa: F811  the fixture
    """Behind a closed directory, and closed itself; each file is named."""
    (place / "closed").mkdir(mode=0o700)
    (place / "mine").write_text("{}")
    (place / "mine").chmod(0o600)
    (answer,) = in_turn(("compare", place / "closed/a", place / "mine"), user=NOBODY)
    why = "cannot be read: Permission denied; name a readable file"
    told = "".join(f"canaryd: {place}/{name}: {why}\n" for name in ("closed/a", "mine"))
    assert (answer.code, answer.out, answer.err) == (64, "", told)


@pytest.mark.parametrize("command", ["capture", "pack"])
def test_a_command_of_the_lab_that_is_not_installed_says_what_to_install(tmp_path, command):
    """One line and 64, by an interpreter that has PyYAML alone."""
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)
    paths = f"import sys; sys.path += [{str(ROOT)!r}, {str(tmp_path)!r}]"
    code = f"{paths}; from canaryd.cli.main import main; sys.exit(main())"
    argv = [sys.executable, "-S", "-c", code, command, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done
    assert done.stderr == f'canaryd: "canaryd {command}" is part of the lab; install it: pip install "canaryd[lab]"\n'
