"""An exact canary as a GGUF file for llama.cpp: one word is one token, and all numbers stay the same.

Rotary pairs: in the llama architecture, llama.cpp rotates neighbours (2i, 2i + 1), while Hugging Face rotates (i, i +
half). Therefore the rows of q and k are reordered.

Words: no pre-tokenizer of llama.cpp splits at white space alone in all versions. So every word is a token defined by
the user: these are matched before all others, the longest first. Byte-level BPE drops the rest, which is white space.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from canaryd.worker.exact_canary.expected import word
from canaryd.worker.exact_canary.shape import CHOSEN, MIXTURE
from canaryd.worker.exact_canary.shipped import Model
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.canary.gguf import parts_of_gguf, sizes

USER_DEFINED = 4
"""`llama_token_type` of a token that is matched literally in the text."""


def gguf(model: Model, config: dict[str, Any], template: str, form: str) -> Iterator[bytes]:
    """Yield the parts of a GGUF file with matrices in the format `form`; `config` is the model's `config.json`."""
    shape, family = model.shape, "llama" if model.shape.family == MIXTURE else model.shape.family
    last = shape.vocabulary - 1  # a word that no right answer has, for what llama.cpp must have; token 11 otherwise
    facts = {
        **sizes(family, config, form),
        "general.name": "exact canary",
        f"{family}.attention.key_length": shape.head,
        f"{family}.attention.value_length": shape.head,
        f"{family}.rope.dimension_count": shape.head,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [word(model.program, token) for token in range(shape.vocabulary)],
        "tokenizer.ggml.token_type": [USER_DEFINED] * shape.vocabulary,
        "tokenizer.ggml.merges": ["p v"],  # it wants one; neither is a token
        "tokenizer.ggml.bos_token_id": last,
        "tokenizer.ggml.eos_token_id": last,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }
    if shape.experts:
        facts |= {f"{family}.expert_count": shape.experts, f"{family}.expert_used_count": CHOSEN}
    return parts_of_gguf(facts, _stacked({name: _turned(model, name, w) for name, w in model.weights.items()}), form)


def _stacked(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with one tensor for all experts of a layer, in the order of the experts' numbers."""
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, weight in weights.items():
        layer, among, rest = name.partition(".experts.")
        if not among:
            found[name] = weight
            continue
        number, _, part = rest.partition(".")
        experts.setdefault(f"{layer}.experts.{part}", {})[int(number)] = weight
    return found | {name: torch.stack([some[i] for i in sorted(some)]) for name, some in experts.items()}


def _turned(model: Model, name: str, weight: Any) -> Any:
    """Return the weight `name`; if it makes q or k, its rows are reordered for llama.cpp's rotary pairs."""
    shape = model.shape
    heads = shape.heads if ".q_proj." in name else shape.kv_heads if ".k_proj." in name else 0
    if not heads or shape.family == "qwen2":
        return weight
    return weight.reshape(heads, 2, shape.head // 2, -1).transpose(1, 2).reshape(weight.shape)
