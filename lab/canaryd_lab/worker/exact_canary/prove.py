"""Compute a model's answer to a text in integers; refuse a model or a text that is not exact in every format.

Values are int64 with a common power of two, and every bound that prevents overflow is checked. Linear operators are
computed a second time in float64, which holds the same sums. For large operators, only a sample of outputs is computed
in integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from canaryd.worker.exact_canary.shape import CHOSEN, THETA, Shape
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.exact_canary.layout import GAP

BITS = 8
"""Significant bits of bfloat16, the narrowest format."""
LEAST, MOST = 2.0**-14, 65_504.0
"""Smallest normal number and largest number of float16, the format with the smallest range."""
ACCUMULATOR = 24
"""Significant bits of float32, the narrowest accumulator of partial sums in serving engines."""
SMALL = 1 << 20
"""Maximum number of weights of a linear operator whose outputs are all computed in integers."""
EVERY = 64
"""If an operator has more than `SMALL` weights, one of this many outputs is computed in integers."""
BLOCK = 1 << 21
"""Number of weights of a matrix that are processed at once: as int64 and float64 they need some 50 MB; a whole head
would need 20 GB. Such a tensor is smaller than what workers let glibc keep for the next one
(`canaryd.supervisor.environment`)."""
OPEN, CLOSED = 64.0, -760.0
"""SiLU returns its input if the input is at least OPEN (e^-64 < 2^-54), and 0 if it is at most CLOSED (e^-760 is 0 in
float64)."""


@dataclass(frozen=True)
class Exact:
    """Exact values as whole numbers in a unit: each value is whole * 2^-shift."""

    whole: Any
    shift: int

    @staticmethod
    def of(tensor: Any) -> Exact:
        """Return the exact values of a floating-point tensor; raise `Inexact` if int64 cannot hold them."""
        wide = tensor.to(torch.float64)
        mantissa, exponent = torch.frexp(wide[wide != 0])
        lowest = exponent - 53 + _trailing((mantissa * 2.0**53).to(torch.int64))
        shift = -int(lowest.min()) if lowest.numel() else 0
        if float(wide.abs().max()) * 2.0**shift >= 2**40:
            raise Inexact("a tensor has more than 40 bits")
        return Exact((wide * 2.0**shift).to(torch.int64), shift)

    def reduced(self) -> Exact:
        """Return the same values in the largest unit in which all of them are whole numbers."""
        live = self.whole[self.whole != 0]
        twos = int(_trailing(live).min()) if live.numel() else 0
        return Exact(self.whole >> twos, self.shift - twos)

    def bits(self) -> int:
        """Return the number of significant bits that the values need: the most that any of them needs."""
        live = self.whole[self.whole != 0]
        if not live.numel():
            return 0
        return int((torch.frexp(live.to(torch.float64)).exponent - _trailing(live)).max())

    def at(self, shift: int) -> Any:
        """Return the values as whole numbers in the unit 2^-shift, which must not be coarser than the present one."""
        return self.whole << (shift - self.shift)

    def float64(self) -> Any:
        """Return the values as a tensor in float64."""
        return self.whole.to(torch.float64) * 2.0**-self.shift

    def __add__(self, other: Exact) -> Exact:
        shift = max(self.shift, other.shift)
        return Exact(self.at(shift) + other.at(shift), shift)

    def __getitem__(self, index: Any) -> Exact:
        return Exact(self.whole[index], self.shift)


def _trailing(whole: Any) -> Any:
    """Return the number of trailing zero bits of each whole number; none is 0, and all have less than 54 bits."""
    return torch.frexp((whole & -whole).to(torch.float64)).exponent - 1


@dataclass(frozen=True)
class Block:
    """Some rows of a matrix of exact weights, in the narrowest integer type that holds them."""

    whole: Any
    shift: int
    unit: Any
    """For each row, the lowest set bit of all its weights, as a float64 value (rows)."""

    @staticmethod
    def of(x: Exact) -> Block:
        """Return exact weights as a block."""
        size = int(x.whole.abs().max()).bit_length()
        kind = torch.int16 if size < 16 else torch.int32 if size < 32 else torch.int64
        live = torch.where(x.whole == 0, 1 << 52, x.whole & -x.whole)
        return Block(x.whole.to(kind), x.shift, live.min(-1).values.to(torch.float64))


@dataclass
class Operator:
    """Statistics of one operator of the model, over all layers and positions."""

    bits: int = 0
    """Maximum number of significant bits of a result."""
    sums: int = 0
    """Number of bits with which an accumulator holds every partial sum exactly."""
    largest: float = 0.0
    smallest: float = math.inf
    zeros: int = 0
    """Number of results that are 0. A fault in the low bits of such a result cannot be seen."""
    values: int = 0


@dataclass(frozen=True)
class Proof:
    """The results that every healthy engine gives for a text."""

    logits: Any
    """Exact logits, float64 (positions, vocabulary)."""
    operators: dict[str, Operator]
    witnessed: bool
    """False if products in float64 and in integers disagreed, so that this host cannot be trusted."""
    values: dict[str, Any]
    """Results of all operators if `Walk.keep` is set, else empty: name as in `run` ("2.down") → float64 (positions, …).
    Scores after scaling, and softmax (the winners' share), are (heads, positions, keys). Scores of future keys are
    included."""


@dataclass
class Walk:
    """Computes a model's answers in integers, and proves that every format gives them."""

    shape: Shape
    weights: Mapping[str, Any]
    operators: dict[str, Operator] = field(default_factory=dict)
    witnessed: bool = True
    keep: bool = False
    """Whether a proof also contains the results of every operator."""
    stored: Mapping[str, Any] = field(default_factory=dict)
    """Name of a matrix → its form with few bits (`quantised.Stored`); empty if no matrix is quantised."""
    _compared: int = 0
    _vectors: dict[str, Exact] = field(default_factory=dict)
    _matrices: dict[str, list[Block]] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)

    def prove(self, tokens: list[int], compared: int = 0) -> Proof:
        """Prove a text, whose last `compared` positions count (0: all); raise `Inexact` if a format would round."""
        self._values, self._compared = {}, compared
        self._check_norm_divisor()
        name = "model.embed_tokens.weight"
        self._matrix(name)
        x = Exact.of(self.weights[name][torch.tensor(tokens)]).reduced()
        self._keep("embedding", self._see("embedding", x, live=True))
        for i in range(self.shape.layers):
            for block, place in ((self._attention, f"{i}.middle"), (self._mlp, f"{i}.out")):
                x = self._keep(place, self._see("residual", (x + block(i, x)).reduced(), live=True))
        seen = self._keep("norm", self._norm(x, "model.norm"))
        logits = self._keep("logits", self._linear("logits", "lm_head", seen))
        return Proof(logits.float64(), self.operators, self.witnessed, self._values)

    def _keep(self, place: str, x: Exact) -> Exact:
        if self.keep:
            self._values[place] = x.float64()
        return x

    def _vector(self, name: str) -> Exact:
        if name not in self._vectors:
            self._vectors[name] = self._fits(name, Exact.of(self.weights[name]).reduced())
        return self._vectors[name]

    def _matrix(self, name: str) -> list[Block]:
        if name not in self._matrices:
            weight = self.weights[name]
            rows = max(EVERY, BLOCK // weight.shape[1] // EVERY * EVERY)
            self._matrices[name] = [Block.of(self._fits(name, Exact.of(part).reduced())) for part in weight.split(rows)]
            if few := self.stored.get(name):
                if not bool((few.values == weight).all()):
                    raise Inexact(f"{name}: what is stored in few bits is not the weight")
                if self._fits(name, Exact.of(few.scales).reduced()).bits() > 1:
                    raise Inexact(f"{name}: a scale is no power of two")
                self._fits(name, Exact.of(few.largest).reduced())
        return self._matrices[name]

    def _fits(self, name: str, x: Exact) -> Exact:
        """Return `x` unchanged; raise `Inexact` if some format cannot hold a value exactly."""
        size = x.whole.abs()
        found = self.operators.setdefault(name, Operator()) if name not in self.weights else Operator()
        found.bits = max(found.bits, x.bits())
        found.largest = max(found.largest, float(size.max()) * 2.0**-x.shift)
        live = size[size > 0]
        found.smallest = min(found.smallest, float(live.min()) * 2.0**-x.shift if live.numel() else math.inf)
        found.zeros += size.numel() - live.numel()
        found.values += size.numel()
        if found.bits > BITS or found.largest > MOST or found.smallest < LEAST:
            raise Inexact(f"{name}: {found.bits} bits, from {found.smallest:g} to {found.largest:g}")
        return x

    def _see(self, name: str, x: Exact, *, live: bool = False) -> Exact:
        x = self._fits(name, x)
        if live and self.operators[name].zeros:
            raise Inexact(f"{name}: {self.operators[name].zeros} values are 0")
        return x

    def _sum(self, name: str, magnitude: float, limit: int = ACCUMULATOR) -> None:
        bits = int(magnitude).bit_length()
        found = self.operators.setdefault(name, Operator())
        if limit == ACCUMULATOR:
            found.sums = max(found.sums, bits)
        if bits > limit:
            raise Inexact(f"{name}: partial sums need {bits} bits, an accumulator has {limit}")

    def _linear(self, name: str, module: str, x: Exact, *, live: bool = False) -> Exact:
        blocks = self._matrix(f"{module}.weight")
        own, real = max(block.shift for block in blocks), x.whole.to(torch.float64)
        every = 1 if self.weights[f"{module}.weight"].numel() <= SMALL else EVERY
        parts = [self._product(name, x.whole, real, block, own - block.shift, every) for block in blocks]
        whole, magnitude, unit = (torch.cat(each, -1) for each in zip(*parts, strict=True))
        out = Exact(whole, x.shift + own)
        if few := self.stored.get(f"{module}.weight"):
            if not few.takes(x.float64()):
                raise Inexact(f"{name}: an input is off the grid of int8")
            magnitude = magnitude + few.apart(real.abs()) * 2.0**own
        if f"{module}.bias" in self.weights:
            bias = self._vector(f"{module}.bias")
            finer = max(out.shift, bias.shift) - out.shift
            magnitude = magnitude * 2.0**finer + bias.float64().abs() * 2.0 ** (out.shift + finer)
            unit = (unit * 2.0**finer).clamp(max=2.0 ** (out.shift + finer - bias.shift))
            if few:  # quantised kernels store the product before they add the bias
                self._fits(f"{name} before its bias", out.reduced())
            out = out + bias
        self._sum(name, float((magnitude / unit).max()))
        return self._see(name, out.reduced(), live=live)

    def _product(self, name: str, x: Any, real: Any, block: Block, finer: int, every: int) -> tuple[Any, Any, Any]:
        """Return (x times a block, the same sums of magnitudes, the unit of each row's terms); `real` is x in float64.

        The unit of all three is the block's unit divided by 2^`finer`. One output in `every` is also computed in
        integers.
        """
        weight = block.whole.to(torch.int64)
        other = weight.to(torch.float64)
        magnitude = (real.abs() @ other.abs().T) * 2.0**finer
        self._sum(name, float(magnitude.max()), 53)  # below 2^53, so float64 holds the same sums
        whole = (real @ other.T).to(torch.int64)
        self.witnessed &= bool((x @ weight[::every].T == whole[:, ::every]).all())
        if every > 1:  # int64 products take a hundred times as long; of the last position, all of them
            self.witnessed &= bool((x[-1:] @ weight.T == whole[-1:]).all())
        return whole << finer, magnitude, block.unit * 2.0**finer

    def _check_norm_divisor(self) -> None:
        """Raise `Inexact` unless means of 4 and 16 stay exact if a kernel multiplies by 1 / hidden in float32."""
        d = self.shape.hidden
        inverse = Fraction(float(torch.tensor(1.0 / d, dtype=torch.float32)))
        product = float(torch.tensor(float(inverse * 4 * d), dtype=torch.float32))
        if product != 4.0:
            raise Inexact(f"norm: 4 * {d} times float32's 1 / {d} is {product!r}")

    def _norm(self, x: Exact, module: str) -> Exact:
        x = x.reduced()
        squares = (x.whole * x.whole).sum(-1)
        self._sum("norm", float(squares.max()))
        mean = squares.to(torch.float64) * 4.0**-x.shift / self.shape.hidden
        root = mean.sqrt()
        halvings = int(root[0].log2())
        target = self.shape.hidden * 4**halvings
        if bool((squares * 4 ** max(0, -x.shift) != target * 4 ** max(0, x.shift)).any()):
            span = f"{float(mean.min())} to {float(mean.max())}"
            raise Inexact(f"{module}: mean squares from {span}: wanted 4^{halvings}")
        gain = self._vector(f"{module}.weight")
        out = Exact(x.whole * gain.whole, x.shift + halvings + gain.shift)
        return self._see("norm", out.reduced(), live=True)

    def _attention(self, i: int, x: Exact) -> Exact:
        s, module = self.shape, f"model.layers.{i}.self_attn"
        seen = self._keep(f"{i}.attention_norm", self._norm(x, f"model.layers.{i}.input_layernorm"))
        query, key, value = (
            self._keep(f"{i}.{name}", self._linear(name, f"{module}.{name[0]}_proj", seen, live=name == "value"))
            for name in ("query", "key", "value")
        )
        count = len(x.whole)
        self._check_turns(query, s.heads, count)
        self._check_turns(key, s.kv_heads, count)
        group = s.heads // s.kv_heads
        parts, found = [], []
        for h in range(s.heads):
            q, k, v = (
                part.whole[:, j * s.head : (j + 1) * s.head]
                for part, j in ((query, h), (key, h // group), (value, h // group))
            )
            scores = q @ k.T
            magnitude = float((q.abs() @ k.abs().T).max())
            self._sum("scores", magnitude)
            unit = 2.0 ** -(query.shift + key.shift)
            if magnitude * unit > MOST:
                raise Inexact(f"scores: up to {magnitude * unit:g}, float16 ends at {MOST:g}")
            winners = self._winners(scores, unit)
            number = winners.sum(-1, keepdim=True)
            parts.append((winners.to(torch.int64) @ v) * (2 // number))
            found.append((scores.to(torch.float64) * (unit * s.head**-0.5), winners / number.to(torch.float64)))
        if self.keep:
            for name, heads in zip(("scores", "softmax"), zip(*found, strict=True), strict=True):
                self._values[f"{i}.{name}"] = torch.stack(heads)
        mixed = Exact(torch.cat(parts, 1), value.shift + 1)  # twice the mean of the winners' values, per head
        mixed = self._keep(f"{i}.mixed", self._see("mixed", mixed.reduced()))
        return self._keep(f"{i}.output", self._linear("output", f"{module}.o_proj", mixed, live=True))

    def _check_turns(self, x: Exact, heads: int, count: int) -> None:
        """Raise `Inexact` unless the rotation by positions leaves every value unchanged, even in float64."""
        half = self.shape.head // 2
        a, b = x.whole.view(count, heads, 2, half).unbind(2)
        a, b = a.abs().to(torch.float64), b.abs().to(torch.float64)
        for i in range(half):
            angle = count * THETA ** (-i / half)
            worst = torch.maximum(b[..., i] * angle - a[..., i] * 2.0**-54, a[..., i] * angle - b[..., i] * 2.0**-54)
            if float(worst.max()) > 0:
                raise Inexact(f"rotation: pair {i} turns by up to {angle:g}")

    def _winners(self, scores: Any, unit: float) -> Any:
        """Return truth values that mark the winning keys of each query, one or two; raise unless softmax is exact."""
        count = len(scores)
        future = torch.ones((count, count), dtype=torch.bool).triu(1)
        losing = math.ceil(-GAP * math.sqrt(self.shape.head) / unit)
        winners = (scores == 0) & ~future
        if bool(((scores > losing) & ~winners & ~future).any()):
            raise Inexact("scores: one is neither 0 nor far below")
        number = winners.sum(-1)
        if bool(((number != 1) & (number != 2)).any()):
            raise Inexact(f"scores: {int(number.min())} to {int(number.max())} keys tie: wanted one or two")
        return winners

    def _mlp(self, i: int, x: Exact) -> Exact:
        module = f"model.layers.{i}.mlp"
        seen = self._keep(f"{i}.inner_norm", self._norm(x, f"model.layers.{i}.post_attention_layernorm"))
        if self.shape.experts:
            return self._keep(f"{i}.down", self._mixture(i, seen))
        return self._neurons(f"{i}", [f"{module}.{name}_proj" for name in ("gate", "up", "down")], seen)

    def _neurons(self, place: str, modules: list[str], seen: Exact) -> Exact:
        gate, up = (
            self._keep(f"{place}.{name}", self._linear(name, module, seen, live=True))
            for name, module in zip(("gate", "up"), modules, strict=False)
        )
        size = gate.float64()
        is_open = size >= OPEN
        if bool((~is_open & (size > CLOSED)).any()):
            raise Inexact(f"gate: one is between {CLOSED:g} and {OPEN:g}")
        active = Exact(torch.where(is_open, gate.whole * up.whole, 0), gate.shift + up.shift)
        active = self._keep(f"{place}.active", self._see("active", active.reduced()))
        return self._keep(f"{place}.down", self._linear("down", modules[2], active, live=True))

    def _mixture(self, i: int, seen: Exact) -> Exact:
        """Return the mean of the two chosen experts' results, each rounded to the format before and after halving."""
        module = f"model.layers.{i}.block_sparse_moe"
        logits = self._keep(f"{i}.router", self._linear("router", f"{module}.gate", seen))
        takes = routes(logits, self._compared)
        total = Exact(torch.zeros_like(seen.whole), 0)
        for expert in range(self.shape.experts):
            words = takes[:, expert].nonzero().view(-1)
            place, names = f"{i}.expert{expert}", [f"{module}.experts.{expert}.{part}" for part in ("w1", "w3", "w2")]
            if self.keep:  # in process, every expert computes every word
                self._values[f"{place}.share"] = takes[:, expert, None] / CHOSEN
                out = self._neurons(place, names, seen)[words]
            else:
                out = self._neurons(place, names, seen[words])
            half = self._see("half", Exact(out.whole, out.shift + 1).reduced(), live=True)
            total = total + Exact(torch.zeros_like(seen.whole).index_copy(0, words, half.whole), half.shift)
        return self._see("mixture", total.reduced(), live=True)


def routes(logits: Exact, compared: int = 0) -> Any:
    """Return the experts of each word as truth values (words, experts); raise unless every share is exactly ½.

    The two chosen experts have logit 0, and all others are lower by at least `GAP`: e^-110 is 0 in float32 and too
    small to change a sum with 1 in float64. So softmax gives exactly ½ to both, in every format, over all experts or
    over the chosen ones. The last `compared` words (0: all words) must use every expert.
    """
    takes = logits.whole == 0
    least = math.ceil(-GAP * 2.0**logits.shift)
    if bool(((logits.whole > least) & ~takes).any()):
        raise Inexact(f"router: an expert is neither at 0 nor {GAP:g} below")
    number = takes.sum(-1)
    if bool((number != CHOSEN).any()):
        raise Inexact(f"router: {int(number.min())} to {int(number.max())} experts tie: wanted {CHOSEN}")
    unused = (~takes[-compared:].any(0)).nonzero().view(-1).tolist()
    if unused:
        raise Inexact(f"router: no compared word takes expert {unused[0]}")
    return takes
