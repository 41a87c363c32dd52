"""A CUDA device that is not there: torch's fake tensors, and what `torch.cuda` and its attention would answer.

Fake tensors have device, format, shape and strides, and no data. torch checks the arguments of every operation on them
as it does on a GPU, and refuses to give a value of one.
"""

import contextlib
import warnings
from types import SimpleNamespace

from canaryd.model import Device
from canaryd.worker.numeric import tensors

UUID = "5d1a0b3e-0000-4000-8000-00000000beef"
AMPERE, HOPPER = (
    Device(uuid=f"GPU-{UUID}", backend="cuda", index=0, torch_index=0, model=model, detail={"capability": capability})
    for model, capability in (("A100", "8.0"), ("H100", "9.0"))
)
MI300X = Device(
    uuid=f"GPU-{UUID}", backend="rocm", index=0, torch_index=0, model="MI300X", detail={"capability": "9.4"}
)
DEVICES = (AMPERE, HOPPER, MI300X)


OPERATORS = {"copy_": "copy_", "contiguous": "contiguous", "__int__": "_local_scalar_dense"}
"""Method of a tensor → the operator that it calls."""


def stand_in(monkeypatch, torch):
    """Let `torch.cuda` answer as on a machine with one device, which computes nothing."""
    tensors._index_now.cache_clear()
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda index: SimpleNamespace(uuid=UUID),
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


@contextlib.contextmanager
def fake(torch):
    """Operations in this block run on fake tensors; tensors of the host become fake when they meet one."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    class Indexing(TorchFunctionMode):
        """Some methods as operators: the methods need a device guard, which a build without CUDA lacks."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function.__name__ == "__getitem__":
                return subscript(torch, *args)
            if function.__name__ == "__setitem__":
                tensor, index, value = args
                part = subscript(torch, tensor, index)
                return torch.ops.aten.copy_(part, value) if isinstance(value, torch.Tensor) else part.fill_(value)
            if function.__name__ in OPERATORS:
                return getattr(torch.ops.aten, OPERATORS[function.__name__])(*args)
            if function.__name__ == "_scaled_mm" and (kwargs or {}).get("out") is not None:
                # torch has no fake kernel for it with `out`, which must have the format that is asked for.
                made, out = function(*args, **{k: v for k, v in kwargs.items() if k != "out"}), kwargs["out"]
                assert (made.shape, made.dtype, made.stride()) == (out.shape, out.dtype, out.stride())
                return out
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Indexing():
        yield


def subscript(torch, tensor, index):
    """Return `tensor[index]` for integers, slices, None, Ellipsis, and tensors of integers or truth values."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i if i is Ellipsis else None for i in index]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        missing = tensor.dim() - sum(1 for i in index if i is not None and i is not Ellipsis)
        index = (*index[:at], *(slice(None),) * missing, *index[at + 1 :])
    dim, found = 0, []
    for i in index:
        if i is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(i, slice):
            tensor, dim = torch.ops.aten.slice(tensor, dim, i.start, i.stop, i.step or 1), dim + 1
        elif isinstance(i, int):
            tensor = torch.ops.aten.select(tensor, dim, i)
        else:
            found += [None] * (dim - len(found)) + [torch.as_tensor(i)]
            dim += 1
    return torch.ops.aten.index(tensor, found) if found else tensor


def attention_rules(torch, chosen):
    """Return a `scaled_dot_product_attention` that refuses what CUDA's kernels refuse, in CUDA's words.

    The rules are those of torch's sdp_utils.cpp for dense tensors; `chosen` names the kernel that is enabled.
    """
    real = torch.nn.functional.scaled_dot_product_attention
    half = (torch.float16, torch.bfloat16)

    def reasons(query, key, mask, causal):
        yield "Memory efficient kernel", (
            "Memory Efficient attention has been runtime disabled." if chosen() != "EFFICIENT_ATTENTION"
            else "Expected query, key and value to all be of dtype: {Half, Float, BFloat16}."
            if query.dtype == torch.float64 else ""
        )  # fmt: skip
        yield "Flash attention kernel", (
            "Flash attention has been runtime disabled." if chosen() != "FLASH_ATTENTION"
            else "Flash Attention does not support non-null attn_mask." if mask is not None
            else "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k."
            if causal and query.shape[-2] != key.shape[-2]
            else "Expected query, key and value to all be of dtype: {Half, BFloat16}." if query.dtype not in half
            else ""
        )  # fmt: skip
        yield "cuDNN attention kernel", (
            "cuDNN attention has been runtime disabled." if chosen() != "CUDNN_ATTENTION"
            else "cuDNN SDPA is not deterministic." if torch.are_deterministic_algorithms_enabled()
            else "Expected query, key and value to all be of dtype: {Half, BFloat16}." if query.dtype not in half
            else ""
        )  # fmt: skip

    def function(query, key, value, attn_mask=None, is_causal=False, **options):
        said = dict(reasons(query, key, attn_mask, is_causal))
        if chosen() not in ("", "MATH") and all(said.values()):
            for kernel, reason in said.items():
                warnings.warn(f"{kernel} not used because: (Triggered internally at sdp_utils.cpp:1.)", stacklevel=2)
                warnings.warn(f"{reason} (Triggered internally at sdp_utils.cpp:2.)", stacklevel=2)
            raise RuntimeError("No available kernel. Aborting execution.")
        return real(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    return function
