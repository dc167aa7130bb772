/* Frames in and out. A host may vanish in the middle of one and another may come: see GuestStream in stream.py. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define READ_BYTES (64 << 10)
#define BUSY_BYTES (4 << 20) /* waiting for the host: read no more requests until it takes something */
#define KEEP_BYTES (64 << 10)
#define BODY_MARK '.' /* after a body: line feeds of a host that comes new never complete a frame of the one that died */
#define RETRY_FIRST_MS 5
#define RETRY_LAST_MS 100

enum { LINE, SKIP_LINE, BODY, MARK };

static struct {
    int in, out;
    bool can_return; /* a FIFO or a port: the host side may go and come back */
    bool greeted;    /* a host said hello, and all that it sent since was sound */
    int state;
    buffer line, body, queue;
    size_t body_need, sent;
    value *fields;
    int64_t retry_at, retry_ms;
    char epoch[37];
} stream;

static void make_epoch(void) {
    unsigned char b[16];
    if (getrandom(b, sizeof b, 0) != sizeof b) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        memcpy(b, &t, sizeof b);
    }
    b[6] = (b[6] & 0x0f) | 0x40;
    b[8] = (b[8] & 0x3f) | 0x80;
    char *out = stream.epoch;
    for (int i = 0; i < 16; i++) out += sprintf(out, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

const char *epoch_id(void) { return stream.epoch; }

void stream_open(void) {
    make_epoch();
    stream.in = 0, stream.out = 1;
    if (options.device) {
        stream.in = stream.out = open(options.device, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (stream.in < 0) {
            fprintf(stderr, "moonlet agent: cannot open %s: %s\n", options.device, strerror(errno));
            exit(1);
        }
    }
    struct stat info;
    stream.can_return = options.device || (!fstat(stream.in, &info) && !S_ISSOCK(info.st_mode) && !S_ISREG(info.st_mode));
    for (int i = 0; i < 2; i++) {
        int fd = i ? stream.out : stream.in;
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
}

static void trim(buffer *b) {
    b->size = 0;
    if (b->room > KEEP_BYTES) buffer_free(b);
}

/* -- out ---------------------------------------------------------------------------------------------------------- */
bool stream_is_busy(void) { return stream.queue.size - stream.sent > BUSY_BYTES; }

/* Nobody waits for the answer to a request without an id: it is written here and lost. */
static buffer *lost(void) {
    static buffer b;
    trim(&b);
    return &b;
}

buffer *reply_begin(int64_t id) {
    if (id < 0) return lost();
    buffer_print(&stream.queue, "{\"id\":%lld,\"ok\":true", (long long)id);
    return &stream.queue;
}

buffer *event_begin(const char *name) {
    buffer_print(&stream.queue, "{\"event\":\"%s\"", name);
    return &stream.queue;
}

void reply_end(buffer *out) { buffer_add(out, "}\n", 2); }

void reply_body(buffer *out, const void *body, size_t size) {
    buffer_print(out, ",\"bytes\":%zu}\n", size);
    buffer_add(out, body, size);
}

void reply_ok(const request *r) {
    if (r->id >= 0) reply_end(reply_begin(r->id));
}

static const char *error_name(int error) {
    static const struct { int number; const char *name; } names[] = {
        {EPERM, "EPERM"}, {ENOENT, "ENOENT"}, {ESRCH, "ESRCH"}, {EIO, "EIO"}, {E2BIG, "E2BIG"}, {ENOEXEC, "ENOEXEC"},
        {EAGAIN, "EAGAIN"}, {ENOMEM, "ENOMEM"}, {EACCES, "EACCES"}, {EBUSY, "EBUSY"}, {EEXIST, "EEXIST"},
        {EXDEV, "EXDEV"}, {ENOTDIR, "ENOTDIR"}, {EISDIR, "EISDIR"}, {EINVAL, "EINVAL"}, {ENFILE, "ENFILE"},
        {EMFILE, "EMFILE"}, {ETXTBSY, "ETXTBSY"}, {EFBIG, "EFBIG"}, {ENOSPC, "ENOSPC"}, {EROFS, "EROFS"},
        {EPIPE, "EPIPE"}, {ENAMETOOLONG, "ENAMETOOLONG"}, {ENOSYS, "ENOSYS"}, {ENOTEMPTY, "ENOTEMPTY"}, {ELOOP, "ELOOP"},
        {EOVERFLOW, "EOVERFLOW"}, {EDQUOT, "EDQUOT"}, {ENXIO, "ENXIO"}, {EADDRINUSE, "EADDRINUSE"}, {EMSGSIZE, "EMSGSIZE"},
        {ENOTTY, "ENOTTY"}, {ENODEV, "ENODEV"}, {EOPNOTSUPP, "EOPNOTSUPP"}, {ESTALE, "ESTALE"}, {EADDRNOTAVAIL, "EADDRNOTAVAIL"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].number == error) return names[i].name;
    return "EIO";
}

static void reply_error_list(int64_t id, int error, const char *format, va_list args) {
    char text[1024];
    if (id < 0) return;
    vsnprintf(text, sizeof text, format, args);
    buffer_print(&stream.queue, "{\"id\":%lld,\"ok\":false,\"error\":\"%s\",\"message\":", (long long)id, error_name(error));
    buffer_string(&stream.queue, text, strlen(text));
    reply_end(&stream.queue);
}

void reply_error(const request *r, int error, const char *format, ...) {
    va_list args;
    va_start(args, format);
    reply_error_list(r->id, error, format, args);
    va_end(args);
}

void reply_error_id(int64_t id, int error, const char *format, ...) {
    va_list args;
    va_start(args, format);
    reply_error_list(id, error, format, args);
    va_end(args);
}

void stream_flush(void) {
    while (stream.sent < stream.queue.size && !stream.retry_at) {
        ssize_t n = write(stream.out, stream.queue.data + stream.sent, stream.queue.size - stream.sent);
        if (n > 0) stream.sent += (size_t)n;
        else if (n < 0 && errno == EINTR) continue;
        else if (n < 0 && errno != EAGAIN && !stream.can_return) stop_agent();
        if (n <= 0) break;
    }
    if (stream.sent == stream.queue.size) {
        stream.sent = stream.queue.size = 0;
        if (stream.queue.room > KEEP_BYTES) buffer_free(&stream.queue);
    } else if (stream.sent > BUSY_BYTES) {
        memmove(stream.queue.data, stream.queue.data + stream.sent, stream.queue.size -= stream.sent);
        stream.sent = 0;
    }
}

/* -- in ----------------------------------------------------------------------------------------------------------- */
static void end_frame(void) {
    free(stream.fields);
    stream.fields = NULL;
    trim(&stream.line);
    trim(&stream.body);
    stream.state = LINE;
}

/* What follows may be the inside of a body: nothing is obeyed until a host says hello. */
static void distrust(void) {
    if (stream.greeted) reply_end(event_begin("junk"));
    stream.greeted = false;
}

static void greet(const char *nonce) {
    stream.queue.size = stream.sent = 0;
    stream.greeted = true;
    commands_new_host();
    tree_new_host();
    watch_new_host();
    relay_new_host();
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    buffer_add(&stream.queue, "\n{\"hello\":", 10); /* the frame before may have been cut anywhere */
    buffer_string(&stream.queue, nonce, strlen(nonce));
    buffer_print(&stream.queue, ",\"protocol\":1,\"epoch\":\"%s\",\"pid\":%d,\"time\":%lld.%09ld", stream.epoch, (int)getpid(),
                 (long long)t.tv_sec, t.tv_nsec);
    reply_end(&stream.queue);
}

static void run_frame(void) {
    const char *op = json_text(stream.fields, "op");
    request r = {stream.fields, json_int(stream.fields, "id", -1), stream.body.data, stream.body.size};
    if (op && !strcmp(op, "hello")) {
        const char *nonce = json_text(stream.fields, "nonce");
        if (nonce) greet(nonce);
    } else if (stream.greeted) {
        dispatch(&r);
    }
    end_frame();
}

static void end_line(void) {
    if (!stream.line.size) return;
    buffer_add(&stream.line, "", 1);
    stream.fields = json_parse(stream.line.data, stream.line.size - 1);
    const value *bytes = stream.fields ? json_get(stream.fields, "bytes") : NULL;
    int64_t count = bytes ? json_int(stream.fields, "bytes", -1) : 0;
    if (!stream.fields || count < 0 || count > MAX_BODY_BYTES) {
        distrust();
        end_frame();
    } else if (!bytes) {
        run_frame();
    } else {
        stream.body_need = (size_t)count;
        stream.state = count ? BODY : MARK;
    }
}

static size_t feed_line(const char *data, size_t size) {
    const char *end = memchr(data, '\n', size);
    size_t part = end ? (size_t)(end - data) : size;
    if (stream.state == LINE && stream.line.size + part > MAX_LINE_BYTES) {
        distrust();
        end_frame();
        stream.state = SKIP_LINE;
    }
    if (stream.state == LINE) buffer_add(&stream.line, data, part);
    if (!end) return part;
    if (stream.state == LINE) end_line();
    else stream.state = LINE;
    return part + 1;
}

static size_t feed(const char *data, size_t size) {
    if (stream.state == LINE || stream.state == SKIP_LINE) return feed_line(data, size);
    if (stream.state == BODY) {
        size_t part = stream.body_need - stream.body.size < size ? stream.body_need - stream.body.size : size;
        buffer_add(&stream.body, data, part);
        if (stream.body.size == stream.body_need) stream.state = MARK;
        return part;
    }
    if (*data == BODY_MARK) {
        run_frame();
        return 1;
    }
    distrust();
    end_frame();
    return 0;
}

static void wait_for_host(void) {
    if (!stream.can_return) {
        stop_agent();
        return;
    }
    stream.retry_ms = stream.retry_ms ? stream.retry_ms * 2 : RETRY_FIRST_MS;
    if (stream.retry_ms > RETRY_LAST_MS) stream.retry_ms = RETRY_LAST_MS;
    stream.retry_at = now_ms() + stream.retry_ms;
}

static void readable(void *owner, int fd, short events) {
    (void)owner;
    static char data[READ_BYTES];
    ssize_t n = read(fd, data, sizeof data);
    if (n > 0) {
        stream.retry_ms = 0;
        for (size_t at = 0; at < (size_t)n;) at += feed(data + at, (size_t)n - at);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR) || events & (POLLHUP | POLLERR)) {
        wait_for_host();
    }
}

static void writable(void *owner, int fd, short events) {
    (void)owner, (void)fd;
    if (events & (POLLHUP | POLLERR) && !(events & POLLOUT)) wait_for_host();
}

void stream_want(void) {
    /* A port without a host reports a hang-up all the time, which poll cannot be told to ignore. */
    if (stream.retry_at > now_ms()) {
        due(stream.retry_at);
        return;
    }
    stream.retry_at = 0;
    if (!stream_is_busy()) want(stream.in, POLLIN, readable, NULL);
    if (stream.sent < stream.queue.size) want(stream.out, POLLOUT, writable, NULL);
}
