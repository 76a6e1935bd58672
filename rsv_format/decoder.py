"""The forward pass of a decoder of a known family, in numpy, some rows of a matrix in memory at a time.

For statistics and for measuring quality, not for speed. Left out: position scaling, sliding windows, soft caps.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.threads import ordered

Rows = NDArray[np.float32]
Fetch = Callable[[str], Sequence[Rows] | None]
Observe = Callable[[str, Rows], None]
_MLP_NUMBERS = 2**23  # within an MLP, for each token at a time as many as it is wide


@dataclass(frozen=True)
class _Family:
    """How a model type differs from Llama."""

    gain_offset: float = 0.0  # Gemma stores a norm's gain less one
    gelu: bool = False
    scaled_embedding: bool = False
    sandwich: bool = False  # norms behind attention and MLP too


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "gemma": _Family(1.0, True, True),
    "gemma2": _Family(1.0, True, True, True),
    "gemma3_text": _Family(1.0, True, True, True),
}


@contextlib.contextmanager
def running(code: str, where: str) -> Iterator[None]:
    """Around a decoder: what a config or tensors that do not fit it make Python and numpy raise is one error."""
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite is refused at the end
            yield
    except RsvError:
        raise
    except KeyError as e:  # of the config, or a tensor
        raise RsvError(code, where, f"it lacks {e}") from e
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        raise RsvError(code, where, f"{type(e).__name__}: {e}") from e


class Decoder:
    """The blocks of a model.

    Parameters
    ----------
    config : mapping
        config.json's content; `model_type` must be of a known family.
    fetch : callable
        Hugging Face name of a tensor -> its rows, float32 matrices that lie one below the other, or a vector alone;
        None where the model has none.
    observe : callable, optional
        Told the name and the input (tokens, in_features) of each linear layer; of one in an MLP for some tokens at a
        time.
    window : int, optional
        Tokens are taken in runs of so many, each a text of its own; one run of all if not given.

    Raises
    ------
    KeyError, TypeError, ValueError
        The config is not one of a known family; later, a tensor is missing or does not fit.
    """

    def __init__(
        self, config: Mapping[str, Any], fetch: Fetch, observe: Observe | None = None, window: int | None = None
    ) -> None:
        self.family = _FAMILIES[str(config["model_type"])]
        self.fetch, self.observe, self.window = fetch, observe, window
        self.hidden_size = int(config["hidden_size"])
        self.blocks = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.theta = float(config.get("rope_theta") or 10000.0)
        self.mlp_tokens = max(1, _MLP_NUMBERS // int(config.get("intermediate_size") or 1))  # at a time

    def run(self, embedded: Rows, progress: Callable[[int, int, str], None] | None = None) -> Rows:
        """Embedded tokens (tokens, hidden_size) through all blocks and the last norm: what the head sees."""
        steps = self.steps(embedded, progress)
        del embedded
        (last,) = deque(steps, maxlen=1)
        return last

    def steps(self, embedded: Rows, progress: Callable[[int, int, str], None] | None = None) -> Iterator[Rows]:
        """Embedded tokens after each block, which runs when it is asked for, in the same array, and after the last
        norm."""
        x = embedded * np.float32(np.sqrt(self.hidden_size) if self.family.scaled_embedding else 1)
        del embedded
        for i in range(self.blocks):
            block = f"model.layers.{i}"
            if progress is not None:
                progress(i, self.blocks, block)
            self._run_block(block, x)
            yield x
        x = self._norm("model.norm", x)
        yield x

    def _run_block(self, block: str, x: Rows) -> None:
        """A block adds to what goes through it."""
        attended = self._attention(f"{block}.self_attn", self._norm(f"{block}.input_layernorm", x))
        if self.family.sandwich:
            attended = self._norm(f"{block}.post_attention_layernorm", attended)
        x += attended
        del attended
        before = "pre_feedforward_layernorm" if self.family.sandwich else "post_attention_layernorm"
        for start in range(0, x.shape[0], self.mlp_tokens):
            some = x[start : start + self.mlp_tokens]
            out = self._mlp(f"{block}.mlp", self._norm(f"{block}.{before}", some))
            some += self._norm(f"{block}.post_feedforward_layernorm", out) if self.family.sandwich else out

    def _attention(self, name: str, x: Rows) -> Rows:
        tokens = x.shape[0]
        q = self._linear(f"{name}.q_proj", x).reshape(tokens, self.heads, -1)
        k = self._linear(f"{name}.k_proj", x).reshape(tokens, self.kv_heads, -1)
        v = self._linear(f"{name}.v_proj", x).reshape(tokens, self.kv_heads, -1)
        del x
        step = self.window or tokens
        for start in range(0, tokens, step):
            run = slice(start, start + step)
            query, key = (self._positioned(f"{name}.{part}_norm", rows[run]) for part, rows in (("q", q), ("k", k)))
            q[run] = self._attended(query, key, v[run]).reshape(q[run].shape)
        del k, v
        return self._linear(f"{name}.o_proj", q.reshape(tokens, -1))

    def _attended(self, q: Rows, k: Rows, v: Rows) -> Rows:
        """What the heads of one run of tokens gather, (tokens, heads * head_dim)."""
        tokens = q.shape[0]
        k, v = (np.repeat(rows, self.heads // self.kv_heads, axis=1) for rows in (k, v))
        scores = np.matmul(q.swapaxes(0, 1), k.transpose(1, 2, 0)) / np.float32(np.sqrt(q.shape[-1]))
        scores += np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray(np.matmul(weights, v.swapaxes(0, 1)).swapaxes(0, 1).reshape(tokens, -1))

    def _positioned(self, norm: str, heads: Rows) -> Rows:
        """Of one run of tokens: the head's own norm, where the model has one, then rotary positions."""
        if self.fetch(f"{norm}.weight") is not None:
            heads = self._norm(norm, heads)
        half = heads.shape[-1] // 2
        frequencies = self.theta ** (-np.arange(half) / half)
        angle = (np.arange(heads.shape[0])[:, None] * frequencies)[:, None, :]
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _mlp(self, name: str, x: Rows) -> Rows:
        gate = self._linear(f"{name}.gate_proj", x)
        if self.family.gelu:
            gate = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
        else:
            gate = gate / (1 + np.exp(-np.clip(gate, -80, None)))
        return self._linear(f"{name}.down_proj", gate.astype(np.float32) * self._linear(f"{name}.up_proj", x))

    def _linear(self, name: str, x: Rows) -> Rows:
        if self.observe is not None:
            self.observe(name, x)
        y = _product(x, self._pieces(f"{name}.weight"))
        bias = self.fetch(f"{name}.bias")
        if bias is not None:
            y += np.concatenate([*bias])
        return y

    def _norm(self, name: str, x: Rows) -> Rows:
        gain = np.concatenate([*self._pieces(f"{name}.weight")]) + np.float32(self.family.gain_offset)
        square = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(square + np.float32(self.eps)) * gain)

    def _pieces(self, name: str) -> Sequence[Rows]:
        pieces = self.fetch(name)
        if pieces is None:
            raise KeyError(name)
        return pieces


def _product(x: Rows, weight: Sequence[Rows]) -> Rows:
    """x @ W.T, pieces of W side by side."""
    if len(weight) == 1:
        return x @ weight[0].T
    return np.concatenate([*ordered(lambda i: x @ weight[i].T, range(len(weight)), None)], axis=1)
