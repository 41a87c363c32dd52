"""Inject faults into results and count what digests of their bits miss, beside the bound that is proven for each.

A digest could replace the comparison with a golden (right result) that the device gathers for every draw of operands.
Each row of a result, cut into pieces t of equal width, has the digest S = w_1 t_1 + ... + w_n t_n with random odd
weights w. Rows of a golden are rows of the pools' answers with the same columns, so 128 digests of those give what
every row must have: no golden is gathered, and a row that differs is named. The host finds the element in that row.

What a digest can miss. Let d_j be the differences of the pieces of one row, w the width of a piece and m that of the
sum, in bits. The digest misses the row if the sum of w_j d_j is 0 modulo 2**m.

- One wrong piece is always found: 0 < |d| < 2**w <= 2**m, and an odd factor keeps the number of times that 2 divides.
- Otherwise let 2**t be the largest power of two that divides all differences; t < w. Fix all weights but that of a
  piece whose difference is 2**t times an odd number. The row is missed for one residue of this weight modulo 2**(m - t)
  at most, out of 2**(m - t - 1) odd ones: with a probability of at most 2**(t + 1 - m) <= 2**(w - m).
- The bound is reached: differences of 2**(m - 1), such as signs of 32-bit elements in sums of 32 bits, cancel in pairs
  whatever the odd weights are. A row with an even number of flipped signs is always missed there, and more vectors of
  odd weights miss it too.
- "bytes" is canaryd's own (canaryd/worker/numeric/digests.py has its bound).

These are probabilities over the weights, for any fault that does not depend on them. Weights shall be drawn anew for
every case: what one draw misses, another finds. Rows share the weights, so many wrong rows count as one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import common
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.cases import product_case
from canaryd.worker.numeric.digests import VECTORS, Digest
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.integers import mixed
from canaryd.worker.numeric.operands import gather_golden, make_pools
from canaryd.worker.numeric.products import format_pairs, label_of
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, bits, torch
from canaryd.worker.runtime.torch import BURST, Torch

SIZES = (96, 160, 128, 0)
"""M, N, K and the batch of the products whose results get faults."""
CONTENTS = ("dense", "permute", "cancel")
TILE = 32
PART = 1 << 16
"""Number of pieces that are multiplied at a time: what is made of them in between stays in the processor's cache."""
SURE = 24
"""A way that is proven to miss at most one fault in 2**SURE must miss none here."""


@dataclass(frozen=True)
class Way:
    """One kind of digest."""

    name: str
    piece: int
    """Largest number of bytes of a piece; an element with fewer bytes is one piece."""
    sum: int
    """Number of bits of a sum."""
    vectors: int = 1

    def bound(self, element: int) -> int:
        """Return b: the digest misses a wrong row of elements of so many bytes with a probability of at most 2**-b."""
        return 6 * self.vectors if self.piece == 1 else self.sum - 8 * min(self.piece, element)

    def moved(self, element: int) -> int:
        """Return the number of bytes that torch reads and writes on a GPU for one element; it fuses nothing."""
        pieces = element // min(self.piece, element)
        return element if self.piece == 1 else element + 2 * pieces * self.sum // 8


WAYS = (Way("32 bits", 4, 32), Way("32 bits of halves", 2, 32), Way("64 bits", 4, 64), Way("bytes", 1, 32, VECTORS))


class Wide:
    """Digests of rows of one length in sums of 32 or 64 bits, with weights of their own."""

    def __init__(self, way: Way, columns: int, element: int, seed: int) -> None:
        """Draw the weights, on the host; `element` is the number of bytes of an element."""
        piece = min(way.piece, element)
        self._pieces = {2: torch.int16, 4: torch.int32}[piece]
        words = mixed(torch.arange(1, columns * element // piece + 1), derive(seed, "weights")) | 1
        self._weights = words.to({32: torch.int32, 64: torch.int64}[way.sum])

    def rows(self, matrix: Any) -> Any:
        """Return the digest of each row of a contiguous matrix, (rows, 1)."""
        pieces, weights = matrix.view(self._pieces), self._weights
        if weights.dtype is pieces.dtype:
            return (pieces @ weights)[:, None]  # no copy: torch multiplies integers on a processor as they are
        parts = pieces.split(max(1, PART // pieces.shape[-1]))
        return torch.cat([part.to(weights.dtype) @ weights for part in parts])[:, None]


def digest_of(way: Way, columns: int, element: int, seed: int) -> Any:
    """Return an object whose `rows` digests rows of so many elements, on a processor."""
    if way.piece == 1:
        return Digest(columns, element, seed, torch.device("cpu"))
    return Wide(way, columns, element, seed)


def broken(right: Any, stale: Any, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield (kind of fault, raw bits of a result with it); some change nothing. `stale`: bits of another turn."""
    (M, N), width = right.shape, 8 * right.element_size()
    (i, k), (j, m), bit = rng.sample(range(M), 2), rng.sample(range(N), 2), 1 << rng.randrange(width)
    one, sign = faults.signed(bit, right), faults.signed(1 << width - 1, right)
    tile = tuple(slice(at // TILE * TILE, at // TILE * TILE + TILE) for at in (i, j))
    two, every = (i, [j, m]), (slice(None), slice(None))
    for kind, where, value in (
        ("one bit of one element", (i, j), right[i, j] ^ one),
        ("one element zero", (i, j), 0),
        ("one element NaN", (i, j), (1 << width - 1) - 1),
        ("two elements exchanged", ([i, k], [j, m]), right[[k, i], [m, j]]),
        ("two elements of a row exchanged", two, right[i, [m, j]]),
        ("the same bit of two elements of a row", two, right[two] ^ one),
        ("signs of two elements of a row", two, right[two] ^ sign),
        ("one more and one less in a row", two, right[two] + torch.tensor([1, -1], dtype=right.dtype)),
        ("all signs of a row", i, right[i] ^ sign),
        ("a row like another", i, right[k]),
        ("two columns exchanged", (slice(None), [j, m]), right[:, [m, j]]),
        ("a bit stuck at 1 in a column", (slice(None), j), right[:, j] | one),
        ("a bit stuck at 0 everywhere", every, right & ~one),
        ("a bit flipped everywhere", every, right ^ one),
        ("a tile zero", tile, 0),
        ("a tile mirrored", tile, right[tile].flip(1)),
        ("a tile of the turn before", tile, stale[tile]),
        ("everything of the turn before", every, stale),
        ("rows shifted by one", tile[0], right.roll(1, 0)[tile[0]]),
    ):
        changed = right.clone()
        changed[where] = value
        yield kind, changed


@dataclass
class Count:
    """What one way made of one kind of fault, over all pairs of formats."""

    tried: int = 0
    """Number of faults that changed a bit."""
    missed: int = 0
    """Number of faults that no row's digest shows."""
    rows: int = 0
    """Number of wrong rows."""
    unnamed: int = 0
    """Number of wrong rows whose digest is right."""
    misplaced: int = 0
    """Number of faults that were found, but whose first wrong element is not in the first row that was named."""


Counts = dict[tuple[str, str, str], Count]
"""(format of the result, name of the way, kind of fault) → what was counted."""


def try_pair(source: str, target: str, seed: int, each: int, counts: Counts) -> None:
    """Inject `each` faults of every kind for each content, and count; exit the program if a right turn differs."""
    device, form = cpu(), FORMATS[target].dtype
    for turn, content in enumerate(CONTENTS, 1):
        product = product_case(device, source, target, content, "square", "nt", SIZES).product
        assert product is not None
        pools = make_pools(product.of_pools, seed)
        golden, stale = (bits(gather_golden(product, pools, seed, at)) for at in (turn, turn + 1))
        wanted = {}
        for way in WAYS:
            digest = digest_of(way, product.N, form.itemsize, derive(seed, f"{content} {way.name}"))
            expected = Gatherer(Torch(), device, product, pools, seed).digesting(digest).gather(turn)[1]
            if not torch.equal(digest.rows(golden), expected):
                raise SystemExit(f"{way.name}: a right turn of {label_of(source, target)}/{content} has another digest")
            wanted[way.name] = digest, expected
        rng = random.Random(derive(seed, f"{source} {target} {content}"))
        for kind, changed in itertools.chain.from_iterable(broken(golden, stale, rng) for _ in range(each)):
            if torch.equal(changed, golden):
                continue
            for name, (digest, expected) in wanted.items():
                count = counts.setdefault((target, name, kind), Count())
                _judge(count, changed, golden, digest.rows(changed).ne(expected).view(product.M, -1).any(-1))


def _judge(count: Count, changed: Any, golden: Any, named: Any) -> None:
    """Count one fault; `named` says of each row whether its digest differs, and the host reads the first of these."""
    wrong = (changed != golden).any(-1)
    count.tried += 1
    count.rows += int(wrong.sum())
    count.unnamed += int((wrong & ~named).sum())
    count.missed += not bool(named.any())
    if bool(named.any()):
        row = int(named.int().argmax())
        place = row, int((changed[row] != golden[row]).int().argmax())
        count.misplaced += place != tuple((changed != golden).nonzero()[0].tolist())


def total(counts: Counts, **only: str) -> Count:
    """Return the sum of all counts whose `target`, `way` and `kind` are those of `only`."""
    found: Counter[str] = Counter()
    for key, count in counts.items():
        if only.items() <= dict(zip(("target", "way", "kind"), key, strict=True)).items():
            found.update(asdict(count))
    return Count(**found)


def report(counts: Counts) -> str:
    """Return the body of the report."""
    kinds = dict.fromkeys(kind for *_, kind in counts)
    targets = sorted({target for target, *_ in counts})
    ways = []
    for target, way in itertools.product(targets, WAYS):
        element, found = FORMATS[target].dtype.itemsize, total(counts, target=target, way=way.name)
        ways.append([target, way.name, f"2^-{way.bound(element)}" if way.bound(element) else "always", found.tried,
                     found.missed, found.rows, found.unnamed, found.misplaced, way.moved(element)])  # fmt: skip
    gathered = 3 / BURST  # the golden is read and written, and one result spoilt, once in a burst
    today = ", ".join(f"{(2.25 + gathered) * FORMATS[t].dtype.itemsize:.1f} ({t})" for t in targets)
    header = ["result", "digest", "misses at most", "faults", "missed", "wrong rows", "not named", "element not named",
              "bytes moved"]  # fmt: skip
    each = [[kind, total(counts, way=WAYS[0].name, kind=kind).tried,
             *(total(counts, way=way.name, kind=kind).missed for way in WAYS)] for kind in kinds]  # fmt: skip
    tried = total(counts, way=WAYS[0].name).tried
    missed = ", ".join(f"{way.name} {total(counts, way=way.name).missed}" for way in WAYS)
    return (
        f"{tried} faults of {len(kinds)} kinds changed a bit. Missed: {missed}.\n\n{common.table(header, ways)}\n"
        "Misses at most: what is proven for several wrong pieces of a row; one wrong piece is always found.\n"
        "Not named: wrong rows whose digest is right. Element not named: the first row that was named does not\n"
        "hold the first wrong element. Bytes moved: for one element, by torch's own kernels on a"
        " GPU, which fuse\nnothing; counted, not measured. Comparison, gather of the golden and spoiling in a burst"
        f"\nmove {today}.\n\nMissed faults, by kind:\n\n"
        f"{common.table(['fault', 'tried', *(way.name for way in WAYS)], each)}"
    )


def failures(counts: Counts) -> list[str]:
    """Return a text for each way that missed what it was proven to find; [] if none did."""
    return [
        f"{way.name} of {target} missed {found.missed} faults and {found.unnamed} rows"
        for target, way in itertools.product(sorted({target for target, *_ in counts}), WAYS)
        for found in [total(counts, target=target, way=way.name)]
        if way.bound(FORMATS[target].dtype.itemsize) > SURE and (found.missed or found.unnamed or found.misplaced)
    ]


def main() -> None:
    """Inject faults in every pair of formats, write the report, and exit with 1 if a proven bound was broken."""
    parser = common.options(__doc__)
    parser.add_argument("--each", type=int, default=45, help="faults of each kind, pair of formats and content")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    common.become_worker()
    counts: Counts = {}
    for source, target in format_pairs(cpu()):
        try_pair(source, target, arguments.seed, arguments.each, counts)
    wrong = failures(counts)
    data = {"counts": [[*key, asdict(count)] for key, count in counts.items()], "failures": wrong}
    common.write(arguments.out, "digest", "What digests of results miss", common.machine(), report(counts), data)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
