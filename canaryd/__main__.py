"""`python -m canaryd` is `canaryd`."""

import sys

from canaryd.cli import main

sys.exit(main())
