"""How fast a quantized model is loaded, in how much memory, and how fast it then runs.

Peers: mlx-lm's own load of a 4-bit affine folder, VeloxQuant-MLX's reservoir (small and large file), and the floor:
mx.load and eval of one array of as many bytes. Every load runs in fresh processes; imports come first and do not
count. The model has the Qwen2.5-0.5B shape (24 blocks, 168 linear layers, random weights, a vocabulary of 1024 so
that the linear layers are all that counts), or is SmolLM2 with its 49152-token embedding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import drop_from_page_cache, in_fresh_process, machine, peak_nbytes, smollm2, start_peak, table

QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
PEER_BLOCKS = 1  # of 24: the peer takes minutes per block


def write_dense(folder: Path) -> None:
    """A Hugging Face folder of the Qwen2.5-0.5B shape with random weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen2

    model = qwen2.Model(qwen2.ModelArgs.from_dict(QWEN))
    weights = {name: mx.random.normal(x.shape) * 0.02 for name, x in tree_flatten(model.parameters())}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), {k: v.astype(mx.float16) for k, v in weights.items()})
    (folder / "config.json").write_text(json.dumps(QWEN))


def write_affine(dense: Path, folder: Path) -> None:
    """The same as mlx-lm writes it: affine, 4 bits, group 64, linear layers only."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    model, _ = load_model(dense)
    nn.quantize(model, 64, 4, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(QWEN | {"quantization": {"group_size": 64, "bits": 4}}))


def ours(path: str, repeat: int) -> dict[str, Any]:
    """rsv_mlx.load_model."""
    import mlx.core as mx
    import mlx_lm.utils  # noqa: F401

    import rsv_mlx

    mx.eval(mx.zeros(1))
    before, times, parts = start_peak(), [], []
    for _ in range(repeat):
        started = time.perf_counter()
        model, report = rsv_mlx.load_model(path, dtype="keep", return_report=True)
        times.append(time.perf_counter() - started)
        parts.append(report.seconds["tensors"] + report.seconds["layers"])
        loaded = peak_nbytes() - before
        del model
    return {"first": times[0], "times": times, "bytes": parts, "peak": loaded}


def mlx_lm_load(path: str, repeat: int) -> dict[str, Any]:
    """mlx_lm.utils.load_model."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.eval(mx.zeros(1))
    before, times = start_peak(), []
    for _ in range(repeat):
        started = time.perf_counter()
        model, _ = load_model(Path(path))
        times.append(time.perf_counter() - started)
        loaded = peak_nbytes() - before
        del model
    return {"first": times[0], "times": times, "peak": loaded}


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
    return {"first": times[0], "times": times, "peak": loaded}


def peer(folder: str, repeat: int) -> dict[str, Any]:
    """VeloxQuant-MLX on PEER_BLOCKS blocks: quantize_model, and loading its small and its large file."""
    import mlx.core as mx
    import mlx.nn as nn
    from veloxquant_mlx.weight import load_reservoir, quantize_model, save_reservoir

    from benchmarks.common import QWEN_BLOCK

    model = nn.Module()
    for block in range(PEER_BLOCKS):
        for name, rows, columns in QWEN_BLOCK:
            linear = nn.Linear(columns, rows, bias=False)
            setattr(model, f"{name.replace('.', '_')}_{block}", linear)
    mx.eval(model.parameters())
    started = time.perf_counter()
    quantize_model(model, bits=4)
    result: dict[str, Any] = {"quantize": time.perf_counter() - started}
    for kind, persist in (("small", False), ("large", True)):
        path = Path(folder, f"peer-{kind}.bin")
        save_reservoir(model, path, persist_rotation=persist)
        started = time.perf_counter()
        load_reservoir(path)
        result[kind] = time.perf_counter() - started
        result[f"{kind}_nbytes"] = path.stat().st_size
    return result


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


def child(what: str, path: str, *rest: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    print("measuring", what, Path(path).name, *rest, "...", file=sys.stderr)
    return in_fresh_process("benchmarks.load", "--child", what, path, *rest)


def loads(what: str, path: Path) -> dict[str, Any]:
    """First load, cold and warm, and the median of later ones."""
    file = path / "model.safetensors" if path.is_dir() else path
    cold = child(what, str(path), "1")["first"] if drop_from_page_cache(file) else None
    warm = [child(what, str(path), "1") for _ in range(3)]
    later = child(what, str(path), "6")
    return {
        "nbytes": file.stat().st_size,
        "cold": cold,
        "warm": statistics.median(run["first"] for run in warm),
        "later": statistics.median(later["times"][1:]),
        "bytes": statistics.median(later["bytes"][1:]) if "bytes" in later else None,
        "peak": statistics.median(run["peak"] for run in warm),
    }


def report(title: str, results: dict[str, dict[str, Any]]) -> None:
    """One table of loads, against the floor."""

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value * 1e3:.0f}"

    base = results["floor: mx.load of as many bytes"]
    table(
        title,
        ("what", "MB", "cold ms", "warm ms", "later ms", "of it bytes ms", "later / floor", "peak / bytes"),
        [
            (
                name,
                f"{r['nbytes'] / 1e6:.0f}",
                ms(r["cold"]),
                ms(r["warm"]),
                ms(r["later"]),
                ms(r["bytes"]),
                f"{r['later'] / base['later']:.2f}",
                f"{r['peak'] / r['nbytes']:.2f}",
            )
            for name, r in results.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--no-peer", action="store_true", help="leave out VeloxQuant-MLX, which takes minutes")
    parser.add_argument("--no-run", action="store_true", help="load only, no tokens")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, path, *rest = arguments.child
        work = {"ours": ours, "mlx_lm": mlx_lm_load, "floor": floor, "peer": peer}
        result = running(path, rest[0]) if what == "running" else work[what](path, int(rest[0]))
        print(json.dumps(result))
        return

    import mlx.core as mx

    import rsv_format

    output: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dense(folder / "dense")
        write_affine(folder / "dense", folder / "affine")
        files = {}
        for codebook in ("lloyd-max", "uniform"):
            files[codebook] = folder / f"{codebook}.rsv"
            rsv_format.quantize(folder / "dense", files[codebook], codebook=codebook, importance="gains")
        rsv_format.quantize(smollm2(), folder / "smollm2.rsv")
        for title, path, others in (
            ("Qwen2.5-0.5B shape, 168 linear layers", files["lloyd-max"], {"mlx-lm, affine 4 bits": folder / "affine"}),
            ("SmolLM2-135M, embedding included", folder / "smollm2.rsv", {}),
        ):
            bare = folder / f"floor-{path.stem}.safetensors"
            mx.save_safetensors(str(bare), {"a": mx.array(np.zeros(path.stat().st_size // 4, np.uint32))})
            results = {"rsv_mlx.load_model": loads("ours", path)}
            results |= {label: loads("mlx_lm", other) for label, other in others.items()}
            results["floor: mx.load of as many bytes"] = loads("floor", bare)
            output[title] = results
        if not arguments.no_run:
            output["tokens"] = {
                "dense float32": child("running", str(folder / "dense"), "mlx_lm"),
                "mlx-lm affine 4 bits": child("running", str(folder / "affine"), "mlx_lm"),
                **{
                    f"rsv {codebook}, {kind}": child("running", str(path), kind)
                    for codebook, path in files.items()
                    for kind in ("packed", "dense")
                },
            }
        if not arguments.no_peer:
            output["peer"] = child("peer", str(folder), "1")
    if arguments.json:
        print(json.dumps(output))
        return
    print(machine())
    for title, results in output.items():
        if title == "tokens":
            table(
                "Seconds per token, Qwen2.5-0.5B shape, float32 activations",
                ("what", "prefill (32 tokens) ms", "decode ms", "peak MB above the interpreter"),
                [
                    (what, f"{r['prefill'] * 1e3:.0f}", f"{r['decode'] * 1e3:.0f}", f"{r['peak'] / 1e6:.0f}")
                    for what, r in results.items()
                ],
            )
        elif title == "peer":
            mine = output["Qwen2.5-0.5B shape, 168 linear layers"]["rsv_mlx.load_model"]
            scale = QWEN["num_hidden_layers"] / PEER_BLOCKS  # type: ignore[operator]
            table(
                f"VeloxQuant-MLX, measured on {PEER_BLOCKS} of 24 blocks and scaled to 24",
                ("what", "seconds", "MB", "over our warm load", "our bytes / its bytes"),
                [
                    ("quantize_model", f"{results['quantize'] * scale:.1f}", "", "", ""),
                    *(
                        (
                            f"load the {kind} file",
                            f"{results[kind] * scale:.1f}",
                            f"{results[f'{kind}_nbytes'] * scale / 1e6:.0f}",
                            f"{results[kind] * scale / mine['warm']:.0f}",
                            f"{mine['nbytes'] / (results[f'{kind}_nbytes'] * scale):.2f}",
                        )
                        for kind in ("small", "large")
                    ),
                ],
            )
        else:
            report(title, results)


if __name__ == "__main__":
    main()
