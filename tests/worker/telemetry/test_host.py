"""Host telemetry on constructed trees, as an unprivileged user, on this machine, and through the supervisor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from canaryd.model import Device, Outcome
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.telemetry import host
from probes import host_telemetry
from tests.command import open_to_all, soon
from tests.worker.telemetry.trees import GARBAGE, checked, link, plant, unprivileged

DEVICE = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")
CPU = "sys/devices/system/cpu"
EDAC = "sys/devices/system/edac/mc"
MEMINFO = "MemTotal: 1000 kB\nMemFree: 400 kB\nMemAvailable: 600 kB\nSwapTotal: 200 kB\nSwapFree: 150 kB"
INTERRUPTS = """           CPU0       CPU1
  0:         44          0   IO-APIC    2-edge      timer
NMI:          9          9   Non-maskable interrupts
MCE:          3          4   Machine check exceptions
MCP:        977        978   Machine check polls
ERR:          0"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and /sys are Linux's")


def settings(root: Path) -> dict[str, str]:
    return {"sysfs": str(root / "sys"), "proc": str(root / "proc")}


def read(root: Path) -> tuple[dict[str, float], dict[str, str]]:
    return checked(host.read(DEVICE, settings(root)))


def of(name: str, values: dict) -> dict:
    return {key: value for key, value in values.items() if key.partition("{")[0] == name}


@pytest.fixture
def open_directory():
    """A directory that every user may enter, unlike pytest's own."""
    with open_to_all() as path:
        yield path


DIMMS = {"P0_A": (7, 1), "twice dimm1": (0, 0), "twice rank2": (4, 0), "rank3": (5, 0), "unknown": (2, 0)}
SOME = "some avg10=9.00 avg60=12.50 avg300=3.00 total=12345"
CPUFREQ = f"{CPU}/cpufreq/policy"
PSTORE = {"proc/mounts": "pstore /sys/fs/pstore pstore rw,nosuid 0 0", "sys/module/pstore/parameters/backend": "erst"}
BACKEND = "sys/module/pstore/parameters/backend"
NOTHING_WATCHES = "no EDAC driver watches the memory: errors are not known"
UNWATCHED = dict.fromkeys(("edac_controllers", "edac_errors_total"), NOTHING_WATCHES)
TREES = {
    # What the tree holds, every reading of the kinds that it is about, and reasons of what is absent.
    "no EDAC": ({}, {}, UNWATCHED),
    "EDAC without a controller": ({f"{EDAC}/power/control": "auto", f"{EDAC}/uevent": ""}, {}, UNWATCHED),
    "errors by module, by its label where that is its own": (
        {
            f"{EDAC}/mc0/{name}": text
            for name, text in {
                "ce_count": "99",
                "ce_noinfo_count": "2",
                "ue_noinfo_count": "0",
                "dimm0/dimm_ce_count": "7",
                "dimm0/dimm_ue_count": "1",
                "dimm0/dimm_label": "P0_A",
                "dimm1/dimm_ce_count": "0",
                "dimm1/dimm_ue_count": "0",
                "dimm1/dimm_label": "twice",
                "rank2/dimm_ce_count": "4",
                "rank2/dimm_ue_count": "0",
                "rank2/dimm_label": "twice",
                "rank3/dimm_ce_count": "5",
                "rank3/dimm_ue_count": "0",
            }.items()
        },
        {
            "edac_controllers": 1,
            **{
                f"edac_errors_total{{controller=mc0,dimm={name},kind={kind}}}": number
                for name, counts in DIMMS.items()
                for kind, number in zip(("corrected", "uncorrected"), counts, strict=True)
            },
        },
        {},
    ),
    "errors by row and channel; modules without counters are passed over": (
        {
            **{f"{EDAC}/mc0/csrow0/{name}": n for name, n in (("ch0_ce_count", "1"), ("ch1_ce_count", "2"))},
            f"{EDAC}/mc0/csrow0/ue_count": "3",
            f"{EDAC}/mc0/csrow0/ce_count": "3",
            f"{EDAC}/mc0/dimm0/dimm_label": "A1",
            f"{EDAC}/mc0/ce_noinfo_count": "0",
            f"{EDAC}/mc0/ue_noinfo_count": "0",
        },
        {
            "edac_errors_total{controller=mc0,dimm=csrow0 ch0,kind=corrected}": 1,
            "edac_errors_total{controller=mc0,dimm=csrow0 ch1,kind=corrected}": 2,
            "edac_errors_total{controller=mc0,dimm=csrow0,kind=uncorrected}": 3,
            "edac_errors_total{controller=mc0,dimm=unknown,kind=corrected}": 0,
            "edac_errors_total{controller=mc0,dimm=unknown,kind=uncorrected}": 0,
        },
        {},
    ),
    "machine checks, and not polls": ({"proc/interrupts": INTERRUPTS}, {"machine_check_exceptions_total": 7}, {}),
    "no counters of throttling, as with AMD": (
        {f"{CPU}/cpu0/topology/core_id": "0"},
        {},
        {f"throttle_events_total{{scope={s}}}": "does not count thermal throttling" for s in ("core", "package")},
    ),
    "clocks as a mean and a maximum": (
        {
            f"{CPUFREQ}0/scaling_cur_freq": "2000000",
            f"{CPUFREQ}1/scaling_cur_freq": "3000000",
            f"{CPUFREQ}0/cpuinfo_max_freq": "3500000",
            f"{CPUFREQ}1/cpuinfo_max_freq": "3800000",
        },
        {"clock_hertz{domain=cpu}": 2_500_000_000, "clock_max_hertz{domain=cpu}": 3_800_000_000},
        {},
    ),
    "a clock that is not known": (
        {f"{CPUFREQ}0/scaling_cur_freq": "2000000", f"{CPUFREQ}1/scaling_cur_freq": "<unknown>"},
        {"clock_hertz{domain=cpu}": 2_000_000_000},
        {},
    ),
    "clocks of a virtual machine": (
        {"proc/cpuinfo": "processor\t: 0\ncpu MHz\t\t: 2000.000\n\nprocessor\t: 1\ncpu MHz\t\t: 2100.000"},
        {"clock_hertz{domain=cpu}": 2_050_000_000},
        {"clock_max_hertz{domain=cpu}": "neither a cpufreq driver nor the processor"},
    ),
    "load and memory": (
        {"proc/meminfo": MEMINFO, "proc/loadavg": "3.25 2.00 1.00 2/300 4711"},
        {
            "load_average": 3.25,
            "memory_total_bytes": 1_024_000,
            "memory_available_bytes": 614_400,
            "swap_total_bytes": 204_800,
            "swap_used_bytes": 51_200,
        },
        {},
    ),
    "pressure of the last minute": (
        {
            "proc/pressure/cpu": f"{SOME}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0",
            "proc/pressure/memory": f"{SOME}\nfull avg10=0.00 avg60=1.25 avg300=0.00 total=99",
            "proc/pressure/io": SOME,
        },
        {
            **{f"pressure_ratio{{kind=some,resource={r}}}": 0.125 for r in ("cpu", "memory", "io")},
            "pressure_ratio{kind=full,resource=memory}": 0.0125,
        },
        {
            "pressure_ratio{kind=full,resource=cpu}": "not defined",
            "pressure_ratio{kind=full,resource=io}": "has no line of the form",
        },
    ),
    "processors that could be plugged in are not offline": (
        {f"{CPU}/{k}": v for k, v in (("online", "0-3,6"), ("present", "0-7"), ("offline", "4-5,7-127"))},
        {"cpu_cores{state=online}": 5, "cpu_cores{state=offline}": 3},
        {},
    ),
    "pstore that is not mounted": (
        PSTORE | {"proc/mounts": "sysfs /sys sysfs rw"},
        {},
        {"crash_records": "not mounted"},
    ),
    "pstore without storage": (PSTORE | {BACKEND: "(null)"}, {}, {"crash_records": "pstore has no storage"}),
    "pstore that may not be listed": (PSTORE, {}, {"crash_records": "not offered by this kernel"}),
}


@pytest.mark.parametrize(("files", "wanted", "reasons"), TREES.values(), ids=TREES)
def test_a_tree_is_read(tmp_path, files, wanted, reasons):
    """What the kernel gives is read in base units; what it does not give is absent with a reason, and never zero."""
    readings, absent = read(plant(tmp_path, files))
    for name in {key.partition("{")[0] for key in (*wanted, *reasons)}:
        assert of(name, readings) == of(name, wanted)
    for name, reason in reasons.items():
        assert reason in absent[name]


def test_an_empty_tree_gives_reasons_alone(tmp_path):
    """No zero, no reading, one reason for each thing that is not known."""
    readings, absent = read(tmp_path)
    assert readings == {}
    names = {name.partition("{")[0] for name in absent}
    assert names == {
        *("edac_controllers", "edac_errors_total", "machine_check_exceptions_total", "throttle_events_total"),
        *("temperature_celsius", "fan_rpm", "clock_hertz", "clock_max_hertz", "load_average", "memory_total_bytes"),
        *("memory_available_bytes", "swap_total_bytes", "swap_used_bytes", "pressure_ratio", "cpu_cores"),
        *("clock_source", "boot_time_seconds", "crash_records"),
    }


def test_a_tree_of_garbage_gives_reasons_alone(tmp_path):
    """Whatever a file holds, no poll is lost and nothing becomes a number."""
    numbers = (
        *(f"{EDAC}/mc0/dimm0/dimm_ce_count", f"{EDAC}/mc0/dimm0/dimm_ue_count", f"{EDAC}/mc0/ce_noinfo_count"),
        *("proc/interrupts", f"{CPU}/cpu0/thermal_throttle/core_throttle_count", f"{CPU}/online", f"{CPU}/present"),
        *(f"{CPU}/cpu0/topology/core_id", "sys/class/hwmon/hwmon0/temp1_input", "sys/class/hwmon/hwmon0/fan1_input"),
        *("sys/class/thermal/thermal_zone0/temp", f"{CPU}/cpufreq/policy0/scaling_cur_freq", "proc/cpuinfo"),
        *("proc/loadavg", "proc/meminfo", "proc/pressure/cpu", "proc/pressure/io", "proc/stat", "proc/mounts"),
        "sys/module/pstore/parameters/backend",
    )
    for index, text in enumerate(GARBAGE):
        root = plant(tmp_path / str(index), dict.fromkeys(numbers, text))
        plant(root, {f"{CPU}/cpu0/thermal_throttle/package_throttle_count": text})
        readings, absent = read(root)
        assert readings == {"edac_controllers": 1}, text  # a directory, not a file's content
        assert absent


def processors(root: Path, packages: int, cores: int, threads: int = 2, **counts: str) -> Path:
    """A machine whose every processor has the counters of its core and its package."""
    number = 0
    for _ in range(threads):
        for package in range(packages):
            for core in range(cores):
                base = f"{CPU}/cpu{number}"
                files = {f"{base}/topology/physical_package_id": str(package), f"{base}/topology/core_id": str(core)}
                for scope in ("core", "package"):
                    files[f"{base}/thermal_throttle/{scope}_throttle_count"] = counts.get(scope, "0")
                plant(root, files)
                number += 1
    return root


def test_a_spell_of_heat_is_counted_once_however_many_cores_slow_down(tmp_path):
    """Two packages of four cores with two threads each: the highest count, not sixteen times as much."""
    processors(tmp_path, 2, 4, core="3", package="5")
    plant(tmp_path, {f"{CPU}/cpu6/thermal_throttle/core_throttle_count": "4"})
    plant(tmp_path, {f"{CPU}/cpu1/thermal_throttle/package_throttle_count": "9"})
    readings, _ = read(tmp_path)
    assert of("throttle_events_total", readings) == {
        "throttle_events_total{scope=core}": 4,
        "throttle_events_total{scope=package}": 9,
    }


def test_one_unreadable_processor_makes_the_count_absent(tmp_path):
    """It may be the highest, and without it the counter would seem to fall."""
    processors(tmp_path, 1, 2, core="3", package="5")
    plant(tmp_path, {f"{CPU}/cpu1/thermal_throttle/core_throttle_count": "?"})
    readings, absent = read(tmp_path)
    assert of("throttle_events_total", readings) == {"throttle_events_total{scope=package}": 5}
    assert "cpu1/thermal_throttle/core_throttle_count" in absent["throttle_events_total{scope=core}"]


def test_sensors_are_named_after_chip_device_and_label(tmp_path):
    """Cores are one sensor, the hottest; a zone that is also a chip is read once; critical values come along."""
    hwmon = "sys/class/hwmon"
    plant(
        tmp_path,
        {
            f"{hwmon}/hwmon0/name": "coretemp",
            f"{hwmon}/hwmon0/temp1_input": "50000",
            f"{hwmon}/hwmon0/temp1_label": "Package id 0",
            f"{hwmon}/hwmon0/temp1_crit": "100000",
            f"{hwmon}/hwmon0/temp2_input": "48000",
            f"{hwmon}/hwmon0/temp2_label": "Core 0",
            f"{hwmon}/hwmon0/temp3_input": "49500",
            f"{hwmon}/hwmon0/temp3_label": "Core 12",
            f"{hwmon}/hwmon1/name": "nct6798",
            f"{hwmon}/hwmon1/fan2_input": "900",
            f"{hwmon}/hwmon1/fan2_label": "CPU fan",
            f"{hwmon}/hwmon1/fan3_input": "0",
            "sys/class/thermal/thermal_zone0/type": "x86_pkg_temp",
            "sys/class/thermal/thermal_zone0/temp": "51000",
            "sys/class/thermal/thermal_zone1/type": "acpitz",
            "sys/class/thermal/thermal_zone1/temp": "20000",
            "sys/class/thermal/thermal_zone1/hwmon2/name": "acpitz",
            "sys/class/thermal/cooling_device0/type": "Processor",
        },
    )
    link(tmp_path / hwmon / "hwmon0/device", tmp_path / "sys/devices/platform/coretemp.0")
    readings, absent = read(tmp_path)
    assert of("temperature_celsius", readings) == {
        "temperature_celsius{sensor=coretemp/coretemp.0/Package id 0}": 50.0,
        "temperature_celsius{sensor=coretemp/coretemp.0/hottest core}": 49.5,
        "temperature_celsius{sensor=x86_pkg_temp/thermal_zone0}": 51.0,
    }
    assert of("temperature_threshold_celsius", readings) == {
        "temperature_threshold_celsius{threshold=coretemp/coretemp.0/Package id 0_crit}": 100.0
    }
    assert of("fan_rpm", readings) == {
        "fan_rpm{fan=nct6798/hwmon1/CPU fan}": 900,
        "fan_rpm{fan=nct6798/hwmon1/fan3}": 0,
    }
    assert of("temperature_celsius", absent) == of("fan_rpm", absent) == {}


def test_sensors_of_accelerators_are_left_to_their_vendors(tmp_path):
    """A chip on a display controller or a processing accelerator is that device's; one on a drive is the host's."""
    for number, (name, pci_class) in enumerate((("amdgpu", "0x038000"), ("xe", "0x120000"), ("nvme", "0x010802"))):
        chip = tmp_path / f"sys/class/hwmon/hwmon{number}"
        plant(chip, {"name": name, "temp1_input": "40000"})
        link(chip / "device", tmp_path / f"sys/devices/pci0000:00/0000:00:0{number}.0")
        plant(chip / "device", {"class": pci_class})
    readings, _ = read(tmp_path)
    assert of("temperature_celsius", readings) == {"temperature_celsius{sensor=nvme/0000:00:02.0/temp1}": 40.0}


def test_crash_records_are_counted_where_they_can_be(tmp_path):
    """None is 0 only where pstore is mounted and has storage."""
    plant(tmp_path, PSTORE)
    (tmp_path / "sys/fs/pstore").mkdir(parents=True)
    assert read(tmp_path)[0]["crash_records"] == 0
    plant(tmp_path / "sys/fs/pstore", {"dmesg-erst-1": "Panic", "dmesg-erst-2": "Oops"})
    assert read(tmp_path)[0]["crash_records"] == 2


def test_what_only_root_may_read_says_so(open_directory):
    """EDAC and the sensors: a reason that tells what to do."""
    root = open_directory
    plant(root, {f"{EDAC}/mc0/ce_count": "1", "sys/class/hwmon/hwmon0/temp1_input": "1"})
    for directory in (EDAC, "sys/class/hwmon"):
        (root / directory).chmod(0)
    code = """
import json, sys
from canaryd.model import Device
from canaryd.worker.telemetry import host
# drop
device = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")
facts = host.read(device, json.loads(sys.argv[1]))
print(json.dumps({fact.name: getattr(fact, "reason", "") for fact in facts}))
"""
    facts = json.loads(unprivileged(code, json.dumps(settings(root))))
    for name in ("edac_controllers", "edac_errors_total", "temperature_celsius", "fan_rpm"):
        assert facts[name].startswith("permission denied: run as root to read "), name


def test_elsewhere_psutil_gives_a_part():
    """What macOS would give, read here through the same calls."""
    readings, absent = checked(host.portable())
    assert readings["memory_total_bytes"] == psutil.virtual_memory().total
    assert readings["boot_time_seconds"] == pytest.approx(psutil.boot_time(), abs=2)
    assert {"load_average", "memory_available_bytes", "swap_used_bytes", "cpu_cores{state=online}"} <= set(readings)
    assert {"edac_errors_total", "machine_check_exceptions_total", "temperature_celsius"} <= set(absent)


def test_this_machine_is_told_as_it_is():
    """What its kernel offers is read, and agrees with psutil; what it does not offer has a reason."""
    readings, absent = checked(host.read(DEVICE, {}))
    memory = psutil.virtual_memory()
    assert readings["memory_total_bytes"] == memory.total
    assert readings["memory_available_bytes"] == pytest.approx(memory.available, rel=0.2)
    assert readings["swap_total_bytes"] == psutil.swap_memory().total
    assert readings["load_average"] == pytest.approx(psutil.getloadavg()[0], abs=1)
    assert readings["boot_time_seconds"] == pytest.approx(psutil.boot_time(), abs=2)
    assert readings["cpu_cores{state=online}"] == psutil.cpu_count()
    watched = sorted(Path("/sys/devices/system/edac/mc").glob("mc[0-9]*"))
    assert readings.get("edac_controllers", 0) == len(watched)
    assert ("edac_errors_total" in absent) == (not watched)
    if not watched:
        assert absent["edac_errors_total"] == NOTHING_WATCHES
    counts = any(line.lstrip().startswith("MCE:") for line in Path("/proc/interrupts").read_text().splitlines())
    assert ("machine_check_exceptions_total" in readings) == counts
    seen = [path for path in ("/sys/class/hwmon/hwmon*/temp*_input", "/sys/class/thermal/thermal_zone*") if _any(path)]
    assert ("temperature_celsius" in absent) == (not seen)
    pressure = Path("/proc/pressure/memory").exists()
    assert ("pressure_ratio{kind=some,resource=memory}" in readings) == pressure


def _any(pattern: str) -> bool:
    return next(Path("/").glob(pattern.removeprefix("/")), None) is not None


def test_the_probe_runs_in_a_worker(tmp_path):
    """On this machine, on an empty tree, with a wrong setting and with a device that is not its own."""
    path = Path(host_telemetry.__file__)
    with Series(WorkerSpec(), grace=0.5) as series:

        def run(**fields):
            asked = {"probe_path": path, "device": DEVICE, "level": "quick", "seed": 7} | fields
            return series.run(RunRequest(spec=host_telemetry.SPEC, **asked), 20.0)

        here, nothing, wrong, foreign = (
            run(),
            run(settings=settings(tmp_path)),
            run(settings={"sysfs": "sys"}),
            run(device=Device(uuid="GPU-1", backend="cuda", index=0, model="a GPU")),
        )
    assert here.outcome is Outcome.COMPLETED
    assert {reading.name for reading in here.readings} >= {"memory_total_bytes", "load_average", "boot_time_seconds"}
    assert here.seconds < soon(2)
    assert nothing.outcome is Outcome.COMPLETED
    assert nothing.readings == ()
    assert nothing.absent["edac_errors_total"] == NOTHING_WATCHES
    assert wrong.outcome is Outcome.ERRORED
    assert "sysfs: got 'sys', wanted an absolute path such as '/sys'" in wrong.detail
    assert (foreign.outcome, "cuda:0 is not a processor" in foreign.detail) == (Outcome.SKIPPED, True)
