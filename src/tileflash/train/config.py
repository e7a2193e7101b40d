"""Every setting of a training run, declared once: the flags of `tileflash train`, the keys of a TOML file, checks."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _facts(
    help_text: str,
    group: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> dict[str, Any]:
    return {"help": help_text, "group": group, "minimum": minimum, "maximum": maximum, "choices": choices}


def _option(default: Any, help_text: str, group: str, **facts: Any) -> Any:
    """A field that is also a flag; `facts` as in `_facts`, where `minimum` and `maximum` are themselves allowed."""
    return field(default=default, metadata=_facts(help_text, group, **facts))


_SMALLEST = sys.float_info.min  # the smallest number that is not zero: for what must be positive


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one run; frozen, checked here once. ValueError names the setting, its value, what it must be."""

    model: str
    model_overrides: dict[str, Any] = field(
        default_factory=dict, metadata=_facts("change a field of the preset, as n_layer=2; may be repeated", "Model")
    )
    init_from: str | None = _option(
        None, "start from these weights: a Hugging Face directory, or an llm.c .bin file", "Model"
    )
    seed: int = _option(
        42, "seed of the initial weights, of --shuffle and of sampling", "Model", minimum=0, maximum=2**64 - 1
    )

    flash: bool = _option(
        False, "use tileflash.attention; without it, the unfused chain of small operators (the baseline)", "Attention"
    )
    attention_backend: str = _option("auto", "with --flash: the backend, by name; auto takes the best one", "Attention")
    separate_documents: bool = _option(
        False,
        "with --flash: a token sees only its own document, which begins at the tokenizer's begin-of-text token (GPT-2: end-of-text)",
        "Attention",
    )

    fused_operators: bool = _option(
        False,
        "norms with their residual adds, SwiGLU, rotary embedding and the loss by kernels that move less memory, and "
        "logits that are never whole (docs/operators.md); faster and smaller in the one sitting that measured it, not yet the default",
        "Operators",
    )

    master_weights: str = _option(
        "float32",
        "where the fp32 master of a weight lies. float32: the weight is it, and autocast rounds it anew in each step; split: the weight is "
        "bfloat16, and the optimizer keeps 16 more bits, which are the master together; needs --dtype bfloat16",
        "Operators",
        choices=("float32", "split"),
    )
    gradient_dtype: str = _option(
        "float32",
        "with --master-weights split: what gradients of several micro-batches are summed in",
        "Operators",
        choices=("float32", "bfloat16"),
    )
    compile: bool = _option(
        False,
        "compile each layer with torch.compile; the first step then takes a minute",
        "Operators",
    )
    recompute: str = _option(
        "none",
        "what the backward pass computes again instead of keeping it: none; selective: all but matrix products and attention; full: "
        "whole layers",
        "Operators",
        choices=("none", "selective", "full"),
    )

    memory_budget: float | None = _option(
        None,
        "GB (10^9 bytes) that a step may use on a GPU: the least recomputation that stays below it is chosen, by trying; instead of "
        "--recompute",
        "Operators",
        minimum=_SMALLEST,
    )

    input_bin: str | None = _option(
        None, "training tokens: a .bin file of llm.c's format or a glob of shards; without it, the demo corpus", "Data"
    )
    input_val_bin: str | None = _option(None, "validation tokens, as --input-bin", "Data")
    tokenizer: str | None = _option(
        None,
        "for the demo corpus and for samples: gpt2, bytes or llama3; default by the vocabulary",
        "Data",
        choices=("gpt2", "bytes", "llama3"),
    )
    tokenizer_path: str | None = _option(None, "file of the tokenizer (llama3: tokenizer.model)", "Data")
    data_directory: str | None = _option(
        None, "where the demo corpus is written once as .bin files; default ~/.cache/tileflash", "Data"
    )
    shuffle: bool = _option(False, "shuffle the samples anew in each epoch; else they come in file order", "Data")

    batch_size: int = _option(4, "samples in one forward pass of one rank", "Batch", minimum=1)
    sequence_length: int = _option(64, "tokens in a sample", "Batch", minimum=1)
    total_batch_size: int | None = _option(
        None,
        "tokens in a step of all ranks, a multiple of batch size x sequence length x data ranks: gradients are "
        "accumulated up to it; default: one batch of each",
        "Batch",
        minimum=1,
    )
    num_iteration: int = _option(10, "steps", "Batch", minimum=1)

    learning_rate: float = _option(1e-4, "highest learning rate", "Optimizer", minimum=_SMALLEST)
    warmup_iterations: int = _option(0, "steps of linear warm-up", "Optimizer", minimum=0)
    final_learning_rate_fraction: float = _option(
        0.1, "the cosine ends at this fraction of --learning-rate; 1: constant", "Optimizer", minimum=0, maximum=1
    )
    weight_decay: float = _option(0.1, "decay of weights with 2 or more dimensions", "Optimizer", minimum=0)
    gradient_clip: float = _option(1.0, "largest norm of the gradient; 0: not clipped", "Optimizer", minimum=0)

    skip_loss_z: float = _option(
        0.0,
        "skip a step whose loss lies this many standard deviations above the last steps'; 0: off",
        "Guard",
        minimum=0,
    )
    skip_gradient_z: float = _option(0.0, "the same for the norm of the gradient; 0: off", "Guard", minimum=0)
    skip_window: int = _option(128, "number of last steps that the two above look at", "Guard", minimum=2)
    max_skips_in_a_row: int = _option(
        10, "stop after this many skipped steps in a row (NaN or Inf always skips)", "Guard", minimum=1
    )

    data_parallel: int = _option(
        1, "ranks that share the samples of a step; with torchrun, see docs/parallel.md", "Parallel", minimum=1
    )
    zero_stage: int = _option(
        0,
        "what data (and context) ranks hold one part each of, not a copy each: 1 the optimizer's moments and the weights between "
        "steps, 2 also the gradients between micro-batches, 3 also the weights between layers",
        "Parallel",
        minimum=0,
        maximum=3,
    )
    tensor_parallel: int = _option(1, "ranks that share each layer: heads, columns, vocabulary", "Parallel", minimum=1)
    sequence_parallel: bool = _option(
        False, "tensor ranks also share what lies between the products, along the sequence", "Parallel"
    )
    pipeline_parallel: int = _option(1, "ranks that share the layers, a run of them each", "Parallel", minimum=1)
    pipeline_schedule: str = _option(
        "1f1b",
        "in which order: gpipe, 1f1b, interleaved (two runs of layers a rank) or zb (the same, and the gradients of weights are "
        "computed where a rank would wait)",
        "Parallel",
        choices=("gpipe", "1f1b", "interleaved", "zb"),
    )
    context_parallel: int = _option(
        1, "ranks that share each sequence, along its length; needs --flash", "Parallel", minimum=1
    )
    context_parallel_kind: str = _option(
        "ring",
        "how: ring (keys go round, memory is divided) or ulysses (heads are exchanged; they must divide)",
        "Parallel",
        choices=("ring", "ulysses"),
    )
    rank_timeout: float = _option(
        600.0,
        "seconds after which a rank that others wait for counts as lost; more than saving takes",
        "Parallel",
        minimum=1,
    )

    device: str = _option("auto", "auto (a GPU where there is one), cpu, cuda or cuda:N", "Device")
    dtype: str = _option(
        "auto",
        "of the computation; weights stay float32. auto: bfloat16 on a GPU that has it, else float32",
        "Device",
        choices=("auto", "float32", "bfloat16"),
    )
    cuda_graph: bool | None = _option(
        None,
        "capture the step in CUDA graphs and replay them, so that small batches do not wait for the host; an error "
        "where that fails. When not given: yes on an NVIDIA GPU, and where it fails a warning and eager steps",
        "Device",
    )
    deterministic: bool = _option(
        False, "only operators that give the same bits each time (slower); an error where there is none", "Device"
    )

    val_loss_every: int = _option(
        0, "validation loss every so many steps and after the last; 0: never", "Evaluation", minimum=0
    )
    val_max_batches: int = _option(20, "batches of one validation, of each data rank", "Evaluation", minimum=1)
    sample_every: int = _option(
        0,
        "write a sample of text every so many steps and after the last; 0: never",
        "Evaluation",
        minimum=0,
    )
    text_length: int = _option(64, "tokens in a sample of text, the prompt included", "Evaluation", minimum=1)
    prompt: str = _option("", "how samples begin; empty: at the end-of-text token", "Evaluation")
    temperature: float = _option(0.8, "of sampling; 0: always the most likely token", "Evaluation", minimum=0)
    top_k: int = _option(50, "sample among this many most likely tokens; 0: among all", "Evaluation", minimum=0)

    output: str | None = _option(
        None, "directory for checkpoints, log.jsonl and TensorBoard; without it nothing is saved", "Output"
    )
    save_every: int = _option(
        0, "checkpoint every so many steps (the last is always saved); 0: only the last", "Output", minimum=0
    )
    keep: int = _option(3, "checkpoints to keep", "Output", minimum=1)
    resume: bool = _option(False, "go on from the last complete checkpoint of --output, if there is one", "Output")
    load: str | None = _option(
        None, "go on from this checkpoint, or from the last complete one of this directory", "Output"
    )
    log_json: str | None = _option(None, "JSON-lines log; default OUTPUT/log.jsonl", "Output")
    tensorboard: bool = _option(True, "write OUTPUT/tensorboard", "Output")

    def __post_init__(self) -> None:
        for name, expected in get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), expected)
        for setting in dataclasses.fields(self):
            _check_range(setting, getattr(self, setting.name))
        self._check_batch()
        self._check_output()
        self._check_parallel()
        self._check_operators()
        if self.attention_backend != "auto" and not self.flash:
            raise ValueError(
                f'attention_backend is "{self.attention_backend}" and flash is off: the baseline has no backends; add --flash'
            )
        if self.separate_documents and not self.flash:
            raise ValueError("separate_documents is set and flash is off: the baseline has no documents; add --flash")
        if self.tokenizer == "llama3" and self.tokenizer_path is None:
            raise ValueError("tokenizer is llama3 and tokenizer_path is not set: it must name the tokenizer.model file")

    def _check_operators(self) -> None:
        if self.gradient_dtype != "float32" and self.master_weights != "split":
            raise ValueError(
                f"gradient_dtype is {self.gradient_dtype} and master_weights {self.master_weights}: gradients have their weights' dtype; "
                "it must be float32, or master_weights split"
            )
        if self.master_weights == "split" and self.dtype == "float32":
            raise ValueError(
                "master_weights is split and dtype float32: the weights are bfloat16, and dtype must be it"
            )
        if self.compile and self.recompute == "selective":
            raise ValueError(
                "compile is set and recompute is selective: the compiler chooses by itself what to compute again; recompute must be "
                "none or full"
            )

        if self.memory_budget is not None and self.recompute != "none":
            raise ValueError(
                f"memory_budget is set and recompute is {self.recompute}: the budget chooses it; leave recompute at none"
            )

    def _check_batch(self) -> None:
        batch_tokens = self._pass_tokens
        if self.step_tokens % batch_tokens:
            factors, ranks = f"{self.batch_size} * {self.sequence_length}", ""
            if self.data_parallel > 1:
                factors, ranks = f"{factors} * {self.data_parallel}", " * data_parallel"
            raise ValueError(
                f"total_batch_size is {self.step_tokens} tokens: it must be a multiple of batch_size * sequence_length"
                f"{ranks} = {factors} = {batch_tokens} (for example "
                f"{math.ceil(self.step_tokens / batch_tokens) * batch_tokens})"
            )

    def _check_parallel(self) -> None:
        if self.zero_stage and self.data_parallel * self.context_parallel == 1:
            raise ValueError(
                f"zero_stage is {self.zero_stage} and data_parallel is 1: there are no data ranks to share anything"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel is set and tensor_parallel is 1: there are no ranks to share a sequence"
            )
        if self.context_parallel > 1 and not self.flash:
            raise ValueError(
                f"context_parallel is {self.context_parallel} and flash is off: the baseline needs whole sequences; add --flash"
            )
        parallel = (self.data_parallel, self.tensor_parallel, self.context_parallel, self.pipeline_parallel)
        if self.cuda_graph and math.prod(parallel) > 1:
            raise ValueError("cuda_graph is set: steps of several ranks are not captured; it must be off")

    def _check_output(self) -> None:
        if self.resume and self.load is not None:
            raise ValueError("resume and load are both set: give one of them (load PATH, or resume for output)")
        if self.resume and self.output is None:
            raise ValueError("resume is set and output is not: output must name the directory to go on from")
        if self.save_every and self.output is None:
            raise ValueError(f"save_every is {self.save_every} and output is not set: output must name a directory")
        if self.init_from is not None and self.model_overrides:
            raise ValueError("model_overrides and init_from are both set: the weights fix the model; give one of them")

    @property
    def step_tokens(self) -> int:
        """Tokens in one optimizer step."""
        return self._pass_tokens if self.total_batch_size is None else self.total_batch_size

    @property
    def _pass_tokens(self) -> int:
        """Tokens in one forward pass of all ranks."""
        return self.batch_size * self.sequence_length * self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of each rank in one optimizer step."""
        return self.step_tokens // self._pass_tokens

    @property
    def step_samples(self) -> int:
        """Samples in one optimizer step of all ranks."""
        return self.step_tokens // self.sequence_length

    def as_dict(self) -> dict[str, Any]:
        """All settings, for the log and the checkpoint; `total_batch_size` is the number in force."""
        return {**dataclasses.asdict(self), "total_batch_size": self.step_tokens}


def load_toml(path: Path) -> dict[str, Any]:
    """The settings that a TOML file gives; keys are the flags' names, `-` or `_`. ValueError for a key that is none."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
        raise ValueError(f"{path} is no valid TOML: {error}") from error
    settings = {name.replace("-", "_"): value for name, value in values.items()}
    check_names(settings, where=str(path))
    if "model" not in settings:
        raise ValueError(f'{path} has no key "model": it must name a preset, as model = "gpt2"')
    return settings


def parse_override(text: str) -> tuple[str, Any]:
    """`n_layer=2` as ("n_layer", 2); values are written as in TOML, words without quotes are strings."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f'model_override is "{text}": it must be FIELD=VALUE, as n_layer=2')
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def check_names(settings: Mapping[str, Any], where: str) -> None:
    """ValueError naming every key that is no setting, with the nearest name there is."""
    known = [setting.name for setting in dataclasses.fields(TrainConfig)]
    wrong = []
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            wrong.append(f'"{name}"' + (f' (did you mean "{near[0]}"?)' if near else ""))
    if wrong:
        raise ValueError(f"{where} has unknown keys: {', '.join(wrong)}; there are: {', '.join(known)}")


def _check_type(name: str, value: Any, expected: Any) -> None:
    allowed = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    kinds = tuple(get_origin(kind) or kind for kind in allowed)
    if float in kinds:
        kinds += (int,)
    # bool is a subclass of int, but `batch_size = true` is a slip.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{name} is {value!r}: it must be {names}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be finite")


def _check_range(setting: dataclasses.Field[Any], value: Any) -> None:
    if value is None or not setting.metadata:
        return
    minimum, maximum, choices = (setting.metadata[key] for key in ("minimum", "maximum", "choices"))
    if minimum is not None and value < minimum:
        bound = "positive" if minimum == _SMALLEST else f"at least {minimum}"
        raise ValueError(f"{setting.name} is {value}: it must be {bound}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{setting.name} is {value}: it must be at most {maximum}")
    if choices and value not in choices:
        raise ValueError(f'{setting.name} is "{value}": it must be one of {", ".join(choices)}')
