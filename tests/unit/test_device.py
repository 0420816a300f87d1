"""Composition and colour on the device against slow references, exact cases, and no host reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from yolo_ray.augment.device import Scene, augment, compose, hsv, mix
from yolo_ray.data.batch import TENSORS, Batch
from yolo_ray.data.geometry import build_affine, lay_out, resize_output

SIDE = 32


def make_scene(motion: list[list[float]], mosaic: list[bool], flips: bool = False) -> list[Tensor]:
    """The arguments of compose for noise photos of several shapes, eight photos a row."""
    rng = np.random.default_rng(0)
    rows = len(motion)
    extents = np.stack(
        [rng.integers(16, SIDE + 1, (rows, 4)), rng.integers(16, SIDE + 1, (rows, 4))], -1
    ).astype(float)
    centre = rng.integers(SIDE // 2, SIDE * 3 // 2, (rows, 2)).astype(float)
    layout = lay_out(extents, centre, np.array(mosaic), SIDE)
    affine = build_affine(np.array(motion), np.full((rows, 2), flips), layout.canvas, SIDE)
    photos = torch.from_numpy(rng.integers(0, 256, (rows * 8, 3, SIDE, SIDE), dtype=np.uint8))
    picks = torch.from_numpy(rng.permutation(rows * 8)[: rows * 4].reshape(rows, 4))
    parts = (layout.origins, layout.extents, layout.centre, layout.canvas, affine.inverse)
    return [photos, picks, *(torch.from_numpy(part.astype(np.float32)) for part in parts)]


def in_pairs(scene: list[Tensor]) -> list[Tensor]:
    """The tensors of a batch that mixes rows 0 and 1, 2 and 3, ... of the scene."""
    photos, picks, *parts = scene
    half = len(picks) // 2
    return [
        photos,
        picks.view(half, 8),
        *(part.reshape(half, -1, *part.shape[2:]) for part in parts),
    ]


def batch_of(scene: list[Tensor], gains: Tensor, weights: Tensor, side: int = SIDE) -> Batch:
    """A batch without boxes."""
    none = torch.zeros(16, dtype=torch.int64)
    tensors = [*scene, gains, weights, torch.zeros(16, 4), none, none, none.bool()]
    return Batch(**dict(zip(TENSORS, tensors, strict=True)), side=side)


def paste(scene: list[Tensor], row: int) -> np.ndarray:
    """The canvas of one row, float64 [K+2,K+2,3] with one gray pixel around it."""
    photos, picks, origins, extents, centre, canvas, _ = (part.numpy() for part in scene)
    size = int(canvas[row])
    board = np.full((size + 2, size + 2, 3), 114.0)
    for y in range(size):
        for x in range(size):
            quadrant = 2 * int(y >= centre[row, 1]) + int(x >= centre[row, 0])
            column, line = np.array([x, y]) - origins[row, quadrant].astype(int)
            width, height = extents[row, quadrant]
            if 0 <= column < width and 0 <= line < height:
                board[y + 1, x + 1] = photos[picks[row, quadrant], :, line, column]
    return board


def warp(board: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Bilinear, in float64; [3,S,S]."""
    last = len(board) - 2
    ys, xs = np.mgrid[:SIDE, :SIDE]
    x, y = np.einsum("ij,jhw->ihw", inverse, np.stack([xs, ys, np.ones_like(xs)]))
    low_x, low_y = np.floor(x).astype(int), np.floor(y).astype(int)
    total = np.zeros((SIDE, SIDE, 3))
    for j in (0, 1):
        for i in (0, 1):
            weight = np.abs(1 - i - (x - low_x)) * np.abs(1 - j - (y - low_y))
            at_x, at_y = np.clip(low_x + i, -1, last), np.clip(low_y + j, -1, last)
            total += weight[..., None] * board[at_y + 1, at_x + 1]
    return total.transpose(2, 0, 1)


def test_compose_equals_paste_then_warp():
    motion = [
        [0, 1.0, 0, 0, 0.5, 0.5],
        [30, 0.6, 4, -6, 0.45, 0.6],
        [-10, 1.5, 0, 10, 0.5, 0.4],
        [170, 0.3, 2, 3, 0.9, 0.1],
    ]
    scene = make_scene(motion, [True, True, False, False], flips=True)
    found = compose(Scene(*scene), SIDE).numpy()
    assert found.dtype == np.float32 and (found == np.round(found)).all()
    for row in range(len(motion)):
        wanted = warp(paste(scene, row), scene[-1][row].numpy().astype(np.float64))
        # positions are rounded to 1/512 px at most: one level on noise, and half one for rounding
        assert np.abs(found[row] - wanted).max() <= 1.5
    assert (found[3] == 114).any()


def test_whole_moves_and_flips_are_exact():
    still = [[0, 1.0, 0, 0, 0.5, 0.5]]
    scene = make_scene(still, [False])
    found = compose(Scene(*scene), SIDE)
    board = paste(scene, 0)[1:-1, 1:-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(found[0].numpy(), board)
    turned = compose(Scene(*make_scene(still, [False], flips=True)), SIDE)
    assert torch.equal(turned, found.flip(2, 3))
    quarter = make_scene([[90, 1.0, 0, 0, 0.5, 0.5]], [False])
    quarter[-1] = quarter[-1] + torch.tensor([[0.0, 0, -1], [0, 0, 0]])  # pixel centres, not edges
    assert torch.equal(compose(Scene(*quarter), SIDE), found.rot90(1, (2, 3)))


@pytest.mark.parametrize("side", [SIDE // 2, SIDE * 3 // 4, SIDE * 2])
def test_another_side_is_the_same_image_resized(side):
    """Against torch's bilinear resizing of the plain image, flips included, where edges are soft."""
    motion = [[0, 1.0, 0, 0, 0.5, 0.5], [20, 1.3, 0, 0, 0.5, 0.5]]
    scene = make_scene(motion, [False, False], flips=True)
    photos = scene[0].float()
    for _ in range(3):  # noise has no resized version: two samplings of it agree nowhere
        photos = torch.nn.functional.avg_pool2d(photos, 5, 1, 2, count_include_pad=False)
    scene[0] = photos.round().to(torch.uint8)
    scene[3] = torch.full_like(scene[3], SIDE)  # photos without gray bars
    scene[2] = torch.zeros_like(scene[2])
    plain = compose(Scene(*scene), SIDE)
    inverse, boxes = resize_output(scene[-1].double().numpy(), np.ones((1, 4), "f4"), SIDE, side)
    found = compose(Scene(*[*scene[:-1], torch.from_numpy(inverse).float()]), side)
    wanted = torch.nn.functional.interpolate(plain, (side, side), mode="bilinear")
    inside = slice(2, -2)  # at its edge ours sees what lies beyond, the plain image ends
    apart = (found - wanted)[:, :, inside, inside].abs()
    assert found.shape == (2, 3, side, side) and found.std() > 3
    assert apart.max() <= 2 and apart.mean() <= 1
    np.testing.assert_allclose(boxes, side / SIDE)


def test_a_batch_with_mixup_is_two_images_blended():
    motion = [[7.0, 0.8, 1, 2, 0.5, 0.5], [0, 1, 0, 0, 0.5, 0.5]] * 2
    scene = make_scene(motion, [True, False, False, True])
    gains, weights = torch.tensor([[0.0, 1, 1], [0.1, 1.2, 0.8]]), torch.tensor([4096.0, 1234])
    found = augment(batch_of(in_pairs(scene), gains, weights))
    own, second = compose(Scene(*scene), SIDE).view(2, 2, 3, SIDE, SIDE).unbind(1)
    assert torch.equal(found[0], own[0])
    blend = (own[1].double() * 1234 + second[1].double() * (4096 - 1234)) / 4096
    assert torch.equal(found[1], hsv(blend.floor().float()[None], gains[1:])[0])
    extremes = torch.tensor([255.0, 255, 0, 255]).view(4, 1, 1, 1).expand(4, 3, 1, 1)
    assert mix(extremes, torch.tensor([1.0, 1])).view(2, 3)[:, 0].tolist() == [255, 254]


def test_wild_matrices_give_gray():
    scene = make_scene([[0, 1.0, 0, 0, 0.5, 0.5]] * 2, [True, True])
    scene[-1] = torch.tensor([[[1e30, 0, 1e30], [0, 1, 0]], [[1, 0, -1e9], [0, 1, 1e9]]])
    assert (compose(Scene(*scene), SIDE) == 114).all()


def test_a_row_does_not_depend_on_its_neighbours():
    scene = make_scene([[7.0, 0.8, 1, 2, 0.5, 0.5]] * 3, [True, False, True])
    gains = torch.tensor([[0.01, 1.3, 0.8], [0, 1, 1], [-0.3, 0.5, 1.2]])
    whole = hsv(compose(Scene(*scene), SIDE), gains)
    for row in range(3):
        alone = [scene[0], *(part[row : row + 1] for part in scene[1:])]
        assert torch.equal(hsv(compose(Scene(*alone), SIDE), gains[row : row + 1])[0], whole[row])


def test_known_colours():
    red = torch.tensor([255.0, 0, 0])
    images = torch.stack([red, red, red, torch.full((3,), 200.0), red]).view(5, 3, 1, 1)
    gains = torch.tensor([[1 / 3, 1, 1], [-1 / 3, 1, 1], [0, 0.5, 1], [0.2, 1.5, 0.5], [0, 1, 1.9]])
    found = hsv(images, gains).view(5, 3).tolist()
    assert found == [[0, 255, 0], [0, 0, 255], [255, 128, 128], [100, 100, 100], [255, 0, 0]]


def test_unit_gains_leave_every_colour_alone():
    images = torch.randint(0, 256, (2, 3, 16, 16)).float()
    assert torch.equal(hsv(images, torch.tensor([[0.0, 1, 1], [0, 1, 1]])), images)


def test_nothing_is_read_on_the_host():
    """Tensors without data go through: no value decides a shape or a branch."""
    scene = make_scene([[0, 1.0, 0, 0, 0.5, 0.5]] * 2, [True, False])
    for side in (SIDE, SIDE // 2, SIDE * 3 // 2):
        batch = batch_of(scene, torch.ones(2, 3), torch.ones(2), side)
        assert augment(batch.to("meta")).shape == (2, 3, side, side)
    mixed = batch_of(in_pairs(scene), torch.ones(1, 3), torch.ones(1))
    assert augment(mixed.to("meta")).shape == (1, 3, SIDE, SIDE)
