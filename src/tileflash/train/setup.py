"""From settings to facts: the device, precision, model, tokenizer, data and attention of a run. Takes no memory yet."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tileflash.data import TokenFiles, Tokenizer, get_tokenizer, read_dataset
from tileflash.models import AttentionFunction, LayerOperators, ModelConfig, model_config, unfused_attention
from tileflash.models.operators import PLAIN
from tileflash.parallel.layout import SINGLE, Layout
from tileflash.train.config import TrainConfig
from tileflash.train.data_source import open_data
from tileflash.train.fused import FUSED, fused_loss
from tileflash.train.step import LossFunction, plain_loss

_GPT2_VOCABULARY = 50257
_BYTES_VOCABULARY = 257


@dataclass(frozen=True)
class Setup:
    """What a run consists of, all of it checked. `attention_name` says in words what computes attention.

    `document_start`: the token at which documents begin that do not see each other; None: they do.
    """

    device: torch.device
    dtype: torch.dtype
    cuda_graph: bool
    model: ModelConfig
    attention: AttentionFunction
    attention_name: str
    document_start: int | None
    operators: LayerOperators
    loss_function: LossFunction
    tokenizer: Tokenizer | None
    training: TokenFiles
    validation: TokenFiles | None
    notes: tuple[str, ...]


def prepare_setup(config: TrainConfig, layout: Layout = SINGLE, local_rank: int | None = None) -> Setup:
    """Resolve and check everything that `config` leaves open. ValueError names what does not fit.

    `local_rank`: which of its host's ranks this is, None: the only one of the run.
    """
    device = find_device(config.device) if local_rank is None else rank_device(config.device, local_rank)
    cuda_graph = local_rank is None and cuda_graph_in_force(config.cuda_graph, device)
    device = _use(device)
    dtype = _dtype(config.dtype, device)
    if config.memory_budget is not None and device.type != "cuda":
        raise ValueError(
            f"memory_budget is set and the device is {device}: it is for GPUs, where memory can be measured"
        )
    model, notes = _model(config)
    layout.check_model(model, config.sequence_length)
    _check_one_rank(config, layout.ranks)
    if config.master_weights == "split" and dtype != torch.bfloat16:
        raise ValueError(f"master_weights is split and the computation is in {dtype} on {device}: add --dtype bfloat16")
    tokenizer = _tokenizer(config, model.vocab_size)
    training, validation = open_data(config, tokenizer, model.vocab_size)
    attention, attention_name = _attention(config, model, device, dtype, layout)
    return Setup(
        device, dtype, cuda_graph, model, attention, attention_name, _document_start(config, tokenizer), *_operators(config),
        tokenizer, training, validation, tuple(notes),
    )  # fmt: skip


def _check_one_rank(config: TrainConfig, ranks: int) -> None:
    """ValueError for what only one rank can do as yet."""
    if ranks == 1:
        return
    defaults = {setting.name: setting.default for setting in dataclasses.fields(config)}
    for name, what in (
        ("fused_operators", "fused operators are"),
        ("master_weights", "split masters are"),
        ("compile", "compilation is"),
        ("recompute", "recomputation is"),
        ("memory_budget", "a memory budget is"),
    ):
        value = getattr(config, name)
        if value != defaults[name]:
            setting = f"{name} is set" if value is True else f"{name} is {value}"
            raise ValueError(f"{setting} and there are {ranks} ranks: {what} for one rank as yet")


def cuda_graph_in_force(asked: bool | None, device: torch.device) -> bool:
    """Whether steps on `device` are captured, where `asked` is None by default; ValueError where they cannot be."""
    if asked is None:
        # PyTorch calls AMD GPUs "cuda" too. There it has never been tried, so it must be asked for.
        return device.type == "cuda" and torch.version.hip is None
    if asked and device.type != "cuda":
        raise ValueError(f"cuda_graph is set and the device is {device}: it must be a GPU, or cuda_graph off")
    return asked


def find_device(name: str) -> torch.device:
    """The device that `name` (auto, cpu, cuda or cuda:N) means here; ValueError where there is none.

    Nothing is started on a GPU: whoever only asks takes none of its memory from those who run there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'device is "{name}": it must be auto, cpu, cuda or cuda:N')
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'device is "{name}": PyTorch {torch.__version__} sees no GPU here; it must be cpu or auto')
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(f'device is "{name}": there are {torch.cuda.device_count()} GPUs, numbered from 0')
    return device


def find_gpu_device(name: str) -> str:
    """`name` (auto, cuda or cuda:N) as PyTorch knows it, for what only a GPU can do; ValueError where it is none."""
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f'device is "{name}": PyTorch {torch.__version__} sees no GPU here, and this needs one')
    device = find_device(name)
    if device.type != "cuda":
        raise ValueError(f'device is "{name}": this needs a GPU; it must be auto, cuda or cuda:N')
    return str(device)


def rank_device(name: str, local_rank: int) -> torch.device:
    """The device of a host's rank `local_rank`: the CPU, or the GPU of that number. ValueError where there is none."""
    device = find_device(name)
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(f'device is "{name}": with several ranks each takes the GPU of its number; it must be cuda')
    return find_device(f"cuda:{local_rank}")


def _use(device: torch.device) -> torch.device:
    """Make a GPU the current one; the device with its number."""
    if device.type == "cpu":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)  # kernels launched by Triton go to the current device
    _use_expandable_segments()
    return torch.device("cuda", index)


def _use_expandable_segments() -> None:
    """Let the caching allocator grow its segments instead of cutting fixed ones up.

    Otherwise a block may be up to 1 MiB larger than what was asked for, counts as used whole, and two schemes that need the same memory
    differ in their peaks by chance; long runs also reserve less. Whoever configures the allocator by PyTorch's own variable is left alone.
    """
    if torch.version.hip is None and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # Not is_bf16_supported(): it also says yes where bfloat16 is emulated.
        native = device.type == "cuda" and (
            torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
        )
        return torch.bfloat16 if native else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _model(config: TrainConfig) -> tuple[ModelConfig, list[str]]:
    """The model's configuration, long enough for the run's sequences, and what the user should know of it."""
    if config.init_from is not None:
        model = _stored_model(config.model, config.init_from)
        if model.family == "gpt2" and config.sequence_length > model.max_sequence_length:
            raise ValueError(
                f"sequence_length is {config.sequence_length}: the weights at {config.init_from} have learned "
                f"{model.max_sequence_length} positions; it must be at most that"
            )
        notes = [f"weights from {config.init_from}"]
    else:
        model, notes = model_config(config.model, **config.model_overrides), []
    longest = model.max_sequence_length
    if config.sequence_length <= longest:
        return model, notes
    if "max_sequence_length" in config.model_overrides:
        raise ValueError(
            f"sequence_length is {config.sequence_length} and max_sequence_length {longest}: it must be at most that"
        )
    notes.append(f"{config.model} has {longest} positions; this run's has {config.sequence_length}")
    return dataclasses.replace(model, max_sequence_length=config.sequence_length), notes


def _stored_model(name: str, path: str) -> ModelConfig:
    """The configuration of the weights at `path`; ValueError if `name` is a preset of another size."""
    from tileflash.weights import config_from_path

    stored, preset = config_from_path(path), model_config(name)
    sizes = ("family", "n_layer", "n_head", "n_kv_head", "n_embd", "vocab_size")
    different = [
        f"{size}: {getattr(preset, size)} -> {getattr(stored, size)}"
        for size in sizes
        if getattr(preset, size) != getattr(stored, size)
    ]
    if different:
        raise ValueError(
            f"model is {name}, but init_from is {path}, which holds another model ({'; '.join(different)})"
        )
    return stored


def _tokenizer(config: TrainConfig, vocab_size: int) -> Tokenizer | None:
    """The tokenizer asked for; else the one the data was made with; else the one that fits the vocabulary.

    None where the run has no use for one, or there is none: only the demo corpus, samples of text and documents need it.
    """
    needless = not config.sample_every and not config.separate_documents
    if config.tokenizer is None and config.input_bin is not None and needless:
        return None
    name = config.tokenizer
    if name is None and config.input_bin is not None:
        dataset = read_dataset(Path(config.input_bin).parent)
        # Llama-3's own needs a file that only the user can name.
        name = dataset.tokenizer if dataset is not None and dataset.tokenizer != "llama3" else None
    if name is None:
        name = "gpt2" if vocab_size >= _GPT2_VOCABULARY else "bytes" if vocab_size >= _BYTES_VOCABULARY else None
    if name is None:
        return None
    try:
        return get_tokenizer(name, None if config.tokenizer_path is None else Path(config.tokenizer_path))
    except ValueError as error:
        if config.tokenizer is not None:
            raise
        raise ValueError(f"{error}; or choose another with --tokenizer, as --tokenizer bytes") from error


def _attention(
    config: TrainConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, layout: Layout
) -> tuple[AttentionFunction, str]:
    if not config.flash:
        return unfused_attention, "unfused chain of small operators (the baseline; --flash for fused kernels)"
    import tileflash

    backend = config.attention_backend
    ring = layout.context > 1 and layout.context_kind == "ring"
    length = config.sequence_length // layout.context if ring else config.sequence_length
    ranks = layout.tensor if ring else layout.tensor * layout.context

    def example(heads: int) -> torch.Tensor:  # [B, S, H, D], of no size in memory
        one_head = torch.empty(model.head_dim, device=device, dtype=dtype, requires_grad=True)
        return one_head.expand(config.batch_size, length, max(heads // ranks, 1), model.head_dim)

    q, k, v = (example(heads) for heads in (model.n_head, model.n_kv_head, model.n_kv_head))
    ids = torch.zeros(q.shape[:2], dtype=torch.int32, device=device) if config.separate_documents else None
    explanation = tileflash.explain(q, k, v, causal=True, backend=backend, return_lse=ring, document_ids=ids)
    if explanation.choice is None:  # told before anything is built
        raise ValueError(f'attention_backend is "{backend}": {explanation}')
    name = f"tileflash.attention: {explanation.choice}"
    if layout.context > 1:
        name += f", {'a ring' if ring else 'Ulysses'} of {layout.context} ranks"
    return functools.partial(tileflash.attention, backend=backend), name


def _document_start(config: TrainConfig, tokenizer: Tokenizer | None) -> int | None:
    if not config.separate_documents:
        return None
    if tokenizer is None:
        raise ValueError(
            "separate_documents is set and no tokenizer says with which token they begin: name it with --tokenizer"
        )
    return tokenizer.begin_of_text


def _operators(config: TrainConfig) -> tuple[LayerOperators, LossFunction]:
    return (FUSED, fused_loss) if config.fused_operators else (PLAIN, plain_loss)
