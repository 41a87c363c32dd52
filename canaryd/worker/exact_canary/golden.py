"""The one right answer of an exact canary to a prompt, derived from its program without weights or activations.

It needs the standard library only. `prove` derives the same answer from the weights, in integers.
"""

from __future__ import annotations

from canaryd.worker.exact_canary.shape import Plan
from canaryd.worker.numeric.seeds import GAMMA, derive, mix64


def prompt(program: Plan, seed: int) -> list[int]:
    """Return a prompt: the anchor, if there is one, then one word per place in random order, the last place last."""
    start = derive(seed, "prompt")
    values = [mix64(start + i) % program.values for i in range(program.prompt)]
    order = sorted(range(program.prompt - 1), key=lambda i: mix64(start ^ (i + 1) * GAMMA))
    words = [place * program.values + values[place] for place in [*order, program.prompt - 1]]
    return [program.anchor, *words] if program.anchored else words


def codes(program: Plan, seed: int) -> list[int]:
    """Return the code of each place: a permutation of the places, equal to `integers.permutation` of this seed."""
    start = derive(seed, "places")
    drawn = [mix64((i + 1) * GAMMA + start) & ((1 << 63) - 1) for i in range(program.places)]
    return sorted(range(program.places), key=drawn.__getitem__)


def continuation(program: Plan, layers: int, words: list[int], count: int) -> list[int]:
    """Return the `count` words that follow a prompt."""
    values = finals(program, layers, words, count)[program.prompt - 1 :]
    return [(program.prompt + i) * program.values + value for i, value in enumerate(values)]


def finals(program: Plan, layers: int, words: list[int], count: int) -> list[int]:
    """Return for each place the value that it passes on to later places, when `count` words follow the prompt `words`.

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
