"""A failing case for somebody without canaryd: the files are the case, and the script alone finds what is wrong."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from canaryd.codec import to_json
from canaryd.probe import Skip
from canaryd.worker.numeric import indexing, reproducer, stack
from canaryd.worker.numeric.cases import product_case
from canaryd.worker.numeric.tensors import host_same_bits

torch = pytest.importorskip("torch", reason="torch is not installed in this interpreter")
pytestmark = pytest.mark.torch

CPU = stack.cpu()
PRODUCT = "bfloat16/cancel/decode/nt@32x64x128"
INTEGERS = [("exact_integer", f"int64/{name}/fresh@1024") for name in indexing.OPERATIONS]
CASES = [
    ("exact_matmul", "float32/dense/prefill/tn@48x64x96"),
    ("exact_matmul", PRODUCT),
    ("exact_matmul", "float64/full/batched/tt@2x16x24x32"),
    ("exact_matmul", "float16/scaled/fixed24/nt@96x80x256"),
    ("exact_matmul", "int8>int32/narrow/fresh/nt@64x256x512"),
    ("exact_matmul", "bfloat16-grouped/cancel/prefill/nt@4x48x32x64"),
    ("exact_matmul", "float8_e4m3fn-rowwise>bfloat16/full/decode/nt@16x128x256"),
    ("exact_attention", "float32/uniform/prefill/math/causal@1x2x2x48x48x64"),
    ("exact_attention", "bfloat16/onehot/grouped/math/bool@1x4x2x32x65x64"),
    ("exact_attention", "float32/onehot/decode/math/float@2x2x2x3x320x64"),
    ("exact_units", "bfloat16/cancel/tiles/gemm@2x16x16x32"),
    ("exact_units", "int8>int32/narrow/tiles/gemm@2x32x32x32"),
    *INTEGERS,
]


def laid_out(out: Path, probe: str, case: str, **changed):
    """Let the module write one case to a directory, as an engine would ask it to."""
    out.mkdir(exist_ok=True)
    made = reproducer.exhibit(probe, case, 7, CPU)
    arguments = {"device": to_json(CPU), "probe": probe, "case": case, "shape": made.problem.shape, "seed": 7}
    arguments |= {"expected": [], "out": str(out), "on": "cpu", "environment": {}, "unset": []}
    arguments |= {"runs": 2, "copied": 1, "core": None}
    return reproducer.answer(arguments | changed, lambda _fraction, _text: None), made


def reproduce(out: Path, *more: str):
    """Run the script as its reader would: another process, another directory, no canaryd on its path."""
    argv = [sys.executable, "-I", str(out / "reproduce.py"), "cpu", *more]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)


READER = """
import json, os, runpy, sys
import torch, torch.nn.attention

for line in sys.stdin:
    argv, printed = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    sys.argv, status = argv, 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        os._exit(status)
"""
"""An interpreter that has loaded torch, which takes longest, and runs each script that it is given in a child."""


@pytest.fixture(scope="module")
def reader():
    """Run scripts as `reproduce` does, by one interpreter."""
    argv = [sys.executable, "-I", "-c", READER]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv, cwd="/", env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(out: Path, *more: str, device: str = "cpu"):
            printed = [out / "stdout", out / "stderr"]
            argv = [str(out / "reproduce.py"), device, *more]
            process.stdin.write(json.dumps([argv, list(map(str, printed))]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            texts = [path.read_text() for path in printed]
            for path in printed:
                path.unlink()
            return subprocess.CompletedProcess(argv, status, *texts)

        yield run


def told(done) -> str:
    """Return the last line of the script's output: the count."""
    return done.stdout.splitlines()[-1]


def flip(path: Path, element: int, bit: int, size: int) -> None:
    """Flip one bit of one element of a .npy file."""
    data = bytearray(path.read_bytes())
    begin = 10 + int.from_bytes(data[8:10], "little")
    data[begin + element * size + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(("probe", "case"), CASES, ids=[case for _, case in CASES])
def test_the_script_computes_what_the_probe_computed(tmp_path, reader, probe, case):
    """On a sound processor every kind of case comes out as its golden says, twice, with exit status 0."""
    answer, made = laid_out(tmp_path / "case", probe, case)
    assert answer["files"][-2:] == ["golden.npy", "reproduce.py"]
    assert {p.name for p in (tmp_path / "case").iterdir()} == set(answer["files"])
    done = reader(tmp_path / "case")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == ["0 of 2 runs were wrong on cpu"]
    assert answer["exactness"] == made.problem.exactness.value


def test_the_script_runs_the_kernel_that_was_wrong_and_no_other(tmp_path, reader):
    """A processor has no memory-efficient kernel: the script says so, and no other kernel proves the device sound."""
    laid_out(tmp_path, "exact_attention", "float32/onehot/prefill/efficient_attention/none@1x2x2x48x48x64")
    done = reader(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("not run: RuntimeError: No viable backend for scaled_dot_product_attention")


def test_the_script_names_the_wrong_element_and_its_bit(tmp_path):
    """One bit of the golden is flipped: exactly that element and bit are reported, in every run, with status 1."""
    laid_out(tmp_path, "exact_matmul", PRODUCT)
    flip(tmp_path / "golden.npy", 5 * 64 + 9, 13, 2)
    core = min(os.sched_getaffinity(0))
    done = reproduce(tmp_path, "3", "--core", str(core))
    assert done.returncode == 1, done.stderr
    found = re.findall(r"run (\d): element \[5, 9\]: expected (0x\w+), got (0x\w+), flipped bits \[13\]", done.stdout)
    assert [run for run, _, _ in found] == ["0", "1", "2"]
    assert {int(want, 16) ^ int(have, 16) for _, want, have in found} == {1 << 13}
    assert done.stdout.splitlines()[-1] == f"3 of 3 runs were wrong on cpu, core {core}"
    assert len(done.stdout.splitlines()) == 5


def test_what_cannot_be_run_is_no_verdict(tmp_path, reader):
    """A device that is not there ends with status 2, not with 0 or 1."""
    laid_out(tmp_path, "exact_integer", "int64/sort/fresh@1024")
    done = reader(tmp_path, device="cuda:99")
    assert done.returncode == 2
    assert done.stderr.startswith("not run: ")


def without(module: str, out: Path, *more: str):
    """Run the script in an interpreter that lacks a module."""
    argv = ["reproduce.py", "cpu", *(more or "1")]
    code = f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv = {argv}\n"
    code += f"runpy.run_path({str(out / 'reproduce.py')!r}, run_name='__main__')"
    argv = [sys.executable, "-I", "-c", code]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def test_a_missing_torch_is_no_wrong_result(tmp_path):
    """Status 2 and one sentence: 1 would say that the device is wrong."""
    laid_out(tmp_path, "exact_integer", "int64/sort/fresh@1024")
    done = without("torch", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"not run: torch cannot be loaded in \S+: .*torch.*\n", done.stderr)


def test_an_interrupted_script_says_what_it_saw(tmp_path):
    """A rare fault takes many runs: those that were made count, and no clean ones among them acquit."""
    laid_out(tmp_path, "exact_matmul", PRODUCT)
    text = (tmp_path / "reproduce.py").read_text()
    every = "            if run % 1 == 0:"
    stopped = f"            if run == 10:\n                raise KeyboardInterrupt\n{every}"
    (tmp_path / "reproduce.py").write_text(text.replace(every, stopped))
    done = reproduce(tmp_path, "1000")
    assert (done.returncode, told(done)) == (2, "0 of 10 runs were wrong on cpu, then interrupted")
    flip(tmp_path / "golden.npy", 5 * 64 + 9, 13, 2)
    done = reproduce(tmp_path, "1000")
    assert (done.returncode, told(done)) == (1, "10 of 10 runs were wrong on cpu, then interrupted")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("0",), "RUNS is 0: wanted 1 or more"),
        (("-1",), "RUNS is -1: wanted 1 or more"),
        (("1", "--core", "99999"), "core 99999 is not usable here"),
        (("1", "--core", "x"), "core x is not usable here"),
    ],
)
def test_what_shows_nothing_is_a_usage_error(tmp_path, more, why):
    """No run at all must not end with 0, nor a run on another core than was asked for; nobody waits for torch."""
    laid_out(tmp_path, "exact_integer", "int64/sort/fresh@1024")
    done = without("torch", tmp_path, *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_the_script_runs_on_the_core_that_failed(tmp_path, reader):
    """By itself; its usage line names the core, and --core changes it."""
    core = max(os.sched_getaffinity(0))
    laid_out(tmp_path, "exact_integer", "int64/sort/fresh@1024", core=core)
    assert f"python3 reproduce.py cpu 2 --core {core}\n" in (tmp_path / "reproduce.py").read_text()
    assert told(reader(tmp_path)) == f"0 of 2 runs were wrong on cpu, core {core}"
    assert told(reader(tmp_path, "--core", "any")) == "0 of 2 runs were wrong on cpu"
    other = min(os.sched_getaffinity(0))
    assert told(reader(tmp_path, "--core", str(other))) == f"0 of 2 runs were wrong on cpu, core {other}"


def test_the_surroundings_are_those_of_the_probe(tmp_path):
    """What changes numbers behind the script's back goes before torch starts, and the probe's own settings come."""
    asked = {"environment": {"ATEN_CPU_CAPABILITY": "default"}, "unset": ["ONEDNN_DEFAULT_FPMATH_MODE"]}
    laid_out(tmp_path, "exact_matmul", PRODUCT, **asked)
    text = (tmp_path / "reproduce.py").read_text()
    head = text[: text.index("try:\n    import torch")] + "print(sorted(os.environ))"
    surroundings = {**os.environ, "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}
    argv = [sys.executable, "-c", head, "cpu"]
    done = subprocess.run(argv, env=surroundings, capture_output=True, text=True, timeout=60, check=True)
    names = ast.literal_eval(done.stdout)
    assert "ATEN_CPU_CAPABILITY" in names
    assert "ONEDNN_DEFAULT_FPMATH_MODE" not in names
    assert reproduce(tmp_path).returncode == 0


def test_the_golden_must_be_the_one_that_was_missed(tmp_path):
    """The bits that the evidence expected are looked up in the golden made now; another golden is not laid out."""
    _, made = laid_out(tmp_path / "first", "exact_matmul", PRODUCT)
    raw = int(made.problem.golden.view(torch.int16)[3, 4]) % (1 << 16)
    laid_out(tmp_path / "same", "exact_matmul", PRODUCT, expected=[[[3, 4], f"0x{raw:04x}"]])
    with pytest.raises(Skip, match=r"another one: element \[3, 4\] is"):
        laid_out(tmp_path / "other", "exact_matmul", PRODUCT, expected=[[[3, 4], f"0x{raw ^ 1:04x}"]])
    with pytest.raises(Skip, match=r"it has no element \[99, 0\]"):
        laid_out(tmp_path / "beyond", "exact_matmul", PRODUCT, expected=[[[99, 0], "0x0000"]])
    with pytest.raises(Skip, match="the one that failed had M=1"):
        laid_out(tmp_path / "shape", "exact_matmul", PRODUCT, shape="M=1 N=64 K=128")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("probe", "case", "reason"),
    [
        ("model_canary", "float32/tide", "not made from a seed alone"),
        ("exact_matmul", "float31/dense/prefill/nt@8x8x8", "does not know the case"),
        ("exact_integer", "int64/juggle/fresh@1024", "does not know the case"),
        ("exact_matmul", "only", "does not know the case"),
    ],
)
def test_what_cannot_be_made_again_says_so(probe, case, reason):
    """Never a wrong exhibit, never a traceback."""
    with pytest.raises(Skip, match=reason):
        reproducer.exhibit(probe, case, 1, CPU)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("square", (96, 96, 96, 0)), ("decode", (4, 192, 96, 0)), ("long", (96, 96, 480, 0)), ("batched", (9, 9, 96, 4))],
)
def test_the_operands_are_those_that_failed(kind, sizes):
    """Products of one kind share pools, which may have more rows than the product: the files hold the same draw."""
    case = product_case(CPU, "bfloat16", "bfloat16", "dense", kind, "nt", sizes)
    made = reproducer.exhibit("exact_matmul", case.name, 7, CPU).problem
    right = case.build(7)
    for one, other in zip((*made.operands, made.golden), (*right.operands, right.golden), strict=True):
        assert host_same_bits(one, other)
