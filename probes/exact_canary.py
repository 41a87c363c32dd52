"""A language model with one right answer, bit for bit: constructed, proved in integers, run in every format.

Stresses: a whole inference (embedding, norms, rotations, grouped-query attention over a KV cache, SwiGLU, head) with
activations of which nearly none is 0; by prefill and decode; with one row and several; with eager attention and with
every attention kernel of the runtime. A mixture of experts with its router, with eager attention.

Cannot see: what rounding would show (recorded_kernels), large matrices and full load, most faults in rotated or masked
parts of q and k (benchmarks/results/observability-keys.md has the shares), kernels outside torch and MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from canaryd.probe import Context, Device, Fact, NoCase, ProbeSpec, Skipped
from canaryd.worker.exact_canary.cases import EAGER, MOST_ROWS, PATHS, Inference, case, kernels, steps
from canaryd.worker.exact_canary.shape import EXPERTS, TINY
from canaryd.worker.numeric.attention import Attention, blank
from canaryd.worker.numeric.tensors import FORMATS as FORMATS_BY_NAME
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation
from canaryd.worker.toolkit import chosen, need_torch, refusal, verify_all

SPEC = ProbeSpec(
    name="exact_canary",
    summary="a constructed language model with one right answer, bit for bit",
    runtimes=("torch", "mlx"),
    budget={"quick": 1.0, "standard": 15.0, "deep": 60.0},
    every_instruction_set=True,
    order=20,
)
MODELS = Path(__file__).parent / "exact_models"
FORMATS = ("float64", "float32", "bfloat16", "float16")
ROWS = (1, MOST_ROWS)


def run(ctx: Context) -> Iterator[Fact]:
    """Verify inferences of a model and of prompts that the run's seed chooses; skip inferences that cannot run here."""
    need_torch()
    asked = [i for i in every_inference(ctx) if chosen(ctx, i.name)]
    if not asked:
        raise NoCase(ctx.cases, (i.name for i in every_inference(ctx)))
    cannot: dict[tuple[str, str], str] = {}
    for kernel, form in dict.fromkeys((i.kernel, i.form) for i in asked):
        if kernel != EAGER and (why := refuses(ctx.device, kernel, form)):
            cannot[kernel, form] = why
            yield Skipped(case=f"{form}/{kernel}", reason=why)
    taken = [i for i in asked if (i.kernel, i.form) not in cannot]
    yield from verify_all(ctx, [case(ctx.device, i, ctx.seed, MODELS) for i in taken], [], None, list(cannot.values()))


def every_inference(ctx: Context) -> list[Inference]:
    """Return the inferences of a run: all at deep; at other levels some, in rotation.

    At standard, numbers of rows take turns, and the mixture of experts has one format; at quick, paths take turns too,
    and the mixture is left out.
    """
    return [*_of_one_mlp(ctx), *_of_experts(ctx)]


def _of_experts(ctx: Context) -> list[Inference]:
    modes = list(product(FORMATS, PATHS, ROWS))
    if ctx.level != "deep" and not ctx.cases:
        modes = modes[ctx.seed % len(modes) :][:1] if ctx.level == "standard" else []
    return [Inference(*mode, EAGER, steps(EXPERTS, ctx.level), EXPERTS) for mode in modes]


def _of_one_mlp(ctx: Context) -> list[Inference]:
    count = steps(TINY, ctx.level)
    if ctx.level == "deep" or ctx.cases:
        return [Inference(*choice, count) for choice in product(FORMATS, PATHS, ROWS, kernels(ctx.device))]
    found = []
    # The math kernel needs a model of its own, which takes time.
    some = [k for k in kernels(ctx.device) if k != "math" or ctx.level == "standard"]
    for number, (form, kernel, path) in enumerate(product(FORMATS, some, PATHS)):
        turn = ctx.seed + number
        if ctx.level == "quick" and (kernel, path) == ("cudnn_attention", "decode"):
            continue  # cuDNN makes a plan for every length of the cache: 1.7 s on an H200
        if ctx.level == "standard" or turn // len(PATHS) % len(PATHS) == number % len(PATHS):
            found.append(Inference(form, path, ROWS[turn % len(ROWS)], kernel, count))
    return found


def refuses(device: Device, kernel: str, form: str) -> str:
    """Return the reason why the kernel refuses the model's heads in this format; "" if it computes them with zeros."""
    for queries, mask in ((16, "causal"), (1, "none")):
        sizes = (1, TINY.heads, TINY.kv_heads, queries, 16, TINY.head)
        problem = blank(Attention("onehot", FORMATS_BY_NAME[form], mask, *sizes))
        attend = Operation("attention", form, kernel=kernel.upper(), mask=mask)
        if why := refusal(device, problem, partial(interface.of(device).run, attend)):
            return why
    return ""
