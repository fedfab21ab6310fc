/* Device memory and registered host memory, each at an address of its own between pages that nobody may touch. */
#include "sim.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define GUARD (16 * PAGE)
#define MAX_RANGES 65536

typedef struct {
    uintptr_t device; /* where the device sees it */
    uintptr_t host;   /* of host memory that the device knows */
    size_t bytes;
    int owned;        /* the driver made it: it is no registration */
} Range;

static Range ranges[MAX_RANGES];
static int num_ranges;
static atomic_ulong generation = 1; /* of `ranges`: what a thread remembers of it holds only for this one */
static uint64_t place = 88172645463325252ull;

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Reserve address space at a random place, and return where `bytes` stand between guards. */
static void* reserve(size_t bytes) {
    pthread_mutex_lock(&sim_lock);
    place ^= place << 13, place ^= place >> 7, place ^= place << 17;
    const uintptr_t hint = (0x100000000000ull + (place % 0x500000000ull) * PAGE);
    pthread_mutex_unlock(&sim_lock);
    const size_t all = whole_pages(bytes) + 2 * GUARD;
    char* start = mmap((void*)hint, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start + GUARD;
}

/* Take the bytes away and keep the addresses, so that later use of them is seen. */
static void withdraw(uintptr_t address, size_t bytes) {
    mmap((void*)address, whole_pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static int add(Range range) {
    pthread_mutex_lock(&sim_lock);
    const int fits = num_ranges < MAX_RANGES;
    if (fits) ranges[num_ranges++] = range;
    atomic_fetch_add(&generation, 1);
    pthread_mutex_unlock(&sim_lock);
    return fits;
}

/* Find and, where told to, remove the range that holds [address, address + bytes) as the host or the device sees it. */
static int find(uintptr_t address, size_t bytes, int host, int removes, Range* found) {
    int is_there = 0;
    pthread_mutex_lock(&sim_lock);
    for (int i = 0; i < num_ranges && !is_there; ++i) {
        const uintptr_t start = host ? ranges[i].host : ranges[i].device;
        if (!start || address < start || address - start > ranges[i].bytes) continue;
        if (bytes > ranges[i].bytes - (address - start) || address - start == ranges[i].bytes) continue;
        is_there = 1;
        *found = ranges[i];
        if (removes) {
            ranges[i] = ranges[--num_ranges];
            atomic_fetch_add(&generation, 1);
        }
    }
    pthread_mutex_unlock(&sim_lock);
    return is_there;
}

int sim_may_touch(uintptr_t address, size_t bytes, Reach reach) {
    Range found;
    return find(address, bytes, 0, 0, &found) || (reach == BY_DMA && find(address, bytes, 1, 0, &found));
}

static _Thread_local uintptr_t stack_start, stack_end;

void sim_enter_kernel(void) {
    pthread_attr_t attributes;
    void* start;
    size_t bytes;
    if (stack_end) return;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &start, &bytes);
    pthread_attr_destroy(&attributes);
    stack_start = (uintptr_t)start;
    stack_end = stack_start + bytes;
}

/* One access of a kernel. Most fall into a range that the thread's last ones fell into. */
void sim_touch(uintptr_t address, size_t bytes) {
    enum { KEPT = 4 };
    static _Thread_local Range kept[KEPT];
    static _Thread_local unsigned long seen;
    static _Thread_local unsigned next;
    const unsigned long now = atomic_load(&generation);
    if (seen != now) memset(kept, 0, sizeof kept), seen = now;
    for (int i = 0; i < KEPT; ++i)
        if (address >= kept[i].device && address - kept[i].device + bytes <= kept[i].bytes) return;
    if (address >= stack_start && address + bytes <= stack_end) return;
    Range found;
    if (find(address, bytes, 0, 0, &found)) {
        kept[next++ % KEPT] = found;
        return;
    }
    char why[128];
    const char* whose = find(address, 1, 1, 0, &found) ? "a host address of registered memory" : "not the device's";
    snprintf(why, sizeof why, "a kernel touched %zu B at %#lx: %s", bytes, (unsigned long)address, whose);
    sim_break(ILLEGAL_ADDRESS, why);
    sim_abandon_kernel();
}

int hipMalloc(void** address, size_t bytes) {
    ENTER_OR_RETURN(hipMalloc);
    char* start = bytes ? reserve(bytes) : NULL;
    if (!start || mprotect(start, whole_pages(bytes), PROT_READ | PROT_WRITE)) return sim_answer(OUT_OF_MEMORY);
    memset(start, 0xEE, bytes);
    if (!add((Range){(uintptr_t)start, 0, bytes, 0})) return sim_answer(OUT_OF_MEMORY);
    sim_live(ALLOCATIONS, 1);
    *address = start;
    return SUCCESS;
}

int hipFree(void* address) {
    ENTER(hipFree);
    Range found;
    if (!find((uintptr_t)address, 1, 0, 0, &found) || found.host || found.device != (uintptr_t)address)
        return sim_answer(INVALID_VALUE);
    find((uintptr_t)address, 1, 0, 1, &found);
    withdraw(found.device, found.bytes);
    sim_live(ALLOCATIONS, -1);
    return sim_answer(code);
}

int hipMemGetAddressRange(void** base, size_t* bytes, void* address) {
    ENTER_OR_RETURN(hipMemGetAddressRange);
    Range found;
    if (!find((uintptr_t)address, 1, 0, 0, &found)) return sim_answer(NOT_FOUND);
    *base = (void*)found.device;
    *bytes = found.bytes;
    return SUCCESS;
}

/* Put the bytes of whole pages into a file that is then mapped at both places. */
static int map_twice(void* host, void* alias, size_t bytes) {
    const int file = memfd_create("hipsim", MFD_CLOEXEC);
    if (file < 0) return 0;
    int done = ftruncate(file, bytes) == 0;
    for (size_t at = 0; done && at < bytes;) {
        const ssize_t written = pwrite(file, (char*)host + at, bytes - at, at);
        done = written > 0;
        at += done ? written : 0;
    }
    const int both = PROT_READ | PROT_WRITE, how = MAP_SHARED | MAP_FIXED;
    done = done && mmap(alias, bytes, both, how, file, 0) != MAP_FAILED;
    done = done && mmap(host, bytes, both, how, file, 0) != MAP_FAILED;
    close(file);
    return done;
}

/* Give the host its pages back as they were before `map_twice`: its own, which a forked child gets a copy of. They may be
 * of the heap, whose other owners go on with them. */
static int map_back(void* host, size_t bytes) {
    void* own = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) return 0;
    memcpy(own, host, bytes);
    return mremap(own, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, host) == host;
}

/* Whole pages only: what lies beside them belongs to others, who write to it while the pages change places. */
int hipHostRegister(void* host, size_t bytes, unsigned flags) {
    ENTER_OR_RETURN(hipHostRegister);
    const uintptr_t start = (uintptr_t)host;
    if (!bytes || start % PAGE || bytes % PAGE || flags != 3) return sim_answer(INVALID_VALUE);
    pthread_mutex_lock(&sim_lock);
    int taken = 0;
    for (int i = 0; i < num_ranges; ++i)
        taken |= ranges[i].host && ranges[i].host < start + bytes && start < ranges[i].host + ranges[i].bytes;
    pthread_mutex_unlock(&sim_lock);
    if (taken) return sim_answer(ALREADY_REGISTERED);
    char* alias = reserve(bytes);
    if (!alias || !map_twice(host, alias, bytes) || !add((Range){(uintptr_t)alias, start, bytes, 0}))
        return sim_answer(OUT_OF_MEMORY);
    sim_live(REGISTRATIONS, 1);
    return SUCCESS;
}

int hipHostUnregister(void* host) {
    ENTER(hipHostUnregister);
    Range found;
    if (!find((uintptr_t)host, 1, 1, 0, &found) || found.host != (uintptr_t)host || found.owned)
        return sim_answer(NOT_REGISTERED);
    find((uintptr_t)host, 1, 1, 1, &found);
    withdraw(found.device, found.bytes);
    sim_live(REGISTRATIONS, -1);
    return sim_answer(map_back(host, found.bytes) ? code : OUT_OF_MEMORY);
}

int hipHostMalloc(void** host, size_t bytes, unsigned flags) {
    ENTER_OR_RETURN(hipHostMalloc);
    char *start = reserve(bytes), *alias = reserve(bytes);
    if (!bytes || flags != 3 || !start || !alias) return sim_answer(INVALID_VALUE);
    if (mprotect(start, whole_pages(bytes), PROT_READ | PROT_WRITE)) return sim_answer(OUT_OF_MEMORY);
    if (!map_twice(start, alias, whole_pages(bytes))) return sim_answer(OUT_OF_MEMORY);
    if (!add((Range){(uintptr_t)alias, (uintptr_t)start, bytes, 1})) return sim_answer(OUT_OF_MEMORY);
    sim_live(HOST_ALLOCATIONS, 1);
    *host = start;
    return SUCCESS;
}

int hipHostFree(void* host) {
    ENTER(hipHostFree);
    Range found;
    if (!find((uintptr_t)host, 1, 1, 0, &found) || found.host != (uintptr_t)host || !found.owned)
        return sim_answer(INVALID_VALUE);
    find((uintptr_t)host, 1, 1, 1, &found);
    withdraw(found.device, found.bytes);
    withdraw(found.host, found.bytes);
    sim_live(HOST_ALLOCATIONS, -1);
    return sim_answer(code);
}

int hipHostGetDevicePointer(void** device, void* host, unsigned flags) {
    ENTER_OR_RETURN(hipHostGetDevicePointer);
    Range found;
    if (flags || !find((uintptr_t)host, 1, 1, 0, &found)) return sim_answer(INVALID_VALUE);
    *device = (void*)(found.device + ((uintptr_t)host - found.host));
    return SUCCESS;
}

int hipMemcpyHtoD(void* destination, const void* source, size_t bytes) {
    ENTER_OR_RETURN(hipMemcpyHtoD);
    if (!sim_may_touch((uintptr_t)destination, bytes, BY_DEVICE)) return sim_answer(INVALID_VALUE);
    memcpy(destination, source, bytes);
    return SUCCESS;
}

void sim_run_copy(const Copy* copy) {
    for (size_t row = 0; row < copy->height; ++row) {
        char *to = copy->to + row * copy->to_pitch, *from = copy->from + row * copy->from_pitch;
        if (!sim_may_touch((uintptr_t)to, copy->width, BY_DMA) || !sim_may_touch((uintptr_t)from, copy->width, BY_DMA)) {
            sim_break(ILLEGAL_ADDRESS, "a copy of memory that was given back before it ran");
            return;
        }
        memcpy(to, from, copy->width);
    }
}

/* Refuse a copy that does not lie in one allocation or one registration on either side; enqueue others. */
static int enqueue_copy(const Copy* copy, int kind, void* stream) {
    if (kind != 4 || !copy->width || !copy->height) return sim_answer(INVALID_VALUE);
    if (copy->height > 1 && (copy->width > copy->to_pitch || copy->width > copy->from_pitch)) return sim_answer(INVALID_VALUE);
    const size_t to_bytes = (copy->height - 1) * copy->to_pitch + copy->width;
    const size_t from_bytes = (copy->height - 1) * copy->from_pitch + copy->width;
    if (!sim_may_touch((uintptr_t)copy->to, to_bytes, BY_DMA)) return sim_answer(INVALID_VALUE);
    if (!sim_may_touch((uintptr_t)copy->from, from_bytes, BY_DMA)) return sim_answer(INVALID_VALUE);
    return sim_copy(copy, stream);
}

int hipMemcpyAsync(void* to, void* from, size_t bytes, int kind, void* stream) {
    ENTER_OR_RETURN(hipMemcpyAsync);
    return enqueue_copy(&(Copy){to, from, 0, 0, bytes, 1}, kind, stream);
}

int hipMemcpy2DAsync(void* to, size_t to_pitch, void* from, size_t from_pitch, size_t width, size_t height, int kind,
                     void* stream) {
    ENTER_OR_RETURN(hipMemcpy2DAsync);
    return enqueue_copy(&(Copy){to, from, to_pitch, from_pitch, width, height}, kind, stream);
}

int hipMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count, void* attributes, size_t* indices,
                        size_t num_attributes, size_t* failed, void* stream) {
    ENTER_OR_RETURN(hipMemcpyBatchAsync);
    if (!count || attributes || indices || num_attributes) return sim_answer(INVALID_VALUE);
    for (size_t i = 0; i < count; ++i) {
        const int refused = enqueue_copy(&(Copy){to[i], from[i], 0, 0, bytes[i], 1}, 4, stream);
        *failed = i;
        if (refused) return refused;
    }
    return SUCCESS;
}
