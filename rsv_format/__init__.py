"""RSV: quantized weights, computed once and loaded in a blink. The reference implementation, in numpy.

Modules, bottom up:

- errors, limits, version: codes and fixed sizes
- locks: who lives;  panics: what Rust prints;  scratch: temporary folders
- replaceable: what an output may replace;  outputs: how files come into place
- layout: prologue, sizes and offsets;  packing: codes to words;  dtypes: element types
- roles: what tensors are for, by their names;  threads: work on pieces, side by side;  decoder: a model run in numpy
- remote: bytes by URL;  stored: a file's bytes;  tables: for notebooks
- codebook: centroids;  householder: the Q of a QR, in pieces;  rotation: transforms
- header: JSON to structs;  validate: rules between entries, the walk over the blobs
- canonical: the order of entries;  sets: one content in several files
- payload: checks of values;  reader: open and view;  verify: check it all;  writer: stream into place
- splitting: into shards, and back;  summary: where the bytes went
- sources: where models come from;  quantizer: what makes content of them
- difference: of two files;  vqrs: VeloxQuant-MLX's;  upgrade: those and earlier drafts as RSV
- dense: a file as a source;  report: a page to look at, drawn by page/

What makes and compares files is imported when it is first asked for: to open one takes a third less time so.
"""

import typing as _typing
from importlib import import_module as _import_module

from rsv_format.errors import CODES, RsvError, is_out_of_memory
from rsv_format.limits import PAGE
from rsv_format.packing import pack, unpack
from rsv_format.panics import quiet_panics
from rsv_format.reader import Attachment, File, Layer, Tensor, open
from rsv_format.remote import is_url
from rsv_format.roles import Role, layer_role
from rsv_format.rotation import Transform
from rsv_format.summary import Summary, summarize
from rsv_format.verify import verify
from rsv_format.version import VERSION as __version__
from rsv_format.writer import AttachmentData, LayerData, TensorData, Writer, write

if _typing.TYPE_CHECKING:
    from rsv_format.difference import Change, Changes, Difference, diff
    from rsv_format.quantizer.calibration import CALIBRATION_TOKENS
    from rsv_format.quantizer.conversion import QuantizeReport, quantize, quantize_layers, save
    from rsv_format.quantizer.evaluation import Evaluation, default_text, evaluate, evaluate_logits, text_windows
    from rsv_format.quantizer.feedback import feedback_importance, spread_errors
    from rsv_format.quantizer.importance import plain_name, share_groups
    from rsv_format.quantizer.matrix import group_transform, quantize_matrix
    from rsv_format.quantizer.options import EMBEDDING_BITS, Calibration, QuantizeOptions, table_bits
    from rsv_format.quantizer.synthetic import random_tokens
    from rsv_format.sources import Source, SourceTensor, open_source
    from rsv_format.splitting import merge, split
    from rsv_format.upgrade import convert

__all__ = [
    "CALIBRATION_TOKENS",
    "CODES",
    "EMBEDDING_BITS",
    "PAGE",
    "Attachment",
    "AttachmentData",
    "Calibration",
    "Change",
    "Changes",
    "Difference",
    "Evaluation",
    "File",
    "Layer",
    "LayerData",
    "QuantizeOptions",
    "QuantizeReport",
    "Role",
    "RsvError",
    "Source",
    "SourceTensor",
    "Summary",
    "Tensor",
    "TensorData",
    "Transform",
    "Writer",
    "__version__",
    "convert",
    "default_text",
    "diff",
    "evaluate",
    "evaluate_logits",
    "feedback_importance",
    "group_transform",
    "is_out_of_memory",
    "is_url",
    "layer_role",
    "merge",
    "open",
    "open_source",
    "pack",
    "plain_name",
    "quantize",
    "quantize_layers",
    "quantize_matrix",
    "quiet_panics",
    "random_tokens",
    "save",
    "share_groups",
    "split",
    "spread_errors",
    "summarize",
    "table_bits",
    "text_windows",
    "unpack",
    "verify",
    "write",
]

_LATER = {
    "difference": ("Change", "Changes", "Difference", "diff"),
    "quantizer.calibration": ("CALIBRATION_TOKENS",),
    "quantizer.conversion": ("QuantizeReport", "quantize", "quantize_layers", "save"),
    "quantizer.evaluation": ("Evaluation", "default_text", "evaluate", "evaluate_logits", "text_windows"),
    "quantizer.feedback": ("feedback_importance", "spread_errors"),
    "quantizer.importance": ("plain_name", "share_groups"),
    "quantizer.matrix": ("group_transform", "quantize_matrix"),
    "quantizer.options": ("EMBEDDING_BITS", "Calibration", "QuantizeOptions", "table_bits"),
    "quantizer.synthetic": ("random_tokens",),
    "sources": ("Source", "SourceTensor", "open_source"),
    "splitting": ("merge", "split"),
    "upgrade": ("convert",),
}


def __getattr__(name: str) -> _typing.Any:
    for module, names in _LATER.items():
        if name in names:
            globals()[name] = getattr(_import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
