"""Write a failing case to files for people without canaryd: operands, golden (right result), a script that needs torch.

The host makes the tensors again from case and seed and compares them with those of the failure; it leaves out a case
that differs. docs/dossier.md describes the files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from canaryd.codec import from_json
from canaryd.facts import GRAPH, Exactness
from canaryd.model import TORCH, Device
from canaryd.probe import Skip
from canaryd.worker.numeric import attention, grouped, indexing, scaled
from canaryd.worker.numeric.characterised import accumulator, room_of
from canaryd.worker.numeric.operands import POOLS, Problem, Product, build, build_int8
from canaryd.worker.numeric.products import RECIPES
from canaryd.worker.numeric.tensors import FORMATS, bits, bytes_of, need_torch, on_core, visible_cores
from canaryd.worker.units.tiles import Tiles

Progress = Callable[[float, str], None]

LARGEST = 256 << 20
"""Largest size in bytes of a case's operands and golden: larger files cannot be sent by mail."""
DESCRIPTIONS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<i2", "int64": "<i8", "int32": "<i4"}
DESCRIPTIONS |= {"int8": "|i1", "bool": "|b1"}
"""torch dtype → NumPy's name in the file; formats that NumPy lacks are stored as integers of their width."""
WHY = {
    Exactness.UNIVERSAL: "every partial sum and the result are exactly representable, so any order of summation on any"
    "\nhealthy device gives these bits",
    Exactness.ROUNDED: "the sum is exact in any order and is rounded once to the result's format, to nearest even",
}
SCRIPT = Template('''"""Repeat a computation that came out wrong. It needs torch and the files beside it, nothing else.

    python3 reproduce.py DEVICE [RUNS] [--core N]        for example: python3 reproduce.py $device $runs$option

What: $what.
Why golden.npy is right: $why.
Exit status: 0 every run was right, 1 at least one was wrong, 2 it could not be run, or was interrupted while right.
"""

import argparse
import ast
import os
import sys
import time
import warnings
from pathlib import Path

CORE = "$core"  # the processor's core that was wrong; any: none is known
parser = argparse.ArgumentParser()  # before torch, which takes seconds to load
parser.add_argument("device", help="as torch calls it: cpu, cuda:0, xpu:0, …")
parser.add_argument("runs", nargs="?", type=int, default=$runs)
parser.add_argument("--core", default=CORE, help="CPU: run on this core alone; default: $core")
options = parser.parse_args()
if options.runs < 1:
    parser.error(f"RUNS is {options.runs}: wanted 1 or more")
if options.core != "any" and options.core not in map(str, os.sched_getaffinity(0)):
    parser.error(f"core {options.core} is not usable here: --core N names another, --core any pins to none")

# The libraries read these when they start: what would change numbers goes, and the kernels are the same.
for name in $unset:
    os.environ.pop(name, None)
os.environ.update($environment)

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # it is not needed
try:
    import torch
    import torch.nn.attention
except (ImportError, OSError) as error:
    print(f"not run: torch cannot be loaded in {sys.executable}: {error}", file=sys.stderr)
    sys.exit(2)

HERE = Path(__file__).resolve().parent


def load(name, dtype, columns_first=False):
    """Read a .npy file; bfloat16 and float8 are stored as integers of the same width."""
    data = (HERE / name).read_bytes()
    begin = 10 + int.from_bytes(data[8:10], "little")
    flat = torch.frombuffer(bytearray(data[begin:]), dtype=torch.uint8).view(dtype)
    tensor = flat.reshape(ast.literal_eval(data[10:begin].decode())["shape"])
    return tensor.mT.contiguous().mT if columns_first else tensor


def bits(tensor):
    """View the raw bits as integers."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(width[tensor.element_size()])


def compute($names):
    """The computation under test."""
    return $compute


def main():
    where = options.device
    if options.core != "any":
        os.sched_setaffinity(0, {int(options.core)})
        torch.set_num_threads(1)
        where += f", core {options.core}"
$switches
    golden = bits(load("golden.npy", $golden_dtype))
    host = [$loads]
    width = golden.element_size() * 8
    done = wrong = 0
    try:
        for run in range(options.runs):
            if run % $copied == 0:  # fresh copies on the device
                operands = [t.clone(memory_format=torch.preserve_format).to(options.device) for t in host]
            result = bits(compute(*operands).cpu())
            bad = (result != golden).nonzero()
            done, wrong = run + 1, wrong + (len(bad) > 0)
            for at in bad[:10].tolist():
                want, have = (int(t[tuple(at)]) % 2**width for t in (golden, result))
                flipped = [bit for bit in range(width) if (want ^ have) >> bit & 1]
                print(f"run {run}: element {at}: expected {want:#x}, got {have:#x}, flipped bits {flipped}")
            if len(bad) > 10:
                print(f"run {run}: {len(bad)} of {golden.numel()} elements are wrong")
    except KeyboardInterrupt:
        where += ", then interrupted"
    describe = getattr(getattr(torch, torch.device(options.device).type, None), "get_device_properties", str)
    part = describe(options.device)  # with its uuid, where torch knows it
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC, torch {torch.__version__}, {part}")
    print(f"{wrong} of {done} runs were wrong on {where}")
    return 1 if wrong else 0 if done == options.runs else 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        print(f"not run: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
''')
"""Template of the script. Its expression `compute`, its operands and its switches differ from case to case."""


@dataclass(frozen=True)
class Exhibit:
    """One case to write to files."""

    problem: Problem
    compute: str
    """A torch expression of the operands in `names`."""
    names: tuple[str, ...]
    switches: Sequence[str] = ()
    """Python statements that set torch's switches as the probe had set them."""


def exhibit(probe: str, case: str, seed: int, device: Device) -> Exhibit:
    """Build one case of an exact probe again from its name and seed; raise `Skip` if that is impossible."""
    makers = {
        "exact_matmul": _product, "exact_attention": _attention, "exact_integer": _integer, "exact_units": _tiles,
    }  # fmt: skip
    if device.runtime != TORCH:
        raise Skip(f"reproduce.py calls torch, and this case failed through {device.runtime}")
    if probe not in makers:
        raise Skip(f"the operands of {probe} are not made from a seed alone, so they are not laid out as files")
    if "/edge-" in case:
        raise Skip(f"{case}: its operands are too large for files; canaryd check with this case and seed runs it again")
    try:
        return makers[probe](case, seed, device)
    except (KeyError, ValueError, IndexError) as error:
        raise Skip(f"{probe} {case}: this version of canaryd does not know the case ({error})") from error


def _sizes(case: str) -> tuple[list[str], list[int]]:
    name, _, sizes = case.partition("#")[0].partition("@")
    return name.split("/"), [int(n) for n in sizes.split("x")]


def _product(case: str, seed: int, device: Device) -> Exhibit:
    (label, content, kind, layout), sizes = _sizes(case)
    source, _, target = label.partition(">")
    if source == grouped.LABEL:
        groups, M, N, K = sizes
        made = grouped.case(device, content, kind, (groups, M, N, K)).build(seed)
        return Exhibit(made, "torch.nn.functional.grouped_mm(a, b, offs=ends)", ("a", "b", "ends"))
    if "-" in source:
        return _scaled(source.partition("-")[2], target, content, kind, sizes, seed, device)
    if source == "int8":
        M, N, K = sizes
        return Exhibit(build_int8(content, M, N, K, layout, seed), "torch._int_mm(a, b)", ("a", "b"))
    target = target or source
    batch, M, N, K = [0] * (4 - len(sizes)) + sizes
    fixed = re.fullmatch(r"fixed(\d+)", kind)
    room = int(fixed[1]) if fixed else room_of(device, source, target, batched=batch > 0)
    product = Product(content, FORMATS[source], FORMATS[target], room, M, N, K, batch, layout, POOLS.get(kind, 0))
    output = str(FORMATS[target].dtype)
    if source.startswith("float8"):
        one = "torch.ones((), device=a.device)"
        compute = f"torch._scaled_mm(a, b, scale_a={one}, scale_b={one}, out_dtype={output})"
    else:
        compute = "torch.matmul(a, b)" if FORMATS[source].dtype == FORMATS[target].dtype else ""
        compute = compute or f"torch.{'bmm' if batch else 'mm'}(a, b, out_dtype={output})"
    switches = (
        f"torch.backends.cuda.matmul.allow_tf32 = {source == 'tfloat32'}",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    )
    turn = int(case.partition("#")[2].removesuffix(GRAPH) or 0)
    return Exhibit(build(product, seed, turn), compute, ("a", "b"), switches)


def _scaled(name: str, target: str, content: str, kind: str, sizes: list[int], seed: int, device: Device) -> Exhibit:
    M, N, K = sizes
    made = scaled.case(device, scaled.SCALINGS[name], target, content, kind, (M, N, K)).build(seed)
    names = ("a", "b", "scale_a", "scale_b", "all_a", "all_b")[: len(made.operands)]
    output = str(FORMATS[target].dtype)
    if name not in RECIPES:
        return Exhibit(made, f"torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype={output})", names)
    api, two = "torch.nn.functional", "all_a" in names
    *recipes, form = RECIPES[name]
    code, byte = ".view(torch.float4_e2m1fn_x2)" * name.endswith("fp4"), f".view(torch.{form})" * bool(form)
    scales = [
        f"[scale_{side}{byte}{f', all_{side}' * two}], "
        f"[{api}.ScalingType.{recipe}{f', {api}.ScalingType.TensorWise' * two}]"
        for side, recipe in zip("ab", recipes, strict=True)
    ]
    swizzle = f"[{api}.SwizzleType.SWIZZLE_32_4_4{f', {api}.SwizzleType.NO_SWIZZLE' * two}]" if form else "None"
    compute = f"{api}.scaled_mm(a{code}, b{code}, {', '.join(scales)}, {swizzle}, {swizzle}, output_dtype={output})"
    return Exhibit(made, compute, names)


def _tiles(case: str, seed: int, device: Device) -> Exhibit:
    """Return the exhibit of tiles that one core computed; the script's option `--core` selects the core."""
    (label, content, _, path), sizes = _sizes(case)
    if path != "gemm":
        raise Skip("only canaryd's own kernel tells SMs apart; canaryd check with this case and seed runs it again")
    source = label.partition(">")[0]
    made = Tiles(source, content, path, accumulator(device, source).bits, *sizes).build(seed)
    one = "torch._int_mm" if source == "int8" else "torch.matmul"
    compute = f"torch.cat([{one}(x, y.mT) for x, y in zip(a, b)])"
    return Exhibit(replace(made, golden=made.golden.flatten(0, 1)), compute, ("a", "b"))


def _attention(case: str, seed: int, device: Device) -> Exhibit:
    (form, content, _, kernel, mask), (B, H, G, L, S, D) = _sizes(case)
    width = attention.value_bits(device, form, kernel)
    problem = attention.build(attention.Attention(content, FORMATS[form], mask, B, H, G, L, S, D, width), seed)
    options = ", is_causal=True" if mask == "causal" else ""
    options += ", enable_gqa=True" if H != G else ""
    options += ", attn_mask=mask" if mask in ("bool", "float") else ""
    names = ("query", "key", "value", "mask") if mask in ("bool", "float") else ("query", "key", "value")
    compute = f"torch.nn.functional.scaled_dot_product_attention(query, key, value{options})"
    switches = (
        f"only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.{kernel.upper()})",
        'only.__enter__()  # this kernel and no other, as long as "only" is kept',
        "torch.backends.cuda.matmul.allow_tf32 = False",
    )
    return Exhibit(problem, compute, names, switches)


def _integer(case: str, seed: int, device: Device) -> Exhibit:  # noqa: ARG001  one signature for the makers
    (_, name, _), (n,) = _sizes(case)
    problem = indexing.build(name, n, seed)
    return Exhibit(problem, indexing.EXPRESSIONS[name][1], ("a", "b")[: len(problem.operands)])


def npy(tensor: Any) -> bytes:
    """Return a tensor as the bytes of a .npy file, version 1.0, in C order (NumPy Enhancement Proposal 1)."""
    if sys.byteorder != "little":
        raise Skip("this host stores numbers with the highest byte first, and the files are written the other way")
    whole = tensor.detach().cpu()
    kind = DESCRIPTIONS.get(str(whole.dtype).removeprefix("torch."), "|u1")  # of the formats in FP8
    shape = f"({', '.join(map(str, whole.shape))}{',' * (whole.dim() == 1)})"
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin-1")
    return head + bytes_of(whole)


def script(made: Exhibit, what: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of `reproduce.py`; `arguments` are those of `answer`.

    The script runs on the wrong core if one is known. `what` names the probe, case, shape and seed.
    """
    core, environment, unset = arguments["core"], arguments["environment"], arguments["unset"]
    loads = []
    for name, tensor in zip(made.names, made.problem.operands, strict=False):
        columns = ", columns_first=True" if not tensor.is_contiguous() else ""
        loads.append(f'load("{name}.npy", {tensor.dtype}{columns})')
    return SCRIPT.substitute(
        what=what,
        why=WHY[made.problem.exactness],
        device=arguments["on"],
        core="any" if core is None else core,
        option="" if core is None else f" --core {core}",
        environment=repr(dict(sorted(environment.items()))),
        unset="(" + "".join(f"\n    {name!r}," for name in unset) + "\n)" if unset else "()",
        names=", ".join(made.names),
        compute=made.compute,
        runs=int(arguments["runs"]),
        copied=int(arguments["copied"]),
        switches="".join(f"    {line}\n" for line in made.switches).rstrip("\n"),
        golden_dtype=made.problem.golden.dtype,
        loads=", ".join(loads),
    )


def disagreement(golden: Any, expected: Sequence[tuple[Sequence[int], str]]) -> str:
    """Return a sentence on the first difference of `golden` from `expected` (index, right bits in hex), or ""."""
    raw, width = bits(golden), golden.element_size() * 8
    for index, text in expected:
        try:
            value = int(raw[tuple(index)]) % (1 << width)
        except IndexError:
            return f"it has no element {list(index)}"
        if value != int(text, 16):
            return f"element {list(index)} is {value:#x}, and {text} was expected then"
    return ""


def answer(arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Write operands, golden and script of one failing case into a directory; return its "files" and "bytes".

    Arguments: device (a `Device` as JSON, the one that failed), probe, case, shape, seed, expected (pairs of index and
    bits as hex, from the evidence), out (an existing directory), on (torch's name of the device), environment and
    unset (variables that the script sets and removes), runs (its default number), copied (runs between fresh copies of
    the operands), core (the host core that was wrong, on which no tensor is made; None: not known).
    Raises `Skip` if the case cannot be made again exactly.
    """
    need_torch()
    device, case, out = from_json(Device, arguments["device"]), str(arguments["case"]), Path(arguments["out"])
    progress(0.0, case)
    suspect = arguments["core"]
    cores = [c for c in visible_cores() if c != suspect]
    with on_core(cores[0] if cores and suspect is not None else None):
        made = exhibit(arguments["probe"], case, int(arguments["seed"]), device)
    problem = made.problem
    if problem.shape != arguments["shape"]:
        raise Skip(f"made again, {case} has the shape {problem.shape}; the one that failed had {arguments['shape']}")
    if not problem.witnessed:
        raise Skip(f"{case}: integer and float64 arithmetic of this host disagree on the golden made now")
    if why := disagreement(problem.golden, arguments["expected"]):
        raise Skip(f"made again, the golden of {case} is another one: {why}")
    tensors = {**dict(zip(made.names, problem.operands, strict=False)), "golden": problem.golden}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST:
        raise Skip(f"{case}: its tensors take {size:,} bytes, more than the {LARGEST:,} that are laid out")
    for name, tensor in tensors.items():
        (out / f"{name}.npy").write_bytes(npy(tensor))
    what = f"{arguments['probe']} {case}, {problem.shape}, seed {arguments['seed']}"
    (out / "reproduce.py").write_text(script(made, what, arguments), encoding="utf-8")
    files = [*(f"{name}.npy" for name in tensors), "reproduce.py"]
    return {"files": files, "bytes": size, "exactness": problem.exactness.value}
