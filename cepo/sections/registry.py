"""Registers classes with settings by name: methods and policy losses, those of the package and of plug-ins."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

from pydantic.dataclasses import is_pydantic_dataclass

from cepo.errors import ConfigError, did_you_mean
from cepo.files.trees import Fields, Tree
from cepo.sections.fields import fields_of, section
from cepo.sections.reader import default_tree


class Configured(Protocol):
    """A class that is selected by name, with its settings in a nested class."""

    name: str
    Config: type[Any]


_Kind = TypeVar("_Kind")
_Class = TypeVar("_Class", bound=type[Any])
_NAME = re.compile(r"[\w-]+")
"""Names are keys of sections and values of settings, so they have no dots and no spaces."""


class Registry(Generic[_Kind]):
    """The classes among which a setting chooses, by name.

    A field of a class's `Config` with the name of a field of `shared` takes the value of that shared setting, with the
    field's default as the class's preset; all other fields are the class's own section of settings.

    Attributes:
        setting: the key whose value is one of the names.
        shared: the section of settings that several classes read.
        base: what all classes derive from.
        decorator: the name of the function by which users register a class, for errors.
        hint: what to do if a name is unknown, for the error's end.
        classes: those registered, by name.
    """

    def __init__(self, setting: str, shared: type[Any], base: type[_Kind], *, decorator: str, hint: str = "") -> None:
        self.setting = setting
        self.shared: Mapping[str, Any] = {name: field.annotation for name, field in fields_of(shared).items()}
        self.base = base
        self.decorator = decorator
        self.hint = hint
        self.classes: dict[str, type[_Kind]] = {}

    def register(self, name: str) -> Callable[[_Class], _Class]:
        """Decorates a class to register it under `name`, and turns its `Config` into a section if it is none.

        Raises `ConfigError`: `name` is not a name, another class has it, the class does not derive from `base` or lacks a
        function that it must define or gives one other parameters, its `Config` has a value without a type or lacks what the
        base reads, or a field has the name of a shared section and another type.
        """
        self._check_name(name)

        def add(cls: _Class) -> _Class:
            self._check_base(name, cls)
            if name in self.classes:
                module = self.classes[name].__module__
                raise ConfigError(f"{self.setting} '{name}' is already registered by {module}")
            missing_methods = sorted(getattr(cls, "__abstractmethods__", ()))
            if missing_methods:
                raise ConfigError(
                    f"{self.setting} '{name}': the class {cls.__qualname__} must define {', '.join(missing_methods)}"
                )
            configured = cast("type[Configured]", cls)
            configured.name = name
            if not is_pydantic_dataclass(configured.Config):
                _check_types_of_settings(cls)
                configured.Config = section(configured.Config)
            self._check_inherited_settings(cls)
            self._check_shared_fields(cls)
            _check_initialiser(cls)
            check_parameters(cls)
            self.classes[name] = cast("type[_Kind]", cls)
            return cls

        return add

    def _check_name(self, name: object) -> None:
        """Raises `ConfigError` if `name` is the decorated class, as it is without parentheses, or another false name."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f'@{self.decorator} needs a name in parentheses, of letters, digits, "_" and "-" alone: '
                f'@{self.decorator}("my_name"), got {getattr(name, "__name__", name)!r}.'
            )

    def _check_base(self, name: str, decorated: Any) -> None:
        """Raises `ConfigError` for a function or a class that does not derive from the base."""
        decorated_name: str = getattr(decorated, "__qualname__", repr(decorated))
        if isinstance(decorated, type) and issubclass(decorated, self.base):
            return
        raise ConfigError(
            f'@{self.decorator}("{name}"): {decorated_name} is no subclass of {self.base.__name__}. '
            f"Write a class that derives from it, class {decorated_name}({self.base.__name__})."
        )

    def _check_shared_fields(self, cls: type[Any]) -> None:
        """Raises `ConfigError` if a field has the name of a shared section, and is not a part of that section."""
        parent = self.setting.rpartition(".")[0]
        for key, field in fields_of(cls.Config).items():
            declared = field.annotation
            shared = self.shared.get(key, declared)
            if declared == shared or not isinstance(shared, type):
                continue
            if not isinstance(declared, type) or not issubclass(shared, declared):
                raise ConfigError(
                    f"{cls.__qualname__}.Config.{key}: {parent}.{key} is shared and has the type {shared.__name__}; "
                    "declare that type, or give the setting another name"
                )

    def _check_inherited_settings(self, cls: type[Any]) -> None:
        """Raises `ConfigError` if `Config` lacks a setting that a class between `cls` and the base reads."""
        declared = fields_of(cls.Config)
        between = [parent for parent in cls.__mro__[1:] if issubclass(parent, self.base) and parent is not self.base]
        for parent in between:
            for name, field in fields_of(cast("type[Configured]", parent).Config).items():
                if name not in declared:
                    kind = getattr(field.annotation, "__name__", field.annotation)
                    raise ConfigError(
                        f"{cls.Config.__qualname__} has no setting '{name}', which {parent.__name__} reads; write "
                        f"{name}: {kind} = {kind}()"
                    )

    def names(self) -> list[str]:
        """Returns all names in alphabetical order."""
        return sorted(self.classes)

    def class_of(self, name: str) -> type[_Kind]:
        """Returns the class registered under `name`; raises a `ConfigError` that lists the known names."""
        if name not in self.classes:
            known = self.names()
            message = f"{self.setting} '{name}' is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}"
            raise ConfigError(message + self.hint)
        return self.classes[name]

    def config_of(self, name: str) -> type[Any]:
        """Returns the section of settings that the class reads."""
        return cast("type[Configured]", self.class_of(name)).Config

    def own_fields(self, name: str) -> list[str]:
        """Returns the settings of the class that no other has."""
        return [field for field in fields_of(self.config_of(name)) if field not in self.shared]

    def presets_of(self, name: str) -> Tree:
        """Returns the class's defaults of the shared settings that it reads."""
        defaults = default_tree(self.config_of(name))
        return {field: value for field, value in defaults.items() if field in self.shared}

    def settings_of(self, name: str, *, shared: Fields, own: Fields) -> Tree:
        """Returns the settings that the class reads: of the section `shared` its part, and all of its `own` section."""
        settings: Tree = {}
        for field, declared in fields_of(self.config_of(name)).items():
            if field in self.shared and field in shared:
                settings[field] = _part_of(shared[field], declared.annotation)
        return settings | dict(own)


def _check_types_of_settings(cls: type[Any]) -> None:
    """Raises `ConfigError` for a value in `Config` without a type, which would be no setting."""
    declared: type[object] = cls.Config
    annotations = inspect.get_annotations(declared)
    values = cast("Mapping[str, object]", vars(declared))
    for name, value in values.items():
        if name.startswith("_") or name in annotations or callable(value) or hasattr(value, "__get__"):
            continue
        raise ConfigError(
            f"{declared.__qualname__}.{name} has no type, so that it is no setting; write {name}: {type(value).__name__} = "
            f"{value!r}"
        )


def _check_initialiser(cls: type[Any]) -> None:
    """Raises `ConfigError` for an `__init__` that takes anything but the settings."""
    initialiser = vars(cls).get("__init__")
    if initialiser is not None and [*inspect.signature(initialiser).parameters][1:] != ["config"]:
        raise ConfigError(
            f"{cls.__qualname__} defines __init__; leave it out: its settings are the fields of a nested class Config, and "
            "self.config has their values"
        )


def check_parameters(cls: type[Any]) -> None:
    """Raises `ConfigError` for a function that cannot be called as the one of a base class that it replaces."""
    for name, function in vars(cls).items():
        inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        if name.startswith("_") or not inspect.isfunction(function) or not inspect.isfunction(inherited):
            continue
        parameters = inspect.signature(inherited).parameters.values()
        required = [parameter for parameter in parameters if parameter.default is parameter.empty]
        by_name = {parameter.name: None for parameter in required if parameter.kind is parameter.KEYWORD_ONLY}
        positional = [None] * (len(required) - len(by_name))
        try:
            inspect.signature(function).bind(*positional, **by_name)
        except TypeError as error:
            without_types = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
            raise ConfigError(
                f"{function.__qualname__}: {error}. Write def {name}{inspect.Signature(without_types)}, as "
                f"{inherited.__qualname__} has it"
            ) from None


def _part_of(value: Any, kind: Any) -> Any:
    """Returns those keys of a section's values that the section `kind` has; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    known = fields_of(kind)
    return {key: inner for key, inner in cast("Tree", value).items() if key in known}
