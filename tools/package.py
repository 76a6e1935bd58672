"""Build wheel and sdist and the archive of the conformance suite, check them, and try the wheel alone in a clean
environment with each extra, the suite with the wheel's reader."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ = "import rsv_format; print(rsv_format.__version__, len(rsv_format.CODES))"
MADE = """
import numpy as np, rsv_format
data = rsv_format.quantize_matrix(np.ones((4, 64), "f4") + np.arange(64, dtype="f4"), bits=4, codebook="{}")
rsv_format.write("one.rsv", layers=[data])
assert rsv_format.verify("one.rsv") == []
"""
TRIALS = {  # extras -> what must run with them, one after the other
    "": [["python", "-c", READ], ["python", "-c", MADE.format("lloyd-max")]],
    "sources": [["python", "-c", READ + "; import gguf, safetensors, tokenizers"]],
    "quantize": [["python", "-c", MADE.format("trellis")]],
    "cli": [["rsv", "--version"], ["rsv", "quantize", "--help"], ["rsv", "report", "--help"]],
    "mlx": [["python", "-c", "import rsv_mlx; print(rsv_mlx.load.__name__)"]],
    "all": [
        ["python", "-c", MADE.format("trellis")],
        ["rsv", "verify", "one.rsv"],
        ["rsv", "report", "one.rsv", "-o", "one.html"],
    ],
}
WANTED = (
    "rsv_format/py.typed", "rsv_mlx/py.typed", "rsv_format/page/draw.mjs",
    "rsv_format/quantizer/tables/trellis-4-8.npy",
    "rsv_format/quantizer/texts/alice.txt", "licenses/LICENSE", "entry_points.txt",
)  # fmt: skip


SUITE = (  # what a reader's author needs, and Python alone
    "README.md", "PROTOCOL.md", "AMBIGUITIES.md", "run.py", "recipe.py", "manifest.json", "manifest.schema.json",
    "adapters/python.py",
    "valid", "invalid", "order", "encode", "kernels",
)  # fmt: skip


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Print and run; stop here if it fails."""
    print("+", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", nargs="+", default=list(TRIALS), help="only these")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-W", "error", "-m", "build", "--outdir", folder, ".")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    strange = [name for name in names if name.split("/")[0] not in ("rsv_format", "rsv_mlx", "rsv_cli")]
    assert all(".dist-info/" in name for name in strange), strange
    assert all(any(name.endswith(wanted) for name in names) for wanted in WANTED), names
    with tarfile.open(sdist) as tarball:
        assert any(name.endswith("/pyproject.toml") for name in tarball.getnames())
    version = wheel.name.split("-")[1]
    suite = folder / f"rsv-conformance-{version}.zip"
    with zipfile.ZipFile(suite, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("SPEC.md", "LICENSE", "schema/rsv-header-1.0.schema.json"):
            archive.write(ROOT / name, name)
        for part in SUITE:
            for path in sorted({ROOT / "conformance" / part, *(ROOT / "conformance" / part).rglob("*")}):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(ROOT))
    for extra in arguments.extra:
        place = folder / (extra or "plain")
        run(sys.executable, "-m", "venv", place)
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        run(place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted)
        run(place / "bin" / "python", "-m", "pip", "check")
        with zipfile.ZipFile(suite) as archive:
            archive.extractall(place)
        adapter = f"{place}/bin/python conformance/adapters/python.py"
        suite_run = ["python", "conformance/run.py", "--adapter", adapter, "--only", "valid/spec-*"]
        for command in [*TRIALS[extra], *([] if extra else [suite_run])]:
            run(place / "bin" / command[0], *command[1:], cwd=place)
        shutil.rmtree(place)
    print(f"all well: {wheel.name}, {sdist.name}, {suite.name}")


if __name__ == "__main__":
    main()
