/* What the parts of the guest agent share. One thread, one loop, nothing that waits for a peer. */
#ifndef MOONLET_AGENT_H
#define MOONLET_AGENT_H

#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "json.h"

#define MAX_LINE_BYTES (1 << 20)
#define MAX_BODY_BYTES (256 << 10)
#define NO_DEADLINE INT64_MAX

typedef struct {
    const char *device; /* NULL: stdin and stdout */
    const char *home;
    int64_t processes, memory_bytes, file_bytes, open_files; /* 0: as the agent's own */
    bool init;
    bool owns_machine; /* may set the clock and the host name: not on a machine of others */
} settings;

extern settings options;

/* One request. `body` is valid until the handler returns. Without an id nobody waits for an answer. */
typedef struct {
    const value *fields;
    int64_t id;
    const char *body;
    size_t body_size;
} request;

/* -- loop (agent.c) -- */
typedef void (*handler)(void *owner, int fd, short events);
void want(int fd, short events, handler ready, void *owner); /* for the coming round only */
void due(int64_t at_ms);                                     /* wake the loop no later than this */
int64_t now_ms(void);                                        /* monotonic, as of this round */
int64_t clock_ms(void);                                      /* as of now */
void stop_agent(void);
void hold_standard_fds(void);

/* -- frames (stream.c) -- */
void stream_open(void);
void stream_want(void);
void stream_flush(void);
bool stream_is_busy(void);                    /* so much is waiting for the host that more should not be made */
buffer *reply_begin(int64_t id);              /* `{"id":7,"ok":true`; add `,"field":...`, then end it */
void reply_end(buffer *out);
void reply_body(buffer *out, const void *body, size_t size);
buffer *event_begin(const char *name);        /* ended like a reply */
void reply_ok(const request *r);
void reply_error(const request *r, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
void reply_error_id(int64_t id, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
const char *epoch_id(void);

/* -- what a request can ask for -- */
void dispatch(const request *r); /* ops.c */

void commands_start(const request *r); /* commands.c */
void commands_poll(const request *r);
void commands_stdin(const request *r);
void commands_signal(const request *r);
void commands_resize(const request *r);
void commands_reap(const request *r);
void commands_list(const request *r);
void commands_want(void);
void commands_tick(int64_t now);
void commands_shift(int64_t by_ms); /* the agent was frozen for so long: deadlines move on */
void commands_new_host(void);       /* nobody waits any more */

void files_read(const request *r); /* files.c */
void files_write(const request *r);
void files_put(const request *r);
void files_begin(const request *r);
void files_rename(const request *r);
void files_stat(const request *r);
void files_mkdir(const request *r);
const char *full_path(const request *r, const char *field); /* NULL: an error went out; static memory per field */
bool make_parents(const char *path);
void add_file_info(buffer *out, const char *path, int folder, const char *name);

void tree_list(const request *r); /* tree.c */
void tree_remove(const request *r);
void tree_want(void);
void tree_tick(void);
void tree_new_host(void);

void watch_open(const request *r); /* watch.c */
void watch_changes(const request *r);
void watch_close(const request *r);
void watch_want(void);
void watch_tick(int64_t now);
void watch_new_host(void);

void relay_open(const request *r); /* relay.c */
void relay_send(const request *r);
void relay_end(const request *r);
void relay_close(const request *r);
void relay_ack(const request *r);
void relay_want(void);
void relay_tick(void);
void relay_new_host(void);

void machine_settime(const request *r); /* machine.c */
void machine_reseed(const request *r);
void machine_identity(const request *r);
void machine_sync(const request *r);
void machine_usage(const request *r);
void machine_child_ended(pid_t pid);
void bring_up_loopback(void);

const char *vsock_port(unsigned number); /* vsock.c */
const char *init_machine(void); /* init.c: the path of the port to the host */

#endif
