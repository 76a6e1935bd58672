"""Models of the Hugging Face hub: downloaded into the hub's own cache, then read as a folder."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from rsv_format.errors import RsvError, is_out_of_memory
from rsv_format.sources.attachments import ATTACHED
from rsv_format.sources.base import library

_SECONDS = 10  # to wait for an answer, twice
_FILES = (".gguf", ".safetensors", ".rsv", ".json", ".bin")  # repositories are not called so
_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*(@[A-Za-z0-9_][A-Za-z0-9._/-]*)?")


def is_repository(spec: str) -> bool:
    """Whether a string has the form owner/name or owner/name@revision."""
    return _REPOSITORY.fullmatch(spec) is not None and ".." not in spec


def download(spec: str) -> tuple[str, Path]:
    """Fetch what a source needs of a repository, at a revision or as it is now; its name, and its folder, whose own
    name is the commit.

    Raises
    ------
    RsvError
        `io_error` when the hub cannot be reached or has no such repository, or the string looks like a path;
        `missing_dependency` when huggingface_hub is not installed.
    """
    spec, _, revision = spec.partition("@")
    owner, name = spec.split("/")
    if Path(owner).exists() or name.lower().endswith(_FILES):
        raise RsvError("io_error", spec, "no such file or folder")
    hub = library("huggingface_hub", spec)
    wanted = {"allow_patterns": ["*.safetensors", "*.json", *ATTACHED], "ignore_patterns": ["*/*"]}
    try:
        return spec, Path(hub.snapshot_download(spec, revision=_asked(hub, spec, revision), **wanted))
    except Exception as error:  # the hub's own errors, and those of the HTTP client below it
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            reason = f"the hub does not answer within {_SECONDS} s"
        if not isinstance(error, hub.errors.HfHubHTTPError):  # which is an answer
            with contextlib.suppress(Exception):
                kept = hub.snapshot_download(spec, revision=revision or None, local_files_only=True, **wanted)
                return spec, Path(kept)
        detail = f"no such file or folder, nor could it be downloaded as a model of the Hugging Face hub: {reason}"
        raise RsvError("io_error", spec, detail) from error


def _asked(hub: Any, spec: str, revision: str) -> str | None:
    """The commit of a repository's revision: a short question, so that a hub that never answers is noticed at once."""
    if hub.constants.HF_HUB_OFFLINE:
        return revision or None
    named = {"revision": revision} if revision else {}
    info = hub.HfApi().model_info(spec, timeout=_SECONDS, **named)
    return str(info.sha)
