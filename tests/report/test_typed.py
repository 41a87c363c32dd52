"""Commands that are printed act on the record that the reader looked at."""

from __future__ import annotations

import pytest

from canaryd.cli import main
from canaryd.cli.main import parser
from canaryd.report.terminal import COMMANDS, paragraph, type_with, typed
from tests.command import configure, in_turn


@pytest.fixture(autouse=True)
def forgotten():
    """No other test prints commands with these options."""
    yield
    type_with((), ())


def test_every_command_is_met():
    """The list here is that of the command line."""
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")
    assert sorted(commands) == sorted(COMMANDS)


def test_commands_carry_the_options_once():
    """After the command, in quotes where the shell needs them; a path that a process runs is none of ours."""
    type_with(("--state-dir", "/srv/a b"), ())
    given = "Start it (canaryd run), then: canaryd check --device cpu:0; canaryd itself is fine"
    right = "Start it (canaryd run --state-dir '/srv/a b'), then: canaryd check --state-dir '/srv/a b' --device cpu:0"
    assert typed(given) == f"{right}; canaryd itself is fine"
    assert typed(typed(given)) == typed(given)
    assert typed("waiting: pid 7: /opt/canaryd/bin/canaryd run") == "waiting: pid 7: /opt/canaryd/bin/canaryd run"


def test_a_command_is_run_with_sudo_where_the_record_needs_it():
    """Once, before all that it needs."""
    type_with(("--state-dir", "/srv"), (), sudo=True)
    assert typed("type canaryd check --device cpu:0") == "type sudo canaryd check --state-dir /srv --device cpu:0"
    type_with((), (), sudo=True)
    assert typed(typed("type canaryd check")) == "type sudo canaryd check"


@pytest.mark.parametrize(
    ("command", "given", "needs"),
    [
        ("status", {}, False),
        ("status", {"SUDO_USER": "anna"}, True),
        ("status", {"NOTIFY_SOCKET": "/run/x"}, False),
        ("run", {"NOTIFY_SOCKET": "/run/x"}, True),
    ],
)
def test_who_reads_needs_sudo_where_the_process_had_it(command, given, needs, tmp_path, monkeypatch):
    """Of sudo itself; and of systemd, whose daemon is root to the reader of its page. Not of a shell inside a unit."""
    for name in ("SUDO_USER", "NOTIFY_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main._needs_sudo(command, tmp_path) is needs


@pytest.mark.parametrize("before", range(0, 80, 7))
def test_a_command_in_a_sentence_is_never_cut_in_two(before):
    """A line that ends within it cannot be pasted."""
    own = "--state-dir /srv/some/where"
    type_with(tuple(own.split()), ())
    text = f"{'x ' * before}(canaryd run), or canaryd check; more of the sentence follows after both of them"
    shown = [line for _, line in paragraph("note     ", text)]
    assert sum(f"canaryd run {own}" in line for line in shown) == 1
    assert sum(f"canaryd check {own}" in line for line in shown) == 1
    assert " ".join(" ".join(shown).split()) == f"note {typed(text)}"
    assert max(map(len, shown)) <= 79


@pytest.mark.parametrize("before", range(0, 80, 7))
def test_nor_are_the_options_behind_it(before):
    """Up to the next word that is none."""
    type_with(("--state-dir", "/srv/a"), ())
    text = f"{'x ' * before}type canaryd check --level deep --device cuda:0 on a node that serves nobody at this time"
    lines = [line for _, line in paragraph("", text)]
    assert [line for line in lines if "canaryd check --state-dir /srv/a --level deep --device cuda:0" in line]


def test_an_installed_service_is_started_by_systemd(tmp_path):
    """Not so for another record than that of the service, or where there is no unit."""
    unit = tmp_path / "systemd/system/canaryd.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    type_with((), (str(tmp_path),))
    assert typed("start it (canaryd run); canaryd check") == "start it (systemctl start canaryd); canaryd check"
    type_with(("--state-dir", "/srv"), (str(tmp_path),))
    assert typed("start it (canaryd run)") == "start it (canaryd run --state-dir /srv)"
    type_with((), (str(tmp_path / "other"),))
    assert typed("start it (canaryd run)") == "start it (canaryd run)"


def test_the_commands_of_real_answers_can_be_copied(tmp_path):
    """Advice of status, history and gate; JSON stays as it was."""
    state, config = tmp_path / "state", configure(tmp_path, "passes")
    own = f"--config {config} --state-dir {state}"
    common = ("--config", config, "--state-dir", state)
    status, history, gate, document, default = in_turn(
        ("status", *common),
        ("history", *common),
        ("gate", *common),
        ("status", "--json", *common),
        ("status", "--state-dir", state),
    )
    for text in (status.out, history.out):
        assert f"Do now: Start the daemon:\n        canaryd run {own}\n        Or test once:\n" in text
        assert f"        canaryd check {own}\n" in text
    for text in (status.out, history.out, gate.out):
        assert f"canaryd run {own}" in " ".join(text.split()), text
    assert own not in document.out
    assert f"        canaryd check --state-dir {state}\n" in default.out
