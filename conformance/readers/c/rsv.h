/* A reader of RSV 1.0 files in C11, written from SPEC.md alone. No dependencies but libc and libm.
 *
 * rsv_open_* does all that SPEC.md calls "open" (phases framing to extent); rsv_verify does the payload
 * phase. Everything a file gives out points into the bytes it was opened from or into memory that
 * rsv_close frees. A file that is open is not changed by any function but rsv_close, so threads may share
 * it; a plan (rsv_plan) holds scratch memory and belongs to one thread at a time. */
#ifndef RSV_H
#define RSV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    RSV_OK = 0,
    /* framing */
    RSV_FILE_TOO_SHORT,
    RSV_BAD_MAGIC,
    RSV_UNSUPPORTED_VERSION,
    RSV_RESERVED_FLAGS,
    RSV_HEADER_TOO_LARGE,
    RSV_FILE_TRUNCATED,
    RSV_TRAILING_BYTES,
    RSV_HEADER_OUT_OF_BOUNDS,
    RSV_HEADER_DIGEST_MISMATCH,
    RSV_HEADER_PADDING_NONZERO,
    /* json */
    RSV_INVALID_UTF8,
    RSV_JSON_LIMIT,
    RSV_INVALID_JSON,
    RSV_JSON_NUMBER,
    RSV_JSON_DUPLICATE_KEY,
    RSV_JSON_LONE_SURROGATE,
    /* schema */
    RSV_UNSUPPORTED_FEATURE,
    RSV_SCHEMA_VIOLATION,
    /* reference */
    RSV_TRANSFORM_SHAPE,
    RSV_BAD_REFERENCE,
    RSV_DIM_MISMATCH,
    RSV_UNREFERENCED,
    RSV_DUPLICATE_NAME,
    /* extent */
    RSV_FILE_EXTENT,
    /* payload */
    RSV_PADDING_NONZERO,
    RSV_BLOB_DIGEST_MISMATCH,
    RSV_NONFINITE_VALUE,
    RSV_ZERO_DIAGONAL,
    RSV_CODEBOOK_ORDER,
    RSV_NOT_ORTHOGONAL,
    RSV_HAAR_WITNESS_MISMATCH,
    /* not about the file */
    RSV_E_IO,       /* the system refuses */
    RSV_E_MEMORY,   /* malloc failed */
    RSV_E_ARGUMENT, /* the caller's mistake */
    RSV_E_LIMIT,    /* a bound set by the caller (rsv_options) was exceeded */
    RSV_CODE_COUNT
} rsv_code;

/* "bad_magic" and so on, as in section 9; "ok" and "e_..." for the others. */
const char *rsv_code_name(rsv_code code);

typedef struct {
    rsv_code code;
    uint64_t expected_nbytes; /* with RSV_FILE_EXTENT: the length the header implies, 0 beyond 2^53 - 1 */
    char message[200];        /* prose; ASCII */
} rsv_error;

/* UTF-8, followed by a NUL that size does not count; may hold NULs itself (metadata). */
typedef struct {
    const char *data;
    size_t size;
} rsv_string;

typedef struct {
    uint64_t offset; /* from the start of the file */
    uint64_t nbytes;
    uint8_t sha256[32];
} rsv_blob;

typedef struct {
    unsigned bits, window; /* of a code; of an index: 2^window centroids */
    rsv_blob blob;
} rsv_codebook;

typedef enum { RSV_DIAGONAL_NONE, RSV_DIAGONAL_SIGNS, RSV_DIAGONAL_VALUES } rsv_diagonal;
typedef enum { RSV_FACTOR_NONE, RSV_FACTOR_HARTLEY, RSV_FACTOR_MATRIX, RSV_FACTOR_HAAR } rsv_factor;

typedef struct {
    uint32_t dim, hadamard, order; /* dim = order * hadamard, m * n in SPEC.md */
    rsv_diagonal diagonal;
    rsv_factor factor;
    uint64_t seed;                     /* haar */
    rsv_blob diagonal_blob, factor_blob; /* where there is one */
} rsv_transform;

typedef enum { RSV_BIAS_NONE, RSV_BIAS_F32, RSV_BIAS_F16, RSV_BIAS_BF16 } rsv_bias;

typedef struct {
    rsv_string name;
    uint32_t in_features, out_features, stack;
    rsv_bias bias;
    size_t codebook;
    int64_t transform;     /* -1: none */
    uint64_t rows;         /* stack * out_features */
    uint64_t row_words;    /* u32 per row of codes */
    uint64_t scales, bias_offset; /* offsets in the blob */
    rsv_blob blob;
} rsv_layer;

typedef enum {
    RSV_BOOL, RSV_U8, RSV_I8, RSV_U16, RSV_I16, RSV_U32, RSV_I32, RSV_U64, RSV_I64,
    RSV_F16, RSV_BF16, RSV_F32, RSV_F64
} rsv_dtype;

typedef struct {
    rsv_string name;
    rsv_dtype dtype;
    unsigned rank;
    uint64_t shape[8];
    rsv_blob blob;
} rsv_tensor;

typedef struct {
    rsv_string name, media_type;
    rsv_blob blob;
} rsv_attachment;

typedef struct {
    rsv_string name, value;
} rsv_member;

/* What the header says. All pointers live until rsv_close. */
typedef struct {
    unsigned version_major, version_minor;
    const uint8_t *data; /* the file */
    uint64_t nbytes;
    rsv_string header;       /* the JSON text, not NUL-terminated */
    rsv_string extensions;   /* the JSON text of the member, not NUL-terminated */
    uint64_t end;            /* of the last blob */
    size_t codebook_count, transform_count, layer_count, tensor_count, attachment_count, metadata_count;
    const rsv_codebook *codebooks;
    const rsv_transform *transforms;
    const rsv_layer *layers;
    const rsv_tensor *tensors;
    const rsv_attachment *attachments;
    const rsv_member *metadata;
} rsv_file;

/* Opens a file that the caller holds in memory, for as long as *file is used. error may be NULL. */
rsv_code rsv_open_memory(const void *data, size_t nbytes, rsv_file **file, rsv_error *error);
/* Maps and opens. The caller sees to it that nobody truncates the file meanwhile (section 13). */
rsv_code rsv_open_path(const char *path, rsv_file **file, rsv_error *error);
void rsv_close(rsv_file *file); /* NULL is fine */

/* Bytes of a blob. */
static inline const uint8_t *rsv_bytes(const rsv_file *file, const rsv_blob *blob)
{
    return file->data + blob->offset;
}
unsigned rsv_dtype_nbytes(rsv_dtype dtype);
const char *rsv_dtype_name(rsv_dtype dtype);
const char *rsv_bias_name(rsv_bias bias); /* "f32", ...; NULL for none */

/* How much work a caller allows. All zero: whatever the format allows. */
typedef struct {
    uint32_t max_factor_order; /* largest haar factor to derive and largest matrix factor to check */
} rsv_options;

/* One fault of the payload; what: what it is about ("layer 3", ...). Return false to stop. */
typedef bool rsv_fault(void *context, rsv_code code, const char *message);
/* Checks the payload and returns the first fault, RSV_OK or RSV_E_*. If fault is NULL it stops at the
 * first, otherwise it calls fault for each and goes on. options and error may be NULL. */
rsv_code rsv_verify(const rsv_file *file, const rsv_options *options, rsv_fault *fault, void *context,
                    rsv_error *error);

float rsv_centroid(const rsv_file *file, size_t codebook, uint32_t index); /* index must be below 2^window */
bool rsv_codebook_uniform(const rsv_file *file, size_t codebook);          /* RSV-521 */

/* Row r is row r % out_features of matrix r / out_features of the stack. All are memory-safe on any bits;
 * r must be less than rows. */
void rsv_layer_codes(const rsv_file *file, const rsv_layer *layer, uint64_t r, uint8_t *codes);
void rsv_layer_indices(const rsv_file *file, const rsv_layer *layer, uint64_t r, uint16_t *indices); /* RSV-512 */
float rsv_layer_scale(const rsv_file *file, const rsv_layer *layer, uint64_t r);
float rsv_layer_bias(const rsv_file *file, const rsv_layer *layer, uint64_t r); /* 0 where there is none */
/* in_features elements of W_rot, exact (RSV-720). */
void rsv_layer_rotated_row(const rsv_file *file, const rsv_layer *layer, uint64_t r, float *row);

/* A transform made ready for use: a haar factor is derived and held against its witness. */
typedef struct rsv_plan rsv_plan;
/* transform: a position, or -1 for the identity of order dim. */
rsv_code rsv_plan_new(const rsv_file *file, int64_t transform, uint32_t dim, const rsv_options *options,
                      rsv_plan **plan, rsv_error *error);
void rsv_plan_free(rsv_plan *plan);
/* In place, dim elements, in binary64: x @ T.T of an activation, and w @ T of a row. */
void rsv_plan_activation(rsv_plan *plan, double *v);
void rsv_plan_row(rsv_plan *plan, double *v);

/* in_features elements of W; plan must be of the layer's transform. RSV_OK or RSV_E_MEMORY. */
rsv_code rsv_layer_row(const rsv_file *file, const rsv_layer *layer, rsv_plan *plan, uint64_t r, float *row);
/* Row r of x @ W.T + bias, tx being x after rsv_plan_activation; W is not built. */
double rsv_layer_output(const rsv_file *file, const rsv_layer *layer, const double *tx, uint64_t r);
/* y = x @ W.T + bias: rows elements from in_features. RSV_OK or RSV_E_MEMORY. */
rsv_code rsv_layer_apply(const rsv_file *file, const rsv_layer *layer, rsv_plan *plan, const float *x, float *y);

typedef struct {
    uint32_t h[8];
    uint64_t nbytes;
    uint8_t block[64];
} rsv_sha256_state;
void rsv_sha256_init(rsv_sha256_state *state);
void rsv_sha256_update(rsv_sha256_state *state, const void *data, size_t nbytes);
void rsv_sha256_final(rsv_sha256_state *state, uint8_t digest[32]);
void rsv_sha256(const void *data, size_t nbytes, uint8_t digest[32]);
/* What the bytes 32 to 63 of a file must be [RSV-109]. */
void rsv_header_digest(const uint8_t *file, size_t header_nbytes, uint8_t digest[32]);

float rsv_load_f32(const uint8_t *bytes); /* little-endian, at any address */
float rsv_f16_to_f32(uint16_t bits);
float rsv_bf16_to_f32(uint16_t bits);

#ifdef __cplusplus
}
#endif
#endif
