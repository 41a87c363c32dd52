"""`canaryd` and `python -m canaryd`: whatever goes wrong inside, the exit status stays one that means what it says."""

import sys
import traceback

UNKNOWN = 3
"""Python's own status for an uncaught exception is 1, which here would mean "degraded"."""


def main() -> int:
    """Run the command line; a defect of ours ends as unknown, with its traceback for the report."""
    try:
        from canaryd.cli.main import main as command  # noqa: PLC0415  a broken installation must not exit with 1 either

        return command()
    except Exception:  # noqa: BLE001  the last resort of the process
        traceback.print_exc()
        print("canaryd: this is a defect of canaryd or of its installation; nothing is known", file=sys.stderr)
        return UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
