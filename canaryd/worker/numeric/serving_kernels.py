"""The kernels that serving uses, with operands that use all mantissa bits: operands, computation, error bounds.

Nobody knows the right bits of these results beforehand: they are recorded (docs/goldens.md). Operands come from integer
arithmetic under `FIXED_SEED` and the case's name, so that they are the same bytes on every device and in every run;
another `MAKER` means that they have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric import error_bounds
from canaryd.worker.numeric.attention import attend
from canaryd.worker.numeric.integers import below, stream
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import FORMATS, Format, torch
from canaryd.worker.numeric.verify import FIXED_SEED

MAKER = "kernels 1"
"""Name and version of these cases. The version must be increased when operands, shapes or calls change."""
DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = {
    "default": "", "math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}  # fmt: skip
"""Part of the case's name → torch's name of the attention kernel; "" leaves the choice to torch."""
WRITTEN = ("default", "math")
"""Attention kernels that can write scores to memory in the operands' format; the other kernels never do."""
EPS = 2.0**-17
"""Epsilon of the norms, about 1e-5."""
GROUP = 32
"""Number of weights that share a scale in the 4-bit cases."""
SMALL = {"M": 96, "N": 256, "K": 512, "keys": 256, "queries": 64, "rows": 64, "width": 512}
LARGE = {"M": 256, "N": 1024, "K": 1024, "keys": 1024, "queries": 256, "rows": 256, "width": 1024}
"""Sizes on accelerators, where a small problem leaves most units idle; `SMALL` has the sizes on a CPU. The host
computes the references as float64 products, and larger ones would take the whole time."""

# Elementary functions: smallest and largest exponent of |x| in wide formats and in float16, and whether x may be
# negative. Results stay finite and normal.
SWEEPS = {
    "exp": ((-20, 5), (-14, 2), True), "exp2": ((-20, 5), (-14, 2), True), "log": ((-100, 100), (-14, 14), False),
    "rsqrt": ((-100, 100), (-14, 14), False), "erf": ((-10, 2), (-10, 2), True), "sin": ((-20, 13), (-12, 13), True),
    "cos": ((-20, 13), (-12, 13), True),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One recorded case: functions that make the operands, compute the result, and bound its error."""

    name: str
    """Name of the case: "kind/variant/…@sizes"."""
    dtype: str
    """Format of the operands."""
    build: Callable[[int], tuple[Any, ...]]
    """Function that takes a seed and returns the operands, contiguous host tensors."""
    compute: Callable[..., Any]
    """Function that takes the operands on the device and returns a contiguous result."""
    bound: Callable[..., error_bounds.Bounded]
    """Function that takes the operands as float64 (integers too); it returns the reference, and the tolerance before
    the result is rounded to its format."""

    @property
    def kind(self) -> str:
        """Kind of the kernel, the first part of its name; readings have it as a label."""
        return self.name.partition("/")[0]

    @property
    def seed(self) -> int:
        """Seed of the recorded operands."""
        return derive(FIXED_SEED, self.name)

    def judged(self, operands: tuple[Any, ...], form: Format) -> error_bounds.Bounded:
        """Return the reference and the largest permitted distance from it for a result in `form`."""
        return error_bounds.allowed(self.bound(*(t.to(torch.float64) for t in operands)), form)


def draw(seed: int, name: str, shape: tuple[int, ...], form: Format, low: int = -6, high: int = 1) -> Any:
    """Return values in `form` with full random significands, exponents uniform on `low` … `high`, and random signs."""
    raw = stream(seed, name, shape)  # 52 bits for the significand, 8 for the exponent, one for the sign
    significand = (raw & ((1 << form.bits - 1) - 1)) + (1 << form.bits - 1)
    exponent = low - (form.bits - 1) + ((raw >> 52) & 255) % (high - low + 1)
    size = torch.ldexp(significand.to(torch.float64), exponent)
    return torch.where((raw >> 60) & 1 == 0, size, -size).to(form.dtype)


def every_kernel(device: Device) -> list[Kernel]:
    """Return all recorded cases for `device`, also those that it does not support."""
    size = SMALL if device.backend == "cpu" else LARGE
    return [
        *_products(device, size),
        *_attention(device, size),
        *_rowwise(size),
        *_sweeps(size),
        *_quantised(device, size),
    ]


def _products(device: Device, size: dict[str, int]) -> list[Kernel]:
    N, K = size["N"], size["K"]
    found = []
    for dtype in DTYPES:
        form, u = FORMATS[dtype], error_bounds.unit(device, dtype)

        def bound(x: Any, w: Any, u: float = u) -> error_bounds.Bounded:
            return error_bounds.dot(x, w.T, u)

        for shape, M in (("prefill", size["M"]), ("decode8", 8), ("decode1", 1)):
            build = partial(_pair, form, (M, K), (N, K))
            name = f"gemm/{dtype}/{shape}@{M}x{N}x{K}"
            found.append(Kernel(name, dtype, build, torch.nn.functional.linear, bound))
        if dtype != "float32":
            build = partial(_pair, form, (size["M"], K), (N, K))
            name = f"gemm/{dtype}>float32/prefill@{size['M']}x{N}x{K}"
            found.append(Kernel(name, dtype, build, _wide, bound))
    return found


def _pair(form: Format, first: tuple[int, ...], second: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    return draw(seed, "x", first, form), draw(seed, "w", second, form)


def _wide(x: Any, w: Any) -> Any:
    return torch.mm(x, w.T, out_dtype=torch.float32)


def _attention(device: Device, size: dict[str, int]) -> list[Kernel]:
    queries, keys, D = size["queries"], size["keys"], 64
    found = []
    for label, kernel in ATTENTION.items():
        for dtype in DTYPES:
            u = error_bounds.unit(device, dtype)
            if device.backend != "cpu" and dtype == "float32":
                u = 2.0**-20  # CUTLASS makes float32 products of three TF32 ones, about 2**-21 each
            for shape, (B, H, G, L, S) in {
                "causal": (1, 4, 4, queries, queries),
                "grouped": (1, 8, 2, queries, queries),
                "decode": (1, 4, 4, 1, keys),
            }.items():
                causal = shape != "decode"
                found.append(
                    Kernel(
                        f"sdpa/{label}/{dtype}/{shape}@{B}x{H}x{G}x{L}x{S}x{D}",
                        dtype,
                        partial(_qkv, FORMATS[dtype], (B, H, L, D), (B, G, S, D)),
                        partial(attend, kernel, causal=causal),
                        partial(
                            error_bounds.attention, u=u, form=FORMATS[dtype], causal=causal, written=label in WRITTEN
                        ),
                    )
                )
    return found


def _qkv(form: Format, query: tuple[int, ...], key: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    return draw(seed, "query", query, form), draw(seed, "key", key, form), draw(seed, "value", key, form)


def _rowwise(size: dict[str, int]) -> list[Kernel]:
    rows, width = size["rows"], size["width"]
    functional = torch.nn.functional
    at = f"@{rows}x{width}"
    found = []
    for dtype in DTYPES:
        form = FORMATS[dtype]
        one = partial(_operands, form, ((rows, width),))
        two = partial(_operands, form, ((rows, width), (rows, width)))
        row = partial(_operands, form, ((rows, width), (width,)))
        bias = partial(_operands, form, ((rows, width), (width,), (width,)))
        turned = partial(_operands, form, ((1, rows // 8, 8, width), (8, width), (8, width)))
        for name, build, compute, bound in (
            ("rmsnorm", row, _rms_norm, partial(error_bounds.rms_norm, eps=EPS, form=form)),
            ("layernorm", bias, _layer_norm, partial(error_bounds.layer_norm, eps=EPS)),
            ("silu", one, functional.silu, error_bounds.silu),
            ("swiglu", two, lambda g, up: torch.nn.functional.silu(g) * up, partial(error_bounds.swiglu, form=form)),
            ("gelu", one, functional.gelu, error_bounds.gelu),
            ("rope", turned, lambda x, c, s: x * c + error_bounds.rotate(x) * s, partial(error_bounds.rope, form=form)),
            ("softmax", partial(_large, form, (rows, width)), partial(torch.softmax, dim=-1), error_bounds.softmax),
        ):
            found.append(Kernel(f"{name}/{dtype}{at}", dtype, build, compute, bound))
    return found


def _operands(form: Format, shapes: tuple[tuple[int, ...], ...], seed: int) -> tuple[Any, ...]:
    return tuple(draw(seed, str(n), shape, form) for n, shape in enumerate(shapes))


def _large(form: Format, shape: tuple[int, ...], seed: int) -> tuple[Any, ...]:
    """Return values from 80 to 112: a float32 exponential overflows unless the largest is subtracted first."""
    return ((draw(seed, "x", shape, FORMATS["float64"], -6, 3) + 96.0).to(form.dtype),)


def _rms_norm(x: Any, weight: Any) -> Any:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _sweeps(size: dict[str, int]) -> list[Kernel]:
    shape = size["rows"], size["width"]
    found = []
    for name, (wide, half, negative) in SWEEPS.items():
        function = getattr(torch, name)
        for dtype in DTYPES:
            build = partial(_sweep, FORMATS[dtype], shape, half if dtype == "float16" else wide, negative)
            own: dict[str, Any] = {"erf": error_bounds.erf, "rsqrt": partial(error_bounds.rsqrt, form=FORMATS[dtype])}
            bound = own.get(name) or partial(error_bounds.elementary, function)
            found.append(Kernel(f"{name}/{dtype}@{shape[0]}x{shape[1]}", dtype, build, function, bound))
    return found


def _sweep(form: Format, shape: tuple[int, ...], span: tuple[int, int], negative: bool, seed: int) -> tuple[Any, ...]:
    x = draw(seed, "x", shape, form, *span)
    return (x if negative else x.abs(),)


def _quantised(device: Device, size: dict[str, int]) -> list[Kernel]:
    M, N, K = 32, size["N"], size["K"]
    at = f"@{M}x{N}x{K}"
    found = []
    for dtype in ("float32", "bfloat16"):
        form, u = FORMATS[dtype], error_bounds.unit(device, dtype)
        # scaled weights (or scaled sums) may be written in the format, and are rounded in float32 before
        steps = ((2, error_bounds.roundoff(form)), (4, error_bounds.SINGLE))

        def int8(x: Any, w: Any, s: Any, u: float = u, steps: Any = steps) -> error_bounds.Bounded:
            return error_bounds.dot(x, (w * s[:, None]).T, u, *steps)

        def int4(x: Any, w: Any, s: Any, u: float = u, steps: Any = steps) -> error_bounds.Bounded:
            return error_bounds.dot(
                x, (_nibbles(w.to(torch.uint8)).to(s.dtype) * s.repeat_interleave(GROUP, 1)).T, u, *steps
            )

        build8, build4 = partial(_int8, form, M, N, K), partial(_int4, form, M, N, K)
        found.append(Kernel(f"quantised/int8/{dtype}{at}", dtype, build8, _dequantise8, int8))
        found.append(Kernel(f"quantised/int4/{dtype}{at}", dtype, build4, _dequantise4, int4))
        if dtype == "bfloat16":
            found.append(Kernel(f"quantised/int8pack/{dtype}{at}", dtype, build8, _int8pack, int8))
    found.append(Kernel(f"quantised/w8a8/int8{at}", "int8", partial(_w8a8, M, N, K), _int_product, _int_bound))
    weights = FORMATS[float8(device, "float8_e4m3fn")]
    for name, target in (("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float32"), ("float8_e5m2", "bfloat16")):
        source = float8(device, name)
        compute = partial(_scaled, target)
        bound8 = partial(_scaled_bound, error_bounds.unit(device, source))
        build = partial(_float8, FORMATS[source], weights, M, N, K)
        found.append(Kernel(f"fp8/{source}>{target}{at}", source, build, compute, bound8))
    return found


def _int8(form: Format, M: int, N: int, K: int, seed: int) -> tuple[Any, ...]:
    w = (below(seed, "w", (N, K), 255) - 127).to(torch.int8)
    return draw(seed, "x", (M, K), form), w, draw(seed, "scale", (N,), form, -8, -5).abs()


def _dequantise8(x: Any, w: Any, scale: Any) -> Any:
    return torch.nn.functional.linear(x, w.to(x.dtype) * scale[:, None])


def _int8pack(x: Any, w: Any, scale: Any) -> Any:
    return torch._weight_int8pack_mm(x, w, scale)  # noqa: SLF001  what int8 checkpoints are served with


def _int4(form: Format, M: int, N: int, K: int, seed: int) -> tuple[Any, ...]:
    packed = below(seed, "w", (N, K // 2), 256).to(torch.uint8)
    return draw(seed, "x", (M, K), form), packed, draw(seed, "scale", (N, K // GROUP), form, -6, -3).abs()


def _nibbles(packed: Any) -> Any:
    """Return 4-bit weights, -8 … 7, as int8 (N, K); `packed` (N, K / 2) has two per byte, the first in the low half."""
    both = torch.stack((packed & 15, packed >> 4), -1)
    return both.to(torch.int8).flatten(1) - 8


def _dequantise4(x: Any, packed: Any, scale: Any) -> Any:
    w = _nibbles(packed).to(x.dtype).view(*scale.shape, GROUP) * scale[..., None]
    return torch.nn.functional.linear(x, w.flatten(1))


def _w8a8(M: int, N: int, K: int, seed: int) -> tuple[Any, ...]:
    a = (below(seed, "a", (M, K), 255) - 127).to(torch.int8)
    b = (below(seed, "b", (N, K), 127) - 63).to(torch.int8)  # content.INT8_NARROW: no pair saturates
    single = FORMATS["float32"]
    return a, b, draw(seed, "sa", (M, 1), single).abs(), draw(seed, "sb", (N,), single).abs()


def _int_product(a: Any, b: Any, sa: Any, sb: Any) -> Any:
    return torch._int_mm(a, b.T).to(torch.float32) * sa * sb  # noqa: SLF001


def _int_bound(a: Any, b: Any, sa: Any, sb: Any) -> error_bounds.Bounded:
    """Return reference and tolerance of a scaled integer sum: the sum is exact, three later steps round once each."""
    reference = a @ b.T * sa * sb
    return reference, reference.abs() * error_bounds.reach((3, error_bounds.SINGLE))


def _float8(form: Format, weights: Format, M: int, N: int, K: int, seed: int) -> tuple[Any, ...]:
    single = FORMATS["float32"]
    # E5M2 meets E4M3 weights: Hopper does not take it on both sides
    x, w = draw(seed, "x", (M, K), form), draw(seed, "w", (N, K), weights)
    return x, w, draw(seed, "sx", (), single).abs(), draw(seed, "sw", (), single).abs()


def _scaled(target: str, x: Any, w: Any, sx: Any, sw: Any) -> Any:
    return torch._scaled_mm(x, w.T, scale_a=sx, scale_b=sw, out_dtype=FORMATS[target].dtype)  # noqa: SLF001


def _scaled_bound(u: float, x: Any, w: Any, sx: Any, sw: Any) -> error_bounds.Bounded:
    return error_bounds.dot(x * sx, w.T * sw, u, (3, error_bounds.SINGLE))
