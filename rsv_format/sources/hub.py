"""Models of the Hugging Face hub: downloaded into the hub's own cache, then read as a folder."""

from __future__ import annotations

import re
from pathlib import Path

from rsv_format.errors import RsvError
from rsv_format.sources.base import library
from rsv_format.sources.safetensors import ATTACHMENTS, INDEX

_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


def is_repository(spec: str) -> bool:
    """Whether a string has the form owner/name."""
    return _REPOSITORY.fullmatch(spec) is not None and ".." not in spec


def download(spec: str) -> Path:
    """Fetch what a source needs of a repository and return its folder.

    Raises
    ------
    RsvError
        `io_error` when the hub cannot be reached or has no such repository; `source_unsupported` when
        huggingface_hub is not installed.
    """
    hub = library("huggingface_hub", spec)
    patterns = ["*.safetensors", INDEX, "config.json", *ATTACHMENTS]
    try:
        return Path(hub.snapshot_download(spec, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors, and those of the HTTP client below it
        raise RsvError("io_error", spec, f"could not be downloaded: {type(error).__name__}: {error}") from error
