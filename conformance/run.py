"""Run the conformance cases against an adapter (PROTOCOL.md): a table, and exit code 1 if a case fails.

    python conformance/run.py --adapter "CMD" [--only PATTERN] [--jobs N] [--json]
    python conformance/run.py --write DIR [--only PATTERN]

Standard library only. PATTERN is a glob over `group/id` and `group/id:operation`, or, if it has no slash, a
part of an id.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fnmatch
import hashlib
import json
import math
import os
import queue
import selectors
import shlex
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe import build

HERE = Path(__file__).resolve().parent
SECONDS = 10.0  # of processor time
PATIENCE = 6  # times that, of wall time: a busy machine is no fault of the adapter
MEMORY = 512 * 2**20  # plus 8 times the file


@dataclass
class Check:
    case: dict[str, Any]
    operation: str
    status: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.case['group']}/{self.case['id']}:{self.operation}"

    @property
    def group(self) -> str:
        phase = self.case["phase"]
        return f"{self.case['group']}/{phase}" if phase else self.case["group"]


@dataclass
class Answer:
    """What an adapter did: exit code and output, or why it counts as a crash."""

    exit: int | None
    output: bytes = b""
    crash: str = ""


class Adapter:
    """Starts the program once per operation, or keeps it in batch mode. One per thread."""

    def __init__(self, command: list[str], seconds: float, batch: bool) -> None:
        self._command, self._seconds, self._batch = command, seconds, batch
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, operation: str, path: Path) -> Answer:
        limit = MEMORY + 8 * path.stat().st_size
        if self._batch and self._process is None:
            self._start()
        return self._line(operation, path, limit) if self._process else self._once(operation, path, limit)

    def close(self) -> None:
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            process.wait()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, "batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        line = self._read(PATIENCE * self._seconds)
        try:
            hello = json.loads(line or b"")
        except ValueError:
            hello = None
        if hello != {"batch": 1}:
            self._batch = False
            self.close()

    def _read(self, seconds: float) -> bytes | None:
        """A line, or None at the end of the output or of the time."""
        assert self._process is not None and self._process.stdout is not None
        stdout, deadline = self._process.stdout, time.monotonic() + seconds
        chunks = [self._rest]
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in chunks[-1]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(stdout.fileno(), 1 << 20)
                if not chunk:
                    return None
                chunks.append(chunk)
        line, _, self._rest = b"".join(chunks).partition(b"\n")
        return line

    def _line(self, operation: str, path: Path, limit: int) -> Answer:
        assert self._process is not None and self._process.stdin is not None
        started, spent = time.monotonic(), _processor_time(self._process.pid)
        _reset_peak(self._process.pid)
        try:
            self._process.stdin.write(f"{operation}\t{path}\n".encode())
            self._process.stdin.flush()
            line = self._read(PATIENCE * self._seconds)
        except OSError:
            line = None
        if line is None:
            late = time.monotonic() - started >= PATIENCE * self._seconds
            self.close()
            return Answer(None, crash=f"no answer in {PATIENCE * self._seconds} s" if late else "the adapter died")
        peak, spent = _peak(self._process.pid), _processor_time(self._process.pid) - spent
        try:
            reply = json.loads(line)
            answer = Answer(reply["exit"], json.dumps(reply["output"]).encode())
        except (ValueError, TypeError, KeyError):
            return Answer(None, crash="the line is not an answer of batch mode")
        if spent > self._seconds:
            return Answer(None, crash=f"{spent:.1f} s of processor time, the limit is {self._seconds}")
        if peak > limit:
            self.close()
            return Answer(None, crash=f"{peak >> 20} MiB of memory, the limit is {limit >> 20}")
        return answer

    def _once(self, operation: str, path: Path, limit: int) -> Answer:
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [*self._command, operation, str(path)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            deadline, pause = time.monotonic() + PATIENCE * self._seconds, 0.0005
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    return Answer(None, crash=f"no answer in {PATIENCE * self._seconds} s")
                time.sleep(pause)
                pause = min(0.02, 2 * pause)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            spent = usage.ru_utime + usage.ru_stime
            if spent > self._seconds:
                return Answer(None, crash=f"{spent:.1f} s of processor time, the limit is {self._seconds}")
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            if peak > limit:
                return Answer(None, crash=f"{peak >> 20} MiB of memory, the limit is {limit >> 20}")
            return Answer(process.returncode, out.read())


def _reset_peak(pid: int) -> None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/clear_refs", "w") as f:
        f.write("5")


def _peak(pid: int) -> int:
    """Peak resident bytes since the reset; 0 where the system does not say."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as f:
        for line in f:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _processor_time(pid: int) -> float:
    """Seconds that a process has computed; 0 where the system does not say."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class Files:
    """The files of the cases: those of recipes are made for as long as they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def path(self, case: dict[str, Any]) -> Any:
        if "file" in case:
            yield HERE / case["file"]
            return
        path = self._folder / f"{case['id']}.rsv"
        path.write_bytes(content(case))
        try:
            yield path
        finally:
            path.unlink()


def content(case: dict[str, Any]) -> bytes:
    if "file" in case:
        data = (HERE / case["file"]).read_bytes()
    else:
        data = build(json.loads((HERE / case["recipe"]).read_bytes()))
    if hashlib.sha256(data).hexdigest() != case["sha256"]:
        raise SystemExit(f"{case['id']}: the file is not that of the manifest")
    return data


def judge(check: Check, answer: Answer) -> tuple[str, str]:
    """Status and, of a failure, what is wrong."""
    if answer.crash:
        return "fail", answer.crash
    if answer.exit == 77:
        return "unsupported", ""
    if answer.exit not in (0, 1):
        return "fail", f"exit code {answer.exit}"
    try:
        output = json.loads(answer.output)
    except (ValueError, RecursionError):
        return "fail", f"exit code {answer.exit}, but the output is not JSON"
    if not isinstance(output, dict):
        return "fail", "the output is not an object"
    want = check.case["operations"][check.operation]
    if want.startswith("invalid"):
        must = want.partition(":")[2] or check.case["error"]
        if answer.exit == 0:
            return "fail", f"accepted, it must be refused with {must}"
        code = output.get("error")
        if check.operation == "encode":  # a writer's codes are its own
            return ("pass", "") if isinstance(code, str) else ("fail", "no error code")
        return ("pass", "") if code == must else ("fail", f"{code}, it must be {must}")
    if answer.exit == 1:
        return "fail", f"refused with {output.get('error')}, it must be accepted"
    if want == "accepted":
        return "pass", ""
    problem = compare(check, output)
    return ("fail", problem) if problem else ("pass", "")


def compare(check: Check, output: dict[str, Any]) -> str:
    if check.operation == "verify":
        return "" if output == {} else "verify prints an empty object"
    expected = (HERE / check.case["expected"]["file"]).read_bytes()
    try:
        if check.operation == "encode":
            return _bytes_differ(base64.b64decode(output["file"], validate=True), expected)
        want = json.loads(expected)[check.operation]
        if check.operation == "decode":
            return differ(output, want, "")
        return _dequantized(output["layers"], want["layers"], check.case["tolerance"])
    except (KeyError, TypeError, ValueError, IndexError, struct.error) as e:
        return f"the output is not what PROTOCOL.md describes: {e!r}"


def differ(got: Any, want: Any, where: str) -> str:
    """The first place where two JSON values differ."""
    if type(got) is not type(want):
        return f"{where or '/'} is {_short(got)}, it must be {_short(want)}"
    if isinstance(want, dict):
        for key in sorted(want.keys() | got.keys()):
            if key not in got or key not in want:
                return f"{where}/{key} is {'missing' if key not in got else 'not of the protocol'}"
            problem = differ(got[key], want[key], f"{where}/{key}")
            if problem:
                return problem
        return ""
    if isinstance(want, list):
        if len(got) != len(want):
            return f"{where} has {len(got)} items, it must have {len(want)}"
        return next(
            filter(None, (differ(g, w, f"{where}/{i}") for i, (g, w) in enumerate(zip(got, want, strict=True)))), ""
        )
    return "" if got == want else f"{where} is {_short(got)}, it must be {_short(want)}"


def _short(value: Any) -> str:
    return json.dumps(value)[:80]


def _bytes_differ(got: bytes, want: bytes) -> str:
    if got == want:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"{len(got)} bytes, expected {len(want)}; the first difference is at byte {at}"


def _f32(digits: list[str]) -> list[float]:
    return [struct.unpack(">f", bytes.fromhex(d))[0] if len(d) == 8 else _fail(d) for d in digits]


def _fail(digits: str) -> float:
    raise ValueError(f"{digits!r} is not an f32")


def _dequantized(got: list[Any], want: list[Any], tolerance: dict[str, float]) -> str:
    if [layer["name"] for layer in got] != [layer["name"] for layer in want]:
        return "other layers"
    for g, w in zip(got, want, strict=True):
        name, bounds = w["name"][:40], w["bounds"]
        problem = differ(g["w_rot"], w["w_rot"], f"{name}: w_rot")
        if problem:
            return problem
        sizes = [len(w["tx"]) for _ in w["w"]]
        if [len(row) for row in g["w"]] != sizes or len(g["tx"]) != len(w["tx"]):
            return f"{name}: other samples"
        if bounds["exact"]:
            if g["w"] != w["w"]:
                return f"{name}: w must be w_rot, bit for bit"
        else:
            d = [1.0] * len(w["tx"]) if bounds["d"] is None else _f32(bounds["d"])
            for k, (row, expected) in enumerate(zip(g["w"], w["w"], strict=True)):
                if expected is None:  # beyond f32: RSV-723
                    continue
                error = _norm((a - b) / c for a, b, c in zip(_f32(row), _f32(expected), d, strict=True))
                if not error <= tolerance["w"] * _f32(bounds["norm_w"])[k]:
                    return f"{name}: w, sampled row {k}: error {error:.3g}, norm {_f32(bounds['norm_w'])[k]:.3g}"
        norm_xd = _f32([bounds["norm_xd"]])[0]
        error = _norm(a - b for a, b in zip(_f32(g["tx"]), _f32(w["tx"]), strict=True))
        if not error <= tolerance["tx"] * norm_xd:
            return f"{name}: tx: error {error:.3g}, norm {norm_xd:.3g}"
        if w["y"] is None:
            continue
        if len(g["y"]) != len(w["y"]):
            return f"{name}: y has {len(g['y'])} values, it must have {len(w['y'])}"
        bias = [0.0] * len(w["y"]) if bounds["bias"] is None else _f32(bounds["bias"])
        rows = zip(_f32(g["y"]), _f32(w["y"]), _f32(bounds["norm_w"]), bias, strict=True)
        for k, (a, b, norm_w, c) in enumerate(rows):
            if not abs(a - b) <= tolerance["y"] * norm_xd * norm_w + 1e-6 * abs(c) + 1e-38:
                return f"{name}: y of sampled row {k} is {a:.6g}, it must be {b:.6g}"
    return ""


def _norm(values: Any) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


def select(cases: list[dict[str, Any]], pattern: str | None) -> list[Check]:
    checks = [Check(case, operation) for case in cases for operation in case["operations"]]
    if pattern is None:
        return checks
    if "/" not in pattern:
        return [c for c in checks if fnmatch.fnmatch(c.name, f"*/*{pattern}*")]
    return [c for c in checks if any(fnmatch.fnmatch(name, pattern) for name in (c.name, c.name.split(":")[0]))]


def run(command: list[str], checks: list[Check], jobs: int, seconds: float, batch: bool) -> None:
    """Fill in the checks. Those of one case stay together, so that its file is made once."""
    todo: queue.SimpleQueue[list[Check]] = queue.SimpleQueue()
    by_case: dict[str, list[Check]] = {}
    for check in checks:
        by_case.setdefault(check.case["id"], []).append(check)
    for group in by_case.values():
        todo.put(group)
    failures: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="rsv-conformance-") as folder:
        files = Files(Path(folder))

        def work() -> None:
            adapter = Adapter(command, seconds, batch)
            try:
                while not failures:
                    try:
                        group = todo.get_nowait()
                    except queue.Empty:
                        return
                    with files.path(group[0].case) as path:
                        for check in group:
                            started = time.monotonic()
                            check.status, check.detail = judge(check, adapter.ask(check.operation, path))
                            check.seconds = time.monotonic() - started
            except BaseException as e:
                failures.append(e)
            finally:
                adapter.close()

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def table(checks: list[Check]) -> str:
    groups: dict[str, dict[str, int]] = {}
    for check in checks:
        row = groups.setdefault(check.group, {"pass": 0, "fail": 0, "unsupported": 0})
        row[check.status] += 1
    total = {key: sum(row[key] for row in groups.values()) for key in ("pass", "fail", "unsupported")}
    lines = [f"{'group':<20}{'pass':>8}{'fail':>8}{'unsupported':>14}"]
    for name, row in [*groups.items(), ("all", total)]:
        lines.append(f"{name:<20}{row['pass']:>8}{row['fail']:>8}{row['unsupported']:>14}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", help="the command, without operation and file")
    only = "cases to run, as GROUP/ID:OPERATION with * and ?: valid/spec-example:decode, invalid/*, *:verify"
    parser.add_argument("--only", metavar="PATTERN", help=only)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="adapters at work at once")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--no-batch", action="store_true", help="start the adapter for each operation")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="processor time of an operation")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the files of the cases, recipes too, and stop")
    options = parser.parse_args()
    checks = select(json.loads((HERE / "manifest.json").read_bytes())["cases"], options.only)
    if options.write:
        for case in {check.case["id"]: check.case for check in checks}.values():
            target = options.write / case["group"] / f"{case['id']}{'.json' if case['group'] == 'encode' else '.rsv'}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content(case))
        return 0
    if not options.adapter:
        parser.error("--adapter or --write is needed")
    if not checks:
        parser.error("no case matches")
    run(shlex.split(options.adapter), checks, options.jobs, options.seconds, not options.no_batch)
    failed = [check for check in checks if check.status == "fail"]
    if options.json:
        names = [
            {"name": c.name, "status": c.status, "detail": c.detail, "seconds": round(c.seconds, 3)} for c in checks
        ]
        print(json.dumps({"adapter": options.adapter, "failed": len(failed), "checks": names}, indent=1))
    else:
        for check in failed:
            print(f"FAIL {check.name}: {check.detail}")
        print(table(checks))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
