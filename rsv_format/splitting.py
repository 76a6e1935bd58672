"""A content in other files: `split` into shards, `merge` into one (SPEC section 12.1). Blobs are copied as they are."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from rsv_format.canonical import arrange
from rsv_format.errors import RsvError
from rsv_format.header import Header, build_header, parse_header, replace
from rsv_format.layout import align, build_prologue
from rsv_format.limits import CELL, MAX_HEADER_NBYTES, MAX_SHARDS, PAGE, PROLOGUE_NBYTES, USUAL_HOLES
from rsv_format.outputs import Output, commit, folder, write_all
from rsv_format.reader import File, content_key
from rsv_format.reader import open as open_file
from rsv_format.sets import EXTENSION, Membership, joined_header, set_id, shard_name
from rsv_format.validate import Blob, walk
from rsv_format.writer import RSV_FILE

StrPath = str | os.PathLike[str]
Progress = Callable[[int, int, str], None]
_ENTRY_NBYTES = 512  # of the header, at most, beside the name and the place in its file


def split(
    source: StrPath,
    out: StrPath,
    shard_size: int,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Spread a file's content over shards: all of them come into place, or none.

    Parameters
    ----------
    source : path
        Of a file, or of a set, which is then spread anew.
    out : path
        As of one file, "model.rsv": its shards are "model-00001-of-00003.rsv" and so on. Their folder is made.
    shard_size : int
        Bytes that a shard has at most, unless it holds a single layer or tensor, or, the first one, attachments.
    force : bool
        As `Writer`.
    progress : callable(done, total, name), optional
        Told the bytes done so far and in all, and the blob at work.

    Returns
    -------
    list of str
        The paths of the shards.

    Raises
    ------
    RsvError
        bad_argument: the size is not positive, or there would be more than 99999 shards, or something that may not
        be replaced is at a path; blob_digest_mismatch; io_error; what `open` raises. SPEC section 12.1.
    """
    with open_file(source) as mapped:
        return spread(mapped.unmapped(), out, shard_size, force=force, progress=progress)


def spread(
    file: File,
    out: StrPath,
    shard_size: int,
    *,
    inputs: Iterable[StrPath] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """As `split`, of an open file that is not mapped; it and `inputs` are never replaced."""
    inputs = [*file.paths, *inputs]
    whole = arrange(joined_header([_without_membership(file.header)]))
    parts = _parts(whole, shard_size)
    id = set_id(whole)
    headers = [
        replace(part, extensions={**part.extensions, EXTENSION: Membership(id, len(parts), i).extension})
        for i, part in enumerate(parts)
    ]
    names = _names(out, len(parts))
    with folder(os.path.dirname(names[0])):
        _write_all(file, [Output(name, RSV_FILE, inputs=inputs, force=force) for name in names], headers, progress)
    return names


def shard_paths(header: Header, out: StrPath, shard_size: int) -> list[str]:
    """Where the shards of a content will be, of whose header no digest need be known yet; bad_argument as `split`."""
    return _names(out, len(_parts(arrange(header), shard_size)))


def _names(out: StrPath, count: int) -> list[str]:
    return [shard_name(os.fspath(out), count, i) for i in range(count)]


def merge(source: StrPath, out: StrPath, *, force: bool = False, progress: Progress | None = None) -> None:
    """Put the shards of a set into one file, canonically: the one that was split, if that was canonical.

    Parameters
    ----------
    source : path
        Of a shard, whichever, or a pattern of all their paths.
    out, force, progress
        As `split`; `out` is the path of the one file.

    Raises
    ------
    RsvError
        bad_argument: what is at the path may not be replaced; blob_digest_mismatch; io_error; what `open` raises.
    """
    with open_file(source) as mapped:
        file = mapped.unmapped()
        whole = arrange(joined_header([_without_membership(file.header)]))
        _write_all(file, [Output(out, RSV_FILE, inputs=file.paths, force=force)], [whole], progress)


def _without_membership(header: Header) -> Header:
    return replace(header, extensions={key: x for key, x in header.extensions.items() if key != EXTENSION})


def _parts(whole: Header, shard_size: int) -> list[Header]:
    """Headers of the shards, but for what they say of the set: as much in each as there is room for."""
    if shard_size < 1:
        raise RsvError("bad_argument", "shard_size", f"{shard_size} bytes are no size")
    bare = replace(whole, codebooks=(), transforms=(), layers=(), tensors=(), attachments=())
    rest = replace(bare, extensions={})
    sizes = {(blob.kind, blob.index): 0 for blob in walk(whole, 0)[0]}
    for blob in walk(whole, 0)[0]:
        sizes[blob.kind, blob.index] += align(blob.nbytes, CELL) + _ENTRY_NBYTES + 6 * len(blob.name)
    attached = sum(nbytes for (kind, _), nbytes in sizes.items() if kind == "attachment")
    empty = PAGE + PROLOGUE_NBYTES + _ENTRY_NBYTES
    room = [empty + len(build_header(bare)) + attached, empty + len(build_header(rest))]  # of the first, of others
    shards: list[tuple[list[int], list[int]]] = [([], [])]
    tables: set[tuple[str, int]] = set()
    used = room[0]
    items = [("layer", i) for i in range(len(whole.layers))] + [("tensor", i) for i in range(len(whole.tensors))]
    for kind, i in items:
        needed = {("codebook", whole.layers[i].codebook)} if kind == "layer" else set()
        if kind == "layer" and (transform := whole.layers[i].transform) is not None:
            needed |= {("diagonal", transform), ("factor", transform)}
        more = sizes[kind, i] + sum(sizes.get(key, _ENTRY_NBYTES) for key in needed - tables)
        if used + more > shard_size and any(shards[-1]):
            shards.append(([], []))
            tables, used = set(), room[1]
            more = sizes[kind, i] + sum(sizes.get(key, _ENTRY_NBYTES) for key in needed)
        shards[-1][kind == "tensor"].append(i)
        tables |= needed
        used += more
    if len(shards) > MAX_SHARDS:
        raise RsvError("bad_argument", "shard_size", f"{len(shards)} shards, and {MAX_SHARDS} are the most")
    return [
        arrange(
            replace(
                whole if number == 0 else replace(whole, attachments=(), extensions={}),
                layers=tuple(whole.layers[i] for i in layers),
                tensors=tuple(whole.tensors[i] for i in tensors),
            )
        )
        for number, (layers, tensors) in enumerate(shards)
    ]


def _write_all(file: File, outputs: Sequence[Output], headers: Sequence[Header], progress: Progress | None) -> None:
    """Write files of these headers, and bring all of them into place."""
    file.check_holes(USUAL_HOLES)
    told = progress or (lambda done, total, name: None)
    where = {content_key(blob): blob for blob in file.blobs}
    laid = [_laid_out(output.path, header) for output, header in zip(outputs, headers, strict=True)]
    rest = sum(nbytes for _, _, nbytes in laid)
    done = 0
    with contextlib.ExitStack() as stack:
        for output, (text, blobs, nbytes) in zip(outputs, laid, strict=True):
            stack.callback(output.discard)
            rest -= nbytes
            try:
                out = output.open(nbytes, beside=rest)
                write_all(out, build_prologue(text, nbytes) + text)
                for blob in blobs:
                    told(min(done, file.nbytes), file.nbytes, blob.name)
                    out.seek(blob.offset)
                    for piece in _checked(file, where[content_key(blob)]):
                        write_all(out, piece)
                    done += blob.nbytes
            except OSError as e:
                raise RsvError("io_error", output.path, e.strerror or str(e)) from e
        file.check_unchanged()
        commit(*outputs)
    told(file.nbytes, file.nbytes, "")


def _laid_out(path: str, header: Header) -> tuple[bytes, list[Blob], int]:
    """A header's text, its blobs, and the length of its file."""
    text = build_header(header)
    if len(text) > MAX_HEADER_NBYTES:
        raise RsvError("header_too_large", path, f"{len(text)} bytes, the limit is {MAX_HEADER_NBYTES}")
    parse_header(text)
    return text, *walk(header, len(text))


def _checked(file: File, blob: Blob) -> Iterator[memoryview]:
    """A blob's bytes, some at a time."""
    digest = hashlib.sha256()
    for piece in file.pieces(blob.offset, "u8", blob.nbytes):
        digest.update(piece.data)
        yield piece.data
    if digest.hexdigest() != blob.sha256:
        detail = "the bytes are not those that were written"
        raise RsvError("blob_digest_mismatch", f"{blob.kind} {blob.name}", detail)
