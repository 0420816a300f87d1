"""Layers, doors and house limits, read from the source of every file that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOW = {"errors", "config"}
MIDDLE = LOW | {"data", "augment", "model"}
# What each part of yolo_ray may import besides itself.
LAYERS = {
    "errors": set(),
    "config": {"errors"},
    "entry": LOW,
    "data": LOW | {"augment"},
    "augment": LOW | {"data"},
    "model": LOW,
    "step": MIDDLE,
    "bench": MIDDLE | {"step"},
    "train": MIDDLE | {"step"},
    "export": MIDDLE,
    "study": LOW,
    "gate": LOW,
    "cluster": MIDDLE | {"step", "train", "study", "export", "gate"},
    "track": LOW | {"data", "augment", "study", "gate"},
}
# The only places that may import a dependency; a folder or a file.
DOORS = {
    "ultralytics": ("yolo_ray/model/build.py", "yolo_ray/bench/rival.py"),
    "albumentations": ("yolo_ray/augment/transforms.py",),
    "ray.data": ("yolo_ray/data/pipeline.py", "yolo_ray/data/shards.py"),
    "ray.train": ("yolo_ray/cluster/",),
    "ray.tune": ("yolo_ray/cluster/",),
    "ray": (
        "yolo_ray/cluster/",
        "yolo_ray/data/pipeline.py",
        "yolo_ray/data/tasks.py",
        "yolo_ray/data/shards.py",
    ),
    "mlflow": ("yolo_ray/track/",),
    "optuna": ("yolo_ray/study/sampling.py",),
    "fsspec": ("yolo_ray/data/storage.py",),
    "nvidia": ("yolo_ray/data/decoding.py",),
    "onnx": ("yolo_ray/export/",),
    "onnxruntime": ("yolo_ray/export/session.py", "yolo_ray/track/served_model.py"),
    # What fsspec opens stores with; nobody but fsspec knows which is installed.
    "s3fs": (),
    "gcsfs": (),
    "boto3": (),
    "botocore": (),
    "aiohttp": (),
}
FILE_LINES, TEST_LINES, PIPELINE_LINES = 400, 700, 60
FUNCTION_LINES, ARGUMENTS = 60, 7
LONGER_PIPELINES = {"fetch.py"}  # makes the example photos, which no layer knows
BANNED_NAMES = {"utils", "common", "helpers", "misc", "base"}
AT_IMPORT = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
# Spelled in pieces, since this file is read too.
MACHINE_PATH = re.compile(
    r"(?<![\w.$}])/(?:" + "|".join(("work", "root", "farm", "opt/pypi")) + r")/"
)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = python_files("yolo_ray", "pipelines")
TESTS = python_files("tests")


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported name and every use of a submodule of ray, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "ray":
                yield node.lineno, f"ray.{node.attr}"


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer_mistakes(path: str, tree: ast.AST) -> list[str]:
    """Imports against the direction of the layers."""
    own = Path(path).parts[1].removesuffix(".py") if path.startswith("yolo_ray/") else None
    mistakes = []
    for line, name in imports_of(tree):
        if is_within(name, "pipelines") and own is not None:
            mistakes.append(f"{path}:{line} imports {name}")
        if own in (None, "__init__") or not name.startswith("yolo_ray."):
            continue
        part = name.split(".")[1]
        if part != own and part not in LAYERS[own]:
            mistakes.append(f"{path}:{line} imports {name}")
    return mistakes


def door_mistakes(path: str, tree: ast.AST) -> list[str]:
    """Dependencies imported elsewhere than at their door."""
    mistakes = []
    for line, name in imports_of(tree):
        door = next((package for package in DOORS if is_within(name, package)), None)
        if door and not any(path == place or path.startswith(place) for place in DOORS[door]):
            mistakes.append(f"{path}:{line} imports {name}")
    return mistakes


def size_mistakes(path: str, text: str) -> list[str]:
    """Files, functions and argument lists over the limits."""
    is_test = path.startswith("tests/")
    limit = TEST_LINES if is_test else FILE_LINES
    if path.startswith("pipelines/") and Path(path).name not in LONGER_PIPELINES:
        limit = PIPELINE_LINES
    count = len(text.splitlines())
    mistakes = [f"{path}: {count} lines, {limit} allowed"] if count > limit else []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
        if lines > FUNCTION_LINES:
            mistakes.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
        if len(names) > ARGUMENTS and not is_test and not is_kernel(node):
            mistakes.append(f"{path}:{node.lineno} {node.name}: {len(names)} arguments")
    return mistakes


def habit_mistakes(path: str, tree: ast.Module) -> list[str]:
    """Work at import, hasattr, Base classes, swallowed errors, asking what a machine is."""
    mistakes = []
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (isinstance(node, AT_IMPORT) or is_text or is_guard(node)):
            mistakes.append(f"{path}:{node.lineno} does work at import")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "hasattr":
                mistakes.append(f"{path}:{node.lineno} uses hasattr")
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_").startswith("Base"):
            mistakes.append(f"{path}:{node.lineno} class {node.name}")
        if isinstance(node, ast.ExceptHandler) and swallows(node):
            mistakes.append(f"{path}:{node.lineno} swallows every error")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not is_kernel(node) and not is_typed(node):
            mistakes.append(f"{path}:{node.lineno} {node.name} is not fully typed")
    return mistakes


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel: its pointers have no types and are plain arguments."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def is_guard(node: ast.stmt) -> bool:
    """``if TYPE_CHECKING`` and ``if __name__ == "__main__"``."""
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id in ("TYPE_CHECKING", "__name__")
        for part in ast.walk(node.test)
    )


def swallows(node: ast.ExceptHandler) -> bool:
    name = node.type.id if isinstance(node.type, ast.Name) else None
    broad = node.type is None or name in ("Exception", "BaseException")
    return broad and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)


def is_typed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    args = node.args
    given = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    named = [arg for arg in given if arg and arg.arg not in ("self", "cls")]
    return node.returns is not None and all(arg.annotation for arg in named)


def test_there_is_something_to_read() -> None:
    assert len(SOURCES) > 10
    assert Path(__file__).resolve() in TESTS


def test_every_part_has_a_layer() -> None:
    parts = {path.relative_to(ROOT / "yolo_ray").parts[0] for path in python_files("yolo_ray")}
    assert {part.removesuffix(".py") for part in parts} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_source_keeps_layers_doors_and_habits(path: Path) -> None:
    tree = ast.parse(path.read_text())
    mistakes = layer_mistakes(label(path), tree) + door_mistakes(label(path), tree)
    assert mistakes + habit_mistakes(label(path), tree) == []
    assert path.stem not in BANNED_NAMES


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=label)
def test_sizes(path: Path) -> None:
    assert size_mistakes(label(path), path.read_text()) == []


def test_modules_import_each_other_in_one_direction() -> None:
    """No cycle between modules, however they are grouped."""
    modules = {label(p).removesuffix(".py").replace("/", "."): p for p in SOURCES}
    needs = {
        name: {
            other
            for _, used in imports_of(ast.parse(path.read_text()))
            for other in modules
            if other != name and not other.endswith("__init__") and is_within(used, other)
        }
        for name, path in modules.items()
    }
    while leaves := [name for name, others in needs.items() if not others]:
        for leaf in leaves:
            del needs[leaf]
        for others in needs.values():
            others.difference_update(leaves)
    assert needs == {}


def test_no_file_names_a_machine_of_ours() -> None:
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".gz"]
    folders = ("yolo_ray", "pipelines", "tests", "configs", ".ci", "docs", "deploy")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    suffixes = ("", ".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".sh")
    found = [
        f"{label(path)}:{number}"
        for path in [*top, *texts]
        if path.suffix in suffixes and path.name != ".git"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("yolo_ray/data/plan.py", "from yolo_ray.train import loop", 1),
        ("yolo_ray/data/plan.py", "def f():\n    import yolo_ray.cluster.launch", 1),
        ("yolo_ray/track/run.py", "from yolo_ray.train.report import Tracker", 1),
        ("yolo_ray/study/trials.py", "from yolo_ray.cluster import search", 1),
        ("yolo_ray/cluster/launch.py", "from yolo_ray.train import loop", 0),
        ("yolo_ray/cluster/launch.py", "from pipelines import train", 1),
        ("pipelines/train.py", "from yolo_ray.cluster import launch", 0),
    ],
)
def test_the_layer_check_can_fail(path: str, source: str, count: int) -> None:
    assert len(layer_mistakes(path, ast.parse(source))) == count


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("yolo_ray/model/build.py", "from ultralytics.nn.tasks import DetectionModel", 0),
        ("yolo_ray/model/loss.py", "from ultralytics.nn.tasks import DetectionModel", 1),
        ("yolo_ray/cluster/launch.py", "import ray.train", 0),
        ("yolo_ray/cluster/launch.py", "import ray\nray.data.range(3)", 1),
        ("yolo_ray/cluster/launch.py", "from ray import data", 1),
        ("pipelines/train.py", "import mlflow", 1),
        ("yolo_ray/cluster/search.py", "import optuna", 1),
        ("yolo_ray/data/pipeline.py", "import ray.data", 0),
        ("yolo_ray/data/storage.py", "import fsspec.asyn", 0),
        ("yolo_ray/data/records.py", "import fsspec", 1),
        ("yolo_ray/data/storage.py", "import s3fs", 1),
    ],
)
def test_the_door_check_can_fail(path: str, source: str, count: int) -> None:
    assert len(door_mistakes(path, ast.parse(source))) == count


@pytest.mark.parametrize(
    "source",
    [
        "print(3)",
        "for a in b: pass",
        "def f(a) -> None: ...",
        "def f(a: int): ...",
        "class BaseStep: ...",
        "def f() -> bool:\n    return hasattr(1, 'a')",
        "def f() -> None:\n    try:\n        g()\n    except Exception:\n        pass",
    ],
)
def test_the_habit_check_can_fail(source: str) -> None:
    assert len(habit_mistakes("yolo_ray/step/x.py", ast.parse(source))) == 1


def test_the_size_check_can_fail() -> None:
    long = "def f() -> None:\n" + "    g()\n" * 61
    wide = "def f(a, b, c, d, e, f, g, h): ...\n"
    assert len(size_mistakes("yolo_ray/step/x.py", long + wide)) == 2
    assert len(size_mistakes("pipelines/x.py", "a = 1\n" * 61)) == 1
    assert size_mistakes("yolo_ray/step/x.py", "a = 1\n" * 400) == []
    assert MACHINE_PATH.search("cd /" + "work/main") and not MACHINE_PATH.search("$x/work/y")
