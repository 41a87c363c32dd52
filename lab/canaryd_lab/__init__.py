"""The engineer's tools of canaryd: commands that run occasionally, on one machine and not on every node."""

__version__ = "0.1.0"
