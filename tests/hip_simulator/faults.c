/* Injected failures, counters, and errors by name. */
#include "sim.h"

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
    char name[64];
    long after;
    int code;
} Failure;

#define MAX_FAILURES 16
static Failure failures[MAX_FAILURES];
static int num_failures;
static Site* sites;
static long live[NUM_KINDS];
static int broken;
static char message[256];
static _Thread_local int last_error;
static const char* const kinds[NUM_KINDS] = {
    "allocations", "events", "host allocations", "modules", "registrations", "streams"};

int sim_enter(Site* site) {
    int code = 0;
    pthread_mutex_lock(&sim_lock);
    if (!site->known) {
        site->known = 1;
        site->next = sites;
        sites = site;
    }
    ++site->calls;
    for (int i = 0; i < num_failures; ++i) {
        Failure* failure = &failures[i];
        if (strcmp(failure->name, site->name) || failure->after-- > 0) continue;
        code = failure->code;
        *failure = failures[--num_failures];
        break;
    }
    if (!code) code = broken;
    pthread_mutex_unlock(&sim_lock);
    return code;
}

int sim_answer(int code) {
    if (code) last_error = code;
    return code;
}

void sim_live(Kind kind, int change) { __atomic_add_fetch(&live[kind], change, __ATOMIC_SEQ_CST); }

void sim_break(int code, const char* why) {
    pthread_mutex_lock(&sim_lock);
    if (!broken) snprintf(message, sizeof message, "%s", why);
    broken = code;
    pthread_mutex_unlock(&sim_lock);
}

int sim_broken(void) { return __atomic_load_n(&broken, __ATOMIC_SEQ_CST); }

/* Let call number `after` of `name` from now on, 0 for the next, answer `code`, once. */
int hipsim_fail(const char* name, long after, int code) {
    pthread_mutex_lock(&sim_lock);
    const int fits = num_failures < MAX_FAILURES && strlen(name) < sizeof failures[0].name;
    if (fits) {
        Failure* failure = &failures[num_failures++];
        strcpy(failure->name, name);
        failure->after = after;
        failure->code = code;
    }
    pthread_mutex_unlock(&sim_lock);
    return fits ? 0 : -1;
}

/* How many failures no call has come to yet. */
int hipsim_pending(void) { return num_failures; }

/* Break the device: what is queued is dropped, and every call answers `code`. */
void hipsim_break(int code) { sim_break(code, "told to"); }

/* Forget injected failures and repair the device. */
void hipsim_repair(void) {
    pthread_mutex_lock(&sim_lock);
    num_failures = broken = 0;
    message[0] = 0;
    pthread_mutex_unlock(&sim_lock);
}

/* Why the device broke; "" where it did not. */
const char* hipsim_message(void) { return message; }

/* How many `kind` are alive; -1 for a kind that there is not. */
long hipsim_live(const char* kind) {
    for (int i = 0; i < NUM_KINDS; ++i)
        if (!strcmp(kind, kinds[i])) return __atomic_load_n(&live[i], __ATOMIC_SEQ_CST);
    return -1;
}

/* How often `name` was called. */
long hipsim_calls(const char* name) {
    long calls = 0;
    pthread_mutex_lock(&sim_lock);
    for (Site* site = sites; site; site = site->next)
        if (!strcmp(site->name, name)) calls += site->calls;
    pthread_mutex_unlock(&sim_lock);
    return calls;
}

int hipGetLastError(void) {
    const int code = last_error;
    last_error = 0;
    return code;
}

static const struct {
    int code;
    const char* name;
    const char* text;
} errors[] = {
    {SUCCESS, "hipSuccess", "no error"},
    {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
    {NO_BINARY_FOR_GPU, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {NOT_READY, "hipErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered", "part or all of the memory is already registered"},
    {NOT_REGISTERED, "hipErrorHostMemoryNotRegistered", "the memory is not registered"},
    {NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
};

const char* hipGetErrorName(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; ++i)
        if (errors[i].code == code) return errors[i].name;
    return "hipErrorUnknown";
}

const char* hipGetErrorString(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; ++i)
        if (errors[i].code == code) return errors[i].text;
    return "unknown error";
}
