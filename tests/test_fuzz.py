"""A bounded slice of the fuzzing: mutated files, some bits of all, the readers compared where their tools are there."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from strategies import expected_code

import rsv_format

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fuzz import bitflips, corpus, differential, signing  # noqa: E402
from fuzz.exercise import exercise  # noqa: E402
from fuzz.jsontext import Style  # noqa: E402
from fuzz.mutate import mutate  # noqa: E402

VECTORS = corpus.vectors("valid", max_nbytes=16384)
FILES = list(VECTORS.values())


def mutated(seed: int) -> bytes:
    rng = random.Random(seed)
    return mutate(rng.choice(FILES), rng, other=rng.choice(FILES))


def test_what_is_signed_again_is_sound() -> None:
    at_the_limit = {name for name in VECTORS if "json-values-most" in name}  # white space keeps them within it
    for i, file in enumerate([VECTORS[name] for name in VECTORS if name not in at_the_limit][::5]):
        for style in (Style(), Style(random.Random(i), 0.3)):
            rsv_format.verify(signing.sign(signing.split(file), style))


def test_a_seed_gives_one_file() -> None:
    assert [mutated(i) for i in range(50)] == [mutated(i) for i in range(50)]


def test_only_rsv_errors_escape_and_the_codes_are_right() -> None:
    seen = set()
    with np.errstate(all="ignore"):  # numbers that are not finite are to be expected
        for seed in range(1000):
            file = mutated(seed)
            must = expected_code(file)
            codes = exercise(file)
            assert must is None or codes == [must], f"seed {seed}"
            seen.update(codes)
    assert len(seen) > 25  # the mutations reach past the digests


@pytest.mark.parametrize("path", sorted((ROOT / "fuzz" / "regressions").glob("*.rsv")), ids=lambda path: path.stem)
def test_finds_stay_mended(path: Path) -> None:
    file = path.read_bytes()
    must = expected_code(file)
    with np.errstate(all="ignore"):
        assert exercise(file) == [must] or must is None


def test_flipped_bits_and_truncations() -> None:
    """python -m fuzz.bitflips takes all of them, in three readers."""
    data = bitflips.FILE.read_bytes()
    bits = [*range(512), *range(512, 8 * len(data), 127)]
    answers = bitflips.flips(data, bits)
    assert [bit for bit, answer in zip(bits, answers, strict=True) if answer == "ok"] == []
    lengths = [*range(1500), *range(1500, len(data), 16)]
    cuts = {length: bitflips.answer(data[:length], verify=False) for length in lengths}
    assert cuts == {n: "file_too_short" if n < 64 else "file_truncated" for n in lengths}


@pytest.fixture(scope="module")
def readers() -> None:
    if not (shutil.which("node") and shutil.which("cc") and shutil.which("make")):
        pytest.skip("needs node, cc and make")
    folder = ROOT / "conformance" / "readers" / "c"
    subprocess.run(["make", "-s", "build/rsv-adapter"], cwd=folder, check=True, capture_output=True)


def test_three_readers_agree(readers: None) -> None:
    outcomes, finds = differential.run(differential.generated(150, 5000))
    assert finds == 0 and outcomes.total() == 150 and len(outcomes) > 10


def test_a_disagreement_is_found(readers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One reader that no longer sees a code is noticed, and the file kept."""
    real = differential.python_adapter()
    monkeypatch.setattr(differential, "FINDS", tmp_path)
    monkeypatch.setattr(differential, "python_adapter", lambda: real)
    answer = real.answer
    monkeypatch.setattr(
        real, "answer", lambda operation, path: (0, {}) if answer(operation, path)[0] else answer(operation, path)
    )
    _, finds = differential.run(differential.generated(10, 5000))
    assert finds == len(list(tmp_path.glob("*.rsv"))) > 0
