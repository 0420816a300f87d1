"""The training loop of one process: epochs of steps, evaluation, checkpoints. It knows neither Ray nor MLflow."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from yolo_ray.augment.device import augment
from yolo_ray.config.schema import TrainConfig
from yolo_ray.data.records import Records
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.model.build import Detector
from yolo_ray.model.loss import head_gains_at
from yolo_ray.step.graph import GraphedStep, Step
from yolo_ray.step.reduce import AllReduce
from yolo_ray.step.schedule import Schedule
from yolo_ray.step.train_step import StepSums
from yolo_ray.train.checkpoint import Progress, disk_explained
from yolo_ray.train.diagnose import Speedometer
from yolo_ray.train.events import EventLog, NullEventLog
from yolo_ray.train.feed import Feed
from yolo_ray.train.meter import GpuMeter, NoMeter
from yolo_ray.train.metrics import EvalResult
from yolo_ray.train.report import Tracker
from yolo_ray.train.saver import Saver

NUM_PICTURED_STEPS = 3
MAX_SKIPPED_STEPS = 10  # in a row, before the run gives up
# A progress line is read from the device some steps later, which is then still busy with those: at once it would stand
# still until the line is written. The same on all ranks, since a stop request comes with it.
LINE_LAG_STEPS = 3
STOP_FILE = "stop"
SUMMARY_FILE = "summary.json"
EVALUATION_FILE = "evaluation.npz"


@dataclass
class Run:
    """The parts of a run, put together by the worker.

    ``evaluate`` runs on every rank and returns the same numbers on every rank; ``report`` is called once an epoch on
    every rank; ``reduce`` sums a tensor over the ranks.
    """

    config: TrainConfig
    folder: Path
    detector: Detector
    step: Step
    schedule: Schedule
    feed: Feed
    evaluate: Callable[[], EvalResult]
    reduce: AllReduce
    report: Callable[[dict[str, float]], None]
    tracker: Tracker
    events: EventLog | NullEventLog
    rank: int
    workers: int
    data_digest: str
    val: Records
    data_cpus: float  # of all workers, to read photos
    progress: Progress = field(default_factory=Progress)

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.folder / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """Its existence asks the run to stop a few steps after the next progress line."""
        return self.folder / STOP_FILE


def fit(run: Run) -> None:
    """Train from ``run.progress.step`` to the end and write ``summary.json``: the best epoch and its metrics.

    Raises:
        StopRequested: the run was asked to stop; its checkpoint is written.
        UserError: no gradient was finite for ten steps or more in a row, or the disk refuses.
    """
    loop = _Loop(run)
    batches = run.feed.batches(run.progress.step)
    with closing(loop.speedometer.meter), closing(loop.saver), closing(batches) as stream:
        if loop.is_epoch_due():
            loop.end_epoch(run.progress.step - 1)
            loop.begin_epoch()
        for step, batch in () if loop.is_stale() else stream:
            loop.train_one(step, batch)
            if loop.is_epoch_due():
                loop.end_epoch(step)
                if loop.is_stale():
                    break
                loop.begin_epoch()
        loop.saver.wait()
    if run.progress.step < run.schedule.epochs * run.schedule.steps_per_epoch:
        loop.note(f"no gain in {run.config.patience} epochs: training ends early")
    if run.rank == 0:
        loop.write_summary()


@dataclass(frozen=True)
class _Line:
    """A progress line to be: the step after which it stands, how many steps it is of, their sums."""

    step: int
    steps: int
    sums: StepSums


class _Loop:
    """The counters and clocks between steps."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.begin_time = time.perf_counter() - run.progress.elapsed_s  # of the run
        self.start_time = time.perf_counter()  # of this process
        self.first_step = run.progress.step
        self.losses = np.zeros(4)  # box, cls, dfl sums and the steps they are of, this epoch
        self.last_logged = run.progress.step
        self.lines: deque[_Line] = deque()
        self.saver = Saver(run.config, run.folder, run.detector, run.data_digest)
        self.num_skipped = 0  # as of the last line
        self.skipped_in_a_row = 0
        self.is_cost_told = False
        device = run.step.flat.state.device
        self.speedometer = Speedometer(
            device, run.feed, GpuMeter(device) if device.type == "cuda" and run.rank == 0 else NoMeter(),
            batch=run.config.batch, data_cpus=run.data_cpus, data=run.config.data,
        )  # fmt: skip
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.speedometer.restart()
        self.losses[:] = 0

    def note(self, text: str) -> None:
        self.run.events.write("note", text=text)

    def train_one(self, step: int, batch: Any) -> None:
        """One training step and what falls due after it: log, checkpoint, stop."""
        run, epoch = self.run, step // self.run.schedule.steps_per_epoch
        if run.rank == 0 and step < NUM_PICTURED_STEPS:
            self._picture(step, batch)
        self._ask_to_stop(step)
        self.speedometer.clock.begin()
        controls = run.schedule.at(step)
        run.step.set_controls(controls, head_gains_at(epoch, run.config.epochs, run.step.num_heads))
        run.step(batch, update=run.schedule.is_update(step))
        self.speedometer.clock.end()
        run.progress.step = step + 1
        if run.config.data.log_samples:
            self._log_samples(step)
        last = (step + 1) % run.schedule.steps_per_epoch == 0
        if last or (step + 1) % run.config.log_steps == 0:
            self.lines.append(_Line(step, step + 1 - self.last_logged, run.step.take_sums()))
            self.last_logged = step + 1
        self._write_lines(step if last else step - LINE_LAG_STEPS)
        every = run.config.checkpoint.save_steps
        if every and (step + 1) % every == 0 and not last:
            self._checkpoint()

    def _ask_to_stop(self, step: int) -> None:
        """Before a logging step this rank says whether it was asked to stop; the collective tells all ranks."""
        if (step + 1) % self.run.config.log_steps == 0 or (
            step + 1
        ) % self.run.schedule.steps_per_epoch == 0:
            self.run.step.stop.fill_(float(self.run.stop_file.exists()))

    def _write_lines(self, due: int) -> None:
        """The lines up to the step ``due``, and all of them if one says that the run was asked to stop."""
        is_stopped = False
        while self.lines and (is_stopped or self.lines[0].step <= due):
            is_stopped |= self._log(self.lines.popleft())
        if is_stopped:
            self._checkpoint()
            self.saver.wait()
            run = self.run
            raise StopRequested(
                f"stopped at step {run.progress.step}; go on with: resume={run.folder}"
            )

    def _log(self, line: _Line) -> bool:
        """Write a line; whether some rank had been asked to stop by then."""
        self.saver.check()
        run, per_epoch, step = self.run, self.run.schedule.steps_per_epoch, line.step
        sums, lr, steps = line.sums.read(), run.schedule.at(step).lr, line.steps
        self.num_skipped = int(sums["all_skipped"])
        self.speedometer.collect()
        self._tell_cost()
        self.speedometer.tell_supply(self.note, is_over=(step + 1) % per_epoch == 0)
        trained = steps - sums["skipped"]
        self._refuse_lost_run(step, lr, 0 if trained else steps)
        self.losses += np.array([sums["box"], sums["cls"], sums["dfl"], 1.0]) * trained
        speed = self.speedometer.speed()
        run.progress.elapsed_s = time.perf_counter() - self.begin_time
        done = run.progress.step - self.first_step
        remaining = run.schedule.epochs * per_epoch - run.progress.step
        since = time.perf_counter() - self.start_time
        run.events.write(
            "step",
            epoch=step // per_epoch + 1, epochs=run.schedule.epochs,
            step=step % per_epoch + 1, steps=per_epoch,
            images_per_s=speed.images_per_s, lr=lr, data_wait=speed.data_wait_share,
            eta_s=since / done * remaining, skipped=self.num_skipped,
            **{name: sums[name] for name in ("box", "cls", "dfl")},
        )  # fmt: skip
        run.tracker.metrics(
            {f"train/{name}": sums[name] for name in ("box", "cls", "dfl")}
            | {"lr": lr, "speed/images_per_s": speed.images_per_s}
            | {"skipped_steps": float(self.num_skipped)},
            step=step + 1,
        )
        return sums["stop"] > 0

    def _tell_cost(self) -> None:
        """Once: what the graph cost and when that is paid back."""
        step, schedule = self.run.step, self.run.schedule
        if isinstance(step, GraphedStep) and step.cost is not None and not self.is_cost_told:
            self.is_cost_told = True
            self.note(step.cost.sentence(schedule.epochs * schedule.steps_per_epoch))

    def _refuse_lost_run(self, step: int, lr: float, skipped: int) -> None:
        """One bad step is skipped and counted; nothing but bad steps means that the run has diverged."""
        run = self.run
        self.skipped_in_a_row = self.skipped_in_a_row + skipped if skipped else 0
        least = MAX_SKIPPED_STEPS
        if not run.step.scale.is_active:  # float16 finds its scale by skipping a few steps
            least = min(least, max(2, run.schedule.steps_per_epoch))
        if self.skipped_in_a_row >= least:
            self.saver.wait()
            raise UserError(
                f"no gradient of the last {self.skipped_in_a_row} steps (to step {step + 1}) was finite: lower lr0 "
                f"(now {lr:.3g}) or raise optim.warmup_epochs; the checkpoints in {run.checkpoints} are intact"
            )

    def is_epoch_due(self) -> bool:
        """Whether all steps of an epoch are done and its end is not."""
        epochs, rest = divmod(self.run.progress.step, self.run.schedule.steps_per_epoch)
        return rest == 0 and epochs > self.run.progress.ended

    def _row(self, step: int) -> dict[str, float]:
        """What training itself adds to results.csv: means over the epoch's steps in this process."""
        run, speed = self.run, self.speedometer.speed()
        row = {"lr": run.schedule.at(step).lr, "skipped_steps": float(run.step.skipped)}
        if speed.steps == 0:  # resumed after the last step of the epoch
            return row
        means = (self.losses[:3] / max(self.losses[3], 1)).tolist()
        losses = zip(("train/box", "train/cls", "train/dfl"), means, strict=True)
        return {**dict(losses), **row, **speed.row()}

    def end_epoch(self, step: int) -> None:
        """Evaluate, write the row, the weights and the checkpoint."""
        run = self.run
        epoch = step // run.schedule.steps_per_epoch
        row = self._row(step)
        # The first epoch of a process starts up and says nothing of the rest.
        if epoch > self.first_step // run.schedule.steps_per_epoch:
            self.speedometer.tell_wait(lambda text: run.events.write("warning", text=text))
        if isinstance(run.step, GraphedStep):
            row |= {"graph/captures": run.step.captures, "graph/replays": run.step.replays}
        result = self._evaluate(epoch) if self._evaluates(epoch) else None
        if result is not None:
            row |= result.metrics
            if isinstance(run.step, GraphedStep):
                row["graph/eval_replays"] = result.replays
        row["time/epoch_s"] = time.perf_counter() - self.speedometer.begin_time
        run.progress.ended = epoch + 1
        run.tracker.row(row, epoch=epoch + 1)
        is_best = result is not None and run.progress.best_epoch == epoch
        self._checkpoint(epoch=epoch + 1, is_best=is_best)
        run.report({"epoch": float(epoch + 1), **row})

    def _evaluates(self, epoch: int) -> bool:
        options, last = self.run.config.eval, epoch + 1 == self.run.schedule.epochs
        return last or (options.val and (epoch + 1) % options.val_period == 0)

    def _evaluate(self, epoch: int) -> EvalResult:
        run = self.run
        average_buffers(run)
        with ema_weights(run.step):
            result = run.evaluate()
        metrics = result.metrics
        if metrics["val/map50_95"] > run.progress.best:
            run.progress.best, run.progress.best_epoch = metrics["val/map50_95"], epoch
            run.progress.best_metrics = dict(metrics)
            if run.rank == 0:
                with disk_explained(run.folder):
                    save_evaluation(run.folder / EVALUATION_FILE, result, run.val)
        run.events.write("val", epoch=epoch + 1, **metrics)
        return result

    def write_summary(self) -> None:
        """What the driver makes result.json of."""
        progress = self.run.progress
        summary = {
            "steps": progress.step,
            "best_epoch": progress.best_epoch + 1,
            "skipped_steps": int(self.run.step.skipped),
            "elapsed_s": round(progress.elapsed_s, 1),
            **{name.removeprefix("val/"): value for name, value in progress.best_metrics.items()},
        }
        with disk_explained(self.run.folder):
            (self.run.folder / SUMMARY_FILE).write_text(json.dumps(summary))

    def is_stale(self) -> bool:
        """Whether an evaluation has found no gain for ``patience`` epochs."""
        patience, progress = self.run.config.patience, self.run.progress
        if not patience or progress.best_epoch < 0 or not self._evaluates(progress.ended - 1):
            return False
        return progress.ended - 1 - progress.best_epoch >= patience

    def _checkpoint(self, *, epoch: int | None = None, is_best: bool = False) -> None:
        run = self.run
        average_buffers(run)
        if run.rank == 0:
            run.progress.elapsed_s = time.perf_counter() - self.begin_time
            self.saver.save(run.step, run.progress, epoch=epoch, is_best=is_best)

    def _picture(self, step: int, batch: Any) -> None:
        images = augment(batch).clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()[:16]
        valid = batch.valid.cpu().numpy()
        index, boxes = batch.image_index.cpu().numpy()[valid], batch.boxes.cpu().numpy()[valid]
        classes = batch.classes.cpu().numpy()[valid]
        rows = range(len(images))
        self.run.tracker.photos(
            f"train_batch{step}", images, [boxes[index == i] for i in rows], [classes[index == i] for i in rows],
            step=step,
        )  # fmt: skip

    def _log_samples(self, step: int) -> None:
        folder = self.run.folder / "samples"
        line = f"{step},{' '.join(map(str, self.run.feed.ids.tolist()))}\n"
        with disk_explained(self.run.folder):
            folder.mkdir(exist_ok=True)
            with open(folder / f"rank_{self.run.rank}.csv", "a") as file:
                file.write(line)


def save_evaluation(path: Path, result: EvalResult, val: Records) -> None:
    """What pictures of an evaluation need: curves, and truth and detections of its first photos.

    ``truth`` float32 [n,6]: sample number, xyxy px, class; ``found`` [m,7]: the same and the score.
    """
    truth, found = [np.zeros((0, 6), np.float32)], [np.zeros((0, 7), np.float32)]
    for number, (image_id, boxes, scores, classes) in enumerate(result.samples):
        height, width = val.sizes[image_id].tolist()
        real, real_classes = val.boxes_of(image_id)
        pixels = real * np.array([width, height, width, height], np.float32)
        truth.append(np.column_stack([np.full(len(real), number), pixels, real_classes]))
        found.append(np.column_stack([np.full(len(boxes), number), boxes, classes, scores]))
    paths = np.array([str(val.paths[sample[0]]) for sample in result.samples])
    arrays = {"truth": np.concatenate(truth), "found": np.concatenate(found), "paths": paths}
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays, **vars(result.curves))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class ema_weights:
    """The detector computes with the EMA weights inside, and has its own back, bit for bit, outside."""

    def __init__(self, step: Step) -> None:
        self.flat = step.flat

    def __enter__(self) -> None:
        self.saved = self.flat.state.clone()
        self.flat.state.copy_(self.flat.ema)

    def __exit__(self, *_: object) -> None:
        self.flat.state.copy_(self.saved)


def average_buffers(run: Run) -> None:
    """Without synchronised batch norm each rank has statistics of its own: their mean is kept."""
    if run.workers > 1 and not run.config.cluster.sync_bn:
        for flat in (run.step.flat.state, run.step.flat.ema):
            buffers = flat[run.step.flat.num_trained :]
            total = buffers.double()  # the mean of equal numbers is that number: frozen ones stay
            run.reduce(total)
            buffers.copy_(total / run.workers)
