"""Finds the protocol's descriptor and writes rubbish to it."""

import inspect
import os
import sys
import time

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="garbles_protocol", summary="Breaks the protocol", numeric=False)


def run(ctx):
    fd = int(sys.argv[sys.argv.index("--fd") + 1])
    nonce = sys.argv[sys.argv.index("--nonce") + 1].encode() + b" "
    block = {
        "text": b"\nsegmentation violets\n",
        "json": b"\n" + nonce + b"{]\n",
        "list": b"\n" + nonce + b"[1]\n",
        "deep": b"\n" + nonce + b"[" * 100_000 + b"\n",
        "fact": b"\n" + nonce + b'{"kind":"fact","id":"ID","type":"Recording","value":{"case":7}}\n',
        "line": b"x" * (1 << 20),
    }[ctx.settings["how"]]
    block = block.replace(b"ID", inspect.getclosurevars(ctx.progress).nonlocals["run"].encode())
    for _ in range(40 if ctx.settings["how"] == "line" else 1):
        left = memoryview(block)
        while left:
            left = left[os.write(fd, left) :]
    time.sleep(600)
    yield
