"""A WebAssembly module with one matrix product per format, without SIMD: it uses plain multiplications and additions.

Binary format and opcodes: WebAssembly Core Specification 1.0, chapter 5.
"""

from __future__ import annotations

from canaryd_lab.worker.pack.graph import varint

I32 = 0x7F
# local.get, local.set, i32.const, i32.add, i32.mul, i32.ge_u, block, loop, br, br_if, end
GET, SET, CONST, ADD, MUL, GE = 0x20, 0x21, 0x41, 0x6A, 0x6C, 0x4F
BLOCK, LOOP, BR, BR_IF, END, EMPTY = 0x02, 0x03, 0x0C, 0x0D, 0x0B, 0x40
FORMATS = {
    # name: (type, bytes, load, store, zero constant, multiply, add)
    "f32": (0x7D, 4, 0x2A, 0x38, bytes([0x43, 0, 0, 0, 0]), 0x94, 0x92),
    "f64": (0x7C, 8, 0x2B, 0x39, bytes([0x44, *[0] * 8]), 0xA2, 0xA0),
    "i32": (0x7F, 4, 0x28, 0x36, bytes([0x41, 0]), 0x6C, 0x6A),
}
A, B, C, M, N, K, ROW, COLUMN, TERM, P, Q, S = range(12)
"""Numbers of a function's parameters and locals. Parameters: addresses of a, b and the result, then sizes. Locals:
counters, addresses and the sum."""


def _vector(items: list[bytes]) -> bytes:
    return varint(len(items)) + b"".join(items)


def _section(number: int, content: bytes) -> bytes:
    return bytes([number]) + varint(len(content)) + content


def _step(local: int, by: bytes) -> bytes:
    return bytes([GET, local]) + by + bytes([ADD, SET, local])


def _counted(counter: int, end: int, body: bytes) -> bytes:
    """Return the code of a loop: for (counter = 0; counter < end; counter++) body."""
    head = bytes([CONST, 0, SET, counter, BLOCK, EMPTY, LOOP, EMPTY, GET, counter, GET, end, GE, BR_IF, 1])
    return head + body + _step(counter, bytes([CONST, 1])) + bytes([BR, 0, END, END])


def _function(form: str) -> bytes:
    kind, size, load, store, zero, multiply, add = FORMATS[form]
    width, align = bytes([CONST, size]), {4: 2, 8: 3}[size]
    row = bytes([GET, A, GET, ROW, GET, K, MUL]) + width + bytes([MUL, ADD, SET, P])  # P = A + ROW*K*size
    column = bytes([GET, B, GET, COLUMN]) + width + bytes([MUL, ADD, SET, Q])  # Q = B + COLUMN*size
    term = bytes([GET, S, GET, P, load, align, 0, GET, Q, load, align, 0, multiply, add, SET, S])
    term += _step(P, width) + _step(Q, bytes([GET, N]) + width + bytes([MUL]))
    element = zero + bytes([SET, S]) + row + column + _counted(TERM, K, term)
    element += bytes([GET, C, GET, S, store, align, 0]) + _step(C, width)
    body = _vector([bytes([5, I32]), bytes([1, kind])]) + _counted(ROW, M, _counted(COLUMN, N, element)) + bytes([END])
    return varint(len(body)) + body


def module() -> bytes:
    """Return a module with 2 MiB of memory and the functions `f32`, `f64` and `i32`, each of (a, b, c, M, N, K)."""
    exports = [bytes([6, *b"memory", 2, 0])]
    exports += [bytes([3, *name.encode(), 0, number]) for number, name in enumerate(FORMATS)]
    return b"".join(
        [
            b"\0asm\1\0\0\0",
            _section(1, _vector([bytes([0x60, 6, *[I32] * 6, 0])])),
            _section(3, _vector([bytes([0])] * len(FORMATS))),
            _section(5, _vector([bytes([0, 32])])),
            _section(7, _vector(exports)),
            _section(10, _vector([_function(form) for form in FORMATS])),
        ]
    )
