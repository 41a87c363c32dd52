"""Queries, keys and values whose attention has one right answer.

Letters: B batch, H query heads, G key/value heads, L queries, S keys, D head dimension. Softmax is exact in two cases
only. One-hot: one score is exactly 0, and every other is so far below that its exponential vanishes. Uniform: 2**k
scores are exactly 0 and the rest vanish; the answer is the mean of 2**k integers. Both are built with *codes*: a key
has a bit code, a query has the code it selects, and their product is minus a large gap per differing bit.

Why the answer does not depend on the kernel. The winners' scores are exactly 0: every term of q.k is 0, whatever the
scale or the order of summation, so their exponential is exactly 1 (a kernel that folds the scale into exp2 would not
give exactly 1 for a nonzero maximum). Kernels for 16-bit formats may approximate even exp(0) (torch's on CPUs is off by
5e-5): numerator and denominator then have the same factor, and rounding to 11 or 8 bits restores the answer as long as
the approximation errs by less than 2**-12. That is an assumption about rounding, so 16-bit attention is of class R.
Kernels that split the keys among blocks (FlashAttention, where rows and heads leave SMs idle) weigh each part by the
logarithm of its sum. Those factors err by up to 2**-20: a uniform row's mean is at least 1/66 of its largest value.

The losers' scores are at most -gap: below -104 the exponential is under half the smallest float32 subnormal, for
float64 under 2**-53 of any value here. Online softmax multiplies all sums from before the winner by that same zero. The
sum of 2**k ones is exact, and so is the sum of their values by the bound.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canaryd.facts import Exactness
from canaryd.model import Device
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.integers import below, longest, permutation, signed, significant_bits
from canaryd.worker.numeric.operands import Bound, Inexact, Problem
from canaryd.worker.numeric.stack import cudnn_version
from canaryd.worker.numeric.tensors import Format, torch
from canaryd.worker.numeric.tensors import bits as bits_of

GAP = 128.0
"""Smallest difference, after scaling, between the winning score and any other score, for float32 and narrower formats.
exp(-104) already rounds to zero in float32 with subnormals."""
GAP_FLOAT64 = 1024.0
"""Smallest difference between the winning score and other scores for float64; exp(-745) is the last nonzero value."""
LARGEST_SCORE = 60_000.0
"""Largest permitted magnitude of a score, because some kernels keep scores in float16."""

MANY, UNLIKE = 4, 2
"""A batch of more than `MANY` sequences repeats `UNLIKE` of them in random order, so that the host makes only these."""

CONTENTS = ("onehot", "uniform", "rising", "falling")
MASKS = ("none", "causal", "bool", "float")


@dataclass(frozen=True)
class Attention:
    """The description of one attention problem: content class, format, kind of mask, sizes."""

    content: str
    form: Format
    mask: str
    B: int
    H: int
    G: int
    L: int
    S: int
    D: int
    bits: int = 53
    """Maximum number of significant bits of a value: fewer than the format has if the kernel multiplies fewer bits."""

    @property
    def shape(self) -> str:
        """The sizes as text."""
        return f"B={self.B} H={self.H} G={self.G} L={self.L} S={self.S} D={self.D}"


THREE_PRODUCTS = 20
"""Number of significant bits of a float32 value that a kernel keeps when it computes with three TF32 products. Each
value is split into two parts of 11 bits: the second part holds bits that rounding removed from the first (NVIDIA
CUTLASS, example 27_ampere_3xtf32_fast_accurate_tensorop_gemm)."""


SOUND_CUDNN = 9, 10, 2
"""Oldest cuDNN version whose wrong attention results count as evidence against a device. Before 9.10, minus infinity in
a mask can give NaN. NVIDIA disables 9.10.0 and 9.10.1 for known errors (NVIDIA/cudnn-frontend, attn_score_modifiers.h,
get_negative_inf_value; sdpa_support_surface.h; jax pull request 22078)."""


def value_bits(device: Device, form: str, kernel: str) -> int:
    """Return the number of significant bits of a value that a kernel keeps.

    This is the number of the format's bits, with one exception: memory-efficient float32 attention on accelerators
    consists of TF32 products and keeps fewer bits.
    """
    three = device.backend != "cpu" and form == "float32" and kernel.upper() == "EFFICIENT_ATTENTION"
    return THREE_PRODUCTS if three else 53


def blank(spec: Attention) -> Problem:
    """Return a problem of zeros with the right formats and sizes, to find out whether a kernel supports them."""
    dtype = spec.form.dtype
    query = torch.zeros((spec.B, spec.H, spec.L, spec.D), dtype=dtype)
    key = torch.zeros((spec.B, spec.G, spec.S, spec.D), dtype=dtype)
    kinds = {"bool": torch.bool, "float": dtype}
    mask = torch.zeros((spec.L, spec.S), dtype=kinds[spec.mask]) if spec.mask in kinds else torch.zeros(0)
    return Problem((query, key, key.clone(), mask), torch.zeros_like(query), Exactness.MARGIN, Bound(0, 1), spec.shape)


def attend(kernel: str, query: Any, key: Any, value: Any, *, causal: bool, mask: Any = None) -> Any:
    """Return the attention of operands on their device, computed by torch's kernel `kernel`; "": torch chooses.

    Raises `NotImplementedError` with the reason if torch has no kernel (torch gives the reason as a warning), or if
    cuDNN's kernel is known to give wrong answers on healthy devices.
    """
    cudnn = kernel == "CUDNN_ATTENTION" and query.device.type == "cuda"
    tensors = (t for t in (query, key, value, mask) if t is not None)
    problem = (causal, *((t.device, t.dtype, t.shape, t.stride()) for t in tensors)) if cudnn else ()
    if cudnn and (why := _unsound(query, causal=causal) or _UNPLANNED.get(problem, "")):
        raise NotImplementedError(why)
    options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    function = torch.nn.functional.scaled_dot_product_attention
    call = partial(function, query, key, value, attn_mask=mask, is_causal=causal, **options)
    if not kernel:
        return _whole(call())
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
        try:
            return _whole(call())
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise NotImplementedError(_why_no_kernel(kernel, call) or str(error)) from error
            if cudnn and is_refusal(error):
                _UNPLANNED[problem] = str(error)
            raise


def _whole(made: Any) -> Any:
    """Return a result in its own order of elements. If that is a copy, the kernel's own memory is spoiled.

    A kernel that writes nothing the next time would else leave the right result of this time there.
    """
    whole = made.contiguous()
    if whole is not made:
        bits_of(made).fill_(-1)
    return whole


_UNPLANNED: dict[tuple[Any, ...], str] = {}
"""Problems for which cuDNN has no plan: key of the problem → reason. Some torch versions keep an empty plan for such
a problem, and the process dies when it uses that plan (pytorch, aten/src/ATen/native/cudnn/MHA.cpp,
run_cudnn_SDP_fprop)."""


def _unsound(query: Any, *, causal: bool) -> str:
    """Return the reason why a wrong result of cuDNN's kernel does not count against the device, or "" if it counts.

    Sources: pytorch issue 193893 (different answers on B200), for which newer torches refuse one query there (MHA.cpp,
    check_cudnn_sdpa_decode); cuDNN 9.18.1 release notes, "Known Issues" (one query under a causal mask).
    """
    if torch.version.hip:
        return ""
    number = cudnn_version() or 0
    version = number // 10_000, number // 100 % 100, number % 100
    if number and version < SOUND_CUDNN:
        found, wanted = (".".join(map(str, each)) for each in (version, SOUND_CUDNN))
        return f"cuDNN {found} has errors in its attention: tested from {wanted} on"
    if torch.cuda.get_device_capability(query.device) >= (10, 0):
        return "cuDNN's attention is wrong on healthy Blackwell GPUs (pytorch issue 193893)"
    return "cuDNN may be wrong for one query under a causal mask" if causal and query.shape[2] == 1 else ""


def _why_no_kernel(kernel: str, call: Any) -> str:
    """Return torch's warning with the reason why it does not use this kernel, or "" if torch gives no reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError):
            call()
    texts = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
    word = kernel.partition("_")[0].lower()
    for heading, text in itertools.pairwise(texts):
        if "not used because" in heading and word in heading.lower() and "not used because" not in text:
            return text
    return ""


def build(spec: Attention, seed: int) -> Problem:
    """Build an attention problem: operands and golden (the one right result).

    The operands are query (B, H, L, D), key and value (B, G, S, D), and a mask (L, S) or an empty tensor. Raises
    `Inexact` if the sizes leave no room for the codes, or if the sums exceed the bound of exact arithmetic.
    """
    if spec.B > MANY:
        return _repeated(build(replace(spec, B=UNLIKE), seed), spec, seed)
    B, H, G, L, S = spec.B, spec.H, spec.G, spec.L, spec.S
    size = {"uniform": 8}.get(spec.content, 1)  # keys per group: the winners of one query
    member = _groups(spec, seed, size)  # (B, G, S): which group a key belongs to; masked decoys share a group
    ask = _asked(spec, seed, size)  # (B, H, L): which group a query asks for
    values = _values(spec, seed, member, size)  # (B, G, S, D) int64
    allowed = _allowed(spec)
    gap = GAP_FLOAT64 if spec.form.name == "float64" else GAP
    if spec.content in ("rising", "falling"):
        query, key = _ladder(spec, seed, gap)
    else:
        query, key = coded(spec, ask, member, gap)
    owner = torch.arange(H) // (H // G)
    # (B, H, L, S): the live keys of every query, from group membership and mask alone; all integer work.
    live = (member[:, owner].view(B, H, 1, S) == ask.view(B, H, L, 1)) & allowed.view(1, 1, L, S)
    if not bool((live.sum(-1) == torch.where(ask == 0, 1, size)).all()):
        raise Inexact(f"{spec}: a query does not have the number of live keys it should have")
    total = live.to(torch.int64) @ values[:, owner]
    bound = Bound(int((live.to(torch.int64) @ values[:, owner].abs()).max()), 1 << _accumulator(spec.form))
    if bool((total == 0).any()) or significant_bits(total) > spec.form.bits:
        raise Inexact(f"{spec}: an answer is zero or not representable")
    work = torch.float64
    count = live.sum(-1, keepdim=True).to(work)  # a power of two: the division is exact
    golden = (total.to(work) / count).to(spec.form.dtype)
    mask = torch.zeros(0)
    if spec.mask == "bool":
        mask = allowed
    elif spec.mask == "float":
        mask = torch.zeros((L, S), dtype=torch.float32).masked_fill(~allowed, -torch.inf).to(spec.form.dtype)
    return Problem(
        operands=(query.to(spec.form.dtype), key.to(spec.form.dtype), values.to(work).to(spec.form.dtype), mask),
        golden=golden.contiguous(),
        exactness=Exactness.UNIVERSAL if spec.form.bits >= 24 else Exactness.ROUNDED,
        bound=bound,
        shape=spec.shape,
        operations=4 * spec.B * spec.H * spec.L * spec.S * spec.D,  # of both products, masked scores included
        witnessed=_witness(spec, member, ask, allowed, values, total, owner, seed),
    )


def _repeated(few: Problem, spec: Attention, seed: int) -> Problem:
    """Return the problem of a large batch, whose sequences are those of `few`, in random order."""
    order = below(seed, "sequences", (spec.B,), UNLIKE)
    query, key, value, golden = (t.index_select(0, order) for t in (*few.operands[:3], few.golden))
    operations = few.operations // UNLIKE * spec.B
    return replace(
        few, operands=(query, key, value, few.operands[3]), golden=golden, shape=spec.shape, operations=operations
    )


def _accumulator(form: Format) -> int:
    """Return the significant bits of the sums over keys: 53 for float64, otherwise 24, those of float32."""
    return 53 if form.name == "float64" else 24


def _groups(spec: Attention, seed: int, size: int) -> Any:
    """Return the group number of each key: key 0 is a group alone; the others form groups of `size` keys.

    A causal mask's first row sees only key 0. Raises `Inexact` if there are fewer keys than one group needs.
    """
    masked = spec.mask in ("bool", "float")
    if size >= spec.S or (masked and spec.S < 3):
        raise Inexact(f"{spec}: fewer keys than one group")
    member = _numbered(spec.S, size).expand(spec.B, spec.G, spec.S).clone()
    if spec.content in ("rising", "falling"):
        member[...] = 1
        member[..., _winner(spec, seed)] = 0
    elif spec.mask == "none":  # any order will do unless rows see only what came before
        for b, g in itertools.product(range(spec.B), range(spec.G)):
            member[b, g, 1:] = member[b, g, 1 + permutation(seed, f"keys {b} {g}", spec.S - 1)]
    elif masked:
        # The masked second half repeats the groups of the first with other values: only the mask removes them.
        half = (spec.S - 1) // 2
        member[..., half:] = 1 + (half - 1) // size
        member[..., :half] = member[..., half : 2 * half] = _numbered(half, size)
    return member


def _numbered(length: int, size: int) -> Any:
    """Return the group number of each key, in order of position; no query selects the last, incomplete group."""
    n = (length - 1) // size
    group = torch.full((length,), n + 1, dtype=torch.int64)
    group[0] = 0
    group[1 : 1 + n * size] = 1 + torch.arange(n * size) // size
    return group


def _winner(spec: Attention, seed: int) -> int:
    """Return the position of the key with the highest score: near the end for "rising" without a mask, otherwise 0."""
    if spec.mask != "none":
        return 0
    return spec.S - 1 - int(below(seed, "winner", (1,), min(4, spec.S))) if spec.content == "rising" else 0


def _asked(spec: Attention, seed: int, size: int) -> Any:
    """Return the number of the group that each query selects, (B, H, L): the query sees all keys of this group."""
    if spec.content in ("rising", "falling"):
        return torch.zeros((spec.B, spec.H, spec.L), dtype=torch.int64)
    seen = torch.full((spec.L,), spec.S)
    if spec.mask == "causal":
        seen = torch.arange(1, spec.L + 1).clamp(max=spec.S)  # torch aligns its causal mask at the top left
    elif spec.mask != "none":
        seen = torch.full((spec.L,), (spec.S - 1) // 2)
    groups = (seen - 1) // size  # whole groups visible beside key 0
    raw = below(seed, "ask", (spec.B, spec.H, spec.L), 1 << 40)
    return torch.where(groups > 0, 1 + raw % groups.clamp(min=1), 0)


def _allowed(spec: Attention) -> Any:
    allowed = torch.ones((spec.L, spec.S), dtype=torch.bool)
    if spec.mask == "causal":
        return allowed.tril()
    if spec.mask != "none":
        allowed[:, (spec.S - 1) // 2 :] = False
    return allowed


def _values(spec: Attention, seed: int, member: Any, size: int) -> Any:
    """Return values (B, G, S, D) with full significands; in groups of several keys, neighbours cancel in pairs.

    The last pair of a group does not cancel, and its sum is the group's sum. `member`: group number of each key.
    """
    p = min(spec.form.bits, spec.bits if size == 1 else min(spec.bits, _accumulator(spec.form) - 4))
    values = signed(seed, "v", (spec.B, spec.G, spec.S, spec.D), 1 << (p - 1), (1 << p) - 1)
    if size == 1:
        return values
    # Within a group in order of position: x, -x, y, -y, … and last s - w after w, with an odd s of p - 2 bits.
    order = torch.argsort(member, dim=-1, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(spec.S).expand_as(order).contiguous())
    start = torch.searchsorted(member.gather(-1, order).contiguous(), member.contiguous())
    place = (rank - start).unsqueeze(-1)  # 0 … size - 1 within the group
    before = order.gather(-1, (rank - 1).clamp(min=0)).unsqueeze(-1).expand_as(values)
    # Never narrower: a small mean would show the rounding of kernels that share the keys out.
    odd = 2 * signed(seed, "s", tuple(values.shape), 1 << (p - 4), (1 << (p - 3)) - 1) + 1
    small = signed(seed, "w", tuple(values.shape), 1, (1 << (p - 1)) - 1)
    values = torch.where(place == size - 2, small, values)
    previous = values.gather(2, before)
    values = torch.where(place % 2 == 1, -previous, values)
    return torch.where(place == size - 1, odd + values, values)


def coded(spec: Attention, ask: Any, member: Any, gap: float) -> tuple[Any, Any]:
    """Return queries and keys built from bit codes: their product is 0 if the codes are equal, else far below 0.

    `ask`: code of each query; `member`: code of each key. A key with code c holds (c, 1 - c), a query for code c holds
    -(1 - c, c): for equal codes all terms are zero.
    """
    width = max(1, longest(member))
    repeat = spec.D // (2 * width)
    if repeat < 1:
        raise Inexact(f"{spec}: head dimension {spec.D} has no room for {width} code bits")
    scale = spec.D**-0.5
    amplitude = 2.0 ** max(0, -(-(int(gap / scale / repeat)).bit_length() // 2))
    if spec.form.name != "float64" and amplitude**2 * repeat * width * scale > LARGEST_SCORE:
        raise Inexact(f"{spec}: scores would leave float16")
    places = torch.arange(width)
    asked = ((ask.unsqueeze(-1) >> places) & 1).to(torch.float64)
    held = ((member.unsqueeze(-1) >> places) & 1).to(torch.float64)
    query = -amplitude * torch.cat([1 - asked, asked], dim=-1)
    key = amplitude * torch.cat([held, 1 - held], dim=-1)
    pad = spec.D - 2 * width * repeat

    def widen(t: Any, fill: float) -> Any:
        wide = t.repeat(1, 1, 1, repeat)
        return torch.cat([wide, torch.full((*wide.shape[:-1], pad), fill, dtype=wide.dtype)], dim=-1)

    return widen(query, 0.0), widen(key, 1.0)


def _ladder(spec: Attention, seed: int, gap: float) -> tuple[Any, Any]:
    """Return queries and keys whose scores fall with the distance from the winner: running maxima change often."""
    winner = _winner(spec, seed)
    distance = (torch.arange(spec.S) - winner).abs().to(torch.float64)
    steps = torch.ceil(distance / max(1.0, spec.S / 128))  # at most 128 steps: exact in bfloat16, within float16
    scale = spec.D**-0.5
    amplitude = 2.0 ** (int(gap / scale)).bit_length()  # one step is between one gap and two: 128 steps fit float16
    query = torch.zeros((spec.B, spec.H, spec.L, spec.D), dtype=torch.float64)
    key = torch.ones((spec.B, spec.G, spec.S, spec.D), dtype=torch.float64)
    query[..., 0] = -amplitude / 16
    key[..., 0] = 16 * steps
    return query, key


def _witness(
    spec: Attention, member: Any, ask: Any, allowed: Any, values: Any, total: Any, owner: Any, seed: int
) -> bool:
    """Return whether 16 sampled elements of `total`, the sums of selected values, agree with plain Python."""
    shape = tuple(total.shape)
    for sample in below(seed, "witness", (16, 4), 1 << 40).tolist():
        b, h, row, d = (value % size for value, size in zip(sample, shape, strict=True))
        g, wanted = int(owner[h]), int(ask[b, h, row])
        groups, column = member[b, g].tolist(), values[b, g, :, d].tolist()
        seen = allowed[row].tolist()
        if sum(v for v, m, ok in zip(column, groups, seen, strict=True) if ok and m == wanted) != int(
            total[b, h, row, d]
        ):
            return False
    return spec.S > 0
