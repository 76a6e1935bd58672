/* A libFuzzer entry, and without clang (-DSTANDALONE) a main that replays files or mutates them:
 *
 *     rsv-replay FILE...                      each file once
 *     rsv-replay --mutate COUNT SEED FILE...  COUNT random mutations of each
 *
 * Since a digest guards the header, an input that does not open is tried again with its prologue put right and at the
 * length that its header implies. */
#include "fuzz.h"
#include "rsv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile double sink;

static bool go_on(void *context, rsv_code code, const char *message)
{
    ++*(int *)context;
    sink = (double)strlen(message) + code;
    return true;
}

static void use(const rsv_file *file)
{
    const rsv_options options = {.max_factor_order = 24};
    uint8_t digest[32];
    int faults = 0;
    rsv_code first = rsv_verify(file, &options, NULL, NULL, NULL);
    rsv_code same = rsv_verify(file, &options, go_on, &faults, NULL);
    if (first != RSV_E_LIMIT && (first != same || (first != RSV_OK) != (faults > 0)))
        abort();
    for (size_t i = 0; i < file->codebook_count; i++)
        sink = rsv_codebook_uniform(file, i);
    for (size_t i = 0; i < file->layer_count && i < 8; i++) {
        const rsv_layer *l = &file->layers[i];
        rsv_plan *plan;
        if (l->in_features > 1024 || rsv_plan_new(file, l->transform, l->in_features, &options, &plan, NULL))
            continue;
        float *row = malloc(l->in_features * sizeof *row);
        double *tx = malloc(l->in_features * sizeof *tx);
        uint8_t *codes = malloc(l->in_features);
        uint16_t *indices = malloc(l->in_features * sizeof *indices);
        if (!row || !tx || !codes || !indices)
            abort();
        memset(tx, 0, l->in_features * sizeof *tx);
        rsv_plan_activation(plan, tx);
        for (uint64_t r = 0; r < l->rows; r += l->rows > 4 ? l->rows / 3 : 1) {
            rsv_layer_codes(file, l, r, codes);
            for (uint32_t j = 0; j < l->in_features; j++)
                if (codes[j] >> file->codebooks[l->codebook].bits)
                    abort();
            rsv_layer_indices(file, l, r, indices);
            for (uint32_t j = 0; j < l->in_features; j++)
                if (indices[j] >> file->codebooks[l->codebook].window
                    || (indices[j] & ((1u << file->codebooks[l->codebook].bits) - 1)) != codes[j])
                    abort();
            if (rsv_layer_row(file, l, plan, r, row))
                abort();
            sink = (double)row[0] + (double)rsv_layer_bias(file, l, r) + rsv_layer_output(file, l, tx, r);
        }
        free(row);
        free(tx);
        free(codes);
        free(indices);
        rsv_plan_free(plan);
    }
    for (size_t i = 0; i < file->tensor_count; i++)
        rsv_sha256(rsv_bytes(file, &file->tensors[i].blob), file->tensors[i].blob.nbytes, digest);
    for (size_t i = 0; i < file->attachment_count; i++)
        rsv_sha256(rsv_bytes(file, &file->attachments[i].blob), file->attachments[i].blob.nbytes, digest);
    for (size_t i = 0; i < file->metadata_count; i++)
        sink = (double)(strlen(file->metadata[i].name.data) + strlen(file->metadata[i].value.data));
}

static rsv_code try_bytes(const uint8_t *data, size_t size, rsv_error *error)
{
    /* An allocation of its very size: a sanitizer sees each byte read beyond. */
    uint8_t *copy = malloc(size ? size : 1);
    rsv_file *file;
    if (!copy)
        abort();
    if (size)
        memcpy(copy, data, size);
    rsv_code code = rsv_open_memory(copy, size, &file, error);
    if (!code) {
        use(file);
        rsv_close(file);
    } else if (file || code != error->code || code >= RSV_PADDING_NONZERO) {
        abort();
    }
    free(copy);
    return code;
}

static void put64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static uint64_t get64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static uint8_t *zeros(size_t nbytes)
{
    uint8_t *p = calloc(1, nbytes ? nbytes : 1);
    if (!p)
        abort();
    return p;
}

void fuzz_prologue(uint8_t *p, size_t nbytes, size_t header_nbytes)
{
    memcpy(p, "\x89RSV\r\n\x1a\n\1\0\0\0\0\0\0\0", 16);
    put64(p + 16, header_nbytes);
    put64(p + 24, nbytes);
    rsv_header_digest(p, header_nbytes, p + 32);
}

uint8_t *fuzz_pad(const uint8_t *input, size_t size, size_t *nbytes)
{
    uint64_t claimed = size >= 64 ? get64(input + 24) : 0;
    *nbytes = claimed > size && claimed <= FUZZ_MAX_NBYTES ? (size_t)claimed : size;
    uint8_t *p = zeros(*nbytes);
    if (size)
        memcpy(p, input, size);
    return p;
}

uint8_t *fuzz_repair(const uint8_t *input, size_t size, size_t *nbytes)
{
    rsv_error error;
    rsv_file *file;
    size_t header = 0, padded = (size + 63) / 64 * 64;
    uint8_t *p = zeros(padded);
    memcpy(p, input, size);
    while (64 + header < size && input[64 + header])
        header++;
    for (size_t i = 64 + header; i % 64; i++)
        p[i] = 0;
    fuzz_prologue(p, padded, header);
    *nbytes = padded;
    if (!rsv_open_memory(p, padded, &file, &error)) {
        rsv_close(file);
    } else if (error.code == RSV_FILE_EXTENT && error.expected_nbytes && error.expected_nbytes <= FUZZ_MAX_NBYTES) {
        *nbytes = (size_t)error.expected_nbytes;
        uint8_t *other = zeros(*nbytes);
        memcpy(other, p, padded < *nbytes ? padded : *nbytes);
        fuzz_prologue(other, *nbytes, header);
        free(p);
        p = other;
        if (rsv_open_memory(p, *nbytes, &file, &error))
            abort(); /* the length it asked for */
        rsv_close(file);
    }
    return p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    rsv_error error;
    size_t nbytes;
    uint8_t *p = fuzz_pad(data, size, &nbytes);
    rsv_code code = try_bytes(p, nbytes, &error);
    free(p);
    if (size < 64 || (code != RSV_FILE_EXTENT && code > RSV_HEADER_PADDING_NONZERO) || !code)
        return 0; /* nothing that a repair would change */
    p = fuzz_repair(data, size, &nbytes);
    try_bytes(p, nbytes, &error);
    free(p);
    return 0;
}

#ifdef STANDALONE
static uint64_t state;

static uint64_t draw(uint64_t below)
{
    uint64_t z = state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return (z ^ z >> 31) % below;
}

/* Changes mostly the prologue and the header, where the structure is. */
static size_t mutate(uint8_t *p, size_t size, size_t room)
{
    static const char *const words[] = {
        "0", "1", "-1", "9007199254740991", "9007199254740992", "16777216", "2147483647", "null", "\"\"", "{}",
        "[]", "[[", "\\u0000", "\\ud800", "\"a\":0,", ",", "\"", "\\", "\xff", "1e5", "haar", "hartley", "matrix",
        "values", "signs", "f32", "bf16", "65535", "16384", "4503599627370496", "-0", "\xed\xa0\x80"};
    for (uint64_t times = 1 + draw(4); times && size; times--) {
        size_t near = size < 2048 || !draw(8) ? size : 2048, at = draw(near);
        const char *word = words[draw(sizeof words / sizeof *words)];
        size_t length = strlen(word);
        switch (draw(6)) {
        case 0:
            p[at] ^= (uint8_t)(1u << draw(8));
            break;
        case 1:
            p[at] = (uint8_t)draw(256);
            break;
        case 2: /* overwrite with a word */
            memcpy(p + at, word, length < size - at ? length : size - at);
            break;
        case 3: /* insert a word */
            if (size + length > room)
                break;
            memmove(p + at + length, p + at, size - at);
            memcpy(p + at, word, length);
            size += length;
            break;
        case 4: { /* delete */
            size_t gone = draw(16) ? 1 + draw(40) : 1 + draw(size);
            gone = gone < size - at ? gone : size - at;
            memmove(p + at, p + at + gone, size - at - gone);
            size -= gone;
            break;
        }
        default: { /* repeat a part elsewhere */
            size_t from = draw(near), take = 1 + draw(200);
            take = take < size - from ? take : size - from;
            if (size + take > room)
                break;
            memmove(p + at + take, p + at, size - at);
            memmove(p + at, p + (from >= at ? from + take : from), from >= at || from + take <= at ? take : at - from);
            size += take;
        }
        }
    }
    return size;
}

int main(int argc, char **argv)
{
    int first = 1;
    unsigned long count = 0;
    if (argc > 3 && !strcmp(argv[1], "--mutate")) {
        count = strtoul(argv[2], NULL, 10);
        state = strtoul(argv[3], NULL, 10);
        first = 4;
    }
    for (int i = first; i < argc; i++) {
        FILE *in = fopen(argv[i], "rb");
        long end;
        if (!in || fseek(in, 0, SEEK_END) || (end = ftell(in)) < 0 || fseek(in, 0, SEEK_SET)) {
            perror(argv[i]);
            return 1;
        }
        size_t size = (size_t)end, room = size + 65536;
        uint8_t *data = malloc(room), *copy = malloc(room);
        if (!data || !copy || fread(data, 1, size, in) != size)
            return 1;
        fclose(in);
        LLVMFuzzerTestOneInput(data, size);
        for (unsigned long k = 0; k < count; k++) {
            memcpy(copy, data, size);
            LLVMFuzzerTestOneInput(copy, mutate(copy, size, room));
        }
        free(data);
        free(copy);
    }
    printf("%d files, %lu mutations of each\n", argc - first, count);
    return 0;
}
#endif
