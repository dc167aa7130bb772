/* Changes below a directory, kept until the host asks. Names follow what editors and E2B clients expect of them. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#define MAX_WATCHES 64
#define MAX_FOLDERS 8192 /* of one watch */
#define MAX_EVENTS 4096
#define MAX_EVENT_BYTES (1 << 20) /* of their paths */
#define MAX_DEPTH 64
#define REPLY_BYTES (512 << 10)
#define MASK (IN_CREATE | IN_MODIFY | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ONLYDIR | IN_DONT_FOLLOW | IN_EXCL_UNLINK)

typedef struct {
    int number;
    char *path; /* relative to the watched directory, "" for itself */
} folder;

typedef struct event {
    struct event *next;
    int64_t serial;
    const char *kind;
    char path[];
} event;

typedef struct watch {
    struct watch *next;
    char *name, *root;
    int fd;
    bool recursive, dead;
    bool overflow, overflow_told; /* since it was told more may have been lost */
    folder *folders;
    size_t num_folders, room;
    event *first, *last;
    size_t num_events, event_bytes;
    int64_t waiter, deadline; /* -1: nobody asks */
    int64_t serial, sent;     /* of the last event; of the last one that was told */
} watch;

static watch *watches;

static watch *find(const request *r, bool complain) {
    const char *name = json_text(r->fields, "watch");
    for (watch *w = watches; w && name; w = w->next)
        if (!w->dead && !strcmp(w->name, name)) return w;
    if (complain) reply_error(r, ESRCH, "there is no watch '%.64s'", name ? name : "");
    return NULL;
}

static void lose(watch *w) {
    w->overflow = true;
    w->overflow_told = false;
}

static void add_event(watch *w, const char *kind, const char *path) {
    bool is_same = w->last && w->last->serial > w->sent && w->last->kind == kind && !strcmp(w->last->path, path);
    if (is_same) return; /* a file that grows */
    if (w->num_events >= MAX_EVENTS || w->event_bytes + strlen(path) > MAX_EVENT_BYTES) {
        lose(w);
        return;
    }
    event *e = need(calloc(1, sizeof *e + strlen(path) + 1));
    e->kind = kind;
    e->serial = ++w->serial;
    strcpy(e->path, path);
    if (w->last) w->last->next = e;
    else w->first = e;
    w->last = e;
    w->num_events++;
    w->event_bytes += strlen(path);
}

static const char created[] = "create", written[] = "write", removed[] = "remove", renamed[] = "rename", changed[] = "chmod";

static folder *find_folder(watch *w, int number) {
    for (size_t i = 0; i < w->num_folders; i++)
        if (w->folders[i].number == number) return &w->folders[i];
    return NULL;
}

/* Watches one directory; false if it cannot be. */
static bool add_folder(watch *w, const char *path) {
    char full[PATH_MAX];
    if (snprintf(full, sizeof full, "%s%s%s", w->root, *path ? "/" : "", path) >= (int)sizeof full) return false;
    if (w->num_folders >= MAX_FOLDERS) {
        lose(w);
        return false;
    }
    int number = inotify_add_watch(w->fd, full, *path ? MASK : MASK & ~IN_DONT_FOLLOW);
    if (number < 0) {
        if (errno == ENOSPC) lose(w);
        return false;
    }
    folder *known = find_folder(w, number);
    if (known) { /* the same directory under a new name */
        free(known->path);
        known->path = need(strdup(path));
        return true;
    }
    if (w->num_folders == w->room) {
        w->room = w->room ? w->room * 2 : 8;
        w->folders = need(realloc(w->folders, w->room * sizeof *w->folders));
    }
    w->folders[w->num_folders++] = (folder){number, need(strdup(path))};
    return true;
}

/* A directory and all below it. What was in it before it could be watched is told as created. */
static void add_tree(watch *w, const char *path, int depth, bool tell) {
    char full[PATH_MAX], child[PATH_MAX];
    if (!add_folder(w, path) || depth > MAX_DEPTH) return;
    if (!w->recursive) return;
    snprintf(full, sizeof full, "%s/%s", w->root, path);
    DIR *dir = opendir(full);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (snprintf(child, sizeof child, "%s%s%s", path, *path ? "/" : "", entry->d_name) >= (int)sizeof child) continue;
        if (tell) add_event(w, created, child);
        if (!fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) && S_ISDIR(info.st_mode)) add_tree(w, child, depth + 1, tell);
    }
    if (dir) closedir(dir);
}

static void take(watch *w, const struct inotify_event *e) {
    char path[PATH_MAX];
    if (e->mask & IN_Q_OVERFLOW) lose(w);
    folder *at = find_folder(w, e->wd);
    if (!at) return;
    if (e->mask & IN_IGNORED) { /* that directory is gone */
        free(at->path);
        *at = w->folders[--w->num_folders];
        return;
    }
    if (!e->len) return; /* of the directory itself: its parent tells it too, or it is the root */
    if (snprintf(path, sizeof path, "%s%s%s", at->path, *at->path ? "/" : "", e->name) >= (int)sizeof path) return;
    if (e->mask & (IN_CREATE | IN_MOVED_TO)) {
        add_event(w, created, path);
        if (e->mask & IN_ISDIR && w->recursive) add_tree(w, path, 0, true);
    } else if (e->mask & IN_MODIFY) {
        add_event(w, written, path);
    } else if (e->mask & IN_ATTRIB) {
        add_event(w, changed, path);
    } else if (e->mask & IN_DELETE) {
        add_event(w, removed, path);
    } else if (e->mask & IN_MOVED_FROM) {
        add_event(w, renamed, path);
    }
}

static void readable(void *owner, int fd, short events) {
    watch *w = owner;
    char data[16384] __attribute__((aligned(8)));
    (void)events;
    if (w->fd != fd) return;
    ssize_t size = read(fd, data, sizeof data);
    for (ssize_t at = 0; at < size;) {
        const struct inotify_event *e = (const struct inotify_event *)(data + at);
        take(w, e);
        at += (ssize_t)(sizeof *e + e->len);
    }
}

static void drop_event(watch *w) {
    event *e = w->first;
    w->first = e->next;
    if (!w->first) w->last = NULL;
    w->num_events--;
    w->event_bytes -= strlen(e->path);
    free(e);
}

/* What is told stays until the next question confirms it: the host that asked may be gone. */
static void answer(watch *w) {
    buffer *out = reply_begin(w->waiter);
    size_t begun = out->size;
    event *e = w->first;
    buffer_print(out, ",\"events\":[");
    for (; e && out->size - begun < REPLY_BYTES; e = e->next) {
        buffer_print(out, "%s{\"kind\":\"%s\",\"path\":", e == w->first ? "" : ",", e->kind);
        buffer_string(out, e->path, strlen(e->path));
        buffer_add(out, "}", 1);
        w->sent = e->serial;
    }
    w->overflow_told = w->overflow && !e;
    buffer_print(out, "],\"last\":%lld,\"overflow\":%s", (long long)w->sent, w->overflow_told ? "true" : "false");
    reply_end(out);
    w->waiter = -1;
}

static void close_watch(watch *w) {
    if (w->waiter >= 0) reply_error_id(w->waiter, ESRCH, "the watch was closed");
    while (w->first) drop_event(w);
    for (size_t i = 0; i < w->num_folders; i++) free(w->folders[i].path);
    free(w->folders);
    close(w->fd);
    free(w->name);
    free(w->root);
    *w = (watch){.next = w->next, .fd = -1, .dead = true, .waiter = -1}; /* freed by the next tick: the loop may still name it */
}

void watch_open(const request *r) {
    const char *name = json_text(r->fields, "watch"), *path = full_path(r, "path");
    size_t count = 0;
    if (!path) return;
    for (watch *w = watches; w; w = w->next) count++;
    if (!name || strlen(name) > 64 || find(r, false) || count >= MAX_WATCHES) {
        reply_error(r, count >= MAX_WATCHES ? EAGAIN : EINVAL, "watch must be a new name of at most 64 bytes; at most %d watches are kept", MAX_WATCHES);
        return;
    }
    watch *w = need(calloc(1, sizeof *w));
    *w = (watch){.name = need(strdup(name)), .root = need(strdup(path)), .recursive = json_bool(r->fields, "recursive"), .waiter = -1};
    w->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (w->fd < 0 || !add_folder(w, "")) {
        reply_error(r, errno, "cannot watch %s: %s", path, strerror(errno));
        close_watch(w);
        free(w);
        return;
    }
    add_tree(w, "", 0, false);
    w->next = watches;
    watches = w;
    reply_ok(r);
}

void watch_changes(const request *r) {
    watch *w = find(r, true);
    double wait_s = json_number(r->fields, "wait_s", 0);
    if (!w) return;
    if (w->waiter >= 0) reply_error_id(w->waiter, EBUSY, "somebody else asked");
    int64_t after = json_int(r->fields, "after", 0);
    while (w->first && w->first->serial <= after) drop_event(w);
    if (w->overflow_told && after >= w->sent) w->overflow = w->overflow_told = false;
    w->waiter = r->id;
    w->deadline = now_ms() + (int64_t)((wait_s > 0 && wait_s < 1e6 ? wait_s : 0) * 1000);
}

void watch_close(const request *r) {
    watch *w = find(r, true);
    if (!w) return;
    close_watch(w);
    reply_ok(r);
}

void watch_want(void) {
    for (watch *w = watches; w; w = w->next) {
        if (w->fd >= 0) want(w->fd, POLLIN, readable, w);
        if (w->waiter >= 0 && !stream_is_busy()) due(w->first || w->overflow ? now_ms() : w->deadline);
    }
}

void watch_tick(int64_t now) {
    for (watch **link = &watches; *link;) {
        watch *w = *link;
        if (w->waiter >= 0 && !stream_is_busy() && (w->first || w->overflow || now >= w->deadline)) answer(w);
        if (w->dead) {
            *link = w->next;
            free(w);
        } else {
            link = &w->next;
        }
    }
}

void watch_new_host(void) {
    for (watch *w = watches; w; w = w->next) w->waiter = -1;
}
