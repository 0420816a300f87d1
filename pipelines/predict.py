"""Find objects in photos and videos, on any number of workers.

    python -m pipelines.predict weights=runs/train source=folder/of/photos
    python -m pipelines.predict weights=models:/parts@champion source=s3://bucket/photos out=found save=parquet,coco
    python -m pipelines.predict weights=parts.onnx source=line3.mp4 vid_stride=5 save=parquet,pictures

out gets predictions/part-*.parquet (a row a photo or frame, in the order of the source), coco.json, pictures/, and
bad.csv with the photos that cannot be read. The same command again goes on where it was stopped.
The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.cluster.predict import predict
from yolo_ray.config.deploy import PredictConfig
from yolo_ray.config.load import load
from yolo_ray.entry import run
from yolo_ray.track.counting import counted
from yolo_ray.track.pictures import annotated_jpeg
from yolo_ray.track.weights import weights_at


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, predict, return what is printed."""
    return predict(load(argv, PredictConfig), weights_at, counted, annotated_jpeg)


if __name__ == "__main__":
    sys.exit(run(main, schema=PredictConfig))
