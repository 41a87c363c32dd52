"""The names that a numeric probe can import. These names and their arguments stay the same in later versions.

Everything else below `canaryd.worker` may change. `docs/writing-a-probe.md` describes each name;
`tests/worker/test_toolkit.py` checks names and arguments.
"""

from __future__ import annotations

from canaryd.worker.numeric.cases import Case, chosen, refusal
from canaryd.worker.numeric.evidence import collect
from canaryd.worker.numeric.operands import Bound, Problem
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import (
    need_torch,
    strict_switches,
    synchronize,
    torch,
    torch_device,
    upload,
)
from canaryd.worker.numeric.verify import verify_all

__all__ = [
    "Bound",
    "Case",
    "Problem",
    "chosen",
    "collect",
    "derive",
    "need_torch",
    "refusal",
    "strict_switches",
    "synchronize",
    "torch",
    "torch_device",
    "upload",
    "verify_all",
]
