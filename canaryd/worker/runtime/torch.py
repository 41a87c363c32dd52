"""The runtime of torch: CPUs, CUDA, ROCm, MPS, XPU and NPU. It gets torch from `canaryd.worker.numeric.tensors`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from canaryd.model import TORCH, Device
from canaryd.worker.numeric import indexing, stack
from canaryd.worker.numeric import tensors as door
from canaryd.worker.numeric.attention import attend
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.products import multiply, multiply_blocks
from canaryd.worker.numeric.tensors import bits, host_same_bits, same_bits, words
from canaryd.worker.runtime import graphs
from canaryd.worker.runtime.interface import BURST_BYTES, Change, KeyValues, Operation, Operators, Repeated, Runtime

BURST = 48
"""Number of results that an accelerator computes before the host waits once and reads all their comparisons. With fewer
a GPU spends more of the time on gathers and between turns (benchmarks.case_list)."""
LONGEST = 1024
"""Maximum number of positions of a text, which is a prompt with its continuation (ours)."""


class _Operators:
    """Torch's operators as in serving: norms, rotations and softmax of 16-bit formats are computed in float32.

    The exact canary's attention is exact in any order of sums. If one order were required, torch would refuse cuDNN's
    kernel, which several versions prefer on an H100 (pytorch, sdp_utils.cpp, check_prefer_cudnn_attention).
    """

    exponential = "float64"

    def run(self, work: Callable[[], Any]) -> Any:
        with door.torch.inference_mode():
            return work().contiguous()

    def embed(self, table: Any, tokens: Any) -> Any:
        return door.torch.nn.functional.embedding(tokens, table)

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        return door.torch.nn.functional.linear(x, weight, bias)

    def norm(self, x: Any, weight: Any, epsilon: float) -> Any:
        wide = _wide(x)
        scaled = wide * door.torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return scaled.to(x.dtype) * weight

    def rotation(self, head: int, theta: float, like: Any) -> Callable[[Any, Any], Any]:
        """Return a function that rotates x by its positions; the host computes the cosines and sines in float64."""
        angles = rotary_angles(head, theta)
        turns = [table.to(like.dtype).to(like.device) for table in (angles.cos(), angles.sin())]

        def rotate(x: Any, at: Any) -> Any:
            a, b = x.chunk(2, -1)
            cos, sin = (table[at] for table in turns)
            return door.torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return rotate

    def attend(self, kernel: str, query: Any, key: Any, value: Any, *, causal: bool) -> Any:
        with door.in_any_order():
            return attend(kernel, query, key, value, causal=causal)

    def softmax(self, scores: Any, at: Any) -> Any:
        later = door.torch.arange(scores.shape[-1], device=scores.device) > at[:, None]
        hidden = _wide(scores.masked_fill(later, -math.inf))
        return door.torch.softmax(hidden, -1).to(scores.dtype)

    def silu(self, x: Any) -> Any:
        return door.torch.nn.functional.silu(x)

    def route(self, logits: Any, count: int) -> tuple[Any, Any]:
        """Return (shares, experts) like `Operators.route`; softmax covers all experts, as in transformers and vLLM."""
        shares, chosen = door.torch.softmax(_wide(logits), -1).topk(count, -1)
        return (shares / shares.sum(-1, keepdim=True)).to(logits.dtype), chosen

    def choose(self, logits: Any) -> Any:
        return logits.argmax(-1)

    def join(self, arrays: list[Any]) -> Any:
        return door.torch.cat(arrays, 1)

    def positions(self, count: int, like: Any) -> Any:
        return door.torch.arange(count, device=like.device)

    def cache(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> KeyValues:
        return KeyValues(layers, lambda: like.new_zeros(sizes))


def rotary_angles(head: int, theta: float) -> Any:
    """Return the rotary angle of each position and pair, float64 (LONGEST, head / 2); `theta`: frequencies' base."""
    speeds = door.torch.tensor([theta ** (-2 * i / head) for i in range(head // 2)], dtype=door.torch.float64)
    return door.torch.arange(LONGEST, dtype=door.torch.float64)[:, None] * speeds


def _wide(x: Any) -> Any:
    return x.to(door.torch.float32) if x.element_size() == 2 else x


class Torch(Runtime):
    """The runtime of torch's devices; its arrays are torch's tensors."""

    name = TORCH
    attention_kernels: tuple[str, ...] = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    left_integers: tuple[str, ...] = ("int8",)
    operators: Operators | None = _Operators()
    gathers = True
    pins = True

    def devices(self) -> list[Device]:
        """Return the host's CPU and every accelerator that this torch reaches."""
        return stack.discover()[0]

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:
        """Return the versions of torch, its libraries and the driver."""
        return stack.stack(device, instruction_set)

    def need(self, device: Device) -> None:
        """Raise `Skip` if torch is missing, is too old for the device, or does not see the device."""
        door.need_torch()
        door.torch_device(device)

    def strict(self, device: Device) -> AbstractContextManager[dict[str, str]]:  # noqa: ARG002  all devices' alike
        """Set torch's switches to their exact values until the end of the block."""
        return door.strict_switches()

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors in new allocations of the device."""
        return door.upload(tensors, device)

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        """Return the result of an operation, computed by torch's own kernels."""
        if operation.name == "matmul":
            return multiply(operation.source, operation.target, operands, out)
        if operation.name == "blocks":
            return multiply_blocks(operation.source, operation.target, operands)
        if operation.name == "grouped":
            a, b, ends = operands
            return door.torch.nn.functional.grouped_mm(a, b, offs=ends)
        if operation.name == "attention":
            query, key, value, allowed = operands
            mask = allowed if operation.mask in ("bool", "float") else None
            with door.in_any_order():
                return attend(operation.kernel, query, key, value, causal=operation.mask == "causal", mask=mask)
        if operation.name in ("rows", "columns"):
            pool, index = operands
            return _taken(operation, pool, index, out)
        with door.in_any_order():  # integers are exact in every order
            return indexing.OPERATIONS[operation.name][1](*operands).contiguous()

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        """Return for each result whether its bits equal the golden's; an accelerator synchronises once for all."""
        if golden.device.type == "cpu":
            same = host_same_bits if door.is_alone(golden) else same_bits
            return [same(result, golden) for result in results]
        return [not differs for differs in _differ(results, golden).tolist()]

    def download(self, array: Any) -> Any:
        """Return a tensor with the same bits on the host."""
        return array.cpu()

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        """Return `array`, after calling `change` on its raw bits with `choice`, in place."""
        change(door.flat_bits(array), choice)
        return array

    def spoil(self, results: list[Any]) -> None:
        """Overwrite every bit of every result with ones."""
        for result in door.joined(results):
            door.spoil(result)

    def burst(self, golden: Any, most: int = BURST_BYTES) -> int:
        """Return the number of results like `golden` in one burst: 1 on a CPU, else as many as `most` bytes hold."""
        if golden.device.type == "cpu":
            return 1
        return int(max(1, min(BURST, most // max(1, golden.nbytes))))

    def room(self, like: Any, count: int) -> list[Any]:
        """Return `count` arrays that are adjacent in memory. One comparison can then cover them all."""
        return list(door.torch.empty((count, *like.shape), dtype=like.dtype, device=like.device))

    def repeats(self, device: Device) -> bool:
        """Return whether the device has CUDA graphs; ROCm devices have them under the same name."""
        return device.backend in ("cuda", "rocm")

    def repeated(self, device: Device, burst: Callable[[], tuple[list[Any], Any]]) -> Repeated:
        """Return a CUDA graph that computes and compares the burst at each launch."""
        return graphs.Graph(door.torch_device(device), lambda: _differ(*burst()))

    def memory(self, device: Device) -> tuple[int | None, int | None]:
        """Return (free bytes, total bytes) as the driver reports them; both are None if the backend reports nothing."""
        module = self._module(device)
        if not hasattr(module, "mem_get_info"):
            return None, None
        target = door.torch_device(device)
        try:
            free, total = module.mem_get_info(target)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            return None, None  # integrated GPUs of Intel tell no free memory (pytorch issue 194576)
        # Memory that torch kept from an earlier probe of the series will be used again.
        return free + module.memory_reserved(target), total

    def limit_memory(self, device: Device, size: int) -> None:
        """Limit the memory of torch's allocator if the backend supports it; on XPUs only newer versions of torch do."""
        module = self._module(device)
        if hasattr(module, "mem_get_info") and hasattr(module, "set_per_process_memory_fraction"):
            target = door.torch_device(device)
            total = module.get_device_properties(target).total_memory
            module.set_per_process_memory_fraction(min(1.0, size / total), target)

    @staticmethod
    def _module(device: Device) -> Any:
        """Return torch's module of a device's backend; None if the backend has no module or torch is missing."""
        return getattr(door.torch, device.torch_place[0], None)

    def synchronize(self, device: Device) -> None:
        """Wait until the device has finished all work."""
        door.synchronize(device)

    def let_go(self) -> None:
        """Release the memory in torch's cache."""
        graphs.let_go()
        door.let_go()


def _differ(results: list[Any], golden: Any) -> Any:
    """Return truth values (n,) on the device, one per result: whether it differs from the golden in any bit."""
    found = []
    for block in door.joined(results):
        raw, right = words(block, golden)
        found.append((raw.reshape(-1, right.numel()) != right.reshape(-1)).any(-1))
    return door.torch.cat(found)


def _taken(operation: Operation, pool: Any, index: Any, out: Any) -> Any:
    """Return the rows or columns `index` of a pool; they are copied as raw bits, because torch cannot index FP8."""
    raw = bits(pool)
    kept = None if out is None else bits(out.mT if operation.turned else out)
    if operation.name == "rows":
        if raw.dim() > 2:  # each matrix of a batch has a pool of its own
            numbers = door.torch.arange(raw.shape[0], device=raw.device).view(-1, 1)
            raw, index = raw.flatten(0, 1), index + raw.shape[1] * numbers
        flat = None if kept is None else kept.flatten(0, -2)
        taken = door.torch.index_select(raw, 0, index.flatten(), out=flat).view(*index.shape, -1)
    else:  # on a CPU four times faster than index_select along columns
        if operation.together > 1:  # a run is one word, or some
            count = operation.together * raw.element_size() // door.WORD
            raw, kept = raw.view(door.torch.int64), None if kept is None else kept.view(door.torch.int64)
            if count > 1:
                index = (index.unsqueeze(-1) * count + door.torch.arange(count, device=index.device)).flatten(-2)
        shape = (*index.shape[:-1], raw.shape[0], index.shape[-1])
        taken = door.torch.gather(
            raw.expand(shape[:-1] + raw.shape[1:]), -1, index.unsqueeze(-2).expand(shape), out=kept
        )
    found = taken.view(pool.dtype)
    return found.mT if operation.turned else found


RUNTIME = Torch()
