"""The processes of a run and how they agree. `Alone` is the one process of a run without torchrun: it agrees with itself.

Small facts (counts, flags, what went wrong) go over gloo between the hosts' memories, so no agreement waits for a GPU.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tileflash.parallel.layout import SINGLE, Layout
from tileflash.parallel.watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def world_size_from_environment() -> int | None:
    """How many ranks torchrun started; None where it did not start this process, or started it alone."""
    if not all(name in os.environ for name in _TORCHRUN):
        return None
    size = int(os.environ["WORLD_SIZE"])
    return size if size > 1 else None


def restarts_from_environment() -> int:
    """How often torchrun (--max-restarts) has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


class Alone(AbstractContextManager["Alone"]):
    """The only process: everything is done here, and nothing of torch.distributed is touched."""

    layout, rank, local_rank, is_first = SINGLE, 0, None, True

    def __exit__(self, *_: object) -> None:
        return None

    def first(self, work: Callable[[], Value]) -> Value | None:
        """Do `work`."""
        return work()

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """Do `work`."""
        return work()

    def together(self, work: Callable[[], Value]) -> Value:
        """Do `work`."""
        return work()

    def share(self, value: Any) -> Any:
        """`value`."""
        return value

    def loss_of_rank(self, error: BaseException) -> str | None:
        """None: there is no other."""
        return None


class Ranks(AbstractContextManager["Ranks"]):
    """This process among the others, while in force.

    `mesh` has the dimensions "pipeline", "replicate", "shard", "tensor": data and context ranks together lie along "shard" where
    they share weights (ZeRO 1 to 3), else along "replicate". `token_mesh` has "pipeline", "data", "context", "tensor": who has which
    tokens. A process group that is there already is used and left as it is.
    """

    def __init__(self, layout: Layout, device_type: str, timeout_s: float, rank: int | None = None) -> None:
        """`rank`: which one this is, None: as torchrun's environment says."""
        self.layout = layout
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.local_rank = int(os.environ["LOCAL_RANK"]) if rank is None else rank
        self.is_first = self.rank == 0
        self._device_type, self._timeout_s = device_type, timeout_s
        self._owns_group = False
        self._watch: Watch | None = None  # of a process group of our own
        self.mesh: DeviceMesh
        self.token_mesh: DeviceMesh
        self.data_group: ProcessGroup
        self.replica_group: ProcessGroup
        self.tensor_group: ProcessGroup
        self.pipeline_group: ProcessGroup
        self.tied_group: ProcessGroup | None = None  # of the first and last pipeline ranks, which may share a weight

    @property
    def pipeline_rank(self) -> int:
        """Which of the `layout.pipeline` parts of the layers is this rank's."""
        return self.rank // (self.layout.tensor * self.layout.replicas)

    @property
    def replica_rank(self) -> int:
        """Which of the `layout.replicas` this is: data ranks' context ranks are neighbours."""
        return self.rank // self.layout.tensor % self.layout.replicas

    def first_of(self, pipeline_rank: int) -> int:
        """The number of the first rank that has that part of the layers."""
        return pipeline_rank * self.layout.tensor * self.layout.replicas

    @property
    def data_rank(self) -> int:
        """Which of the `layout.data` shares of the samples is this rank's."""
        return self.replica_rank // self.layout.context

    @property
    def context_rank(self) -> int:
        """Which of the `layout.context` parts of each sequence is this rank's."""
        return self.replica_rank % self.layout.context

    @property
    def tensor_rank(self) -> int:
        """Which of the `layout.tensor` parts of the model is this rank's."""
        return self.rank % self.layout.tensor

    def __enter__(self) -> Ranks:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import _set_pg_timeout

        layout, timeout = self.layout, timedelta(seconds=self._timeout_s)
        if self._device_type == "cuda":
            torch.cuda.set_device(self.local_rank)  # before NCCL looks for its GPU
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self._device_type == "cuda" else "gloo"
            store = self._store(timeout)
            own = dist.PrefixStore(f"watch_{restarts_from_environment()}", store)
            self._watch = Watch(own, self.rank, layout.ranks, patience_s=0.8 * self._timeout_s)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=layout.ranks, timeout=timeout)
            self._owns_group = True
        shape = (1, layout.replicas) if layout.shards_weights else (layout.replicas, 1)
        names = ("pipeline", "replicate", "shard", "tensor")
        token_names = ("pipeline", "data", "context", "tensor")
        self.mesh = init_device_mesh(self._device_type, (layout.pipeline, *shape, layout.tensor), mesh_dim_names=names)
        sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
        self.token_mesh = init_device_mesh(self._device_type, sizes, mesh_dim_names=token_names)
        self.replica_group = self.mesh.get_group("shard" if layout.shards_weights else "replicate")
        self.tensor_group = self.mesh.get_group("tensor")
        self.data_group = self.token_mesh.get_group("data")
        self.pipeline_group = self.mesh.get_group("pipeline")
        if layout.pipeline > 1:
            ends = [[rank, self.first_of(layout.pipeline - 1) + rank] for rank in range(self.first_of(1))]
            group, _ = dist.new_subgroups_by_enumeration(ends, timeout=timeout)
            self.tied_group = group if isinstance(group, dist.ProcessGroup) else None
        if self._owns_group:
            for mesh, dimensions in ((self.mesh, names), (self.token_mesh, token_names)):
                for name in dimensions:  # a mesh gives its groups PyTorch's default, up to half an hour
                    _set_pg_timeout(timeout, mesh.get_group(name))
        return self

    def _store(self, timeout: timedelta) -> Store:
        """Where the ranks leave their addresses for each other, by torchrun's environment."""
        import torch.distributed as dist

        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun's agent keeps one store for all its restarts, and PyTorch believes that it makes a new one each time (2.13): a rank
        # could then take the address of one that has died for its successor's, and wait for it. Agents of several hosts may count
        # differently, and need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead.
        if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == self.layout.ranks:
            store = dist.PrefixStore(f"attempt_{restarts_from_environment()}", store)
        return store

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import torch.distributed as dist

        if not self._owns_group:
            return
        # After a failure the others may never come: the group then ends with the process.
        if error is None:
            self.any(False)  # rank 0 holds the store that the others need to the end
            if self._watch is not None:
                self._watch.stop()
            self.any(False)
            dist.destroy_process_group()

    @property
    def tensor_crosses_hosts(self) -> bool:
        """Whether a tensor group has ranks of several hosts, by torchrun's count of each host's ranks."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.layout.ranks)) % self.layout.tensor != 0

    def first(self, work: Callable[[], Value]) -> Value | None:
        """Rank 0 does `work` and gets its result, the others None; what goes wrong there is raised by all."""
        return self._together(work if self.is_first else None)

    def together(self, work: Callable[[], Value]) -> Value:
        """All do `work`, each gets its own result; what goes wrong on any is raised by all."""
        return self._together(work)  # type: ignore[return-value]

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """All do `work`, the first of each host before the others: what it leaves on the disk is then there for them."""
        leads = self.local_rank == 0
        result = self._together(work if leads else None)
        rest = self._together(None if leads else work)
        return result if leads else rest  # type: ignore[return-value]

    def _together(self, work: Callable[[], Value] | None) -> Value | None:
        import torch.distributed as dist

        result, failure = None, None
        try:
            result = None if work is None else work()
        except Exception as error:
            failure = error
        failures: list[Exception | None] = [None] * self.layout.ranks
        dist.all_gather_object(failures, None if failure is None else _portable(failure))
        if failure is not None:
            raise failure
        told = next((other for other in failures if other is not None), None)
        if told is not None:
            raise told
        return result

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, on all ranks."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def new_group(self) -> ProcessGroup:
        """All ranks once more, over gloo: for a thread that must not come between what the others say to each other."""
        import torch.distributed as dist

        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return group

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; the same answer on all."""
        import torch.distributed as dist

        if self._watch is not None:
            self._watch.step_begins()
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return bool(raised)

    def data_sum(self, number: int) -> int:
        """The sum of `number` over the data ranks."""
        import torch.distributed as dist

        total = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(total, group=self.data_group)
        return int(total)

    def loss_of_rank(self, error: BaseException) -> str | None:
        """What to tell where `error` is torch.distributed's way to say that another rank is gone; None where it is this rank that
        fails, which the others are then told. Of a loss it may take some seconds to find out whose."""
        text = str(error)
        if not is_loss_of_rank(error):
            if self._watch is not None:
                self._watch.leave_word(f"{type(error).__name__}: {text}" if text else type(error).__name__)
            return None
        missed = "" if self._watch is None else f" ({self._watch.missed()})"
        return (
            f"rank {self.rank}: another rank has ended or has not answered for {self._timeout_s:g} s{missed}, so this one ends "
            f"too. What made it end stands in its own lines; --resume goes on from the last checkpoint. "
            f"[{text.splitlines()[0] if text else type(error).__name__}]"
        )


def join(layout: Layout, device_of: Callable[[int], torch.device], timeout_s: float) -> Alone | Ranks:
    """The processes of this run, by torchrun's environment; ValueError unless `layout` takes that many.

    `device_of` gives the device of a host's rank of that number.
    """
    world_size = world_size_from_environment()
    layout.check_world(world_size)
    if world_size is None:
        return Alone()
    return Ranks(layout, device_of(int(os.environ["LOCAL_RANK"])).type, timeout_s)


def is_loss_of_rank(error: BaseException) -> bool:
    """Whether `error` is torch.distributed's way to say that another rank is gone."""
    kinds = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
    if any(kind.__name__.lstrip("_") in kinds for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))


def _portable(error: Exception) -> Exception:
    """An error as other ranks can raise it: of its own kind where that is made of a message alone."""
    try:
        portable: Exception = pickle.loads(pickle.dumps(type(error)(str(error))))
    except Exception:  # whatever a class of somebody else's does
        portable = (ValueError if isinstance(error, ValueError | OSError) else RuntimeError)(str(error))
    return portable
