"""Functions of one's own that a training configuration names: ``{call: "package.module:name", with: {width: 512}}``.

A name is imported only while the configuration that a person named on the command line is read, by `imported`. Reading
the same entries from anywhere else, such as a run's folder, imports nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Discriminator, Field, PrivateAttr, ValidationInfo, field_validator

from autoshard.call_errors import note_entry
from autoshard.errors import ArgumentError, ConfigError, meant, nearest
from autoshard.strict_config import Config
from autoshard.strict_files import cut

IMPORTS = "imports"
"""Of a validation's context: whether what is called is imported."""

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Call(Config):
    """A function or class, and the arguments it is called with by name."""

    call: str = Field(max_length=500)
    """``package.module:name``, of a module in the working directory, beside the configuration, or installed."""
    arguments: dict[str, Any] = Field(default={}, alias="with", validate_default=True)
    """What it is called with, by name."""

    supplied: ClassVar[frozenset[str]] = frozenset()
    """Arguments that the run gives by name, to what takes them."""
    positional: ClassVar[int] = 0
    """Arguments that the run gives by position."""

    _target: Callable[..., Any] | None = PrivateAttr(default=None)
    _at: str = PrivateAttr(default="")

    @field_validator("call")
    @classmethod
    def _found(cls, call: str, info: ValidationInfo) -> str:
        if not _NAME.fullmatch(call):
            module, dot, name = call.rpartition(".")
            if dot and _NAME.fullmatch(whole := f"{module}:{name}"):
                raise ValueError(f"{cut(call)!r} has no colon between module and name{meant([cut(whole)])}")
            raise ValueError(f"{cut(call)!r} is not a name such as 'my_package.models:make'")
        if _imports(info):
            _target_of(call, info)
        return call

    @field_validator("arguments")
    @classmethod
    def _accepted(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if _imports(info) and "call" in info.data:
            cls._check(_target_of(info.data["call"], info), info.data["call"], arguments)
        return arguments

    @classmethod
    def _check(cls, target: Callable[..., Any], call: str, arguments: Mapping[str, Any]) -> None:
        parameters = _parameters(target)
        if parameters is None:
            return
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        parameters = [p for p in parameters if p not in by_position[: cls.positional]]
        named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for name in arguments.keys() - named:
                raise ValueError(f"{call} takes no {cut(name)!r}{nearest(name, named)}")
        missing = [n for n, p in named.items() if p.default is p.empty and n not in {*arguments, *cls.supplied}]
        if missing:
            raise ValueError(f"{call} needs {', '.join(map(repr, missing))}")

    def resolved(self) -> Callable[..., Any]:
        """What is called, with its arguments; takes what the run supplies.

        Raises:
          ConfigError: the configuration is not one that was named on the command line.
        """
        if self._target is None:
            raise ConfigError(
                f"{self.at}{self.call} is not imported: a call is imported only from a configuration that is named on "
                "the command line. From Python, use autoshard.train.fit"
            )
        target = self._target

        def call(*args: Any, **given: Any) -> Any:
            return target(*args, **{n: x for n, x in given.items() if takes(target, n)}, **self.arguments)

        return self.named(call)

    @property
    def at(self) -> str:
        """Where the entry stands, before what is said of it: ``FILE:LINE: KEY: ``; "" if it stands nowhere."""
        return self._at

    def stands(self, at: str) -> None:
        """Says where the entry stands."""
        self._at = at

    def named[**P, T](self, function: Callable[P, T]) -> Callable[P, T]:
        """``function``, what is called or what that gave, whose errors name this entry: those that autoshard raises of
        arguments and configurations in their line, others in a note, by which `autoshard.call_errors` shows them.
        """

        @functools.wraps(function)
        def run(*args: P.args, **given: P.kwargs) -> T:
            try:
                return function(*args, **given)
            except StopIteration:
                raise
            except (ArgumentError, ConfigError) as error:
                if str(error).startswith(self.at or name):
                    raise
                raise ConfigError(f"{name}: {error}") from error
            except Exception as error:
                note_entry(error, name)
                raise

        name = f"{self.at}{self.call}"
        return run

    def model_post_init(self, context: Any, /) -> None:
        if isinstance(context, Mapping) and context.get(IMPORTS):
            self._target = _resolve(self.call, _folders(context))


class ModelCall(Call):
    """What makes a model; it may take ``rngs``, a `flax.nnx.Rngs`, or ``key``, a random key."""

    supplied = frozenset({"rngs", "key"})


class LossCall(Call):
    """The loss of a model's outputs and a batch."""

    positional = 2


def _entries_or_call(value: object) -> str:
    return "a call" if isinstance(value, Call) or (isinstance(value, dict) and "call" in value) else "entries"


ENTRIES_OR_CALL = Discriminator(_entries_or_call)
"""Of a key's type: which of its members, tagged ``entries`` and ``a call``, a value is of."""


def takes(target: Callable[..., Any], name: str) -> bool:
    """Whether ``target`` has a parameter of this name."""
    return any(p.name == name for p in _parameters(target) or ())


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a call of ``target``; None where they are not known, as of a function in C, whose call itself
    says what it lacks.
    """
    try:  # of a class those of __init__: NNX hides them behind a metaclass
        found = list(inspect.signature(target.__init__ if isinstance(target, type) else target).parameters.values())
    except (TypeError, ValueError):
        return None
    return found[1:] if isinstance(target, type) else found


def _imports(info: ValidationInfo) -> bool:
    return bool((info.context or {}).get(IMPORTS))


def _target_of(call: str, info: ValidationInfo) -> Callable[..., Any]:
    return _resolve(call, _folders(info.context or {}))


def _folders(context: Mapping[str, Any]) -> list[str]:
    """Where own modules are looked for before the installed ones."""
    return list(dict.fromkeys((os.getcwd(), str(Path(context.get("file", "")).parent.resolve()))))


def _resolve(call: str, folders: Iterable[str]) -> Callable[..., Any]:
    """What ``call`` names.

    Raises:
      ValueError: there is no such module or name, or its import fails; says what was looked for and what is nearest.
    """
    module_name, _, name = call.partition(":")
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    found: Any = _module(module_name, folders)
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise ValueError(f"{module_name} has no {cut(part)!r}{nearest(part, known[:1000])}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{call} is a {type(found).__name__}, which cannot be called")
    return found


def _module(name: str, folders: Iterable[str]) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(_failed(name, error)) from None
        parent, _, last = error.name.rpartition(".")
        paths = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else list(folders)
        files = [file for path in paths for file in Path(path).iterdir() if file.suffix == ".py" or file.is_dir()]
        known = [file.stem for file in files if file.stem.isidentifier() and file.stem != "__pycache__"][:1000]
        where = f"in {parent}" if parent else f"in {' or '.join(folders)}, or installed"
        raise ValueError(f"there is no module {cut(last)!r} {where}{nearest(last, known)}") from None
    except Exception as error:
        raise ValueError(_failed(name, error)) from None


def _failed(name: str, error: BaseException) -> str:
    """That the import of ``name`` fails, and at which line."""
    at = traceback.extract_tb(error.__traceback__)
    line = f" ({at[-1].filename}:{at[-1].lineno})" if at else ""
    return f"importing {name} fails: {type(error).__name__}: {cut(str(error))}{line}"
