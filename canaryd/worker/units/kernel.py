"""The kernel that computes exact tiles on every SM: the only module that imports Triton.

Every torch that was built with CUDA brings Triton. Triton compiles the same source for the chip, or interprets it on
the host (TRITON_INTERPRET=1). The host has no SMs, so in that case the caller chooses an SM for each block.
"""

import triton
import triton.language as tl

SM = tl.constexpr("mov.u32 $0, %smid;")
LANE = tl.constexpr("mov.u32 $0, %laneid;")
"""Instructions that read the number of the SM on which a thread runs, and its lane in the warp (PTX ISA, "Special
Registers")."""
WARPS = 4
"""Number of warps of a block: one on each of an SM's four parts; Hopper's tensor cores need at least four."""


@triton.jit(do_not_specialize=["shift"])  # else it is compiled anew for 1 and for multiples of 16
def exact_tiles(
    a,
    b,
    out,
    lanes,
    units,
    shift,
    rounds,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
    ON_CHIP: tl.constexpr,
):
    """Compute a (rounds, M, K) times b (rounds, N, K) transposed, once in every block, into out (blocks, rounds, M, N).

    With `DOT` tensor cores compute, `STEP` of K at a time; otherwise each term is one multiplication and one addition.
    The kernel writes the number of the SM at the start and at the end to `units` (blocks, 2), and the lane of each
    element to `lanes` (blocks, M, N); without `ON_CHIP` it leaves both unchanged. Block n writes to place n + `shift`,
    so that a broken part of the memory is not always written by the same SM.
    """
    block = (tl.program_id(0) + shift) % tl.num_programs(0)
    if ON_CHIP:
        tl.store(units + 2 * block, tl.inline_asm_elementwise(SM, "=r", [], tl.int32, is_pure=False, pack=1))
    row = tl.arange(0, M)
    column = tl.arange(0, N)
    at = row[:, None] * N + column[None, :]
    for number in range(rounds):
        left = a + (number * M + row) * K
        right = b + (number * N + column) * K
        sums = tl.full((M, N), 0, out.dtype.element_ty)
        if DOT:
            for k in range(0, K, STEP):
                inner = k + tl.arange(0, STEP)
                x = tl.load(left[:, None] + inner[None, :])
                y = tl.load(right[None, :] + inner[:, None])
                sums = tl.dot(x, y, sums, out_dtype=out.dtype.element_ty)
        else:
            for k in range(K):
                x, y = tl.broadcast(tl.load(left + k)[:, None], tl.load(right + k)[None, :])
                if sums.dtype.is_floating():
                    sums = tl.fma(x, y, sums)  # whatever this Triton does with a product and a sum
                else:
                    sums += x * y
        tl.store(out + (block * rounds + number) * M * N + at, sums)
        if ON_CHIP:  # noqa: SIM102  known when it is compiled, the next only when it runs
            if number == rounds - 1:  # the lane is that of the registers that `sums` is in
                held = sums.to(tl.int32, bitcast=True)
                lane = tl.inline_asm_elementwise(LANE, "=r,r", [held], tl.int32, is_pure=False, pack=1)
                tl.store(lanes + block * M * N + at, lane)
    if ON_CHIP:
        tl.store(units + 2 * block + 1, tl.inline_asm_elementwise(SM, "=r", [], tl.int32, is_pure=False, pack=1))
