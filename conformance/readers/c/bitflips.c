/* Every single-bit flip of a file through open and verify, and every truncation through open:
 *
 *     rsv-bitflips FILE
 *
 * It prints one JSON object: how often each code was the answer ("ok" where there was none), and the SHA-256 of all
 * answers in order, each followed by a line feed, bits from the lowest of byte 0, lengths from 0. */
#include "rsv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned long counts[RSV_CODE_COUNT];
    rsv_sha256_state answers;
} tally;

static void add(tally *t, rsv_code code)
{
    const char *name = rsv_code_name(code);
    t->counts[code]++;
    rsv_sha256_update(&t->answers, name, strlen(name));
    rsv_sha256_update(&t->answers, "\n", 1);
}

static void print(const char *name, tally *t)
{
    uint8_t digest[32];
    const char *comma = "";
    rsv_sha256_final(&t->answers, digest);
    printf("\"%s\":{\"answers\":{", name);
    for (int i = 0; i < RSV_CODE_COUNT; i++)
        if (t->counts[i]) {
            printf("%s\"%s\":%lu", comma, rsv_code_name((rsv_code)i), t->counts[i]);
            comma = ",";
        }
    fputs("},\"sha256\":\"", stdout);
    for (int i = 0; i < 32; i++)
        printf("%02x", digest[i]);
    fputs("\"}", stdout);
}

static rsv_code answer(const uint8_t *data, size_t size, int verify)
{
    rsv_file *file;
    rsv_code code = rsv_open_memory(data, size, &file, NULL);
    if (!code && verify)
        code = rsv_verify(file, NULL, NULL, NULL, NULL);
    rsv_close(file);
    return code;
}

int main(int argc, char **argv)
{
    static tally flips, cuts;
    FILE *in = argc == 2 ? fopen(argv[1], "rb") : NULL;
    long end;
    if (!in || fseek(in, 0, SEEK_END) || (end = ftell(in)) < 0 || fseek(in, 0, SEEK_SET)) {
        fputs("usage: rsv-bitflips FILE\n", stderr);
        return 2;
    }
    size_t size = (size_t)end;
    uint8_t *data = malloc(size + 1);
    if (!data || fread(data, 1, size, in) != size || answer(data, size, 1))
        return 2; /* the file itself must be sound */
    fclose(in);
    rsv_sha256_init(&flips.answers);
    rsv_sha256_init(&cuts.answers);
    for (size_t bit = 0; bit < 8 * size; bit++) {
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        add(&flips, answer(data, size, 1));
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t length = 0; length < size; length++) {
        uint8_t *cut = malloc(length ? length : 1); /* a sanitizer sees each byte read beyond */
        if (!cut)
            return 2;
        memcpy(cut, data, length);
        add(&cuts, answer(cut, length, 0));
        free(cut);
    }
    putchar('{');
    print("flips", &flips);
    putchar(',');
    print("truncations", &cuts);
    puts("}");
    free(data);
    return 0;
}
