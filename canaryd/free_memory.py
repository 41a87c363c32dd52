"""Measure how much of the host's memory is available now."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

NODES = Path("/sys/devices/system/node")
"""Where the kernel shows the memory of each NUMA node (Documentation/ABI/stable/sysfs-devices-node)."""


def available(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc"), nodes: Path = NODES) -> int | None:
    """Return the bytes of memory that this process and its children can still take, or None if that is not known.

    This is the smallest of the kernel's estimate for the host (proc_meminfo(5), MemAvailable) and the free room in each
    control group above this process (cgroup v2: memory.max less memory.current; inactive files in it count as free).
    """
    host = of_host(proc / "meminfo", nodes)
    found = [] if host is None else [host]
    for group in _groups(root, proc):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no limit there: "max", or no such file
            limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
            stat = (group / "memory.stat").read_text(encoding="ascii")
            cached = int(re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)[1])  # type: ignore[index]
            found.append(max(0, limit - used + cached))
    return min(found, default=None)


def of_host(meminfo: Path = Path("/proc/meminfo"), nodes: Path = NODES) -> int | None:
    """Return the bytes that the kernel can give without swapping, or None if the kernel does not report them.

    A NUMA node without processors does not count: on GH200 and GB200 it is the memory of a GPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        text = meminfo.read_text(encoding="ascii")
        free = int(re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)[1]) << 10  # type: ignore[index]
        return max(0, free - sum(map(_of_node, nodes.glob("node*"))))
    return None


def _of_node(node: Path) -> int:
    """Return the bytes of a node without processors that are free or hold files; 0 for any other node."""
    with contextlib.suppress(OSError):
        if not (node / "cpulist").read_text(encoding="ascii").strip():
            text = (node / "meminfo").read_text(encoding="ascii")
            return sum(int(kib) << 10 for kib in re.findall(r" (?:MemFree|FilePages):\s+(\d+) kB$", text, re.MULTILINE))
    return 0


def _groups(root: Path, proc: Path) -> list[Path]:
    """Return the directories of this process's control group and of all groups above it."""
    try:
        text = (proc / "self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return []
    own = next((line[3:] for line in text.splitlines() if line.startswith("0::/")), None)
    if own is None:
        return []
    group = root / own.lstrip("/")
    return [each for each in (group, *group.parents) if each == root or root in each.parents]
