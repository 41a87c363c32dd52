"""`canaryd` and `python -m canaryd`; an internal error exits with unknown, never with the status of a verdict."""

import sys
import traceback

UNKNOWN = 3
"""Exit status of an internal error. Python's own status for an uncaught exception is 1, which means degraded here."""


def main() -> int:
    """Run the command line; an internal error exits with unknown and prints its traceback."""
    try:
        from canaryd.cli.main import main as command  # noqa: PLC0415  a broken installation must not exit with 1 either

        return command()
    except Exception:  # noqa: BLE001  the last resort of the process
        traceback.print_exc()
        print(
            "canaryd: internal error in canaryd or its installation; the state of this machine is unknown",
            file=sys.stderr,
        )
        return UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
