"""One fault in every report: the same facts in one short paragraph, and a machine of eight on one screen."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from dataclasses import replace

import pytest

from canaryd.config.settings import Config
from canaryd.engine.check import Result
from canaryd.facts import Place
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import find_cause
from canaryd.model import (
    Cause,
    Confirmation,
    Finding,
    Ground,
    Part,
    PlaceTally,
    Rival,
    Shown,
    State,
    Suspect,
    Tally,
    Whose,
)
from canaryd.report import check, history, status, status_page
from canaryd.report.incidents import INDENT, describe, incidents_json, state_lines, step
from canaryd.report.status_text import as_json as status_json
from canaryd.report.status_text import as_text as status_text
from canaryd.report.terminal import type_with
from canaryd.store.store import Store
from tests.command import canaryd, configure, in_turn
from tests.mixed_machine import GPU, NOW, H, S, U, fault, mixed_machine, rivals, tally, verdict
from tests.pages import Page
from tests.programs import measured
from tests.story.catalogue import MEMORY
from tests.story.format import STORIES, Fault, load
from tests.story.playing import play


def lines(found, device=GPU, width=79, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width + 1))
        return [text for _, text in state_lines(device, found, verbose=False, **options)]


# --- The sentences ---------------------------------------------------------------------------------------------------


def test_a_confirmed_fault_is_one_paragraph():
    """What, how much, where, which bits, confirmed how, the cause with its rivals, what to do now, and then."""
    found = lines(verdict(fault()))
    assert found == [
        f"FAULTY   cuda:3  NVIDIA H100 80GB HBM3  since {found[0][-16:]}",
        "         Wrong results in exact_attention and exact_matmul: 27 of 4,293, always",
        "         SM 37, bit 11 of bfloat16. 6 of 6 retests failed. Cause: hardware, not",
        "         the software, reference or host: 7 identical devices compute it right.",
        "Do now:  Take cuda:3 out of service, then open a vendor case:",
        "         canaryd report cuda:3 -o ./case",
        "         Send the file that it names to the vendor.",
    ]


def test_what_several_devices_share_is_told_once(store):
    """The first line, the page and JSON say that no single device is at fault, and what the remedy takes."""
    shared_by, reach = ("cuda:0", "cuda:1"), ("cpu:0", *(f"cuda:{n}" for n in range(8)))
    found = Finding(
        rule="gpu-lost", state=State.SUSPECT, cause=U, message="It was lost.", action="Restart the machine."
    )
    parts = Part.SUPPLY, Part.RISER
    found = replace(found, subject=Whose.SHARED, parts=parts, shared_by=shared_by, reach=reach)
    for number, name in enumerate(shared_by):
        device = replace(GPU, uuid=name, index=number)
        store.see_device(device, NOW)
        store.set_verdict(replace(verdict(found), device=name, decided=NOW))
    told = status.gather(store, Config(), NOW)
    text = " ".join(status_text(told).split())
    assert text.startswith(
        "NO, do not trust this node's numbers: cuda:0 and cuda:1 are suspect (cause unknown): It was lost; this points"
        " to what cuda:0 and cuda:1 share, not to one device Do now: "
    )
    whole = (
        "It was lost. This points to what cuda:0 and cuda:1 share (power supply or riser), not to one device."
        " The remedy reaches cpu:0 and cuda:0 to cuda:7."
    )
    assert text.count(whole) == 1
    assert whole in status_page.render(told).decode()
    (incident,) = status_json(told)["devices"][0]["incidents"]
    assert (incident["subject"], incident["parts"]) == ("shared part", ["power supply", "riser"])
    assert (incident["shared_by"], incident["reach"]) == ([*shared_by], [*reach])


def test_a_reason_that_was_cut_gets_no_full_stop():
    """Its mark ends the sentence."""
    found = verdict(Finding(rule="x", state=State.UNKNOWN, cause=U, message="It was skipped: too…"))
    assert lines(found)[-1].endswith("It was skipped: too…")


def test_a_command_at_the_end_of_an_action_stands_on_its_own_line():
    """Whole, however long: people copy it."""
    found = verdict(Finding(rule="x", state=State.UNKNOWN, cause=U, message="Bad", action="Try: canaryd check --x y"))
    assert lines(found, width=20)[-2:] == ["Do now:  Try:", "         canaryd check --x y"]
    assert incidents_json(found, GPU)[0]["command"] == "canaryd check --x y"


@pytest.mark.parametrize(("seconds", "typed"), [(0.0, ""), (90.0, "90s"), (420.0, "7m"), (39_600.0, "11h")])
def test_a_rare_fault_is_repeated_elsewhere_for_long_enough(seconds, typed):
    """A sound part is not accused because the other was right by chance."""
    found = fault(cause=U, rivals=())
    there = replace(found.wrong.elsewhere, seconds=seconds)
    told = replace(found, wrong=replace(found.wrong, elsewhere=there))
    (command,) = (line for line in lines(verdict(told)) if "check --device" in line)
    assert command.endswith(f" --level quick{typed and f' --for {typed}'}")


@pytest.mark.parametrize("width", [79, 110])
@pytest.mark.parametrize(
    "finding",
    [
        fault(),
        fault(cause=U, rivals=()),
        fault(
            cause=S,
            rivals=(Rival(cause=H, why="x", rejected=True, what=Suspect.DEVICE, shown=Shown.ALIKE, by=("cuda:1",)),),
        ),
        fault(
            *(State.SUSPECT, U),
            rivals=(Rival(cause=H, why="x", rejected=True, what=Suspect.HOST, shown=Shown.PASSED),),
            to_come=2,
        ),
        fault(probes=("exact_attention", "exact_canary", "exact_integer", "exact_matmul", "recorded_kernels")),
    ],
    ids=["hardware", "undetermined", "software", "suspect", "five probes"],
)
def test_a_paragraph_has_at_most_six_lines(finding, width):
    """At 80 and at 120 columns, one more to say where to find the cause, and what follows for the vendor after it.

    Only a command is longer than a line.
    """
    body = lines(verdict(finding), width=width)
    vendor = {H: 1, U: 3}.get(finding.cause, 0) if finding.state is State.FAULTY else 0
    assert len(body) <= 6 + (finding.cause is U) + vendor, body
    assert all(len(line) <= width or line.lstrip().startswith("canaryd ") for line in body)


def test_a_device_that_never_failed_is_said_to_have_never_failed():
    """Not that it fails less often: the sibling of a GPU that errs once in a million, and how often it was right."""
    found = incidents(play(load(STORIES / "one-in-a-million.yaml")).verdicts["gpu0"][-1])
    assert "not the software or host: cuda:1 never failed in 15,600,000 results." in describe(found[0])


@pytest.mark.slow
def test_a_sibling_that_was_wrong_elsewhere_is_not_said_to_have_never_failed():
    """Its memory has a stuck cell: what its products never did does not make it one that never fails."""
    told = load(STORIES / "one-in-a-million.yaml")
    stuck = Fault(kind="exact", device="gpu1", probe=MEMORY, cell="stuck", after=136, until=137)
    played = play(replace(told, probes=(*told.probes, MEMORY), faults=(*told.faults, stuck)))
    words = describe(incidents(played.verdicts["gpu0"][-1])[0])
    assert "Cause: hardware, not the software or host: cuda:1 fails far less often." in words


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (fault(), "Cause: hardware, not the software, reference or host: 7 identical devices compute it right."),
        (fault(rivals=rivals(by=("cuda:1",))), "not the software, reference or host: cuda:1 computes it right."),
        (fault(rivals=(replace(rivals()[0], shown=Shown.RARER),)), "7 identical devices fail far less often."),
        (fault(cause=U, rivals=()), "Cause unknown: no identical device here to compare with."),
        (
            fault(cause=U, rivals=(Rival(cause=H, why="x", rejected=True, what=Suspect.HOST, shown=Shown.PASSED),)),
            "compare with. Not the host: its CPU passed the same tests.",
        ),
        (fault(State.SUSPECT, U, rivals=()), "Not confirmed: 6 of 6 retests failed."),
        (fault(probes=("a", "b", "c")), "Wrong results in 3 probes: 54 of 8,586, always SM 37, bit 11 of bfloat16."),
    ],
)  # fmt: skip
def test_what_was_rejected_is_named(finding, words):
    """Never "hardware: rejected": what it is not, and what shows that."""
    (incident,) = incidents(verdict(finding))
    assert words in describe(incident)
    assert not re.search(r"hardware: rejected|undetermined", describe(incident))


def test_a_cause_that_another_finding_knows_comes_with_its_own_reason_and_action():
    """Never "Cause: hardware. Cause unknown": the finding that leads may know of no cause."""
    lead = fault(State.SUSPECT, U, rivals=())
    facts = replace(lead.wrong, why="One program gave two results on cores 0 and 1.")
    known = replace(lead, rule="golden-disagreement", cause=H, wrong=facts, action="Do not rely on its results")
    (incident,) = incidents(verdict(replace(lead, action="To find the cause, repeat the test"), known))
    assert describe(incident).endswith(" Cause: hardware. One program gave two results on cores 0 and 1.")
    assert step(incident, GPU).text == "Do not rely on its results."


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({0: 5, 1: 5}, "on both cores"),
        ({0: 5, 1: 0}, "always core 0"),
        ({0: 5}, "on core 0"),
        ({0: 5, 1: 0, 2: 1}, "on 2 of 3 cores (0 and 2)"),
        ({n: int(n > 2) for n in range(9)}, "on 6 of 9 cores"),
    ],
)
def test_no_single_core_is_named_where_several_fail(wrong, words):
    """All places that computed are looked at, not the newest one."""
    places = tuple(PlaceTally(place=Place(unit="core", numbers=(n,)), wrong=w, of=9) for n, w in wrong.items())
    base = fault()
    facts = replace(base.wrong, probes={"exact_matmul": tally(5, 99, places=places)})
    (incident,) = incidents(verdict(replace(base, wrong=facts)))
    assert re.search(rf": 5 of 99, {re.escape(words)}, (always )?bit 11 of bfloat16\.", describe(incident)), describe(
        incident
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({0: 0, 1: 15}, ": 68 of 496, all 15 single-core ones on core 1, always bit 11 of bfloat16."),
        ({1: 15}, ": 68 of 496, always bit 11 of bfloat16."),
        ({0: 1, 1: 14}, ": 68 of 496, on both cores, always bit 11 of bfloat16."),
    ],
)
def test_a_core_is_named_for_no_result_that_all_cores_computed(wrong, words):
    """53 of the 68 ran on all threads together: nothing says on which core these went wrong."""
    places = tuple(PlaceTally(place=Place(unit="core", numbers=(n,)), wrong=w, of=99) for n, w in wrong.items())
    base = fault()
    facts = replace(base.wrong, probes={"exact_matmul": tally(68, 496, places=places)})
    (incident,) = incidents(verdict(replace(base, wrong=facts)))
    assert words in describe(incident), describe(incident)


@pytest.mark.parametrize(
    ("failed", "completed", "ground", "words"),
    [
        (3, 3, Ground.RETESTS, ", bit 11 of bfloat16. 3 of 3 retests failed."),
        (8, 15, Ground.RETESTS, "It fails in 8 of 15 retests: intermittent."),
        (1, 6, Ground.PLACE, "Confirmed: it failed twice in one place."),
        (0, 0, Ground.DAY, "Confirmed: it failed twice in one place."),
    ],
)
def test_retests_that_passed_are_explained(failed, completed, ground, words):
    """One count, and what it means that some of them passed."""
    base, again = fault(probes=("exact_matmul",)), Tally(wrong=failed, of=completed)
    confirmed = (Confirmation(ground=ground, why="it failed twice in one place"),)
    facts = replace(base.wrong, probes={"exact_matmul": tally(9, 99, retests=again)}, confirmed=confirmed)
    (incident,) = incidents(verdict(replace(base, wrong=facts)))
    assert words in describe(incident), describe(incident)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ([(3, 7), (3,)], "bits 3 and 7 of bfloat16."),
        ([(0,), tuple(range(32))], "always SM 37, bit 0 of bfloat16 in a"),
        ([tuple(range(8)), tuple(range(9))], "in 9 different bits"),
        ([(), ()], "2 of 2, always SM 37."),
    ],
)
def test_bits_are_those_of_the_probe_that_narrows_them_down(bits, words):
    """A model's answer is wrong in every bit where one product was in one."""
    base = fault()
    facts = replace(base.wrong, probes={name: tally(1, 1, bits=b) for name, b in zip("ab", bits, strict=True)})
    (incident,) = incidents(verdict(replace(base, wrong=facts)))
    assert words in describe(incident)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ([{"bfloat16": (14,)}, {"float16": (14,)}], "always SM 37, bit 14 of bfloat16 and float16."),
        ([{"bfloat16": (14,)}, {"float32": (30,)}], "always SM 37, bit 14 of bfloat16, bit 30 of float32."),
        ([{"bfloat16": (6,), "float16": (6, 9)}], "always SM 37, bit 6 of bfloat16, bits 6 and 9 of float16."),
        ([{"64 bits": (5,)}], "bit 5 of 64 bits."),
        ([{"bfloat16": (14,)}, {"not known": (14,)}], "always SM 37, bit 14."),
        ([{}], "always SM 37, bit 11."),
    ],
)
def test_a_bit_is_one_of_a_number_type(of, words):
    """Bit 14 is the largest of the exponent of bfloat16, and in the middle of float32's mantissa."""
    base, probes = fault(), {}
    for name, types in zip("ab", of, strict=False):
        bits = tuple(sorted({bit for some in types.values() for bit in some})) or (11,)
        probes[name] = replace(tally(1, 1), bits=bits, bits_by_type=types)
    (incident,) = incidents(verdict(replace(base, wrong=replace(base.wrong, probes=probes))))
    assert words in describe(incident)


@pytest.mark.parametrize("state", [State.SUSPECT, State.FAULTY])
@pytest.mark.parametrize(
    ("there", "words"),
    [
        ("cuda", "epeat the test on another node (not here) with the same model and software:"),
        ("cuda:1", "epeat the test on cuda:1, which is identical:"),
    ],
)
def test_a_command_that_names_a_backend_is_for_another_node(state, there, words):
    """Here it would test the accused device again."""
    found = fault(state, U)
    elsewhere = replace(found.wrong.elsewhere, device=there)
    found = replace(found, wrong=replace(found.wrong, elsewhere=elsewhere), action=find_cause(GPU, elsewhere))
    (incident,) = incidents(verdict(found))
    todo = step(incident, GPU)
    assert words in todo.text
    assert todo.command.startswith(f"canaryd check --device {there} ")


@pytest.mark.parametrize(("there", "options"), [("cuda", ""), ("cuda:1", " --state-dir /srv/a")])
def test_only_commands_for_this_node_name_its_record(there, options):
    """Another node has another state directory."""
    found = fault(State.FAULTY, U)
    found = replace(found, wrong=replace(found.wrong, elsewhere=replace(found.wrong.elsewhere, device=there)))
    type_with(("--state-dir", "/srv/a"), ())
    try:
        text = lines(verdict(found))
    finally:
        type_with((), ())
    assert any(line.strip().startswith(f"canaryd check{options} --device {there} ") for line in text), text
    assert f"{INDENT}canaryd report --state-dir /srv/a cuda:3 -o ./case" in text


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (U, "Wrong there too: look for a software fault first. Right there: cuda:3 is at fault; write the report for "),
        (Cause.HARDWARE, "canaryd report cuda:3 -o ./case Send the file that it names to the vendor."),
    ],
)
def test_every_report_gives_both_halves_of_the_advice(store, cause, words):
    """The check, the history, the status, its page and JSON all give it."""
    found = verdict(replace(fault(cause=cause), since=NOW - 7200))
    store.see_device(GPU, NOW)
    store.set_verdict(found)
    of_status = status.gather(store, Config(), NOW)
    result = Result(level="quick", started=NOW - 9000, devices=[GPU], verdicts={GPU.uuid: found})
    of_history = history.gather(store, Config(), GPU.uuid, NOW - 9000, NOW, {})
    texts = [check.as_text(result), history.as_text(of_history), status_text(of_status)]
    page = status_page.render(of_status).decode()
    (said,) = incidents_json(found, GPU)
    spoken = " ".join(said[key] for key in ("action", "command", "next_action", "next_command"))
    for text in (*texts, Page(page).shown, spoken):
        assert words in " ".join(text.split()), text


def test_a_drill_asks_for_nothing():
    """Nothing is to be done about an injected fault."""
    text = "\n".join(lines(verdict(fault(), drill=True)))
    assert "drill, not the device" in text
    assert "Do now" not in text


# --- One fault, every report -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A machine whose processor has one wrong bit that three probes see, checked once: (options, answers)."""
    directory = tmp_path_factory.mktemp("faulty")
    config = configure(directory, "mismatches", "mismatches:second", "mismatches:third", "passes")
    options = ("--config", config, "--state-dir", directory / "state")
    checked = canaryd("check", *options)
    assert checked.code == 2, checked.err
    return options, checked.out, directory


def counts(incident):
    """Return the numbers of an incident's JSON."""
    return {
        name: incident[name]
        for name in ("wrong", "results", "probes", "places", "bits_by_type", "confirmed", "retests")
    }


def test_one_fault_is_one_incident_with_equal_numbers_in_every_report(faulty):
    """Check, status, history, the page, and the dossier: the same counts, and no rule before it is asked for."""
    options, checked, directory = faulty
    commands = (("status", "--json"), ("history", "--json"), ("status",), ("history",))
    answers = in_turn(*((*command, *options) for command in commands))
    (first,), (of_history,) = (answer.document["devices"][0]["incidents"] for answer in answers[:2])
    with Store.open(directory / "state") as store:
        runs = [r for r in store.runs() if r.probe != "passes"]
        (record,) = store.devices()
        page = Page(status_page.render(status.gather(store, Config())).decode()).shown
    # From the runs themselves: each wrong result, of all those that these probes computed.
    assert first["wrong"] == sum(c.wrong_trials for r in runs for c in r.comparisons) == 12
    assert first["results"] == sum(r.trials for r in runs) == 24
    assert (first["state"], first["bits"], len(first["probes"])) == ("faulty", [23], 3)
    assert first["bits_by_type"] == {"32 bits": [23]}
    assert first["retests"] == {"failed": 9, "completed": 9}
    assert first["since"] == min(r.started for r in runs)

    answer = canaryd("report", record.device.name, "-o", directory / "out", *options)
    assert answer.code == 0, answer.err
    (archive,) = (directory / "out").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        files = {name.rpartition("/")[2]: name for name in packed.getnames()}
        document = json.loads(packed.extractfile(files["dossier.json"]).read())
        dossier = Page(packed.extractfile(files["dossier.html"]).read().decode()).shown
    (of_dossier,) = document["verdict"]["incidents"]
    assert counts(first) == counts(of_history) == counts(of_dossier)
    assert first["text"] == of_history["text"] == of_dossier["text"]

    texts = [checked, *(answer.out for answer in answers[2:]), page]
    for text in (*texts, dossier, document["summary"]):
        shown = " ".join(text.split())
        assert shown.count(first["text"]) >= 1, shown
        assert "12 of 24, always bit 23 of 32 bits." in shown
        assert "9 of 9 retests failed. " in shown
        assert "suspect" not in shown.partition("What happened")[0].lower()
    for text in texts[:2] + texts[3:]:
        assert "exact-mismatch" not in text


def test_a_check_begins_and_ends_with_the_verdict(faulty):
    """The paragraph of the device, one line on what was not tested, one on the verdict."""
    options, checked, _ = faulty
    found = checked.splitlines()
    assert found[0].startswith("FAULTY   cpu:0  ")
    assert found[-1].startswith("verdict: FAULTY  (exit 2, ")
    assert len([line for line in found if line.startswith("Do now:")]) == 1
    assert len(found) <= 17, checked  # on an interpreter without torch, which takes two of them
    full = canaryd("status", "-v", *options).out
    assert "- exact-mismatch-confirmed (" in full
    assert re.search(r"Runs: [0-9a-f]{12}-", full)


def test_the_next_check_counts_on_everywhere(faulty, tmp_path):
    """What is stored is renewed with every wrong result, so that no report is behind another."""
    options, _, directory = faulty
    shutil.copytree(directory / "state", tmp_path / "state")
    common = (*options[:2], "--state-dir", tmp_path / "state")
    (checked,) = canaryd("check", "--json", *common).document["devices"][0]["incidents"]
    (stored,) = canaryd("status", "--json", *common).document["devices"][0]["incidents"]
    assert counts(checked) == counts(stored)
    assert checked["wrong"] > 12


# --- A machine of eight ----------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """Eight GPUs and a processor: one broken, one suspected, one hot, one gone, one with an Xid, the rest sound."""
    return mixed_machine(tmp_path / "state")


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 24)])
def test_a_mixed_machine_of_eight_fits_one_screen(mixed, columns, rows, monkeypatch):
    """Every incident is there, worst first, and the sound devices share one line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = status_text(mixed)
    shown = text.splitlines()
    assert len(shown) <= rows, text
    assert max(map(len, shown)) <= columns
    for device in status_json(mixed)["devices"]:
        for incident in device["incidents"]:
            assert incident["text"] in " ".join(text.split()), text
    assert [line.split()[0] for line in shown if re.match("[A-Z]{6,8} ", line)][-5:] == [
        *("FAULTY", "SUSPECT", "UNKNOWN", "DEGRADED", "HEALTHY")
    ]


def test_a_mixed_machine_of_eight_fits_one_window(mixed, tmp_path):
    """At 1,280 by 900 pixels nothing has to be scrolled to."""
    script = 'd => Math.max(...[...d.querySelectorAll("article")].map(card => card.getBoundingClientRect().bottom))'
    assert measured(status_page.render(mixed).decode(), tmp_path, (1280, 900), script) <= 900
