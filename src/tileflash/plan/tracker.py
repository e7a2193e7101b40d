"""A dispatch mode that follows a step operator by operator: which storages live at its highest moment, and what was computed and moved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_BLOCK_BYTES = 512  # the CUDA allocator hands out multiples of it


@dataclass(frozen=True)
class Storage:
    """A piece of memory: its bytes, the operator that made it, and the shape and dtype in which it was made."""

    nbytes: int
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Work:
    """What some operators do: FLOPs of matrix products and of attention, the bytes that the others move, and how many there are."""

    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    operators: int = 0
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # (group, kind) -> bytes that a rank sends
    message_counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: Work, times: float = 1.0) -> None:
        """Add `other`, `times` times."""
        self.product_flops += times * other.product_flops
        self.attention_flops += times * other.attention_flops
        self.moved_bytes += times * other.moved_bytes
        self.operators += round(times * other.operators)
        for mine, its in ((self.messages, other.messages), (self.message_counts, other.message_counts)):
            for key, number in its.items():
                mine[key] += round(times * number)


class StepTracker(TorchDispatchMode):
    """Counts while in force. `current` and `peak` are bytes of storages that exist, as the CUDA allocator rounds them if `rounded`.

    `highest`: for each phase that has ended, those that lived at its peak, by a number of their own; `numbers_of` gives the numbers of
    tensors. `work` is what was done since `take_work` was called.
    """

    def __init__(self, *, rounded: bool) -> None:
        super().__init__()
        self.weights: set[tuple[int, ...]] = set()  # shapes of weights
        self.current = self.peak = 0
        self.phase = ""
        self.highest: dict[str, tuple[int, Mapping[int, Storage]]] = {}  # by phase: bytes, and what they were
        self._unit = _BLOCK_BYTES if rounded else 1
        self._live: dict[int, Storage] = {}  # number -> storage
        self._numbers: dict[int, int] = {}  # address of the storage's object -> number
        self._resized: dict[int, weakref.ref[Any]] = {}  # FSDP gives memory back by resizing a storage to nothing
        self._at_peak: dict[int, Storage] | None = None
        self._made = 0
        self.work = Work()

    def begin(self, phase: str) -> None:
        """What comes now is of `phase`, whose highest moment is that of all its turns; "" counts nowhere."""
        if self.phase and self.peak > self.highest.get(self.phase, (-1, {}))[0]:
            self.highest[self.phase] = (self.peak, dict(self._live) if self._at_peak is None else self._at_peak)
        self.phase = phase
        self.peak, self._at_peak = self.current, None

    def take_work(self) -> Work:
        """What was done since the last call."""
        taken, self.work = self.work, Work()
        return taken

    def hold(self, tensors: Iterable[torch.Tensor], operator: str) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._track(tensor, operator)

    def numbers_of(self, tensors: Iterable[torch.Tensor | None]) -> set[int]:
        """The numbers under which the storages of tensors are known."""
        found = (self._numbers.get(tensor.untyped_storage()._cdata) for tensor in tensors if tensor is not None)
        return {number for number in found if number is not None}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators come here one by one
        self._look_at_resized()
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func._schema.name
        if name == "aten::add" and made[0].shape in self.weights:
            # Autograd adds gradients up in place, but not those of fake tensors: the sum takes the place of the first.
            self._give_up(given[0])
        fresh = [self._track(tensor, name) for tensor in made]
        self._count(func, name, args, kwargs or {}, given, made, any(fresh))
        return result

    def _track(self, tensor: torch.Tensor, operator: str) -> bool:
        """Whether the tensor's storage is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return False
        self._made += 1
        number = self._made
        self._numbers[key] = number
        self._set(number, Storage(self._rounded(storage.nbytes()), operator, tuple(tensor.shape), tensor.dtype))
        weakref.finalize(storage, self._free, key, number)
        if operator == "aten::empty":
            self._resized[number] = weakref.ref(storage)
        return True

    def _give_up(self, tensor: torch.Tensor) -> None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None and tensor.dtype == torch.float32:
            self._set(number, replace(self._live[number], nbytes=0))

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._unit) * self._unit

    def _set(self, number: int, storage: Storage) -> None:
        old = self._live.get(number)
        before = 0 if old is None else old.nbytes
        if storage.nbytes < before:
            self._remember()
        self._live[number] = storage
        self.current += storage.nbytes - before
        if self.current > self.peak:
            self.peak, self._at_peak = self.current, None

    def _free(self, key: int, number: int) -> None:
        self._remember()
        self._numbers.pop(key, None)
        self._resized.pop(number, None)
        self.current -= self._live.pop(number).nbytes

    def _pass_by(self, nbytes: int) -> None:
        """Memory that an operator takes and gives back within itself."""
        if self.current + nbytes > self.peak:
            self.peak, self._at_peak = (
                self.current + nbytes,
                {**self._live, -1: Storage(nbytes, "inside", (), torch.uint8)},
            )

    def _remember(self) -> None:
        """Something is about to go: if this is the highest moment, keep what there is."""
        if self._at_peak is None and self.current == self.peak:
            self._at_peak = dict(self._live)

    def _look_at_resized(self) -> None:
        for number, reference in list(self._resized.items()):
            storage = reference()
            if storage is None:
                continue
            nbytes, known = self._rounded(storage.nbytes()), self._live[number]
            if nbytes != known.nbytes:
                self._set(number, replace(known, nbytes=nbytes))

    def _count(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        fresh: bool,
    ) -> None:
        work = self.work
        if "c10d" in name:
            self._message(name, args, given, made)
            return
        if not fresh and not func._schema.is_mutable:
            return  # a view
        if name in ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::detach"):
            return
        work.operators += 1
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            flops = float(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))
            if name.startswith("tileflash::"):
                work.attention_flops += flops
            else:
                work.product_flops += flops
            return
        if name == "tileflash::linear_cross_entropy":
            # Three products a chunk of tokens, whose logits it makes within its budget and nobody sees.
            hidden, weight = given[:2]
            work.product_flops += 6.0 * hidden.shape[0] * weight.numel()
            self._pass_by(min(int(args[_BUDGET]), 2 * 4 * hidden.shape[0] * weight.shape[0]))
            return
        moved = {id(tensor): tensor for tensor in (*given, *made)}
        work.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in moved.values())

    def _message(self, name: str, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        kind = name.split("::")[1].strip("_")
        if not kind.startswith(_SENDING):
            return  # to wait, to receive, to wrap
        group = _group_of(args)
        ranks = torch.distributed.get_world_size(group)
        if ranks == 1:
            return
        largest = max((tensor.numel() * tensor.element_size() for tensor in (*given, *made)), default=0)
        share = (
            1.0
            if kind.startswith("send")
            else (2.0 if "allreduce" in kind or "all_reduce" in kind else 1.0) * (ranks - 1) / ranks
        )
        key = (group.group_name, kind)
        self.work.messages[key] += int(largest * share)
        self.work.message_counts[key] += 1


_SENDING = (
    "all_gather",
    "allgather",
    "reduce_scatter",
    "allreduce",
    "all_reduce",
    "alltoall",
    "all_to_all",
    "broadcast",
    "send",
)
_BUDGET = 4 + 5  # of the operator's arguments: four tensors, then the fields of its options up to the budget


def _group_of(arguments: Any) -> Any:
    """The process group among an operator's arguments: an object, or a name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    for argument in tree_leaves(arguments):
        name: Any = argument
        if isinstance(argument, str):
            try:
                return _resolve_process_group(name)
            except (KeyError, RuntimeError, ValueError):
                continue  # another word: what kind of sum
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return torch.distributed.ProcessGroup.unbox(argument)
    raise ValueError(f"there is no process group among the arguments {arguments}")
