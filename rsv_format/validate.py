"""The rules between a header's entries, and the walk over its blobs (SPEC sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

from rsv_format.errors import RsvError
from rsv_format.header import Factor, Header, TensorEntry
from rsv_format.layout import DTYPE_NBYTES, layer_layout, place
from rsv_format.limits import MAX_HAAR, MAX_INTEGER


@dataclass(frozen=True, slots=True)
class Blob:
    """One run of bytes of the file: what it is, whose, where."""

    kind: str  # codebook, diagonal, factor, layer, tensor or attachment
    index: int  # of the entry in its table
    name: str
    offset: int
    nbytes: int
    sha256: str


def check_references(header: Header) -> None:
    """The reference phase, rule by rule over the whole header.

    Raises
    ------
    RsvError
        transform_shape, bad_reference, dim_mismatch, unreferenced or duplicate_name.
    """
    for i, transform in enumerate(header.transforms):
        _check_transform_shape(f"/transforms/{i}", transform.dim, transform.hadamard, transform.factor)
    for i, layer in enumerate(header.layers):
        if layer.codebook >= len(header.codebooks):
            raise RsvError("bad_reference", f"/layers/{i}/codebook", f"there is no codebook {layer.codebook}")
        if layer.transform is not None and layer.transform >= len(header.transforms):
            raise RsvError("bad_reference", f"/layers/{i}/transform", f"there is no transform {layer.transform}")
    for i, layer in enumerate(header.layers):
        if layer.transform is not None and header.transforms[layer.transform].dim != layer.in_features:
            dim = header.transforms[layer.transform].dim
            raise RsvError(
                "dim_mismatch", f"/layers/{i}", f"in_features {layer.in_features}, but its transform has {dim}"
            )
    _check_all_used("codebooks", len(header.codebooks), (layer.codebook for layer in header.layers))
    _check_all_used("transforms", len(header.transforms), (layer.transform for layer in header.layers))
    _check_unique("/layers", (claim for layer in header.layers for claim in claims(layer.name)))
    layer_claims = {claim for layer in header.layers for claim in claims(layer.name)}
    _check_unique("/tensors", (tensor.name for tensor in header.tensors), layer_claims)
    _check_unique("/attachments", (attachment.name.lower() for attachment in header.attachments))


def claims(layer: str) -> tuple[str, str, str]:
    """The names that a layer takes: its own and those of the parameters that it stands for."""
    return layer, f"{layer}.weight", f"{layer}.bias"


def _check_transform_shape(where: str, dim: int, n: int, factor: Factor | None) -> None:
    m, rest = divmod(dim, n)
    if rest:
        raise RsvError("transform_shape", where, f"hadamard {n} does not divide dim {dim}")
    if m == 1 and factor is not None:
        raise RsvError("transform_shape", where, "dim = hadamard leaves no room for a factor")
    if factor is not None and factor.kind == "haar" and m > MAX_HAAR:
        raise RsvError("transform_shape", where, f"a haar factor of order {m}, the limit is {MAX_HAAR}")


def _check_all_used(table: str, count: int, used: Iterable[int | None]) -> None:
    missing = set(range(count)) - set(used)
    if missing:
        raise RsvError("unreferenced", f"/{table}/{min(missing)}", "no layer points to it")


def _check_unique(where: str, names: Iterable[str], taken: Iterable[str] = ()) -> None:
    seen = set(taken)
    for name in names:
        if name in seen:
            raise RsvError("duplicate_name", where, f"{name[:120]!r} is taken twice")
        seen.add(name)


def walk(header: Header, header_nbytes: int) -> tuple[list[Blob], int]:
    """All blobs in the order of the file, placed, and the length of the file.

    Raises
    ------
    RsvError
        file_extent: a tensor's shape is beyond any file.
    """
    parts = list(_sizes(header))
    offsets, file_nbytes = place(header_nbytes, (nbytes for _, _, _, nbytes, _ in parts))
    blobs = [
        Blob(kind, index, name, offset, nbytes, sha256)
        for (kind, index, name, nbytes, sha256), offset in zip(parts, offsets, strict=True)
    ]
    return blobs, file_nbytes


def _sizes(header: Header) -> Iterator[tuple[str, int, str, int, str]]:
    """(kind, index, name, nbytes, sha256) of each blob."""
    for i, codebook in enumerate(header.codebooks):
        yield "codebook", i, f"codebooks/{i}", 4 * 2**codebook.window, codebook.sha256
    for i, transform in enumerate(header.transforms):
        name = f"transforms/{i}"
        if transform.diagonal is not None:
            nbytes = _DIAGONAL_NBYTES[transform.diagonal.kind](transform.dim)
            yield "diagonal", i, name, nbytes, transform.diagonal.sha256
        if transform.factor is not None and transform.factor.sha256 is not None:
            nbytes = _FACTOR_NBYTES[transform.factor.kind](transform.dim // transform.hadamard)
            yield "factor", i, name, nbytes, transform.factor.sha256
    for i, layer in enumerate(header.layers):
        bits = header.codebooks[layer.codebook].bits
        layout = layer_layout(layer.in_features, layer.rows, bits, layer.bias)
        yield "layer", i, layer.name, layout.nbytes, layer.sha256
    for i, tensor in enumerate(header.tensors):
        yield "tensor", i, tensor.name, _tensor_nbytes(tensor), tensor.sha256
    for i, attachment in enumerate(header.attachments):
        yield "attachment", i, attachment.name, attachment.nbytes, attachment.sha256


def _tensor_nbytes(tensor: TensorEntry) -> int:
    """Its size; an empty one must not hide axes whose product no machine can index."""
    spread = prod(length for length in tensor.shape if length) * DTYPE_NBYTES[tensor.dtype]
    if spread > MAX_INTEGER:
        raise RsvError("file_extent", f"tensor {tensor.name[:120]}", f"a shape of {spread} bytes")
    return 0 if 0 in tensor.shape else spread


_DIAGONAL_NBYTES: dict[str, Callable[[int], int]] = {
    "signs": lambda dim: -(-dim // 8),
    "values": lambda dim: 4 * dim,
}
_FACTOR_NBYTES: dict[str, Callable[[int], int]] = {
    "matrix": lambda m: 4 * m * m,
    "haar": lambda m: 4 * m,
}
