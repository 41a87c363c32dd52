"""Recompute every fixed golden in plain Python integers and write the digests that the package ships.

Run it from the root of a checkout, with torch: `python tools/make_goldens.py`. Operands come from the probes' own
builders. The rest is independent of the builders: this script decodes values from their bits, adds them as Python
integers, rounds, encodes and digests. A golden that differs in one bit ends the run with an error.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import struct
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from canaryd.model import Device  # noqa: E402
from canaryd.worker.numeric.cases import Case  # noqa: E402
from canaryd.worker.numeric.integers import digest  # noqa: E402
from canaryd.worker.numeric.operands import Problem  # noqa: E402
from canaryd.worker.numeric.tensors import bits, need_torch  # noqa: E402
from canaryd.worker.numeric.verify import FIXED_SEED  # noqa: E402

PROBES = ("exact_matmul", "exact_attention", "exact_integer")
DEVICES = tuple(
    Device(uuid=name, backend=backend, index=0, model=name, detail=detail)
    for name, backend, detail in (
        ("x86", "cpu", {"architecture": "x86_64"}),
        ("arm", "cpu", {"architecture": "aarch64"}),
        ("ampere", "cuda", {"capability": "8.0"}),
        ("hopper", "cuda", {"capability": "9.0"}),
        ("instinct", "rocm", {"capability": "9.4"}),
        ("apple", "mps", {}),
        ("xe", "xpu", {}),
        ("ascend", "npu", {}),
        ("mlx on x86", "mlx-cpu", {"architecture": "x86_64"}),
        ("mlx on arm", "mlx-cpu", {"architecture": "arm64"}),
        ("mlx on a gpu", "mlx-cuda", {}),
        ("onnx on x86", "onnx-cpu", {"architecture": "x86_64"}),
        ("webgpu", "webgpu-cpu", {"architecture": "x86_64"}),
        ("onnx elsewhere", "onnx-coreml", {}),
        ("jax on x86", "jax-cpu", {"architecture": "x86_64"}),
        ("jax on a gpu", "jax-cuda", {}),
        ("jax on a tpu", "jax-tpu", {}),
    )
)
"""One device for each value that `canaryd.worker.numeric.characterised.accumulator` can return."""

# Significand bits (the implicit one included), exponent bits.
LAYOUT = {
    "float64": (53, 11),
    "float32": (24, 8),
    "bfloat16": (8, 8),
    "float16": (11, 5),
    "float8_e4m3fn": (4, 4),
    "float8_e5m2": (3, 5),
    "float8_e4m3fnuz": (4, 4),
    "float8_e5m2fnuz": (3, 5),
}
VANISHES = {"float64": 746, "float32": 104, "bfloat16": 104, "float16": 104}
"""Format of values → smallest x for which exp(-x) rounds to 0 in softmax, which computes narrow formats in float32."""
_MASK64 = (1 << 64) - 1


class Wrong(Exception):
    """Raised for a golden that the recomputation does not confirm."""


def decode(raw: int, form: str) -> tuple[int, int]:
    """Return (m, e) for a bit pattern of `form`, whose value is m * 2**e; raise `Wrong` for NaN and infinity."""
    precision, width = LAYOUT[form]
    fraction = precision - 1
    mantissa, exponent = raw & ((1 << fraction) - 1), raw >> fraction & ((1 << width) - 1)
    top = (1 << width) - 1
    fnuz = form.endswith("fnuz")  # only negative zero's pattern is none of its numbers
    if raw == 1 << (fraction + width) if fnuz else exponent == top and (form != "float8_e4m3fn" or mantissa == 7):
        raise Wrong(f"{raw:#x} is not a finite {form}")
    bias = (1 << (width - 1)) - (0 if fnuz else 1)
    if exponent:
        mantissa, exponent = mantissa + (1 << fraction), exponent - 1
    return (-mantissa if raw >> (fraction + width) & 1 else mantissa), exponent + 1 - bias - fraction


def round_to(value: int, precision: int) -> int:
    """Return an integer rounded to `precision` significant bits, to nearest, ties to even."""
    shift = abs(value).bit_length() - precision
    if shift <= 0:
        return value
    quotient, rest = divmod(abs(value), 1 << shift)
    half = 1 << (shift - 1)
    quotient += rest > half or (rest == half and quotient % 2 == 1)
    return (quotient << shift) * (-1 if value < 0 else 1)


def encode(value: int, scale: int, form: str) -> int:
    """Return the bits of value * 2**scale rounded once to `form`; raise `Wrong` for zero, subnormal and overflow."""
    precision, width = LAYOUT[form]
    rounded = round_to(value, precision)
    exponent = abs(rounded).bit_length() - 1 + scale
    emax = (1 << (width - 1)) - 1
    if not value or not 1 - emax <= exponent <= emax:
        raise Wrong(f"{value} * 2**{scale} is zero, subnormal or too large for {form}")
    exact = float(Fraction(rounded) * Fraction(2) ** scale)  # at most 53 significant bits: no rounding here
    if form == "bfloat16":  # the upper half of a float32
        return cast("int", struct.unpack("<I", struct.pack("<f", exact))[0]) >> 16
    code, as_integer = {"float64": ("<d", "<Q"), "float32": ("<f", "<I"), "float16": ("<e", "<H")}[form]
    return cast("int", struct.unpack(as_integer, struct.pack(code, exact))[0])


def mix(z: int) -> int:
    """Return a 64-bit integer mixed by the last step of SplitMix64."""
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
    return z ^ z >> 31


def digest_of(raw: Sequence[int], width: int) -> str:
    """Return the digest of `raw`, unsigned bit patterns of `width` bits in order, as `integers.digest` defines it."""
    sign = 1 << (width - 1) if width > 8 else 0  # patterns of more than one byte are read as signed integers
    total = len(raw)
    for index, value in enumerate(raw, 1):
        total += mix(
            (mix((value - (value & sign) * 2 + 0x94D049BB133111EB) & _MASK64) + index * 0x9E3779B97F4A7C15) & _MASK64
        )
    return f"{mix(total & _MASK64):016x}"


def form_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype: "float32", "int64"."""
    return str(tensor.dtype).removeprefix("torch.")


def raw_of(tensor: Any) -> list[int]:
    """Return the unsigned bit patterns of a tensor's elements, in order."""
    mask = (1 << tensor.element_size() * 8) - 1
    return [v & mask for v in bits(tensor.contiguous()).reshape(-1).tolist()]


def integers_of(tensor: Any, precision: int = 64) -> tuple[list[int], int]:
    """Return (values, scale): element i is exactly values[i] * 2**scale.

    Raises `Wrong` if an element has more than `precision` significant bits.
    """
    pairs = [decode(raw, form_of(tensor)) for raw in raw_of(tensor)]
    for m, _ in pairs:
        if m and (abs(m) // (m & -m)).bit_length() > precision:
            raise Wrong(f"an operand has more than {precision} significant bits")
    scale = min((e for m, e in pairs if m), default=0)
    return [m << (e - scale) if m else 0 for m, e in pairs], scale


def _rows(values: Sequence[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(values[i : i + length]) for i in range(0, len(values), length)]


def product(problem: Problem, precision: int = 64) -> list[int]:
    """Return the bit patterns of a product (…, M, K) x (…, K, N), in order, computed from the operands alone."""
    a, b = problem.operands
    K = a.shape[-1]
    if form_of(a) in ("int8", "uint8"):
        left, right = _rows(a.reshape(-1).tolist(), K), _rows(b.transpose(-1, -2).reshape(-1).tolist(), K)
        return [sum(map(mul, row, column)) & 0xFFFFFFFF for row in left for column in right]
    (av, a_scale), (bv, b_scale) = integers_of(a, precision), integers_of(b.transpose(-1, -2), precision)
    form = form_of(problem.golden)
    left, right, M, N = _rows(av, K), _rows(bv, K), a.shape[-2], b.shape[-1]
    return [
        encode(sum(map(mul, row, column)), a_scale + b_scale, form)
        for item in range(len(left) // M)
        for row in left[item * M : (item + 1) * M]
        for column in right[item * N : (item + 1) * N]
    ]


def quantized(problem: Problem, packing: str) -> list[int]:
    """Return the bit patterns of a product with quantised weights, computed from the operands alone.

    `packing`: the weights' form, such as "mxfp8"; the columns of the weight matrix are stored as rows.
    """
    x, words, scales, *offsets = problem.operands
    (xv, x_scale), K, N = integers_of(x), x.shape[-1], words.shape[0]
    width = 8 if packing.startswith(("affine8", "mxfp8")) else 4
    group = K // scales.shape[-1]
    codes = [word >> shift & (1 << width) - 1 for word in raw_of(words) for shift in range(0, 32, width)]
    if packing.startswith("affine"):
        meant = [Fraction(code) for code in codes]
        steps, bases = ([_fraction(raw, form_of(t)) for raw in raw_of(t)] for t in (scales, offsets[0]))
    else:
        four = [Fraction(v) * sign for sign in (1, -1) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
        meant = [_fraction(code, "float8_e4m3fn") if width == 8 else four[code] for code in codes]
        of_e4m3 = packing == "nvfp4"
        steps = [_fraction(raw, "float8_e4m3fn") if of_e4m3 else Fraction(2) ** (raw - 127) for raw in raw_of(scales)]
        bases = [Fraction(0)] * len(steps)
    weights = [meant[i] * steps[i // group] + bases[i // group] for i in range(N * K)]
    unit = min(-(w.denominator.bit_length() - 1) for w in weights)
    columns = _rows([int(w / Fraction(2) ** unit) for w in weights], K)
    form = form_of(problem.golden)
    return [encode(sum(map(mul, row, c)), x_scale + unit, form) for row in _rows(xv, K) for c in columns]


def _fraction(raw: int, form: str) -> Fraction:
    m, e = decode(raw, form)
    return m * Fraction(2) ** e


def attention(problem: Problem, *, causal: bool = False) -> list[int]:
    """Return the bit patterns of attention, computed from its definition: scores, mask, softmax, mean of values.

    Raises `Wrong` unless 2**k keys give each query its best allowed score, which is exactly 0, and all other allowed
    scores are so far below 0 that their exponentials are zero: only then the softmax is exact.
    """
    query, key, value, mask = problem.operands
    B, H, L, D = query.shape
    G, S = key.shape[1], key.shape[2]
    form = form_of(value)
    (qv, q_scale), (kv, k_scale), (vv, v_scale) = (integers_of(t) for t in (query, key, value))
    queries, keys = _rows(qv, D), _rows(kv, D)
    columns = _rows(vv, D)
    allowed = [[not causal or s <= row for s in range(S)] for row in range(L)]
    if mask.numel():
        allowed = [[bool(v) if form_of(mask) == "bool" else v == 0 for v in row] for row in mask.tolist()]
    # score / sqrt(D) <= -gap  <=>  score <= 0 and score**2 >= gap**2 * D, all in integers and fractions.
    enough = VANISHES[form] ** 2 * D
    unit = Fraction(2) ** (q_scale + k_scale)
    out = []
    for b, h, row in itertools.product(range(B), range(H), range(L)):
        first = (b * G + h // (H // G)) * S
        asked = queries[(b * H + h) * L + row]
        scores = {s: sum(map(mul, asked, keys[first + s])) for s in range(S) if allowed[row][s]}
        winners = [s for s, score in scores.items() if score == 0]
        for score in set(scores.values()) - {0}:
            if score > 0 or (score * unit) ** 2 < enough:
                raise Wrong(f"a score of {float(score * unit)} is neither 0 nor far enough below it")
        k = max(0, len(winners).bit_length() - 1)
        if len(winners) != 1 << k:
            raise Wrong(f"{len(winners)} keys win; wanted a power of two")
        out += [encode(sum(c), v_scale - k, form) for c in zip(*(columns[first + s] for s in winners), strict=True)]
    return out


def index_operation(problem: Problem, name: str) -> list[int]:
    """Return the bit patterns of the integer or index operation `name`, computed from the operands alone."""
    lists = [t.tolist() for t in problem.operands]
    first, second = lists[0], lists[-1]
    n = len(first)

    def add(source: Iterable[int], target: Iterable[int], out: list[int], *, onto: bool) -> list[int]:
        for value, place in zip(source, target, strict=True):
            out[place] = value + (out[place] if onto else 0)
        return out

    operations: dict[str, Callable[[], Iterable[int]]] = {
        "gather": lambda: map(first.__getitem__, second),
        "embedding": lambda: itertools.chain.from_iterable(map(first.__getitem__, second)),
        "scatter": lambda: add(first, second, [0] * n, onto=False),
        "index_add": lambda: add(first, second, [1] * (n // 8), onto=True),
        "cumsum": lambda: (sum(first[: i + 1]) for i in range(n)),
        "sort": lambda: sorted(first),
        "topk": lambda: [i for _, i in sorted(((v, i) for i, v in enumerate(first)), reverse=True)][: n // 16],
        "modulo": lambda: (v - m * (v // m) for v, m in zip(first, second, strict=True)),
        "bucketize": lambda: (bisect_left(second, v) for v in first),
        "experts": lambda: (t ^ e * 0x9E3779B9 for t, e in zip(first, second, strict=True)),
    }
    mask = (1 << problem.golden.element_size() * 8) - 1
    return [v & mask for v in operations[name]()]


def recompute(probe: str, case: str, problem: Problem) -> list[int]:
    """Return the unsigned bit patterns of one case's golden, computed without the code of its builder."""
    parts = case.partition("@")[0].split("/")
    if probe == "exact_integer":
        return index_operation(problem, parts[1])
    if probe == "exact_attention":
        return attention(problem, causal=parts[-1] == "causal")
    if parts[1] == "codes":
        return quantized(problem, parts[0].partition(">")[0])
    return product(problem, 11 if parts[0].startswith("tfloat32") else 64)


def confirm(probe: str, case: str, problem: Problem) -> str:
    """Return the digest of a golden, if the recomputation gives the same bits; else raise `Wrong` with the case."""
    raw = raw_of(problem.golden)
    try:
        expected = recompute(probe, case, problem)
    except Wrong as error:
        raise Wrong(f"{case}: {error}") from error
    differ = [i for i, (want, have) in enumerate(zip(expected, raw, strict=True)) if want != have]
    if differ:
        i = differ[0]
        raise Wrong(f"{case}: {len(differ)} elements differ, first {i}: built {raw[i]:#x}, recomputed {expected[i]:#x}")
    made = digest_of(raw, problem.golden.element_size() * 8)
    if made != digest(problem.golden):
        raise Wrong(f"{case}: digest {digest(problem.golden)}, recomputed {made}")
    return made


def load(probe: str) -> Any:
    """Return the module of a probe, imported by its path as the worker does."""
    spec = importlib.util.spec_from_file_location(f"canaryd_golden_{probe}", ROOT / "probes" / f"{probe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fixed_cases(probe: str) -> Iterator[Case]:
    """Yield every fixed case of a probe on any of `DEVICES`, each name once."""
    module, seen = load(probe), set()
    for device in DEVICES:
        for case in module.fixed_cases(device):
            if case.name not in seen:
                seen.add(case.name)
                yield case


def digests(probe: str) -> dict[str, str]:
    """Return case name → digest for every fixed case of a probe; raise `Wrong` at the first golden not confirmed."""
    made: dict[str, str] = {}
    known: dict[Any, str] = {}  # kernels share problems: recompute each problem once
    for case in fixed_cases(probe):
        build = cast("partial[Problem]", case.build)
        key = (build.func, build.args, tuple(build.keywords.items()))
        if key not in known:
            known[key] = confirm(probe, case.name, case.build(FIXED_SEED))
        made[case.name] = known[key]
    return made


def main() -> None:
    """Write one file of digests per probe into probes/golden."""
    need_torch()
    for probe in PROBES:
        made = digests(probe)
        path = ROOT / "probes" / "golden" / f"{probe}.json"
        path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
        sys.stdout.write(f"{path.name}: {len(made)} digests, each golden recomputed in plain integers\n")


if __name__ == "__main__":
    main()
