"""What a model's own files may decide: data, never code, and nothing that costs more than the file shows."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import rsv_format
from rsv_cli import adoption
from rsv_cli.app import app
from rsv_format import AttachmentData, LayerData, RsvError, TensorData, is_out_of_memory
from rsv_format.scratch import abandoned
from rsv_format.sources.base import reading

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
tokenizers = pytest.importorskip("tokenizers")

import rsv_mlx  # noqa: E402
from rsv_mlx import prompt  # noqa: E402
from rsv_mlx.calibrate import load_anything  # noqa: E402
from rsv_mlx.untrusted import check_config, data_folder, library  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
SHAPES = {"model.embed_tokens": (32, 64), "model.layers.0.mlp.up_proj": (96, 64)}

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one block, with a tokenizer of one token a word."""
    path, rng = tmp_path_factory.mktemp("untrusted"), np.random.default_rng(1)
    shapes = {f"self_attn.{part}_proj": (rows, 64) for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    shapes |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
    tensors = {f"model.layers.0.{name}.weight": rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
    for norm in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        tensors[f"{norm}.weight"] = np.ones(64)
    tensors["model.embed_tokens.weight"] = rng.standard_normal((32, 64))
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(32)} | {"beyond": 10**6}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    rsv_format.quantize(folder, folder / "base.rsv", importance="none")
    return folder / "base.rsv"


@pytest.fixture
def make(base: Path, tmp_path: Path) -> Make:
    """The model's file with other attachments: objects are JSON, None leaves one out."""

    def made(files: dict[str, Any]) -> Path:
        with rsv_format.open(base) as file:
            attachments = {name: AttachmentData(a.media_type, bytes(a.data)) for name, a in file.attachments.items()}
            for name, content in files.items():
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                attachments[name] = AttachmentData("application/octet-stream", data)
            layers = [
                LayerData(x.name, x.in_features, x.bits, x.codes, x.scales, x.codebook, x.transform)
                for x in file.layers.values()
            ]
            tensors = {t.name: TensorData(t.dtype, t.array) for t in file.tensors.values()}
            rsv_format.write(tmp_path / "made.rsv", layers=layers, tensors=tensors, attachments=attachments)
        return tmp_path / "made.rsv"

    return made


def generate(path: Path, *options: str, code: int = 0) -> str:
    """What `rsv generate` prints: text, or errors."""
    result = CliRunner().invoke(app, ["generate", str(path), "-p", "w1 w2", "-m", "2", "-q", *options])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result.stderr if code else result.stdout


def refused(path: Path, code: str, part: str) -> None:
    """By `load` in this process and by `generate` in another, in one line."""
    with pytest.raises(RsvError) as info:
        rsv_mlx.load(path)
    assert info.value.code == code and part in str(info.value)
    said = generate(path, code=1)
    assert said.startswith(f"error[{code}]") and part in said and said.count("\n") == 1


# code


def test_a_model_with_files_of_its_own_runs(base: Path) -> None:
    assert generate(base).strip()
    tokens = rsv_mlx.load_tokenizer(base).encode("w1 w2")
    with prompt.encoder(base) as encoder:
        assert encoder.text("w1 w2") == encoder.tokens({"messages": [], "text": "w1 w2"}) == tokens == [1, 2]


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("answer", ["", "y\n"])
def test_code_in_attachments_is_never_run(
    where: str, answer: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    evil = f"open({str(mark)!r}, 'w').write('x')\nclass Evil: pass\n".encode()
    own: dict[str, Any] = CONFIG if where == "config.json" else TOKENIZER | {"tokenizer_class": "Evil"}
    chosen = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    path = make({where: {**own, "auto_map": chosen}, "evil.py": evil, "sitecustomize.py": evil})
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    if where == "config.json":
        rsv_mlx.load(path)  # a config of a kind that is known
    else:
        refused(path, "unsupported_model", "its own code")
    assert not mark.exists()


def test_code_beside_a_folder_is_never_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "ran"
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').write('x')\n")
    chosen = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(chosen))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    for spec in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(RsvError, match="unsupported_model at tokenizer: .*its own code"):
            load_anything(spec)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_file": "evil.py"}))
    for spec in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(RsvError, match="unsupported_model at config.json: it brings its own code"):
            load_anything(spec)
    assert not mark.exists()


def test_modules_of_the_working_folder_are_not_imported(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    for name in ("json", "resource", "tokenizers", "mlx_lm", "rsv_mlx", "rsv_cli", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').write('x')\n")
    monkeypatch.chdir(tmp_path)
    with prompt.encoder(base) as encoder:
        assert encoder.text("w1 w2") == [1, 2]
    assert adoption.probe()["attempts"]
    assert not mark.exists()


def test_other_processes_answer_in_any_encoding(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-16")
    with prompt.encoder(base) as encoder:
        assert encoder.text("w1 w2") == [1, 2]
    assert adoption.probe()["attempts"]


def test_remote_code_cannot_be_asked_for(base: Path) -> None:
    with pytest.raises(RsvError, match="bad_argument at tokenizer_config"):
        rsv_mlx.load(base, tokenizer_config={"trust_remote_code": True})


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["tool_parser_type", "chat_template_type"])
@pytest.mark.parametrize("value", ["evil", "../../evil", "json_tools.x", "os", 3, ["x"]])
def test_modules_must_be_mlx_lms_own(name: str, key: str, value: Any) -> None:
    with (
        pytest.raises(RsvError, match=f"unsupported_model at {name}: {key}"),
        data_folder([(name, _json({key: value}))]),
    ):
        pass


@pytest.mark.parametrize("value", ["AutoTokenizer", "AutoModel", "pipeline", "AutoConfig", "utils", "__version__", 3])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_class_is_a_tokenizer(name: str, value: Any) -> None:
    with pytest.raises(RsvError, match="is no tokenizer"), data_folder([(name, _json({"tokenizer_class": value}))]):
        pass


def test_what_transformers_sees() -> None:
    files = {
        "config.json": {"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}, "model_file": None},
        "tokenizer_config.json": {"vocab_file": "/x", "init_inputs": ["/x"], "tool_parser_type": "json_tools"},
        "special_tokens_map.json": {"tokenizer_file": "/x", "eos_token": "w0"},
        "tokenizer.json": {}, "a.py": {}, "b.pkl": {}, "qwen.tiktoken": {}, "generation_config.json": {}, "x.json": {},
    }  # fmt: skip
    with data_folder([(name, _json(tree)) for name, tree in files.items()]) as folder:
        seen = {path.name: json.loads(path.read_bytes()) for path in folder.iterdir()}
    assert seen.pop("config.json") == {"model_type": "llama"}
    assert seen.pop("tokenizer_config.json") == {"tool_parser_type": "json_tools"}
    assert seen.pop("special_tokens_map.json") == {"eos_token": "w0"}
    assert set(seen) == {"tokenizer.json", "qwen.tiktoken", "generation_config.json"}
    assert not folder.exists()


def test_a_folder_of_a_call_is_named_once_its_process_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with data_folder([("tokenizer.json", b"{}")]) as folder:
        assert folder.parent == tmp_path and abandoned(str(tmp_path)) == []
    code = "import sys, os, tempfile; tempfile.tempdir = sys.argv[1]\nfrom rsv_mlx.untrusted import data_folder\n"
    code += "with data_folder([('tokenizer.json', b'{}')]): os._exit(0)"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=Path(__file__).parents[1])
    (left,) = abandoned(str(tmp_path))
    assert [path.name for path in left.iterdir()] == ["tokenizer.json"]


# costs


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": 257}, {"num_hidden_layers": -1}, {"n_layer": 10**6},
        {"text_config": {"num_hidden_layers": 10**9}}, {"num_local_experts": 10**6}, {"n_routed_experts": 10**6},
        {"hidden_size": 10**9}, {"vocab_size": 10**12}, {"num_attention_heads": 10**9}, {"n_group": 10**9},
        {"depths": [10**9]}, {"num_nextn_predict_layers": 10**9},
    ],
    ids=str,
)  # fmt: skip
def test_counts_that_the_tensors_do_not_show(change: dict[str, Any]) -> None:
    for shapes in (SHAPES, {}):
        with pytest.raises(RsvError, match=r"unsupported_model at config.json: \w+ is .*the tensors do not show"):
            check_config(CONFIG | change, shapes)


def test_counts_that_are_none_or_are_shown() -> None:
    free = {
        "max_position_embeddings": 10**15,
        "rope_theta": 10**12,
        "sliding_window_size": 2**40,
        "bos_token_id": 2**31,
    }
    check_config(CONFIG | free | {"num_local_experts": 384, "num_hidden_layers": 300}, SHAPES | {
        f"model.layers.{i}.mlp.switch_mlp.up_proj": (384, 96, 64) for i in range(300)
    })  # fmt: skip


@pytest.mark.parametrize("kind", ["../../x", "os", "llama.__init__", "", 3, None, "\x1b]0;x\x07"])
def test_model_types_that_mlx_lm_does_not_ship(kind: Any) -> None:
    with pytest.raises(RsvError, match="unsupported_model at config.json: "):
        check_config({"model_type": kind}, SHAPES)


LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [LOOP, "{{ 9**(9**9) }}"], ids=["loops", "in one call"])
def test_a_template_that_never_ends(template: str, make: Make) -> None:
    path = make({"chat_template.jinja": template.encode()})
    said = generate(path, "--template-seconds", "0.5", code=1)
    assert said.startswith("error[over_limit] prompt: ") and "0.5 s" in said
    assert generate(path, "--raw").strip()


def test_a_template_that_takes_all_memory(make: Make) -> None:
    said = generate(make({"chat_template.jinja": b"\x1b{{ 'a' * 60000000000 }}"}), code=1)
    assert said.startswith("error[out_of_memory] prompt: ")


# whatever is wrong with a tokenizer or a template


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": b"{"}, {"tokenizer.json": b"\xff"}, {"tokenizer.json": b"[]"},
        {"tokenizer.json": b"[" * 10**5},
        {"tokenizer.json": {"version": "1.0", "model": {"type": "Nope"}}}, {"tokenizer.json": {"a": 1}},
        {"tokenizer_config.json": b"{"}, {"tokenizer_config.json": []}, {"special_tokens_map.json": b"\xff"},
        {"added_tokens.json": [1]}, {"tokenizer_config.json": TOKENIZER | {"eos_token": {"content": 3}}},
        {"tokenizer_config.json": TOKENIZER | {"added_tokens_decoder": {"x": {}}}}, {"chat_template.jinja": b"\xff"},
    ],
    ids=lambda files: str(files)[:50],
)  # fmt: skip
def test_broken_tokenizers(files: dict[str, Any], make: Make) -> None:
    with pytest.raises(RsvError) as info:
        rsv_mlx.load_tokenizer(make(files))
    assert info.value.code == "unsupported_model" and len(str(info.value)) < 500 and "\n" not in str(info.value)


@pytest.mark.parametrize(
    "template, part",
    [
        ("{% for x in %}", "TemplateSyntaxError"), ("{{ raise_exception('no \x1b[31mred') }}", "no \x1b[31mred"),
        ("{{ nothing.at.all }}", "UndefinedError"), ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)  # fmt: skip
def test_templates_that_raise(template: str, part: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_limit", lambda seconds: None)  # of this process
    with pytest.raises(RsvError, match="unsupported_model at chat template: ") as info:
        prompt._Worker(str(make({"chat_template.jinja": template.encode()})), 1).tokens(
            [{"role": "user", "content": "w1"}]
        )
    assert part in info.value.detail and "\n" not in info.value.detail


def test_prompts(base: Path) -> None:
    def prompted(prompt: str | bytes, *options: str) -> Any:
        given = ["-p", "-"] if isinstance(prompt, bytes) else ["-p", prompt]
        data = prompt if isinstance(prompt, bytes) else None
        return CliRunner().invoke(app, ["generate", str(base), "-m", "1", "-q", *given, *options], input=data)

    for bad in ("\udcff\udcfe", b"\xff\xfe"):
        assert prompted(bad).stderr.startswith("error[bad_argument] --prompt: is not UTF-8")
    assert prompted("").stderr.startswith("error[bad_argument] --prompt: it has no tokens")
    assert prompted(b"w1 beyond").stderr.startswith("error[unsupported_model] tokenizer: it gives token 1000000")


def test_a_prompt_is_given_up_with_the_body(base: Path) -> None:
    with pytest.raises(KeyboardInterrupt), prompt.encoder(base) as encoder:
        encoder.send({"text": "w1"})
        process = encoder._process
        raise KeyboardInterrupt
    assert process is not None and process.poll() is not None and encoder._process is None


def test_an_encoder_goes_on_after_a_limit_and_an_error(make: Make) -> None:
    template = "{% if messages[0].content == 'w3' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    path = make({"chat_template.jinja": template.encode()})
    with prompt.encoder(path, 4) as encoder:  # to load the tokenizer takes one
        for _ in range(2):
            with pytest.raises(RsvError, match="over_limit at prompt: .*4 s"):
                encoder.chat([{"role": "user", "content": "w3"}])
            assert encoder.chat([{"role": "user", "content": "w1 w2"}], tokenize=True, odd=None) == [1, 2]
        first = encoder._process
        with pytest.raises(RsvError, match="unsupported_model at chat template"):
            encoder.chat([], tokenize=True)
        with pytest.raises(RsvError, match="bad_argument at prompt: it is no JSON"):
            encoder.chat([{"role": "user", "content": object()}])
        assert encoder.text("w1", add_special_tokens=False) == [1] and encoder._process is first


def test_an_encoder_that_is_ended_leaves_nothing(base: Path) -> None:
    def there() -> set[Path]:
        return set(Path(tempfile.gettempdir()).iterdir())

    before = there()
    with prompt.encoder(base) as encoder:
        encoder.text("w1")
        (room,) = there() - before
        (room / "unfinished").mkdir()  # as it may be ended while it reads a tokenizer
        assert room not in abandoned(tempfile.gettempdir())
    assert there() == before


def test_a_limit_may_be_any_number(base: Path) -> None:
    for seconds in (float("inf"), 1e300):
        with prompt.encoder(base, seconds) as encoder:
            assert encoder.text("w1", add_special_tokens=False) == [1]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError("Unable to allocate 9 GiB for an array"), MemoryError(), RuntimeError("std::bad_alloc"),
        RuntimeError("[malloc_or_wait] Unable to allocate 9 bytes."), RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"), RuntimeError("Resource temporarily unavailable"),
        ImportError("libx.so: failed to map segment from shared object"),
        ImportError("libx.so: cannot allocate memory for program header: Cannot allocate memory"),
        Exception("Cannot allocate memory (os error 12)"), caused(RuntimeError("x"), MemoryError()),
    ],
    ids=repr,
)  # fmt: skip
def test_libraries_that_lack_memory(raised: Exception) -> None:
    assert is_out_of_memory(raised)
    with pytest.raises((MemoryError, RsvError)) as caught, library("unsupported_model", "x"):
        raise raised
    assert getattr(caught.value, "code", "out_of_memory") == "out_of_memory"
    with pytest.raises((MemoryError, RsvError)) as caught, reading("x"):
        raise raised
    assert getattr(caught.value, "code", "out_of_memory") == "out_of_memory"


@pytest.mark.parametrize(
    "raised",
    [
        ImportError("libgomp: cannot allocate memory in static TLS block"), ModuleNotFoundError("No module named 'x'"),
        ImportError("libx.so: failed to map segment from shared object: Operation not permitted"),
        ValueError("out of memory, says the template"), KeyError("bad_alloc"), OSError(28, "No space left on device"),
        BlockingIOError(11, "Resource temporarily unavailable"), caused(RuntimeError("x"), KeyError("y")),
    ],
    ids=repr,
)  # fmt: skip
def test_libraries_that_lack_something_else(raised: Exception) -> None:
    assert not is_out_of_memory(raised)
    with pytest.raises(RsvError) as caught, library("unsupported_model", "x"):
        raise raised
    assert caught.value.code != "out_of_memory"


def test_no_room_for_mlx(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsv_mlx.stream._SPARE", 2**60)
    with pytest.raises(MemoryError, match="the process may not take 0 MB and"):
        rsv_mlx.load(base)


def test_errors_of_libraries() -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    for raised, code in (
        (PanicException("of Rust"), "unsupported_model"), (ImportError("no sentencepiece"), "missing_dependency"),
        (OSError(28, "No space left"), "io_error"), (OSError("no vocabulary"), "unsupported_model"),
        (KeyError("x"), "unsupported_model"),
    ):  # fmt: skip
        with pytest.raises(RsvError) as info, library("unsupported_model", "tokenizer"):
            raise raised
        assert info.value.code == code
    with pytest.raises(KeyboardInterrupt), library("unsupported_model", "tokenizer"):
        raise KeyboardInterrupt
    with pytest.raises(MemoryError), library("unsupported_model", "tokenizer"):
        raise RuntimeError("[malloc] Unable to allocate 99 bytes")


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()
