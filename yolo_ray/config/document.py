"""Settings and the places where they were written: in a YAML file or one ``key=value``."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from yolo_ray.errors import UserError


@dataclass(frozen=True)
class Setting:
    """One value: its key as written, what YAML makes of it, and its own text if it is a scalar."""

    key: str
    value: Any
    text: str | None
    place: str


# Tag, pattern and possible first characters. Without PyYAML's dates, octal and base-60 numbers;
# with 1e-3 as a number and none as null.
_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|no|No|on|On|off|Off", "tTfFyYnNoO"),
    ("null", r"~|null|Null|NULL|none|None|", ("~", "n", "N", "")),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first in _SCALARS:
        for character in first:
            rule = (f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"))
            table.setdefault(character, []).append(rule)
    return table


class _Loader(yaml.SafeLoader):
    """YAML as people read it."""


_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.yaml_constructors = {
    **yaml.SafeLoader.yaml_constructors,
    "tag:yaml.org,2002:int": lambda _, node: int(node.value),  # PyYAML: 010 is 8
}


def read_settings(path: Path, sections: Collection[str]) -> list[Setting]:
    """Every setting of a YAML file in file order; a section's keys come out dotted.

    Raises UserError, with the line, for a file that cannot be read, is no YAML, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; give the path of a YAML file or key=value"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a text file ({error})") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                f"{path}: the file must hold lines like 'epochs: 50', not a list or a single value"
            )
        return _walk(loader, node, str(path), "", sections)
    except yaml.YAMLError as error:
        raise UserError(
            f"{_place(str(path), error)}: not valid YAML ({_problem(error)})"
        ) from error
    finally:
        loader.dispose()


def parse_setting(argument: str, sections: Collection[str]) -> list[Setting]:
    """The settings of one ``key=value``: one, or several if the value is a mapping for a section.

    Raises UserError for an argument of another form. A value that is no YAML is a text.
    """
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not key or key.startswith("-"):
        plain = key.lstrip("-") or "key"
        remedy = f"write {plain}={text or 'VALUE'}" if key.startswith("-") else "write key=value"
        raise UserError(f"argument {argument!r} is neither a YAML file nor key=value; {remedy}")
    place = f"argument {argument!r}"
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode) and key in sections:
            return [
                Setting(inner.key, inner.value, inner.text, place)
                for inner in _walk(loader, node, place, f"{key}.", ())
            ]
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError:
        value = text
    finally:
        loader.dispose()
    return [Setting(key, value, text, place)]


def _walk(
    loader: _Loader, node: yaml.MappingNode, source: str, prefix: str, sections: Collection[str]
) -> list[Setting]:
    settings: list[Setting] = []
    seen: set[str] = set()
    for key_node, value_node in node.value:
        place = f"{source} line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{place}: a key must be the name of an option")
        key = prefix + key_node.value
        if key in seen:
            raise UserError(f"{place}: {key!r} stands there twice; keep one")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and key in sections:
            settings += _walk(loader, value_node, source, f"{key}.", ())
            continue
        is_scalar = isinstance(value_node, yaml.ScalarNode)
        text = value_node.value if is_scalar else None
        value = loader.construct_object(value_node, deep=True)
        if not (value is None and key in sections):  # a section with nothing in it says nothing
            settings.append(Setting(key, value, text, place))
    return settings


def _place(source: str, error: yaml.YAMLError) -> str:
    mark = (
        error.problem_mark or error.context_mark
        if isinstance(error, yaml.MarkedYAMLError)
        else None
    )
    return f"{source} line {mark.line + 1}" if mark else source


def _problem(error: yaml.YAMLError) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
    return " ".join((problem or str(error)).split())
