"""scripts/check and scripts/test set an environment up: the torch they take, what they say, what a second run does.

pip and the interpreter are small programs that write down what they are asked; one test uses the real ones.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tests.command import ROOT, environment, soon
from tests.worker.telemetry.trees import plant

PIP = """#!/bin/sh
# Stands in for python3 and pip: `-m venv` makes an environment of this file, `-m pip` writes down what it is asked.
case "$*" in
    "-m venv"*) for last; do :; done
        rm -rf "$last" && mkdir -p "$last/bin" && cp "$0" "$last/bin/python"
        echo "version = $version.1" >"$last/pyvenv.cfg" ;;
    "-m pip config list") echo "$config" ;;
    *"-m pip "*) echo "$*" >>"$log"
        case "$*" in *"$refused"*) echo "ERROR: cannot reach it" >&2; exit 1 ;; *torch*) touch "$0.torch" ;; esac ;;
    *"import sys, torch"*) [ -e "$0.torch" ] || [ "$torch" = yes ] ;;
    *sys.base_prefix*) echo "$version /usr" ;;
    *importlib.metadata*) echo 2.13.0+cpu ;;
    --version) echo "Python $version.1" ;;
    *) exec "$real" "$@" ;;
esac
"""
CPU = "https://download.pytorch.org/whl/cpu"
HEAD = "-m pip --disable-pip-version-check install "
"""How torch is installed: not quietly, since it takes longest."""


class Setup:
    """make_environment of scripts/environment, on a machine that is made up."""

    def __init__(self, directory: Path) -> None:
        self.venv, self.root, self.log = directory / "venv", directory / "root", directory / "log"
        self.python = directory / "python3"
        self.python.write_text(PIP)
        self.python.chmod(0o755)
        (self.root / "sys/bus/pci/devices").mkdir(parents=True)
        self.card("0000:02:00.0", "0x1a03", "0x030000")  # graphics of a board's management controller

    def card(self, bus_id: str, vendor: str, pci_class: str) -> None:
        """Put a function on the PCI bus."""
        plant(self.root / "sys/bus/pci/devices" / bus_id, {"vendor": vendor, "device": "0x2335", "class": pci_class})

    def make(self, stdin: int = subprocess.DEVNULL, code: int = 0, **given: str) -> tuple[str, list[str]]:
        """Return what it says, and what pip was told to install of torch."""
        self.log.write_text("")
        variables = {"version": "3.11", "config": "", "torch": "", "refused": "nothing is", "PYTHON": str(self.python)}
        variables |= {"log": str(self.log), "real": sys.executable} | given
        line = '. scripts/environment; system=$1; make_environment "$2" -e .'
        argv = ["bash", "-euo", "pipefail", "-c", line, "bash", self.root, self.venv]
        done = subprocess.run(
            argv, cwd=ROOT, env=environment(**variables), stdin=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        told = [words.removeprefix(HEAD) for words in self.log.read_text().splitlines()]
        return done.stdout + done.stderr, [words for words in told if "torch" in words]


@pytest.fixture
def setup(tmp_path):
    """A made-up machine without an accelerator."""
    return Setup(tmp_path)


def test_without_an_accelerator_the_cpu_build_is_taken(setup):
    """And said; the graphics of a management controller are no accelerator."""
    said, told = setup.make()
    assert told == [f"torch==2.13.0 --index-url {CPU}"]
    assert "found no accelerator: installing PyTorch's CPU build of torch==2.13.0, 200 MB to download" in said
    assert said.startswith("first time here: making ")


@pytest.mark.parametrize(
    ("vendor", "pci_class"), [("0x1002", "0x120000"), ("0x1002", "0x038000"), ("0x19e5", "0x120000")]
)
def test_an_accelerator_that_cuda_does_not_drive_gets_no_cuda(setup, vendor, pci_class):
    """It is named, and how to get its own build."""
    setup.card("0000:65:00.0", vendor, pci_class)
    said, told = setup.make()
    assert told == [f"torch==2.13.0 --index-url {CPU}"]
    assert "0000:65:00.0: installing PyTorch's CPU build" in said
    assert "for another build set CANARYD_TORCH: https://pytorch.org/get-started/locally/" in said


@pytest.mark.parametrize(
    "config", ["global.index-url='https://p.example/simple'", ":env:.extra-index-url='x'", "install.find-links='/w'"]
)
def test_an_index_of_ones_own_decides(setup, config):
    """It may hold another build, so only the largest size is known."""
    said, told = setup.make(config=config)
    assert told == ["torch==2.13.0"]
    assert "from the index that pip is configured for: up to 2.7 GB" in said


@pytest.mark.parametrize(
    ("answer", "card", "told"),
    [("n", "", []), ("", "", []), ("y", "", ["torch==2.13.0"]), ("", "0x10de", ["torch==2.13.0"])],
)
def test_at_a_terminal_it_asks_before_it_downloads_cuda_that_no_gpu_needs(setup, answer, card, told):
    """Yes alone goes on; with an NVIDIA GPU nobody is asked."""
    if card:
        setup.card("0000:65:00.0", card, "0x030200")
    master, slave = pty.openpty()
    os.write(master, f"{answer}\n".encode())
    try:
        said, installed = setup.make(stdin=slave, code=0 if told else 1, config="global.index-url='x'")
    finally:
        os.close(master)
        os.close(slave)
    assert installed == told
    assert "up to 2.7 GB" in said
    assert ("Download it?" in said) == (not card)
    assert ("stopped: no torch was installed" in said) == (not told)


def test_canaryd_torch_is_for_pip_word_for_word(setup):
    """And said to be ignored where a torch is there already."""
    _, told = setup.make(CANARYD_TORCH="torch==2.4 --index-url https://p.example")
    assert told == ["torch==2.4 --index-url https://p.example"]
    said, told = setup.make(CANARYD_TORCH="torch==2.5")
    assert told == []
    assert f"CANARYD_TORCH is ignored: {setup.venv} has torch 2.13.0+cpu" in said


def test_a_second_run_asks_nobody(setup):
    """No package index, and it takes no time; a change of the dependencies does ask."""
    setup.make()
    begun = time.monotonic()
    assert setup.make() == ("", [])
    assert time.monotonic() - begun < soon(2.0)
    assert setup.log.read_text() == ""
    (setup.venv / ".made").write_text("other dependencies")
    setup.make()
    assert "install -e ." in setup.log.read_text()


def test_what_only_workers_load_is_compiled(setup):
    """A worker leaves no files anywhere, so each would compile the whole of itself at every start."""
    compiled = [
        Path(cache_from_source(str(ROOT / name))) for name in ("canaryd/worker/runner.py", "probes/exact_matmul.py")
    ]
    for path in compiled:
        path.unlink(missing_ok=True)
    setup.make()
    assert all(path.is_file() for path in compiled)


def test_a_directory_that_is_no_environment_is_not_emptied(tmp_path):
    """CANARYD_VENV may name anything."""
    plant(tmp_path / "home", {"letter": "dear"})
    line = '. scripts/environment; make_environment "$1" -e .'
    argv = ["bash", "-euo", "pipefail", "-c", line, "bash", tmp_path / "home"]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(PYTHON=sys.executable), capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "home: is no virtual environment" in done.stderr
    assert (tmp_path / "home/letter").exists()


def test_an_interpreter_that_is_missing_or_too_old_is_named(setup):
    """In one line, before anything is made."""
    said, told = setup.make(PYTHON="python9", code=64)
    assert said == "python9 is missing or older than Python 3.10: name another interpreter in PYTHON\n"
    assert not told
    assert not setup.venv.exists()


def test_an_interrupted_set_up_leaves_nothing(setup):
    """Ctrl-C ends it with one line, and the next call does not trust what was half made."""
    setup.python.write_text(PIP.replace("*torch*) ", '*torch*) touch "$log.begun"; sleep 60; '))
    argv = ["bash", "-euo", "pipefail", "-c", '. scripts/environment; make_environment "$1" -e .', "bash", setup.venv]
    variables = {"version": "3.11", "config": "x.index-url=", "torch": "", "refused": "nothing is"}
    variables |= {"PYTHON": str(setup.python), "log": str(setup.log), "real": sys.executable}
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as making:  # fmt: skip
        while not Path(f"{setup.log}.begun").exists():
            time.sleep(0.02)
        os.killpg(making.pid, signal.SIGINT)
        said = making.communicate()[0]
    assert said.endswith(f"\ninterrupted: {setup.venv} was not complete and is removed; the same command begins anew\n")
    assert making.returncode == 130
    assert not setup.venv.exists()


@pytest.mark.slow
def test_it_installs_from_the_index_that_is_named(tmp_path):
    """With the real pip, from a directory that stands in for PyTorch's index."""
    index = tmp_path / "index/torch"
    index.mkdir(parents=True)
    name = "torch-2.13.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(index / name, "w") as wheel:
        wheel.writestr("torch/__init__.py", '__version__ = "2.13.0+cpu"\n')
        wheel.writestr(
            "torch-2.13.0+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
        )
        wheel.writestr(
            "torch-2.13.0+cpu.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("torch-2.13.0+cpu.dist-info/RECORD", "")
    (index / "index.html").write_text(f'<a href="{name}">{name}</a>')
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    clean |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(ROOT)}
    line = ". scripts/environment; venv=$1; cpu_index=$2; system=$3; install_torch"
    argv = ["bash", "-euo", "pipefail", "-c", line, "bash", venv, index.parent.as_uri(), tmp_path]
    done = subprocess.run(argv, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import importlib.metadata as m; print(m.version('torch'))"
    told = subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "2.13.0+cpu\n"


# --- scripts/accelerator ----------------------------------------------------------------------------------------------


def this_python(tmp_path: Path) -> dict[str, str]:
    """Return variables with which scripts use this interpreter as it is, and install nothing."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return environment(PYTHON=str(python), CANARYD_VENV=str(tmp_path / "venv"))


@pytest.mark.slow
@pytest.mark.torch
def test_a_call_on_an_accelerator_goes_on_from_the_call_before(tmp_path):
    """It has the tests for GPUs and one part more each time, in a directory of few files, on the processor as well."""
    variables, out = this_python(tmp_path), tmp_path / "results"
    for part in ("controls", "memory"):
        argv = [ROOT / "scripts/accelerator", "cpu:0", out, "--minutes", "1", "--part", part]
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        with tarfile.open(out / "parts.tar") as parts:
            names = {Path(name).stem for name in parts.getnames() if "/parts/" in name}
        assert names == {"environment", "controls", "memory"} - ({"memory"} if part == "controls" else set())
        ran = (out / "gpu-tests.txt").stat().st_mtime_ns
    kinds = sorted(file.suffix for file in out.iterdir())
    assert kinds == [".html", ".json", ".tar", ".txt"]
    assert "tests/worker/units/test_kernel.py" in (out / "gpu-tests.txt").read_text()
    # A call whose time is over keeps its parts, and does not repeat the tests.
    argv = ["timeout", "--signal=TERM", "60", ROOT / "scripts/accelerator", "cpu:0", out, "--minutes", "5"]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 124
    assert (out / "gpu-tests.txt").stat().st_mtime_ns == ran
    assert sorted(file.suffix for file in out.iterdir()) == kinds
    with tarfile.open(out / "parts.tar") as parts:
        assert names < {Path(name).stem for name in parts.getnames() if "/parts/" in name}


@pytest.mark.slow
@pytest.mark.torch
def test_each_slice_leaves_what_came_of_every_step(tmp_path):
    """On the processor too, where what needs a GPU is skipped with the reason; nothing waits for the end of a slice."""
    variables, out = this_python(tmp_path), tmp_path / "results"
    for number in ("1", "2", "3"):
        argv = [ROOT / "scripts/accelerator", "cpu:0", out, "--slice", number, "--level", "quick", "--minutes", "2"]
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
    rows = {row["step"]: row for row in map(json.loads, (out / "steps.jsonl").read_text().splitlines())}
    assert list(rows) == ["check", "kernels", "graphs", "verified", "formats", "beside", "engine"]
    assert rows["check"]["busy"].startswith("not measured")
    assert sum(run["trials"] for run in rows["check"]["runs"]) > 0
    assert [part["name"] for part in json.loads((out / "kernels.out").read_text())["parts"]] == [
        "environment",
        "kernels",
    ]
    assert "skipped" in (out / "gpu-tests-graphs.out").read_text()
    assert "skipped" in rows["verified"]
    assert any(case.startswith("float8") or case.endswith("grouped") for case in rows["formats"]["skipped_cases"])
    assert "skipped" in rows["beside"]
    assert any("vllm" in line for line in rows["engine"]["not run"])


def test_a_cut_takes_only_the_step_that_it_hits(tmp_path):
    """A step whose time is over is asked to end, then killed; what it had written stays, and the next begins."""
    from benchmarks.accelerator import Bench

    bench = Bench("cpu:0", tmp_path, tmp_path, "quick")
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('so far', flush=True); time.sleep(60)"
    done = bench.run("stuck", [sys.executable, "-c", code], 1.0, grace=0.2)
    assert (done["exit"], (tmp_path / "stuck.out").read_text()) == (-signal.SIGKILL, "so far\n")
    assert bench.run("next", [sys.executable, "-c", "print(1)"], 30.0)["exit"] == 0


def test_without_torch_the_accelerator_script_says_which_interpreter_lacks_it(tmp_path):
    """And how to name another one; nothing is installed."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    argv = [ROOT / "scripts/accelerator", "cuda:0", tmp_path / "results"]
    variables = environment(PYTHON=str(python), CANARYD_VENV=str(tmp_path / "venv"))
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        64, f"{python} has no torch: name the interpreter that has it in PYTHON\n",
    )  # fmt: skip
    assert not (tmp_path / "venv").exists()
