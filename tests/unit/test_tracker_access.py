"""What of the environment travels to the process that logs."""

from __future__ import annotations

from yolo_ray.track.client import access_of


def test_access_to_server_and_its_store_travels_and_nothing_else() -> None:
    travels = {
        "MLFLOW_TRACKING_TOKEN": "t",
        "MLFLOW_S3_ENDPOINT_URL": "http://store",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AZURE_STORAGE_ACCESS_KEY": "a",
    }
    stays = {"MLFLOW_TRACKING_URI": "http://x", "AWS_PROFILE": "mine", "HOME": "/root", "PATH": ""}
    assert access_of(travels | stays) == travels
