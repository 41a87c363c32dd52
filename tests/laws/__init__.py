"""The laws of judgement (docs/judgement.md), held as properties: what must not change when a story is told otherwise.

`python -m tests.laws [STORY ...]` prints what breaks them.
"""
