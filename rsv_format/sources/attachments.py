"""The files beside the weights: those that a tokenizer or a processor is made of are attached, others named.

What is code, lies in a folder or has a name that an attachment cannot have is left out and told; what is of no use to
a model, such as its README, is left out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from rsv_format.sources.base import json_attachment, read_bytes, reading

Attachments = dict[str, tuple[str, bytes]]

ATTACHED = {
    "*tokenizer*.json": "application/json",
    "*vocab*.json": "application/json",
    "*processor*.json": "application/json",
    "*.jinja": "text/plain",
    "*.model": "application/octet-stream",  # SentencePiece's and tiktoken's, under any name
    "*.spm": "application/octet-stream",
    "*.tiktoken": "text/plain",
    "*merges*.txt": "text/plain",
    "*vocab*.txt": "text/plain",
    "vocab.bpe": "text/plain",
    "bpe.codes": "text/plain",
    "dict.txt": "text/plain",
    **dict.fromkeys(
        ("added_tokens.json", "chat_template.json", "encoder.json", "generation_config.json", "normalizer.json",
         "special_tokens_map.json", "tekken.json"), "application/json"),
}  # fmt: skip
TEMPLATES = "additional_chat_templates"
# told where they are left out: code, other forms of a tokenizer, adapters, what sentence-transformers adds
_TOLD = ("*.py", "*token*", "*vocab*", "adapter*", "modules.json", "*sentence_*.json")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")  # SPEC section 9


def beside(
    folder: Path, config: dict[str, Any], names: Container[str] | None = None
) -> tuple[Attachments, tuple[str, ...]]:
    """The attachments of a model's folder, its config as given, and the files that are left out.

    Where `names` is given, no others are read.

    Raises
    ------
    RsvError
        `io_error`; `source_invalid` for a pointer of Git LFS.
    """
    attachments: Attachments = {"config.json": json_attachment(config)}
    taken, left_out = {"config.json"}, []
    with reading(str(folder)):
        files = sorted(path for path in [*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*")] if path.is_file())
    for path in files:
        name = path.relative_to(folder).as_posix()
        if names is not None and name not in names:
            continue
        kind = next((kind for pattern, kind in ATTACHED.items() if fnmatch.fnmatchcase(path.name, pattern)), None)
        if kind is not None and "/" not in name and _NAME.fullmatch(name) and name.lower() not in taken:
            attachments[name] = kind, read_bytes(path)
            taken.add(name.lower())
        elif kind is not None or any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _TOLD):
            left_out.append(name)
    return attachments, tuple(left_out)
