"""Options: YAML files and ``key=value``, merged left to right, validated once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from yolo_ray.config.address import checked_place, is_remote
from yolo_ray.config.document import Setting, parse_setting, read_settings
from yolo_ray.config.options import RECORD, build, find_option, options_of, sections_of
from yolo_ray.config.register import RegisterConfig
from yolo_ray.config.schema import Configuration, EvaluateConfig, TrainConfig
from yolo_ray.errors import UserError

Config = TypeVar("Config", TrainConfig, EvaluateConfig, RegisterConfig)

RUN_CONFIG = "config.yaml"  # the record of a run, in its folder
_YAML = (".yaml", ".yml")
# What evaluation has in the place of an option of training.
_INSTEAD = {
    "model": "name the file with weights=",
    "batch": "the photos a worker evaluates at once are eval.val_batch",
}
_NULLS = ("", "~", "null", "Null", "NULL", "none", "None")


def load(argv: Sequence[str], schema: type[Config] = TrainConfig) -> Config:
    """The configuration that the arguments ask for, with the defaults for the rest.

    An argument is the path of a YAML file or ``key=value``; a later one wins. A key is dotted
    (``optim.lr0``) or bare (``lr0``); ``data=x.yaml`` means ``data.path=x.yaml``. ``data.path`` and
    ``resume`` come out absolute: a path in a YAML file is relative to that file if it exists there.
    With ``resume=FOLDER`` that run's own ``config.yaml`` comes first.

    Raises:
        UserError: unknown, unsupported, doubled or wrong options, unreadable files, no data set.
    """
    merged = _Merge(schema)
    for argument in argv:
        merged.add(argument)
    resume = merged.values.get("resume")
    if resume is not None:
        again = _Merge(schema)
        again.add_file(_record_of(Path(resume)), Path(resume) / RUN_CONFIG)
        again.update(merged)
        merged = again
    config = merged.build()
    if config.data.path is None and schema is not RegisterConfig:  # a run knows its own
        raise UserError("no data set is given; pass data=path/to/data.yaml")
    return config


def dump(config: Configuration, path: Path) -> None:
    """Write every option and which ones the user gave: ``load([path])`` gives an equal config."""
    path.write_text(
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
    )


def default_yaml(schema: type[Configuration] = TrainConfig) -> str:
    """The text of configs/default.yaml: every option, commented out, with its description."""
    lines = [
        "# Every option with its default. Uncomment what you change; what stays commented is left",
        "# to the defaults and to `auto`. Made from the schema by `make defaults`. Launch:",
        "#   python -m pipelines.train configs/default.yaml data=path/to/data.yaml",
        "",
    ]
    section = ""
    for option in options_of(schema).values():
        if option.section != section:
            section = option.section
            lines += ["", f"{section}:"]
        default = json.dumps(option.default).strip('"')
        setting = f"{'  ' if section else ''}# {option.leaf}: {default}"
        lines.append(f"{setting:<32} # {option.description}")
    return "\n".join(lines) + "\n"


class _Merge(Generic[Config]):
    """Values by dotted name, with the place of each and which of them the user gave."""

    def __init__(self, schema: type[Config]) -> None:
        self.schema = schema
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.given: set[str] = set()

    def add(self, argument: str) -> None:
        """Take in one argument, over what is there."""
        if "=" not in argument and argument.lower().endswith(_YAML):
            path = Path(argument)
            self.add_file(read_settings(path, sections_of(self.schema)), path)
            return
        for setting in parse_setting(argument, sections_of(self.schema)):
            name = self._put(setting, Path())
            self.given.add(name)

    def add_file(self, settings: Sequence[Setting], path: Path) -> None:
        """Take in a YAML file. The record of a run says itself what its user had given."""
        record = [setting.value for setting in settings if setting.key == RECORD]
        names: dict[str, str] = {}
        for setting in (s for s in settings if s.key != RECORD):
            if not record:
                _refuse_data_file(setting, path)
            name = self._put(setting, path.parent)
            if name in names:
                raise UserError(f"{setting.place}: {name!r} stands there twice; keep one")
            names[name] = setting.place
        self.given |= set(record[0] or ()) & set(names) if record else set(names)

    def update(self, later: _Merge[Config]) -> None:
        """Take in another merge, over what is there."""
        self.values |= later.values
        self.places |= later.places
        self.given |= later.given

    def build(self) -> Config:
        """The validated configuration."""
        return build(self.schema, self.values | {RECORD: tuple(sorted(self.given))}, self.places)

    def _put(self, setting: Setting, folder: Path) -> str:
        if self.schema is EvaluateConfig:
            _refuse_training_option(setting)
        is_data = setting.key == "data" and setting.text is not None
        option = find_option(self.schema, "data.path" if is_data else setting.key, setting.place)
        value = setting.value
        if option.is_text and setting.text is not None:
            value = None if option.is_nullable and setting.text in _NULLS else setting.text
        if option.name in ("data.path", "resume") and isinstance(value, str) and value:
            value = _absolute(value, folder)
        self.values[option.name] = value
        self.places[option.name] = setting.place
        return option.name


def _absolute(value: str, folder: Path) -> str:
    value = checked_place(value)
    if is_remote(value):
        return value
    path = Path(value).expanduser()
    beside, here = folder.absolute() / path, path.absolute()
    return str((here if here.exists() and not beside.exists() else beside).resolve())


def _record_of(folder: Path) -> list[Setting]:
    path = folder / RUN_CONFIG
    if not path.is_file():
        raise UserError(
            f"resume={folder} is not the folder of a run (no {RUN_CONFIG} in it); pass runs/NAME"
        )
    return read_settings(path, sections_of(TrainConfig))


def _refuse_training_option(setting: Setting) -> None:
    """An option, or a section, that training has and evaluation has no use for."""
    key = setting.key

    def is_known(schema: type[Configuration]) -> bool:
        options = options_of(schema).values()
        return key in sections_of(schema) or any(key in (o.name, o.leaf) for o in options)

    if is_known(TrainConfig) and not is_known(EvaluateConfig):
        remedy = _INSTEAD.get(key, "leave it out")
        raise UserError(
            f"{setting.place}: {key!r} is an option of training that evaluation does not use: {remedy}"
        )


def _refuse_data_file(setting: Setting, path: Path) -> None:
    if setting.key in ("names", "train", "nc"):
        raise UserError(f"{setting.place}: this file describes a data set; pass data={path}")
