/* A growing byte buffer, and JSON in and out of it. File names are bytes: what is not UTF-8 travels as \udcNN. */
#ifndef MOONLET_JSON_H
#define MOONLET_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    char *data;
    size_t size, room;
} buffer;

void buffer_reserve(buffer *b, size_t more);
void buffer_add(buffer *b, const void *data, size_t size);
void buffer_print(buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void buffer_string(buffer *b, const char *text, size_t size); /* a JSON string, with its quotes */
void buffer_trim(buffer *b, size_t *sent);                     /* forgets what was sent once it is worth the copying */
void buffer_free(buffer *b);
void *need(void *memory); /* ends the agent if an allocation failed */

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct value {
    json_kind kind;
    const char *name; /* within an object */
    const char *text; /* bytes of a string, ended by a zero that `size` does not count */
    size_t size;      /* of a string in bytes, of an array or object in members */
    double number;
    struct value *first, *next;
} value;

/* Parses in place (`text` is overwritten and must be ended by a zero). NULL if it is not one JSON object. Free with free(). */
value *json_parse(char *text, size_t size);

const value *json_get(const value *object, const char *name);
/* NULL if absent, of another kind, or with a zero byte inside. */
const char *json_text(const value *object, const char *name);
int64_t json_int(const value *object, const char *name, int64_t otherwise); /* also if beyond 2^53 */
double json_number(const value *object, const char *name, double otherwise);
bool json_bool(const value *object, const char *name);

#endif
