"""Workers on other machines, by Dask."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

_SECONDS = 10  # until a scheduler that does not answer is given up


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[dict[str, Any]]:
    """What `quantize` is given besides to work with a scheduler's workers; nothing without one.

    Raises
    ------
    RsvError
        missing_dependency; io_error: there is no scheduler, or it has no workers.
    """
    if address is None:
        yield {}
        return
    from rsv_format.errors import RsvError

    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as e:
        raise RsvError.of_import(e, "distributed", "pip install 'rsv-format[cluster]'") from e
    try:
        client = distributed.Client(address, timeout=_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as e:
        raise RsvError("io_error", address, f"no scheduler answers there: {e}") from e
    with client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if workers == 0:
            raise RsvError("io_error", address, f"it has no workers: dask worker {address} --nthreads 1")
        with client.get_executor(retries=2) as executor:
            yield {"executor": executor, "workers": workers}
