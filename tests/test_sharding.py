"""A model in two processes of MLX's ring backend: tensor parallelism, and a pipeline of blocks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
nn = pytest.importorskip("mlx.nn")
pytest.importorskip("mlx_lm")
if not mx.distributed.is_available("ring"):
    pytest.skip("MLX has no ring backend here", allow_module_level=True)

from test_mlx_models import TOKENS, make  # noqa: E402

import rsv_mlx  # noqa: E402
from rsv_format import RsvError  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import mlx.core as mx, numpy as np
import rsv_mlx
from mlx.utils import tree_flatten
from rsv_format import RsvError
group = mx.distributed.init(backend="ring", strict=True)
path, how, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = rsv_mlx.load_model(path, lazy=True)
if how == "pipeline":
    model.model.pipeline(group)
else:
    rsv_mlx.shard(model, group)
from mlx_lm.models.cache import make_prompt_cache
logits = model(mx.array(tokens))
cache = make_prompt_cache(model)
model(mx.array(tokens)[:, :-1], cache=cache)
last = model(mx.array(tokens)[:, -1:], cache=cache)
try:
    rsv_mlx.save(model, path + ".part")
    refused = ""
except RsvError as e:
    refused = str(e)
held = sum(array.nbytes for name, array in tree_flatten(model.parameters()) if "codes" in name and "embed" not in name)
found = {"logits": np.array(logits).tolist(), "last": np.array(last).tolist()}
print(json.dumps(found | {"held": held, "refused": refused}))
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def in_two(path: Path, how: str) -> list[dict[str, Any]]:
    """What both processes say."""
    hosts = path.with_suffix(".hosts")
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), how, json.dumps(TOKENS)], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        found = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert all(child.returncode == 0 for child in children), [said[1].decode()[-2000:] for said in found]
    return [json.loads(said[0].splitlines()[-1]) for said in found]


def saved(family: str, path: Path, **changes: Any) -> tuple[Any, int]:
    """A packed model in a file: its logits, and the bytes of its codes but for the embedding."""
    model, config = make(family, **changes)
    if family == "qwen2":
        for module in model.modules():
            if "bias" in module and isinstance(module, nn.Linear):
                module.bias = mx.random.normal(module.bias.shape)
    rsv_mlx.quantize_model(model, bits=5, importance=None)
    rsv_mlx.save(model, path, config=config)
    held = sum(m.codes.nbytes for name, m in model.named_modules() if "embed" not in name and hasattr(m, "codes"))
    return np.array(model(mx.array(TOKENS))), held


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_tensor_parallelism(family: str, tmp_path: Path) -> None:
    wanted, held = saved(family, tmp_path / "m.rsv", tie_word_embeddings=True)
    for said in in_two(tmp_path / "m.rsv", "tensor"):
        assert np.allclose(said["logits"], wanted, atol=1e-4)
        assert np.allclose(said["last"], wanted[:, -1:], atol=1e-4)
        assert said["held"] == held // 2 and "sharded" in said["refused"]


@pytest.mark.parametrize("family", ["qwen2"])
def test_a_pipeline_of_blocks(family: str, tmp_path: Path) -> None:
    wanted, held = saved(family, tmp_path / "m.rsv", tie_word_embeddings=True)
    said = in_two(tmp_path / "m.rsv", "pipeline")
    assert sum(one["held"] for one in said) == held
    for one in said:
        assert np.allclose(one["logits"], wanted, atol=1e-4) and np.allclose(one["last"], wanted[:, -1:], atol=1e-4)


def test_what_cannot_be_sharded_is_refused() -> None:
    model, _ = make("llama")
    rsv_mlx.quantize_model(model, bits=4, importance=None)
    before = np.array(model(mx.array(TOKENS)))
    with pytest.raises(RsvError, match=r"rsv_mlx\.shard.*materialize='dense'"):
        model.shard(mx.distributed.init())
    with pytest.raises(RsvError, match="unsupported_model.*no tensor parallelism"):
        rsv_mlx.shard(nn.Linear(4, 4))
    assert np.array_equal(np.array(model(mx.array(TOKENS))), before)
    rsv_mlx.shard(model)  # alone
    assert np.allclose(np.array(model(mx.array(TOKENS))), before, atol=1e-5)
