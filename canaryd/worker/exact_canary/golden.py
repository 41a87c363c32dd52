"""The one right answer of an exact canary to a prompt, derived from its program without weights or activations.

It needs the standard library only. `prove` derives the same answer from the weights, in integers.
"""

from __future__ import annotations

from canaryd.worker.exact_canary.shape import Plan
from canaryd.worker.numeric.seeds import GAMMA, derive, mix64


def prompt(program: Plan, seed: int) -> list[int]:
    """Return the words of a prompt: the anchor, if the program has one, then each place once, the last place last."""
    start = derive(seed, "prompt")
    values = [mix64(start + i) % program.values for i in range(program.prompt)]
    order = sorted(range(program.prompt - 1), key=lambda i: mix64(start ^ (i + 1) * GAMMA))
    words = [place * program.values + values[place] for place in [*order, program.prompt - 1]]
    return [program.anchor, *words] if program.anchored else words


def codes(program: Plan, seed: int) -> list[int]:
    """Return the code of each place as a number: the permutation of `integers.permutation`, in plain Python."""
    start = derive(seed, "places")
    drawn = [mix64((i + 1) * GAMMA + start) & ((1 << 63) - 1) for i in range(program.places)]
    return sorted(range(program.places), key=drawn.__getitem__)


def continuation(program: Plan, layers: int, words: list[int], count: int) -> list[int]:
    """Return the `count` words that follow a prompt."""
    values = finals(program, layers, words, count)[program.prompt - 1 :]
    return [(program.prompt + i) * program.values + value for i, value in enumerate(values)]


def finals(program: Plan, layers: int, words: list[int], count: int) -> list[int]:
    """Return for each place the value that it passes on to later places, once `count` words are generated.

    Every place has a state of value bits. Each layer multiplies it with two retrieved states: u[b] t0[b] t1[b'], with
    signs ±1, where t0 and t1 are the states of two earlier places at the same layer, and b' = b + layer + 1. With
    experts, bit b changes its sign if bit b of the number of the place's pair of experts is 1.
    """
    bits = program.value_bits
    states: dict[int, list[list[int]]] = {}
    found: list[int] = []
    # What a place looks at has a smaller number, or is itself: in order of places all is known when it is asked for.
    pending = {word // program.values: word % program.values for word in words if word != program.anchor}
    for place in range(program.prompt + count - 1):
        value = pending[place]
        state = [[(value >> b & 1) * 2 - 1 for b in range(bits)]]
        for layer in range(layers):
            own = place < program.prompt
            near, far = (state[layer] if own else states[place - lag][layer] for lag in program.lags)
            u = state[layer]
            route = place % program.routes
            state.append(
                [(1 - 2 * (route >> b & 1)) * u[b] * near[b] * far[(b + layer + 1) % bits] for b in range(bits)]
            )
        states[place] = state
        found.append(sum((bit > 0) << b for b, bit in enumerate(state[-1])))
        if place >= program.prompt - 1:
            pending[place + 1] = found[-1]
    return found
