"""The one core or SM that is wrong: named where the others computed the same right, and only there."""

import pytest

from canaryd.facts import Place
from canaryd.judge.cause import Mismatch
from canaryd.judge.units import lone_unit, units_of
from canaryd.model import Cause, State
from tests.judge.made import HOUR, MINUTE, ask, fresh, right, rules, run, wrong
from tests.places import place

SMS = range(132)


def sms(*numbers):
    return Place(unit="sm", numbers=numbers)


def others(*but, seed=1, tiles=2, uploads=2, **more):
    """The clean comparison of all SMs but some."""
    rest = [n for n in SMS if n not in but]
    return right(seed, **{"trials": tiles * uploads * len(rest), "uploads": uploads, "place": sms(*rest)} | more)


def bad(sm, seed=1, of=2, hit=2, **more):
    """One launch in which an SM was wrong."""
    return wrong(seed, of, hit, place=sms(sm), **more)


def named(*runs):
    return lone_unit(runs, [Mismatch(run=r, comparison=c) for r in runs for c in r.wrong], 4)


def test_an_sm_that_is_always_wrong_where_the_others_are_right_is_named():
    """One launch is enough: the other 131 computed the same bytes with the same program."""
    assert named(run(HOUR, bad(17), others(17))) == (sms(17), sms(*(n for n in SMS if n != 17)))


def test_one_passing_error_names_no_sm():
    """It was wrong once and right once on the same bytes, as any SM could be."""
    assert named(run(HOUR, bad(17, hit=1), right(1, 2, place=sms(17)), others(17))) is None


def test_an_sm_that_is_wrong_now_and_then_is_named_from_its_second_wrong_upload():
    """Of bytes that the others computed too: two meet on one of 132 by chance in less than 1 % of cases."""
    several = [
        run(HOUR * n, bad(17, seed=n, hit=1), right(n, 14, uploads=7, place=sms(17)), others(17, seed=n, uploads=8))
        for n in (1, 2, 3)
    ]
    assert named(*several[:1]) is None
    assert named(*several[:2])[0] == named(*several)[0] == sms(17)


@pytest.mark.parametrize("seen", [(17, 18), (17, 90, 91)])
def test_several_wrong_sms_are_none_alone(seen):
    """Whatever they share is not one SM."""
    assert named(run(HOUR, *(bad(n) for n in seen), others(*seen))) is None


def test_where_all_are_wrong_none_is_named():
    """Told as one comparison."""
    assert named(run(HOUR, wrong(1, 264, 264, place=sms(*SMS)))) is None


def test_without_the_others_on_the_same_bytes_one_wrong_run_names_none():
    """A program that is wrong on these bytes is wrong on every SM."""
    assert named(run(HOUR, bad(17, seed=1), others(17, seed=2))) is None


def test_other_software_and_other_probes_do_not_count():
    """What they computed says nothing about this program."""
    clean = run(HOUR, others(17), probe="exact_attention"), run(HOUR, others(17), stack={"torch": "2.14"})
    assert named(run(MINUTE, bad(17))) is None
    assert (
        lone_unit([*clean, failed := run(MINUTE, bad(17))], [Mismatch(run=failed, comparison=failed.wrong[0])], 4)
        is None
    )


def test_units_of_a_place():
    """Cores and SMs are units; threads, memory and the device as a whole are not."""
    assert list(units_of(sms(3, 5))) == [sms(3), sms(5)]
    assert [list(units_of(place(text))) for text in ("device", "all 2 threads", "memory")] == [[], [], []]
    assert (str(sms(*range(131))), str(sms(1, 2)), str(sms(7))) == ("131 SMs", "SMs 1 and 2", "SM 7")
    assert [p.is_unit for p in (sms(7), sms(1, 2), place("core 3"), place("device"))] == [True, False, True, False]


def test_an_sm_wrong_alone_accuses_a_gpu_that_nobody_has_characterised():
    """The device contradicts itself: right on 131 SMs and wrong on one, for the same bytes."""
    runs = run(HOUR, bad(17, characterised=False), others(17, characterised=False))
    verdict = ask(runs, fresh())
    assert (verdict.state, verdict.cause) == (State.SUSPECT, Cause.HARDWARE)
    assert rules(verdict) == {"exact-mismatch"}
    (finding,) = verdict.findings
    assert finding.wrong.why == "Only SM 17 is wrong: 131 SMs computed the same data correctly."
    assert [(p.place, p.wrong, p.of) for p in finding.wrong.places if p.wrong] == [(sms(17), 2, 2)]
    assert {(p.wrong, p.of) for p in finding.wrong.places if not p.wrong} == {(0, 4)}
    everywhere = run(HOUR, wrong(1, 264, 264, place=sms(*SMS), characterised=False))
    assert ask(everywhere, fresh()).state is State.UNKNOWN


def test_two_uploads_wrong_on_one_sm_confirm_each_other():
    """As on one core; on two SMs they do not."""
    assert ask(run(HOUR, bad(17, bits=("1", "2")), bad(17, seed=2, bits=("5", "6"))), fresh()).state is State.FAULTY
    assert ask(run(HOUR, bad(17, bits=("1", "2")), bad(18, seed=2, bits=("5", "6"))), fresh()).state is State.SUSPECT


@pytest.mark.parametrize(("uploads", "told"), [(6, False), (7, True)])
def test_of_two_cores_chance_explains_six_wrong_uploads_on_one(uploads, told):
    """The seventh is less likely than 2 % (`judge.cause.ALONE`), the choice of the core included."""
    failed = run(
        HOUR,
        *(wrong(9, 2, 1, place=place("core 1")) for _ in range(uploads)),
        right(9, 20 - 2 * uploads, uploads=10 - uploads, place=place("core 1")),
        right(9, 20, uploads=10, place=place("core 0")),
    )
    assert bool(named(failed)) is told
