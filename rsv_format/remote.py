"""Bytes of a file elsewhere, by URL: only what is asked for is fetched, with fsspec."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import Any

from rsv_format.errors import RsvError, is_out_of_memory

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_TRIES = 4
_PAUSE = 0.25  # seconds before the second try, doubled before each further one
_SILENCE = 30  # seconds without a byte, or to connect
_SAME = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "VersionId", "blob_id", "mtime")


def is_url(path: str) -> bool:
    """Whether a path is that of something elsewhere, as https://, s3:// and hf:// are."""
    return _URL.match(path) is not None


class Remote:
    """Bytes of a file by its URL, by ranges; a server without them is refused.

    Raises
    ------
    RsvError
        io_error: it cannot be reached, or not in time, gives no ranges, or has changed since; missing_dependency.
    """

    def __init__(self, url: str) -> None:
        self._url, self._lock = url, threading.Lock()
        try:
            from fsspec.core import url_to_fs

            options: dict[str, Any] = {}
            if url.startswith("http"):
                from aiohttp import ClientTimeout

                options["client_kwargs"] = {"timeout": ClientTimeout(sock_connect=_SILENCE, sock_read=_SILENCE)}
            self._fs, self._path = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as e:
            raise RsvError.of_import(e, url, "pip install 'rsv-format[remote]'") from e
        except ValueError as e:
            raise RsvError("io_error", url, str(e)) from e
        found = self._tried(lambda: self._fs.info(self._path))
        if found.get("size") is None:
            raise RsvError("io_error", url, "its length is not told: it cannot be read by ranges")
        self.nbytes = int(found["size"])
        self.disk = self
        self._identity = _identity(found)
        self._file = self._tried(lambda: self._fs.open(self._path, "rb", cache_type="none"))
        if not self._file.seekable():
            raise RsvError("io_error", url, "the server gives no ranges: download the file")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some of the bytes, fetched."""
        if nbytes == 0:
            return memoryview(b"")

        def fetch() -> bytes:
            with self._lock:
                self._file.seek(offset)
                return bytes(self._file.read(nbytes))

        data = self._tried(fetch)
        if len(data) != nbytes:
            raise RsvError("io_error", self._url, f"{len(data)} of {nbytes} bytes from byte {offset} were sent")
        return memoryview(data)

    def read_into(self, offset: int, out: memoryview) -> None:
        """A copy of some of the bytes."""
        out[:] = self.view(offset, out.nbytes)

    def advise(self, offset: int, nbytes: int) -> None:
        """Nothing is fetched before it is asked for."""

    def holes(self) -> int:
        """None that anybody could tell of."""
        return 0

    def check_unchanged(self) -> None:
        """Whether the length, and what else tells versions apart, are those at the opening."""
        if _identity(self._tried(lambda: self._fs.info(self._path))) != self._identity:
            raise RsvError("io_error", self._url, "it was changed while it was read")

    def _tried(self, action: Any) -> Any:
        """What an action gives, tried again while the network or the server fails for a moment."""
        for attempt in range(_TRIES):
            try:
                return action()
            except ValueError as e:
                detail = "the server gives no ranges: download the file" if "range" in str(e) else str(e)
                raise RsvError("io_error", self._url, detail) from e
            except ImportError as e:
                raise RsvError.of_import(e, self._url) from e
            except Exception as e:  # of whatever library reads from there
                if is_out_of_memory(e):
                    raise
                reason = e.__cause__ or e  # fsspec's FileNotFoundError stands for any answer but a good one
                if isinstance(e, FileNotFoundError) and getattr(reason, "status", 404) == 404:
                    raise RsvError("io_error", self._url, "there is no such file") from e
                status = getattr(reason, "status", 500)
                if attempt + 1 == _TRIES or isinstance(e, PermissionError) or status < 500:
                    raise RsvError("io_error", self._url, f"{type(reason).__name__}: {reason}"[:300]) from reason
            with contextlib.suppress(Exception):
                self._fs.invalidate_cache()
            time.sleep(_PAUSE * 2**attempt)
        raise AssertionError


def _identity(info: dict[str, Any]) -> dict[str, str]:
    return {key: str(info[key]) for key in _SAME if info.get(key) is not None}
