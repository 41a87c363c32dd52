"""Train the built-in canary model and write its weights, its reference logits and its goldens.

From the root of a checkout, with torch: `python tools/make_canary.py` trains (seeded, a few minutes on one core),
measures every instruction set and writes to probes/canary; `python tools/make_canary.py --check` recomputes tokens,
margins and logits from the shipped weights, in plain Python as well, and writes nothing. A rerun on another machine may
give other bytes, but must give the same tokens with margins as wide.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "probes" / "canary"
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from canaryd.worker.canary.golden import golden_digest  # noqa: E402
from canaryd.worker.canary.model import (  # noqa: E402
    DTYPES,
    Canary,
    Shape,
    decode,
    load,
    read_safetensors,
    save,
    score,
    write_safetensors,
)
from canaryd.worker.numeric.tensors import strict_switches, torch  # noqa: E402

SEED = 20_260_101
SHAPE = Shape(layers=4, hidden=128, heads=4, kv_heads=2, inner=256)
PROMPT, COUNT = 16, 40
"""Bytes of every prompt and of every continuation: more than 8, since some kernels change there; at least 32."""
TEXTS = {
    "pier": "The lamp at the end of the pier burns blue when it rains",
    "matrix": "Every matrix knows its own inverse, unless it has none. ",
    "boats": "Seven small boats crossed the bay before the fog came in",
    "clock": "In the quiet hall a clock counts what nobody else counts",
    "series": "1 1 2 3 5 8 13 21 34 55 89 144 233 377 610 987 1597 2584",
    "code": "def add(a, b):\n    return a + b\n\ndef mul(a, b):\n    retu",
    "copper": "Copper wires hum at night; the transformer answers low B",
    "record": '{"device": "gpu", "state": "healthy", "errors": 0, "n": ',
}
assert all(len(text) == PROMPT + COUNT for text in TEXTS.values()), {k: len(v) for k, v in TEXTS.items()}
STEPS = 600
WANTED_MARGIN = 16.0
"""Logit units by which training asks the right byte to lead all others together."""
NOISE = 2.0**-7
"""Relative noise in training at every point where a format would round: twice bfloat16's unit roundoff."""
ROBUST = 20
"""The smallest margin over the largest error of bfloat16 and float16 that makes a prompt robust (issue's bar)."""
SAFETY = 8
"""Tolerance of a logit over the largest healthy error, measured or simulated."""
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff u: half the distance from 1 to the next number."""
SIMULATIONS = 30
SENSITIVE = 4
CANDIDATES = 400
SENSITIVE_LENGTH = 24
STACKS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""What torch on x86 is told by `canaryd` to take a given execution path."""


def bytes_of(text: str) -> list[int]:
    """Return a text's tokens."""
    return list(text.encode("ascii"))


def sequences() -> Any:
    """Return all texts as tokens (texts, PROMPT + COUNT)."""
    return torch.tensor([bytes_of(text) for text in TEXTS.values()])


def noisy(size: float, generator: Any, _name: str, tensor: Any) -> Any:
    """Watch that changes every value by a relative error uniform on ±size."""
    error = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) * 2 - 1
    return tensor * (1 + size * error)


def train() -> Canary:
    """Memorise the continuations with wide margins, under noise, and round the weights to bfloat16."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, sizes in SHAPE.tensors().items():
        if len(sizes) == 1:
            weights[name] = torch.ones(sizes)
        else:
            weights[name] = torch.randn(sizes, generator=generator) * sizes[-1] ** -0.5
        weights[name].requires_grad_()
    model = Canary(SHAPE, weights, partial(noisy, NOISE, generator))
    tokens = sequences()
    wanted = tokens[:, PROMPT:]
    optimiser = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=0.02)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        logits = model.forward(tokens[:, :-1])[:, PROMPT - 1 :]
        right = logits.gather(2, wanted[:, :, None])[:, :, 0]
        others = logits.scatter(2, wanted[:, :, None], -math.inf).logsumexp(2)
        short = torch.relu(WANTED_MARGIN - (right - others))
        loss = short.mean() + 0.2 * short.amax(1).mean() + 1e-3 * logits.square().mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}, smallest margin {(right - others).min().item():.2f}")
    return Canary(SHAPE, {name: narrow(tensor) for name, tensor in weights.items()})


def narrow(tensor: Any) -> Any:
    """Round to bfloat16, and what float16 cannot hold as a normal number to zero: all formats then hold it."""
    rounded = tensor.detach().to(torch.bfloat16)
    assert rounded.abs().max() < 2.0**15
    return torch.where(rounded.abs() < 2.0**-14, torch.zeros_like(rounded), rounded)


def margins(logits: Any) -> Any:
    """Return by how much the best logit leads the second."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def simulate(model: Canary, dtype: str, reference: Any) -> float:
    """Return the largest error of a logit in float64 runs whose every rounding point errs at random.

    D. S. Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997. In 16-bit formats the error is uniform on ±u, for
    products and sums inside an operator are float32's, far below. In float32 and float64 a sum of n products errs by
    about sqrt(n) u (N. J. Higham, T. Mary, SIAM J. Sci. Comput. 41, 2019, section 3), n at most the inner size.
    """
    size = ROUNDOFF[dtype] * (1.0 if dtype.endswith("16") else math.sqrt(SHAPE.inner))
    generator = torch.Generator().manual_seed(SEED)
    shaken = Canary(model.shape, model.weights, partial(noisy, size, generator))
    tokens = sequences()
    worst = 0.0
    for _ in range(SIMULATIONS):
        _, logits = score(shaken, tokens[:, :PROMPT], tokens[:, PROMPT:])
        worst = max(worst, (logits - reference).abs().max().item())
    return worst


def reference_of(model: Canary) -> Any:
    """Return the logits (texts, COUNT, vocabulary) in float64, scored in one pass."""
    tokens = sequences()
    return score(model.to("cpu", "float64"), tokens[:, :PROMPT], tokens[:, PROMPT:])[1]


def measure(model: Canary, reference: Any) -> dict[str, dict[str, Any]]:
    """Run every dtype, path and batch here: largest error and smallest margin; tokens must all be right."""
    tokens = sequences()
    found: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        copy = model.to("cpu", dtype)
        errors, margin, right = [], math.inf, True
        for rows in (1, 4):
            for i in range(0, len(tokens), rows):
                part, wanted = tokens[i : i + rows, :PROMPT], tokens[i : i + rows, PROMPT:]
                for chosen, logits in (decode(copy, part, COUNT), score(copy, part, wanted)):
                    right = right and torch.equal(chosen, wanted)
                    errors.append((logits.double() - reference[i : i + rows]).abs().max().item())
                    margin = min(margin, margins(logits.double()).min().item())
        found[dtype] = {"error": max(errors), "margin": margin, "right": right}
    return found


def measure_stack(name: str, weights: Path, reference: Path) -> dict[str, dict[str, Any]]:
    """Do `measure` in a new process that takes one execution path."""
    argv = [sys.executable, str(Path(__file__).resolve()), "--measure", str(weights), str(reference)]
    environment = {k: v for k, v in os.environ.items() if k not in {n for s in STACKS.values() for n in s}}
    done = subprocess.run(argv, env={**environment, **STACKS[name]}, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def sensitive(model: Canary) -> list[dict[str, Any]]:
    """Return the random prompts whose best two bytes lie closest together, in float64."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(33, 127, (CANDIDATES, SENSITIVE_LENGTH), generator=generator)
    logits = model.to("cpu", "float64").forward(tokens)[:, -1]
    thin = margins(logits).argsort()[:SENSITIVE].tolist()
    return [
        {
            "text": bytes(tokens[i].tolist()).decode("ascii"),
            "rivals": logits[i].topk(2).indices.tolist(),
            "margin": margins(logits[i]).item(),
        }
        for i in thin
    ]


def make() -> None:
    """Train, measure and write; refuse to write a model that is not robust."""
    model = train()
    (MODEL / "weights.safetensors").write_bytes(save(model))
    with torch.no_grad():
        reference = reference_of(model)
        file = write_safetensors({"logits": reference}, {})
        (MODEL / "reference.safetensors").write_bytes(file)
        stacks = {
            name: measure_stack(name, MODEL / "weights.safetensors", MODEL / "reference.safetensors") for name in STACKS
        }
        double = model.to("cpu", "float64")
        simulated = {dtype: simulate(double, dtype, reference) for dtype in DTYPES}
        thin = sensitive(model)
    measured = {dtype: max(found[dtype]["error"] for found in stacks.values()) for dtype in DTYPES}
    lead = margins(reference)
    golden: dict[str, Any] = {
        "prompts": {
            name: {
                "text": text[:PROMPT],
                "continuation": text[PROMPT:],
                "margins": [round(m, 3) for m in lead[i].tolist()],
            }
            for i, (name, text) in enumerate(TEXTS.items())
        },
        "sensitive": thin,
        "measured_error": measured,
        "simulated_error": simulated,
        "tolerance": {dtype: SAFETY * max(measured[dtype], simulated[dtype]) for dtype in DTYPES},
        "weights_sha256": hashlib.sha256((MODEL / "weights.safetensors").read_bytes()).hexdigest(),
        "reference_sha256": hashlib.sha256(file).hexdigest(),
    }
    golden["sha256"] = golden_digest(golden)
    (MODEL / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    problems = [
        f"{name}/{dtype}: wrong tokens" for name, s in stacks.items() for dtype in DTYPES if not s[dtype]["right"]
    ]
    report(golden, lead.min().item(), stacks)
    ratio = lead.min().item() / max(measured["bfloat16"], measured["float16"])
    if ratio < ROBUST:
        problems.append(f"the smallest margin is {ratio:.1f} times the largest 16-bit error; wanted {ROBUST}")
    if problems:
        sys.exit("\n".join(problems))


def report(golden: dict[str, Any], margin: float, stacks: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print the numbers that docs/canaries.md quotes."""
    print(f"smallest margin in float64: {margin:.3f}")
    for dtype in DTYPES:
        by_stack = ", ".join(f"{name} {found[dtype]['error']:.3g}" for name, found in stacks.items())
        print(
            f"{dtype}: error {by_stack}; simulated {golden['simulated_error'][dtype]:.3g};"
            f" tolerance {golden['tolerance'][dtype]:.3g}; margin {margin / golden['measured_error'][dtype]:.3g} times"
        )
    print(f"sensitive margins: {', '.join(format(s['margin'], '.3g') for s in golden['sensitive'])}")


def plain_logits(model: Canary, tokens: list[int]) -> list[list[float]]:
    """Return the logits at every position of one sequence, in plain Python floats and code of its own."""
    shape, half = model.shape, model.shape.head // 2
    rows = {name: tensor.to(torch.float64).tolist() for name, tensor in model.weights.items()}

    def linear(matrix: list[list[float]], x: list[float]) -> list[float]:
        return [sum(map(mul, row, x)) for row in matrix]

    def norm(name: str, x: list[float]) -> list[float]:
        scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + 1e-5)
        return [v * scale * g for v, g in zip(x, rows[name], strict=True)]

    def rotate(x: list[float], position: int) -> list[float]:
        turned = [0.0] * len(x)
        for start in range(0, len(x), shape.head):
            for k in range(half):
                angle = position * shape.theta ** (-k / half)
                a, b = x[start + k], x[start + k + half]
                turned[start + k] = a * math.cos(angle) - b * math.sin(angle)
                turned[start + k + half] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    states = [rows["embedding"][token] for token in tokens]
    for i in range(shape.layers):
        keys: list[list[float]] = []
        values: list[list[float]] = []
        for position, state in enumerate(states):
            seen = norm(f"{i}.attention_norm", state)
            query = rotate(linear(rows[f"{i}.query"], seen), position)
            keys.append(rotate(linear(rows[f"{i}.key"], seen), position))
            values.append(linear(rows[f"{i}.value"], seen))
            mixed: list[float] = []
            for h in range(shape.heads):
                mine = slice(h * shape.head, (h + 1) * shape.head)
                at = h // (shape.heads // shape.kv_heads) * shape.head
                theirs = slice(at, at + shape.head)
                scores = [sum(map(mul, query[mine], key[theirs])) / math.sqrt(shape.head) for key in keys]
                chances = [math.exp(s - max(scores)) for s in scores]
                columns = zip(*(value[theirs] for value in values), strict=True)
                mixed += [sum(map(mul, chances, column)) / sum(chances) for column in columns]
            state = [a + b for a, b in zip(state, linear(rows[f"{i}.output"], mixed), strict=True)]  # noqa: PLW2901
            seen = norm(f"{i}.inner_norm", state)
            gate, up = linear(rows[f"{i}.gate"], seen), linear(rows[f"{i}.up"], seen)
            active = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            states[position] = [a + b for a, b in zip(state, linear(rows[f"{i}.down"], active), strict=True)]
    return [linear(rows["embedding"], norm("norm", state)) for state in states]


def check(names: list[str]) -> list[str]:
    """Recompute what ships from the shipped weights; return what does not hold."""
    golden = json.loads((MODEL / "golden.json").read_text())
    data = {name: (MODEL / f"{name}.safetensors").read_bytes() for name in ("weights", "reference")}
    wrong = [f"{n}: digest differs" for n, d in data.items() if hashlib.sha256(d).hexdigest() != golden[f"{n}_sha256"]]
    if golden_digest(golden) != golden["sha256"]:
        wrong.append("golden.json: digest differs")
    if list(golden["prompts"]) != list(TEXTS) or any(
        p["text"] + p["continuation"] != TEXTS[n] for n, p in golden["prompts"].items()
    ):
        wrong.append("golden.json: other texts than this script's")
    model = load(data["weights"])
    wrong += [f"{n}: float16 does not hold it" for n, t in model.weights.items() if not torch.equal(t, narrow(t))]
    shipped = read_safetensors(data["reference"])[0]["logits"]
    again = reference_of(model)
    tolerance = golden["tolerance"]["float64"]
    if not torch.equal(again.argmax(-1), sequences()[:, PROMPT:]):
        wrong.append("float64 tokens differ")
    if (again - shipped).abs().max().item() > tolerance:
        wrong.append("float64 logits differ")
    for i, name in enumerate(TEXTS):
        if (margins(again[i]) - torch.tensor(golden["prompts"][name]["margins"])).abs().max().item() > 1e-3:
            wrong.append(f"{name}: margins differ")
        if name in names:
            plain = torch.tensor(plain_logits(model, bytes_of(TEXTS[name])[:-1]), dtype=torch.float64)[PROMPT - 1 :]
            if (plain - shipped[i]).abs().max().item() > tolerance:
                wrong.append(f"{name}: plain Python gives other logits")
    return wrong


def main() -> None:
    """Make, check, or measure one stack for `make`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="recompute from the shipped weights, write nothing")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with strict_switches():
        if asked.measure:
            weights, reference = (path.read_bytes() for path in asked.measure)
            with torch.no_grad():
                logits = read_safetensors(reference)[0]["logits"]
                print(json.dumps(measure(load(weights), logits)))
        elif asked.check:
            with torch.no_grad():
                wrong = check(list(TEXTS))
            sys.exit("\n".join(wrong) or None)
        else:
            make()


if __name__ == "__main__":
    main()
