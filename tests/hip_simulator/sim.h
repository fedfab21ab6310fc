/* A HIP runtime without a GPU, for tests: what its files share. Real function names and error codes, no real headers.
 *
 * It is stricter than hardware where hardware would only sometimes fail: memory that nobody registered cannot be copied,
 * a copy or a kernel's access must lie in one allocation or registration, and nothing waits that was not told to. */
#ifndef SIM_H
#define SIM_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

#define NUM_DEVICES 2

/* -- faults.c: injected failures, the sticky one, and what is alive -- */

typedef struct Site {
    const char* name;
    long calls;
    struct Site* next;
    int known;
} Site;

typedef enum { ALLOCATIONS, EVENTS, HOST_ALLOCATIONS, MODULES, REGISTRATIONS, STREAMS, NUM_KINDS } Kind;

/* Begin a call: `code` is what it must answer. Calls that give something back do so whatever that is, as a runtime does
 * that reports an earlier error of another call. */
#define ENTER(called)                      \
    static Site site_ = {.name = #called}; \
    const int code = sim_enter(&site_)
#define ENTER_OR_RETURN(called) \
    ENTER(called);              \
    if (code) return sim_answer(code)

extern pthread_mutex_t sim_lock; /* over all state of the simulator; never held while bytes move or Python runs */
int sim_enter(Site* site);
int sim_answer(int code); /* remembers an error as the thread's last one */
void sim_live(Kind kind, int change);
void sim_break(int code, const char* why); /* from now on every call fails */
int sim_broken(void);
int sim_device(void); /* the calling thread's */

/* -- memory.c -- */

typedef enum { BY_DEVICE, BY_DMA } Reach; /* kernels know device addresses only; DMA takes registered host ones too */
int sim_may_touch(uintptr_t address, size_t bytes, Reach reach);
void sim_touch(uintptr_t address, size_t bytes); /* a kernel's access, in a stream's thread */
typedef struct {
    char *to, *from;
    size_t to_pitch, from_pitch, width, height;
} Copy; /* `height` rows of `width` bytes */
void sim_run_copy(const Copy* copy);
void sim_enter_kernel(void); /* note where the calling thread's stack is, which kernels may touch */

/* -- streams.c -- */

int sim_copy(const Copy* copy, void* stream);
typedef void (*Launcher)(const void* parameters, unsigned grid, unsigned block);
int sim_launch(void* stream, Launcher run, const void* parameters, size_t bytes, unsigned grid, unsigned block);
void sim_abandon_kernel(void) __attribute__((noreturn)); /* leave the kernel that the thread runs */

#endif
