/* Directories: listing in pages of bounded memory, removal in slices so that the loop stays awake. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#define MAX_PAGE 2000
#define PAGE_BYTES (512 << 10)
#define MAX_LIST_DEPTH 64
#define SLICE 500
#define MAX_OPEN_LEVELS 64

/* -- listing ------------------------------------------------------------------------------------------------------ */
/* The smallest names of a directory that come after one: a heap whose head is the largest kept. */
typedef struct {
    char **names;
    size_t count, limit;
} page;

static void sift_down(page *p, size_t at) {
    for (size_t child; (child = 2 * at + 1) < p->count; at = child) {
        if (child + 1 < p->count && strcmp(p->names[child + 1], p->names[child]) > 0) child++;
        if (strcmp(p->names[at], p->names[child]) >= 0) return;
        char *swap = p->names[at];
        p->names[at] = p->names[child], p->names[child] = swap;
    }
}

static void offer(page *p, const char *name) {
    if (p->count == p->limit) {
        if (strcmp(name, p->names[0]) >= 0) return;
        free(p->names[0]);
        p->names[0] = need(strdup(name));
        sift_down(p, 0);
        return;
    }
    size_t at = p->count++;
    p->names[at] = need(strdup(name));
    for (size_t parent; at && strcmp(p->names[at], p->names[parent = (at - 1) / 2]) > 0; at = parent) {
        char *swap = p->names[at];
        p->names[at] = p->names[parent], p->names[parent] = swap;
    }
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool is_dot(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

static void read_page(DIR *folder, const char *first, page *p) {
    for (struct dirent *entry; (entry = readdir(folder));)
        if (!is_dot(entry->d_name) && (!first || strcmp(entry->d_name, first) >= 0)) offer(p, entry->d_name);
    qsort(p->names, p->count, sizeof *p->names, by_name);
}

typedef struct {
    buffer *out;
    size_t begun, count, limit;
    char path[PATH_MAX]; /* of the directory that is being read, then of its entry */
    bool more;
} listing;

static bool is_full(const listing *l) { return l->count == l->limit || l->out->size - l->begun > PAGE_BYTES; }

/* Preorder, names by their bytes. `after` is the last path of the page before, relative to this directory, or NULL. */
static void list_folder(listing *l, int fd, int depth, const char *after) {
    char first[NAME_MAX + 1] = "";
    size_t length = strlen(l->path), first_size = after ? strcspn(after, "/") : 0;
    DIR *folder = fdopendir(fd);
    if (!folder) {
        close(fd);
        return;
    }
    if (first_size < sizeof first) memcpy(first, after ? after : "", first_size), first[first_size] = 0;
    page p = {need(calloc(l->limit + 2, sizeof(char *))), 0, l->limit + 2}; /* `first` itself, and one to know of more */
    read_page(folder, after ? first : NULL, &p);
    for (size_t i = 0; i < p.count && !l->more; i++) {
        bool is_first = after && !strcmp(p.names[i], first);
        const char *rest = is_first && after[first_size] ? after + first_size + 1 : NULL;
        int size = snprintf(l->path + length, PATH_MAX - length, "%s%s", length && l->path[length - 1] == '/' ? "" : "/", p.names[i]);
        if (size >= (int)(PATH_MAX - length)) continue; /* no path could name it */
        if (!is_first) {
            if ((l->more = is_full(l))) break;
            if (l->count++) buffer_add(l->out, ",", 1);
            add_file_info(l->out, l->path, fd, p.names[i]);
        }
        int child = depth > 1 ? openat(fd, p.names[i], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK) : -1;
        if (child >= 0) list_folder(l, child, depth - 1, rest);
    }
    l->path[length] = 0;
    for (size_t i = 0; i < p.count; i++) free(p.names[i]);
    free(p.names);
    closedir(folder);
}

void tree_list(const request *r) {
    static listing l;
    const char *path = full_path(r, "path"), *after = json_text(r->fields, "after");
    int64_t depth = json_int(r->fields, "depth", 1), limit = json_int(r->fields, "limit", MAX_PAGE);
    if (!path) return;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        reply_error(r, errno, "cannot list %s: %s", path, strerror(errno));
        return;
    }
    l.out = reply_begin(r->id);
    l.begun = l.out->size;
    l.count = 0, l.more = false;
    l.limit = (size_t)(limit < 1 || limit > MAX_PAGE ? MAX_PAGE : limit);
    snprintf(l.path, sizeof l.path, "%s", path);
    buffer_print(l.out, ",\"base\":");
    buffer_string(l.out, path, strlen(path));
    buffer_print(l.out, ",\"entries\":[");
    list_folder(&l, fd, depth < 1 ? 1 : depth > MAX_LIST_DEPTH ? MAX_LIST_DEPTH : (int)depth, after && *after ? after : NULL);
    buffer_print(l.out, "],\"more\":%s", l.more ? "true" : "false");
    reply_end(l.out);
}

/* -- removal ------------------------------------------------------------------------------------------------------ */
typedef struct removal {
    struct removal *next;
    int64_t id;
    char *path;
} removal;

static removal *removals;

typedef struct {
    int top, budget, error;
} slice;

static int open_folder(int at, const char *name) {
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(at, name, flags);
    /* A directory that its owner locked; a link cannot be followed here: openat has just said that it is none. */
    if (fd < 0 && errno == EACCES && !fchmodat(at, name, 0700, 0)) fd = openat(at, name, flags);
    return fd;
}

static void clear_folder(slice *s, int fd, int level);

static void remove_entry(slice *s, int at, const char *name, int level) {
    s->budget--;
    if (!unlinkat(at, name, 0)) return;
    int error = errno;
    if (error == EACCES || error == EPERM) { /* perhaps the directory that holds it may not be written */
        struct stat info;
        if (!fstat(at, &info) && !(info.st_mode & S_IWUSR) && !fchmod(at, 0700) && !unlinkat(at, name, 0)) return;
    }
    if (!unlinkat(at, name, AT_REMOVEDIR)) return;
    if (errno != ENOTEMPTY && errno != EEXIST) {
        s->error = s->error ? s->error : errno == ENOTDIR ? error : errno;
        return;
    }
    if (level >= MAX_OPEN_LEVELS) { /* too deep to hold every level open: its rest is moved up and goes in its turn */
        char shallow[64];
        snprintf(shallow, sizeof shallow, ".moonlet-%lx", random());
        if (!renameat(at, name, s->top, shallow)) return;
    }
    int fd = open_folder(at, name);
    if (fd < 0) {
        s->error = errno;
        return;
    }
    clear_folder(s, fd, level + 1);
    if (s->budget > 0 && !s->error && unlinkat(at, name, AT_REMOVEDIR) && errno != ENOENT && errno != ENOTEMPTY) s->error = errno;
}

static void clear_folder(slice *s, int fd, int level) {
    DIR *folder = fdopendir(fd);
    if (!folder) {
        s->error = errno;
        close(fd);
        return;
    }
    for (struct dirent *entry; s->budget > 0 && !s->error && (entry = readdir(folder));)
        if (!is_dot(entry->d_name)) remove_entry(s, fd, entry->d_name, level);
    closedir(folder);
}

/* True when there is no more to do; the error if any is in *error. */
static bool remove_slice(const char *path, int *error) {
    *error = 0;
    if (!unlink(path)) return true;
    if (errno != EISDIR && errno != EPERM && errno != EACCES) return *error = errno, true;
    int as_file = errno;
    if (!rmdir(path)) return true;
    if (errno != ENOTEMPTY && errno != EEXIST && errno != EACCES) return *error = errno == ENOTDIR ? as_file : errno, true;
    slice s = {open_folder(AT_FDCWD, path), SLICE, 0};
    if (s.top < 0) return *error = errno, true;
    int copy = fcntl(s.top, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) s.error = errno;
    else clear_folder(&s, copy, 0);
    close(s.top);
    if (s.error) return *error = s.error, true;
    if (!rmdir(path)) return true;
    if (errno == ENOTEMPTY || errno == EEXIST) return false;
    return *error = errno, true;
}

void tree_remove(const request *r) {
    const char *path = full_path(r, "path");
    if (!path) return;
    removal *job = need(calloc(1, sizeof *job)), **link = &removals;
    *job = (removal){NULL, r->id, need(strdup(path))};
    while (*link) link = &(*link)->next;
    *link = job;
}

void tree_tick(void) {
    removal *job = removals;
    int error;
    if (!job || !remove_slice(job->path, &error)) return;
    if (error) reply_error_id(job->id, error, "cannot remove %s: %s", job->path, strerror(error));
    else reply_end(reply_begin(job->id));
    removals = job->next;
    free(job->path);
    free(job);
}

void tree_want(void) {
    if (removals) due(now_ms());
}

void tree_new_host(void) {
    for (removal *job = removals; job; job = job->next) job->id = -1;
}
