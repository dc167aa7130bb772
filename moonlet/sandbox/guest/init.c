/* The agent as the first program of a small virtual machine: from an initramfs to the root disk and the port to the host.
 *
 * The initramfs holds this program, /modules.list (names below /modules, in the order in which they load) and /modules.
 * The kernel's command line may say moonlet.root=DEVICE (else /dev/vda), moonlet.vsock=PORT (else a virtio port is the
 * way to the host), and after `--` the agent's options.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define PORT_NAME "moonlet.agent"
#define DEVICE_WAIT_MS 20000

static void give_up(const char *doing, const char *what) {
    fprintf(stderr, "moonlet init: cannot %s %s: %s\n", doing, what, strerror(errno));
    sync();
    reboot(RB_POWER_OFF);
    _exit(1);
}

static void place(const char *type, const char *where, unsigned long flags, const char *data) {
    mkdir(where, 0755);
    if (mount(type, where, type, flags, data) && errno != EBUSY) fprintf(stderr, "moonlet init: no %s: %s\n", where, strerror(errno));
}

static void load_modules(void) {
    char line[256], path[300];
    FILE *list = fopen("/modules.list", "re");
    while (list && fgets(line, sizeof line, list)) {
        line[strcspn(line, "\r\n")] = 0;
        if (!*line) continue;
        snprintf(path, sizeof path, "%s%s", *line == '/' ? "" : "/modules/", line);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) give_up("open the module", path);
        if (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST) give_up("load the module", path);
        close(fd);
        unlink(path); /* it is memory of the machine as long as it is there */
    }
    if (list) fclose(list);
}

/* The value of a word of the kernel's command line; NULL if it is not there. `name` ends with the equals sign. */
static const char *boot_option(const char *name) {
    char text[4096], *found;
    FILE *file = fopen("/proc/cmdline", "re");
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[size] = 0;
    if (!(found = strstr(text, name))) return NULL;
    found += strlen(name);
    return need(strndup(found, strcspn(found, " \n")));
}

static void nap(void) { nanosleep(&(struct timespec){0, 5000000}, NULL); }

static void enter_root(const char *device) {
    int64_t until = clock_ms() + DEVICE_WAIT_MS;
    while (access(device, F_OK) && clock_ms() < until) nap();
    mkdir("/newroot", 0755);
    if (mount(device, "/newroot", "ext4", MS_NOATIME, NULL)) give_up("mount", device);
    static const char *moved[][2] = {{"/dev", "/newroot/dev"}, {"/proc", "/newroot/proc"}, {"/sys", "/newroot/sys"}};
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
        mkdir(moved[i][1], 0755);
        if (mount(moved[i][0], moved[i][1], NULL, MS_MOVE, NULL)) give_up("move", moved[i][0]);
    }
    if (chdir("/newroot") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) give_up("enter", device);
}

static bool names_port(const char *entry) {
    char path[300], name[64] = "";
    snprintf(path, sizeof path, "/sys/class/virtio-ports/%.200s/name", entry);
    FILE *file = fopen(path, "re");
    bool found = file && fgets(name, sizeof name, file);
    if (file) fclose(file);
    name[strcspn(name, "\n")] = 0;
    return found && !strcmp(name, PORT_NAME);
}

static bool find_port(char *path, size_t room) {
    DIR *folder = opendir("/sys/class/virtio-ports");
    bool found = false;
    for (struct dirent *entry; folder && !found && (entry = readdir(folder));)
        if (*entry->d_name != '.' && (found = names_port(entry->d_name))) snprintf(path, room, "/dev/%.200s", entry->d_name);
    if (folder) closedir(folder);
    return found && !access(path, F_OK);
}

const char *init_machine(void) {
    static char port[256];
    const char *root, *vsock;
    place("devtmpfs", "/dev", MS_NOSUID, NULL);
    hold_standard_fds();
    place("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    place("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    load_modules();
    root = boot_option("moonlet.root=");
    enter_root(root ? root : "/dev/vda");
    place("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=620,ptmxmode=666");
    place("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
    place("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=755");
    /* Root may do as it likes here, but a slip must not end the machine. */
    if (mount("/dev/null", "/proc/sysrq-trigger", NULL, MS_BIND, NULL)) fprintf(stderr, "moonlet init: sysrq stays\n");
    mkdir("/tmp", 01777);
    mkdir(options.home, 0755);
    bring_up_loopback();
    clearenv(); /* the kernel puts its unknown parameters there */
    if ((vsock = boot_option("moonlet.vsock="))) {
        const char *path = vsock_port((unsigned)atoi(vsock));
        if (!path) give_up("listen on vsock port", vsock);
        return path;
    }
    int64_t until = clock_ms() + DEVICE_WAIT_MS;
    while (!find_port(port, sizeof port) && clock_ms() < until) nap();
    if (!*port) give_up("find the port", PORT_NAME);
    return port;
}
