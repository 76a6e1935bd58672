"""GGUF files: what their tensors become, and that what is malformed, cut short or unknown is refused by name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rsv_format
from rsv_format.errors import RsvError
from rsv_format.sources import open_source

gguf = pytest.importorskip("gguf")
from gguf_models import (  # noqa: E402
    EXPERTS,
    HEADS,
    INNER,
    KV_HEADS,
    ROWS,
    WIDTH,
    interleaved,
    model_tensors,
    write_file,
    write_model,
)

Q8_0, BF16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16
BLOCK = "model.layers.0"


def refuses(code: str, call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(RsvError) as caught:
        call()
    assert caught.value.code == code, str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# What the tensors become


def test_the_checkpoint_comes_back(tmp_path: Path) -> None:
    plain = model_tensors()
    q, k = plain["blk.0.attn_q.weight"], plain["blk.0.attn_k.weight"]
    bias = np.random.default_rng(1).standard_normal(k.shape[0]).astype(np.float32)
    changes = {
        "blk.0.attn_q.weight": interleaved(q, HEADS).astype(np.float16),
        "blk.0.attn_k.weight": interleaved(k, KV_HEADS),
        "blk.0.attn_k.bias": interleaved(bias, KV_HEADS),
    }
    types = {"blk.0.attn_k.weight": Q8_0, "blk.0.ffn_down.weight": BF16}
    with open_source(write_model(tmp_path / "m.gguf", tensors=changes, types=types)) as source:
        got = source.tensors
        assert np.array_equal(got[f"{BLOCK}.self_attn.q_proj.weight"].read(), q.astype(np.float16))
        assert np.array_equal(got[f"{BLOCK}.self_attn.k_proj.bias"].float32(), bias)
        assert np.array_equal(got[f"{BLOCK}.input_layernorm.weight"].read(), plain["blk.0.attn_norm.weight"])
        quantized = got[f"{BLOCK}.self_attn.k_proj.weight"]
        assert (quantized.dtype, quantized.shape) == ("f16", k.shape)
        assert np.abs(quantized.float32() - k).max() < 0.02
        assert np.array_equal(quantized.read(), quantized.float32().astype(np.float16))
        brain, down = got[f"{BLOCK}.mlp.down_proj.weight"], plain["blk.0.ffn_down.weight"]
        assert (brain.dtype, brain.read().dtype, brain.shape) == ("bf16", np.uint16, down.shape)
        assert np.abs(brain.float32() - down).max() < 0.02


def test_qwen_rows_are_left_alone(tmp_path: Path) -> None:
    with open_source(write_model(tmp_path / "m.gguf", "qwen2")) as source:
        q = model_tensors("qwen2")["blk.0.attn_q.weight"]
        assert np.array_equal(source.tensors[f"{BLOCK}.self_attn.q_proj.weight"].read(), q)


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3"])
def test_gemma_norms(tmp_path: Path, arch: str) -> None:
    gain = np.array([0.5, -0.25] * (WIDTH // 2), np.float32)
    norm = "post_attention_layernorm" if arch == "gemma" else "pre_feedforward_layernorm"
    with open_source(write_model(tmp_path / "m.gguf", arch, tensors={"blk.0.ffn_norm.weight": gain + 1})) as source:
        kept = source.tensors[f"{BLOCK}.{norm}.weight"]
        assert kept.dtype == "f32" and np.array_equal(kept.read(), gain) and np.array_equal(kept.float32(), gain)


@pytest.mark.parametrize(
    "arch, stack",
    [
        ("qwen3moe", "mlp.switch_mlp.up_proj"),
        ("qwen2moe", "mlp.switch_mlp.up_proj"),
        ("llama", "block_sparse_moe.switch_mlp.up_proj"),
    ],
)
def test_expert_stacks(tmp_path: Path, arch: str, stack: str) -> None:
    with open_source(write_model(tmp_path / "m.gguf", arch, experts=True)) as source:
        name = f"{BLOCK}.{stack}.weight"
        experts = model_tensors(arch, experts=True)["blk.0.ffn_up_exps.weight"]
        assert source.tensors[name].shape == (EXPERTS, INNER, WIDTH) and source.is_linear(name)
        assert np.array_equal(source.tensors[name].read(), experts)


@pytest.mark.parametrize("arch", ["qwen2", "qwen2moe"])
def test_biases_that_no_block_has_are_zeros(tmp_path: Path, arch: str) -> None:
    none = {f"blk.{i}.attn_{name}.bias": None for i in range(2) for name in "qkv"}
    with open_source(write_model(tmp_path / "m.gguf", arch, blocks=2, tensors=none)) as source:
        bias = source.tensors["model.layers.1.self_attn.k_proj.bias"]
        assert bias.dtype == "f32" and not bias.read().any() and bias.read().shape == bias.shape
    del none["blk.1.attn_k.bias"]
    write_model(tmp_path / "m.gguf", arch, blocks=2, tensors=none)
    refuses("source_invalid", lambda: open_source(tmp_path / "m.gguf"), "blk.0.attn_k.bias: is missing")


def test_biases_of_llama(tmp_path: Path) -> None:
    biases = {f"blk.0.attn_{name}.bias": np.ones(n, np.float32) for name, n in (("q", 64), ("k", 32), ("v", 32))}
    biases["blk.0.ffn_up.bias"] = np.ones(INNER, np.float32)
    with open_source(write_model(tmp_path / "m.gguf", tensors=biases)) as source:
        assert source.config is not None and source.config["attention_bias"] and source.config["mlp_bias"]
        assert source.tensors[f"{BLOCK}.self_attn.v_proj.bias"].read().all()
        assert not source.tensors[f"{BLOCK}.self_attn.o_proj.bias"].read().any()
        assert not source.tensors[f"{BLOCK}.mlp.down_proj.bias"].read().any()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "qwen2moe", "qwen3moe"])
def test_names_agree_with_the_gguf_package(arch: str) -> None:
    """Every tensor that the package lists for an architecture has a name here, and the package maps it back."""
    from rsv_format.sources.gguf_config import _ARCHITECTURES
    from rsv_format.sources.gguf_names import gguf_name, hugging_face_name

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, 1)
    skipped = {"rope_freqs", "blk.0.attn_rot_embd"}
    for tensor_kind in gguf.MODEL_TENSORS[kind]:
        stem = gguf.TENSOR_NAMES[tensor_kind].format(bid=0)
        model_type = _ARCHITECTURES[arch].model_type
        ours = hugging_face_name(f"{stem}.weight", model_type)
        if stem in skipped or (arch in ("gemma3", "qwen2moe", "qwen3moe", "llama") and ours is None):
            continue
        assert ours is not None, stem
        assert gguf_name(ours, model_type) == f"{stem}.weight"
        assert names.get_name(ours.removesuffix(".weight").replace("switch_mlp", "experts")) == stem


def test_large_tensors_are_dequantized_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"token_embd.weight": Q8_0}
    with open_source(write_model(tmp_path / "m.gguf", types=types)) as source:
        embedding = source.tensors["model.embed_tokens.weight"]
        whole = embedding.float32()
        monkeypatch.setattr("rsv_format.sources.gguf_reader._AT_ONCE", 3 * WIDTH)
        assert np.array_equal(embedding.float32(), whole)


def test_values_beyond_float16(tmp_path: Path) -> None:
    name = "blk.0.ffn_up.weight"
    large = np.full((INNER, WIDTH), 1e5, np.float32)
    with open_source(write_model(tmp_path / "m.gguf", tensors={name: large}, types={name: Q8_0})) as source:
        kept = source.tensors[f"{BLOCK}.mlp.up_proj.weight"]
        assert np.allclose(kept.float32(), 1e5, rtol=1e-2)
        refuses("source_invalid", kept.read, name)


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_weights_that_overflow_are_refused(tmp_path: Path, scale: float) -> None:
    path = write_model(tmp_path / "m.gguf", types={"token_embd.weight": Q8_0})
    found = gguf.GGUFReader(path)
    offset = next(int(tensor.data_offset) for tensor in found.tensors if tensor.name == "token_embd.weight")
    del found
    data = bytearray(path.read_bytes())
    at = offset + 3 * WIDTH // 32 * 34  # the scale of the first block of row 3
    data[at : at + 2] = np.float16(scale).tobytes()
    path.write_bytes(data)
    with open_source(path) as source:
        embedding = source.tensors["model.embed_tokens.weight"]
        refuses("nonfinite_weight", embedding.read, "token_embd.weight: the value at (3, 0)")
        refuses("nonfinite_weight", lambda: rsv_format.quantize(source, tmp_path / "m.rsv", embedding_bits="keep"))
    assert [other.name for other in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["f4", "f2", "bf16"])
def test_values_are_finite(tmp_path: Path, value: float, kind: str) -> None:
    name, types = "blk.0.ffn_up.weight", {}
    weight = model_tensors()[name]
    weight[3, 5] = value
    if kind == "bf16":
        types[name] = BF16
    else:
        weight = weight.astype(kind)
    with open_source(write_model(tmp_path / "m.gguf", tensors={name: weight}, types=types)) as source:
        tensor = source.tensors[f"{BLOCK}.mlp.up_proj.weight"]
        refuses("nonfinite_weight", tensor.read, f"{name}: the value at (3, 5)")
        refuses("nonfinite_weight", tensor.float32, name)


# What is missing, or too much


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "qwen2moe"])
def test_no_tensor_may_be_missing(tmp_path: Path, arch: str) -> None:
    tensors = model_tensors(arch, blocks=2)
    for name in (name for name in tensors if ".bias" not in name and not name.startswith("blk.0.")):
        path = write_model(tmp_path / "m.gguf", arch, blocks=2, tensors={name: None})
        refuses("source_invalid", lambda path=path: open_source(path), name, "is missing")


def test_blocks_are_counted(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", blocks=1, keys={"llama.block_count": 3})
    refuses("source_invalid", lambda: open_source(path), "blk.1.attn_q.weight", "of 29 tensors", "18 are")
    path = write_model(tmp_path / "m.gguf", blocks=1, keys={"llama.block_count": 2**32 - 1})
    refuses("source_invalid", lambda: open_source(path), "11 tensors for 4294967295 blocks")
    path = write_model(tmp_path / "m.gguf", blocks=3, keys={"llama.block_count": 2})
    refuses("source_unsupported", lambda: open_source(path), "blk.2.attn", "models of 2 blocks")


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    more = {"blk.2.nextn.eh_proj.weight": np.zeros((WIDTH, 2 * WIDTH), np.float32)}
    keys = {"qwen3.nextn_predict_layers": 1}
    with open_source(write_model(tmp_path / "m.gguf", "qwen3", blocks=3, tensors=more, keys=keys)) as source:
        assert source.config is not None and source.config["num_hidden_layers"] == 2
        assert not any("layers.2." in name for name in source.tensors)
    keys = {"qwen3.nextn_predict_layers": 3}
    write_model(tmp_path / "m.gguf", "qwen3", blocks=3, keys=keys)
    refuses("source_invalid", lambda: open_source(tmp_path / "m.gguf"), "nextn_predict_layers")


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.scale", "blk.0.ffn_gate.0.weight", "output_norm.bias", "blk.0.attn_sinks.weight", "v.patch.weight",
     "rope_factors_long.weight", "blk.0.attn_q_norm.weight"],
)  # fmt: skip
def test_tensors_that_a_model_has_no_use_for(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", tensors={name: np.ones(HEADS, np.float32)})
    refuses("source_unsupported", lambda: open_source(path), name)


@pytest.mark.parametrize("name", ["blk.0.attn_v.weight", "blk.0.ffn_down.weight", "output_norm.weight"])
def test_shapes_are_those_of_the_metadata(tmp_path: Path, name: str) -> None:
    other = np.zeros([side // 2 for side in model_tensors()[name].shape], np.float32)
    path = write_model(tmp_path / "m.gguf", tensors={name: other})
    refuses("source_invalid", lambda: open_source(path), name, "has the shape")


@pytest.mark.parametrize(
    "arch, keys, part",
    [
        ("mamba", {}, "'mamba'"),
        ("clip", {}, "mmproj"),
        ("llama", {"general.type": "mmproj"}, "mmproj"),
        ("llama", {"general.type": "adapter"}, "LoRA adapter"),
        ("llama", {"general.type": "imatrix"}, "importance"),
    ],
)
def test_files_of_other_models(tmp_path: Path, arch: str, keys: dict[str, Any], part: str) -> None:
    path = write_model(tmp_path / "m.gguf", arch, keys=keys)
    refuses("source_unsupported", lambda: open_source(path), part)


# Types


@pytest.mark.parametrize(
    "type_id, part",
    [(41, "Q1_0 tensors cannot be dequantized"), (24, "I8"), (28, "F64"), (156, "type 156"), (31, "Q4_0_4_4")],
)
def test_tensor_types_are_named_with_the_tensor(tmp_path: Path, type_id: int, part: str) -> None:
    name = "blk.0.attn_q.weight"
    path = write_model(tmp_path / "m.gguf", tensors={name: np.zeros((WIDTH, 128), np.float32)})
    data = path.read_bytes()
    at = data.index(name.encode()) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:at] + struct.pack("<I", type_id) + data[at + 4 :])
    refuses("source_unsupported", lambda: open_source(path), f"{name}: ", part)


# Files


def test_a_gguf_file_is_known_by_what_it_begins_with(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    for name in ("sha256-6a0746a1", "M.GGUF", "model.bin"):
        other = path.rename(tmp_path / name)
        with open_source(other) as source:
            assert source.kind == "gguf" and source.path == str(other)
        path = other.rename(tmp_path / "m.gguf")
    (tmp_path / "x.gguf").write_bytes(b"<html>")
    refuses("source_invalid", lambda: open_source(tmp_path / "x.gguf"), "is no GGUF file", "<htm")
    (tmp_path / "x.bin").write_bytes(b"")
    refuses("source_unsupported", lambda: open_source(tmp_path / "x.bin"), "neither")


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refuses("source_unsupported", lambda: open_source(tmp_path / "m.gguf"), "regular file")


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "a.GGUF", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    refuses("source_unsupported", lambda: open_source(tmp_path), "a.GGUF or b-00001-of-00002.gguf")


def split_model(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    from gguf_models import model_keys

    names = [*(tensors := model_tensors(blocks=2))]
    paths = []
    for i in range(count):
        keys = {**(model_keys(blocks=2) if i == 0 else {}), "split.no": i, "split.count": count, **changes}
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        write_file(paths[-1], "llama", keys, {name: tensors[name] for name in names[i::count]})
    return paths


def test_all_parts_of_a_split_model_are_read(tmp_path: Path) -> None:
    paths = split_model(tmp_path, **{"split.tensors.count": len(model_tensors(blocks=2))})
    for path in paths:
        with open_source(path) as source:
            down = source.tensors["model.layers.1.mlp.down_proj.weight"].read()
            assert np.array_equal(down, model_tensors(blocks=2)["blk.1.ffn_down.weight"])
            assert len(source.files) == 3 and source.path == str(path)
    paths[1].unlink()
    refuses("source_invalid", lambda: open_source(paths[2]), "m-00002-of-00003.gguf is not beside it")


def test_parts_of_another_model(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    refuses("source_invalid", lambda: open_source(paths[0]), str(paths[1]), "part 2 of 3")
    alone = split_model(tmp_path)[0].rename(tmp_path / "alone.gguf")
    refuses("source_invalid", lambda: open_source(alone), "-of-00003.gguf")
    paths = split_model(tmp_path, **{"split.tensors.count": 99})
    refuses("source_invalid", lambda: open_source(paths[0]), "split.tensors.count", "not 99")


def test_a_part_that_is_the_whole(tmp_path: Path) -> None:
    with open_source(write_model(tmp_path / "m-00001-of-00003.gguf", keys={"split.count": 1})) as source:
        assert source.config is not None


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    with open_source(path) as source:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 20_000)
        refuses("source_invalid", source.tensors[f"{BLOCK}.mlp.down_proj.weight"].read, "ffn_down")
        refuses("io_error", source.check_unchanged)
    path.unlink()
    write_model(path)
    with open_source(path) as source:
        path.unlink()
        write_model(path, tensors={"output_norm.weight": np.zeros(WIDTH, np.float32)})
        refuses("io_error", lambda: rsv_format.quantize(source, tmp_path / "m.rsv"), "changed")
    assert not (tmp_path / "m.rsv").exists()


# Headers


def pair(key: bytes, kind: int, payload: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    "more",
    [
        pair(b"a.b.caf\xe9", 8, text(b"Caf\xe9")),  # not UTF-8
        pair(b"tags", 9, struct.pack("<IQ", 8, 2) + text(b"\xff") + text(b"\xed\xa0\x80")),
        pair(b"an.array", 9, struct.pack("<IQ", 8, 0)),
        pair(b"arrays", 9, struct.pack("<IQ", 9, 2) + 2 * struct.pack("<IQI", 4, 1, 7)),
        pair(b"odd", 12, struct.pack("<d", np.nan)),
    ],
)
def test_odd_metadata_that_nobody_asks_for(tmp_path: Path, more: bytes) -> None:
    path = write_model(tmp_path / "m.gguf")
    more += pair(b"x" * (-(len(more) + 20) % 32), 10, bytes(8))  # so that the data stays aligned
    data = path.read_bytes()
    tensors, count = struct.unpack("<QQ", data[8:24])
    path.write_bytes(data[:8] + struct.pack("<QQ", tensors, count + 2) + more + data[24:])
    with open_source(path) as source:
        up = source.tensors[f"{BLOCK}.mlp.up_proj.weight"].read()
        assert np.array_equal(up, model_tensors()["blk.0.ffn_up.weight"])


@pytest.mark.parametrize(
    "payload, part",
    [
        (pair(b"k", 9, struct.pack("<IQ", 0, 2**60)), "k: the file ends"),
        (pair(b"k", 9, struct.pack("<IQ", 8, 2**62)), "k: the file ends"),
        (pair(b"k", 8, struct.pack("<Q", 2**63)), "k: the file ends"),
        (pair(b"k", 99, b"1234"), "k: its value is of type 99"),
        (pair(b"k", 9, struct.pack("<IQ", 9, 1) * 9), "nested"),
        (struct.pack("<Q", 2**64 - 1) + b"k", "the file ends"),
        (2 * pair(b"k", 10, bytes(8)), "k: is there twice"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path: Path, payload: bytes, part: str) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + payload)
    refuses("source_invalid", lambda: open_source(tmp_path / "m.gguf"), part)


@pytest.mark.parametrize("version, part", [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_versions(tmp_path: Path, version: int, part: str) -> None:
    path = write_model(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    refuses("source_unsupported", lambda: open_source(path), part)


def test_tensors_are_there_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", blocks=2)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    refuses("source_invalid", lambda: open_source(path), "blk.0.attn_q.weight: is there twice")


def test_cut_or_altered_anywhere(tmp_path: Path) -> None:
    """Every prefix is refused; a damaged byte of the header is refused or read, never a traceback."""
    path = write_model(tmp_path / "m.gguf", "qwen2")
    whole = path.read_bytes()
    header = whole.index(b"output_norm.weight") + 80
    for length in [*range(0, header, 9), len(whole) - ROWS * WIDTH, len(whole) - 32]:
        path.write_bytes(whole[:length])
        refuses("source_invalid", lambda: open_source(path))
    for position in range(0, header, 3):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        try:
            open_source(path).close()
        except RsvError as error:
            assert error.code in ("source_invalid", "source_unsupported")
