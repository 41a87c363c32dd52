"""The comparisons of other tools, on the tensors that canaryd saw: published rules, and the real ai-chip-integrity.

A rule returns True if it finds the result wrong, False if not, and None if the tool does not support the format. The
data are canaryd's. gpu-burn and DCGM multiply larger, positive numbers, so their threshold 1e-3 is less than one bit of
a float32 result there. The rules, their public repositories and files:

- gpu-burn: |result - first result| > 1e-3, in float64 > 1e-7; a NaN compares false. (wilicc/gpu-burn, compare.cu)
- DCGM: the diagnostic plugin, gpu-burn's rule also for float16, and a NaN fails. Targeted stress compares no result.
  (NVIDIA/DCGM, nvvs/plugin_src/diagnostic/compare.cu)
- RVS: GST with both checks on, which are off by default and only logged: relative Frobenius norm of the difference to
  the result before > 0; in float32 and float64 also a relative error above 10 epsilon against the host's product. A NaN
  affects norm and maximum as in GST. Its newest source can compare a CRC with the first run's and with other GPUs;
  this is not judged here. (ROCm/ROCmValidationSuite, gst.so/src/gst_worker.cpp, src/rvs_blas.cpp)
- SuperBench: |result - reference| / |reference| / K > 1e-6, in float16 > 1e-3, against the host's product; a NaN
  compares false. (microsoft/superbenchmark, superbench/benchmarks/micro_benchmarks/cublas_function/cublas_benchmark.h)
- ai-chip-integrity: the installed package judges two runs of the same product, the first and this one: bits of the
  first run, and a proven bound around the float64 product. (tech4biz-yasha/ai-chip-integrity, chip_integrity/screen.py)
- relative L2: ||result - reference|| / ||reference|| >= 5e-3 against float64; NaN fails it.
  (cv700/scanprobe, ashiba_scanprobe/checks/matmul.py, where NaN passes)
- not finite: NaN or infinity, which a serving engine notices without any test.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from benchmarks.injections import Struck, Trial
from canaryd.worker.numeric.tensors import bits, torch

Rule = Callable[[Trial, Struck, str], "bool | None"]

FIRST = {"float32": 1e-3, "float64": 1e-7}
PER_K = {"float32": 1e-6, "float16": 1e-3}
SCREENED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn>float32": "fp8"}
"""Number format → its name in ai-chip-integrity."""


def gpu_burn(_trial: Trial, struck: Struck, form: str) -> bool | None:
    """Return whether the result differs too much from the first result; None for other formats."""
    if form not in FIRST:
        return None
    return bool(((struck.result - struck.first).abs() > FIRST[form]).any())


def dcgm(trial: Trial, struck: Struck, form: str) -> bool | None:
    """Return whether the result differs too much from the first one, or either has a NaN; None for other formats."""
    wrong = gpu_burn(trial, struck, "float32" if form == "float16" else form)
    nan = bool(torch.isnan(struck.result).any() or torch.isnan(struck.first).any())
    return None if wrong is None else wrong or nan


def rvs(trial: Trial, struck: Struck, form: str) -> bool | None:
    """Return whether the self-check or the accuracy check of GST fails; None for other formats."""
    if form == "bfloat16":  # its bits are compared as integers there
        return bool((bits(struck.result) != bits(struck.first)).any())
    if form not in ("float64", "float32", "float16"):
        return None
    difference = struck.result.to(torch.float64) - struck.first.to(torch.float64)
    norm_is_nan = bool(torch.isnan(difference).any()) or int(torch.isinf(difference).sum()) > 1
    if not norm_is_nan and bool((difference != 0).any()):
        return True
    if form == "float16":
        return False
    golden = trial.problem.golden
    errors = ((golden - struck.result) / golden).abs().mT.reshape(-1)  # by columns
    nan = torch.nonzero(torch.isnan(errors))
    errors = errors[int(nan[-1]) + 1 :] if len(nan) else errors  # a NaN makes the maximum begin anew
    return len(errors) > 0 and bool(errors.max() > 10 * torch.finfo(golden.dtype).eps)


def superbench(trial: Trial, struck: Struck, form: str) -> bool | None:
    """Return whether the result differs too much from the host's product; None for other formats."""
    if form not in PER_K:
        return None
    seen, reference = struck.result.to(torch.float64), trial.problem.golden.to(torch.float64)
    return bool(((seen - reference).abs() / reference.abs() / trial.K > PER_K[form]).any())


def relative_l2(trial: Trial, struck: Struck, _form: str) -> bool:
    """Return whether the relative L2 error of the whole result against float64 is too large."""
    seen, reference = struck.result.to(torch.float64), trial.problem.golden.to(torch.float64)
    return not float(torch.linalg.vector_norm(seen - reference) / torch.linalg.vector_norm(reference)) < 5e-3


def not_finite(_trial: Trial, struck: Struck, _form: str) -> bool:
    """Return whether the result has a NaN or an infinity."""
    return not bool(torch.isfinite(struck.result.to(torch.float32 if struck.result.element_size() < 8 else None)).all())


def chip_integrity(trial: Trial, struck: Struck, form: str) -> bool | None:
    """Return whether ai-chip-integrity rejects the product, whose results replace its own; None for other formats."""
    if form not in SCREENED:
        return None
    screen = importlib.import_module("chip_integrity.screen")
    a, b = trial.problem.operands
    runs = [t.reshape(-1, *t.shape[-2:]) for t in (struck.first, struck.result)]
    pairs = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), *runs, strict=True)
    return any(not _screened(screen, SCREENED[form], left, right, given) for left, right, *given in pairs)


def _screened(screen: Any, name: str, a: Any, b: Any, runs: list[Any]) -> bool:
    def replace(run: int, computed: Any) -> None:
        computed.copy_(runs[run])

    wide = [t.to(torch.float64) for t in (a, b)]
    case = a, b, wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
    told = SimpleNamespace(add_measurement=lambda **_: None, add_diagnosis=lambda *_, **__: None)
    shape = (a.shape[0], a.shape[1], b.shape[1])
    screen._FAULT_HOOK = replace  # noqa: SLF001  its own place for faults
    try:
        return bool(
            screen.screen_case(told, torch.device("cpu"), name, shape, 2, 0, 0, random.Random(0), None, case)[0]
        )
    finally:
        screen._FAULT_HOOK = None  # noqa: SLF001


def chip_integrity_version() -> str:
    """Return the installed version of ai-chip-integrity, or "" if it is not installed."""
    try:
        return version("ai-chip-integrity")
    except PackageNotFoundError:
        return ""


def rules() -> dict[str, Rule]:
    """Return name → rule. ai-chip-integrity is included only if it is installed."""
    real: dict[str, Rule] = {"ai-chip-integrity": chip_integrity} if chip_integrity_version() else {}
    return {
        "gpu-burn": gpu_burn,
        "DCGM": dcgm,
        "RVS": rvs,
        "SuperBench": superbench,
        **real,
        "relative L2": relative_l2,
        "not finite": not_finite,
    }
