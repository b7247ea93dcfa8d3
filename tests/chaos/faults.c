/* A file system that fails: preloaded before libc (LD_PRELOAD), so that whatever writes is met, Python,
   PyTorch's C++ and the Rust of safetensors and tokenizers alike. Calls on paths below a folder are
   counted, and at the nth of them something happens:

   FULL   it fails with ENOSPC, and so do all later ones that need room; what frees room works
   ERROR  it fails with EIO, once
   TORN   half of what is written gets there; later calls that need room fail with ENOSPC
   KILLED half of what is written gets there, and the process dies by SIGKILL; other calls are not made

   What is counted depends on it: for FULL calls that need room, for ERROR all, for TORN writes, for
   KILLED all that change something. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { NONE, FULL, ERROR, TORN, KILLED };
enum { LOOKS = 1, CHANGES = 2, NEEDS_ROOM = 4, WRITES = 8 };
static const int counted[] = {0, NEEDS_ROOM, LOOKS | CHANGES, WRITES, CHANGES};

static char folder[PATH_MAX];
static size_t folder_length; /* 0: nothing is watched */
static enum kind kind;
static long nth;
static int log_file = -1;
static atomic_long seen;
static atomic_int full;

/* The real one; once per place. */
#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* From now on watch what is below `path`; the answer of each call goes as a line to `log`, if it is
   a descriptor. */
void faults_arm(const char *path, enum kind what, long when, int log) {
    snprintf(folder, sizeof folder, "%s", path);
    kind = what, nth = when, log_file = log;
    atomic_store(&seen, 0), atomic_store(&full, 0);
    folder_length = strlen(folder);
}

long faults_seen(void) { return atomic_load(&seen); }

static int inside(int dir, const char *path, char *whole) {
    char link[64];
    ssize_t length = 0;
    if (!folder_length) return 0;
    if (path == NULL || path[0] != '/') {
        if (path && dir == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX)) return 0;
            length = strlen(whole);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            if ((length = readlink(link, whole, PATH_MAX - 1)) < 0) return 0;
        }
    }
    snprintf(whole + length, PATH_MAX - length, "%s%s", length && path ? "/" : "", path ? path : "");
    return !strncmp(whole, folder, folder_length) &&
           (whole[folder_length] == '/' || !whole[folder_length]);
}

/* 0, or the errno with which the call fails; HALF: it writes half. */
enum { HALF = -1 };
static int fate(const char *call, int does, int dir, const char *path) {
    char whole[PATH_MAX] = "", line[PATH_MAX + 64];
    int before = errno, what = 0;
    if (!inside(dir, path, whole)) return errno = before, 0;
    if (atomic_load(&full) && (does & NEEDS_ROOM)) return ENOSPC;
    if (does & counted[kind]) {
        long number = atomic_fetch_add(&seen, 1) + 1;
        if (log_file >= 0) {
            int length = snprintf(line, sizeof line, "%ld %s %s\n", number, call, whole + folder_length);
            REAL(write);
            if (real(log_file, line, length) != length) _exit(99);
        }
        if (number == nth) {
            if (kind == FULL || kind == TORN) atomic_store(&full, 1);
            if (kind == KILLED && !(does & WRITES)) raise(SIGKILL);
            what = kind == FULL ? ENOSPC : kind == ERROR ? EIO : HALF;
        }
    }
    return errno = before, what;
}

#define MEET(call, does, dir, path, failed) \
    do { \
        int error = fate(call, does, dir, path); \
        if (error > 0) return errno = error, failed; \
    } while (0)

static int opening(int flags) {
    return (flags & O_ACCMODE) == O_RDONLY ? LOOKS
         : flags & (O_CREAT | O_TRUNC) ? CHANGES | NEEDS_ROOM : CHANGES;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags), mode = va_arg(rest, mode_t), va_end(rest); \
        } \
        REAL(name); \
        MEET("open", opening(flags), AT_FDCWD, path, -1); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags), mode = va_arg(rest, mode_t), va_end(rest); \
        } \
        REAL(name); \
        MEET("open", opening(flags), dir, path, -1); \
        return real(dir, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        MEET("fopen", strchr("wa", mode[0]) ? CHANGES | NEEDS_ROOM : LOOKS, AT_FDCWD, path, NULL); \
        return real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
    REAL(opendir);
    MEET("opendir", LOOKS, AT_FDCWD, path, NULL);
    return real(path);
}

#define STAT(name, type) \
    int name(const char *path, struct type *found) { \
        REAL(name); \
        MEET("stat", LOOKS, AT_FDCWD, path, -1); \
        return real(path, found); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

ssize_t read(int file, void *data, size_t size) {
    REAL(read);
    MEET("read", LOOKS, file, NULL, -1);
    return real(file, data, size);
}

#define PREAD(name, type) \
    ssize_t name(int file, void *data, size_t size, type at) { \
        REAL(name); \
        MEET("read", LOOKS, file, NULL, -1); \
        return real(file, data, size, at); \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

static ssize_t half(ssize_t written) {
    if (kind == KILLED) raise(SIGKILL);
    return written;
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    int what = fate("write", CHANGES | NEEDS_ROOM | WRITES, file, NULL);
    if (what > 0) return errno = what, -1;
    return what == HALF ? half(real(file, data, size / 2)) : real(file, data, size);
}

#define PWRITE(name, type) \
    ssize_t name(int file, const void *data, size_t size, type at) { \
        REAL(name); \
        int what = fate("write", CHANGES | NEEDS_ROOM | WRITES, file, NULL); \
        if (what > 0) return errno = what, -1; \
        return what == HALF ? half(real(file, data, size / 2, at)) : real(file, data, size, at); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    int what = fate("write", CHANGES | NEEDS_ROOM | WRITES, file, NULL);
    if (what > 0) return errno = what, -1;
    /* The first of them, or half of an only one. */
    if (what == HALF && count > 1) return half(real(file, parts, 1));
    if (what == HALF) return half(write(file, parts->iov_base, parts->iov_len / 2));
    return real(file, parts, count);
}

#define ON_FILE(name) \
    int name(int file) { \
        REAL(name); \
        MEET(#name, CHANGES | NEEDS_ROOM, file, NULL, -1); \
        return real(file); \
    }
ON_FILE(fsync)
ON_FILE(fdatasync)

/* As on network file systems, where it may be the last write that fails. The descriptor is closed. */
int close(int file) {
    REAL(close);
    int flags = folder_length ? fcntl(file, F_GETFL) : -1, error = 0;
    if (flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && !atomic_load(&full))
        error = fate("close", CHANGES | NEEDS_ROOM, file, NULL);
    int closed = real(file);
    return error > 0 ? (errno = error, -1) : closed;
}

int flock(int file, int what) {
    REAL(flock);
    MEET("flock", LOOKS, file, NULL, -1);
    return real(file, what);
}

#define FTRUNCATE(name, type) \
    int name(int file, type size) { \
        REAL(name); \
        MEET("ftruncate", CHANGES, file, NULL, -1); \
        return real(file, size); \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

int rename(const char *from, const char *to) {
    REAL(rename);
    MEET("rename", CHANGES | NEEDS_ROOM, AT_FDCWD, to, -1);
    return real(from, to);
}

int renameat(int old, const char *from, int dir, const char *to) {
    REAL(renameat);
    MEET("rename", CHANGES | NEEDS_ROOM, dir, to, -1);
    return real(old, from, dir, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    MEET("mkdir", CHANGES | NEEDS_ROOM, AT_FDCWD, path, -1);
    return real(path, mode);
}

int chmod(const char *path, mode_t mode) {
    REAL(chmod);
    MEET("chmod", CHANGES, AT_FDCWD, path, -1);
    return real(path, mode);
}

#define REMOVE(name) \
    int name(const char *path) { \
        REAL(name); \
        MEET(#name, CHANGES, AT_FDCWD, path, -1); \
        return real(path); \
    }
REMOVE(unlink)
REMOVE(rmdir)

int unlinkat(int dir, const char *path, int flags) {
    REAL(unlinkat);
    MEET("unlink", CHANGES, dir, path, -1);
    return real(dir, path, flags);
}
