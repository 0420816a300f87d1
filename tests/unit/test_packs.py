"""Packed data sets: the same records and pixels as the folder, and no half pack that looks whole."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from pipelines.pack import main
from tests.stores import BUCKET, flaky_proxy, s3_server, upload, use_s3
from tests.synthetic import make_dataset
from yolo_ray.augment.images import read_photo
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data import packing, storage
from yolo_ray.data.leaks import shared_photos
from yolo_ray.data.packing import PackConfig, pack
from yolo_ray.data.packs import PackIndex, load_index
from yolo_ray.data.plan import Plan
from yolo_ray.data.records import Records, load_records
from yolo_ray.data.storage import split_packed
from yolo_ray.entry import run
from yolo_ray.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set with everything that a pack must keep; its shards are closed at 30 kB."""
    monkeypatch.setattr(packing, "MEBIBYTE", 30_000)
    data = make_dataset(tmp_path / "set", train=10, val=3, size=(70, 96))
    images, labels = data.parent / "images" / "train", data.parent / "labels" / "train"
    (labels / "0003.txt").unlink()
    (labels / "0004.txt").write_text("")
    (labels / "0005.txt").write_text("0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0.2 0.2\n1 0.95 0.5 0.105 0.2\n")
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(images / "0006.jpg") as image:
        image.save(images / "0006.jpg", exif=exif)
        image.save(images / "0007.png")
    (images / "0007.jpg").unlink()
    (images / "deep::er @1+2").mkdir()
    (labels / "deep::er @1+2").mkdir()
    shutil.move(images / "0000.jpg", images / "deep::er @1+2" / "ü.jpg")
    shutil.move(labels / "0000.txt", labels / "deep::er @1+2" / "ü.txt")
    (images / "0008.jpg").write_bytes(b"")
    return data


def packed(data: Path | str, out: Path, **options: object) -> Path:
    values = {"data": str(data), "out": str(out), "shard_mb": 1, "max_bad": 0.2} | options
    lines: list[str] = []
    result = pack(PackConfig.model_validate(values), lines.append)
    assert len(lines) in (0, result["train"]["shards"] + result["val"]["shards"])
    return Path(result["data"])


def both(data: Path | str) -> tuple[Records, Records]:
    return load_records(data, "train", max_bad=0.2), load_records(data, "val", max_bad=0.2)


def assert_same(one: Records, two: Records) -> None:
    for name in ("sizes", "offsets", "boxes", "classes", "num_bytes"):
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name
        assert name == "num_bytes" or not b.flags.writeable
    for name in ("names", "digest", "counts", "bad"):
        assert getattr(one, name) == getattr(two, name), name
    for here, there in zip(one.paths, two.paths, strict=True):
        np.testing.assert_array_equal(read_photo(str(here)), read_photo(str(there)))


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -------------------------------------------------------------------------------------- what is kept


def test_records_pixels_and_digest_are_those_of_the_folder(data: Path, tmp_path: Path) -> None:
    made = packed(data, tmp_path / "pack")
    for one, two in zip(both(data), both(made), strict=True):
        assert_same(one, two)
        names = [split_packed(str(place)) for place in two.paths]
        assert [name and name[0] for name in names] == [
            Path(str(path)).relative_to(data.parent).as_posix() for path in one.paths
        ]
    train = both(made)[0]
    assert train.counts == {"duplicates": 1, "clipped": 1} and len(train.bad) == 1
    assert len({str(place).rpartition("::")[2] for place in train.paths}) > 1, "several shards"
    files = {path.name for path in (tmp_path / "pack").iterdir()}
    assert {"data.yaml", "train.index.npz", "val.index.npz", "val-00000.tar"} <= files
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_plan_of_a_pack_is_the_plan_of_the_folder(data: Path, tmp_path: Path) -> None:
    plans = [
        Plan(records, seed=5, epochs=2, batch=4, imgsz=64, augment=AugmentConfig())
        for records in (both(data)[0], both(packed(data, tmp_path / "pack"))[0])
    ]
    for step in range(plans[0].total_steps):
        one, two = (plan.at(step) for plan in plans)
        np.testing.assert_array_equal(one.images, two.images)
        np.testing.assert_array_equal(one.boxes, two.boxes)


def test_shards_are_tars_of_the_original_bytes(data: Path, tmp_path: Path) -> None:
    made = packed(data, tmp_path / "pack")
    for shard in made.parent.glob("*.tar"):
        with tarfile.open(shard) as tar:
            tar.extractall(tmp_path / "out", filter="data")
    there = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert len(there) == 12 + 11, "photos that are not bad, labels that exist"
    for path in there:
        place = path.relative_to(tmp_path / "out").as_posix()
        if path.suffix == ".txt":
            place = place.replace("images/", "labels/")
        assert path.read_bytes() == (data.parent / place).read_bytes()


def test_the_same_data_make_the_same_files(data: Path, tmp_path: Path) -> None:
    one, two = packed(data, tmp_path / "one").parent, packed(data, tmp_path / "two").parent
    for path in one.glob("*.tar"):
        assert path.read_bytes() == (two / path.name).read_bytes()


def test_a_pack_may_move_and_its_classes_be_renamed(data: Path, tmp_path: Path) -> None:
    made = packed(data, tmp_path / "pack")
    moved = Path(shutil.move(made.parent, tmp_path / "elsewhere")) / "data.yaml"
    assert_same(both(data)[0], both(moved)[0])
    for path in (data, moved):
        path.write_text(path.read_text().replace("circle", "no"))
    assert both(moved)[0].names[0] == "no"
    assert both(data)[0].digest == both(moved)[0].digest, (
        "the digest knows the names, as a folder's does"
    )
    moved.write_text(moved.read_text().replace("2: triangle", ""))
    assert "names 2 classes" in refused(lambda: both(moved))


def test_photos_outside_the_folder_and_twins(data: Path, tmp_path: Path) -> None:
    outside = tmp_path / "images" / "x.jpg"
    outside.parent.mkdir()
    shutil.copyfile(data.parent / "images" / "val" / "0001.jpg", outside)
    content = yaml.safe_load(data.read_text())
    content["train"] = [content["train"], str(outside)]
    data.write_text(yaml.safe_dump(content))
    made = packed(data, tmp_path / "pack")
    train, val = both(made)
    assert_same(both(data)[0], train)
    ((twin, origin),) = shared_photos(train, val)
    assert "images/val/0001.jpg" in twin and "../images/x.jpg" in origin
    members = [name for path in made.parent.glob("*.tar") for name in tarfile.open(path).getnames()]
    assert "outside/up/images/x.jpg" in members and not any(".." in name for name in members)


def test_the_share_of_bad_photos_is_judged_again(data: Path, tmp_path: Path) -> None:
    made = packed(data, tmp_path / "pack")
    message = refused(lambda: load_records(made, "train", max_bad=0.01))
    assert "1 of the 10 photos" in message and "0008.jpg: empty file" in message
    assert "0008.jpg" in refused(lambda: packed(data, tmp_path / "other", max_bad=0.0))
    assert not (tmp_path / "other").exists()


# -------------------------------------------------------------------------------------- run again, run cut


def test_a_second_run_finds_it_and_nothing_is_overwritten(data: Path, tmp_path: Path) -> None:
    made = packed(data, tmp_path / "pack")
    before = {path: path.stat().st_mtime_ns for path in made.parent.iterdir()}
    assert packed(data, tmp_path / "pack") == made
    assert {path: path.stat().st_mtime_ns for path in made.parent.iterdir()} == before
    label = data.parent / "labels" / "val" / "0000.txt"
    label.write_text("0 0.5 0.5 0.1 0.1\n")
    assert "is a pack of other data" in refused(lambda: packed(data, tmp_path / "pack"))
    assert "is no pack" in refused(lambda: packed(data, data.parent))
    assert "is no pack" in refused(lambda: packed(data, label))
    (tmp_path / "empty").mkdir()
    assert packed(data, tmp_path / "empty").is_file()
    assert "a pack already" in refused(lambda: packed(made, tmp_path / "again"))


def test_a_killed_run_leaves_nothing_that_looks_whole(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    script = (
        "import os, signal; from yolo_ray.data import packing; packing.MEBIBYTE = 30_000\n"
        f"config = packing.PackConfig(data={str(data)!r}, out={str(out)!r}, shard_mb=1, max_bad=0.2)\n"
        "packing.pack(config, lambda line: os.kill(os.getpid(), signal.SIGKILL))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    left = tmp_path / ".pack.packing"
    assert (left / "train-00000.tar").is_file() and not (left / "train.index.npz").exists()
    (left / "train-00099.tar").write_bytes(b"of a longer try")
    assert_same(both(data)[0], both(packed(data, out))[0])
    assert not left.exists() and not (out / "train-00099.tar").exists()


def test_a_failure_and_a_stop_leave_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(tmp_path.iterdir())
    photo = data.parent / "images" / "val" / "0001.jpg"

    def change(line: str) -> None:
        if "train-00000" in line:
            photo.write_bytes(photo.read_bytes() + b"more")

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    config = PackConfig(data=str(data), out=str(tmp_path / "pack"), shard_mb=1, max_bad=0.2)
    assert "0001.jpg changed while it was packed" in refused(lambda: pack(config, change))
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(KeyboardInterrupt):
        pack(config, stop)
    assert set(tmp_path.iterdir()) == before
    monkeypatch.setattr(
        packing, "_open_shard", lambda path: photo.unlink(missing_ok=True) or open_shard(path)
    )
    assert "put it back" in refused(lambda: pack(config, lambda line: None))
    assert set(tmp_path.iterdir()) == before


open_shard = packing._open_shard


def test_two_at_once(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".pack.packing"
    folder.mkdir()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process" in refused(lambda: packed(data, tmp_path / "pack"))
        assert (folder / "lock").exists(), "the other's folder stays"
    assert packed(data, tmp_path / "pack").is_file()


def test_a_disk_without_room_is_refused_before_anything_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 5000, 5000))
    message = refused(lambda: packed(data, tmp_path / "pack"))
    assert "GiB free" in message and "another disk" in message
    assert not (tmp_path / "pack").exists() and not (tmp_path / ".pack.packing").exists()


def test_a_disk_that_fills_up_is_a_sentence(data: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands in for the disk: the same call fails, with another number."""
    command = [sys.executable, "-m", "pipelines.pack", f"data={data}", "max_bad=0.2"]
    done = subprocess.run(
        [*command, f"out={tmp_path}/pack"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (
        last["exit"] == 2 and "cannot be written (File too large); free some space" in last["error"]
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "pack").exists() and not (tmp_path / ".pack.packing").exists()


# ---------------------------------------------------------------------------------------- the pipeline


def test_the_pipeline(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    code = run(main, [f"data={data}", f"out={tmp_path}/2024", "shard_mb=1", "max_bad=0.2"], None)
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert code == result["exit"] == 0 and result["data"] == f"{tmp_path}/2024/data.yaml"
    assert (result["train"]["photos"], result["train"]["left_out"]) == (9, 1)
    assert "train-00000.tar" in err and result["val"]["photos"] == 3
    for arguments, words in (
        ([], "pass data="),
        ([f"data={data}"], "out=FOLDER"),
        ([f"data={data}", "out=s3://b/x"], "copy the folder into the store"),
        ([f"data={data}", f"out={tmp_path}/x", "shard_mb=0"], "shard_mb"),
        ([f"data={data}", f"out={tmp_path}/x", "shard_gb=1"], "shard_mb"),
        ([f"data={tmp_path}/none.yaml", f"out={tmp_path}/x"], "none.yaml is not a file"),
        (["data=http://127.0.0.1:9/data.yaml", f"out={tmp_path}/x"], "check the network"),
        (["data=az://b/data.yaml", f"out={tmp_path}/x"], "az:// is not read"),
        ([f"data={data}", "out=/proc/pack", "max_bad=0.2"], "/proc/pack cannot be written"),
    ):
        assert run(main, arguments, None) == 2
        assert words in json.loads(capsys.readouterr().out)["error"]


# ------------------------------------------------------------------------------------------ damaged packs


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-600])


def of_another_format(path: Path) -> None:
    with np.load(path) as saved:
        arrays = dict(saved)
    meta = json.loads(arrays["meta"].tobytes()) | {"format": 99}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **arrays)


def other_boxes(path: Path) -> None:
    index = load_index(str(path))
    changed = {**index.arrays, "boxes": index.arrays["boxes"] / 2}
    fields = {**vars(index), "arrays": changed}
    path.write_bytes(PackIndex(**fields).to_bytes())


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train-00001.tar", cut, "train-00001.tar has"),
        ("train-00000.tar", Path.unlink, "train-00000.tar is not there"),
        ("train.index.npz", cut, "train.index.npz is damaged"),
        ("train.index.npz", Path.unlink, "train.index.npz is not there"),
        ("train.index.npz", lambda path: path.write_bytes(b""), "is damaged"),
        ("train.index.npz", of_another_format, "of format 99"),
        ("train.index.npz", other_boxes, "its digest differs"),
    ],
)
def test_damage_is_named(
    data: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    made = packed(data, tmp_path / "pack")
    damage(made.parent / name)
    message = refused(lambda: both(made))
    assert words in message and ("pack" in message)


def test_an_index_beside_other_entries_is_refused(data: Path, tmp_path: Path) -> None:
    made = packed(data, tmp_path / "pack")
    made.write_text(
        made.read_text().replace("train: train.index.npz", "train: [train.index.npz, more]")
    )
    assert "beside other entries" in refused(lambda: both(made))


# ------------------------------------------------------------------------------------------------- stores


def test_from_a_store_and_into_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as endpoint, flaky_proxy(endpoint) as proxy:
        use_s3(monkeypatch, proxy.address)
        source = upload(endpoint, data.parent, "loose")
        made = packed(f"{source}/data.yaml", tmp_path / "pack")
        local = packed(data, tmp_path / "local")
        for path in local.parent.glob("*.tar"):
            assert path.read_bytes() == (made.parent / path.name).read_bytes()
        target = upload(endpoint, made.parent, "packed", bucket=f"{BUCKET}-2")
        proxy.seen.clear()
        train, val = both(f"{target}/data.yaml")
        assert not [path for path in proxy.seen if ".jpg" in path]
        assert len(proxy.seen) < 20, "two indices, a look at each shard, and no photo"
        proxy.seen.clear()
        assert_same(both(local)[1], val)
        assert len(proxy.seen) == 3, "one ranged read a photo"
        assert train.digest == both(data)[0].digest and "AWS_ACCESS_KEY_ID" in train.access
