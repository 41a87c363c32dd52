"""What the tests of the numeric worker share: the script that recomputes goldens, and the probes loaded by path."""

import importlib.util

import pytest


@pytest.fixture(scope="session")
def maker():
    """The module `tools/make_goldens.py`: plain-integer arithmetic that shares nothing with the builders."""
    from tools import make_goldens

    return make_goldens


@pytest.fixture(scope="session")
def probes(maker):
    """The three exact probes as modules, by name."""
    return {name: maker.load(name) for name in maker.PROBES}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Build in one thread: the problems are tiny, and on a busy machine a pool of threads costs five times the work."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
