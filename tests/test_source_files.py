"""Files of a source stay open: what is read is of one file, and what changes meanwhile is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rsv_format
from rsv_format import RsvError, open_source

safetensors = pytest.importorskip("safetensors.numpy")

LAYERS = [f"layers.{i}.up_proj" for i in range(6)]


def model(path: Path, value: float, layers: int = 6) -> Path:
    safetensors.save_file({f"{name}.weight": np.full((8, 32), value, np.float32) for name in LAYERS[:layers]}, path)
    return path


def replaced(path: Path) -> None:
    os.replace(model(path.with_name("next"), 2.0), path)


def touched(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def removed(path: Path) -> None:
    path.unlink(missing_ok=True)


def test_tensors_are_those_of_the_file_that_was_opened(tmp_path: Path) -> None:
    path = model(tmp_path / "m.safetensors", 1.0)
    with open_source(path) as source:
        replaced(path)
        assert all((tensor.read() == 1).all() for tensor in source.tensors.values())


@pytest.mark.parametrize("change", [replaced, touched, grown, removed])
def test_a_change_while_it_is_quantized_is_an_error(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = model(tmp_path / "m.safetensors", 1.0)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "m.rsv"

    def told(done: int, total: int, name: str) -> None:
        if name == LAYERS[3]:
            change(path)

    with pytest.raises(RsvError, match="m.safetensors") as caught:
        rsv_format.quantize(path, out, progress=told)
    assert caught.value.code == "io_error" and not list(out.parent.iterdir())
    model(path, 1.0)
    with pytest.raises(RsvError, match="m.safetensors"):
        list(rsv_format.quantize_layers(path, progress=told))


def test_a_changed_gguf_file_is_an_error(tmp_path: Path) -> None:
    from gguf_models import write_model

    path = write_model(tmp_path / "m.gguf")
    with open_source(path) as source:
        source.check_unchanged()
        os.replace(write_model(tmp_path / "next.gguf"), path)
        with pytest.raises(RsvError, match="io_error at .*m.gguf"):
            source.check_unchanged()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files by Linux's /proc")
def test_closing_closes_the_files(tmp_path: Path) -> None:
    def opened() -> int:
        files = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        return sum(file.startswith(str(tmp_path)) for file in files)

    path = model(tmp_path / "m.safetensors", 1.0)
    with open_source(path) as source:
        tensor = next(iter(source.tensors.values()))
        assert opened() == 1
    assert opened() == 0
    with pytest.raises(RsvError, match="closed"):
        tensor.read()
    del tensor
    source = open_source(tmp_path)
    assert opened() == 1
    del source  # its last owner closes a file, too
    assert opened() == 0
