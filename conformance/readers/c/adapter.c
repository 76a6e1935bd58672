/* The adapter of conformance/PROTOCOL.md on top of rsv.h: decode, verify, dequantize and batch;
 * encode answers 77. */
#define _POSIX_C_SOURCE 200809L
#include "rsv.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Standard output, or memory: dequantize may find a fault in its middle, and a line of a batch is one line. */
static FILE *out;

static void *allocate(size_t count, size_t nbytes)
{
    void *p = count <= SIZE_MAX / nbytes ? malloc((count ? count : 1) * nbytes) : NULL;
    if (!p) {
        fputs("rsv-adapter: out of memory\n", stderr);
        exit(2);
    }
    return p;
}

static int refuse(const rsv_error *error)
{
    if (error->code >= RSV_E_IO) {
        fprintf(stderr, "rsv-adapter: %s: %s\n", rsv_code_name(error->code), error->message);
        return 2;
    }
    fprintf(out, "{\"error\":\"%s\",\"where\":\"%s\"}\n", rsv_code_name(error->code), error->message);
    return 1;
}

static void put_string(rsv_string s)
{
    putc('"', out);
    for (size_t i = 0; i < s.size; i++) {
        unsigned char c = (unsigned char)s.data[i];
        if (c < 0x20)
            fprintf(out, "\\u%04x", c);
        else if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else
            putc(c, out);
    }
    putc('"', out);
}

static void put_float(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    fprintf(out, "\"%08" PRIx32 "\"", bits);
}

/* An array of the protocol: elements are added little-endian, in any number of calls. */
typedef struct {
    rsv_sha256_state sha;
    uint8_t first[64];
    size_t nbytes;
    unsigned itemsize;
} array;

static void array_begin(array *a, unsigned itemsize)
{
    rsv_sha256_init(&a->sha);
    a->nbytes = 0;
    a->itemsize = itemsize;
}

static void array_add(array *a, const void *bytes, size_t nbytes)
{
    size_t room = 8 * a->itemsize - a->nbytes, take = nbytes < room ? nbytes : room;
    if (!nbytes)
        return;
    memcpy(a->first + a->nbytes, bytes, take);
    a->nbytes += take;
    rsv_sha256_update(&a->sha, bytes, nbytes);
}

static void array_add_float(array *a, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    uint8_t bytes[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16), (uint8_t)(bits >> 24)};
    array_add(a, bytes, 4);
}

static void put_digest(const uint8_t digest[32])
{
    putc('"', out);
    for (int i = 0; i < 32; i++)
        fprintf(out, "%02x", digest[i]);
    putc('"', out);
}

static void array_put(array *a, const char *dtype, const uint64_t *shape, unsigned rank)
{
    uint8_t digest[32];
    fputs("{\"shape\":[", out);
    for (unsigned i = 0; i < rank; i++)
        fprintf(out, "%s%" PRIu64, i ? "," : "", shape[i]);
    fprintf(out, "],\"dtype\":\"%s\",\"sha256\":", dtype);
    rsv_sha256_final(&a->sha, digest);
    put_digest(digest);
    fputs(",\"first\":[", out);
    for (size_t i = 0; i < a->nbytes; i += a->itemsize) {
        fputs(i ? ",\"" : "\"", out);
        for (unsigned k = a->itemsize; k-- > 0;)
            fprintf(out, "%02x", a->first[i + k]);
        putc('"', out);
    }
    fputs("]}", out);
}

static void put_bytes(const uint8_t *bytes, uint64_t nbytes, unsigned itemsize, const char *dtype,
                      const uint64_t *shape, unsigned rank)
{
    array a;
    array_begin(&a, itemsize);
    array_add(&a, bytes, (size_t)nbytes);
    array_put(&a, dtype, shape, rank);
}

static void put_blob(const char *kind, size_t entry, const rsv_blob *blob)
{
    fprintf(out, "{\"kind\":\"%s\",\"entry\":%zu,\"offset\":%" PRIu64 ",\"nbytes\":%" PRIu64 "}", kind, entry,
            blob->offset, blob->nbytes);
}

static void put_comma(bool *first)
{
    if (!*first)
        putc(',', out);
    *first = false;
}

static bool has_factor_blob(const rsv_transform *t)
{
    return t->factor == RSV_FACTOR_MATRIX || t->factor == RSV_FACTOR_HAAR;
}

static void decode_transform(const rsv_file *file, const rsv_transform *t)
{
    uint64_t shape[2] = {t->dim, 0};
    fputs("{\"diagonal\":", out);
    if (t->diagonal == RSV_DIAGONAL_NONE) {
        fputs("null", out);
    } else if (t->diagonal == RSV_DIAGONAL_VALUES) {
        put_bytes(rsv_bytes(file, &t->diagonal_blob), t->diagonal_blob.nbytes, 4, "f32", shape, 1);
    } else {
        array a;
        const uint8_t *d = rsv_bytes(file, &t->diagonal_blob);
        array_begin(&a, 4);
        for (uint32_t j = 0; j < t->dim; j++)
            array_add_float(&a, d[j / 8] >> j % 8 & 1 ? -1.0f : 1.0f);
        array_put(&a, "f32", shape, 1);
    }
    fputs(",\"factor\":", out);
    shape[0] = shape[1] = t->order;
    if (has_factor_blob(t))
        put_bytes(rsv_bytes(file, &t->factor_blob), t->factor_blob.nbytes, 4, "f32", shape,
                  t->factor == RSV_FACTOR_MATRIX ? 2 : 1);
    else
        fputs("null", out);
    putc('}', out);
}

static void decode_layer(const rsv_file *file, const rsv_layer *l)
{
    uint64_t shape[2] = {l->rows, l->in_features}, at = l->blob.offset;
    array a;
    fputs("{\"name\":", out);
    put_string(l->name);
    fprintf(out, ",\"parts\":{\"codes\":[%" PRIu64 ",%" PRIu64 "],\"scales\":[%" PRIu64 ",%" PRIu64 "],\"bias\":", at,
            l->rows * l->row_words * 4, at + l->scales, l->rows * 4);
    if (l->bias == RSV_BIAS_NONE)
        fputs("null", out);
    else
        fprintf(out, "[%" PRIu64 ",%" PRIu64 "]", at + l->bias_offset, l->rows * (l->bias == RSV_BIAS_F32 ? 4 : 2));
    fputs("},\"codes\":", out);
    uint8_t *codes = allocate(l->in_features, 1);
    array_begin(&a, 1);
    for (uint64_t r = 0; r < l->rows; r++) {
        rsv_layer_codes(file, l, r, codes);
        array_add(&a, codes, l->in_features);
    }
    free(codes);
    array_put(&a, "u8", shape, 2);
    fputs(",\"indices\":", out);
    uint16_t *indices = allocate(l->in_features, sizeof *indices);
    array_begin(&a, 2);
    for (uint64_t r = 0; r < l->rows; r++) {
        rsv_layer_indices(file, l, r, indices);
        uint8_t *bytes = (uint8_t *)indices; /* little-endian, in place: element j is not read again */
        for (uint32_t j = 0; j < l->in_features; j++) {
            uint16_t index = indices[j];
            bytes[2 * (size_t)j] = (uint8_t)index;
            bytes[2 * (size_t)j + 1] = (uint8_t)(index >> 8);
        }
        array_add(&a, bytes, 2 * (size_t)l->in_features);
    }
    free(indices);
    array_put(&a, "u16", shape, 2);
    fputs(",\"scales\":", out);
    put_bytes(file->data + at + l->scales, 4 * l->rows, 4, "f32", shape, 1);
    fputs(",\"bias\":", out);
    if (l->bias == RSV_BIAS_NONE) {
        fputs("null", out);
    } else {
        array_begin(&a, 4);
        for (uint64_t r = 0; r < l->rows; r++)
            array_add_float(&a, rsv_layer_bias(file, l, r));
        array_put(&a, "f32", shape, 1);
    }
    putc('}', out);
}

static void decode(const rsv_file *file)
{
    bool first = true;
    fprintf(out, "{\"version\":[%u,%u],\"header_nbytes\":%zu,\"header_sha256\":", file->version_major,
            file->version_minor, file->header.size);
    put_digest(file->data + 32);
    fprintf(out, ",\"file_nbytes\":%" PRIu64 ",\"header\":", file->nbytes);
    fwrite(file->header.data, 1, file->header.size, out);

    fputs(",\"blobs\":[", out);
    for (size_t i = 0; i < file->codebook_count; i++)
        put_comma(&first), put_blob("codebook", i, &file->codebooks[i].blob);
    for (size_t i = 0; i < file->transform_count; i++) {
        const rsv_transform *t = &file->transforms[i];
        if (t->diagonal != RSV_DIAGONAL_NONE)
            put_comma(&first), put_blob("diagonal", i, &t->diagonal_blob);
        if (has_factor_blob(t))
            put_comma(&first), put_blob("factor", i, &t->factor_blob);
    }
    for (size_t i = 0; i < file->layer_count; i++)
        put_comma(&first), put_blob("layer", i, &file->layers[i].blob);
    for (size_t i = 0; i < file->tensor_count; i++)
        put_comma(&first), put_blob("tensor", i, &file->tensors[i].blob);
    for (size_t i = 0; i < file->attachment_count; i++)
        put_comma(&first), put_blob("attachment", i, &file->attachments[i].blob);

    fputs("],\"codebooks\":[", out);
    first = true;
    for (size_t i = 0; i < file->codebook_count; i++) {
        const rsv_codebook *c = &file->codebooks[i];
        uint64_t shape[1] = {(uint64_t)1 << c->window};
        put_comma(&first);
        fputs("{\"centroids\":", out);
        put_bytes(rsv_bytes(file, &c->blob), c->blob.nbytes, 4, "f32", shape, 1);
        fprintf(out, ",\"uniform\":%s}", rsv_codebook_uniform(file, i) ? "true" : "false");
    }
    fputs("],\"transforms\":[", out);
    first = true;
    for (size_t i = 0; i < file->transform_count; i++)
        put_comma(&first), decode_transform(file, &file->transforms[i]);
    fputs("],\"layers\":[", out);
    first = true;
    for (size_t i = 0; i < file->layer_count; i++)
        put_comma(&first), decode_layer(file, &file->layers[i]);
    fputs("],\"tensors\":[", out);
    first = true;
    for (size_t i = 0; i < file->tensor_count; i++) {
        const rsv_tensor *t = &file->tensors[i];
        put_comma(&first);
        fputs("{\"name\":", out);
        put_string(t->name);
        fputs(",\"data\":", out);
        put_bytes(rsv_bytes(file, &t->blob), t->blob.nbytes, rsv_dtype_nbytes(t->dtype), rsv_dtype_name(t->dtype),
                  t->shape, t->rank);
        putc('}', out);
    }
    fputs("],\"attachments\":[", out);
    first = true;
    for (size_t i = 0; i < file->attachment_count; i++) {
        const rsv_attachment *a = &file->attachments[i];
        put_comma(&first);
        fputs("{\"name\":", out);
        put_string(a->name);
        fputs(",\"data\":", out);
        put_bytes(rsv_bytes(file, &a->blob), a->blob.nbytes, 1, "u8", &a->blob.nbytes, 1);
        putc('}', out);
    }
    fputs("]}\n", out);
}

/* Ascending; the sampled positions of n, as the protocol defines them for rows and columns. */
static size_t sample_rows(uint64_t n, uint64_t *at)
{
    if (n > 16) {
        at[0] = 0, at[1] = n / 2, at[2] = n - 1;
        return 3;
    }
    for (uint64_t i = 0; i < n; i++)
        at[i] = i;
    return (size_t)n;
}

static size_t sample_columns(uint64_t n, uint64_t *at)
{
    uint64_t step = n <= 640 ? 1 : (n + 255) / 256;
    size_t count = 0;
    for (uint64_t i = 0; i < n; i += step)
        at[count++] = i;
    if (at[count - 1] != n - 1)
        at[count++] = n - 1;
    return count;
}

static rsv_code dequantize_layer(const rsv_file *file, const rsv_layer *l, rsv_plan *plan, rsv_error *error)
{
    uint64_t rows[16], columns[641], shape[2] = {l->rows, l->in_features};
    size_t row_count = sample_rows(l->rows, rows), column_count = sample_columns(l->in_features, columns);
    float *row = allocate(l->in_features, sizeof *row);
    double *tx = allocate(l->in_features, sizeof *tx);
    rsv_code code = RSV_OK;
    array a;

    fputs("{\"name\":", out);
    put_string(l->name);
    fputs(",\"w_rot\":", out);
    array_begin(&a, 4);
    for (uint64_t r = 0; r < l->rows; r++) {
        rsv_layer_rotated_row(file, l, r, row);
        for (uint32_t j = 0; j < l->in_features; j++)
            array_add_float(&a, row[j]);
    }
    array_put(&a, "f32", shape, 2);
    fputs(",\"w\":[", out);
    for (size_t i = 0; !code && i < row_count; i++) {
        code = rsv_layer_row(file, l, plan, rows[i], row);
        fputs(i ? ",[" : "[", out);
        for (size_t k = 0; k < column_count; k++) {
            if (k)
                putc(',', out);
            put_float(row[columns[k]]);
        }
        putc(']', out);
    }
    if (code) {
        error->code = code;
        snprintf(error->message, sizeof error->message, "out of memory");
    }
    for (uint32_t j = 0; j < l->in_features; j++)
        tx[j] = ((double)((7 * (uint64_t)j + 3) % 17) - 8) / 8;
    rsv_plan_activation(plan, tx);
    fputs("],\"tx\":[", out);
    for (size_t k = 0; k < column_count; k++) {
        if (k)
            putc(',', out);
        put_float((float)tx[columns[k]]);
    }
    fputs("],\"y\":[", out);
    for (size_t i = 0; i < row_count; i++) {
        if (i)
            putc(',', out);
        put_float((float)rsv_layer_output(file, l, tx, rows[i]));
    }
    fputs("]}", out);
    free(row);
    free(tx);
    return code;
}

static rsv_code dequantize(const rsv_file *file, rsv_error *error)
{
    /* One plan at a time: haar factors of a hostile file would fill any memory. */
    rsv_plan *plan = NULL;
    int64_t planned = -1;
    rsv_code code = RSV_OK;
    fputs("{\"layers\":[", out);
    for (size_t i = 0; !code && i < file->layer_count; i++) {
        const rsv_layer *l = &file->layers[i];
        if (!plan || planned < 0 || planned != l->transform) {
            rsv_plan_free(plan);
            code = rsv_plan_new(file, l->transform, l->in_features, NULL, &plan, error);
            planned = l->transform;
        }
        if (i)
            putc(',', out);
        if (!code)
            code = dequantize_layer(file, l, plan, error);
    }
    fputs("]}\n", out);
    rsv_plan_free(plan);
    return code;
}

/* The exit code; what is to be printed has been written to out. */
static int answer(const char *operation, const char *path)
{
    if (strcmp(operation, "decode") && strcmp(operation, "verify") && strcmp(operation, "dequantize"))
        return 77;
    rsv_file *file;
    rsv_error error;
    if (rsv_open_path(path, &file, &error))
        return refuse(&error);
    rsv_code code = RSV_OK;
    FILE *whole = out;
    char *buffer = NULL;
    size_t nbytes = 0;
    if (!strcmp(operation, "decode")) {
        decode(file);
    } else if (!strcmp(operation, "verify")) {
        code = rsv_verify(file, NULL, NULL, NULL, &error);
        if (!code)
            fputs("{}\n", out);
    } else {
        out = open_memstream(&buffer, &nbytes);
        if (!out)
            return 2;
        code = dequantize(file, &error);
        if (fclose(out))
            return 2;
        out = whole;
        if (!code)
            fwrite(buffer, 1, nbytes, out);
        free(buffer);
    }
    rsv_close(file);
    return code ? refuse(&error) : 0;
}

static int batch(void)
{
    char *line = NULL;
    size_t room = 0;
    puts("{\"batch\":1}");
    fflush(stdout);
    for (ssize_t size; (size = getline(&line, &room, stdin)) > 0;) {
        char *buffer = NULL, *tab = strchr(line, '\t');
        size_t nbytes = 0;
        if (line[size - 1] == '\n')
            line[size - 1] = 0;
        if (!tab)
            return 2;
        *tab = 0;
        out = open_memstream(&buffer, &nbytes);
        if (!out)
            return 2;
        int code = answer(line, tab + 1);
        if (fclose(out) || code == 2)
            return 2;
        for (size_t i = 0; i < nbytes; i++) /* the header's line feeds; none are within strings */
            if (buffer[i] == '\n' || buffer[i] == '\r')
                buffer[i] = ' ';
        printf("{\"exit\":%d,\"output\":%s}\n", code, nbytes ? buffer : "null");
        fflush(stdout);
        free(buffer);
    }
    free(line);
    return 0;
}

int main(int argc, char **argv)
{
    out = stdout;
    if (argc == 2 && !strcmp(argv[1], "batch"))
        return batch();
    if (argc != 3) {
        fputs("usage: rsv-adapter decode|verify|dequantize|encode FILE, or batch\n", stderr);
        return 77;
    }
    int code = answer(argv[1], argv[2]);
    return fflush(stdout) || ferror(stdout) ? 2 : code;
}
