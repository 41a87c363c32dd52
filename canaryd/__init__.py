"""canaryd: a hardware health daemon with inference canaries."""

__version__ = "0.1.0"
