/* The commands that run or ran: their output, input, end, and who waits for them. */
#include "commands.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_COMMANDS 1024
#define MAX_WAITERS 4096
#define MAX_NAME_BYTES 128
#define MAX_PENDING_BYTES (1 << 20)
#define CALM_PENDING_BYTES (256 << 10) /* a sender is answered when no more than this waits for the command */
#define DRAIN_BYTES (1 << 20)
#define SETTLE_MS 50 /* the kernel delivers what was written to a terminal a little later */
#define LIST_BYTES (256 << 10)
#define MAX_ENDED 256                /* of those that ended a while ago, only so many are remembered, */
#define MAX_ENDED_BYTES (64 << 20)   /* with so much output */
#define RECENT_MS 60000

typedef enum { POLL, STDIN, KILL } waiting_for;

typedef struct waiter {
    struct waiter *next;
    waiting_for what;
    command *c;
    int64_t id, deadline;
    uint64_t offsets[2];
    size_t max;
} waiter;

static command *commands;
static waiter *waiters;
static int num_commands, num_waiters;
static int64_t next_serial = 1;

static bool has_ended(const command *c) { return c->exited && c->settle_at == NO_DEADLINE && (!c->killing || c->gone); }

static command *find(const request *r) {
    const char *name = json_text(r->fields, "command");
    for (command *c = commands; name && c; c = c->next)
        if (!c->forgotten && !strcmp(c->name, name)) return c;
    reply_error(r, ESRCH, "there is no command '%.128s'", name ? name : "");
    return NULL;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* -- waiters ------------------------------------------------------------------------------------------------------ */
static waiter *add_waiter(command *c, const request *r, waiting_for what) {
    if (num_waiters >= MAX_WAITERS) {
        reply_error(r, EAGAIN, "%d calls wait already", MAX_WAITERS);
        return NULL;
    }
    waiter *w = need(calloc(1, sizeof *w));
    *w = (waiter){.next = waiters, .what = what, .c = c, .id = r->id, .deadline = NO_DEADLINE};
    waiters = w;
    num_waiters++;
    return w;
}

static size_t available(const waiter *w, int i) {
    size_t kept = w->c->out[i].kept.size;
    return w->offsets[i] < kept ? kept - (size_t)w->offsets[i] : 0;
}

static void answer_poll(const waiter *w) {
    const command *c = w->c;
    size_t sizes[2] = {available(w, 0), available(w, 1)};
    if (sizes[0] + sizes[1] > w->max) { /* half for each, and what one does not need for the other */
        size_t half = w->max / 2;
        size_t second = sizes[1] < half ? sizes[1] : sizes[0] < half ? w->max - sizes[0] : half;
        size_t first = w->max - second;
        sizes[0] = sizes[0] < first ? sizes[0] : first;
        sizes[1] = second;
    }
    bool ended = has_ended(c);
    buffer *out = reply_begin(w->id);
    buffer_print(out, ",\"running\":%s,\"timed_out\":%s", ended ? "false" : "true", c->timed_out ? "true" : "false");
    if (ended && WIFEXITED(c->status)) buffer_print(out, ",\"exit_code\":%d,\"signal\":null", WEXITSTATUS(c->status));
    else if (ended) buffer_print(out, ",\"exit_code\":null,\"signal\":%d", WTERMSIG(c->status));
    else buffer_print(out, ",\"exit_code\":null,\"signal\":null");
    static const char *names[2] = {"stdout", "stderr"};
    for (int i = 0; i < 2; i++)
        buffer_print(out, ",\"%s_bytes\":%zu,\"%s_kept\":%zu,\"%s_total\":%llu", names[i], sizes[i], names[i],
                     c->out[i].kept.size, names[i], (unsigned long long)c->out[i].total);
    buffer_print(out, ",\"bytes\":%zu}\n", sizes[0] + sizes[1]);
    for (int i = 0; i < 2; i++)
        if (sizes[i]) buffer_add(out, c->out[i].kept.data + w->offsets[i], sizes[i]);
}

static bool answer(const waiter *w, int64_t now) {
    command *c = w->c;
    if (w->what == POLL) {
        if (!c->started || (!available(w, 0) && !available(w, 1) && !has_ended(c) && now < w->deadline)) return false;
        answer_poll(w);
    } else if (w->what == STDIN) {
        if (c->input >= 0 && c->pending.size - c->pending_sent > CALM_PENDING_BYTES) return false;
        if (c->input < 0 && c->pending.size > c->pending_sent) reply_error_id(w->id, EPIPE, "the command no longer reads its input");
        else reply_end(reply_begin(w->id));
    } else {
        if (!c->gone) return false;
        reply_end(reply_begin(w->id));
    }
    return true;
}

static void answer_waiters(int64_t now) {
    for (waiter **link = &waiters; *link;) {
        waiter *w = *link;
        if (!stream_is_busy() && answer(w, now)) {
            *link = w->next;
            free(w);
            num_waiters--;
        } else {
            if (now < w->deadline) due(w->deadline);
            link = &w->next;
        }
    }
}

static void fail_waiters(const command *c, int error, const char *message) {
    for (waiter **link = &waiters; *link;) {
        waiter *w = *link;
        if (w->c == c) {
            reply_error_id(w->id, error, "%s", message);
            *link = w->next;
            free(w);
            num_waiters--;
        } else {
            link = &w->next;
        }
    }
}

void commands_new_host(void) {
    while (waiters) {
        waiter *next = waiters->next;
        free(waiters);
        waiters = next;
    }
    num_waiters = 0;
    for (command *c = commands; c; c = c->next) c->start_id = -1;
}

/* -- life and end ------------------------------------------------------------------------------------------------- */
static void forget(command *c, int error, const char *message) {
    fail_waiters(c, error, message);
    c->forgotten = true;
    c->keep = 0;
    for (int i = 0; i < 2; i++) buffer_free(&c->out[i].kept);
    buffer_free(&c->pending);
    c->pending_sent = 0;
    close_fd(&c->input);
}

static void free_command(command *c) {
    for (int i = 0; i < 2; i++) {
        close_fd(&c->out[i].fd);
        buffer_free(&c->out[i].kept);
    }
    close_fd(&c->control);
    close_fd(&c->input);
    buffer_free(&c->pending);
    buffer_free(&c->argv);
    free(c->name);
    free(c->tag);
    free(c);
    num_commands--;
}

/* Reads what is there, at most `budget` bytes. False when there will be no more. */
static bool drain(command *c, output *out, size_t budget) {
    static char scrap[64 << 10];
    while (out->fd >= 0 && budget) {
        size_t space = c->keep - out->kept.size;
        if (space > sizeof scrap) space = sizeof scrap;
        ssize_t n = read(out->fd, scrap, sizeof scrap);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (n <= 0) { /* a terminal says EIO when nobody has it open any more */
            close_fd(&out->fd);
            break;
        }
        buffer_add(&out->kept, scrap, (size_t)n < space ? (size_t)n : space);
        out->total += (uint64_t)n;
        budget = (size_t)n < budget ? budget - (size_t)n : 0;
    }
    return out->fd >= 0;
}

static void drain_both(command *c) {
    for (int i = 0; i < 2; i++) drain(c, &c->out[i], DRAIN_BYTES);
}

static void send_message(command *c, int kind, int number) {
    message m = {kind, number};
    if (c->control >= 0 && send(c->control, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {} /* it has just ended */
}

static void kill_tree(command *c) {
    if (c->gone) {
        kill_marked(c->name); /* nothing is left where there are subreapers */
        return;
    }
    c->killing = true;
    send_message(c, KILL_TREE, 0);
}

static void on_exit_status(command *c, int status) {
    c->exited = true;
    c->exited_at = now_ms();
    c->status = status;
    c->deadline = NO_DEADLINE;
    drain_both(c);
    if (c->has_terminal && c->out[0].fd >= 0) c->settle_at = now_ms() + SETTLE_MS;
}

static void on_started(command *c, pid_t pid) {
    c->started = true;
    c->pid = pid;
    buffer *out = reply_begin(c->start_id);
    buffer_print(out, ",\"pid\":%d", (int)pid);
    reply_end(out);
}

static void on_failure(command *c, const message *m) {
    const char *text = strerror(m->value);
    if (m->kind == NO_CWD) reply_error_id(c->start_id, m->value, "cannot enter the working directory of '%s': %s", c->name, text);
    else reply_error_id(c->start_id, m->value, "cannot run %.*s: %s", c->argv.size < 200 ? (int)c->argv.size : 200, c->argv.data, text);
    c->exited = true;
    forget(c, m->value, "the command could not be started");
}

static void on_gone(command *c) {
    close_fd(&c->control);
    c->gone = true;
    if (!c->exited) { /* the command killed its own supervisor: its descendants are found by their mark */
        if (!c->started) on_started(c, 0);
        kill_marked(c->name);
        on_exit_status(c, SIGKILL);
    }
    drain_both(c);
}

static void on_control(void *owner, int fd, short events) {
    command *c = owner;
    message m;
    (void)events;
    if (c->control != fd) return; /* closed in this round, and perhaps another's by now */
    ssize_t n = recv(fd, &m, sizeof m, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n != sizeof m) {
        on_gone(c);
    } else if (m.kind == STARTED) {
        on_started(c, m.value);
    } else if (m.kind == EXITED) {
        on_exit_status(c, m.value);
    } else if (!c->started) {
        on_failure(c, &m);
    }
}

static void on_output(void *owner, int fd, short events) {
    command *c = owner;
    (void)events;
    for (int i = 0; i < 2; i++)
        if (c->out[i].fd == fd) drain(c, &c->out[i], 256 << 10);
}

static void on_input(void *owner, int fd, short events) {
    command *c = owner;
    (void)events;
    if (c->input != fd) return;
    while (c->pending_sent < c->pending.size) {
        ssize_t n = write(fd, c->pending.data + c->pending_sent, c->pending.size - c->pending_sent);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (n < 0) {
            close_fd(&c->input);
            return;
        }
        c->pending_sent += (size_t)n;
    }
    buffer_trim(&c->pending, &c->pending_sent);
    if (c->close_input && !c->pending.size) close_fd(&c->input);
}

void commands_want(void) {
    for (command *c = commands; c; c = c->next) {
        if (c->control >= 0) want(c->control, POLLIN, on_control, c);
        for (int i = 0; i < 2; i++)
            if (c->out[i].fd >= 0) want(c->out[i].fd, POLLIN, on_output, c);
        if (c->input >= 0 && (c->pending.size > c->pending_sent || c->close_input)) want(c->input, POLLOUT, on_input, c);
        if (c->deadline != NO_DEADLINE) due(c->deadline);
        if (c->settle_at != NO_DEADLINE) due(c->settle_at);
    }
    answer_waiters(now_ms());
}

/* A host that never reaps must not make the agent grow without end. */
static void forget_oldest(int64_t now) {
    size_t bytes = 0;
    int count = 0;
    for (const command *c = commands; c; c = c->next) {
        if (c->forgotten || !has_ended(c)) continue;
        bytes += c->out[0].kept.size + c->out[1].kept.size;
        count++;
    }
    for (command *c = commands; c && (count > MAX_ENDED || bytes > MAX_ENDED_BYTES); c = c->next) {
        if (c->forgotten || !has_ended(c) || now - c->exited_at < RECENT_MS) continue;
        bytes -= c->out[0].kept.size + c->out[1].kept.size;
        count--;
        forget(c, ESRCH, "the command was forgotten");
    }
}

void commands_tick(int64_t now) {
    for (command **link = &commands; *link;) {
        command *c = *link;
        if (now >= c->deadline) {
            c->deadline = NO_DEADLINE;
            c->timed_out = true;
            kill_tree(c);
        }
        if (now >= c->settle_at || c->out[0].fd < 0) c->settle_at = NO_DEADLINE;
        if (c->forgotten && c->gone && c->out[0].fd < 0 && c->out[1].fd < 0) {
            *link = c->next;
            free_command(c);
        } else {
            link = &c->next;
        }
    }
    answer_waiters(now);
    forget_oldest(now);
}

void commands_shift(int64_t by_ms) {
    for (command *c = commands; c; c = c->next)
        if (c->deadline != NO_DEADLINE) c->deadline += by_ms;
}

/* -- requests ----------------------------------------------------------------------------------------------------- */
void commands_start(const request *r) {
    const char *name = json_text(r->fields, "command");
    if (!name || !*name || strlen(name) > MAX_NAME_BYTES) {
        reply_error(r, EINVAL, "command must be a name of 1 to %d bytes", MAX_NAME_BYTES);
        return;
    }
    for (command *c = commands; c; c = c->next) {
        if (c->forgotten || strcmp(c->name, name)) continue;
        reply_error(r, EEXIST, "there is a command '%s' already", name);
        return;
    }
    if (num_commands >= MAX_COMMANDS) {
        reply_error(r, EAGAIN, "%d commands are kept: reap those that have ended", MAX_COMMANDS);
        return;
    }
    command *c = launch_command(r), **link = &commands;
    if (!c) return;
    c->serial = next_serial++;
    while (*link) link = &(*link)->next;
    *link = c;
    num_commands++;
}

void commands_poll(const request *r) {
    command *c = find(r);
    waiter *w = c ? add_waiter(c, r, POLL) : NULL;
    if (!w) return;
    double wait_s = json_number(r->fields, "wait_s", 0);
    int64_t max = json_int(r->fields, "max", MAX_BODY_BYTES);
    int64_t offsets[2] = {json_int(r->fields, "stdout", 0), json_int(r->fields, "stderr", 0)};
    w->max = (size_t)(max < 2 ? 2 : max > MAX_BODY_BYTES ? MAX_BODY_BYTES : max);
    for (int i = 0; i < 2; i++) w->offsets[i] = offsets[i] < 0 ? 0 : (uint64_t)offsets[i];
    w->deadline = now_ms() + (int64_t)((wait_s > 0 && wait_s < 1e6 ? wait_s : 0) * 1000);
}

void commands_stdin(const request *r) {
    command *c = find(r);
    if (!c) return;
    if (c->input < 0 || c->close_input) {
        if (!r->body_size && json_bool(r->fields, "close")) reply_ok(r);
        else reply_error(r, EPIPE, "the input of the command is closed");
        return;
    }
    if (c->pending.size - c->pending_sent + r->body_size > MAX_PENDING_BYTES) {
        reply_error(r, EAGAIN, "the command has not yet read %zu bytes of its input", c->pending.size - c->pending_sent);
        return;
    }
    buffer_add(&c->pending, r->body, r->body_size);
    if (json_bool(r->fields, "close")) {
        if (c->has_terminal) buffer_add(&c->pending, "\x04", 1); /* a terminal's way to say end-of-file */
        else c->close_input = true;
    }
    on_input(c, c->input, 0);
    add_waiter(c, r, STDIN);
}

void commands_signal(const request *r) {
    command *c = find(r);
    int64_t number = json_int(r->fields, "signal", SIGTERM);
    if (!c) return;
    if (json_bool(r->fields, "tree")) {
        kill_tree(c);
        add_waiter(c, r, KILL);
    } else if (number < 1 || number > 64) {
        reply_error(r, EINVAL, "there is no signal %lld", (long long)number);
    } else if (c->exited) {
        reply_error(r, ESRCH, "the command has ended");
    } else {
        send_message(c, SEND_SIGNAL, (int)number);
        reply_ok(r);
    }
}

void commands_resize(const request *r) {
    command *c = find(r);
    if (!c) return;
    int64_t rows = json_int(r->fields, "rows", 0), columns = json_int(r->fields, "columns", 0);
    struct winsize window = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    if (rows < 1 || columns < 1 || rows > 65535 || columns > 65535) reply_error(r, EINVAL, "rows and columns go from 1 to 65535");
    else if (!c->has_terminal) reply_error(r, ENOTTY, "the command has no terminal");
    else if (c->out[0].fd >= 0 && ioctl(c->out[0].fd, TIOCSWINSZ, &window)) reply_error(r, errno, "cannot resize: %s", strerror(errno));
    else reply_ok(r);
}

void commands_reap(const request *r) {
    command *c = find(r);
    if (!c) return;
    if (json_bool(r->fields, "kill")) {
        kill_tree(c);
    } else if (!has_ended(c)) {
        reply_error(r, EBUSY, "the command is running");
        return;
    }
    forget(c, ESRCH, "the command was forgotten");
    reply_ok(r);
}

void commands_list(const request *r) {
    int64_t after = json_int(r->fields, "after", 0);
    int count = 0;
    bool more = false;
    buffer *out = reply_begin(r->id);
    size_t begun = out->size;
    buffer_print(out, ",\"commands\":[");
    for (command *c = commands; c; c = c->next) {
        if (c->forgotten || !c->started || c->serial <= after) continue;
        if ((more = out->size - begun > LIST_BYTES)) break;
        bool ended = has_ended(c);
        buffer_print(out, "%s{\"serial\":%lld,\"pid\":%d,\"running\":%s,\"timed_out\":%s", count++ ? "," : "",
                     (long long)c->serial, (int)c->pid, ended ? "false" : "true", c->timed_out ? "true" : "false");
        if (ended && WIFEXITED(c->status)) buffer_print(out, ",\"exit_code\":%d,\"signal\":null", WEXITSTATUS(c->status));
        else if (ended) buffer_print(out, ",\"exit_code\":null,\"signal\":%d", WTERMSIG(c->status));
        else buffer_print(out, ",\"exit_code\":null,\"signal\":null");
        buffer_print(out, ",\"command\":");
        buffer_string(out, c->name, strlen(c->name));
        buffer_print(out, ",\"tag\":");
        buffer_string(out, c->tag, strlen(c->tag) < 512 ? strlen(c->tag) : 512);
        buffer_print(out, ",\"argv\":");
        buffer_add(out, c->argv.data, c->argv.size);
        buffer_print(out, "}");
    }
    buffer_print(out, "],\"more\":%s", more ? "true" : "false");
    reply_end(out);
}
