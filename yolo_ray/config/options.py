"""The options of a schema, by dotted or bare name, and what the user is told of a wrong one."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from yolo_ray.config.document import parse_setting
from yolo_ray.config.unsupported import UNSUPPORTED
from yolo_ray.errors import UserError

RECORD = "explicit"  # the field that remembers what the user gave; not an option itself
Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Option:
    """One leaf of a schema. ``spec`` is its JSON schema."""

    section: str
    leaf: str
    spec: dict[str, Any]
    default: Any
    description: str

    @property
    def name(self) -> str:
        """The dotted name, unique over the schema."""
        return f"{self.section}.{self.leaf}" if self.section else self.leaf

    @property
    def is_text(self) -> bool:
        """Whether a value is to be taken as written, whatever YAML would make of it."""
        return set(_kinds(self.spec)) <= {"string", "null"}

    @property
    def is_nullable(self) -> bool:
        """Whether ``null`` is a value of it."""
        return "null" in _kinds(self.spec)


@functools.cache
def sections_of(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of a schema by name."""
    fields = schema.model_fields.items()
    kinds = {name: field.annotation for name, field in fields}
    return {
        n: kind
        for n, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


@functools.cache
def options_of(schema: type[BaseModel], section: str = "") -> dict[str, Option]:
    """Every option of a schema by its dotted name, in the order of the schema."""
    specs = schema.model_json_schema()["properties"]
    inner = sections_of(schema)
    found: dict[str, Option] = {}
    for leaf, field in schema.model_fields.items():
        if leaf in inner:
            found |= options_of(inner[leaf], leaf)
        elif leaf != RECORD:
            option = Option(section, leaf, specs[leaf], field.default, field.description or "")
            found[option.name] = option
    return found


def find_option(schema: type[BaseModel], key: str, place: str) -> Option:
    """The option with that dotted or bare name; UserError with the reason or the nearest names."""
    options = options_of(schema)
    if key in options:
        return options[key]
    by_leaf = {option.leaf: option for option in options.values()}
    if key in by_leaf:
        return by_leaf[key]
    sections = sections_of(schema)
    leaf = key.rpartition(".")[2]
    if leaf in UNSUPPORTED and leaf not in by_leaf:
        raise UserError(f"{place}: option {key!r} {UNSUPPORTED[leaf]}")
    if key in sections:
        inner = ", ".join(f"{key}.{name}" for name in sections[key].model_fields)
        raise UserError(f"{place}: {key!r} is a section, not an option; set one of {inner}")
    raise UserError(f"{place}: unknown option {key!r}; {_suggestion(key, options, by_leaf)}")


def build(schema: type[Schema], values: Mapping[str, Any], places: Mapping[str, str]) -> Schema:
    """A validated schema from dotted values; UserError names the first wrong one and its place."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    try:
        return schema.model_validate(nested)
    except ValidationError as error:
        raise UserError(_first_mistake(schema, error, values, places)) from error


def parse_flat(schema: type[Schema], argv: Sequence[str]) -> Schema:
    """A schema without sections from ``key=value`` arguments; UserError names the first wrong one."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for argument in argv:
        for setting in parse_setting(argument, ()):
            option = find_option(schema, setting.key, setting.place)
            as_text = option.is_text and setting.text is not None
            values[option.name] = setting.text if as_text else setting.value
            places[option.name] = setting.place
    return build(schema, values, places)


def values_of(config: BaseModel) -> dict[str, Any]:
    """The value of every option by its dotted name."""
    sections = {name: getattr(config, name) for name in sections_of(type(config))} | {"": config}
    return {o.name: getattr(sections[o.section], o.leaf) for o in options_of(type(config)).values()}


def expected(spec: Mapping[str, Any]) -> str:
    """A JSON schema in words: ``a whole number >= 1``."""
    if "anyOf" in spec:
        return " or ".join(expected(part) for part in spec["anyOf"])
    if "enum" in spec:
        return "one of " + ", ".join(str(word) for word in spec["enum"])
    if "const" in spec:
        return str(spec["const"])
    words = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "a text",
        "null": "null",
        "array": "a list",
        "object": "a mapping",
    }
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    if spec.get("minLength"):
        return "a text that is not empty"
    limits = [f"{sign} {spec[bound]:g}" for bound, sign in bounds.items() if bound in spec]
    return " ".join([words[spec["type"]], " and ".join(limits)]).rstrip()


def refuse_lookalikes(schema: type[BaseModel], leaf: str, value: Any) -> None:
    """ValueError for true as a number or a number as a switch, which pydantic would convert."""
    option = options_of(schema).get(leaf)
    if option is None:
        return
    spec = option.spec
    kinds = set(_kinds(spec))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wrong_switch = isinstance(value, bool) and "boolean" not in kinds
    wrong_number = is_number and "boolean" in kinds and not kinds & {"integer", "number"}
    if wrong_switch or wrong_number:
        raise ValueError(f"expected {expected(spec)}")


def option_lines(schema: type[BaseModel]) -> list[str]:
    """The option table of ``--help``: name, default and description, a line each."""
    options = options_of(schema).values()
    width = max(len(option.name) for option in options)
    shown = [(option, json.dumps(option.default)) for option in options]
    column = max(len(default) for _, default in shown)
    return [f"  {o.name:<{width}}  {default:<{column}}  {o.description}" for o, default in shown]


def _kinds(spec: Mapping[str, Any]) -> list[str]:
    parts = spec.get("anyOf", [spec])
    return [part["type"] for part in parts]


def _suggestion(key: str, options: Mapping[str, Option], by_leaf: Mapping[str, Option]) -> str:
    leaf = key.rpartition(".")[2]
    if leaf in by_leaf:  # the right leaf in the wrong section
        return f"did you mean {by_leaf[leaf].name}?"
    near = difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.6)
    names = [by_leaf[match].name for match in near] if "." in key else near
    names += [
        name
        for name in difflib.get_close_matches(key, options, n=1, cutoff=0.75)
        if name not in names
    ]
    if names:
        return f"did you mean {' or '.join(names)}?"
    return "--help lists the options"


def _first_mistake(
    schema: type[BaseModel],
    error: ValidationError,
    values: Mapping[str, Any],
    places: Mapping[str, str],
) -> str:
    first = error.errors(include_url=False)[0]
    wrong = first.get("ctx", {}).get("error")  # what a validator of ours raised
    options = options_of(schema)
    for depth in (2, 1):  # a union adds its branch behind the option's own location
        name = ".".join(str(part) for part in first["loc"][:depth])
        if name in options:
            reason = str(wrong) if wrong else f"expected {expected(options[name].spec)}"
            return f"{places.get(name, 'options')}: {name}={values.get(name)!s} is wrong: {reason}"
    return str(wrong) if wrong else first["msg"]
