"""Which files of a folder hold the model's weights, and whether all of them are there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rsv_format.errors import RsvError
from rsv_format.sources.base import read_json_object, reading

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

_SHARD = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?P<of>[-_]of[-_])(?P<count>\d+)(?P<end>.*)")
_NO_MODEL = ("adapter", "optimizer", "scheduler", "random_states")  # how names of other files with tensors begin
_UNREAD = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack", ".onnx")  # weights in forms that are not read


def indexed_files(folder: Path) -> dict[str, str] | None:
    """Tensor -> file, as the folder's index has it; None without one, or where a whole model lies beside it.

    Raises
    ------
    RsvError
        `source_invalid` where the index is none, or names what is not there.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    where = str(index)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise RsvError("source_invalid", where, "weight_map does not map tensor names to file names")
    files = sorted(set(weight_map.values()))
    if (folder / WHOLE).exists() and (WHOLE not in files or files == [WHOLE]):
        return None  # as transformers does: the index is of no use, or that of an earlier state
    for file in files:
        if not file.endswith(".safetensors") or "/" in file or "\\" in file or "\0" in file:
            raise RsvError("source_invalid", where, f"{file!r} is not the plain name of a .safetensors file")
        if not (folder / file).exists():
            raise RsvError("source_invalid", where, f"{file} is missing")
    return weight_map


def unindexed_files(folder: Path) -> list[str]:
    """The names of the files with weights, which no index lists.

    Raises
    ------
    RsvError
        `source_invalid` where there are none, or not all of those that belong together.
    """
    with reading(str(folder)):
        names = sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors") and not name.startswith((".", *_NO_MODEL))]
    if WHOLE in found:
        return [WHOLE]
    found = [name for name in found if name.startswith("model")] or found
    if missing := missing_siblings(found):
        raise RsvError("source_invalid", str(folder), f"{missing[0]} is missing")
    if not found:
        raise RsvError("source_invalid", str(folder), f"holds no weights in .safetensors files{_instead(names)}")
    return found


def missing_siblings(names: Iterable[str]) -> list[str]:
    """What is missing of files that are numbered "1-of-3" or so, counted from 1 or from 0."""
    sets: dict[tuple[str, ...], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            key = (match["stem"], match["of"], match["count"], match["end"], str(len(match["number"])))
            sets.setdefault(key, set()).add(int(match["number"]))
    missing = []
    for (stem, of, count, end, width), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        wanted = range(first, first + min(int(count), len(numbers) + 1))  # one that is missing is enough
        missing += [f"{stem}{i:0{width}}{of}{count}{end}" for i in wanted if i not in numbers]
    return missing


def _instead(names: list[str]) -> str:
    """What lies there in their place."""
    if any(name.startswith("adapter") for name in names):
        return ": it is an adapter (such as LoRA's), to be merged into its base model first"
    unread = next((name for name in names if name.endswith(_UNREAD)), None)
    return "" if unread is None else f", and {unread} is of a kind that is not read: convert it first"
