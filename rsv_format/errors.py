"""The one public error and the closed list of its codes, by phase (SPEC section 9)."""

from __future__ import annotations

import errno
import re

# The order of the phases is the order of the checks: the first failing one is reported.
_BY_PHASE: dict[str, tuple[str, ...]] = {
    "framing": (
        "file_too_short",
        "bad_magic",
        "unsupported_version",
        "reserved_flags",
        "header_too_large",
        "file_truncated",
        "trailing_bytes",
        "header_out_of_bounds",
        "header_digest_mismatch",
        "header_padding_nonzero",
    ),
    "json": (
        "invalid_utf8",
        "json_limit",
        "invalid_json",
        "json_number",
        "json_duplicate_key",
        "json_lone_surrogate",
    ),
    "schema": ("unsupported_feature", "schema_violation"),
    "reference": ("transform_shape", "bad_reference", "dim_mismatch", "unreferenced", "duplicate_name"),
    "extent": ("file_extent",),
    "set": ("foreign_shard", "missing_shard", "set_mismatch"),
    "payload": (
        "padding_nonzero",
        "blob_digest_mismatch",
        "nonfinite_value",
        "zero_diagonal",
        "codebook_order",
        "not_orthogonal",
        "haar_witness_mismatch",
    ),
    "binding": (
        "missing_layer",
        "unexpected_layer",
        "shape_mismatch",
        "missing_attachment",
        "unsupported_model",
    ),
    # Not part of the file contract: what this implementation's writer, quantizer, sources and tools refuse.
    "input": (
        "io_error",
        "source_unsupported",
        "source_invalid",
        "nonfinite_weight",
        "importance_mismatch",
        "bad_argument",
        "content_invalid",
        "missing_dependency",
        "over_limit",
        "out_of_memory",
        "closed",
        "internal_error",
    ),
}

PHASES: tuple[str, ...] = tuple(_BY_PHASE)
CODES: dict[str, str] = {code: phase for phase, codes in _BY_PHASE.items() for code in codes}

# What is said for want of memory, or of room for a thread, by what raises something else than MemoryError: MLX and C++,
# the loader of shared libraries (whose TLS block and noexec are other matters), Rust, Python's threads.
_NO_MEMORY = re.compile(
    r"bad_alloc|un ?able to allocate|cannot allocate(?! memory in static TLS)|failed to allocate|memory allocation|"
    r"allocation failed|(?:out of|insufficient|not enough) memory|os error 12\b|"
    r"failed to map segment from shared object(?!: (?:Operation not permitted|Permission denied))|"
    r"can't start new thread|resource temporarily unavailable",
    re.IGNORECASE,
)
_CHAIN = 8  # exceptions that were raised one for another


class RsvError(ValueError):
    """Whatever is wrong with a file, a model or an input.

    Attributes
    ----------
    code : str
        One of `CODES`; the contract that programs and conformance vectors rely on.
    where : str
        What is at fault: a field, a JSON pointer, a layer's name, a path.
    detail : str
        Prose for people, free to change.
    """

    def __init__(self, code: str, where: str, detail: str) -> None:
        assert code in CODES, f"unknown error code {code}"
        super().__init__(code, where, detail)
        self.code = code
        self.where = where
        self.detail = detail

    @property
    def phase(self) -> str:
        """The phase that the code belongs to, one of `PHASES`."""
        return CODES[self.code]

    def __str__(self) -> str:
        return f"{self.code} at {self.where}: {self.detail}"

    @classmethod
    def of_import(cls, error: ImportError, where: str, hint: str = "") -> RsvError:
        """Of a failed import: out_of_memory if it is that, else missing_dependency.

        Parameters
        ----------
        error : ImportError
        where : str
        hint : str
            How to install what is not there at all.
        """
        if is_out_of_memory(error):
            return cls("out_of_memory", where, str(error))
        detail = str(error)
        if isinstance(error, ModuleNotFoundError):
            detail = f"{error.name or error} is not installed{hint and f': {hint}'}"
        return cls("missing_dependency", where, detail)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it, or what it was raised for, is a want of memory, in whatever words a library has for that."""
    for _ in range(_CHAIN):
        number = getattr(error, "errno", None)
        if isinstance(error, MemoryError) or number == errno.ENOMEM:
            return True
        own = isinstance(error, ValueError | TypeError | LookupError)  # whose text can be a file's
        if number is None and not own and _NO_MEMORY.search(str(error)):
            return True
        below = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if below is None:
            break
        error = below
    return False
