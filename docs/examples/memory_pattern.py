# ruff: noqa: INP001  a catalogue, not a package
"""Write seeded bytes over a stretch of host memory and read them back.

Stresses: memory cells, caches, and the path between them.

Cannot see: memory that the kernel did not hand out, cells that lose a bit only later, which module is at fault.
"""

import random
from collections.abc import Iterator

from canaryd.probe import Comparison, Context, Evidence, Exactness, Fact, ProbeSpec, Reading

SPEC = ProbeSpec(name="memory_pattern", summary="bytes in memory, read back", backends=("cpu",), numeric=False)
CHUNK = 1 << 20
CHUNKS = {"quick": 32, "standard": 128, "deep": 512}


def run(ctx: Context) -> Iterator[Fact]:
    """Compare every chunk of a freshly written stretch of memory with what was written."""
    golden = random.Random(ctx.seed).randbytes(CHUNK)
    memory = bytearray(golden) * CHUNKS[ctx.level]
    if ctx.drill:  # flip one bit, to test that the alarm arrives
        memory[ctx.seed % len(memory)] ^= 1
    wrong = [at for at in range(0, len(memory), CHUNK) if not memory.startswith(golden, at)]
    yield Comparison(
        case="bytes/seeded",
        shape=f"{len(memory)} bytes",
        seed=ctx.seed,
        exactness=Exactness.UNIVERSAL,
        trials=CHUNKS[ctx.level],
        wrong_trials=len(wrong),
        evidence=_evidence(golden, bytes(memory[wrong[0] : wrong[0] + CHUNK])) if wrong else None,
    )
    yield Reading(name="memory_compared", value=len(memory), unit="bytes")


def _evidence(golden: bytes, seen: bytes) -> Evidence:
    bad = [(i, a, b) for i, (a, b) in enumerate(zip(golden, seen, strict=True)) if a != b]
    return Evidence(
        wrong=len(bad),
        total=CHUNK,
        first=tuple(((i,), f"0x{a:02x}", f"0x{b:02x}") for i, a, b in bad[:64]),
        bits={str(k): n for k in range(8) if (n := sum((a ^ b) >> k & 1 for _, a, b in bad))},
        zeroed=sum(b == 0 for _, _, b in bad),
        nonfinite=0,
        lines={},  # an index into virtual memory names no physical place
        pattern=f"{len(bad)} bytes of the first wrong chunk, byte {bad[0][0]} first" if bad else "not seen again",
    )
