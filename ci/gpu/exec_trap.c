/* Preloaded into a process and all that it starts: writes down every attempt to run a CUDA compiler or ninja.
 *
 * EXEC_TRAP_LOG names the file, which must exist. A path is noted if its last part is one of those programs, what
 * follows "-c" and what goes to popen or system if it contains one of their names; "which" only looks for it, and is
 * left out.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const programs[] = {"nvcc", "cicc", "cudafe++", "ninja"};

static void write_down(const char *what) {
    const char *log = getenv("EXEC_TRAP_LOG");
    char line[512];
    int length = snprintf(line, sizeof line, "%s\n", what);
    if (length >= (int)sizeof line) length = sizeof line - 1;
    int file = log ? open(log, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
    if (file < 0 || write(file, line, length) != length) abort();
    close(file);
}

static void note_path(const char *path) {
    const char *slash = path ? strrchr(path, '/') : NULL;
    const char *name = slash ? slash + 1 : path;
    for (size_t i = 0; name && i < sizeof programs / sizeof *programs; i++)
        if (!strcmp(name, programs[i])) write_down(path);
}

static void note_command(const char *command) {
    if (!command || !strncmp(command, "which ", 6)) return;
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strstr(command, programs[i])) {
            write_down(command);
            return;
        }
}

static void note(const char *path, char *const argv[]) {
    note_path(path);
    if (argv && argv[0] && argv[1] && !strcmp(argv[1], "-c")) note_command(argv[2]);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int execve(const char *path, char *const argv[], char *const envp[]) {
    note(path, argv);
    return REAL(execve)(path, argv, envp);
}

int execv(const char *path, char *const argv[]) {
    note(path, argv);
    return REAL(execv)(path, argv);
}

int execvp(const char *file, char *const argv[]) {
    note(file, argv);
    return REAL(execvp)(file, argv);
}

int execvpe(const char *file, char *const argv[], char *const envp[]) {
    note(file, argv);
    return REAL(execvpe)(file, argv, envp);
}

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    note(path, argv);
    return REAL(posix_spawn)(pid, path, actions, attributes, argv, envp);
}

int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    note(file, argv);
    return REAL(posix_spawnp)(pid, file, actions, attributes, argv, envp);
}

FILE *popen(const char *command, const char *type) {
    note_command(command);
    return REAL(popen)(command, type);
}

int system(const char *command) {
    note_command(command);
    return REAL(system)(command);
}
