"""Build wheel and sdist, check them, and try the wheel alone in a clean environment with each extra."""

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
    for extra in arguments.extra:
        place = folder / (extra or "plain")
        run(sys.executable, "-m", "venv", place)
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        run(place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted)
        run(place / "bin" / "python", "-m", "pip", "check")
        for command in TRIALS[extra]:
            run(place / "bin" / command[0], *command[1:], cwd=place)
        shutil.rmtree(place)
    print(f"all well: {wheel.name}, {sdist.name}")


if __name__ == "__main__":
    main()
