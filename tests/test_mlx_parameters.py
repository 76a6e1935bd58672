"""Parameters of packed layers, seen and set from outside: as MLX's own layers' are, or refused."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

from mlx.utils import tree_flatten, tree_map, tree_reduce  # noqa: E402

import rsv_format  # noqa: E402
import rsv_mlx  # noqa: E402
from rsv_format import RsvError  # noqa: E402
from rsv_mlx.packed import Packed  # noqa: E402

TOKENS = mx.array([[1, 5, 2, 7, 3]])


class Small(nn.Module):
    """An embedding, two linear layers that share their input, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.gate_proj, self.up_proj = nn.Linear(24, 40), nn.Linear(24, 40, bias=False)
        self.norm, self.down = nn.RMSNorm(40), nn.Linear(40, 24)

    def __call__(self, x: Any) -> Any:
        x = self.embed(x)
        return self.embed.as_linear(self.down(self.norm(self.gate_proj(x) * self.up_proj(x))))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mx.random.seed(1)
    model = Small()
    rsv_mlx.quantize_model(model, importance=None)
    rsv_mlx.save(model, tmp_path / "m.rsv")
    return tmp_path / "m.rsv"


def loaded(path: Path, **how: Any) -> Any:
    return rsv_mlx.load(path, model=Small(), **how)


def packed(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Packed)]


def same(a: Any, b: Any) -> bool:
    return np.array_equal(np.array(a(TOKENS).astype(mx.float32)), np.array(b(TOKENS).astype(mx.float32)))


def flat(model: Any) -> dict[str, Any]:
    return tree_flatten(model.parameters(), destination={})


@pytest.mark.parametrize("lazy", [False, True])
def test_all_parameters_are_seen(lazy: bool, path: Path, tmp_path: Path) -> None:
    eager, model = loaded(path), loaded(path, lazy=lazy)
    wanted = flat(eager)
    assert len(packed(model)) == 4 and len(wanted) == 12  # two of each, a norm, two biases, the embedding's dtype
    assert {name: array.nbytes for name, array in flat(model).items()} == {k: v.nbytes for k, v in wanted.items()}
    model = loaded(path, lazy=lazy)
    assert tree_reduce(lambda n, x: n + x.nbytes, model, 0) == sum(x.nbytes for x in wanted.values())
    model = loaded(path, lazy=lazy)
    assert len(tree_flatten(model)) == 12 and not flat(model.gate_proj).keys() - dict(model.gate_proj).keys()
    for name in ("w.safetensors", "w.npz"):
        loaded(path, lazy=lazy).save_weights(str(tmp_path / name))
        assert mx.load(str(tmp_path / name)).keys() == wanted.keys()
        model = loaded(path, lazy=lazy)
        for module in packed(model):
            module.codes = mx.zeros_like(module.codes)
        assert same(model.load_weights(str(tmp_path / name)), eager)


@pytest.mark.parametrize("lazy", [False, True])
def test_copies_and_pickles(lazy: bool, path: Path) -> None:
    eager = loaded(path)
    for made in (copy.deepcopy(loaded(path, lazy=lazy)), pickle.loads(pickle.dumps(loaded(path, lazy=lazy)))):
        assert same(made, eager) and flat(made).keys() == flat(eager).keys()
        assert made.gate_proj.transform is made.up_proj.transform and made.gate_proj.codebook is made.up_proj.codebook
        assert not made.gate_proj.trainable_parameters()
    twin = copy.deepcopy(eager)
    twin.gate_proj.codes = twin.gate_proj.codes + 1
    assert not same(twin, eager) and same(loaded(path), eager)


def test_layers_first_used_by_many_threads(path: Path) -> None:
    wanted = np.array(loaded(path)(TOKENS))
    for _ in range(5):
        model, found, ready = loaded(path, lazy=True, zero_copy="never"), [], threading.Barrier(4)

        def run(model: Any = model, found: list[Any] = found, ready: Any = ready) -> None:
            ready.wait()
            found.append(np.array(model(mx.array(np.array(TOKENS)))))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and all(np.array_equal(x, wanted) for x in found)


def test_casting_a_model_leaves_codes_and_scales(path: Path, tmp_path: Path) -> None:
    eager, model = loaded(path), loaded(path)
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        model.set_dtype(dtype)
        assert model.embed(TOKENS).dtype == model.embed.dtype == model.norm.weight.dtype == model(TOKENS).dtype == dtype
        assert model.gate_proj.codes.dtype == mx.uint32 and mx.array_equal(
            model.gate_proj.scales, eager.gate_proj.scales
        )
        model.save_weights(str(tmp_path / "w.safetensors"))
        again = loaded(path).load_weights(str(tmp_path / "w.safetensors"))
        assert again(TOKENS).dtype == dtype and same(again, model)
        assert same(copy.deepcopy(model), model)
        rsv_mlx.save(model, tmp_path / "cast.rsv")
        assert same(loaded(tmp_path / "cast.rsv", dtype="keep"), model)
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(eager(TOKENS)), rtol=0.02, atol=0.02)  # a rounded bias


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [{"seed": 1}, {"rotation": "none"}, {"codebook": "uniform"}, {"rotation": "haar"}])
def test_weights_of_another_basis_do_not_fit(other: dict[str, Any], strict: bool, path: Path, tmp_path: Path) -> None:
    model = loaded(path)
    mx.random.seed(1)
    foreign = Small()
    rsv_mlx.quantize_model(foreign, importance=None, **other)
    foreign.save_weights(str(tmp_path / "w.safetensors"))
    if strict:
        with pytest.raises(ValueError, match="not in model"):
            model.load_weights(str(tmp_path / "w.safetensors"))
    else:  # what fits is taken: the bias and the norm, which are the same
        model.load_weights(str(tmp_path / "w.safetensors"), strict=False)
    assert same(model, loaded(path))
    with pytest.raises(ValueError, match="codes_"):
        model.update(foreign.parameters())
    name, codes = next((k, v) for k, v in foreign.gate_proj.items() if k.startswith("codes"))
    with pytest.raises(RsvError, match="bad_argument"):
        model.gate_proj[name] = codes


def test_parameters_that_do_not_fit_are_refused(path: Path) -> None:
    model, eager = loaded(path), loaded(path)
    left, embed = model.gate_proj, model.embed
    for layer, name, value in [
        (left, "codes", left.codes[:1]),
        (left, "codes", left.codes.astype(mx.float32)),
        (left, "scales", left.scales[1:]),
        (left, "scales", left.codes[:, 0]),
        (left, "bias", left.bias[None]),
        (left, "weight", mx.zeros((3, 3))),
        (left, "weight", left.codes),
        (left, "other", mx.zeros(3)),
        (embed, "bias", mx.zeros(32)),
        (embed, "one", mx.zeros(3)),
    ]:
        with pytest.raises(RsvError, match="bad_argument|shape_mismatch"):
            setattr(layer, name, value)
    with pytest.raises(RsvError):
        model.update({"up_proj": {name: mx.array([]) for name in model.up_proj.parameters()}})
    assert same(model, eager)
    model.update(tree_map(lambda x: x, model.parameters()))
    left.scales = left.scales * 2
    left.bias = left.bias * 2
    np.testing.assert_allclose(left(mx.ones((1, 24))), 2 * np.array(eager.gate_proj(mx.ones((1, 24)))), rtol=1e-5)


def test_the_weight_is_the_dense_one(path: Path) -> None:
    model, x = loaded(path), mx.random.normal((3, 24))
    wanted = x @ model.up_proj.weight.T
    np.testing.assert_allclose(model.up_proj(x), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.embed.as_linear(x), x @ model.embed.weight.T, rtol=1e-4, atol=1e-5)
    assert isinstance(model.up_proj, Packed)


def test_a_weight_that_is_set_makes_the_layer_dense(path: Path, tmp_path: Path) -> None:
    """As Gemma 3n does in every call."""
    model, x = loaded(path), mx.random.normal((3, 24))
    left, embed = model.gate_proj, model.embed
    for layer in (left, embed):
        layer.weight = mx.clip(layer.weight, -0.05, 0.05)
    assert type(left) is nn.Linear and type(embed) is nn.Embedding
    np.testing.assert_allclose(
        left(x), x @ mx.clip(loaded(path).gate_proj.weight, -0.05, 0.05).T + left.bias, atol=1e-5
    )
    assert set(flat(left)) == {"weight", "bias"} and not left.trainable_parameters()
    assert same(copy.deepcopy(model), model)
    rsv_mlx.save(model, tmp_path / "d.rsv")
    assert same(loaded(tmp_path / "d.rsv"), model)


def test_layers_that_are_replaced_are_not_read(path: Path, tmp_path: Path) -> None:
    (tmp_path / "gone.rsv").write_bytes(path.read_bytes())
    model, report = loaded(tmp_path / "gone.rsv", lazy=True, zero_copy="never", return_report=True)
    before = report.copied_nbytes
    rsv_mlx.graft(model, path)
    assert report.copied_nbytes == before and same(model, loaded(path))
    rsv_format.write(tmp_path / "one.rsv", layers=[rsv_format.quantize_matrix(np.ones((40, 24)), name="up_proj")])
    lazy, report = loaded(path, lazy=True, zero_copy="never", return_report=True)
    before = report.copied_nbytes
    with pytest.raises(RsvError, match=r"missing_layer.*(down|gate_proj|embed)\.weight"):
        rsv_mlx.graft(lazy, tmp_path / "one.rsv")
    rsv_mlx.graft(lazy, tmp_path / "one.rsv", strict=False)
    assert report.copied_nbytes == before
