/* Files by path. Relative paths start at the home. Only regular files are read and written: no other can make us wait. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

const char *full_path(const request *r, const char *field) {
    static char paths[2][PATH_MAX];
    static int turn;
    char *path = paths[turn ^= 1]; /* the last two stay valid: a rename has two */
    const value *given = json_get(r->fields, field);
    const char *text = given && given->kind != JSON_NULL ? json_text(r->fields, field) : ".";
    if (!text || (given && !*text)) {
        reply_error(r, EINVAL, "%s must be a path without zero bytes", field);
        return NULL;
    }
    while (!strncmp(text, "./", 2)) text += 2;
    int size = *text == '/' ? snprintf(path, PATH_MAX, "%s", text)
             : !*text || !strcmp(text, ".") ? snprintf(path, PATH_MAX, "%s", options.home)
             : snprintf(path, PATH_MAX, "%s/%s", strcmp(options.home, "/") ? options.home : "", text);
    if (size >= PATH_MAX) {
        reply_error(r, ENAMETOOLONG, "the path is longer than %d bytes", PATH_MAX - 1);
        return NULL;
    }
    while (size > 1 && path[size - 1] == '/') path[--size] = 0;
    return path;
}

static void fail(const request *r, const char *doing, const char *path) {
    int error = errno;
    reply_error(r, error, "cannot %s %s: %s", doing, path, strerror(error));
}

bool make_parents(const char *path) {
    char copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", path);
    for (char *slash = copy + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(copy, 0777) && errno != EEXIST && errno != EISDIR && errno != EROFS && errno != EACCES) return false;
        *slash = '/';
    }
    return true;
}

static int open_regular(const char *path, int flags, mode_t mode) {
    struct stat info;
    int fd = open(path, flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, mode);
    if (fd < 0) return -1;
    int error = fstat(fd, &info) ? errno : S_ISDIR(info.st_mode) ? EISDIR : S_ISREG(info.st_mode) ? 0 : EINVAL;
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

static bool write_all(int fd, const char *data, size_t size, off_t offset) {
    while (size) {
        ssize_t n = pwrite(fd, data, size, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        data += n, size -= (size_t)n, offset += n;
    }
    return true;
}

void files_read(const request *r) {
    static char data[MAX_BODY_BYTES];
    const char *path = full_path(r, "path");
    if (!path) return;
    int64_t offset = json_int(r->fields, "offset", 0), length = json_int(r->fields, "length", MAX_BODY_BYTES);
    struct stat info;
    int fd = open_regular(path, O_RDONLY, 0);
    ssize_t size = 0, n = 0;
    if (fd < 0 || fstat(fd, &info)) {
        fail(r, "read", path);
        if (fd >= 0) close(fd);
        return;
    }
    if (length < 0 || length > MAX_BODY_BYTES) length = MAX_BODY_BYTES;
    while (size < length && (n = pread(fd, data + size, (size_t)(length - size), offset + size)) > 0) size += n;
    if (n < 0 && !size) {
        fail(r, "read", path);
    } else {
        buffer *out = reply_begin(r->id);
        buffer_print(out, ",\"size\":%lld", (long long)info.st_size);
        reply_body(out, data, (size_t)size);
    }
    close(fd);
}

void files_write(const request *r) {
    const char *path = full_path(r, "path");
    if (!path) return;
    int64_t mode = json_int(r->fields, "mode", -1), offset = json_int(r->fields, "offset", 0);
    if (json_bool(r->fields, "make_dirs") && !make_parents(path)) {
        fail(r, "make the directories of", path);
        return;
    }
    int fd = open_regular(path, O_WRONLY | O_CREAT | (json_bool(r->fields, "truncate") ? O_TRUNC : 0), 0666);
    if (fd < 0 || !write_all(fd, r->body, r->body_size, offset) || (mode >= 0 && fchmod(fd, (mode_t)mode & 07777))) fail(r, "write", path);
    else reply_ok(r);
    if (fd >= 0) close(fd);
}

/* Where a file is to appear: what a symbolic link points to is replaced, not the link. */
static void follow_link(const char *path, char *real) {
    char *found = realpath(path, NULL);
    snprintf(real, PATH_MAX, "%s", found ? found : path);
    free(found);
}

static int open_temporary(const char *target, char *temporary) {
    const char *slash = strrchr(target, '/');
    for (int i = 0; i < 100; i++) {
        if (snprintf(temporary, PATH_MAX, "%.*s/.moonlet-%08lx", (int)(slash - target), target, random() & 0xffffffffUL) >= PATH_MAX) {
            errno = ENAMETOOLONG;
            return -1;
        }
        int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

/* A new file keeps the mode of the one that it replaces, unless it is told another. */
static bool settle_mode(const char *temporary, const char *target, int64_t mode) {
    struct stat info;
    if (mode < 0) {
        if (stat(target, &info) || !S_ISREG(info.st_mode)) return true;
        mode = info.st_mode & 07777;
    }
    return !chmod(temporary, (mode_t)mode & 07777);
}

static bool is_directory(const char *path) {
    struct stat info;
    return !stat(path, &info) && S_ISDIR(info.st_mode);
}

/* Target and temporary name of a file to be written whole, opened. -1: an error went out. */
static int begin_file(const request *r, char *real, char *temporary) {
    const char *path = full_path(r, "path");
    if (!path) return -1;
    follow_link(path, real);
    if (is_directory(real)) {
        errno = EISDIR;
        fail(r, "write", path);
        return -1;
    }
    if (!make_parents(real)) {
        fail(r, "make the directories of", path);
        return -1;
    }
    int fd = open_temporary(real, temporary);
    if (fd < 0) fail(r, "write", path);
    return fd;
}

void files_put(const request *r) {
    static char real[PATH_MAX], temporary[PATH_MAX];
    int fd = begin_file(r, real, temporary);
    if (fd < 0) return;
    bool good = write_all(fd, r->body, r->body_size, 0) && settle_mode(temporary, real, json_int(r->fields, "mode", -1));
    good = !close(fd) && good;
    if (good && !rename(temporary, real)) {
        reply_ok(r);
        return;
    }
    fail(r, "write", real);
    unlink(temporary);
}

void files_begin(const request *r) {
    static char real[PATH_MAX], temporary[PATH_MAX];
    int fd = begin_file(r, real, temporary);
    if (fd < 0) return;
    close(fd);
    buffer *out = reply_begin(r->id);
    buffer_print(out, ",\"temporary\":");
    buffer_string(out, temporary, strlen(temporary));
    reply_end(out);
}

void files_rename(const request *r) {
    static char real[PATH_MAX];
    const char *path = full_path(r, "path"), *to = path ? full_path(r, "to") : NULL;
    if (!to) return;
    bool is_new_file = json_bool(r->fields, "replace"); /* the end of a `begin` */
    if (is_new_file) follow_link(to, real);
    else snprintf(real, sizeof real, "%s", to);
    if (is_new_file && !settle_mode(path, real, json_int(r->fields, "mode", -1))) fail(r, "set the mode of", path);
    else if (rename(path, real)) fail(r, "rename", path);
    else reply_ok(r);
}

void files_mkdir(const request *r) {
    const char *path = full_path(r, "path");
    if (!path) return;
    bool created = make_parents(path) && !mkdir(path, 0777);
    if (!created && (errno != EEXIST || !is_directory(path))) {
        fail(r, "make the directory", path);
        return;
    }
    buffer *out = reply_begin(r->id);
    buffer_print(out, ",\"created\":%s", created ? "true" : "false");
    reply_end(out);
}

void add_file_info(buffer *out, const char *path, int folder, const char *name) {
    static char target[PATH_MAX];
    struct stat info = {0};
    if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW)) info = (struct stat){0}; /* it vanished meanwhile */
    const char *kind = S_ISREG(info.st_mode) ? "file" : S_ISDIR(info.st_mode) ? "dir" : S_ISLNK(info.st_mode) ? "symlink" : "other";
    buffer_print(out, "{\"path\":");
    buffer_string(out, path, strlen(path));
    buffer_print(out, ",\"kind\":\"%s\",\"size\":%lld,\"mode\":%u,\"mtime\":%lld.%09ld,\"owner\":%u,\"group\":%u", kind,
                 (long long)info.st_size, (unsigned)info.st_mode, (long long)info.st_mtim.tv_sec, info.st_mtim.tv_nsec,
                 (unsigned)info.st_uid, (unsigned)info.st_gid);
    ssize_t size = S_ISLNK(info.st_mode) ? readlinkat(folder, name, target, sizeof target) : -1;
    if (size >= 0) {
        buffer_print(out, ",\"link\":");
        buffer_string(out, target, (size_t)size);
    }
    buffer_print(out, "}");
}

void files_stat(const request *r) {
    const char *path = full_path(r, "path");
    struct stat info;
    if (!path) return;
    if (lstat(path, &info)) {
        fail(r, "find", path);
        return;
    }
    buffer *out = reply_begin(r->id);
    buffer_print(out, ",\"entry\":");
    add_file_info(out, path, AT_FDCWD, path);
    reply_end(out);
}
