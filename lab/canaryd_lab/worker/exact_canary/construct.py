"""Construct the weights of an exact canary from a seed (docs/exact-canary.md), named as in Hugging Face's Llama."""

from __future__ import annotations

from typing import Any

from canaryd.worker.exact_canary.shape import Plan, Shape, plan
from canaryd.worker.exact_canary.shipped import Model
from canaryd.worker.numeric.integers import permutation
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.exact_canary.blocks import Attention, Mlp
from canaryd_lab.worker.exact_canary.experts import Experts
from canaryd_lab.worker.exact_canary.layout import Layout, lay_out, ports
from canaryd_lab.worker.exact_canary.matrix import Digits, Matrix, full

READ = 16
"""Number of pairs of cancelling weights per row of the head. With more, float32 sums would hide the lowest bits of a
fault."""
TOP = 20
"""Logit of the right word. Another word has 8 less for each wrong bit of its place or value."""


def construct(shape: Shape, seed: int, *, anchored: bool | None = None, bits: int = 0) -> Model:
    """Return the model of a seed, with weights of at most `bits` bits (0: bfloat16); raise `Unfit` for small sizes."""
    return Maker(shape, plan(shape, anchored=anchored), seed, Digits.quantised(bits)).model()


class Maker:
    """The state that the steps of constructing one model share."""

    def __init__(self, shape: Shape, program: Plan, seed: int, digits: Digits) -> None:
        self.shape, self.program, self.seed, self.digits = shape, program, seed, digits
        self.layout: Layout = lay_out(shape, program, seed)
        self.at_a, _ = ports(self.layout, shape, reserve=shape.biased)
        _, at_b = ports(self.layout, shape, reserve=False)
        self.attention = Attention(shape, program, self.layout, self.at_a, digits)
        self.mlp = (Experts if shape.experts else Mlp)(shape, program, self.layout, at_b, digits)
        self.codes = self._codes()

    def model(self) -> Model:
        """Return the model with all its weights."""
        d = self.shape.hidden
        weights = _narrow({"model.embed_tokens.weight": self._embedding()})
        for i in range(self.shape.layers):
            name, seed = f"model.layers.{i}", self.seed * 1000 + i
            for block in (self.attention, self.mlp):
                weights |= _narrow({f"{name}.{part}": w for part, w in block.weights(i, seed).items()})
            for norm in ("input_layernorm", "post_attention_layernorm"):
                weights |= _narrow({f"{name}.{norm}.weight": torch.ones(d)})
        weights |= _narrow({"model.norm.weight": torch.ones(d), "lm_head.weight": self._head()})
        return Model(self.shape, self.program, self.seed, weights)

    def _codes(self) -> Any:
        """Return the code of each place, as signs (places, bits of a place)."""
        order = permutation(self.seed, "places", self.program.places)
        return _signs(order, self.program.place_bits)

    def _statics(self) -> Any:
        """Return the constant bits of each place's words, as signs (places + 1, constant bits).

        A row has: the place's code, the codes that its even and odd heads look for, its code again, +1, and its pair of
        experts. The last row is the anchor's.
        """
        place = torch.arange(self.program.places)
        own = place < self.program.prompt
        looked = [torch.where(own, place, place - lag) for lag in self.program.lags]
        words = torch.cat([self.codes[p] for p in (place, *looked, place)], 1)
        route = _signs(place % self.program.routes, self.program.routes.bit_length() - 1)
        words = torch.cat([words, torch.ones_like(words[:, :1]), route], 1)
        anchor = torch.ones_like(words[:1])
        anchor[:, 3 * self.program.place_bits :] = -1  # contradicts its own code, so that its key is zero
        return torch.cat([words, anchor])

    def _embedding(self) -> Any:
        """Return the embedding (vocabulary, hidden); words that the program does not use repeat rows of used words."""
        p = self.program
        word = torch.arange(self.shape.vocabulary) % p.words
        place, value = word // p.values, word % p.values
        place[p.anchor], value[p.anchor] = p.places, p.values - 1
        static, value = self._statics()[place].to(torch.float32), _signs(value, p.value_bits).to(torch.float32)
        out = torch.empty((len(word), self.shape.hidden), dtype=torch.float32)
        for c in self.layout.copied:
            out[:, c.first] = out[:, c.second] = c.sign * static[:, c.static]
        for w in self.layout.written:
            out[:, w.first] = w.sign * (2 + w.turn * value[:, w.bit])
            out[:, w.second] = w.sign * (2 - w.turn * value[:, w.bit])
        for dim in self.layout.units:
            out[:, dim] = 2
        for dim, a, _ in self.layout.ballast:
            out[:, dim] = a
        return out

    def _head(self) -> Any:
        """Return the head (vocabulary, hidden): logit 20 for the right word, 8 less per wrong bit; and `_readers`."""
        p, head = self.program, Matrix(self.at_a, self.shape.vocabulary, self.digits)
        word = torch.arange(p.words)
        before = self.codes[(word // p.values - 1) % p.places].to(torch.float64)
        value = _signs(word % p.values, p.value_bits).to(torch.float64)
        units = torch.tensor(self.layout.units[1:])
        most = float(TOP - 4 * (p.place_bits + p.value_bits))
        parts, least = [most], -4.0 * self.digits.levels or most  # 4 is what a bit weighs
        while parts[-1] < least:
            parts[-1:] = [least, parts[-1] - least]
        for number, part in enumerate(parts):
            dims = units[(word + number) % len(units)]
            head.add_all(word, dims, torch.full((len(word),), part, dtype=torch.float64))
        gains = torch.tensor(self.at_a.gains, dtype=torch.float64)
        for bit in range(p.place_bits):
            members = torch.tensor(self.at_a.members["s", bit])
            dims = members[(word // 3 + bit) % len(members)]
            head.add_all(word, dims, 4 * before[:, bit] / gains[dims])
        for bit in range(p.value_bits):
            options = [w for w in self.layout.written if w.bit == bit]
            table = torch.tensor([(w.first, w.second, w.sign * w.turn) for w in options])
            first, second, sign = table[(word // 5 + bit) % len(options)].T
            head.add_all(word, first, 4 * value[:, bit] * sign)
            head.add_all(word, second, -4 * value[:, bit] * sign)
        self._readers(head)
        return head.finish(self.seed + 8, 16.0, READ)

    def _readers(self, head: Matrix) -> None:
        """Let each word outside the program read one constant bit, with a weight of full significand from 2 to 4."""
        rest = range(self.program.words, self.shape.vocabulary)
        sizes = full(self.seed, "readers", len(rest), 2.0, self.digits.bits)
        names = [name for name in self.at_a.members if isinstance(name, tuple) and name[0] == "s"]
        dims = [self.at_a.members[names[i % len(names)]][i % 2] for i in range(len(rest))]
        for row, w, dim in zip(rest, sizes, dims, strict=True):
            head.add(row, (dim, w / self.at_a.gains[dim]))


def _narrow(weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights in bfloat16; raise `Inexact` if one needs more bits."""
    narrow = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    for name, weight in weights.items():
        if not torch.equal(narrow[name].to(torch.float32), weight):
            raise Inexact(f"{name}: a weight is none of bfloat16")
    return narrow


def _signs(numbers: Any, count: int) -> Any:
    """Return the lowest `count` bits of whole numbers as signs (…, count)."""
    return ((numbers[..., None] >> torch.arange(count)) & 1) * 2 - 1
