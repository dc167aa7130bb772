/* The stream to the host over a vsock, for monitors that have no serial port for it (Firecracker).
 *
 * A child listens, and hands one host after the other through a raw terminal to the agent, which opens it like a port.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#include "agent.h"

typedef struct {
    char data[64 << 10];
    size_t at, size;
} waiting;

static bool is_over(ssize_t n) { return n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN); }

/* Neither direction waits for the other: an agent that has much to say reads nothing until it has said it. */
static bool move(waiting *w, struct pollfd *from, struct pollfd *to) {
    if (w->at == w->size && from->revents & (POLLIN | POLLHUP | POLLERR)) {
        ssize_t n = read(from->fd, w->data, sizeof w->data);
        if (is_over(n)) return false;
        w->at = 0, w->size = n > 0 ? (size_t)n : 0;
    }
    if (w->at == w->size) return true;
    ssize_t n = write(to->fd, w->data + w->at, w->size - w->at);
    if (is_over(n)) return false;
    if (n > 0) w->at += (size_t)n;
    return true;
}

static void serve(int listener, int terminal) {
    static waiting to_agent, to_host;
    for (;;) {
        int host = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (host < 0) continue;
        to_agent.at = to_agent.size = to_host.at = to_host.size = 0;
        struct pollfd ends[2] = {{.fd = host}, {.fd = terminal}};
        do {
            ends[0].events = (to_agent.at == to_agent.size ? POLLIN : 0) | (to_host.at < to_host.size ? POLLOUT : 0);
            ends[1].events = (to_host.at == to_host.size ? POLLIN : 0) | (to_agent.at < to_agent.size ? POLLOUT : 0);
            poll(ends, 2, -1);
        } while (move(&to_agent, &ends[0], &ends[1]) && move(&to_host, &ends[1], &ends[0]));
        close(host);
    }
}

/* The path of a terminal that leads to whoever connects to this port; NULL where there are no vsocks. */
const char *vsock_port(unsigned number) {
    static char path[64];
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = number};
    struct termios mode;
    int listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0), terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), end;
    if (listener < 0 || terminal < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1)) return NULL;
    if (grantpt(terminal) || unlockpt(terminal) || ptsname_r(terminal, path, sizeof path)) return NULL;
    /* The child keeps the agent's end open too: before the agent opens it there must be no hang-up. */
    if ((end = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0 || tcgetattr(end, &mode)) return NULL;
    cfmakeraw(&mode);
    if (tcsetattr(end, TCSANOW, &mode) || fcntl(terminal, F_SETFL, O_RDWR | O_NONBLOCK)) return NULL;
    pid_t child = fork();
    if (!child) {
        signal(SIGPIPE, SIG_IGN);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(listener, terminal);
    }
    close(listener);
    close(terminal);
    close(end);
    return child > 0 ? path : NULL;
}
