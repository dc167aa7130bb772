/* The names that a host may ask for. */
#include <errno.h>
#include <string.h>

#include "agent.h"

static const struct {
    const char *name;
    void (*run)(const request *r);
} ops[] = {
    {"start", commands_start},     {"poll", commands_poll},         {"stdin", commands_stdin},   {"signal", commands_signal},
    {"resize", commands_resize},   {"reap", commands_reap},         {"commands", commands_list}, {"read", files_read},
    {"write", files_write},        {"put", files_put},              {"begin", files_begin},      {"rename", files_rename},
    {"stat", files_stat},          {"mkdir", files_mkdir},          {"list", tree_list},         {"remove", tree_remove},
    {"watch", watch_open},         {"changes", watch_changes},      {"unwatch", watch_close},    {"relay", relay_open},
    {"net.send", relay_send},      {"net.end", relay_end},          {"net.close", relay_close},  {"net.ack", relay_ack},
    {"settime", machine_settime},  {"reseed", machine_reseed},      {"sync", machine_sync},      {"usage", machine_usage},
    {"identity", machine_identity},
};

void dispatch(const request *r) {
    const char *op = json_text(r->fields, "op");
    for (size_t i = 0; op && i < sizeof ops / sizeof *ops; i++) {
        if (!strcmp(ops[i].name, op)) {
            ops[i].run(r);
            return;
        }
    }
    reply_error(r, ENOSYS, "unknown op '%s': the host is of another version than the agent", op ? op : "");
}
