"""Calls sys.exit where it is imported."""

import sys

sys.exit("not today")
