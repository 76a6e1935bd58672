"""How long it takes from the start of a process to a first token, step by step.

Ours: rsv_mlx.load of a file and mlx_lm.stream_generate. mlx-lm's: mlx_lm.load of the same model as an MLX 4-bit folder
and the same mlx_lm.stream_generate. Without a tokenizer: load_model of both, a prompt of tokens. Each run is a fresh
process with everything in the page cache; figures are medians. SmolLM2-135M-Instruct, at float32: MLX's CPU kernels are
many times slower at half precision, which is what the folder would run at. `rsv generate` is timed as a command, and
what it takes beside mlx-lm's own prefill. "Processor" is the time until ready that all cores together worked.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, in_fresh_process, machine, smollm2, table
from benchmarks.load import write_affine, write_smollm2

ROUNDS = 7
PROMPT = "Why is the sky blue? Answer in one sentence."
STEPS = ("interpreter", "imports", "open", "skeleton", "weights", "tokenizer", "prefill and first token")
OURS, MLX_LM = "rsv_mlx.load", "mlx_lm.load, affine 4 bits"
OURS_BARE, MLX_LM_BARE = "rsv_mlx.load_model", "mlx_lm.utils.load_model, affine 4 bits"
COMMAND = "rsv generate --max-tokens 1"


class _Clock:
    """Seconds of each step, from the moment at which the parent started the process."""

    def __init__(self, started: float) -> None:
        self.steps: dict[str, float] = {}  # and "processor", what the steps so far took of all cores
        self._last = started
        self.lap("interpreter")

    def lap(self, step: str) -> None:
        now = time.time()
        self.steps[step] = now - self._last
        self.steps["processor"] = time.process_time()
        self._last = now


def ours(path: str, clock: _Clock, bare: bool) -> Callable[[], None]:
    """What runs the prompt to its first token, once the file is loaded by rsv_mlx."""
    import rsv_mlx

    clock.lap("imports")
    if bare:
        model, report = rsv_mlx.load_model(path, return_report=True)
        tokenizer = None
    else:
        model, tokenizer, report = rsv_mlx.load(path, return_report=True)
    clock.lap("weights")
    inner = report.seconds
    clock.steps["imports"] += inner["mlx_lm"]
    clock.steps |= {"open": inner["open"], "skeleton": inner["model"], "tokenizer": inner.get("tokenizer", 0.0)}
    clock.steps["weights"] -= sum(inner[step] for step in ("mlx_lm", "open", "model")) + clock.steps["tokenizer"]
    return lambda: _first_token(model, tokenizer)


def mlx_lm(path: str, clock: _Clock, bare: bool) -> Callable[[], None]:
    """The same, once a folder is loaded by mlx-lm; its skeleton is not told apart from its weights."""
    import mlx.core as mx
    from mlx_lm.utils import load_model, load_tokenizer

    clock.lap("imports")
    model, config = load_model(Path(path), lazy=True)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    clock.lap("weights")
    tokenizer = None if bare else load_tokenizer(Path(path), eos_token_ids=config.get("eos_token_id"))
    clock.lap("tokenizer")
    return lambda: _first_token(model, tokenizer)


def _first_token(model: Any, tokenizer: Any) -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step, stream_generate

    if tokenizer is None:
        next(iter(generate_step(mx.array([5] * 40), model, max_tokens=1)))
        return
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    next(iter(stream_generate(model, tokenizer, prompt, max_tokens=1)))


def child(kind: str, path: str, bare: str, run: str, started: str) -> dict[str, float]:
    clock = _Clock(float(started))
    first_token = {"ours": ours, "mlx_lm": mlx_lm}[kind](path, clock, bare == "bare")
    ready = clock.steps["processor"]
    if run == "run":
        first_token()
        clock.lap(STEPS[-1])
    return clock.steps | {"processor": ready}


def command(path: Path) -> dict[str, float]:
    """Seconds of the whole command, and what mlx-lm says of its prefill."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "rsv_cli", "generate", str(path), "-p", PROMPT, "-m", "1"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    seconds = time.time() - started
    tokens, speed = done.stderr.split("prompt ")[1].split("/s")[0].split(" tokens, ")
    return {"all": seconds, "prefill": int(tokens) / float(speed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-run", action="store_true", help="load only, no tokens")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child)))
        return

    import rsv_format

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("writing the models ...", file=sys.stderr)
        write_smollm2(folder / "dense")
        rsv_format.quantize(smollm2(), folder / "smollm2.rsv")
        write_affine(folder / "dense", folder / "affine", embedding=True)
        with rsv_format.open(folder / "smollm2.rsv") as file:
            for attachment in file.attachments.values():
                if not (folder / "affine" / attachment.name).exists():
                    (folder / "affine" / attachment.name).write_bytes(bytes(attachment.data))
        contestants = {
            OURS: ("ours", folder / "smollm2.rsv", "whole"),
            MLX_LM: ("mlx_lm", folder / "affine", "whole"),
            OURS_BARE: ("ours", folder / "smollm2.rsv", "bare"),
            MLX_LM_BARE: ("mlx_lm", folder / "affine", "bare"),
        }
        runs: dict[str, list[dict[str, float]]] = {
            name: [] for name in (*contestants, *([] if arguments.no_run else [COMMAND]))
        }
        order, run = random.Random(0), "load" if arguments.no_run else "run"
        for i in range(arguments.rounds + 1):  # the first fills the page cache
            for name in order.sample(list(runs), len(runs)):
                print("measuring", name, "...", file=sys.stderr)
                if name == COMMAND:
                    found = command(folder / "smollm2.rsv")
                else:
                    kind, path, bare = contestants[name]
                    found = in_fresh_process(
                        "benchmarks.start", "--child", kind, str(path), bare, run, str(time.time())
                    )
                runs[name] += [found] if i else []
    output = {
        name: {step: statistics.median(run[step] for run in found if step in run) for step in found[0]}
        for name, found in runs.items()
    }
    for name in contestants:
        output[name]["ready"] = sum(output[name].get(step, 0.0) for step in STEPS[:-1])
        if not arguments.no_run:
            output[name]["all"] = output[name]["ready"] + output[name][STEPS[-1]]
    if arguments.json:
        print(json.dumps(output))
        return
    print(machine())
    columns = (*STEPS[:-1], "ready", "processor", STEPS[-1], "all")

    def cell(name: str, step: str, base: str) -> str:
        if step not in output[name]:
            return ""
        ratio = (
            f" ({output[name][step] / output[base][step]:.2f})"
            if step in ("ready", "processor", "all") and name != base
            else ""
        )
        return f"{output[name][step] * 1e3:.0f}{ratio}"

    pairs = ((OURS, MLX_LM), (MLX_LM, MLX_LM), (OURS_BARE, MLX_LM_BARE), (MLX_LM_BARE, MLX_LM_BARE))
    table(
        "Milliseconds from the start of the process; in brackets, over mlx-lm's",
        ("what", *columns),
        [(name, *(cell(name, step, base) for step in columns)) for name, base in pairs],
    )
    if not arguments.no_run:
        whole, prefill = (output[COMMAND][key] * 1e3 for key in ("all", "prefill"))
        print(f"\n{COMMAND}: {whole:.0f} ms, {whole - prefill:.0f} ms beside the prefill")


if __name__ == "__main__":
    main()
