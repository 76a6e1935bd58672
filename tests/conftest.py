"""Hypothesis profiles: "ci" is short and the same each time; RSV_FUZZ=1 searches longer, and at random."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("fuzz", max_examples=5000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("fuzz" if os.environ.get("RSV_FUZZ") else "ci")


@pytest.fixture(autouse=True, scope="session")
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands name what killed runs have left among the temporary files: here there are none of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        patch.delenv("COLUMNS", raising=False)  # tables have the width of no terminal
        yield
