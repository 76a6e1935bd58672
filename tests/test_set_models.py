"""Models in sets of shards: what a set gives is what its file gives, in every command; a shard is a file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm")
pytest.importorskip("tokenizers")

from test_inspect import inspected, needs_node  # noqa: E402
from test_remote import serving  # noqa: E402
from test_serve import post, serving_here, started, with_template  # noqa: E402
from test_untrusted import base, folder  # noqa: E402, F401
from typer.testing import CliRunner  # noqa: E402

import rsv_format  # noqa: E402
import rsv_mlx  # noqa: E402
from rsv_cli.app import app  # noqa: E402
from rsv_mlx import prompt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CC = shutil.which("cc")


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:  # noqa: F811
    return with_template(base, base.parent / "whole.rsv", "{{ messages[-1].content }}")


@pytest.fixture(scope="module")
def shards(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [Path(name) for name in rsv_format.split(whole, tmp_path_factory.mktemp("set") / "m.rsv", 20_000)]


def run(*arguments: object, said: str = "", code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(x) for x in arguments], input=said)
    assert result.exit_code == code, (result.output, result.exception)
    return str(result.output)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_model_of_a_set_is_that_of_the_file(whole: Path, shards: list[Path], lazy: bool, tmp_path: Path) -> None:
    assert len(shards) > 2
    x = mx.array([[1, 2, 3]])
    for path in (shards[0], shards[-1], str(shards[0].parent / "m-*.rsv")):
        (of_file, tokenizer), (of_set, same) = (rsv_mlx.load(name, lazy=lazy) for name in (whole, path))
        assert mx.array_equal(of_file(x), of_set(x)) and tokenizer.encode("w1 w2") == same.encode("w1 w2")
        for name, model, source in (("a", of_file, whole), ("b", of_set, path)):
            rsv_mlx.save(model, tmp_path / f"{name}.rsv", tokenizer_from=source)
        assert (tmp_path / "a.rsv").read_bytes() == (tmp_path / "b.rsv").read_bytes()
        rsv_mlx.graft(of_file, path)
        assert mx.array_equal(of_file(x), of_set(x))


def test_a_shard_whose_tokenizer_is_taken_is_not_written_over(shards: list[Path], tmp_path: Path) -> None:
    copied = [Path(shutil.copy(path, tmp_path)) for path in shards]
    model, _ = rsv_mlx.load(copied[0])
    for force in (False, True):
        with pytest.raises(rsv_format.RsvError, match="is the input itself"):
            rsv_mlx.save(model, copied[1], tokenizer_from=copied[0], force=force)
    assert copied[1].read_bytes() == shards[1].read_bytes()


@pytest.fixture(scope="module")
def url(whole: Path) -> Iterator[str]:
    with serving(whole.read_bytes()) as server:
        yield server.url


def test_commands_that_run_it(
    whole: Path,
    shards: list[Path],
    url: str,
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{i % 30}" for i in range(90)))
    given: list[tuple[Any, ...]] = [
        ("generate", "FILE", "-p", "w1 w2", "-m", "6", "-q"),
        ("generate", "FILE", "-p", "w1 w2", "-m", "6", "-q", "--draft-model", "FILE"),
        ("chat", "FILE", "-q", "-m", "5"),
        ("evaluate", folder, "FILE", "--text", text, "--window", "30", "--json", "-q"),
        ("calibrate", "FILE", "--text", text, "-o", tmp_path / "i.gguf", "-q"),
    ]
    for command in given:
        found = []
        for path in (whole, shards[1], url):
            said = run(*(path if x == "FILE" else x for x in command), said="w1 w2\n")
            if command[0] == "calibrate":
                said = (tmp_path / "i.gguf").read_bytes().hex()
            if command[0] == "evaluate":
                said = json.loads(said) | {"file": "", "nbytes": 0, "bits_per_weight": 0}
            found.append(said)
        assert found[0] == found[1] == found[2], command
    body = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 5, "temperature": 0}
    with prompt.encoder(whole, 20) as encoder, serving_here(*rsv_mlx.load(whole), encoder) as address:
        same = post(address, body)
    for path in (shards[1], url):
        with started(path) as (_, address):
            status, answer = post(address, body)
        assert (status, answer["choices"]) == (same[0], same[1]["choices"]) and status == 200


def test_what_is_wrong_with_a_set_is_named_by_every_command(
    shards: list[Path],
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    copied = [Path(shutil.copy(path, tmp_path)) for path in shards]
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("w1 w2 w3")
    commands: list[tuple[Any, ...]] = [
        ("info",), ("verify",), ("ls",), ("cat", "m.norm", "-o", out), ("diff", copied[0]), ("report", "-o", out),
        ("export", "-o", out), ("extract", "-o", out), ("split", "-o", out, "--shard-size", "1MB"),
        ("merge", "-o", out), ("generate", "-p", "w1"), ("chat",), ("serve", "--port", "0"),
        ("calibrate", "--text", text, "-o", out),
    ]  # fmt: skip

    def refused(code: str, name: Path) -> None:
        for command, *options in commands:
            told = re.sub(r"\s+", "", run(command, copied[0], *options, code=1))
            assert f"error[{code}]" in told or f"fault[{code}]" in told or code in told, (command, told)
            assert name.name in told, (command, told)
            assert not out.exists()
        for command in ("evaluate", "compare"):
            assert code in run(command, folder, copied[0], code=1)
        with pytest.raises(rsv_format.RsvError, match=code):
            rsv_mlx.load(copied[0])

    kept = copied[1].read_bytes()
    copied[1].unlink()
    refused("missing_shard", copied[1])
    copied[1].write_bytes(copied[2].read_bytes())
    refused("foreign_shard", copied[1])
    rsv_format.write(copied[1])
    refused("foreign_shard", copied[1])
    copied[1].write_bytes(kept)
    run("verify", copied[0])


@needs_node
def test_one_shard_is_a_file_to_the_inspector_and_the_reader_in_javascript(shards: list[Path], tmp_path: Path) -> None:
    adapter = ROOT / "conformance" / "readers" / "javascript" / "adapter.mjs"
    for path in shards:
        facts = inspected(path, tmp_path)["facts"]
        with rsv_format.open(path, alone=True) as shard:
            assert [x["name"] for x in facts["layers"]] == list(shard.layers) and facts["nbytes"] == shard.nbytes
        reads_as_python([shutil.which("node") or "", str(adapter)], path)


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_one_shard_is_a_file_to_the_reader_in_c(shards: list[Path], tmp_path: Path) -> None:
    place = ROOT / "conformance" / "readers" / "c"
    command = [str(CC), "-O1", "-o", str(tmp_path / "adapter"), str(place / "adapter.c"), str(place / "rsv.c"), "-lm"]
    subprocess.run(command, check=True)
    for path in shards:
        reads_as_python([str(tmp_path / "adapter")], path)


def reads_as_python(adapter: list[str], path: Path) -> None:
    """The same is decoded, and nothing is wrong with it."""
    python = [sys.executable, str(ROOT / "conformance" / "adapters" / "python.py")]
    decoded = [
        json.loads(subprocess.run([*x, "decode", path], check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        for x in (adapter, python)
    ]
    assert decoded[0] == decoded[1] and "set" in json.dumps(decoded[0])
    subprocess.run([*adapter, "verify", path], check=True, capture_output=True)
