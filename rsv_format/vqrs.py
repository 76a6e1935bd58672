"""VeloxQuant-MLX's reservoirs, read as layers: magic VQRS, version 2.

"VQRS", a u32 version, a u32 length, so much JSON; then four sections, each from one page to another: codes, norms,
rotations, centroids. The JSON has the length of each section and, of each layer, its places in them, which begin on
pages too. A code has a byte, whatever its bits; the other numbers are f32; a bias is hexadecimal f16 in the JSON.
All is little-endian.

    W = (norm[i] * float16(centroid[code[i, j]])) @ T

where T is H_in diag(signs), H being MLX's Hadamard matrix and the signs what is stored of the rotation, or a
matrix: the stored one or, if none is stored, the Q of NumPy's QR of the layer's own random numbers.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.header import TransformEntry, parse_json
from rsv_format.layout import align
from rsv_format.limits import MAX_HEADER_NBYTES, MAX_IN_FEATURES, MAX_NAME, MAX_OUT_FEATURES, PAGE, USUAL_ORDER
from rsv_format.packing import pack
from rsv_format.remote import Remote
from rsv_format.rotation import Transform
from rsv_format.stored import Disk, Memory, Source, stored_bytes
from rsv_format.writer import LayerData, diagonal_entry, factor_entry

MAGIC = b"VQRS"
VERSION = 2
_BITS = (2, 3, 4)
_START = struct.Struct("<4sII")
_SECTIONS = ("index", "norms", "rotation", "centroids")
_HEADER = {"version": int, "layers": list} | {f"{section}_blob_nbytes": int for section in _SECTIONS}
_LAYER = {"name": str, "out_features": int, "in_features": int, "bits": int, "seed": int, "use_hadamard": bool,
          "has_bias": bool, "bias": (str, type(None))} | {
    f"{section}_{what}": int for section in _SECTIONS for what in ("offset", "nbytes")
}  # fmt: skip
# The first normal deviates of NumPy's generator for the seed 42, which the rotations that are not stored come from.
_STREAM = np.array([0.30471707975443135, -1.0399841062404955, 0.7504511958064572])
# MLX's Hadamard matrices are four by four circulant blocks, of which these are the first rows; that of order 12 is
# Paley's second construction from the squares modulo 5.
_BLOCKS = {
    20: "+---- +---- ++--+ +-++- -++++ +---- -+--+ ++--+ --++- +-++- +---- -++++ -+--+ --++- +---- +----",
    28: "+------ ++----+ +-+--+- +--++-- --++++- +------ -++--++ +-+--+- "
    "-+-++-+ +--++-- +------ --++++- -++--++ -+-++-+ ++----+ +------",
}


@dataclass(frozen=True)
class VqrsLayer:
    """What the header says of a layer."""

    name: str
    out_features: int
    in_features: int
    bits: int
    seed: int
    use_hadamard: bool
    bias: NDArray[np.float16] | None
    places: dict[str, tuple[int, int]]  # section -> offset in the file and bytes

    @property
    def is_derived(self) -> bool:
        """Whether its rotation is not stored."""
        return self.places["rotation"][1] == 0

    @property
    def has_signs(self) -> bool:
        """Whether its rotation is signs and a Hadamard matrix, as is that of order 1."""
        return self.use_hadamard or self.in_features == 1


class Reservoir:
    """A file of the peer's, checked from its magic to its length; numbers are read when they are asked for.

    Parameters
    ----------
    source
        As `rsv_format.open`, or the bytes of a file.
    max_order : int
        Of a matrix that may be derived or checked; several may take as long together as one of this order.

    Raises
    ------
    RsvError
        io_error, bad_magic, source_unsupported, source_invalid, over_limit.
    """

    def __init__(self, source: Source | Memory | Disk | Remote, *, max_order: int = USUAL_ORDER) -> None:
        self._stored: Memory | Disk | Remote = stored_bytes(source, mmap=False)
        start = bytes(self._stored.view(0, min(_START.size, self._stored.nbytes)))
        if start[:4] != MAGIC:
            raise RsvError("bad_magic", "magic", "not a VQRS file")
        _require(len(start) == _START.size, "file", "it ends within its first bytes")
        _, version, header_nbytes = _START.unpack(start)
        if version != VERSION:
            raise RsvError("source_unsupported", "version", f"VQRS version {version}; {VERSION} is read")
        most = min(MAX_HEADER_NBYTES, self._stored.nbytes - _START.size)
        _require(header_nbytes <= most, "header", f"{header_nbytes} bytes; {most} are there, or allowed")
        tree = _header(bytes(self._stored.view(_START.size, header_nbytes)))
        begins = _sections(tree, _START.size + header_nbytes, self._stored.nbytes)
        self.layers = _layers(tree["layers"], begins, tree)
        work = {self.transform_key(x): (1.0 if x.is_derived else 0.375) * x.in_features**3
                for x in self.layers if not x.use_hadamard}  # fmt: skip
        if sum(work.values()) > max_order**3:
            detail = f"its matrices take as long as one of order {int(np.ceil(sum(work.values()) ** (1 / 3)))}"
            raise RsvError("over_limit", "rotations", f"{detail}; max_order is {max_order}, and can be raised")

    def holes(self) -> int:
        """Bytes that were never written, of which the system knows."""
        return 0 if self._stored.disk is None else self._stored.disk.holes()

    def check_unchanged(self) -> None:
        """Raise RsvError `io_error` if a file on disk was written to since it was opened."""
        if self._stored.disk is not None:
            self._stored.disk.check_unchanged()

    def transform_key(self, layer: VqrsLayer) -> tuple[Any, ...]:
        """Equal for layers with the same transform."""
        if layer.is_derived:
            return layer.in_features, layer.seed
        return layer.in_features, layer.use_hadamard, hashlib.sha256(self._read(layer, "rotation")).digest()

    def codebook(self, layer: VqrsLayer) -> NDArray[np.float32]:
        """Centroids as the peer multiplies with them: rounded to float16. float32 (2**bits,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._floats(layer, "centroids").astype(np.float16).astype(np.float32)

    def transform_entry(self, layer: VqrsLayer) -> TransformEntry:
        """What an RSV header says of its transform."""
        n = layer.in_features
        if not layer.has_signs:
            return TransformEntry(n, 1, None, factor_entry("matrix", None))
        order = hadamard_order(n)
        factor = None if order == 1 else factor_entry("matrix", None)
        return TransformEntry(n, n // order, diagonal_entry("signs"), factor)

    def transform(self, layer: VqrsLayer) -> Transform:
        """Its transform; a matrix that is not stored is derived.

        Raises
        ------
        RsvError
            source_invalid; source_unsupported: this NumPy draws other numbers than the peer's.
        """
        n = layer.in_features
        numbers = _random_rotation(n, layer.seed) if layer.is_derived else self._floats(layer, "rotation")
        if not layer.has_signs:
            return Transform(n, 1, factor="matrix", stored=numbers.reshape(n, n))
        _require(bool((np.abs(numbers) == 1).all()), layer.name, "a sign is neither 1 nor -1")
        signs, order = np.packbits(numbers.reshape(-1) < 0, bitorder="little"), hadamard_order(n)
        if order == 1:
            return Transform(n, n, signs)
        return Transform(n, n // order, signs, factor="matrix", stored=mlx_hadamard(order))

    def layer(self, layer: VqrsLayer) -> LayerData:
        """Its codes, scales, codebook and bias, without the transform."""
        codes = np.frombuffer(self._read(layer, "index"), np.uint8).reshape(layer.out_features, layer.in_features)
        _require(int(codes.max()) < 2**layer.bits, layer.name, f"a code needs more than {layer.bits} bits")
        return LayerData(
            layer.name,
            layer.in_features,
            layer.bits,
            pack(codes, layer.bits),
            self._floats(layer, "norms"),
            self.codebook(layer),
            bias=layer.bias,
            bias_dtype=None if layer.bias is None else "f16",
        )

    def _read(self, layer: VqrsLayer, section: str) -> memoryview:
        return self._stored.view(*layer.places[section])

    def _floats(self, layer: VqrsLayer, section: str) -> NDArray[np.float32]:
        return np.frombuffer(self._read(layer, section), "<f4")


def hadamard_order(n: int) -> int:
    """The order of the part of MLX's Hadamard matrix of order n that is not a power of two; 0: there is no such."""
    odd = n // (n & -n)
    order = {1: 1, 3: 12, 5: 20, 7: 28}.get(odd, 0)
    return order if order and n % order == 0 else 0


def mlx_hadamard(order: int) -> NDArray[np.float32]:
    """MLX's Hadamard matrix of order 12, 20 or 28 over the root of the order, float32."""
    if order == 12:
        legendre = np.array([0, 1, -1, -1, 1])
        conference = np.ones((6, 6))
        conference[1:, 1:] = legendre[(np.arange(5) - np.arange(5)[:, None]) % 5]
        conference[0, 0] = 0
        signs = np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(6), [[1, -1], [-1, -1]])
    else:
        rows = [[1 if c == "+" else -1 for c in text] for text in _BLOCKS[order].split()]
        blocks = [np.stack([np.roll(row, k) for k in range(order // 4)]) for row in rows]
        signs = np.block([blocks[i : i + 4] for i in range(0, 16, 4)])
    return np.asarray(signs / np.sqrt(order), np.float32)


def _random_rotation(n: int, seed: int) -> NDArray[np.float32]:
    """The peer's rotation of a seed: Q as LAPACK leaves its signs."""
    if not np.array_equal(np.random.default_rng(42).standard_normal(3), _STREAM):
        raise RsvError("source_unsupported", "rotation", f"NumPy {np.__version__} draws other numbers")
    return np.asarray(np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n))).Q, np.float32)


def _require(condition: bool, where: str, detail: str) -> None:
    if not condition:
        raise RsvError("source_invalid", where, detail)


def _header(text: bytes) -> dict[str, Any]:
    try:
        tree = parse_json(text)
    except RsvError as e:
        raise RsvError("source_invalid", "header", f"{e.code}: {e.detail}") from None
    _fits(tree, _HEADER, "header")
    _require(tree["version"] == VERSION, "header", f"version {tree['version']}")
    _require(len(tree["layers"]) > 0, "header", "there are no layers")
    for i, layer in enumerate(tree["layers"]):
        _fits(layer, _LAYER, f"layers/{i}")
    return dict(tree)


def _fits(tree: Any, members: dict[str, Any], where: str) -> None:
    """An object with these members, of these types, and no others."""
    _require(isinstance(tree, dict) and tree.keys() == members.keys(), where, f"want {', '.join(members)}")
    for name, kind in members.items():
        _require(
            type(tree[name]) in (kind if isinstance(kind, tuple) else (kind,)), where, f"{name} is of another type"
        )
        _require(kind is not int or tree[name] >= 0, where, f"{name} is negative")


def _sections(tree: dict[str, Any], end: int, nbytes: int) -> dict[str, int]:
    """Where the sections begin: one after the other, to the end of the file."""
    begins = {}
    end = align(end, PAGE)
    for section in _SECTIONS:
        begins[section] = end
        end += tree[f"{section}_blob_nbytes"]
    _require(end == nbytes, "file", f"{nbytes} bytes, the header says {end}")
    return begins


def _layers(entries: list[dict[str, Any]], begins: dict[str, int], tree: dict[str, Any]) -> tuple[VqrsLayer, ...]:
    """Layers that follow one another without a gap in each section."""
    layers, names = [], set()
    ends = dict.fromkeys(_SECTIONS, 0)
    for entry in entries:
        name, rows, columns, bits = (entry[key] for key in ("name", "out_features", "in_features", "bits"))
        _require(0 < len(name) <= MAX_NAME and name.isprintable() and name not in names, name[:80] or "layer",
                 "no name, or one that is taken or too long")  # fmt: skip
        names.add(name)
        if bits not in _BITS:
            raise RsvError("source_unsupported", name, f"{bits} bits; VQRS has 2, 3 and 4")
        fit = 0 < rows <= MAX_OUT_FEATURES and 0 < columns <= MAX_IN_FEATURES
        _require(fit, name, f"{rows} rows of {columns} columns")
        if entry["use_hadamard"] and not hadamard_order(columns):
            raise RsvError("source_unsupported", name, f"MLX has no Hadamard matrix of order {columns}")
        rotation = (4 * columns,) if entry["use_hadamard"] else (0, 4 * columns * columns)
        sizes = {"index": (rows * columns,), "norms": (4 * rows,), "rotation": rotation, "centroids": (4 * 2**bits,)}
        places = {}
        for section, allowed in sizes.items():
            offset, nbytes = entry[f"{section}_offset"], entry[f"{section}_nbytes"]
            _require(nbytes in allowed, name, f"{section}_nbytes is {nbytes}, not {' or '.join(map(str, allowed))}")
            _require(offset == ends[section], name, f"{section}_offset is {offset}, not {ends[section]}")
            ends[section] = align(offset + nbytes, PAGE)
            places[section] = begins[section] + offset, nbytes
        bias = _bias(entry, rows)
        layers.append(VqrsLayer(name, rows, columns, bits, entry["seed"], entry["use_hadamard"], bias, places))
    for section in _SECTIONS:
        said = tree[f"{section}_blob_nbytes"]
        _require(said == ends[section], "header", f"{section}_blob_nbytes is {said}, not {ends[section]}")
    return tuple(layers)


def _bias(entry: dict[str, Any], rows: int) -> NDArray[np.float16] | None:
    text = entry["bias"]
    _require((text is not None) == entry["has_bias"], entry["name"], "bias and has_bias disagree")
    if text is None:
        return None
    _require(len(text) == 4 * rows and text.isascii() and text.isalnum(), entry["name"], f"its bias is not {rows} f16")
    try:
        return np.frombuffer(bytes.fromhex(text), "<f2")
    except ValueError:
        raise RsvError("source_invalid", entry["name"], "its bias is not hexadecimal") from None
