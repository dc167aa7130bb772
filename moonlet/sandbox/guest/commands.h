/* A command, its supervisor, and what passes between them. */
#ifndef MOONLET_COMMANDS_H
#define MOONLET_COMMANDS_H

#include "agent.h"

/* What the supervisor needs to start the command; descriptors are the child's ends. */
typedef struct {
    char **argv, **env;
    const char *cwd, *name;
    int input, output, error, control;
    bool has_terminal;
} launch;

typedef struct {
    int kind, value;
} message;

enum { STARTED = 1, NO_CWD, NO_PROGRAM, EXITED, SEND_SIGNAL, KILL_TREE };

typedef struct {
    int fd; /* -1: closed */
    buffer kept;
    uint64_t total;
} output;

typedef struct command {
    struct command *next;
    char *name, *tag;
    buffer argv; /* JSON, cut short */
    int64_t serial, start_id, deadline, settle_at, exited_at;
    pid_t pid, supervisor;
    int control, input;    /* -1: closed */
    output out[2];         /* of a terminal only the first */
    size_t keep;           /* bytes per stream */
    buffer pending;        /* for the command's standard input */
    size_t pending_sent;
    bool close_input, has_terminal;
    bool started, exited, killing, timed_out;
    bool gone;      /* the supervisor has ended: no descendant is left */
    bool forgotten; /* the host wants no more of it; its background children may still write */
    int status;     /* as of waitpid */
} command;

command *launch_command(const request *r); /* launch.c; NULL: the error went out */
void supervise(const launch *l) __attribute__((noreturn)); /* supervisor.c */
void kill_marked(const char *name);        /* kills every process whose environment names this command */

#endif
