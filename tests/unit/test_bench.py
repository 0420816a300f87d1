"""The benchmark: what it is told, what it concludes, what it writes. No number of time is judged here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from yolo_ray.bench import compare as compare_module
from yolo_ray.bench.compare import compare
from yolo_ray.bench.cost import Cost, count_cost, shares
from yolo_ray.bench.measure import Clock
from yolo_ray.bench.options import parse
from yolo_ray.bench.ratios import add_ratios, crossing, payback_steps, sweep_points
from yolo_ray.bench.startup import measure_birth, startup_rows
from yolo_ray.bench.static import FrozenAssignment, static_rows
from yolo_ray.bench.sweep import draw_sweep
from yolo_ray.bench.table import markdown
from yolo_ray.bench.variants import (
    EAGER,
    GRAPH,
    GRAPH_COMPILE,
    ULTRALYTICS,
    ULTRALYTICS_COMPILE,
    Setting,
    build_variant,
    make_scene,
)
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.model import loss as loss_module
from yolo_ray.model.assign import Assignment

CPU = torch.device("cpu")
TINY = Setting("yolo11n.yaml", 2, 64, 4, "fp32", "SGD")
QUICK = ["device=cpu", "imgsz=64", "boxes=4", "steps=1", "blocks=1"]


def row(variant: str, **values: Any) -> dict[str, Any]:
    who = {"model": "yolo11n", "batch": 16, "precision": "bf16", "optimizer": "SGD"}
    return who | {"variant": variant} | values


def sweep_rows(times: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Batch -> (eager ms, graph ms)."""
    return [
        row(variant, batch=batch, step_ms=ms)
        for batch, pair in times.items()
        for variant, ms in zip((EAGER, GRAPH), pair, strict=True)
    ]


def test_options_take_one_value_or_a_list() -> None:
    config = parse(["precision=bf16", "optimizer=[SGD,MuSGD,SGD]", "cases=yolo11n.yaml:4"])
    assert config.precision == ("bf16",)
    assert config.optimizer == ("SGD", "MuSGD")
    assert config.cases == ("yolo11n.yaml:4",)
    assert parse(["precision=[bf16,fp16,tf32,fp32]"]).precision == ("bf16", "fp16", "tf32", "fp32")
    assert parse(["out=2026"]).out == "2026"  # a name, not a number
    assert parse([]).precision == ("auto",) and parse([]).optimizer == ("SGD",)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("precision=[bf16,bf15]", "auto, bf16, fp16, tf32, fp32"),
        ("optimizer=Adam", "SGD, AdamW, MuSGD"),
        ("optimizer=[]", "SGD, AdamW, MuSGD"),
        ("precision=3", "a list"),
        ("cases=[yolo11n.yaml]", "model:batch"),
        ("cases=yolo11n.yaml:²", "model:batch"),
        ("cases=[1]", "words"),
        ("cases=yolo11n.yaml:16,yolo26n.yaml:16", "brackets"),
        ("table=false", "nothing to measure"),
        ("sweeep=true", "did you mean sweep"),
        ("sweep=1", "true or false"),
        ("static_steps=4", "a whole number >= 5"),
    ],
)
def test_wrong_options_are_named(argument: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse([argument])


def test_a_precision_nobody_has_is_refused_but_one_of_several_is_a_row() -> None:
    with pytest.raises(UserError, match="needs a GPU"):
        compare_module._precisions(["bf16"], CPU)
    assert compare_module._precisions(["auto", "bf16", "fp32"], CPU) == ["fp32", "bf16"]


def test_payback() -> None:
    assert payback_steps(10.0, 50.0, 10.0) == 250
    assert payback_steps(10.0, 50.0, 47.0) == 3334
    assert payback_steps(10.0, 10.0, 10.0) is None
    assert payback_steps(-1.0, 10.0, 20.0) == 0


def test_ratios_leave_failed_rows_alone() -> None:
    rows = [
        row(ULTRALYTICS, step_ms=60.0, start_s=2.0, peak_gib=2.4),
        row(ULTRALYTICS_COMPILE, failed="no compiler"),
        row(EAGER, step_ms=50.0, start_s=30.0, peak_gib=2.0),  # it compiled what the graph uses
        row(GRAPH, step_ms=10.0, start_s=5.0, capture_s=2.0, peak_gib=2.1),
        row(GRAPH_COMPILE, step_ms=12.0, start_s=65.0, peak_gib=1.5),
    ]
    add_ratios(rows)
    assert [r.get("ratio") for r in rows] == [1.0, None, 1.2, 6.0, 5.0]
    assert [r.get("memory_ratio") for r in rows] == [1.2, None, 1.0, 1.05, 0.75]
    assert [r.get("payback_steps") for r in rows] == [None, None, None, 50, "never"]


def test_crossing_lies_between_the_last_batch_that_gains_and_the_next() -> None:
    points = sweep_points(sweep_rows({1: (60, 10), 32: (55, 50), 64: (100, 100), 128: (200, 201)}))
    assert points[0] == (1, 6.0)
    where = crossing(points)
    assert where is not None and where == pytest.approx(2**5.5)  # 1.10 at 32, 1.00 at 64
    assert crossing(points[:2]) is None
    assert crossing([(8, 1.01), (16, 1.0)]) == 8.0
    assert crossing([(8, 1.01), (16, 1.2)]) is None
    assert crossing([]) is None


def test_sweep_is_drawn_with_failures_and_with_nothing(tmp_path: Path) -> None:
    rows = sweep_rows({1: (60, 10), 32: (55, 50), 64: (100, 100)})
    rows += [row(ULTRALYTICS, batch=1, step_ms=70.0), row(ULTRALYTICS, batch=32, failed="memory")]
    for name, drawn in (("full.png", rows), ("empty.png", [])):
        draw_sweep(drawn, tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert picture.format == "PNG" and picture.width > 500
    assert (tmp_path / "full.png").stat().st_size > (tmp_path / "empty.png").stat().st_size


def test_markdown_has_sections_reasons_and_no_empty_column() -> None:
    result = {
        "conditions": {"device": "a card"},
        "rows": [row(EAGER, step_ms=50.0), row(GRAPH, failed="out | of memory")],
        "sweep": sweep_rows({1: (60, 10), 64: (100, 100)}),
        "startup": [],
    }
    text = markdown(result)
    assert "device a card" in text and "## Step" in text
    assert "out / of memory" in text  # a bar would end the cell
    assert "kernel ms |" not in text and "process start" not in text
    assert "stops helping" in text and "(sweep.png)" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_shares_of_a_known_and_an_unknown_card() -> None:
    cost = Cost(flops=1e10, elements=1e8, weights=1e7, parameters=10**7)
    found = shares(cost, "NVIDIA H200", "bf16", (10, 1.0))  # 1e11 operations in a millisecond
    assert found["tflops"] == 100.0
    assert found["flops_share"] == pytest.approx(10.1)
    # 1e9 + 1e7 elements of 2 bytes and 28 bytes a parameter: 2.3 GB in a millisecond, of 4.8 TB/s
    assert found["bandwidth_share"] == pytest.approx(47.9)
    assert shares(cost, "another card", "bf16", (10, 1.0)) == {"tflops": 100.0}
    assert shares(None, "NVIDIA H200", "bf16", (10, 1.0)) == {}


def test_operations_are_three_times_the_published_forward() -> None:
    cost = count_cost("yolo11n.yaml", 640)
    assert 2.8 * 6.5e9 < cost.flops < 3.1 * 6.5e9  # Ultralytics publishes 6.5 GFLOPs
    assert 2.5e6 < cost.parameters < 2.8e6
    # Each filter is read twice and its gradient written; activations outweigh them by far.
    assert 2.9 * cost.parameters < cost.weights < 3.1 * cost.parameters < cost.elements


def test_frozen_assignment_repeats_what_it_recorded() -> None:
    asked: list[int] = []

    def exact(value: int) -> Assignment:
        asked.append(value)
        return Assignment(torch.tensor([value]), torch.tensor([value / 10]))

    frozen = FrozenAssignment(exact)
    for batch in (1, 3):  # two heads ask in each step
        frozen.record(lambda batch=batch: (frozen(batch), frozen(batch + 1))[-1] and None)
    answers = []
    for number in (0, 1, 2):
        frozen.select(number)
        answers += [int(frozen(99).row), int(frozen(99).row)]
    assert answers == [1, 2, 3, 4, 1, 2]
    assert asked == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="no longer calls"):
        frozen.record(lambda: None)


def test_static_assignment_begins_with_the_exact_one() -> None:
    """As many steps as batches: every step was recorded, so both must have learnt the same."""
    before = loss_module.assign
    exact, frozen = static_rows(TINY, Clock(CPU, 1, 1), 4)
    assert loss_module.assign is before
    assert exact["total"] == frozen["total"] and exact["total"] > 0
    assert frozen["assignment"].startswith("frozen") and frozen["step_ms"] > 0


def test_one_case_and_a_sweep_on_the_cpu(tmp_path: Path) -> None:
    config = parse([*QUICK, "cases=yolo11n.yaml:2", "sweep=true", "sweep_max=2", f"out={tmp_path}"])
    result = compare(config)
    assert [r["variant"] for r in result["rows"]] == [ULTRALYTICS, EAGER]
    assert all(r["step_ms"] > 0 and r["host_ms"] > 0 and r["tflops"] >= 0 for r in result["rows"])
    assert {(r["batch"], r["variant"]) for r in result["sweep"]} == {
        (batch, variant) for batch in (1, 2) for variant in (ULTRALYTICS, EAGER)
    }
    assert json.loads((tmp_path / "step.json").read_text())["rows"] == result["rows"]
    assert "exit" not in result
    assert "## Sweep" in (tmp_path / "step.md").read_text()
    assert (tmp_path / "sweep.png").is_file()


def test_a_variant_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(variant: str, *rest: Any) -> Any:
        if variant == ULTRALYTICS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")
        raise StopRequested("enough")

    monkeypatch.setattr(compare_module, "build_variant", build)
    monkeypatch.setattr(compare_module, "_cost_of", lambda model, imgsz: None)
    arguments = [*QUICK, "cases=yolo11n.yaml:1", f"out={tmp_path}"]
    with pytest.raises(StopRequested):  # a stop is no failure of a variant
        compare(parse(arguments))
    monkeypatch.setattr(compare_module, "_attempt", lambda measure: {"failed": "out of memory"})
    result = compare(parse([*arguments, "sweep=true"]))
    assert result["exit"] == 1  # nothing was measured
    assert [r["failed"] for r in result["rows"]] == ["out of memory"] * 2
    assert {r["batch"] for r in result["sweep"]} == {1}  # nothing larger is tried


def test_a_result_is_not_overwritten_and_a_bad_folder_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "step.json").write_text("{}")
    (tmp_path / "file").touch()
    assert compare_module._new_folder(tmp_path / "out") == tmp_path / "out2"
    assert compare_module._new_folder(tmp_path / "out") == tmp_path / "out3"
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"out=.*cannot be written"):
            compare_module._new_folder(place)


def test_an_unknown_model_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="yolo99n"):
        compare(parse([*QUICK, "cases=yolo99n.yaml:1", f"out={tmp_path}"]))


def test_the_rival_trains_with_its_own_musgd() -> None:
    setting = dataclasses.replace(TINY, optimizer="MuSGD")
    scene = make_scene(setting, CPU)
    subject = build_variant(ULTRALYTICS, setting, scene)
    rival: Any = subject.call
    assert type(rival.optimizer).__module__.startswith("ultralytics.optim")
    weight = rival.net.model[0].conv.weight
    before = weight.detach().clone()
    subject.call(0)
    assert not torch.equal(weight, before)


def test_a_rival_that_does_not_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ultralytics.utils import torch_utils

    monkeypatch.setattr(torch_utils, "attempt_compile", lambda model, **_: model)
    with pytest.raises(RuntimeError, match="uncompiled"):
        build_variant(ULTRALYTICS_COMPILE, TINY, make_scene(TINY, CPU))


def test_the_parts_of_a_start_add_up() -> None:
    told = {
        "setting": dataclasses.asdict(TINY),
        "device": "cpu",
        "variant": EAGER,
        "begin": 0.0,
    }
    parts = measure_birth(told)
    total = parts["import_s"] + parts["build_s"] + parts["kernels_s"]
    assert parts["total_s"] == pytest.approx(total, abs=0.05)


def test_a_start_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        seen.append(env)
        if len(seen) == 1:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no\n")
        return subprocess.CompletedProcess(command, 0, 'chatter\n{"total_s": 3.0}\n', "")

    monkeypatch.setattr(subprocess, "run", run)
    cold, warm = startup_rows(TINY, "cpu", compile=True)
    assert cold["cache"] == "cold" and cold["failed"] == "RuntimeError: no"
    assert warm["cache"] == "warm" and warm["total_s"] == 3.0
    assert seen[0]["TRITON_CACHE_DIR"] == seen[1]["TRITON_CACHE_DIR"]  # the second finds it full
