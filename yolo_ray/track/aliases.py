"""Who is champion: MLflow's aliases, and the tag of the registered model that remembers who was.

MLflow has no compare-and-swap, so a champion is changed under a lease: a tag that is written, given time to be
overwritten by somebody else, and read back.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from yolo_ray.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER = "champion", "challenger"
HISTORY = "champion.history"  # versions that were champion, oldest first, the present one last
LEASE = "champion.lease"
KEPT = 200  # versions in the history
SETTLE_S, STALE_S, WAIT_S, POLL_S = 0.3, 30.0, 60.0, 0.2


def holder(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version that an alias names; None without the model or the alias."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def version_of(client: MlflowClient, name: str, alias: str = CHAMPION) -> str | None:
    """The number of the version that an alias names; MLflow counts in int or str by store."""
    found = holder(client, name, alias)
    return None if found is None else str(found.version)


def crown(client: MlflowClient, name: str, version: str, over: str | None) -> bool:
    """Make a version champion if ``over`` still is; False, and nothing is changed, if another is.

    Under ``lease``. The history goes first: cut off in between, it names one that never was, which ``before`` does
    not mind.
    """
    if version_of(client, name) != over:
        return False
    past = history(client, name, over)
    client.set_registered_model_tag(name, HISTORY, " ".join([*past, version][-KEPT:]))
    client.set_registered_model_alias(name, CHAMPION, version)
    if version_of(client, name, CHALLENGER) == version:
        client.delete_registered_model_alias(name, CHALLENGER)
    return True


def history(client: MlflowClient, name: str, present: str | None) -> list[str]:
    """The champions up to the present one, oldest first."""
    past = client.get_registered_model(name).tags.get(HISTORY, "").split()
    if present is None:
        return []
    if present not in past:  # somebody set the alias by hand
        return [*past, present]
    last = len(past) - past[::-1].index(present)
    return past[:last]


def uncrown(client: MlflowClient, name: str) -> tuple[str, str]:
    """Give @champion back to the one before; the version that was and the one that is. Under ``lease``.

    Raises:
        UserError: there is no champion, or none before it.
    """
    present = version_of(client, name)
    if present is None:
        raise UserError(
            f"name={name} has no @champion: register a run first, or pass to=VERSION to name one"
        )
    past = history(client, name, present)[:-1]
    living = _versions(client, name)
    while past and (past[-1] not in living or past[-1] == present):
        past.pop()
    if not past:
        raise UserError(
            f"name={name}: version {present} is its first champion, there is none before it: pass to=VERSION"
        )
    client.set_registered_model_alias(name, CHAMPION, past[-1])
    client.set_registered_model_tag(name, HISTORY, " ".join(past))
    return present, past[-1]


def _versions(client: MlflowClient, name: str) -> set[str]:
    found = client.search_model_versions(f"name='{name}'")
    return {str(version.version) for version in found}


@contextmanager
def lease(client: MlflowClient, name: str) -> Iterator[None]:
    """Alone with the champion of a model.

    Raises:
        UserError: somebody else holds on to it for a minute.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + WAIT_S
    while not _taken(client, name, own):
        if time.monotonic() > end:
            raise UserError(
                f"another registration of name={name} is changing its champion for {WAIT_S:.0f} s: wait for it and "
                "run again"
            )
        time.sleep(POLL_S)
    try:
        yield
    finally:
        if _lease_of(client, name)[0] == own:
            client.delete_registered_model_tag(name, LEASE)


def _taken(client: MlflowClient, name: str, own: str) -> bool:
    other, since = _lease_of(client, name)
    if other and time.time() - since < STALE_S:
        return False
    client.set_registered_model_tag(name, LEASE, f"{own} {time.time():.3f}")
    time.sleep(
        SETTLE_S
    )  # whoever saw no lease a moment ago has written by now; the last one has it
    return _lease_of(client, name)[0] == own


def _lease_of(client: MlflowClient, name: str) -> tuple[str, float]:
    text = client.get_registered_model(name).tags.get(LEASE, "")
    token, _, since = text.partition(" ")
    try:
        return token, float(since)
    except ValueError:
        return "", 0.0
