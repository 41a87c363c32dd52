"""The experts of a mixture, which replace a layer's MLP; a pair of experts computes each word (docs/exact-canary.md).

Both experts of a pair write the MLP's result, but one adds a number to every dimension, and the other subtracts this
number. So their mean is right, but an expert combined with one of another pair gives errors everywhere. Each pair
negates other bits of the value, so a wrong pair gives another word.
"""

from __future__ import annotations

from typing import Any

from canaryd.worker.exact_canary.shape import CHOSEN
from canaryd.worker.numeric.integers import below, permutation
from canaryd.worker.numeric.seeds import derive
from canaryd_lab.worker.exact_canary.blocks import PAIRS, Mlp
from canaryd_lab.worker.exact_canary.matrix import Matrix, full

LEAST = 66.0
"""Smallest weight of a bit in an expert's logit. Each wrong bit lowers the logit by twice its weight, at least 132."""
NOISE = 64.0
"""Size of the router's cancelling weights. An error in the lowest bit of one of them is large enough to break a tie."""


class Experts(Mlp):
    """A router and its experts, which replace the MLP of a layer."""

    def weights(self, layer: int, seed: int) -> dict[str, Any]:
        """Return the block's weights: name of a tensor (without the layer's name) → tensor."""
        count = self.shape.experts
        order = permutation(seed, "experts", count).tolist()
        router = self.matrix(self.port, count)
        found: dict[str, Any] = {}
        for number, expert in enumerate(order):
            route, side = divmod(number, CHOSEN)
            self._read_route(router, expert, route, layer, seed)
            apart = self._apart(derive(seed, f"pair {route}"), 1 - 2 * side)
            matrices = self.matrices(layer, derive(seed, f"expert {expert}"), route, apart)
            for name, weight in zip(("w1", "w3", "w2"), matrices.values(), strict=True):
                found[f"block_sparse_moe.experts.{expert}.{name}.weight"] = weight
        return {"block_sparse_moe.gate.weight": router.finish(seed + 9, NOISE, PAIRS), **found}

    def _read_route(self, router: Matrix, expert: int, route: int, layer: int, seed: int) -> None:
        """Make an expert's logit 0 for words of its pair `route`; each wrong bit costs twice the bit's weight."""
        bits = self.program.routes.bit_length() - 1
        sizes = full(seed, f"router {expert}", bits, LEAST, min(6, self.digits.half))
        for bit, weight in enumerate(sizes):
            options = [c for c in self.layout.copied if c.static == self.program.first_route + bit]
            c = options[(expert + layer) % len(options)]
            wanted = 1 if route >> bit & 1 else -1  # behind the norm, first + second is sign * s / 2
            router.add(expert, (c.first, 2 * weight * wanted * c.sign), (c.second, 2 * weight * wanted * c.sign))
            router.add(expert, (self.unit(expert + bit, layer), -weight))

    def _apart(self, seed: int, side: int) -> dict[int, int]:
        """Return dimension → number that an expert adds; `side` is its sign. No result becomes 0 by it."""
        signs = (side * (2 * below(seed, "apart", (self.shape.hidden,), 2) - 1)).tolist()
        apart = dict(enumerate(signs))
        for dim, a, b in self.layout.ballast:
            if abs(a - b) == 1:
                apart[dim] *= 2
        return apart
