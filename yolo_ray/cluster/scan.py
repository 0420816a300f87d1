"""Label files read and photos judged before a run: here, or by tasks on every node, with word of how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import ray

from yolo_ray.cluster.preflight import connect, place
from yolo_ray.config.schema import WorkersConfig
from yolo_ray.data.judging import Judged, judge_apart
from yolo_ray.data.records import Judge, judge_here
from yolo_ray.data.storage import access_of
from yolo_ray.errors import UserError

FEWEST_RUNS = 8  # below that they are judged here before two cores of tasks, which take 3 s to start, are faster
AHEAD = 2  # runs under way for each that can run: the next is there when one ends
# Shows how far something is: what and of how many -> a context in which it is told of each so many
Counted = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def judge_on(cluster: WorkersConfig, counted: Counted) -> Judge:
    """How ``load_records`` has photos judged: few in this process, many by the cluster, which is joined for it.

    The results are the same, and so are the sentences about mistakes.
    """

    def judge(runs: Sequence[Sequence[str]], num_classes: int) -> Iterator[Judged]:
        few = len(runs) < FEWEST_RUNS
        judged = judge_here(runs, num_classes) if few else _judge_there(cluster, runs, num_classes)
        with counted("reading labels", sum(map(len, runs))) as done:
            for run, one in zip(runs, judged, strict=True):
                done(len(run))
                yield one

    return judge


def _judge_there(
    cluster: WorkersConfig, runs: Sequence[Sequence[str]], num_classes: int
) -> Iterator[Judged]:
    connect(cluster.address)
    # What a decoding task of the run will take; the run is refused where that has no room.
    cpus = place(cluster).data.task_cpus
    tasks = int(ray.cluster_resources().get("CPU", 1.0) / cpus)
    yield from judge_by_tasks(runs, num_classes, cpus=cpus, under_way=AHEAD * max(1, tasks))


def judge_by_tasks(
    runs: Sequence[Sequence[str]], num_classes: int, *, cpus: float, under_way: int
) -> Iterator[Judged]:
    """What each run came to, in order, by Ray tasks of ``cpus`` CPUs; a task whose process dies is started again.

    At most ``under_way`` runs are given out or wait to be taken. A result lies in the object store: copy it.

    Raises:
        UserError: what a task met that concerns all photos, such as a store that is down.
    """
    # A function of a module that imports little: its processes start in a third of a second instead of four.
    task = ray.remote(judge_apart).options(num_cpus=cpus, scheduling_strategy="SPREAD")
    # Through the object store, as the decoding tasks get it: never as a part of what Ray logs.
    access = ray.put(access_of(photo for run in runs for photo in run))
    waiting: deque[ray.ObjectRef] = deque()
    rest = iter(runs)
    try:
        while True:
            while len(waiting) < under_way and (run := next(rest, None)) is not None:
                waiting.append(task.remote(run, num_classes, access))
            if not waiting:
                return
            outcome: Judged | UserError = ray.get(waiting[0])
            waiting.popleft()
            if isinstance(outcome, UserError):
                raise outcome
            yield outcome
    finally:
        for unwanted in waiting:  # a mistake, or Ctrl-C
            ray.cancel(unwanted, force=True)
