"""Pages that are not written twice: documents that lie elsewhere in the project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"SPEC.md": "SPEC.md", "SECURITY.md": "SECURITY.md", "PROTOCOL.md": "conformance/PROTOCOL.md"}


def on_files(files: Files, config: Any) -> Files:
    """Take the shared documents in, as they are but for links to what is no page."""
    for name, path in SHARED.items():
        files.append(File.generated(config, name, content=_linked((ROOT / path).read_text())))
    return files


def _linked(text: str) -> str:
    """Links to pages keep their target, those to other files of the project become their names."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        name, _, anchor = target.partition("#")
        base = name.rpartition("/")[2]
        if not name or "://" in name:
            return match[0]
        return f"[{label}]({base}{'#' + anchor if anchor else ''})" if base in SHARED else f"{label} (`{name}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)
