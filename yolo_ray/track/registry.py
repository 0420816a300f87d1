"""MLflow's model registry: versions made whole or not at all, the champion, and the way back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from yolo_ray.config.register import RegisterConfig
from yolo_ray.errors import UserError
from yolo_ray.gate.compare import markdown
from yolo_ray.gate.parts import Candidate, Champion, Comparison, Package
from yolo_ray.track import aliases, package
from yolo_ray.track.client import MAX_TAG, create_run, find_experiment, usable
from yolo_ray.track.gate_table import show
from yolo_ray.track.outbox import short
from yolo_ray.track.source import REMEDY, Source, find_candidate, locate, reach

if TYPE_CHECKING:
    from mlflow import MlflowClient

RESULT = "gate.result"  # tag: pending, promoted, refused, overtaken


@dataclass(frozen=True)
class Version:
    """A version under way."""

    name: str
    number: str


class ModelRegistry:
    """The registry that a registration's options name. The first call meets the server."""

    def __init__(self, config: RegisterConfig) -> None:
        """Raises UserError for a run that is none."""
        self.name = config.name
        self._experiment = config.mlflow.experiment
        self._project = Path(config.project).expanduser()
        self._source: Source = locate(config)
        self._client: MlflowClient | None = None

    @property
    def uri(self) -> str:
        """Where it is."""
        return self._source.uri

    def candidate(self, folder: Path) -> Candidate:
        """The run to register; files that are not here go into ``folder``.

        Raises:
            UserError: no such run, no weights, or a server that does not answer.
        """
        client = self._connected()
        with self._answering():
            return find_candidate(client, self._source, folder)

    def champion(self, folder: Path) -> Champion | None:
        """The version that serves now, its files in ``folder``; None before the first.

        Raises:
            UserError: it is not one that this pipeline registered, or its files are gone.
        """
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        client = self._connected()
        with self._answering():
            found = aliases.holder(client, self.name, aliases.CHAMPION)
        if found is None:
            return None
        folder = folder / str(found.version)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            here = [
                Path(download_artifacts(
                    f"{str(found.source).rstrip('/')}/artifacts/{name}", dst_path=str(folder), tracking_uri=self.uri,
                ))
                for name in (package.WEIGHTS, package.ONNX)
            ]  # fmt: skip
        except (MlflowException, OSError) as error:
            raise UserError(
                f"the champion, version {found.version} of {self.name}, cannot be read ({short(error)}): another "
                "program made it, or its files are gone; name another with to=VERSION, or register under another name="
            ) from error
        return Champion(str(found.version), *here)

    def serve(self, onnx: Path) -> tuple[int, Callable[[np.ndarray], object]]:
        """An ONNX file by the code that serves it: its side in px, and what detects in a photo uint8 [H,W,3]."""
        self._connected()
        return package.serve(onnx)

    @contextmanager
    def registered(self, made: Package, comparison: Comparison, folder: Path) -> Iterator[Version]:
        """A new version, taken back if anything fails inside, unless it is champion by then.

        Raises:
            UserError: the registry or its store of artifacts refuses.
        """
        client = self._connected()
        path = package.save_package(made, comparison, folder)
        undo: list[Callable[[], object]] = []
        try:
            version = self._register(client, made, path, undo)
            yield version
        except BaseException as error:
            left = self._take_back(undo)
            if left and not isinstance(error, KeyboardInterrupt):
                print(f"Warning: {left}", file=sys.stderr, flush=True)
            raise

    def settle(self, version: Version, comparison: Comparison) -> bool:
        """Write the comparison into a version and, if it was promoted, crown it; False: another was quicker."""
        client, champion = self._connected(), comparison.champion
        promoted = comparison.verdict.promoted
        with self._answering():
            if not promoted:
                self._describe(client, version, comparison, "refused")
                client.set_registered_model_alias(self.name, aliases.CHALLENGER, version.number)
                return True
            with aliases.lease(client, self.name):
                over = None if champion is None else champion.name
                if aliases.version_of(client, self.name) != over:
                    return False
                self._describe(client, version, comparison, "promoted")
                return aliases.crown(client, self.name, version.number, over)

    def overtaken(self, version: Version) -> None:
        """Leave a version as @challenger whose champion changed again and again while it was judged."""
        client = self._connected()
        with self._answering():
            client.set_model_version_tag(self.name, version.number, RESULT, "overtaken")
            client.set_registered_model_alias(self.name, aliases.CHALLENGER, version.number)

    def go_back(self, to: int | None) -> dict[str, Any]:
        """Give @champion to the one before, or to the version ``to``; what is printed.

        Raises:
            UserError: no such model or version, or none before.
        """
        client = self._connected()
        with self._answering():
            self._check_known(client)
            with aliases.lease(client, self.name):
                before, now = (
                    aliases.uncrown(client, self.name)
                    if to is None
                    else self._crown_by_hand(client, str(to))
                )
            if before is not None and before != now:
                stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                client.set_model_version_tag(self.name, before, "replaced", f"by {now} at {stamp}")
        return {"name": self.name, "champion": now, "before": before, "mlflow": self.uri}

    def show(self, comparison: Comparison) -> None:
        """The comparison as a table on stderr."""
        show(self.name, comparison)

    # ------------------------------------------------------------------------------------------

    def _connected(self) -> MlflowClient:
        if self._client is None:
            # A database that is not there is made for a run's folder only: elsewhere it is a wrong path.
            self._client = reach(self.uri, create=self._source.folder is not None)
            import mlflow

            # Saving a model asks the default store something, which would make a mlflow.db in the current folder.
            mlflow.set_tracking_uri(self.uri)
        return self._client

    @contextmanager
    def _answering(self) -> Iterator[None]:
        with usable(self.uri, REMEDY):
            yield

    def _register(
        self,
        client: MlflowClient,
        made: Package,
        path: Path,
        undo: list[Callable[[], object]],
    ) -> Version:
        """Run, logged model, artifacts, registered model and version; ``undo`` grows with each."""
        run_id = made.candidate.run_id or self._new_run(client, made, undo)
        with self._answering():
            experiment = client.get_run(run_id).info.experiment_id
            logged = client.create_logged_model(
                experiment, name="detector", source_run_id=run_id, model_type="detector"
            )
        undo.append(lambda: client.delete_logged_model(logged.model_id))
        with self._storing():
            _sign(path, logged.model_id, run_id, logged.artifact_location)
            client.log_model_artifacts(logged.model_id, str(path))
        with self._answering():
            client.finalize_logged_model(logged.model_id, "READY")
            self._ensure_model(client, undo)
            number = str(
                client.create_model_version(
                    self.name, logged.artifact_location, run_id, tags={RESULT: "pending"},
                    model_id=logged.model_id, description="not judged to the end",
                ).version
            )  # fmt: skip
        version = Version(self.name, number)
        undo.append(lambda: self._delete(client, version))
        return version

    def _new_run(
        self, client: MlflowClient, made: Package, undo: list[Callable[[], object]]
    ) -> str:
        """A run for weights that were trained without tracking."""
        with self._answering():
            experiment = find_experiment(client, self.uri, self._experiment, self._project)
            facts = dict(made.candidate.facts)
            run_id = create_run(client, experiment, f"register-{self.name}", {}, facts)
            client.set_terminated(run_id, "FINISHED")
        undo.append(lambda: client.delete_run(run_id))
        return run_id

    def _ensure_model(self, client: MlflowClient, undo: list[Callable[[], object]]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client.create_registered_model(self.name, description="Detectors of yolo_ray")
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return

        def remove() -> None:
            if not client.search_model_versions(f"name='{self.name}'"):  # another may have come in
                client.delete_registered_model(self.name)

        undo.append(remove)

    def _delete(self, client: MlflowClient, version: Version) -> bool:
        """True, and nothing is deleted, if it is champion: the alias may be set although the answer was lost."""
        if aliases.version_of(client, self.name) == version.number:
            return True
        client.delete_model_version(self.name, version.number)
        return False

    def _take_back(self, undo: list[Callable[[], object]]) -> str | None:
        """Undo, newest first; what could not be undone, as a sentence."""
        from mlflow.exceptions import MlflowException

        for step in reversed(undo):
            try:
                if step() is True:
                    return None
            except (MlflowException, OSError) as error:
                return (
                    f"the failed version could not be taken back ({short(error)}); what is left of it in {self.uri} "
                    f"has no alias; a version is tagged {RESULT}=pending"
                )
        return None

    @contextmanager
    def _storing(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, OSError) as error:
            raise UserError(
                f"the artifact store of mlflow.uri={self.uri} refuses the files ({short(error)}): give it room and "
                "make it writable; nothing was registered"
            ) from error

    def _describe(
        self, client: MlflowClient, version: Version, comparison: Comparison, result: str
    ) -> None:
        champion, challenger = comparison.champion, comparison.challenger
        tags: dict[str, object] = {
            "gate.champion": "none" if champion is None else champion.name,
            "gate.reasons": "; ".join(comparison.verdict.reasons) or "none",
            "gate.data": comparison.data,
            **{f"gate.{key}": f"{value:.6g}" for key, value in challenger.summary.items()},
            RESULT: result,
        }
        if challenger.latency_ms is not None:
            tags["gate.latency_ms"] = f"{challenger.latency_ms:.4g}"
        text = markdown(champion, challenger, comparison.verdict, comparison.data)
        client.update_model_version(self.name, version.number, description=text)
        for key, value in tags.items():
            client.set_model_version_tag(self.name, version.number, key, str(value)[:MAX_TAG])

    def _check_known(self, client: MlflowClient) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client.get_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UserError(
                f"name={self.name} is not registered in {self.uri}: check the name, or pass mlflow.uri="
            ) from error

    def _crown_by_hand(self, client: MlflowClient, version: str) -> tuple[str | None, str]:
        before = aliases.version_of(client, self.name)
        found = client.search_model_versions(f"name='{self.name}'")
        tags = {str(one.version): one.tags for one in found}
        if version not in tags:
            there = ", ".join(sorted(tags, key=int)) or "none"
            raise UserError(f"to={version}: {self.name} has no such version (there are: {there})")
        if tags[version].get(RESULT) == "pending":
            raise UserError(
                f"to={version} was never judged to its end: delete that version and register its run again"
            )
        if before != version:
            aliases.crown(client, self.name, version, before)
        return before, version


def _sign(path: Path, model_id: str, run_id: str, location: str) -> None:
    """Write into MLmodel which logged model it is."""
    from mlflow.models import Model

    model: Any = Model.load(str(path))
    model.model_id = model.model_uuid = model_id
    model.run_id, model.artifact_path = run_id, location
    model.save(str(path / "MLmodel"))
