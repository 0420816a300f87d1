"""What a model costs whoever runs it: its size, and the time of one photo."""

from __future__ import annotations

import statistics
import time

import torch

from yolo_ray.model.build import Detector

WARM_UP, TIMED = 3, 15


@torch.inference_mode()
def measure_costs(detector: Detector, imgsz: int, device: torch.device) -> dict[str, float]:
    """``parameters_m`` in millions, and ``latency_ms``: the median of 15 forward passes of one photo, float32, eager.

    The detector is left in the mode it was in. Runs beside this one take their share of the time: it compares
    models within a study and is no benchmark.
    """
    training = detector.training
    detector.eval()
    photo = torch.zeros(1, 3, imgsz, imgsz, device=device)
    times = []
    try:
        for number in range(WARM_UP + TIMED):
            begin = time.perf_counter()
            detector(photo)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= WARM_UP:
                times.append((time.perf_counter() - begin) * 1e3)
    finally:
        detector.train(training)
    count = sum(parameter.numel() for parameter in detector.parameters())
    return {"parameters_m": count / 1e6, "latency_ms": statistics.median(times)}
