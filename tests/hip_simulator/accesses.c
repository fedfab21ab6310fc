/* Every access of a kernel, as the compiler reports it where it is told to (-fsanitize=kernel-address, with calls). */
#include <stddef.h>
#include <stdint.h>

static void (*touch)(uintptr_t address, size_t bytes);

void hipsim_bind(void (*function)(uintptr_t, size_t)) { touch = function; }

#define REPORTED(bytes)                                                       \
    void __asan_load##bytes##_noabort(uintptr_t at) { touch(at, bytes); }     \
    void __asan_store##bytes##_noabort(uintptr_t at) { touch(at, bytes); }
REPORTED(1) REPORTED(2) REPORTED(4) REPORTED(8) REPORTED(16)

void __asan_loadN_noabort(uintptr_t at, size_t bytes) { touch(at, bytes); }
void __asan_storeN_noabort(uintptr_t at, size_t bytes) { touch(at, bytes); }
void __asan_handle_no_return(void) {}
