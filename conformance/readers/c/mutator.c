/* The mutator of the libFuzzer program: it knows that a file is a prologue, a JSON text and blobs, changes one of
 * them, and mostly renews the digests, so that what it makes gets past them. */
#include "fuzz.h"
#include "rsv.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

static uint64_t state;

static size_t draw(size_t below)
{
    uint64_t z = state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return below ? (size_t)((z ^ z >> 31) % below) : 0;
}

#define SHA "\"sha256\":\"0000000000000000000000000000000000000000000000000000000000000000\""

static const char *const scalars[] = {
    "0", "1", "2", "3", "4", "8", "9", "16", "31", "32", "33", "-1", "-0", "1e5", "1.0", "01", "255", "256", "512",
    "16384", "16385", "65535", "65536", "16777216", "16777217", "2147483647", "2147483648", "4503599627370496",
    "9007199254740991", "9007199254740992", "-9007199254740991", "18446744073709551616", "NaN", "null", "true",
    "false", "\"\"", "\"f32\"", "\"f16\"", "\"bf16\"", "\"bool\"", "\"u8\"", "\"i64\"", "\"signs\"", "\"values\"",
    "\"hartley\"", "\"matrix\"", "\"haar\"", "\"\\u0000\"", "\"\\ud800\"", "\"\\udc00\\ud800\"", "\"\\ud83d\\ude00\"",
    "\"\\u0061\"", "\"a.weight\"", "\"a.bias\"", "\"\x7f\"", "\"\xc3\xa9\"", "\"\xed\xa0\x80\"", "\"\xff\"", "\"A/b\"",
    "[]", "{}", "[0]", "[0,9007199254740991]", "[3,3]", "[1,1,1,1,1,1,1,1]",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
    "{\"\":0,\"\":1}", "{\"a\":0,\"\\u0061\":0}", "\"__proto__\"",
};
static const char *const entries[] = {
    "{\"bits\":1,\"window\":1," SHA "}",
    "{\"bits\":3,\"window\":3," SHA "}",
    "{\"bits\":2,\"window\":5," SHA "}",
    "{\"bits\":1,\"window\":16," SHA "}",
    "{\"kind\":\"signs\"," SHA "}",
    "{\"kind\":\"values\"," SHA "}",
    "{\"kind\":\"hartley\"}",
    "{\"kind\":\"matrix\"," SHA "}",
    "{\"kind\":\"haar\",\"seed\":7," SHA "}",
    "{\"dim\":6,\"hadamard\":2,\"diagonal\":null,\"factor\":{\"kind\":\"hartley\"}}",
    "{\"dim\":200,\"hadamard\":1,\"diagonal\":null,\"factor\":{\"kind\":\"hartley\"}}",
    "{\"dim\":4,\"hadamard\":4,\"diagonal\":{\"kind\":\"values\"," SHA "},\"factor\":null}",
    "{\"name\":\"b\",\"in_features\":6,\"out_features\":2,\"stack\":1,\"codebook\":0,\"transform\":null,"
    "\"bias\":null," SHA "}",
    "{\"name\":\"c\",\"in_features\":6,\"out_features\":1,\"stack\":3,\"codebook\":0,\"transform\":0,"
    "\"bias\":\"f16\"," SHA "}",
    "{\"name\":\"h\",\"in_features\":16777216,\"out_features\":2147483647,\"stack\":65535,\"codebook\":0,"
    "\"transform\":null,\"bias\":\"f32\"," SHA "}",
    "{\"name\":\"i\",\"in_features\":1,\"out_features\":2147483647,\"stack\":65535,\"codebook\":0,"
    "\"transform\":null,\"bias\":\"f32\"," SHA "}",
    "{\"dim\":16777216,\"hadamard\":1,\"diagonal\":null,\"factor\":{\"kind\":\"matrix\"," SHA "}}",
    "{\"dim\":32768,\"hadamard\":1,\"diagonal\":null,\"factor\":{\"kind\":\"haar\",\"seed\":7," SHA "}}",
    "{\"name\":\"e\",\"media_type\":\"a/b\",\"nbytes\":9007199254740991," SHA "}",
    "{\"dim\":256,\"hadamard\":1,\"diagonal\":null,\"factor\":{\"kind\":\"hartley\"}}",
    "{\"name\":\"t\",\"dtype\":\"f64\",\"shape\":[2,0,3]," SHA "}",
    "{\"name\":\"d\",\"media_type\":\"a/b\",\"nbytes\":3," SHA "}",
    "\"x\":{\"a\":[1,null]}",
    "\"name\":\"tiny\"",
    "\"requires\":[\"x\"]",
};
#define PICK(table) ((table)[draw(sizeof(table) / sizeof *(table))])

/* Text that grows and shrinks in place. */
typedef struct {
    uint8_t *p;
    size_t size, room;
} text;

static void replace(text *t, size_t at, size_t gone, const void *by, size_t size)
{
    if (t->size - gone + size > t->room)
        return;
    memmove(t->p + at + size, t->p + at + gone, t->size - at - gone);
    memcpy(t->p + at, by, size);
    t->size += size - gone;
}

/* A value, or a name with its colon and value, and what follows it is not part of it. */
typedef struct {
    size_t start, stop;
} span;

enum { MAX_SPANS = 1024 };

static size_t string_end(const text *t, size_t at)
{
    for (at++; at < t->size && t->p[at] != '"'; at++)
        at += t->p[at] == '\\';
    return at < t->size ? at + 1 : t->size;
}

/* Spans of whatever looks like JSON; brackets need not match. */
static size_t find_spans(const text *t, span *spans)
{
    size_t open[64], depth = 0, count = 0;
    for (size_t at = 0; at < t->size && count < MAX_SPANS;) {
        uint8_t c = t->p[at];
        size_t start = at;
        if (c == '{' || c == '[') {
            if (depth < 64) {
                open[depth++] = count;
                spans[count++] = (span){at, t->size};
            }
            at++;
        } else if (c == '}' || c == ']') {
            at++;
            if (depth)
                spans[open[--depth]].stop = at;
        } else if (c == '"') {
            at = string_end(t, at);
            spans[count++] = (span){start, at};
        } else if (strchr("-+.0123456789abcdefghijklmnopqrstuvwxyzNI", c) && c) {
            while (at < t->size && t->p[at] && strchr("-+.0123456789abcdefghijklmnopqrstuvwxyzNIE", t->p[at]))
                at++;
            at += at == start;
            spans[count++] = (span){start, at};
        } else {
            at++;
        }
    }
    return count;
}

/* A name takes its value with it, and a value its name. */
static span member(const text *t, const span *spans, size_t count, size_t i)
{
    span s = spans[i];
    if (i + 1 < count && s.stop < t->size && t->p[s.stop] == ':')
        s.stop = spans[i + 1].stop;
    else if (i && s.start && t->p[s.start - 1] == ':' && spans[i - 1].stop == s.start - 1)
        s.start = spans[i - 1].start;
    return s;
}

static void mutate_number(text *t, span s)
{
    char digits[24], out[24];
    size_t size = s.stop - s.start;
    if (size > 17) /* as far as products stay in 64 bits */
        return;
    memcpy(digits, t->p + s.start, size);
    digits[size] = 0;
    long long v = strtoll(digits, NULL, 10);
    const long long others[] = {v + 1, v - 1, v * 2, v / 2, -v, v + 32, v ^ 1};
    v = PICK(others);
    replace(t, s.start, size, out, (size_t)snprintf(out, sizeof out, "%lld", v));
}

static void mutate_json(text *t)
{
    static span spans[MAX_SPANS];
    size_t count = find_spans(t, spans);
    if (!count)
        return;
    size_t i = draw(count);
    span s = spans[i], other = spans[draw(count)], m = member(t, spans, count, i);
    const char *word = draw(4) ? PICK(scalars) : PICK(entries);
    uint8_t copy[1024];
    size_t size;
    switch (draw(9)) {
    case 0:
    case 1:
        if (t->p[s.start] >= '0' && t->p[s.start] <= '9')
            mutate_number(t, s);
        else
            replace(t, s.start, s.stop - s.start, word, strlen(word));
        break;
    case 2:
        replace(t, s.start, s.stop - s.start, word, strlen(word));
        break;
    case 3: /* by another value of this text */
        size = other.stop - other.start;
        if (size > sizeof copy)
            break;
        memcpy(copy, t->p + other.start, size);
        replace(t, s.start, s.stop - s.start, copy, size);
        break;
    case 4: /* drop */
        if (m.stop < t->size && t->p[m.stop] == ',')
            m.stop++;
        else if (m.start && t->p[m.start - 1] == ',')
            m.start--;
        replace(t, m.start, m.stop - m.start, "", 0);
        break;
    case 5: /* repeat */
        size = m.stop - m.start;
        if (size + 1 > sizeof copy)
            break;
        copy[0] = ',';
        memcpy(copy + 1, t->p + m.start, size);
        replace(t, m.stop, 0, copy, size + 1);
        break;
    case 6: /* add an entry */
        word = PICK(entries);
        size = (size_t)snprintf((char *)copy, sizeof copy, t->p[s.start] == '[' ? "%s%s" : ",%s", word,
                                s.start + 1 < t->size && t->p[s.start + 1] == ']' ? "" : ",");
        replace(t, t->p[s.start] == '[' ? s.start + 1 : m.stop, 0, copy, size);
        break;
    case 7: /* a character as an escape */
        size = s.start + draw(s.stop - s.start);
        if (t->p[s.start] == '"' && size > s.start && size + 1 < s.stop && t->p[size] < 0x80 && t->p[size] != '\\') {
            snprintf((char *)copy, sizeof copy, draw(2) ? "\\u%04x" : "\\u%04X", t->p[size]);
            replace(t, size, 1, copy, 6);
        }
        break;
    default: { /* white space around a value */
        const char *const space[] = {" ", "\n", "\t\r", "    ", "\v", "/**/"};
        word = PICK(space);
        replace(t, draw(2) ? s.start : s.stop, 0, word, strlen(word));
    }
    }
}

static void mutate_floats(uint8_t *p, size_t size)
{
    static const uint32_t odd[] = {0,          0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1,
                                   0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7C007C00, 0x7F807F80, 0x00800000, 0xFFFFFFFF};
    if (size < 4)
        return;
    uint32_t v = PICK(odd);
    size_t at = draw(size / 4) * 4;
    for (int i = 0; i < 4; i++)
        p[at + (size_t)i] = (uint8_t)(v >> (8 * i));
}

/* Writes the digest that a blob has over the one that its entry states. */
static void renew(const rsv_file *file, uint8_t *header, size_t size, const rsv_blob *blob)
{
    uint8_t digest[32];
    char stated[65], right[65];
    rsv_sha256(rsv_bytes(file, blob), blob->nbytes, digest);
    if (!memcmp(digest, blob->sha256, 32))
        return;
    for (int i = 0; i < 32; i++) {
        snprintf(stated + 2 * i, 3, "%02x", blob->sha256[i]);
        snprintf(right + 2 * i, 3, "%02x", digest[i]);
    }
    for (size_t at = 0; at + 64 <= size; at++)
        if (header[at] == (uint8_t)stated[0] && !memcmp(header + at, stated, 64)) {
            memcpy(header + at, right, 64);
            return;
        }
}

static void sign_blobs(uint8_t *p, size_t nbytes)
{
    rsv_file *file;
    if (rsv_open_memory(p, nbytes, &file, NULL))
        return;
    size_t size = file->header.size;
    uint8_t *header = malloc(size + 1);
    if (!header)
        abort();
    memcpy(header, p + 64, size);
    for (size_t i = 0; i < file->codebook_count; i++)
        renew(file, header, size, &file->codebooks[i].blob);
    for (size_t i = 0; i < file->transform_count; i++) {
        const rsv_transform *t = &file->transforms[i];
        if (t->diagonal)
            renew(file, header, size, &t->diagonal_blob);
        if (t->factor > RSV_FACTOR_HARTLEY)
            renew(file, header, size, &t->factor_blob);
    }
    for (size_t i = 0; i < file->layer_count; i++)
        renew(file, header, size, &file->layers[i].blob);
    for (size_t i = 0; i < file->tensor_count; i++)
        renew(file, header, size, &file->tensors[i].blob);
    for (size_t i = 0; i < file->attachment_count; i++)
        renew(file, header, size, &file->attachments[i].blob);
    rsv_close(file);
    memcpy(p + 64, header, size);
    free(header);
    fuzz_prologue(p, nbytes, size);
}

static size_t cell(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* The parts changed, put together again: blobs move with the header's length. */
static size_t mutate_parts(uint8_t *data, size_t size, size_t max_size)
{
    size_t header = 0, body_at;
    while (64 + header < size && data[64 + header])
        header++;
    body_at = cell(64 + header) < size ? cell(64 + header) : size;
    text t = {malloc(max_size), header, max_size}, body = {malloc(max_size), size - body_at, max_size};
    if (!t.p || !body.p)
        abort();
    memcpy(t.p, data + 64, header);
    memcpy(body.p, data + body_at, body.size);
    switch (draw(8)) {
    case 0:
        t.size = LLVMFuzzerMutate(t.p, t.size, t.room);
        break;
    case 1:
        body.size = LLVMFuzzerMutate(body.p, body.size, body.room);
        break;
    case 2:
        mutate_floats(body.p, body.size);
        break;
    default:
        for (size_t times = 1 + draw(4) * draw(2); times; times--)
            mutate_json(&t);
    }
    size_t whole = cell(64 + t.size) + body.size;
    if (whole <= max_size) {
        memset(data + 64, 0, whole - 64);
        memcpy(data + 64, t.p, t.size);
        memcpy(data + cell(64 + t.size), body.p, body.size);
        size = whole;
    }
    free(t.p);
    free(body.p);
    return size;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    state = seed;
    if (size < 64 || max_size < 128 || !draw(16))
        return LLVMFuzzerMutate(data, size, max_size);
    size = mutate_parts(data, size, max_size);
    if (!draw(16)) {
        LLVMFuzzerMutate(data, 64, 64);
        return size;
    }
    size_t nbytes;
    uint8_t *p = fuzz_repair(data, size, &nbytes);
    if (draw(8))
        sign_blobs(p, nbytes);
    if (nbytes > 64 && !draw(16)) /* padding, which no digest guards */
        p[64 + draw(nbytes - 64)] ^= (uint8_t)(1u << draw(8));
    while (nbytes > 64 && !p[nbytes - 1])
        nbytes--;
    if (nbytes <= max_size) {
        memcpy(data, p, nbytes);
        size = nbytes;
    }
    free(p);
    return size;
}
