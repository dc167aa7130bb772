/* Connections to ports of the guest's own loopback, carried to the host as channels: the only way out of a sandbox.
 *
 * Each direction of a channel has a window: no more than WINDOW bytes are under way that the other side has not confirmed,
 * so neither a slow host nor a slow program makes the agent hold more.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

#define MAX_LISTENERS 16
#define MAX_CHANNELS 256
#define WINDOW (256 << 10)
#define PIECE (32 << 10)

typedef struct channel {
    struct channel *next;
    int64_t number;
    int fd, port;
    size_t unconfirmed;      /* sent to the host */
    buffer out;              /* from the host, for the program */
    size_t sent;
    bool read_end, host_end; /* no more comes from the program; from the host */
    bool dead;
} channel;

static struct {
    int fd, port;
} listeners[MAX_LISTENERS];
static int num_listeners, num_channels;
static channel *channels;
static int64_t next_number = 1;

static channel *find(const request *r) {
    int64_t number = json_int(r->fields, "channel", -1);
    for (channel *c = channels; c; c = c->next)
        if (!c->dead && c->number == number) return c;
    reply_error(r, ESRCH, "there is no channel %lld", (long long)number);
    return NULL;
}

static void tell(const channel *c, const char *event) {
    buffer *out = event_begin(event);
    buffer_print(out, ",\"channel\":%lld", (long long)c->number);
    if (!strcmp(event, "net.open")) buffer_print(out, ",\"port\":%d", c->port);
    reply_end(out);
}

static void drop(channel *c, bool is_told) {
    if (c->dead) return;
    c->dead = true;
    close(c->fd);
    c->fd = -1;
    buffer_free(&c->out);
    if (is_told) tell(c, "net.close");
}

static void on_connection(void *owner, int fd, short events) {
    int port = listeners[(intptr_t)owner].port, one = 1;
    (void)events;
    int peer = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (peer < 0) return;
    if (num_channels >= MAX_CHANNELS) {
        close(peer);
        return;
    }
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    channel *c = need(calloc(1, sizeof *c));
    *c = (channel){.next = channels, .number = next_number++, .fd = peer, .port = port};
    channels = c;
    num_channels++;
    tell(c, "net.open");
}

static void read_program(channel *c) {
    static char data[PIECE];
    size_t room = WINDOW - c->unconfirmed < sizeof data ? WINDOW - c->unconfirmed : sizeof data;
    ssize_t n = read(c->fd, data, room);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) {
        drop(c, true);
    } else if (n == 0) {
        c->read_end = true;
        tell(c, "net.end");
    } else {
        c->unconfirmed += (size_t)n;
        buffer *out = event_begin("net.data");
        buffer_print(out, ",\"channel\":%lld", (long long)c->number);
        reply_body(out, data, (size_t)n);
    }
}

static void write_program(channel *c) {
    size_t before = c->sent;
    while (c->sent < c->out.size) {
        ssize_t n = send(c->fd, c->out.data + c->sent, c->out.size - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN) {
            drop(c, true);
            return;
        }
        if (n < 0) break;
        c->sent += (size_t)n;
    }
    if (c->sent > before) {
        buffer *out = event_begin("net.ack");
        buffer_print(out, ",\"channel\":%lld,\"count\":%zu", (long long)c->number, c->sent - before);
        reply_end(out);
    }
    buffer_trim(&c->out, &c->sent);
    if (c->host_end && !c->out.size) shutdown(c->fd, SHUT_WR);
}

static void on_channel(void *owner, int fd, short events) {
    channel *c = owner;
    if (c->fd != fd) return;
    if (events & POLLOUT) write_program(c);
    if (!c->dead && events & (POLLIN | POLLHUP | POLLERR) && !c->read_end && c->unconfirmed < WINDOW) read_program(c);
    if (!c->dead && events & POLLERR && c->read_end) drop(c, true);
}

void relay_want(void) {
    for (intptr_t i = 0; i < num_listeners; i++) want(listeners[i].fd, POLLIN, on_connection, (void *)i);
    for (channel *c = channels; c; c = c->next) {
        bool reads = !c->dead && !c->read_end && c->unconfirmed < WINDOW && !stream_is_busy();
        bool writes = !c->dead && c->out.size > c->sent;
        if (reads || writes) want(c->fd, (short)((reads ? POLLIN : 0) | (writes ? POLLOUT : 0)), on_channel, c);
    }
}

void relay_tick(void) {
    for (channel **link = &channels; *link;) {
        channel *c = *link;
        if (!c->dead && c->read_end && c->host_end && c->out.size == c->sent) drop(c, true); /* both have said all */
        if (c->dead) {
            *link = c->next;
            free(c);
            num_channels--;
        } else {
            link = &c->next;
        }
    }
}

void relay_new_host(void) {
    for (channel *c = channels; c; c = c->next) drop(c, false); /* their other ends died with the host before */
}

void relay_open(const request *r) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int64_t port = json_int(r->fields, "port", 0);
    int one = 1, i = 0;
    while (i < num_listeners && (!port || listeners[i].port != port)) i++;
    if (i == num_listeners) {
        bring_up_loopback();
        address.sin_port = htons((uint16_t)port);
        int fd = port < 0 || port > 65535 || i == MAX_LISTENERS ? -1 : socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64) || getsockname(fd, (struct sockaddr *)&address, &size)) {
            reply_error(r, fd < 0 ? EINVAL : errno, "cannot listen on port %lld of the sandbox: %s", (long long)port, strerror(errno));
            if (fd >= 0) close(fd);
            return;
        }
        listeners[i].fd = fd, listeners[i].port = ntohs(address.sin_port);
        num_listeners++;
    }
    buffer *out = reply_begin(r->id);
    buffer_print(out, ",\"port\":%d,\"window\":%d", listeners[i].port, WINDOW);
    reply_end(out);
}

void relay_send(const request *r) {
    channel *c = find(r);
    if (!c) return;
    if (c->host_end || c->out.size - c->sent + r->body_size > WINDOW) { /* it does not keep to the window */
        drop(c, true);
        return;
    }
    buffer_add(&c->out, r->body, r->body_size);
    write_program(c);
    reply_ok(r);
}

void relay_end(const request *r) {
    channel *c = find(r);
    if (!c) return;
    c->host_end = true;
    if (c->out.size == c->sent) shutdown(c->fd, SHUT_WR);
    reply_ok(r);
}

void relay_close(const request *r) {
    channel *c = find(r);
    if (!c) return;
    drop(c, false);
    reply_ok(r);
}

void relay_ack(const request *r) {
    channel *c = find(r);
    int64_t count = json_int(r->fields, "count", 0);
    if (!c) return;
    c->unconfirmed = count > 0 && (uint64_t)count <= c->unconfirmed ? c->unconfirmed - (size_t)count : c->unconfirmed;
    reply_ok(r);
}
