"""Commands of the lab.

A new command is a module here, an entry point in lab/pyproject.toml, and a name in `LAB` of canaryd/cli/main.py.
"""
