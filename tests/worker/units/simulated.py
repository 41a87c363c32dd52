"""A simulated GPU: a scheduler that puts blocks on SMs, unevenly, and SMs that are wrong now and then or always."""

import random
from collections.abc import Callable, Sequence

from canaryd.worker.numeric.tensors import bits, torch
from canaryd.worker.units.tiles import MOVED, Launch

SMS = 132


class Chip:
    """SMs that compute tiles by float64 arithmetic of the host; `broken` says how often an SM spoils a tile.

    A launch fills the SMs in an order of its own. Most get one block; now and then one gets two, and another none
    until blocks are left over.
    """

    def __init__(
        self,
        seed: int,
        broken: Callable[[int], float] = lambda _: 0.0,
        *,
        unit: str = "sm",
        count: int = SMS,
        lane: int = 5,
        bit: int = 11,
        doubled: float = 0.02,
        never: Sequence[int] = (),
        moved: float = 0.0,
    ):
        self.unit, self.count = unit, count
        self.broken, self.lane, self.bit = broken, lane, bit
        self.random = random.Random(seed)
        self.doubled, self.never, self.moved = doubled, set(never), moved
        self.spoilt: dict[int, int] = {}
        """SM → how many tiles it spoilt."""

    def refuses(self, tiles) -> str:
        return ""

    def schedule(self, blocks: int) -> list[int]:
        """Return the SM of each block."""
        sms = [sm for sm in range(self.count) if sm not in self.never]
        self.random.shuffle(sms)
        placed: list[int] = []
        while len(placed) < blocks:
            free = [sm for sm in sms if self.random.random() >= self.doubled]
            placed += free + [self.random.choice(free) for _ in range(len(sms) - len(free))]
        return placed[:blocks]

    def launch(self, tiles, operands, blocks: int, shift: int) -> Launch:
        a, b = (operand.to(torch.float64) for operand in operands)
        right = (a @ b.mT).to(getattr(torch, tiles.target))
        results = right.expand(blocks, *right.shape).clone()
        lanes = (torch.arange(tiles.M * tiles.N) % 32).view(tiles.M, tiles.N).to(torch.int32)
        units = [MOVED] * blocks
        for block, sm in enumerate(self.schedule(blocks)):
            slot = (block + shift) % blocks
            units[slot] = MOVED if self.random.random() < self.moved else sm
            for tile in results[slot]:
                if self.random.random() < self.broken(sm):
                    self.spoilt[sm] = self.spoilt.get(sm, 0) + 1
                    held = bits(tile).view(-1)
                    held[self.lane + 32 * self.random.randrange(held.numel() // 32)] ^= 1 << self.bit
        return Launch(results, units, lanes.expand(blocks, tiles.M, tiles.N))
