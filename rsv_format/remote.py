"""Bytes of a file elsewhere, by URL: only what is asked for is fetched, with fsspec."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from rsv_format.errors import RsvError, is_out_of_memory

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_TRIES = 4
_PAUSE = 0.25  # seconds before the second try, doubled before each further one
_SILENCE = 30  # seconds without a byte, or to connect
_SAME = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "VersionId", "blob_id", "mtime")
_STRONG = re.compile(r'"[^"]*"')  # an ETag that stands for bytes, as a weak one does not
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_CHANGED, _NO_RANGES = "it was changed while it was read", "the server gives no ranges: download the file"


def is_url(path: str) -> bool:
    """Whether a path is that of something elsewhere, as https://, s3:// and hf:// are.

    Parameters
    ----------
    path : str
    """
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
            answers = _Answers(url) if url.startswith("http") else None
            if answers is not None:
                from aiohttp import ClientTimeout

                timeout = ClientTimeout(sock_connect=_SILENCE, sock_read=_SILENCE)
                options["client_kwargs"] = {"timeout": timeout, "raise_for_status": answers.check}
                options["skip_instance_cache"] = True
            self._fs, self._path = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as e:
            raise RsvError.of_import(e, url, "pip install 'rsv-format[remote]'") from e
        except ValueError as e:
            raise RsvError("io_error", url, str(e)) from e
        found = self._tried(lambda: self._fs.info(self._path))
        if found.get("size") is None:
            raise RsvError("io_error", url, "its length is not told: it cannot be read by ranges")
        self.nbytes = int(found["size"])
        self._identity = _identity(found)
        more = {} if answers is None else {"size": self.nbytes, "headers": answers.wanted(found)}
        self._file = self._tried(lambda: self._fs.open(self._path, "rb", cache_type="none", **more))
        if not (self._file.seekable() and found.get("partial", True)):
            raise RsvError("io_error", url, _NO_RANGES)

    @property
    def disk(self) -> Remote:
        """Itself."""
        return self

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
            raise RsvError("io_error", self._url, _CHANGED)

    def _tried(self, action: Any) -> Any:
        """What an action gives, tried again while the network or the server fails for a moment."""
        for attempt in range(_TRIES):
            try:
                return action()
            except RsvError:
                raise
            except ValueError as e:
                raise RsvError("io_error", self._url, _NO_RANGES if "range" in str(e) else str(e)) from e
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


class _Answers:
    """What a web server must answer to a range: those bytes, of the file that was there at the opening.

    It is asked for them with If-Match. Not every server heeds that, so each answer is held against the opening's too.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: dict[str, str] = {}

    def wanted(self, found: Mapping[str, Any]) -> dict[str, str]:
        """The headers to ask for ranges with, for a file of which this was told at the opening."""
        self._opened = _identity(found)
        tag = self._opened.get("ETag", "")
        return {"Accept-Encoding": "identity"} | ({"If-Match": tag} if _STRONG.fullmatch(tag) else {})

    async def check(self, answer: Any) -> None:
        """What aiohttp calls with each answer, before its body is read; io_error."""
        asked = answer.request_info.headers.get("Range")
        if asked is None or not (answer.status < 300 or answer.status == 412):
            return  # other failures are looked at where it was asked
        told = {key: answer.headers[key] for key in ("ETag", "Last-Modified") if key in answer.headers}
        span = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if span is not None and span[3] != "*":
            told["size"] = span[3]
        if answer.status == 412 or any(self._opened.get(key, value) != value for key, value in told.items()):
            raise RsvError("io_error", self._url, _CHANGED)
        if answer.status != 206 or span is None or asked != f"bytes={span[1]}-{span[2]}":
            raise RsvError("io_error", self._url, _NO_RANGES)


def _identity(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(info[key]) for key in _SAME if info.get(key) is not None}
