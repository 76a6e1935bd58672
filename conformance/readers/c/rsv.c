/* See rsv.h. Compile with -ffp-contract=off: rsv_codebook_uniform and the comparison with a witness are
 * defined on binary64 operations that are rounded one by one. */
#define _POSIX_C_SOURCE 200809L
#include "rsv.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CELL 64u
#define PAGE 16384u
#define PROLOGUE_NBYTES 64u
#define MAX_HEADER_NBYTES 67108864u
#define MAX_JSON_DEPTH 32
#define FREE_JSON_VALUES 4096
#define JSON_VALUE_NBYTES 16
#define MAX_INTEGER 9007199254740991u
#define MAX_IN_FEATURES 16777216u
#define MAX_OUT_FEATURES 2147483647u
#define MAX_BITS 8u
#define MAX_WINDOW 16u
#define MAX_STACK 65535u
#define MAX_HAAR 16384u
#define MAX_NAME 512u
#define MAX_ATTACHMENT_NAME 255u
#define MAX_RANK 8u
#define ORTHOGONALITY_TOLERANCE 1e-4
#define HAAR_TOLERANCE 1e-5

static const double pi = 3.14159265358979323846;

/* ---------------------------------------------------------------------------------------- errors */

static const char *const code_names[RSV_CODE_COUNT] = {
    "ok",
    "file_too_short", "bad_magic", "unsupported_version", "reserved_flags", "header_too_large",
    "file_truncated", "trailing_bytes", "header_out_of_bounds", "header_digest_mismatch",
    "header_padding_nonzero",
    "invalid_utf8", "json_limit", "invalid_json", "json_number", "json_duplicate_key",
    "json_lone_surrogate",
    "unsupported_feature", "schema_violation",
    "transform_shape", "bad_reference", "dim_mismatch", "unreferenced", "duplicate_name",
    "file_extent",
    "padding_nonzero", "blob_digest_mismatch", "nonfinite_value", "zero_diagonal", "codebook_order",
    "not_orthogonal", "haar_witness_mismatch",
    "e_io", "e_memory", "e_argument", "e_limit",
};

const char *rsv_code_name(rsv_code code)
{
    return (unsigned)code < RSV_CODE_COUNT ? code_names[code] : "e_unknown";
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static rsv_code fail(rsv_error *error, rsv_code code, const char *format, ...)
{
    if (error) {
        va_list arguments;
        error->code = code;
        error->expected_nbytes = 0;
        va_start(arguments, format);
        vsnprintf(error->message, sizeof error->message, format, arguments);
        va_end(arguments);
    }
    return code;
}

static rsv_code no_memory(rsv_error *error)
{
    return fail(error, RSV_E_MEMORY, "out of memory");
}

/* --------------------------------------------------------------------------------------- numbers */

static uint16_t load16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t load64(const uint8_t *p)
{
    return load32(p) | (uint64_t)load32(p + 4) << 32;
}

static float float_of(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

float rsv_load_f32(const uint8_t *p)
{
    return float_of(load32(p));
}

float rsv_bf16_to_f32(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

float rsv_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 31)
        return float_of(sign | 0x7F800000u | fraction << 13);
    if (exponent)
        return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float v = (float)fraction * 0x1p-24f;
    return sign ? -v : v;
}

static bool finite32(const uint8_t *p)
{
    return (load32(p) & 0x7F800000u) != 0x7F800000u;
}

/* RSV-503: false if the result would exceed 2^53 - 1. */
static bool multiply(uint64_t *value, uint64_t by)
{
    if (by && *value > MAX_INTEGER / by)
        return false;
    *value *= by;
    return true;
}

static bool add(uint64_t *value, uint64_t by)
{
    if (by > MAX_INTEGER || *value > MAX_INTEGER - by)
        return false;
    *value += by;
    return true;
}

static bool align_up(uint64_t *value, uint64_t to)
{
    uint64_t rest = *value % to;
    return !rest || add(value, to - rest);
}

/* --------------------------------------------------------------------------------------- SHA-256 */

static const uint32_t sha_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t v, int by)
{
    return v >> by | v << (32 - by);
}

static void sha_block(uint32_t h[8], const uint8_t *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++, p += 4)
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotr(a, 7) ^ rotr(a, 18) ^ a >> 3) + w[i - 7] + (rotr(b, 17) ^ rotr(b, 19) ^ b >> 10);
    }
    memcpy(s, h, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t a = s[0], e = s[4];
        uint32_t t1 = s[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + sha_k[i] + w[i];
        uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        s[7] = s[6], s[6] = s[5], s[5] = e, s[4] = s[3] + t1;
        s[3] = s[2], s[2] = s[1], s[1] = a, s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        h[i] += s[i];
}

void rsv_sha256_init(rsv_sha256_state *state)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(state->h, start, sizeof start);
    state->nbytes = 0;
}

void rsv_sha256_update(rsv_sha256_state *state, const void *data, size_t nbytes)
{
    const uint8_t *p = data;
    size_t used = state->nbytes % 64;
    state->nbytes += nbytes;
    if (used) {
        size_t take = nbytes < 64 - used ? nbytes : 64 - used;
        if (take)
            memcpy(state->block + used, p, take);
        if (used + take < 64)
            return;
        sha_block(state->h, state->block);
        p += take, nbytes -= take;
    }
    for (; nbytes >= 64; p += 64, nbytes -= 64)
        sha_block(state->h, p);
    if (nbytes)
        memcpy(state->block, p, nbytes);
}

void rsv_sha256_final(rsv_sha256_state *state, uint8_t digest[32])
{
    uint8_t tail[72] = {0x80};
    uint64_t bits = state->nbytes * 8;
    size_t zeros = (119 - state->nbytes % 64) % 64; /* after the 0x80, up to 8 bytes before a block's end */
    for (int i = 0; i < 8; i++)
        tail[1 + zeros + (size_t)i] = (uint8_t)(bits >> (56 - 8 * i));
    rsv_sha256_update(state, tail, 1 + zeros + 8);
    for (int i = 0; i < 32; i++)
        digest[i] = (uint8_t)(state->h[i / 4] >> (24 - 8 * (i % 4)));
}

void rsv_sha256(const void *data, size_t nbytes, uint8_t digest[32])
{
    rsv_sha256_state state;
    rsv_sha256_init(&state);
    rsv_sha256_update(&state, data, nbytes);
    rsv_sha256_final(&state, digest);
}

void rsv_header_digest(const uint8_t *file, size_t header_nbytes, uint8_t digest[32])
{
    rsv_sha256_state state;
    rsv_sha256_init(&state);
    rsv_sha256_update(&state, file, 32);
    rsv_sha256_update(&state, file + 64, header_nbytes);
    rsv_sha256_final(&state, digest);
}

/* --------------------------------------------------------------------------------------- sorting */

typedef int compare_fn(const void *context, uint32_t a, uint32_t b);

/* Merges runs of doubling length. Each comparison outputs one item, and costs at most the length of the
 * shorter text, so that the whole costs at most (bytes of text) * log2(count), whatever the input. The sorted
 * items may end in either array; the one that holds them is returned. */
static uint32_t *sort(uint32_t *items, uint32_t *spare, size_t count, compare_fn *compare, const void *context)
{
    for (size_t run = 1; run < count; run *= 2) {
        for (size_t left = 0; left < count; left += 2 * run) {
            size_t middle = left + run < count ? left + run : count;
            size_t right = left + 2 * run < count ? left + 2 * run : count;
            size_t i = left, j = middle, k = left;
            while (i < middle && j < right)
                spare[k++] = compare(context, items[j], items[i]) < 0 ? items[j++] : items[i++];
            while (i < middle)
                spare[k++] = items[i++];
            while (j < right)
                spare[k++] = items[j++];
        }
        uint32_t *swap = items;
        items = spare, spare = swap;
    }
    return items;
}

/* Whether two of the items are equal. */
static rsv_code has_equal(uint32_t *items, size_t count, compare_fn *compare, const void *context, bool *equal)
{
    *equal = false;
    if (count < 2)
        return RSV_OK;
    uint32_t *spare = malloc(count * sizeof *spare);
    if (!spare)
        return RSV_E_MEMORY;
    const uint32_t *sorted = sort(items, spare, count, compare, context);
    for (size_t i = 1; i < count && !*equal; i++)
        *equal = compare(context, sorted[i - 1], sorted[i]) == 0;
    free(spare);
    return RSV_OK;
}

/* ------------------------------------------------------------------------------- JSON, before parsing */

static bool valid_utf8(const uint8_t *p, const uint8_t *end)
{
    while (p < end) {
        uint8_t c = *p++;
        int more;
        uint8_t low = 0x80, high = 0xBF; /* bounds of the second byte */
        if (c < 0x80)
            continue;
        if (c >= 0xC2 && c <= 0xDF) {
            more = 1;
        } else if (c >= 0xE0 && c <= 0xEF) {
            more = 2;
            if (c == 0xE0)
                low = 0xA0;
            if (c == 0xED)
                high = 0x9F;
        } else if (c >= 0xF0 && c <= 0xF4) {
            more = 3;
            if (c == 0xF0)
                low = 0x90;
            if (c == 0xF4)
                high = 0x8F;
        } else {
            return false;
        }
        if (end - p < more || *p < low || *p > high)
            return false;
        for (int i = 1; i < more; i++)
            if (p[i] < 0x80 || p[i] > 0xBF)
                return false;
        p += more;
    }
    return true;
}

static bool within_limits(const uint8_t *p, const uint8_t *end)
{
    int64_t depth = 0, count = 0, limit = FREE_JSON_VALUES + (end - p) / JSON_VALUE_NBYTES;
    bool in_string = false, escaped = false;
    for (; p < end; p++) {
        uint8_t c = *p;
        if (in_string) {
            if (escaped)
                escaped = false;
            else if (c == '\\')
                escaped = true;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            depth++, count++;
        } else if (c == ']' || c == '}') {
            depth--;
        } else if (c == ',') {
            count++;
        }
        if (depth > MAX_JSON_DEPTH || count > limit)
            return false;
    }
    return true;
}

/* --------------------------------------------------------------------------------- JSON, the grammar */

typedef struct {
    const uint8_t *p, *end;
    int depth;
    bool bad_number, lone_surrogate;
} grammar;

static void blanks(grammar *g)
{
    while (g->p < g->end && (*g->p == ' ' || *g->p == '\t' || *g->p == '\n' || *g->p == '\r'))
        g->p++;
}

static int hex_digit(uint8_t c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* The value of four hexadecimal digits, or -1. */
static int32_t hex4(const uint8_t *p, const uint8_t *end)
{
    int32_t v = 0;
    if (end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(p[i]);
        if (digit < 0)
            return -1;
        v = v * 16 + digit;
    }
    return v;
}

static bool is_high(int32_t c)
{
    return c >= 0xD800 && c <= 0xDBFF;
}

static bool is_low(int32_t c)
{
    return c >= 0xDC00 && c <= 0xDFFF;
}

static bool grammar_string(grammar *g) /* p is at the opening quote */
{
    for (g->p++; g->p < g->end;) {
        uint8_t c = *g->p++;
        if (c == '"')
            return true;
        if (c < 0x20)
            return false;
        if (c != '\\')
            continue;
        if (g->p == g->end)
            return false;
        c = *g->p++;
        if (c == 'u') {
            int32_t unit = hex4(g->p, g->end);
            if (unit < 0)
                return false;
            g->p += 4;
            if (is_high(unit) && g->end - g->p >= 6 && g->p[0] == '\\' && g->p[1] == 'u'
                && is_low(hex4(g->p + 2, g->end)))
                g->p += 6;
            else if (is_high(unit) || is_low(unit))
                g->lone_surrogate = true;
        } else if (!strchr("\"\\/bfnrt", c) || !c) {
            return false;
        }
    }
    return false;
}

static bool digits(grammar *g)
{
    const uint8_t *start = g->p;
    while (g->p < g->end && *g->p >= '0' && *g->p <= '9')
        g->p++;
    return g->p > start;
}

static bool grammar_number(grammar *g)
{
    const uint8_t *start = g->p;
    bool integer = true;
    if (*g->p == '-')
        g->p++;
    const uint8_t *first = g->p;
    if (g->p < g->end && *g->p == '0')
        g->p++;
    else if (!digits(g))
        return false;
    size_t count = (size_t)(g->p - first);
    if (g->p < g->end && *g->p == '.') {
        integer = false;
        g->p++;
        if (!digits(g))
            return false;
    }
    if (g->p < g->end && (*g->p == 'e' || *g->p == 'E')) {
        integer = false;
        g->p++;
        if (g->p < g->end && (*g->p == '+' || *g->p == '-'))
            g->p++;
        if (!digits(g))
            return false;
    }
    /* RSV-205 */
    if (!integer || count > 16 || (*first == '0' && first != start)) {
        g->bad_number = true;
    } else {
        uint64_t value = 0;
        for (size_t i = 0; i < count; i++)
            value = value * 10 + (uint64_t)(first[i] - '0');
        if (value > MAX_INTEGER)
            g->bad_number = true;
    }
    return true;
}

static bool grammar_value(grammar *g)
{
    static const char *const words[] = {"true", "false", "null"};
    blanks(g);
    if (g->p == g->end)
        return false;
    uint8_t c = *g->p;
    if (c == '"')
        return grammar_string(g);
    if (c == '-' || (c >= '0' && c <= '9'))
        return grammar_number(g);
    if (c == '[' || c == '{') {
        uint8_t close = c == '[' ? ']' : '}';
        if (++g->depth > MAX_JSON_DEPTH)
            return false; /* cannot be: the scan has refused it */
        g->p++;
        blanks(g);
        if (g->p < g->end && *g->p == close) {
            g->p++, g->depth--;
            return true;
        }
        for (;;) {
            if (close == '}') {
                blanks(g);
                if (g->p == g->end || *g->p != '"' || !grammar_string(g))
                    return false;
                blanks(g);
                if (g->p == g->end || *g->p++ != ':')
                    return false;
            }
            if (!grammar_value(g))
                return false;
            blanks(g);
            if (g->p == g->end)
                return false;
            c = *g->p++;
            if (c == close) {
                g->depth--;
                return true;
            }
            if (c != ',')
                return false;
        }
    }
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(words[i]);
        if ((size_t)(g->end - g->p) >= length && !memcmp(g->p, words[i], length)) {
            g->p += length;
            return true;
        }
    }
    return false;
}

/* ------------------------------------------------------------------------ JSON, walking valid text
 *
 * From here on the text is known to be one JSON value by the grammar, so a walk needs no end. */

static const uint8_t *ws(const uint8_t *p)
{
    while (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')
        p++;
    return p;
}

static const uint8_t *skip_string(const uint8_t *p) /* from a quote to after the other */
{
    for (p++; *p != '"'; p++)
        if (*p == '\\')
            p++;
    return p + 1;
}

static const uint8_t *skip_value(const uint8_t *p)
{
    int depth = 0;
    do {
        p = ws(p);
        if (*p == '"') {
            p = skip_string(p);
        } else if (*p == '[' || *p == '{') {
            depth++, p++;
        } else if (*p == ']' || *p == '}') {
            depth--, p++;
        } else if (*p == ',' || *p == ':') {
            p++;
        } else {
            while (*p && !strchr(" \t\n\r,:]}", *p)) /* only within an array or object, so one of these follows */
                p++;
        }
    } while (depth);
    return p;
}

/* The next code point of a string, its escapes replaced; -1 at the closing quote. A lone surrogate counts
 * as the code point of its number. */
static int32_t next_code_point(const uint8_t **at)
{
    const uint8_t *p = *at;
    int32_t c = *p++;
    if (c == '"')
        return -1;
    if (c == '\\') {
        c = *p++;
        switch (c) {
        case 'b': c = '\b'; break;
        case 'f': c = '\f'; break;
        case 'n': c = '\n'; break;
        case 'r': c = '\r'; break;
        case 't': c = '\t'; break;
        case 'u':
            c = hex4(p, p + 4);
            p += 4;
            if (is_high(c) && p[0] == '\\' && p[1] == 'u') {
                int32_t low = hex4(p + 2, p + 6);
                if (is_low(low)) {
                    c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
                    p += 6;
                }
            }
            break;
        default: break;
        }
    } else if (c >= 0xF0) {
        c = (c & 7) << 18 | (p[0] & 63) << 12 | (p[1] & 63) << 6 | (p[2] & 63);
        p += 3;
    } else if (c >= 0xE0) {
        c = (c & 15) << 12 | (p[0] & 63) << 6 | (p[1] & 63);
        p += 2;
    } else if (c >= 0xC0) {
        c = (c & 31) << 6 | (p[0] & 63);
        p += 1;
    }
    *at = p;
    return c;
}

static int compare_keys(const void *context, uint32_t a, uint32_t b)
{
    const uint8_t *text = context, *p = text + a, *q = text + b;
    while (*p == *q && *p != '"' && *p != '\\') /* equal text is skipped byte by byte */
        p++, q++;
    while ((*p & 0xC0) == 0x80 || (*q & 0xC0) == 0x80) /* back to where the code point starts */
        p--, q--;
    for (;;) {
        int32_t c = next_code_point(&p), d = next_code_point(&q);
        if (c != d)
            return c < d ? -1 : 1;
        if (c < 0)
            return 0;
    }
}

/* RSV-206. Each object's names are pushed on one stack, sorted and compared at its end, and popped. */
typedef struct {
    const uint8_t *text, *p;
    uint32_t *keys;
    size_t count, capacity;
} duplicates;

static rsv_code find_duplicates(duplicates *s) /* RSV_JSON_DUPLICATE_KEY, RSV_OK or RSV_E_MEMORY */
{
    s->p = ws(s->p);
    if (*s->p != '[' && *s->p != '{') {
        /* A scalar: the grammar says that something follows unless it is the whole text, which the caller
         * does not pass. */
        s->p = skip_value(s->p);
        return RSV_OK;
    }
    bool object = *s->p == '{';
    size_t base = s->count;
    s->p = ws(s->p + 1);
    if (*s->p == ']' || *s->p == '}') {
        s->p++;
        return RSV_OK;
    }
    for (;;) {
        if (object) {
            s->p = ws(s->p);
            if (s->count == s->capacity) {
                size_t capacity = s->capacity ? 2 * s->capacity : 256;
                uint32_t *keys = realloc(s->keys, capacity * sizeof *keys);
                if (!keys)
                    return RSV_E_MEMORY;
                s->keys = keys, s->capacity = capacity;
            }
            s->keys[s->count++] = (uint32_t)(s->p + 1 - s->text);
            s->p = ws(skip_string(s->p)) + 1; /* and the colon */
        }
        rsv_code code = find_duplicates(s);
        if (code)
            return code;
        s->p = ws(s->p);
        if (*s->p++ != ',')
            break;
    }
    if (object) {
        bool equal;
        rsv_code code = has_equal(s->keys + base, s->count - base, compare_keys, s->text, &equal);
        if (code || equal)
            return code ? code : RSV_JSON_DUPLICATE_KEY;
        s->count = base;
    }
    return RSV_OK;
}

static rsv_code check_json(const uint8_t *text, size_t nbytes, rsv_error *error)
{
    const uint8_t *end = text + nbytes;
    if (!valid_utf8(text, end))
        return fail(error, RSV_INVALID_UTF8, "the header is not UTF-8");
    if (!within_limits(text, end))
        return fail(error, RSV_JSON_LIMIT, "the header nests too deeply or holds too many values");
    grammar g = {.p = text, .end = end};
    bool valid = grammar_value(&g);
    if (valid)
        blanks(&g);
    if (!valid || g.p < end)
        return fail(error, RSV_INVALID_JSON, "the header is not JSON at byte %zu", (size_t)(g.p - text));
    if (g.bad_number)
        return fail(error, RSV_JSON_NUMBER, "a number of the header is not an integer of at most 53 bits");
    duplicates s = {.text = text, .p = ws(text)};
    if (*s.p == '[' || *s.p == '{') {
        rsv_code code = find_duplicates(&s);
        free(s.keys);
        if (code == RSV_E_MEMORY)
            return no_memory(error);
        if (code)
            return fail(error, code, "an object of the header has a name twice");
    }
    if (g.lone_surrogate)
        return fail(error, RSV_JSON_LONE_SURROGATE, "a string of the header has a lone surrogate");
    return RSV_OK;
}

/* ---------------------------------------------------------------------------------------- schema */

typedef struct {
    rsv_file file; /* first: a pointer to it is one to the whole */
    void *map;
    size_t map_nbytes;
    rsv_codebook *codebooks;
    rsv_transform *transforms;
    rsv_layer *layers;
    rsv_tensor *tensors;
    rsv_attachment *attachments;
    rsv_member *metadata;
    char *strings; /* decoded strings; they are never longer than their text in the header */
    size_t strings_used;
} opened;

static bool string_is(const uint8_t *value, const char *text) /* text is ASCII */
{
    if (*value++ != '"')
        return false;
    for (;; text++) {
        int32_t c = next_code_point(&value);
        if (c < 0)
            return !*text;
        if (c != (unsigned char)*text || !*text)
            return false;
    }
}

/* Iterates over an array or object: at is NULL first. Returns the start of the next item (for an object, of its
 * name), or NULL. after must be the end of the item before. */
static const uint8_t *next_item(const uint8_t *container, const uint8_t *after)
{
    const uint8_t *p = ws(after ? after : container + 1);
    if (after) {
        if (*p != ',')
            return NULL;
        return ws(p + 1);
    }
    return *p == ']' || *p == '}' ? NULL : p;
}

typedef struct {
    const char *name;
    const uint8_t *value;
} field;

/* Finds the members of a closed object: each once (RSV-206 holds), no other. required: how many of the
 * first fields must be there. */
static bool closed_object(const uint8_t *value, field *fields, size_t count, size_t required)
{
    if (*value != '{')
        return false;
    const uint8_t *after = NULL, *p;
    while ((p = next_item(value, after))) {
        const uint8_t *name = p;
        size_t i = 0;
        p = ws(ws(skip_string(p)) + 1);
        while (i < count && !string_is(name, fields[i].name))
            i++;
        if (i == count)
            return false;
        fields[i].value = p;
        after = skip_value(p);
    }
    for (size_t i = 0; i < required; i++)
        if (!fields[i].value)
            return false;
    return true;
}

static bool get_integer(const uint8_t *value, uint64_t low, uint64_t high, uint64_t *out)
{
    uint64_t v = 0;
    if (*value < '0' || *value > '9')
        return false;
    for (; *value >= '0' && *value <= '9'; value++)
        v = v * 10 + (uint64_t)(*value - '0');
    *out = v;
    return v >= low && v <= high;
}

static bool is_null(const uint8_t *value)
{
    return *value == 'n';
}

static bool get_sha256(const uint8_t *value, uint8_t digest[32])
{
    if (*value++ != '"')
        return false;
    for (int i = 0; i < 64; i++) {
        int32_t c = next_code_point(&value);
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f')))
            return false;
        int digit = hex_digit((uint8_t)c);
        digest[i / 2] = (uint8_t)(i % 2 ? digest[i / 2] | digit : digit << 4);
    }
    return next_code_point(&value) < 0;
}

static bool get_string(opened *o, const uint8_t *value, rsv_string *out, size_t *code_points)
{
    if (*value++ != '"')
        return false;
    char *start = o->strings + o->strings_used, *p = start;
    size_t count = 0;
    for (int32_t c; (c = next_code_point(&value)) >= 0; count++) {
        if (c < 0x80) {
            *p++ = (char)c;
        } else if (c < 0x800) {
            *p++ = (char)(0xC0 | c >> 6);
            *p++ = (char)(0x80 | (c & 63));
        } else if (c < 0x10000) {
            *p++ = (char)(0xE0 | c >> 12);
            *p++ = (char)(0x80 | (c >> 6 & 63));
            *p++ = (char)(0x80 | (c & 63));
        } else {
            *p++ = (char)(0xF0 | c >> 18);
            *p++ = (char)(0x80 | (c >> 12 & 63));
            *p++ = (char)(0x80 | (c >> 6 & 63));
            *p++ = (char)(0x80 | (c & 63));
        }
    }
    *p++ = 0;
    *out = (rsv_string){start, (size_t)(p - 1 - start)};
    o->strings_used += (size_t)(p - start);
    if (code_points)
        *code_points = count;
    return true;
}

static bool get_name(opened *o, const uint8_t *value, rsv_string *out)
{
    size_t count;
    if (!get_string(o, value, out, &count) || count < 1 || count > MAX_NAME)
        return false;
    for (size_t i = 0; i < out->size; i++) {
        unsigned char c = (unsigned char)out->data[i];
        if (c < 0x20 || c == 0x7F)
            return false;
    }
    return true;
}

static bool alphanumeric(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

static bool get_codebook(opened *o, const uint8_t *value, void *entry)
{
    rsv_codebook *c = entry;
    field f[] = {{"bits", 0}, {"window", 0}, {"sha256", 0}};
    uint64_t bits, window;
    (void)o;
    if (!closed_object(value, f, 3, 3) || !get_integer(f[0].value, 1, MAX_BITS, &bits)
        || !get_integer(f[1].value, bits, MAX_WINDOW, &window))
        return false;
    c->bits = (unsigned)bits;
    c->window = (unsigned)window;
    return get_sha256(f[2].value, c->blob.sha256);
}

static bool get_transform(opened *o, const uint8_t *value, void *entry)
{
    rsv_transform *t = entry;
    field f[] = {{"dim", 0}, {"hadamard", 0}, {"diagonal", 0}, {"factor", 0}};
    uint64_t v;
    (void)o;
    if (!closed_object(value, f, 4, 4) || !get_integer(f[0].value, 1, MAX_IN_FEATURES, &v))
        return false;
    t->dim = (uint32_t)v;
    if (!get_integer(f[1].value, 1, MAX_IN_FEATURES, &v) || v & (v - 1))
        return false;
    t->hadamard = (uint32_t)v;

    t->diagonal = RSV_DIAGONAL_NONE;
    if (!is_null(f[2].value)) {
        field d[] = {{"kind", 0}, {"sha256", 0}};
        if (!closed_object(f[2].value, d, 2, 2))
            return false;
        if (string_is(d[0].value, "signs"))
            t->diagonal = RSV_DIAGONAL_SIGNS;
        else if (string_is(d[0].value, "values"))
            t->diagonal = RSV_DIAGONAL_VALUES;
        else
            return false;
        if (!get_sha256(d[1].value, t->diagonal_blob.sha256))
            return false;
    }

    t->factor = RSV_FACTOR_NONE;
    if (!is_null(f[3].value)) {
        field d[] = {{"kind", 0}, {"sha256", 0}, {"seed", 0}};
        if (!closed_object(f[3].value, d, 3, 1))
            return false;
        if (string_is(d[0].value, "hartley"))
            t->factor = RSV_FACTOR_HARTLEY;
        else if (string_is(d[0].value, "matrix"))
            t->factor = RSV_FACTOR_MATRIX;
        else if (string_is(d[0].value, "haar"))
            t->factor = RSV_FACTOR_HAAR;
        else
            return false;
        if (!!d[1].value != (t->factor != RSV_FACTOR_HARTLEY) || !!d[2].value != (t->factor == RSV_FACTOR_HAAR))
            return false;
        if (d[1].value && !get_sha256(d[1].value, t->factor_blob.sha256))
            return false;
        if (d[2].value && !get_integer(d[2].value, 0, MAX_INTEGER, &t->seed))
            return false;
    }
    return true;
}

static bool get_layer(opened *o, const uint8_t *value, void *entry)
{
    rsv_layer *l = entry;
    field f[] = {{"name", 0}, {"in_features", 0}, {"out_features", 0}, {"stack", 0},
                 {"codebook", 0}, {"transform", 0}, {"bias", 0}, {"sha256", 0}};
    uint64_t in, out, stack, codebook, transform;
    if (!closed_object(value, f, 8, 8) || !get_name(o, f[0].value, &l->name)
        || !get_integer(f[1].value, 1, MAX_IN_FEATURES, &in) || !get_integer(f[2].value, 1, MAX_OUT_FEATURES, &out)
        || !get_integer(f[3].value, 1, MAX_STACK, &stack) || !get_integer(f[4].value, 0, MAX_INTEGER, &codebook))
        return false;
    l->in_features = (uint32_t)in, l->out_features = (uint32_t)out, l->stack = (uint32_t)stack;
    l->codebook = codebook <= SIZE_MAX ? (size_t)codebook : SIZE_MAX;
    l->transform = -1;
    if (!is_null(f[5].value)) {
        if (!get_integer(f[5].value, 0, MAX_INTEGER, &transform))
            return false;
        l->transform = (int64_t)transform;
    }
    if (is_null(f[6].value))
        l->bias = RSV_BIAS_NONE;
    else if (string_is(f[6].value, "f32"))
        l->bias = RSV_BIAS_F32;
    else if (string_is(f[6].value, "f16"))
        l->bias = RSV_BIAS_F16;
    else if (string_is(f[6].value, "bf16"))
        l->bias = RSV_BIAS_BF16;
    else
        return false;
    l->rows = stack * out;
    return get_sha256(f[7].value, l->blob.sha256);
}

static const struct {
    const char *name;
    unsigned nbytes;
} dtypes[] = {{"bool", 1}, {"u8", 1}, {"i8", 1}, {"u16", 2}, {"i16", 2}, {"u32", 4}, {"i32", 4},
              {"u64", 8}, {"i64", 8}, {"f16", 2}, {"bf16", 2}, {"f32", 4}, {"f64", 8}};
enum { DTYPE_COUNT = sizeof dtypes / sizeof *dtypes };

unsigned rsv_dtype_nbytes(rsv_dtype dtype)
{
    return dtypes[dtype].nbytes;
}

const char *rsv_dtype_name(rsv_dtype dtype)
{
    return dtypes[dtype].name;
}

const char *rsv_bias_name(rsv_bias bias)
{
    static const char *const names[] = {NULL, "f32", "f16", "bf16"};
    return names[bias];
}

static bool get_tensor(opened *o, const uint8_t *value, void *entry)
{
    rsv_tensor *t = entry;
    field f[] = {{"name", 0}, {"dtype", 0}, {"shape", 0}, {"sha256", 0}};
    if (!closed_object(value, f, 4, 4) || !get_name(o, f[0].value, &t->name))
        return false;
    int i = 0;
    while (i < DTYPE_COUNT && !string_is(f[1].value, dtypes[i].name))
        i++;
    if (i == DTYPE_COUNT || *f[2].value != '[')
        return false;
    t->dtype = (rsv_dtype)i;
    const uint8_t *after = NULL, *p;
    for (t->rank = 0; (p = next_item(f[2].value, after)); after = skip_value(p))
        if (t->rank == MAX_RANK || !get_integer(p, 0, MAX_INTEGER, &t->shape[t->rank++]))
            return false;
    return get_sha256(f[3].value, t->blob.sha256);
}

static bool get_attachment(opened *o, const uint8_t *value, void *entry)
{
    rsv_attachment *a = entry;
    field f[] = {{"name", 0}, {"media_type", 0}, {"nbytes", 0}, {"sha256", 0}};
    if (!closed_object(value, f, 4, 4) || !get_string(o, f[0].value, &a->name, NULL)
        || !get_string(o, f[1].value, &a->media_type, NULL))
        return false;

    /* In both, only ASCII passes, so that bytes are code points. */
    if (a->name.size < 1 || a->name.size > MAX_ATTACHMENT_NAME)
        return false;
    for (size_t i = 0; i < a->name.size; i++) {
        char c = a->name.data[i];
        if (!alphanumeric(c) && c != '_' && !(i && (c == '.' || c == '-')))
            return false;
    }
    if (a->media_type.size < 3 || a->media_type.size > 255)
        return false;
    int slashes = 0;
    bool first = true;
    for (size_t i = 0; i < a->media_type.size; i++) {
        char c = a->media_type.data[i];
        if (c == '/') {
            if (first || slashes++)
                return false;
            first = true;
            continue;
        }
        if (!alphanumeric(c) && (first || !c || !strchr("!#$&^_.+-", c)))
            return false;
        first = false;
    }
    if (first || !slashes)
        return false;
    return get_integer(f[2].value, 0, MAX_INTEGER, &a->blob.nbytes) && get_sha256(f[3].value, a->blob.sha256);
}

/* Grows with what has been found valid, so memory stays in proportion to the text. */
static rsv_code get_array(opened *o, const char *name, const uint8_t *value, size_t item_nbytes,
                          bool get(opened *, const uint8_t *, void *), void **items, size_t *count,
                          rsv_error *error)
{
    size_t capacity = 0;
    const uint8_t *after = NULL, *p;
    if (*value != '[')
        return fail(error, RSV_SCHEMA_VIOLATION, "%s is not an array", name);
    while ((p = next_item(value, after))) {
        if (*count == capacity) {
            capacity = capacity ? capacity + capacity / 2 : 4;
            void *grown = realloc(*items, capacity * item_nbytes);
            if (!grown)
                return no_memory(error);
            *items = grown;
        }
        char *item = (char *)*items + *count * item_nbytes;
        memset(item, 0, item_nbytes);
        if (!get(o, p, item))
            return fail(error, RSV_SCHEMA_VIOLATION, "%s[%zu]: a member is missing, unknown, of another type or "
                        "out of range", name, *count);
        ++*count;
        after = skip_value(p);
    }
    return RSV_OK;
}

/* RSV-301: the header is an object whose member requires is an array of strings, and there is one. */
static bool requires_something(const uint8_t *header)
{
    if (*header != '{')
        return false;
    const uint8_t *after = NULL, *p;
    while ((p = next_item(header, after))) {
        const uint8_t *value = ws(ws(skip_string(p)) + 1);
        if (string_is(p, "requires")) {
            size_t count = 0;
            if (*value != '[')
                return false;
            for (after = NULL; (p = next_item(value, after)); after = skip_value(p), count++)
                if (*p != '"')
                    return false;
            return count > 0;
        }
        after = skip_value(value);
    }
    return false;
}

static rsv_code check_schema(opened *o, const uint8_t *text, rsv_error *error)
{
    rsv_file *file = &o->file;
    const uint8_t *header = ws(text);
    rsv_code code;
    if (requires_something(header))
        return fail(error, RSV_UNSUPPORTED_FEATURE, "the file requires a feature that this reader lacks");
    field f[] = {{"codebooks", 0}, {"transforms", 0}, {"layers", 0}, {"tensors", 0},
                 {"attachments", 0}, {"metadata", 0}, {"requires", 0}, {"extensions", 0}};
    if (!closed_object(header, f, 8, 8))
        return fail(error, RSV_SCHEMA_VIOLATION, "a member of the header is missing or unknown, or it is no object");
    void *items = NULL;
#define ARRAY(at, entry)                                                                                    \
    items = NULL;                                                                                           \
    code = get_array(o, f[at].name, f[at].value, sizeof *o->entry##s, get_##entry, &items,                  \
                     &file->entry##_count, error);                                                          \
    file->entry##s = o->entry##s = items;                                                                   \
    if (code)                                                                                               \
        return code;
    ARRAY(0, codebook)
    ARRAY(1, transform)
    ARRAY(2, layer)
    ARRAY(3, tensor)
    ARRAY(4, attachment)
#undef ARRAY
    if (*f[5].value != '{')
        return fail(error, RSV_SCHEMA_VIOLATION, "metadata is not an object");
    const uint8_t *after = NULL, *p;
    for (size_t capacity = 0; (p = next_item(f[5].value, after)); file->metadata_count++) {
        if (file->metadata_count == capacity) {
            capacity = capacity ? capacity + capacity / 2 : 4;
            rsv_member *grown = realloc(o->metadata, capacity * sizeof *grown);
            if (!grown)
                return no_memory(error);
            file->metadata = o->metadata = grown;
        }
        rsv_member *member = &o->metadata[file->metadata_count];
        const uint8_t *value = ws(ws(skip_string(p)) + 1);
        if (!get_string(o, p, &member->name, NULL) || !get_string(o, value, &member->value, NULL))
            return fail(error, RSV_SCHEMA_VIOLATION, "metadata holds something that is no string");
        after = skip_value(value);
    }
    /* Array, and of strings only if empty, since RSV-301 has dealt with the others. */
    if (*f[6].value != '[' || next_item(f[6].value, NULL))
        return fail(error, RSV_SCHEMA_VIOLATION, "requires is not an array of strings");
    if (*f[7].value != '{')
        return fail(error, RSV_SCHEMA_VIOLATION, "extensions is not an object");
    file->extensions = (rsv_string){(const char *)f[7].value, (size_t)(skip_value(f[7].value) - f[7].value)};
    return RSV_OK;
}

/* ------------------------------------------------------------------------------------ references */

/* Claim k of a file: of layer k / 3 its name with suffix k % 3; then the names of the tensors. */
static size_t claim(const rsv_file *file, uint32_t k, rsv_string *name, const char **suffix)
{
    static const char *const suffixes[] = {"", ".weight", ".bias"};
    if (k < 3 * file->layer_count) {
        *name = file->layers[k / 3].name;
        *suffix = suffixes[k % 3];
    } else {
        *name = file->tensors[k - 3 * file->layer_count].name;
        *suffix = "";
    }
    return name->size + strlen(*suffix);
}

static int compare_claims(const void *context, uint32_t a, uint32_t b)
{
    rsv_string names[2];
    const char *suffixes[2];
    size_t sizes[2] = {claim(context, a, &names[0], &suffixes[0]), claim(context, b, &names[1], &suffixes[1])};
    size_t both = names[0].size < names[1].size ? names[0].size : names[1].size;
    int order = memcmp(names[0].data, names[1].data, both);
    for (size_t i = both; !order && i < sizes[0] && i < sizes[1]; i++) {
        unsigned char c[2];
        for (int k = 0; k < 2; k++)
            c[k] = (unsigned char)(i < names[k].size ? names[k].data[i] : suffixes[k][i - names[k].size]);
        order = c[0] - c[1];
    }
    return order ? order : (sizes[0] > sizes[1]) - (sizes[0] < sizes[1]);
}

static int fold(char c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

static int compare_attachments(const void *context, uint32_t a, uint32_t b)
{
    const rsv_file *file = context;
    const char *p = file->attachments[a].name.data, *q = file->attachments[b].name.data; /* without NULs */
    while (*p && fold(*p) == fold(*q))
        p++, q++;
    return fold(*p) - fold(*q);
}

static rsv_code check_unique(const rsv_file *file, size_t count, compare_fn *compare, const char *what,
                             rsv_error *error)
{
    bool equal;
    uint32_t *items = malloc((count ? count : 1) * sizeof *items);
    if (!items)
        return no_memory(error);
    for (size_t i = 0; i < count; i++)
        items[i] = (uint32_t)i;
    rsv_code code = has_equal(items, count, compare, file, &equal);
    free(items);
    if (code)
        return no_memory(error);
    return equal ? fail(error, RSV_DUPLICATE_NAME, "%s", what) : RSV_OK;
}

static rsv_code check_references(opened *o, rsv_error *error)
{
    rsv_file *file = &o->file;
    for (size_t i = 0; i < file->transform_count; i++) {
        rsv_transform *t = &o->transforms[i];
        if (t->dim % t->hadamard)
            return fail(error, RSV_TRANSFORM_SHAPE, "transforms[%zu]: hadamard does not divide dim", i);
        t->order = t->dim / t->hadamard;
        if (t->order == 1 && t->factor != RSV_FACTOR_NONE)
            return fail(error, RSV_TRANSFORM_SHAPE, "transforms[%zu]: a factor of order 1", i);
        if (t->factor == RSV_FACTOR_HAAR && t->order > MAX_HAAR)
            return fail(error, RSV_TRANSFORM_SHAPE, "transforms[%zu]: a haar factor of order %u", i,
                        (unsigned)t->order);
    }
    for (size_t i = 0; i < file->layer_count; i++) {
        const rsv_layer *l = &o->layers[i];
        if (l->codebook >= file->codebook_count
            || (l->transform >= 0 && (uint64_t)l->transform >= file->transform_count))
            return fail(error, RSV_BAD_REFERENCE, "layers[%zu] points beyond a table", i);
    }
    for (size_t i = 0; i < file->layer_count; i++) {
        const rsv_layer *l = &o->layers[i];
        if (l->transform >= 0 && l->in_features != o->transforms[l->transform].dim)
            return fail(error, RSV_DIM_MISMATCH, "layers[%zu]: in_features is not the dim of its transform", i);
    }
    size_t total = file->codebook_count + file->transform_count, used = 0;
    bool *seen = calloc(total ? total : 1, sizeof *seen);
    if (!seen)
        return no_memory(error);
    for (size_t i = 0; i < file->layer_count; i++) {
        seen[o->layers[i].codebook] = true;
        if (o->layers[i].transform >= 0)
            seen[file->codebook_count + (size_t)o->layers[i].transform] = true;
    }
    while (used < total && seen[used])
        used++;
    free(seen);
    if (used < total) {
        bool codebook = used < file->codebook_count;
        return fail(error, RSV_UNREFERENCED, "no layer uses %s[%zu]", codebook ? "codebooks" : "transforms",
                    codebook ? used : used - file->codebook_count);
    }
    rsv_code code = check_unique(file, 3 * file->layer_count + file->tensor_count, compare_claims,
                                 "the name of a layer or tensor is taken", error);
    if (!code)
        code = check_unique(file, file->attachment_count, compare_attachments,
                            "the name of an attachment is taken", error);
    return code;
}

/* ---------------------------------------------------------------------------------------- extent */

static bool place(rsv_blob *blob, uint64_t nbytes, uint64_t *end)
{
    blob->nbytes = nbytes;
    if (!align_up(end, CELL))
        return false;
    blob->offset = *end;
    return add(end, nbytes);
}

static bool layer_nbytes(rsv_layer *l, unsigned bits, uint64_t *end)
{
    static const unsigned itemsize[] = {0, 4, 2, 2};
    l->row_words = ((uint64_t)l->in_features + 31) / 32 * bits;
    uint64_t at = l->rows, scales = l->rows, bias = l->rows;
    if (!multiply(&at, l->row_words) || !multiply(&at, 4) || !align_up(&at, CELL))
        return false;
    l->scales = at;
    if (!multiply(&scales, 4) || !add(&at, scales))
        return false;
    if (l->bias != RSV_BIAS_NONE) {
        if (!align_up(&at, CELL))
            return false;
        l->bias_offset = at;
        if (!multiply(&bias, itemsize[l->bias]) || !add(&at, bias))
            return false;
    }
    *end = at;
    return true;
}

static bool tensor_nbytes(const rsv_tensor *t, uint64_t *nbytes)
{
    bool empty = false;
    *nbytes = rsv_dtype_nbytes(t->dtype);
    for (unsigned i = 0; i < t->rank; i++) {
        if (!t->shape[i])
            empty = true;
        else if (!multiply(nbytes, t->shape[i]))
            return false;
    }
    if (empty)
        *nbytes = 0;
    return true;
}

static bool lay_out(opened *o, uint64_t *end)
{
    rsv_file *file = &o->file;
    uint64_t nbytes;
    *end = PROLOGUE_NBYTES + file->header.size;
    for (size_t i = 0; i < file->codebook_count; i++)
        if (!place(&o->codebooks[i].blob, (uint64_t)4 << o->codebooks[i].window, end))
            return false;
    for (size_t i = 0; i < file->transform_count; i++) {
        rsv_transform *t = &o->transforms[i];
        if (t->diagonal == RSV_DIAGONAL_SIGNS && !place(&t->diagonal_blob, ((uint64_t)t->dim + 7) / 8, end))
            return false;
        if (t->diagonal == RSV_DIAGONAL_VALUES && !place(&t->diagonal_blob, (uint64_t)t->dim * 4, end))
            return false;
        nbytes = (uint64_t)t->order * 4; /* orders are at most 2^24: nothing here reaches 2^53 */
        if (t->factor == RSV_FACTOR_MATRIX && !place(&t->factor_blob, nbytes * t->order, end))
            return false;
        if (t->factor == RSV_FACTOR_HAAR && !place(&t->factor_blob, nbytes, end))
            return false;
    }
    for (size_t i = 0; i < file->layer_count; i++) {
        rsv_layer *l = &o->layers[i];
        if (!layer_nbytes(l, o->codebooks[l->codebook].bits, &nbytes) || !place(&l->blob, nbytes, end))
            return false;
    }
    for (size_t i = 0; i < file->tensor_count; i++)
        if (!tensor_nbytes(&o->tensors[i], &nbytes) || !place(&o->tensors[i].blob, nbytes, end))
            return false;
    for (size_t i = 0; i < file->attachment_count; i++)
        if (!place(&o->attachments[i].blob, o->attachments[i].blob.nbytes, end))
            return false;
    return true;
}

static rsv_code check_extent(opened *o, rsv_error *error)
{
    uint64_t end, expected = 0;
    bool fits = lay_out(o, &end);
    if (fits) {
        o->file.end = expected = end;
        fits = align_up(&expected, PAGE);
    }
    if (fits && expected == o->file.nbytes)
        return RSV_OK;
    fail(error, RSV_FILE_EXTENT, "the blobs need another length of the file");
    if (error)
        error->expected_nbytes = fits ? expected : 0;
    return RSV_FILE_EXTENT;
}

/* ------------------------------------------------------------------------------------------ open */

static rsv_code check_framing(const uint8_t *p, uint64_t nbytes, uint64_t *header_nbytes, rsv_error *error)
{
    static const uint8_t magic[8] = {0x89, 0x52, 0x53, 0x56, 0x0D, 0x0A, 0x1A, 0x0A};
    uint8_t digest[32];
    if (nbytes < PROLOGUE_NBYTES)
        return fail(error, RSV_FILE_TOO_SHORT, "the file has less than 64 bytes");
    if (memcmp(p, magic, sizeof magic))
        return fail(error, RSV_BAD_MAGIC, "the file is not RSV");
    if (load16(p + 8) != 1)
        return fail(error, RSV_UNSUPPORTED_VERSION, "the file is of version %u", load16(p + 8));
    if (load32(p + 12))
        return fail(error, RSV_RESERVED_FLAGS, "a flag is set");
    uint64_t length = load64(p + 16), claimed = load64(p + 24);
    if (length > MAX_HEADER_NBYTES)
        return fail(error, RSV_HEADER_TOO_LARGE, "the header is above 64 MiB");
    if (nbytes < claimed)
        return fail(error, RSV_FILE_TRUNCATED, "the end of the file is missing");
    if (nbytes > claimed)
        return fail(error, RSV_TRAILING_BYTES, "bytes follow the end of the file");
    uint64_t end = PROLOGUE_NBYTES + length, padded = (end + CELL - 1) / CELL * CELL;
    if (padded > nbytes)
        return fail(error, RSV_HEADER_OUT_OF_BOUNDS, "the header does not fit the file");
    rsv_header_digest(p, (size_t)length, digest);
    if (memcmp(digest, p + 32, sizeof digest))
        return fail(error, RSV_HEADER_DIGEST_MISMATCH, "the header is damaged");
    for (uint64_t i = end; i < padded; i++)
        if (p[i])
            return fail(error, RSV_HEADER_PADDING_NONZERO, "byte %llu is not zero", (unsigned long long)i);
    *header_nbytes = length;
    return RSV_OK;
}

static rsv_code open_bytes(const uint8_t *data, size_t nbytes, void *map, rsv_file **out, rsv_error *error)
{
    uint64_t length = 0;
    *out = NULL;
    fail(error, RSV_OK, "%s", "");
    rsv_code code = check_framing(data, nbytes, &length, error);
    if (code)
        return code;
    const uint8_t *text = data + PROLOGUE_NBYTES;
    code = check_json(text, (size_t)length, error);
    if (code)
        return code;

    opened *o = calloc(1, sizeof *o);
    if (!o)
        return no_memory(error);
    rsv_file *file = &o->file;
    file->data = data;
    file->nbytes = nbytes;
    file->version_major = load16(data + 8);
    file->version_minor = load16(data + 10);
    file->header = (rsv_string){(const char *)text, (size_t)length};
    o->strings = malloc((size_t)length + 1);
    code = o->strings ? check_schema(o, text, error) : no_memory(error);
    if (!code)
        code = check_references(o, error);
    if (!code)
        code = check_extent(o, error);
    if (code) {
        rsv_close(file); /* map is not yet its own */
        return code;
    }
    o->map = map;
    o->map_nbytes = nbytes;
    *out = file;
    return RSV_OK;
}

rsv_code rsv_open_memory(const void *data, size_t nbytes, rsv_file **file, rsv_error *error)
{
    return open_bytes(data, nbytes, NULL, file, error);
}

rsv_code rsv_open_path(const char *path, rsv_file **file, rsv_error *error)
{
    struct stat status;
    void *map = NULL;
    *file = NULL;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe must not block */
    if (fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode) || (uintmax_t)status.st_size > SIZE_MAX) {
        if (fd >= 0)
            close(fd);
        return fail(error, RSV_E_IO, "the file cannot be opened or is not a regular one");
    }
    size_t nbytes = (size_t)status.st_size;
    if (nbytes) {
        map = mmap(NULL, nbytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            int reason = errno;
            close(fd);
            return fail(error, RSV_E_IO, "mmap: %s", strerror(reason));
        }
    }
    close(fd);
    rsv_code code = open_bytes(map, nbytes, map, file, error);
    if (code && map)
        munmap(map, nbytes);
    return code;
}

void rsv_close(rsv_file *file)
{
    opened *o = (opened *)file;
    if (!o)
        return;
    free(o->codebooks);
    free(o->transforms);
    free(o->layers);
    free(o->tensors);
    free(o->attachments);
    free(o->metadata);
    free(o->strings);
    if (o->map)
        munmap(o->map, o->map_nbytes);
    free(o);
}

/* --------------------------------------------------------------------------------- codes and rows */

float rsv_centroid(const rsv_file *file, size_t codebook, uint32_t index)
{
    return rsv_load_f32(rsv_bytes(file, &file->codebooks[codebook].blob) + 4 * (size_t)index);
}

bool rsv_codebook_uniform(const rsv_file *file, size_t codebook)
{
    const rsv_codebook *c = &file->codebooks[codebook];
    if (c->window != c->bits)
        return false;
    double first = rsv_centroid(file, codebook, 0), step = (double)rsv_centroid(file, codebook, 1) - first;
    for (uint32_t i = 0; i < 1u << c->bits; i++) {
        double offset = i * step;
        if ((double)rsv_centroid(file, codebook, i) != first + offset)
            return false;
    }
    return true;
}

void rsv_layer_codes(const rsv_file *file, const rsv_layer *layer, uint64_t r, uint8_t *codes)
{
    const uint8_t *p = rsv_bytes(file, &layer->blob) + r * layer->row_words * 4;
    unsigned bits = file->codebooks[layer->codebook].bits, have = 0, mask = (1u << bits) - 1;
    unsigned buffer = 0;
    for (uint32_t j = 0; j < layer->in_features; j++) {
        if (have < bits) {
            buffer |= (unsigned)*p++ << have;
            have += 8;
        }
        codes[j] = (uint8_t)(buffer & mask);
        buffer >>= bits;
        have -= bits;
    }
}

/* count bits, at most 16, from bit p of a row that has so many. */
static unsigned bits_at(const uint8_t *row, uint64_t p, unsigned count)
{
    const uint8_t *byte = row + p / 8;
    unsigned shift = (unsigned)(p % 8), value = 0;
    for (unsigned have = 0; have < shift + count; have += 8)
        value |= (unsigned)*byte++ << have;
    return value >> shift & ((1u << count) - 1);
}

/* The indices of columns first to first + count [RSV-512]. A window that the row's end cuts goes on at its start. */
static void some_indices(const rsv_file *file, const rsv_layer *layer, uint64_t r, uint32_t first, uint32_t count,
                         uint16_t *indices)
{
    const rsv_codebook *c = &file->codebooks[layer->codebook];
    const uint8_t *row = rsv_bytes(file, &layer->blob) + r * layer->row_words * 4;
    uint64_t row_bits = (uint64_t)layer->in_features * c->bits, start = (uint64_t)first * c->bits;
    for (uint32_t j = 0; j < count; j++, start += c->bits) {
        unsigned index = 0, have = 0;
        for (uint64_t p = start; have < c->window; p = 0) {
            unsigned wanted = c->window - have;
            unsigned take = row_bits - p < wanted ? (unsigned)(row_bits - p) : wanted;
            index |= bits_at(row, p, take) << have;
            have += take;
        }
        indices[j] = (uint16_t)index;
    }
}

void rsv_layer_indices(const rsv_file *file, const rsv_layer *layer, uint64_t r, uint16_t *indices)
{
    some_indices(file, layer, r, 0, layer->in_features, indices);
}

float rsv_layer_scale(const rsv_file *file, const rsv_layer *layer, uint64_t r)
{
    return rsv_load_f32(rsv_bytes(file, &layer->blob) + layer->scales + 4 * r);
}

float rsv_layer_bias(const rsv_file *file, const rsv_layer *layer, uint64_t r)
{
    const uint8_t *p = rsv_bytes(file, &layer->blob) + layer->bias_offset;
    switch (layer->bias) {
    case RSV_BIAS_F32: return rsv_load_f32(p + 4 * r);
    case RSV_BIAS_F16: return rsv_f16_to_f32(load16(p + 2 * r));
    case RSV_BIAS_BF16: return rsv_bf16_to_f32(load16(p + 2 * r));
    default: return 0;
    }
}

enum { CHUNK = 1024 }; /* columns of which the indices are held at a time */

/* What an index of a row of this scale stands for. The product of two f32 is exact in binary64, so it is rounded
 * once, whatever FLT_EVAL_METHOD is. */
static float value_of(const uint8_t *centroids, uint16_t index, double scale)
{
    return (float)(scale * (double)rsv_load_f32(centroids + 4 * (size_t)index));
}

void rsv_layer_rotated_row(const rsv_file *file, const rsv_layer *layer, uint64_t r, float *row)
{
    const uint8_t *centroids = rsv_bytes(file, &file->codebooks[layer->codebook].blob);
    double scale = rsv_layer_scale(file, layer, r);
    uint16_t indices[CHUNK];
    for (uint32_t at = 0; at < layer->in_features; at += CHUNK) {
        uint32_t count = layer->in_features - at < CHUNK ? layer->in_features - at : CHUNK;
        some_indices(file, layer, r, at, count, indices);
        for (uint32_t j = 0; j < count; j++)
            row[at + j] = value_of(centroids, indices[j], scale);
    }
}

double rsv_layer_output(const rsv_file *file, const rsv_layer *layer, const double *tx, uint64_t r)
{
    const uint8_t *centroids = rsv_bytes(file, &file->codebooks[layer->codebook].blob);
    double scale = rsv_layer_scale(file, layer, r), sum = 0;
    uint16_t indices[CHUNK];
    for (uint32_t at = 0; at < layer->in_features; at += CHUNK) {
        uint32_t count = layer->in_features - at < CHUNK ? layer->in_features - at : CHUNK;
        double part = 0;
        some_indices(file, layer, r, at, count, indices);
        for (uint32_t j = 0; j < count; j++)
            part += tx[at + j] * (double)value_of(centroids, indices[j], scale);
        sum += part;
    }
    return sum + (double)rsv_layer_bias(file, layer, r);
}

/* ---------------------------------------------------------------------------------- haar factors */

static uint64_t splitmix64(uint64_t seed, uint64_t k)
{
    uint64_t z = seed + (k + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* a[i0.., j0..] -= tau v (v.T a[i0.., j0..]) of an m by m matrix; sums has room for m. */
static void reflect(double *a, size_t m, size_t i0, size_t j0, const double *v, double tau, double *sums)
{
    memset(sums + j0, 0, (m - j0) * sizeof *sums);
    for (size_t i = i0; i < m; i++) {
        const double *row = a + i * m;
        double factor = v[i];
        for (size_t j = j0; j < m; j++)
            sums[j] += factor * row[j];
    }
    for (size_t i = i0; i < m; i++) {
        double *row = a + i * m, factor = tau * v[i];
        for (size_t j = j0; j < m; j++)
            row[j] -= factor * sums[j];
    }
}

/* RSV-710 to RSV-712 by Householder's method; the result is m * m f32 in memory of 8 m * m bytes. */
static float *derive_haar(size_t m, uint64_t seed)
{
    double *a = malloc(m * m * sizeof *a), *work = malloc(m * 4 * sizeof *work);
    if (!a || !work) {
        free(a);
        free(work);
        return NULL;
    }
    double *v = work, *sums = work + m, *taus = work + 2 * m, *signs = work + 3 * m;
    for (size_t k = 0; 2 * k < m * m; k++) {
        double u1 = (double)((splitmix64(seed, 2 * k) >> 11) + 1) * 0x1p-53;
        double u2 = (double)(splitmix64(seed, 2 * k + 1) >> 11) * 0x1p-53;
        double r = sqrt(-2 * log(u1));
        a[2 * k] = r * cos(2 * pi * u2);
        if (2 * k + 1 < m * m)
            a[2 * k + 1] = r * sin(2 * pi * u2);
    }
    for (size_t k = 0; k < m; k++) {
        double first = a[k * m + k], square = 0;
        for (size_t i = k + 1; i < m; i++)
            square += a[i * m + k] * a[i * m + k];
        if (square == 0) { /* the last column: no reflection */
            taus[k] = 0;
            signs[k] = first < 0 ? -1 : 1;
            continue;
        }
        double beta = -copysign(sqrt(first * first + square), first);
        taus[k] = (beta - first) / beta;
        signs[k] = beta < 0 ? -1 : 1; /* U[k, k] is beta */
        v[k] = 1;
        for (size_t i = k + 1; i < m; i++)
            a[i * m + k] = v[i] = a[i * m + k] / (first - beta);
        if (k + 1 < m)
            reflect(a, m, k, k + 1, v, taus[k], sums);
    }
    for (size_t k = m; k-- > 0;) { /* Q = H_0 H_1 ... I, in place */
        v[k] = 1;
        for (size_t i = k + 1; i < m; i++)
            v[i] = a[i * m + k];
        for (size_t j = k; j < m; j++)
            a[k * m + j] = 0; /* U is no longer needed */
        if (k + 1 < m)
            reflect(a, m, k, k + 1, v, taus[k], sums);
        a[k * m + k] = 1 - taus[k];
        for (size_t i = k + 1; i < m; i++)
            a[i * m + k] = -taus[k] * v[i];
    }
    float *f = malloc(m * m * sizeof *f);
    if (f)
        for (size_t i = 0; i < m; i++)
            for (size_t j = 0; j < m; j++)
                f[i * m + j] = (float)(a[i * m + j] * signs[j]);
    free(a);
    free(work);
    return f;
}

/* RSV-610; witness: m f32, little-endian. */
static bool witness_matches(const float *f, size_t m, const uint8_t *witness)
{
    for (size_t i = 0; i < m; i++) {
        double sum = 0;
        for (size_t j = 0; j < m; j++)
            sum += (double)f[i * m + j] * ((double)((5 * j + 1) % 8) - 3.5);
        sum /= sqrt(5.25 * (double)m);
        if (!(fabs(sum - (double)rsv_load_f32(witness + 4 * i)) <= HAAR_TOLERANCE))
            return false;
    }
    return true;
}

static rsv_code get_haar(const rsv_file *file, size_t position, const rsv_options *options, float **out,
                         rsv_error *error)
{
    const rsv_transform *t = &file->transforms[position];
    *out = NULL;
    if (options && options->max_factor_order && t->order > options->max_factor_order)
        return fail(error, RSV_E_LIMIT, "transforms[%zu]: a haar factor of order %u", position, (unsigned)t->order);
    float *f = derive_haar(t->order, t->seed);
    if (!f)
        return no_memory(error);
    if (!witness_matches(f, t->order, rsv_bytes(file, &t->factor_blob))) {
        free(f);
        return fail(error, RSV_HAAR_WITNESS_MISMATCH, "transforms[%zu]: the factor derived is not the writer's",
                    position);
    }
    *out = f;
    return RSV_OK;
}

/* ---------------------------------------------------------------------------------------- verify */

typedef struct {
    const rsv_file *file;
    rsv_fault *fault;
    void *context;
    rsv_error *error;
    rsv_code first;
    uint64_t end; /* of the blob before */
    bool stop;
} verifier;

static void report(verifier *v, rsv_code code, const char *what, size_t at, const char *message)
{
    rsv_error here;
    if (v->stop)
        return;
    fail(&here, code, "%s[%zu]: %s", what, at, message);
    if (!v->first) {
        v->first = code;
        if (v->error)
            *v->error = here;
    }
    if (!v->fault || !v->fault(v->context, code, here.message))
        v->stop = true;
}

static bool zeros(const uint8_t *p, uint64_t nbytes)
{
    return !nbytes || (!*p && (nbytes == 1 || !memcmp(p, p + 1, (size_t)nbytes - 1)));
}

/* The gap before a blob, and its digest. */
static const uint8_t *blob_start(verifier *v, const rsv_blob *blob, const char *what, size_t at)
{
    uint8_t digest[32];
    const uint8_t *p = rsv_bytes(v->file, blob);
    if (!v->stop && !zeros(v->file->data + v->end, blob->offset - v->end))
        report(v, RSV_PADDING_NONZERO, what, at, "the gap before the blob is not zero");
    v->end = blob->offset + blob->nbytes;
    if (!v->stop) {
        rsv_sha256(p, (size_t)blob->nbytes, digest);
        if (memcmp(digest, blob->sha256, sizeof digest))
            report(v, RSV_BLOB_DIGEST_MISMATCH, what, at, "the blob is damaged");
    }
    return p;
}

static bool all_finite(const uint8_t *p, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        if (!finite32(p + 4 * i))
            return false;
    return true;
}

/* RSV-609, by tiles; the lower triangle suffices. RSV_NOT_ORTHOGONAL, RSV_OK or RSV_E_MEMORY. */
static rsv_code check_orthogonal(const uint8_t *f, size_t m)
{
    enum { TILE = 32, DEPTH = 128 };
    typedef struct {
        double a[TILE][DEPTH], b[DEPTH][TILE], sum[TILE][TILE];
    } tiles;
    tiles *t = malloc(sizeof *t);
    if (!t)
        return RSV_E_MEMORY;
    bool good = true;
    for (size_t i0 = 0; good && i0 < m; i0 += TILE) {
        for (size_t j0 = 0; good && j0 <= i0; j0 += TILE) {
            memset(t->sum, 0, sizeof t->sum);
            for (size_t k0 = 0; k0 < m; k0 += DEPTH) {
                for (size_t i = 0; i < TILE; i++)
                    for (size_t k = 0; k < DEPTH; k++) {
                        bool in = k0 + k < m;
                        t->a[i][k] = in && i0 + i < m ? (double)rsv_load_f32(f + 4 * ((i0 + i) * m + k0 + k)) : 0;
                        t->b[k][i] = in && j0 + i < m ? (double)rsv_load_f32(f + 4 * ((j0 + i) * m + k0 + k)) : 0;
                    }
                for (size_t i = 0; i < TILE; i++)
                    for (size_t k = 0; k < DEPTH; k++) {
                        double a = t->a[i][k], *sum = t->sum[i];
                        const double *b = t->b[k];
                        for (size_t j = 0; j < TILE; j++)
                            sum[j] += a * b[j];
                    }
            }
            for (size_t i = 0; i < TILE && i0 + i < m; i++)
                for (size_t j = 0; j < TILE && j0 + j < m; j++) {
                    double identity = i0 + i == j0 + j ? 1 : 0;
                    if (!(fabs(t->sum[i][j] - identity) <= ORTHOGONALITY_TOLERANCE))
                        good = false;
                }
        }
    }
    free(t);
    return good ? RSV_OK : RSV_NOT_ORTHOGONAL;
}

static void verify_codebook(verifier *v, size_t at)
{
    const rsv_codebook *c = &v->file->codebooks[at];
    const uint8_t *p = blob_start(v, &c->blob, "codebooks", at);
    if (!all_finite(p, (size_t)1 << c->window))
        report(v, RSV_NONFINITE_VALUE, "codebooks", at, "a centroid is not finite");
    for (uint32_t i = 1; c->window == c->bits && i < 1u << c->bits; i++)
        if (!(rsv_centroid(v->file, at, i - 1) < rsv_centroid(v->file, at, i))) {
            report(v, RSV_CODEBOOK_ORDER, "codebooks", at, "centroids are not in order");
            break;
        }
}

static rsv_code verify_transform(verifier *v, size_t at, const rsv_options *options)
{
    const rsv_transform *t = &v->file->transforms[at];
    const char *what = "transforms";
    if (t->diagonal != RSV_DIAGONAL_NONE) {
        const uint8_t *p = blob_start(v, &t->diagonal_blob, what, at);
        if (t->diagonal == RSV_DIAGONAL_SIGNS) {
            if (t->dim % 8 && p[t->dim / 8] >> t->dim % 8)
                report(v, RSV_PADDING_NONZERO, what, at, "a sign bit beyond dim is set");
        } else {
            bool zero = false;
            if (!all_finite(p, t->dim))
                report(v, RSV_NONFINITE_VALUE, what, at, "a value of the diagonal is not finite");
            for (uint32_t i = 0; i < t->dim; i++)
                zero |= !(load32(p + 4 * (size_t)i) & 0x7FFFFFFFu);
            if (zero)
                report(v, RSV_ZERO_DIAGONAL, what, at, "a value of the diagonal is zero");
        }
    }
    if (t->factor == RSV_FACTOR_MATRIX || t->factor == RSV_FACTOR_HAAR) {
        const uint8_t *p = blob_start(v, &t->factor_blob, what, at);
        if (!all_finite(p, t->factor_blob.nbytes / 4))
            report(v, RSV_NONFINITE_VALUE, what, at, "an element of the factor is not finite");
        if (v->stop)
            return RSV_OK;
        if (options && options->max_factor_order && t->order > options->max_factor_order)
            return fail(v->first ? NULL : v->error, RSV_E_LIMIT, "transforms[%zu]: a factor of order %u", at,
                        (unsigned)t->order);
        if (t->factor == RSV_FACTOR_MATRIX) {
            rsv_code code = check_orthogonal(p, t->order);
            if (code == RSV_E_MEMORY)
                return no_memory(v->first ? NULL : v->error);
            if (code)
                report(v, code, what, at, "the factor is no rotation");
        } else {
            float *f;
            rsv_code code = get_haar(v->file, at, NULL, &f, NULL);
            free(f);
            if (code == RSV_E_MEMORY)
                return no_memory(v->first ? NULL : v->error);
            if (code)
                report(v, code, what, at, "the derived factor is not the writer's");
        }
    }
    return RSV_OK;
}

static void verify_layer(verifier *v, size_t at)
{
    const rsv_layer *l = &v->file->layers[at];
    const char *what = "layers";
    const uint8_t *p = blob_start(v, &l->blob, what, at);
    if (v->stop)
        return;
    uint64_t codes = l->rows * l->row_words * 4, scales_end = l->scales + 4 * l->rows;
    if (!zeros(p + codes, l->scales - codes)
        || (l->bias != RSV_BIAS_NONE && !zeros(p + scales_end, l->bias_offset - scales_end)))
        report(v, RSV_PADDING_NONZERO, what, at, "the bytes between the parts are not zero");
    unsigned used = l->in_features % 32 * v->file->codebooks[l->codebook].bits; /* bits of the last group */
    if (used) {
        bool zero = true;
        uint64_t row_nbytes = l->row_words * 4, group = 4 * (uint64_t)v->file->codebooks[l->codebook].bits;
        for (uint64_t r = 0; zero && r < l->rows; r++) {
            const uint8_t *last = p + (r + 1) * row_nbytes - group;
            zero = !(last[used / 8] >> used % 8) && zeros(last + used / 8 + 1, group - used / 8 - 1);
        }
        if (!zero)
            report(v, RSV_PADDING_NONZERO, what, at, "a padding code is not zero");
    }
    bool finite = all_finite(p + l->scales, l->rows);
    for (uint64_t r = 0; finite && l->bias != RSV_BIAS_NONE && r < l->rows; r++)
        finite = isfinite(rsv_layer_bias(v->file, l, r));
    if (!finite)
        report(v, RSV_NONFINITE_VALUE, what, at, "a scale or bias is not finite");
}

rsv_code rsv_verify(const rsv_file *file, const rsv_options *options, rsv_fault *fault, void *context,
                    rsv_error *error)
{
    verifier v = {.file = file, .fault = fault, .context = context, .error = error,
                  .end = PROLOGUE_NBYTES + file->header.size};
    rsv_code unable = RSV_OK; /* not about the file: what is still to be checked is, so it goes on */
    fail(error, RSV_OK, "%s", "");
    for (size_t i = 0; !v.stop && i < file->codebook_count; i++)
        verify_codebook(&v, i);
    for (size_t i = 0; !v.stop && i < file->transform_count; i++) {
        rsv_code code = verify_transform(&v, i, options);
        if (code && !fault)
            return code;
        unable = unable ? unable : code;
    }
    for (size_t i = 0; !v.stop && i < file->layer_count; i++)
        verify_layer(&v, i);
    for (size_t i = 0; !v.stop && i < file->tensor_count; i++)
        blob_start(&v, &file->tensors[i].blob, "tensors", i);
    for (size_t i = 0; !v.stop && i < file->attachment_count; i++)
        blob_start(&v, &file->attachments[i].blob, "attachments", i);
    if (!v.stop && !zeros(file->data + file->end, file->nbytes - file->end))
        report(&v, RSV_PADDING_NONZERO, "end", 0, "the gap up to the end of the file is not zero");
    return v.first ? v.first : unable;
}

/* ------------------------------------------------------------------------------------ transforms */

enum { DIRECT_ORDER = 192 }; /* up to here a Hartley factor is applied by its definition */

struct rsv_plan {
    const rsv_file *file;
    const rsv_transform *transform; /* NULL: identity */
    uint32_t dim;
    float *haar;     /* m * m */
    double *product; /* dim: the result of a factor, where it is applied as a matrix */
    double *cas;     /* m: (cos t + sin t) / sqrt(m) as f32, for j * k mod m = 0, 1, ... */
    /* Fourier transform of order m by one of order n, a power of two (Bluestein), or n = m */
    size_t n;
    double *twiddles; /* n / 2 complex: exp(-2 pi i k / n) */
    double *chirp;    /* m complex: exp(-pi i k^2 / m); NULL if n = m */
    double *filter;   /* n complex: transform of the conjugate of the chirp, over n */
    double *work;     /* n complex */
};

static void fft(double *x, size_t n, const double *twiddles)
{
    for (size_t i = 1, j = 0; i < n; i++) {
        size_t bit = n >> 1;
        for (; j & bit; bit >>= 1)
            j ^= bit;
        j ^= bit;
        if (i < j) {
            double re = x[2 * i], im = x[2 * i + 1];
            x[2 * i] = x[2 * j], x[2 * i + 1] = x[2 * j + 1];
            x[2 * j] = re, x[2 * j + 1] = im;
        }
    }
    for (size_t half = 1; half < n; half *= 2) {
        size_t stride = n / 2 / half;
        for (size_t start = 0; start < n; start += 2 * half) {
            double *a = x + 2 * start, *b = a + 2 * half;
            for (size_t k = 0; k < half; k++, a += 2, b += 2) {
                const double *w = twiddles + 2 * k * stride;
                double re = b[0] * w[0] - b[1] * w[1], im = b[0] * w[1] + b[1] * w[0];
                b[0] = a[0] - re, b[1] = a[1] - im;
                a[0] += re, a[1] += im;
            }
        }
    }
}

static bool plan_fourier(rsv_plan *p, size_t m)
{
    bool power = !(m & (m - 1));
    p->n = 1;
    while (p->n < (power ? m : 2 * m - 1))
        p->n *= 2;
    p->twiddles = malloc(p->n * sizeof *p->twiddles);
    p->work = malloc(2 * p->n * sizeof *p->work);
    if (!p->twiddles || !p->work)
        return false;
    for (size_t k = 0; k < p->n / 2; k++) {
        double t = -2 * pi * (double)k / (double)p->n;
        p->twiddles[2 * k] = cos(t), p->twiddles[2 * k + 1] = sin(t);
    }
    if (power)
        return true;
    p->chirp = malloc(2 * m * sizeof *p->chirp);
    p->filter = calloc(2 * p->n, sizeof *p->filter);
    if (!p->chirp || !p->filter)
        return false;
    for (size_t k = 0; k < m; k++) {
        uint64_t square = (uint64_t)k * k % (2 * (uint64_t)m); /* below 2^48 before the remainder */
        double t = -pi * (double)square / (double)m;
        p->chirp[2 * k] = cos(t), p->chirp[2 * k + 1] = sin(t);
        size_t at[2] = {k, k ? p->n - k : 0};
        for (int i = 0; i < 2; i++) {
            p->filter[2 * at[i]] = p->chirp[2 * k] / (double)p->n;
            p->filter[2 * at[i] + 1] = -p->chirp[2 * k + 1] / (double)p->n;
        }
    }
    fft(p->filter, p->n, p->twiddles);
    return true;
}

/* The discrete Fourier transform of order m of work, in place. */
static void fourier(rsv_plan *p, size_t m)
{
    double *x = p->work;
    if (!p->chirp) {
        fft(x, p->n, p->twiddles);
        return;
    }
    for (size_t k = 0; k < m; k++) {
        double re = x[2 * k], im = x[2 * k + 1], *w = p->chirp + 2 * k;
        x[2 * k] = re * w[0] - im * w[1], x[2 * k + 1] = re * w[1] + im * w[0];
    }
    memset(x + 2 * m, 0, 2 * (p->n - m) * sizeof *x);
    fft(x, p->n, p->twiddles);
    for (size_t k = 0; k < p->n; k++) { /* conjugated, so that the next transform is the inverse */
        double re = x[2 * k], im = x[2 * k + 1], *w = p->filter + 2 * k;
        x[2 * k] = re * w[0] - im * w[1], x[2 * k + 1] = -(re * w[1] + im * w[0]);
    }
    fft(x, p->n, p->twiddles);
    for (size_t k = 0; k < m; k++) {
        double re = x[2 * k], im = -x[2 * k + 1], *w = p->chirp + 2 * k;
        x[2 * k] = re * w[0] - im * w[1], x[2 * k + 1] = re * w[1] + im * w[0];
    }
}

/* The Hartley factor on the columns of v, two at a time as the parts of complex numbers. */
static void hartley(rsv_plan *p, double *v, size_t m, size_t n)
{
    double norm = 0.5 / sqrt((double)m);
    for (size_t c = 0; c < n; c += 2) {
        bool two = c + 1 < n;
        for (size_t k = 0; k < m; k++) {
            p->work[2 * k] = v[k * n + c];
            p->work[2 * k + 1] = two ? v[k * n + c + 1] : 0;
        }
        fourier(p, m);
        for (size_t k = 0; k < m; k++) {
            const double *x = p->work + 2 * k, *y = p->work + 2 * (k ? m - k : 0);
            v[k * n + c] = norm * (x[0] + y[0] - x[1] + y[1]);
            if (two)
                v[k * n + c + 1] = norm * (x[1] + y[1] + x[0] - y[0]);
        }
    }
}

static void apply_factor(rsv_plan *p, double *v, bool transposed)
{
    const rsv_transform *t = p->transform;
    size_t m = t->order, n = t->hadamard;
    if (t->factor == RSV_FACTOR_NONE)
        return;
    if (t->factor == RSV_FACTOR_HARTLEY && !p->cas) {
        hartley(p, v, m, n);
        return;
    }
    const uint8_t *stored = t->factor == RSV_FACTOR_MATRIX ? rsv_bytes(p->file, &t->factor_blob) : NULL;
    memset(p->product, 0, p->dim * sizeof *p->product);
    for (size_t j = 0; j < m; j++)
        for (size_t k = 0; k < m; k++) {
            size_t at = j * m + k;
            double f = stored    ? (double)rsv_load_f32(stored + 4 * at)
                       : p->haar ? (double)p->haar[at]
                                 : p->cas[j * k % m];
            const double *from = v + (transposed ? j : k) * n;
            double *to = p->product + (transposed ? k : j) * n;
            for (size_t c = 0; c < n; c++)
                to[c] += f * from[c];
        }
    memcpy(v, p->product, p->dim * sizeof *v);
}

static void apply_hadamard(const rsv_plan *p, double *v)
{
    size_t n = p->transform->hadamard;
    if (n == 1)
        return;
    double norm = 1 / sqrt((double)n);
    for (double *row = v; row < v + p->dim; row += n) {
        for (size_t half = 1; half < n; half *= 2)
            for (size_t start = 0; start < n; start += 2 * half)
                for (size_t k = start; k < start + half; k++) {
                    double a = row[k], b = row[k + half];
                    row[k] = a + b, row[k + half] = a - b;
                }
        for (size_t k = 0; k < n; k++)
            row[k] *= norm;
    }
}

static void apply_diagonal(const rsv_plan *p, double *v)
{
    const rsv_transform *t = p->transform;
    if (t->diagonal == RSV_DIAGONAL_NONE)
        return;
    const uint8_t *d = rsv_bytes(p->file, &t->diagonal_blob);
    for (uint32_t j = 0; j < p->dim; j++) {
        if (t->diagonal == RSV_DIAGONAL_VALUES)
            v[j] *= (double)rsv_load_f32(d + 4 * (size_t)j);
        else if (d[j / 8] >> j % 8 & 1)
            v[j] = -v[j];
    }
}

void rsv_plan_activation(rsv_plan *plan, double *v)
{
    if (!plan->transform)
        return;
    apply_diagonal(plan, v);
    apply_factor(plan, v, false);
    apply_hadamard(plan, v);
}

void rsv_plan_row(rsv_plan *plan, double *v)
{
    if (!plan->transform)
        return;
    apply_hadamard(plan, v);
    apply_factor(plan, v, true);
    apply_diagonal(plan, v);
}

void rsv_plan_free(rsv_plan *plan)
{
    if (!plan)
        return;
    free(plan->haar);
    free(plan->product);
    free(plan->cas);
    free(plan->twiddles);
    free(plan->chirp);
    free(plan->filter);
    free(plan->work);
    free(plan);
}

rsv_code rsv_plan_new(const rsv_file *file, int64_t transform, uint32_t dim, const rsv_options *options,
                      rsv_plan **out, rsv_error *error)
{
    *out = NULL;
    fail(error, RSV_OK, "%s", "");
    if (transform < -1 || (transform >= 0 && (uint64_t)transform >= file->transform_count))
        return fail(error, RSV_E_ARGUMENT, "no such transform");
    const rsv_transform *t = transform < 0 ? NULL : &file->transforms[transform];
    rsv_plan *p = calloc(1, sizeof *p);
    if (!p)
        return no_memory(error);
    p->file = file;
    p->transform = t;
    p->dim = t ? t->dim : dim;
    rsv_code code = RSV_OK;
    bool good = true;
    if (t && t->factor == RSV_FACTOR_HAAR)
        code = get_haar(file, (size_t)transform, options, &p->haar, error);
    if (t && t->factor == RSV_FACTOR_HARTLEY && t->order <= DIRECT_ORDER) {
        p->cas = malloc(t->order * sizeof *p->cas);
        for (uint32_t k = 0; p->cas && k < t->order; k++) {
            double angle = 2 * pi * (double)k / (double)t->order;
            p->cas[k] = (double)(float)((cos(angle) + sin(angle)) / sqrt((double)t->order));
        }
        good = p->cas;
    } else if (t && t->factor == RSV_FACTOR_HARTLEY) {
        good = plan_fourier(p, t->order);
    }
    if (!code && good && t && (p->cas || t->factor == RSV_FACTOR_MATRIX || t->factor == RSV_FACTOR_HAAR))
        good = (p->product = malloc(p->dim * sizeof *p->product));
    if (!code && !good)
        code = no_memory(error);
    if (code) {
        rsv_plan_free(p);
        return code;
    }
    *out = p;
    return RSV_OK;
}

rsv_code rsv_layer_row(const rsv_file *file, const rsv_layer *layer, rsv_plan *plan, uint64_t r, float *row)
{
    rsv_layer_rotated_row(file, layer, r, row);
    if (!plan->transform)
        return RSV_OK;
    double *v = malloc(layer->in_features * sizeof *v);
    if (!v)
        return RSV_E_MEMORY;
    for (uint32_t j = 0; j < layer->in_features; j++)
        v[j] = (double)row[j];
    rsv_plan_row(plan, v);
    for (uint32_t j = 0; j < layer->in_features; j++)
        row[j] = (float)v[j];
    free(v);
    return RSV_OK;
}

rsv_code rsv_layer_apply(const rsv_file *file, const rsv_layer *layer, rsv_plan *plan, const float *x, float *y)
{
    double *v = malloc(layer->in_features * sizeof *v);
    if (!v)
        return RSV_E_MEMORY;
    for (uint32_t j = 0; j < layer->in_features; j++)
        v[j] = (double)x[j];
    rsv_plan_activation(plan, v);
    for (uint64_t r = 0; r < layer->rows; r++)
        y[r] = (float)rsv_layer_output(file, layer, v, r);
    free(v);
    return RSV_OK;
}
