"""Damage with structure: a sound file's header tree, text, blobs or bytes are changed, then it is signed again.

All of it is decided by the random.Random that is passed in: the same seed gives the same file.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from typing import Any

from fuzz.jsontext import Blob, Members, Raw, Style
from fuzz.signing import align, owned, prologue, sign, split

INTEGERS = [
    0, 1, 2, 3, 4, 6, 8, 9, 16, 31, 32, 33, 64, 255, 256, 511, 512, 16384, 16385, 65535, 65536, 2**24, 2**24 + 1,
    2**31 - 1, 2**31, 2**32, 2**52, 2**53 - 1, 2**53, 2**63, 2**64, -1, -(2**53) + 1, -(2**53), 10**40,
]  # fmt: skip
TOKENS = [
    "1.0", "1e0", "1E2", "-0", "0.5", "1e400", "01", "+1", "NaN", "Infinity", "-Infinity", "'a'", "tru", ".5", "0x1",
    '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\x41"', '"\\u12"', '"a', "{", "]", "",
    '{"a":1,"\\u0061":2}', '{"":0,"":0}', "[1,]", "{,}", "/**/1", "null null", '"\t"', "99999999999999999999",
]  # fmt: skip
NAMES = [
    "", "a", "A", "é", "e\u0301", "\U0001f600", "\x7f", "\0", "a.weight", "a.bias", "../x", "a/b", "__proto__",
    "constructor", "n" * 512, "n" * 513, "\U0001f600" * 512, "\ud800", "toString", "con", " ",
]  # fmt: skip
WORDS = [
    "f32", "f16", "bf16", "f64", "bool", "u8", "i64", "signs", "values", "hartley", "matrix", "haar", "a/b",
    "application/json", "0" * 64, "F" * 64, "f" * 63,
]  # fmt: skip
FLOATS = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x3F800000, 0x7F7FFFFF, 0x7C007C00]
TABLES = ["codebooks", "transforms", "layers", "tensors", "attachments"]

Place = tuple[Any, int]  # a list or Members, and a position in it


def mutate(file: bytes, rng: random.Random, *, other: bytes | None = None) -> bytes:
    """A file made from a sound one; `other` is a second, whose entries may be taken."""
    if rng.random() < 0.08:
        return mutate_bytes(file, rng)
    tree = split(file)
    donor = split(other) if other else copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choices(*zip(*MUTATIONS, strict=True))[0](tree, rng, donor)
    style = Style(rng, rng.choice([0, 0, 0, 0.02, 0.3]))
    text = mutate_text(style.dump(tree), rng) if rng.random() < 0.1 else None
    data = sign(tree, style, text)
    return mutate_framing(data, rng) if rng.random() < 0.1 else data


# --- the tree --------------------------------------------------------------------------------------------------------


def places(tree: Any) -> list[Place]:
    """Where each value of a tree stands."""
    found: list[Place] = []
    queue = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, list):
            found += ((node, i) for i in range(len(node)))
            queue += [pair[1] for pair in node] if isinstance(node, Members) else node
    return found


def read(place: Place) -> Any:
    holder, i = place
    return holder[i][1] if isinstance(holder, Members) else holder[i]


def put(place: Place, value: Any) -> None:
    holder, i = place
    if isinstance(holder, Members):
        holder[i][1] = value
    else:
        holder[i] = value


def odd_value(rng: random.Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(INTEGERS)
    if kind == 1:
        return Raw(rng.choice(TOKENS))
    if kind == 2:
        return rng.choice([None, True, False, [], Members(), [[]], [0], ["a"]])
    if kind == 3:
        return rng.choice(NAMES)
    if kind == 4:
        return rng.choice(WORDS)
    if kind == 5:
        depth = rng.choice([5, 27, 28, 29, 30, 31, 32, 33, 5000])
        return Raw("[" * depth + "]" * depth) if rng.random() < 0.5 else Raw('{"a":' * depth + "0" + "}" * depth)
    return [rng.choice(INTEGERS) for _ in range(rng.randrange(10))]


def _somewhere(tree: Any, rng: random.Random) -> Place:
    return rng.choice(places(tree))


def replace(tree: Any, rng: random.Random, donor: Any) -> None:
    if places(tree):
        put(_somewhere(tree, rng), odd_value(rng))


def change_number(tree: Any, rng: random.Random, donor: Any) -> None:
    numbers = [place for place in places(tree) if type(read(place)) is int]
    if numbers:
        place = rng.choice(numbers)
        value = read(place)
        put(place, rng.choice([value + 1, value - 1, value * 2, value // 2, -value, rng.choice(INTEGERS)]))


def drop(tree: Any, rng: random.Random, donor: Any) -> None:
    if places(tree):
        holder, i = _somewhere(tree, rng)
        del holder[i]


def repeat(tree: Any, rng: random.Random, donor: Any) -> None:
    if places(tree):
        holder, i = _somewhere(tree, rng)
        holder.insert(rng.randint(0, len(holder)), copy.deepcopy(holder[i]))


def rename(tree: Any, rng: random.Random, donor: Any) -> None:
    """A member's name, or a string that may be a name."""
    found = [place for place in places(tree) if isinstance(place[0], Members) or isinstance(read(place), str)]
    if not found:
        return
    holder, i = rng.choice(found)
    name = rng.choice([*NAMES, *(str(pair[0]) for pair in holder if isinstance(holder, Members))])
    if isinstance(holder, Members) and rng.random() < 0.5:
        holder[i][0] = name
    else:
        put((holder, i), name)


def exchange(tree: Any, rng: random.Random, donor: Any) -> None:
    found = places(tree)
    if found:
        a, b = rng.choice(found), rng.choice(found)
        x, y = copy.deepcopy(read(a)), copy.deepcopy(read(b))
        put(a, y)
        put(b, x)


def shuffle(tree: Any, rng: random.Random, donor: Any) -> None:
    holders = [tree, *(value for value in map(read, places(tree)) if isinstance(value, list))]
    holder = rng.choice(holders)
    if isinstance(holder, list):
        rng.shuffle(holder)


def insert(tree: Any, rng: random.Random, donor: Any) -> None:
    """A new member or item anywhere."""
    holders = [tree, *(value for value in map(read, places(tree)) if isinstance(value, list))]
    holder = rng.choice(holders)
    if isinstance(holder, Members):
        holder.insert(rng.randint(0, len(holder)), [rng.choice([*NAMES, "requires", "sha256"]), odd_value(rng)])
    elif isinstance(holder, list):
        holder.insert(rng.randint(0, len(holder)), odd_value(rng))


def graft(tree: Any, rng: random.Random, donor: Any) -> None:
    """An entry of the donor, whole; a layer brings its codebook and transform."""
    name = rng.choice(TABLES[2:])
    table, given = _list(tree, name), _list(donor, name)
    if table is None or not given:
        return
    entry = copy.deepcopy(rng.choice(given))
    if isinstance(entry, Members):
        for member, kind in (("codebook", "codebooks"), ("transform", "transforms")):
            source, target, i = _list(donor, kind), _list(tree, kind), entry.get(member)
            if name == "layers" and source and target is not None and type(i) is int and 0 <= i < len(source):
                target.append(copy.deepcopy(source[i]))
                entry.set(member, len(target) - 1)
        if rng.random() < 0.8:
            entry.set("name", f"{entry.get('name')}{rng.randrange(100)}"[:512])
    table.append(entry)


def reshape(tree: Any, rng: random.Random, donor: Any) -> None:
    """Other lengths that still fit together, so that the file remains sound but for what its blobs hold."""
    layers = [x for x in _list(tree, "layers") or [] if isinstance(x, Members)]
    if not layers:
        return
    layer = rng.choice(layers)
    member = rng.choice(["in_features", "out_features", "stack", "bias"])
    if member == "bias":
        layer.set("bias", rng.choice([None, "f32", "f16", "bf16"]))
    elif member == "in_features":
        n, m = rng.choice([1, 1, 2, 4, 32]), rng.choice([1, 2, 3, 5, 17, 31, 33])
        layer.set("in_features", n * m)
        transforms, i = _list(tree, "transforms") or [], layer.get("transform")
        if type(i) is int and 0 <= i < len(transforms) and isinstance(transforms[i], Members):
            transforms[i].set("dim", n * m)
            transforms[i].set("hadamard", n)
    else:
        layer.set(member, rng.choice([1, 2, 3, 17]))


def rewindow(tree: Any, rng: random.Random, donor: Any) -> None:
    """A window: out of range, below its bits, for a table of another size, or wider than a row that uses it."""
    books = [x for x in _list(tree, "codebooks") or [] if isinstance(x, Members)]
    if not books:
        return
    book, kind = rng.choice(books), rng.randrange(4)
    if kind == 0:
        book.set("window", rng.choice([0, 17, 32, 64, 2**32, 2**53 - 1, -1, None, True, "8"]))
    elif kind == 1:
        book.set("bits", rng.randint(1, 8))
        book.set("window", rng.randint(1, 8))
    elif kind == 2:  # the table follows, mostly: see signing.fit
        book.set("window", rng.randint(1, 16))
        if isinstance(book.get("sha256"), Blob) and rng.random() < 0.3:
            blob = book.get("sha256")
            blob.stated = blob.digest()
    else:
        book.set("window", rng.choice([12, 15, 16]))
        for layer in _list(tree, "layers") or []:
            if isinstance(layer, Members) and rng.random() < 0.7:
                layer.set("in_features", rng.randint(1, 5))
                layer.set("transform", None)


def enlarge(tree: Any, rng: random.Random, donor: Any) -> None:
    """Lengths each of which is legal; their products or sums may exceed 2^53 - 1 (RSV-503)."""
    kind = rng.randrange(4)
    transforms, layers, tensors, attachments = (_list(tree, name) or [] for name in TABLES[1:])
    if kind == 0 and layers and isinstance(layers[0], Members):
        transforms.clear()
        for layer in layers:
            if isinstance(layer, Members):
                layer.set("transform", None)
        for member, largest in (("in_features", 2**24), ("out_features", 2**31 - 1), ("stack", 65535)):
            layers[0].set(member, rng.choice([1, 3, largest - 1, largest]))
    elif kind == 1 and tensors and isinstance(tensors[0], Members):
        lengths = [0, 1, 3, 2**20, 2**31, 2**50, 2**53 - 1]
        tensors[0].set("shape", [rng.choice(lengths) for _ in range(rng.randint(1, 8))])
    elif kind == 2 and transforms and isinstance(transforms[0], Members):
        transforms[0].set("dim", rng.choice([2**15, 2**24]))
    elif attachments:
        attachments[:] = [copy.deepcopy(attachments[0]) for _ in range(rng.randint(1, 5))]
        for i, attachment in enumerate(attachments):
            if isinstance(attachment, Members):
                attachment.set("name", f"a{i}")
                attachment.set("nbytes", 2 ** rng.randint(46, 53) - rng.choice([1, 64, 16384]))


def point(tree: Any, rng: random.Random, donor: Any) -> None:
    """Another codebook or transform."""
    layers = [x for x in _list(tree, "layers") or [] if isinstance(x, Members)]
    if layers:
        rng.choice(layers).set(rng.choice(["codebook", "transform"]), rng.choice([0, 1, 2, 2**32, 2**53 - 1, None]))


def damage_blob(tree: Any, rng: random.Random, donor: Any) -> None:
    """The bytes of a blob; mostly its digest follows."""
    blobs = [blob for blob, _ in owned(tree) if blob.data]
    if not blobs:
        return
    blob = rng.choice(blobs)
    data = bytearray(blob.data)
    if rng.random() < 0.2:
        blob.stated = blob.digest() if rng.random() < 0.7 else "0" * 64
    at = rng.randrange(len(data))
    kind = rng.randrange(5)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and len(data) >= 4:
        struct.pack_into("<I", data, rng.randrange(len(data) // 4) * 4, rng.choice(FLOATS))
    elif kind == 2:
        data[at : at + 16] = rng.randbytes(len(data[at : at + 16]))
    elif kind == 3:
        data[:] = rng.randbytes(len(data))
    else:
        data[:] = bytes(len(data))
    blob.data = bytes(data)


MUTATIONS: list[tuple[Callable[[Any, random.Random, Any], None], int]] = [
    (replace, 3), (change_number, 2), (drop, 1), (repeat, 2), (rename, 2), (exchange, 2), (shuffle, 1), (insert, 1),
    (graft, 3), (reshape, 4), (rewindow, 3), (enlarge, 1), (point, 1), (damage_blob, 5),
]  # fmt: skip


def _list(tree: Any, name: str) -> list[Any] | None:
    table = tree.get(name) if isinstance(tree, Members) else None
    return table if type(table) is list else None


# --- text, framing, bytes --------------------------------------------------------------------------------------------


def mutate_text(text: bytes, rng: random.Random) -> bytes:
    """JSON text that need not be JSON, or UTF-8, afterwards."""
    data = bytearray(text)
    at = rng.randrange(len(data) + 1)
    stop = min(len(data), at + rng.randrange(8))
    tokens = [token.encode() for token in TOKENS]
    odd = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\0", b"\\", b'"', b",", b" "]
    kind = rng.randrange(4)
    if kind == 0:
        data[at:stop] = b""
    elif kind == 1:
        data[at:at] = rng.choice(odd + tokens)
    elif kind == 2:
        data[at:stop] = rng.choice(odd + tokens)
    else:
        data[at:at] = data[stop : stop + rng.randrange(64)]
    return bytes(data)


def mutate_framing(file: bytes, rng: random.Random) -> bytes:
    """Prologue, padding, length."""
    nbytes = struct.unpack_from("<Q", file, 16)[0]
    text = file[64 : 64 + nbytes]
    kind = rng.randrange(5)
    if kind == 0:
        odd = rng.choice(INTEGERS)
        field, bits = rng.choice(
            [("major", 16), ("minor", 16), ("flags", 32), ("header_nbytes", 64), ("file_nbytes", 64)]
        )
        return prologue(text, len(file), **{field: odd % 2**bits}) + file[64:]
    if kind == 1:
        file = file[: rng.randrange(len(file))]
        return prologue(text, len(file)) + file[64:] if rng.random() < 0.7 and len(file) >= 64 else file
    if kind == 2:
        file += bytes(rng.choice([1, 64, 16384]))
        return prologue(text, len(file)) + file[64:] if rng.random() < 0.7 else file
    data = bytearray(file)
    data[rng.randrange(64 + nbytes if kind == 3 else 64, len(data) + 1) - 1] ^= 1 << rng.randrange(8)
    return bytes(data)


def mutate_bytes(file: bytes, rng: random.Random) -> bytes:
    """Bytes at random, the more the nearer to the start; the header's digest follows, or not."""
    data = bytearray(file)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(rng.choice([64, min(len(data), 2048), len(data)]))
        data[at : at + rng.randrange(5)] = rng.randbytes(rng.randrange(5))
    nbytes = struct.unpack_from("<Q", file, 16)[0]
    if rng.random() < 0.5 and len(data) > align(64 + nbytes, 64):
        text = bytes(data[64 : 64 + nbytes])
        return prologue(text, len(data)) + bytes(data[64:])
    return bytes(data)
