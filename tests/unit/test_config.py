"""Options: how they are read and merged, and what the user is told of a wrong one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from yolo_ray.config.load import default_yaml, dump, load
from yolo_ray.config.options import options_of, sections_of
from yolo_ray.config.schema import EvaluateConfig, TrainConfig
from yolo_ray.config.tune import TuneConfig
from yolo_ray.config.unsupported import UNSUPPORTED
from yolo_ray.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


def message(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        load(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_are_the_schema() -> None:
    config = load(["data=x.yaml"])
    assert config.model_dump(exclude={"data", "explicit"}) == TrainConfig().model_dump(
        exclude={"data", "explicit"}
    )
    assert config.explicit == ("data.path",)


def test_arguments_merge_left_to_right() -> None:
    first = write("a.yaml", "data: a.yaml\nlr0: 0.5\noptim: {lrf: 0.2, momentum: 0.5}\nbatch: 4\n")
    second = write("b.yml", "optim:\n  lr0: 0.25\naugment.mosaic: 0\n")
    config = load([first, "lrf=0.3", second, "batch=8", "optim={warmup_epochs: 1}", "batch=32"])
    assert (config.optim.lr0, config.optim.lrf, config.optim.momentum) == (0.25, 0.3, 0.5)
    assert (config.batch, config.augment.mosaic, config.optim.warmup_epochs) == (32, 0.0, 1.0)


@pytest.mark.parametrize("key", ["lr0", "optim.lr0"])
@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E-3", 1e-3), ("5", 5.0), ("+.5", 0.5)]
)
def test_numbers_in_every_spelling(key: str, text: str, value: float) -> None:
    assert load(["data=x", f"{key}={text}"]).optim.lr0 == value
    assert load([write("n.yaml", f"data: x\n{key}: {text}\n")]).optim.lr0 == value


@pytest.mark.parametrize("text", ["none", "null", "None", "~", ""])
def test_null_in_every_spelling(text: str) -> None:
    assert load(["data=x", "mlflow.uri=http://a", f"uri={text}"]).mlflow.uri is None


@pytest.mark.parametrize("text", ["007", "2024-01-01", "1:30", "true", "1e5", "a: b", "[x", "x=y"])
def test_a_text_is_taken_as_written(text: str) -> None:
    assert load(["data=x", f"name={text}"]).name == text


def test_freeze_is_a_number_or_a_list() -> None:
    values = {"10": 10, "0": 0, "null": None, "[0, 1, 5]": (0, 1, 5), "[]": ()}
    for text, value in values.items():
        config = load(["data=x", f"freeze={text}"])
        assert config.freeze == value
        dump(config, Path("again.yaml"))
        assert load(["again.yaml"]).freeze == value
    assert load(["data=x", "freeze=[0,1]"]).flat()["freeze"] == "[0, 1]"


def test_the_cache_is_given_in_our_words_or_in_those_of_ultralytics() -> None:
    words = {"off": "off", "false": "off", "true": "memory", "ram": "memory", "disk": "disk"}
    for text, value in (words | {"memory": "memory", "RAM": "memory"}).items():
        config = load(["data=x", f"cache={text}"])
        assert config.data.cache == value and config.is_given("cache")
        assert load([write("c.yaml", f"data: {{path: x, cache: {text}}}\n")]).data.cache == value
        assert load(["data=x", f"data.cache={text}"], EvaluateConfig).data.cache == value
        dump(config, Path("again.yaml"))
        assert load(["again.yaml"]).data.cache == value
    for text in ("1", "maybe", "[disk]"):
        with pytest.raises(UserError, match=r"cache.*is wrong: expected true or false or"):
            load(["data=x", f"cache={text}"])


def test_data_shorthand_and_section() -> None:
    assert load(["data=x.yaml", "data.max_bad=0.1"]).data.max_bad == 0.1
    inline = load(["data={path: y.yaml, max_bad: 0.2}"]).data
    assert (Path(inline.path or "").name, inline.max_bad) == ("y.yaml", 0.2)
    both = load([write("c.yaml", "data: {path: z.yaml, max_bad: 0.3}\n"), "data=w.yaml"]).data
    assert (Path(both.path or "").name, both.max_bad) == ("w.yaml", 0.3)


def test_data_is_relative_to_the_yaml_file_else_to_here(in_tmp: Path) -> None:
    config = write("configs/c.yaml", "data: ../sets/data.yaml\n")
    write("sets/data.yaml", "")
    assert load([config]).data.path == str(in_tmp / "sets/data.yaml")
    write("here.yaml", "")
    here = write("configs/d.yaml", "data:\n  path: here.yaml\n")
    assert load([here]).data.path == str(in_tmp / "here.yaml")
    write("configs/here.yaml", "")
    assert load([here]).data.path == str(in_tmp / "configs/here.yaml")
    assert load([here, "data=here.yaml"]).data.path == str(in_tmp / "here.yaml")
    nowhere = write("configs/e.yaml", "data: gone.yaml\n")
    assert load([nowhere]).data.path == str(in_tmp / "configs/gone.yaml")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("mosiac=0", "unknown option 'mosiac'; did you mean mosaic?"),
        ("augment.mosiac=0", "did you mean augment.mosaic?"),
        ("optim.mosaic=0", "did you mean augment.mosaic?"),
        ("agument.mosaic=0", "did you mean augment.mosaic?"),
        ("lr=1", "lr0"),
        ("zzzzzz=1", "--help lists the options"),
        ("explicit=[lr0]", "unknown option 'explicit'"),
        ("mlflow=1", "'mlflow' is a section"),
        ("device=0", "set cluster.workers and cluster.gpu"),
        ("train.device=0", "set cluster.workers and cluster.gpu"),
        ("augment=true", "test-time augmentation"),
        ("optimizer=sgd", "optim.optimizer=sgd is wrong: expected one of auto, SGD, AdamW"),
        ("epochs=1.5", "epochs=1.5 is wrong: expected a whole number >= 1"),
        ("epochs=true", "expected a whole number >= 1"),
        ("epochs=0", "expected a whole number >= 1"),
        ("epochs=[1]", "expected a whole number"),
        ("epochs={a: 1}", "expected a whole number"),
        ("lr0=.inf", "expected a number > 0"),
        ("lr0=.nan", "expected a number > 0"),
        ("lr0=-1", "optim.lr0=-1 is wrong: expected a number > 0"),
        ("scale=1", "expected a number >= 0 and < 1"),
        ("cos_lr=1", "expected true or false"),
        ("cos_lr=maybe", "expected true or false"),
        ("gpu=0", "expected true or false or auto"),
        ("workers=two", "cluster.workers=two is wrong: expected a whole number >= 1"),
        ("name=", "expected a text that is not empty"),
        ("albumentations=[1]", "expected true or false or a list"),
        ("multi_scale=1.5", "augment.multi_scale=1.5 is wrong: expected a number >= 0 and <= 1"),
        ("freeze=-1", "freeze=-1 is wrong: expected a whole number >= 0 or a list or null"),
        ("freeze=[0,-1]", "expected a whole number >= 0 or a list or null"),
        ("freeze=true", "expected a whole number >= 0 or a list or null"),
        ("freeze=[true]", "expected a whole number >= 0 or a list or null"),
        ("freeze=[23.cv2]", "expected a whole number >= 0 or a list or null"),
    ],
)
def test_a_wrong_argument_is_named_with_the_remedy(argument: str, words: str) -> None:
    said = message("data=x.yaml", argument)
    assert words in said
    assert f"argument {argument!r}" in said


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("epochs: 1\n\noptim:\n  lr: 1\n", 4, "unknown option 'optim.lr'"),
        ("epochs: 1\nbatch: x\n", 2, "batch=x is wrong"),
        ("optim:\n  lr0: 1\n  lr0: 2\n", 3, "twice"),
        ("lr0: 1\noptim:\n  lr0: 2\n", 3, "twice"),
        ("epochs: 1\nepochs: 2\n", 2, "twice"),
        ("epochs: 1\nlr0: [1\n", 3, "not valid YAML"),
        ("epochs: 1\n\tlr0: 1\n", 2, "not valid YAML"),
        ("epochs: *gone\n", 1, "not valid YAML"),
        ("rect: false\n", 1, "same square shape"),
        ("[a, b]: 1\n", 1, "a key must be the name of an option"),
        ("optim: 3\n", 1, "'optim' is a section"),
        ("path: .\nnames: [a]\ntrain: images\n", 2, "describes a data set; pass data=c.yaml"),
    ],
)
def test_a_wrong_file_is_named_with_the_line(text: str, line: int, words: str) -> None:
    said = message("data=x", write("c.yaml", text))
    assert said.startswith(f"c.yaml line {line}: ")
    assert words in said


def test_other_wrong_arguments() -> None:
    assert "gone.yaml: no such file" in message("gone.yaml")
    assert "write epochs=VALUE" in message("data=x", "--epochs", "5")
    assert "write epochs=5" in message("data=x", "--epochs=5")
    assert "neither a YAML file nor key=value" in message("data=x", "epochs")
    assert "must hold lines like" in message(write("list.yaml", "- 1\n"))
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00epochs")
    assert message("bytes.yaml").startswith("bytes.yaml")
    Path("folder.yaml").mkdir()
    assert "cannot be read" in message("folder.yaml")
    assert "pass data=path/to/data.yaml" in message("epochs=3")
    assert "raise batch or lower cluster.workers" in message("data=x", "batch=1", "workers=2")
    text = message("data=x", "decode=gpu")  # albumentations are on unless said otherwise
    assert text.endswith("use data.decode=cpu, or set augment.albumentations=false")
    text = message("data=x", "decode=gpu", "albumentations=false", "cache=disk", "fast_decode=true")
    assert text.endswith("or set data.cache=off data.fast_decode=false")
    load(["data=x", "decode=gpu", "albumentations=false"])


def test_an_empty_file_and_an_empty_section_say_nothing() -> None:
    assert load([write("empty.yaml", ""), write("s.yaml", "# c\noptim:\n"), "data=x"]).explicit == (
        "data.path",
    )


def test_override_makes_another_and_checks_it() -> None:
    config = load(["data=x", "lr0=0.5"])
    changed = config.override({"mosaic": 0.25, "optim.momentum": 0.5})
    assert (changed.augment.mosaic, changed.optim.momentum, changed.optim.lr0) == (0.25, 0.5, 0.5)
    assert config.augment.mosaic == 1.0
    assert changed.explicit == ("augment.mosaic", "data.path", "optim.lr0", "optim.momentum")
    for change, words in [
        ({"mosiac": 1}, "did you mean mosaic"),
        ({"mosaic": 2}, "override: augment"),
    ]:
        with pytest.raises(UserError, match=words):
            config.override(change)
    with pytest.raises(ValidationError, match="frozen"):
        config.optim.lr0 = 0.1  # pyright: ignore[reportAttributeAccessIssue]


def test_given_options_are_known() -> None:
    config = load([write("c.yaml", "data: x\noptim: {lr0: 0.01}\n")])
    assert config.is_given("lr0") and config.is_given("optim.lr0")
    assert not config.is_given("momentum")


def test_dump_and_load_give_an_equal_config(in_tmp: Path) -> None:
    blur = "albumentations=[{transform: Blur, p: 0.5, blur_limit: [3, 7]}]"
    config = load(["data=x", "lr0=1e-7", "name=007", blur, "epochs=3", "mlflow.uri=none"])
    record = in_tmp / "record.yaml"
    dump(config, record)
    assert load([str(record)]) == config
    assert load([str(record), "batch=8"]) == config.override({"batch": 8})
    elsewhere = in_tmp / "elsewhere"
    elsewhere.mkdir()
    dump(config, elsewhere / "again.yaml")
    assert load([str(elsewhere / "again.yaml")]) == config


def test_resume_starts_from_the_options_of_that_run(in_tmp: Path) -> None:
    run = in_tmp / "runs/train"
    run.mkdir(parents=True)
    dump(load(["data=x", "lr0=0.5", "epochs=7"]), run / "config.yaml")
    again = load(["resume=runs/train", "epochs=9"])
    assert (again.optim.lr0, again.epochs, again.data.path) == (0.5, 9, str(in_tmp / "x"))
    assert again.resume == str(run)
    assert again.explicit == ("data.path", "epochs", "optim.lr0", "resume")
    assert "pass runs/NAME" in message("resume=runs/gone")


def test_flat_holds_scalars_only() -> None:
    flat = load(["data=x", "albumentations=[{transform: Blur}]"]).flat()
    assert flat.keys() == options_of(TrainConfig).keys()
    assert all(v is None or isinstance(v, str | int | float | bool) for v in flat.values())
    assert json.loads(str(flat["augment.albumentations"])) == [{"transform": "Blur"}]


def test_leaf_names_are_unique_and_described() -> None:
    options = list(options_of(TrainConfig).values())
    leaves = [option.leaf for option in options]
    assert len(leaves) == len(set(leaves))
    assert not set(leaves) & set(sections_of(TrainConfig))
    assert [option.name for option in options if not option.description] == []
    assert not set(leaves) & set(UNSUPPORTED)


def test_every_unsupported_option_is_refused_with_its_reason() -> None:
    for key, reason in UNSUPPORTED.items():
        assert reason in message("data=x", f"{key}=1")


def test_default_yaml_is_the_schema() -> None:
    text = (ROOT / "configs/default.yaml").read_text()
    assert text == default_yaml(), "run `make defaults`"
    uncommented = re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)
    config = load([write("d.yaml", uncommented), "data=x"])
    assert config.override({"data.path": None}).model_dump(exclude={"explicit"}) == (
        TrainConfig().model_dump(exclude={"explicit"})
    )
    assert len(config.explicit) == len(options_of(TrainConfig))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_loads_and_opens_with_its_launch_command(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines()[:5] if line.startswith("#")]
    is_study = path.name == "tune.yaml"
    pipeline = "tune" if is_study else "train"
    assert any(f"python -m pipelines.{pipeline} configs/{path.name}" in line for line in comment)
    assert load(["data=x.yaml", str(path)], TuneConfig if is_study else TrainConfig).epochs > 0


def test_evaluation_has_options_of_its_own(in_tmp: Path) -> None:
    given = ["weights=a.pt", "data=x", "conf=0.1", "workers=3", "graph.mode=off", "precision=fp32"]
    config = load(given, EvaluateConfig)
    assert (config.weights, config.eval.conf, config.cluster.workers) == ("a.pt", 0.1, 3)
    assert (config.graph.mode, config.data.path) == ("off", str(in_tmp / "x"))
    assert config.is_given("conf") and config.override({"imgsz": 96}).imgsz == 96
    train = options_of(TrainConfig)
    for name, option in options_of(EvaluateConfig).items():
        assert name == "weights" or train[name].default == option.default


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("lr0=0.1", "'lr0' is an option of training that evaluation does not use: leave it out"),
        ("optim.lr0=0.1", "'optim.lr0' is an option of training"),
        ("optim={lr0: 0.1}", "'optim' is an option of training"),
        ("resume=runs/train", "'resume' is an option of training"),
        ("val_period=2", "'val_period' is an option of training"),
        ("cluster.sync_bn=false", "'cluster.sync_bn' is an option of training"),
        ("model=best.pt", "name the file with weights="),
        ("batch=4", "eval.val_batch"),
        ("wieghts=best.pt", "did you mean weights?"),
        ("device=0", "is not an option: set cluster.workers"),
        ("conf=2", "conf=2 is wrong"),
    ],
)
def test_evaluation_refuses_what_it_does_not_use(argument: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load(["data=x", argument], EvaluateConfig)
    assert words in str(error.value) and argument.partition("=")[0] in str(error.value)


def test_evaluation_names_the_line_of_a_training_option() -> None:
    path = write("train.yaml", "data: x\nimgsz: 64\noptim:\n  lr0: 0.1\n")
    with pytest.raises(UserError, match=r"train\.yaml line 3: 'optim' is an option of training"):
        load([path], EvaluateConfig)
