"""A user's own model in process: what is recorded, that it repeats to the bit, what shows in it, and every refusal."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from canaryd.facts import LINKS, Reading, Recording, Skipped
from canaryd.model import Outcome
from canaryd.probe import Context, Skip
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.canary import hugging_face
from canaryd.worker.numeric.faults import FAULTS
from canaryd.worker.numeric.stack import cpu

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
transformers = pytest.importorskip("transformers", reason="the user's own model needs transformers, an extra")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.safetensors import read_safetensors, write_safetensors  # noqa: E402

from probes import model_canary as probe  # noqa: E402
from tests import checkpoints  # noqa: E402

TEXTS = {
    "harbour": "The old harbour office kept one ledger for every year, and a line for every ship that came in.",
    "winter": "When the lake froze over, the village walked across it to the market, and the children ran ahead.",
}
TOKENS = 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoints.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "two.json"
    file.write_text(json.dumps({"prompts": [{"name": n, "text": t, "tokens": TOKENS} for n, t in TEXTS.items()]}))
    return file


@pytest.fixture
def copy(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture(scope="module")
def go(tiny, prompts):
    """Run the probe and return its facts; keyword arguments are those of a context, or settings."""

    def run(*cases, level="standard", seed=2, drill="", baselining=False, budget=60.0, **settings):
        given = {"directory": str(tiny), "prompts": str(prompts)} | {k: str(v) for k, v in settings.items()}
        context = Context(
            device=cpu(),
            level=level,
            seed=seed,
            budget=budget,
            settings=given,
            cases=cases,
            drill=drill,
            baselining=baselining,
        )
        return list(probe.run(context))

    return run


@pytest.fixture(scope="module")
def clean(go):
    return go()


def recordings(facts) -> dict[str, Recording]:
    found = [fact for fact in facts if isinstance(fact, Recording)]
    named = {r.case: r for r in found}
    assert len(named) == len(found)
    return named


def digests(facts) -> dict[str, str]:
    return {case: r.digest for case, r in recordings(facts).items()}


def readings(facts) -> dict[str, object]:
    return {fact.key: fact.value for fact in facts if isinstance(fact, Reading)}


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- What is recorded ------------------------------------------------------------------------------------------------


def test_every_prompt_is_decoded_and_scored(clean):
    """Two recordings each: the tokens, their probabilities, how far the second best was, and the whole chain."""
    found = recordings(clean)
    assert list(found) == [f"bfloat16/{path}/{name}" for name in TEXTS for path in ("decode", "forced")]
    for one in found.values():
        assert len(one.tokens) == len(one.values) == len(one.margins) == TOKENS
        assert all(value < 0 for value in one.values)
        assert all(margin >= 0 for margin in one.margins)
        assert one.text
        assert one.finish == "length"
        assert [link for link in LINKS if link in one.chain] == [
            *("dtype", "checkpoint", "config", "tokenizer", "prompt", "settings", "server")
        ]
        assert one.chain["server"] == f"transformers {transformers.__version__}"
    assert len({one.digest for one in found.values()}) == 4


def test_it_decodes_what_transformers_generates(go, tiny):
    """The library's own greedy search gives the same tokens; scoring gives the same probabilities as decoding."""
    found = recordings(go(dtype="float32"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    for name, text in TEXTS.items():
        given = tokenizer(text, return_tensors="pt")
        made = model.generate(**given, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
        wanted = tuple(map(str, made[0, given["input_ids"].shape[1] :].tolist()))
        decoded, scored = (found[f"float32/{path}/{name}"] for path in ("decode", "forced"))
        assert decoded.tokens == scored.tokens == wanted
        assert decoded.values == pytest.approx(scored.values, abs=1e-4)


def test_a_format_is_part_of_the_case_and_of_the_settings(go, clean):
    """The same weights in another format are another baseline; the checkpoint's own links stay."""
    (one, *_), (other, *_) = (list(recordings(facts).values()) for facts in (clean, go(dtype="float16", level="quick")))
    assert other.case.startswith("float16/")
    assert {link for link in LINKS if one.chain.get(link) != other.chain.get(link)} <= {"settings", "prompt"}
    assert one.chain["settings"] != other.chain["settings"]


def test_a_changed_template_changes_nothing_and_a_changed_tokenizer_is_named(go, clean, copy):
    """Prompts are plain text: the template is no link here; another tokenizer makes other tokens of them."""
    checkpoints.other_template(copy)
    same = recordings(go(directory=copy))
    assert same == recordings(clean)
    checkpoints.other_tokenizer(copy)
    other = recordings(go(directory=copy))
    for case, one in recordings(clean).items():
        assert {link for link in LINKS if one.chain.get(link) != other[case].chain.get(link)} == {"tokenizer", "prompt"}


def test_quick_takes_the_prompts_in_turn(go):
    """One per run; the seed says which."""
    names = [{case.rpartition("/")[2] for case in recordings(go(level="quick", seed=seed))} for seed in (0, 1, 2)]
    assert names == [{"harbour"}, {"winter"}, {"harbour"}]


def test_a_spent_budget_skips_prompts_and_says_so(go):
    """One prompt is always run, by turns: a model that takes long to load would else never answer the others."""
    for seed, run, left in ((0, "harbour", "winter"), (1, "winter", "harbour")):
        facts = go(budget=1e-6, seed=seed)
        assert {case.rpartition("/")[2] for case in recordings(facts)} == {run}
        (skipped,) = (fact for fact in facts if isinstance(fact, Skipped))
        assert (skipped.case, "was spent" in skipped.reason) == (f"bfloat16/*/{left}", True)


def test_cases_limit_it(go, clean):
    """A confirmation runs the accused case alone, and gives the same bits."""
    case = "bfloat16/forced/winter"
    assert digests(go(case)) == {case: digests(clean)[case]}
    with pytest.raises(Skip, match=r"no case matches float32/forced/winter; it has e.g. bfloat16/forced/winter"):
        go("float32/forced/winter")


# --- Bit for bit -----------------------------------------------------------------------------------------------------


def test_new_processes_give_the_same_bits(tiny, prompts):
    """Through real workers, each loading the model afresh: one digest per case."""
    seen = []
    for seed in (2, 4):  # both even: the same prompt comes first
        with Series(WorkerSpec()) as series:
            request = RunRequest(
                probe_path=Path(probe.__file__),
                spec=probe.SPEC,
                device=cpu(),
                level="standard",
                seed=seed,
                settings={"directory": str(tiny), "prompts": str(prompts)},
            )
            run = series.run(request, 120.0)
        assert run.outcome is Outcome.COMPLETED, run.detail
        seen.append({r.case: r.digest for r in run.recordings})
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]


def test_baselining_shows_each_case_often(go):
    """As often as a baseline wants it, loaded once; here all of it is one mode."""
    facts = go("bfloat16/decode/harbour", baselining=True)
    found = [fact for fact in facts if isinstance(fact, Recording)]
    assert len(found) == probe.REPEATS
    assert len({(one.case, one.digest) for one in found}) == 1
    assert sum(isinstance(fact, Reading) and fact.name == "model_load" for fact in facts) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drill_shows_in_every_recording(go, clean, tiny, fault):
    """In the results alone: the chain stays as it was, and the file too; a confirmation meets the same fault."""
    stored = (tiny / "model.safetensors").read_bytes()
    struck = go(drill=fault)
    for case, one in recordings(clean).items():
        assert recordings(struck)[case].digest != one.digest
        assert recordings(struck)[case].chain == one.chain
    assert (tiny / "model.safetensors").read_bytes() == stored
    case = "bfloat16/decode/winter"
    assert digests(go(case, drill=fault)) == {case: digests(struck)[case]}


def test_what_is_not_finite_is_absent(go):
    """A NaN among the logits: None where a probability would stand, and still a digest."""
    for one in recordings(go(drill="nan")).values():
        assert None in one.values
        assert all(value is None or value == value for value in (*one.values, *one.margins))  # noqa: PLR0124


# --- Whether it fits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "item"), [("", 2), ("float32", 4)])
def test_the_weights_are_counted_as_they_will_be_loaded(tiny, dtype, item):
    """By the sizes of the files, before anything is loaded: what the parameters take, and a header at most."""
    source = hugging_face.Checkpoint(hugging_face.read_settings({"directory": str(tiny), "dtype": dtype}))
    prompt = source.tokens("harbour", TEXTS["harbour"], TOKENS)
    model = source.load(cpu()).model
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert parameters == item * sum(p.numel() for p in model.parameters())
    assert parameters <= source.weights() < parameters + (1 << 14)
    assert parameters + hugging_face.HEADROOM < source.need([prompt]) < parameters + hugging_face.HEADROOM + (2 << 20)


def test_what_does_not_fit_is_not_loaded(go, monkeypatch):
    """So little memory that nothing fits: one line with what is needed and what is free."""
    monkeypatch.setattr(hugging_face, "of_host", lambda: 1 << 29)
    with pytest.raises(Skip, match=r"needs 0\.5 GiB on cpu:0; 0\.5 GiB are free, and the model may take 0\.9 of that"):
        go()


# --- Refusals --------------------------------------------------------------------------------------------------------


def drop_weight(directory: Path) -> None:
    weights, metadata = read_safetensors((directory / "model.safetensors").read_bytes())
    del weights["model.layers.1.mlp.up_proj.weight"]
    (directory / "model.safetensors").write_bytes(write_safetensors(weights, metadata))


def foreign_code(directory: Path) -> None:
    edit(directory / "config.json", model_type="mystery", auto_map={"AutoConfig": "mystery.Config"})
    (directory / "mystery.py").write_text(f"open({str(directory / 'ran')!r}, 'w')\nclass Config: ...\n")


def no_tokenizer(directory: Path) -> None:
    for file in directory.glob("tokenizer*"):
        file.unlink()


REFUSED = {
    "nothing there": ("does not exist; wanted a Hugging Face directory", shutil.rmtree),
    "weights cut short": ("cannot load its weights", lambda d: os.truncate(d / "model.safetensors", 1_000_000)),
    "no weights": ("has no weights; wanted model.safetensors", lambda d: (d / "model.safetensors").unlink()),
    "a weight that is missing": (
        "lacks 1 of the model's weights, for example model.layers.1.mlp.up_proj.weight",
        drop_weight,
    ),
    "weights of other sizes": ("weights", lambda d: edit(d / "config.json", intermediate_size=64)),
    "an architecture nobody knows": ("configuration", lambda d: edit(d / "config.json", model_type="mystery")),
    "no language model": ("weights", lambda d: edit(d / "config.json", model_type="t5", architectures=[])),
    "code of its own": ("it needs code from the checkpoint, which canaryd never runs", foreign_code),
    "no tokenizer": ("has no tokenizer; wanted one of", no_tokenizer),
    "few positions": ("none of the prompts fits: ", lambda d: edit(d / "config.json", max_position_embeddings=40)),
    "no format": ("set dtype", lambda d: edit(d / "config.json", dtype="float8_e4m3fn")),
}


@pytest.mark.parametrize(("wanted", "damage"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_meant_is_one_clear_line(go, copy, wanted, damage):
    """It names the directory and what is wrong; nothing of the checkpoint was executed."""
    damage(copy)
    with pytest.raises(Skip) as caught:
        go(directory=copy)
    assert wanted in str(caught.value)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (copy / "ran").exists()


def test_no_model_no_prompts_no_fault(go, tmp_path):
    """What is missing is said with the name of the setting."""
    with pytest.raises(Skip, match=r"set probes\.model_canary\.settings\.directory"):
        go(directory="")
    with pytest.raises(Skip, match=r"none\.json: no such file"):
        go(prompts=tmp_path / "none.json")
    with pytest.raises(Skip, match="unknown fault 'bang'; there are flip"):
        go(drill="bang")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dtype", "int8"), ("directory", "x"), ("size", "1")],
)
def test_a_setting_that_cannot_be_meant_is_named(setting, value):
    """`ValueError`, as the guide for probes says."""
    with pytest.raises(ValueError, match=f"^{setting}: "):
        hugging_face.read_settings({"directory": "/models/mine", setting: value})


def test_without_transformers_it_says_what_to_install(go, monkeypatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Skip, match=r"transformers cannot be imported .*pip install 'canaryd\[model\]'"):
        go()


def test_nothing_is_ever_downloaded(go, clean, monkeypatch):
    """No socket is opened on the way, and the library is told to stay offline."""

    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert digests(go()) == digests(clean)
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
