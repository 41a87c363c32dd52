"""Write an exact canary as a checkpoint for serving engines, with the answers that they must give."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canaryd.worker.exact_canary.expected import FILE, GGUF, SCHEMA, WEIGHTS, spell, word
from canaryd.worker.exact_canary.golden import continuation, prompt
from canaryd.worker.exact_canary.shape import CHOSEN, CONTEXT, EPSILON, MIXTURE, THETA, TINY, Plan, Shape, Unfit
from canaryd.worker.exact_canary.shipped import Model
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.tensors import need_torch
from canaryd_lab.worker.exact_canary import quantised
from canaryd_lab.worker.exact_canary.construct import construct
from canaryd_lab.worker.exact_canary.gguf import gguf
from canaryd_lab.worker.exact_canary.prove import Walk
from canaryd_lab.worker.exact_canary.quantised import FORMS, Stored
from canaryd_lab.worker.safetensors import parts_of_safetensors

PROMPTS = 8
"""Number of prompts that are written with answers beside the checkpoint; all can be asked at once (ours)."""
STEPS = 64
"""Maximum words of an answer: as many as an endpoint canary requests, since proving a word takes time (ours)."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def answer(arguments: Mapping[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Write a checkpoint; return its sizes, or {"mistake": reason} if no exact canary can have the requested sizes.

    Raises `Skip` without torch, `ValueError` if the directory cannot be written.
    """
    need_torch()
    directory = Path(arguments["directory"])
    progress(0.0, "making the weights")
    try:
        shape = like(arguments["like"], arguments["layers"]) if arguments["like"] else TINY
        form = arguments["form"]
        bits = FORMS[form].whole if form in FORMS else 0
        model = construct(shape, arguments["seed"], anchored=False if arguments["no_anchor"] else None, bits=bits)
    except KeyError as error:
        return {"mistake": f"has no {error.args[0]}"}
    except (Unfit, Inexact, TypeError, ValueError) as error:
        return {"mistake": str(error)}
    try:
        export(model, directory, progress, form=form)
    except (Inexact, Unfit) as error:
        return {"mistake": str(error)}
    except OSError as error:
        raise ValueError(f"{directory}: not written: {error.strerror}") from None
    return {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "prompts": PROMPTS,
        "words": steps(model),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()),
    }


def steps(model: Model) -> int:
    """Return the number of words in an answer."""
    return min(STEPS, model.program.steps)


def config(model: Model) -> dict[str, Any]:
    """Return the content of `config.json`, for transformers 4 and 5, whose names for the rotary base differ."""
    s, qwen = model.shape, model.shape.biased
    kinds = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", MIXTURE: "MixtralForCausalLM"}
    mixture = {"num_local_experts": s.experts, "num_experts_per_tok": CHOSEN, "sliding_window": None}
    return {
        "architectures": [kinds[s.family]],
        "model_type": s.family,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": qwen,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
        **(mixture if s.experts else {}),
    }


def tokenizer(model: Model) -> dict[str, Any]:
    """Return the content of `tokenizer.json`: each word is one token, and white space separates words."""
    words = {word(model.program, token): token for token in range(model.shape.vocabulary)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": word(model.program, model.shape.vocabulary - 1)},
    }


def answers(model: Model, few: Mapping[str, Stored], progress: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """Return prompts with their proved answers; `few`: name of a matrix → the form with few bits that is stored."""
    walk, found = Walk(model.shape, model.weights, stored=few), []
    for number in range(PROMPTS):
        progress(number / PROMPTS, f"proving prompt {number + 1} of {PROMPTS}")
        words, count = prompt(model.program, model.seed + number), steps(model)
        following = continuation(model.program, model.shape.layers, words, count)
        logits = walk.prove(words + following[:-1], count).logits[-count:].tolist()
        right = right_answer(model.program, model.shape, words, count, logits)
        found.append(
            {
                "text": spell(model.program, words),
                "prompt": words,
                "continuation": spell(model.program, following),
                "tokens": right.tokens,
                "log_probabilities": right.log_probabilities,
                "leads": right.leads,
            }
        )
    return found


def export(
    model: Model,
    directory: Path,
    progress: Callable[[float, str], None] = lambda _fraction, _text: None,
    *,
    form: str = "",
) -> None:
    """Prove the model's answers, and write the checkpoint completely or not at all.

    `form`: one of `FORMS` for quantised matrices; float32, float16 or bfloat16 for a GGUF file. The directory must be
    new or empty. Raises `Inexact` or `Unfit` before anything is written, `OSError` if the directory cannot be written.
    """
    few = quantised.stored(model.weights, form) if form in FORMS else {}
    proved = answers(model, few, progress)
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        as_gguf = form and form not in FORMS
        weights = _write_gguf(model, fresh, form) if as_gguf else _write_hugging_face(model, fresh, few, form)
        expected = {
            "schema": SCHEMA,
            "shape": asdict(model.shape),
            "seed": model.seed,
            "anchored": model.program.anchored,
            "quantization": form if few else "",
            "weights": weights,
            "prompts": proved,
        }
        _write(fresh / FILE, expected)
        fresh.rename(directory)  # takes the place of an empty directory
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(fresh)


def _write_gguf(model: Model, directory: Path, form: str) -> str:
    """Write the GGUF file; return its SHA-256."""
    return _write_parts(directory / GGUF, gguf(model, config(model), TEMPLATE, form))


def _write_hugging_face(model: Model, directory: Path, few: Mapping[str, Stored], form: str) -> str:
    """Write the Hugging Face files; return the SHA-256 of the weights."""
    tensors = quantised.tensors(model.weights, few, form) if few else model.weights
    digest = _write_parts(directory / WEIGHTS, parts_of_safetensors(tensors, {"format": "pt"}))
    documents = {
        "config": config(model) | (quantised.settings(form) if few else {}),
        "generation_config": {"do_sample": False},
        "tokenizer": tokenizer(model),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
        },
    }
    for name, document in documents.items():
        _write(directory / f"{name}.json", document)
    return digest


def _write_parts(path: Path, parts: Iterable[bytes]) -> str:
    """Write a file part by part; return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def like(config: Mapping[str, Any], layers: int = 4) -> Shape:
    """Return the sizes in the `config.json` of a served model, but at most `layers` layers."""
    kind = str(config.get("model_type", ""))
    family = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", MIXTURE: MIXTURE}.get(kind)
    if family is None:
        raise Unfit(f"model_type {kind!r}: wanted llama, mistral, mixtral or qwen2")
    if family == MIXTURE and config["num_experts_per_tok"] != CHOSEN:
        raise Unfit(f"num_experts_per_tok {config['num_experts_per_tok']}: wanted {CHOSEN}")
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head=int(config.get("head_dim") or hidden // heads),
        inner=int(config["intermediate_size"]),
        layers=min(layers, int(config["num_hidden_layers"])),
        vocabulary=int(config["vocab_size"]),
        family=family,
        experts=int(config["num_local_experts"]) if family == MIXTURE else 0,
    )


@dataclass(frozen=True)
class RightAnswer:
    """The answer that every healthy engine gives to a prompt."""

    tokens: list[int]
    leads: list[float]
    """For each token: the right word's logit minus the second largest logit."""
    log_probabilities: list[float]
    """Natural logarithm of the right word's probability, per token; correct to about 1e-12."""


def right_answer(program: Plan, shape: Shape, words: list[int], count: int, logits: list[list[float]]) -> RightAnswer:
    """Return the answer of `count` tokens to the prompt `words`; `logits` has the proved logits of each token."""
    tokens = continuation(program, shape.layers, words, count)
    leads, chances = [], []
    for token, row in zip(tokens, logits, strict=True):
        best = row[token]
        leads.append(best - max(v for i, v in enumerate(row) if i != token))
        chances.append(-math.log(math.fsum(math.exp(v - best) for v in row)))
    return RightAnswer(tokens, leads, chances)
