"""Photos and labels in stores and on servers: the same records and pixels, and one sentence for what goes wrong."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.stores import (
    BUCKET,
    KEYS,
    Flaky,
    flaky_proxy,
    free_port,
    s3_server,
    upload,
    use_s3,
    web_server,
)
from tests.synthetic import make_dataset
from yolo_ray.augment.images import PhotoError, photo_size, read_photo
from yolo_ray.cluster.folder import absolute_paths
from yolo_ray.cluster.sentences import leak_sentence, left_out_sentence
from yolo_ray.config.address import checked_place, join
from yolo_ray.config.load import load
from yolo_ray.data import storage
from yolo_ray.data.formats import label_path, load_data_yaml
from yolo_ray.data.leaks import shared_photos
from yolo_ray.data.records import Records, load_records
from yolo_ray.data.storage import StorageError, access_of, find, read_bytes, size_of, use_access
from yolo_ray.errors import UserError

Maker = Callable[..., Path]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.yaml of a local set: a twin in both splits, background, a bad photo, a deeper folder."""
    data = make_dataset(tmp_path_factory.mktemp("set") / "data", train=9, val=4, size=(70, 96))
    images, labels = data.parent / "images", data.parent / "labels"
    shutil.copyfile(images / "train" / "0001.jpg", images / "val" / "0002.jpg")
    (labels / "train" / "0003.txt").unlink()
    (images / "train" / "0004.jpg").write_bytes(b"\xff\xd8 no photo")
    for kind, name in ((images, "a b.jpg"), (labels, "a b.txt")):
        (kind / "train" / "deep").mkdir()
        shutil.copyfile(kind / "train" / f"0000{name[3:]}", kind / "train" / "deep" / name)
    (images / "train" / ".hidden.jpg").write_bytes(b"x")
    return data


@pytest.fixture(scope="module")
def server(local: Path) -> Iterator[str]:
    with s3_server() as endpoint:
        upload(endpoint, local.parent, "sets/one")
        yield endpoint


@pytest.fixture
def remote(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the same set in the store, whose keys the environment has."""
    use_s3(monkeypatch, server)
    return f"s3://{BUCKET}/sets/one"


@pytest.fixture
def flaky(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    with flaky_proxy(server) as proxy:
        use_s3(monkeypatch, proxy.address)
        monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
        yield proxy


def both(data: Path | str, max_bad: float = 0.2) -> tuple[Records, Records]:
    return load_records(data, "train", max_bad=max_bad), load_records(data, "val", max_bad=max_bad)


def assert_same(one: Records, two: Records) -> None:
    """Everything but the places, and every pixel."""
    for name in ("sizes", "offsets", "boxes", "classes", "num_bytes"):
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name
    assert (one.names, one.digest, dict(one.counts)) == (two.names, two.digest, dict(two.counts))
    assert [(bad.line, bad.reason) for bad in one.bad] == [(b.line, b.reason) for b in two.bad]
    assert pixels(one) == pixels(two)


def pixels(records: Records) -> list[str]:
    return [hashlib.sha256(read_photo(str(path)).tobytes()).hexdigest() for path in records.paths]


def sentence(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and KEYS["AWS_SECRET_ACCESS_KEY"] not in message
    return message


# ------------------------------------------------------------------------------------------------ S3


def test_records_pixels_and_digest_are_those_of_the_local_folder(local: Path, remote: str) -> None:
    for one, two in zip(both(local), both(f"{remote}/data.yaml"), strict=True):
        assert_same(one, two)
        here = [Path(path).relative_to(local.parent).as_posix() for path in one.paths]
        assert [str(path) for path in two.paths] == [f"{remote}/{name}" for name in here]
        assert one.access == {} and set(KEYS) <= set(two.access)


def test_a_local_data_yaml_points_into_the_store(local: Path, remote: str, tmp_path: Path) -> None:
    data = tmp_path / "data.yaml"
    data.write_text(local.read_text().replace("path: .", f"path: {remote}"))
    assert_same(both(local)[0], both(data)[0])
    lines = [f"{remote}/images/val/{number:04d}.jpg" for number in range(4)]
    (tmp_path / "val.txt").write_text("\n".join(lines))
    names = local.read_text()[local.read_text().index("names:") :]
    data.write_text(f"train: {remote}/images/train/*.jpg\nval: val.txt\n{names}")
    train, val = both(data)
    assert list(val.paths) == lines and len(train) == 8, (
        "the pattern does not reach the deeper folder"
    )
    data.write_text(
        f"train: [{lines[0]}, {remote}/images/train/deep]\nval: {remote}/images/val\n{names}"
    )
    assert [path.rpartition("/")[2] for path in both(data)[0].paths] == ["a b.jpg", "0000.jpg"]


def test_twins_and_bad_photos_are_named_by_address(remote: str, tmp_path: Path) -> None:
    train, val = both(f"{remote}/data.yaml")
    twins = (f"{remote}/images/val/0002.jpg", f"{remote}/images/train/0001.jpg")
    assert shared_photos(train, val) == [twins]
    assert leak_sentence(train, val).startswith("1 of the 4") and twins[0] in leak_sentence(
        train, val
    )
    left_out_sentence(tmp_path, train, val)
    text = (tmp_path / "left_out.txt").read_text()
    assert text == f"{remote}/images/train/0004.jpg: truncated JPEG (no end marker)\n"
    message = sentence(lambda: both(f"{remote}/data.yaml", max_bad=0.0))
    assert f"{remote}/images/train/0004.jpg" in message


def test_ranges_and_sizes(local: Path, remote: str) -> None:
    path = local.parent / "images" / "train" / "0000.jpg"
    data = path.read_bytes()
    for place in (str(path), f"{remote}/images/train/0000.jpg"):
        assert read_bytes(place) == data and size_of(place) == len(data)
        assert read_bytes(place, 5, 25) == data[5:25] and read_bytes(place, 5, 5) == b""
        assert read_bytes(place, -7) == data[-7:] and read_bytes(place, 9) == data[9:]
        packed = storage.packed_place("x::y@1+2/a.jpg", 10, 30, place)
        assert storage.split_packed(packed) == ("x::y@1+2/a.jpg", 10, 30, place)
        assert read_bytes(packed) == data[10:40] and read_bytes(packed, -4) == data[36:40]
        long = storage.packed_place("a.jpg", 10, len(data), place)
        assert "is not whole" in sentence(lambda long=long: read_bytes(long))


def test_listing_is_asked_once_and_a_read_is_one_request(flaky: Flaky) -> None:
    records = load_records(f"s3://{BUCKET}/sets/one/data.yaml", "train", max_bad=0.2)
    lists = [path for path in flaky.seen if "list-type" in path]
    assert len(lists) <= 2, "the folder, and whether it is a file"
    flaky.seen.clear()
    read_photo(str(records.paths[0]))
    assert len(flaky.seen) == 1


@pytest.mark.parametrize("status", [503, 500, 429, 0])
def test_a_store_that_stumbles_is_asked_again(flaky: Flaky, local: Path, status: int) -> None:
    flaky.status, flaky.failures = status, 3
    assert_same(both(local)[1], both(f"s3://{BUCKET}/sets/one/data.yaml")[1])
    assert flaky.failures == 0


def test_a_store_that_stays_down_ends_the_check_at_once(
    flaky: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolo_ray.data.judging.NETWORK_READERS", 2)
    flaky.failures, flaky.only = 10**6, "/labels/"
    message = sentence(lambda: both(f"s3://{BUCKET}/sets/one/data.yaml"))
    assert f"s3://{BUCKET}/sets/one/labels/train/" in message and "in 5 attempts" in message
    assert flaky.address in message and "check the network" in message
    tried = {path for path in flaky.seen if "/labels/" in path}
    assert len(tried) <= 4, "not every photo waits for a store that is down"


def test_a_photo_that_cannot_be_reached_is_not_called_bad(flaky: Flaky) -> None:
    """Else a stumbling network would silently train on less."""
    flaky.failures, flaky.only = 10**6, "/images/train/0002.jpg"
    message = sentence(lambda: both(f"s3://{BUCKET}/sets/one/data.yaml", max_bad=1.0))
    assert "images/train/0002.jpg could not be read" in message


# ------------------------------------------------------------------------------------ users' mistakes


def test_what_is_not_there(remote: str, tmp_path: Path) -> None:
    assert "is not there" in sentence(lambda: both(f"{remote}/date.yaml"))
    assert "is not there" in sentence(lambda: both("s3://no-such-bucket-of-ours/data.yaml"))
    data = tmp_path / "data.yaml"
    for entry, words in (
        ("images/nowhere", "has no photos in images/nowhere"),
        ("images/none.txt", "images/none.txt is not there"),
        ("s3://no-such-bucket-of-ours/x", "has no photos in s3://no-such-bucket-of-ours/x"),
    ):
        data.write_text(f"path: {remote}\ntrain: {entry}\nval: images/val\nnames: [a, b, c]\n")
        assert words in sentence(lambda: both(data))
    with pytest.raises(PhotoError, match="no such file"):
        read_photo(f"{remote}/images/train/none.jpg")


def test_no_credentials(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    message = sentence(lambda: both(f"{remote}/data.yaml"))
    assert "no usable credentials" in message and "AWS_ACCESS_KEY_ID" in message
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "AWS_PROFILE" in sentence(lambda: both(f"{remote}/data.yaml"))


@pytest.mark.parametrize("status", [403, 401])
def test_access_refused_is_not_tried_again(flaky: Flaky, status: int) -> None:
    flaky.status, flaky.failures = status, 10**6
    message = sentence(lambda: both(f"s3://{BUCKET}/sets/one/data.yaml"))
    assert "data.yaml" in message and "AWS_ACCESS_KEY_ID" in message
    assert len(flaky.seen) <= 2


def test_what_gcsfs_says_is_understood() -> None:
    """Its package is not among the tests'; these are its errors, word for word."""

    def work(error: Exception, calls: list[int]) -> None:
        calls.append(1)
        raise error

    for error, words in (
        (OSError("Forbidden: https://storage.googleapis.com/b/o denied"), "access is refused"),
        (ValueError("Bad Request: https://storage.googleapis.com/b/o"), "check the address"),
        (OSError("Cannot connect to host storage.googleapis.com:443"), "in 6 attempts"),
    ):
        calls: list[int] = []
        message = sentence(
            lambda e=error, c=calls: storage._patiently("gs://b/o", lambda: work(e, c))
        )
        assert words in message and "gs://b/o" in message and calls == [1]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    begin = time.monotonic()
    message = sentence(lambda: both(f"s3://{BUCKET}/sets/one/data.yaml"))
    assert "check the network" in message and os.environ["AWS_ENDPOINT_URL"] in message
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("scheme", "module", "extra"), [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")]
)
def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, scheme: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for name in ("gs", "gcs", "s3", "s3a"):  # the classes that fsspec found before
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, name, raising=False)
    storage._filesystem.cache_clear()
    message = sentence(lambda: both(f"{scheme}://bucket/data.yaml"))
    assert f"pip install 'yolo_ray[{extra}]'" in message and "every node" in message


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("az://container/data.yaml", "az:// is not read"),
        ("S3://bucket/data.yaml", "S3:// is not read"),
        ("https://me:hunter22@host/data.yaml", "credentials would be written to logs"),
        ("https://host/data.yaml?X-Amz-Signature=hunter22", "may hold a secret"),
        ("file://data.yaml", "file:///PATH"),
    ],
)
def test_addresses_that_are_refused(place: str, words: str, tmp_path: Path) -> None:
    message = sentence(lambda: load_data_yaml(place))
    assert words in message and "hunter22" not in message
    assert words in sentence(lambda: load([f"data={place}"]))
    data = tmp_path / "data.yaml"
    data.write_text(f"train: '{place}'\nval: x\nnames: [a]\n")
    assert words in sentence(lambda: load_records(data, "train", max_bad=0.0))


# ----------------------------------------------------------------------------------- http and file://


def test_a_web_server_takes_lists_and_has_no_listing(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(local.parent, tmp_path / "www")
    photos = sorted((root / "images" / "train").glob("00*.jpg"))
    (root / "train.txt").write_text("".join(f"images/train/{path.name}\n" for path in photos))
    with web_server(root) as address:
        text = local.read_text().replace("val: images/val", f"val: {address}/images/train/0001.jpg")
        (root / "data.yaml").write_text(text)
        message = sentence(lambda: load_records(f"{address}/data.yaml", "train", max_bad=0.2))
        assert "a web server lists no folders" in message and ".txt" in message
        (root / "data.yaml").write_text(text.replace("train: images/train", "train: train.txt"))
        train, val = both(f"{address}/data.yaml")
        here = load_records(root / "data.yaml", "train", max_bad=0.2)
        assert_same(here, train)
        assert shared_photos(train, val) == [(str(val.paths[0]), str(train.paths[1]))]
        space = f"{address}/images/train/deep/a b.jpg"
        assert read_bytes(space) == (root / "images" / "train" / "deep" / "a b.jpg").read_bytes()
        assert read_bytes(space, 3, 9) == read_bytes(space)[3:9], "http.server knows no ranges"
        monkeypatch.setattr(storage, "MOST_WASTED_BYTES", 100)
        assert "ignores ranges" in sentence(lambda: read_bytes(space, 3, 9))
        with pytest.raises(FileNotFoundError):
            read_bytes(f"{address}/none.jpg")


def test_a_flaky_web_server(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    with web_server(local.parent) as address, flaky_proxy(address) as proxy:
        for proxy.status, proxy.failures in ((503, 4), (0, 2)):
            assert load_data_yaml(f"{proxy.address}/data.yaml").names == load_data_yaml(local).names
        proxy.status, proxy.failures = 403, 99
        assert "access is refused" in sentence(lambda: load_data_yaml(f"{proxy.address}/data.yaml"))
        proxy.status, proxy.failures = 410, 99
        assert "check the address" in sentence(lambda: load_data_yaml(f"{proxy.address}/data.yaml"))
        assert proxy.failures == 98


def test_file_addresses_are_paths(local: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.yaml"
    data.write_text(local.read_text().replace("path: .", f"path: file://{local.parent}"))
    for one, two in zip(both(local), both(f"file://{data}"), strict=True):
        assert_same(one, two)
        assert list(one.paths) == list(two.paths)


# ----------------------------------------------------------------------------------- places and secrets


def test_places() -> None:
    assert join("s3://b/sets/one", "../two/./images") == "s3://b/sets/two/images"
    assert join("s3://b", "../../x") == "s3://b/x" and join("s3://b/x", "..") == "s3://b"
    assert join("s3://b/x", "gs://c/y/") == "gs://c/y"
    assert label_path("s3://images/train/0.jpg") == "s3://images/train/0.txt", "a bucket stays"
    assert label_path("s3://images/a/images/b/0.jpg") == "s3://images/a/labels/b/0.txt"
    assert label_path("https://h/images/0.png") == "https://h/labels/0.txt"
    assert checked_place("/a/images/0.jpg") == "/a/images/0.jpg"


def test_an_address_stays_one_in_the_options(tmp_path: Path) -> None:
    for place in ("s3://bucket/sets/data.yaml", "https://host/data.yaml", "gs://b/d.yaml"):
        config = load([f"data={place}", f"project={tmp_path}"])
        assert config.data.path == place and absolute_paths(config).data.path == place
    config = load([f"data=file://{tmp_path}/data.yaml"])
    assert config.data.path == f"{tmp_path}/data.yaml"
    config = config.override({"data": f"file://{tmp_path}/other.yaml"})
    assert absolute_paths(config).data.path == f"{tmp_path}/other.yaml"


def test_only_named_variables_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "FSSPEC_", "GOOGLE_")):
            monkeypatch.delenv(name)
    there = {
        "AWS_SECRET_ACCESS_KEY": "secret-1", "AWS_ENDPOINT_URL": "http://x", "FSSPEC_S3_ANON": "true",
        "GOOGLE_APPLICATION_CREDENTIALS": "/k.json", "FSSPEC_CONFIG_DIR": "/c",
    }  # fmt: skip
    for name, value in (there | {"AWS_LAMBDA_THING": "x", "MY_PASSWORD": "y"}).items():
        monkeypatch.setenv(name, value)
    s3 = access_of(["s3://b/x", "/local/y", storage.packed_place("a", 0, 1, "s3://b/t.tar")])
    assert s3 == {name: there[name] for name in there if not name.startswith("GOOGLE")}
    assert set(access_of(["gs://b/x"])) == {"GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_CONFIG_DIR"}
    assert access_of(["/local/x.jpg", storage.packed_place("a", 0, 1, "/t.tar")]) == {}
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    use_access(s3)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "secret-1"


def test_records_carry_their_access_and_never_show_it(remote: str) -> None:
    records = load_records(f"{remote}/data.yaml", "val", max_bad=0.2)
    assert pickle.loads(pickle.dumps(records)).access == records.access
    assert KEYS["AWS_SECRET_ACCESS_KEY"] in records.access.values()
    for text in (repr(records), str(records), records.digest):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in text


def test_a_task_reads_with_the_access_of_the_records(
    local: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from yolo_ray.augment.images import resize_photo
    from yolo_ray.data.reading import Reading, resized_photo

    records = load_records(f"{remote}/data.yaml", "val", max_bad=0.2)
    for name in records.access:  # a node that was started without them
        monkeypatch.delenv(name)
    here = read_photo(local.parent / "images" / "val" / "0001.jpg")
    there = resized_photo(records, 1, Reading(imgsz=64))
    np.testing.assert_array_equal(there, resize_photo(here, 64))


def test_errors_name_the_variable_instead_of_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-" * 60)
    text = storage._reason(OSError("refused " + "x" * 150 + "token-" * 60))
    assert "$AWS_SESSION_TOKEN" in text and "token-token" not in text


def test_a_new_environment_makes_a_new_connection(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task takes its access over after fsspec was imported, perhaps after other stores were read."""
    assert find(f"{remote}/images/val")
    access = access_of([remote])
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.001)
    with pytest.raises(StorageError):
        find(f"{remote}/images/val")
    use_access(access)
    assert len(find(f"{remote}/images/val")) == 4


def test_sizes_of_bytes_and_of_files_agree(local: Path) -> None:
    from yolo_ray.augment.images import size_in

    for path in sorted((local.parent / "images" / "val").iterdir()):
        assert size_in(path, path.read_bytes()) == photo_size(path)
