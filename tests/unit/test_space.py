"""Search spaces: judged before anything starts, with the place of every mistake."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from yolo_ray.config.load import dump, load
from yolo_ray.config.options import find_option
from yolo_ray.config.schema import TrainConfig
from yolo_ray.config.space import Domain, domains_of, parse_domain
from yolo_ray.config.tune import STUDY_CONFIG, TuneConfig
from yolo_ray.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def study(*arguments: str) -> TuneConfig:
    return load(["data=d.yaml", *arguments], TuneConfig)


def test_ranges_are_merged_by_name_and_null_takes_one_out(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "epochs: 7\nspace:\n  lr0: {loguniform: [1e-4, 1e-1]}\n  augment.mosaic:\n    choice: [0, 1.0]\n"
        "  box: {uniform: [1, 9]}\n"
    )
    config = study(
        str(path),
        "space.mosaic=null",
        "space.momentum={uniform: [0.6, 0.9]}",
        "space.box={choice: [3]}",
    )
    assert config.space == {
        "optim.lr0": {"loguniform": [1e-4, 1e-1]},
        "loss.box": {"choice": [3]},
        "optim.momentum": {"uniform": [0.6, 0.9]},
    }
    assert config.training().explicit == ("data.path", "epochs")
    assert config.training().optim.lr0 == 0.01, "a range is no value"


def test_a_models_file_is_found_from_any_folder_and_a_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    config = study("space.model={choice: [mine.yaml, yolo11n.yaml]}")
    assert config.space == {"model": {"choice": [str(tmp_path / "mine.yaml"), "yolo11n.yaml"]}}


def test_a_space_without_lines_adds_nothing_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("space:\n#  lr0: {uniform: [0.1, 0.2]}\n")
    given = "space.lr0={choice: [0.1]}"
    assert study(given, str(path)).space == {"optim.lr0": {"choice": [0.1]}}
    assert study(str(path)).space == {}
    for wrong in ("space=3", "space=null", "space=[lr0]"):
        with pytest.raises(UserError, match=r"'space=.*space is a mapping from options to ranges"):
            study(given, wrong)


def test_bare_names_and_tune_from(tmp_path: Path) -> None:
    config = study("num_samples=3", f"tune.from={tmp_path}", "workers_per_trial=2", "search=random")
    assert (config.tune.num_samples, config.tune.warm_start) == (3, str(tmp_path))
    assert config.training().cluster.workers == 2
    assert config.name == "study" and config.training().name == "train"


def test_a_study_is_read_back_from_its_record(tmp_path: Path) -> None:
    config = study(
        "space.lr0={loguniform: [1e-4, 1e-1]}",
        "space.freeze={choice: [null, [0, 1], 3]}",
        "batch=4",
    )
    dump(study("space.lr0={choice: [1]}"), tmp_path / STUDY_CONFIG)
    with open(
        tmp_path / STUDY_CONFIG
    ) as before:  # replaced whole: who reads it sees one or the other
        dump(config, tmp_path / STUDY_CONFIG)
        assert "choice:\n    - 1\n" in before.read().replace("      ", "    ")
    assert [path.name for path in tmp_path.iterdir()] == [STUDY_CONFIG]
    again = load([f"resume={tmp_path}", "num_samples=9"], TuneConfig)
    assert again.space == config.space and again.batch == 4 and again.tune.num_samples == 9
    assert again.training() == config.training()
    with pytest.raises(UserError, match=r"not the folder of a run \(no config.yaml"):
        load([f"resume={tmp_path}"])
    with pytest.raises(UserError, match=r"not the folder of a study \(no study.yaml"):
        load([f"resume={tmp_path / 'x'}"], TuneConfig)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("lr: {uniform: [0.1, 1]}", r"line 3: unknown option 'lr'; did you mean"),
        ("device: {choice: [0]}", "line 3: option 'device' is not an option: set cluster.workers"),
        ("lr0: {uniform: [0, 1]}", r"line 3: optim.lr0=0 is wrong: expected a number > 0"),
        ("mosaic: {uniform: [0.5, 1.5]}", r"line 3: augment.mosaic=1.5 is wrong: .* <= 1"),
        (
            "optimizer: {choice: [SGD, Adam]}",
            r"line 3: optim.optimizer=Adam is wrong: expected one of",
        ),
        ("lr0: {uniform: [0.2, 0.1]}", "line 3: .*the first number must be less"),
        ("lr0: {uniform: [0.1]}", r"line 3: .*it takes \[low, high\]"),
        ("lr0: {quniform: [0.1, 0.3]}", r"line 3: .*\[low, high, step\]"),
        ("mosaic: {quniform: [0, 1, 2]}", "line 3: .*the step must be"),
        ("mosaic: {loguniform: [0, 1]}", "line 3: .*begins above 0"),
        ("lr0: {normal: [0, 1]}", "line 3: 'normal' is no kind of range; use one of uniform"),
        ("lr0: {uniform: [low, 1]}", "line 3: .*'low' is no number"),
        ("lr0: {uniform: [0.1, .inf]}", "line 3: .*finite"),
        ("epochs: {uniform: [1, 5]}", "line 3: .*takes no such numbers; use randint"),
        ("epochs: {randint: [1.5, 5]}", "line 3: .*1.5 is no whole number"),
        ("cos_lr: {randint: [0, 1]}", "line 3: .*use choice"),
        ("lr0: 0.1", "line 3: the values of 'lr0' are not understood; write, for example"),
        ("lr0: {choice: []}", "line 3: choice of 'lr0' needs at least one value"),
        ("lr0: {choice: 0.1}", "line 3: choice of 'lr0' needs a list"),
        ("lr0: {choice: [1], uniform: [0, 1]}", "line 3: 'lr0' has 2 kinds of range, choice, unif"),
        ("batch: {choice: [auto, 8]}", "line 3: a study cannot choose batch=auto"),
        ("workers: {choice: [1, 2]}", "line 3: 'workers' says where or how"),
        ("data.path: {choice: [a.yaml]}", "line 3: .*the same for all trials"),
        ("conf: {uniform: [0.1, 0.2]}", "line 3: .*changes how trials are measured"),
    ],
)
def test_a_mistake_has_its_line(tmp_path: Path, entry: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(f"epochs: 3\nspace:\n  {entry}\n")
    with pytest.raises(UserError, match=message) as caught:
        study(str(path))
    assert str(path) in str(caught.value)


def test_batch_is_judged_with_the_workers_of_a_trial() -> None:
    with pytest.raises(UserError, match=r"batch=1 is less than cluster.workers=2"):
        study("workers_per_trial=2", "space.batch={choice: [1, 4]}")


def test_a_mistake_about_the_workers_of_a_trial_names_their_option() -> None:
    with pytest.raises(UserError, match=r"batch=16 is less than tune.workers_per_trial=50"):
        study("workers_per_trial=50").training()


def test_the_weights_of_an_objective_are_numbers() -> None:
    with pytest.raises(UserError, match="the weight of latency_ms must be a number, not 'x'"):
        study("tune.objective={val/map50_95: 1, latency_ms: x}")


@pytest.mark.parametrize(
    ("kind", "values", "grid", "inside", "outside", "near"),
    [
        ("randint", (1, 3), [1, 2, 3], 3, 4, (9.0, 3)),
        ("quniform", (0.1, 0.45, 0.1), [0.1, 0.2, 0.3, 0.4], 0.3, 0.45, (0.44, 0.4)),
        ("quniform", (32, 100, 32), [32, 64, 96], 96, 100, (100.0, 96)),
        ("uniform", (0.0, 1.0), None, 0.5, 1.01, (2.0, 1.0)),
        ("loguniform", (1e-3, 1.0), None, 1e-3, 1e-4, (1e-9, 1e-3)),
    ],
)
def test_numbers(
    kind: str, values: tuple[Any, ...], grid: list[Any] | None, inside: float, outside: float, near: tuple[float, float]
) -> None:  # fmt: skip
    domain = Domain("optim.lr0", kind, values)
    assert domain.grid() == grid
    assert domain.holds(inside) and not domain.holds(outside) and not domain.holds(True)
    assert domain.nearest(near[0]) == near[1]


def test_choices_are_told_apart() -> None:
    domain = parse_domain("freeze", {"choice": [None, 1, [0, 1]]}, "here")
    assert domain.holds(None) and domain.holds([0, 1]) and domain.holds((0, 1))
    assert not domain.holds(0) and not domain.holds([0])


def test_the_preset_has_the_ranges_of_the_installed_ultralytics() -> None:
    """All that its tuner searches and we have, within the same bounds."""
    from ultralytics.engine.tuner import Tuner

    source = inspect.cleandoc("\n" + inspect.getsource(Tuner.__init__))
    theirs = next(
        ast.literal_eval(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
        and any(isinstance(k, ast.Constant) and k.value == "lr0" for k in node.keys)
    )
    lacking = {"cls_pw", "perspective", "bgr", "cutmix", "copy_paste"}
    for name in lacking:
        with pytest.raises(UserError):
            find_option(TrainConfig, name, "here")
    config = study(str(ROOT / "configs/tune.yaml"))
    ours = {name.rpartition(".")[2]: d.values for name, d in domains_of(config.space).items()}
    assert ours == {
        name: pytest.approx(bounds[:2]) for name, bounds in theirs.items() if name not in lacking
    }
