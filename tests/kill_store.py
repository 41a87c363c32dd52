"""Writes runs into a store and prints each id once it is promised to be on disk: `kill_store.py DIR PREFIX [COUNT]`.

A process of its own, so that the tests can kill it or run two of them at once.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from canaryd.model import Comparison, Exactness, Outcome, Run
from canaryd.store import Store

state_dir, prefix, *count = sys.argv[1:]
comparisons = tuple(
    Comparison(case=f"case {n}", shape="M=32 N=1024 K=256", seed=n, exactness=Exactness.UNIVERSAL) for n in range(20)
)
with Store.open(Path(state_dir)) as store:
    for number in itertools.islice(itertools.count(), int(count[0]) if count else None):
        run = Run(
            id=f"{prefix}-{number}",
            device="CPU-1",
            probe="exact_matmul",
            probe_version=1,
            started=float(number),
            seconds=0.1,
            outcome=Outcome.COMPLETED,
            comparisons=comparisons,
        )
        if not store.add_run(run):
            sys.exit(store.problem)
        print(run.id, flush=True)
