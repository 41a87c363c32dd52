/* A stand-in for libnvidia-ml.so.1 that answers from a text file, so that the real pynvml can be driven without a GPU.
 *
 * $NVML_STAND_IN names the scenario, one `key=value` a line, read again whenever the file changes:
 *     count=8                        a key of the driver
 *     3.temperature=45               a key of GPU 3; `*.temperature=45` for every GPU that has no line of its own
 *     3/0.memory_total=9             a key of the first MIG instance of GPU 3; `*` + `/` + `*` likewise for all
 *     3.nvmlDeviceGetName=999        what a function returns: a code, `hang` (for ever) or `crash` (abort)
 *     nvmlInitWithFlags=9            the same for functions that take no device
 * A value `!4` makes the functions that need the key return 4; `none` is `!3`, not supported. What the scenario does
 * not say comes from `defaults`, a healthy GPU of the Hopper generation. `{gpu}` (hexadecimal) and `{instance}` stand
 * for the numbers.
 *
 * As on a real driver: a lost GPU (`3.lost=1`) fails when its handle is asked for and in every call, and makes the
 * search by UUID fail for all GPUs; a GPU divided by MIG gives no volatile errors, no remapped rows, no utilisation.
 *
 * $NVML_STAND_IN_HANDLE names a file that is held open from the first nvmlInit to the last nvmlShutdown, as
 * /dev/nvidiactl is. Without persistence (`3.persistence=0`), a GPU forgets its volatile errors when the last client
 * lets go: the first client of all processes (a lock on SCENARIO.lock tells) copies the scenario to SCENARIO.epoch, and
 * a volatile counter reads what it has grown by since then.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define GPUS 16 /* the number is one hexadecimal digit of UUID, serial and bus */
#define INSTANCES 8
#define SUCCESS 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define GPU_IS_LOST 15
#define VERSION_MISMATCH 25
#define TEXT 512

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { int gpu, instance; } device_t; /* instance -1: the whole GPU */
typedef const device_t *nvmlDevice_t;
typedef struct { char *key, *value; } line_t;
typedef struct { line_t *lines; size_t count; } scenario_t;

static device_t devices[GPUS][INSTANCES + 1];
static scenario_t now, epoch;
static int references, lock = -1, handle = -1;

static const line_t defaults[] = {
    {"count", "8"}, {"driver", "580.95.05"}, {"cuda", "13000"}, {"nvml", "13.580.95.05"},
    {"cc_feature", "0"}, {"cc_multi_gpu", "0"},
    {".name", "NVIDIA H200"}, {".uuid", "GPU-00000000-0000-4000-8000-00000000000{gpu}"}, 
    {".serial", "165042300000{gpu}"},
    {".board_part_number", "692-2G520-0280-501"}, {".vbios", "96.00.B8.00.01"}, {".inforom", "G520.0280.00.01"},
    {".inforom_ecc", "7.16"}, {".inforom_power", "none"}, {".gsp_firmware", "580.95.05"}, {".board_id", "0x6{gpu}00"},
    {".module_id", "0x{gpu}"}, {".domain", "0"}, {".bus", "0x1{gpu}"}, {".slot", "0"}, {".architecture", "9"},
    {".capability_major", "9"}, {".capability_minor", "0"}, {".persistence", "1"}, {".compute_mode", "0"},
    {".ecc_current", "1"}, {".ecc_pending", "1"}, {".mig_mode", "0"}, {".mig_pending", "0"}, {".mig_instances", "0"},
    {".volatile.corrected.dram", "0"}, {".volatile.uncorrected.dram", "0"}, {".volatile.corrected.sram", "0"},
    {".volatile.uncorrected.sram", "0"}, {".aggregate.corrected.dram", "0"}, {".aggregate.uncorrected.dram", "0"},
    {".aggregate.corrected.sram", "0"}, {".aggregate.uncorrected.sram", "0"},
    {".sram.volatile.parity", "0"}, {".sram.volatile.sec_ded", "0"}, {".sram.volatile.corrected", "0"},
    {".sram.aggregate.parity", "0"}, {".sram.aggregate.sec_ded", "0"}, {".sram.aggregate.corrected", "0"},
    {".sram.aggregate.l2", "0"}, {".sram.aggregate.sm", "0"}, {".sram.aggregate.pcie", "0"},
    {".sram.aggregate.mcu", "0"}, {".sram.aggregate.other", "0"}, {".sram.threshold", "0"},
    {".remapped.correctable", "0"}, {".remapped.uncorrectable", "0"}, {".remapped.pending", "0"},
    {".remapped.failed", "0"}, {".banks.max", "2560"}, {".banks.high", "0"}, {".banks.partial", "0"},
    {".banks.low", "0"}, {".banks.none", "0"}, {".temperature", "34"}, {".memory_temperature", "41"},
    {".temperature_margin", "53"}, {".tlimit.shutdown", "-8"}, {".tlimit.slowdown", "-2"},
    {".tlimit.memory_max", "0"}, {".tlimit.gpu_max", "0"}, {".power", "112345"}, {".power_limit.enforced", "700000"},
    {".power_limit.default", "700000"}, {".power_limit.min", "200000"}, {".power_limit.max", "700000"},
    {".energy", "123456789"}, {".reasons", "0x1"}, {".reasons_supported", "0x1ff"},
    {".throttle_ns.sw_power_cap", "0"}, {".throttle_ns.sw_thermal", "0"}, {".throttle_ns.sync_boost", "0"},
    {".throttle_ns.board_limit", "0"}, {".throttle_ns.reliability", "0"}, {".throttle_ns.hw_thermal", "0"},
    {".throttle_ns.hw_power_brake", "0"}, {".clock.graphics", "345"},
    {".clock.sm", "345"}, {".clock.memory", "3201"}, {".clock.video", "765"}, {".clock_max.graphics", "1980"},
    {".clock_max.sm", "1980"}, {".clock_max.memory", "3201"}, {".clock_max.video", "1545"},
    {".performance_state", "0"}, {".pcie_generation", "5"}, {".pcie_generation_max", "5"}, {".pcie_width", "16"},
    {".pcie_width_max", "16"}, {".pcie_replays", "0"}, {".nvlinks", "18"}, {".nvlink.up", "1"},
    {".nvlink.crc_flit", "0"}, {".nvlink.crc_data", "0"}, {".nvlink.replay", "0"}, {".nvlink.recovery", "0"},
    {".nvlink.ecc_data", "0"}, {".fabric_state", "3"}, {".fabric_status", "0"},
    {".fabric_health", "0x1aa"}, {".fabric_summary", "1"}, {".fabric_clique", "0"}, {".fabric_cluster", "0"},
    {".fabric_version", "3"}, {".utilization.gpu", "0"},
    {".utilization.memory", "0"}, {".memory_total", "150754820096"}, {".memory_used", "578813952"},
    {".memory_reserved", "577765376"},
    {".processes", ""}, {".recovery_action", "0"},
    {"/name", "NVIDIA H200 MIG 1g.18gb"}, {"/uuid", "MIG-00000000-0000-4000-8{gpu}0{instance}-000000000000"},
    {"/gpu_instance_id", "{instance}"}, {"/compute_instance_id", "0"}, {"/multiprocessors", "16"},
    {"/memory_total", "18253611008"}, {"/memory_used", "25165824"}, {"/memory_reserved", "0"},
    {"/processes", ""},
    {"/volatile.uncorrected.sram", "0"},
};

/* --- The scenario ------------------------------------------------------------------------------------------------- */

static scenario_t parse(const char *path) {
    scenario_t found = {0};
    size_t size = 0, space = 0;
    char *text = NULL, *rest = NULL;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t got = 1; file >= 0 && got > 0; size += got > 0 ? (size_t)got : 0) {
        text = realloc(text, size + 65537);
        got = read(file, text + size, 65536);
    }
    if (file >= 0) close(file);
    if (!text) return found;
    text[size] = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *equals = strchr(line, '=');
        if (!equals || *line == '#') continue;
        *equals = 0;
        if (found.count == space) found.lines = realloc(found.lines, (space = space * 2 + 64) * sizeof(line_t));
        found.lines[found.count++] = (line_t){line, equals + 1};
    }
    return found;
}

static void refresh(void) {
    static struct stat last;
    struct stat here;
    const char *path = getenv("NVML_STAND_IN");
    if (!path || stat(path, &here)) return;
    if (here.st_ino == last.st_ino && here.st_size == last.st_size && here.st_mtim.tv_sec == last.st_mtim.tv_sec
        && here.st_mtim.tv_nsec == last.st_mtim.tv_nsec) return;
    last = here;
    now = parse(path); /* the old text is left where it is: a caller may still look at it */
}

static const char *line_of(const scenario_t *in, const char *key) {
    for (size_t i = in->count; i--;)
        if (!strcmp(in->lines[i].key, key)) return in->lines[i].value;
    return NULL;
}

static const char *default_of(const char *key) {
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        if (!strcmp(defaults[i].key, key)) return defaults[i].value;
    return NULL;
}

/* Writes what `in` or the defaults say of a key, or "none"; a device of NULL asks for a key of the driver. */
static void look_up(const scenario_t *in, nvmlDevice_t device, const char *key, char *out) {
    char own[TEXT], all[TEXT], general[TEXT];
    const char *value;
    if (!device) {
        value = line_of(in, key);
        snprintf(general, TEXT, "%s", key);
    } else if (device->instance < 0) {
        snprintf(own, TEXT, "%d.%s", device->gpu, key);
        snprintf(all, TEXT, "*.%s", key);
        snprintf(general, TEXT, ".%s", key);
        value = line_of(in, own) ? line_of(in, own) : line_of(in, all);
    } else {
        snprintf(own, TEXT, "%d/%d.%s", device->gpu, device->instance, key);
        snprintf(all, TEXT, "*/*.%s", key);
        snprintf(general, TEXT, "/%s", key);
        value = line_of(in, own) ? line_of(in, own) : line_of(in, all);
    }
    if (!value) value = default_of(general);
    if (!value) value = "none";
    size_t used = 0;
    while (*value && used < TEXT - 12) {
        if (!strncmp(value, "{gpu}", 5) && device) {
            used += sprintf(out + used, "%x", device->gpu);
            value += 5;
        } else if (!strncmp(value, "{instance}", 10) && device) {
            used += sprintf(out + used, "%d", device->instance);
            value += 10;
        } else {
            out[used++] = *value++;
        }
    }
    out[used] = 0;
}

static u64 number_in(const char *text) {
    return *text == '-' ? (u64)strtoll(text, NULL, 0) : strtoull(text, NULL, 0);
}

static int code_in(const char *text) {
    if (!strcmp(text, "none")) return NOT_SUPPORTED;
    return *text == '!' ? atoi(text + 1) : SUCCESS;
}

static int text_of(nvmlDevice_t device, const char *key, char *out) {
    look_up(&now, device, key, out);
    return code_in(out);
}

static int number_of(nvmlDevice_t device, const char *key, u64 *out) {
    char text[TEXT];
    int code = text_of(device, key, text);
    if (code == SUCCESS) *out = number_in(text);
    return code;
}

/* A number that the first of two keys gives that is there. */
static int either_of(nvmlDevice_t device, const char *first, const char *second, u64 *out) {
    int code = number_of(device, first, out);
    return code == NOT_SUPPORTED ? number_of(device, second, out) : code;
}

static int is(nvmlDevice_t device, const char *key) {
    u64 value = 0;
    return number_of(device, key, &value) == SUCCESS && value;
}

static int volatile_of(nvmlDevice_t device, const char *key, u64 *out) {
    char before[TEXT];
    int code = number_of(device, key, out);
    if (code != SUCCESS || is(&devices[device->gpu][0], "persistence")) return code;
    look_up(&epoch, device, key, before);
    if (code_in(before) == SUCCESS) *out -= number_in(before);
    return code;
}

/* --- Who may pass ------------------------------------------------------------------------------------------------- */

static int behave(nvmlDevice_t device, const char *function) {
    char text[TEXT];
    look_up(&now, device, function, text);
    if (!strcmp(text, "hang"))
        for (;;) pause();
    if (!strcmp(text, "crash")) abort();
    return strcmp(text, "none") ? atoi(text) : SUCCESS;
}

static const char *counted; /* a call that names no device yet passes both gates, and is one call */

static void count_call(const char *function) {
    const char *path = getenv("NVML_STAND_IN_CALLS");
    if (!path) return;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    dprintf(file, "%s\n", function);
    close(file);
}

static int gate(nvmlDevice_t device, const char *function) {
    if (!references) return UNINITIALIZED;
    refresh();
    if (function != counted) count_call(function);
    if (!device || device < &devices[0][0] || device > &devices[GPUS - 1][INSTANCES]) return INVALID_ARGUMENT;
    int code = behave(device, function);
    return is(&devices[device->gpu][0], "lost") ? GPU_IS_LOST : code;
}

static int driver_gate(const char *function) {
    refresh();
    counted = function;
    count_call(function);
    return references ? behave(NULL, function) : UNINITIALIZED;
}

#define GATE(device) do { int code_ = gate(device, __func__); if (code_) return code_; } while (0)
#define DRIVER_GATE() do { int code_ = driver_gate(__func__); if (code_) return code_; } while (0)

static int give_text(const char *text, char *out, u32 length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int give_u32(nvmlDevice_t device, const char *key, u32 *out) {
    u64 value;
    int code = number_of(device, key, &value);
    if (code == SUCCESS) *out = (u32)value;
    return code;
}

#define STRING(function, key) \
    int function(nvmlDevice_t device, char *out, u32 length) { \
        char text[TEXT]; \
        GATE(device); \
        int code = text_of(device, key, text); \
        return code ? code : give_text(text, out, length); \
    }
#define NUMBER(function, key) \
    int function(nvmlDevice_t device, u32 *out) { GATE(device); return give_u32(device, key, out); }
#define LONG(function, key) \
    int function(nvmlDevice_t device, u64 *out) { GATE(device); return number_of(device, key, out); }
#define PAIR(function, key1, key2) \
    int function(nvmlDevice_t device, u32 *first, u32 *second) { \
        GATE(device); \
        int code = give_u32(device, key1, first); \
        return code ? code : give_u32(device, key2, second); \
    }

/* --- The library itself ------------------------------------------------------------------------------------------- */

static void begin_epoch(const char *path) {
    char name[4096];
    snprintf(name, sizeof name, "%s.lock", path);
    lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    snprintf(name, sizeof name, "%s.epoch", path);
    if (lock >= 0 && !flock(lock, LOCK_EX | LOCK_NB)) {
        FILE *copy = fopen(name, "we");
        for (size_t i = 0; copy && i < now.count; i++) fprintf(copy, "%s=%s\n", now.lines[i].key, now.lines[i].value);
        if (copy) fclose(copy);
    }
    flock(lock, LOCK_SH);
    epoch = parse(name);
}

int nvmlInitWithFlags(u32 flags) {
    const char *path = getenv("NVML_STAND_IN"), *held = getenv("NVML_STAND_IN_HANDLE");
    (void)flags;
    refresh();
    int code = behave(NULL, __func__);
    if (code || references++) return code;
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (int instance = -1; instance < INSTANCES; instance++)
            devices[gpu][instance + 1] = (device_t){gpu, instance};
    if (path) begin_epoch(path);
    if (held) handle = open(held, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    DRIVER_GATE();
    if (--references) return SUCCESS;
    if (lock >= 0) close(lock);
    if (handle >= 0) close(handle);
    lock = handle = -1;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[64];
    snprintf(text, sizeof text, "stand-in error %d", code);
    return text;
}

static int driver_text(const char *key, char *out, u32 length) {
    char text[TEXT];
    int code = text_of(NULL, key, text);
    return code ? code : give_text(text, out, length);
}

int nvmlSystemGetDriverVersion(char *out, u32 length) { DRIVER_GATE(); return driver_text("driver", out, length); }
int nvmlSystemGetNVMLVersion(char *out, u32 length) { DRIVER_GATE(); return driver_text("nvml", out, length); }
int nvmlSystemGetCudaDriverVersion(int *out) { DRIVER_GATE(); return give_u32(NULL, "cuda", (u32 *)out); }

/* Confidential computing: whether it is on, and how several GPUs are protected. */
int nvmlSystemGetConfComputeState(u32 out[3]) { DRIVER_GATE(); return give_u32(NULL, "cc_feature", &out[1]); }

int nvmlSystemGetConfComputeSettings(u32 out[5]) {
    DRIVER_GATE();
    if (out[0] != (20 | 1 << 24)) return VERSION_MISMATCH;
    int code = give_u32(NULL, "cc_feature", &out[2]);
    return code ? code : give_u32(NULL, "cc_multi_gpu", &out[4]);
}

int nvmlDeviceGetCount_v2(u32 *out) { DRIVER_GATE(); return give_u32(NULL, "count", out); }

/* --- Handles ------------------------------------------------------------------------------------------------------ */

static u32 gpus(void) {
    u32 count = 0;
    give_u32(NULL, "count", &count);
    return count < GPUS ? count : GPUS;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, nvmlDevice_t *out) {
    DRIVER_GATE();
    if (index >= gpus()) return INVALID_ARGUMENT;
    GATE(&devices[index][0]);
    *out = &devices[index][0];
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out) {
    u32 domain, bus, slot;
    u64 is_domain, is_bus, is_slot;
    DRIVER_GATE();
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_ARGUMENT;
    for (u32 i = 0; i < gpus(); i++) {
        nvmlDevice_t device = &devices[i][0];
        if (number_of(device, "domain", &is_domain) || number_of(device, "bus", &is_bus)
            || number_of(device, "slot", &is_slot) || domain != is_domain || bus != is_bus || slot != is_slot) continue;
        GATE(device);
        *out = device;
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    char text[TEXT];
    DRIVER_GATE();
    for (u32 i = 0; i < gpus(); i++)
        GATE(&devices[i][0]); /* the real one says "lost" too if any GPU is */
    for (u32 i = 0; i < gpus(); i++)
        for (int j = 0; j <= INSTANCES; j++)
            if (text_of(&devices[i][j], "uuid", text) == SUCCESS && !strcmp(text, uuid)) {
                *out = &devices[i][j];
                return SUCCESS;
            }
    return NOT_FOUND;
}

PAIR(nvmlDeviceGetMigMode, "mig_mode", "mig_pending")

int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, u32 *out) {
    u32 mode;
    GATE(device);
    int code = give_u32(device, "mig_mode", &mode);
    *out = code ? 0 : INSTANCES - 1;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, u32 index, nvmlDevice_t *out) {
    u32 count = 0;
    GATE(device);
    if (device->instance >= 0 || index >= INSTANCES) return INVALID_ARGUMENT;
    give_u32(device, "mig_instances", &count);
    if (index >= count || !is(device, "mig_mode")) return NOT_FOUND;
    GATE(&devices[device->gpu][index + 1]);
    *out = &devices[device->gpu][index + 1];
    return SUCCESS;
}

/* --- Identity ----------------------------------------------------------------------------------------------------- */

STRING(nvmlDeviceGetName, "name")
STRING(nvmlDeviceGetUUID, "uuid")
STRING(nvmlDeviceGetSerial, "serial")
STRING(nvmlDeviceGetBoardPartNumber, "board_part_number")
STRING(nvmlDeviceGetVbiosVersion, "vbios")
STRING(nvmlDeviceGetInforomImageVersion, "inforom")
NUMBER(nvmlDeviceGetBoardId, "board_id")
NUMBER(nvmlDeviceGetModuleId, "module_id")
NUMBER(nvmlDeviceGetArchitecture, "architecture")
NUMBER(nvmlDeviceGetGpuInstanceId, "gpu_instance_id")
NUMBER(nvmlDeviceGetComputeInstanceId, "compute_instance_id")
PAIR(nvmlDeviceGetCudaComputeCapability, "capability_major", "capability_minor")

int nvmlDeviceGetInforomVersion(nvmlDevice_t device, u32 object, char *out, u32 length) {
    char text[TEXT];
    GATE(device);
    int code = text_of(device, object == 1 ? "inforom_ecc" : object == 2 ? "inforom_power" : "inforom_oem", text);
    return code ? code : give_text(text, out, length);
}

int nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *out) {
    char text[TEXT];
    GATE(device);
    int code = text_of(device, "gsp_firmware", text);
    return code ? code : give_text(text, out, 64);
}

typedef struct {
    char legacy[16];
    u32 domain, bus, slot, id, subsystem;
    char bus_id[32];
} pci_t;

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, pci_t *out) {
    GATE(device);
    memset(out, 0, sizeof *out);
    int code = give_u32(device, "domain", &out->domain);
    if (!code) code = give_u32(device, "bus", &out->bus);
    if (!code) code = give_u32(device, "slot", &out->slot);
    snprintf(out->bus_id, 32, "%08X:%02X:%02X.0", out->domain, out->bus, out->slot);
    return code;
}

typedef struct {
    u32 multiprocessors, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    u64 memory_mib;
} attributes_t;

int nvmlDeviceGetAttributes_v2(nvmlDevice_t device, attributes_t *out) {
    GATE(device);
    memset(out, 0, sizeof *out);
    return give_u32(device, "multiprocessors", &out->multiprocessors);
}

/* --- Settings and use --------------------------------------------------------------------------------------------- */

NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
PAIR(nvmlDeviceGetEccMode, "ecc_current", "ecc_pending")

int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, u32 *out) {
    GATE(device);
    if (device->instance >= 0 || is(device, "mig_mode")) return NOT_SUPPORTED;
    int code = give_u32(device, "utilization.gpu", &out[0]);
    return code ? code : give_u32(device, "utilization.memory", &out[1]);
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, u64 *out) {
    GATE(device);
    int code = number_of(device, "memory_total", &out[0]);
    if (!code) code = number_of(device, "memory_used", &out[2]);
    if (!code) out[1] = out[0] - out[2];
    return code;
}

typedef struct { u32 version; u64 total, reserved, unused, used; } memory_t;

/* Here used does not include what is reserved. */
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, memory_t *out) {
    GATE(device);
    int code = number_of(device, "memory_total", &out->total);
    if (!code) code = number_of(device, "memory_used", &out->used);
    if (!code) code = number_of(device, "memory_reserved", &out->reserved);
    if (code) return code;
    out->unused = out->total - out->used;
    out->used -= out->reserved;
    return SUCCESS;
}

typedef struct { u32 pid; u64 memory; u32 gpu_instance, compute_instance; } process_t;

/* `processes` is a list such as "4242:1073741824,77:none". */
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, u32 *count, process_t *out) {
    char text[TEXT], *rest = NULL;
    u32 found = 0;
    GATE(device);
    int code = text_of(device, "processes", text);
    if (code) return code;
    for (char *item = strtok_r(text, ",", &rest); item; item = strtok_r(NULL, ",", &rest), found++) {
        char *memory = strchr(item, ':');
        if (out && memory && found < *count)
            out[found] = (process_t){
                (u32)atoi(item), strcmp(memory, ":none") ? number_in(memory + 1) : ~0ULL, ~0U, ~0U};
    }
    code = found > (out ? *count : 0) ? INSUFFICIENT_SIZE : SUCCESS;
    *count = found;
    return code;
}

/* --- Errors of memory and caches ---------------------------------------------------------------------------------- */

static int errors_of(nvmlDevice_t device, u32 kind, u32 counter, const char *location, u64 *out) {
    char key[TEXT];
    nvmlDevice_t whole = &devices[device->gpu][0];
    if (kind > 1 || counter > 1) return INVALID_ARGUMENT;
    if (!is(whole, "ecc_current") || (!counter && device == whole && is(device, "mig_mode"))) return NOT_SUPPORTED;
    snprintf(key, TEXT, "%s.%s.%s", counter ? "aggregate" : "volatile", kind ? "uncorrected" : "corrected", location);
    return counter ? number_of(device, key, out) : volatile_of(device, key, out);
}

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, u32 kind, u32 counter, u64 *out) {
    GATE(device);
    return errors_of(device, kind, counter, "all", out);
}

int nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, u32 kind, u32 counter, u32 location, u64 *out) {
    static const char *names[] = {"l1", "l2", "dram", "register_file", "texture", "texture_shm", "cbu", "sram"};
    GATE(device);
    return location > 7 ? INVALID_ARGUMENT : errors_of(device, kind, counter, names[location], out);
}

typedef struct { u32 version; u64 counters[11]; u32 threshold; } sram_t;

int nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, sram_t *out) {
    static const char *keys[] = {"aggregate.parity", "aggregate.sec_ded", "aggregate.corrected", "volatile.parity",
                                 "volatile.sec_ded", "volatile.corrected", "aggregate.l2", "aggregate.sm",
                                 "aggregate.pcie", "aggregate.mcu", "aggregate.other"};
    char key[TEXT];
    int code = SUCCESS;
    GATE(device);
    if (out->version != (sizeof *out | 1 << 24)) return VERSION_MISMATCH;
    for (int i = 0; i < 11 && !code; i++) {
        snprintf(key, TEXT, "sram.%s", keys[i]);
        code = (*keys[i] == 'v' ? volatile_of : number_of)(device, key, &out->counters[i]);
    }
    return code ? code : give_u32(device, "sram.threshold", &out->threshold);
}

int nvmlDeviceGetRemappedRows(nvmlDevice_t device, u32 *correctable, u32 *uncorrectable, u32 *pending, u32 *failed) {
    GATE(device);
    if (is(device, "mig_mode")) return NOT_SUPPORTED;
    int code = give_u32(device, "remapped.correctable", correctable);
    if (!code) code = give_u32(device, "remapped.uncorrectable", uncorrectable);
    if (!code) code = give_u32(device, "remapped.pending", pending);
    return code ? code : give_u32(device, "remapped.failed", failed);
}

int nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, u32 *out) {
    static const char *keys[] = {"banks.max", "banks.high", "banks.partial", "banks.low", "banks.none"};
    int code = SUCCESS;
    GATE(device);
    for (int i = 0; i < 5 && !code; i++) code = give_u32(device, keys[i], &out[i]);
    return code;
}

/* --- Heat, power, clocks ------------------------------------------------------------------------------------------ */

int nvmlDeviceGetTemperature(nvmlDevice_t device, u32 sensor, u32 *out) {
    GATE(device);
    return sensor ? INVALID_ARGUMENT : give_u32(device, "temperature", out);
}

int nvmlDeviceGetTemperatureV(nvmlDevice_t device, u32 *out) {
    GATE(device);
    if (out[0] != 0x100000C) return VERSION_MISMATCH;
    return out[1] ? INVALID_ARGUMENT : give_u32(device, "temperature", &out[2]);
}

int nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, u32 threshold, u32 *out) {
    static const char *names[] = {"shutdown", "slowdown", "memory_max", "gpu_max",
                                  "acoustic_min", "acoustic_current", "acoustic_max", "gps_current"};
    char key[TEXT];
    GATE(device);
    if (threshold > 7) return INVALID_ARGUMENT;
    snprintf(key, TEXT, "threshold.%s", names[threshold]);
    return give_u32(device, key, out);
}

int nvmlDeviceGetMarginTemperature(nvmlDevice_t device, u32 *out) {
    GATE(device);
    return out[0] == 0x1000008 ? give_u32(device, "temperature_margin", &out[1]) : VERSION_MISMATCH;
}

NUMBER(nvmlDeviceGetNumFans, "fans")

int nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, u32 fan, u32 *out) {
    char key[TEXT];
    GATE(device);
    snprintf(key, TEXT, "fan.%u", fan);
    return give_u32(device, key, out);
}

NUMBER(nvmlDeviceGetPowerUsage, "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit.enforced")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit.default")
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, "power_limit.min", "power_limit.max")
LONG(nvmlDeviceGetTotalEnergyConsumption, "energy")
LONG(nvmlDeviceGetCurrentClocksEventReasons, "reasons")
LONG(nvmlDeviceGetCurrentClocksThrottleReasons, "reasons")
LONG(nvmlDeviceGetSupportedClocksEventReasons, "reasons_supported")
LONG(nvmlDeviceGetSupportedClocksThrottleReasons, "reasons_supported")
NUMBER(nvmlDeviceGetPerformanceState, "performance_state")

static int clock_of(nvmlDevice_t device, const char *what, u32 domain, u32 *out) {
    static const char *names[] = {"graphics", "sm", "memory", "video"};
    char key[TEXT];
    if (domain > 3) return INVALID_ARGUMENT;
    snprintf(key, TEXT, "%s.%s", what, names[domain]);
    return give_u32(device, key, out);
}

int nvmlDeviceGetClockInfo(nvmlDevice_t device, u32 domain, u32 *out) {
    GATE(device);
    return clock_of(device, "clock", domain, out);
}

int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, u32 domain, u32 *out) {
    GATE(device);
    return clock_of(device, "clock_max", domain, out);
}

/* --- Links -------------------------------------------------------------------------------------------------------- */

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie_replays")

static int link_of(nvmlDevice_t device, u32 link, const char *what, u64 *out) {
    char own[TEXT], all[TEXT];
    u32 count = 0;
    int code = give_u32(device, "nvlinks", &count);
    if (code) return code;
    if (link >= count) return INVALID_ARGUMENT;
    snprintf(own, TEXT, "nvlink.%u.%s", link, what);
    snprintf(all, TEXT, "nvlink.%s", what);
    return either_of(device, own, all, out);
}

int nvmlDeviceGetNvLinkState(nvmlDevice_t device, u32 link, u32 *out) {
    u64 value = 0;
    GATE(device);
    int code = link_of(device, link, "up", &value);
    *out = (u32)value;
    return code;
}

int nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, u32 link, u32 counter, u64 *out) {
    static const char *names[] = {"replay", "recovery", "crc_flit", "crc_data", "ecc_data"};
    GATE(device);
    return counter > 4 ? INVALID_ARGUMENT : link_of(device, link, names[counter], out);
}

typedef struct {
    u32 version;
    unsigned char cluster[16];
    u32 status, clique, state, health;
    unsigned char summary; /* from version 3 on */
} fabric_t;

/* `fabric_version` is the newest structure that the driver knows. */
int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, fabric_t *out) {
    u32 newest = 3, cluster = 0, summary = 0;
    GATE(device);
    give_u32(device, "fabric_version", &newest);
    int is_third = newest >= 3 && out->version == (sizeof *out | 3 << 24);
    if (!is_third && out->version != (offsetof(fabric_t, summary) | 2 << 24)) return VERSION_MISMATCH;
    int code = give_u32(device, "fabric_state", &out->state);
    if (!code) code = give_u32(device, "fabric_status", &out->status);
    if (!code) code = give_u32(device, "fabric_health", &out->health);
    give_u32(device, "fabric_summary", &summary);
    give_u32(device, "fabric_clique", &out->clique);
    give_u32(device, "fabric_cluster", &cluster);
    out->cluster[15] = (unsigned char)cluster;
    if (is_third) out->summary = (unsigned char)summary;
    return code;
}

typedef struct { unsigned char cluster[16]; u32 status, clique, state; } old_fabric_t;

int nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, old_fabric_t *out) {
    GATE(device);
    int code = give_u32(device, "fabric_state", &out->state);
    return code ? code : give_u32(device, "fabric_status", &out->status);
}

/* --- Field values ------------------------------------------------------------------------------------------------- */

typedef struct {
    u32 id, scope;
    long long timestamp, latency;
    u32 type;
    int code;
    union { double d; u32 ui; unsigned long ul; u64 ull; long long sll; int si; unsigned short us; } value;
} field_t;

enum { DOUBLE, UINT, ULONG, ULLONG, SLLONG, SINT, USHORT };

static const struct { u32 id, type; const char *key; } fields[] = {
    {29, UINT, "retired.single_bit"}, {30, UINT, "retired.double_bit"}, {31, UINT, "retired.pending"},
    {74, ULLONG, "throttle_ns.sw_power_cap"}, {75, ULLONG, "throttle_ns.sw_thermal"},
    {76, ULLONG, "throttle_ns.sync_boost"}, {77, ULLONG, "throttle_ns.board_limit"},
    {79, ULLONG, "throttle_ns.reliability"}, {82, UINT, "memory_temperature"}, {91, UINT, "nvlinks"},
    {193, SINT, "tlimit.shutdown"}, {194, SINT, "tlimit.slowdown"}, {195, SINT, "tlimit.memory_max"},
    {196, SINT, "tlimit.gpu_max"}, {230, UINT, "recovery_action"},
    {206, ULLONG, "/malformed"}, {207, ULLONG, "/overrun"}, {208, ULLONG, "/receive"}, {211, ULLONG, "/integrity"},
    {212, ULLONG, "/discard"}, {214, ULLONG, "/recovery_failed"}, {215, ULLONG, "/recoveries"},
    {219, ULLONG, "/effective"},
};

/* The moving ones: 252 and 253 from driver 575.51 to 580.65, 270 and 271 from 580.82 on, as in nvidia-ml-py. */
static const char *moving(u32 id) {
    char driver[TEXT];
    int major = 0, minor = 0;
    if (text_of(NULL, "driver", driver) || sscanf(driver, "%d.%d", &major, &minor) < 1) return NULL;
    int version = major * 1000 + minor;
    u32 first = version >= 580082 ? 270 : version >= 575051 && version <= 580065 ? 252 : 0;
    if (!first || id < first || id > first + 1) return NULL;
    return id == first ? "throttle_ns.hw_thermal" : "throttle_ns.hw_power_brake";
}

/* Fields of single links: numbers of their own for links 0 to 5 and 6 to 11, and a number with the link as scope. */
static const char *link_key(u32 id, u32 *scope) {
    static const struct { u32 first, later, scoped; const char *key; } links[] = {
        {46, 108, 161, "/replay"}, {53, 114, 162, "/recovery"}, {32, 96, 163, "/crc_flit"},
        {39, 102, 0, "/crc_data"}, {148, 154, 0, "/ecc_data"}, {0, 0, 165, "/up"},
    };
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        u32 first = links[i].first, later = links[i].later;
        if (links[i].scoped && id == links[i].scoped) return links[i].key;
        if (first && id >= first && id < first + 6) return *scope = id - first, links[i].key;
        if (later && id >= later && id < later + 6) return *scope = id - later + 6, links[i].key;
    }
    return NULL;
}

static int field_of(nvmlDevice_t device, field_t *field) {
    char type_key[TEXT];
    const char *key = moving(field->id);
    u64 value = 0, type = ULLONG;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].id == field->id) key = fields[i].key, type = fields[i].type;
    u32 scope = field->scope;
    if (!key && !is(NULL, "no_link_fields")) key = link_key(field->id, &scope);
    if (!key) return INVALID_ARGUMENT;
    int code = *key == '/' ? link_of(device, scope, key + 1, &value) : number_of(device, key, &value);
    snprintf(type_key, TEXT, "type.%s", key);
    number_of(device, type_key, &type);
    field->type = (u32)type;
    field->value.ull = value;
    if (type == UINT || type == SINT) field->value.ull = (u32)value;
    if (type == DOUBLE) field->value.d = (double)value;
    return code;
}

int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, field_t *out) {
    GATE(device);
    if (device->instance >= 0) return NOT_SUPPORTED;
    for (int i = 0; i < count; i++) out[i].code = field_of(device, &out[i]);
    return SUCCESS;
}
