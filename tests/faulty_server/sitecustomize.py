"""Breaks the products of a model server that is started with this directory on PYTHONPATH: for benchmarks.

`CANARYD_TEST_FAULT_RATE` is the share of matrix products of which one element has one bit wrong. At 1 the bit is stuck:
the same element and bit of every product.
"""

import os
import random

RATE = float(os.environ["CANARYD_TEST_FAULT_RATE"])
BITS = {2: 12, 4: 28}
"""Bytes of an element → a bit in the middle of its exponent."""
chance = random.Random(7)


def broken(compute, hurt):
    """Return `compute` with a wrong bit in its result now and then."""

    def product(*arguments, **named):
        out = compute(*arguments, **named)
        if chance.random() >= RATE:
            return out
        return hurt(out, 0 if RATE >= 1 else chance.randrange(out.shape[-1]))

    return product


def hurt_torch(out, column):
    """Flip a bit in the last row of a tensor."""
    kind = {2: torch.int16, 4: torch.int32}[out.element_size()]
    wrong = out.detach().clone()
    wrong.view(kind).view(-1, out.shape[-1])[-1, column] ^= 1 << BITS[out.element_size()]
    return wrong


def hurt_mlx(out, column):
    """Flip a bit in the last row of an array."""
    kind = {2: mlx.uint16, 4: mlx.uint32}[out.itemsize]
    words = out.view(kind).reshape(-1, out.shape[-1])
    words[-1, column] = words[-1, column] ^ mlx.array(1 << BITS[out.itemsize], kind)
    return words.reshape(out.shape).view(out.dtype)


try:
    import mlx.core as mlx
    from mlx import nn

    nn.Linear.__call__ = broken(nn.Linear.__call__, hurt_mlx)
except ImportError:
    import torch

    torch.nn.Linear.forward = broken(torch.nn.Linear.forward, hurt_torch)
