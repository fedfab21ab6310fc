/* Devices, and modules whose code objects are libraries that hold the kernels as C++ for the CPU. */
#include "sim.h"

#include <dlfcn.h>

#define ARCH_OFFSET 1160 /* gcnArchName in hipDeviceProp_tR0600 */

static _Thread_local int current;
static char arch[64] = "gfx942:sramecc+:xnack-";

typedef struct {
    void* library;
    size_t parameter_bytes;
    int alive;
} Module;

typedef struct {
    Launcher run;
    const Module* module;
} Function;

int sim_device(void) { return current; }

/* Let all devices be `name` from now on. */
void hipsim_set_arch(const char* name) { snprintf(arch, sizeof arch, "%s", name); }

int hipInit(unsigned flags) {
    ENTER_OR_RETURN(hipInit);
    return sim_answer(flags ? INVALID_VALUE : SUCCESS);
}

int hipRuntimeGetVersion(int* version) {
    ENTER_OR_RETURN(hipRuntimeGetVersion);
    *version = 70200000;
    return SUCCESS;
}

int hipDeviceGet(int* device, int ordinal) {
    ENTER_OR_RETURN(hipDeviceGet);
    *device = ordinal;
    return sim_answer(ordinal < 0 || ordinal >= NUM_DEVICES ? INVALID_DEVICE : SUCCESS);
}

/* A thread's device is not the device's to refuse: this works where it is broken, and so does hipSetDevice. */
int hipGetDevice(int* device) {
    ENTER(hipGetDevice);
    if (code && code != sim_broken()) return sim_answer(code);
    *device = current;
    return SUCCESS;
}

int hipSetDevice(int device) {
    ENTER(hipSetDevice);
    if (code && code != sim_broken()) return sim_answer(code);
    if (device < 0 || device >= NUM_DEVICES) return sim_answer(INVALID_DEVICE);
    current = device;
    return SUCCESS;
}

int hipThreadExchangeStreamCaptureMode(int* mode) {
    ENTER_OR_RETURN(hipThreadExchangeStreamCaptureMode);
    *mode = 0;
    return SUCCESS;
}

int hipDeviceGetName(char* name, int bytes, int device) {
    ENTER_OR_RETURN(hipDeviceGetName);
    snprintf(name, bytes, "simulated GPU %d", device);
    return SUCCESS;
}

int hipDeviceGetAttribute(int* value, int attribute, int device) {
    ENTER_OR_RETURN(hipDeviceGetAttribute);
    if (device < 0 || device >= NUM_DEVICES) return sim_answer(INVALID_DEVICE);
    if (attribute == 58) *value = 1 << 20; /* hipDeviceAttributeMaxPitch */
    else if (attribute == 63) *value = 4;  /* hipDeviceAttributeMultiprocessorCount */
    else return sim_answer(INVALID_VALUE);
    return SUCCESS;
}

int hipGetDevicePropertiesR0600(char* properties, int device) {
    ENTER_OR_RETURN(hipGetDevicePropertiesR0600);
    if (device < 0 || device >= NUM_DEVICES) return sim_answer(INVALID_DEVICE);
    memset(properties, 0, ARCH_OFFSET + 256);
    snprintf(properties + ARCH_OFFSET, 256, "%s", arch);
    return SUCCESS;
}

/* An image is the text "hipsim TARGET PATH", of a library that code_object.cpp makes. */
int hipModuleLoadData(Module** module, const char* image) {
    ENTER_OR_RETURN(hipModuleLoadData);
    char target[64], path[1024];
    if (sscanf(image, "hipsim %63s %1023s", target, path) != 2) return sim_answer(INVALID_IMAGE);
    if (strncmp(target, arch, strcspn(arch, ":")) || target[strcspn(arch, ":")]) return sim_answer(NO_BINARY_FOR_GPU);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return sim_answer(INVALID_IMAGE);
    void (*bind)(void (*)(uintptr_t, size_t)) = (void (*)(void (*)(uintptr_t, size_t)))dlsym(library, "hipsim_bind");
    const size_t* bytes = dlsym(library, "hipsim_parameter_bytes");
    if (!bind || !bytes) return sim_answer(INVALID_IMAGE);
    bind(sim_touch);
    *module = calloc(1, sizeof **module);
    **module = (Module){library, *bytes, 1};
    sim_live(MODULES, 1);
    return SUCCESS;
}

int hipModuleUnload(Module* module) {
    ENTER(hipModuleUnload);
    if (!module->alive) return sim_answer(INVALID_HANDLE);
    module->alive = 0; /* its library stays: a stream may still run it */
    sim_live(MODULES, -1);
    return sim_answer(code);
}

int hipModuleGetFunction(Function** function, Module* module, const char* name) {
    ENTER_OR_RETURN(hipModuleGetFunction);
    char symbol[128];
    snprintf(symbol, sizeof symbol, "run_%s", name);
    const Launcher run = (Launcher)dlsym(module->library, symbol);
    if (!run || !module->alive) return sim_answer(NOT_FOUND);
    *function = calloc(1, sizeof **function);
    **function = (Function){run, module};
    return SUCCESS;
}

int hipModuleLaunchKernel(Function* function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
                          unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                          void** extra) {
    ENTER_OR_RETURN(hipModuleLaunchKernel);
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared || extra) return sim_answer(INVALID_VALUE);
    if (!function->module->alive) return sim_answer(INVALID_HANDLE);
    return sim_launch(stream, function->run, parameters[0], function->module->parameter_bytes, grid, block);
}
