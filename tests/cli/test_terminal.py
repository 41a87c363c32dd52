"""Commands on a real terminal of 80 and of 120 columns: every line fits, standard error too."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence

import pytest

from canaryd.formatting import folded
from tests.command import ROOT, canaryd, configure, environment

LONG = "a_directory_whose_name_is_long_enough_to_be_wrapped"


AFTER = "-- the next command --"
COMMANDS = f"""
import json, sys
from canaryd.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit:
        pass
    print({AFTER!r}, flush=True)
"""


def shown(columns: int, *commands: Sequence[object]) -> list[list[str]]:
    """Return the lines of each command on a terminal of so many columns, without colours; one process types them."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    typed = json.dumps([[str(word) for word in command] for command in commands])
    argv = [sys.executable, "-c", COMMANDS, typed]
    with subprocess.Popen(argv, cwd=ROOT, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        read = b""
        try:
            while part := os.read(ours, 1 << 16):
                read += part
        except OSError:  # on Linux: the last one that had it open has ended
            pass
        process.wait(60)
    os.close(ours)
    assert process.returncode == 0, read.decode()
    text = re.sub(r"\x1b\[[0-9;]*m", "", read.decode()).replace("\r\n", "\n")
    *each, last = text.split(f"{AFTER}\n")
    assert (len(each), last) == (len(commands), ""), text
    return [one.split("\n") for one in each]


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_every_line_fits_the_terminal(tmp_path, columns):
    """Verdicts, lists, answers and mistakes; only a command to type or a path to copy stays whole."""
    config = configure(tmp_path, "passes", "mismatches", "records")
    common = ("--config", config, "--state-dir", tmp_path / "state")
    commands = (
        ("check",),  # the first one finds an empty record
        *(("check",), ("status",), ("status", "-v"), ("history",), ("gate",), ("probes",), ("baseline", "list")),
        *(("release",), ("ack", "cpu:0", "--reason", "seen"), ("gate", "--device", "cuda:9")),
        *(("ack", "cuda:9", "--reason", "seen"), ("config", "check"), ("drill", "--probe", "mismatches")),
        *(("check", "--level", "quickly"), ("baseline", "list", "cuda:9"), ("--help",), ("check", "--probe", LONG)),
    )
    typed = [(*command, *(() if command == ("--help",) else common)) for command in commands]
    for command, lines in zip(commands, shown(columns, *typed), strict=True):
        assert "".join(lines), command
        for line in lines:
            for moving in line.split("\r"):  # a progress bar is drawn over itself
                whole = moving.lstrip().startswith("canaryd ") or len(moving.split()) == 1
                assert len(moving) <= columns or whole, (command, moving)


def test_a_check_says_how_far_it_is(tmp_path):
    """From the first moment, over all its parts with the retests: neither the part nor the bar goes back."""
    config = configure(tmp_path, "passes", "mismatches", "records")
    ((*lines,),) = shown(80, ("check", "--config", config, "--state-dir", tmp_path / "state"))
    drawn = [moving for line in lines for moving in line.split("\r") if moving.startswith("[")]
    assert "looking for devices" in drawn[0]
    parts = [(int(n), int(of)) for line in drawn for n, of in re.findall(r"\] part (\d+) of (\d+)", line)]
    assert parts[0] == (1, 3)
    assert parts[-1][0] == parts[-1][1] > 3  # the retests of the mismatch came
    assert parts == sorted(parts)
    bars = [line.count("#") for line in drawn]
    assert bars == sorted(bars)
    assert re.search(r"part 1 of 3, about \d+ s left: cpu:0 ", "".join(drawn))


def test_a_check_of_given_length_is_not_done_after_its_first_round(tmp_path):
    """How far it is, and how long the rest takes, follows from the time that --for gives, not from the first round."""
    config = configure(tmp_path, "passes")
    ((*lines,),) = shown(80, ("check", "--for", "6s", "--config", config, "--state-dir", tmp_path / "state"))
    drawn = [re.match(r".*\[(#*)\.*\] part (\d+) .*about (\d+) s", line) for line in "\r".join(lines).split("\r")]
    told = [(int(found[2]), len(found[1]), int(found[3])) for found in drawn if found]
    assert all(left >= 4 and bar <= 4 for part, bar, left in told if part <= 2), told
    assert told[-1][1] >= 5, told


def test_a_pipe_gets_whole_lines(tmp_path):
    """For grep and awk."""
    config = configure(tmp_path, "passes")
    answer = canaryd("probes", "--config", config, "--state-dir", tmp_path / "state")
    assert len(answer.out.splitlines()) == 1


def test_folding_keeps_words_and_indents():
    """What follows the first line stands further in; short lines are left alone."""
    path = "/a/path-that/is-longer/than-the/line"
    assert folded(f"  one two three {path}\nfour", 16) == f"  one two three\n    {path}\nfour"
