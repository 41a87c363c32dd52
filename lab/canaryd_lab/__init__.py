"""The engineer's bench of canaryd: what runs beside it, not on every node."""

__version__ = "0.1.0"
