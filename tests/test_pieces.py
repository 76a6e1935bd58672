"""Matrices are read, encoded and written some rows at a time, from every source, and the bytes are always the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import write_model
from safetensors.numpy import save_file
from test_folders import GPT2, gpt2, mlx_layer
from test_sources import named, write_folder

import rsv_format
from rsv_format import RsvError, Source, SourceTensor, open_source, threads
from rsv_format.dtypes import to_float32
from rsv_format.quantizer.calibration import DecoderCalibration
from rsv_format.sources.base import dense_tensor

BLOCK = "model.layers.0"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))


def llama(folder: Path) -> Path:
    """Matrices of some hundred rows."""
    tensors = {"model.embed_tokens.weight": normal(0, 300, 64), "model.norm.weight": np.ones(64, np.float32)}
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
              "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
              "mlp.down_proj": (64, 96)}  # fmt: skip
    for i in range(2):
        for seed, (name, shape) in enumerate(shapes.items()):
            tensors[f"model.layers.{i}.{name}.weight"] = normal(10 * i + seed + 1, *shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = 1 + normal(30 + i, 64)
    folder.mkdir(exist_ok=True)
    write_folder(folder, LLAMA, model={name: ("F32", x) for name, x in tensors.items()})
    return folder


def gguf_llama(folder: Path) -> Path:
    kinds = {f"blk.0.{x}.weight": gguf.GGMLQuantizationType.Q8_0 for x in ("attn_q", "ffn_down_exps", "attn_v")}
    return write_model(folder / "m.gguf", "llama", experts=True, types=kinds)


def affine(folder: Path) -> Path:
    tensors = named(f"{BLOCK}.mlp.up_proj", mlx_layer(4, 64, 40, 256)[0])
    tensors |= named("model.embed_tokens", mlx_layer(6, 32, 70, 128)[0])
    write_folder(folder, {"quantization": {"group_size": 64, "bits": 4}}, model=tensors)
    return folder


def turned(folder: Path) -> Path:
    write_folder(folder, GPT2, model={name: ("F32", array) for name, array in gpt2().items()})
    return folder


def fused(family: str, axes: tuple[int, int, int], dtype: str = "F32") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        gate_up, down = normal(1, 3, 20, 12).transpose(axes), normal(2, 3, 12, 10).transpose(axes)
        codes = np.random.default_rng(3).integers(0, 0x7E, gate_up.shape, np.uint8)
        both: tuple[str, np.ndarray] = ("F8_E4M3", codes) if dtype == "F8_E4M3" else ("F32", gate_up)
        tensors = {f"{BLOCK}.mlp.experts.gate_up_proj": both, f"{BLOCK}.mlp.experts.down_proj": ("F32", down)}
        if dtype == "F8_E4M3":
            tensors[f"{BLOCK}.mlp.experts.gate_up_proj_scale"] = ("F32", np.arange(1, 4, dtype=np.float32))
        write_folder(folder, {"model_type": family}, model=tensors)
        return folder

    return write


def apart(folder: Path) -> Path:
    parts = {"gate_proj": (10, 12), "up_proj": (10, 12), "down_proj": (12, 10)}
    tensors = {
        f"{BLOCK}.mlp.experts.{i}.{part}.weight": ("F16", normal(i, *shape).astype(np.float16))
        for i in range(3)
        for part, shape in parts.items()
    }
    write_folder(folder, {"model_type": "qwen3_moe"}, model=tensors)
    return folder


def mxfp4(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 3, 10, 2, 16), np.uint8), rng.integers(118, 134, (2, 3, 10, 2), np.uint8)
    names = [f"{BLOCK}.mlp.experts.{x}" for x in ("gate_up_proj", "down_proj")]
    tensors: dict[str, tuple[str, np.ndarray]] = {
        f"{names[0]}_blocks": ("U8", blocks[0]), f"{names[0]}_scales": ("U8", scales[0]),
        f"{names[1]}_blocks": ("U8", rng.integers(0, 256, (3, 64, 1, 16), np.uint8)),
        f"{names[1]}_scales": ("U8", rng.integers(118, 134, (3, 64, 1), np.uint8)),
    }  # fmt: skip
    write_folder(folder, {"model_type": "gpt_oss"}, model=tensors)
    return folder


def dbrx(folder: Path) -> Path:
    name = "transformer.blocks.0.ffn.experts.mlp"
    tensors = {f"{name}.{part}": ("F32", normal(i, 12, 6)) for i, part in enumerate(("v1", "w1", "w2"))}
    write_folder(folder, {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 3}}, model=tensors)
    return folder


SOURCES: dict[str, Callable[[Path], Path]] = {
    "llama": llama, "gguf": gguf_llama, "affine": affine, "gpt2": turned, "apart": apart, "mxfp4": mxfp4, "dbrx": dbrx,
    "fused": fused("qwen3_moe", (0, 1, 2)), "fused and turned": fused("llama4", (0, 2, 1)),
    "fp8, fused and turned": fused("llama4", (0, 2, 1), "F8_E4M3"), "by turns": fused("gpt_oss", (0, 2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_parts_of_a_tensor_are_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    with open_source(SOURCES[kind](tmp_path), tokenizer=False) as source:
        matrices = [x for x in source.tensors.values() if len(x.shape) > 1]
        for tensor in matrices:
            assert tensor.rows is not None and tensor.held() is tensor
            rows, columns = tensor.matrix_shape
            whole, kept = tensor.float32().reshape(rows, columns), tensor.read().reshape(rows, columns)
            for start, stop in ((0, 1), (rows - 1, rows), (rows // 3, rows // 2 + 1), (0, rows)):
                part = tensor.row_part(start, stop)
                assert part.shape == (stop - start, columns) and part.dtype == tensor.dtype
                assert np.array_equal(part.float32(), whole[start:stop]) and part.float32().flags.c_contiguous
                assert np.array_equal(part.read(), kept[start:stop])
            some = tensor.row_part(rows // 4, rows).row_part(1, rows // 2)
            assert np.array_equal(some.float32(), whole[rows // 4 + 1 : rows // 4 + rows // 2])
            half = tensor.column_part(1, columns // 2)
            assert half.shape == (rows, columns // 2 - 1) and np.array_equal(half.float32(), whole[:, 1 : columns // 2])
            assert np.array_equal(np.concatenate([*tensor.pieces()]), whole)
            chosen = np.array([rows - 1, 0, rows // 2, 0])
            assert np.array_equal(tensor.taken(chosen), to_float32(kept[chosen], tensor.dtype))
        assert len(matrices) > 1


def test_a_tensor_that_is_only_read_whole_is_read_once_for_all_of_its_parts() -> None:
    read: list[str] = []

    def array() -> np.ndarray:
        read.append("x")
        return normal(0, 30, 4)

    tensor = dense_tensor("x", "f32", (30, 4), array)
    held = tensor.held()
    parts = [held.row_part(start, start + 10).float32() for start in (0, 10, 20)]
    assert np.array_equal(np.concatenate(parts), normal(0, 30, 4)) and len(read) == 1
    assert np.array_equal(tensor.column_part(1, 3).read(), normal(0, 30, 4)[:, 1:3])


def test_a_file_that_ends_within_a_column(tmp_path: Path) -> None:
    save_file({"a.weight": normal(0, 8, 16)}, str(tmp_path / "a.safetensors"))
    with open_source(tmp_path / "a.safetensors") as source:
        part = source.tensors["a.weight"].column_part(4, 8)
        size = (tmp_path / "a.safetensors").stat().st_size
        with open(tmp_path / "a.safetensors", "r+b") as file:
            file.truncate(size - 4 * 16)
        with pytest.raises(RsvError, match="too early") as e:
            part.read()
        assert e.value.code == "source_invalid"


# --- quantizing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"bits_per_weight": 9.0}, {"codebook": "trellis", "bits": 2}, {"feedback": True}, {"rotation": "haar"},
     {"codebook": "trellis", "feedback": True}, {"embedding_bits": "keep", "importance": "gains"}],
    ids=str,
)  # fmt: skip
def test_the_size_of_the_pieces_changes_no_byte(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama(tmp_path / "m")
    monkeypatch.setattr("rsv_format.quantizer.matrix._CHUNK", 7 * 64)  # seven rows at a time
    if options.get("feedback"):
        seen = DecoderCalibration(open_source(source), np.random.default_rng(0).integers(0, 300, 100))
        options = options | {"calibration": seen}
    found = []
    for count, (pieces, workers, memory) in enumerate(((1, 1, 2**30), (100, 1, 2**20), (3, 2, 2**20), (1, 3, 2**24))):
        monkeypatch.setattr(threads, "_PIECES", pieces)
        rsv_format.quantize(source, tmp_path / f"{count}.rsv", memory=memory, threads=workers, **options)
        found.append((tmp_path / f"{count}.rsv").read_bytes())
    assert len(set(found)) == 1
    rsv_format.verify(tmp_path / "0.rsv")
    whole = {x.name: x.codes for x in rsv_format.quantize_layers(source, **options)}
    with rsv_format.open(tmp_path / "0.rsv") as file:
        assert all(np.array_equal(layer.codes, whole[name]) for name, layer in file.layers.items())


@pytest.mark.parametrize("kind", ["llama", "gguf", "fp8, fused and turned", "apart"])
def test_no_matrix_is_read_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to measure nor to encode nor to keep."""
    monkeypatch.setattr("rsv_format.quantizer.matrix._CHUNK", 64)
    monkeypatch.setattr(threads, "_PIECES", 8)
    monkeypatch.setattr("rsv_format.sources.base._AT_ONCE", 256)
    largest = 0

    def watched(tensor: SourceTensor, of_all: int) -> SourceTensor:
        def never() -> np.ndarray:
            raise AssertionError(f"{tensor.name} is read whole")

        def some(start: int, stop: int) -> SourceTensor:
            nonlocal largest
            largest = max(largest, stop - start)
            assert stop - start < of_all
            return tensor.row_part(start, stop)

        return replace(tensor, read=never, float32=never, rows=some)

    source = open_source(SOURCES[kind](tmp_path), tokenizer=False)
    source.tensors = {
        name: watched(x, x.matrix_shape[0]) if len(x.shape) > 1 and x.matrix_shape[0] > 8 else x
        for name, x in source.tensors.items()
    }
    for number, options in enumerate(({"threads": 2}, {"threads": 1, "bits_per_weight": 7.9})):
        limited = options if kind == "llama" else {"threads": number + 1}
        rsv_format.quantize(source, tmp_path / "a.rsv", **limited)
        rsv_format.verify(tmp_path / "a.rsv")
    if kind == "llama":
        rsv_format.quantize(source, tmp_path / "a.rsv", embedding_bits="keep", threads=2)
    assert largest
    source.close()


def test_places_in_errors_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsv_format.quantizer.matrix._CHUNK", 64)
    weight = normal(0, 90, 16)
    weight[77, 5] = np.inf
    source = Source("test", "", {"a.q_proj.weight": dense_tensor("a.q_proj.weight", "f32", (90, 16), lambda: weight)})
    with pytest.raises(RsvError, match="row 77, column 5"):
        rsv_format.quantize(source, tmp_path / "a.rsv", threads=2)
    weight[77, 5] = 1
    weight[80] = 3e37
    with pytest.raises(RsvError, match="row 80, of root mean square"):
        rsv_format.quantize(source, tmp_path / "a.rsv", threads=2)


def test_a_value_of_a_gguf_that_is_not_finite_is_named_by_its_place(tmp_path: Path) -> None:
    gate = np.ones((3, 96, 64), np.float32)
    gate[2, 5, 7] = np.nan
    path = write_model(tmp_path / "m.gguf", "llama", experts=True, tensors={"blk.0.ffn_gate_exps.weight": gate})
    with open_source(path, tokenizer=False) as source:
        part = source.tensors[f"{BLOCK}.block_sparse_moe.switch_mlp.gate_proj.weight"].row_part(190, 200)
        with pytest.raises(RsvError, match=r"\(2, 5, 7\) of \(3, 96, 64\)"):
            part.float32()


@pytest.mark.parametrize("memory", [0, -1, 999_999])
def test_memory_that_is_too_little(memory: int, tmp_path: Path) -> None:
    with pytest.raises(RsvError) as e:
        rsv_format.quantize(llama(tmp_path / "m"), tmp_path / "a.rsv", memory=memory)
    assert (e.value.code, e.value.where) == ("bad_argument", "memory")


@pytest.mark.parametrize(
    "text, nbytes",
    [("64MB", threads.DEFAULT_MEMORY), ("500M", 500_000_000), ("1.5 GB", 1_500_000_000), ("2000000", 2_000_000),
     ("x", None), ("1e9", None), ("-1MB", None), ("64MiB", None), ("10", None), ("9" * 400, None)],
)  # fmt: skip
def test_memory_on_the_command_line(
    text: str, nbytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from rsv_cli.app import app

    source, given = llama(tmp_path / "m"), []
    plain = rsv_format.quantize

    def seen(*args: Any, memory: int, **options: Any) -> Any:
        given.append(memory)
        return plain(*args, memory=memory, **options)

    monkeypatch.setattr(rsv_format, "quantize", seen)
    done = CliRunner().invoke(app, ["quantize", str(source), "-o", str(tmp_path / "a.rsv"), "--memory", text])
    if nbytes is None:
        assert done.exit_code == 2 and not (tmp_path / "a.rsv").exists()
    else:
        assert done.exit_code == 0 and given == [nbytes] and "of memory for pieces" in done.output


def test_results_come_in_order_and_none_is_made_long_before_it_is_wanted() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return item * item

    results = threads.ordered(work, range(40), 3)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(begun) <= 5 + 4
    results.close()
    assert list(threads.ordered(work, range(7), 2)) == [0, 1, 4, 9, 16, 25, 36]
    assert list(threads.ordered(work, [], 2)) == []


def test_products_take_no_threads_of_their_own() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def counts(_: int = 0) -> list[int]:
        return [x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]

    threads._libraries.cache_clear()  # what was loaded meanwhile is to be known
    before = counts()
    for workers in (1, 2):
        within = list(threads.ordered(counts, range(3), workers))
        assert within == [[1] * len(before)] * 3 and counts() == before


# --- writing --------------------------------------------------------------------------------------------------------


def test_a_layer_in_pieces_must_be_whole(tmp_path: Path) -> None:
    data = rsv_format.quantize_matrix(normal(0, 10, 32), name="x")
    rsv_format.write(tmp_path / "whole", layers=[data])
    with rsv_format.open(tmp_path / "whole") as file:
        header = file.header

    def written(*edges: int) -> bytes:
        pieces = zip(edges, edges[1:], strict=False)
        with rsv_format.Writer(tmp_path / "a", header) as writer:
            writer.codebook(0, data.codebook)
            writer.transform(0, data.transform)
            writer.layer_pieces("x", ((data.codes[a:b], data.scales[a:b]) for a, b in pieces))
        return (tmp_path / "a").read_bytes()

    assert written(0, 10) == written(0, 3, 4, 10) == (tmp_path / "whole").read_bytes()
    for edges in ((0, 9), (0, 6, 6), (0,)):
        with pytest.raises(RsvError, match="rows, the header says 10") as e:
            written(*edges)
        assert e.value.code == "content_invalid"
    with pytest.raises(RsvError, match="more than 10 rows"), rsv_format.Writer(tmp_path / "a", header) as writer:
        writer.layer_pieces("x", [(data.codes, data.scales), (data.codes[:1], data.scales[:1])])


@pytest.mark.parametrize("mmap", [True, False])
def test_saving_holds_some_rows_at_a_time(mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rsv_format.quantize(llama(tmp_path / "m"), tmp_path / "a.rsv", rotation="haar", importance="none")
    monkeypatch.setattr("rsv_format.quantizer.conversion._ROWS_NBYTES", 500)
    monkeypatch.setattr("rsv_format.reader.Layer.codes", property(lambda self: pytest.fail("is read whole")))
    with rsv_format.open(tmp_path / "a.rsv", mmap=mmap) as file:
        rsv_format.save(file, tmp_path / "b.rsv")
    assert (tmp_path / "b.rsv").read_bytes() == (tmp_path / "a.rsv").read_bytes()
