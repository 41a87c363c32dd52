"""What canaryd promises of every story: who is accused, when and of what, without a rule's name or a word.

`python -m tests.contract` plays the stories and prints where they differ from the files here; with `--write` it
writes them. A line that changes is argued in the commit that changes it.
"""
