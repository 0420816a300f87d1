"""Synchronised batch norm: uneven parts on several workers equal BatchNorm2d on the whole batch."""

import copy
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from yolo_ray.model.norm import (
    SyncedBatchNorm2d,
    desynchronise,
    freeze_statistics,
    synchronise,
)

PARTS = (3, 1)


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.SiLU(),
        nn.Conv2d(5, 4, 3, bias=False),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.03),
    )
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 2)
                module.bias.uniform_(-1, 1)
    return net


def make_batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(PARTS), 3, 8, 8, generator=generator) + 2
    wanted = torch.randn(sum(PARTS), 4, 4, 4, generator=generator)
    return images, wanted


def train(net, images, wanted, steps=2):
    """Outputs, gradients (of weights and images) and buffers after forward and backward passes."""
    images = images.clone().requires_grad_()
    output, grads = images, []
    for _ in range(steps):
        output = net(images)
        loss = ((output - wanted) ** 2).sum()
        grads = list(torch.autograd.grad(loss, [images, *net.parameters()]))
    names = [name for name, _ in net.named_parameters()]
    named = dict(zip(names, grads[1:], strict=True))
    return output.detach(), grads[0], named, dict(net.named_buffers())


def gap(one, other):
    """Largest difference against the largest value."""
    return ((one - other).abs().max() / other.abs().max()).item()


def work(rank, folder):
    """One worker: its rows, its outputs written to a file."""
    torch.set_num_threads(1)
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(PARTS))
    net = make_net()
    assert synchronise(net, dist.all_reduce) == 2
    rows = slice(sum(PARTS[:rank]), sum(PARTS[: rank + 1]))
    images, wanted = make_batch()
    output, images_grad, grads, buffers = train(net, images[rows], wanted[rows])
    for gradient in grads.values():
        dist.all_reduce(gradient)
    torch.save((output, images_grad, grads, buffers), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_uneven_workers_equal_one(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(r, str(tmp_path))) for r in range(len(PARTS))]
    for worker in workers:
        worker.start()
    images, wanted = make_batch()
    whole = train(make_net().double(), images.double(), wanted.double())  # the exact answer
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(PARTS))]
    assert gap(torch.cat([part[0] for part in parts]), whole[0]) < 1e-6
    assert gap(torch.cat([part[1] for part in parts]), whole[1]) < 1e-6
    for part in parts:
        assert all(gap(part[2][name], gradient) < 1e-6 for name, gradient in whole[2].items())
        assert all(gap(part[3][name], buffer) < 1e-6 for name, buffer in whole[3].items())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_one_worker_equals_batch_norm(dtype):
    plain, synced = make_net().to(dtype), make_net().to(dtype)
    synchronise(synced, lambda sums: None)
    images, wanted = (tensor.to(dtype) for tensor in make_batch())
    expected, found = train(plain, images, wanted), train(synced, images, wanted)
    limit = 1e-6 if dtype == torch.float32 else 1e-14
    assert gap(found[0], expected[0]) < limit and gap(found[1], expected[1]) < limit
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert all(gap(one[name], other[name]) < limit for name in other)


def test_gradient_is_the_derivative():
    module = nn.BatchNorm2d(2).double()
    synchronise(module, lambda sums: None)
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def normalise(x, weight, bias):
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(module, parameters, (x,))

    assert torch.autograd.gradcheck(normalise, (x, weight, bias))


def test_large_mean_keeps_its_variance():
    module = nn.BatchNorm2d(1, momentum=1.0)
    synchronise(module, lambda sums: None)
    x = 1000 + torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    module(x)  # from a running mean of 0
    module(x)
    assert module.running_var is not None
    torch.testing.assert_close(
        module.running_var, x.double().var().float()[None], rtol=1e-4, atol=0
    )


def test_names_copies_and_undoing():
    net = make_net()
    names = list(net.state_dict())
    parameters = list(net.parameters())
    synchronise(net, lambda sums: None)
    assert list(net.state_dict()) == names
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert type(copy.deepcopy(net)[1]) is SyncedBatchNorm2d
    assert desynchronise(net) == 2
    assert type(net[1]) is nn.BatchNorm2d and "reduce" not in vars(net[1])


def test_eval_and_frozen_modes_talk_to_nobody():
    def refuse(sums):
        raise AssertionError("no collective in eval mode")

    net, plain = make_net(), make_net().eval()
    synchronise(net, refuse)
    net.train()
    assert freeze_statistics(net) == 2
    images, wanted = make_batch()
    output, _, grads, buffers = train(net, images, wanted)
    assert torch.equal(output, plain(images))
    assert torch.equal(buffers["1.running_mean"], torch.zeros(5))
    assert grads["1.weight"].abs().sum() > 0
