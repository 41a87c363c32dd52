"""The shaders of the WebGPU runtime. WGSL is kept as text in Python, so that wheels and remote workers contain it."""

from __future__ import annotations

TILE = 64
"""Number of rows, and of columns, of a product that one workgroup computes: 16 x 16 invocations, each 4 x 4 results."""
GROUP = 256
"""Number of invocations per workgroup in all shaders except the product's."""

LOADS = {
    "float32": ("f32", "f32", "f32({0}[i])"),
    "float16": ("f16", "f16", "f16({0}[i])"),
    "float16>float32": ("f16", "f32", "f32({0}[i])"),
    "int8": ("u32", "i32", "extractBits(bitcast<i32>({0}[i / 4]), (i % 4) * 8, 8)"),
    "uint8": ("u32", "i32", "i32(extractBits({0}[i / 4], (i % 4) * 8, 8))"),
}
"""Operand's format → type in storage, type in which it is multiplied and summed, and code that reads element i;
bytes are packed into words of 32 bits."""

_PRODUCT = """
struct Sizes {{ M: u32, N: u32, K: u32, a_row: u32, a_column: u32, b_row: u32, b_column: u32, pad: u32 }}
@group(0) @binding(0) var<storage, read> sizes: Sizes;
@group(0) @binding(1) var<storage, read> a: array<{stored_a}>;
@group(0) @binding(2) var<storage, read> b: array<{stored_b}>;
@group(0) @binding(3) var<storage, read_write> c: array<{sum}>;
var<workgroup> rows: array<array<{sum}, 65>, 16>;
var<workgroup> columns: array<array<{sum}, 65>, 16>;
fn of_a(i: u32) -> {sum} {{ return {load_a}; }}
fn of_b(i: u32) -> {sum} {{ return {load_b}; }}
@compute @workgroup_size(16, 16)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {{
    var sums: array<array<{sum}, 4>, 4>;
    let top = group.y * 64u;
    let left = group.x * 64u;
    let number = local.y * 16u + local.x;
    for (var start = 0u; start < sizes.K; start += 16u) {{
        for (var part = 0u; part < 4u; part++) {{
            let k = start + number % 16u;
            let place = number / 16u + part * 16u;
            var x = {sum}(0);
            var y = {sum}(0);
            if (k < sizes.K && top + place < sizes.M) {{
                x = of_a(group.z * sizes.M * sizes.K + (top + place) * sizes.a_row + k * sizes.a_column);
            }}
            if (k < sizes.K && left + place < sizes.N) {{
                y = of_b(group.z * sizes.K * sizes.N + k * sizes.b_row + (left + place) * sizes.b_column);
            }}
            rows[number % 16u][place] = x;
            columns[number % 16u][place] = y;
        }}
        workgroupBarrier();
        for (var k = 0u; k < 16u; k++) {{
            for (var i = 0u; i < 4u; i++) {{
                for (var j = 0u; j < 4u; j++) {{
                    sums[i][j] += rows[k][local.y + i * 16u] * columns[k][local.x + j * 16u];
                }}
            }}
        }}
        workgroupBarrier();
    }}
    for (var i = 0u; i < 4u; i++) {{
        for (var j = 0u; j < 4u; j++) {{
            let row = top + local.y + i * 16u;
            let column = left + local.x + j * 16u;
            if (row < sizes.M && column < sizes.N) {{
                c[(group.z * sizes.M + row) * sizes.N + column] = sums[i][j];
            }}
        }}
    }}
}}
"""


def product(left: str, right: str) -> str:
    """Return the shader of a product; `left` and `right` are names in `LOADS` whose sums have the same type."""
    (stored_a, total, load_a), (stored_b, _, load_b) = LOADS[left], LOADS[right]
    text = _PRODUCT.format(
        stored_a=stored_a, stored_b=stored_b, sum=total, load_a=load_a.format("a"), load_b=load_b.format("b")
    )
    return f"enable f16;\n{text}" if "f16" in (stored_a, stored_b) else text


_LINEAR = """
@group(0) @binding(0) var<storage, read> n: array<u32, 8>;
{bindings}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {{
    let i = (group.y * groups.x + group.x) * 256u + local;
    if (i >= n[0]) {{ return; }}
    {body}
}}
"""
_WORDS = "array<vec2<u32>>"
_ADD = "array<atomic<u32>>"


def linear(body: str, *types: str) -> str:
    """Return a shader that runs `body` for every i below n[0]; `types`: types of x0, x1, … and, last, of out."""
    names = [*(f"x{i}" for i in range(len(types) - 1)), "out"]
    bindings = "\n".join(
        f"@group(0) @binding({i}) var<storage, {'read_write' if name == 'out' else 'read'}> {name}: {kind};"
        for i, (name, kind) in enumerate(zip(names, types, strict=True), 1)
    )
    return _LINEAR.format(bindings=bindings, body=body)


FILL = linear("out[i] = 0xffffffffu;", "array<u32>")
DIFFERS = linear(
    "let kept = select(0xffffffffu, n[1], i + 1u == n[0]);\n"
    "    if (((x0[i] ^ x1[i]) & kept) != 0u) { atomicStore(&out[0], 1u); }",
    "array<u32>",
    "array<u32>",
    _ADD,
)
ONES = linear("out[i] = vec2<u32>(1u, 0u);", _WORDS)
INDEX = {
    "gather": linear("out[i] = x0[x1[i].x];", _WORDS, _WORDS, _WORDS),
    "embedding": linear("out[i] = x0[x1[i / n[1]].x * n[1] + i % n[1]];", "array<u32>", _WORDS, "array<u32>"),
    "scatter": linear("out[x1[i].x] = x0[i];", _WORDS, _WORDS, _WORDS),
    # 64 bits out of two atomics: whoever makes the lower word wrap carries one into the upper.
    "index_add": linear(
        "let at = x1[i].x * 2u;\n"
        "    let before = atomicAdd(&out[at], x0[i].x);\n"
        "    let carry = select(0u, 1u, before + x0[i].x < before);\n"
        "    atomicAdd(&out[at + 1u], x0[i].y + carry);",
        _WORDS,
        _WORDS,
        _ADD,
    ),
    # Long division of the magnitude, 12 bits at a time: a remainder below 2**19 stays below 2**31.
    "modulo": linear(
        "let by = x1[i].x;\n"
        "    let negative = x0[i].y >> 31u == 1u;\n"
        "    var low = x0[i].x;\n"
        "    var high = x0[i].y;\n"
        "    if (negative) { low = ~low + 1u; high = ~high + select(0u, 1u, low == 0u); }\n"
        "    var rest = high % by;\n"
        "    rest = ((rest << 12u) | (low >> 20u)) % by;\n"
        "    rest = ((rest << 12u) | ((low >> 8u) & 0xfffu)) % by;\n"
        "    rest = ((rest << 8u) | (low & 0xffu)) % by;\n"
        "    if (negative && rest != 0u) { rest = by - rest; }\n"
        "    out[i] = vec2<u32>(rest, 0u);",
        _WORDS,
        _WORDS,
        _WORDS,
    ),
    "bucketize": linear(
        "var low = 0u;\n"
        "    var high = n[1];\n"
        "    while (low < high) {\n"
        "        let middle = (low + high) / 2u;\n"
        "        let edge = x1[middle];\n"
        "        let less = edge.y < x0[i].y || (edge.y == x0[i].y && edge.x < x0[i].x);\n"
        "        if (less) { low = middle + 1u; } else { high = middle; }\n"
        "    }\n"
        "    out[i] = vec2<u32>(low, 0u);",
        _WORDS,
        _WORDS,
        _WORDS,
    ),
}
"""Operation of `indexing.OPERATIONS` that needs only one pass → its shader. A 64-bit integer is two words."""
