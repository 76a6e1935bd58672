"""Every fixed size and limit, with its reason on the same line (SPEC section 10)."""

CELL = 64  # bytes; blobs and their parts start on a cache line, enough for any vector load
PAGE = 16384  # bytes; the largest common page (Apple silicon): the file's length is a multiple of it
PROLOGUE_NBYTES = 64  # one cell
MAX_HEADER_NBYTES = 64 * 2**20  # some 300,000 layers; bounds what is parsed as JSON
MAX_JSON_DEPTH = 32  # the format itself needs 4; safe for any recursive parser
FREE_JSON_VALUES = 4096  # bytes , [ { outside strings in a header of any length; about 1 MiB in a parser
JSON_VALUE_NBYTES = 16  # of header for each further one: as dense as its own entries; bounds a parser to a few headers
MAX_INTEGER = 2**53 - 1  # exact in IEEE binary64, hence in every JSON parser
MAX_BITS = 8  # a code fits a byte
MAX_WINDOW = 16  # bits of an index: 65536 centroids, 256 KiB, stay in a cache
MAX_IN_FEATURES = 2**24  # j * k of the Hartley formula stays below 2^48: exact in binary64
MAX_OUT_FEATURES = 2**31 - 1  # a row index fits a signed 32-bit integer
MAX_STACK = 65535  # experts in one layer; models have hundreds
MAX_SHARDS = 99999  # of a set: a name has five digits for them
MAX_HAAR = 16384  # order of a derived Haar factor: 2 GiB of binary64 to derive it from a tiny file
USUAL_ORDER = 4096  # of a factor derived or held against the identity, unless more is asked for: seconds, not minutes
USUAL_HOLES = 4 * 2**30  # bytes never written that verify reads unless more is asked for: seconds
MAX_NAME = 512  # code points of a layer's or tensor's name; models stay under 100
MAX_ATTACHMENT_NAME = 255  # the common limit of file systems
MAX_RANK = 8  # axes of a tensor; numpy, MLX and safetensors agree on at least that
ORTHOGONALITY_TOLERANCE = 1e-4  # largest |F F^T - I|; a float32 QR of order 16384 stays below
HAAR_TOLERANCE = 1e-5  # largest |F u - witness|; LAPACKs differ by about 1e-7
WRITER_SHARE = 0.5  # of these two tolerances, what a writer allows itself: no reader's rounding decides
