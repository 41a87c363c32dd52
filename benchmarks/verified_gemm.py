"""Measure the throughput of verified products relative to unverified products, and the parts of the difference.

Unverified: torch.matmul(a, b, out=c). Verified: what exact_matmul does per trial: its own `compute`, the comparison of
every result with the golden on the device, and new operands and golden, which the device gathers for every eighth
product. A GPU repeats both sides itself, as in exact_matmul. The cost per upload (the pools are made twice and
uploaded, the host compares the first result) is measured separately, and so is the digest, which only fixed cases need.

On a processor each way of `benchmarks.digest` is measured too, in turn with both sides: instead of a golden the device
makes the digests that the rows must have, and every result is read once. Results are spoilt all the same: eight
products of one gather have equal results, so no digest shows that one of them was not written. A GPU verifies by
digests ("bytes") itself; there the other ways are comparison with goldens, and Triton's "64 bits, one kernel" of 16-bit
results.

`--beside DIR` names a checkout of another version: both sides of its own benchmark, in a process of its own, are then
measured in turn with both sides of this one (on a CPU only).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from canaryd_lab.worker.characterise.speed import Repetition

from benchmarks import common, other_version
from benchmarks.digest import WAYS, Way, digest_of
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.numeric import stack, verify
from canaryd.worker.numeric.cases import Case, product_case
from canaryd.worker.numeric.gathering import PRODUCTS, Gatherer
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.making import make_twice
from canaryd.worker.numeric.operands import SHEET, Problem, Product, gather, make_pools
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import host_same_bits, strict_switches, synchronize, torch, torch_device, upload
from canaryd.worker.runtime.graphs import Graph

SAMPLE = 0.2
"""Minimum seconds of one side of a pair: small products are repeated."""
TARGETS = {1024: 0.95, 2048: 0.98, 4096: 0.98}
"""Size → smallest ratio of the throughputs. Larger sizes have the last target; sizes below 1024 have none."""
FUSED = 2
"""Number of bytes of the elements that Triton's digest takes."""
FEWER = 10
"""Number of pairs for sizes from 4096 on, unless --pairs is given: one product takes seconds there."""


@dataclass(frozen=True)
class Account:
    """The costs at one size, in seconds (medians)."""

    product: float
    """One unverified product."""
    comparison: float
    """One comparison with the golden on the device; part of every trial."""
    spoiling: float
    """Overwriting one compared result, so that an old result cannot pass for the next one; part of every trial."""
    making: float
    """Making the pools and their answers, twice; once per upload."""
    upload: float
    """Copying operands and golden into new allocations on the device; once per upload."""
    host: float
    """Copying the first result to the host, and its comparison there; once per upload."""
    digest: float
    """Computing the digest of one result; only for fixed cases."""

    @property
    def trial(self) -> float:
        """Seconds that one verified product takes."""
        return self.product + self.comparison + self.spoiling

    @property
    def per_upload(self) -> float:
        """Seconds of work that is done once per upload."""
        return self.making + self.upload + self.host


@dataclass(frozen=True)
class Row:
    """The measurements at one size."""

    size: int
    depth: int
    """K; M and N are `size`."""
    repeats: int
    ratio: common.Ratio
    others: float
    """Fraction of the processor time that other processes used during the measurement."""
    account: Account
    digests: dict[str, tuple[common.Ratio, common.Ratio]]
    """Way → (throughput verified in it over unverified, the same over that of canaryd's own way)."""
    beside: other_version.Beside | None

    @property
    def judged(self) -> str:
        """The comparison of the interval with the target, in words."""
        target = TARGETS.get(min(self.size, 4096))
        if target is None:
            return "no target"
        disturbed = self.others >= common.DISTURBED
        return f"{'not resolved, disturbed' if disturbed else self.ratio.against(target)} (≥ {target})"


def undoubted(session: Session, case: Case, product: Product, seed: int) -> Any:
    """Return the pools of a product; exit the program if its golden is in doubt."""
    pools, doubts = make_twice(session, replace(case, build=partial(make_pools, product)), seed, None, "")
    if doubts:
        raise SystemExit(f"the golden of {case.name} is in doubt: {doubts[0]}")
    return pools


def verifying(
    session: Session,
    case: Case,
    buffers: list[Any],
    gatherer: Gatherer,
    agree: Callable[[list[Any], Any], list[bool]],
) -> Callable[[int], None]:
    """Return a function that verifies so many bursts in `buffers`, each step started by the host.

    `agree` says of each result whether it agrees with the golden, or whatever `gatherer` gives in its place.
    """
    bursts, turns, fresh = itertools.count(), itertools.count(), list[Any]()

    def verified(repeats: int) -> None:
        for _ in range(repeats):
            if next(bursts) * len(buffers) % PRODUCTS == 0:
                fresh[:] = gatherer.gather(next(turns))
            results = [case.compute(fresh[0], buffer) for buffer in buffers]
            for result in results:
                session.injector.after(case.name, result)
            if not all(agree(results, fresh[1])):
                raise SystemExit(f"a result of {case.name} is wrong on this machine")
            session.runtime.spoil(results)

    return verified


def by_digest(
    session: Session, case: Case, pools: Problem, seed: int, buffers: list[Any], way: Way
) -> Callable[[int], None]:
    """Return what `verifying` returns, with digests of rows instead of a golden."""
    assert case.product is not None
    digested = digest_of(way, case.product.N, buffers[0].element_size(), seed)
    gatherer = Gatherer(session.runtime, session.ctx.device, case.product, pools, seed).digesting(digested)

    def agree(results: list[Any], expected: Any) -> list[bool]:
        return [torch.equal(digested.rows(result), expected) for result in results]

    return verifying(session, case, buffers, gatherer, agree)


class Digested:
    """Products that a GPU repeats without the host, verified by digests of their rows that Triton makes."""

    def __init__(self, session: Session, case: Case, gatherer: Gatherer, buffers: list[Any]) -> None:
        """Capture one burst: gather, multiply, digest, and count the results with a wrong row."""
        self._case, device = case, torch_device(session.ctx.device)
        self._sheet = gatherer.sheet(0)
        self._indices = tuple(index[0].clone() for index in self._sheet)
        self._wrong, self._turns = torch.zeros(1, dtype=torch.int64, device=device), itertools.count()

        def burst() -> Any:
            operands, expected = gatherer.gather_by(self._indices, 1)
            session.runtime.spoil(buffers[:1])
            made = gatherer.compared([case.compute(operands, buffer) for buffer in buffers])
            wrong = torch.stack([(each != expected).any() for each in made])
            self._wrong.add_(wrong.sum())
            return wrong

        self._graph = Graph(device, burst)

    def verified(self, bursts: int) -> None:
        """Verify so many bursts; exit the program if a result is wrong."""
        for _ in range(bursts):
            turn = next(self._turns) % SHEET
            for mine, given in zip(self._indices, self._sheet, strict=True):
                mine.copy_(given[turn])
            self._graph.launch()
        if wrong := int(self._wrong):
            raise SystemExit(f"{wrong} products of {self._case.name} have a wrong digest on this machine")


def repeated(
    session: Session, case: Case, pools: Problem, seed: int, buffers: list[Any]
) -> dict[str, Callable[[int], object]]:
    """Return way → function that lets a GPU do so many bursts by itself: unverified, verified, and in other ways."""
    own = Repetition(session, case, pools, seed)
    if session.undigested:
        print(f"without digests: {session.undigested}", flush=True)
    session.undigested = "the benchmark compares goldens"
    goldens = Repetition(session, case, pools, seed)
    session.undigested = ""

    def verified(repetition: Repetition, bursts: int) -> None:
        if wrong := repetition.verified(bursts):
            raise SystemExit(f"{wrong} products of {case.name} with seed {seed} are wrong on this machine")

    found: dict[str, Callable[[int], object]] = {
        "unverified": own.unverified,
        "verified": partial(verified, own),
        "goldens": partial(verified, goldens),
    }
    if buffers[0].element_size() == FUSED:
        try:
            from benchmarks.digest_kernel import Fused  # noqa: PLC0415  Triton may be missing
        except ImportError as error:
            print(f"without the digest in one kernel: {error}", flush=True)
        else:
            assert case.product is not None
            gatherer = Gatherer(session.runtime, session.ctx.device, case.product, pools, seed)
            fused: Any = Fused(case.product.N, seed, torch_device(session.ctx.device))
            found["64 bits, one kernel"] = Digested(session, case, gatherer.digesting(fused), buffers).verified
    return found


def measure(device: Device, form: str, size: int, depth: int, pairs: int, tree: Path | None) -> Row:
    """Measure one size with `pairs` pairs, also in turn with `tree`; exit the program if a result is wrong."""
    context = Context(device=device, level="standard", seed=size, budget=3600.0)
    session = Session(context)
    case = product_case(device, form, form, "dense", "square", "nn", (size, size, depth, 0))
    seed = verify.case_seed(context, case)
    product = case.product
    assert product is not None
    made: list[Any] = []
    making = common.seconds(lambda: made.append(undoubted(session, case, product, seed)))
    pools = made[0]
    problem = gather(product, pools, seed, 0)
    operands = upload(problem.operands, device)
    (golden,) = upload((problem.golden,), device)
    burst = session.runtime.burst(golden)
    buffers = [torch.empty_like(golden) for _ in range(burst)]

    def unverified(repeats: int) -> None:
        for _ in range(repeats):
            for buffer in buffers:
                torch.matmul(*operands, out=buffer)
            synchronize(device)

    if session.runtime.repeats(device):
        found = repeated(session, case, pools, seed, session.runtime.room(golden, burst))
        sides, ways = list(found.values()), list(found)[2:]
    else:
        gatherer = Gatherer(session.runtime, device, product, pools, seed)
        sides = [unverified, verifying(session, case, buffers, gatherer, session.runtime.agree)]
        sides += [by_digest(session, case, pools, seed, buffers, way) for way in WAYS]
        ways = [way.name for way in WAYS]
    for side in sides:
        side(1)
    repeats = max(1, round(SAMPLE / common.seconds(partial(sides[0], 1))))
    with common.Bystanders() as bystanders:
        times = common.interleave([partial(side, repeats) for side in sides], pairs)
    words = ["--dtype", form, "--sizes", size, *(["--depth", depth] if depth != size else [])]
    beside = other_version.measure(tree, words, sides[:2], repeats, burst, pairs) if tree else None
    tries = 3 if size >= 4096 else 9

    def median(work: Callable[[], object]) -> float:
        return statistics.median(common.seconds(work) for _ in range(tries))

    def load() -> None:
        upload((*problem.operands, problem.golden), device)
        synchronize(device)

    unverified(1)  # what was verified is spoilt: the account compares right results
    spare = [torch.empty_like(golden) for _ in range(burst)]
    account = Account(
        product=statistics.median(first for first, *_ in times) / (repeats * burst),
        comparison=median(lambda: session.runtime.agree(buffers, golden)) / burst,
        spoiling=median(lambda: session.runtime.spoil(spare)) / burst,
        making=making,
        upload=median(load),
        host=median(lambda: host_same_bits(buffers[0].cpu(), problem.golden)),
        digest=median(lambda: digest(buffers[0])),
    )

    def ratio(first: int, second: int) -> common.Ratio:
        return common.ratio([(each[first], each[second]) for each in times])

    digests = {name: (ratio(0, at), ratio(1, at)) for at, name in enumerate(ways, 2)}
    return Row(size, depth, repeats * burst, ratio(0, 1), bystanders.share, account, digests, beside)


def report(rows: list[Row]) -> str:
    """Return the body of the report."""
    speed = common.table(
        ["size", "K", "pairs", "products per side", "verified / unverified (95 %)", "target", "others", "Gflop/s"],
        [
            [
                *(r.size, r.depth, r.ratio.pairs, r.repeats, r.ratio, r.judged, f"{100 * r.others:.0f} %"),
                f"{2e-9 * r.size**2 * r.depth / r.account.product:.1f}",
            ]
            for r in rows
        ],
    )
    costs = common.table(
        [
            "size",
            "product",
            "comparison",
            "spoiling",
            "making twice",
            "upload",
            "host compare",
            "digest",
            "trials to 5 %",
        ],
        [
            [
                r.size,
                *(
                    f"{1e3 * cost:.2f} ms"
                    for cost in (
                        r.account.product,
                        r.account.comparison,
                        r.account.spoiling,
                        r.account.making,
                        r.account.upload,
                        r.account.host,
                        r.account.digest,
                    )
                ),
                round(r.account.per_upload / (0.05 * r.account.trial)),
            ]
            for r in rows
        ],
    )
    header = ["size", "way", "verified / unverified (95 %)", "over verified (95 %)", "faster than verified"]
    faster = {"reached": "yes", "missed": "no"}
    digests = common.table(
        header,
        [
            [r.size, way, raw, today, faster.get(today.against(1.0), "not resolved")]
            for r in rows
            for way, (raw, today) in r.digests.items()
        ],
    )
    about = "\nVerified in other ways; `benchmarks.digest` says what digests can miss.\n\n"
    return (
        f"{speed}\nOthers: the share of all processor time that other processes took meanwhile. Gflop/s: unverified.\n"
        "\nThe account. Comparison and spoiling (overwriting a compared result, so that a kernel that writes nothing\n"
        "does not find it right) are part of every trial and of the ratio above; making, upload and host compare\n"
        "happen once per upload, the digest for fixed cases only. The last column: how many trials over one\n"
        f"upload bring its own costs below 5 % of the time.\n\n{costs}"
        f"{about + digests if any(r.digests for r in rows) else ''}"
        f"{other_version.report([(r.size, r.depth, r.beside) for r in rows if r.beside])}"
    )


def main() -> None:
    """Measure every size in one process and write the report."""
    parser = common.options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--depth", type=int, nargs="+", default=[0], help="K (default: the size)")
    parser.add_argument("--pairs", type=int, help=f"pairs per size (default: 40; {FEWER} from 4096 up on a CPU)")
    parser.add_argument("--beside", type=Path, help="checkout of another version, measured in turn (CPU only)")
    arguments = parser.parse_args()
    if arguments.beside and arguments.device != "cpu":
        parser.error("--beside measures on a CPU only: leave --device out")
    common.become_worker()
    facts = common.machine()
    found = [d for d in stack.discover()[0] if d.backend == arguments.device]
    if not found:
        parser.error(f"--device {arguments.device}: this torch finds none; it finds {stack.discover()[0][0].name}")
    with strict_switches():
        rows = []
        for size, depth in itertools.product(arguments.sizes, arguments.depth):
            slow = arguments.device == "cpu" and size >= 4096
            pairs = arguments.pairs or (FEWER if slow else 40)
            rows.append(measure(found[0], arguments.dtype, size, depth or size, pairs, arguments.beside))
            print(f"{size}, K {rows[-1].depth}: {rows[-1].ratio}, {rows[-1].judged}", flush=True)
            print("".join(f"  {way}: {raw}\n" for way, (raw, _) in rows[-1].digests.items()), end="", flush=True)
    common.write(
        arguments.out,
        f"verified_gemm-{arguments.device}-{arguments.dtype}{'-beside' if arguments.beside else ''}",
        f"Verified products over unverified ones, {arguments.dtype} on {found[0].model}",
        facts,
        report(rows),
        {"rows": [{**asdict(r), "judged": r.judged} for r in rows]},
    )


if __name__ == "__main__":
    main()
