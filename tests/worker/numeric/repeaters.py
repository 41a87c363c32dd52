"""Stand-ins of a GPU that repeats bursts by itself, and the verification of one product through them.

One repeats on the processor: the same calls, on the same memory. Another one records torch's operators once, and
replays them without Python, as a CUDA graph does.
"""

from functools import partial

import pytest

from canaryd.facts import Comparison
from canaryd.probe import Context
from canaryd.worker.numeric import verify
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.operands import Product, build
from canaryd.worker.numeric.products import multiply
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, flat_bits
from canaryd.worker.runtime.torch import Torch, _differ

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
dispatch = pytest.importorskip("torch.utils._python_dispatch")

NAME = "float32/dense/square/nn@64x72x96"
BURST = 4


class Again:
    """A burst that is repeated: results in the memory of the first time."""

    def __init__(self, runtime, burst):
        self.runtime, self.burst = runtime, burst
        self.kept, _ = burst()
        self.found = []

    flying = 0

    def launch(self):
        Again.flying += 1
        results, golden = self.burst()
        for kept, result in zip(self.kept, results, strict=True):
            kept.copy_(result)
        self.found = [int(not equal) for equal in self.runtime.agree(self.kept, golden)]
        self.runtime.launched += 1

    def answers(self):
        Again.flying -= 1
        return self.runtime.said(self.found)


class Repeating(Torch):
    """torch on a processor, with bursts that repeat."""

    def __init__(self, *, cannot=None):
        self.launched, self.cannot = 0, cannot

    def burst(self, golden, most=0):
        return BURST

    def repeats(self, device):
        return True

    def repeated(self, device, burst):
        if self.cannot is not None:
            raise self.cannot
        return Again(self, burst)

    def said(self, found):
        return found


class Graph:
    """Work that is captured once, operator by operator, and replayed on the same memory, as a CUDA graph is."""

    def __init__(self, runtime, work):
        work()
        self.runtime, self.steps = runtime, []
        with self.capturing():
            self.kept = work()

    def capturing(self):
        """Return a context in which torch's operators are recorded; what asks the host ends as in a capture."""

        class Capturing(dispatch.TorchDispatchMode):
            def __torch_dispatch__(mode, function, types, args=(), kwargs=None):  # noqa: N805
                if function.name() in ("aten::_local_scalar_dense", "aten::nonzero"):
                    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
                made = function(*args, **(kwargs or {}))
                self.steps.append((function, args, kwargs or {}, made))
                return made

        return Capturing()

    def launch(self):
        for function, args, kwargs, made in self.steps:
            again = function(*args, **kwargs)
            if isinstance(made, torch.Tensor) and made.data_ptr() != again.data_ptr():
                made.copy_(again)
        self.found = self.kept.tolist()
        self.runtime.launched += 1

    def answers(self):
        return self.runtime.said(list(map(int, self.found)))


class Replaying(Repeating):
    """torch on a processor, with bursts that a recording repeats: Python takes no part in a launch."""

    def repeated(self, device, burst):
        return Graph(self, lambda: _differ(*burst()))

    def spoil(self, results):
        for result in results:
            flat_bits(result).fill_(-1)


def verified(
    runtime,
    *,
    cases=(),
    seconds=1.0,
    compute=None,
    drill="",
    room=0,
    layout="nn",
    batch=0,
    device=None,
    sizes=(64, 72, 96),
    pace=None,
    intensity="",
):
    spec = Product("dense", FORMATS["float32"], FORMATS["float32"], 24, *sizes, batch, layout)
    compute = compute or partial(multiply, "float32", "float32")
    case = Case(NAME, partial(build, spec), compute, product=spec)
    session = Session(
        Context(device=device or cpu(), level="quick", seed=7, budget=5.0, drill=drill, room=room, cases=cases)
    )
    session.runtime = runtime
    session.ctx.pace, session.ctx.intensity = pace or session.ctx.pace, intensity
    session.injector.arm([NAME])
    found = [f for f in verify.verify_case(session, case, seconds, "") if isinstance(f, Comparison)]
    return session, found


def broken(runtime, turn, at=0):
    """Return a product that flips one bit of an element, in one result of the burst of one turn."""
    here = []

    def compute(operands, out):
        result = multiply("float32", "float32", operands, out)
        if runtime.launched == turn + 1:  # after two that must differ
            here.append(1)
            if len(here) == at + 1:
                flat_bits(result)[5] ^= 1 << 20
        return result

    return compute
