/* Shared by the fuzz target and its mutator: files from inputs. */
#ifndef RSV_FUZZ_H
#define RSV_FUZZ_H

#include <stddef.h>
#include <stdint.h>

enum { FUZZ_MAX_NBYTES = 256 << 10 }; /* of a file that an input is made into: larger ones only cost time */

/* Inputs are files without the zeros at their end. This puts them back, up to the file_nbytes of the prologue if that
 * is no more than FUZZ_MAX_NBYTES. The caller frees it. */
uint8_t *fuzz_pad(const uint8_t *input, size_t size, size_t *nbytes);

/* The input as a file whose prologue is right and, if only that is wrong then, whose length is the one that its
 * header implies. The header is what stands at 64, up to the first NUL. The caller frees it. size is at least 64. */
uint8_t *fuzz_repair(const uint8_t *input, size_t size, size_t *nbytes);

/* The rest of signing: magic to header_sha256 of a file in p. */
void fuzz_prologue(uint8_t *p, size_t nbytes, size_t header_nbytes);

#endif
