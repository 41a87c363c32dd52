"""The file of prompts: what canaryd brings, and one line for every mistake in another's."""

from __future__ import annotations

import json

import pytest

from canaryd.probe import Skip
from canaryd.worker.endpoint.prompts import FEWEST, LONGEST, Prompt, load
from tests.worker.endpoint.served import PROBE

TEXT = "What the diver saw on the way down to the reef, told step by step, in plain words."


def write(tmp_path, content):
    path = tmp_path / "prompts.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def problems(tmp_path, content) -> list[str]:
    path = write(tmp_path, content)
    with pytest.raises(Skip) as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_the_shipped_prompts_fill_prefill_and_decode_kernels():
    """At least two, ASCII, one of some hundreds of tokens, 32 tokens to decode or more, no two beginning alike."""
    prompts = load(PROBE.parent / "endpoint" / "prompts.json")
    assert len(prompts) >= 2
    assert all(prompt.text.isascii() and prompt.tokens >= FEWEST for prompt in prompts)
    assert min(len(prompt.text.split()) for prompt in prompts) > 16
    assert max(len(prompt.text.split()) for prompt in prompts) > 150
    assert len({prompt.text[:4] for prompt in prompts}) == len(prompts)


def test_a_file_of_ones_own_is_read(tmp_path):
    """Tokens have a default, and a text may be in any language."""
    text = "钢琴的第四章与海" * 12
    path = write(tmp_path, {"prompts": [{"name": "a", "text": TEXT, "tokens": 32}, {"name": "b", "text": text}]})
    assert load(path) == (Prompt(name="a", text=TEXT, tokens=32), Prompt(name="b", text=text, tokens=64))


def test_every_mistake_of_a_file_is_told_at_once(tmp_path):
    """Each with its entry, its field, and what is wanted there."""
    entries = [
        {"name": "Reef 1", "text": TEXT},
        {"name": "a", "text": "short", "tokens": 31},
        {"name": "b", "text": 7, "tokens": True, "temperature": 1},
        {"name": "b", "text": TEXT + "\x00"},
        "reef",
        {"text": "x" * (LONGEST + 1), "tokens": "many"},
    ]
    assert problems(tmp_path, {"prompts": entries}) == [
        "prompts[0].name: wanted 1 to 32 of a-z, 0-9, _ and -, a letter first",
        "prompts[1].text: wanted 64 to 20,000 characters of plain text",
        "prompts[1].tokens: wanted a whole number from 32 to 1024",
        "prompts[2].temperature: unknown, wanted name, text and tokens only",
        "prompts[2].text: wanted 64 to 20,000 characters of plain text",
        "prompts[2].tokens: wanted a whole number from 32 to 1024",
        "prompts[3].text: wanted 64 to 20,000 characters of plain text",
        "prompts[4]: got str, wanted an object with name, text and tokens",
        "prompts[5].name: wanted 1 to 32 of a-z, 0-9, _ and -, a letter first",
        "prompts[5].text: wanted 64 to 20,000 characters of plain text",
        "prompts[5].tokens: wanted a whole number from 32 to 1024",
        "the name 'b' is given 2 times, wanted once",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1"),
        (b"prompts:\n- name: reef\n", "not JSON"),
        (b'{"prompts": [', "not JSON"),
        (b"\xff\xfe{", "not JSON: 'utf-8' codec"),
        (b"[" * 200_000, "not JSON: maximum recursion"),
        ([], "wanted an object with one list"),
        ({"prompts": {}}, "wanted an object with one list"),
        ({"prompts": [], "more": 1}, "wanted an object with one list"),
        ({"prompts": []}, "0 prompts, wanted 1 to 32"),
        ({"prompts": [{}] * 33}, "33 prompts, wanted 1 to 32"),
        (b" " * ((1 << 20) + 1), "1048577 bytes, wanted at most 1 MiB"),
    ],
)
def test_what_is_no_file_of_prompts_is_one_line(tmp_path, content, said):
    """It says what was found and what is wanted."""
    (line,) = problems(tmp_path, content)
    assert said in line


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    """Not there, or a directory."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(Skip) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
