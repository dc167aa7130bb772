/* One small process between the agent and each command.
 *
 * It is a child subreaper: whatever a descendant does (setsid, double fork, death of its parent), it stays a descendant of
 * this process, so a timeout or a kill reaches all of it. Where the kernel has no subreapers, descendants are recognised by
 * the MOONLET_COMMAND that they inherited in their environment and by their session.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commands.h"

#define CHILD_OOM_SCORE "500" /* the hog dies, not the agent */
#define MAX_ROUNDS 400

static struct {
    pid_t main, session; /* `main` is 0 once it has been waited for */
    int control;
    const char *name;
    bool is_subreaper, is_killing;
} self;

/* -- starting ----------------------------------------------------------------------------------------------------- */
static void limit(int what, int64_t amount) {
    struct rlimit r = {(rlim_t)amount, (rlim_t)amount};
    if (amount > 0) setrlimit(what, &r);
}

static int run_program(const launch *l) {
    static char path[4096];
    const char *program = l->argv[0], *folders = NULL;
    int error = ENOENT;
    if (strchr(program, '/')) {
        execve(program, l->argv, l->env);
        return errno;
    }
    for (char **item = l->env; *item; item++)
        if (!strncmp(*item, "PATH=", 5)) folders = *item + 5;
    while (folders && *program) {
        size_t size = strcspn(folders, ":");
        if (snprintf(path, sizeof path, "%.*s%s%s", (int)size, folders, size ? "/" : "./", program) < (int)sizeof path) {
            execve(path, l->argv, l->env);
            if (errno == EACCES) error = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR) return errno;
        }
        folders = folders[size] ? folders + size + 1 : NULL;
    }
    return error;
}

/* In the vfork child, whose memory is the supervisor's. Returns only if something failed. */
static message become(const launch *l) {
    sigset_t none;
    setsid();
    if (l->has_terminal) ioctl(l->input, TIOCSCTTY, 0);
    dup2(l->input, 0);
    dup2(l->output, 1);
    dup2(l->error, 2);
    for (int i = 1; i < 32; i++)
        if (i != SIGKILL && i != SIGSTOP) signal(i, SIG_DFL);
    /* The C library keeps signals 32 and 33 to itself, but hands them on as it got them. */
    const unsigned long by_default[4] = {0};
    for (int i = 32; i <= 64; i++) syscall(SYS_rt_sigaction, i, by_default, NULL, sizeof by_default[0]);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    limit(RLIMIT_NPROC, options.processes);
    limit(RLIMIT_AS, options.memory_bytes);
    limit(RLIMIT_FSIZE, options.file_bytes);
    limit(RLIMIT_NOFILE, options.open_files);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (chdir(l->cwd)) return (message){NO_CWD, errno};
    return (message){NO_PROGRAM, run_program(l)};
}

static void report(int kind, int number) {
    message m = {kind, number};
    /* The agent reads at once; if it is gone there is nobody to tell. */
    while (send(self.control, &m, sizeof m, MSG_NOSIGNAL) < 0 && (errno == EINTR || errno == EAGAIN)) usleep(1000);
}

/* Of this process and so of its children. A process that cannot be looked into (see prepare_process) may not write there. */
static void raise_oom_score(void) {
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (write(fd, CHILD_OOM_SCORE, sizeof CHILD_OOM_SCORE - 1) < 0) {} /* a system that forbids it does without */
        close(fd);
    }
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

static int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* Pipes of other commands must not stay open here: their readers would never see the end. */
static void close_all_but(int *keep, size_t count) {
    int from = 0;
    size_t i = 0;
    qsort(keep, count, sizeof *keep, by_number);
#ifdef SYS_close_range
    for (; i <= count; from = i < count ? keep[i] + 1 : from, i++) {
        int to = i < count ? keep[i] - 1 : INT_MAX;
        if (from <= to && syscall(SYS_close_range, from, to, 0)) break;
    }
    if (i > count) return;
#endif
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        int fd = atoi(entry->d_name);
        bool kept = *entry->d_name == '.' || fd == dirfd(folder);
        for (i = 0; i < count; i++) kept = kept || fd == keep[i];
        if (!kept) close(fd);
    }
    if (folder) closedir(folder);
}

static void start_main(const launch *l) {
    static volatile message failure; /* written by the vfork child */
    failure.kind = 0;
    pid_t pid = vfork();
    if (!pid) {
        message m = become(l);
        failure.kind = m.kind;
        failure.value = m.value;
        _exit(127);
    }
    int error = errno;
    if (pid < 0) report(NO_PROGRAM, error);
    else if (failure.kind) report(failure.kind, failure.value);
    if (pid < 0 || failure.kind) _exit(0);
    self.main = self.session = pid;
    report(STARTED, pid);
    close(l->input);
    close(l->output);
    close(l->error);
}

/* -- killing ------------------------------------------------------------------------------------------------------ */
typedef struct {
    pid_t pid, parent, session;
    bool is_dead, is_doomed;
} process;

typedef struct {
    process *items;
    size_t count, room;
} processes;

static size_t read_file(const char *path, char *data, size_t room) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = 0, n;
    if (fd < 0) return 0;
    while ((size_t)size < room - 1 && (n = read(fd, data + size, room - 1 - (size_t)size)) > 0) size += n;
    close(fd);
    data[size] = 0;
    return (size_t)size;
}

static bool bears_mark(pid_t pid, const char *name) {
    static char data[256 << 10];
    char path[64], mark[256];
    snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    int length = snprintf(mark, sizeof mark, "MOONLET_COMMAND=%s", name);
    size_t size = read_file(path, data, sizeof data);
    for (size_t at = 0; at < size; at += strlen(data + at) + 1)
        if (!strncmp(data + at, mark, (size_t)length + 1)) return true;
    return false;
}

static void list_processes(processes *all) {
    char path[64], text[1024];
    DIR *folder = opendir("/proc");
    all->count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        process p = {.pid = atoi(entry->d_name)};
        snprintf(path, sizeof path, "/proc/%d/stat", (int)p.pid);
        if (p.pid <= 0 || !read_file(path, text, sizeof text)) continue;
        char *fields = strrchr(text, ')'); /* the name before may hold anything */
        char state;
        int threads;
        const char *format = " %c %d %*d %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d";
        if (!fields || sscanf(fields + 1, format, &state, &p.parent, &p.session, &threads) != 4) continue;
        p.is_dead = state == 'Z' && threads < 2; /* a first thread that ended alone looks like a zombie too */
        if (all->count == all->room) {
            all->room = all->room ? all->room * 2 : 64;
            all->items = need(realloc(all->items, all->room * sizeof *all->items));
        }
        all->items[all->count++] = p;
    }
    if (folder) closedir(folder);
}

static process *find(processes *all, pid_t pid) {
    for (size_t i = 0; i < all->count; i++)
        if (all->items[i].pid == pid) return &all->items[i];
    return NULL;
}

/* Marks what must die; returns how many of them still live. */
static size_t doom(processes *all, pid_t root, bool by_mark, const char *name) {
    size_t alive = 0;
    pid_t me = getpid(), agent = getppid();
    list_processes(all);
    for (size_t i = 0; i < all->count; i++) {
        process *p = &all->items[i];
        if (p->pid == me || p->pid == agent || p->pid == 1) continue;
        p->is_doomed = root && (p->parent == root || (by_mark && self.session && p->session == self.session));
        if (!p->is_doomed && by_mark && !p->is_dead) p->is_doomed = bears_mark(p->pid, name);
    }
    for (bool more = true; more;) { /* children of the doomed, to any depth */
        more = false;
        for (size_t i = 0; i < all->count; i++) {
            process *p = &all->items[i], *parent = p->is_doomed || p->pid == me || p->pid == agent ? NULL : find(all, p->parent);
            if (parent && parent->is_doomed) p->is_doomed = more = true;
        }
    }
    for (size_t i = 0; i < all->count; i++) alive += all->items[i].is_doomed && !all->items[i].is_dead;
    return alive;
}

static void send_doomed(const processes *all, int number) {
    for (size_t i = 0; i < all->count; i++)
        if (all->items[i].is_doomed && !all->items[i].is_dead) kill(all->items[i].pid, number);
}

/* False when there is no child any more. */
static bool reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid != self.main) continue;
        self.main = 0;
        report(EXITED, status);
    }
    return pid == 0;
}

/* Stop all until a look finds no more of them (a stopped process cannot fork), then kill; again until none is left. */
static void kill_all(pid_t root, bool by_mark, const char *name) {
    processes all = {0};
    for (int round = 0; round < MAX_ROUNDS; round++) {
        size_t found = doom(&all, root, by_mark, name), before = 0;
        reap();
        if (!found) break;
        for (int look = 0; look < 100 && found > 1 && found != before; look++) {
            send_doomed(&all, SIGSTOP);
            before = found;
            found = doom(&all, root, by_mark, name);
        }
        send_doomed(&all, SIGKILL);
        usleep(round < 10 ? 1000 : 20000);
        reap();
    }
    free(all.items);
}

void kill_marked(const char *name) {
    pid_t pid = fork();
    if (pid) return; /* without a process left there is nothing more to be done; the host may ask again */
    kill_all(0, true, name);
    _exit(0);
}

/* -- waiting ------------------------------------------------------------------------------------------------------ */
static void wake(int number) { (void)number; }

static void obey(void) {
    message m;
    ssize_t n = recv(self.control, &m, sizeof m, MSG_DONTWAIT);
    if (n == sizeof m && m.kind == SEND_SIGNAL && self.main) kill(-self.main, m.value);
    if (n == 0 || (n == sizeof m && m.kind == KILL_TREE)) self.is_killing = true;
}

/* Asked back, because there are kernels (gVisor) that accept the wish without heeding it. */
static bool become_subreaper(void) {
    int is_one = 0;
    return !prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) && !prctl(PR_GET_CHILD_SUBREAPER, &is_one, 0, 0, 0) && is_one == 1;
}

void supervise(const launch *l) {
    sigset_t child, none;
    sigemptyset(&none);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    signal(SIGCHLD, wake);
    signal(SIGTERM, SIG_IGN);
    self.control = l->control;
    self.name = l->name;
    self.is_subreaper = become_subreaper();
    close_all_but((int[]){l->input, l->output, l->error, l->control}, 4);
    raise_oom_score();
    start_main(l);
    while (reap()) {
        if (self.is_killing) {
            kill_all(getpid(), !self.is_subreaper, self.name);
            break;
        }
        struct pollfd wait = {self.control, POLLIN, 0};
        if (ppoll(&wait, 1, NULL, &none) > 0) obey();
    }
    _exit(0);
}
