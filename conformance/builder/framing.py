"""Files that break the framing: the prologue and the lengths (SPEC section 2)."""

from __future__ import annotations

import hashlib

from recipe import part

from builder import valid
from builder.cases import Cases
from builder.doc import Doc, prologue_bytes
from builder.fault import add
from builder.kernel import align


def all_cases(cases: Cases) -> None:
    doc = valid.spec_example()
    good = doc.render()
    text = doc.text()

    for n in (0, 1, 8, 63):
        add(cases, f"file-of-{n}-bytes", "file_too_short", "RSV-101", good[:n], f"cut to {n} bytes", flags=["edge"])
    for id, magic, what in (
        ("magic-first-byte", b"\x09RSV\r\n\x1a\n", "bit 7 lost, as a 7-bit channel does"),
        ("magic-lowercase", b"\x89rsv\r\n\x1a\n", "lower case"),
        ("magic-last-byte", b"\x89RSV\r\n\x1a\r", "the last byte"),
        ("magic-png", b"\x89PNG\r\n\x1a\n", "that of PNG"),
        ("magic-zero", bytes(8), "zeros"),
    ):
        add(cases, id, "bad_magic", "RSV-102", magic + good[8:], f"magic: {what}")
    for major in (0, 2, 256, 65535):
        data = doc.render(version_major=major)
        add(cases, f"major-version-{major}", "unsupported_version", "RSV-103", data, f"version_major {major}")
    for bit in (0, 7, 8, 31):
        add(cases, f"flag-{bit}", "reserved_flags", "RSV-104", doc.render(flags=1 << bit), f"flag bit {bit} set")
    for id, n in (
        ("64-mib-and-1", 2**26 + 1),
        ("2-32", 2**32 + len(text)),
        ("2-53", 2**53),
        ("2-63", 2**63),
        ("2-64-minus-1", 2**64 - 1),
        ("2-64-minus-64", 2**64 - 64),
    ):
        add(
            cases,
            f"header-nbytes-{id}",
            "header_too_large",
            "RSV-105",
            doc.render(header_nbytes=n),
            f"header_nbytes is {n}",
            flags=["bomb"],
        )
    whole = text + b" " * (2**26 + 1 - len(text))
    head = prologue_bytes(whole, file_nbytes=align(64 + len(whole), 16384))
    recipe = [part(head + text), part(b" ", 2**26 + 1 - len(text))]
    recipe.append(part(b"\0", align(64 + len(whole), 16384) - 64 - len(whole)))
    add(
        cases,
        "header-really-64-mib-and-1",
        "header_too_large",
        "RSV-105",
        None,
        "a header that is there, signed, and one byte too long",
        flags=["linked"],
        recipe=recipe,
    )
    for n in (64, 65, 4096, len(good) - 1):
        add(cases, f"truncated-to-{n}", "file_truncated", "RSV-106", good[:n], f"cut to {n} bytes")
    for id, n in (
        ("plus-1", 16385),
        ("page-more", 32768),
        ("2-32", 2**32 + 16384),
        ("2-53", 2**53),
        ("2-63", 2**63),
        ("2-64-minus-1", 2**64 - 1),
    ):
        add(
            cases,
            f"file-nbytes-{id}",
            "file_truncated",
            "RSV-106",
            doc.render(file_nbytes=n),
            f"file_nbytes is {n}",
            flags=["bomb"] if n > 2**31 else [],
        )
    add(cases, "trailing-zero", "trailing_bytes", "RSV-107", good + b"\0", "a zero byte appended")
    add(cases, "trailing-newline", "trailing_bytes", "RSV-107", good + b"\n", "a line feed appended")
    add(cases, "trailing-page", "trailing_bytes", "RSV-107", good + bytes(16384), "a page of zeros appended")
    for n in (0, 63, 64, 16383):
        add(cases, f"file-nbytes-{n}", "trailing_bytes", "RSV-107", doc.render(file_nbytes=n), f"file_nbytes is {n}")
    for id, n in (("file", 16384), ("room-plus-1", 16384 - 63), ("64-mib", 2**26)):
        add(
            cases,
            f"header-nbytes-{id}",
            "header_out_of_bounds",
            "RSV-108",
            doc.render(header_nbytes=n),
            f"header_nbytes is {n}",
            flags=["edge"] if id != "file" else [],
        )
    short = Doc().text()
    n = 64 + len(short)
    assert n % 64
    add(
        cases,
        "header-cell-cut",
        "header_out_of_bounds",
        "RSV-108",
        prologue_bytes(short, file_nbytes=n) + short,
        "the file ends with the header, in the middle of a cell",
        base="empty",
        flags=["edge", "linked"],
    )
    for byte in (32, 63):
        data = bytearray(good)
        data[byte] ^= 1
        add(
            cases,
            f"header-digest-byte-{byte - 32}",
            "header_digest_mismatch",
            "RSV-109",
            bytes(data),
            f"a bit of byte {byte - 32} of header_sha256",
        )
    add(
        cases,
        "minor-not-signed",
        "header_digest_mismatch",
        "RSV-109",
        good[:10] + b"\1\0" + good[12:],
        "version_minor, not signed",
    )
    add(
        cases,
        "header-byte",
        "header_digest_mismatch",
        "RSV-109",
        good.replace(b'"mlp.up"', b'"mlp.uq"'),
        "a byte of the header, not signed",
    )
    add(
        cases,
        "header-digest-zero",
        "header_digest_mismatch",
        "RSV-109",
        good[:32] + bytes(32) + good[64:],
        "header_sha256 is zero",
    )
    add(
        cases,
        "header-digest-of-cell",
        "header_digest_mismatch",
        "RSV-109",
        good[:32] + hashlib.sha256(good[:32] + good[64 : align(64 + len(text), 64)]).digest() + good[64:],
        "header_sha256 is that of header and padding",
    )
    end = 64 + len(text)
    for id, byte in (("first", end), ("last", align(end, 64) - 1)):
        data = bytearray(good)
        data[byte] = 0x20
        add(
            cases,
            f"header-padding-{id}",
            "header_padding_nonzero",
            "RSV-110",
            bytes(data),
            f"the {id} byte of the header's padding is a space",
        )
