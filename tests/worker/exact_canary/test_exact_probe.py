"""The probe `exact_canary`, and the faults that it must see."""

import itertools
import json
import shutil

import pytest

from canaryd.facts import Comparison, Exactness, Skipped
from canaryd.model import Outcome
from canaryd.probe import Context, Skip
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.command import ROOT

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


from benchmarks.observability import activations, live_weights  # noqa: E402
from canaryd.worker.exact_canary import cases  # noqa: E402
from canaryd.worker.exact_canary.cases import Inference, case, infer, shipped, text  # noqa: E402
from canaryd.worker.exact_canary.shape import EXPERTS, TINY  # noqa: E402
from canaryd.worker.numeric.stack import cpu  # noqa: E402
from canaryd.worker.numeric.tensors import bits, same_bits, strict_switches, visible_cores  # noqa: E402
from canaryd.worker.runtime import interface  # noqa: E402
from probes import exact_canary as probe  # noqa: E402

MODELS = ROOT / "probes" / "exact_models"


def build(inference, seed, attempt):
    """An inference of a shipped model."""
    return cases.build(inference, seed, MODELS, attempt)


def model(seed, anchored=True):
    """The shipped model that a seed chooses."""
    return shipped(MODELS, TINY, seed, anchored, visible_cores()).model


def facts(kind, **asked):
    wanted = {"level": "quick", "seed": 11, "budget": 0.01, "device": cpu(), **asked}
    return [fact for fact in probe.run(Context(**wanted)) if isinstance(fact, kind)]


def test_a_clean_run_compares_every_format_and_is_right():
    """Eager and by flash attention, decode and prefill; what this torch does not have is skipped with its reason."""
    cases = tuple(
        f"{form}/{path}/b1/{kernel}"
        for form in probe.FORMATS
        for path, kernel in (("decode", "eager"), ("forced", "flash_attention"))
    )
    found = facts(Comparison, cases=cases)
    assert not [c for c in found if c.wrong]
    assert {c.case.partition("@")[0] for c in found} >= {case for case in cases if "eager" in case}
    assert all(c.exactness is Exactness.UNIVERSAL and c.trials > 1 for c in found)
    skipped = [s for s in facts(Skipped) if "budget" not in s.reason]
    assert {s.case.rpartition("/")[2].partition("@")[0] for s in skipped} >= {"cudnn_attention"}
    assert all("does not support it" in s.reason for s in skipped)


def test_all_cases_are_reached():
    """Standard has every format, path and kernel; deep every row too; an unknown case is refused."""
    names = {level: [i.name for i in probe.every_inference(Context(device=cpu(), level=level, seed=3, budget=1.0))]
             for level in ("quick", "standard", "deep")}  # fmt: skip
    assert (len(names["standard"]), len(names["deep"])) == (41, 96)
    assert set(names["standard"]) < set(names["deep"])
    assert len(names["quick"]) < 20
    quick = {(i.kernel, i.path) for seed in range(4)
             for i in probe.every_inference(Context(device=cpu(), level="quick", seed=seed, budget=1.0))}  # fmt: skip
    assert {kernel for kernel, path in quick} == {*cases.kernels(cpu())} - {"math"}
    assert {kernel for kernel, path in quick if path == "decode"} == {kernel for kernel, _ in quick} - {
        "cudnn_attention"  # a plan for every word would take longer than the run
    }
    assert [sum("-experts@" in name for name in names[level]) for level in names] == [0, 1, 16]
    with pytest.raises(Skip, match="no case matches float8"):
        facts(Comparison, cases=("float8",))


def test_a_requested_kernel_that_the_device_lacks_is_refused_by_its_reason():
    """The run is skipped with the request and torch's reason."""
    asked = "float64/decode/b1/cudnn_attention"
    with pytest.raises(Skip, match=f"supports no {asked}: .*No viable backend"):
        facts(Comparison, cases=(asked,))


@pytest.fixture
def mlx(monkeypatch):
    """The host's processor through MLX."""
    pytest.importorskip("mlx.core", reason="mlx is not installed in this interpreter")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    return interface.named("mlx").devices()[0]


@pytest.mark.runtimes
def test_the_model_is_right_through_mlx(mlx):
    """Every format, decoded and in one pass, eager and by MLX's own attention, one row and two."""
    asked = Context(device=mlx, level="deep", seed=3, budget=1.0)
    names = [i.name for i in probe.every_inference(asked)]
    assert len(names) == 4 * 2 * 2 * (2 + 1)
    assert {name.split("/")[3].partition("@")[0] for name in names} == {"eager", "fast", "eager-experts"}
    wanted = tuple(f"{form}/{path}/b2/{kernel}" for form in probe.FORMATS
                   for path, kernel in (("decode", "eager"), ("decode", "fast"), ("forced", "fast"),
                                        ("decode", "eager-experts"), ("forced", "eager-experts")))  # fmt: skip
    found = facts(Comparison, device=mlx, cases=wanted)
    assert {c.case.partition("@")[0] for c in found} == set(wanted)
    assert not [c.case for c in found if c.wrong]
    assert all(c.exactness is Exactness.UNIVERSAL and c.place.unit == "device" for c in found)


@pytest.mark.runtimes
@pytest.mark.parametrize("fault", ["flip", "swap", "stuck", "consistent"])
def test_a_drill_is_found_through_mlx(mlx, fault):
    """In MLX's result, or in the final norm's weights in its memory."""
    found = facts(Comparison, device=mlx, drill=fault, cases=("float16/forced/b1/fast",))
    assert any(c.wrong for c in found)


def test_a_mixture_of_experts_is_right_and_a_drill_in_it_is_found():
    """In every format, both ways and for one row and two, as the probe runs it."""
    modes = itertools.product(probe.FORMATS, ("decode", "forced"), probe.ROWS)
    wanted = tuple(f"{form}/{path}/b{rows}/eager-experts" for form, path, rows in modes)
    found = facts(Comparison, cases=wanted)
    assert {c.case.partition("@")[0] for c in found} == set(wanted)
    assert not [c.case for c in found if c.wrong]
    assert any(c.wrong for c in facts(Comparison, drill="flip", cases=("bfloat16/decode/b2/eager-experts",)))


@pytest.mark.parametrize("fault", ["flip", "zero", "swap", "nan", "stuck", "consistent"])
def test_every_drill_is_found(fault):
    """In a result or in the final norm's weights; the same seed finds the same."""
    first, again = (facts(Comparison, drill=fault, cases=("bfloat16/forced/b1/eager",)) for _ in range(2))
    wrong = [[(c.case, c.evidence.first) for c in some if c.wrong] for some in (first, again)]
    assert wrong[0]
    assert wrong[0] == wrong[1]


def test_a_worker_runs_it():
    """As canaryd does: in a process of its own, within the time of a quick run."""
    with Series(WorkerSpec()) as series:
        request = RunRequest(
            probe_path=ROOT / "probes" / "exact_canary.py", spec=probe.SPEC, device=cpu(), level="quick", seed=5
        )
        run = series.run(request, 120.0)
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert run.comparisons
    assert not run.wrong


def test_the_case_is_the_seed():
    """A case built again from its seed has the same operands and golden; another seed has others."""
    inference = Inference("float32", "decode", 2, "eager", 4)
    one, again, other = (build(inference, seed, 0) for seed in (1, 1, 2))
    pairs = zip((*one.operands, one.golden), (*again.operands, again.golden), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)
    assert not torch.equal(one.golden, other.golden)
    assert one.golden.shape == (2, 4, TINY.vocabulary)
    assert bool((one.golden != 0).all())


def test_a_damaged_cache_or_weight_is_seen():
    """The lowest bit of one weight of every matrix, in bfloat16: the logits differ."""
    inference = Inference("bfloat16", "forced", 1, "eager", 8)
    problem = build(inference, 4, 0)
    names = list(model(4).weights)
    for at, name in enumerate(names):
        operands = [t.clone() for t in problem.operands]
        flat = bits(operands[at]).view(-1)
        live = (operands[at].view(-1) != 0).nonzero().view(-1)
        index = int(problem.operands[-1][0, 3]) * TINY.hidden if "embed" in name else int(live[len(live) // 2])
        flat[index] ^= 1
        result = infer(inference, tuple(names), tuple(operands), None)
        assert not torch.equal(result, problem.golden), name


PLACES = ("embedding", "attention_norm", "output", "middle", "inner_norm", "down", "out", "norm")
"""Where every bit of a result reaches a logit."""


def test_single_bit_faults_are_seen():
    """A sample of benchmarks/observability.py: any bit, any layer and position, in bfloat16."""
    made = model(7)
    with strict_switches(), torch.inference_mode():
        whole = text(made, 7, 0, 12)
        struck = activations(made, "bfloat16", whole, 8, (*PLACES, "keys", "values"))
        seen = {place: count.share() for place, count in struck}
        weights = {place: count.share() for place, count in live_weights(made, "bfloat16", whole, 6)}
    for place in PLACES:
        assert seen[place] >= 0.9, (place, seen)
    assert seen["values, read later"] >= 0.8
    assert seen["keys, read later"] >= 0.8
    assert weights["all weights"] >= 0.95


def test_a_kernel_that_rounds_scores_first_has_a_model_without_ties():
    """Torch's math attention multiplies q and k by the root of the scale, so that equal scores differ a little."""
    tied = Inference("float32", "forced", 1, "math", 4)
    assert not tied.anchored
    assert Inference("float32", "forced", 1, "flash_attention", 4).anchored
    checked = case(cpu(), tied, 3, MODELS)
    problem = checked.build(0)
    assert torch.equal(checked.compute(problem.operands, None), problem.golden)
    made = model(3)
    whole = torch.tensor([text(made, 3, 0, 4)])
    operands = (*(w.to(torch.float32) for w in made.weights.values()), whole)
    result = infer(tied, tuple(made.weights), operands, None)
    eager = Inference("float32", "forced", 1, "eager", 4)
    assert not torch.equal(result, infer(eager, tuple(made.weights), operands, None))


def test_the_shipped_models_are_enough_and_small():
    """Eight at least, of every kind that the probe runs, each another; 8 MB in all."""
    index = json.loads((MODELS / "models.json").read_bytes())
    files = [MODELS / entry["file"] for entry in index]
    assert len(index) >= 8
    assert {(e["experts"], e["anchored"]) for e in index} == {(0, True), (0, False), (4, True)}
    assert len({path.read_bytes() for path in files}) == len(index)
    assert {path.name for path in MODELS.iterdir()} == {"models.json", *(path.name for path in files)}
    assert sum(path.stat().st_size for path in MODELS.iterdir()) < 8_000_000


@pytest.mark.parametrize("shape", [TINY, EXPERTS])
def test_every_seed_chooses_a_model_and_prompts(shape):
    """Seeds in a row take all models; one of them has as many prompts as were proved, and each answers in its way."""
    chosen = {id(shipped(MODELS, shape, seed, True, ()).model) for seed in range(3)}
    assert len(chosen) == 3
    found = shipped(MODELS, shape, 0, True, ())
    assert len(found.prompts) >= 32
    texts = {tuple(text(found.model, seed, 0, found.model.program.steps)) for seed, _ in found.prompts}
    assert len(texts) == len(found.prompts)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "index", "no index"])
def test_a_damaged_model_is_skipped_with_the_reason(monkeypatch, tmp_path, damage):
    """One bit of a file, half of it, no file, another index or none: nobody is accused."""
    shutil.copytree(MODELS, tmp_path / "models")
    for path in (tmp_path / "models").glob("*.zlib"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "flipped":
            path.write_bytes(data)
        elif damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "gone":
            path.unlink()
    if damage == "index":
        (tmp_path / "models" / "models.json").write_text('[{"file": 1}]')
    elif damage == "no index":
        (tmp_path / "models" / "models.json").unlink()
    monkeypatch.setattr(probe, "MODELS", tmp_path / "models")
    with pytest.raises(Skip, match=r"This installation is damaged: install canaryd again") as caught:
        facts(Comparison)
    assert str(tmp_path / "models") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_that_computes_another_answer_is_in_doubt(monkeypatch):
    """The answer is made here from the program, and its digest shipped: where they differ, nothing is witnessed."""
    inference = Inference("float32", "forced", 1, "eager", 4)
    assert build(inference, 5, 0).witnessed
    right = cases.logits

    def wrong(*given):
        found = right(*given)
        found[3, 7] += 8.0
        return found

    monkeypatch.setattr(cases, "logits", wrong)
    assert not build(inference, 5, 0).witnessed
