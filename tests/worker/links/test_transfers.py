"""Copies between host and device: clean ones are clean, and a wrong one tells which way it went, or that it is memory.

The host's memory stands in for the device's; on fake tensors of a CUDA device the same calls are rehearsed.
"""

import pytest

from canaryd.facts import Comparison, Culprit, Reading, Way
from canaryd.probe import Context, NoCase
from canaryd.worker.links import transfers
from canaryd.worker.links.patterns import PATTERNS, make
from canaryd.worker.numeric.characterised import SETTLED
from canaryd.worker.numeric.stack import cpu
from tests.worker.numeric.cuda import DEVICES, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

WORDS = 1000
SEEDS = range(8)


def copied(*cases, drill="", seed=3, budget=0.0, words=WORDS):
    """The comparisons of a run: (wrong, right), and its readings by name."""
    ctx = Context(device=cpu(), level="quick", seed=seed, budget=budget or 1e-9, cases=cases, drill=drill)
    facts = list(transfers.copy_patterns(ctx, words))
    found = [f for f in facts if isinstance(f, Comparison)]
    return (
        [c for c in found if c.wrong],
        [c for c in found if not c.wrong],
        {f.name: f.value for f in facts if isinstance(f, Reading)},
    )


def test_clean_copies_are_clean():
    """Every pattern there and back, whatever the seed and the number of words; with the speed of each way."""
    for seed in SEEDS:
        wrong, right, told = copied(seed=seed, words=WORDS + seed)
        assert wrong == []
        assert sorted(c.case for c in right) == sorted(
            f"int64/{name}/{way}@{WORDS + seed}" for name in PATTERNS for way in ("to-device", "to-host")
        )
        assert told["trials"] == 2 * len(PATTERNS)
        assert told["speed_to_device"] > 0 < told["speed_to_host"]
        assert told["device_seconds"] > 0  # without it the budget would count the start of torch too


def test_a_longer_budget_repeats_the_patterns():
    """Clean copies of a pattern are one comparison, which counts them."""
    wrong, right, told = copied(budget=0.3)
    assert (wrong, len(right)) == ([], 2 * len(PATTERNS))
    assert told["trials"] == sum(c.trials for c in right) == sum(c.uploads for c in right) > 2 * len(PATTERNS)


class WrongToHost(transfers.Copies):
    """A bit flips on the way to the host."""

    def fetch(self):
        super().fetch()
        self.back[self.back.numel() // 3] ^= transfers.FLIPPED


class WrongMemory(transfers.Copies):
    """A bit of the device's memory always reads 1."""

    def send(self):
        super().send()
        self.there[self.there.numel() // 3] |= transfers.FLIPPED

    def write(self, words):
        super().write(words)
        self.there[self.there.numel() // 3] |= transfers.FLIPPED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "way", "culprit"),
    [
        (transfers.Struck, Way.TO_DEVICE, Culprit.TRANSFER),
        (WrongToHost, Way.TO_HOST, Culprit.TRANSFER),
        (WrongMemory, Way.TO_DEVICE, Culprit.MEMORY),
    ],
)
def test_a_wrong_way_is_told_from_the_other_and_from_memory(monkeypatch, fault, way, culprit, seed):
    """The fault of a drill, and two others: its way, what was wrong, the word and the bit; nothing else is accused."""
    monkeypatch.setattr(transfers, "Struck", fault)
    wrong, right, _ = copied(drill="flip", seed=seed)
    assert {(c.evidence.transfer.way, c.evidence.transfer.culprit) for c in wrong} == {(way, culprit)}
    for c in wrong:
        assert c.case.split("/")[2].startswith(transfers.NAMES[way])
        ((index, want, have),) = c.evidence.first
        assert index == (WORDS // 3,)
        assert int(want, 16) ^ int(have, 16) == transfers.FLIPPED
        assert (c.evidence.bits, c.evidence.repeats, c.evidence.repeats_wrong) == ({"11": 1}, 3, 3)
        assert c.evidence.lines["element"].first == WORDS // 3
        assert str(WORDS // 3) in c.evidence.pattern
    assert all(transfers.NAMES[way] not in c.case for c in right) or culprit is Culprit.MEMORY


def test_a_transfer_that_errs_once_is_told_as_passing(monkeypatch):
    """It is right in every repetition."""
    send = transfers.Copies.send
    struck = []

    def once(self):
        send(self)
        if not struck:
            struck.append(self.there)
            self.there[7] ^= 1

    monkeypatch.setattr(transfers.Copies, "send", once)
    (wrong,), _, _ = copied()
    assert (wrong.evidence.transfer.culprit, wrong.evidence.repeats, wrong.evidence.repeats_wrong) == (
        Culprit.TRANSFER,
        3,
        0,
    )


def test_a_copy_that_does_nothing_is_wrong(monkeypatch):
    """What is left from before never passes for what arrives, in either direction."""
    for name in ("send", "fetch"):
        with monkeypatch.context() as patch:
            patch.setattr(transfers.Copies, name, lambda self: None)
            assert copied()[0]


def test_a_confirmation_copies_only_its_pattern():
    """By the name of its case; what does not exist is named."""
    _, right, _ = copied("int64/walking/to-host@4096")
    assert {c.case.split("/")[1] for c in right} == {"walking"}
    with pytest.raises(NoCase, match="no case matches int64/nonsense"):
        copied("int64/nonsense")


def test_the_patterns_toggle_every_line():
    """Each bit takes both values in each pattern, and with `alternating` every bit changes with every word."""
    for name in PATTERNS:
        words = make(name, 1 << 12, 5, torch.device("cpu"))
        low = 12 if name == "address" else 64
        bits = [(words >> bit) & 1 for bit in range(64)]
        assert all(0 < int(b.sum()) < len(words) for b in bits[:low]), name
    words = make("alternating", 64, 0, torch.device("cpu"))
    assert set((words[1:] ^ words[:-1]).tolist()) == {-1}
    walking = [w & (1 << 64) - 1 for w in make("walking", 128, 0, torch.device("cpu")).tolist()]
    assert walking == [1 << n for n in range(64)] + [(1 << 64) - 1 - (1 << n) for n in range(64)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
def test_copies_run_on_a_gpu_as_far_as_that_can_be_rehearsed(monkeypatch, device):
    """Patterns and copies on torch's fake tensors of a CUDA device."""
    stand_in(monkeypatch, torch)
    assert device.backend in SETTLED
    with fake(torch):
        target = torch.device("cuda", 0)
        for name in PATTERNS:
            words = make(name, WORDS, 1, target)
            assert (words.shape, words.dtype, words.device.type) == ((WORDS,), torch.int64, "cuda")
        monkeypatch.setattr(transfers, "LOCKED", ())  # this torch locks no pages without a GPU
        copies = transfers.Copies(target, WORDS)
        copies.write(words)
        copies.send()
        copies.fetch()
        assert copies.back.device.type == "cpu"
