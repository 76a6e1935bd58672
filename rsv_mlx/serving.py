"""A file behind mlx-lm's HTTP server: its endpoints and its generation, our model, and requests that are checked first.

mlx-lm's server loads models by names that requests say, and fetches images from addresses in them; what a request has
wrong can end the thread that generates. Here one model is served, requests are checked before they reach that thread,
and if something gets through to it all the same, it answers with errors and goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from queue import Queue
from types import SimpleNamespace
from typing import Any

from rsv_format import RsvError, is_out_of_memory
from rsv_mlx.calibrate import check_tokens, table_rows
from rsv_mlx.prompt import Encoder
from rsv_mlx.untrusted import library, mlx_lm_utils

LARGEST = 64 * 2**20  # bytes of a request
_PATIENCE = 5.0  # seconds that answers have to be ended in


def limited(tokenizer: Any, encoder: Encoder) -> Any:
    """A tokenizer of mlx-lm whose prompts are encoded by another process, with limits."""

    class Limited(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return encoder.text(text, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
            if not options.pop("tokenize", True):
                raise ValueError("a template is rendered to tokens alone")
            return encoder.chat(messages, **options)

    made: Any = Limited.__new__(Limited)
    vars(made).update(vars(tokenizer))
    return made


class Server:
    """mlx-lm's server, listening from the moment at which it is made.

    Parameters
    ----------
    name : str
        Of the model.
    model, tokenizer
        As `load` returns them; the tokenizer as `limited` returns it.
    draft : Module, optional
        A smaller model with the same tokenizer, which proposes tokens.
    host, port
        Port 0 takes a free one.
    options
        Of mlx_lm.server, by the names of its command line.

    Raises
    ------
    RsvError
        missing_dependency; io_error: it cannot listen there.
    """

    def __init__(
        self, name: str, model: Any, tokenizer: Any, draft: Any = None, *, host: str, port: int, **options: Any
    ) -> None:
        mlx_lm_utils()
        try:
            theirs: Any = importlib.import_module("mlx_lm.server")
        except ImportError as e:
            raise RsvError.of_import(e, "mlx_lm.server") from e
        arguments = SimpleNamespace(
            model=name, adapter_path=None, draft_model=None, trust_remote_code=False, chat_template="",
            use_default_chat_template=False, pipeline=False, **options,
        )  # fmt: skip
        with library("unsupported_model", "mlx_lm.server"):
            provider = _provider(theirs)(arguments, model, tokenizer, draft)
            fingerprint = theirs.get_system_fingerprint()
        handler = _handler(theirs)
        rows = table_rows(model)
        try:
            family, _, _, _, address = next(iter(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
            kind = type("Listening", (_Listening,), {"address_family": family})
            self._http = kind(
                address,
                lambda *found: handler(self._generator, *found, system_fingerprint=fingerprint, rows=rows),
            )
        except (OSError, OverflowError) as e:
            raise RsvError("io_error", f"{host}:{port}", str(e)) from e
        self._generator: Any = _generator(theirs)(provider, theirs.LRUPromptCache(arguments.prompt_cache_size))
        self.address: tuple[str, int] = self._http.server_address[:2]

    def run(self) -> None:
        """Answer until an exception, as of a signal, ends it; answers that are under way then end with an error."""
        try:
            self._http.serve_forever(poll_interval=0.1)
        finally:
            self._http.server_close()
            self._generator.end(RuntimeError("the server ends"))
            self._http.wait(_PATIENCE)


class _Listening(ThreadingHTTPServer):
    """Knows what is under way; says in a line what went wrong with a connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._busy = threading.Condition()
        self._count = 0
        super().__init__(*arguments)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._busy:
            self._count += 1
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._busy:
                self._count -= 1
                self._busy.notify_all()

    def wait(self, seconds: float) -> None:
        """Until nothing is under way, or so long."""
        with self._busy:
            self._busy.wait_for(lambda: self._count == 0, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.error("%s: %r", client_address[0], sys.exc_info()[1])


def _provider(theirs: Any) -> Any:
    class Provider(theirs.ModelProvider):  # type: ignore[misc]
        """One model, under one name."""

        def __init__(self, arguments: Any, model: Any, tokenizer: Any, draft: Any) -> None:
            super().__init__(arguments)
            self.model, self.tokenizer, self.draft_model = model, tokenizer, draft
            self.model_key = (arguments.model, None, None)
            cache = theirs.make_prompt_cache(model)
            self.is_batchable = draft is None and all(hasattr(part, "merge") for part in cache)

        def load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> tuple[Any, Any]:
            if model_path not in ("default_model", self.cli_args.model):
                raise ValueError(f"there is no model {model_path!r:.80}, only {self.cli_args.model!r}")
            if adapter_path is not None or draft_model_path not in (None, "default_model"):
                raise ValueError("a request can choose neither adapters nor a draft model")
            return self.model, self.tokenizer

        def load_default(self) -> None:
            pass

        def reset(self) -> None:
            pass

    return Provider


class _Requests(Queue[Any]):
    """Requests, and who waits for the answers."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._waiting.add(item[0])
        super().put(item, block, timeout)

    def fail(self, error: Exception) -> None:
        """Answer all who wait, and will wait for what has been put, with an error."""
        for answers in list(self._waiting):
            answers.put(error)
        self._waiting.clear()


class _Unanswered(BaseException):
    """Why a request gets no answer: of what is an Exception mlx-lm's handler says that it was not found."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _generator(theirs: Any) -> Any:
    class Generator(theirs.ResponseGenerator):  # type: ignore[misc]
        """A thread that generates, begun again after whatever ends it."""

        def __init__(self, *arguments: Any) -> None:
            self._begun = threading.Event()
            super().__init__(*arguments)
            self.requests = _Requests()
            self._begun.set()

        prompt_cache: Any

        def generate(self, *arguments: Any, **options: Any) -> Any:
            try:
                return super().generate(*arguments, **options)
            except Exception as e:
                raise _Unanswered(e) from e

        def _run_generate(self) -> None:
            self._begun.wait()
            while not self._stop:
                cache = self.prompt_cache
                try:
                    self._generate()
                except BaseException as e:  # a library in Rust raises what is no Exception
                    logging.error("generating: %s: %s", type(e).__name__, e)
                    self.requests.fail(RuntimeError(f"the answer was given up: {type(e).__name__}: {e}"))
                    self.prompt_cache = type(cache)(self.cli_args.prompt_cache_size)

        def _tokenize(self, tokenizer: Any, request: Any, arguments: Any) -> Any:
            found = super()._tokenize(tokenizer, request, arguments)
            if not found[0]:
                raise ValueError("the prompt has no tokens: there is nothing to continue")
            check_tokens(self.model_provider.model, found[0])
            return found

        def end(self, error: Exception) -> None:
            self._stop = True
            self.requests.fail(error)

    return Generator


def _handler(theirs: Any) -> Any:
    class Handler(theirs.APIHandler):  # type: ignore[misc]
        """mlx-lm's, of requests that are checked."""

        timeout = 600  # seconds without a byte

        def __init__(self, *arguments: Any, rows: int | None, **options: Any) -> None:
            self._rows, self._begun = rows, False
            super().__init__(*arguments, **options)

        def end_headers(self) -> None:
            self._begun = True  # until then nothing is sent
            super().end_headers()

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if length.isdecimal() and int(length) > LARGEST:
                self._refuse(413, f"a request has at most {LARGEST} bytes")
            elif length and not length.isdecimal():
                self._refuse(400, "Content-Length is no number")
            else:
                with self._answering():
                    super().do_POST()

        def do_GET(self) -> None:
            with self._answering():
                super().do_GET()

        @contextlib.contextmanager
        def _answering(self) -> Iterator[None]:
            """Whatever goes wrong is an answer, or ends one that has begun."""
            try:
                yield
            except ConnectionError:
                self.close_connection = True
            except (Exception, _Unanswered) as raised:
                e = raised.reason if isinstance(raised, _Unanswered) else raised
                logging.error("%s %s: %s: %s", self.command, self.path[:80], type(e).__name__, e)
                self.close_connection = True
                if not self._begun:
                    asked = isinstance(e, ValueError | RecursionError | RsvError) and not is_out_of_memory(e)
                    self._refuse(400 if asked else 500, str(e))
                elif getattr(self, "stream", False):
                    with contextlib.suppress(OSError):
                        error = {"error": {"message": str(e), "type": "server_error"}}
                        self.wfile.write(f"data: {json.dumps(error)}\n\n".encode())

        def _refuse(self, code: int, why: str) -> None:
            self.close_connection = True
            self._headers_buffer: list[bytes] = []  # of an answer that was about to begin
            with contextlib.suppress(OSError):
                self._answer(code, {"error": why})

        def _answer(self, code: int, tree: Any) -> None:
            data = json.dumps(tree).encode()
            self._set_completion_headers(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def validate_model_parameters(self) -> None:
            super().validate_model_parameters()
            stop = self.body.get("stop")
            words = [stop] if isinstance(stop, str) else stop or []
            if not (isinstance(words, list) and all(isinstance(word, str) and word for word in words)):
                raise ValueError("stop must be a text or a list of texts")
            if not isinstance(self.chat_template_kwargs, dict | None):
                raise ValueError("chat_template_kwargs must be an object")
            if "tokenize" in (self.chat_template_kwargs or {}):
                raise ValueError("chat_template_kwargs cannot say tokenize")
            if self._rows is not None and not all(0 <= token < self._rows for token in self.logit_bias or ()):
                raise ValueError("logit_bias names a token that the model does not have")
            if self._rows is not None and self.top_k >= self._rows:
                raise ValueError("top_k must be below the number of tokens")
            for name in ("stream_options", "role_mapping"):
                if not isinstance(self.body.get(name), dict | None):
                    raise ValueError(f"{name} must be an object")

        def handle_chat_completions(self) -> Any:
            messages, tools = self.body.get("messages"), self.body.get("tools")
            if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
                raise ValueError("messages must be a list of objects, each with a role and a content of text")
            if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
                raise ValueError("tools must be a list of objects")
            return super().handle_chat_completions()

        def handle_text_completions(self) -> Any:
            if not (isinstance(self.body.get("prompt"), str) and self.body["prompt"]):
                raise ValueError("prompt must be a text")
            return super().handle_text_completions()

        def handle_models_request(self) -> None:
            name = self.response_generator.cli_args.model
            model = {"id": name, "object": "model", "created": self.created, "owned_by": "rsv"}
            wanted = self.path.partition("?")[0].rstrip("/").removeprefix("/v1/models").lstrip("/")
            if not wanted:
                self._answer(200, {"object": "list", "data": [model]})
            elif wanted == name:
                self._answer(200, model)
            else:
                self._answer(404, {"error": f"there is no model {wanted!r:.80}, only {name!r}"})

    return Handler


def _is_message(message: Any) -> bool:
    """Whether a message is of text alone: no addresses of images, which mlx-lm would fetch."""
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return isinstance(content, str | list | None) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )
