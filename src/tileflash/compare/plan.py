"""What a comparison measures and in which order: settings, schemes, repeats, and each run's `tileflash train` line."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

BASELINE = "baseline"
FLASH = "flash"
SCHEMES = (BASELINE, FLASH)
DTYPES = ("float32", "bfloat16")
LANGUAGES = ("en", "zh")

# What `--ladder` measures: each rung has the flags of the one before it and one measure more. Names are parts of file names.
_LADDER = (
    ("ladder-baseline", ()),
    ("ladder-flash", ("--flash",)),
    ("ladder-fused", ("--fused-operators",)),
    ("ladder-split", ("--master-weights=split",)),
    ("ladder-compile", ("--compile",)),
    ("ladder-graph", ("--cuda-graph",)),
)


def _rungs() -> dict[str, tuple[str, ...]]:
    rungs: dict[str, tuple[str, ...]] = {}
    flags: tuple[str, ...] = ()
    for name, more in _LADDER:
        flags += more
        rungs[name] = flags if "--cuda-graph" in flags else ("--no-cuda-graph", *flags)
    # What the compiler is worth where the host does not set the pace.
    rungs["ladder-graph-alone"] = tuple(flag for flag in flags if flag != "--compile")
    return rungs


RUNGS = _rungs()

# The setting of the public InfiniTrain report: bfloat16, batch 4, sequence 64 (256 tokens a step), 10 steps.
PUBLIC_BATCH_SIZE, PUBLIC_SEQUENCE_LENGTH, PUBLIC_NUM_ITERATION, PUBLIC_DTYPE = 4, 64, 10, "bfloat16"


def model_name(model: str) -> str:
    """`model` as shown and as used in file names: a preset's name, or the stem of a TOML file."""
    return Path(model).stem if model.endswith(".toml") else model


@dataclass(frozen=True, order=True)
class Setting:
    """One problem that both schemes are measured on; a step trains on `batch_size * sequence_length` tokens."""

    model: str
    batch_size: int
    sequence_length: int
    num_iteration: int
    dtype: str

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def name(self) -> str:
        """A file name without suffix."""
        return f"{model_name(self.model)}-b{self.batch_size}-s{self.sequence_length}-n{self.num_iteration}-{self.dtype}"


@dataclass(frozen=True)
class Run:
    """One process: a setting, a scheme ("baseline", "flash" or one of `RUNGS`) and which repeat it is (from 1)."""

    setting: Setting
    scheme: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}-{self.scheme}-r{self.repeat}"


@dataclass(frozen=True)
class CompareConfig:
    """Everything `tileflash compare` was asked for; checked here once.

    Args:
        models: presets or TOML files, as `tileflash train` takes them; no two alike.
        lengths: sequence lengths in tokens, measured shortest first.
        repeats: how often each pair of baseline and flash is measured.
        num_iteration: optimizer steps of a run; at least 2, since the first is never counted.
        public_setting: measure the setting of the public report first.
        seed: of the models' weights, of the data, and of the order of the runs.
        learning_rate, warmup_iterations, input_bin, attention_backend: handed to `tileflash train` when given.
        cuda_graph: whether steps are one CUDA graph; None until `decided` has looked at the device.
        timeout_seconds: a run that takes longer is killed and counts as failed.
        budget_seconds: no run goes on beyond it; None is no limit.
        demo: the losses must fall and agree, or the exit status is 1.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """

    models: tuple[str, ...]
    batch_size: int = 4
    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 8192)
    repeats: int = 3
    num_iteration: int = 10
    dtype: str = PUBLIC_DTYPE
    device: str = "auto"
    seed: int = 42
    public_setting: bool = True
    learning_rate: float | None = None
    warmup_iterations: int | None = None
    input_bin: str | None = None
    attention_backend: str | None = None
    cuda_graph: bool | None = None
    output: Path = Path("reports/compare")
    language: str = "en"
    ledger: Path | None = None
    demo: bool = False
    budget_seconds: float | None = None
    timeout_seconds: float = 1800.0
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty; name at least one, for example gpt2")
        if len({model_name(model) for model in self.models}) < len(self.models):
            raise ValueError(f"models is {list(self.models)}: each must be given once")
        if not self.lengths or min(self.lengths) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths is {list(self.lengths)}; must be one or more different integers >= 1")
        minima = {"batch_size": 1, "repeats": 1, "num_iteration": 2, "seed": 0}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least {minimum}")
        for name, choices in {"dtype": DTYPES, "language": LANGUAGES}.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; must be one of {', '.join(choices)}")
        if self.warmup_iterations is not None and self.warmup_iterations < 0:
            raise ValueError(f"warmup_iterations is {self.warmup_iterations}; must be at least 0")
        for name in ("budget_seconds", "timeout_seconds", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; must be above 0")

    def public_settings(self) -> list[Setting]:
        """The public report's setting for each model, or nothing when it was not asked for."""
        if not self.public_setting:
            return []
        shape = (PUBLIC_BATCH_SIZE, PUBLIC_SEQUENCE_LENGTH, PUBLIC_NUM_ITERATION, PUBLIC_DTYPE)
        return [Setting(model, *shape) for model in self.models]

    def length_settings(self, model: str) -> list[Setting]:
        """The settings of `model` by sequence length, shortest first."""
        return [
            Setting(model, self.batch_size, length, self.num_iteration, self.dtype) for length in sorted(self.lengths)
        ]


def plan(config: CompareConfig) -> list[Run]:
    """Every run in the order it is made.

    The public report's setting comes first. Then each repeat goes through all models and lengths before the next one
    starts, so that a comparison that is cut short has measured every length at least once, and slow drift of the
    machine (clocks, temperature) shows as spread between repeats, not as a difference between lengths.

    Both schemes of a pair run back to back. Which one comes first in a setting's first repeat is drawn with
    `config.seed`; the order then turns round at each repeat (A B, B A, A B, ...), so that neither always comes first.
    """
    first = config.public_settings()
    later = [setting for model in config.models for setting in config.length_settings(model) if setting not in first]
    generator = random.Random(config.seed)
    flash_leads = {setting: generator.random() < 0.5 for setting in [*first, *later]}
    return [run for group in (first, later) for run in _pairs(group, config.repeats, flash_leads)]


def _pairs(settings: list[Setting], repeats: int, flash_leads: dict[Setting, bool]) -> Iterator[Run]:
    for repeat in range(1, repeats + 1):
        for setting in settings:
            flash_first = flash_leads[setting] == (repeat % 2 == 1)
            for scheme in reversed(SCHEMES) if flash_first else SCHEMES:
                yield Run(setting, scheme, repeat)


def train_arguments(config: CompareConfig, run: Run) -> list[str]:
    """The arguments after `tileflash train` that make `run`, without the log file: what a user would type."""
    setting = run.setting
    arguments = [setting.model]
    arguments += ["--batch-size", str(setting.batch_size), "--sequence-length", str(setting.sequence_length)]
    arguments += ["--total-batch-size", str(setting.tokens_per_step), "--num-iteration", str(setting.num_iteration)]
    arguments += ["--dtype", setting.dtype, "--device", config.device, "--seed", str(config.seed)]
    if config.learning_rate is not None:
        arguments += ["--learning-rate", repr(config.learning_rate)]
    if config.warmup_iterations is not None:
        arguments += ["--warmup-iterations", str(config.warmup_iterations)]
    if config.input_bin is not None:
        arguments += ["--input-bin", config.input_bin]
    flags = RUNGS.get(run.scheme)
    if flags is None:
        flags = (_cuda_graph_flag(config), *(("--flash",) if run.scheme == FLASH else ()))
    # Split masters are for bfloat16.
    arguments += [flag for flag in flags if setting.dtype == "bfloat16" or "split" not in flag]
    if "--flash" in flags and config.attention_backend is not None:
        arguments += ["--attention-backend", config.attention_backend]
    return arguments


def _cuda_graph_flag(config: CompareConfig) -> str:
    # Never left to the trainer's default: `--continue` knows runs by their arguments, and the default may change.
    assert config.cuda_graph is not None, "the comparison was not `decided`"
    return "--cuda-graph" if config.cuda_graph else "--no-cuda-graph"


def decided(config: CompareConfig) -> CompareConfig:
    """`config` with what it left open decided for this machine, once for all runs: whether steps are CUDA graphs.

    Raises:
        ValueError: when the device is not there, or cannot do what was asked for; when no backend has the name, or no
            token file. Told here, not by every run.
    """
    # Imported late: the trainer's settings bring PyTorch, which the rest of the plan does without.
    from tileflash.attention.dispatch import order_of
    from tileflash.data import TokenFiles
    from tileflash.train.setup import cuda_graph_in_force, find_device

    if config.attention_backend is not None:
        order_of(config.attention_backend)
    if config.input_bin is not None:
        TokenFiles(config.input_bin)
    return replace(config, cuda_graph=cuda_graph_in_force(config.cuda_graph, find_device(config.device)))


def compare_command(config: CompareConfig) -> list[str]:
    """The `tileflash compare` line that repeats this comparison: every option with the value it had."""
    command = ["tileflash", "compare", *config.models]
    command += ["--batch-size", str(config.batch_size), "--lengths", ",".join(map(str, sorted(config.lengths)))]
    command += ["--repeats", str(config.repeats), "--num-iteration", str(config.num_iteration)]
    command += ["--dtype", config.dtype, "--device", config.device, "--seed", str(config.seed)]
    command.append("--public-setting" if config.public_setting else "--no-public-setting")
    for name in ("learning_rate", "warmup_iterations", "input_bin", "attention_backend", "budget_seconds", "ledger"):
        value = getattr(config, name)
        if value is not None:
            command += ["--" + name.replace("_", "-"), str(value)]
    command.append(_cuda_graph_flag(config))
    if config.demo:
        command.append("--demo")
    command += ["--timeout-seconds", f"{config.timeout_seconds:g}", "--output", str(config.output)]
    return [*command, "--language", config.language]
