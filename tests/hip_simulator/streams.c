/* Streams: a thread each, which does what was enqueued later and in order; events order them among each other. */
#include "sim.h"

#include <setjmp.h>
#include <time.h>

typedef struct { /* where an event was recorded */
    int done;
    double seconds;
} Point;

typedef struct {
    Point* point; /* NULL: never recorded */
    int device, alive;
} Event;

typedef enum { COPY, KERNEL, RECORD, WAIT, CALL_HOST } Work;

typedef struct Op {
    struct Op* next;
    Work work;
    Point* point;
    void (*host)(void*);
    void* data;
    Launcher run;
    unsigned grid, block;
    size_t parameter_bytes;
    Copy copy;
    char parameters[];
} Op;

typedef struct Stream {
    pthread_t thread;
    Op *first, *last;
    int device, alive, busy;
    uint64_t random;
} Stream;

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream* defaults[NUM_DEVICES];
static uint64_t seed = 1;
static unsigned longest_us, one_in = 1;
static _Thread_local jmp_buf out_of_kernel;

/* Let one piece of work in `one` begin late, by up to `us` microseconds, as chance has it that `from` seeds. */
void hipsim_pause(uint64_t from, unsigned us, unsigned one) {
    pthread_mutex_lock(&sim_lock);
    seed = from, longest_us = us, one_in = one ? one : 1;
    pthread_mutex_unlock(&sim_lock);
}

static uint64_t chance(Stream* stream) {
    stream->random ^= stream->random << 13, stream->random ^= stream->random >> 7;
    return stream->random ^= stream->random << 17;
}

static void pause_first(Stream* stream) {
    if (!longest_us || chance(stream) % one_in) return;
    const struct timespec pause = {0, 1000l * (chance(stream) % longest_us)};
    nanosleep(&pause, NULL);
}

void sim_abandon_kernel(void) { longjmp(out_of_kernel, 1); }

static void launch(const Op* op) {
    sim_enter_kernel();
    char on_stack[4096]; /* kernels may touch their stack: their parameters lie there */
    memcpy(on_stack, op->parameters, op->parameter_bytes);
    if (!setjmp(out_of_kernel)) op->run(on_stack, op->grid, op->block);
}

static void work_off(const Op* op) {
    if (op->work == CALL_HOST) op->host(op->data);
    if (sim_broken()) return;
    if (op->work == COPY) sim_run_copy(&op->copy);
    if (op->work == KERNEL) launch(op);
}

static void* run(void* argument) {
    Stream* stream = argument;
    pthread_mutex_lock(&sim_lock);
    for (;;) {
        while (!stream->first && stream->alive) pthread_cond_wait(&changed, &sim_lock);
        Op* op = stream->first;
        if (!op) break;
        stream->first = op->next;
        stream->busy = 1;
        if (op->work == WAIT)
            while (!op->point->done) pthread_cond_wait(&changed, &sim_lock);
        pthread_mutex_unlock(&sim_lock);
        pause_first(stream);
        work_off(op);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        pthread_mutex_lock(&sim_lock);
        stream->busy = 0;
        if (op->work == RECORD) op->point->seconds = now.tv_sec + 1e-9 * now.tv_nsec, op->point->done = 1;
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&sim_lock);
    return NULL;
}

static Stream* start(int device) {
    Stream* stream = calloc(1, sizeof *stream);
    static uint64_t number;
    stream->device = device;
    stream->alive = 1;
    stream->random = (seed + ++number) * 0x9E3779B97F4A7C15ull | 1;
    if (pthread_create(&stream->thread, NULL, run, stream)) stream->alive = 0;
    return stream;
}

/* Return the stream of a handle that is alive, else NULL. Handles stay valid memory for ever. The lock is held. */
static Stream* stream_of(void* handle) {
    if (!handle) {
        const int device = sim_device();
        if (!defaults[device]) defaults[device] = start(device);
        return defaults[device];
    }
    Stream* stream = handle;
    return stream->alive ? stream : NULL;
}

static int enqueue(void* handle, Op* op) {
    pthread_mutex_lock(&sim_lock);
    Stream* stream = stream_of(handle);
    if (stream) {
        *(stream->first ? &stream->last->next : &stream->first) = op;
        stream->last = op;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&sim_lock);
    if (!stream) free(op);
    return sim_answer(stream ? SUCCESS : INVALID_HANDLE);
}

static Op* make(Work work, size_t parameter_bytes) {
    Op* op = calloc(1, sizeof *op + parameter_bytes);
    op->work = work;
    return op;
}

int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    ENTER_OR_RETURN(hipDeviceGetStreamPriorityRange);
    *least = 1;
    *greatest = -1;
    return SUCCESS;
}

int hipStreamCreateWithPriority(void** handle, unsigned flags, int priority) {
    ENTER_OR_RETURN(hipStreamCreateWithPriority);
    if (flags > 1 || priority < -1 || priority > 1) return sim_answer(INVALID_VALUE);
    pthread_mutex_lock(&sim_lock);
    *handle = start(sim_device());
    pthread_mutex_unlock(&sim_lock);
    sim_live(STREAMS, 1);
    return SUCCESS;
}

int hipStreamDestroy(void* handle) {
    ENTER(hipStreamDestroy);
    Stream* stream = handle;
    if (!stream || !stream->alive) return sim_answer(INVALID_HANDLE);
    pthread_mutex_lock(&sim_lock);
    stream->alive = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&sim_lock);
    pthread_join(stream->thread, NULL);
    sim_live(STREAMS, -1);
    return sim_answer(code);
}

int hipStreamSynchronize(void* handle) {
    ENTER_OR_RETURN(hipStreamSynchronize);
    pthread_mutex_lock(&sim_lock);
    Stream* stream = stream_of(handle);
    while (stream && (stream->first || stream->busy)) pthread_cond_wait(&changed, &sim_lock);
    pthread_mutex_unlock(&sim_lock);
    return sim_answer(stream ? sim_broken() : INVALID_HANDLE);
}

int hipStreamWaitEvent(void* stream, Event* event, unsigned flags) {
    ENTER_OR_RETURN(hipStreamWaitEvent);
    if (!event->alive || flags) return sim_answer(INVALID_HANDLE);
    Op* op = make(WAIT, 0);
    pthread_mutex_lock(&sim_lock);
    op->point = event->point;
    pthread_mutex_unlock(&sim_lock);
    if (op->point) return enqueue(stream, op);
    free(op);
    return SUCCESS;
}

/* Call `host` from the stream's thread when the stream has come to it; also where the device is broken by then. */
int hipLaunchHostFunc(void* stream, void (*host)(void*), void* data) {
    ENTER_OR_RETURN(hipLaunchHostFunc);
    Op* op = make(CALL_HOST, 0);
    op->host = host;
    op->data = data;
    return enqueue(stream, op);
}

int sim_copy(const Copy* copy, void* stream) {
    Op* op = make(COPY, 0);
    op->copy = *copy;
    return enqueue(stream, op);
}

int sim_launch(void* handle, Launcher run, const void* parameters, size_t bytes, unsigned grid, unsigned block) {
    pthread_mutex_lock(&sim_lock);
    const Stream* stream = stream_of(handle);
    pthread_mutex_unlock(&sim_lock);
    if (!stream || stream->device != sim_device()) return sim_answer(INVALID_HANDLE);
    if (!grid || !block || block > 1024 || bytes > 4096) return sim_answer(INVALID_VALUE);
    Op* op = make(KERNEL, bytes);
    op->run = run, op->grid = grid, op->block = block, op->parameter_bytes = bytes;
    memcpy(op->parameters, parameters, bytes);
    return enqueue(handle, op);
}

int hipEventCreateWithFlags(Event** event, unsigned flags) {
    ENTER_OR_RETURN(hipEventCreateWithFlags);
    if (flags > 3) return sim_answer(INVALID_VALUE);
    *event = calloc(1, sizeof **event);
    (*event)->device = sim_device();
    (*event)->alive = 1;
    sim_live(EVENTS, 1);
    return SUCCESS;
}

int hipEventDestroy(Event* event) {
    ENTER(hipEventDestroy);
    if (!event->alive) return sim_answer(INVALID_HANDLE);
    event->alive = 0;
    sim_live(EVENTS, -1);
    return sim_answer(code);
}

int hipEventRecord(Event* event, void* handle) {
    ENTER_OR_RETURN(hipEventRecord);
    pthread_mutex_lock(&sim_lock);
    const Stream* stream = stream_of(handle);
    const int fits = stream && event->alive && event->device == stream->device;
    Op* op = fits ? make(RECORD, 0) : NULL;
    if (fits) op->point = event->point = calloc(1, sizeof(Point));
    pthread_mutex_unlock(&sim_lock);
    return fits ? enqueue(handle, op) : sim_answer(INVALID_HANDLE);
}

int hipEventQuery(Event* event) {
    ENTER_OR_RETURN(hipEventQuery);
    pthread_mutex_lock(&sim_lock);
    const int ready = !event->point || event->point->done;
    pthread_mutex_unlock(&sim_lock);
    return sim_answer(!event->alive ? INVALID_HANDLE : ready ? SUCCESS : NOT_READY);
}

int hipEventSynchronize(Event* event) {
    ENTER_OR_RETURN(hipEventSynchronize);
    if (!event->alive) return sim_answer(INVALID_HANDLE);
    pthread_mutex_lock(&sim_lock);
    const Point* point = event->point;
    while (point && !point->done) pthread_cond_wait(&changed, &sim_lock);
    pthread_mutex_unlock(&sim_lock);
    return sim_answer(sim_broken());
}

int hipEventElapsedTime(float* milliseconds, const Event* first, const Event* last) {
    ENTER_OR_RETURN(hipEventElapsedTime);
    if (!first->point || !last->point) return sim_answer(INVALID_HANDLE);
    *milliseconds = 1e3f * (float)(last->point->seconds - first->point->seconds);
    return SUCCESS;
}
