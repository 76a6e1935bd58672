"""mlx-lm's tuner on packed layers: LoRA is trained, saved, loaded and fused; what cannot be is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm")
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters, print_trainable_parameters, remove_lora_layers

import mlx.optimizers  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from test_mlx_models import TOKENS, make  # noqa: E402

import rsv_format  # noqa: E402
import rsv_mlx  # noqa: E402
from rsv_format import RsvError  # noqa: E402
from rsv_mlx.packed import Packed  # noqa: E402

LORA = {"rank": 4, "scale": 4.0, "dropout": 0.0}
ROWS = [([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 0)] * 4  # one batch: the order is no matter


class Rows(list[Any]):
    """A data set that is tokens already."""

    def process(self, row: Any) -> Any:
        return row


def logits(model: Any) -> Any:
    return np.array(model(mx.array(TOKENS)))


def packed(family: str = "llama", **options: Any) -> tuple[Any, dict[str, Any]]:
    model, config = make(family, tie_word_embeddings=True)
    rsv_mlx.quantize_model(model, importance=None, **options)
    return model, config


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    """On a CPU MLX would call a C++ compiler for seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def train(model: Any, folder: Path, steps: int = 10) -> list[float]:
    """mlx-lm's trainer; losses as it reports them."""
    losses: list[float] = []

    class Report:
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            losses.append(info["train_loss"])

        def on_val_loss_report(self, info: dict[str, Any]) -> None:
            pass

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA})
    )
    arguments = trainer.TrainingArgs(
        batch_size=4, iters=steps, val_batches=0, steps_per_report=1, steps_per_eval=1000, steps_per_save=1000,
        max_seq_length=32, adapter_file=str(folder / "adapters.safetensors"),
    )  # fmt: skip
    trainer.train(
        model, mlx.optimizers.Adam(2e-3), trainer.CacheDataset(Rows(ROWS)), args=arguments, training_callback=Report()
    )
    return losses


def adapt(model: Any, **options: Any) -> None:
    mx.random.seed(3)  # of the adapters' first values
    model.freeze()
    linear_to_lora_layers(model, 2, LORA, **options)


def fuse(model: Any, dequantize: bool) -> None:
    fused = [(name, m.fuse(dequantize=dequantize)) for name, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(fused))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_training_lowers_the_loss_as_on_mlx_own_layers(family: str, tmp_path: Path) -> None:
    affine, _ = make(family, tie_word_embeddings=True)
    nn.quantize(affine, group_size=32, bits=8)
    adapt(affine)
    theirs = train(affine, tmp_path / "affine")
    model, config = packed(family, bits=8)
    before = logits(model)
    codes = {name: np.array(a) for name, a in tree_flatten(model.parameters()) if "codes_" in name}
    adapt(model)
    assert np.array_equal(logits(model), before)
    names = {name.rsplit(".", 1)[-1] for name, _ in tree_flatten(model.trainable_parameters())}
    assert names == {"lora_a", "lora_b"}
    ours = train(model, tmp_path / "ours")
    assert ours[-1] < 0.2 * ours[0] and np.allclose(ours[:6], theirs[:6], rtol=0.1), (ours, theirs)
    after = logits(model)
    for name, array in tree_flatten(model.parameters()):
        if "codes_" in name:
            assert np.array_equal(np.array(array), codes[name.replace(".linear.", ".")])

    with pytest.raises(RsvError, match=r"bad_argument at model\.layers\..*fuse"):
        rsv_mlx.save(model, tmp_path / "m.rsv", config=config)
    again, _ = packed(family, bits=8)
    load_adapters(again, str(tmp_path / "ours"))
    assert np.allclose(logits(again), after, atol=1e-4)

    fuse(again, dequantize=True)
    assert np.allclose(logits(again), after, atol=1e-3)
    assert not any(isinstance(m, Packed) and "layers" in name for name, m in again.named_modules())
    fuse(model, dequantize=False)
    found = logits(model)
    assert np.linalg.norm(found - after) < 0.1 * np.linalg.norm(after - before)
    rsv_mlx.save(model, tmp_path / "m.rsv", config=config)
    assert np.array_equal(logits(rsv_mlx.load_model(tmp_path / "m.rsv")), found)


@pytest.mark.parametrize("options", [{"codebook": "uniform"}, {"rotation": "none"}, {"codebook": "lloyd-max"}])
def test_a_layer_is_packed_again_as_it_was(options: dict[str, Any]) -> None:
    linear = nn.Linear(64, 48)
    layer = rsv_mlx.QuantizedLinear.from_linear(linear, bits=6, **options)
    adapter = layer.to_lora(r=3, scale=2.0)
    assert isinstance(adapter, LoRALinear)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape) * 0.1
    x = mx.random.normal((5, 64))
    fused = adapter.fuse()
    assert type(fused) is type(layer) and fused.transform is layer.transform and fused.codebook is layer.codebook
    assert np.array_equal(np.array(fused.bias), np.array(layer.bias))
    wanted = np.array(adapter(x))
    assert np.linalg.norm(np.array(fused(x)) - wanted) < 0.1 * np.linalg.norm(wanted)
    assert np.allclose(np.array(adapter.fuse(dequantize=True)(x)), wanted, atol=1e-4)


def test_embeddings_and_experts() -> None:
    table = rsv_mlx.QuantizedEmbedding.from_embedding(nn.Embedding(40, 32), bits=8)
    adapter = table.to_lora(r=2)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape) * 0.1
    tokens, x = mx.array([3, 39]), mx.random.normal((2, 32))
    for dense in (True, False):
        fused = adapter.fuse(dequantize=dense)
        assert np.allclose(np.array(fused(tokens)), np.array(adapter(tokens)), atol=0.1)
        assert np.allclose(np.array(fused.as_linear(x)), np.array(adapter.as_linear(x)), atol=0.6)
    assert isinstance(adapter.fuse(), rsv_mlx.QuantizedEmbedding)


def test_what_is_not_trained_is_refused() -> None:
    model, _ = packed(bits=4)
    with pytest.raises(RsvError, match="materialize='dense'"):
        adapt(model, use_dora=True)
    with pytest.raises(RsvError, match="bits"):
        print_trainable_parameters(model)  # it would take words of codes for weights


def test_adapters_are_removed() -> None:
    model, _ = packed(bits=4)
    before = logits(model)
    adapt(model)
    for _, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.lora_b = module.lora_b + 1
    assert not np.allclose(logits(model), before)
    assert np.array_equal(logits(remove_lora_layers(model)), before)


def test_tokenizer_of_a_file(tmp_path: Path) -> None:
    model, config = packed(bits=4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").write_text("{}")
    rsv_mlx.save(model, tmp_path / "a.rsv", config=config, tokenizer_from=tmp_path / "folder")
    rsv_mlx.save(model, tmp_path / "b.rsv", tokenizer_from=tmp_path / "a.rsv")
    with rsv_format.open(tmp_path / "a.rsv") as a, rsv_format.open(tmp_path / "b.rsv") as b:
        assert {n: bytes(x.data) for n, x in a.attachments.items()} == {
            n: bytes(x.data) for n, x in b.attachments.items()
        }
    with pytest.raises(RsvError):
        rsv_mlx.save(model, tmp_path / "c.rsv", tokenizer_from=tmp_path / "folder" / "tokenizer.json")
