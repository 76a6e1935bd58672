"""RSV on MLX: load a file into a model, its weights packed as they lie in it.

Modules, bottom up:

- transform: T on activations;  codebook: centroids, and products with packed indices
- linear: QuantizedLinear, in place of mlx.nn.Linear
- adopt: bytes of a file to arrays: adopted, copied or read when first used
- binding: layers and tensors to the modules of a model
- loading: load, load_model
"""

try:
    import mlx.core as _mlx  # noqa: F401
except ImportError as e:  # pragma: no cover
    raise ImportError("rsv_mlx needs MLX: pip install 'rsv-format[mlx]'") from e

from rsv_mlx.adopt import LoadReport, adoption_obstacle
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.loading import load, load_model

__all__ = ["LoadReport", "QuantizedLinear", "adoption_obstacle", "load", "load_model"]
