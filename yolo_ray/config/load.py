"""Options: YAML files and ``key=value``, merged left to right, validated once."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from yolo_ray.config.address import checked_place, is_remote
from yolo_ray.config.deploy import ExportConfig, PredictConfig
from yolo_ray.config.document import Setting, parse_setting, read_settings
from yolo_ray.config.options import RECORD, build, find_option, options_of, sections_of
from yolo_ray.config.register import RegisterConfig
from yolo_ray.config.schema import Configuration, EvaluateConfig, TrainConfig
from yolo_ray.config.space import check_domain, parse_domain
from yolo_ray.config.tune import ALIASES, SPACE, STUDY_CONFIG, TuneConfig
from yolo_ray.errors import UserError

Config = TypeVar(
    "Config", TrainConfig, EvaluateConfig, TuneConfig, RegisterConfig, ExportConfig, PredictConfig
)

RUN_CONFIG = "config.yaml"  # the record of a run, in its folder
_YAML = (".yaml", ".yml")
_PATHS = ("data.path", "resume", "tune.warm_start")
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
    With ``resume=FOLDER`` that run's own ``config.yaml`` (of a study: ``study.yaml``) comes first.

    Raises:
        UserError: unknown, unsupported, doubled or wrong options, unreadable files, no data set, or a search space
            with a range that an option does not take.
    """
    merged = _Merge(schema)
    for argument in argv:
        merged.add(argument)
    resume = merged.values.get("resume")
    if resume is not None:
        again = _Merge(schema)
        record = Path(resume) / (STUDY_CONFIG if schema is TuneConfig else RUN_CONFIG)
        again.add_file(_settings_of(record, schema), record)
        again.update(merged)
        merged = again
    config = merged.build()
    # A registered run knows its own, and exporting and predicting need none.
    if isinstance(config, TrainConfig | EvaluateConfig) and config.data.path is None:
        raise UserError("no data set is given; pass data=path/to/data.yaml")
    if isinstance(config, TuneConfig):
        _check_space(config, merged.places)
    return config


def dump(config: Configuration, path: Path) -> None:
    """Write every option and which ones the user gave: ``load([path])`` gives an equal config.

    A kill in the middle leaves the file of before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
            self.add_file(read_settings(path, _sections(self.schema)), path)
            return
        for setting in parse_setting(argument, _sections(self.schema)):
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
        spaces = self.values.get(SPACE, {}) | later.values.get(SPACE, {})
        self.values |= later.values | ({SPACE: spaces} if spaces else {})
        self.places |= later.places
        self.given |= later.given

    def build(self) -> Config:
        """The validated configuration."""
        if SPACE in self.values:  # null takes an option of an earlier file out of the search
            space = self.values[SPACE].items()
            self.values[SPACE] = {name: value for name, value in space if value is not None}
        given = sorted(name for name in self.given if not name.startswith(f"{SPACE}."))
        return build(self.schema, self.values | {RECORD: tuple(given)}, self.places)

    def _put(self, setting: Setting, folder: Path) -> str:
        if self.schema is EvaluateConfig:
            _refuse_training_option(setting)
        if self.schema is TuneConfig:
            if setting.key.startswith(f"{SPACE}."):
                return self._put_range(setting)
            if setting.key == SPACE and (setting.value or setting.text is not None):
                raise UserError(
                    f"{setting.place}: space is a mapping from options to ranges; for example "
                    "space: {lr0: {loguniform: [1e-4, 1e-1]}}"
                )
            if setting.key == SPACE:  # all its lines are commented out: it adds nothing
                setting = replace(setting, value=self.values.get(SPACE, {}))
            setting = replace(setting, key=ALIASES.get(setting.key, setting.key))
        has_data = "data" in sections_of(self.schema)
        is_data = has_data and setting.key == "data" and setting.text is not None
        option = find_option(self.schema, "data.path" if is_data else setting.key, setting.place)
        value = setting.value
        if option.is_text and setting.text is not None:
            value = None if option.is_nullable and setting.text in _NULLS else setting.text
        if option.name in _PATHS and isinstance(value, str) and value:
            value = _absolute(value, folder)
        self.values[option.name] = value
        self.places[option.name] = setting.place
        return option.name

    def _put_range(self, setting: Setting) -> str:
        """One option of the search space; the whole name of it counts as given."""
        key, value = setting.key.removeprefix(f"{SPACE}."), setting.value
        name = find_option(TrainConfig, key, setting.place).name
        if value is not None:
            domain = parse_domain(key, value, setting.place)
            values = [_file_of(one) if name == "model" else one for one in domain.values]
            value = {domain.kind: values}
        self.values[SPACE] = self.values.get(SPACE, {}) | {name: value}
        self.places[f"{SPACE}.{name}"] = setting.place
        self.given.add(SPACE)
        return f"{SPACE}.{name}"


def _sections(schema: type[Configuration]) -> Collection[str]:
    """The names below which a YAML file may be indented."""
    return {*sections_of(schema), *((SPACE,) if schema is TuneConfig else ())}


def _check_space(config: TuneConfig, places: dict[str, str]) -> None:
    training = config.training()
    for name, value in config.space.items():
        place = places.get(f"{SPACE}.{name}", SPACE)
        check_domain(parse_domain(name, value, place), training, place)


def _absolute(value: str, folder: Path) -> str:
    value = checked_place(value)
    if is_remote(value):
        return value
    path = Path(value).expanduser()
    beside, here = folder.absolute() / path, path.absolute()
    return str((here if here.exists() and not beside.exists() else beside).resolve())


def _file_of(value: Any) -> Any:
    """A model's file by its absolute path: trials run in other folders. A name stays one."""
    path = Path(str(value)).expanduser()
    return str(path.resolve()) if path.is_file() else value


def _settings_of(record: Path, schema: type[Configuration]) -> list[Setting]:
    if not record.is_file():
        kind = "study" if schema is TuneConfig else "run"
        raise UserError(
            f"resume={record.parent} is not the folder of a {kind} (no {record.name} in it); pass runs/NAME"
        )
    return read_settings(record, _sections(schema))


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
