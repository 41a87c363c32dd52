"""Triage: every kind of wrong answer is recognised, and healthy texts of many kinds are not."""

# ruff: noqa: E501, RUF001  # texts in other scripts are the point, and a wide character counts twice
from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import string
import sys
import time

import pytest

from canaryd.cli.main import parser
from canaryd.facts import Recording
from canaryd.judge.recordings.triage import CAUSES, SYMPTOMS, kind_of_wrong
from tests.command import ROOT, soon

REEF = (
    "The reef lies two miles off the coast, and at low tide its ridge stands above the water like the back of a "
    "sleeping animal. Fishermen know it by the colour of the sea: where the green turns to white, the rock is near. "
    "In the summer of that year the harbour master had three new marks set upon it, and nobody ran aground again "
    "until the great storm, which took the marks, the harbour wall and the master's own boat in a single night."
)
LANGUAGES = {
    "german": "Das Riff liegt zwei Meilen vor der Küste. Bei Ebbe ragt sein Rücken aus dem Wasser, und wer die Farbe der "
    "See kennt, der weiß, wo der Fels beginnt. Im Sommer setzte der Hafenmeister drei neue Zeichen, und bis zum großen "
    "Sturm lief kein Schiff mehr auf Grund.",
    "french": "Le récif se trouve à deux milles de la côte. À marée basse, sa crête sort de l'eau, et celui qui connaît "
    "la couleur de la mer sait où commence la roche. Cet été-là, le maître du port fit poser trois nouvelles balises.",
    "spanish": "El arrecife está a dos millas de la costa. Con la marea baja, su cresta asoma sobre el agua, y quien "
    "conoce el color del mar sabe dónde empieza la roca. Aquel verano se pusieron tres señales nuevas.",
    "russian": "Риф лежит в двух милях от берега. Во время отлива его гребень поднимается над водой, и тот, кто знает цвет "
    "моря, знает и то, где начинается скала. Тем летом начальник порта поставил три новых знака.",
    "chinese": "礁石离海岸两海里。退潮的时候，它的脊背露出水面，熟悉海水颜色的渔民都知道岩石从哪里开始。那年夏天，港务长在上面立了三个新的标志，"
    "直到那场大风暴，再也没有船在那里搁浅。可以使用Python的json模块把这些记录保存下来。",
    "japanese": "その岩礁は海岸から二マイルのところにある。引き潮になると背が水の上に出て、海の色を知る漁師は岩がどこから始まるかを知っている。"
    "その年の夏、港長は新しい標識を三つ立てた。それからは大きな嵐まで座礁する船はなかった。",
    "korean": "암초는 해안에서 2마일 떨어져 있다. 썰물이 되면 등이 물 위로 드러나고, 바다의 색을 아는 어부들은 바위가 어디서 시작되는지 안다. "
    "그해 여름 항만장은 새 표지를 세 개 세웠다.",
    "arabic": "تقع الشعاب على بعد ميلين من الساحل. عند الجزر يظهر ظهرها فوق الماء، ومن يعرف لون البحر يعرف أين تبدأ الصخور. "
    "في ذلك الصيف وضع مدير الميناء ثلاث علامات جديدة.",
    "hebrew": "השונית נמצאת שני מיילים מהחוף. בשפל גבה עולה מעל המים, ומי שמכיר את צבע הים יודע היכן מתחיל הסלע.",
    "greek": "Ο ύφαλος βρίσκεται δύο μίλια από την ακτή. Με την άμπωτη η ράχη του βγαίνει πάνω από το νερό, και όποιος "
    "ξέρει το χρώμα της θάλασσας ξέρει πού αρχίζει ο βράχος.",
    "hindi": "चट्टान तट से दो मील दूर है। भाटे के समय उसकी पीठ पानी के ऊपर आ जाती है, और जो समुद्र का रंग जानता है वह जानता है कि पत्थर कहाँ से शुरू होता है।",
    "thai": "แนวปะการังอยู่ห่างจากชายฝั่งสองไมล์ เมื่อน้ำลง สันของมันจะโผล่พ้นน้ำ ชาวประมงที่รู้จักสีของทะเลจะรู้ว่าหินเริ่มต้นตรงไหน",
    "polish": "Rafa leży dwie mile od brzegu. Podczas odpływu jej grzbiet wystaje nad wodę, a kto zna barwę morza, ten wie, "
    "gdzie zaczyna się skała. Tamtego lata postawiono trzy nowe znaki.",
    "names": "English, Deutsch, Français, Русский, 中文, 日本語, 한국어, العربية, עברית, Ελληνικά, हिन्दी, ไทย",
    "physics": "The change Δx of a length of 5 μm is found from λ/2π, so that Δx·Δp ≥ ħ/2 for every state ψ, and ∑ᵢ xᵢ² ≤ 1.",
}
LISTS = {
    "numbers": "\n".join(f"{i}. {i * i}" for i in range(1, 60)),
    "capitals": "Paris, London, Rome, Madrid, Berlin, Vienna, Lisbon, Dublin, Oslo, Athens, Warsaw, Prague, Budapest, Sofia, "
    "Bucharest, Helsinki, Stockholm, Copenhagen, Riga, Vilnius, Tallinn, Zagreb, Ljubljana, Bratislava, Bern, Brussels, "
    "Luxembourg, Valletta, Nicosia, Amsterdam, Reykjavik, Belgrade, Skopje, Tirana, Sarajevo, Podgorica, Minsk, Kyiv",
    "table": "\n".join(f"| row {i} | {i / 7:.3f} | {'yes' if i % 3 else 'no'} |" for i in range(25)),
    "song": "Row the boat, row the boat, out to the reef,\nThe tide is long and the night is brief.\n"
    "Row the boat, row the boat, home to the quay,\nWhat the land has forgotten is kept by the sea.\n" * 2,
    "code": "for i in range(3):\n    print(i)\n",
    "short": "Yes.",
    "exclaimed": "Hurrah!!! It works!!!",
    "markup": "<ul>\n"
    + "\n".join(f'  <li class="item"><a href="/p/{w}">{w}</a></li>' for w in string.ascii_lowercase)
    + "\n</ul>",
    "hex": "\n".join(f"{i:08x}  {i * 2654435761 % 2**32:08x} {i * 40503 % 2**32:08x}" for i in range(24)),
}
MODULES = [
    "argparse",
    "ast",
    "asyncio",
    "bisect",
    "calendar",
    "cmd",
    "codecs",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "doctest",
    "email",
    "enum",
    "fileinput",
    "fractions",
    "functools",
    "gettext",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "http",
    "imaplib",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "logging",
    "lzma",
    "mailbox",
    "math",
    "mimetypes",
    "operator",
    "optparse",
    "os",
    "pathlib",
    "pdb",
    "pickle",
    "pickletools",
    "platform",
    "plistlib",
    "pprint",
    "pstats",
    "queue",
    "random",
    "re",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "smtplib",
    "socket",
    "sqlite3",
    "ssl",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "traceback",
    "types",
    "unittest",
    "urllib.parse",
    "uuid",
    "wave",
    "weakref",
    "xml.dom",
    "zipfile",
    "zoneinfo",
]


def poem() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        this = importlib.import_module("this")
    return codecs.decode(this.s, "rot13")


@functools.cache
def healthy() -> dict[str, str]:
    """Return texts that nobody would call wrong, at most 4,096 characters each, as a recording holds them."""
    texts = {**LANGUAGES, **LISTS, "reef": REEF, "poem": poem()}
    for name in MODULES:
        loaded = importlib.import_module(name)
        texts[f"{name}: documentation"] = inspect.getdoc(loaded) or ""
        if getattr(loaded, "__file__", "").endswith(".py"):
            source = inspect.getsource(loaded)
            texts |= {f"{name}: head": source[:1500], f"{name}: middle": source[len(source) // 2 :][:700]}
        for key, value in itertools.islice(vars(loaded).items(), 400):
            text = inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else ""
            if text and len(text) > 400:
                texts[f"{name}.{key}"] = text
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        paragraphs = path.read_text()
        if path.stem != "triage":  # it shows what the rules look for
            pieces = {f"{path.name}: {i}": paragraphs[i : i + 1200] for i in range(0, len(paragraphs), 6000)}
            texts |= {name: piece for name, piece in pieces.items() if "<|" not in piece}
    config = {"stdlib": sorted(sys.stdlib_module_names)[:60], "sizes": {m: i * 3.5 for i, m in enumerate(MODULES)}}
    texts |= {"json": json.dumps(config), "json indented": json.dumps(config, indent=2)}
    texts |= {"records": json.dumps([{"name": m, "line": i, "ok": i % 2 == 0} for i, m in enumerate(MODULES)])}
    return {name: text[:4096] for name, text in texts.items() if text.strip()}


def answer(text: str, case="completions/reef/fresh", **more) -> Recording:
    return Recording(case=case, digest=f"{hash(text) & (2**64 - 1):016x}", text=text, **more)


def tokens(*values: float | None, **more) -> Recording:
    names = tuple(str(i) for i in range(100, 100 + len(values)))
    return answer(more.pop("text", REEF), tokens=more.pop("tokens", names), values=values, **more)


KNOWN = answer(REEF)
SURE = tokens(*[-0.4] * 32, margins=(2.0,) * 32)


def name_of(now: Recording, *known: Recording) -> str:
    found = kind_of_wrong(now, known)
    return found.name if found else ""


# --- Healthy texts ---------------------------------------------------------------------------------------------------


def test_healthy_texts_are_many_and_of_many_kinds():
    """The measurement of false positives means something."""
    assert len(healthy()) >= 400
    assert {"chinese", "json", "markup", "poem", "numbers", "argparse: head", "argparse: documentation"} <= set(
        healthy()
    )


def test_no_healthy_text_is_called_wrong():
    """Of itself, without a known answer."""
    assert {name: found.evidence for name, text in healthy().items() if (found := kind_of_wrong(answer(text)))} == {}


def test_a_healthy_text_that_differs_shows_no_symptom():
    """Each against its neighbour, and the second half of each against its first: another answer, but no gibberish."""
    texts = list(healthy().items())
    wrong = {}
    for (name, text), (_, other) in itertools.pairwise(texts):
        half = len(text) // 2
        halves = [(text[half:], text[:half])] if half > 20 else []
        for now, known in ((text, other), *halves):
            found = kind_of_wrong(answer(now), [answer(known)])
            if found:
                wrong[name] = (found.name, found.evidence)
    assert wrong == {}


def test_a_known_answer_is_no_symptom():
    """Whatever it looks like: a tiny model babbles when it is healthy."""
    for text in (REEF, "!x " * 40, "\ufffd" * 50, "<|im_start|>", "the the the the " * 20, ""):
        assert kind_of_wrong(answer(text), [answer(text)]) is None
    assert name_of(answer("!x " * 41), answer("!x " * 40)) == ""


# --- Each rule, from both sides --------------------------------------------------------------------------------------

ENDLESS = "The reef lies off the coast. " + "It is the reef of the coast. " * 9


@pytest.mark.parametrize(
    ("name", "now", "known"),
    [
        ("non-finite logits", tokens(-0.1, float("nan"), -0.2), ()),
        ("non-finite logits", tokens(-0.1, float("-inf")), ()),
        ("non-finite logits", tokens(*[-9999.0] * 4), ()),
        ("non-finite logits", tokens(-0.1, -0.2, None, None), ()),
        ("non-finite logits", tokens(None, None), [SURE]),
        ("non-finite logits", answer("The reef lies" + "!" * 40), ()),
        ("non-finite logits", answer("The reef", tokens=("17", "4", *["0"] * 8)), ()),
        ("nothing generated", answer(""), ()),
        ("nothing generated", answer(" \n\n"), [KNOWN]),
        ("nothing generated", answer("The reef lies.", finish="stop"), [KNOWN]),
        ("meta text", answer("The reef.<|im_end|>\n<|im_start|>user\nAnd then?"), ()),
        ("meta text", answer("The reef lies two miles off.\nassistant\nThe reef lies"), ()),
        ("meta text", answer("Okay, the user wants me to go on with a story about a reef."), [KNOWN]),
        ("meta text", answer("You are a helpful assistant. The reef lies"), ()),
        ("meta text", answer("The reef lies [/INST] two miles off the coast"), ()),
        ("meta text", answer("{%- for message in messages %}{{ message }}"), ()),
        ("repetition loop", answer(ENDLESS), ()),
        ("repetition loop", answer("The reef lies " + "the " * 40), ()),
        ("repetition loop", answer("那年夏天，" + "礁石离海岸两海里。" * 8), ()),
        ("gibberish", answer("The re\ufffd\ufffd lies \ufffd off \ufffd\ufffd coast"), ()),
        ("gibberish", answer("The \x00reef\x01 \x02lies \ue000 two"), ()),
    ],
)
def test_each_kind_of_wrong_answer_is_recognised(name, now, known):
    """By texts of the kinds that field reports tell of."""
    assert name_of(now, *known) == name


@pytest.mark.parametrize(
    ("now", "known"),
    [
        (tokens(None, -0.1, -0.2), ()),  # the first position has no past
        (tokens(None, None, text=REEF), ()),  # a server without log probabilities
        (tokens(-0.1, -30.0), ()),
        (answer("Help" + "!" * 7), ()),
        (answer("The reef", tokens=("17", *["0"] * 7)), ()),
        (answer("", tokens=("5", "6")), ()),  # a canary without a tokenizer
        (answer("", values=(-0.5, -0.25)), ()),
        (answer(REEF[: len(REEF) // 3], finish="stop"), ()),
        (answer("The tag <s> and the word assistant mean nothing, and a prompt is a prompt."), ()),
        (answer("The reef lies off the coast. " + "Row, row. " * 4), ()),
        (answer("Report\n" + REEF + "\n" + "=" * 60), ()),
        (answer("A sign that was cut in two at the end of the answer: \ufffd"), ()),
    ],
)
def test_on_the_other_side_of_each_threshold_nothing_is_said(now, known):
    """What only resembles a symptom is none."""
    assert kind_of_wrong(now, known) is None


def test_a_shorter_coherent_answer_is_not_an_immediate_end():
    """It stopped by itself at a third of the known length."""
    assert name_of(answer(REEF[: len(REEF) // 3], finish="stop"), KNOWN) == ""
    assert name_of(answer(REEF[: len(REEF) // 5], finish="length"), KNOWN) == ""


@pytest.mark.parametrize("text", ["a" * 4095 + "b", "ab" * 2047 + "c", "!" * 4095 + "b"])
def test_a_long_answer_takes_no_time(text):
    """Nothing is tried at every place of a text."""
    begun = time.monotonic()
    assert kind_of_wrong(answer(text)) is None
    assert time.monotonic() - begun < soon(1.0)


# --- Causes ----------------------------------------------------------------------------------------------------------

UNCHANGED = {"checkpoint": "c0", "dtype": "d0", "tokenizer": "a0", "prompt": "p0", "settings": "s0", "server": "v0"}


@pytest.mark.parametrize(
    ("link", "named"),
    [
        ("", set()),
        ("checkpoint", {"checkpoint"}),
        ("dtype", {"dtype"}),
        ("prompt", {"tokenizer", "template"}),
        ("settings", {"settings"}),
        ("server", {"settings"}),
    ],
)
def test_a_link_that_is_known_to_be_equal_is_not_named(link, named):
    """Of a link that nobody knows nothing is known; the prompt's ids tell of tokenizer and template too."""
    chain = {k: v for k, v in UNCHANGED.items() if k != link}
    known = answer(REEF, case="chat/reef/fresh", chain=chain)
    texts = ({"text": ""}, {"text": "na " * 90}, {"text": "\ufffd" * 9}, {"text": REEF, "values": (math.nan,)})
    broken = [answer(case=known.case, chain=chain, **text) for text in texts]
    found = [kind_of_wrong(now, [known]) for now in broken]
    told = {key for key, cause in CAUSES.items() for kind in found if kind and cause in kind.causes}
    assert {key for key in told if CAUSES[key].links} == named
    assert {"server", "device"} <= told


@pytest.mark.parametrize(("case", "named"), [("completions/reef/fresh", False), ("chat/reef", True)])
def test_a_template_is_not_named_where_none_is_used(case, named):
    """A continuation is made from the prompt as it stands."""
    assert (CAUSES["template"] in kind_of_wrong(answer("", case=case), [answer(REEF, case=case)]).causes) is named


@pytest.mark.parametrize("key", CAUSES)
def test_every_command_that_is_named_can_be_typed(key):
    """The command line takes it as it stands."""
    words = CAUSES[key].command.format(device="cuda:0").split()
    assert words[0] == "canaryd"
    assert parser().parse_args(words[1:]).command in ("capture", "check")


def test_the_document_tells_every_symptom():
    """docs/baselines.md names each, with causes that are known."""
    document = (ROOT / "docs" / "baselines.md").read_text()
    for symptom in SYMPTOMS:
        assert f"| {symptom.name} |" in document
        assert {*symptom.causes} <= set(CAUSES)
