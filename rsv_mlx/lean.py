"""mlx-lm imported without transformers, which takes most of the time that mlx-lm's import does.

mlx-lm needs transformers to make tokenizers and to download; what a file holds needs neither (`tokenizing`). So, while
mlx-lm is imported, stand-ins have the names that it takes from there. They go at once: whoever imports transformers
then, mlx-lm too, gets the real one, and mlx-lm's modules get the real names. Where mlx-lm or transformers have been
imported before, or mlx-lm wants other names, nothing is put in between.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BASES = ("PreTrainedTokenizerBase", "PreTrainedTokenizer", "PreTrainedTokenizerFast")
_lock = threading.RLock()


def import_mlx_lm() -> ModuleType:
    """mlx_lm, imported without transformers if it was not imported before.

    Raises
    ------
    ImportError
    """
    with _lock:
        if "mlx_lm" in sys.modules or "transformers" in sys.modules or importlib.util.find_spec("transformers") is None:
            return importlib.import_module("mlx_lm")
        stand_ins = _StandIns()
        sys.modules.update(stand_ins.modules)
        try:
            found = importlib.import_module("mlx_lm")
        except (ImportError, AttributeError, TypeError):  # a release that wants something else of them
            found = None
        finally:
            for name, module in stand_ins.modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
        if found is None:
            for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]:
                del sys.modules[name]
            return importlib.import_module("mlx_lm")
        sys.meta_path.insert(0, _Watch(stand_ins))
        return found


class _StandIns:
    """Modules that have the names which mlx-lm imports, and what those become."""

    def __init__(self) -> None:
        own = {"__module__": "transformers", "apply_chat_template": _from_pretrained}  # no other has this one
        self._bases = {name: type(name, (), own) for name in _BASES}
        self._registered: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        auto = type("AutoTokenizer", (), {"register": self._register, "from_pretrained": _from_pretrained})
        self._names = {**self._bases, "AutoTokenizer": auto}
        transformers = _module("transformers", {name: self._names[name] for name in (*_BASES[1:], "AutoTokenizer")})
        transformers.__path__ = []
        base = _module("transformers.tokenization_utils_base", {_BASES[0]: self._names[_BASES[0]]})
        self.modules = {module.__name__: module for module in (transformers, base)}
        if "huggingface_hub" not in sys.modules:
            hub = _module("huggingface_hub", {"snapshot_download": _snapshot_download})
            self.modules[hub.__name__] = hub

    def _register(self, *arguments: Any, **options: Any) -> None:
        self._registered.append((arguments, options))

    def become_real(self, transformers: ModuleType) -> None:
        """Put the real names in the stand-ins' places, now that transformers is there."""
        base = importlib.import_module("transformers.tokenization_utils_base")
        real = {name: getattr(base if name == _BASES[0] else transformers, name) for name in self._names}
        ours = {id(stand_in): name for name, stand_in in self._names.items()}
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] != "mlx_lm":
                continue
            for name, value in list(vars(module).items()):
                if id(value) in ours:
                    setattr(module, name, real[ours[id(value)]])
        for name, stand_in in self._bases.items():
            child: Any  # mypy takes a class's bases for fixed
            for child in stand_in.__subclasses__():
                child.__bases__ = tuple(real[name] if base is stand_in else base for base in child.__bases__)
        for arguments, options in self._registered:
            real["AutoTokenizer"].register(*arguments, **options)


class _Watch(importlib.abc.MetaPathFinder):
    """Sees transformers being imported, once; who only looks for it finds it as ever."""

    def __init__(self, stand_ins: _StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self, module: ModuleType) -> None:
        """It is there."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._stand_ins.become_real(module)


class _Loader(importlib.abc.Loader):
    """Another's loader, and what comes after it."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader, self._watch = loader, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._watch.imported(sys.modules[module.__name__])  # transformers puts another one in its place


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _from_pretrained(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(*arguments, **options)


def _snapshot_download(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module("huggingface_hub").snapshot_download(*arguments, **options)
