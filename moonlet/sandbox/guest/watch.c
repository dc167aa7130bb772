#include "agent.h"
void watch_open(const request *r) {(void)r;}
void watch_changes(const request *r){(void)r;}
void watch_close(const request *r){(void)r;}
void watch_want(void){}
void watch_tick(int64_t now){(void)now;}
void watch_new_host(void){}
