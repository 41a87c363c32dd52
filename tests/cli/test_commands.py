"""The command line: lists, configuration, help, and every way to use it wrongly."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys

import jsonschema
import pytest

from canaryd import __version__
from canaryd.cli.common import use_color
from canaryd.cli.main import LAB, MODULES, main, parser
from canaryd.supervisor import series
from tests.command import BUILTIN, ROOT, bare_python, canaryd, configure, in_turn

COMMANDS = ("check", "drill", "run", "canary", "config", "probes", "devices")


@pytest.fixture
def common(tmp_path):
    """A configuration with one light probe, and a state directory."""
    return ("--config", configure(tmp_path, "passes"), "--state-dir", tmp_path / "state")


def commands_of(top):
    """Name → parser of each command."""
    return next(action for action in top._actions if action.dest == "command").choices


# --- Help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command():
    """With a line each, and the exit statuses below."""
    answer = canaryd("--help", COLUMNS="120")
    assert (answer.code, answer.err) == (0, "")
    for command in COMMANDS:
        assert f"\n    {command} " in answer.out
    assert "0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown, 64 usage" in " ".join(answer.out.split())


def test_the_help_of_a_case_says_where_its_name_may_end():
    """As `--case` selects: "float32/dense" selects "float32/dense/square/nn@8x8x8", and "float32/den" nothing."""
    known = commands_of(parser())
    texts = {c: next(a.help for a in known[c]._actions if a.dest == "case") for c in ("check", "baseline")}
    assert "continue with / or @ after it" in texts["check"]
    assert "continue with / after it" in texts["baseline"]


def test_every_command_explains_its_options():
    """Each option has a text of its own, and the two that all commands take are there."""
    known = commands_of(parser())
    answers = in_turn(*((command, "--help") for command in COMMANDS), COLUMNS="120")
    for command, answer in zip(COMMANDS, answers, strict=True):
        assert (answer.code, answer.err) == (0, ""), command
        assert "--config FILE" in answer.out, command
        assert "--state-dir DIR" in answer.out, command
        for action in known[command]._actions:
            assert action.help or action.choices, action
            assert not action.option_strings or action.option_strings[-1] in answer.out


def test_every_command_names_its_exit_statuses():
    """As the list of commands and the README promise."""
    for command, one in commands_of(parser()).items():
        text = one.format_help()
        assert "exit status" in text, command
        assert "64" in text[text.index("exit status") :], command


def test_one_command_is_parsed_without_the_modules_of_the_others():
    """The table names every command of the core, and the module that has it; the lab adds its own."""
    assert {*MODULES, *LAB} == commands_of(parser()).keys()
    for command in (*MODULES, *LAB):
        assert command in commands_of(parser(command))
    found = subprocess.run(
        [sys.executable, "-c", "from canaryd.cli import main; import sys; main.parser('check'); print(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {name for name in found.stdout.split() if name.startswith("canaryd.cli.")} == {
        f"canaryd.cli.{name}" for name in ("main", "arguments", "common", "check")
    }


def test_help_is_a_word_too():
    """As of git and apt: alone, and before a command."""
    (one, other), (short, long) = in_turn(("help",), ("--help",)), in_turn(("help", "ack"), ("ack", "--help"))
    assert (one.code, one.out) == (0, other.out)
    assert (short.code, short.out) == (0, long.out)


def test_version():
    """The package's own."""
    answer = canaryd("--version")
    assert (answer.code, answer.out) == (0, f"canaryd {__version__}\n")


# --- Lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_probes_lists_the_catalogue(tmp_path):
    """Name, what it stresses, and where it comes from."""
    (tmp_path / "empty.yaml").touch()
    answer = canaryd("probes", "--config", tmp_path / "empty.yaml", "--state-dir", tmp_path / "state")
    assert (answer.code, answer.err) == (0, "")
    listed = [line.split()[0] for line in answer.out.splitlines()]
    asked_for = ["model_canary", "vendor_selftest"]  # these run only where the configuration asks for them
    assert sorted([*listed, *asked_for]) == list(BUILTIN)
    order = ["exact_integer", "exact_matmul", "exact_units", "exact_attention", "exact_canary", "exact_endpoint"]
    assert [name for name in listed if name in order] == order
    for line in answer.out.splitlines():
        assert f"(builtin: {ROOT}/probes/{line.split()[0]}.py)" in line


def test_probes_names_the_broken_ones(tmp_path):
    """The others are listed all the same."""
    config = configure(tmp_path, "passes", "raises_at_import")
    answer = canaryd("probes", "--config", config, "--state-dir", tmp_path / "state")
    assert answer.code == 3
    assert answer.out.startswith("passes ")
    assert "raises_at_import.py: ImportError: no module named unobtainium" in answer.err


def test_devices_are_listed_with_their_identity(common):
    """As JSON, the processor at least; present or not."""
    answer = canaryd("devices", *common)
    assert answer.code == 0
    (cpu,) = [device for device in answer.document if device["backend"] == "cpu"]
    assert cpu["uuid"].startswith("CPU-")
    assert cpu["present"] is True
    assert cpu["model"]
    assert isinstance(cpu["weak_identity"], bool)


# --- Configuration ---------------------------------------------------------------------------------------------------


def test_config_check_says_ok(common):
    """And which file it read."""
    answer = canaryd("config", "check", *common)
    assert (answer.code, answer.out, answer.err) == (0, f"{common[1]}: ok\n", "")


def test_config_check_says_everything_at_once(tmp_path):
    """Each mistake on a line with its place; exit 64."""
    config = tmp_path / "canaryd.yaml"
    config.write_text("listen: nowhere\njudge: {stale_after: 1yr}\nprobes: {exact_matmul: {periode: 1h}}\n")
    answer = canaryd("config", "check", "--config", config)
    assert (answer.code, answer.out) == (64, "")
    lines = answer.err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["canaryd"] * 3
    for number, words in ((1, "listen"), (2, "judge.stale_after"), (3, 'did you mean "period"')):
        assert any(f"{config}:{number}: " in line and words in line for line in lines), lines


def test_config_check_says_what_a_run_would_go_without(tmp_path):
    """Probes of no file, drop-ins that cannot be loaded, missing files: each on a line, all at once, exit 3."""
    gone = str(tmp_path / "gone")
    config = configure(
        tmp_path,
        *("passes", "raises_at_import", "wrong_name"),
        each={"exact_matmull": {"period": "1h"}},
        endpoints={"main": {"url": "http://127.0.0.1:1/v1", "key_file": gone, "ca_file": gone}},
        telemetry={"kernel_log": gone},
        worker={"python": bare_python(), "env": {}},
    )
    answer = canaryd("config", "check", "--config", config, "--state-dir", tmp_path / "state")
    assert (answer.code, answer.out) == (3, "")
    lines = answer.err.splitlines()
    assert all(line.startswith(f"canaryd: {config}: ") for line in lines)
    for said in (
        f"endpoints.main.key_file: {gone} does not exist",
        f"endpoints.main.ca_file: {gone} does not exist",
        f"telemetry.kernel_log: {gone} does not exist",
        "raises_at_import.py: ImportError: no module named unobtainium",
        "wrong_name.py: its SPEC.name is",
        'probes.exact_matmull: no probe of that name was found; did you mean "exact_matmul"?',
    ):
        assert sum(said in line for line in lines) == 1, (said, lines)
    assert len(lines) == 6
    assert not (tmp_path / "state").exists()


def test_config_check_tells_live_that_torch_takes_long_and_once_that_it_is_lost(tmp_path, monkeypatch, capsys):
    """A drop-in makes a worker import torch: as in a check, one line while it is waited for, and one for the cause."""
    monkeypatch.setattr(series, "PATIENCE", 0.5)
    (tmp_path / "torch.py").write_text("import os\nimport time\ntime.sleep(2)\nos.abort()\n")
    worker = {"python": bare_python(), "env": {"PYTHONPATH": str(tmp_path)}}
    config = configure(tmp_path, "passes", "mismatches", "raises_at_import", worker=worker)
    assert main(["config", "check", "--config", str(config), "--state-dir", str(tmp_path / "state")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    waiting, lost = err.splitlines()
    assert waiting == f"canaryd: waiting for torch of worker.python ({bare_python()}) to import, for at most 120 s"
    assert lost.startswith(f"canaryd: {config}: torch of worker.python ({bare_python()}) does not import: ")
    assert "SIGABRT" in lost


def test_config_example_is_a_configuration(tmp_path):
    """It can be written to a file and used as it is."""
    answer = canaryd("config", "example")
    assert answer.code == 0
    config = tmp_path / "canaryd.yaml"
    config.write_text(answer.out)
    assert canaryd("config", "check", "--config", config).code == 0


def test_config_schema_is_a_json_schema():
    """Of the draft that it names."""
    answer = canaryd("config", "schema")
    assert answer.code == 0
    jsonschema.Draft202012Validator.check_schema(answer.document)
    assert not jsonschema.Draft202012Validator(answer.document).is_valid({"listn": ":1"})


# --- Wrong use -------------------------------------------------------------------------------------------------------


def test_a_database_of_a_newer_canaryd_is_left_alone(common):
    """Exit 64 with the way out; the file is not touched."""
    state = common[-1]
    state.mkdir()
    with sqlite3.connect(state / "canaryd.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = (state / "canaryd.db").read_bytes()
    answers = in_turn(*((command, *common) for command in ("check", "probes", "devices")))
    for answer in (*answers, canaryd("run", "--listen", "127.0.0.1:0", *common)):
        assert (answer.code, answer.out) == (64, "")
        assert "was written by a newer canaryd" in answer.err
        assert "upgrade canaryd, or choose another --state-dir" in answer.err
    assert (state / "canaryd.db").read_bytes() == before


def test_a_damaged_database_is_set_aside_and_the_check_goes_on(common):
    """Said on standard error and in the report."""
    state = common[-1]
    state.mkdir()
    (state / "canaryd.db").write_bytes(b"this is not a database" * 1000)
    answer = canaryd("check", "--json", *common)
    assert answer.code == 3, "what was found before is not known, so nothing is healthy"
    assert {f["rule"] for d in answer.document["devices"] for f in d["findings"] if f["severity"] == "unknown"} == {
        "history-lost"
    }
    assert "started a new, empty database" in answer.err
    assert any("started a new, empty database" in problem for problem in answer.document["problems"])
    assert len(list(state.glob("canaryd.db.corrupt-*"))) == 1


def test_a_case_that_does_not_exist_is_a_mistake_and_no_verdict(tmp_path):
    """One sentence of each probe names its nearest cases; nothing is on record, however long it was to last."""
    config = configure(tmp_path, "picks", "picks:picks_other")
    common = ("--config", config, "--state-dir", tmp_path / "state")
    answer = canaryd("check", "--json", "--case", "int64/summ", "--for", "1h", *common)
    assert (answer.code, answer.out) == (64, "")
    said = [f"canaryd: check: {probe}: no case matches int64/summ; it has" for probe in ("picks", "picks_other")]
    assert [line.partition(" e.g. ")[0] for line in answer.err.splitlines()] == said
    with contextlib.closing(sqlite3.connect(tmp_path / "state/canaryd.db")) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (0,)


def test_a_format_that_the_device_lacks_is_no_mistake_and_not_healthy(tmp_path):
    """The answer names the format that was asked for and the device's reason, and no other format."""
    pytest.importorskip("torch")
    config = configure(tmp_path, each={"exact_matmul": {"enabled": True}}, worker={"python": sys.executable})
    common = ("--config", config, "--state-dir", tmp_path / "state")
    asked = "float8_e4m3fn-mxfp8>bfloat16"
    answer = canaryd(
        "check", "--device", "cpu:0", "--level", "quick", "--probe", "exact_matmul", "--case", asked, *common
    )
    said = " ".join(answer.out.split())
    assert answer.code == 3, answer
    assert f"supports no {asked}: " in said
    assert "products with scales of blocks are for NVIDIA GPUs alone" in said


def test_a_case_is_judged_by_the_probes_that_have_it(tmp_path):
    """The other probes have nothing to say of it."""
    config = configure(tmp_path, "picks", "picks:picks_other")
    common = ("--config", config, "--state-dir", tmp_path / "state")
    answer = canaryd("check", "--json", "--case", "int64/sum", *common)
    assert (answer.code, answer.document["state"]) == (0, "healthy"), answer


def test_nothing_is_reported_of_a_device_without_a_record(tmp_path):
    """A processor that is there, and a state directory that is mistyped: an empty dossier would look like evidence."""
    (tmp_path / "empty.yaml").touch()
    pytest.importorskip("torch")
    common = ("--config", tmp_path / "empty.yaml", "--state-dir", tmp_path / "state")
    answer = canaryd("report", "cpu:0", "-o", tmp_path / "case", *common)
    assert (answer.code, answer.out, (tmp_path / "case").exists()) == (64, "", False)
    assert 'report: no device "cpu:0"; nothing is recorded yet' in answer.err


def test_a_skipped_probe_is_named_where_it_can_be_disabled(tmp_path):
    """The advice can be typed as it stands."""
    config = configure(tmp_path, "skips")
    answer = canaryd("check", "-v", "--config", config, "--state-dir", tmp_path / "state")
    assert "disable the probe: probes.skips.enabled: false" in " ".join(answer.out.split())


def test_a_locale_without_unicode_costs_no_report(tmp_path):
    """What cannot be written is escaped."""
    (tmp_path / "probes.d").mkdir()
    config = configure(tmp_path, "passes")
    probe = tmp_path / "probes.d/passes.py"
    probe.write_text(probe.read_text().replace("not on this device", "nicht für dieses Gerät …"))
    answer = canaryd("check", "-v", "--config", config, "--state-dir", tmp_path / "state", PYTHONIOENCODING="ascii")
    assert answer.code == 0
    assert "nicht f\\xfcr dieses Ger\\xe4t \\u2026" in answer.out


def test_the_configuration_can_be_named_by_the_environment(tmp_path):
    """For containers; an option wins over it."""
    config = configure(tmp_path, "passes")
    answer = canaryd("config", "check", CANARYD_CONFIG=str(config))
    assert (answer.code, answer.out) == (0, f"{config}: ok\n")
    (tmp_path / "other.yaml").write_text("{}")
    answer = canaryd("config", "check", "--config", tmp_path / "other.yaml", CANARYD_CONFIG=str(config))
    assert answer.out == f"{tmp_path}/other.yaml: ok\n"


def test_json_is_ascii_safe(common):
    """A document can be piped through anything."""
    document = canaryd("check", "--json", *common).out
    assert document.isascii()
    assert json.loads(document)["schema"] == "canaryd.check/1"


def test_a_defect_of_ours_is_unknown_and_never_degraded(tmp_path):
    """An uncaught exception would exit with 1, which means degraded: a broken installation exits with 3."""
    package = tmp_path / "canaryd"
    shutil.copytree(ROOT / "canaryd", package)
    (package / "store" / "store.py").write_text("raise RuntimeError('half an upgrade')\n")
    command = [sys.executable, "-m", "canaryd", "check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "half an upgrade" in done.stderr
    assert "the state of this machine is unknown" in done.stderr


@pytest.mark.parametrize("columns", [60, *(pytest.param(n, marks=pytest.mark.slow) for n in (80, 120))])
def test_text_fits_the_terminal(tmp_path, columns):
    """Sentences are broken where the terminal ends; a command to type is not broken."""
    config = configure(tmp_path, "skips", "mismatches")
    common = ("--config", config, "--state-dir", tmp_path / "state")
    commands = (("check",), ("check", "-v"), ("status",), ("status", "-v"), ("history", "-v"))
    answers = in_turn(*((*command, *common) for command in commands), COLUMNS=str(columns))
    for command, answer in zip(commands, answers, strict=True):
        lines = [line for line in answer.out.splitlines() if not line.lstrip().startswith("canaryd ")]
        lines = [line for line in lines if str(tmp_path) not in line]  # of a command within a sentence, to be copied
        assert len(lines) > 5
        # A history has a table of 80 columns at least.
        assert max(map(len, lines)) <= (80 if command[0] == "history" and columns < 80 else columns), command


def test_help_fits_80_columns():
    """That of every command."""
    commands = [("--help",), *((name, "--help") for name in commands_of(parser()))]
    for command, answer in zip(commands, in_turn(*commands, COLUMNS="80"), strict=True):
        assert answer.code == 0, command
        assert max(map(len, answer.out.splitlines())) <= 80, command


def test_details_are_shown_on_request(tmp_path):
    """What was skipped and not tested is counted or named in one line; -v lists each with its reason."""
    common = ("--config", configure(tmp_path, "passes"), "--state-dir", tmp_path / "state")
    short, long = in_turn(("check", *common), ("check", "-v", *common))
    brief, full = short.out.replace("\n", " "), long.out  # the line is folded where it is long
    assert re.search(r" \d+ things were not tested: \d+ probes skipped, [^:]*\(-v lists them\) verdict: ", brief)
    assert "  skipped exact_matmul: disabled in the configuration\n" in full
    assert len(re.findall("^not tested: ", full, re.MULTILINE)) > 3


def test_progress_says_why_a_run_was_lost(tmp_path):
    """Not the last line of the stack that the dying worker printed."""
    config = configure(tmp_path, "crashes", "raises")
    answer = canaryd("check", "--config", config, "--state-dir", tmp_path / "state", "--level", "quick")
    told = {line.split()[1].rstrip(":"): line.partition(" s: ")[2] for line in answer.err.splitlines()}
    assert told["crashes"] == "the worker was killed by SIGSEGV"
    assert told["raises"] == "ZeroDivisionError: the moon is in the wrong phase"


def test_colour_is_for_terminals(monkeypatch):
    """NO_COLOR forbids it (no-color.org)."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color()
    monkeypatch.setenv("TERM", "dumb")  # as of an editor's shell, which shows the codes
    assert not use_color()
    monkeypatch.delenv("TERM")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color()
