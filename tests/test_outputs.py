"""What is replaced and what is not, and how files come into place: one rule for every command and call."""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rsv_format
from rsv_format import RsvError, outputs
from rsv_format.outputs import Output, check, commit, leftovers, write_all
from rsv_format.replaceable import Kind
from rsv_format.sources.imatrix import load_imatrix, save_imatrix

ROOT = Path(__file__).resolve().parents[1]
RSV = [sys.executable, "-m", "rsv_cli"]
TEXT = Kind("a text", lambda head: head.startswith(b"text"))


@pytest.fixture(params=["named", "unnamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Files that are not finished have a hidden name, as on most systems, or none, as on Linux."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("there are no files without a name here")
    return str(request.param)


def put(path: Path, data: bytes = b"text, new", kind: Kind | None = TEXT, **choices: Any) -> None:
    with Output(path, kind, **choices) as output:
        write_all(output.open(len(data)), data)


def refused(path: Path, *words: str, code: str = "bad_argument", **choices: Any) -> None:
    """An output refuses a path, at the start as at its end, and touches nothing."""
    before = tree(path.parent)
    for action in (lambda: put(path, **choices), lambda: check(path, choices.pop("kind", TEXT), **choices)):
        with pytest.raises(RsvError) as e:
            action()
        assert e.value.code == code and e.value.where == str(path)
        assert all(word in e.value.detail for word in words), e.value.detail
    assert tree(path.parent) == before


def tree(folder: Path) -> dict[str, Any]:
    """What lies in a folder: names, kinds, contents."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            found[path.name] = os.readlink(path)
        else:
            found[path.name] = path.read_bytes() if path.is_file() else stat.S_IFMT(path.stat().st_mode)  # type: ignore
    return found


# ---- what may be replaced


def test_a_new_file_and_one_of_its_kind(tmp_path: Path, way: str) -> None:
    path = tmp_path / "a"
    for data in (b"text, first", b"text, second", b""):
        put(path, data)
        assert tree(tmp_path) == {"a": data}
    put(path, b"text")  # in the place of an empty file, which holds nothing


def test_another_kind_of_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"precious")
    refused(path, "exists", "not a text", "--force", "force=True")
    put(path, force=True)
    assert path.read_bytes() == b"text, new"


def test_a_name_that_comes_from_a_file_needs_force_for_all_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"text", b""):
        path.write_bytes(data)
        refused(path, "exists", "--force", kind=None)
    put(path, kind=None, force=True)
    assert path.read_bytes() == b"text, new"


def model_files() -> dict[str, bytes]:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    return {
        "a.safetensors": len(header).to_bytes(8, "little") + header + b"x",
        "no-suffix": len(header).to_bytes(8, "little") + header + b"x",
        "model.gguf": b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + bytes(100),
        "pytorch_model.bin": b"PK\x03\x04",
        "weights.NPZ": b"PK\x03\x04",
    }


@pytest.mark.parametrize("name", model_files())
@pytest.mark.parametrize("kind", [TEXT, None], ids=["kind", "none"])
def test_a_model_of_another_format_is_never_replaced(tmp_path: Path, name: str, kind: Kind | None) -> None:
    path = tmp_path / name
    path.write_bytes(model_files()[name])
    for force in (False, True):
        refused(path, "a model that is not RSV", kind=kind, force=force)


def test_text_that_looks_like_a_model_only_to_the_careless(tmp_path: Path) -> None:
    for data in (b"12345678{}", b"notes on GGUF", b"{}"):
        (tmp_path / "a.txt").write_bytes(data)
        put(tmp_path / "a.txt", force=True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", [TEXT, None], ids=["kind", "none"])
def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path, force: bool, kind: Kind | None) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "pipe", "not a regular file", kind=kind, force=force)
    refused(tmp_path / "folder", "is a folder", kind=kind, force=force)
    with pytest.raises(RsvError, match="not a regular file"):
        check(os.devnull, kind, force=force)


@pytest.mark.parametrize("to", ["file", "pipe"])
@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="needs /dev/stdout")
def test_standard_output_is_no_place_for_a_file(tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    code = "import rsv_format, sys\ntry:\n    rsv_format.write('/dev/stdout')\nexcept rsv_format.RsvError as e:\n"
    code += "    sys.exit(e.code)"
    with out.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=file if to == "file" else subprocess.PIPE, stderr=subprocess.PIPE,
            check=False, cwd=ROOT,
        )  # fmt: skip
    assert done.stderr == b"bad_argument\n" and not done.stdout and out.read_bytes() == b""
    assert os.listdir(tmp_path) == ["out"]


def test_an_open_file_without_a_name_is_no_place(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    with (tmp_path / "a").open("wb") as file:
        os.unlink(tmp_path / "a")
        with pytest.raises(RsvError) as e:
            check(f"/proc/self/fd/{file.fileno()}", TEXT)
    assert e.value.code == "bad_argument" and os.listdir(tmp_path) == []


# ---- inputs


@pytest.mark.parametrize("alias", ["itself", "link", "hard link", "dots", "descriptor"])
@pytest.mark.parametrize("force", [False, True])
def test_an_input_is_never_replaced(tmp_path: Path, alias: str, force: bool) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"text, precious")
    path = tmp_path / "alias"
    with source.open("rb") as file:
        match alias:
            case "itself":
                path = source
            case "link":
                path.symlink_to(source)
            case "hard link":
                os.link(source, path)
            case "dots":
                (tmp_path / "x").mkdir()
                path = tmp_path / "x" / ".." / "source"
            case _:
                path = Path(f"/proc/self/fd/{file.fileno()}")
                if not path.exists():
                    pytest.skip("needs /proc")
        for inputs in ([source], [tmp_path / "none", str(path)]):
            with pytest.raises(RsvError) as e:
                put(path, inputs=inputs, force=force)
            assert e.value.code == "bad_argument" and "input" in e.value.detail
    assert source.read_bytes() == b"text, precious"


def test_files_of_an_input_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(b"{}")
    (folder / "config.json").symlink_to(tmp_path / "blob")  # as in the hub's cache
    (folder / "earlier").write_bytes(b"text")
    for path in (folder / "config.json", tmp_path / "blob"):
        refused(path, "a file of the input's", inputs=[folder], force=True)
    put(folder / "earlier", inputs=[folder])  # of the kind that is written, so it was not read
    put(folder / "new", inputs=[folder])
    put(tmp_path / "blob", inputs=[folder / "earlier"], force=True)


# ---- links, modes, owners


def test_a_link_of_the_users_is_written_through(tmp_path: Path, way: str) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "link"
    link.symlink_to("store/target")  # dangling at first
    for _ in range(2):
        put(link)
        assert os.readlink(link) == "store/target" and tree(tmp_path / "store") == {"target": b"text, new"}
    (tmp_path / "store" / "target").write_bytes(b"precious")
    refused(link, "--force")


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_at_a_name_from_a_file_is_not_followed(tmp_path: Path, dangling: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if not dangling:
        target.write_bytes(b"precious")
    link.symlink_to(target)
    refused(link, "link", "--force", kind=None)
    put(link, kind=None, force=True)
    assert not link.is_symlink() and link.read_bytes() == b"text, new"
    assert target.exists() is not dangling and (dangling or target.read_bytes() == b"precious")


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RsvError) as e:
        put(tmp_path / "loop")
    assert e.value.code in ("io_error", "bad_argument") and os.readlink(tmp_path / "loop") == "loop"


def test_a_hard_link_elsewhere_keeps_what_it_was(tmp_path: Path) -> None:
    put(tmp_path / "a", b"text, old")
    os.link(tmp_path / "a", tmp_path / "b")
    put(tmp_path / "a")
    assert tree(tmp_path) == {"a": b"text, new", "b": b"text, old"}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
@pytest.mark.parametrize("kind", [TEXT, None], ids=["kind", "none"])
@pytest.mark.usefixtures("way")
def test_permissions_stay(tmp_path: Path, mode: int, kind: Kind | None) -> None:
    path = tmp_path / "a"
    put(path)
    path.chmod(mode)
    put(path, kind=kind, force=kind is None)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.usefixtures("way")
def test_nobody_else_reads_a_private_file_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path)
    path.chmod(0o600)
    with Output(path, TEXT) as output:
        assert stat.S_IMODE(os.fstat(output.open().fileno()).st_mode) == 0o600


def test_a_write_protected_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path)
    path.chmod(0o444)
    refused(path, "write-protected", "--force")
    put(path, b"text", force=True)
    assert path.read_bytes() == b"text" and stat.S_IMODE(path.stat().st_mode) == 0o444


@pytest.mark.usefixtures("way")
def test_permissions_of_a_new_file_are_the_usual_ones(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        put(tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_the_owner_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path)
    os.chown(path, 1234, 4321)
    put(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_where_the_group_cannot_stay_it_reads_no_more_than_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "a"
    put(path)
    path.chmod(0o640)
    old = list(path.stat())
    old[stat.ST_GID] += 1
    monkeypatch.setattr(os, "fchown", fail)
    with path.open("rb") as file:
        outputs._inherit(file.fileno(), os.stat_result(old))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ---- whole or not at all


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), ValueError()])
def test_a_failure_in_the_body(tmp_path: Path, way: str, error: BaseException) -> None:
    path = tmp_path / "a"
    for before in ({}, {"a": b"text"}):
        wanted = RsvError if isinstance(error, OSError) else type(error)
        with pytest.raises(wanted), Output(path, TEXT) as output:
            output.open(10**6)
            raise error
        assert tree(tmp_path) == before
        put(path, b"text")


def test_what_comes_to_the_path_meanwhile_is_not_replaced_either(tmp_path: Path, way: str) -> None:
    path = tmp_path / "a"
    with pytest.raises(RsvError) as e, Output(path, TEXT) as output:
        output.open(9)
        path.write_bytes(b"precious")
    assert e.value.code == "bad_argument" and tree(tmp_path) == {"a": b"precious"}
    with Output(tmp_path / "b", TEXT) as output:  # but another of its kind is
        write_all(output.open(9), b"text, new")
        (tmp_path / "b").write_bytes(b"text, another")
    assert (tmp_path / "b").read_bytes() == b"text, new"


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "a", tmp_path / "file" / "a", tmp_path / ("x" * 300)):
        for action in (put, lambda path: check(path, TEXT), lambda path: check(path)):
            with pytest.raises(RsvError) as e:
                action(path)
            assert e.value.code == "io_error" and e.value.where == str(path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("way")
def test_too_little_room(tmp_path: Path) -> None:
    path = tmp_path / "a"
    room = os.statvfs(tmp_path)
    much = 2 * room.f_blocks * room.f_frsize
    for action in (lambda: check(path, TEXT, nbytes=much), lambda: Output(path, TEXT).open(much)):
        with pytest.raises(RsvError) as e:
            action()
        assert e.value.code == "io_error" and "MB are free" in e.value.detail
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("way")
def test_long_names(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127, "漢" * 85):
        put(tmp_path / name)
        put(tmp_path / name)
    assert len(os.listdir(tmp_path)) == 3


# ---- several files at once


def several(tmp_path: Path) -> list[Output]:
    found = [Output(tmp_path / name, force=True) for name in "abc"]
    for output in found:
        write_all(output.open(3), b"new")
    return found


def test_several_files(tmp_path: Path, way: str) -> None:
    (tmp_path / "b").write_bytes(b"old")
    commit(*several(tmp_path))
    assert tree(tmp_path) == dict.fromkeys("abc", b"new")


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "Operation not permitted"), KeyboardInterrupt()])
def test_several_files_of_which_one_cannot_come_into_place(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "b").write_bytes(b"old")
    found, replace = several(tmp_path), os.replace

    def fails_at_c(old: str, new: str) -> None:
        if new == str(tmp_path / "c"):
            raise error
        replace(old, new)

    monkeypatch.setattr(os, "replace", fails_at_c)
    with pytest.raises(RsvError if isinstance(error, OSError) else KeyboardInterrupt):
        commit(*found)
    assert tree(tmp_path) == {"b": b"old"}


def test_what_somebody_else_puts_there_is_not_undone(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(old: str, new: str) -> None:
        Path(new).write_bytes(b"another's")
        raise OSError(errno.EPERM, "Operation not permitted")

    with pytest.raises(RsvError), Output(tmp_path / "a", TEXT) as output:
        output.open()
        monkeypatch.setattr(os, "replace", overtaken)
    assert tree(tmp_path) == {"a": b"another's"}


def test_several_files_of_which_one_is_refused_at_the_end(tmp_path: Path, way: str) -> None:
    found = several(tmp_path)
    (tmp_path / "c").mkdir()
    with pytest.raises(RsvError) as e:
        commit(*found)
    assert e.value.code == "bad_argument" and os.listdir(tmp_path) == ["c"]


def test_a_signal_waits_until_all_files_are_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def interrupted(old: str, new: str) -> None:
        signal.raise_signal(signal.SIGINT)
        replace(old, new)

    monkeypatch.setattr(os, "replace", interrupted)
    found = several(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            commit(*found)
    finally:
        signal.signal(signal.SIGINT, before)
    assert tree(tmp_path) == dict.fromkeys("abc", b"new")


def test_a_folder_that_was_made_goes_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), outputs.folder(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with outputs.folder(tmp_path / "a" / "b") as made, pytest.raises(ZeroDivisionError), outputs.folder(made / "c"):
        raise ZeroDivisionError
    assert made.is_dir() and os.listdir(made) == []
    (tmp_path / "file").touch()
    with pytest.raises(RsvError), outputs.folder(tmp_path / "file" / "a"):
        raise AssertionError


# ---- what a kill leaves

CHILD = """
import os, sys, time
from rsv_format import outputs
if sys.argv[2] == "named" and hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE
with outputs.Output(sys.argv[1], outputs.Kind("a text", lambda head: True)) as output:
    outputs.write_all(output.open(10**6), b"half")
    print("here", flush=True)
    time.sleep(60)
"""


def test_what_a_kill_leaves_is_told_once_its_writer_is_dead(tmp_path: Path, way: str) -> None:
    path = tmp_path / "a"
    (tmp_path / ".a.0123456789ab.tmp").touch()  # of an earlier one
    (tmp_path / ".hidden.tmp").touch()  # somebody else's
    with subprocess.Popen([sys.executable, "-c", CHILD, path, way], stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None and child.stdout.readline() == b"here\n"
        assert leftovers(path) == [tmp_path / ".a.0123456789ab.tmp"]
        child.kill()
    left = leftovers(path)
    assert len(left) == (2 if way == "named" else 1) and all(file.name.startswith(".a.") for file in left)
    assert not path.exists()
    put(path)
    assert leftovers(path) == left  # they are named, not removed
    assert leftovers(tmp_path / "none" / "a") == []


# ---- commands and calls


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    save_file({"a.weight": weight, "b.weight": weight.T.copy()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def rsv(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RSV, *map(str, args)], capture_output=True, text=True, check=False, cwd=ROOT)


def test_quantize_never_replaces_what_it_reads(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    weights = source / "model.safetensors"
    importance = tmp_path / "imatrix.gguf"
    save_imatrix(importance, {"a": (np.ones(64), 1)})
    with rsv_format.open_source(source) as opened:
        for read, out in ((weights, weights), (source, weights), (opened, weights), (source, source / "config.json")):
            for force in (False, True):
                with pytest.raises(RsvError) as e:
                    rsv_format.quantize(read, out, force=force)
                assert e.value.code == "bad_argument"
    with pytest.raises(RsvError, match="input"):
        rsv_format.quantize(source, importance, importance=importance, force=True)
    assert tree(source) == before and list(load_imatrix(importance)) == ["a"]
    rsv_format.quantize(source, source / "model.rsv", importance="none")
    rsv_format.quantize(source, source / "model.rsv", importance="none")


def call_write(path: Path, force: bool) -> None:
    rsv_format.write(path, force=force)


def call_save(path: Path, force: bool) -> None:
    from strategies import small_file

    with rsv_format.open(small_file()) as file:
        rsv_format.save(file, path, force=force)


def call_save_imatrix(path: Path, force: bool) -> None:
    save_imatrix(path, {"a": (np.ones(4), 1)}, force=force)


CALLS: list[Callable[[Path, bool], None]] = [call_write, call_save, call_save_imatrix]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("way")
def test_calls_follow_the_rule(tmp_path: Path, call: Callable[[Path, bool], None]) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"precious")
    with pytest.raises(RsvError) as e:
        call(path, False)
    assert e.value.code == "bad_argument" and path.read_bytes() == b"precious"
    for _ in range(2):
        call(path, True)
        call(path, False)
    (tmp_path / "link").symlink_to(path)
    call(tmp_path / "link", False)
    assert (tmp_path / "link").is_symlink()
    path.write_bytes(model_files()["model.gguf"])
    with pytest.raises(RsvError):
        call(path, True)
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


def test_kinds_are_not_mixed(source: Path, tmp_path: Path) -> None:
    rsv_format.quantize(source, tmp_path / "a.rsv", importance="none")
    save_imatrix(tmp_path / "i.gguf", {"a": (np.ones(64), 1)})
    assert rsv("export", tmp_path / "a.rsv", "-o", tmp_path / "a.safetensors").returncode == 0
    before = tree(tmp_path)
    for args in (
        ("export", tmp_path / "a.rsv", "-o", source / "model.safetensors", "--force"),
        ("export", tmp_path / "a.rsv", "-o", tmp_path / "i.gguf"),
        ("export", tmp_path / "a.rsv", "-o", tmp_path / "a.rsv", "--force"),
        ("quantize", source, "-o", tmp_path / "i.gguf"),
        ("quantize", source, "-o", tmp_path / "a.safetensors", "--force"),
    ):
        done = rsv(*args)
        assert done.returncode == 2 and done.stderr.startswith("error[bad_argument]"), (args, done.stderr)
    assert tree(tmp_path) == before
    assert rsv("export", tmp_path / "a.rsv", "-o", tmp_path / "a.safetensors").returncode == 0
    assert rsv("quantize", source, "-o", tmp_path / "i.gguf", "--importance", "none", "-f").returncode == 0
    assert rsv_format.verify(tmp_path / "i.gguf") == []


def attached(path: Path, **files: bytes) -> Path:
    rsv_format.write(path, attachments={k: rsv_format.AttachmentData("a/b", v) for k, v in files.items()})
    return path


def test_extract_is_all_or_nothing(tmp_path: Path) -> None:
    file = attached(tmp_path / "a.rsv", b=b"B", c=b"C", d=b"D")
    out = tmp_path / "out"
    (out / "d").mkdir(parents=True)
    (out / "b").write_bytes(b"mine")
    for force in ([], ["--force"]):
        assert rsv("extract", file, "-o", out, *force).returncode == 2
        assert tree(out) == {"b": b"mine", "d": stat.S_IFDIR}
    (out / "d").rmdir()
    assert rsv("extract", file, "-o", out, "--force").returncode == 0
    assert tree(out) == {"b": b"B", "c": b"C", "d": b"D"}
    assert rsv("extract", file, "-o", tmp_path / "a.rsv" / "x").returncode == 1


def test_extract_of_nothing_says_so(tmp_path: Path) -> None:
    done = rsv("extract", attached(tmp_path / "a.rsv"), "-o", tmp_path / "out")
    assert done.returncode == 1 and "nothing is attached" in done.stderr and os.listdir(tmp_path) == ["a.rsv"]


def test_extract_never_replaces_its_input(tmp_path: Path) -> None:
    file = attached(tmp_path / "self.rsv", **{"self.rsv": b"no model any more", "b": b"B"})
    before = tree(tmp_path)
    for args in ((), ("--force",)):
        assert rsv("extract", file, "-o", tmp_path, *args).returncode == 2
    assert tree(tmp_path) == before


def test_a_killed_runs_leftovers_are_named(source: Path, tmp_path: Path) -> None:
    left = tmp_path / ".a.rsv.0123456789ab.tmp"
    left.write_bytes(b"x" * 1000)
    done = rsv("quantize", source, "-o", tmp_path / "a.rsv", "--importance", "none")
    assert done.returncode == 0 and str(left) in done.stderr and "may be removed" in done.stderr and left.exists()
    assert rsv("export", tmp_path / "a.rsv", "-o", tmp_path / "b.safetensors", "-q").stderr == ""


@pytest.mark.parametrize(
    "options, words",
    [
        ({"importance": "nofile.gguf"}, "nofile.gguf"),
        ({"include": ["nothing*"]}, "nothing"),
        ({"include": ["a", "nothing*"]}, "nothing"),
        ({"exclude": ["nothing*"]}, "nothing"),
        ({"bits_per_weight": 1.2}, "the least"),
    ],
)
def test_mistakes_are_noticed_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    def worked(*_: Any) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("rsv_format.quantizer.conversion.synthetic_importance", worked)
    with pytest.raises(RsvError) as e:
        rsv_format.quantize(source, tmp_path / "a.rsv", **options)
    assert words in str(e.value) and not (tmp_path / "a.rsv").exists()


def test_too_little_room_is_noticed_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def check_room(descriptor: int, nbytes: int) -> None:
        asked.append(nbytes)
        if nbytes:
            raise OSError(None, "no room")

    monkeypatch.setattr(outputs, "_check_room", check_room)
    monkeypatch.setattr("rsv_format.quantizer.conversion.synthetic_importance", lambda *_: pytest.fail("was run"))
    with pytest.raises(RsvError, match="no room"):
        rsv_format.quantize(source, tmp_path / "a.rsv")
    monkeypatch.undo()
    rsv_format.quantize(source, tmp_path / "a.rsv")
    size = (tmp_path / "a.rsv").stat().st_size
    assert 0.9 * size <= asked[-1] <= size


def test_the_report_is_of_the_file_that_was_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although somebody else replaces it at once."""
    replace, out = os.replace, tmp_path / "a.rsv"
    attached(tmp_path / "other.rsv", b=b"B")

    def overtaken(old: str, new: str) -> None:
        replace(old, new)
        replace(tmp_path / "other.rsv", new)

    monkeypatch.setattr(os, "replace", overtaken)
    report = rsv_format.quantize(source, out, importance="none")
    assert report.summary.layers == 2 and rsv_format.summarize(out).layers == 0
