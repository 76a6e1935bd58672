"""`rsv report`: the facts, and the page that shows them and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

import rsv_format
from rsv_cli.app import app
from rsv_format import TensorData, quantize_matrix
from rsv_format.report import describe, html

RNG = np.random.default_rng(2)


def rsv(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": RNG.standard_normal((40, 96)).astype("f4") for i in range(3)}
    tensors["model.layers.1.mlp.up_proj.weight"][5] = 0
    tensors["model.norm.weight"] = np.ones(96, "f4")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    rsv_format.quantize(folder, folder / "model.rsv", bits=3)
    return folder


def facts_in(page: Path) -> Any:
    text = page.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_errors_are_those_of_compare(model: Path, tmp_path: Path) -> None:
    path = model / "model.rsv"
    assert rsv("report", path, "-o", tmp_path / "r.html", "--source", model / "model.safetensors").exit_code == 0
    facts = facts_in(tmp_path / "r.html")
    compared = json.loads(rsv("compare", model / "model.safetensors", path, "--json").stdout)
    wanted = {layer["name"]: layer["relative_error"] for layer in compared["layers"]}
    assert {x["name"]: pytest.approx(x["error"], rel=1e-6) for x in facts["layers"]} == wanted
    assert {x["family"] for x in facts["layers"]} == {"model.layers.*.mlp.up_proj"}


def test_facts_add_up(model: Path) -> None:
    with rsv_format.open(model / "model.rsv") as file:
        facts = describe(file, "x")
        assert sum(facts["kinds"].values()) == facts["nbytes"] == file.nbytes
        assert facts["bits_per_weight"] == rsv_format.summarize(file).bits_per_weight
        for entry in facts["layers"]:
            layer = file.layers[entry["name"]]
            counts = np.bincount(layer.unpack().reshape(-1), minlength=8)
            assert entry["numbers"]["counts"] == counts.tolist() and entry["error"] is None
            scales = entry["numbers"]["scales"]
            assert scales["zeros"] == int((layer.scales == 0).sum()) and sum(scales["bins"]) + scales["zeros"] == 40
            assert scales["max"] == pytest.approx(float(layer.scales.max()))
    texts = [warning["text"] for warning in facts["warnings"]]
    assert "rows that are zero: 1" in texts and "there is no tokenizer.json: rsv_mlx.load needs them" in texts


def test_a_page_needs_nothing_else(model: Path, tmp_path: Path) -> None:
    assert rsv("report", model / "model.rsv", "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text("utf-8")
    addresses = set(re.findall(r"\w+://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}  # the name of a language
    assert not addresses and "default-src 'none'" in text and not re.search(r"<link|<img|\bsrc=|@import|import ", text)


def test_names_of_a_file_are_text(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!--"
    rsv_format.write(tmp_path / "a.rsv", layers=[quantize_matrix(np.ones((2, 8), "f4"), name=name, bits=2)],
                     metadata={name: name})  # fmt: skip
    assert rsv("report", tmp_path / "a.rsv", "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "alert(1)" in text and "<script>alert" not in text and text.count("</script>") == 2
    assert facts_in(tmp_path / "r.html")["layers"][0]["name"] == name


def test_files_without_layers_and_without_anything(tmp_path: Path) -> None:
    for name, tensors in (("a", {}), ("b", {"x": TensorData("f32", np.ones(3, "<f4"))})):
        rsv_format.write(tmp_path / name, tensors=tensors)
        assert rsv("report", tmp_path / name, "-o", tmp_path / f"{name}.html").exit_code == 0
        assert len(facts_in(tmp_path / f"{name}.html")["tensors"]) == len(tensors)


def test_faults_are_on_the_page(model: Path, tmp_path: Path) -> None:
    data = bytearray((model / "model.rsv").read_bytes())
    with rsv_format.open(model / "model.rsv") as file:
        layer = file.layers["model.layers.0.mlp.up_proj"]
        data[layer.offset + layer.layout.scales_offset : layer.offset + layer.layout.scales_offset + 4] = (
            b"\0\0\xc0\x7f"
        )
    (tmp_path / "broken.rsv").write_bytes(data)
    result = rsv("report", tmp_path / "broken.rsv", "-o", tmp_path / "r.html")
    assert result.exit_code == 1 and "blob_digest_mismatch" in result.stderr
    found = [
        warning["text"].split()[0] for warning in facts_in(tmp_path / "r.html")["warnings"] if warning["level"] == "bad"
    ]
    assert found == ["blob_digest_mismatch", "nonfinite_value"]


def test_a_source_of_another_model(model: Path, tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((2, 8), "f4")}, tmp_path / "other.safetensors")
    page = tmp_path / "r.html"
    result = rsv("report", model / "model.rsv", "-o", page, "--source", tmp_path / "other.safetensors")
    assert result.exit_code == 1 and "missing_layer" in result.stderr and not page.exists()


def test_what_a_page_replaces(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    for _ in range(2):
        assert rsv("report", model / "model.rsv", "-o", page).exit_code == 0
    page.write_text("<!doctype html> somebody's")
    assert rsv("report", model / "model.rsv", "-o", page).exit_code == 2
    assert rsv("report", model / "model.rsv", "-o", model / "model.rsv", "--force").exit_code == 2


def test_the_script_ends_no_element() -> None:
    assert html({"name": "x"}).count("</script>") == 2 and html({"name": "x"}).count("</style>") == 1
