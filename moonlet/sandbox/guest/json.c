/* JSON: written by hand because the agent must run in images that hold nothing at all. */
#include "json.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_DEPTH 32
#define MAX_VALUES 200000

void *need(void *memory) {
    if (!memory) {
        static const char text[] = "moonlet agent: out of memory\n";
        if (write(2, text, sizeof text - 1)) {}
        _exit(70);
    }
    return memory;
}

void buffer_reserve(buffer *b, size_t more) {
    if (b->room - b->size >= more) return;
    size_t room = b->room ? b->room : 256;
    while (room - b->size < more) room *= 2;
    b->data = need(realloc(b->data, room));
    b->room = room;
}

void buffer_add(buffer *b, const void *data, size_t size) {
    if (!size) return;
    buffer_reserve(b, size);
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

void buffer_print(buffer *b, const char *format, ...) {
    va_list args;
    buffer_reserve(b, 128);
    va_start(args, format);
    int size = vsnprintf(b->data + b->size, b->room - b->size, format, args);
    va_end(args);
    if (size < 0) return;
    if ((size_t)size >= b->room - b->size) {
        buffer_reserve(b, (size_t)size + 1);
        va_start(args, format);
        vsnprintf(b->data + b->size, b->room - b->size, format, args);
        va_end(args);
    }
    b->size += (size_t)size;
}

void buffer_trim(buffer *b, size_t *sent) {
    if (*sent == b->size) {
        buffer_free(b);
    } else if (*sent > b->size / 2) {
        memmove(b->data, b->data + *sent, b->size - *sent);
        b->size -= *sent;
    } else {
        return;
    }
    *sent = 0;
}

void buffer_free(buffer *b) {
    free(b->data);
    *b = (buffer){0};
}

/* Length of the UTF-8 sequence at `s`, 0 if it is none (overlong, a surrogate, beyond U+10FFFF, cut off). */
static size_t utf8_length(const unsigned char *s, size_t left) {
    if (s[0] < 0x80) return 1;
    size_t size = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || size > left) return 0;
    for (size_t i = 1; i < size; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f)) return 0;
    if ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0;
    return size;
}

void buffer_string(buffer *b, const char *text, size_t size) {
    const unsigned char *s = (const unsigned char *)text;
    buffer_add(b, "\"", 1);
    for (size_t at = 0; at < size;) {
        size_t plain = at;
        while (plain < size && s[plain] >= 0x20 && s[plain] < 0x7f && s[plain] != '"' && s[plain] != '\\') plain++;
        buffer_add(b, text + at, plain - at);
        if ((at = plain) == size) break;
        size_t length = utf8_length(s + at, size - at);
        if (length > 1) buffer_add(b, text + at, length);
        else if (length == 1) buffer_print(b, "\\u%04x", s[at]), length = 1;
        else buffer_print(b, "\\udc%02x", s[at]), length = 1;
        at += length;
    }
    buffer_add(b, "\"", 1);
}

/* -- parsing ------------------------------------------------------------------------------------------------------ */
typedef struct {
    char *at, *end;
    value *values;
    size_t used, count;
} parser;

static void skip_space(parser *p) {
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\r' || *p->at == '\n')) p->at++;
}

static bool take(parser *p, char wanted) {
    skip_space(p);
    if (p->at == p->end || *p->at != wanted) return false;
    p->at++;
    return true;
}

/* More values than this cannot be in the text: one, and one for each `,`, `:`, `[` and `{` outside strings. */
static size_t count_values(const char *text, size_t size) {
    size_t count = 1;
    bool inside = false;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '\\' && inside) i++;
        else if (text[i] == '"') inside = !inside;
        else if (!inside && strchr(",:[{", text[i]) && text[i]) count++;
    }
    return count;
}

static int hex4(const char *s, const char *end) {
    int code = 0;
    if (end - s < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return -1;
        code = code * 16 + digit;
    }
    return code;
}

static char *put_utf8(char *out, unsigned code) {
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xc0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        *out++ = (char)(0xe0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    } else {
        *out++ = (char)(0xf0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 0x3f));
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    }
    return out;
}

/* After `\u`: writes the character, or the raw byte of a \udcNN. NULL for any other half of a pair. */
static char *unicode_escape(parser *p, char *out) {
    int code = hex4(p->at, p->end);
    if (code < 0) return NULL;
    p->at += 4;
    if (code >= 0xdc80 && code <= 0xdcff) {
        *out++ = (char)(code & 0xff);
        return out;
    }
    if (code >= 0xd800 && code < 0xdc00) {
        int low = p->end - p->at >= 6 && p->at[0] == '\\' && p->at[1] == 'u' ? hex4(p->at + 2, p->end) : -1;
        if (low < 0xdc00 || low > 0xdfff) return NULL;
        p->at += 6;
        return put_utf8(out, 0x10000 + ((unsigned)(code - 0xd800) << 10) + (unsigned)(low - 0xdc00));
    }
    return code >= 0xdc00 && code <= 0xdfff ? NULL : put_utf8(out, (unsigned)code);
}

/* After the opening quote. What is decoded is never longer than its source, so it can take its place. */
static bool parse_string(parser *p, const char **text, size_t *size) {
    char *out = p->at;
    *text = out;
    while (p->at < p->end && *p->at != '"') {
        if ((unsigned char)*p->at < 0x20) return false;
        if (*p->at != '\\') {
            *out++ = *p->at++;
            continue;
        }
        if (++p->at == p->end) return false;
        const char *from = "\"\\/bfnrt", *to = "\"\\/\b\f\n\r\t";
        char kind = *p->at++;
        const char *known = kind ? strchr(from, kind) : NULL;
        if (known) *out++ = to[known - from];
        else if (kind != 'u' || !(out = unicode_escape(p, out))) return false;
    }
    if (p->at == p->end) return false;
    p->at++;
    *size = (size_t)(out - *text);
    *out = 0;
    return true;
}

static bool parse_number(parser *p, value *v) {
    char copy[64], *rest;
    size_t size = 0;
    while (p->at + size < p->end && size < sizeof copy && strchr("+-.0123456789eE", p->at[size]) && p->at[size]) size++;
    if (!size || size == sizeof copy) return false;
    memcpy(copy, p->at, size);
    copy[size] = 0;
    v->kind = JSON_NUMBER;
    v->number = strtod(copy, &rest);
    p->at += size;
    return !*rest && isfinite(v->number);
}

static bool parse_word(parser *p, const char *word, value *v, json_kind kind) {
    size_t size = strlen(word);
    if ((size_t)(p->end - p->at) < size || memcmp(p->at, word, size)) return false;
    p->at += size;
    v->kind = kind;
    return true;
}

static value *parse_value(parser *p, int depth);

static bool parse_members(parser *p, value *v, int depth) {
    char close = v->kind == JSON_OBJECT ? '}' : ']';
    value **link = &v->first;
    if (take(p, close)) return true;
    do {
        const char *name = NULL;
        size_t size;
        if (v->kind == JSON_OBJECT && !(take(p, '"') && parse_string(p, &name, &size) && take(p, ':'))) return false;
        value *member = parse_value(p, depth + 1);
        if (!member) return false;
        member->name = name;
        *link = member;
        link = &member->next;
        v->size++;
    } while (take(p, ','));
    return take(p, close);
}

static value *parse_value(parser *p, int depth) {
    skip_space(p);
    if (p->at == p->end || depth > MAX_DEPTH || p->used == p->count) return NULL;
    value *v = &p->values[p->used++];
    bool good;
    switch (*p->at) {
    case '{':
    case '[':
        v->kind = *p->at++ == '{' ? JSON_OBJECT : JSON_ARRAY;
        good = parse_members(p, v, depth);
        break;
    case '"':
        p->at++;
        v->kind = JSON_STRING;
        good = parse_string(p, &v->text, &v->size);
        break;
    case 't': good = parse_word(p, "true", v, JSON_TRUE); break;
    case 'f': good = parse_word(p, "false", v, JSON_FALSE); break;
    case 'n': good = parse_word(p, "null", v, JSON_NULL); break;
    default: good = parse_number(p, v);
    }
    return good ? v : NULL;
}

value *json_parse(char *text, size_t size) {
    parser p = {.at = text, .end = text + size, .count = count_values(text, size)};
    skip_space(&p);
    if (p.at == p.end || *p.at != '{' || p.count > MAX_VALUES) return NULL;
    p.values = need(calloc(p.count, sizeof *p.values));
    value *v = parse_value(&p, 0);
    skip_space(&p);
    if (v && p.at == p.end) return v;
    free(p.values);
    return NULL;
}

const value *json_get(const value *object, const char *name) {
    if (object->kind != JSON_OBJECT) return NULL;
    for (const value *v = object->first; v; v = v->next)
        if (!strcmp(v->name, name)) return v;
    return NULL;
}

const char *json_text(const value *object, const char *name) {
    const value *v = json_get(object, name);
    return v && v->kind == JSON_STRING && strlen(v->text) == v->size ? v->text : NULL;
}

double json_number(const value *object, const char *name, double otherwise) {
    const value *v = json_get(object, name);
    return v && v->kind == JSON_NUMBER ? v->number : otherwise;
}

int64_t json_int(const value *object, const char *name, int64_t otherwise) {
    double number = json_number(object, name, NAN);
    return fabs(number) <= 9007199254740992.0 ? (int64_t)number : otherwise;
}

bool json_bool(const value *object, const char *name) {
    const value *v = json_get(object, name);
    return v && v->kind == JSON_TRUE;
}
