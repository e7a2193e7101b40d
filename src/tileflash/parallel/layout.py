"""How ranks share the work, as facts: numbers that multiply to the world size, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tileflash.models import ModelConfig


@dataclass(frozen=True)
class Layout:
    """`data` x `tensor` ranks. Ranks that share a copy of the model (a tensor group) have neighbouring numbers.

    `zero_stage`: what the data ranks hold one part each of instead of a copy each; see docs/parallel.md.
    """

    data: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return self.data * self.tensor

    @property
    def shards_weights(self) -> bool:
        """Whether each data rank keeps only its part of weights and moments between steps (stages 1 to 3)."""
        return self.data > 1 and self.zero_stage > 0

    @property
    def label(self) -> str:
        """The end of the log line; ZeRO's stage is in it where there are data ranks for it to act on."""
        sequence = self.tensor if self.sequence_parallel else 1
        zero = f", ZeRO={self.zero_stage}" if self.data > 1 else ""
        return f"DP={self.data}, TP={self.tensor}, SP={sequence}, PP=1{zero}"

    def check_world(self, world_size: int | None) -> None:
        """ValueError unless the layout takes exactly `world_size` ranks; None: not started by torchrun."""
        product = f"data_parallel * tensor_parallel is {self.data} * {self.tensor} = {self.ranks}"
        if world_size is None and self.ranks > 1:
            raise ValueError(
                f"{product}, and this is a single process: start it by torchrun --nproc-per-node {self.ranks} -m "
                "tileflash train ..."
            )
        if world_size is not None and world_size != self.ranks:
            fitting = f"--data-parallel {world_size // self.tensor}" if world_size % self.tensor == 0 else "others"
            raise ValueError(f"{product}: it must be the number of ranks, {world_size} (for example {fitting})")

    def check_model(self, model: ModelConfig, sequence_length: int) -> None:
        """ValueError where the tensor ranks cannot share the model: what is cut by heads or columns must divide."""
        tensor = self.tensor
        columns = 4 * model.n_embd if model.family == "gpt2" else model.intermediate_size
        for name, value in (("n_head", model.n_head), ("n_kv_head", model.n_kv_head), ("the MLP's width", columns)):
            if value % tensor:
                raise ValueError(
                    f"tensor_parallel is {tensor}: it must divide {name}, {value}, for each rank has whole ones"
                )
        if self.sequence_parallel and sequence_length % tensor:
            raise ValueError(
                f"sequence_length is {sequence_length}: with sequence_parallel it must be a multiple of "
                f"tensor_parallel, {tensor}"
            )


SINGLE = Layout()
