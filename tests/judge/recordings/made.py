"""A history of recordings, and what the judge says of it."""

import dataclasses
import itertools

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import LEARN
from canaryd.judge.recordings.intake import intake
from canaryd.judge.recordings.launches import label
from canaryd.judge.recordings.record import Peer, Record
from canaryd.judge.recordings.rules import findings
from canaryd.model import Device, Outcome, Run

NOW = 1_790_000_000.0
HOUR, DAY = 3600.0, 86_400.0
POLICY = JudgePolicy()


def asking(reruns: int) -> JudgePolicy:
    """Return a policy that asks for another number of retests: how many are enough is a matter of chances."""

    class Policy(JudgePolicy):
        confirm_runs = reruns

    return Policy()


ENDPOINT = Device(uuid="endpoint:main", backend="endpoint", index=0, model="qwen", detail={"behind": "cuda:0 cuda:1"})
GPU = Device(uuid="GPU-a", backend="cuda", index=0, model="H100")
CHAIN = {"checkpoint": "c1", "tokenizer": "t1", "template": "m1", "server": "vllm 0.32", "client": "vllm 1"}
TALE = "a tale of two cards in one rack and of the fan between them which never once stood still"
WORDS = tuple(TALE.split())
VALUES = tuple(-0.1 * n for n in range(1, len(WORDS) + 1))
NUMBERS = itertools.count()


def recording(shift=0.0, *, chain=None, tokens=WORDS, digest="", case="story", **fields):
    values = tuple(v + shift for v in VALUES)
    return Recording(
        case=case,
        digest=digest or f"{abs(hash((values, tokens))):016x}"[:16],
        chain=CHAIN if chain is None else chain,
        tokens=tokens,
        values=values,
        margins=(1.0,) * len(values),
        text=" ".join(tokens),
        **fields,
    )


GOOD, STRANGE = recording(), recording(0.01)


def run(ago, *recordings, of=ENDPOINT, **fields):
    made = {
        "id": f"{int(NOW - ago):012d}-{next(NUMBERS):04d}",
        "device": of.uuid,
        "probe": "canary",
        "probe_version": 1,
    }
    made |= {"started": NOW - ago, "seconds": 1.0, "outcome": Outcome.COMPLETED, "recordings": recordings}
    return Run(**{**made, **fields})


class History:
    """Takes runs in as the engine does."""

    def __init__(self, of=ENDPOINT, policy=POLICY):
        self.of, self.policy = of, policy
        self.runs, self.baselines = [], {}

    def add(self, ago, *recordings, learns=True, **fields):
        told = label(run(ago, *recordings, of=self.of, **fields), self.baselines, self.runs, self.policy.confirm_runs)
        made, fresh = intake(told, self.baselines, learns=learns)
        self.baselines |= fresh
        self.runs.append(made)
        return made

    def learn(self, ago=9 * DAY, *vectors, times=LEARN):
        """Learn from one run, as of a server; of a device each recording is of a process of its own."""
        listed = list(itertools.islice(itertools.cycle(vectors or (GOOD,)), times))
        if not self.of.has_witnesses:
            self.add(ago, *listed, baselining=True)
        for number, vector in enumerate([] if not self.of.has_witnesses else listed):
            self.add(ago - number, vector, baselining=True)
        return self

    def confirm(self, first, *vectors):
        for number, one in enumerate(vectors):
            self.add(NOW - first.started - 1 - number, one, confirms=first.id, cases=(one.case,))

    def record(self, now=NOW, **peers):
        runs = tuple(sorted(self.runs, key=lambda r: (r.started, r.id)))
        seen = {name: Peer(device=h.of, runs=tuple(h.runs), baselines=h.baselines) for name, h in peers.items()}
        days = range(int(now // DAY) - 60, int(now // DAY) + 1)
        tested = {r.probe: days for r in runs}
        of = {"device": self.of, "runs": runs, "baselines": self.baselines, "policy": self.policy}
        return Record(**of, now=now, peers=seen, tested=tested)

    def found(self, now=NOW, **peers):
        return by_name(self.record(now, **peers))


def by_name(record):
    """Return the findings by rule; of rules that may say several things of a device, by rule and state."""
    several = ("recording-departed", "baseline-learning")
    return {f"{f.rule} {f.state.value}" if f.rule in several else f.rule: f for f in findings(record)}


def departed(*confirmations, of=ENDPOINT, strange=STRANGE, policy=POLICY):
    history = History(of, policy).learn()
    history.add(2 * DAY, GOOD)
    first = history.add(HOUR, strange)
    history.confirm(first, *confirmations)
    return history


BANG = dataclasses.replace(
    recording(tokens=("!",) * len(WORDS), digest="ba"), text="!" * 40, values=(None,) * len(WORDS)
)
KERNEL = {"dtype": "bfloat16", "kernel": "sm90_gemm_128x128"}


def twin(name, vector, *, chain=None, times=LEARN, **device):
    """A GPU that has learnt one vector, and met it since."""
    history = History(of=dataclasses.replace(GPU, uuid=f"GPU-{name}", index=ord(name) - ord("a"), **device))
    made = dataclasses.replace(vector, chain=KERNEL if chain is None else chain, case="gemm/prefill")
    history.learn(9 * DAY, made, times=times)
    history.add(HOUR, made)
    return history


def voted(mine, *others, **fields):
    record = dataclasses.replace(mine.record(**{h.of.name: h for h in others}), **fields)
    return {n: (f.state, f.cause) for n, f in by_name(record).items() if n.startswith(("recording-", "baseline-"))}
