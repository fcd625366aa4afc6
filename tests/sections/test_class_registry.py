"""Classes with settings, chosen by name: what they read of shared settings, and which classes are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import Field, ValidationError

from cepo.errors import ConfigError
from cepo.sections.fields import fields_of, section
from cepo.sections.registry import Registry


@section
class Small:
    """A part of the shared section below."""

    size: int = 1


@section
class Large(Small):
    """What other classes read beside it."""

    colour: str = "red"


@section
class Shared:
    """Settings that several classes read."""

    rate: float = 0.5
    part: Large = Large()


class Kind:
    """The base of what is registered."""

    name: str
    Config: type[Any] = Small


@section
class CircleConfig:
    """Two shared settings, of one section a part, and a setting of its own."""

    rate: float = 0.25
    part: Small = Small(size=3)
    radius: float = 2.0


class Circle(Kind):
    """What is registered."""

    Config = CircleConfig


def registry() -> Registry[Kind]:
    return Registry("drawing.shape", Shared, Kind, decorator="register_shape", hint="; write your own")


def with_circle() -> Registry[Kind]:
    shapes = registry()
    shapes.register("circle")(Circle)
    return shapes


def test_a_class_reads_its_part_of_shared_settings_and_its_own() -> None:
    shared = {"rate": 0.75, "part": {"size": 4, "colour": "blue"}, "other": 1}
    assert with_circle().settings_of("circle", shared=shared, own={"radius": 5.0}) == {
        "rate": 0.75,
        "part": {"size": 4},
        "radius": 5.0,
    }
    assert with_circle().settings_of("circle", shared={}, own={}) == {}


def test_presets_are_the_defaults_of_shared_settings_alone() -> None:
    assert with_circle().presets_of("circle") == {"rate": 0.25, "part": {"size": 3}}
    assert with_circle().own_fields("circle") == ["radius"]
    assert with_circle().class_of("circle").name == "circle"


def test_an_unknown_name_is_an_error_with_the_nearest_and_a_hint() -> None:
    with pytest.raises(
        ConfigError, match=r"^drawing\.shape 'cirlce' is unknown\. Did you mean 'circle'\?.*; write your"
    ):
        with_circle().class_of("cirlce")


def test_a_second_class_of_a_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"drawing\.shape 'circle' is already registered by"):
        with_circle().register("circle")(Kind)


def test_a_decorator_without_a_name_says_what_to_write() -> None:
    class RoundedSquare(Kind):
        pass

    with pytest.raises(ConfigError, match=r'^@register_shape needs a name.* @register_shape\("my_name"\), got'):
        registry().register(RoundedSquare)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["", "a.b", "a b", "ring\n"])
def test_a_name_that_cannot_be_a_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r'a name in parentheses, of letters, digits, "_" and "-" alone'):
        registry().register(name)


def area(radius: float) -> float:
    return radius * radius


class Loose:
    """Has settings, and does not derive from the base."""

    Config = Small


@pytest.mark.parametrize("decorated", [area, Loose, 3])
def test_only_subclasses_of_the_base_are_registered(decorated: Any) -> None:
    with pytest.raises(ConfigError, match=r'^@register_shape\("loose"\): .* is no subclass of Kind\.'):
        registry().register("loose")(decorated)


class Figure(Kind):
    """A base whose function the classes replace."""

    def drawn(self, canvas: str, *, step: int, scale: float = 1.0) -> str:
        return f"{canvas}, {step}, {scale}"


def test_a_function_with_other_parameters_is_refused() -> None:
    """It would fail at its first call, after the model is loaded."""
    figures = Registry("drawing.shape", Shared, Figure, decorator="register_shape")

    class Sole(Figure):
        def drawn(self, canvas: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            return canvas

    class Free(Figure):
        def drawn(self, canvas: str, step: int, **others: float) -> str:
            return f"{canvas}, {step}, {others}"

        def helper(self) -> None:
            """A function of its own has any parameters."""

    message = (
        r"drawn: got an unexpected keyword argument 'step'\. Write def drawn\(self, canvas, \*, step, scale=1\.0\), as"
    )
    with pytest.raises(ConfigError, match=message):
        figures.register("sole")(Sole)
    figures.register("free")(Free)
    assert figures.names() == ["free"]


@section
class Unrelated:
    """Has nothing of the shared section."""

    size: int = 1


@section
class UnrelatedConfig:
    """Names the shared section, with another one."""

    part: Unrelated = Unrelated()


@section
class NumberConfig:
    """Names the shared section, with a number."""

    part: float = 1.0


@pytest.mark.parametrize("config", [UnrelatedConfig, NumberConfig])
def test_a_shared_name_with_another_type_is_an_error(config: type[Any]) -> None:
    class Wrong(Kind):
        Config = config

    with pytest.raises(ConfigError, match=r"drawing\.part is shared and has the type Large; declare that type"):
        registry().register("wrong")(Wrong)


class BoundedShape(Kind):
    """Its settings have bounds and a description below them, in each of the forms of a default."""

    class Config:
        radius: float = Field(default=0.3, gt=0, le=1)
        """The radius in metres."""
        edge: float = Field(default=2.0, description="The edge in metres.")
        """A remark below a described setting."""
        points: tuple[int, ...] = dataclasses.field(default=(1, 2))
        """The points by number."""
        height: float = Field(gt=0)
        """The height, which has no default."""


def test_text_below_a_bounded_setting_keeps_its_default() -> None:
    """0.3 is the default although a text follows `Field(default=0.3, ...)`; `Field(description=...)` is preferred to it."""
    shapes = registry()
    shapes.register("bounded")(BoundedShape)
    config_class = shapes.config_of("bounded")
    config = config_class(height=1.0)
    descriptions = {name: field.description for name, field in fields_of(config_class).items()}
    assert config.radius == 0.3
    assert config.edge == 2.0
    assert config.points == (1, 2)
    assert descriptions == {
        "radius": "The radius in metres.",
        "edge": "The edge in metres.",
        "points": "The points by number.",
        "height": "The height, which has no default.",
    }


@pytest.mark.parametrize("settings", [{"radius": 0.0, "height": 1.0}, {"radius": 1.5, "height": 1.0}, {"height": -1.0}])
def test_text_below_a_bounded_setting_keeps_its_bounds(settings: dict[str, float]) -> None:
    """The radius is in (0, 1], and the height above 0."""
    shapes = registry()
    shapes.register("bounded")(BoundedShape)
    with pytest.raises(ValidationError):
        shapes.config_of("bounded")(**settings)
