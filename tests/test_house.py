"""What holds the house together: imports go one way, and the rules that no linter knows."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from canaryd.cli.check import FAULTS
from canaryd.cli.main import parser
from canaryd.probe import ProbeSpec
from tests.command import ROOT, environment
from tests.conftest import LONGEST
from tests.servers import KINDS, UNKNOWN

MODULES = sorted(path for package in ("canaryd", "lab/canaryd_lab") for path in (ROOT / package).rglob("*.py"))
PROBE_FILES = sorted((ROOT / "probes").glob("*.py"))
TESTS = sorted(path for tests in ("tests", "lab/tests") for path in (ROOT / tests).rglob("test_*.py"))
HEAVY = {"torch", "numpy", "pynvml", "amdsmi", "urllib3", "jinja2", "scipy", "pandas"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def loaded(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after a statement."""
    code = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_imports_go_one_way():
    """The contracts of pyproject.toml hold (CONTRIBUTING.md)."""
    linter = Path(sys.executable).parent / "lint-imports"
    if not linter.exists():
        pytest.skip("import-linter is not installed in this interpreter")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_daemon_and_the_command_line_load_nothing_heavy():
    """No torch, no vendor library, no worker, no probe: the daemon cannot hang on what it has not loaded."""
    modules = loaded("import canaryd.cli.main as main, canaryd.daemon.daemon; main.parser()")
    assert not HEAVY & modules
    assert not {module for module in modules if module.startswith("canaryd.worker")}


def test_a_check_does_not_pay_for_the_daemon():
    """Scheduler and exposition are loaded by `canaryd run` alone."""
    assert not {"apscheduler", "prometheus_client", "canaryd.daemon.daemon", "canaryd.metrics"} & loaded(
        "import canaryd.cli.main as main; main.parser()"
    )


def test_a_probe_author_needs_the_standard_library_alone():
    """`canaryd.probe` and `canaryd.model` run under anybody's interpreter."""
    modules = {module.partition(".")[0] for module in loaded("import canaryd.probe")}
    before = {module.partition(".")[0] for module in loaded("pass")}
    assert modules - before - {"canaryd"} <= sys.stdlib_module_names


def test_a_probe_that_asks_over_http_is_described_without_urllib3():
    """`worker.python` describes every probe, and a serving engine's interpreter may lack what canaryd's own has."""
    assert "urllib3" not in loaded("import canaryd.worker.endpoint.canary, canaryd.worker.endpoint.examiner")


@pytest.mark.torch
def test_the_command_line_knows_every_fault():
    """It must not import the worker to list them, so it has a copy."""
    from canaryd.worker.numeric.faults import FAULTS as INJECTED

    assert tuple(INJECTED) == FAULTS


def test_every_module_says_what_it_is_and_only_the_command_line_prints():
    """One sentence at the top, at least; everything else than a command returns, raises or logs."""
    for path in (*MODULES, *PROBE_FILES):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        prints = any(isinstance(function, ast.Name) and function.id == "print" for function in calls)
        assert not prints or path.parent.name == "cli" or path == ROOT / "canaryd/__main__.py", path


def test_one_function_takes_the_lock_of_a_device():
    """By its card: two runtimes never use a card at once. `canaryd release` only waits for it."""
    taking = re.compile(r"store\.lock\((?!\w*_LOCK\b)")
    found = {name(path) for path in MODULES if taking.search(path.read_text())}
    assert found == {"canaryd/engine/engine.py", "canaryd/cli/daemon.py"}


def test_every_test_states_a_behaviour():
    """In a docstring: a failing test then says what is broken."""
    for path in TESTS:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert [f.name for f in functions if f.name.startswith("test_") and not ast.get_docstring(f)] == [], path


@pytest.mark.torch
@pytest.mark.parametrize("path", PROBE_FILES, ids=name)
def test_a_probe_is_one_short_file_that_bears_its_name(path):
    """At most 150 lines, with a spec and a `run`."""
    assert len(path.read_text().splitlines()) <= 150
    module = importlib.import_module(f"probes.{path.stem}")
    assert isinstance(module.SPEC, ProbeSpec)
    assert module.SPEC.name == path.stem
    assert callable(module.run)


def test_a_probe_imports_no_sibling():
    """Only `canaryd.probe` and `canaryd.worker`: each file can be read, shipped and removed alone."""
    siblings = {path.stem for path in PROBE_FILES}
    for path in PROBE_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                ours = module.startswith("canaryd")
                assert not ours or module == "canaryd.probe" or module.startswith("canaryd.worker."), (path, module)
                assert module not in siblings, (path, module)


def test_the_readme_names_every_command():
    """A command that nobody reads about is not there."""
    subparsers = next(action for action in parser()._actions if action.dest == "command")
    readme = (ROOT / "README.md").read_text()
    assert [command for command in subparsers.choices if f"`canaryd {command}" not in readme] == []


def test_the_files_that_are_begun_first_are_there():
    """A file that was renamed would silently be begun last."""
    assert {(ROOT / "tests" / name).resolve() for name in LONGEST} <= {*TESTS}


def test_the_long_gate_installs_every_server_that_the_tests_know():
    """One that is left out would only be skipped aloud."""
    (line,) = re.findall(r"^scripts/servers .*$", (ROOT / ".ci/full").read_text(), re.MULTILINE)
    named = line.split()[2:]  # after the directory; none: all that scripts/servers knows
    (known,) = re.findall(r"^\[ \$# -gt 0 \] \|\| set -- (.*)$", (ROOT / "scripts/servers").read_text(), re.MULTILINE)
    assert {*(named or known.split())} == {*KINDS, *UNKNOWN}
