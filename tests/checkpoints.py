"""A tiny checkpoint with random weights that the servers of tests/servers.py load, and what tests change in it.

Made here from a seed in under a second with torch alone: nothing is downloaded and nothing is trained. A Qwen2 of 3.4
million weights in 4 layers, or a GPT-NeoX of the same width, whose attention and MLP stand side by side behind layer
norms; 512 tokens: 256 bytes, 253 merges by rule, 3 special tokens.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from canaryd_lab.worker.canary import gguf as ggml
from canaryd_lab.worker.safetensors import read_safetensors, write_safetensors

from canaryd.worker.numeric.tensors import torch

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, POSITIONS, THETA, EPSILON = 4, 256, 768, 4, 2, 2048, 10_000.0, 1e-6
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML."""
OTHER_TEMPLATE = "<|im_start|>system\nYou answer in one word.<|im_end|>\n" + TEMPLATE
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 tokenizers split text before merging. transformers 5 and llama.cpp's `qwen2` apply it whatever the file
says, so the file says the same."""

_EXPONENT = {"BF16": ("H", range(7, 15), 16), "F32": ("I", range(23, 31), 0)}
"""Per format: its struct code, the bits of its exponent, and how far it stands left of its bits in float32."""


def make(directory: Path, *, seed: int = 1234, dtype: str = "bfloat16", family: str = "qwen2") -> Path:
    """Write a checkpoint of a `family` and return `directory`. Every `dtype` holds the same weights, of bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary, merges = _vocabulary(), _merges()
    weights, shape = _FAMILIES[family]
    _save(directory, weights(seed, len(vocabulary) + len(SPECIAL)), dtype)
    ids = {token: len(vocabulary) + i for i, token in enumerate(SPECIAL)}
    config = {
        "model_type": family,
        **shape,
        "vocab_size": len(vocabulary) + len(SPECIAL),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "dtype": dtype,
    }
    _write(directory / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    _write(directory / "generation_config.json", generation)
    _write(directory / "tokenizer.json", _tokenizer(vocabulary, merges, ids))
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer" if family == "qwen2" else "PreTrainedTokenizerFast",
            "model_max_length": POSITIONS,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )
    return directory


def flip_bit(directory: Path, seed: int) -> str:
    """Flip one exponent bit of one weight, both drawn evenly by `seed`; return tensor, index, bit and both values."""
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    header.pop("__metadata__")
    chance = random.Random(seed)
    code, bits, left = _EXPONENT[next(iter(header.values()))["dtype"]]
    size = struct.calcsize(code)
    at = body + size * chance.randrange((len(data) - body) // size)
    bit = chance.choice(bits)
    (before,) = struct.unpack_from(f"<{code}", data, at)
    after = before ^ 1 << bit
    struct.pack_into(f"<{code}", data, at, after)
    path.write_bytes(data)
    name, entry = next((n, e) for n, e in header.items() if body + e["data_offsets"][1] > at)
    index, place = (at - body - entry["data_offsets"][0]) // size, []
    for extent in reversed(entry["shape"]):
        index, digit = divmod(index, extent)
        place.insert(0, digit)
    values = [struct.unpack("<f", struct.pack("<I", word << left))[0] for word in (before, after)]
    return f"{name}{place}: bit {bit}, {values[0]:g} became {values[1]:g}"


def other_tokenizer(directory: Path) -> None:
    """Drop every second merge: the same text becomes other tokens, while every id keeps its meaning."""

    def thin(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][::2]

    _change(directory / "tokenizer.json", thin)


def other_template(directory: Path) -> None:
    """Put a system message before every conversation."""
    _change(directory / "tokenizer_config.json", lambda config: config.update(chat_template=OTHER_TEMPLATE))


def other_dtype(directory: Path, dtype: str) -> None:
    """Store and serve the weights in another format."""
    weights, _ = read_safetensors((directory / "model.safetensors").read_bytes())
    _save(directory, weights, dtype)
    _change(directory / "config.json", lambda config: config.update(dtype=dtype))


def gguf(directory: Path, file: Path, dtype: str = "float32") -> Path:
    """Write the checkpoint in `directory` as a GGUF file for llama.cpp and return its path."""
    config, tokenizer, words = (
        json.loads((directory / f"{name}.json").read_text()) for name in ("config", "tokenizer", "tokenizer_config")
    )
    weights, _ = read_safetensors((directory / "model.safetensors").read_bytes())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = [token["content"] for token in tokenizer["added_tokens"]]
    facts: dict[str, Any] = {
        **ggml.sizes("qwen2", config, dtype),
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + special,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(special),  # normal, control
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["bos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": words["chat_template"],
    }
    file.write_bytes(b"".join(ggml.parts_of_gguf(facts, weights, dtype)))
    return file


def _weights(seed: int, vocabulary: int) -> dict[str, Any]:
    """Return the weights in bfloat16: matrices spread by 0.08, so that the best token mostly stands clear of the next.

    The head is quiet about special tokens and bytes that are no printable ASCII: greedy text then does not end by
    itself, and shows the same in every server.
    """
    draw = _drawing(seed)
    narrow = HIDDEN // HEADS * KV_HEADS
    named = {"model.embed_tokens.weight": draw(vocabulary, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        named[f"{layer}input_layernorm.weight"] = draw(HIDDEN, mean=1.0)
        for name, width in (("q", HIDDEN), ("k", narrow), ("v", narrow)):
            named[f"{layer}self_attn.{name}_proj.weight"] = draw(width, HIDDEN)
            named[f"{layer}self_attn.{name}_proj.bias"] = draw(width)
        named[f"{layer}self_attn.o_proj.weight"] = draw(HIDDEN, HIDDEN)
        named[f"{layer}post_attention_layernorm.weight"] = draw(HIDDEN, mean=1.0)
        named[f"{layer}mlp.gate_proj.weight"] = draw(INNER, HIDDEN)
        named[f"{layer}mlp.up_proj.weight"] = draw(INNER, HIDDEN)
        named[f"{layer}mlp.down_proj.weight"] = draw(HIDDEN, INNER)
    named["model.norm.weight"] = draw(HIDDEN, mean=1.0)
    named["lm_head.weight"] = draw(vocabulary, HIDDEN)
    named["lm_head.weight"][_seldom(vocabulary)] *= 0.25
    return named


def _neox_weights(seed: int, vocabulary: int) -> dict[str, Any]:
    """Return the weights of a GPT-NeoX in bfloat16, spread as those of `_weights`."""
    draw = _drawing(seed)
    named = {"gpt_neox.embed_in.weight": draw(vocabulary, HIDDEN)}
    matrices = {"attention.query_key_value": (3 * HIDDEN, HIDDEN), "attention.dense": (HIDDEN, HIDDEN)}
    matrices |= {"mlp.dense_h_to_4h": (4 * HIDDEN, HIDDEN), "mlp.dense_4h_to_h": (HIDDEN, 4 * HIDDEN)}
    norms = [f"layers.{i}.{norm}" for i in range(LAYERS) for norm in ("input_layernorm", "post_attention_layernorm")]
    for norm in [*norms, "final_layer_norm"]:
        named[f"gpt_neox.{norm}.weight"] = draw(HIDDEN, mean=1.0)
        named[f"gpt_neox.{norm}.bias"] = draw(HIDDEN)
    for i in range(LAYERS):
        for name, sizes in matrices.items():
            named[f"gpt_neox.layers.{i}.{name}.weight"] = draw(*sizes)
            named[f"gpt_neox.layers.{i}.{name}.bias"] = draw(sizes[0])
    named["embed_out.weight"] = draw(vocabulary, HIDDEN)
    named["embed_out.weight"][_seldom(vocabulary)] *= 0.25
    return named


def _drawing(seed: int) -> Callable[..., Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int, mean: float = 0.0) -> Any:
        return (mean + 0.08 * torch.randn(sizes, generator=generator)).to(torch.bfloat16)

    return draw


def _seldom(vocabulary: int) -> list[int]:
    return [*range(32), *range(127, 256), *range(vocabulary - len(SPECIAL), vocabulary)]


_FAMILIES: dict[str, tuple[Callable[[int, int], dict[str, Any]], dict[str, Any]]] = {
    "qwen2": (
        _weights,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "intermediate_size": INNER,
            "num_key_value_heads": KV_HEADS,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            # transformers 5 reads the first; mlx-lm only the second, without a word where it is missing.
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "rope_theta": THETA,
            "use_sliding_window": False,
        },
    ),
    "gpt_neox": (
        _neox_weights,
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "intermediate_size": 4 * HIDDEN,  # mlx-lm knows no other
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "rotary_emb_base": THETA,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
    ),
}


def _merges() -> list[tuple[str, str]]:
    """Return syllables, syllables behind a blank, endings and double consonants, in the order of their rank."""
    vowels, blank = "aeiou", _visible()[32]
    syllables = [(c, v) for c in "bcdfghjklmnpqrstvwxyz" for v in vowels]
    endings = [(v, c) for v in vowels for c in "lnrst"]
    doubles = [("t", "h"), ("s", "h"), ("c", "h"), ("n", "g"), ("s", "t"), ("n", "d"), ("n", "t"), ("c", "k")]
    doubles += [("l", "l"), ("s", "s"), ("t", "t"), ("r", "d"), ("l", "d")]
    return syllables + [(blank, c + v) for c, v in syllables] + endings + [(blank, v) for v in vowels] + doubles


def _vocabulary() -> dict[str, int]:
    tokens = [*_visible(), *(a + b for a, b in _merges())]
    return {token: i for i, token in enumerate(tokens)}


def _visible() -> list[str]:
    """Return the character that stands for each byte: itself where it is printable, else the next from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def _tokenizer(
    vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return the content of tokenizer.json, the format of the `tokenizers` library."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in ids.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytewise]},
        "post_processor": bytewise,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": list(merges),
        },
    }


def _save(directory: Path, weights: Mapping[str, Any], dtype: str) -> None:
    kind = getattr(torch, dtype)
    data = write_safetensors({name: tensor.to(kind) for name, tensor in weights.items()}, {"format": "pt"})
    (directory / "model.safetensors").write_bytes(data)


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    _write(path, content)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
