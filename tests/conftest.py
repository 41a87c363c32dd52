"""What every test may rely on, and skips said aloud."""

import gc
import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("CANARYD_TEST_", "CANARYD_BOOT")
"""Variables that are for the tests."""
LONGEST = (
    *(
        f"contract/test_stories_{letters}.py"
        for letters in ("a_to_d", "h_to_n", "r_to_s", "t_to_z", "e_to_g", "o_to_q")
    ),
    "laws/test_laws.py",
    "daemon/test_telemetry.py",
    "test_failures.py",
    "daemon/test_daemon.py",
    "engine/test_check.py",
    "worker/runtime/test_runtimes.py",
    "test_boot.py",
    "daemon/test_systemd.py",
    "cli/test_streams.py",
    "worker/numeric/test_rehearsal.py",
    "worker/endpoint/test_exact_endpoint.py",
    "engine/test_budget_check.py",
    "deploy/test_prometheus.py",
    "engine/test_budget_daemon.py",
    "worker/numeric/test_verify.py",
    "engine/test_polling.py",
    "judge/test_stories.py",
    "worker/links/test_group.py",
    "deploy/test_kubernetes.py",
    "worker/units/test_kernel.py",
    "../lab/tests/test_cli_compare.py",
    "test_security.py",
    "test_alarm.py",
)
"""The files that take longest, longest first: begun last, one of them alone would leave the other workers idle."""
for name in list(os.environ):  # what the user has set for canaryd is not for the canaryd under test
    if name in ("COLUMNS", "NO_COLOR", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "SUDO_USER") or (
        name.startswith("CANARYD_") and not name.startswith(OURS)
    ):
        del os.environ[name]
sys.dont_write_bytecode = False  # a canaryd that is compiled at each start takes twice as long to start
gc.disable()  # until all tests are collected: nothing of that is garbage
os.umask(0o022)  # a configuration that a group may write is refused
hypothesis.settings.register_profile("canaryd", deadline=None)  # a machine under load is slow
hypothesis.settings.load_profile("canaryd")
sys.path.insert(0, str(ROOT))  # `python -m canaryd` of a checkout that is not installed, and `benchmarks`


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _has_gpu() -> bool:
    if not _has_torch():
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory, which does not exist yet."""
    return tmp_path / "state"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and skip what this machine cannot run, with a reason that the summary prints."""
    gc.enable()
    ranks = {(ROOT / "tests" / name).resolve(): rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(LONGEST)))
    marks = {
        "torch": (_has_torch(), "torch is not installed in this interpreter"),
        "gpu": (_has_gpu(), "no CUDA or ROCm device here"),
    }
    for item in items:
        for name, (there, reason) in marks.items():
            if item.get_closest_marker(name) and not there:
                item.add_marker(pytest.mark.skip(reason=reason))
