"""Sets of shards: one content in several files (SPEC section 12.1)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rsv_format.canonical import arrange
from rsv_format.errors import RsvError
from rsv_format.header import Header, build_header, parse_header, replace
from rsv_format.limits import MAX_HEADER_NBYTES, MAX_SHARDS
from rsv_format.validate import check_references, walk

EXTENSION = "set"
_ID = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(?s)((?:.*/)?[^/]+-)([0-9]{5})-of-([0-9]{5})\.rsv")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Membership:
    """What a shard says of itself."""

    id: str  # of the set
    count: int
    position: int

    @property
    def extension(self) -> dict[str, Any]:
        """As it stands in the header."""
        return {"id": self.id, "count": self.count, "position": self.position}

    def __str__(self) -> str:
        return f"shard {self.position + 1} of {self.count}"


def membership(header: Header) -> Membership | None:
    """What a header says of a set; None if that is nothing.

    Raises
    ------
    RsvError
        foreign_shard: what it says has not the form of RSV-910.
    """
    if EXTENSION not in header.extensions:
        return None
    match header.extensions[EXTENSION]:
        case {"id": str(id), "count": int(count), "position": int(position), **rest} if (
            not rest
            and _ID.fullmatch(id)
            and bool not in (type(count), type(position))
            and 0 <= position < count <= MAX_SHARDS
        ):
            return Membership(id, count, position)
    detail = "it is not an id of 64 hexadecimal digits, a count and a position below it, and nothing else"
    raise RsvError("foreign_shard", f"/extensions/{EXTENSION}", detail)


def shard_name(path: str, count: int, position: int) -> str:
    """The path of a shard of what would be at a path: "a/model.rsv" -> "a/model-00002-of-00003.rsv" (RSV-911)."""
    return f"{path.removesuffix('.rsv')}-{position + 1:05d}-of-{count:05d}.rsv"


def sibling_names(path: str, member: Membership) -> list[str]:
    """The paths of all shards of a set, by that of one.

    Raises
    ------
    RsvError
        foreign_shard: the path is not that of this shard, or tells nothing of the others (RSV-911).
    """
    _check_name(path, member)
    if member.count == 1:
        return [path]
    name = _NAME.fullmatch(path)
    if name is None:
        detail = f"it is {member}: the others are found if it is named NAME-{member.position + 1:05d}-of-"
        raise RsvError("foreign_shard", path, f"{detail}{member.count:05d}.rsv (alone=True opens it by itself)")
    return [f"{name[1]}{i + 1:05d}-of-{name[3]}.rsv" for i in range(member.count)]


def _check_name(path: str, member: Membership) -> None:
    """Refuse a shard whose name tells another position or count than it does (RSV-912)."""
    name = _NAME.fullmatch(path)
    if name is not None and (int(name[2]) - 1, int(name[3])) != (member.position, member.count):
        raise RsvError("foreign_shard", path, f"its header says that it is {member}")


def _member(name: str, header: Header) -> Membership:
    """What a file says of a set, under its name."""
    try:
        member = membership(header)
    except RsvError as e:
        raise RsvError(e.code, f"{name}, {e.where}", e.detail) from None
    if member is None:
        raise RsvError("foreign_shard", name, "it does not say that it is a shard of a set")
    _check_name(name, member)
    return member


def check_members(names: Sequence[str], headers: Sequence[Header]) -> list[int]:
    """Where the shards of a set are among files, by position.

    Raises
    ------
    RsvError
        foreign_shard: a file that is no shard, of another set, named as another one, or at a position that is taken;
        missing_shard.
    """
    members = [_member(name, header) for name, header in zip(names, headers, strict=True)]
    first, places = members[0], dict[int, int]()
    for i, (name, member) in enumerate(zip(names, members, strict=True)):
        if (member.id, member.count) != (first.id, first.count):
            detail = f"it is {member} of the set {member.id[:16]}..., not of {first.id[:16]}... as {names[0]}"
            raise RsvError("foreign_shard", name, detail)
        if member.position in places:
            raise RsvError("foreign_shard", name, f"it is {member}, and so is {names[places[member.position]]}")
        places[member.position] = i
    missing = [i for i in range(first.count) if i not in places]
    if missing:
        named = sibling_names(names[0], first) if _NAME.fullmatch(names[0]) else None
        few = ", ".join(named[i] if named else str(i + 1) for i in missing[:10]) + ", ..." * (len(missing) > 10)
        where = named[missing[0]] if named else names[0]
        raise RsvError("missing_shard", where, f"{len(missing)} of {first.count} shards are not there: {few}")
    return [places[i] for i in range(first.count)]


def joined_header(headers: Sequence[Header]) -> Header:
    """The header of the whole content: entries in the order of the shards, equal codebooks and transforms once.

    Raises
    ------
    RsvError
        set_mismatch: the files have other metadata each, attachments or extensions beyond the first, or a name
        twice.
    """
    first, *others = headers
    for i, header in enumerate(others, 2):
        if header.metadata != first.metadata:
            raise RsvError("set_mismatch", f"shard {i}", "its metadata is not that of the first")
        if header.attachments or header.extensions.keys() - {EXTENSION}:
            raise RsvError("set_mismatch", f"shard {i}", "attachments and extensions are the first shard's")
    codebooks = _once(entry for header in headers for entry in header.codebooks)
    transforms = _once(entry for header in headers for entry in header.transforms)
    whole = Header(
        tuple(codebooks),
        tuple(transforms),
        tuple(
            replace(
                layer,
                codebook=codebooks[header.codebooks[layer.codebook]],
                transform=None if layer.transform is None else transforms[header.transforms[layer.transform]],
            )
            for header in headers
            for layer in header.layers
        ),
        tuple(tensor for header in headers for tensor in header.tensors),
        first.attachments,
        first.metadata,
        tuple(sorted({feature for header in headers for feature in header.requires})),
        {key: value for key, value in first.extensions.items() if key != EXTENSION},
    )
    try:
        check_references(whole)
    except RsvError as e:
        raise RsvError("set_mismatch", e.where, e.detail) from None
    return whole


def set_id(whole: Header) -> str:
    """The id of the sets that hold a content: the SHA-256 of the header that it has in one canonical file.

    Raises
    ------
    RsvError
        set_mismatch: one file cannot hold it (RSV-914).
    """
    text = build_header(arrange(whole))
    try:
        if len(text) > MAX_HEADER_NBYTES:
            raise RsvError("header_too_large", "header", f"{len(text)} bytes, the limit is {MAX_HEADER_NBYTES}")
        walk(parse_header(text), len(text))
    except RsvError as e:
        raise RsvError("set_mismatch", "set", f"one file cannot hold what its shards do: {e}") from None
    return hashlib.sha256(text).hexdigest()


def check_id(whole: Header, member: Membership) -> None:
    """Refuse shards that are not those of their set.

    Raises
    ------
    RsvError
        set_mismatch
    """
    if set_id(whole) != member.id:
        raise RsvError("set_mismatch", "set", "what the shards hold together is not what their id stands for")


def _once(entries: Iterable[_T]) -> dict[_T, int]:
    """Different entries in the order in which they come, and the position of each."""
    return {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
