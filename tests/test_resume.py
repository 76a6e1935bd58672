"""Interrupted work is taken up: the same bytes at the end, nothing left behind; what is of another run is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pieces import llama

import rsv_format
from rsv_format import RsvError, open_source, splitting
from rsv_format.outputs import leftovers, unfinished_path
from rsv_format.quantizer.calibration import DecoderCalibration
from rsv_format.quantizer.plan import plan
from rsv_format.quantizer.unfinished import Journal
from rsv_format.writer import Writer

ROOT = Path(__file__).resolve().parents[1]
RSV = [sys.executable, "-m", "rsv_cli"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"bits_per_weight": 9.0},
    "haar": {"rotation": "haar"},
    "kept": {"embedding_bits": "keep", "importance": "gains"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path / "model")


def interrupted(
    count: int, source: Any, out: Path, *, error: type[BaseException] = KeyboardInterrupt, **options: Any
) -> int:
    """Quantize until so many blobs are finished; how many there were."""
    finished = 0

    def note(self: Any, *blob: str) -> None:
        nonlocal finished
        original(self, *blob)
        finished += 1
        if finished == count:
            raise KeyboardInterrupt

    original = Journal.note
    patch = pytest.MonkeyPatch()
    patch.setattr("rsv_format.quantizer.unfinished.Journal.note", note)
    with contextlib.suppress(KeyboardInterrupt):
        rsv_format.quantize(source, out, **options)
    patch.undo()
    return finished


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_bytes_are_those_of_a_run_that_was_not_interrupted(kind: str, model: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out" / "a.rsv", OPTIONS[kind]
    out.parent.mkdir()
    rsv_format.quantize(model, tmp_path / "whole.rsv", **options)
    blobs = interrupted(10**9, model, tmp_path / "b.rsv", **options)
    for count in range(1, blobs, 5):
        interrupted(count, model, out, resume=True, **options)
        assert [x.name for x in out.parent.iterdir()] == [".a.rsv.unfinished"]
        interrupted(2, model, out, resume=True, **options)  # and once more, soon
        rsv_format.quantize(model, out, resume=True, **options)
        assert out.read_bytes() == (tmp_path / "whole.rsv").read_bytes()
        assert os.listdir(out.parent) == ["a.rsv"]
        out.unlink()


def test_what_is_finished_is_not_made_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.rsv"
    blobs = interrupted(10**9, model, tmp_path / "b.rsv")
    interrupted(blobs - 8, model, out, resume=True)
    monkeypatch.setattr("rsv_format.quantizer.conversion.synthetic_importance", lambda *_: pytest.fail("was run"))
    written: list[str] = []
    put = Writer.layer_pieces

    def seen(self: Writer, name: str, *rest: Any) -> None:
        written.append(name)
        put(self, name, *rest)

    monkeypatch.setattr(Writer, "layer_pieces", seen)
    rsv_format.quantize(model, out, resume=True)
    assert 0 < len(written) <= 5 and out.read_bytes() == (tmp_path / "b.rsv").read_bytes()


def test_with_feedback_too(model: Path, tmp_path: Path) -> None:
    """A calibration of one's own cannot be known again: its work is not taken up; a text's is."""
    ids = np.random.default_rng(0).integers(0, 300, 40)
    with open_source(model) as source:
        options = {"calibration": DecoderCalibration(source, ids)}
        interrupted(9, model, tmp_path / "a.rsv", resume=True, **options)
        with pytest.raises(RsvError, match="calibration: not a text"):
            rsv_format.quantize(model, tmp_path / "a.rsv", resume=True, **options)


def test_a_blob_that_did_not_come_to_the_disk_is_made_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.rsv"
    blobs = interrupted(10**9, model, tmp_path / "b.rsv")
    interrupted(blobs - 5, model, out, resume=True)
    with rsv_format.open(tmp_path / "b.rsv") as file:
        lost = [blob for blob in file.blobs if blob.kind in ("layer", "diagonal")][::3]
    with open(unfinished_path(out), "r+b") as unfinished:
        for blob in lost:
            unfinished.seek(blob.offset)
            unfinished.write(bytes(blob.nbytes))
    rsv_format.quantize(model, out, resume=True)
    assert out.read_bytes() == (tmp_path / "b.rsv").read_bytes()


def test_a_journal_that_ends_within_a_line(model: Path, tmp_path: Path) -> None:
    rsv_format.quantize(model, tmp_path / "whole.rsv")
    for cut in (1, 30, 3000, 20000, 10**6):
        out = tmp_path / "a.rsv"
        interrupted(25, model, out, resume=True)
        path = Path(unfinished_path(out))
        os.truncate(path, max(path.stat().st_size - cut, 0))
        rsv_format.quantize(model, out, resume=True)
        assert out.read_bytes() == (tmp_path / "whole.rsv").read_bytes() and not path.exists()


def touched(model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(1, 1))


def other_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5}))


@pytest.mark.parametrize(
    "changed, options, word",
    [
        (None, {"bits": 5}, "bits: None, not 5"),
        (None, {"seed": 1}, "seed: 0, not 1"),
        (None, {"importance": "gains"}, "importance"),
        (None, {"importance": {"model.layers.0.mlp.up_proj": np.ones(64)}}, "importance"),
        (touched, {}, "file 'model.safetensors'"),
        (other_config, {}, "config.json"),
    ],
)
def test_what_another_run_has_left_is_refused_by_name(
    changed: Callable[[Path], None] | None, options: dict[str, Any], word: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.rsv"
    interrupted(12, model, out, resume=True)
    before = Path(unfinished_path(out)).read_bytes()
    if changed:
        changed(model)
    with pytest.raises(RsvError) as e:
        rsv_format.quantize(model, out, resume=True, **options)
    assert e.value.code == "bad_argument" and e.value.where == unfinished_path(out) and word in e.value.detail
    assert Path(unfinished_path(out)).read_bytes() == before
    rsv_format.quantize(model, out, **options)  # without resume it is left alone
    assert Path(unfinished_path(out)).read_bytes() == before and rsv_format.verify(out) == []
    assert leftovers(out) == [Path(unfinished_path(out))]


def test_without_resume_only_a_kill_leaves_something(model: Path, tmp_path: Path) -> None:
    interrupted(12, model, tmp_path / "a.rsv")
    assert os.listdir(tmp_path) == ["model"]


def test_an_unfinished_file_is_no_rsv_file(model: Path, tmp_path: Path) -> None:
    interrupted(12, model, tmp_path / "a.rsv", resume=True)
    with pytest.raises(RsvError) as e:
        rsv_format.open(unfinished_path(tmp_path / "a.rsv"))
    assert e.value.code == "bad_magic"


def test_what_lies_there_and_is_not_an_own_file(model: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "a.rsv", Path(unfinished_path(tmp_path / "a.rsv"))
    (tmp_path / "mine").write_bytes(b"mine")
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(RsvError):
        rsv_format.quantize(model, out, resume=True)
    assert (tmp_path / "mine").read_bytes() == b"mine" and path.is_symlink()
    rsv_format.quantize(model, out)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RsvError):
        rsv_format.quantize(model, out, resume=True)
    assert stat.S_ISFIFO(path.stat().st_mode)
    path.unlink()
    rsv_format.quantize(model, tmp_path / "b.rsv")
    for data in (b"what is this", b"\xff" * 10**6, b""):  # nothing of use: begun anew
        path.write_bytes(data)
        rsv_format.quantize(model, out, resume=True)
        assert out.read_bytes() == (tmp_path / "b.rsv").read_bytes() and not path.exists()


def test_two_at_work_on_one_output(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.rsv"
    seen: list[str] = []

    def told(done: int, total: int, name: str) -> None:
        if name == "model.layers.1.mlp.down_proj" and not seen:
            with pytest.raises(RsvError, match="another run is at work") as e:
                rsv_format.quantize(model, out, resume=True)
            seen.append(e.value.code)
            rsv_format.quantize(model, out)  # goes without the name

    rsv_format.quantize(model, out, resume=True, progress=told)
    assert seen == ["bad_argument"] and rsv_format.verify(out) == [] and os.listdir(tmp_path).count("a.rsv") == 1
    assert not os.path.exists(unfinished_path(out))


# --- the end of a process -------------------------------------------------------------------------------------------

KILLED = """
import os, sys, rsv_format
from rsv_format.quantizer import unfinished
note, left = unfinished.Journal.note, [int(sys.argv[3])]
def counted(self, *blob):
    if left[0] == 0:
        os.kill(os.getpid(), 9)
    left[0] -= 1
    note(self, *blob)
unfinished.Journal.note = counted
rsv_format.quantize(sys.argv[1], sys.argv[2], importance="gains", resume=sys.argv[4] == "resume")
"""


def test_kills_at_random_moments(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "a.rsv"
    out.parent.mkdir()
    rsv_format.quantize(model, tmp_path / "whole.rsv", importance="gains")
    chance, ends = random.Random(0), []
    while not out.exists():
        count = str(chance.randrange(12))
        ends.append(subprocess.run([sys.executable, "-c", KILLED, model, out, count, "resume"], cwd=ROOT).returncode)
        assert len(os.listdir(out.parent)) == 1
    assert len(ends) > 3 and set(ends[:-1]) == {-signal.SIGKILL} and ends[-1] == 0
    assert os.listdir(out.parent) == ["a.rsv"] and out.read_bytes() == (tmp_path / "whole.rsv").read_bytes()


def rsv(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RSV, *map(str, args)], capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_command_line(model: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "a.rsv", unfinished_path(tmp_path / "a.rsv")
    plain = ["quantize", model, "-o", out, "--importance", "gains"]
    killed = subprocess.run([sys.executable, "-c", KILLED, model, out, "20", "no"], cwd=ROOT).returncode
    assert killed == -signal.SIGKILL and os.path.exists(path) and not out.exists()
    (tmp_path / ".b.rsv.0123456789ab.tmp").touch()
    done = rsv(*plain)
    assert done.returncode == 0 and f"{path}  " in done.stderr and "old" in done.stderr and "--resume" in done.stderr
    whole = out.read_bytes()
    out.unlink()
    done = rsv(*plain, "--resume", "--bits", 3)
    assert done.returncode == 2 and "bits: None, not 3" in done.stderr and not out.exists()
    assert rsv(*plain, "--resume", "--remove-leftovers").returncode == 2 and os.path.exists(path)
    shutil.copy(path, tmp_path / "copy")
    done = rsv(*plain, "--resume")
    assert done.returncode == 0 and out.read_bytes() == whole and not os.path.exists(path)
    shutil.copy(tmp_path / "copy", path)
    done = rsv(*plain, "--remove-leftovers")
    assert done.returncode == 0 and "removed" in done.stderr and not os.path.exists(path)
    assert (tmp_path / ".b.rsv.0123456789ab.tmp").exists() and out.read_bytes() == whole


@pytest.mark.parametrize("before", [True, False])
def test_a_file_size_limit(before: bool, model: Path, tmp_path: Path) -> None:
    import resource

    out = tmp_path / "a.rsv"
    if before:
        rsv_format.quantize(model, out, importance="none", bits=2)
    old = out.read_bytes() if before else None

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    for more in ([], ["--resume"]):
        done = subprocess.run(
            [*RSV, "quantize", model, "-o", out, "--importance", "gains", *more],
            preexec_fn=limit, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and done.stderr.count("error[io_error]") == 1 and "Traceback" not in done.stderr
        assert (out.read_bytes() if out.exists() else None) == old
    rsv_format.quantize(model, out, importance="gains", resume=True)
    assert rsv_format.verify(out) == [] and sorted(os.listdir(tmp_path)) == ["a.rsv", "model"]


def test_a_full_disk_leaves_what_was_done_for_a_run_that_resumes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "a.rsv", Writer._write
    rsv_format.quantize(model, tmp_path / "whole.rsv")
    left = [40]

    def full(self: Writer, offset: int, data: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RsvError("io_error", "a.rsv", os.strerror(errno.ENOSPC))
        write(self, offset, data)

    monkeypatch.setattr(Writer, "_write", full)
    with pytest.raises(RsvError, match="No space left"):
        rsv_format.quantize(model, out, resume=True)
    monkeypatch.undo()
    assert not out.exists() and os.path.exists(unfinished_path(out))
    rsv_format.quantize(model, out, resume=True)
    assert out.read_bytes() == (tmp_path / "whole.rsv").read_bytes()


# into shards

SHARD = 30_000


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_shards_are_taken_up_and_all_or_none(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while layers are made, or while the shards are written: nothing but the unfinished file is left."""
    out = tmp_path / "out" / "a.rsv"
    out.parent.mkdir()
    rsv_format.quantize(model, tmp_path / "whole.rsv")
    wanted = [Path(name).read_bytes() for name in rsv_format.split(tmp_path / "whole.rsv", tmp_path / "w.rsv", SHARD)]
    assert len(wanted) > 2
    interrupted(9, model, out, resume=True, shard_size=SHARD)
    assert names_in(out.parent) == [".a.rsv.unfinished"]
    commit = splitting.commit
    monkeypatch.setattr(splitting, "commit", lambda *outputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rsv_format.quantize(model, out, resume=True, shard_size=SHARD)
    assert names_in(out.parent) == [".a.rsv.unfinished"]
    with pytest.raises(ZeroDivisionError):
        rsv_format.quantize(model, tmp_path / "c.rsv", shard_size=SHARD)
    assert not list(tmp_path.glob("*c*.rsv*"))
    monkeypatch.setattr(splitting, "commit", commit)
    monkeypatch.setattr(Writer, "layer_pieces", lambda *_: pytest.fail("all layers are there"))
    report = rsv_format.quantize(model, out, resume=True, shard_size=SHARD)
    assert [Path(name).read_bytes() for name in report.shards] == wanted and report.path == report.shards[0]
    assert names_in(out.parent) == [Path(name).name for name in report.shards]
    assert report.summary.weights == rsv_format.summarize(tmp_path / "whole.rsv").weights


def test_shards_of_a_run_that_was_killed(model: Path, tmp_path: Path) -> None:
    """By SIGKILL while it writes shards: named with its age, taken up by --resume, or removed."""
    script = (
        "import os, signal, sys; from rsv_format import splitting, quantize;"
        "splitting.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        f"quantize(sys.argv[1], sys.argv[2], shard_size={SHARD})"
    )
    out = tmp_path / "out" / "a.rsv"
    out.parent.mkdir()

    def killed() -> None:
        done = subprocess.run([sys.executable, "-c", script, model, out], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        assert names_in(out.parent)[0] == ".a.rsv.unfinished"
        assert all(name.endswith((".unfinished", ".tmp")) for name in names_in(out.parent))

    def rsv(*options: str) -> str:
        command = [*RSV, "quantize", str(model), "-o", str(out), "--shard-size", str(SHARD), *options]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stderr

    killed()
    assert "left behind" in rsv("--dry-run") and ".a.rsv.unfinished" in names_in(out.parent)
    rsv("--resume")
    made = names_in(out.parent)
    assert len(made) > 2 and made[0] == f"a-00001-of-{len(made):05d}.rsv"
    for name in made:
        (out.parent / name).unlink()
    killed()
    (out.parent / ".a-00001-of-00002.rsv.0123456789ab.tmp").touch()
    assert rsv("--remove-leftovers").count("removed") == 2
    assert names_in(out.parent) == made


def test_what_can_be_known_of_shards_is_told_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(model, shard_size=SHARD)
    report = rsv_format.quantize(model, tmp_path / "a.rsv", shard_size=SHARD)
    assert planned.shards == len(report.shards) and planned.disk == 2 * planned.nbytes
    alone = plan(model)
    assert (alone.shards, alone.disk) == (0, alone.nbytes)
    needed: list[int] = []
    monkeypatch.setattr("rsv_format.outputs._check_room", lambda descriptor, nbytes: needed.append(nbytes))
    rsv_format.quantize(model, tmp_path / "b.rsv", shard_size=SHARD)
    assert needed[1] >= 1.9 * planned.nbytes  # before the model is run
    monkeypatch.setattr("rsv_format.quantizer.conversion.synthetic_importance", lambda *_: pytest.fail("was run"))
    with pytest.raises(RsvError, match="bad_argument"):
        rsv_format.quantize(model, tmp_path / "c.rsv", shard_size=0)
    taken = Path(report.shards[1])
    taken.write_text("not RSV")
    with pytest.raises(RsvError, match="exists and is not an RSV file"):
        rsv_format.quantize(model, tmp_path / "a.rsv", shard_size=SHARD)
    assert taken.read_text() == "not RSV"
