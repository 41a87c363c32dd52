"""Edges of size: products and attention of sizes at which kernels were wrong on healthy devices, by public reports.

Nobody has shown that a device passes an edge, so none is `characterised`, and each has a class of its own: a wrong
result accuses a device only after this edge was met, and equal wrong bits on identical devices are the software's.

The right result is known without a computation of that size. Rows of A, columns of B, queries, keys and values are
copies of rows of small pools, drawn at random, so each element of a product is an element of the table of the pools'
answers (`operands`), and each row of an attention is a value row of the pool (`attention`, one-hot). All elements are
compared with the table bit for bit, in blocks of at most `BLOCK` elements: one wrong element is always found, and
neither the copies nor the comparison cross an edge. A row that a kernel writes to another row's place is found where
the two rows were not drawn alike (of 64 in products, of all keys in attention).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canaryd.facts import Evidence, Exactness, Skipped
from canaryd.free_memory import available
from canaryd.model import TORCH, Device
from canaryd.probe import Context
from canaryd.worker.numeric import evidence, faults
from canaryd.worker.numeric.attention import GAP, Attention, coded
from canaryd.worker.numeric.cases import Case, Refused, chosen, why_refused
from canaryd.worker.numeric.characterised import room_of
from canaryd.worker.numeric.errors import ErrorKind, is_refusal, kind_of
from canaryd.worker.numeric.integers import below, permutation, signed
from canaryd.worker.numeric.measure import Found, comparator_error, counted
from canaryd.worker.numeric.operands import POOLS, Bound, Inexact, Problem, Product, make_pools
from canaryd.worker.numeric.products import computing
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.sizes import CALL, measure_speed
from canaryd.worker.numeric.tensors import FORMATS, bits, host_same_bits, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation

BLOCK = 1 << 24
"""Largest number of elements that are copied or compared at once."""
INDEX, MAKING = 64, 96
"""Bytes that the host takes to draw a row, and to make an element of a pool twice, which a processor's edges share."""
SHARE = 0.25
"""Largest share of a run's time for all edges together (ours)."""
RESERVE = 1 << 30
"""Bytes of an accelerator's free memory that an edge leaves free (ours)."""
HOST_SHARE = 8
"""Divisor: part of the host's available memory that an edge takes (ours), where a device computes in host memory."""
LONGEST = 10.0
"""Largest number of seconds of one edge on a processor (ours)."""
HOST_RATE = 2.5e8
"""Bytes per second at which a processor copies and compares an edge, at least (ours)."""
ON_ACCELERATOR = 1.0
"""Seconds of an edge on an accelerator; the host makes the pools in most of them (ours)."""
LAST = 128
"""Every second query asks for one of this many last keys, so that those beyond the edge count."""
MASKED = -32768.0
"""Score added to a masked key: its exponential is zero, and a block of masked keys gives no NaN."""

Part = tuple[slice, ...]
"""Slices along all axes of a result: one block of it."""
Right = Callable[[Part], Any]
"""Function that returns the right bits of a block."""


@dataclass(frozen=True)
class Held:
    """An edge on the device: its operands, the shape of its result, and the right bits of every block of it."""

    operands: tuple[Any, ...]
    shape: tuple[int, ...]
    right: Right
    right_on_host: Right


CALLS: dict[str, Callable[..., Any]] = {
    "matmul": lambda a, b: torch.matmul(a, b.mT),
    "addmm": lambda a, b, addend: torch.addmm(addend, a, b.mT),
    "baddbmm": lambda a, b, addend: torch.baddbmm(addend.unsqueeze(-2), a, b.mT),
    "linear": lambda *operands: torch.nn.functional.linear(*operands),  # noqa: PLW0108  there may be no torch here
}
"""Name of a torch function → call with A (…, M, K), B (…, N, K) and, for all but "matmul", the addend (…, N)."""


@dataclass(frozen=True)
class Multiplied:
    """An edge of a product; `sizes`: batch (0: none), M, N, K. In "linear" B has no batch."""

    kind: str
    call: str
    """A name in `CALLS`."""
    form: str
    sizes: tuple[int, int, int, int]
    reports: str
    """The public reports of wrong results at such sizes."""

    @property
    def name(self) -> str:
        """The name of the case."""
        batch, *sizes = self.sizes
        text = "x".join(map(str, [batch, *sizes] if batch else sizes))
        return f"{self.form}/dense/edge-{self.call}-{self.kind}/nt@{text}"

    @property
    def operations(self) -> int:
        """Number of multiplications and additions."""
        batch, M, N, K = self.sizes
        return 2 * max(1, batch) * M * N * K

    @property
    def calls(self) -> int:
        """Number of products that a processor's library may compute one by one."""
        return 1 if self.call == "linear" else max(1, self.sizes[0])

    def size(self, device: Device) -> int:  # noqa: ARG002  the same on all
        """Return the bytes that the edge takes: operands and a library's copy of them, result, drawn rows, pools."""
        batch, M, N, K = self.sizes
        item = FORMATS[self.form].dtype.itemsize
        rows, columns = max(1, batch) * M, self.calls * N
        taken: int = item * (2 * (rows + columns) * K + rows * N) + INDEX * (rows + columns) + 16 * BLOCK
        return taken + MAKING * 2 * POOLS["long"] * K

    def computes(self, device: Device) -> Callable[[tuple[Any, ...], Any], Any]:  # noqa: ARG002
        """Return the function that computes the result, as servers call it: from (operands, None)."""
        return lambda operands, _: CALLS[self.call](*operands)

    def build(self, device: Device, seed: int) -> Problem:
        """Return the pools: rows of A (P, K), columns of B (Q, K), with an addend (Q), and the answers (P, Q).

        An addend is even and the sum of products odd (content "dense"), so no answer is zero. With an addend, all sums
        are exact in the result's format too: some kernels add it after rounding.
        """
        batch, M, N, K = self.sizes
        form, added = FORMATS[self.form], self.call != "matmul"
        room = room_of(device, self.form, self.form, batched=batch > 0)
        room = min(room, form.bits) - 1 if added else room
        product = Product("dense", form, form, room, M, N, K, batch, "nt", POOLS["long"])
        made = replace(make_pools(product.of_pools, seed), shape=product.shape, operations=self.operations)
        if not added:
            return made
        addend = 2 * signed(seed, "addend", (product.of_pools.N,), 1, (1 << room - 1) - 1)
        answer = made.golden.to(torch.int64) + addend
        if bool((answer == 0).any()):
            raise Inexact(f"{self.name}: an answer is zero")
        real = [each.to(torch.float64) for each in (*made.operands, addend)]
        return replace(
            made,
            operands=(*made.operands, addend.to(form.dtype)),
            golden=answer.to(form.dtype),
            bound=Bound(made.bound.magnitude + int(addend.abs().max()), 1 << room + 1),
            witnessed=made.witnessed and torch.equal((real[0] @ real[1].T + real[2]).to(torch.int64), answer),
        )

    def hold(self, session: Session, pools: Problem, seed: int) -> Held:
        """Upload the pools, and make the operands from them on the device."""
        batch, M, N, _ = self.sizes
        device, upload = session.ctx.device, session.runtime.upload
        outer, shared = ((batch,) if batch else ()), self.call == "linear"
        P, Q = pools.golden.shape
        rows = below(seed, "edge rows", (*outer, M), P)
        columns = below(seed, "edge columns", (*(() if shared else outer), N), Q)
        a, b, *addend = upload(pools.operands, device)
        r, c = upload((rows, columns), device)
        operands = (gathered(a, r), gathered(b, c), *(pool[c] for pool in addend))
        del r, c

        def right(table: Any, rows: Any, columns: Any, part: Part) -> Any:
            matrix, column = part[:-2], part[-1]
            columns = columns.expand(*outer, N)[matrix][..., column].unsqueeze(-2)
            return bits(table)[rows[part[:-1]].unsqueeze(-1), columns]

        # Uploaded once more: an index that arrived wrong in one upload is right in the other.
        known = upload((pools.golden, rows, columns), device)
        return Held(operands, (*outer, M, N), partial(right, *known), partial(right, pools.golden, rows, columns))


@dataclass(frozen=True)
class Attended:
    """An edge of attention without groups; `sizes`: H, L, S, D. One key wins for each query."""

    kind: str
    sizes: tuple[int, int, int, int]
    reports: str
    kernel: str = ""
    """One of `Runtime.attention_kernels`, or "" for the kernel that torch chooses, as for a server."""
    mask: str = "none"
    """"none", or "float": each key has a twin in the other half of the keys, which only the query's mask removes."""
    packed: bool = False
    """Whether query, key and value are parts of one projection (1, L, 3, H, D), as models compute it."""
    form: str = "bfloat16"
    calls: int = 1

    @property
    def name(self) -> str:
        """The name of the case."""
        H, L, S, D = self.sizes
        kernel = self.kernel.lower() or "chosen"
        return f"{self.form}/onehot/edge-{self.kind}/{kernel}/{self.mask}@1x{H}x{H}x{L}x{S}x{D}"

    @property
    def operations(self) -> int:
        """Number of multiplications and additions."""
        return 4 * math.prod(self.sizes)

    @property
    def codes(self) -> int:
        """Number of different keys."""
        return self.sizes[2] // (1 if self.mask == "none" else 2)

    def size(self, device: Device) -> int:
        """Return the bytes that the edge takes; where no fused kernel is sure, also those of all scores."""
        H, L, S, D = self.sizes
        item = FORMATS[self.form].dtype.itemsize
        scores = self.kernel == "MATH" or (not self.kernel and device.backend not in ("cpu", "cuda", "rocm"))
        kept: int = item * (2 * H * (L + 2 * S) * D + 2 * H * L * D + L * S * (self.mask != "none"))
        return kept + 12 * H * L * S * scores + INDEX * H * (L + S) + MAKING * S * D // 2 + 16 * BLOCK

    def computes(self, device: Device) -> Callable[[tuple[Any, ...], Any], Any]:
        """Return the function that computes the result from ((query, key, value, mask), None)."""
        return partial(interface.of(device).run, Operation("attention", self.form, self.form, self.kernel, self.mask))

    def build(self, device: Device, seed: int) -> Problem:  # noqa: ARG002  of one signature
        """Return the pools: a query and a key (codes, D) of each code, and values (S, D), which are the answers."""
        H, L, S, D = self.sizes
        form, codes = FORMATS[self.form], torch.arange(self.codes).view(1, 1, -1)
        spec = Attention("onehot", form, "none", 1, 1, 1, self.codes, self.codes, D)
        query, key = (each[0, 0].to(form.dtype) for each in coded(spec, codes, codes, GAP))
        values = signed(seed, "v", (S, D), 1 << (form.bits - 1), (1 << form.bits) - 1)
        return Problem(
            operands=(query, key, values.to(form.dtype)),
            golden=values.to(form.dtype),
            exactness=Exactness.ROUNDED,
            bound=Bound(int(values.abs().max()), 1 << 24),
            shape=f"B=1 H={H} G={H} L={L} S={S} D={D}",
            operations=self.operations,
        )

    def hold(self, session: Session, pools: Problem, seed: int) -> Held:
        """Upload the pools, and make query, key, value and mask from them on the device."""
        H, L, S, D = self.sizes
        device, upload = session.ctx.device, session.runtime.upload
        halves = range(S // self.codes)
        order = torch.stack(
            [torch.cat([permutation(seed, f"edge keys {h} {n}", self.codes) for n in halves]) for h in range(H)]
        )
        # Each head has its own order of keys, and other values for them.
        value = (order + torch.arange(S) // self.codes * self.codes + torch.arange(H).view(H, 1)) % S
        at = below(seed, "edge asked", (H, L), S)
        at[:, 1::2] = S - 1 - at[:, 1::2] % min(S, LAST)
        answers = value.gather(1, at).unsqueeze(0)
        queries, keys, values = upload(pools.operands, device)
        indices = upload((order.gather(1, at), order, value), device)
        like = partial(torch.empty, dtype=keys.dtype, device=keys.device)
        parts = [like((1, H, n, D)) for n in (L, S, S)] if not self.packed else []
        if self.packed:
            whole = like((1, L, 3, H, D))
            parts = [whole[:, :, n].transpose(1, 2) for n in range(3)]
        for part, pool, index in zip(parts, (queries, keys, values), indices, strict=True):
            for head in range(H):
                part[0, head].copy_(pool.index_select(0, index[head]))
        mask = torch.zeros(0, device=keys.device)
        if self.mask != "none":
            half = torch.arange(S) // self.codes
            hidden = torch.stack([MASKED * (half != n) for n in halves]).to(keys.dtype)
            mask = gathered(*upload((hidden, at[0] // self.codes), device))

        def right(table: Any, answers: Any, part: Part) -> Any:
            return bits(table)[answers[part[:-1]]][..., part[-1]]

        known = upload((pools.golden, answers), device)
        return Held((*parts, mask), (1, H, L, D), partial(right, *known), partial(right, pools.golden, answers))


Edge = Multiplied | Attended
PRODUCTS = (
    Multiplied("inner", "matmul", "float32", (0, 64, 64, 32_769), "pytorch pull requests 117549, 183535"),
    Multiplied("inner", "addmm", "float32", (0, 64, 64, 32_769), "pytorch pull request 183535"),
    Multiplied("inner-batched", "matmul", "float32", (2, 64, 64, 32_769), "pytorch issue 195163"),
    Multiplied("inner", "baddbmm", "float32", (2, 64, 64, 32_769), "pytorch issue 195163"),
    Multiplied("side", "matmul", "float32", (0, 8_199, 32_769, 1), "pytorch issues 111634, 116769, 122045"),
    Multiplied("batch", "matmul", "float16", (65_600, 8, 8, 16), "pytorch issue 25241, tensorflow issue 29374"),
    Multiplied("batch", "linear", "float32", (65_600, 2, 32, 32), "pytorch issue 189495"),
    Multiplied("rows", "matmul", "float32", (0, 9_530_399, 4, 4), "ROCm/rocm-libraries issue 5706, pytorch 22078"),
    Multiplied("rows", "matmul", "float64", (0, 3_145_729, 16, 16), "ROCm/rocm-libraries issue 8645"),
    Multiplied("rows", "addmm", "float32", (0, 1_680_000, 32, 32), "ROCm/legacy-rocm-build issue 6595"),
    Multiplied("result", "matmul", "bfloat16", (0, 46_400, 46_400, 64), "pytorch issue 191083, mlx issue 1051"),
    Multiplied("outer", "matmul", "bfloat16", (8_209, 512, 512, 1), "pytorch pull request 196431"),
    Multiplied("operand", "matmul", "float32", (0, 35_783, 1, 65_133), "pytorch issue 17897, mlx issue 3591"),
    Multiplied("operand-batched", "matmul", "bfloat16", (65_600, 256, 64, 256), "pytorch issue 197636"),
)
"""Edges of products. "inner": K beyond 32,768; "side": N; "rows": M beyond a million; "batch": matrices beyond 65,535;
"result", "outer", "operand": more than 2**31 elements of a result or an operand ("operand-batched": 2**32)."""
_LAYOUTS = "Dao-AILab/flash-attention issues 2541 and 2665, pytorch issues 112577 and 181133, ROCm/pytorch issue 3230"
ATTENTIONS = (
    Attended("keys", (8, 64, 69_632, 128), "pytorch issue 162588"),
    Attended("scores", (8, 16_384, 65_664, 64), "pytorch issue 179352"),
    Attended("mask", (1, 65_664, 65_664, 64), "pytorch issue 162588", "EFFICIENT_ATTENTION", "float"),
    *(
        Attended("head256", (8, 1024, 1024, 256), _LAYOUTS, kernel, packed=True)
        for kernel in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    ),
)
"""Edges of attention: keys beyond 65,536; more than 2**32 scores; as many elements of a mask; heads of 256 in one
projection with query, key and value."""


def gathered(pool: Any, index: Any) -> Any:
    """Return rows (…, n) of a pool (rows, n) by their numbers, copied on the device in blocks."""
    flat = index.reshape(-1)
    out = torch.empty((flat.numel(), pool.shape[1]), dtype=pool.dtype, device=pool.device)
    step = max(1, BLOCK // pool.shape[1])
    for first in range(0, flat.numel(), step):
        out[first : first + step].copy_(pool.index_select(0, flat[first : first + step]))
    return out.view(*index.shape, -1)


def blocks(shape: Sequence[int]) -> Iterator[Part]:
    """Yield the parts of a result of this shape: contiguous, at most `BLOCK` elements each, together all of it."""
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = next(n for n, size in enumerate(inner) if size <= BLOCK)
    step, rest = max(1, BLOCK // inner[axis]), tuple(slice(0, n) for n in shape[axis + 1 :])
    for outer in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], step):
            own = slice(first, min(first + step, shape[axis]))
            yield (*(slice(n, n + 1) for n in outer), own, *rest)


def cases(ctx: Context, edges: Sequence[Edge]) -> Iterator[Case | Skipped]:
    """Yield a case for each edge that the run tests, or the reason why one is left out, with what it takes.

    Edges are tested at level deep, and if cases are requested by name.
    """
    wanted = [edge for edge in edges if (bool(ctx.cases) or ctx.level == "deep") and chosen(ctx, edge.name)]
    if wanted and ctx.device.runtime != TORCH:
        yield Skipped(case="edges of size", reason="they are tested through torch alone")
        return
    start, named = ctx.seed % max(1, len(wanted)), bool(ctx.cases) and "*" not in ctx.cases
    left = math.inf if named else SHARE * ctx.budget
    for edge in (*wanted[start:], *wanted[:start]):
        seconds, why = _needs(ctx, edge, left)
        if why and not named:
            yield Skipped(case=edge.name, reason=why)
            continue
        left -= seconds
        yield Case(
            edge.name,
            partial(edge.build, ctx.device),
            edge.computes(ctx.device),
            characterised=False,
            measure=partial(measure, edge, why),
            seconds=seconds,
        )


def _needs(ctx: Context, edge: Edge, left: float) -> tuple[float, str]:
    """Return (seconds that an edge takes, reason why there is no memory or time for it now or "").

    `left`: seconds that the run has left for edges.
    """
    device, size = ctx.device, edge.size(ctx.device)
    text = f"it takes {size >> 20:,} MiB of memory"
    if ctx.room:
        return 0.0, f"{text}, and a server uses the device"
    free, _ = interface.of(device).memory(device)
    # Without a number it is a processor, or a device that shares the host's memory.
    may = _of_host() // HOST_SHARE if free is None else max(0, free - RESERVE)
    if size > may:
        return 0.0, f"{text}; at most {may >> 20:,} MiB may be taken"
    seconds = ON_ACCELERATOR
    if device.unit == "cpu":
        form = FORMATS[edge.form]
        compute = computing(device, edge.form, edge.form)
        speed = max(measure_speed(device, compute, form, form) for _ in range(3))  # other work slows some of them
        seconds = edge.operations / speed + size / HOST_RATE + CALL * edge.calls
    most = min(left, LONGEST)
    return seconds, f"it would take about {seconds:.1f} s; {most:.1f} s are left for it" if seconds > most else ""


def _of_host() -> int:
    """Return the bytes of the host's memory that are available, or all of it if the system does not tell (macOS)."""
    free = available()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free


def measure(
    edge: Edge, why: str, session: Session, case: Case, pools: Problem, seed: int, core: int | None, seconds: float
) -> list[Found]:
    """Compute an edge once, in a retest at a higher intensity for `seconds`; return what was found.

    Raises `Refused` if `why` gives a reason, if no kernel takes the edge, or if its memory was not there.
    """
    if why:
        raise Refused(why)
    ctx, until = session.ctx, session.ctx.clock() + seconds
    trials, found, blind = 0, None, ""
    with _refusing(ctx.device, edge):
        held = edge.hold(session, pools, seed)
    while not (found or blind) and (trials == 0 or (ctx.intensity and ctx.clock() < until)):
        ctx.pace()
        with session.on_device():
            with _refusing(ctx.device, edge):
                result = case.compute(held.operands, None)
            result = session.injector.after(case.name, result)
            found, blind = compare(session, held, result, derive(seed, "flipped on purpose"))
            spoil(result)
        trials += 1
    comparison = counted(session, case, pools, seed, core, trials, int(found is not None), found)
    return [(0, comparison, comparator_error(comparison, pools.golden, blind) if blind else None)]


def spoil(result: Any) -> None:
    """Overwrite a result after its comparison: the memory of the next one then holds no right result."""
    for part in blocks(result.shape):
        bits(result[part]).fill_(-1)


@contextlib.contextmanager
def _refusing(device: Device, edge: Edge) -> Iterator[None]:
    """Raise `Refused` if the block runs out of memory, or asks for something that the device does not support."""
    try:
        yield
    except Exception as error:
        if kind_of(error) is ErrorKind.MEMORY:
            raise Refused(f"it takes {edge.size(device) >> 20:,} MiB of memory, which ran out") from error
        if is_refusal(error):
            raise Refused(why_refused(device, error)) from error
        raise


def compare(session: Session, held: Held, result: Any, choice: int) -> tuple[Evidence | None, str]:
    """Compare every element of a result; return (evidence of a wrong one or None, how the comparison itself erred).

    The host compares one block too: the first wrong one, or else the last. In a right result one bit is then flipped
    on purpose, chosen by `choice`, and the device must see it.
    """
    wrong, first = 0, None
    for part in blocks(held.shape):
        block, golden = bits(result[part]), held.right(part)
        if not torch.equal(block, golden):
            wrong += int((block != golden).sum())
            first = first or part
    part = first or list(blocks(held.shape))[-1]
    observed = session.runtime.download(result[part]).contiguous()
    right = held.right_on_host(part).view(observed.dtype)
    if host_same_bits(observed, right):
        if first is not None:
            return None, "the host finds that a block of the result equals, the device that it differs"
        faults.flip(bits(result[part]).view(-1), choice)
        seen = not torch.equal(bits(result[part]), held.right(part))
        return None, "" if seen else "one bit of a right result was flipped on purpose, and the device finds it equal"
    found = evidence.collect(right, observed, tuple(each.start for each in part))
    blind = "" if first is not None else "the host finds that a block of the result differs, the device that it equals"
    return replace(found, wrong=max(wrong, found.wrong), total=math.prod(held.shape)), blind
