"""What Ray Tune is told during a study, with Tune's own schedulers and no cluster."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from ray.tune.search import Searcher
from rich.console import Console

from yolo_ray.cluster.search import Asha, Order, Population, Recorder, StudySearch, order_of
from yolo_ray.cluster.terms import checked_space, earlier_trials, most_epochs
from yolo_ray.cluster.trial import ADOPTED_FILE, _Attempt, adopt, check_used, config_of
from yolo_ray.cluster.tuning import tune
from yolo_ray.config.load import dump, load
from yolo_ray.config.schema import TrainConfig
from yolo_ray.config.space import Domain
from yolo_ray.config.tune import STUDY_CONFIG, TuneConfig, TuneOptions
from yolo_ray.errors import UserError
from yolo_ray.study.sampling import GridSampler
from yolo_ray.study.trials import Journal, Trial
from yolo_ray.track import study_pictures
from yolo_ray.track.study import StudyObserver
from yolo_ray.track.study_table import StudyTable, trials_table
from yolo_ray.train.checkpoint import weights_digest
from yolo_ray.train.events import EventLog

SPACE = {"optim.lr0": Domain("optim.lr0", "choice", (0.1, 0.01, 0.001))}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def search_of(journal: Journal, num_samples: int = 3) -> StudySearch:
    return StudySearch(journal, GridSampler(SPACE), num_samples, {"optim.lr0": 0.01})


class StandIn(SimpleNamespace):
    """Told apart by identity, as Ray Tune's trials are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def stand_in(number: int, trial_id: str, options: dict[str, Any] | None = None) -> Any:
    """What schedulers and callbacks see of Ray Tune's trial."""
    config = Order(number, options or {}, f"trials/{number:03d}").settings()
    return StandIn(trial_id=trial_id, config=config, last_result={})


def test_the_baseline_is_first_and_the_number_of_trials_is_kept(journal: Journal) -> None:
    search = search_of(journal)
    orders = [order_of(search.suggest(name)) for name in "abc"]
    assert orders[0] == Order(0, {}, "trials/000")
    assert [order.options for order in orders[1:]] == [{"optim.lr0": 0.1}, {"optim.lr0": 0.01}]
    assert search.suggest("d") == Searcher.FINISHED
    assert search.left == 0


def test_after_a_kill_the_interrupted_come_first_and_none_is_lost(journal: Journal) -> None:
    search = search_of(journal)
    for name in "ab":
        search.suggest(name)
    recorder = Recorder(journal, lambda trial: None)
    done = stand_in(0, "a")
    done.last_result = {"state": "finished"}
    recorder.on_trial_result(1, [], done, {"epoch": 4, "objective": 0.5, "metrics": "{}"})
    recorder.on_trial_complete(1, [], done)
    again = Journal(journal.path)
    assert [t.state for t in again.trials.values()] == ["finished", "running"]
    search = search_of(again)
    assert search.left == 2
    assert [order_of(search.suggest(name)).number for name in "xy"] == [1, 2]
    assert search.suggest("z") == Searcher.FINISHED


def test_a_stop_hands_out_nothing_and_keeps_trials_running(journal: Journal) -> None:
    search, ended = search_of(journal), list[Trial]()
    search.suggest("a")
    search.is_stopping = True
    assert search.suggest("b") == Searcher.FINISHED
    recorder = Recorder(journal, ended.append)
    trial = stand_in(0, "a")
    trial.last_result = {"state": "interrupted"}
    recorder.on_trial_complete(1, [], trial)
    search.on_trial_complete("a", {"state": "interrupted"})
    assert ended == [] and Journal(journal.path).trials[0].state == "running"


def test_what_the_recorder_writes(journal: Journal) -> None:
    search, ended = search_of(journal, 4), list[Trial]()
    recorder = Recorder(journal, ended.append)
    for number, name in enumerate("abcd"):
        search.suggest(name)
        recorder.on_trial_result(
            1, [], stand_in(number, name), {"epoch": 2, "objective": 0.1 * number}
        )
    recorder.on_trial_complete(1, [], stand_in(1, "b"))  # by the scheduler: no state of its own
    failed = stand_in(2, "c")
    failed.last_result = {"state": "failed", "reason": "no gradient was finite"}
    recorder.on_trial_result(1, [], failed, {"epoch": 0, "objective": math.nan})
    recorder.on_trial_complete(1, [], failed)
    recorder.on_trial_error(1, [], stand_in(3, "d"))
    trials = Journal(journal.path).trials
    assert [trials[n].state for n in range(4)] == ["running", "stopped", "failed", "failed"]
    assert "after epoch 2" in trials[1].reason and trials[2].reason == "no gradient was finite"
    assert "killed" in trials[3].reason and trials[2].reports == {2: 0.2}
    assert [trial.number for trial in ended] == [1, 2, 3]


def rungs(scheduler: Asha) -> dict[float, list[float]]:
    (bracket,) = scheduler._brackets
    return {milestone: sorted(recorded.values()) for milestone, recorded in bracket._rungs}


def test_rungs_are_the_same_after_a_resume(journal: Journal) -> None:
    """Trial 0 ended, trial 1 goes on under another id; the next bad one is stopped where it would have been."""
    options = TuneOptions(grace_period=1, reduction_factor=2)
    scheduler, recorder = Asha(journal, options, 9), Recorder(journal, lambda trial: None)
    search, decisions = search_of(journal, 4), {}
    for number, name in enumerate("ab"):
        search.suggest(name)
        scheduler.on_trial_add(None, stand_in(number, name))
        for epoch in range(1, 5 - number):
            trial, result = (
                stand_in(number, name),
                {"epoch": epoch, "objective": 0.5 + number / 10 + epoch / 100},
            )
            recorder.on_trial_result(1, [], trial, result)
            decisions[number, epoch] = scheduler.on_trial_result(None, trial, result)  # type: ignore[arg-type]
    assert set(decisions.values()) == {"CONTINUE"}
    done = stand_in(0, "a")
    done.last_result = {"state": "finished"}
    recorder.on_trial_complete(1, [], done)

    again = Asha(Journal(journal.path), options, 9)
    again.on_trial_add(None, stand_in(1, "another id"))
    assert rungs(again) == rungs(scheduler)
    bad = stand_in(2, "bad")
    again.on_trial_add(None, bad)
    assert again.on_trial_result(None, bad, {"epoch": 1, "objective": 0.1}) == "STOP"  # type: ignore[arg-type]
    reported = {"epoch": 3, "objective": 0.63}
    assert again.on_trial_result(None, stand_in(1, "another id"), reported) == "CONTINUE"  # type: ignore[arg-type]


def test_auto_grace_is_an_eighth_of_the_epochs(journal: Journal) -> None:
    assert min(rungs(Asha(journal, TuneOptions(), 80))) == 10
    assert min(rungs(Asha(journal, TuneOptions(), 3))) == 1


def test_the_last_rung_lies_where_the_longest_trial_ends() -> None:
    base = TrainConfig().override({"data.path": "/d.yaml", "epochs": 5})
    longer = {"epochs": Domain("epochs", "randint", (2, 9))}
    assert (most_epochs(base, SPACE), most_epochs(base, longer)) == (5, 9)


def test_best_so_far_counts_what_was_evaluated_before_a_kill(tmp_path: Path) -> None:
    """The driver may have been killed before it wrote the best epoch down."""
    (tmp_path / "trials").mkdir()
    job: Any = SimpleNamespace(study=tmp_path, weights={"val/map50": 1.0})
    events = EventLog(tmp_path / "trials/events.jsonl")
    events.write("step", steps=6)
    for epoch, value in ((1, 0.7), (2, 0.4)):
        events.write("val", **{"epoch": epoch, "val/map50": value})
    attempt = _Attempt(job, Order(3, {}, "trials"), {})
    attempt.take_in_old()
    assert (attempt.last["epoch"], attempt.last["objective"]) == (2, 0.7)
    events.write("val", **{"epoch": 3, "val/map50": 0.5})
    attempt.take_in_old()
    assert attempt.last["objective"] == 0.7 and attempt.last["current"] == 0.5
    assert json.loads(attempt.last["metrics"]) == {"val/map50": 0.7}, "of the best epoch"


def test_an_exploit_mutates_the_donor_for_a_folder_of_its_own(journal: Journal) -> None:
    for number in range(2):
        journal.write(
            "trial",
            number,
            options={"optim.lr0": 0.1} if number else {},
            folder=f"trials/00{number}",
        )
    space = {"optim.lr0": Domain("optim.lr0", "loguniform", (1e-3, 1.0))}
    population = Population(journal, space, 2, 0, {"optim.lr0": 0.02})
    own, donor = stand_in(1, "b", {"optim.lr0": 0.1}), stand_in(0, "a")
    population._trial_state = {donor: SimpleNamespace(last_result={"epoch": 6})}  # type: ignore[assignment]
    settings, _ = population._get_new_config(own, donor)
    order = order_of(settings)
    assert (order.number, order.folder) == (1, "trials/001-1")
    assert order.options["optim.lr0"] != 0.1 and space["optim.lr0"].holds(
        order.options["optim.lr0"]
    )
    trial = Journal(journal.path).trials[1]
    assert trial.donors == [{"donor": 0, "epoch": 6}] and trial.options == order.options


def test_sampled_options_are_those_of_the_run(tmp_path: Path) -> None:
    base = TrainConfig().override({"data.path": "/d.yaml"})
    options = {"optim.lr0": 0.003, "freeze": [0, 1], "epochs": 4}
    folder = tmp_path / "trials" / "001"
    config = config_of(base, Order(1, options, "trials/001"), folder)
    assert (config.optim.lr0, config.freeze, config.epochs) == (0.003, (0, 1), 4)
    assert (config.project, config.name, config.resume) == (str(tmp_path / "trials"), "001", None)
    assert config.is_given("lr0") and not config.is_given("momentum")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    check_used(folder, options)
    with pytest.raises(AssertionError, match=r"lr0=0.004 was sampled, 001 runs with 0.003"):
        check_used(folder, options | {"optim.lr0": 0.004})
    assert config_of(base, Order(1, options, "trials/001"), folder).resume == str(folder)


def test_a_donors_state_is_adopted_once(tmp_path: Path) -> None:
    donor, folder = tmp_path / "donor", tmp_path / "own"
    (donor / "checkpoints").mkdir(parents=True)
    model = {"b": torch.arange(3.0), "a": torch.ones(2)}
    torch.save({"model": model}, donor / "checkpoints" / "step_000000012.pt")
    adopt(folder, None)
    assert not folder.exists()
    adopt(folder, {"path": str(donor), "epoch": 3, "donor": 0})
    record = json.loads((folder / ADOPTED_FILE).read_text())
    assert record["step"] == 12 and record["digest"] == weights_digest(model)
    assert weights_digest({**model, "a": torch.tensor([1.0, 1.0001])}) != record["digest"]
    later = folder / "checkpoints" / "step_000000015.pt"
    torch.save({"model": model}, later)
    adopt(folder, {"path": str(donor), "epoch": 3, "donor": 0})  # the same attempt goes on
    assert later.exists() and json.loads((folder / ADOPTED_FILE).read_text()) == record


TRIALS = [
    Trial(0, {}, "trials/000", "finished", {1: 0.1, 2: 0.3}, 0.3),
    Trial(1, {"optim.lr0": 0.1}, "trials/001", "stopped", {1: 0.05}, 0.05, reason="behind"),
    Trial(2, {"optim.lr0": 0.01}, "trials/002-1", "running", {1: 0.4}, 0.4, donors=[{"donor": 0, "epoch": 1}]),
    Trial(3, {"optim.lr0": 0.001}, "trials/003", "failed", reason="no gradient was finite"),
]  # fmt: skip


def test_the_table_and_its_lines() -> None:
    console = Console(width=200, record=True, force_terminal=False, file=open("/dev/null", "w"))
    console.print(trials_table(TRIALS, 9))
    text = console.export_text()
    assert "3 of 9 trials" in text and "0.4000" in text and "lr0=0.1" in text
    trials = {trial.number: trial for trial in TRIALS[:1]}
    with StudyTable(trials, 9, console) as table:
        table.say("a sentence")
        trials |= {trial.number: trial for trial in TRIALS[1:]}
        table._trials = trials
    said = console.export_text()
    assert "a sentence" in said and "trial 003 failed (no gradient was finite): lr0=0.001" in said
    assert "from trial 0" in said and "trial 000" not in said, (
        "what was known before is not told again"
    )


def test_pictures_of_any_study(tmp_path: Path) -> None:
    space = SPACE | {"optim.lr0": Domain("optim.lr0", "loguniform", (1e-3, 0.1))}
    for name, trials in (("many", TRIALS), ("one", TRIALS[:1])):
        study_pictures.draw_history(trials, tmp_path / name / "history.png")
        study_pictures.draw_learning(trials, tmp_path / name / "curves.png")
        study_pictures.draw_parallel(trials, space, tmp_path / name / "parallel.png")
        study_pictures.draw_importance(
            {} if name == "one" else {"optim.lr0": 0.7}, tmp_path / name / "i.png"
        )
        assert all(path.stat().st_size > 4000 for path in (tmp_path / name).iterdir())
        assert len(list((tmp_path / name).iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no search space is given"),
        (("space.batch={choice: [5, 8]}", "tune.scheduler=pbt"), "pbt cannot change batch"),
        (("space.lr0={choice: [0.1]}", "tune.scheduler=pbt", "num_samples=1"), "to 2 or more"),
        (("space.lr0={choice: [0.1]}", "objective=map"), "no run has a metric 'map'"),
    ],
)
def test_mistakes_are_told_before_data_or_cluster_are_looked_at(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tune(load(["data=nowhere.yaml", *arguments], TuneConfig), StudyObserver())


def test_a_study_goes_on_with_what_it_compares(tmp_path: Path) -> None:
    given = ["data=nowhere.yaml", "space.lr0={choice: [0.1]}", "epochs=4"]
    dump(load(given, TuneConfig), tmp_path / STUDY_CONFIG)
    for change, name in (
        ("epochs=5", "epochs"),
        ("space.lr0={choice: [0.2]}", "space"),
        ("search=grid", "tune.search"),
    ):
        config = load([f"resume={tmp_path}", change], TuneConfig)
        with pytest.raises(UserError, match=rf"the study has {name}=.*could not be compared"):
            tune(config, StudyObserver())
    journal = tmp_path / "journal.jsonl"
    begun = [{"kind": "trial", "number": n, "options": {}, "folder": str(n)} for n in range(2)]
    journal.write_text("".join(json.dumps(event) + "\n" for event in begun))
    with pytest.raises(UserError, match=r"2 trials have begun, num_samples=1"):
        tune(load([f"resume={tmp_path}", "num_samples=1"], TuneConfig), StudyObserver())
    config = load(
        [f"resume={tmp_path}", "num_samples=50", "max_concurrent=3", "cluster.address=local"],
        TuneConfig,
    )
    with pytest.raises(UserError, match=r"nowhere.yaml"):  # the next thing that is judged
        tune(config, StudyObserver())
    journal.write_text('garbage\n{"kind": "report", "number": 0, "epoch": 1, "objective": 0.1}\n')
    with pytest.raises(UserError, match=r"journal.jsonl is damaged"):
        tune(config, StudyObserver())


def test_period_that_would_leave_every_trial_alone_is_refused() -> None:
    given = ["data=nowhere.yaml", "space.lr0={choice: [0.1]}", "epochs=8"]
    checked_space(load([*given, "grace_period=7"], TuneConfig))
    with pytest.raises(
        UserError, match=r"tune\.grace_period=8 .* 8 epochs .* ever be stopped early"
    ):
        checked_space(load([*given, "grace_period=8"], TuneConfig))
    checked_space(load([*given, "grace_period=8", "space.epochs={choice: [4, 16]}"], TuneConfig))
    with pytest.raises(UserError, match=r"tune\.perturb_period=9 .* ever be changed"):
        checked_space(
            load([*given, "tune.scheduler=pbt", "num_samples=2", "perturb_period=9"], TuneConfig)
        )


def test_an_earlier_study_that_has_gone(tmp_path: Path) -> None:
    given = ["data=nowhere.yaml", "space.lr0={choice: [0.1]}", f"tune.from={tmp_path / 'gone'}"]
    with pytest.raises(UserError, match=r"^tune.from=.*gone is not the folder of a study") as told:
        earlier_trials(load(given, TuneConfig))
    assert "null" not in str(told.value)
    dump(load(given, TuneConfig), tmp_path / STUDY_CONFIG)
    with pytest.raises(UserError, match=r"go on without it: tune.from=null"):
        earlier_trials(load([f"resume={tmp_path}"], TuneConfig))
    config = load([f"resume={tmp_path}", "tune.from=null"], TuneConfig)
    assert earlier_trials(config) == [] and checked_space(config)
