/* Moonlet's guest agent: runs commands and moves files for a host at the other end of a byte stream.
 *
 *   agent [--device PATH] [--home DIR] [--processes N] [--memory-bytes N] [--file-bytes N] [--open-files N] [--init]
 *
 * Without --device the stream is stdin and stdout. The limits hold for each command. --init makes a machine of an initramfs
 * first. What travels is described in stream.py and client.py.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define FROZEN_MS 1000 /* a wait that takes so much longer than asked was a pause of the machine */
#define TICK_MS 1000   /* so that a pause is noticed before a deadline that lies far ahead */

settings options = {.home = "/workspace"};

static struct {
    struct pollfd *fds;
    struct {
        handler ready;
        void *owner;
    } *handlers;
    size_t count, room;
    int64_t due, now;
    bool stopping;
} loop;

static volatile sig_atomic_t child_ended, asked_to_stop;

int64_t now_ms(void) { return loop.now; }

int64_t clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void want(int fd, short events, handler ready, void *owner) {
    if (loop.count == loop.room) {
        loop.room = loop.room ? loop.room * 2 : 32;
        loop.fds = need(realloc(loop.fds, loop.room * sizeof *loop.fds));
        loop.handlers = need(realloc(loop.handlers, loop.room * sizeof *loop.handlers));
    }
    loop.fds[loop.count] = (struct pollfd){fd, events, 0};
    loop.handlers[loop.count].ready = ready;
    loop.handlers[loop.count++].owner = owner;
}

void due(int64_t at_ms) {
    if (at_ms < loop.due) loop.due = at_ms;
}

void stop_agent(void) { loop.stopping = true; }

static void on_signal(int number) {
    if (number == SIGCHLD) child_ended = 1;
    else asked_to_stop = 1;
}

static void wait_for_events(void) {
    sigset_t none;
    sigemptyset(&none);
    int64_t before = loop.now, wait = loop.due == NO_DEADLINE ? -1 : loop.due > before ? loop.due - before : 0;
    if (wait > TICK_MS) wait = TICK_MS;
    struct timespec t = {wait / 1000, wait % 1000 * 1000000};
    int ready = ppoll(loop.fds, loop.count, wait < 0 ? NULL : &t, &none);
    loop.now = clock_ms();
    int64_t late = loop.now - before - wait;
    if (wait >= 0 && late > FROZEN_MS) commands_shift(late);
    for (size_t i = 0; ready > 0 && i < loop.count; i++)
        if (loop.fds[i].revents) loop.handlers[i].ready(loop.handlers[i].owner, loop.fds[i].fd, loop.fds[i].revents);
}

static void reap_children(void) {
    pid_t pid;
    child_ended = 0;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) machine_child_ended(pid);
}

static void run_loop(void) {
    while (!loop.stopping && !asked_to_stop) {
        loop.count = 0;
        loop.due = NO_DEADLINE;
        commands_want();
        watch_want();
        relay_want();
        tree_want();
        stream_flush();
        stream_want();
        wait_for_events();
        if (child_ended) reap_children();
        commands_tick(loop.now);
        watch_tick(loop.now);
        relay_tick();
        tree_tick();
        stream_flush();
    }
}

static int64_t number_option(const char *text) {
    char *end;
    long long number = strtoll(text, &end, 10);
    if (*end || number < 0) {
        fprintf(stderr, "moonlet agent: %s is not a number\n", text);
        exit(2);
    }
    return number;
}

static void parse_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *text = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(name, "--init")) {
            options.init = true;
            continue;
        }
        if (text && !strcmp(name, "--device")) options.device = text;
        else if (text && !strcmp(name, "--home")) options.home = text;
        else if (text && !strcmp(name, "--processes")) options.processes = number_option(text);
        else if (text && !strcmp(name, "--memory-bytes")) options.memory_bytes = number_option(text);
        else if (text && !strcmp(name, "--file-bytes")) options.file_bytes = number_option(text);
        else if (text && !strcmp(name, "--open-files")) options.open_files = number_option(text);
        else {
            fprintf(stderr, "moonlet agent: unknown option or no value: %s\n", name);
            exit(2);
        }
        i++;
    }
}

/* A closed one of these would be given to a pipe of a command. */
void hold_standard_fds(void) {
    int fd = 0;
    while (fd >= 0 && fd < 3) fd = open("/dev/null", O_RDWR);
    if (fd > 2) close(fd);
}

static void prepare_process(void) {
    struct rlimit files;
    sigset_t blocked;
    hold_standard_fds();
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigaddset(&blocked, SIGTERM);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    signal(SIGCHLD, on_signal);
    signal(SIGTERM, on_signal);
    if (getpid() == 1) { /* a guest may signal its first process, which only the host ends, by SIGKILL */
        const int deaf[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGVTALRM, SIGPROF, SIGIO, SIGPWR};
        for (size_t i = 0; i < sizeof deaf / sizeof *deaf; i++) signal(deaf[i], SIG_IGN);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond the limit on files is an error of its request */
    umask(022);
    srandom((unsigned)clock_ms() ^ (unsigned)getpid() << 16);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* commands of the same user must not look into or steer the agent */
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    prepare_process();
    loop.now = clock_ms();
    if (options.init) options.device = init_machine();
    options.owns_machine = getpid() == 1 || options.init;
    stream_open();
    run_loop();
    if (options.init) { /* the kernel would panic without its first program */
        sync();
        reboot(RB_POWER_OFF);
    }
    return 0;
}
