"""Batch norm over all workers: one all-reduce forward, one backward, on CPU and GPU.

torch's own SyncBatchNorm refuses the CPU. This one keeps the modules, their parameters and the
state_dict: ``synchronise`` only changes how the forward is computed. Shapes: B rows of this worker,
C channels, N values a channel over all workers. Source: Batch Normalization (arXiv 1502.03167).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

Reduce = Callable[[Tensor], object]
"""Adds a tensor up over all workers, in place."""

SILU_AFTER_NORM = ("Conv", "DWConv")  # Ultralytics' modules that compute act(bn(conv(x)))


def synchronise(net: nn.Module, reduce: Reduce) -> int:
    """Make every ``BatchNorm2d`` of ``net`` use the statistics of all workers; how many there are.

    ``reduce`` must not be called by one worker alone: all run the same forward and backward.
    The gradients of weight and bias stay this worker's share, like those of every other parameter:
    the sum over the workers is the gradient of the summed loss.
    """
    swapped = 0
    for module in net.modules():
        if type(module) is nn.BatchNorm2d or type(module) is SyncedBatchNorm2d:
            # Swapped in place: other objects hold references to these modules and parameters.
            module.__class__ = SyncedBatchNorm2d
            module.__dict__["reduce"] = reduce
            swapped += 1
    return swapped


def fuse(net: nn.Module) -> int:
    """Compute every batch norm of ``net``, and the SiLU behind it, by kernels of ours; how many.

    Poolings that keep the size and nearest upsamplings are taken over too. For a net on a GPU whose
    filters lie channels last. Call it after ``synchronise``, if that is called.
    """
    fused = 0
    for parent in net.modules():
        if type(parent) is nn.Upsample and parent.mode == "nearest":
            setattr(parent, "__class__", NearestUpsample)  # noqa: B010 (a type checker refuses it)
        if type(parent) is nn.MaxPool2d and _is_centred(parent):
            setattr(parent, "__class__", CentredMaxPool)  # noqa: B010 (as above)
        for name, module in parent.named_children():
            if type(module) is not nn.BatchNorm2d and type(module) is not SyncedBatchNorm2d:
                continue
            module.__dict__.setdefault("reduce", None)
            module.__dict__["act"] = None
            setattr(module, "__class__", FusedBatchNorm2d)  # noqa: B010 (as above)
            fused += 1
            act = dict(parent.named_children()).get("act")
            if name == "bn" and type(parent).__name__ in SILU_AFTER_NORM and type(act) is nn.SiLU:
                module.__dict__["act"] = act
                parent.add_module("act", nn.Identity())
    return fused


def desynchronise(net: nn.Module) -> int:
    """Undo ``synchronise`` and ``fuse``: plain ``BatchNorm2d`` again; how many were changed."""
    changed = 0
    for parent in net.modules():
        bn = dict(parent.named_children()).get("bn")
        if isinstance(bn, FusedBatchNorm2d) and bn.act is not None:
            parent.add_module("act", bn.act)
    for module in net.modules():
        if type(module) in PLAIN:
            setattr(module, "__class__", PLAIN[type(module)])  # noqa: B010 (as below)
        if type(module) is SyncedBatchNorm2d or type(module) is FusedBatchNorm2d:
            del module.__dict__["reduce"]
            module.__dict__.pop("act", None)
            setattr(module, "__class__", nn.BatchNorm2d)  # noqa: B010 (a type checker refuses it)
            changed += 1
    return changed


def freeze_statistics(net: nn.Module) -> int:
    """Put every batch norm in eval mode (call it after ``net.train()``); how many there are.

    Running statistics then normalise and do not move; weights and biases still learn.
    """
    frozen = 0
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            frozen += 1
    return frozen


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` with the statistics of all workers; made by ``synchronise`` only."""

    reduce: Reduce

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [B,C,H,W]; in eval mode exactly ``BatchNorm2d``."""
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None and self.num_batches_tracked is not None
        result, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.running_mean, (self.eps, self.reduce)
        )
        with torch.no_grad():
            # As torch: the running variance is the unbiased one, of the GLOBAL count.
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        return result


class NearestUpsample(nn.Upsample):
    """Copies pixels in the type they have; autocast would widen them, and all that follows, to float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Nearest neighbours of [B,C,H,W]."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input)


class CentredMaxPool(nn.MaxPool2d):
    """A pooling with stride 1 that keeps the size, by a kernel of ours while training."""

    def forward(self, input: Tensor) -> Tensor:
        """Largest of each window of [B,C,H,W]."""
        if not (self.training and input.is_cuda):
            return functional.max_pool2d(input, self.kernel_size, 1, self.padding)
        from yolo_ray.model.fused_layers import max_pool  # Triton: on a GPU only

        assert isinstance(self.kernel_size, int)
        return max_pool(input, self.kernel_size)


def _is_centred(pool: nn.MaxPool2d) -> bool:
    size = pool.kernel_size
    if not isinstance(size, int) or size % 2 == 0 or size >= 16:
        return False
    plain = (
        pool.stride == 1 and pool.dilation == 1 and not pool.ceil_mode and not pool.return_indices
    )
    return plain and pool.padding == size // 2


PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    NearestUpsample: nn.Upsample,
    CentredMaxPool: nn.MaxPool2d,
}


class FusedBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` and the SiLU behind it in one; made by ``fuse`` only."""

    reduce: Reduce | None
    act: nn.Module | None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [B,C,H,W] and apply ``act`` if there is one; in eval mode as torch does."""
        if not self.training:
            result = super().forward(input)
            return result if self.act is None else self.act(result)
        from yolo_ray.model.fused_norm import FusedNorm, NormState  # Triton: on a GPU only

        state = NormState(self, self.reduce, silu=self.act is not None)
        return FusedNorm.apply(input, self.weight, self.bias, state)


Sums = tuple[Tensor, Tensor, Tensor]  # of dy, of dy * (x - mean), of rows: over all workers


class _Kernels(NamedTuple):
    """The four passes over the activations; x and dy are [B,C,H,W], the rest [C]."""

    moments: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x, shift, eps) -> sums of (x - shift) and of its square over this worker's rows."""
    normalise: Callable[..., Tensor]
    """(x, weight, bias, mean, inverse, eps) -> result, in x's dtype."""
    gradient_sums: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    """(dy, x, mean, inverse, weight) -> sum dy, sum dy * (x - mean), dweight, dbias."""
    gradient: Callable[..., Tensor]
    """(dy, x, mean, inverse, weight, (sum_dy, sum_dy_xmu, count)) -> dx."""


class _Normalise(Function):
    """Normalisation by global statistics, with the gradient through those statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor, how: tuple[float, Reduce]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        eps, reduce = how
        kernels = _KERNELS[x.device.type]
        x = _packed(x)
        # Sums about the running mean, which all workers share: squares about zero would cancel
        # where the mean is large against the spread.
        local_first, local_second = kernels.moments(x, shift, eps)
        local_count = torch.full_like(local_first[:1], x.numel() // x.shape[1])
        sums = torch.cat((local_first, local_second, local_count))
        reduce(sums)
        first, second, count = sums.split((x.shape[1], x.shape[1], 1))
        offset = first / count
        mean = shift + offset
        variance = (second / count - offset.square()).clamp(min=0)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.reduce = reduce
        ctx.mark_non_differentiable(mean, variance, count)
        return kernels.normalise(x, weight, bias, mean, inverse, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        kernels = _KERNELS[x.device.type]
        # In x's own layout: the kernels want both alike.
        plain = x.is_contiguous()
        dy = gradients[0].contiguous(
            memory_format=torch.contiguous_format if plain else torch.channels_last
        )
        sum_dy, sum_dy_xmu, dweight, dbias = kernels.gradient_sums(dy, x, mean, inverse, weight)
        sums = torch.cat((sum_dy, sum_dy_xmu))
        ctx.reduce(sums)
        sum_dy, sum_dy_xmu = sums.chunk(2)
        dx = kernels.gradient(dy, x, mean, inverse, weight, (sum_dy, sum_dy_xmu, count))
        return dx, dweight, dbias, None, None


def _packed(x: Tensor) -> Tensor:
    """Contiguous in its own layout: the kernels know plain and channels-last memory only."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _plane(values_C: Tensor) -> Tensor:
    return values_C[:, None, None]


def _cpu_moments(x: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # Every float32 operation here is on one element or one photo, and what adds photos up is
    # float64: so the result does not depend on how the photos are split over workers. One float32
    # bit of difference would grow a thousandfold on its way through the network.
    centred = _wide(x) - _plane(shift.to(_wide(x).dtype))
    first = _over_photos(centred.sum((2, 3)))
    return first, _over_photos(centred.square_().sum((2, 3)))


def _cpu_normalise(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    scale = _plane((weight * inverse).to(_wide(x).dtype))
    centred = _wide(x) - _plane(mean.to(scale.dtype))
    return centred.mul_(scale).add_(_plane(bias)).to(x.dtype)


def _cpu_gradient_sums(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide_dy = _wide(dy)
    sum_dy = _over_photos(wide_dy.sum((2, 3)))
    centred = _wide(x) - _plane(mean.to(wide_dy.dtype))
    sum_dy_xmu = _over_photos(centred.mul_(wide_dy).sum((2, 3)))
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * inverse).to(weight.dtype), sum_dy.to(weight.dtype)


def _cpu_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, sums: Sums
) -> Tensor:
    sum_dy, sum_dy_xmu, count = sums
    slope = inverse.square() * sum_dy_xmu / count
    dtype = _wide(x).dtype
    mean, slope, offset, scale = (
        _plane(values.to(dtype)) for values in (mean, slope, sum_dy / count, weight * inverse)
    )
    dx = (_wide(dy) - offset).sub_((_wide(x) - mean).mul_(slope)).mul_(scale)
    return dx.to(x.dtype)


def _over_photos(sums_BC: Tensor) -> Tensor:
    return sums_BC.sum(0, dtype=torch.float64)


def _cuda_moments(x: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, inverse = torch.batch_norm_stats(x, eps)
    count = x.numel() // x.shape[1]
    offset = mean - shift
    variance = (inverse.square().reciprocal() - eps).clamp(min=0)
    return offset * count, (variance + offset.square()) * count


def _cuda_gradient_sums(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.batch_norm_backward_reduce(dy, x, mean, inverse, weight, True, True, True)


def _cuda_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, sums: Sums
) -> Tensor:
    sum_dy, sum_dy_xmu, count = sums
    return torch.batch_norm_backward_elemt(
        dy, x, mean, inverse, weight, sum_dy, sum_dy_xmu, count.to(torch.int32)
    )


def _wide(x: Tensor) -> Tensor:
    """At least float32: half precision loses the sums."""
    return x if x.dtype == torch.float64 else x.float()


_KERNELS = {
    "cpu": _Kernels(_cpu_moments, _cpu_normalise, _cpu_gradient_sums, _cpu_gradient),
    "cuda": _Kernels(_cuda_moments, torch.batch_norm_elemt, _cuda_gradient_sums, _cuda_gradient),
}
