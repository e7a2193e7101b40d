"""AdamW with clipping and the guard's decision in it: three launches a step, whatever the number of weights. docs/operators.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tileflash.operators.choice import uses_triton
from tileflash.train.masters import join_master, split_master

if TYPE_CHECKING:
    from tileflash.kernels.triton.adamw import WeightTable

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) over fp32 weights, or over bf16 weights whose fp32 masters it completes.

    With `split` every weight becomes bf16 in place, rounded from what it was, and `state[weight]["low_bits"]` int16 holds what is
    missing to its fp32 master (`masters.join_master`): 6 bytes less a weight than an fp32 master beside a bf16 copy has.

    `finish` is the step: the gradients' norm, clipping, whether to skip, and the update, with no wait for the GPU. There is one step
    count and one learning rate for all weights; groups differ in their weight decay. On a GPU the numbers are those of
    torch.optim.AdamW(fused=True) on fp32 masters within 2 units in the last place a step (decay and update round once each, in another
    order); in plain PyTorch (on a CPU) they are the same bits.

    Args:
        parameters: weights or groups of them as every optimizer takes them; fp32, contiguous, on one device.
        sum_in_fp32: `gather` adds bf16 gradients to fp32 sums.
        backend: "auto" (Triton's kernels on a GPU, else plain PyTorch), "triton", "plain".

    Raises ValueError for weights of another kind, and for a backend that cannot serve.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        split: bool = False,
        sum_in_fp32: bool = True,
        backend: str = "auto",
    ) -> None:
        self.split, self.sum_in_fp32 = split, sum_in_fp32
        self._betas, self._epsilon = betas, eps
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._weights: list[nn.Parameter] = [weight for group in self.param_groups for weight in group["params"]]
        if not self._weights:
            raise ValueError("parameters is empty: there must be at least one")
        device = self._weights[0].device
        for weight in self._weights:
            if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.device != device:
                raise ValueError(
                    f"a weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}: all must be float32, contiguous and on "
                    f"one device, {device}"
                )
        self._triton = uses_triton(backend, device, torch.float32)
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        for weight in self._weights:
            self.state[weight] = {"step": self._step}
            self.state[weight].update({moment: torch.zeros_like(weight.detach()) for moment in MOMENTS})
            if split:
                weight.data, self.state[weight]["low_bits"] = split_master(weight.detach())
        self._sums: list[Tensor] = []  # fp32, beside bf16 gradients
        self._gathered = False
        self._launcher = _Launcher(self, device) if self._triton else None

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of a micro-batch to fp32 sums, which `finish` then takes, and remove them. Of fp32 weights, or without
        `sum_in_fp32`, they stay where autograd adds them up."""
        if not (self.split and self.sum_in_fp32):
            return
        if not self._sums:
            self._sums = [
                torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for weight in self._weights
            ]
        gradients = [weight.grad for weight in self._weights]
        if self._launcher is not None:
            self._launcher.add(gradients, self._sums)
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient
        self._gathered = True
        self.zero_grad(set_to_none=True)

    @torch.no_grad()
    def finish(
        self,
        loss: Tensor,
        *,
        gradient_clip: float,
        loss_limit: float | Tensor,
        gradient_limit: float | Tensor,
        keep_gradients: bool = False,
    ) -> Tensor:
        """Clip the gradients to the norm `gradient_clip` (0: not) and apply them, unless `loss` (fp32 []) or their norm is above its
        limit or NaN.

        Returns fp32 [3] on the device: loss, norm before clipping, 1 if the step was skipped else 0. The gradients are gone
        afterwards; with `keep_gradients` their tensors stay where they are, filled with zeros.
        """
        gathered = self._gathered
        clear = keep_gradients or gathered
        result = self._apply(loss, gradient_clip, loss_limit, gradient_limit, clear=clear)
        if gathered or not keep_gradients:
            self.zero_grad(set_to_none=True)
        self._gathered = False
        return result

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients as they are, as every optimizer does; they stay. NaN and Inf among them skip the step."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._apply(torch.zeros((), device=self._step.device), 0.0, 0.0, torch.finfo(torch.float32).max, clear=False)
        return value

    def _apply(
        self, loss: Tensor, clip: float, loss_limit: float | Tensor, gradient_limit: float | Tensor, *, clear: bool
    ) -> Tensor:
        rates = {id(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"] for group in self.param_groups}
        if len(rates) > 1:
            raise ValueError("the groups have different learning rates: they must have one")
        gradients: list[Tensor | None] = (
            list(self._sums) if self._gathered else [weight.grad for weight in self._weights]
        )
        if self._launcher is None:
            return self._apply_plainly(gradients, loss, (loss_limit, gradient_limit), clip, clear)
        numbers = (loss_limit, gradient_limit, self.param_groups[0]["lr"])
        return self._launcher.apply(gradients, loss, numbers, clip, clear)

    def _apply_plainly(
        self, gradients: list[Tensor | None], loss: Tensor, limits: tuple[Any, Any], clip: float, clear: bool
    ) -> Tensor:
        """The same by PyTorch's own functions, weight by weight where masters are split."""
        wide = [None if gradient is None else gradient.float() for gradient in gradients]
        norm = nn.utils.get_total_norm([gradient for gradient in wide if gradient is not None])
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else None
        healthy = (loss <= limits[0]) & (norm <= limits[1])
        skipped = healthy.logical_not().float()
        self._step += 1 - skipped
        numbers = iter(zip(self._weights, wide, strict=True))
        for group in self.param_groups:
            for _ in group["params"]:
                weight, gradient = next(numbers)
                if gradient is not None:
                    state = self.state[weight]
                    master = join_master(weight, state["low_bits"]) if self.split else weight
                    clipped = (gradient if factor is None else gradient * factor).contiguous()
                    torch._fused_adamw_(
                        [master], [clipped], [state["exp_avg"]], [state["exp_avg_sq"]], [], [self._step],
                        lr=group["lr"], beta1=self._betas[0], beta2=self._betas[1],
                        weight_decay=group["weight_decay"], eps=self._epsilon, amsgrad=False, maximize=False, found_inf=skipped,
                    )  # fmt: skip
                    if self.split:
                        high, low = split_master(master)
                        weight.copy_(high)
                        state["low_bits"].copy_(low)
        if clear:
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
        return torch.stack([loss, norm, skipped])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, into the tensors that are in use.

        PyTorch's own would round the moments to the weights' dtype. ValueError for what does not fit.
        """
        saved = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"state_dict has groups of {sizes[0]} weights: they must be of {sizes[1]}")
        keys = ("step", *MOMENTS, *(("low_bits",) if self.split else ()))
        states = [state_dict["state"].get(number, {}) for group in saved for number in group["params"]]
        for number, (weight, state) in enumerate(zip(self._weights, states, strict=True)):
            for key in keys:
                if key not in state or state[key].shape != self.state[weight][key].shape:
                    raise ValueError(f"state_dict has no {key} for weight {number} of {tuple(weight.shape)}")
        for weight, state in zip(self._weights, states, strict=True):
            for key in keys:
                self.state[weight][key].copy_(state[key])
        for group, before in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})


class _Launcher:
    """The kernels' tables of addresses, on the device: made at the first step, and again where an address changes."""

    def __init__(self, optimizer: FusedAdamW, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._made: WeightTable | None = None
        self._made_from: tuple[list[tuple[int, int, int, int, int]], list[float]] | None = None
        self._uploaded: dict[str, tuple[list[int], Tensor]] = {}
        self._spare: list[Tensor] = []  # pinned, made while no capture forbids it
        self._captured: list[Tensor] = []  # what replays read
        self._betas = torch.tensor(optimizer._betas, dtype=torch.float64).to(device)
        self._numbers = torch.zeros(3, device=device)

    def add(self, gradients: list[Tensor | None], sums: list[Tensor]) -> None:
        from tileflash.kernels.triton import adamw as kernels

        aligned = _aligned(gradients)
        dtype = self._optimizer._weights[0].dtype
        kernels.add_gradients(
            self._table(), self._addresses("gradients", aligned), dtype, self._addresses("sums", list(sums))
        )

    def apply(
        self, gradients: list[Tensor | None], loss: Tensor, numbers: tuple[Any, Any, Any], clip: float, clear: bool
    ) -> Tensor:
        from tileflash.kernels.triton import adamw as kernels

        optimizer, table = self._optimizer, self._table()
        aligned = _aligned(gradients)
        dtype = next((gradient.dtype for gradient in aligned if gradient is not None), torch.float32)
        addresses = self._addresses("sums" if optimizer._gathered else "gradients", aligned)
        if not all(isinstance(number, Tensor) for number in numbers):
            self._numbers.copy_(torch.tensor([float(number) for number in numbers]))
            loss_limit, gradient_limit, rate = self._numbers.unbind()
        else:
            loss_limit, gradient_limit, rate = numbers
        sums = torch.empty(len(table.chunks), device=self._device)
        result = torch.empty(3, device=self._device)
        scalars = torch.empty(kernels.SCALARS, device=self._device)
        kernels.square_sums(table, addresses, dtype, sums)
        limits = (loss_limit, gradient_limit)
        kernels.finish_norm(sums, loss, limits, rate, optimizer._step, self._betas, result, scalars, clip)
        kernels.update(
            table, addresses, dtype, scalars, result, optimizer._betas, optimizer._epsilon, split=optimizer.split, clear=clear
        )  # fmt: skip
        if clear:
            for gradient, copy in zip(gradients, aligned, strict=True):
                if gradient is not None and copy is not gradient:
                    gradient.zero_()
        return result

    def _table(self) -> WeightTable:
        from tileflash.kernels.triton.adamw import make_table

        state = self._optimizer.state
        rows = []
        for weight in self._optimizer._weights:
            low = state[weight].get("low_bits")
            moments = [state[weight][moment].data_ptr() for moment in MOMENTS]
            rows.append((weight.data_ptr(), 0 if low is None else low.data_ptr(), *moments, weight.numel()))
        decays = [group["weight_decay"] for group in self._optimizer.param_groups for _ in group["params"]]
        if self._made is None or (rows, decays) != self._made_from:
            if any(address % 16 for row in rows for address in row[:4]):
                raise ValueError("a weight or its moments lie at an address that is no multiple of 16")
            self._made, self._made_from = make_table(rows, decays, self._device), (rows, decays)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.extend(self._made)
        return self._made

    def _addresses(self, name: str, tensors: list[Tensor | None]) -> Tensor:
        """Addresses int64 [T] of tensors that may lie elsewhere at each step, 0 for None.

        In a capture they are copied by the graph, from pinned memory that is this copy's alone: where gradients lie in the graph's
        memory is only known while it is made.
        """
        rows = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        known = self._uploaded.get(name)
        known_rows, uploaded = (None, None) if known is None else known
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if rows != known_rows or uploaded is None:
                if not self._spare:
                    raise RuntimeError("a capture needs one step before it")
                pinned = self._spare.pop()
                self._captured.append(pinned)
                pinned.copy_(torch.tensor(rows, dtype=torch.int64))
                uploaded = torch.empty(len(rows), dtype=torch.int64, device=self._device)
                return uploaded.copy_(pinned, non_blocking=True)
            self._captured.append(uploaded)  # a later step may upload others
            return uploaded
        if self._device.type == "cuda" and not self._spare:
            self._spare.append(torch.empty(len(rows), dtype=torch.int64, pin_memory=True))
        if rows != known_rows or uploaded is None:
            uploaded = torch.tensor(rows, dtype=torch.int64).to(self._device)
            self._uploaded[name] = rows, uploaded
        return uploaded


def _aligned(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors, those that kernels cannot walk over copied."""
    return [
        tensor
        if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)
        else tensor.clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]
