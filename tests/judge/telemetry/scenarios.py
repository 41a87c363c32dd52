"""What is seen, and the findings that it yields."""

import dataclasses

from canaryd.facts import LogRecord, Reading
from canaryd.judge.telemetry import line_rules
from canaryd.judge.telemetry.events import log_event
from canaryd.judge.telemetry.signals import Poll
from canaryd.model import Cause, Outcome, Reason
from tests.judge.telemetry.made import (
    AER,
    AGGREGATE_CE,
    AGGREGATE_UE,
    CE,
    DAY,
    DEGRADED,
    DIMM_CE,
    DIMM_UE,
    FATAL_LINK,
    FAULTY,
    HEALTHY,
    HOUR,
    LINK,
    MINUTE,
    NOW,
    PLACE,
    SUSPECT,
    THERMAL,
    UE,
    E,
    H,
    U,
    boot,
    event,
    failed,
    held_down,
    policy,
    poll,
    reset,
    rise,
    sign,
    wiped,
    xid,
)


def width(ago):
    """Return a link that came down from 16 lanes to 8."""
    return event("flag", "pcie_width", ago, lasted=15.0, before="16", after="8")


def sxid(code, severity, ago=HOUR, detail="Link 30 LTSSM Fault Up"):
    """Return an SXid as the kernel log gives it."""
    fields = {"severity": severity}
    record = LogRecord(boot="b", sequence=1, at=NOW - ago, kind="sxid", name=str(code), text=detail, fields=fields)
    return log_event(record, "GPU-a")


def mute(known):
    """Return the polls of a probe that complete without a reading; the last one came `known` seconds ago."""
    empty = poll(readings=(), absent={"power_watts": "not supported"})
    readings = {} if known is None else {"power_watts": (Reading(name="power_watts", value=90.0), NOW - known)}
    return Poll(period=15.0, newest=empty, completed=empty, known=readings, since=NOW - 30 * DAY)


def silent(*, first=False, code=999, only=None, **changes):
    """Return signs of a driver that failed to read `UE` in two polls, or in the `first`; it read `only` before."""
    read = poll(ago=45, only=only)
    now = poll(only={UE: None}, absent={UE: "the driver reports an unknown error (999)"}, codes={UE: code})
    known = {r.key: (r, read.started) for r in read.readings}
    before = read.started if first else NOW - 20
    polls = {"p": Poll(period=15.0, newest=now, completed=now, before=before, known=known, since=NOW - DAY)}
    return sign(polls=polls, **changes)


def _losses(what, times):
    """Return the lines by which a driver says that data was lost, a day apart, with reboots between them."""
    lost = [
        event(what, "ras-uncorrected", n * DAY) if isinstance(what, str) else xid(what, n * DAY)
        for n in range(9, 9 - times, -1)
    ]
    return [*lost, *(boot(n * DAY + DAY / 2) for n in range(8, 9 - times, -1))]


def _restarted(by, times, how="unclean"):
    """Return starts of the machine, three days apart, after which its processor says what restarted it."""
    starts = [n * 3 * DAY + HOUR * (how == "clean") for n in range(1, times + 1)]
    return [e for ago in starts for e in (boot(ago, how), event("last-boot", by, ago - 10))]


PAIR = ("cuda:1", "cuda:2")
CONDITIONS = {
    "hot": "throttled",
    "pcie-width": "pcie-slow",
    "pcie-generation": "pcie-slow",
    "memory-pressure": "memory-pressure",
}
"""Condition that comes and goes → its rule."""
DOWN = {"unit": "NETIR_LINK_DOWN", "intr_info": "0x00000011", "error_status": "0x00000000"}
SLOW = "throttle_seconds_total{reason=hw_slowdown}"
HARMLESS_LINK = {**FATAL_LINK, "error_status": "0x00000002"}
OLD = poll(ago=HOUR)
SCENARIOS = {
    "quiet": lambda: (sign(), []),
    "no probe and no event": lambda: (sign(polls={}), []),
    # telemetry-stale
    "one failed poll says nothing": lambda: (sign(newest=failed(Outcome.TIMED_OUT)), []),
    "polls that hang": lambda: (
        sign(completed=poll(ago=121), newest=failed(Outcome.TIMED_OUT)), [("telemetry-stale", DEGRADED, E)],
    ),
    "stale, but for less than two minutes": lambda: (
        sign(completed=poll(ago=119), newest=failed(Outcome.TIMED_OUT)), [],
    ),
    "no library": lambda: (
        sign(completed=None, newest=failed(Outcome.SKIPPED, "libnvidia-ml.so.1 is not here")),
        [("telemetry-stale", DEGRADED, E)],
    ),
    "the probe itself is wrong": lambda: (
        sign(completed=None, newest=failed(Outcome.ERRORED, "Traceback\nValueError: no")),
        [("telemetry-stale", DEGRADED, E)],
    ),
    "never polled, but for a short time": lambda: (
        sign(polls={"p": Poll(period=15.0, newest=None, completed=None, since=NOW - 60)}), [],
    ),
    "an old poll after a restart of canaryd": lambda: (
        sign(polls={"p": Poll(period=15.0, newest=None, completed=OLD, since=NOW - 60)}), [],
    ),
    "nobody polls": lambda: (
        sign(completed=OLD), [("telemetry-stale", DEGRADED, E)],
    ),
    "polls that complete and give nothing any more": lambda: (
        sign(polls={"p": mute(known=121)}), [("telemetry-stale", DEGRADED, E)],
    ),
    "polls that give nothing, but not for long": lambda: (sign(polls={"p": mute(known=119)}), []),
    "polls that never gave anything": lambda: (sign(polls={"p": mute(known=None)}), []),
    # readings-lost
    "a counter that cannot be read any more": lambda: (silent(), [("readings-lost", DEGRADED, E)]),
    "a counter that could not be read once": lambda: (silent(first=True), []),
    "a counter that is not supported any more": lambda: (silent(code=3), []),
    "a counter that waits for a reset": lambda: (silent(code=16), []),
    "a counter without a code": lambda: (silent(code=0), []),
    # a device that is gone
    "gone, and silent with it": lambda: (sign(completed=poll(ago=DAY), gone=True), []),
    "gone, and its counters could not be read before": lambda: (silent(gone=True), []),
    "gone with a failed remap, for months": lambda: (
        sign(completed=poll(ago=90 * DAY, only={"row_remap_failed": 1}), gone=True), [("memory-failed", FAULTY, H)],
    ),
    # gpu-lost
    "the driver says lost": lambda: (
        sign(newest=failed(Outcome.SKIPPED, "GPU is lost", reason=Reason.DEVICE_LOST)), [("gpu-lost", SUSPECT, H)],
    ),
    "another GPU is lost": lambda: (
        sign(newest=failed(Outcome.SKIPPED, "GPU GPU-a is not among those that answer; of others: GPU is lost")), [],
    ),
    "lost words": lambda: (sign(newest=failed(Outcome.ERRORED, "ConnectionError: connection lost")), []),
    "off the bus": lambda: (sign(event("off-bus", ago=DAY), xid(79, DAY)), [("gpu-lost", SUSPECT, H)]),
    "off the bus, rebooted, no pass yet": lambda: (
        sign(xid(79, DAY), boot(HOUR), passed=2 * HOUR), [("gpu-lost", SUSPECT, H)],
    ),
    "off the bus, rebooted and passed": lambda: (sign(xid(79, DAY), boot(HOUR), passed=60), []),
    "off the bus, reset and passed": lambda: (sign(xid(79, DAY), reset(HOUR), passed=60), [("gpu-lost", SUSPECT, H)]),
    "off the bus again after a reboot": lambda: (
        sign(xid(79, 9 * DAY), boot(8 * DAY), event("amdgpu", "lost", DAY), boot(HOUR), passed=60),
        [("gpu-lost", FAULTY, H)],
    ),
    "off the bus for the third time in a year": lambda: (
        sign(xid(79, 99 * DAY), boot(98 * DAY), xid(79, 50 * DAY), boot(49 * DAY), xid(79, DAY), boot(HOUR), passed=60),
        [("gpu-lost", FAULTY, H)],
    ),
    "off the bus three times, but not lately": lambda: (
        sign(xid(79, 300 * DAY), boot(299 * DAY), xid(79, 90 * DAY), boot(89 * DAY), xid(79, 31 * DAY), boot(30 * DAY)),
        [],
    ),
    "off the bus again after a month": lambda: (
        sign(xid(79, 31 * DAY), boot(30.5 * DAY), xid(79, DAY), boot(HOUR), passed=60), [],
    ),
    "off the bus three times alone, and a sibling once, at another time": lambda: (
        sign(
            *(made for n in (9, 6, 3) for made in (xid(79, n * DAY), boot(n * DAY - HOUR))), passed=60,
            beside={"cuda:1": [xid(79, 7 * DAY)]},
        ),
        [("gpu-lost", FAULTY, H)],
    ),
    "off the bus twice, and then the only sibling once": lambda: (
        sign(
            xid(79, 9 * DAY), boot(8 * DAY), xid(79, 5 * DAY), boot(4 * DAY), passed=60,
            beside={"cuda:1": [xid(79, 2 * DAY), boot(DAY)]},
        ),
        [("gpu-lost", FAULTY, U)],
    ),
    "off the bus, without an identical device": lambda: (sign(xid(79, DAY), siblings=()), [("gpu-lost", SUSPECT, U)]),
    "off the bus with another": lambda: (
        sign(xid(79, DAY), beside={"cuda:1": [xid(79, DAY)]}), [("gpu-lost", SUSPECT, U)],
    ),
    "off the bus twice, each time four minutes before another": lambda: (
        sign(
            *(made for n in (9, 3) for made in (xid(79, n * DAY), boot(n * DAY - HOUR))),
            siblings=PAIR, beside={"cuda:1": [xid(79, n * DAY - 4 * MINUTE) for n in (9, 3)]},
        ),
        [("gpu-lost", SUSPECT, U)],
    ),
    "only another is off the bus": lambda: (sign(beside={"cuda:1": [xid(79, DAY)]}), []),
    "Xid 79 graded by the configuration": lambda: (sign(xid(79), policy=policy(xids={"79": "none"})), []),
    # memory of an accelerator
    "row remap failed": lambda: (sign(only={"row_remap_failed": 1}), [("memory-failed", FAULTY, H)]),
    "SRAM threshold": lambda: (sign(only={"ecc_sram_threshold_exceeded": 1}), [("memory-failed", FAULTY, H)]),
    "row remap pending": lambda: (sign(only={"row_remap_pending": True}), [("memory-worn", DEGRADED, H)]),
    "a bank without spare rows": lambda: (
        sign(only={"row_remap_banks{available=none}": 1}), [("memory-worn", DEGRADED, H)],
    ),
    "511 remapped rows": lambda: (sign(only={"row_remap_rows{cause=uncorrectable}": 511}), []),
    "512 remapped rows": lambda: (
        sign(only={"row_remap_rows{cause=uncorrectable}": 512}), [("memory-failed", FAULTY, H)],
    ),
    "62 retired pages": lambda: (sign(only={"retired_pages{cause=single_bit}": 61}), []),
    "63 retired pages": lambda: (sign(only={"retired_pages{cause=single_bit}": 62}), [("memory-failed", FAULTY, H)]),
    "14 pages with double-bit errors": lambda: (sign(only={"retired_pages{cause=double_bit}": 14}), []),
    "15 pages with double-bit errors": lambda: (
        sign(only={"retired_pages{cause=double_bit}": 15}), [("memory-worn", DEGRADED, H)],
    ),
    "a page waits for a reset": lambda: (
        sign(only={"retired_pages_pending": 1}), [("memory-worn", DEGRADED, H)],
    ),
    "bad pages of amdgpu": lambda: (
        sign(only={"memory_bad_pages{status=pending}": 2}), [("memory-worn", DEGRADED, H)],
    ),
    # uncorrected-error
    "an uncorrected error": lambda: (sign(rise(UE), rise(AGGREGATE_UE)), [("uncorrected-error", SUSPECT, H)]),
    "an uncorrected error of old": lambda: (sign(rise(AGGREGATE_UE, ago=31 * DAY)), []),
    "uncorrected at first sight": lambda: (sign(only={UE: 1}), [("uncorrected-error", SUSPECT, H)]),
    "uncorrected, then a reset and a pass": lambda: (sign(rise(UE, ago=2 * HOUR), reset(HOUR), passed=60), []),
    "uncorrected, then a reboot and a pass": lambda: (sign(rise(UE, ago=2 * HOUR), boot(HOUR), passed=60), []),
    "a reset that wiped out an uncorrected error": lambda: (
        sign(wiped()),
        [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected, and rebooted before the next poll": lambda: (
        sign(rise(AGGREGATE_UE, ago=HOUR, lasted=120), boot(HOUR + 60)), [("uncorrected-error", SUSPECT, H)],
    ),
    "Xid 94": lambda: (sign(xid(94)), [("uncorrected-error", SUSPECT, H)]),
    "Xid 94, reset and passed": lambda: (sign(xid(94), reset(120), passed=60), []),
    "Xid 94, 137 and 94 on another device in that second": lambda: (
        sign(xid(94), beside={"cuda:1": [xid(137), xid(94)]}), [("xid", HEALTHY, U)],
    ),
    "Xid 94 that another device had in that second, and a count that rose": lambda: (
        sign(xid(94), rise(UE, lasted=15.0), beside={"cuda:1": [xid(94)]}), [("uncorrected-error", SUSPECT, H)],
    ),
    "Xid 94 on all in that second, and nothing else": lambda: (
        sign(xid(94), beside={"cuda:1": [xid(94)]}), [("uncorrected-error", SUSPECT, U)],
    ),
    **{
        f"Xid 94 on all of a job, and {name} here: three times": lambda m=mark, r=also: (
            sign(
                *(each := _losses(94, times=3)), *(m(n * DAY + 1) for n in (9, 8, 7)),
                beside={"cuda:1": each, "cuda:2": each}, siblings=PAIR,
            ),
            [("uncorrected-error", FAULTY, H), *r],
        )
        for name, mark, also in (
            ("a row was remapped", lambda ago: xid(63, ago), ()),
            ("a row waits for it", lambda ago: event("flag", "row_remap_pending", ago, before="0", after="1"), ()),
            ("a row could not be remapped", lambda ago: xid(64, ago), (("xid", FAULTY, H),)),
        )
    },
    "Xid 94, and a row that was remapped on another device": lambda: (
        sign(xid(94), beside={"cuda:1": [xid(94), xid(63)]}), [("xid", HEALTHY, U)],
    ),
    "Xid 48 and 94 here, 94 on another device": lambda: (
        sign(xid(48), xid(94), beside={"cuda:1": [xid(94)]}), [("uncorrected-error", SUSPECT, H)],
    ),
    "Xid 48 here and 95 on the others, three times": lambda: (
        sign(*_losses(48, times=3), beside={"cuda:1": (each := _losses(95, times=3)), "cuda:2": each}, siblings=PAIR),
        [("uncorrected-error", FAULTY, H)],
    ),
    "Xid 95 here and 48 on another device": lambda: (
        sign(xid(95), beside={"cuda:1": [xid(48)]}), [("xid", HEALTHY, U)],
    ),
    "Xid 149 and 145 here, 145 on another device": lambda: (
        sign(xid(149, fields=DOWN), xid(145, fields=FATAL_LINK), beside={"cuda:1": [xid(145, fields=FATAL_LINK)]}),
        [("xid", SUSPECT, U), ("xid", SUSPECT, U)],
    ),
    "Xid 94 twice in an hour, and the errors of two others that explain them, 30 days later": lambda: (
        sign(
            xid(94, 30 * DAY - 3000, first=NOW - 30 * DAY, count=2.0), now=NOW + MINUTE, siblings=PAIR,
            beside={"cuda:1": [xid(48, 30 * DAY)], "cuda:2": [xid(48, 30 * DAY - 3000)]},
        ),
        [],
    ),
    "Xid 48 here, 94 on another device in that second": lambda: (
        sign(xid(48), beside={"cuda:1": [xid(94)]}), [("uncorrected-error", SUSPECT, H)],
    ),
    **{
        f"{code} on all in one second, {times} times": lambda c=code, t=times: (
            sign(
                *(each := _losses(c, times=t)),
                beside={"cuda:1": each, "cuda:2": each},
                siblings=PAIR,
            ),
            [("uncorrected-error", SUSPECT, U)],
        )
        for code in (48, 95, "amdgpu", "intel")
        for times in (1, 3)
    },
    "Xid 95 on all in one second, three times, and a lifetime count that rose": lambda: (
        sign(
            *(each := _losses(95, times=3)),
            *(rise(AGGREGATE_UE, ago=n * DAY - 5, lasted=15.0) for n in (9, 8, 7)),
            beside={"cuda:1": each},
        ),
        [("uncorrected-error", FAULTY, H)],
    ),
    "Xid 95 on all in one second, three times, and each one's count rose": lambda: (
        sign(
            *(each := [*_losses(95, times=3), *(rise(UE, ago=n * DAY - 5, lasted=15.0) for n in (9, 8, 7))]),
            beside={"cuda:1": each},
        ),
        [("uncorrected-error", SUSPECT, U)],
    ),
    "uncorrected errors counted on all between the same polls": lambda: (
        sign(rise(UE, lasted=15.0), beside={"cuda:1": [rise(UE, lasted=15.0)]}), [("uncorrected-error", SUSPECT, U)],
    ),
    "the same, and the count stands": lambda: (
        sign(rise(UE, lasted=15.0), beside={"cuda:1": [rise(UE, lasted=15.0)]}, only={UE: 1}),
        [("uncorrected-error", SUSPECT, U)],
    ),
    "uncorrected errors twice in each of four hours, and on another device between them": lambda: (
        sign(
            *(made for n in (9, 8, 7, 6) for made in (rise(UE, ago=n * DAY, lasted=3000.0), boot(n * DAY - HOUR))),
            siblings=PAIR,
            beside={"cuda:1": [rise(UE, ago=n * DAY + 1500, lasted=15.0) for n in (9, 8, 7, 6)]},
        ),
        [("uncorrected-error", FAULTY, H)],
    ),
    "amdgpu's errors on all since the driver changed": lambda: (
        sign(
            change := event("change", "driver", 9 * DAY),
            *(made for n in (8, 6, 4) for made in (event("amdgpu", "ras-uncorrected", n * DAY), boot(n * DAY - HOUR))),
            beside={"cuda:1": [change, event("amdgpu", "ras-uncorrected", 7 * DAY)]},
        ),
        [("uncorrected-error", SUSPECT, U)],
    ),
    "amdgpu's errors on both since this device alone was moved": lambda: (
        sign(
            event("change", "bus_id", 9 * DAY),
            *(made for n in (8, 6, 4) for made in (event("amdgpu", "ras-uncorrected", n * DAY), boot(n * DAY - HOUR))),
            beside={"cuda:1": [event("amdgpu", "ras-uncorrected", 7 * DAY)]},
        ),
        [("uncorrected-error", FAULTY, H)],
    ),
    "uncorrected errors counted on both since the driver changed": lambda: (
        sign(
            change := event("change", "driver", 9 * DAY),
            *(made for n in (8, 6, 4) for made in (rise(UE, ago=n * DAY, lasted=15.0), boot(n * DAY - HOUR))),
            beside={"cuda:1": [change, rise(UE, ago=7 * DAY, lasted=15.0)]},
        ),
        [("uncorrected-error", FAULTY, H)],
    ),
    "Xid 48 without an identical device": lambda: (sign(xid(48), siblings=()), [("uncorrected-error", SUSPECT, U)]),
    "an uncorrected error, without an identical device": lambda: (
        sign(rise(UE), siblings=()), [("uncorrected-error", SUSPECT, H)],
    ),
    "Xid 48 for the third time in a year": lambda: (
        sign(xid(48, 300 * DAY), boot(299 * DAY), xid(95, 90 * DAY), boot(89 * DAY), xid(48, DAY)),
        [("uncorrected-error", FAULTY, H)],
    ),
    "Xid 48 again after two resets, without an identical device": lambda: (
        sign(xid(48, DAY), reset(5 * HOUR), xid(48, 4 * HOUR), boot(HOUR), xid(48, 60), siblings=()),
        [("uncorrected-error", FAULTY, U)],
    ),
    "amdgpu's uncorrected error": lambda: (
        sign(event("amdgpu", "ras-uncorrected")), [("uncorrected-error", SUSPECT, H)],
    ),
    "Intel's uncorrected error": lambda: (
        sign(event("intel", "ras-uncorrected")), [("uncorrected-error", SUSPECT, H)],
    ),
    # corrected-errors-rising
    "99 corrected errors": lambda: (sign(rise(CE, 99)), []),
    "100 corrected errors where there were none": lambda: (
        sign(rise(CE, 100)), [("corrected-errors-rising", DEGRADED, H)],
    ),
    "volatile and aggregate are the same errors": lambda: (
        sign(rise(CE, 999), rise(AGGREGATE_CE, 999), rise(AGGREGATE_CE, 3000, ago=9 * DAY)), [],
    ),
    "1000 in a day": lambda: (
        sign(rise(AGGREGATE_CE, 1000), rise(AGGREGATE_CE, 90_000, ago=9 * DAY)),
        [("corrected-errors-rising", DEGRADED, H)],
    ),
    "1000 the day before yesterday": lambda: (sign(rise(CE, 1000, ago=25.5 * HOUR)), []),
    # the host
    "9 corrected errors of a module": lambda: (sign(rise(DIMM_CE, 9)), []),
    "10 corrected errors of a module": lambda: (sign(rise(DIMM_CE, 10)), [("corrected-errors-rising", DEGRADED, H)]),
    "5 corrected errors of two modules each": lambda: (
        sign(rise(DIMM_CE, 5), rise(DIMM_CE.replace("A1", "B1"), 5)), [],
    ),
    "the same by log and by counter": lambda: (sign(rise(DIMM_CE, 5), event("edac", "corrected", count=5.0)), []),
    "uncorrected memory": lambda: (sign(rise(DIMM_UE)), [("uncorrected-error", SUSPECT, H)]),
    "uncorrected memory by the log": lambda: (
        sign(event("edac", "uncorrected")), [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected memory at first sight": lambda: (sign(only={DIMM_UE: 1}), [("uncorrected-error", SUSPECT, H)]),
    "uncorrected memory, EDAC loaded again and passed": lambda: (
        sign(rise(DIMM_UE), reset(120), passed=60), [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected memory, rebooted and passed": lambda: (sign(rise(DIMM_UE), boot(120), passed=60), []),
    "one error in memory, told by the kernel, the firmware and EDAC": lambda: (
        sign(event("mce", "memory", count=2.0), event("edac", "uncorrected", fields={"dimm": "A1", "controller": "0"})),
        [("uncorrected-error", SUSPECT, H)],
    ),
    "an error in memory that EDAC does not tell": lambda: (
        sign(event("mce", "memory", count=20.0)), [("uncorrected-error", SUSPECT, H)],
    ),
    "machine check by the log": lambda: (sign(event("mce", "uncorrected")), [("machine-check", SUSPECT, H)]),
    "machine check by its counter": lambda: (
        sign(rise("machine_check_exceptions_total")), [("machine-check", SUSPECT, H)],
    ),
    "an error restarts the machine twice": lambda: (
        sign(*_restarted(by="error", times=2), passed=60), [("machine-check", SUSPECT, H)],
    ),
    "an error restarts the machine four times": lambda: (
        sign(*_restarted(by="error", times=4), passed=60), [("machine-check", FAULTY, H)],
    ),
    "the firmware repeats at each start what it said once": lambda: (
        sign(*_restarted(by="error", times=1), *_restarted(by="error", times=4, how="clean"), passed=60),
        [],
    ),
    "heat restarts the machine four times": lambda: (
        sign(*_restarted(by="heat", times=4), passed=60), [],
    ),
    "machine checks after each of three starts": lambda: (
        sign(*(e for n in (9, 6, 3) for e in (boot(n * DAY), event("mce", "uncorrected", n * DAY - 60))), passed=60),
        [("machine-check", FAULTY, H)],
    ),
    "machine check, rebooted and passed": lambda: (sign(event("mce", "uncorrected"), boot(120), passed=60), []),
    "9 corrected machine checks": lambda: (sign(event("mce", "corrected", count=9.0)), []),
    "10 corrected machine checks": lambda: (
        sign(event("mce", "corrected", count=5.0), event("mce", "logged", count=5.0)),
        [("corrected-errors-rising", DEGRADED, H)],
    ),
    # Xids
    "Xid 31": lambda: (sign(xid(31)), [("xid", HEALTHY, U)]),
    "Xid 31, exact pass": lambda: (sign(xid(31), passed=60), [("xid", HEALTHY, Cause.SOFTWARE)]),
    "Xid 31, exact mismatch": lambda: (sign(xid(31), wrong=60), [("xid", SUSPECT, U)]),
    "Xid 31, exact mismatch before": lambda: (sign(xid(31), wrong=2 * HOUR), [("xid", HEALTHY, U)]),
    "Xid 31 a day ago": lambda: (sign(xid(31, DAY + 1)), []),
    "a burst of Xid 31": lambda: (sign(xid(31, count=500.0)), [("xid", HEALTHY, U)]),
    "Xid 31 on two occasions": lambda: (sign(xid(31, 5 * HOUR), xid(31)), [("xid", HEALTHY, U)]),
    "Xid 31 on three occasions": lambda: (
        sign(xid(31, 9 * HOUR), xid(31, 5 * HOUR), xid(31)), [("xid", DEGRADED, U)],
    ),
    "three on another device too, which one job may use both": lambda: (
        sign(
            *(each := [xid(31, 9 * HOUR), xid(31, 5 * HOUR), xid(31)]), beside={"cuda:1": each}
        ), [("xid", HEALTHY, U)],
    ),
    "three on the other device too, at other times: one program's bug": lambda: (
        sign(
            xid(31, 9 * HOUR), xid(31, 5 * HOUR), xid(31),
            beside={"cuda:1": [xid(31, 8 * HOUR), xid(31, 4 * HOUR), xid(31, 2 * HOUR)]},
        ), [("xid", HEALTHY, U)],
    ),
    "Xid 31 less than a minute apart": lambda: (
        sign(event("xid", "31", 5 * HOUR, lasted=59.0, count=2.0), xid(31)), [("xid", HEALTHY, U)],
    ),
    "Xid 31 on three occasions in three days": lambda: (
        sign(xid(31, 49 * HOUR), xid(31, 25 * HOUR), xid(31)), [("xid", HEALTHY, U)],
    ),
    "Xid 13 twice at one place": lambda: (
        sign(xid(13, 5 * HOUR, PLACE), xid(13, HOUR, PLACE)), [("xid", DEGRADED, U)],
    ),
    "Xid 13 at two places": lambda: (
        sign(xid(13, 5 * HOUR, PLACE), xid(13, HOUR, {**PLACE, "tpc": "2"})), [("xid", HEALTHY, U)],
    ),
    "Xid 45 with every killed process": lambda: (
        sign(xid(45, 9 * HOUR), xid(45, 5 * HOUR), xid(45)), [("xid", HEALTHY, U)],
    ),
    "Xid 69, an application's own fault, ever again": lambda: (
        sign(xid(69, 9 * HOUR), xid(69, 5 * HOUR), xid(69)), [("xid", HEALTHY, U)],
    ),
    "Xid 43 asks for nothing": lambda: (sign(xid(43)), []),
    "Xid 31 that the configuration silences": lambda: (sign(xid(31), policy=policy(xids={"31": "none"})), []),
    "Xid 31 that the configuration takes for RMA": lambda: (
        sign(xid(31), policy=policy(xids={"31": "rma"})), [("xid", FAULTY, H)],
    ),
    "Xid 64": lambda: (sign(xid(64, DAY)), [("xid", SUSPECT, H)]),
    "Xid 64, reset": lambda: (sign(xid(64, DAY), reset(HOUR), passed=2 * HOUR), [("xid", SUSPECT, H)]),
    "Xid 64, reset and passed": lambda: (sign(xid(64, DAY), reset(HOUR), passed=60), []),
    "Xid 64 again after a reset": lambda: (
        sign(xid(64, DAY), reset(HOUR), xid(64, 60)), [("xid", SUSPECT, H)],
    ),
    "Xid 64 again after two resets": lambda: (
        sign(xid(64, DAY), reset(5 * HOUR), xid(64, 4 * HOUR), boot(HOUR), xid(64, 60)),
        [("xid", FAULTY, H)],
    ),
    **{
        f"Xid {code} again after two resets": lambda c=code, w=cause: (
            sign(xid(c, 70 * DAY), reset(60 * DAY), xid(c, 40 * DAY), boot(30 * DAY), xid(c, 60)),
            [("xid", FAULTY, w)],
        )
        for code, cause in ((46, H), (62, H), (74, U), (109, H), (119, H), (168, H))
    },
    "Xid 119 again after two resets, and on a sibling as often": lambda: (
        sign(
            xid(119, 70 * DAY), reset(60 * DAY), xid(119, 40 * DAY), boot(30 * DAY), xid(119, 60),
            beside={"cuda:1": [xid(119, 71 * DAY), boot(60 * DAY), xid(119, 41 * DAY)]},
        ),
        [("xid", FAULTY, U)],
    ),
    "Xid 64 with another device's within a minute": lambda: (
        sign(xid(64, DAY), beside={"cuda:1": [xid(64, DAY + 60)]}), [("xid", SUSPECT, U)],
    ),
    "Xid 64 without an identical device": lambda: (sign(xid(64, DAY), siblings=()), [("xid", SUSPECT, H)]),
    "Xid 168 without an identical device": lambda: (sign(xid(168, DAY), siblings=()), [("xid", SUSPECT, U)]),
    "Xid 168 again after two resets, without an identical device": lambda: (
        sign(xid(168, DAY), boot(5 * HOUR), xid(168, 4 * HOUR), boot(HOUR), xid(168, 60), siblings=()),
        [("xid", FAULTY, U)],
    ),
    "Xid 64 again and again, and on every other device in the same second": lambda: (
        sign(*(each := [xid(64, DAY), reset(5 * HOUR), xid(64, 4 * HOUR), boot(HOUR), xid(64, 60)]),
             beside={"cuda:1": each}), [("xid", SUSPECT, U)],
    ),
    "Xid 143 on all at one time, on the others before and after it too, three times": lambda: (
        sign(
            *(made for n in (9, 8, 7) for made in (xid(143, n * DAY), boot(n * DAY - 2 * HOUR))),
            beside={"cuda:1": [event("xid", "143", n * DAY - 1500, lasted=3000.0, count=3.0) for n in (9, 8, 7)]},
        ),
        [("xid", SUSPECT, U)],
    ),
    "Xid 149 on this device, and 145 on the others": lambda: (
        sign(xid(149, HOUR, DOWN), beside={"cuda:1": [xid(145, HOUR - 1, FATAL_LINK)]}), [("xid", SUSPECT, U)],
    ),
    "Xid 145, and 149 on another device a second before": lambda: (
        sign(xid(145, HOUR, FATAL_LINK), beside={"cuda:1": [xid(149, HOUR + 1, DOWN)]}), [("xid", HEALTHY, U)],
    ),
    "Xid 95": lambda: (sign(xid(95, DAY)), [("uncorrected-error", SUSPECT, H)]),
    "one memory error under four codes": lambda: (
        sign(*(xid(code, DAY) for code in (48, 171, 94, 95)), rise(UE, ago=DAY)), [("uncorrected-error", SUSPECT, H)],
    ),
    "half of the lanes since a reset": lambda: (
        sign(reset(HOUR), width(HOUR), only={"pcie_width": 8}), [("pcie-slow", DEGRADED, E)],
    ),
    "half of the lanes since no reset, at rest": lambda: (sign(width(HOUR), only={"pcie_width": 8}), []),
    "half of the lanes since a reset, and all of them again": lambda: (sign(reset(HOUR), width(HOUR)), []),
    "Xid 168 wants a reboot": lambda: (sign(xid(168), reset(120), passed=60), [("xid", SUSPECT, H)]),
    "Xid 168, rebooted and passed": lambda: (sign(xid(168), boot(120), passed=60), []),
    "Xid 145, fatal": lambda: (sign(xid(145, fields=FATAL_LINK)), [("xid", SUSPECT, U)]),
    "Xid 145, harmless": lambda: (sign(xid(145, fields=HARMLESS_LINK)), []),
    "Xid 154 wants a reset": lambda: (sign(xid(154, fields={"action": "reset"})), [("xid", SUSPECT, U)]),
    "Xid 154 wants the system rebooted": lambda: (
        sign(xid(154, fields={"action": "system-reboot"}), reset(120), passed=60), [("xid", SUSPECT, U)],
    ),
    "Xid 154 has wanted the system rebooted": lambda: (
        sign(xid(154, fields={"action": "system-reboot"}), boot(120), passed=60), [],
    ),
    "the driver finds no power cable": lambda: (sign(event("driver", "no-power")), [("event-reported", DEGRADED, E)]),
    "Xid 154 has wanted a reset": lambda: (
        sign(xid(154, 2 * HOUR, {"action": "drain-and-reset"}), xid(154, HOUR, {"action": "none"})), [],
    ),
    "Xid 54": lambda: (sign(xid(54, 29.9 * DAY)), [("xid", SUSPECT, E)]),
    "Xid 54 a month ago": lambda: (sign(xid(54, 30.1 * DAY)), []),
    "Xid 999": lambda: (sign(xid(999)), [("xid", DEGRADED, U)]),
    "Xid 999 a day ago": lambda: (sign(xid(999, DAY + 1)), []),
    "Xid 92": lambda: (sign(xid(92)), [("xid", HEALTHY, H)]),
    "Xid 92 a day ago": lambda: (sign(xid(92, DAY + 1)), []),
    "Xid 157, a part without a spare": lambda: (sign(xid(157)), [("xid", HEALTHY, H)]),
    "Xid 161, a memory channel without a spare": lambda: (sign(xid(161)), [("xid", HEALTHY, H)]),
    "fatal SXid": lambda: (sign(sxid(20034, "fatal")), [("event-reported", DEGRADED, H)]),
    "SXid": lambda: (sign(sxid(12028, "non-fatal", detail="fatal")), [("event-reported", HEALTHY, H)]),
    "SXid of unknown severity": lambda: (sign(sxid(12028, "unknown")), [("event-reported", HEALTHY, H)]),
    "SXid a day ago": lambda: (sign(sxid(20034, "fatal", DAY + 1)), []),
    # heat, power, links
    "held down for 59 s": lambda: (sign(rise(THERMAL, 59.0, ago=60)), []),
    "held down for 60 s": lambda: (sign(rise(THERMAL, 60.0, ago=60)), [("throttled", DEGRADED, E)]),
    "held down twice over by one cause": lambda: (sign(rise(THERMAL, 40.0, ago=60), rise(SLOW, 40.0, ago=60)), []),
    "held down an hour ago": lambda: (sign(rise(THERMAL, 600.0, ago=HOUR + 1)), []),
    "held down by software's power cap": lambda: (
        sign(rise("throttle_seconds_total{reason=sw_power_cap}", 3000.0, ago=60)), [],
    ),
    "held down, seen poll by poll": lambda: (
        sign(held_down("hw_power_brake", 60, count=60.0)), [("throttled", DEGRADED, E)],
    ),
    "processors slow down 9 times": lambda: (sign(rise("throttle_events_total{scope=package}", 9.0, ago=60)), []),
    "processors slow down 10 times": lambda: (
        sign(rise("throttle_events_total{scope=package}", 10.0, ago=60)), [("throttled", DEGRADED, E)],
    ),
    "processors slow down, and each has a line": lambda: (
        sign(event("thermal", "core", 60, count=64.0), only={"throttle_events_total{scope=core}": 1}), [],
    ),
    "processors slow down 10 times by the log": lambda: (
        sign(event("thermal", "core", 60, count=10.0)), [("throttled", DEGRADED, E)],
    ),
    **{
        f"{name} for {seconds} s, {ago:g} s ago": lambda n=name, r=rule, s=seconds, a=ago, w=wanted: (
            sign(event("condition", n, a, count=float(s))), [(r, DEGRADED, E)] * w,
        )
        for name, rule in CONDITIONS.items()
        for seconds, ago, wanted in ((60, HOUR, 1), (59, 60, 0), (999, HOUR + 1, 0))
    },
    "310 replays in ten minutes": lambda: (sign(rise("pcie_replays_total", 310, ago=60)), []),
    "320 replays in ten minutes": lambda: (
        sign(rise("pcie_replays_total", 320, ago=60)), [("link-errors", DEGRADED, H)],
    ),
    "320 replays in twenty minutes": lambda: (sign(rise("pcie_replays_total", 320, ago=60, lasted=1200.0)), []),
    "320 correctable errors": lambda: (sign(rise(AER("correctable"), 320, ago=60)), [("link-errors", DEGRADED, H)]),
    "320 replays two hours ago": lambda: (sign(rise("pcie_replays_total", 320, ago=2 * HOUR)), []),
    "fatal PCI Express error": lambda: (sign(rise(AER("fatal"), ago=DAY)), [("pcie-aer", SUSPECT, H)]),
    "fatal PCI Express error, reset and passed": lambda: (sign(rise(AER("fatal"), ago=DAY), reset(120), passed=60), []),
    "fatal PCI Express error, with a reset": lambda: (sign(reset(DAY), rise(AER("fatal"), ago=DAY, lasted=15)), []),
    "fatal PCI Express error, 9 minutes after a reset": lambda: (
        sign(reset(DAY), event("aer", "fatal", DAY - 9 * MINUTE)), [],
    ),
    "fatal PCI Express error, 11 minutes after a reset": lambda: (
        sign(reset(DAY), event("aer", "fatal", DAY - 11 * MINUTE)), [("pcie-aer", SUSPECT, H)],
    ),
    "fatal PCI Express error of the port above": lambda: (
        sign(event("aer", "fatal port", fields={"below": "0000:65:00.0"})), [("pcie-aer", SUSPECT, U)],
    ),
    "fatal PCI Express error with another device's within a minute": lambda: (
        sign(event("aer", "fatal"), beside={"cuda:1": [event("aer", "fatal", HOUR + 60)]}), [("pcie-aer", SUSPECT, U)],
    ),
    "fatal PCI Express errors that come back after two resets": lambda: (
        sign(*(e for n in (9, 6, 3) for e in (event("aer", "fatal", n * DAY), reset(n * DAY - HOUR))), passed=60),
        [("pcie-aer", FAULTY, H)],
    ),
    "fatal PCI Express error with another device's hours before": lambda: (
        sign(event("aer", "fatal"), siblings=PAIR, beside={"cuda:1": [event("aer", "fatal", 9 * HOUR)]}),
        [("pcie-aer", SUSPECT, H)],
    ),
    "fatal PCI Express errors that hop over three devices of four": lambda: (
        sign(
            event("aer", "fatal"),
            siblings=("cuda:1", "cuda:2", "cuda:3"),
            beside={"cuda:1": [event("aer", "fatal", 2 * DAY)], "cuda:2": [event("aer", "fatal", 4 * DAY)]},
        ),
        [("pcie-aer", SUSPECT, U)],
    ),
    "fatal PCI Express error without an identical device": lambda: (
        sign(event("aer", "fatal"), siblings=()), [("pcie-aer", SUSPECT, U)],
    ),
    "nonfatal PCI Express error": lambda: (sign(event("aer", "nonfatal")), [("pcie-aer", DEGRADED, H)]),
    "nonfatal PCI Express error two days ago": lambda: (sign(event("aer", "nonfatal", 2 * DAY)), []),
    "NVLink recovers": lambda: (sign(rise(LINK("recovery"), ago=60)), [("link-errors", DEGRADED, H)]),
    "NVLink recovered two hours ago": lambda: (sign(rise(LINK("recovery"), ago=2 * HOUR)), []),
    "NVLink, 99 CRC errors a second": lambda: (sign(rise(LINK("crc_flit"), 5940, ago=60)), []),
    "NVLink, 100 CRC errors a second": lambda: (
        sign(rise(LINK("crc_flit"), 6000, ago=60)), [("link-errors", DEGRADED, H)],
    ),
    "NVLink down since a day": lambda: (
        sign(event("flag", "nvlink_up{link=3}", DAY, before="1", after="0"), only={"nvlink_up{link=3}": 0}),
        [("nvlink-down", DEGRADED, U)],
    ),
    "NVLink down and up within an hour": lambda: (
        sign(event("flag", "nvlink_up{link=3}", 60, before="1", after="1", count=2.0)), [("nvlink-down", DEGRADED, U)],
    ),
    "NVLink down and up a day ago": lambda: (
        sign(event("flag", "nvlink_up{link=3}", DAY, before="1", after="1", count=2.0)), [],
    ),
    "NVLink came up": lambda: (sign(event("flag", "nvlink_up{link=3}", 60, before="0", after="1")), []),
    "a link that never was up": lambda: (sign(only={"nvlink_up{link=3}": 0, "fabric_ready": 0}), []),
    "the fabric is left": lambda: (
        sign(event("flag", "fabric_ready", DAY, before="1", after="0"), only={"fabric_ready": 0}),
        [("nvlink-down", DEGRADED, U)],
    ),
    **{
        f"fault of the fabric: {fault}": lambda key=f"fabric_fault{{fault={fault}}}": (
            sign(only={key: 1}), [("fabric-fault", DEGRADED, U)],
        )
        for fault in (
            *("degraded_bandwidth", "route_recovery", "route_unhealthy", "access_timeout_recovery"),
            *("incorrect_configuration", "unhealthy", "limited_capacity"),
        )
    },
    "NVLink could not recover": lambda: (sign(rise(LINK("recovery_failed"), ago=60)), [("link-errors", DEGRADED, H)]),
    "NVLink could not recover two hours ago": lambda: (sign(rise(LINK("recovery_failed"), ago=HOUR + 1)), []),
    # gaps: what came at an unknown time is shared out evenly
    "1 replay a minute, in a night that nobody watched": lambda: (
        sign(rise("pcie_replays_total", 480, ago=60, lasted=8 * HOUR)), [],
    ),
    "500 corrected errors a day, for three days that nobody watched": lambda: (
        sign(rise(CE, 1500, ago=60, lasted=3 * DAY)), [],
    ),
    "4 corrected errors of a module a day, for three days": lambda: (
        sign(rise(DIMM_CE, 12, ago=60, lasted=3 * DAY)), [],
    ),
    "held down for 30 s a day, for three days": lambda: (sign(rise(THERMAL, 90.0, ago=60, lasted=3 * DAY)), []),
    "processors slow down once an hour, for a night": lambda: (
        sign(rise("throttle_events_total{scope=core}", 12.0, ago=60, lasted=12 * HOUR)), [],
    ),
    "NVLink recovered once in a night": lambda: (sign(rise(LINK("recovery"), ago=60, lasted=8 * HOUR)), []),
    "NVLink, 6000 CRC errors in a night": lambda: (sign(rise(LINK("crc_flit"), 6000, ago=60, lasted=8 * HOUR)), []),
    "an uncorrected error in a night": lambda: (
        sign(rise(UE, ago=60, lasted=8 * HOUR)), [("uncorrected-error", SUSPECT, H)],
    ),
    "hot for 15 s, four times in an hour": lambda: (
        sign(event("condition", "hot", 600, lasted=2715.0, count=60.0)), [],
    ),
    # after a reset, links train
    **{
        f"{name}, {after / MINUTE:g} minutes after a {what.__name__}": lambda k=key, n=by, a=after, w=what, r=rule: (
            sign(rise(k, n, ago=60, lasted=15.0), w(60 + a)), [(r, DEGRADED, H)] * (a > 600),
        )
        for name, key, by, rule in (
            ("link recovers", LINK("recovery"), 1, "link-errors"),
            ("link could not recover", LINK("recovery_failed"), 1, "link-errors"),
            ("CRC errors", LINK("crc_flit"), 60_000, "link-errors"),
            ("replays", "pcie_replays_total", 320, "link-errors"),
            ("correctable errors", AER("correctable"), 320, "link-errors"),
        )
        for after, what in ((540.0, reset), (540.0, boot), (660.0, reset))
    },
    "link errors in a gap with a reboot": lambda: (
        sign(rise(LINK("recovery"), 2, 5, lasted=700), rise("pcie_replays_total", 330, 5, lasted=700), boot(100)), [],
    ),
    "the fabric is late after a reboot": lambda: (
        sign(event("flag", "fabric_ready", 50, before="1", after="0"), boot(100), only={"fabric_ready": 0}), [],
    ),
    "the fabric was late after a reboot": lambda: (
        sign(event("flag", "fabric_ready", 900, lasted=600.0, before="1", after="1", count=2.0), boot(1000)), [],
    ),
    "the fabric is away since a reboot": lambda: (
        sign(event("flag", "fabric_ready", 650, before="1", after="0"), boot(700), only={"fabric_ready": 0}),
        [("nvlink-down", DEGRADED, U)],
    ),
    "MIG turns links off": lambda: (
        sign(
            event("flag", "nvlink_up{link=3}", DAY, before="1", after="0"),
            only={"nvlink_up{link=3}": 0, "mig_enabled": 1},
        ),
        [],
    ),
    "MIG turned links off, and is off again": lambda: (
        sign(
            event("flag", "nvlink_up{link=3}", 900, lasted=900.0, before="1", after="1", count=2.0),
            event("flag", "mig_enabled", 900, lasted=900.0, before="0", after="0", count=2.0),
        ),
        [],
    ),
    # clocks that are wrong
    "Xid 79 read while the clock said 1970": lambda: (
        sign(dataclasses.replace(xid(79), first=20 * DAY, last=20 * DAY)), [("gpu-lost", SUSPECT, H)],
    ),
    "Xid 79 dated in the future": lambda: (sign(xid(79, -DAY)), [("gpu-lost", SUSPECT, H)]),
    "a rise since 1970 is one of now": lambda: (
        sign(dataclasses.replace(rise("pcie_replays_total", 320, 60), first=20 * DAY)), [("link-errors", DEGRADED, H)],
    ),
    "a poll from half a minute ahead": lambda: (sign(completed=poll(-30)), []),
    "a poll from tomorrow tells what lasts": lambda: (
        sign(completed=poll(-DAY, only={"row_remap_failed": 1, "crash_records": 1})),
        [("memory-failed", FAULTY, H), ("telemetry-stale", DEGRADED, E)],
    ),
    # the driver's advice, settings, the host
    "the driver wants a reset": lambda: (
        sign(only={"recovery_action{action=none}": None, "recovery_action{action=reset}": 1}),
        [("driver-advice", SUSPECT, U)],
    ),
    "the driver wants what we do not know": lambda: (
        sign(only={"recovery_action{action=none}": None, "recovery_action{action=unknown(9)}": 1}),
        [("driver-advice", DEGRADED, U)],
    ),
    **{
        f"device health {word}": lambda w=word, s=state: (
            sign(only={"device_health{status=ok}": None, f"device_health{{status={w}}}": 1}),
            [("driver-advice", s, U)] if s else [],
        )
        for word, state in (("warning", DEGRADED), ("Alarm", DEGRADED), ("critical", SUSPECT), ("unknown", None))
    },
    "persistence off": lambda: (sign(only={"persistence_mode": 0}), [("noted", HEALTHY, E)]),
    "no persistence known": lambda: (sign(only={"persistence_mode": None}), []),
    "ECC off": lambda: (
        sign(only={"ecc_enabled{when=current}": 0, "ecc_enabled{when=pending}": 0}), [("noted", HEALTHY, E)],
    ),
    "ECC will change": lambda: (sign(only={"ecc_enabled{when=pending}": 0}), [("noted", HEALTHY, E)]),
    "tsc given up": lambda: (
        sign(event("flag", "clock_source", 9 * HOUR, before="tsc", after="hpet")), [("event-reported", DEGRADED, E)],
    ),
    "tsc is back": lambda: (sign(event("flag", "clock_source", before="hpet", after="tsc")), []),
    "never had tsc": lambda: (sign(only={"clock_source{source=tsc}": None, "clock_source{source=kvm-clock}": 1}), []),
    "unclean reboot": lambda: (sign(boot(HOUR, "unclean")), [("event-reported", HEALTHY, U)]),
    "unclean reboot two days ago, clean one now": lambda: (sign(boot(2 * DAY, "unclean"), boot(HOUR)), []),
    "crash records": lambda: (sign(only={"crash_records": 2}), [("noted", HEALTHY, U)]),
    **{
        f"line {line}, {ago:g} s ago": lambda i=line, a=ago: (
            sign(event(*f"{i} whatever".split()[:2], a, before=" ".join(i.split()[2:]), fields={"below": "65:00.0"})),
            [(line_rules.LINES[i].rule, *line_rules.LINES[i][:2])] if a <= DAY else [],
        )
        for line in line_rules.LINES
        for ago in (HOUR, DAY + 1)
    },
    "a kind of line that nobody judges": lambda: (
        sign(event("news", "x")), [],
    ),
    "a line of a driver that no row names": lambda: (
        sign(event("amdgpu", "ras-corrected"), event("intel", "ras-corrected")), [("event-reported", HEALTHY, U)] * 2,
    ),
    "the driver changed": lambda: (
        sign(event("change", "driver", before="570.1", after="580.2")), [("noted", HEALTHY, Cause.NONE)],
    ),
    "a counter for life fell": lambda: (sign(event("counter-fell", AGGREGATE_CE)), [("noted", HEALTHY, Cause.NONE)]),
    "counters of links were cleared": lambda: (
        sign(event("counter-fell", "nvlink_errors_total")), [("noted", HEALTHY, Cause.NONE)],
    ),
    "a counter started anew with the machine": lambda: (
        sign(event("counter-fell", "machine_check_exceptions_total", 60, lasted=300.0), boot(100)), [],
    ),
    "changes of two days ago": lambda: (
        sign(event("change", "driver", 2 * DAY), event("counter-fell", AGGREGATE_CE, 2 * DAY)), [],
    ),
}  # fmt: skip
