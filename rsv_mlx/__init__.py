"""RSV on MLX: load a file into a model, its weights packed as they lie in it.

Modules, bottom up:

- transform: T on activations;  window: indices of codes;  codebook: centroids, and products with packed codes
- kernels: those products on Metal
- packed: what quantized layers have in common;  deferred: those that are yet to be read
- linear, embedding, switch: in place of MLX's own modules;  adapters: what is trained beside them
- sharding: parts of them in several processes
- adopt: bytes of a file to arrays: adopted, copied or read when first used
- tracing: which arrays came through foreign code unchanged;  binding: layers and tensors to the modules of a model
- lean: mlx-lm without transformers;  tokenizing: tokenizers without it
- untrusted: mlx-lm's models and tokenizers, of data alone
- loading: load, load_model, load_tokenizer, graft;  saving: save
- calibrate: what a model's linear layers see while it runs on text;  moments: the same, of pairs of channels
- quantizing: quantize_model;  evaluating: a model's predictions, and its source's
- prompt: prompts to tokens, in a process with limits;  serving: HTTP, by mlx-lm's server

What loading does not need is imported when it is first asked for.
"""

import typing as _typing
from importlib import import_module as _import_module

try:
    import mlx.core as _mlx  # noqa: F401
except ModuleNotFoundError as e:  # pragma: no cover
    raise ImportError("rsv_mlx needs MLX: pip install 'rsv-format[mlx]'") from e

from rsv_format import __version__
from rsv_mlx.adopt import LoadReport, adoption_obstacle
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.loading import graft, load, load_model, load_tokenizer
from rsv_mlx.switch import QuantizedSwitchLinear

if _typing.TYPE_CHECKING:
    from rsv_mlx.evaluating import evaluate
    from rsv_mlx.moments import ModelCalibration, text_calibration
    from rsv_mlx.quantizing import quantize_model
    from rsv_mlx.saving import save
    from rsv_mlx.sharding import shard

__all__ = [
    "__version__",
    "LoadReport",
    "ModelCalibration",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "QuantizedSwitchLinear",
    "adoption_obstacle",
    "evaluate",
    "graft",
    "load",
    "load_model",
    "load_tokenizer",
    "quantize_model",
    "save",
    "shard",
    "text_calibration",
]

_LATER = {
    "ModelCalibration": "moments", "evaluate": "evaluating", "quantize_model": "quantizing", "save": "saving",
    "shard": "sharding", "text_calibration": "moments",
}  # fmt: skip


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(_import_module(f"{__name__}.{_LATER[name]}"), name)
    return globals()[name]
