"""Placement groups that nobody is left to remove.

Ray Train 2.60 reserves a run's resources with a placement group that outlives its controller. Ray's own cleaner learns
of a group only after the workers have started, and needs the dashboard: a trial that is stopped before, or on a local
cluster, would keep its CPUs for ever.
"""

from __future__ import annotations

from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.util.placement_group import PlacementGroup, remove_placement_group

_STATES = PlacementGroupTableData.PlacementGroupState
_LIVING = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")


def remove_orphans() -> int:
    """Remove the groups of this job whose creator, an actor, is dead; how many that were.

    Removing one ends what still runs in it. Groups of other jobs are left alone, unless their whole job is dead.
    """
    job = ray.get_runtime_context().get_job_id()
    removed = 0
    for group in _groups():
        state = _STATES.Name(group.state)
        # A group that a driver created has no such actor, and counts as one whose actor is dead.
        by_actor = not ray.ActorID(group.creator_actor_id).is_nil()
        if not (by_actor and group.creator_actor_dead) or group.is_detached or state not in _LIVING:
            continue
        if group.creator_job_id.hex() == job or group.creator_job_dead:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
            removed += 1
    return removed


def _groups() -> list[Any]:
    """Every placement group with its creator, which `placement_group_table` leaves out."""
    table = cluster_state._connect_and_get_accessor().get_placement_group_table()
    return [PlacementGroupTableData.FromString(raw) for raw in table]
