"""Run the exact canary on inference engines: every answer must equal the proved one bit for bit.

In process: torch under each instruction set, or another `--runtime`: MLX (strict, and with TF32), or a graph in the CPU
provider of ONNX Runtime, which chooses its instruction set itself. The models run in four formats, eager and with each
attention kernel, decoded and in one pass, with one row and two, and in torch's compiled single pass. Every logit is
compared with the proof. The first `--seeds` run native (MLX: strict), and `--others` seeds under each other instruction
set. Served: real servers, as scripts/servers installs them, alone and beside eight other clients; cold (new prompts,
outside the prefix cache if the server allows that) and warm (the same again). Words and all printed log probabilities
are compared. What is not installed is listed as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from canaryd_lab.worker.exact_canary.construct import construct
from canaryd_lab.worker.exact_canary.export import export
from canaryd_lab.worker.exact_canary.prove import Walk
from canaryd_lab.worker.exact_canary.quantised import FORMS

from benchmarks import common, exact_onnx
from benchmarks.clean_runs import of_runtime
from canaryd.facts import DTYPES, Comparison
from canaryd.model import TORCH, Device
from canaryd.probe import Skip
from canaryd.worker.exact_canary import cases
from canaryd.worker.exact_canary.expected import load
from canaryd.worker.exact_canary.run import Runner
from canaryd.worker.exact_canary.shape import EXPERTS, FAMILIES, TINY, Shape
from canaryd.worker.exact_canary.shipped import Model
from canaryd.worker.numeric.tensors import bits, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Unsupported
from probes import exact_endpoint
from tests.servers import KINDS, Server, beside, serving
from tests.worker.endpoint.served import context

LIKE = Shape(hidden=2048, heads=32, kv_heads=4, head=64, inner=5632, layers=2, vocabulary=32000)
"""Shape of a Llama with 1.1 billion weights (22 layers), reduced to two layers."""


@dataclass(frozen=True)
class Asked:
    """A server and the kind of model that it serves."""

    server: str
    form: str = ""
    """Form of the exported model: GGUF format or quantised form; "" for a Hugging Face directory in bfloat16."""
    shape: Shape = TINY

    def model(self, shape: Shape, seed: int) -> Model:
        """Return a model that can be exported in this form."""
        return construct(shape, seed, bits=FORMS[self.form].whole if self.form in FORMS else 0)


ENGINES = {
    "llama": Asked("llama", "bfloat16"),
    "llama-experts": Asked("llama", "bfloat16", EXPERTS),
    "mlx": Asked("mlx"),
    "mlx-awq": Asked("mlx", "awq"),
    "mlx-4bit": Asked("mlx", "mlx-4bit"),
    "mlx-8bit": Asked("mlx", "mlx-8bit"),
    "mlx-mxfp8": Asked("mlx", "mlx-mxfp8"),
    "mlx-experts": Asked("mlx", "mlx-8bit", EXPERTS),
    "transformers": Asked("transformers"),
    "transformers-fp8": Asked("transformers", "fp8"),
    "transformers-experts": Asked("transformers", "", EXPERTS),
    "vllm": Asked("vllm"),
    "vllm-awq": Asked("vllm", "awq"),
    "vllm-w8a8": Asked("vllm", "w8a8"),
    "vllm-experts": Asked("vllm", "", EXPERTS),
}
KERNELS: dict[str, tuple[str, ...]] = {TORCH: ("", "FLASH_ATTENTION"), "mlx": ("", "FAST"), "onnx": exact_onnx.KERNELS}
"""Runtime → its attention kernels on processors: operator by operator ("" or "eager"), and the one fused kernel."""
ALONE, BESIDE = "alone", "beside 8 clients"
HOWS = {ALONE: 0, BESIDE: 8}
"""Way of asking a server → number of other clients that ask it at the same time."""


def until(end: float, seeds: range) -> Iterator[int]:
    """Return `seeds` as an iterator that ends at the monotonic time `end`."""
    return itertools.takewhile(lambda _: time.monotonic() < end, seeds)


# --- In process ------------------------------------------------------------------------------------------------------


def in_process(
    name: str, shape: Shape, seeds: range, compiled: int, minutes: float
) -> tuple[dict[str, list[int]], list[str]]:
    """Return ("format/path/kernel" → numbers of models, answers, compared logits, differing logits; what is missing).

    The first `compiled` models also run compiled. No model begins after `minutes`.

    Every fourth model has no anchor, for torch's math kernel; four of eight have Qwen2's shape, with biases. Each model
    runs in one pass in all formats with all kernels. torch and MLX also decode it, in two formats with one kernel in
    turn.
    """
    found: dict[str, list[int]] = {}
    absent: list[str] = []
    device = of_runtime(name)
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as os.environ["TORCHINDUCTOR_CACHE_DIR"]:
        fused = torch.compile(_forward, dynamic=False)
        for number, seed in enumerate(until(end, seeds)):
            family = FAMILIES[number // 4 % len(FAMILIES)]
            model = construct(replace(shape, family=family), seed, anchored=number % 4 != 3)
            rows = 1 if shape == LIKE else 1 + number // 2 % cases.MOST_ROWS
            texts = torch.tensor([cases.text(model, seed, row, model.program.steps) for row in range(rows)])
            walk = Walk(model.shape, model.weights)
            golden = torch.stack([walk.prove(words).logits for words in texts.tolist()])
            for at, form in enumerate(DTYPES):
                wanted = golden.to(getattr(torch, form))
                weights = {place: w.to(wanted.dtype) for place, w in model.weights.items()}
                if name == "onnx":
                    absent += _graphs(found, model, weights, texts, wanted)
                    continue
                for how, got, right in _inferences(device, model, weights, texts, wanted, number, at):
                    _add(found, f"{form}/{how}", got, right)
                if number < compiled and model.program.anchored:
                    _add(found, f"{form}/forced/compiled", fused(model.shape, weights, texts), wanted)
    return found, list(dict.fromkeys(absent))


def _inferences(
    device: Device, model: Model, weights: dict[str, Any], texts: Any, wanted: Any, number: int, form: int
) -> Iterator[tuple[str, Any, Any]]:
    runtime, count = interface.of(device), model.program.steps
    operators, kernels = interface.operators_of(device), KERNELS[runtime.name]
    if runtime.name == TORCH and not model.program.anchored:
        kernels = ("MATH",)
    tail = wanted[:, -count:].contiguous()
    tokens, prompts = runtime.upload((texts, texts[:, : texts.shape[1] - count + 1].contiguous()), device)
    placed = dict(zip(weights, runtime.upload(tuple(weights.values()), device), strict=True))
    for at, kernel in enumerate(kernels):
        runner, how = Runner(model.shape, placed, kernel, operators=operators), kernel.lower() or "eager"
        with contextlib.suppress(NotImplementedError):  # this runtime has no such kernel for this format
            yield f"forced/{how}", runtime.download(operators.run(partial(runner.forward, tokens))), wanted
            if form % 2 == number // 8 % 2 and at == number % len(kernels):
                decoded = operators.run(lambda: runner.decode(prompts, count)[1])  # noqa: B023  called here
                yield f"decode/{how}", runtime.download(decoded), tail


def _graphs(found: dict[str, list[int]], model: Model, weights: dict[str, Any], texts: Any, wanted: Any) -> list[str]:
    """Add the results of ONNX Runtime, in one pass and decoded, to `found`; return a line for each missing kernel."""
    count, absent = model.program.steps, []
    prompts, tail = texts[:, : texts.shape[1] - count + 1], wanted[:, -count:].contiguous()
    form = str(wanted.dtype).removeprefix("torch.")
    for kernel in KERNELS["onnx"]:
        if kernel == "attention" and form == "float64" and model.program.anchored:
            continue  # it has no such kernel, and its own decomposition multiplies q and k by a root each
        try:
            runner = exact_onnx.Runner(model.shape, weights, kernel)
        except Unsupported as error:
            absent.append(f"ONNX Runtime, {form}, {kernel}: {error}")
            continue
        _add(found, f"{form}/forced/{kernel}", runner.forward(texts), wanted)
        _add(found, f"{form}/decode/{kernel}", runner.decode(prompts, count)[1], tail)
    return absent


def _forward(shape: Shape, weights: dict[str, Any], tokens: Any) -> Any:
    return Runner(shape, weights).forward(tokens)


def _add(found: dict[str, list[int]], name: str, got: Any, wanted: Any) -> None:
    differ = int((bits(got.contiguous()) != bits(wanted)).sum())
    _sum(found, name, [1, got.shape[0], got.numel(), differ])


def _sum(found: dict[str, list[int]], name: str, numbers: list[int]) -> None:
    found[name] = [a + b for a, b in zip(found.get(name, [0] * len(numbers)), numbers, strict=True)]


def child(words: argparse.Namespace) -> None:
    """Print the result of `in_process` as JSON, in a process of its own: libraries choose kernels at their start."""
    shape = LIKE if words.child == "like" else TINY
    seeds = range(words.first, words.first + words.seeds)
    with interface.named(words.runtime).strict(of_runtime(words.runtime)), torch.inference_mode():
        print(json.dumps(in_process(words.runtime, shape, seeds, words.compiled, words.minutes)))


def in_process_rows(words: argparse.Namespace) -> tuple[list[list[Any]], list[str]]:
    """Return (rows of the table, what could not run), from one process per core with one thread each."""
    cores = len(os.sched_getaffinity(0))
    wanted: Sequence[tuple[str, str, int]] = (
        ("tiny", "native", words.seeds),
        ("tiny", "avx2", words.others),
        ("tiny", "baseline", words.others),
        ("like", "native", words.likes),
    )
    if words.runtime == "mlx":
        wanted = (
            ("tiny", "strict", words.seeds),
            ("tiny", "tf32", words.others),
            ("like", "strict", words.likes),
        )
    elif words.runtime == "onnx":
        if reason := exact_onnx.why_not():
            return [], [f"ONNX Runtime: {reason}"]
        wanted = (("tiny", "native", words.seeds), ("like", "native", words.likes))
    jobs = [
        (size, instructions, 1 + part * seeds // cores, (part + 1) * seeds // cores - part * seeds // cores)
        for size, instructions, seeds in wanted
        for part in range(cores)
    ]
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    absent: list[str] = []
    with ThreadPoolExecutor(cores) as pool:
        for job, (status, text) in zip(jobs, pool.map(partial(_run_child, words), jobs), strict=True):
            if status:
                absent.append(f"{words.runtime}, {job[0]}, {job[1]}, seeds from {job[2]}: exit status {status}")
                continue
            counts, lacking = json.loads(text)
            absent += [line for line in lacking if line not in absent]
            for name, numbers in counts.items():
                _sum(found.setdefault(job[:2], {}), name, numbers)
    rows = []
    for (size, instructions), counts in found.items():
        library = f"{words.runtime}, {instructions}"
        engine = f"ONNX Runtime {exact_onnx.version()}" if words.runtime == "onnx" else library
        for name, numbers in counts.items():
            form, path, kernel = name.split("/")
            rows.append([engine, size, form, f"{path}, {kernel}", *numbers])
    return rows, absent


def _run_child(words: argparse.Namespace, job: tuple[str, str, int, int]) -> tuple[int, str]:
    size, instructions, first, seeds = job
    if not seeds:
        return 0, "[{}, []]"
    compiled = words.compiled if size == "tiny" and first == 1 and words.runtime == TORCH else 0
    given = {
        "child": size,
        "runtime": words.runtime,
        "first": first,
        "seeds": seeds,
        "compiled": compiled,
        "minutes": words.minutes,
    }
    print(f"{words.runtime}, {size}, {instructions}, {seeds} seeds from {first}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engines", *(f"--{name}={value}" for name, value in given.items())],
        cwd=common.ROOT,
        env=common.worker_environment(instructions) | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=False,
    )
    return done.returncode, done.stdout.decode()


# --- Served ----------------------------------------------------------------------------------------------------------


def served(asked: Asked, models: Iterator[Model], level: str) -> tuple[Counter[tuple[str, str]], str]:
    """Let one server serve model after model; return ((way of asking, kind) → count, reason for an early end or "").

    At level standard each model is asked alone and beside clients. At level quick it is asked alone; each eighth model
    beside clients instead. The right words are the same for all seeds, so words do not show which model is served; log
    probabilities do, if the server prints them. `test_exact_real` shows that each server changes its model.
    """
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="canaryd-engines-") as work, contextlib.ExitStack() as running:
        server: Server | None = None
        for model in models:
            directory = Path(work) / f"{asked.server}-{model.seed}"
            export(model, directory, form=asked.form)
            try:
                if server is None:
                    started = serving(asked.server, directory, Path(work), VLLM_SERVER_DEV_MODE="1")
                    server = running.enter_context(started)
                else:
                    shutil.rmtree(server.directory)
                    server.turn_to(directory)
            except (AssertionError, OSError) as error:
                return found, f"seed {model.seed} was not served: {error}"
            prompts = [question.text for question in load(directory).questions]
            for how in HOWS if level == "standard" else (BESIDE if model.seed % 8 == 0 else ALONE,):
                with beside(server, prompts[: HOWS[how]]):
                    _ask(server, level, how, found)
                found[how, "models"] += 1
            print(f"seed {model.seed}: {dict(found)}", file=sys.stderr, flush=True)
    return found, ""


def _ask(server: Server, level: str, how: str, found: Counter[tuple[str, str]]) -> None:
    settings = {"exact": str(server.directory), "model": server.model, "timeout": 120.0}
    given = context(server.url, level=level, budget=60.0, settings=settings)
    try:
        for fact in exact_endpoint.run(given):
            if isinstance(fact, Comparison):
                kind = {"alone": "cold", "again": "warm"}.get(fact.case.partition("/")[2], "at once")
                found[how, kind] += fact.trials
                found[how, "wrong"] += fact.wrong_trials
    except Skip as error:
        found[how, f"not compared: {error}"] += 1


def served_rows(words: argparse.Namespace) -> tuple[list[list[Any]], list[str]]:
    """Return (rows of the table, servers that are missing). No model begins after `words.minutes`."""
    rows, absent = [], []
    end = time.monotonic() + 60 * words.minutes
    for name in words.engines:
        asked = ENGINES[name]
        program, form = KINDS[asked.server].program, asked.form or "bfloat16"
        if not KINDS[asked.server].found():
            absent.append(f"{name}: {program} is not installed (scripts/servers DIR {asked.server})")
            continue
        for size, shape, seeds in (
            ("experts" if asked.shape == EXPERTS else "tiny", asked.shape, words.served),
            ("like", LIKE, words.likes if asked.shape == TINY else 0),
        ):
            print(f"{name}, {size}", file=sys.stderr, flush=True)
            wanted = range(words.first, words.first + seeds)
            found, reason = served(asked, (asked.model(shape, s) for s in until(end, wanted)), words.level)
            for how in HOWS:
                of = [found[how, kind] for kind in ("models", "cold", "warm", "at once")]
                if of[0]:
                    rows.append([program, size, form, how, *of, sum(of[1:]), found[how, "wrong"]])
            if reason:
                absent.append(f"{name}, {size}: {reason}")
            elif seeds and not found:
                absent.append(f"{name}, {size}: the {words.minutes:g} minutes were over")
            absent += [f"{name}, {size}, {how}: {kind} ({n} runs)" for (how, kind), n in found.items() if ":" in kind]
    return rows, absent


def main() -> None:
    """Test every engine and write the report; exit with 1 if a value differs or a server is wrong."""
    parser = common.options(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="models in process (default: %(default)s)")
    parser.add_argument("--others", type=int, default=5, help="of avx2 and baseline (default: %(default)s)")
    parser.add_argument("--compiled", type=int, default=1, help="of these compiled (default: %(default)s)")
    parser.add_argument("--likes", type=int, default=0, help="models of a real one's sizes (default: %(default)s)")
    parser.add_argument("--served", type=int, default=2, help="models for each server (default: %(default)s)")
    parser.add_argument(
        "--level",
        choices=("quick", "standard"),
        default="standard",
        help="quick: few answers of each served model, beside clients in one of eight",
    )
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no model after so many")
    parser.add_argument(
        "--only", choices=("in-process", "served"), default="", help="one half; its result's name says so"
    )
    parser.add_argument(
        "--runtime",
        choices=tuple(KERNELS),
        default=TORCH,
        help="in process; another than torch is run in process alone",
    )
    parser.add_argument("--child", choices=("tiny", "like"), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=1, help="seed of the first model served (default: %(default)s)")
    words = parser.parse_args()
    if words.child:
        child(words)
        return
    if words.runtime != TORCH:
        words.only = "in-process"
    started, facts = time.monotonic(), common.machine()
    inside, missing = ([], []) if words.only == "served" else in_process_rows(words)
    outside, absent = ([], []) if words.only == "in-process" else served_rows(words)
    heads = (
        ["engine", "size", "format", "how", "models", "answers", "logits", "differ"],
        ["server", "size", "form", "how", "models", "cold", "warm", "at once", "answers", "wrong"],
    )
    differ, wrong = sum(row[-1] for row in inside), sum(row[-1] for row in outside)
    body = ""
    if inside:
        body += f"In process: {differ} of {sum(row[-2] for row in inside):,} logits differ, "
        body += f"in {sum(row[-3] for row in inside):,} answers.\n\n{common.table(heads[0], inside)}\n"
    if outside:
        body += f"Served: {wrong} of {sum(row[-2] for row in outside):,} answers are wrong.\n\n"
        body += common.table(heads[1], outside)
    body += "".join(f"\n- not run: {line}" for line in missing + absent) + "\n"
    data = {"in process": inside, "served": outside, "not run": missing + absent}
    facts |= {"seconds": f"{time.monotonic() - started:.0f}"}
    name = f"engines-{words.only if words.runtime == TORCH else words.runtime}" if words.only else "engines"
    common.write(words.out, name, "The exact canary among engines", facts, body, data)
    sys.exit(1 if differ or wrong else 0)


if __name__ == "__main__":
    if "--child" not in sys.argv:
        os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
