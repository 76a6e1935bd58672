"""Groups of layers quantized by other processes: the bytes are those of one, lost workers or not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pieces import llama
from test_resume import ROOT, interrupted

import rsv_format
from rsv_format import RsvError, open_source
from rsv_format.outputs import unfinished_path
from rsv_format.quantizer.calibration import DecoderCalibration
from rsv_format.quantizer.elsewhere import Task, quantize_group


class Here(Executor):
    """Does at once what is submitted, after a way through pickle, and notes the tasks."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def submit(self, work: Any, /, *args: Any, **more: Any) -> Future[Any]:
        import pickle

        future: Future[Any] = Future()
        try:
            (task,) = pickle.loads(pickle.dumps(args))
            self.tasks.append(task)
            future.set_result(pickle.loads(pickle.dumps(work(task, **more))))
        except Exception as e:
            future.set_exception(pickle.loads(pickle.dumps(e)))
        return future


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path / "model")


@pytest.mark.parametrize(
    "options",
    [{}, {"bits_per_weight": 9.0}, {"rotation": "haar"}, {"codebook": "trellis"}, {"embedding_bits": "keep"},
     {"importance": {"model.layers.0.mlp.up_proj": np.arange(64.0)}}, {"exclude": ["*q_proj"], "bits": 3}],
    ids=str,
)  # fmt: skip
def test_the_bytes_are_those_of_one_process(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    executor = Here()
    rsv_format.quantize(model, tmp_path / "one.rsv", **options)
    report = rsv_format.quantize(model, tmp_path / "many.rsv", executor=executor, **options)
    assert (tmp_path / "many.rsv").read_bytes() == (tmp_path / "one.rsv").read_bytes()
    assert sum(len(task.group) for task in executor.tasks) == report.layers and len(executor.tasks) > 5
    assert rsv_format.verify(tmp_path / "many.rsv") == [] and len(os.listdir(tmp_path)) == 3


def test_error_feedback_goes_along(model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 40)
    with open_source(model) as source:
        seen = DecoderCalibration(source, ids)
        rsv_format.quantize(model, tmp_path / "one.rsv", calibration=seen)
        rsv_format.quantize(model, tmp_path / "many.rsv", calibration=seen, executor=Here())
    assert (tmp_path / "many.rsv").read_bytes() == (tmp_path / "one.rsv").read_bytes()


def test_processes_of_a_pool_and_what_was_left_by_one(model: Path, tmp_path: Path) -> None:
    rsv_format.quantize(model, tmp_path / "one.rsv", importance="gains")
    out = tmp_path / "many.rsv"
    interrupted(14, model, out, importance="gains", resume=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        rsv_format.quantize(model, out, importance="gains", resume=True, executor=executor, workers=2)
    assert out.read_bytes() == (tmp_path / "one.rsv").read_bytes() and not os.path.exists(unfinished_path(out))


def test_errors_of_workers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.rsv"
    with open_source(model) as source, pytest.raises(RsvError, match="its path"):
        rsv_format.quantize(source, out, executor=Here())
    executor = Here()
    rsv_format.quantize(model, out, executor=executor)
    with pytest.raises(RsvError, match="is the storage shared"):
        quantize_group(executor.tasks[0])  # the file is in its place by now
    interrupted(9, model, out, resume=True)
    with pytest.raises(RsvError, match="--remove-leftovers"):
        rsv_format.quantize(model, out, executor=Here())

    def failing(error: Exception) -> Any:
        def work(*_: Any) -> Any:
            raise error

        return work

    for error, expected in (
        (OSError("unplugged"), "io_error.*OSError: unplugged"),
        (MemoryError("none left"), "in the worker of .*: none left"),  # which is no fault of the file
    ):
        monkeypatch.setattr("rsv_format.quantizer.elsewhere.quantize_group", failing(error))
        kind = MemoryError if isinstance(error, MemoryError) else RsvError
        with ThreadPoolExecutor(1) as pool, pytest.raises(kind, match=expected):
            rsv_format.quantize(model, tmp_path / "b.rsv", executor=pool)
        assert not (tmp_path / "b.rsv").exists()


def test_a_worker_that_sees_another_source(model: Path, tmp_path: Path) -> None:
    class Moved(Here):
        def submit(self, work: Any, /, *args: Any, **more: Any) -> Future[Any]:
            (task,) = args
            os.utime(model / "model.safetensors", ns=(len(self.tasks), 5))
            return super().submit(work, task)

    with pytest.raises(RsvError, match="a worker sees another one, file 'model.safetensors'") as e:
        rsv_format.quantize(model, tmp_path / "a.rsv", executor=Moved())
    assert e.value.code == "io_error" and os.listdir(tmp_path) == ["model"]


def test_weights_that_are_not_finite_are_named_as_by_one(model: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = np.nan
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(RsvError) as e:
        rsv_format.quantize(model, tmp_path / "a.rsv", executor=Here(), importance="none")
    assert e.value.code == "nonfinite_weight" and "row 7, column 3" in e.value.detail
    assert os.listdir(tmp_path) == ["model"]


# --- Dask -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A real one with two workers, each a process of its own."""
    pytest.importorskip("distributed")
    place = tmp_path / "dask"
    place.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    told = place / "scheduler.json"

    def dask(*words: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *map(str, words)], env=environment, cwd=place, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    processes = [dask("scheduler", "--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", told)]
    try:
        while not told.exists() or not told.read_text():
            assert processes[0].poll() is None
            time.sleep(0.1)
        address = json.loads(told.read_text())["address"]
        processes += [dask("worker", address, "--nthreads", 1, "--no-nanny", "--no-dashboard") for _ in range(2)]
        yield address, processes[1:]
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def test_a_worker_of_dask_is_killed_midway(
    scheduler: tuple[str, list[subprocess.Popen[bytes]]], model: Path, tmp_path: Path
) -> None:
    from distributed import Client

    address, workers = scheduler
    rsv_format.quantize(model, tmp_path / "one.rsv")
    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(2)
        out, finished = tmp_path / "many.rsv", []

        def told(done: int, total: int, name: str) -> None:
            if name.startswith("model.layers") and workers[0].poll() is None:
                finished.append(name)
                if len(finished) == 2:
                    workers[0].send_signal(signal.SIGKILL)
                    workers[0].wait()

        with client.get_executor(retries=2) as executor:
            rsv_format.quantize(model, out, executor=executor, workers=2, progress=told)
    assert workers[0].returncode == -signal.SIGKILL and workers[1].poll() is None
    assert out.read_bytes() == (tmp_path / "one.rsv").read_bytes() and rsv_format.verify(out) == []
    assert not os.path.exists(unfinished_path(out))
    out.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "rsv_cli", "quantize", model, "-o", out, "--scheduler", address],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == (tmp_path / "one.rsv").read_bytes()


def test_no_scheduler_is_there(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    from rsv_cli import cluster

    monkeypatch.setattr(cluster, "_SECONDS", 0.2)
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        with pytest.raises(RsvError, match="no scheduler answers") as e, cluster.cluster(address):
            raise AssertionError
        assert e.value.code == "io_error"
