"""The exact canary through a server: right answers pass in every format, faults are seen, and settings are named."""

from __future__ import annotations

import json
import math
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the server of these tests computes with torch")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import export  # noqa: E402

from canaryd.facts import Comparison, Skipped, Subject  # noqa: E402
from canaryd.probe import Absent, Skip  # noqa: E402
from canaryd.worker.endpoint.answers import Answer, Position  # noqa: E402
from canaryd.worker.endpoint.excuses import excuse  # noqa: E402
from canaryd.worker.endpoint.marking import FORMATS, Fault, Marked, Sort, mark, printing  # noqa: E402
from canaryd.worker.exact_canary.expected import load, spell  # noqa: E402
from canaryd.worker.exact_canary.shape import TINY, Shape  # noqa: E402
from probes import exact_endpoint  # noqa: E402
from tests.exact_server import exported, serving  # noqa: E402
from tests.worker.endpoint.served import context  # noqa: E402

NORM = ("model.norm.weight", 7, 3)
"""A bit of a weight that reaches every logit."""
COARSE = 8
"""A bit of it that makes the weight 4 times as large."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An exported exact canary."""
    with exported(tmp_path_factory.mktemp("exact") / "canary") as path:
        yield path


def ask(url, directory, *, level="quick", seed=0, **fields):
    """Return the comparisons and other facts of a run, and the reason for which it was skipped."""
    settings = {"exact": str(directory), **fields.pop("settings", {})}
    facts, reason = [], ""
    try:
        facts.extend(exact_endpoint.run(context(url, level=level, seed=seed, settings=settings, **fields)))
    except Skip as skip:
        reason = str(skip)
    return [f for f in facts if isinstance(f, Comparison)], [f for f in facts if not isinstance(f, Comparison)], reason


# --- Right answers ---------------------------------------------------------------------------------------------------


RIGHT = {
    "bfloat16": {},
    "float16": {"form": "float16"},
    "float32": {"form": "float32"},
    "float64": {"form": "float64", "printed": "float64"},
    "log-softmax in bfloat16": {"printed": "bfloat16"},
    "log-softmax in float16": {"printed": "float16"},
    "log-softmax of rounded parts": {"printed": "bfloat16", "subtracts": True},
    "four decimals": {"decimals": 4},
    "six decimals": {"decimals": 6},
    "no log probabilities": {"scored": False},
    "no number of tokens": {"counts": False},
}
RIGHT_IN_GATE = {"bfloat16", "float64", "log-softmax in float16", "four decimals", "no log probabilities"}
"""One of each kind; the others differ in a width, and are asked in `.ci/full`."""


@pytest.mark.parametrize(
    ("seed", "traits"),
    [
        pytest.param(seed, RIGHT[name], id=name, marks=() if name in RIGHT_IN_GATE else pytest.mark.slow)
        for seed, name in enumerate(RIGHT)
    ],
)
def test_right_answers_are_right_from_the_first_one_on(directory, seed, traits):
    """In every format and however finely it prints: nothing is learnt, and every case is compared."""
    with serving(directory, **traits) as url:
        compared, others, reason = ask(url, directory, seed=seed)
    assert reason == ""
    assert not [c for c in compared if c.wrong]
    load = (2, 4, 8)[seed % 3]
    assert {c.case: c.trials for c in compared} == {
        f"{api}/{case}": trials
        for api in ("completions", "chat")
        for case, trials in (("alone", 2), ("again", 2), (f"{load}-at-once", load))
    }
    assert all(c.subject is Subject.DEVICE and c.characterised for c in compared)
    blind = [f for f in others if isinstance(f, Absent)]
    assert len(blind) == (2 if traits == {"scored": False} else 0)


def test_a_cache_of_whole_answers_proves_nothing(directory):
    """It repeats right answers, whatever computes behind it. The run counts none of them, and says why."""
    with serving(directory, cached=True) as url:
        compared, _, reason = ask(url, directory)
    assert not compared
    with serving(directory, cached=True, flipped=(*NORM[:2], COARSE)) as url:
        wrong, _, _ = ask(url, directory)
    assert {c.case for c in wrong} == {"completions/alone", "chat/alone"}
    assert {(c.trials, c.wrong_trials) for c in wrong} == {(1, 1)}
    assert reason.endswith("a cache before the server gives an earlier answer again; set url to the server")


def test_what_is_printed_after_the_choice_says_nothing(directory):
    """Where the chosen word is certain the words alone are compared, and the run says so."""
    with serving(directory, certain=True) as url:
        compared, others, reason = ask(url, directory)
    assert reason == ""
    assert compared
    assert not [c for c in compared if c.wrong]
    assert len([f for f in others if isinstance(f, Absent)]) == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0])
def test_right_words_without_one_number_among_their_log_probabilities_are_wrong(directory, value):
    """Only zeros are what is printed after the choice; where nothing is printed the words alone are compared."""
    expected = load(directory)
    question = expected.questions[0]
    words = [spell(expected.program, [token]) for token in question.tokens]

    def printed(*values, alone=False):
        told = zip(words, values * len(words), strict=False)
        places = tuple(Position(token=w, value=v, top=() if alone else ((w, v),)) for w, v in told)
        return mark(expected, question, Answer(text=" ".join(words), positions=places, scored=True))

    wrong = printed(value)
    assert (len(wrong.faults), wrong.scored, wrong.right) == (len(words), True, False)
    assert not printed(0.0, value).right, "a zero among them excuses none"
    for said in (0.0, None):
        assert (printed(said).scored, printed(said).right) == (False, True)
    # Where vLLM has no log probability of a token, it writes this one, and no alternatives.
    assert (printed(value, alone=True).scored, printed(value, alone=True).right) == (value != -9999.0, value == -9999.0)


def test_standard_asks_everything(directory):
    """All eight prompts alone and again, and 2, 4 and 8 of them at once, on both interfaces."""
    with serving(directory) as url:
        compared, _, reason = ask(url, directory, level="standard")
    assert (reason, len(compared)) == ("", 10)
    assert sum(c.trials for c in compared) == 2 * (8 + 8 + 2 + 4 + 8)


def test_a_run_may_be_limited_to_a_case(directory):
    """As confirmations are; a case that does not exist is an error that names one that does."""
    with serving(directory) as url:
        compared, _, _ = ask(url, directory, cases=("chat/8-at-once",))
        assert [(c.case, c.trials) for c in compared] == [("chat/8-at-once", 8)]
        _, _, reason = ask(url, directory, cases=("chat/9-at-once",))
    assert reason == "no case matches chat/9-at-once; it has e.g. chat/8-at-once, chat/4-at-once, chat/2-at-once"


def test_a_server_that_takes_fewer_at_once_says_so(directory):
    """The rest is compared, and what was not answered is told."""
    with serving(directory, at_once=1, form="float64") as url:
        compared, others, reason = ask(url, directory, seed=2, settings={"timeout": 5.0, "apis": ["completions"]})
    assert reason == ""
    assert {"completions/alone", "completions/again"} <= {c.case for c in compared}
    (left,) = [f for f in others if isinstance(f, Skipped)]
    assert left.case == "completions/8-at-once"
    assert "did not answer 8 requests at once" in left.reason


# --- Faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scored", [True, False])
def test_a_flipped_bit_of_a_live_weight_is_seen_in_the_first_run(directory, scored):
    """Always wrong in the same way; the evidence names prompt and word, and what came."""
    # Without log probabilities only what changes a word is seen; and no position shows that the server can be right.
    bit = NORM if scored else (*NORM[:2], COARSE)
    with serving(directory, flipped=bit, scored=scored) as url:
        compared, _, reason = ask(url, directory, seed=2, settings={"apis": ["completions"]})
    assert reason == ""
    wrong = [c for c in compared if c.wrong]
    assert {c.case for c in wrong} == {"completions/alone", "completions/again", "completions/8-at-once"}
    for found in wrong:
        assert found.characterised is scored
        assert found.evidence.repeats_alike == found.evidence.repeats_wrong == found.evidence.repeats == 3
        ((prompt, word), wanted, got) = found.evidence.first[0]
        assert f"prompt {prompt}, word {word} of 40" in found.evidence.pattern
        assert wanted != got
        assert 0 < found.evidence.wrong <= found.evidence.total == 40 * found.trials


@pytest.mark.parametrize(
    ("rate", "scored"),
    [
        (1 / 500, True),
        (1 / 50, False),
        pytest.param(1 / 50, True, marks=pytest.mark.slow),
        pytest.param(1 / 500, False, marks=pytest.mark.slow),
    ],
)
def test_results_that_err_now_and_then_are_seen(directory, scored, rate):
    """Wrong in another way each time: no format rounds like that, so it accuses though no answer may be right."""
    with serving(directory, rate=rate, scored=scored) as url:
        compared, _, reason = ask(url, directory, settings={"apis": ["completions"]})
    assert reason == ""
    wrong = [c for c in compared if c.wrong]
    assert wrong
    assert all(c.characterised for c in wrong)
    assert any(c.evidence.repeats_alike < c.evidence.repeats_wrong for c in wrong)


def test_probabilities_that_cannot_be_are_wrong_answers(directory):
    """Large wrong logits and a log-softmax that rounds give more than 1 in all: computed wrong, and not unreadable."""
    with serving(directory, printed="bfloat16", subtracts=True, rate=1 / 50) as url:
        compared, _, reason = ask(url, directory, settings={"apis": ["completions"]})
    assert reason == ""
    assert [c for c in compared if c.wrong and c.characterised]


@pytest.mark.parametrize(
    "traits", [{"quantised": {"": 4}}, {"quantised": {"": 4}, "scored": False}, {"scale": 0.7}, {"logits": True}]
)
def test_a_server_that_was_never_right_proves_nothing_against_itself(directory, traits):
    """It is wrong everywhere, always in the same way: wrong, and marked as not characterised."""
    with serving(directory, **traits) as url:
        compared, _, reason = ask(url, directory, settings={"apis": ["completions"]})
    assert reason == ""
    assert all(c.wrong_trials == c.trials for c in compared)
    assert not any(c.characterised for c in compared)


@pytest.mark.parametrize("fault", ["flip", "zero", "swap", "nan", "stuck", "consistent"])
def test_every_drill_is_caught(directory, fault):
    """One wrong word in the first answer, on top of a healthy server."""
    with serving(directory) as url:
        compared, _, reason = ask(url, directory, drill=fault)
    assert reason == ""
    assert [(c.case, c.wrong_trials, c.characterised) for c in compared if c.wrong] == [("completions/alone", 1, True)]


# --- What is no fault ------------------------------------------------------------------------------------------------


SETTINGS = {
    "a tokenizer that adds a word": ({"begin": "anchor"}, "reads 26 tokens in a prompt of 25 words: its tokenizer"),
    "a chat template": ({"template": "p0v0"}, "chat: it reads 26 tokens in a prompt of 25 words: a chat template"),
    "a strong penalty": ({"penalty": 2.0}, "presence or frequency penalty"),
    "a weak penalty": ({"penalty": 0.2}, "presence or frequency penalty"),
    "a repetition penalty": ({"repetition": 1.3}, "lowers the probability of words that came before"),
    "a repetition bonus": ({"repetition": 0.8}, "changes the probability of words that came before"),
    "a repetition bonus that gives other words": (
        {"repetition": 0.5},
        "changes the probability of words that came before",
    ),
    "a repetition bonus after what is printed": (
        {"repetition": 0.5, "raw": True},
        "changes the probability of words that came before",
    ),
    "a temperature": ({"temperature": 1.0}, "it samples, or its choice is wrong"),
    "a high temperature": ({"temperature": 2.0}, "it samples, or its choice is wrong"),
    "a temperature, in text alone": (
        {"temperature": 1.0, "scored": False},
        "it samples though temperature 0 was asked for",
    ),
    "a limit of tokens": ({"most": 10}, "ends an answer after 10 of 40 words"),
    "another model": ({"spoken": "The reef is alive.", "scored": False}, "words that the exact canary does not have"),
    "a cache in 8 bits": (
        {"reports": {"version": "0.5", "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}, "quantised": {"": 4}},
        "the server says that it rounds (kv_cache_dtype fp8_e4m3)",
    ),
}

SLOW = ("a weak penalty", "a repetition penalty", "a repetition bonus", "a high temperature")


@pytest.mark.parametrize(
    ("traits", "said"),
    [pytest.param(*each, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, each in SETTINGS.items()],
)
def test_a_setting_is_named_and_accuses_nobody(directory, traits, said):
    """The run is skipped with the reason, so the endpoint is unknown: neither wrong nor healthy."""
    with serving(directory, **traits) as url:
        compared, _, reason = ask(url, directory)
    assert said in reason
    assert not [c for c in compared if c.wrong]


def test_a_right_beginning_that_the_server_broke_off_is_told_from_a_limit(directory):
    """Nobody has to look for a limit of tokens; what was wrong before the end stays wrong."""
    expected = load(directory)
    question = expected.questions[0]
    right, wrong = ([spell(expected.program, [token]) for token in question.tokens[:3]] for _ in range(2))
    wrong[1] = spell(expected.program, [question.tokens[1] ^ 1])

    def said(words):
        marked = mark(expected, question, Answer(text=" ".join(words), finish="abort"))
        return excuse(expected, "chat", [marked], {})

    for began in (right, [*right, right[0][:2]]):  # or within a word
        assert said(began).startswith('an answer was broken off by the server itself ("abort")')
    assert said(wrong) == ""


def test_a_fault_of_one_word_is_not_taken_for_a_penalty(directory):
    """A penalty strikes all words that came before, and no others; a bad weight of the head strikes one word."""
    expected = load(directory)
    question = expected.questions[0]
    right = Answer(text=question.text, positions=(), scored=True)

    def told(*words):
        faults = tuple(Fault(Sort.LEAD, 3, 8.0, 5.0, word) for word in words)
        marked = Marked(question=question, answer=right, tokens=question.tokens, faults=faults, scored=True)
        return excuse(expected, "completions", [marked], {})

    first, second, later = question.prompt[4], question.prompt[5], question.tokens[9]
    assert "presence or frequency penalty" in told(first, second)
    assert [told(first), told(first, later), told(first, second, None)] == ["", "", ""]


@pytest.mark.parametrize(("form", "told"), [("awq", "awq"), ("fp8", "compressed-tensors")])
def test_quantised_weights_excuse_nothing_where_they_were_proved(directory, tmp_path, form, told):
    """The server reports what the directory is: a wrong answer accuses it; elsewhere it is the excuse.

    So it is where the server quantises in another way than the directory.
    """
    copy, reports = shutil.copytree(directory, tmp_path / "copy"), {"version": "0.5", "quantization": told}
    with serving(copy, flipped=NORM, reports=reports) as url:
        _, _, reason = ask(url, copy)
        assert f"the server says that it rounds (quantization {told})" in reason
        document = json.loads((copy / "expected.json").read_text())
        (copy / "expected.json").write_text(json.dumps(document | {"quantization": "mlx-4bit"}))
        _, _, reason = ask(url, copy)
        assert f"the server says that it rounds (quantization {told})" in reason
        (copy / "expected.json").write_text(json.dumps(document | {"quantization": form}))
        compared, _, reason = ask(url, copy)
    assert reason == ""
    assert any(c.wrong for c in compared)


@pytest.mark.parametrize(
    "noise", [pytest.param(0.01, marks=pytest.mark.slow), 0.001, pytest.param(0.0001, marks=pytest.mark.slow)]
)
def test_small_errors_everywhere_look_like_rounding(directory, noise):
    """The first word of every answer is right, and its neighbours are a little off: not characterised."""
    with serving(directory, form="float32", noise=noise) as url:
        compared, _, reason = ask(url, directory, settings={"apis": ["completions"]})
    assert reason == ""
    assert [c.wrong_trials for c in compared] == [2, 2, 2]
    assert not any(c.characterised for c in compared)


def test_another_exact_canary_is_named(directory, tmp_path):
    """With other layers it answers otherwise: that is not computed wrong."""
    sizes = {**vars(TINY), "layers": 2}
    export(construct(Shape(**sizes), 3), tmp_path / "two")
    with serving(tmp_path / "two") as url:
        compared, _, reason = ask(url, directory)
    assert "as an exact canary with 2 layers" in reason
    assert not [c for c in compared if c.wrong]


def test_a_checkpoint_that_changed_on_disk_is_named(directory, tmp_path):
    """The server loaded what is there; the file is not the one that canaryd wrote."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    data = bytearray((copy / "model.safetensors").read_bytes())
    header = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + header])["model.norm.weight"]["data_offsets"][0]
    data[8 + header + start + 2 * NORM[1]] ^= 1 << NORM[2]
    (copy / "model.safetensors").write_bytes(data)
    with serving(copy) as url:
        compared, _, reason = ask(url, copy)
    assert "is not the file that canaryd wrote" in reason
    assert not [c for c in compared if c.wrong]


def test_what_was_wrong_before_the_server_died_counts(directory):
    """A request that fails later does not discard a wrong answer."""
    with serving(directory, flipped=NORM, dies_after=3) as url:
        compared, _, reason = ask(url, directory, settings={"timeout": 3.0})
    assert any(c.wrong for c in compared)
    assert "503" in reason


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exact": ""}, "exact: not set"),
        ({"exact": "/nowhere"}, "cannot be read"),
        ({"model": "other"}, "model: 'other' is not served; the server lists exact"),
    ],
)
def test_bad_settings_are_one_line(directory, settings, said):
    """And nothing is compared."""
    with serving(directory) as url:
        compared, _, reason = ask(url, directory, settings=settings)
    assert said in reason
    assert not compared


# --- How finely values are printed -----------------------------------------------------------------------------------


def test_the_coarsest_format_that_holds_all_values_counts():
    """A single value in full makes it float32; decimals are told from a format."""
    assert printing([0.0, -8.0, -0.0034027099609375]).bits == FORMATS[0]
    assert printing([0.0, -8.0, -0.003355026]).bits == FORMATS[-1]
    assert printing([-0.0033553822431713343, -8.003355026245117]) == (24, 0.0)
    assert printing([-0.0034, -8.0034]) == (24, 1e-4)
    assert printing([-0.0034, -8.0034]).unit(-8.0034) == pytest.approx(1e-4, rel=0.01)
    assert printing([-0.0033553822431713343]).unit(-8.0) == 2.0**-20
    assert printing([-3.353e-05]).step == 0.0
