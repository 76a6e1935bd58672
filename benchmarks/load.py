"""How fast a quantized model is loaded, in how much memory, and how fast it then runs.

Peers: mlx-lm's own load of a 4-bit affine folder, VeloxQuant-MLX's reservoir (small and large file), and the floor:
mx.load and eval of one array of as many bytes. Every load runs in fresh processes; imports come first and do not
count. Models: the linear layers of the Qwen2.5-0.5B shape (24 blocks, 168 layers, random weights, a vocabulary of
1024 so that nothing else counts), the same shape whole, and SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    QWEN_BLOCK,
    drop_from_page_cache,
    in_fresh_process,
    machine,
    peak_nbytes,
    smollm2,
    start_peak,
    table,
)

QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR, WHOLE, SMOLLM2 = "Qwen2.5-0.5B shape, 168 linear layers", "Qwen2.5-0.5B shape, whole", "SmolLM2-135M"
PEER_BLOCKS = 1  # of 24: the peer takes minutes per block
ROUNDS = 7  # in another order each: memory that the one before gave back is not equally warm for all
TOKEN_ROUNDS = 3
CODEBOOKS = ("lloyd-max", "uniform", "trellis")
OURS, AFFINE, FLOOR = "rsv_mlx.load_model", "mlx_lm.utils.load_model, affine 4 bits", "floor: mx.load of as many bytes"


def write_random(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder of this shape with random float16 weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen2

    model = qwen2.Model(qwen2.ModelArgs.from_dict(config))
    weights = {name: mx.random.normal(x.shape) * 0.02 for name, x in tree_flatten(model.parameters())}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), {k: v.astype(mx.float16) for k, v in weights.items()})
    (folder / "config.json").write_text(json.dumps(config))


def write_smollm2(folder: Path) -> None:
    """SmolLM2 as a Hugging Face folder, float16."""
    import mlx.core as mx

    import rsv_format

    source = rsv_format.open_source(smollm2())
    folder.mkdir()
    weights = {name: mx.array(tensor.float32()).astype(mx.float16) for name, tensor in source.tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(source.config))


def write_affine(dense: Path, folder: Path, embedding: bool) -> None:
    """The same as mlx-lm writes it: affine, 4 bits, group 64, with or without the embedding."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    model, config = load_model(dense)
    kinds = (nn.Linear, nn.Embedding) if embedding else (nn.Linear,)
    nn.quantize(model, 64, 4, class_predicate=lambda _, module: isinstance(module, kinds))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))


def ours(path: str, repeat: int, token: int = 0) -> dict[str, Any]:
    """rsv_mlx.load_model, and a first token if asked for."""
    import mlx.core as mx
    import mlx_lm.utils  # noqa: F401

    import rsv_mlx

    mx.eval(mx.zeros(1))
    before, times, parts = start_peak(), [], []
    for _ in range(repeat):
        started = time.perf_counter()
        model, report = rsv_mlx.load_model(path, dtype="keep", return_report=True)
        times.append(time.perf_counter() - started)
        parts.append(report.seconds["read"])
        loaded = peak_nbytes() - before
    if token:
        mx.eval(model(mx.array([[5]])))
    return {"times": times, "bytes": parts, "peak": loaded, "first_token": peak_nbytes() - before}


def mlx_lm_load(path: str, repeat: int, token: int = 0) -> dict[str, Any]:
    """mlx_lm.utils.load_model, and a first token if asked for."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.eval(mx.zeros(1))
    before, times = start_peak(), []
    for _ in range(repeat):
        started = time.perf_counter()
        model, _ = load_model(Path(path))
        times.append(time.perf_counter() - started)
        loaded = peak_nbytes() - before
    if token:
        mx.eval(model(mx.array([[5]])))
    return {"times": times, "peak": loaded, "first_token": peak_nbytes() - before}


def floor(path: str, repeat: int) -> dict[str, Any]:
    """mx.load and eval of one array."""
    import mlx.core as mx

    mx.eval(mx.zeros(1))
    before, times = start_peak(), []
    for _ in range(repeat):
        started = time.perf_counter()
        arrays = mx.load(path)
        mx.eval(arrays)
        times.append(time.perf_counter() - started)
        loaded = peak_nbytes() - before
        del arrays
    return {"times": times, "bytes": times, "peak": loaded}


def peer_write(folder: str) -> dict[str, Any]:
    """VeloxQuant-MLX: quantize_model on PEER_BLOCKS blocks, and both its files."""
    import mlx.core as mx
    import mlx.nn as nn
    from veloxquant_mlx.weight import quantize_model, save_reservoir

    model = nn.Module()
    for block in range(PEER_BLOCKS):
        for name, rows, columns in QWEN_BLOCK:
            setattr(model, f"{name.replace('.', '_')}_{block}", nn.Linear(columns, rows, bias=False))
    mx.eval(model.parameters())
    started = time.perf_counter()
    quantize_model(model, bits=4)
    result: dict[str, Any] = {"quantize": time.perf_counter() - started}
    for kind in ("small", "large"):
        save_reservoir(model, Path(folder, f"peer-{kind}.bin"), persist_rotation=kind == "large")
        result[kind] = Path(folder, f"peer-{kind}.bin").stat().st_size
    return result


def peer_load(path: str) -> dict[str, Any]:
    """VeloxQuant-MLX: load one of its files, and one call of each layer."""
    import mlx.core as mx
    from veloxquant_mlx.weight import load_reservoir

    mx.eval(mx.zeros(1))
    before = start_peak()
    started = time.perf_counter()
    layers = load_reservoir(path)
    mx.eval([dict(layer) for layer in layers.values()])
    result = {"seconds": time.perf_counter() - started, "peak": peak_nbytes() - before}
    widths = {name.replace(".", "_"): columns for name, _, columns in QWEN_BLOCK}
    for name, layer in layers.items():
        mx.eval(layer(mx.ones((1, widths[name.rpartition("_")[0]]))))
    return {**result, "first_token": peak_nbytes() - before}


def running(path: str, kind: str) -> dict[str, Any]:
    """Seconds per token: prefill of 32 tokens and decoding, float32; memory after the first token."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    import rsv_mlx

    mx.eval(mx.zeros(1))
    before = start_peak()
    if kind in ("packed", "dense"):
        model = rsv_mlx.load_model(path, dtype=mx.float32, materialize=kind)
    else:
        model, _ = load_model(Path(path))
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    cache = make_prompt_cache(model)
    prompt = mx.array([[5] * 32])
    started = time.perf_counter()
    mx.eval(model(prompt, cache=cache))
    prefill = (time.perf_counter() - started) / 32
    times = []
    for _ in range(6):
        started = time.perf_counter()
        mx.eval(model(prompt[:, :1], cache=cache))
        times.append(time.perf_counter() - started)
    return {"prefill": prefill, "decode": statistics.median(times[1:]), "peak": peak_nbytes() - before}


def child(what: str, path: Path, *rest: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    print("measuring", what, path.name, *rest, "...", file=sys.stderr)
    return in_fresh_process("benchmarks.load", "--child", what, str(path), *rest)


def loads(contestants: dict[str, tuple[str, Path]]) -> dict[str, dict[str, Any]]:
    """First loads, cold and warm, in rounds, so that a machine that slows down slows all; then the median of later
    ones, and the memory after a token."""
    files = {name: path / "model.safetensors" if path.is_dir() else path for name, (_, path) in contestants.items()}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {"cold": [], "warm": []} for name in contestants}
    names, order = list(contestants), random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(names, len(names)):
            what, path = contestants[name]
            if drop_from_page_cache(files[name]):
                runs[name]["cold"].append(child(what, path, "1"))
            runs[name]["warm"].append(child(what, path, "1"))
    results = {}
    for name, (what, path) in contestants.items():
        later = child(what, path, "6")
        results[name] = {
            "nbytes": files[name].stat().st_size,
            "later": statistics.median(later["times"][1:]),
            "peak": statistics.median(run["peak"] for run in runs[name]["warm"]),
            "first_token": None if what == "floor" else child(what, path, "1", "1")["first_token"],
        }
        for state, found in runs[name].items():
            for key, suffix in (("times", ""), ("bytes", "_bytes")):
                if found and key in found[0]:
                    results[name][state + suffix] = statistics.median(run[key][0] for run in found)
    return results


def tokens(contestants: dict[str, tuple[Path, str]]) -> dict[str, dict[str, Any]]:
    """Running, in rounds as `loads`; medians."""
    names, order = list(contestants), random.Random(0)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(TOKEN_ROUNDS):
        for name in order.sample(names, len(names)):
            path, kind = contestants[name]
            found[name].append(child("running", path, kind))
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def report(title: str, results: dict[str, dict[str, Any]]) -> None:
    """One table of loads, against the floor."""
    base = results[FLOOR]

    def cell(result: dict[str, Any], key: str, over: str | None = None) -> str:
        if result.get(key) is None:
            return ""
        ratio = f" ({result[key] / base[over]:.2f})" if over and base.get(over) else ""
        return f"{result[key] * 1e3:.0f}{ratio}"

    def share(result: dict[str, Any], key: str) -> str:
        return "" if result.get(key) is None else f"{result[key] / result['nbytes']:.2f}"

    table(
        f"{title}: milliseconds (over the floor), peak memory over the file's bytes",
        ("what", "MB", "cold", "of it bytes", "warm", "of it bytes", "later", "peak", "peak after a token"),
        [
            (
                name,
                f"{r['nbytes'] / 1e6:.0f}",
                cell(r, "cold", "cold"),
                cell(r, "cold_bytes", "cold"),
                cell(r, "warm", "warm"),
                cell(r, "warm_bytes", "warm"),
                cell(r, "later", "later"),
                share(r, "peak"),
                share(r, "first_token"),
            )
            for name, r in results.items()
        ],
    )


def report_tokens(title: str, results: dict[str, dict[str, Any]]) -> None:
    """One table of running."""
    table(
        f"{title}: milliseconds per token, float32 activations",
        ("what", "prefill (32 tokens)", "decode", "peak MB above the interpreter"),
        [
            (what, f"{r['prefill'] * 1e3:.0f}", f"{r['decode'] * 1e3:.0f}", f"{r['peak'] / 1e6:.0f}")
            for what, r in results.items()
        ],
    )


def report_peer(peer: dict[str, Any], mine: dict[str, Any]) -> None:
    """The peer, scaled to all blocks."""
    scale = QWEN["num_hidden_layers"] / PEER_BLOCKS  # type: ignore[operator]
    rows = [("quantize_model", f"{peer['quantize'] * scale:.1f}", "", "", "", "", "")]
    for kind in ("small", "large"):
        load, nbytes = peer[f"load_{kind}"], peer[kind]
        rows.append(
            (
                f"load the {kind} file",
                f"{load['seconds'] * scale:.1f}",
                f"{nbytes * scale / 1e6:.0f}",
                f"{load['seconds'] * scale / mine['warm']:.0f}",
                f"{mine['nbytes'] / (nbytes * scale):.2f}",
                f"{load['peak'] / nbytes:.2f}",
                f"{load['first_token'] / nbytes:.2f}",
            )
        )
    table(
        f"VeloxQuant-MLX on {PEER_BLOCKS} of 24 blocks, seconds and bytes scaled to 24",
        ("what", "seconds", "MB", "over our warm load", "our bytes / its", "peak / bytes", "peak after a call"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--no-peer", action="store_true", help="leave out VeloxQuant-MLX, which takes minutes")
    parser.add_argument("--no-load", action="store_true", help="tokens only, without VeloxQuant-MLX")
    parser.add_argument("--no-run", action="store_true", help="load only, no tokens")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, path, *rest = arguments.child
        work: dict[str, Any] = {
            "ours": ours, "mlx_lm": mlx_lm_load, "floor": floor, "running": running,
            "peer_write": peer_write, "peer_load": peer_load,
        }  # fmt: skip
        print(json.dumps(work[what](path, *(int(x) if x.isdigit() else x for x in rest))))
        return

    import mlx.core as mx

    import rsv_format

    output: dict[str, Any] = {"loads": {}, "tokens": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("writing the models ...", file=sys.stderr)
        write_random(folder / "linear", QWEN | {"vocab_size": 1024})
        write_random(folder / "whole", QWEN)
        write_smollm2(folder / "smollm2")
        for title, dense, options in (
            (LINEAR, folder / "linear", {"importance": "gains", "embedding_bits": None}),
            (WHOLE, folder / "whole", {"importance": "gains"}),
            (SMOLLM2, folder / "smollm2", {}),
        ):
            if arguments.no_load and title == WHOLE:
                continue
            files = {codebook: folder / f"{dense.name}-{codebook}.rsv" for codebook in CODEBOOKS}
            for codebook, path in files.items():
                rsv_format.quantize(dense, path, codebook=codebook, **options)
            affine = folder / f"{dense.name}-affine"
            write_affine(dense, affine, embedding=title != LINEAR)
            bare = folder / f"{dense.name}-floor.safetensors"
            mx.save_safetensors(str(bare), {"a": mx.array(np.zeros(files["lloyd-max"].stat().st_size // 4, np.uint32))})
            mine = {f"{OURS}, {codebook}": ("ours", path) for codebook, path in files.items()}
            if not arguments.no_load:
                output["loads"][title] = loads({**mine, AFFINE: ("mlx_lm", affine), FLOOR: ("floor", bare)})
            if not arguments.no_run and title != WHOLE:
                output["tokens"][title] = tokens(
                    {"dense float32": (dense, "mlx_lm"), "mlx-lm, affine 4 bits": (affine, "mlx_lm")}
                    | {
                        f"rsv {codebook}, {kind}": (path, kind)
                        for codebook, path in files.items()
                        for kind in ("packed", "dense")
                    }
                )
        if not (arguments.no_peer or arguments.no_load):
            output["peer"] = child("peer_write", folder)
            for kind in ("small", "large"):
                output["peer"][f"load_{kind}"] = child("peer_load", folder / f"peer-{kind}.bin")
    if arguments.json:
        print(json.dumps(output))
        return
    print(machine())
    for title, results in output["loads"].items():
        report(title, results)
    for title, results in output["tokens"].items():
        report_tokens(title, results)
    if "peer" in output:
        report_peer(output["peer"], output["loads"][LINEAR][f"{OURS}, lloyd-max"])


if __name__ == "__main__":
    main()
