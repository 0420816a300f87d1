"""What a study leaves for people: trials.csv, and best.yaml that pipelines.train takes as it is."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from yolo_ray.config.options import RECORD
from yolo_ray.config.tune import TuneConfig
from yolo_ray.study.trials import Trial, best_of

BEST, TABLE = "best.yaml", "trials.csv"


def write_results(folder: Path, config: TuneConfig, trials: Iterable[Trial]) -> None:
    """Write both for the trials so far; best.yaml only once there is a best.

    Raises:
        OSError: the disk refuses.
    """
    trials = sorted(trials, key=lambda trial: trial.number)
    _replace(folder / TABLE, lambda path: _write_table(path, config, trials))
    best = best_of(trials)
    if best is not None:
        _replace(folder / BEST, lambda path: _write_best(path, folder, config, best))


def best_options(config: TuneConfig, best: Trial) -> dict[str, Any]:
    """What the user gave and what was sampled, nested by section; everything else keeps its default."""
    training = config.training().override(best.options)
    values = training.model_dump(mode="json")
    nested: dict[str, Any] = {}
    for name in values[RECORD]:
        section, _, leaf = name.rpartition(".")
        if section:
            nested.setdefault(section, {})[leaf] = values[section][leaf]
        else:
            nested[leaf] = values[leaf]
    model = Path(str(nested.get("model", ""))).expanduser()
    if model.is_file():  # found from wherever best.yaml is used
        nested["model"] = str(model.resolve())
    return nested


def _write_best(path: Path, folder: Path, config: TuneConfig, best: Trial) -> None:
    what = "the baseline" if not best.options else f"trial {best.number}"
    lines = [
        f"# The best options of the study {folder.name}: {what}, objective {best.value:.5g} in {best.epoch} "
        "epoch(s).",
        "#   python -m pipelines.train best.yaml",
    ]
    if best.donors:
        lines.append(
            "# They are those of the end: population-based training changed them on the way."
        )
    text = yaml.safe_dump(best_options(config, best), sort_keys=False)
    path.write_text("\n".join(lines) + "\n" + text, encoding="utf-8")


def _write_table(path: Path, config: TuneConfig, trials: list[Trial]) -> None:
    metrics = sorted({name for trial in trials for name in trial.metrics})
    head = [
        "number",
        "state",
        "objective",
        "epochs",
        *metrics,
        *config.space,
        "folder",
        "donors",
        "reason",
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for trial in trials:
            known = [trial.metrics.get(name, "") for name in metrics]
            options = [_cell(trial.options.get(name, "")) for name in config.space]
            donors = " ".join(f"{one['donor']}@{one['epoch']}" for one in trial.donors)
            value = "" if trial.value is None else trial.value
            writer.writerow(
                [
                    trial.number,
                    trial.state,
                    value,
                    trial.epoch,
                    *known,
                    *options,
                    trial.folder,
                    donors,
                    trial.reason,
                ]
            )


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
