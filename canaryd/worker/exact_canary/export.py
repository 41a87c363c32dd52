"""Write an exact canary as a checkpoint that serving engines load, with the answers that they must give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canaryd.worker.canary.model import write_safetensors
from canaryd.worker.exact_canary.construct import Model
from canaryd.worker.exact_canary.golden import answer, continuation, prompt
from canaryd.worker.exact_canary.prove import Walk
from canaryd.worker.exact_canary.shape import CONTEXT, EPSILON, THETA
from canaryd.worker.numeric.tensors import torch

PROMPTS = 2
"""Prompts whose answers are written beside the checkpoint."""


def word(model: Model, token: int) -> str:
    """Return how a token is spelled: "p7v12" is value 12 at place 7."""
    program = model.program
    if token == program.anchor:
        return "anchor"
    if token > program.anchor:
        return f"unused{token}"
    return f"p{token // program.values}v{token % program.values}"


def spell(model: Model, tokens: list[int]) -> str:
    """Return a text that the tokenizer turns into these tokens."""
    return " ".join(word(model, token) for token in tokens)


def config(model: Model) -> dict[str, Any]:
    """Return `config.json`. Written for transformers 4 and 5, which name the rotary base differently."""
    s, qwen = model.shape, model.shape.biased
    return {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
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
    }


def tokenizer(model: Model) -> dict[str, Any]:
    """Return `tokenizer.json`: one word, one token; words are separated by white space."""
    words = {word(model, token): token for token in range(model.shape.vocabulary)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": word(model, model.shape.vocabulary - 1)},
    }


def answers(model: Model) -> list[dict[str, Any]]:
    """Return prompts with their proved continuations: text, tokens, log probabilities (natural), leads."""
    walk, found = Walk(model.shape, model.weights), []
    for number in range(PROMPTS):
        words, count = prompt(model.program, model.seed + number), model.program.steps
        following = continuation(model.program, model.shape.layers, words, count)
        logits = walk.prove(words + following[:-1]).logits[-count:].tolist()
        right = answer(model.program, model.shape, words, count, logits)
        found.append(
            {
                "text": spell(model, words),
                "prompt": words,
                "continuation": spell(model, following),
                "tokens": right.tokens,
                "log_probabilities": right.log_probabilities,
                "leads": right.leads,
            }
        )
    return found


def export(model: Model, directory: Path) -> None:
    """Prove the model's answers, and write the checkpoint; raises `Inexact` before anything is written."""
    expected = answers(model)
    directory.mkdir(parents=True, exist_ok=True)
    narrow = {name: weight.to(torch.bfloat16) for name, weight in model.weights.items()}
    (directory / "model.safetensors").write_bytes(write_safetensors(narrow, {"format": "pt"}))
    documents = {
        "config": config(model),
        "generation_config": {"do_sample": False},
        "tokenizer": tokenizer(model),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
        "expected": {"seed": model.seed, "anchored": model.program.anchored, "prompts": expected},
    }
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
