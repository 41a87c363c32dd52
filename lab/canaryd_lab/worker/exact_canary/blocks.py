"""The two blocks of a layer, attention and MLP: for each row of their linear operators, what it reads and writes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

from canaryd.worker.exact_canary.shape import Plan, Shape
from canaryd.worker.numeric.integers import below, signed
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.exact_canary.layout import ONE, Layout, Port, query_scale
from canaryd_lab.worker.exact_canary.matrix import Digits, Matrix, Twins, full, twins, units

PAIRS = 24
"""Number of pairs of cancelling weights per row. With more, float32 sums would hide the lowest bits of a fault."""
MOST = 20
"""Number of pairs of cancelling weights per row if gains have full significands: 16-bit products stay below 2^23."""


class Block:
    """Base class of both blocks: sizes, program, layout, and the inputs (`port`) that a block reads after its norm."""

    def __init__(self, shape: Shape, program: Plan, layout: Layout, port: Port, digits: Digits) -> None:
        self.shape, self.program, self.layout, self.port, self.digits = shape, program, layout, port, digits

    def matrix(self, port: Port, rows: int) -> Matrix:
        """Return a linear operator with `rows` outputs and no weights yet."""
        return Matrix(port, rows, self.digits)

    def unit(self, row: int, layer: int) -> int:
        """Return the index of a dimension that is 1 after every norm; it is never the one reserved for biases."""
        return self.layout.units[1 + (row + layer) % (len(self.layout.units) - 1)]


class Attention(Block):
    """Attention: queries find a place by its code, and copy the place's value into pairs of dimensions."""

    def weights(self, layer: int, seed: int) -> dict[str, Any]:
        """Return the block's weights: name of a tensor (without the layer's name) → tensor."""
        s = self.shape
        queries = self.matrix(self.port, s.heads * s.head)
        keys, values = (self.matrix(port, s.kv_heads * s.head) for port in (self._moving_port(), self.port))
        live_q, live_k = (torch.zeros(m.rows, dtype=torch.bool) for m in (queries, keys))
        size = query_scale(s, self.program)
        for matrix, live, count, name in ((queries, live_q, s.heads, "query"), (keys, live_k, s.kv_heads, "key")):
            sizes = full(seed, name, count * s.still, size, self.digits.half if name == "key" else self.digits.bits)
            for h, i in itertools.product(range(count), range(s.still)):
                w = sizes[h * s.still + i]
                bit, row = i % self.program.place_bits, h * s.head + s.first_still + i
                partner = row + s.head // 2
                if i % 2:  # terms of either sign follow each other: large partial sums would hide low bits of q and k
                    row, partner = partner, row
                live[[row, partner]] = True
                if name == "query":
                    self._read_static(matrix, row, (1 + h % 2) * self.program.place_bits + bit, w, layer)
                    matrix.add(partner, (self.unit(row, layer), w))
                elif not self.program.anchored:
                    self._read_static(matrix, row, bit, w, layer)
                    matrix.add(partner, (self.unit(row, layer), -w))
                else:  # half from either copy of the code: they cancel for the anchor
                    for plane in (0, 3):
                        self._read_static(matrix, row, plane * self.program.place_bits + bit, w / 2, layer)
                    matrix.add(partner, (self.unit(row, layer), -w / 2))
                    self._read_static(matrix, partner, self.program.first_route - 1, -w / 2, layer)
        port, table = self._retrieved_port(seed)
        for row in range(values.rows):
            self._read_value(values, row, table[row % s.head // 2], (row // s.head, row % s.head), layer)
        out = self._attention_output(port, table, layer)
        noise = torch.exp2(torch.ceil(torch.log2(torch.tensor(size)))).item() * 2
        weights = {
            "self_attn.q_proj": queries.finish(seed + 1, noise, PAIRS, live_q),
            "self_attn.k_proj": keys.finish(seed + 2, noise, PAIRS, live_k),
            "self_attn.v_proj": values.finish(seed + 3, 8.0, PAIRS),
            "self_attn.o_proj": out.finish(seed + 4, 8.0, MOST),
        }
        found = {f"{name}.weight": w for name, w in weights.items()}
        if s.biased:
            for name, live in (("q", live_q), ("k", live_k), ("v", torch.ones(values.rows, dtype=torch.bool))):
                found |= self._bias(seed, name, found[f"self_attn.{name}_proj.weight"], live)
        return found

    def _moving_port(self) -> Port:
        """Return the keys' inputs without pairs of constants: a fault in such a pair would shift all keys alike."""
        port = self.port
        return Port(port.classes, port.gains, pairs=[p for p in port.pairs if port.classes[p[0]] != ONE])

    def _read_static(self, matrix: Matrix, row: int, static: int, weight: float, layer: int) -> None:
        members = self.port.members["s", static]
        dim = members[(row + layer) % len(members)]
        matrix.add(row, (dim, weight / self.port.gains[dim]))

    def _bias(self, seed: int, name: str, weight: Any, live: Any) -> dict[str, Any]:
        """Return a random bias, and add weights that subtract it again through the dimension reserved for biases."""
        unit: Any = 1 / 32
        low, high = 129, 255
        if levels := self.digits.levels:
            # Half as large as weights: the product without it has no more bits than a format holds.
            unit, low, high = units(weight.abs().amax(1), levels), levels // 4 + 1, levels // 2
        bias = signed(seed, f"bias {name}", (len(weight),), low, high).to(torch.float32) * unit * live
        weight[:, self.layout.units[0]] = -bias
        return {f"self_attn.{name}_proj.bias": bias}

    def _retrieved_port(self, seed: int) -> tuple[Port, list[tuple[Twins, Hashable]]]:
        """Return (inputs of the output projection, (twins, value bit or `ONE`) for each pair of head dimensions)."""
        s, kinds = self.shape, self.program.value_bits + 1
        known, unit = twins(self.digits.bits, self.digits.levels), self.digits.offered
        pick = below(seed, "value twins", (s.head // 2,), len(known)).tolist()
        table: list[tuple[Twins, Hashable]] = [
            (known[pick[k]], k % kinds if k % kinds < kinds - 1 else ONE) for k in range(s.head // 2)
        ]
        classes: list[Hashable] = []
        gains: list[float] = []
        for h, (t, bit) in itertools.product(range(s.heads), table):
            classes += [ONE if bit == ONE else ("t", h % 2, bit)] * 2
            gains += [t.a * unit, t.c * unit]
        pairs = [(i, i + 1) for i in range(0, len(classes), 2)]
        return Port(classes, gains, pairs=pairs), table

    def _read_value(
        self, values: Matrix, row: int, kind: tuple[Twins, Hashable], at: tuple[int, int], layer: int
    ) -> None:
        """Add weights to a row of the value projection: as `kind` says, it reads a bit of the value or a constant."""
        pair, bit = kind
        gain = (pair.c if at[1] % 2 else pair.a) * self.digits.offered
        if bit == ONE:
            values.add(row, (self.unit(row, layer), gain))
            return
        options = [w for w in self.layout.written if w.bit == bit]
        w = options[(row + layer) % len(options)]
        # (first - second) / 2 is sign * turn * u behind the norm, which halves: (2 + u) / 2 - (2 - u) / 2 = u.
        values.add(row, (w.first, gain * w.sign * w.turn), (w.second, -gain * w.sign * w.turn))

    def _attention_output(self, port: Port, table: list[tuple[Twins, Hashable]], layer: int) -> Matrix:
        out = self.matrix(port, self.shape.hidden)
        half = self.shape.head // 2

        def write(row: int, name: Hashable, n: int) -> None:
            members = port.members[name]  # twins are neighbours: 2 m and 2 m + 1
            first = members[2 * ((row + layer) % (len(members) // 2))]
            one, other = table[first // 2 % half][0].weights(n, self.digits.offered)
            out.add(row, (first, one), (first + 1, other))

        bits = self.program.value_bits
        for c in self.layout.copied:
            name = ("t", c.retrieved // bits, c.retrieved % bits)
            for dim, n in ((c.first, c.turn), (c.second, -c.turn)):  # half is the anchor's, whose bits are +1
                write(dim, name, 4 * n if self.program.anchored else 2 * n)
                if self.program.anchored:
                    write(dim, ONE, -2 * n)
        for w in self.layout.written:
            write(w.first, ONE, -4 * w.sign)
            write(w.second, ONE, -4 * w.sign)
        for dim in self.layout.units:
            write(dim, ONE, 2)
        for dim, a, b in self.layout.ballast:
            write(dim, ONE, b - a)
        return out


class Mlp(Block):
    """MLP: its neurons erase the retrieved bits, and multiply the bits of the place's value with them."""

    def _jobs(self) -> list[tuple[Hashable, ...]]:
        """Return the jobs of neurons: a constant, a copy of a retrieved bit, a copy of a value's bit, or a product.

        ("product", bit, x, y) gives the value's bit if the two retrieved bits are x and y, otherwise 0.
        """
        bits = range(self.program.value_bits)
        jobs: list[tuple[Hashable, ...]] = [(ONE,)]
        jobs += [("t", lag, bit) for lag in (0, 1) for bit in bits]
        jobs += [("u", bit) for bit in bits]
        return jobs + [("product", bit, x, y) for bit in bits for x in (1, -1) for y in (1, -1)]

    def weights(self, layer: int, seed: int) -> dict[str, Any]:
        """Return the block's weights: name of a tensor (without the layer's name) → tensor."""
        return {f"mlp.{name}_proj.weight": weight for name, weight in self.matrices(layer, seed, 0, {}).items()}

    def matrices(self, layer: int, seed: int, flips: int, apart: Mapping[int, int]) -> dict[str, Any]:
        """Return gate, up and down. Bit b of `flips` negates products of value bit b; `apart`: dimension → addend."""
        s, jobs, known = self.shape, self._jobs(), twins(self.digits.gate, self.digits.levels)
        pick = below(seed, "neuron twins", (s.inner // 2,), len(known)).tolist()
        gate, up = self.matrix(self.port, s.inner), self.matrix(self.port, s.inner)
        classes: list[Hashable] = []
        gains: list[float] = []
        for k in range(s.inner // 2):
            job, pair = jobs[k % len(jobs)], known[pick[k]]
            for row, gain in ((2 * k, pair.a), (2 * k + 1, pair.c)):
                self._read_job(gate, up, row, job, gain * self.digits.open, layer)
                classes.append(job)
                gains.append(gain * self.digits.open)
        pairs = [(i, i + 1) for i in range(0, s.inner, 2)]
        port = Port(classes, gains, pairs=pairs)
        down = self._mlp_output(port, [known[p] for p in pick], layer, flips, apart)
        return {
            "gate": gate.finish(seed + 5, 1024.0, PAIRS),
            "up": up.finish(seed + 6, 4.0, PAIRS),
            "down": down.finish(seed + 7, 8.0, MOST),
        }

    def _read_job(self, gate: Matrix, up: Matrix, row: int, job: tuple[Hashable, ...], gain: float, layer: int) -> None:
        unit = self.unit(row, layer)
        if job[0] == "product":
            _, bit, x, y = job
            other = (bit + layer + 1) % self.program.value_bits  # type: ignore[operator]
            gate.add(row, (unit, -gain))
            self._read_retrieved(gate, row, 0, bit, gain * x, layer)  # type: ignore[operator]
            self._read_retrieved(gate, row, 1, other, gain * y, layer)  # type: ignore[operator]
        else:
            gate.add(row, (unit, gain))
        if job[0] == ONE:
            up.add(row, (unit, 1.0))
        elif job[0] == "t":
            self._read_retrieved(up, row, job[1], job[2], 1.0, layer)
        else:
            options = [w for w in self.layout.written if w.bit == job[1]]
            w = options[(row + layer) % len(options)]
            up.add(row, (w.first, 2.0 * w.sign * w.turn), (w.second, -2.0 * w.sign * w.turn))

    def _read_retrieved(
        self, matrix: Matrix, row: int, lag: Hashable, bit: Hashable, weight: float, layer: int
    ) -> None:
        """Let a row read `weight` times the retrieved bit t: the two inputs are (s + 2 t) / 4 and (s - 2 t) / 4."""
        index = lag * self.program.value_bits + bit  # type: ignore[operator]
        options = [c for c in self.layout.copied if c.retrieved == index]
        c = options[(row + layer) % len(options)]
        matrix.add(row, (c.first, weight * c.turn), (c.second, -weight * c.turn))

    def _mlp_output(self, port: Port, pairs: list[Twins], layer: int, flips: int, apart: Mapping[int, int]) -> Matrix:
        down, bits = self.matrix(port, self.shape.hidden), self.program.value_bits

        def write(row: int, job: Hashable, n: int) -> None:
            members = port.members[job]
            first = members[2 * ((row + layer) % (len(members) // 2))]
            one, other = pairs[first // 2].weights(n, self.digits.open)
            down.add(row, (first, one), (first + 1, other))

        constant = dict(apart)
        for c in self.layout.copied:
            name = ("t", c.retrieved // bits, c.retrieved % bits)
            write(c.first, name, -2 * c.turn)
            write(c.second, name, 2 * c.turn)
        for w in self.layout.written:
            flip = -1 if flips >> w.bit & 1 else 1
            for dim, slot in ((w.first, w.sign * w.turn), (w.second, -w.sign * w.turn)):
                constant[dim] = constant.get(dim, 0) + 4 * w.sign
                write(dim, ("u", w.bit), -slot)
                for x, y in itertools.product((1, -1), (1, -1)):
                    write(dim, ("product", w.bit, x, y), slot * x * y * flip)
        for dim in self.layout.units:
            constant[dim] = constant.get(dim, 0) - 2
        for dim, a, b in self.layout.ballast:
            constant[dim] = constant.get(dim, 0) + a - b
        for dim, n in constant.items():
            write(dim, (ONE,), n)
        return down
