"""Write a GGUF file for llama.cpp: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from canaryd.worker.numeric.tensors import bytes_of, torch

FORMATS = {"float32": (0, 0), "float16": (1, 1), "bfloat16": (30, 32)}
"""Format of matrices → (`ggml_type` of a matrix, `llama_ftype` of a file)."""
_ALIGNMENT = 32
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}


def parts_of_gguf(facts: Mapping[str, Any], weights: Mapping[str, Any], form: str) -> Iterator[bytes]:
    """Yield a file's header, then the bytes of each tensor, so that memory never holds the whole file.

    `weights` have the names of Hugging Face's Llama. Vectors become float32, as in llama.cpp's own converter.
    """
    forms = {name: "float32" if tensor.dim() == 1 else form for name, tensor in weights.items()}
    head, at = [], 0
    for name, tensor in weights.items():
        sizes = struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *reversed(tensor.shape))
        head.append(_string(ggml_name(name)) + sizes + struct.pack("<IQ", FORMATS[forms[name]][0], at))
        at += _aligned(tensor.numel() * getattr(torch, forms[name]).itemsize)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(head), len(facts))
    start += b"".join(_string(key) + _typed(value) for key, value in facts.items()) + b"".join(head)
    yield start.ljust(_aligned(len(start)), b"\0")
    for name, tensor in weights.items():
        data = bytes_of(tensor.detach().to(getattr(torch, forms[name])))
        yield data
        yield bytes(_aligned(len(data)) - len(data))


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def sizes(architecture: str, config: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Return the metadata that llama.cpp needs for a model, from the model's `config.json`."""
    return {
        "general.architecture": architecture,
        "general.file_type": FORMATS[form][1],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": config["rope_theta"],
    }


def ggml_name(name: str) -> str:
    """Return llama.cpp's name for a tensor of Hugging Face's Llama."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_OF_A_LAYER[inner]}.{kind}"


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    """Return the type number (`gguf_metadata_value_type`) and the value as bytes; lists hold integers or texts."""
    if isinstance(value, list) and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)
