"""What is simulated: the probes, their cases, and what may go wrong with them."""

from __future__ import annotations

from collections.abc import Mapping

from canaryd.model import Outcome
from canaryd.probe import ProbeSpec

START = 1_609_459_200.0
"""2021-01-01 UTC: in the past, since the watch doubts lines of the kernel log that lie in the future."""
HOUR, DAY = 3_600.0, 86_400.0
FOREVER = 10**9
SHAPE, ROWS, COLUMNS = "M=64 N=64 K=256", 64, 64
CASES = ("bfloat16/cancel/prefill/nt", "float16/full/decode/nn", "float32/wide/square/tn")
"""Exact cases of a run: each with a fixed seed, and with the run's own."""
KERNELS = ("gemm/prefill", "gemm/decode", "softmax/rows")
"""Recorded cases of a run."""
TILES = 8
REPEATS = 10
"""Recordings of each case in a run that baselines: three such runs learn it."""
ANSWER = "completions/reef/fresh"
"""The endpoint's case; asked so often while it is learnt that one run does."""
ANSWERED = ("the", "reef", "is", "a", "wall", "of", "coral", "in", "warm", "clear", "water", "near", "the", "coast")
LEARNT_AT_ONCE = 30
EXACT, RECORDED, CANARY = "exact_matmul", "recorded_kernels", "endpoint_canary"
SERVED, MEMORY, LINKS = "exact_endpoint", "memory_sweep", "collectives"
PATTERNS, WORDS = ("int64/address/sweep@8191", "int64/inversions/sweep@8191"), 8191
"""Cases of a sweep of memory, and the words of its one slice."""
ASKED, ANSWERS = ("completions/alone", "completions/again", "completions/8-at-once"), 8
"""Cases of a served exact canary, and how many answers each has."""
NVIDIA, HOST = "nvidia_telemetry", "host_telemetry"
SELFTEST = "vendor_selftest"
SPECS: Mapping[str, ProbeSpec] = {
    spec.name: spec
    for spec in (
        ProbeSpec(name=EXACT, summary="exact products", runtimes=("*",), every_instruction_set=True, order=10),
        ProbeSpec(name=RECORDED, summary="recorded kernels", backends=("cuda",), order=30),
        ProbeSpec(name=CANARY, summary="an endpoint's answers", backends=("endpoint",), numeric=False, order=40),
        ProbeSpec(name=SERVED, summary="exact answers", backends=("exact_endpoint",), numeric=False, order=40),
        ProbeSpec(name=MEMORY, summary="memory", order=60),
        ProbeSpec(name=LINKS, summary="links", backends=("cpu", "cuda"), group=True, order=64),
        ProbeSpec(name=SELFTEST, summary="the vendor's self-test", backends=("cuda",), numeric=False, order=90),
        ProbeSpec(name=NVIDIA, summary="telemetry", backends=("cuda",), numeric=False, telemetry=True, period=15.0),
        ProbeSpec(name=HOST, summary="telemetry", backends=("cpu",), numeric=False, telemetry=True, period=15.0),
    )
}
"""The simulated catalogue, shaped like the shipped probes."""
OUTCOMES = {outcome.value for outcome in Outcome} - {Outcome.COMPLETED.value}
KINDS = {"exact", "upload", "golden", "comparator", "link", "recorded", "garbage", "nothing", "selftest", *OUTCOMES}
"""What may go wrong: a result (exact), all results of an upload, the host's golden, the comparator, a link (of one
device or `place`: all its links; of two devices: the one between them; the event `check` shows it), a recorded case
(with `bits` the same departure each time), an endpoint's answer (garbage), all skipped (nothing), a vendor's self-test,
or how a worker ends."""
