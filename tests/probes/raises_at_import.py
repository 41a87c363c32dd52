"""Cannot be imported."""

raise ImportError("no module named unobtainium")
