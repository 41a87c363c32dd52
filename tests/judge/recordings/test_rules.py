"""The judgement of recordings: known passes, unknown is confirmed, a changed chain comes before any device."""

import dataclasses
import itertools

import pytest

from canaryd.config.settings import JudgePolicy
from canaryd.facts import Comparison, Exactness, Reading, Recording
from canaryd.judge.recordings import rules
from canaryd.judge.recordings.baseline import LEARN
from canaryd.judge.recordings.intake import intake
from canaryd.judge.recordings.record import Peer, Record
from canaryd.judge.recordings.rules import ALPHA, BUSY_SLOWER, EARLIER, NEWEST, SLOWER, findings
from canaryd.model import Cause, Device, Outcome, Run, State

NOW = 1_790_000_000.0
HOUR, DAY = 3600.0, 86_400.0
POLICY = JudgePolicy()
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
        made, fresh = intake(run(ago, *recordings, of=self.of, **fields), self.baselines, learns=learns)
        self.baselines |= fresh
        self.runs.append(made)
        return made

    def learn(self, ago=9 * DAY, *vectors, times=LEARN):
        """Learn from one run, as of a server; of a device each recording is of a process of its own."""
        listed = list(itertools.islice(itertools.cycle(vectors or (GOOD,)), times))
        if self.of.is_endpoint:
            self.add(ago, *listed, baselining=True)
        for number, vector in enumerate([] if self.of.is_endpoint else listed):
            self.add(ago - number, vector, baselining=True)
        return self

    def confirm(self, first, *vectors):
        for number, one in enumerate(vectors):
            self.add(NOW - first.started - 1 - number, one, confirms=first.id, cases=(one.case,))

    def record(self, now=NOW, **peers):
        runs = tuple(sorted(self.runs, key=lambda r: (r.started, r.id)))
        seen = {name: Peer(device=h.of, runs=tuple(h.runs), baselines=h.baselines) for name, h in peers.items()}
        return Record(device=self.of, runs=runs, baselines=self.baselines, policy=self.policy, now=now, peers=seen)

    def found(self, now=NOW, **peers):
        return {f.rule: f for f in findings(self.record(now, **peers))}


def departed(*confirmations, of=ENDPOINT, strange=STRANGE, policy=POLICY):
    history = History(of, policy).learn()
    history.add(2 * DAY, GOOD)
    first = history.add(HOUR, strange)
    history.confirm(first, *confirmations)
    return history


def test_known_bits_are_nothing_to_speak_of():
    """A complete baseline and runs within it: no finding at all."""
    history = History().learn(9 * DAY, GOOD, STRANGE)
    history.add(HOUR, GOOD)
    history.add(HOUR / 2, STRANGE)
    assert history.found() == {}
    assert not any(r.unknown for r in history.runs)


def test_what_is_not_learnt_yet_is_said():
    """One recording fewer than a baseline takes."""
    history = History().learn(times=LEARN - 1)
    assert set(history.found()) == {"baseline-learning"}
    assert history.found()["baseline-learning"].state is State.HEALTHY


def test_an_unknown_vector_asks_for_confirmation():
    """Named in the run, unknown until the re-runs came, never straight to an accusation."""
    history = departed()
    assert history.runs[-1].unknown == ("story",)
    found = history.found()["recording-unconfirmed"]
    assert found.state is State.UNKNOWN
    assert "not judged yet" in found.message
    assert "3 re-runs" in found.action


def test_repeated_by_every_rerun_it_is_a_departure():
    """Suspect, whoever's fault it is, with the chance stated and the way to settle it."""
    found = departed(STRANGE, STRANGE, STRANGE).found()["recording-departed"]
    assert (found.state, found.cause) == (State.SUSPECT, Cause.UNDETERMINED)
    assert found.message == "canary differs from its baseline (case story); it repeats in 3 re-runs."
    assert any("log probabilities differ by up to 0.01 nats" in sentence for sentence in found.evidence)
    assert any("by chance" in sentence for sentence in found.evidence)
    assert found.action.endswith("--device cuda:0 --device cuda:1")


def test_reruns_that_differ_from_one_another_are_departures_too():
    """A unit that errs at random gives other wrong bits each time."""
    assert "recording-departed" in departed(recording(0.02), recording(0.03), recording(0.04)).found()


def test_two_of_three_are_not_enough():
    """One re-run gave known bits: counted, told, not held against the device yet."""
    found = departed(STRANGE, STRANGE, GOOD).found()
    assert set(found) == {"recording-not-repeated"}
    assert found["recording-not-repeated"].state is State.HEALTHY


@pytest.mark.parametrize(("times", "rule"), [(3, "recording-not-repeated"), (8, "recording-departed")])
def test_what_comes_back_too_often_is_a_departure(times, rule):
    """A rare fault is never repeated by re-runs; it betrays itself by how often it comes."""
    history = History().learn()
    for n in range(20):
        history.add(2 * DAY - n * HOUR, GOOD)
    for n in range(times):
        first = history.add(DAY - n * HOUR, STRANGE)
        history.confirm(first, GOOD, GOOD, GOOD)
    assert rule in history.found()


@pytest.mark.parametrize(("confirm_runs", "state"), [(3, State.SUSPECT), (2, State.UNKNOWN)])
def test_a_short_record_cannot_accuse(confirm_runs, state):
    """The chance of a healthy device to fail the whole test has to be small: 0.098³ is, 0.098² is not."""
    policy = dataclasses.replace(POLICY, confirm_runs=confirm_runs)
    history = History(policy=policy).learn()
    first = history.add(HOUR, STRANGE)
    history.confirm(first, *[STRANGE] * confirm_runs)
    found = findings(history.record())
    assert [f.state for f in found if f.rule.startswith("recording")] == [state]
    rate = next(iter(history.baselines.values())).rate("")
    assert (rate**confirm_runs <= ALPHA) is (state is State.SUSPECT)


def test_a_sibling_with_known_bits_accuses_the_device():
    """Same case, same chain, later than the departure, and right."""
    history, sibling = departed(*[STRANGE] * 3, of=GPU), History(dataclasses.replace(GPU, uuid="GPU-b")).learn()
    sibling.add(HOUR / 2, GOOD)
    assert history.found(**{"cuda:1": sibling})["recording-departed"].cause is Cause.HARDWARE


def test_a_sibling_with_the_same_new_bits_accuses_the_software():
    """Two devices do not break in the same way."""
    history, sibling = departed(*[STRANGE] * 3, of=GPU), departed(of=dataclasses.replace(GPU, uuid="GPU-b"))
    found = history.found(**{"cuda:1": sibling})["recording-departed"]
    assert (found.state, found.cause) == (State.SUSPECT, Cause.SOFTWARE)


def test_a_sibling_on_another_chain_says_nothing():
    """Its bits are those of another model."""
    sibling = History(dataclasses.replace(GPU, uuid="GPU-b")).learn(DAY, recording(chain={"checkpoint": "c2"}))
    sibling.add(HOUR / 2, recording(chain={"checkpoint": "c2"}))
    history = departed(*[STRANGE] * 3, of=GPU)
    assert history.found(**{"cuda:1": sibling})["recording-departed"].cause is Cause.UNDETERMINED


LINKS = [("checkpoint", "c2"), ("tokenizer", "t2"), ("template", "m2"), ("server", "vllm 0.33"), ("client", "vllm 2")]


@pytest.mark.parametrize(("link", "value"), LINKS)
def test_a_changed_chain_accuses_no_device(link, value):
    """Whatever the answer is now: the link that changed is named, and nothing is said of hardware."""
    history = History().learn()
    history.add(HOUR, recording(0.5, chain=CHAIN | {link: value}))
    found = history.found()
    assert set(found) == {"chain-changed"}
    assert found["chain-changed"].message == f"canary results changed after a change of {link} (case story)."
    assert f"Changed: {link} ({CHAIN[link]} → {value})." in found["chain-changed"].evidence
    assert (found["chain-changed"].state, found["chain-changed"].cause) == (State.UNKNOWN, Cause.SOFTWARE)


def test_another_version_of_a_probe_is_named_as_the_change():
    """The chain is the same; the results of the older version cannot be compared."""
    history = History().learn()
    history.add(HOUR, STRANGE, probe_version=2)
    found = history.found()["chain-changed"]
    assert found.message == "canary results changed after a change of the probe (case story)."
    assert "Changed: the version of the probe." in found.evidence


def test_findings_have_one_sentence_for_what_was_seen_and_one_for_what_to_do():
    """Everything else is evidence; a command stands once."""
    stories = [departed(), departed(*[STRANGE] * 3), departed(STRANGE, GOOD, GOOD), History().learn(times=3)]
    stories += [twin("a", STRANGE), History().learn()]
    stories[-1].add(HOUR, BANG, recording(0.5, case="tale", chain=CHAIN | {"server": "x"}))
    for found in itertools.chain.from_iterable(story.found().values() for story in stories):
        assert found.message.endswith(".")
        assert len(found.message) <= 160
        assert ". " not in found.message + found.action
        commands = [text for text in (found.action, *found.evidence) if "canaryd " in text]
        assert len(commands) == len({*commands})
        assert all(sentence[0].isupper() for sentence in found.evidence)


def test_a_changed_chain_is_learnt_and_told_for_a_while():
    """Learnt anew it is healthy again, with a note for a week; then the note goes."""
    history = History().learn(30 * DAY)
    served = recording(0.5, chain=CHAIN | {"server": "vllm 0.33"})
    history.learn(2 * DAY, served)
    assert history.found()["baseline-fresh"].state is State.UNKNOWN  # nothing was compared yet
    history.add(DAY, served)
    assert history.found()["baseline-fresh"].state is State.HEALTHY
    assert history.found()["chain-changed"].state is State.HEALTHY
    assert any("nothing has confirmed" in sentence for sentence in history.found()["chain-changed"].evidence)
    assert history.found(now=NOW + 10 * DAY) == {}


def test_another_instruction_set_is_no_changed_chain():
    """A CPU is tested in turn by several ways to compute: each has a baseline of its own."""
    history = History(of=dataclasses.replace(GPU, backend="cpu"))
    for number, name in enumerate(("native", "avx2")):
        vectors = [recording(number / 10)] * LEARN
        history.add(9 * DAY - number, *vectors, stack={"instruction_set": name}, baselining=True)
    history.add(HOUR, GOOD, stack={"instruction_set": "native"})
    history.add(HOUR / 2, recording(0.1), stack={"instruction_set": "avx2"})
    assert set(history.found()) == {"baseline-unwitnessed"}


def test_back_on_a_known_chain_nothing_is_new():
    """A rollback is compared with what it gave before."""
    history = History().learn(9 * DAY)
    history.learn(8 * DAY, recording(0.5, chain=CHAIN | {"checkpoint": "c2"}))
    history.add(HOUR, GOOD)
    assert history.found() == {}


def test_cases_of_one_probe_make_one_record():
    """Two re-runs are enough where several cases have shown how seldom a new vector comes."""
    policy = dataclasses.replace(POLICY, confirm_runs=2)
    history = History(policy=policy).learn()
    for name in ("tale", "saga", "ode"):
        history.learn(9 * DAY, recording(case=name))
    first = history.add(HOUR, STRANGE)
    history.confirm(first, STRANGE, STRANGE)
    assert history.found()["recording-departed"].state is State.SUSPECT


def test_what_changed_is_told_beside_what_was_there_last():
    """After an excursion to another server and back, a new tokenizer is all that is new."""
    history = History().learn(9 * DAY)
    history.learn(8 * DAY, recording(0.5, chain=CHAIN | {"server": "vllm 0.33"}))
    history.add(DAY, GOOD)
    history.add(HOUR, recording(0.7, chain=CHAIN | {"tokenizer": "t2"}))
    assert "Changed: tokenizer (t1 → t2)." in history.found()["chain-changed"].evidence


def test_another_model_stays_unknown_until_somebody_says_that_it_was_meant():
    """Nobody can tell a deployment from a file that rotted; an operator's word can."""
    history = History().learn()
    other = recording(0.5, chain=CHAIN | {"checkpoint": "c2"})
    history.learn(2 * DAY, other)
    history.add(DAY, other)
    found = history.found()["chain-changed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.SOFTWARE)
    assert "baseline accept endpoint:main --reason" in found.action
    key = next(b.key for b in history.baselines.values() if b.chain["checkpoint"] == "c2")
    history.baselines[key] = dataclasses.replace(history.baselines[key], accepted="deployed")
    assert history.found() == {}


def test_a_changed_chain_with_the_same_bits_is_no_news():
    """Another client, same answer."""
    history = History().learn()
    history.add(HOUR, recording(chain=CHAIN | {"client": "vllm 2"}))
    assert history.found() == {}


def test_a_bad_unit_does_not_become_its_own_standard():
    """What is not to be learnt from leaves every baseline as it was."""
    history = History()
    history.add(HOUR, GOOD, learns=False)
    assert history.baselines == {}


def test_only_the_digest_of_known_bits_is_kept():
    """The baseline has the rest; of unknown ones all is evidence."""
    history = departed()
    assert all(r.values == () for kept in history.runs[:-1] for r in kept.recordings)
    assert history.runs[-1].recordings == (STRANGE,)


def test_a_departure_clears_by_time_and_known_bits():
    """30 days and three times as many known vectors as it took to depart once."""
    history = departed(STRANGE, STRANGE, STRANGE)
    assert "recording-departed" in history.found(now=NOW + 40 * DAY)
    for n in range(200):
        history.add(HOUR - 1 - n, GOOD)
    assert "recording-departed" in history.found(now=NOW + 29 * DAY)
    assert "recording-departed" not in history.found(now=NOW + 31 * DAY)


@pytest.mark.parametrize(
    ("condition", "usual", "times", "slow"),
    [
        ("idle", 0.01, SLOWER - 0.1, False),
        ("idle", 0.01, SLOWER + 0.1, True),
        ("", 0.01, SLOWER + 0.1, False),
        ("loaded", 0.01, BUSY_SLOWER - 0.1, False),
        ("loaded", 0.01, BUSY_SLOWER + 0.1, True),
        ("idle", 0.0001, 90.0, False),
        ("idle", 0.0001, 110.0, True),
    ],
)
def test_an_endpoint_that_became_slow_is_degraded(condition, usual, times, slow):
    """Several times its own median, in several runs, and by as much as anybody notices; the numbers are right."""
    asked = dataclasses.replace(GOOD, condition=condition)
    history = History().learn(9 * DAY, asked)
    for n in range(EARLIER + NEWEST):
        seconds = usual * (times if n >= EARLIER else 1)
        reading = Reading(name="endpoint_token_seconds", value=seconds, unit="seconds", labels={"api": "chat"})
        history.add(2 * HOUR - n, asked, readings=(reading,))
    assert ("endpoint-slow" in history.found()) is slow
    if slow:
        found = history.found()["endpoint-slow"]
        assert (found.state, found.cause) == (State.DEGRADED, Cause.ENVIRONMENT)


BANG = dataclasses.replace(
    recording(tokens=("!",) * len(WORDS), digest="ba"), text="!" * 40, values=(None,) * len(WORDS)
)


def test_broken_output_on_an_unchanged_chain_is_suspect():
    """Token 0 for ever, with the likely causes in order and the next boundary to test."""
    history = History().learn()
    history.add(HOUR, BANG)
    found = history.found()["broken-output"]
    assert (found.state, found.cause) == (State.SUSPECT, Cause.UNDETERMINED)
    assert any("Next boundary to test" in sentence for sentence in found.evidence)
    assert found.action.startswith("Run: canaryd ")


def test_broken_output_of_another_chain_accuses_nobody():
    """A new model may be what is broken; nothing of it is learnt by itself, and an operator's word settles it."""
    history = History().learn()
    changed = dataclasses.replace(BANG, chain=CHAIN | {"checkpoint": "c2"})
    history.add(HOUR, *[changed] * LEARN, baselining=True)
    found = history.found()["broken-output"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.SOFTWARE)
    assert any("baseline accept" in sentence for sentence in found.evidence)
    assert len(history.baselines) == 1


def test_a_server_that_answers_nothing_from_the_start_is_not_learnt():
    """Its own first answers must not become the standard."""
    history = History()
    history.add(HOUR, *[BANG] * LEARN, baselining=True)
    assert history.baselines == {}
    assert history.found()["broken-output"].state is State.UNKNOWN


def test_known_bits_may_look_as_they_like():
    """A model that was learnt with a loop is not called broken for it."""
    words = ("na",) * len(WORDS)
    loop = dataclasses.replace(recording(tokens=words), text="na " * 60)
    history = History().learn(9 * DAY, loop)
    history.add(HOUR, loop)
    assert history.found() == {}


def test_a_lasting_fault_on_a_case_with_two_modes_is_found():
    """Its record is too short for the test by re-runs; that it never gives known bits again is not."""
    history = History().learn(9 * DAY, *[GOOD] * 3, recording(0.3), *[GOOD] * 26)
    for n in range(12):
        first = history.add(DAY - n * HOUR, STRANGE)
        history.confirm(first, STRANGE, STRANGE, STRANGE)
    assert history.found()["recording-departed"].state is State.SUSPECT


def test_one_rerun_with_three_recordings_is_one_rerun():
    """A deep run records a case several times; it is one process all the same."""
    history = History().learn()
    first = history.add(HOUR, STRANGE)
    history.add(HOUR - 1, STRANGE, recording(0.02), recording(0.03), confirms=first.id, cases=("story",))
    assert history.found()["recording-unconfirmed"].state is State.UNKNOWN


def test_what_was_learnt_while_the_clock_was_ahead_still_judges():
    """What a baseline learnt from is known by name, not by date."""
    history = History().learn(-400 * DAY)
    first = history.add(HOUR, STRANGE)
    history.confirm(first, STRANGE, STRANGE, STRANGE)
    assert "recording-departed" in history.found()


def test_reruns_that_never_came_are_not_waited_for_for_ever():
    """After a day the finding says so, and counts on."""
    history = History().learn()
    history.add(2 * DAY, STRANGE)
    assert history.found()["recording-not-repeated"].state is State.HEALTHY
    assert "not run again in time" in history.found()["recording-not-repeated"].message


def test_under_load_only_idle_answers_count_where_they_can_be_had():
    """No few loads show what every other load gives; idle the same unknown bits are a departure."""
    idle, loaded = (dataclasses.replace(GOOD, condition=c) for c in ("idle", "loaded"))
    history = History()
    history.add(9 * DAY, *[idle] * 16, *[loaded] * 16, baselining=True)
    for n in range(20):
        history.add(2 * DAY - n, idle)
    far = dataclasses.replace(recording(0.5), condition="loaded")
    first = history.add(HOUR, far)
    history.confirm(first, far, far, far)
    assert history.found()["recording-not-repeated"].state is State.HEALTHY
    first = history.add(HOUR / 2, dataclasses.replace(far, condition="idle"))
    history.confirm(first, *[dataclasses.replace(far, condition="idle")] * 3)
    assert history.found()["recording-departed"].state is State.SUSPECT


def test_now_and_then_an_answer_that_is_called_idle_was_not():
    """Gauges are read before and after a request: on a server that batches only re-runs tell, and they do."""
    idle, loaded = (dataclasses.replace(GOOD, condition=c) for c in ("idle", "loaded"))
    history = History()
    mixed = [dataclasses.replace(recording(n / 1000), condition="loaded") for n in range(1, 8)]
    history.add(9 * DAY, *[idle] * 16, *mixed, *[loaded] * 9, baselining=True)
    for n in range(600):
        history.add(8 * DAY - n, idle)
    strange = dataclasses.replace(recording(0.006), condition="idle", digest="ab")
    for n in range(8):
        first = history.add(2 * DAY - n * HOUR, strange)
        history.confirm(first, idle, idle, idle)
    assert history.found()["recording-not-repeated"].state is State.HEALTHY
    first = history.add(HOUR, strange)
    history.confirm(first, strange, strange, strange)
    assert history.found()["recording-departed"].state is State.SUSPECT


def test_a_suspicion_on_a_chain_that_is_gone_clears_on_the_next():
    """The clean runs that are wanted can only come on what is served now."""
    history = departed(STRANGE, STRANGE, STRANGE)
    new = recording(chain=CHAIN | {"server": "vllm 0.33"})
    history.learn(HOUR / 2, new)
    for n in range(200):
        history.add(HOUR / 2 - 1 - n, new)
    assert "recording-departed" in history.found(now=NOW + 29 * DAY)
    assert "recording-departed" not in history.found(now=NOW + 31 * DAY)


# --- Siblings, when a case is first recorded -------------------------------------------------------------------------

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
    names = ("recording-outvoted", "recording-disputed", "baseline-unwitnessed")
    return {f.rule: (f.state, f.cause) for f in findings(record) if f.rule in names}


OUTVOTED = {"recording-outvoted": (State.SUSPECT, Cause.HARDWARE), "baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}
DISPUTED = {
    "recording-disputed": (State.UNKNOWN, Cause.UNDETERMINED),
    "baseline-unwitnessed": (State.HEALTHY, Cause.NONE),
}


def test_the_odd_one_of_three_is_a_suspect_and_the_others_are_not():
    """A unit that was bad when it was first recorded does not become its own standard."""
    bad, good, other = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    assert voted(bad, good, other) == OUTVOTED
    assert voted(good, bad, other) == {}


def test_of_two_that_disagree_nobody_is_accused():
    """Nor of four that are split evenly: there is no majority to go by."""
    a, b, c, d = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD), twin("d", STRANGE)
    assert voted(a, b) == voted(b, a) == DISPUTED
    split = {"recording-disputed": (State.UNKNOWN, Cause.UNDETERMINED)}
    assert voted(a, b, c, d) == voted(b, a, c, d) == split


@pytest.mark.parametrize(
    "other",
    [
        {"chain": KERNEL | {"kernel": "sm90_gemm_64x256"}},
        {"model": "A100"},
        {"times": LEARN - 2},
    ],
    ids=["another kernel", "another model", "not learnt yet"],
)
def test_what_is_not_comparable_does_not_vote(other):
    """Another kernel may round otherwise, another model has other kernels, and what is not learnt says nothing."""
    assert voted(twin("a", STRANGE), twin("b", GOOD, **other), twin("c", GOOD, **other)) == {
        "baseline-unwitnessed": (State.HEALTHY, Cause.NONE)
    }


def test_where_kernels_are_not_known_nobody_is_accused():
    """Two accelerators may have chosen different ones."""
    blind = {"chain": {"dtype": "bfloat16"}}
    assert voted(twin("a", STRANGE, **blind), twin("b", GOOD, **blind), twin("c", GOOD, **blind)) == DISPUTED


def test_kernels_that_do_not_repeat_do_not_vote():
    """Their bits differ from run to run; that they differ from device to device says nothing."""
    first, second = (History(of=dataclasses.replace(GPU, uuid=f"GPU-{n}", index=i)) for i, n in enumerate("ab"))
    for number, history in enumerate((first, second)):
        vectors = [recording(0.001 * (10 * n + number), chain=KERNEL) for n in range(LEARN)]
        history.learn(9 * DAY, *vectors)
        history.add(HOUR, vectors[0])
    assert voted(first, second) == {"baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}


def test_a_baseline_from_another_host_is_a_witness_and_a_vote():
    """Taken in with `canaryd baseline import`, it stands in for the sibling that this host lacks."""
    bad, good, far = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    imported = tuple(dataclasses.replace(b, imported_kind=("cuda", "H100")) for b in far.baselines.values())
    assert voted(bad, good, imported=imported) == OUTVOTED
    assert voted(good, imported=imported) == {}


def test_what_is_imported_of_another_model_does_not_vote():
    """The stack of a processor says nothing of its model."""
    bad, good, far = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    imported = tuple(dataclasses.replace(b, imported_kind=("cuda", "A100")) for b in far.baselines.values())
    assert voted(bad, good, imported=imported) == DISPUTED


def test_instances_of_one_gpu_have_one_vote_and_are_no_witnesses_for_each_other():
    """One bad part, divided in three, must not outvote a healthy one."""
    parts = [twin(name, STRANGE, parent="GPU-bad") for name in "abc"]
    good = twin("d", GOOD, parent="GPU-good")
    assert voted(good, *parts) == DISPUTED
    assert voted(parts[0], *parts[1:]) == {"baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}


def test_a_suspect_has_no_vote():
    """What it gives is nobody's standard."""
    mine, others = twin("a", GOOD), [twin("b", STRANGE), twin("c", STRANGE)]
    peers = {h.of.name: Peer(device=h.of, trusted=False, runs=tuple(h.runs), baselines=h.baselines) for h in others}
    assert voted(mine, peers=peers) == {"baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}


def test_what_went_bad_while_it_was_learnt_is_disputed():
    """It shares a vector with its siblings, and gives another one now that none of them knows."""
    made = [dataclasses.replace(v, chain=KERNEL, case="gemm/prefill") for v in [GOOD] * 10 + [STRANGE] * 20]
    turned = History(of=dataclasses.replace(GPU, uuid="GPU-t", index=9)).learn(9 * DAY, *made)
    turned.add(HOUR, made[-1])
    siblings = [twin(name, GOOD) for name in "abc"]
    assert voted(turned, *siblings) == DISPUTED
    turned.add(HOUR / 2, made[0])
    assert "recording-disputed" not in voted(turned, *siblings)


@pytest.mark.parametrize(
    ("processes", "expected"), [(2, {"baseline-unwitnessed"}), (3, {"baseline-unwitnessed", "recording-outvoted"})]
)
def test_a_vote_takes_several_processes(processes, expected):
    """What one process gives may stick to it."""
    devices = []
    for name, vector in (("a", STRANGE), ("b", GOOD), ("c", GOOD)):
        history = History(of=dataclasses.replace(GPU, uuid=f"GPU-{name}", index=ord(name)))
        made = dataclasses.replace(vector, chain=KERNEL, case="gemm/prefill")
        history.add(9 * DAY, *[made] * LEARN, baselining=True)
        for number in range(processes):
            history.add(HOUR - number, made)
        devices.append(history)
    assert set(voted(*devices)) == expected


def test_a_link_that_is_not_known_any_more_is_no_change_to_be_believed():
    """A profiler that is barred from the day on which the bits change explains nothing."""
    history = twin("a", GOOD)
    blind = dataclasses.replace(STRANGE, chain={"dtype": "bfloat16"}, case="gemm/prefill")
    history.add(HOUR / 2, blind)
    assert history.found()["chain-changed"].state is State.UNKNOWN
    history = twin("a", GOOD)
    history.add(HOUR / 2, dataclasses.replace(blind, chain=KERNEL | {"kernel": "another"}))
    assert history.found()["chain-changed"].state is State.HEALTHY


def test_operands_that_this_host_made_otherwise_speak_against_it():
    """They come from one seed, and nothing else has changed."""
    chain = KERNEL | {"prompt": "1111"}
    history = twin("a", GOOD, chain=chain)
    history.add(HOUR / 2, dataclasses.replace(STRANGE, chain=chain | {"prompt": "2222"}, case="gemm/prefill"))
    found = history.found()["chain-changed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.HARDWARE)


def test_a_reference_is_a_witness():
    """A bound that the same case met all the while it was learnt, in the run that recorded it."""
    held = Comparison(case="gemm/prefill", shape="", seed=1, exactness=Exactness.MARGIN)
    for missed in (False, True):
        history = History(of=GPU)
        made = dataclasses.replace(GOOD, case="gemm/prefill", chain=KERNEL)
        for number in range(LEARN):
            with_bound = () if missed and number == 7 else (held,)
            history.add(9 * DAY - number, made, comparisons=with_bound, baselining=True)
        history.add(HOUR, made, comparisons=(held,))
        assert ("baseline-unwitnessed" in voted(history)) is missed


def test_no_rule_is_idle(monkeypatch):
    """Without any one of them some story above would be judged otherwise."""
    moved = History().learn()
    moved.add(HOUR, recording(0.5, chain=CHAIN | {"server": "x"}))
    stories = [departed(*[STRANGE] * 3), History().learn(times=3), moved]
    whole = [story.found() for story in stories]
    needed = set()
    for rule in rules.RULES:
        monkeypatch.setattr(rules, "RULES", tuple(r for r in rules.RULES if r is not rule))
        if [story.found() for story in stories] != whole:
            needed.add(rule.__name__)
        monkeypatch.undo()
    assert needed == {"departed", "learning", "chain_changed"}  # the others have stories of their own above


def test_clean_runs_do_not_talk_away_what_came_too_often():
    """A suspect leaves by a month's watch, and not because the share of strange runs falls from day to day."""
    history = History().learn()
    for number in range(12):
        history.add(20 * HOUR - number * 600, STRANGE if number % 3 else GOOD)
    assert "recording-departed" in history.found()
    for number in range(60):
        history.add(10 * HOUR - number * 60, GOOD)
    assert "recording-departed" in history.found()


def test_cold_and_warm_answers_of_one_question_know_each_other():
    """A cache that nobody can bypass forgets when it likes; another question's bits are unknown all the same."""
    cold, warm = recording(case="chat/reef/fresh"), recording(0.02, case="chat/reef/warm")
    history = History()
    history.add(9 * DAY, *[cold] * LEARN, *[warm] * LEARN, baselining=True)
    swapped = (dataclasses.replace(cold, case=warm.case), dataclasses.replace(warm, case=cold.case))
    assert history.add(HOUR, *swapped).unknown == ()
    assert history.found() == {}
    assert history.add(HOUR / 2, recording(0.03, case="chat/reef/warm")).unknown == ("chat/reef/warm",)
