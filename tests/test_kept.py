"""What share of the weights is quantized, what is kept and why, as the report and the commands say it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_format.summary import Kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1).standard_normal
    block = "model.layers.{}"
    tensors = {"model.embed_tokens.weight": draw((100, 32)), "model.norm.weight": draw(32)}
    for i in range(2):
        tensors |= {
            f"{block.format(i)}.self_attn.q_proj.weight": draw((32, 32)),
            f"{block.format(i)}.mlp.gate.weight": draw((4, 32)),
            f"{block.format(i)}.mlp.experts.gate_up_proj": draw((4, 32, 60)),
        }
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


EXPERTS = Kept("model.layers.*.mlp.experts.gate_up_proj", "experts in no known layout", 2, 2 * 4 * 32 * 60)
GATES = Kept("model.layers.*.mlp.gate.weight", "a router", 2, 256)
NORM = Kept("model.norm.weight", "a vector", 1, 32)
QUANTIZED, ALL = 3200 + 2 * 1024, 3200 + 2 * 1024 + EXPERTS.weights + GATES.weights + NORM.weights


def test_report_and_info_say_what_is_kept(folder: Path) -> None:
    summary = rsv_format.quantize(folder, folder / "m.rsv").summary
    assert summary.kept == (EXPERTS, GATES, NORM) and summary.weights == QUANTIZED
    assert summary.share == QUANTIZED / ALL and summary.kept_weights == ALL - QUANTIZED
    tree = json.loads(run("info", folder / "m.rsv", "--json"))
    assert tree["share"] == QUANTIZED / ALL and [Kept(**x) for x in tree["kept"]] == [EXPERTS, GATES, NORM]
    text = run("info", folder / "m.rsv")
    assert (
        f"{100 * QUANTIZED / ALL:.1f} % of all" in text and "experts in no known layout" in text and "a router" in text
    )


def test_quantize_names_what_it_keeps_where_that_is_much(folder: Path) -> None:
    text = run("quantize", folder, "-o", folder / "m.rsv", "--exclude", "*embed*")
    kept = ALL - 2 * 1024
    assert f"kept   {100 * kept / ALL:.1f} % as it was:" in text
    for family, weights, reason in ((EXPERTS.family, EXPERTS.weights, EXPERTS.reason),
                                    ("model.embed_tokens.weight", 3200, "excluded"),
                                    (GATES.family, 256, "a router")):  # fmt: skip
        assert f"{100 * weights / ALL:.1f} %  {family}  ({reason})" in text


def test_quantize_is_silent_about_a_per_cent(tmp_path: Path) -> None:
    weights = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
    save_file({"a.weight": weights, "b.norm.weight": weights[0, :64]}, tmp_path / "model.safetensors")
    text = run("quantize", tmp_path / "model.safetensors", "-o", tmp_path / "m.rsv")
    assert "99.6 % of all" in text and "kept" not in text
    assert run("quantize", tmp_path / "model.safetensors", "-o", tmp_path / "n.rsv", "--quiet") == ""
