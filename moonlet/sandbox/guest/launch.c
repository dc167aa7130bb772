/* From a request to a running supervisor: environment, pipes or a terminal, one fork. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "commands.h"

#define MAX_ENV 4096
#define MAX_KEEP_BYTES (1 << 28)
#define LISTED_BYTES 512 /* of a command's arguments in lists */

extern char **environ;

typedef struct {
    char **items;
    size_t count;
} strings;

static void set_env(strings *env, const char *name, const char *text) {
    size_t length = strlen(name), at = 0;
    while (at < env->count && !(!strncmp(env->items[at], name, length) && env->items[at][length] == '=')) at++;
    char *item = need(malloc(length + strlen(text) + 2));
    sprintf(item, "%s=%s", name, text);
    if (at == env->count) {
        env->items = need(realloc(env->items, (env->count + 2) * sizeof *env->items));
        env->items[++env->count] = NULL;
    } else {
        free(env->items[at]);
    }
    env->items[at] = item;
}

static void free_strings(strings *s) {
    for (size_t i = 0; i < s->count; i++) free(s->items[i]);
    free(s->items);
}

static const char *build_env(const request *r, strings *env) {
    set_env(env, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    set_env(env, "LANG", "C.UTF-8");
    for (char **item = environ; item && *item; item++) {
        char *copy = need(strdup(*item)), *text = strchr(copy, '=');
        if (text) *text = 0, set_env(env, copy, text + 1);
        free(copy);
    }
    set_env(env, "HOME", options.home);
    if (json_get(r->fields, "pty")) set_env(env, "TERM", "xterm-256color");
    const value *given = json_get(r->fields, "env");
    if (given && given->kind != JSON_OBJECT && given->kind != JSON_NULL) return "env must be an object of strings";
    for (const value *v = given ? given->first : NULL; v; v = v->next) {
        if (v->kind != JSON_STRING || strlen(v->text) != v->size || !*v->name || strchr(v->name, '='))
            return "env must map names to strings without zero bytes";
        if (env->count >= MAX_ENV) return "env has too many variables";
        set_env(env, v->name, v->text);
    }
    set_env(env, "MOONLET_COMMAND", json_text(r->fields, "command"));
    return NULL;
}

static char **build_argv(const request *r) {
    const value *given = json_get(r->fields, "argv");
    if (!given || given->kind != JSON_ARRAY || !given->size) return NULL;
    char **argv = need(calloc(given->size + 1, sizeof *argv));
    size_t count = 0;
    for (const value *v = given->first; v; v = v->next) {
        if (v->kind != JSON_STRING || strlen(v->text) != v->size) {
            free(argv);
            return NULL;
        }
        argv[count++] = (char *)v->text;
    }
    return argv;
}

static void list_argv(command *c, char **argv) {
    buffer_add(&c->argv, "[", 1);
    for (size_t i = 0; argv[i] && c->argv.size < LISTED_BYTES; i++) {
        size_t size = strlen(argv[i]), left = LISTED_BYTES - c->argv.size;
        if (i) buffer_add(&c->argv, ",", 1);
        buffer_string(&c->argv, argv[i], size < left ? size : left);
    }
    buffer_add(&c->argv, "]", 1);
}

static void close_all(int *fds, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
}

/* ours[0] input, ours[1], ours[2] outputs, ours[3] control; theirs alike. */
static int open_terminal(const value *size, int *ours, int *theirs) {
    struct winsize window = {.ws_row = (unsigned short)json_int(size, "rows", 24),
                             .ws_col = (unsigned short)json_int(size, "columns", 80)};
    int number, locked = 0;
    char path[32];
    if ((ours[1] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK)) < 0) return errno;
    if (ioctl(ours[1], TIOCSPTLCK, &locked) < 0 || ioctl(ours[1], TIOCGPTN, &number) < 0) return errno;
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    if ((theirs[0] = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) return errno;
    ioctl(ours[1], TIOCSWINSZ, &window);
    ours[0] = fcntl(ours[1], F_DUPFD_CLOEXEC, 3);
    theirs[1] = fcntl(theirs[0], F_DUPFD_CLOEXEC, 3);
    theirs[2] = fcntl(theirs[0], F_DUPFD_CLOEXEC, 3);
    return ours[0] < 0 || theirs[1] < 0 || theirs[2] < 0 ? errno : 0;
}

static int open_pipes(const request *r, int *ours, int *theirs) {
    int ends[2];
    bool has_input = json_bool(r->fields, "stdin");
    if (!has_input) theirs[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (theirs[0] < 0) {
        if (pipe2(ends, O_CLOEXEC)) return errno;
        theirs[0] = ends[0], ours[0] = ends[1];
        if (!has_input) close(ours[0]), ours[0] = -1; /* no /dev/null here: a pipe that is at its end already */
    }
    for (int i = 1; i < 3; i++) {
        if (pipe2(ends, O_CLOEXEC)) return errno;
        ours[i] = ends[0], theirs[i] = ends[1];
    }
    for (int i = 0; i < 3; i++)
        if (ours[i] >= 0) fcntl(ours[i], F_SETFL, O_NONBLOCK);
    return 0;
}

static int open_ends(const request *r, int *ours, int *theirs) {
    const value *pty = json_get(r->fields, "pty");
    int control[2];
    int error = pty && pty->kind == JSON_OBJECT ? open_terminal(pty, ours, theirs) : open_pipes(r, ours, theirs);
    if (error) return error;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, control)) return errno;
    ours[3] = control[0], theirs[3] = control[1];
    return 0;
}

static command *new_command(const request *r, const int *ours, char **argv) {
    command *c = need(calloc(1, sizeof *c));
    const char *tag = json_text(r->fields, "tag");
    const value *pty = json_get(r->fields, "pty");
    double timeout_s = json_number(r->fields, "timeout_s", 0);
    int64_t keep = json_int(r->fields, "output_bytes", 8 << 20);
    c->name = need(strdup(json_text(r->fields, "command")));
    c->tag = need(strdup(tag ? tag : ""));
    list_argv(c, argv);
    c->start_id = r->id;
    c->has_terminal = pty && pty->kind == JSON_OBJECT;
    c->keep = (size_t)(keep < 0 ? 0 : keep > MAX_KEEP_BYTES ? MAX_KEEP_BYTES : keep);
    c->deadline = timeout_s > 0 && timeout_s < 1e9 ? now_ms() + (int64_t)(timeout_s * 1000) + 1 : NO_DEADLINE;
    c->settle_at = NO_DEADLINE;
    c->input = ours[0], c->out[0].fd = ours[1], c->out[1].fd = ours[2], c->control = ours[3];
    return c;
}

command *launch_command(const request *r) {
    int ours[4] = {-1, -1, -1, -1}, theirs[4] = {-1, -1, -1, -1};
    strings env = {0};
    const char *cwd = full_path(r, "cwd"), *complaint;
    if (!cwd) return NULL;
    char **argv = build_argv(r);
    command *c = NULL;
    int error;
    if (!argv) reply_error(r, EINVAL, "argv must be a list of at least one string without zero bytes");
    else if ((complaint = build_env(r, &env))) reply_error(r, EINVAL, "%s", complaint);
    else if ((error = open_ends(r, ours, theirs))) reply_error(r, error, "cannot make pipes for the command: %s", strerror(error));
    else {
        launch l = {argv, env.items, cwd, json_text(r->fields, "command"), theirs[0], theirs[1], theirs[2], theirs[3], ours[2] < 0};
        pid_t pid = fork();
        if (!pid) supervise(&l);
        if (pid < 0) reply_error(r, errno, "cannot start a process: %s", strerror(errno));
        else c = new_command(r, ours, argv), c->supervisor = pid;
    }
    close_all(theirs, 4);
    if (!c) close_all(ours, 4);
    free_strings(&env);
    free(argv);
    return c;
}
