"""AMD telemetry on constructed trees, and on a stand-in for AMD's amdsmi."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from canaryd.codec import from_json
from canaryd.facts import Reading
from canaryd.model import Device, Outcome
from canaryd.probe import Absent
from canaryd.worker.telemetry import amd
from tests.worker.telemetry.trees import CAPTURES, ROOT, checked, plant, run_probe

BUS = "0000:05:00.0"
FUNCTION = f"bus/pci/devices/{BUS}"
IDENTITY = {
    "class/drm/card1/device": f"-> ../../../{FUNCTION}",
    f"{FUNCTION}/uevent": f"DRIVER=amdgpu\nPCI_CLASS=120000\nPCI_ID=1002:74A1\nPCI_SLOT_NAME={BUS}\n",
    f"{FUNCTION}/vendor": "0x1002\n",
    f"{FUNCTION}/device": "0x74a1\n",
    f"{FUNCTION}/class": "0x120000\n",
}
VERSIONS = {
    f"{FUNCTION}/unique_id": "c0ffee00c0ffee\n",
    f"{FUNCTION}/vbios_version": "113-M3000100-102\n",
    f"{FUNCTION}/serial_number": "692300000001\n",
    f"{FUNCTION}/product_name": "AMD Instinct MI300X OAM\n",
    f"{FUNCTION}/product_number": "102-G00000-0B\n",
    f"{FUNCTION}/fw_version/smc_fw_version": "0x00554500\n",
    f"{FUNCTION}/fw_version/ta_ras_fw_version": "0x1b36020a\n",
    f"{FUNCTION}/fw_version/dmcu_fw_version": "0x00000000\n",
    "module/amdgpu/version": "6.8.5\n",
}
HWMON = f"{FUNCTION}/hwmon/hwmon4"
FACTS = {
    f"{FUNCTION}/ras/features": "feature mask: 0x3\n",
    f"{FUNCTION}/ras/umc_err_count": "ue: 1\nce: 37\nde: 2\n",
    f"{FUNCTION}/ras/gfx_err_count": "ue: 0\nce: 0\n",
    f"{FUNCTION}/ras/xgmi_wafl_err_count": "ue: 0\nce: 4\n",
    f"{FUNCTION}/ras/gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : R\n"
    "0x00000003 : 0x00001000 : P\n",
    f"{HWMON}/temp1_input": "41000\n",
    f"{HWMON}/temp1_label": "edge\n",
    f"{HWMON}/temp2_input": "52000\n",
    f"{HWMON}/temp2_label": "junction\n",
    f"{HWMON}/temp2_crit": "100000\n",
    f"{HWMON}/temp3_input": "47000\n",
    f"{HWMON}/temp3_label": "mem\n",
    f"{HWMON}/power1_average": "140000000\n",
    f"{HWMON}/power1_cap": "750000000\n",
    f"{HWMON}/power1_cap_default": "750000000\n",
    f"{HWMON}/power1_cap_min": "0\n",
    f"{HWMON}/power1_cap_max": "750000000\n",
    f"{FUNCTION}/pp_dpm_sclk": "S: 19Mhz\n0: 132Mhz *\n1: 2100Mhz\n",
    f"{FUNCTION}/pp_dpm_mclk": "0: 900Mhz *\n1: 1300Mhz\n",
    f"{FUNCTION}/gpu_busy_percent": "37\n",
    f"{FUNCTION}/mem_busy_percent": "12\n",
    f"{FUNCTION}/mem_info_vram_total": "206141652992\n",
    f"{FUNCTION}/mem_info_vram_used": "297381888\n",
    f"{FUNCTION}/pcie_replay_count": "5\n",
    f"{FUNCTION}/current_link_speed": "32.0 GT/s PCIe\n",
    f"{FUNCTION}/current_link_width": "16\n",
    f"{FUNCTION}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{FUNCTION}/max_link_width": "16\n",
    f"{FUNCTION}/aer_dev_correctable": "RxErr 3\nTOTAL_ERR_COR 3\n",
    f"{FUNCTION}/aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0\n",
    f"{FUNCTION}/aer_dev_fatal": "TOTAL_ERR_FATAL 0\n",
}
DEVICE = Device(uuid="GPU-1", backend="rocm", index=0, model="AMD", detail={"bus_id": BUS})
# Runs in a process of its own: the library is imported there, and what it prints must not reach standard output.
ASK = """
import json, sys
from canaryd.codec import to_json
from canaryd.worker.telemetry import amd
settings = {"sysfs": sys.argv[1]}
devices = amd.devices(settings)
facts = [[type(fact).__name__, to_json(fact)] for fact in amd.read(devices[0], settings)]
amd.close()
print(json.dumps({"devices": to_json(devices), "facts": facts}))
"""


def settings(root) -> dict:
    return {"sysfs": str(root), "amdsmi": False}


def ask(tmp_path, way: str, *, library: bool = True):
    """Ask with the stand-in installed as ROCm would; return the first device, readings and absences."""
    root = plant(tmp_path / "sys", IDENTITY | VERSIONS | FACTS)
    rocm = tmp_path / "rocm"
    shutil.copytree(CAPTURES / "rocm", rocm)
    if library:
        plant(rocm, {"lib/libamd_smi.so": ""})
    env = os.environ | {"ROCM_PATH": str(rocm), "ROCM_HOME": "", "STAND_IN": way, "STAND_IN_LOG": str(tmp_path / "log")}
    if not library:
        env["PYTHONPATH"] = str(rocm / "share/amd_smi")  # importable, but not to be imported
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(root)], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    kinds = {"Reading": Reading, "Absent": Absent}
    facts = [from_json(kinds[kind], fact) for kind, fact in answer["facts"]]
    return from_json(Device, answer["devices"][0]), *checked(facts)


def test_an_accelerator_is_known_by_its_chip_and_its_versions(tmp_path):
    """The uuid comes from the silicon; serial, VBIOS, driver and firmware are recorded."""
    root = plant(tmp_path, IDENTITY | VERSIONS)
    (device,) = amd.devices(settings(root))
    assert (device.uuid, device.backend, device.weak_identity) == ("GPU-00c0ffee00c0ffee", "rocm", False)
    assert device.model == "AMD Instinct MI300X OAM"
    assert device.detail == {
        "bus_id": BUS,
        "driver": "amdgpu 6.8.5",
        "serial": "692300000001",
        "vbios": "113-M3000100-102",
        "board_part_number": "102-G00000-0B",
        "firmware_smc": "0x00554500",
        "firmware_ta_ras": "0x1b36020a",
    }


@pytest.mark.parametrize("chip", [None, "", "0000000000000000\n", "not a number\n"])
def test_without_a_chip_number_the_identity_is_weak(tmp_path, chip):
    """The slot then names the device, which yields no dossier for a return."""
    root = plant(tmp_path, IDENTITY | ({} if chip is None else {f"{FUNCTION}/unique_id": chip}))
    (device,) = amd.devices(settings(root))
    assert (device.uuid, device.weak_identity) == (f"GPU-{BUS}", True)
    assert device.model == "AMD GPU [1002:74a1]"


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({"class": "0x120000\n"}, True),
        ({"class": "0x038000\n"}, True),
        ({"class": "0x038000\n", "mem_info_vram_total": "536870912\n"}, False),
        ({"class": "0x030000\n"}, False),
        ({"class": "0x030000\n", "mem_info_vram_total": "536870912\n"}, False),
        ({"class": "0x030000\n", "mem_info_vram_total": "garbage\n"}, False),
        ({"class": "0x030000\n", "mem_info_vram_total": "25753026560\n"}, True),
        ({"vendor": "0x8086\n"}, False),
        ({"uevent": f"DRIVER=vfio-pci\nPCI_SLOT_NAME={BUS}\n"}, False),
        ({"uevent": "DRIVER=amdgpu\n"}, False),
    ],
)
def test_displays_of_processors_are_no_accelerators(tmp_path, changes, served):
    """8 GiB of own memory, or a data-centre class where that cannot be read, and the amdgpu driver."""
    root = plant(tmp_path, IDENTITY | {f"{FUNCTION}/{name}": text for name, text in changes.items()})
    assert bool(amd.devices(settings(root))) is served


def test_sysfs_gives_every_reading(tmp_path):
    """Names, labels, units: as the kernel's documentation says."""
    root = plant(tmp_path, IDENTITY | FACTS)
    readings, absent = checked(amd.read(DEVICE, settings(root)))
    assert readings == {
        "ecc_enabled{when=current}": 1,
        "ecc_errors_total{kind=uncorrected,location=umc}": 1,
        "ecc_errors_total{kind=corrected,location=umc}": 37,
        "ecc_errors_total{kind=deferred,location=umc}": 2,
        "ecc_errors_total{kind=uncorrected,location=gfx}": 0,
        "ecc_errors_total{kind=corrected,location=gfx}": 0,
        "ecc_errors_total{kind=uncorrected,location=xgmi_wafl}": 0,
        "ecc_errors_total{kind=corrected,location=xgmi_wafl}": 4,
        "memory_bad_pages{status=reserved}": 2,
        "memory_bad_pages{status=pending}": 1,
        "memory_bad_pages{status=unreservable}": 0,
        "temperature_celsius{sensor=edge}": 41,
        "temperature_celsius{sensor=junction}": 52,
        "temperature_celsius{sensor=mem}": 47,
        "temperature_threshold_celsius{threshold=junction_crit}": 100,
        "power_watts": 140,
        "power_limit_watts{limit=enforced}": 750,
        "power_limit_watts{limit=default}": 750,
        "power_limit_watts{limit=min}": 0,
        "power_limit_watts{limit=max}": 750,
        "clock_hertz{domain=graphics}": 132_000_000,
        "clock_max_hertz{domain=graphics}": 2_100_000_000,
        "clock_hertz{domain=memory}": 900_000_000,
        "clock_max_hertz{domain=memory}": 1_300_000_000,
        "utilization_ratio{engine=gpu}": 0.37,
        "utilization_ratio{engine=memory}": 0.12,
        "memory_total_bytes": 206141652992,
        "memory_used_bytes": 297381888,
        "pcie_replays_total": 5,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_aer_errors_total{severity=correctable}": 3,
        "pcie_aer_errors_total{severity=nonfatal}": 0,
        "pcie_aer_errors_total{severity=fatal}": 0,
    }
    assert set(absent) == {"fan_rpm", "throttle_active", "energy_joules_total"}


def test_what_a_device_lacks_is_absent_and_never_zero(tmp_path):
    """A card without RAS, sensors and clocks gives reasons instead of readings."""
    root = plant(tmp_path, IDENTITY)
    readings, absent = checked(amd.read(DEVICE, settings(root)))
    assert readings == {}
    assert "not offered by this kernel or device" in absent["ecc_errors_total"]
    assert {name.partition("{")[0] for name in absent} >= {
        "ecc_enabled",
        "memory_bad_pages",
        "temperature_celsius",
        "power_watts",
        "clock_hertz",
        "utilization_ratio",
        "memory_total_bytes",
        "pcie_replays_total",
        "pcie_aer_errors_total",
    }


def test_an_empty_list_of_bad_pages_is_none_bad(tmp_path):
    """The driver's file is empty on a healthy device: that is a count of zero, and not an absence."""
    root = plant(tmp_path, IDENTITY | {f"{FUNCTION}/ras/gpu_vram_bad_pages": ""})
    readings, _ = checked(amd.read(DEVICE, settings(root)))
    assert readings == {f"memory_bad_pages{{status={status}}}": 0 for status in ("reserved", "pending", "unreservable")}


def test_amdsmi_adds_what_sysfs_lacks(tmp_path):
    """Reasons for throttling and energy; all else is the driver's own, and the library is let go of."""
    device, readings, absent = ask(tmp_path, "works")
    assert device.detail["library"] == "amdsmi 26.0.2"
    assert readings["throttle_active{reason=power}"] == 1
    assert readings["throttle_active{reason=thermal}"] == 0
    assert "throttle_active{reason=vr_thermal}" not in readings
    assert readings["energy_joules_total"] == pytest.approx(15.3)
    expected, _ = checked(amd.read(DEVICE, settings(tmp_path / "sys")))
    assert {key: readings[key] for key in expected} == expected
    assert set(absent) == {"fan_rpm"}
    assert (tmp_path / "log").read_text() == "init\nshut down\n"


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("import", "amdsmi cannot be used: KeyError: amdsmi: chatter on standard output Unable to find libamd_smi.so"),
        ("init", "amdsmi cannot be used: AmdSmiLibraryException: amdsmi: chatter on standard output"),
    ],
)
def test_an_amdsmi_that_fails_leaves_sysfs(tmp_path, way, why):
    """Its failure is one line of the inventory; nothing of its chatter reaches standard output."""
    device, readings, _ = ask(tmp_path, way)
    assert device.detail["library"].startswith(why)
    assert readings["ecc_errors_total{kind=corrected,location=umc}"] == 37
    assert readings["power_watts"] == 140


def test_without_the_c_library_amdsmi_is_not_imported(tmp_path):
    """The package alone would print and raise."""
    device, readings, _ = ask(tmp_path, "import", library=False)
    assert "library" not in device.detail
    assert readings["ecc_errors_total{kind=corrected,location=umc}"] == 37


@pytest.mark.parametrize("way", ["unsupported", "nonsense"])
def test_sentinels_and_refusals_of_amdsmi_leave_sysfs(tmp_path, way):
    """The greatest number of a type, "N/A", nothing, not-a-number: none of it becomes a reading."""
    _, readings, _ = ask(tmp_path, way)
    expected, _ = checked(amd.read(DEVICE, settings(tmp_path / "sys")))
    strange = {key: value for key, value in readings.items() if expected.get(key) != value}
    assert strange == {}


def test_the_probe_runs_through_the_supervisor(tmp_path):
    """Completed on a tree, skipped with its reason where there is no such device."""
    run = run_probe("amd_telemetry", DEVICE, settings(plant(tmp_path / "sys", IDENTITY | FACTS)))
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert {reading.name for reading in run.readings} >= {"ecc_errors_total", "memory_bad_pages", "power_watts"}
    run = run_probe("amd_telemetry", DEVICE, settings(tmp_path / "empty"))
    assert run.outcome is Outcome.SKIPPED, run.detail
    assert run.detail == f"rocm:0: no AMD accelerator with a driver at PCI address {BUS}"
