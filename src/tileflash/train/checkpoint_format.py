"""What torch.distributed.checkpoint is told: which rank writes and reads which boxes, and what seals a checkpoint.

Its own plans know DTensors. Ours hold plain tensors, rows of which may lie in another order than in the whole (the heads of
q, k and v), so every box is named here: full name, place, sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tileflash.files import Seal
from tileflash.parallel.box import Box
from tileflash.train.errors import causes_of


class BoxSavePlanner(DefaultSavePlanner):
    """Writes the boxes that each rank gives. Those of all ranks must fill every tensor once: PyTorch checks that before it writes."""

    state_dict: dict[str, list[Box]]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(box.offsets)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(box), properties=TensorProperties(dtype=box.tensor.dtype), size=box.shape
                    ),
                )
                for name, boxes in self.state_dict.items()
                for box in boxes
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self.state_dict, index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Reads into boxes, whatever boxes the file was written in. ValueError for names and shapes that are not in it."""

    state_dict: dict[str, list[Box]]

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, boxes in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"there is no {name} in it")
            for box in boxes:
                if stored.size != box.shape:
                    raise ValueError(f"{name} is {list(stored.size)} in it and {list(box.shape)} here")
            items += create_read_items_for_chunk_list(name, stored, [_chunk(box) for box in boxes])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self.state_dict, index)


class SealingWriter(FileSystemWriter):
    """Each rank writes one file to `path` and its seal; when all have, `seal` is called on the first one with every file's."""

    def __init__(self, path: Path, seal: Callable[[list[Seal]], None]) -> None:
        # The boxes are in the host's memory. A thread that copied ahead from a GPU would do so from GPU 0 on every rank.
        super().__init__(path, sync_files=True, per_thread_copy_ahead=0)
        self._seal_all = seal

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).wait()
            # On their way to the first rank seals stand among the results, which take any value.
            files = Path(self.path).glob(f"{plan.storage_data.prefix}*")
            seals = [WriteResult(MetadataIndex(file.name), 0, Seal.of(file)) for file in files]
        except Exception as error:
            # On its way to other ranks an error loses what led to it, and torch.save wraps the disk's in one of its own.
            refused = next((cause for _, cause in causes_of(error) if isinstance(cause, OSError)), error)
            raise refused from None
        results: Future[list[WriteResult]] = Future()
        results.set_result([*written, *seals])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        together = [result for of_rank in results for result in of_rank]
        super().finish(metadata, [[result for result in together if not isinstance(result.storage_data, Seal)]])
        self._seal_all([result.storage_data for result in together if isinstance(result.storage_data, Seal)])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape)


def _find(stored: Mapping[str, list[Box]], index: MetadataIndex) -> torch.Tensor:
    return next(box.tensor for box in stored[index.fqn] if torch.Size(box.offsets) == index.offset)
