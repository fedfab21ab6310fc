// hipRTC's interface over another compiler: programs are files in FOLDER, which COMMAND (by the shell) compiles.
// It reads `source` and `options` there, one a line, and leaves `code`, or fails and leaves `log`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_PROGRAM = 4, COMPILATION = 6 };

typedef struct {
    char *source;
} Program;

static int num_live;

int fake_num_live(void) { return num_live; }

int hiprtcVersion(int *major, int *minor) {
    *major = 7;
    *minor = 2;
    return SUCCESS;
}

const char *hiprtcGetErrorString(int result) { return result == COMPILATION ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR"; }

int hiprtcCreateProgram(Program **program, const char *source, const char *name, int num_headers, const char **headers,
                        const char **names) {
    if (num_headers || headers || names || !name) return INVALID_PROGRAM;
    *program = malloc(sizeof **program);
    (*program)->source = strdup(source);
    ++num_live;
    return SUCCESS;
}

int hiprtcDestroyProgram(Program **program) {
    free((*program)->source);
    free(*program);
    *program = NULL;
    --num_live;
    return SUCCESS;
}

int hiprtcCompileProgram(Program *program, int num_options, const char **options) {
    FILE *file = fopen(FOLDER "/source", "w");
    fputs(program->source, file);
    fclose(file);
    file = fopen(FOLDER "/options", "w");
    for (int i = 0; i < num_options; ++i) fprintf(file, "%s\n", options[i]);
    fclose(file);
    return system(COMMAND) ? COMPILATION : SUCCESS;
}

static int content(const char *path, char *out, size_t *num_bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) return INVALID_PROGRAM;
    fseek(file, 0, SEEK_END);
    size_t length = ftell(file);
    rewind(file);
    if (num_bytes) *num_bytes = length;
    if (out && fread(out, 1, length, file) != length) length = 0;
    fclose(file);
    return SUCCESS;
}

int hiprtcGetProgramLogSize(Program *program, size_t *num_bytes) { return content(FOLDER "/log", NULL, num_bytes); }
int hiprtcGetProgramLog(Program *program, char *log) { return content(FOLDER "/log", log, NULL); }
int hiprtcGetCodeSize(Program *program, size_t *num_bytes) { return content(FOLDER "/code", NULL, num_bytes); }
int hiprtcGetCode(Program *program, char *code) { return content(FOLDER "/code", code, NULL); }
