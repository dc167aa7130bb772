/* What concerns the machine as a whole. A clone calls all of it before anybody else may use it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define MAX_SYNCS 16

static struct {
    pid_t pid;
    int64_t id;
} syncs[MAX_SYNCS];

static void reply_done(const request *r, const char *what, bool done, const char *more, bool more_done) {
    buffer *out = reply_begin(r->id);
    buffer_print(out, ",\"%s\":%s", what, done ? "true" : "false");
    if (more) buffer_print(out, ",\"%s\":%s", more, more_done ? "true" : "false");
    reply_end(out);
}

void machine_settime(const request *r) {
    double time = json_number(r->fields, "time", 0);
    if (time <= 0 || time > 1e11) {
        reply_error(r, EINVAL, "time must be in seconds since 1970");
        return;
    }
    struct timespec t = {.tv_sec = (time_t)time};
    t.tv_nsec = (long)((time - (double)t.tv_sec) * 1e9);
    reply_done(r, "done", options.owns_machine && !clock_settime(CLOCK_REALTIME, &t), NULL, false);
}

/* Clones of one memory image would draw the same random numbers: mix in what the host sends, and have the kernel use it. */
void machine_reseed(const request *r) {
    struct {
        struct rand_pool_info head;
        char data[512];
    } pool;
    size_t size = r->body_size < sizeof pool.data ? r->body_size : sizeof pool.data;
    int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC | O_NOCTTY);
    bool mixed = false, credited = false;
    if (fd >= 0 && size) {
        mixed = write(fd, r->body, r->body_size) == (ssize_t)r->body_size;
        pool.head.entropy_count = (int)size * 8;
        pool.head.buf_size = (int)size;
        memcpy(pool.head.buf, r->body, size);
        credited = options.owns_machine && !ioctl(fd, RNDADDENTROPY, &pool) && !ioctl(fd, RNDRESEEDCRNG);
    }
    if (fd >= 0) close(fd);
    srandom((unsigned)clock_ms() ^ (r->body_size >= 4 ? *(const unsigned char *)r->body * 16777619U : 0U));
    reply_done(r, "mixed", mixed, "credited", credited);
}

void machine_identity(const request *r) {
    const char *name = json_text(r->fields, "hostname"), *machine = json_text(r->fields, "machine_id");
    bool named = false, marked = false;
    if (options.owns_machine && name) named = !sethostname(name, strlen(name));
    int fd = options.owns_machine && machine ? open("/etc/machine-id", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0444) : -1;
    if (fd >= 0) {
        marked = dprintf(fd, "%s\n", machine) > 0;
        close(fd);
    }
    reply_done(r, "hostname", named, "machine_id", marked);
}

/* In a process of its own: it may take as long as the disk wants. */
void machine_sync(const request *r) {
    for (int i = 0; i < MAX_SYNCS; i++) {
        if (syncs[i].pid) continue;
        pid_t pid = fork();
        if (!pid) {
            sync();
            _exit(0);
        }
        if (pid < 0) break;
        syncs[i].pid = pid, syncs[i].id = r->id;
        return;
    }
    sync();
    reply_ok(r);
}

void machine_child_ended(pid_t pid) {
    for (int i = 0; i < MAX_SYNCS; i++) {
        if (syncs[i].pid != pid) continue;
        syncs[i].pid = 0;
        reply_end(reply_begin(syncs[i].id));
    }
}

void machine_usage(const request *r) {
    long long count = 0, pages = 0;
    DIR *folder = opendir("/proc");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[64];
        long long all, resident, shared;
        if (atoi(entry->d_name) <= 0) continue;
        count++;
        snprintf(path, sizeof path, "/proc/%d/statm", atoi(entry->d_name));
        FILE *file = fopen(path, "re");
        if (file && fscanf(file, "%lld %lld %lld", &all, &resident, &shared) == 3) pages += resident - shared;
        if (file) fclose(file);
    }
    if (folder) closedir(folder);
    buffer *out = reply_begin(r->id);
    buffer_print(out, ",\"processes\":%lld,\"memory_bytes\":%lld", count, pages * sysconf(_SC_PAGESIZE));
    reply_end(out);
}

void bring_up_loopback(void) {
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    if (!ioctl(fd, SIOCGIFFLAGS, &request) && !(request.ifr_flags & IFF_UP)) {
        request.ifr_flags |= IFF_UP;
        ioctl(fd, SIOCSIFFLAGS, &request); /* where it is forbidden the machine came with it */
    }
    close(fd);
}
