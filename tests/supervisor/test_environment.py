"""What a worker finds in its environment."""

from __future__ import annotations

import pytest

from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series
from tests.supervisor.workers import PATIENCE, readings, request

# --- The worker's environment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction_set", "wanted"),
    [
        ("", ("unset", "unset", "unset")),
        ("native", ("unset", "unset", "unset")),
        ("avx2", ("avx2", "unset", "AVX2")),
        ("baseline", ("default", "COMPATIBLE", "unset")),
    ],
)
def test_what_libraries_read_at_start_is_set_at_start(monkeypatch, instruction_set, wanted):
    """Each instruction set has its environment; what the daemon inherited by chance does not leak through."""
    for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "chance")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with Series(WorkerSpec(env={"MINE": "yes"}), instruction_set=instruction_set) as series:
        said = readings(
            series.run(request("echoes", settings={"names": ["PYTORCH_CUDA_ALLOC_CONF", "MINE"]}), PATIENCE)
        )
    assert (said["ATEN_CPU_CAPABILITY"], said["MKL_CBWR"], said["MKL_ENABLE_INSTRUCTIONS"]) == wanted
    assert (said["CUBLAS_WORKSPACE_CONFIG"], said["NVIDIA_TF32_OVERRIDE"]) == (":4096:8", "unset")
    assert (said["PYTORCH_CUDA_ALLOC_CONF"], said["MINE"]) == ("unset", "yes")


def test_an_unknown_instruction_set_is_refused_by_name():
    """The error says what was given and what there is."""
    with pytest.raises(ValueError, match="'sse9' is not one of native, avx2, baseline"):
        Series(WorkerSpec(), instruction_set="sse9")
