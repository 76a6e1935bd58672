"""Sets of shards: split, opened as one file, merged; what is wrong with them is named (SPEC section 12.1)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_format import AttachmentData, RsvError, TensorData
from rsv_format.header import build_header, canonical_json
from rsv_format.layout import build_prologue
from rsv_format.sets import membership

ROOT = Path(__file__).resolve().parents[1]
SIZE = 60_000


def content(path: Path, seed: int = 0) -> Path:
    """A file of six layers, which share two transforms, three tensors and two attachments."""
    rng = np.random.default_rng(seed)
    layers = [
        rsv_format.quantize_matrix(rng.normal(size=(128, 96 + 32 * (i % 2))), name=f"blocks.{i}.up", bits=3 + i % 3)
        for i in range(6)
    ]
    rsv_format.write(
        path,
        layers=layers,
        tensors={f"norm.{i}": TensorData("f32", rng.normal(size=(5000,)).astype("f4")) for i in range(3)},
        attachments={
            "config.json": AttachmentData("application/json", b"{}"),
            "notes.txt": AttachmentData("text/plain", b"attached"),
        },
        metadata={"name": "spread"},
        extensions={"org.example.note": [1]},
    )
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A file, and its shards."""
    folder = tmp_path_factory.mktemp("set")
    whole = content(folder / "model.rsv")
    return whole, [Path(name) for name in rsv_format.split(whole, folder / "model.rsv", SIZE)]


@pytest.fixture
def copied(made: tuple[Path, list[Path]], tmp_path: Path) -> list[Path]:
    """Shards that a test may spoil."""
    return [Path(tmp_path / path.name) for path in made[1] if (tmp_path / path.name).write_bytes(path.read_bytes())]


def refusal(path: Path | str, code: str) -> RsvError:
    with pytest.raises(RsvError) as e:
        rsv_format.open(path)
    assert e.value.code == code
    return e.value


def rewritten(path: Path, **members: Any) -> None:
    """The same file with other members of its header."""
    with rsv_format.open(path, mmap=False, alone=True) as file:
        layers = [
            rsv_format.LayerData(x.name, x.in_features, x.bits, x.codes, x.scales, x.codebook, x.transform)
            for x in file.layers.values()
        ]
        tensors = {name: TensorData(x.dtype, x.array) for name, x in file.tensors.items()}
        attachments = {name: AttachmentData(x.media_type, bytes(x.data)) for name, x in file.attachments.items()}
        given = {"metadata": file.metadata, "extensions": file.header.extensions} | members
        rsv_format.write(path, **{"layers": layers, "tensors": tensors, "attachments": attachments} | given)


def test_names_sizes_and_what_is_in_each(made: tuple[Path, list[Path]]) -> None:
    whole, shards = made
    assert [path.name for path in shards] == [f"model-{i + 1:05d}-of-{len(shards):05d}.rsv" for i in range(len(shards))]
    assert len(shards) > 2 and all(path.stat().st_size <= SIZE for path in shards)
    with rsv_format.open(whole) as file:
        id = hashlib.sha256(build_header(file.header)).hexdigest()
        metadata = file.metadata
    for i, path in enumerate(shards):
        assert rsv_format.verify(path) == []
        with rsv_format.open(path, alone=True) as shard:
            assert not shard.shards and shard.metadata == metadata
            assert membership(shard.header).extension == {"id": id, "count": len(shards), "position": i}  # type: ignore
            assert bool(shard.attachments) == ("org.example.note" in shard.header.extensions) == (i == 0)
            assert rsv_format.verify(shard) == []


def test_equal_content_is_spread_equally(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    again = rsv_format.split(made[1][1], tmp_path / "model.rsv", SIZE)  # of the set
    assert [Path(name).read_bytes() for name in again] == [path.read_bytes() for path in made[1]]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_set_is_the_file(made: tuple[Path, list[Path]], mmap: bool) -> None:
    whole, shards = made
    for name in (shards[0], shards[-1], shards[0].parent / "model-*.rsv"):
        with rsv_format.open(whole) as file, rsv_format.open(name, mmap=mmap) as joined:
            assert joined.header == file.header and len(joined.shards) == len(shards)
            assert joined.nbytes == sum(path.stat().st_size for path in shards) == len(joined.buffer)
            for file_like in (joined, joined.unmapped()):
                for layer in file_like.layers.values():
                    assert np.array_equal(layer.dequantize(), file.layers[layer.name].dequantize())
                for tensor in file_like.tensors.values():
                    assert np.array_equal(tensor.array, file.tensors[tensor.name].array)
                assert {x.name: bytes(x.data) for x in file_like.attachments.values()} == {
                    x.name: bytes(x.data) for x in file.attachments.values()
                }
            assert rsv_format.verify(joined) == [] and not rsv_format.diff(file, joined)
            assert joined.mapped == mmap and "shards" in repr(joined)
            summary = rsv_format.summarize(joined)
            assert sum(summary.by_kind.values()) == joined.nbytes and summary.weights
            joined.check_unchanged()
            joined.read_ahead(0, joined.nbytes)
        with pytest.raises(RsvError):
            joined.read(0, 1)


def test_merged_it_is_byte_for_byte_what_was_split(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    rsv_format.merge(made[1][2], tmp_path / "one.rsv")
    assert (tmp_path / "one.rsv").read_bytes() == made[0].read_bytes()


def test_a_single_shard_and_a_layer_that_is_larger(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    (only,) = rsv_format.split(made[0], tmp_path / "a.rsv", 10**9)
    assert only.endswith("a-00001-of-00001.rsv") and rsv_format.open(only).shards
    many = rsv_format.split(made[0], tmp_path / "b", 1)
    assert len(many) == 9 and many[0].endswith("b-00001-of-00009.rsv")
    rsv_format.merge(many[3], tmp_path / "one.rsv")
    assert (tmp_path / "one.rsv").read_bytes() == made[0].read_bytes()
    with pytest.raises(RsvError, match="bad_argument"):
        rsv_format.split(made[0], tmp_path / "c", 0)


def test_a_folder_for_the_shards_is_made(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    names = rsv_format.split(made[0], tmp_path / "a" / "b" / "m.rsv", 10**9)
    assert [Path(name).parent for name in names] == [tmp_path / "a" / "b"]
    with pytest.raises(RsvError, match="io_error"):
        rsv_format.split(made[0], tmp_path / "c" / ("n" * 300), 10**9)
    assert not (tmp_path / "c").exists()


def test_missing_shards_are_named(copied: list[Path]) -> None:
    copied[1].unlink()
    copied[-1].unlink()
    e = refusal(copied[0], "missing_shard")
    assert e.where == str(copied[1]) and str(copied[-1]) in e.detail
    assert str(copied[1]) in refusal(copied[0].parent / "*.rsv", "missing_shard").detail
    renamed = copied[0].rename(copied[0].with_name("first.rsv"))
    assert "2, 3" in refusal(renamed.parent / "*.rsv", "missing_shard").detail
    renamed.rename(copied[0])
    with rsv_format.open(copied[0], alone=True) as shard:
        assert shard.layers


def test_foreign_shards_are_named(copied: list[Path], tmp_path: Path) -> None:
    other = rsv_format.split(content(tmp_path / "other.rsv", 1), tmp_path / "other.rsv", SIZE)
    assert len(other) == len(copied)
    kept = copied[1].read_bytes()
    copied[1].write_bytes(Path(other[1]).read_bytes())
    assert refusal(copied[0], "foreign_shard").where == str(copied[1])
    copied[1].write_bytes(copied[0].read_bytes())  # named as another one
    assert refusal(copied[0].parent / "model-*.rsv", "foreign_shard").where == str(copied[1])
    copied[1].write_bytes(kept)
    again = copied[0].with_name("model-again.rsv")
    again.write_bytes(copied[0].read_bytes())
    e = refusal(copied[0].parent / "model-*.rsv", "foreign_shard")
    assert e.where == str(again) and str(copied[0]) in e.detail
    again.unlink()
    copied[1].write_bytes(copied[0].read_bytes())
    refusal(copied[1], "foreign_shard")
    content(copied[1])
    assert refusal(copied[0], "foreign_shard").where == str(copied[1])
    copied[1].write_bytes(kept)
    moved = copied[1].rename(tmp_path / "renamed.rsv")
    assert "alone=True" in refusal(moved, "foreign_shard").detail
    assert refusal(tmp_path / "none-*.rsv", "io_error").detail == "no file is named so"


def test_files_that_do_not_belong_together(copied: list[Path]) -> None:
    """Each says that it is of the set, and is not what was written."""
    kept = copied[1].read_bytes()
    for members in (
        {"metadata": {"name": "changed"}},
        {"layers": []},
        {"attachments": {"more.txt": AttachmentData("text/plain", b"")}},
        {"tensors": {"norm.0": TensorData("f32", np.zeros(3, "f4"))}},
    ):
        rewritten(copied[1], **members)
        refusal(copied[0], "set_mismatch")
        copied[1].write_bytes(kept)
    with rsv_format.open(copied[0]):
        pass


def test_faults_name_the_shard(copied: list[Path]) -> None:
    data = bytearray(copied[1].read_bytes())
    with rsv_format.open(copied[1], alone=True) as shard:
        offset = next(iter(shard.layers.values())).offset
    data[offset] ^= 1
    copied[1].write_bytes(data)
    faults = rsv_format.verify(copied[0], collect=True)
    assert [fault.code for fault in faults] == ["blob_digest_mismatch"] and faults[0].where.startswith("shard 2, ")
    for call in (rsv_format.merge, lambda a, b: rsv_format.split(a, b, SIZE)):
        with pytest.raises(RsvError, match="blob_digest_mismatch"):
            call(copied[0], copied[0].parent / "new.rsv")
    assert not list(copied[0].parent.glob("*new*"))  # all or nothing
    data[70] ^= 1
    copied[1].write_bytes(data)
    assert copied[1].name in refusal(copied[0], "header_digest_mismatch").where


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"id": "0" * 63, "count": 1, "position": 0}, {"id": "0" * 64, "count": 1, "position": 1},
     {"id": "0" * 64, "count": True, "position": 0}, {"id": "0" * 64, "count": 100000, "position": 0},
     {"id": "0" * 64, "count": 1, "position": 0, "more": 0}],
)  # fmt: skip
def test_what_is_no_membership_is_refused(tmp_path: Path, value: Any) -> None:
    """By who knows sets: it may be a part of something. Who does not knows the file alone."""
    with pytest.raises(RsvError, match="foreign_shard"):
        rsv_format.write(tmp_path / "a.rsv", extensions={"set": value})
    right = {"id": "0" * 64, "count": 1, "position": 0}
    rsv_format.write(tmp_path / "a.rsv", extensions={"set": right})
    data = (tmp_path / "a.rsv").read_bytes()
    text = canonical_json(
        json.loads(data[64 : 64 + int.from_bytes(data[16:24], "little")]) | {"extensions": {"set": value}}
    )
    (tmp_path / "a.rsv").write_bytes(build_prologue(text, 16384) + text.ljust(16384 - 64, b"\0"))
    refusal(tmp_path / "a.rsv", "foreign_shard")
    with rsv_format.open(tmp_path / "a.rsv", alone=True) as file:
        assert not file.shards


def test_a_name_tells_what_the_header_does(copied: list[Path]) -> None:
    """Whichever of the set is given, and in whatever order."""
    first, second, *_ = (path.read_bytes() for path in copied)
    copied[0].write_bytes(second)
    copied[1].write_bytes(first)
    refusal(copied[0], "foreign_shard")
    assert copied[0].name in refusal(copied[2], "foreign_shard").where
    refusal(copied[0].parent / "model-*.rsv", "foreign_shard")


def test_a_foreign_shard_is_told_before_a_missing_one(copied: list[Path]) -> None:
    copied[0].unlink()
    rsv_format.write(copied[1], metadata={"name": "another"})
    assert copied[1].name in refusal(copied[2], "foreign_shard").where


def test_inputs_are_not_written_over(copied: list[Path]) -> None:
    before = [path.read_bytes() for path in copied]
    with pytest.raises(RsvError, match="is the input itself"):
        rsv_format.split(copied[0], copied[0].parent / "model.rsv", SIZE)
    with pytest.raises(RsvError, match="is the input itself"):
        rsv_format.merge(copied[0], copied[1], force=True)
    for command in ("export", "cat", "report", "extract"):
        for name in (copied[0], copied[0].parent / "*.rsv"):
            out = copied[1].parent if command == "extract" else copied[1]
            (copied[0].parent / "notes.txt").unlink(missing_ok=True)
            if command == "extract":
                (copied[0].parent / "notes.txt").hardlink_to(copied[1])
            arguments = [command, name, *(["notes.txt"] if command in ("cat", "extract") else []), "-o", out, "--force"]
            result = CliRunner().invoke(app, [str(x) for x in arguments])
            assert result.exit_code == 2 and "is the input itself" in result.output, result.output
    assert [path.read_bytes() for path in copied] == before


def test_room_for_all_shards_is_asked_for_first(
    made: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shards = made
    asked: list[int] = []
    monkeypatch.setattr("rsv_format.outputs._check_room", lambda _, nbytes: asked.append(nbytes))
    rsv_format.split(whole, tmp_path / "model.rsv", SIZE)
    sizes = [path.stat().st_size for path in shards]
    assert asked == [sum(sizes[i:]) for i in range(len(sizes))] and len(asked) > 2


def test_holes_of_a_set(copied: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsv_format.stored.Disk.holes", lambda _: 2**40 // len(copied))
    for call in (
        lambda: rsv_format.merge(copied[0], tmp_path / "a.rsv"), lambda: rsv_format.verify(copied[0]),
        lambda: rsv_format.split(copied[0], tmp_path / "b.rsv", SIZE),
    ):  # fmt: skip
        with pytest.raises(RsvError, match="over_limit at file: 10995\\d+ of its "):
            call()
    assert not list(tmp_path.glob("[ab]*.rsv"))


def test_a_shard_that_is_converted_stays_one(copied: list[Path], tmp_path: Path) -> None:
    run("convert", copied[0], tmp_path / "a.rsv")
    assert (tmp_path / "a.rsv").read_bytes() == copied[0].read_bytes()


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_take_sets(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    whole, shards = made
    written = json.loads(run("split", whole, "-o", tmp_path / "a.rsv", "--shard-size", "60kB", "--json"))
    assert [Path(x["path"]).read_bytes() for x in written] == [path.read_bytes() for path in shards]
    run("merge", tmp_path / "a-*.rsv", "-o", tmp_path / "b.rsv")
    assert (tmp_path / "b.rsv").read_bytes() == whole.read_bytes()
    assert json.loads(run("verify", shards[1], "--json"))["valid"]
    tree, of_set = (json.loads(run("info", path, "--json")) for path in (whole, shards[1]))
    assert tree["layers"] == of_set["layers"] and of_set["shards"] == len(shards) and tree["shards"] == 0
    assert f"{len(shards)} shards" in run("info", shards[0])
    assert run("ls", shards[0]) == run("ls", whole)
    for path, out in ((whole, "c"), (shards[0], "d")):
        run("export", path, "-o", tmp_path / f"{out}.safetensors")
        run("extract", path, "-o", tmp_path / out)
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "d.safetensors").read_bytes()
    assert (tmp_path / "c" / "notes.txt").read_bytes() == (tmp_path / "d" / "notes.txt").read_bytes()
    run("compare", tmp_path / "c.safetensors", shards[0])
    run("compare", shards[0], whole)
    run("cat", shards[1], "notes.txt", "-o", tmp_path / "n")
    assert (tmp_path / "n").read_bytes() == b"attached"


def test_quantize_into_shards(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    save_file({f"a.{i}.weight": rng.normal(size=(96, 64)).astype("f4") for i in range(8)}, tmp_path / "m.safetensors")
    run("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "one.rsv", "-q")
    run("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "m.rsv", "--shard-size", "40kB", "-q")
    assert len(list(tmp_path.glob("m-*.rsv"))) > 1
    assert sorted(path.suffix for path in tmp_path.iterdir() if "m-" not in path.name) == [".rsv", ".safetensors"]
    run("merge", tmp_path / "m-*.rsv", "-o", tmp_path / "merged.rsv")
    assert (tmp_path / "merged.rsv").read_bytes() == (tmp_path / "one.rsv").read_bytes()


def test_the_id_of_the_specification(tmp_path: Path) -> None:
    """What SPEC.md computes, of tensors alone."""
    tensors = {name: TensorData("u8", np.arange(20000, dtype="u1")) for name in ("b", "a", "c")}
    rsv_format.write(tmp_path / "a.rsv", tensors=tensors, metadata={"name": "x"})
    headers = []
    for name in rsv_format.split(tmp_path / "a.rsv", tmp_path / "a.rsv", 40000):
        data = Path(name).read_bytes()
        headers.append(json.loads(data[64 : 64 + int.from_bytes(data[16:24], "little")]))
    text = (ROOT / "SPEC.md").read_text("utf-8")
    start = text.index("def set_id(shards)")
    scope: dict[str, Any] = {"json": json, "hashlib": hashlib}
    exec(text[start : text.index("```", start)], scope)
    assert len(headers) > 1 and {scope["set_id"](headers)} == {x["extensions"]["set"]["id"] for x in headers}


def test_mlx_takes_sets(made: tuple[Path, list[Path]]) -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn

    import rsv_mlx

    class Block(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.up = nn.Linear(dim, 128, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [Block(96 + 32 * (i % 2)) for i in range(6)]

    of_file, of_set, x = Model(), Model(), mx.arange(96).astype(mx.float32)
    rsv_mlx.graft(of_file, made[0], strict=False)
    report = rsv_mlx.graft(of_set, made[1][2], strict=False)
    assert report.layers == 6
    for a, b in zip(of_file.blocks, of_set.blocks, strict=True):
        assert mx.array_equal(a.up.dequantize(), b.up.dequantize())
    assert mx.array_equal(of_file.blocks[0].up(x), of_set.blocks[0].up(x))
