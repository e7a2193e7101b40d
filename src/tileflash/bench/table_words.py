"""The words of the generated tables in the languages of the READMEs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tileflash.bench.flags import FLAG_WORDS, FlagWords


@dataclass(frozen=True)
class Words:
    """One language's headings and sentences; `{...}` are filled in."""

    mask: str
    masks: dict[str, str]
    tflops: str
    ratio: str
    limit: str
    mean: str
    directions: dict[str, str]
    all_points: str
    summary_note: str
    summary_flagged: str
    flags: Mapping[str, FlagWords]
    flag_note: str
    flag_unknown: str
    model: str
    batch_by_sequence: str
    runs: str
    step_ms: str
    tokens_per_s: str
    peak_mb: str
    speed_up: str
    memory_saving: str
    variants: dict[str, str]
    provenance: str
    attention_note: str
    train_note: str
    cuda_graph: Mapping[bool, str]
    nothing: str


_ENGLISH = Words(
    mask="mask",
    masks={"full": "full", "causal": "causal"},
    tflops="{variant}, TFLOP/s",
    ratio="{variant} / {baseline}",
    limit="limit, TFLOP/s",
    directions={"forward": "forward", "backward": "backward"},
    all_points="all",
    summary_note="Geometric means over full and causal masks and all lengths on one {gpu}; every point is in the long tables.",
    summary_flagged=" Flagged figures that are left out: {count}.",
    mean="Geometric mean of {variant} / {baseline}: **{ratio}** over {points} points.",
    flags=FLAG_WORDS["en"],
    flag_note="{short} (`{flag}`): {meaning}.",
    flag_unknown="`{flag}`: a flag of the ledger that this version has no words for.",
    model="model",
    batch_by_sequence="batch × sequence",
    runs="runs",
    step_ms="ms a step, {variant}",
    tokens_per_s="tok/s, {variant}",
    peak_mb="peak MB, {variant}",
    speed_up="speed-up",
    memory_saving="memory saving",
    variants={"baseline": "baseline", "flash": "flash"},
    provenance="*{gpu}; {versions}; commit {commit}; {date}. Repeat it: `{command}`*",
    attention_note=(
        "{dtype}, {tokens:,} tokens, heads × head dimension = {width}; TFLOP/s count 4·B·H·S²·D forward, × 2.5 backward, "
        "halved when causal; ratios are of speeds, median (lowest – highest) of {rounds} interleaved rounds."
    ),
    train_note=(
        "{dtype}{graph}; median of the runs of each scheme, each in its own process; speed-up = baseline / flash in ms a "
        "step, memory saving = 1 - flash / baseline of the peak (MB = 2^20 bytes), with the lowest – highest that the "
        "runs allow. Of a single run no spread is known."
    ),
    cuda_graph={True: "; each step one CUDA graph", False: "; no CUDA graphs"},
    nothing="*No measurement yet. Make one: `{command}`*",
)

_CHINESE = Words(
    mask="掩码",
    masks={"full": "无掩码", "causal": "因果"},
    tflops="{variant}（TFLOP/s）",
    ratio="{variant} / {baseline}",
    limit="物理上限（TFLOP/s）",
    directions={"forward": "前向", "backward": "反向"},
    all_points="全部",
    summary_note="在一块 {gpu} 上对完整与因果掩码、全部长度取的几何平均；每个测点见下面的长表。",
    summary_flagged="{count} 个带标记的数值未计入。",
    mean="{variant} / {baseline} 的几何平均：**{ratio}**（{points} 个测点）。",
    flags=FLAG_WORDS["zh"],
    flag_note="{short}（`{flag}`）：{meaning}。",
    flag_unknown="`{flag}`：此版本未收录的 ledger 标记。",
    model="模型",
    batch_by_sequence="批大小 × 序列长度",
    runs="运行次数",
    step_ms="每步毫秒，{variant}",
    tokens_per_s="tok/s，{variant}",
    peak_mb="峰值显存 MB，{variant}",
    speed_up="加速比",
    memory_saving="显存节省",
    variants={"baseline": "基线", "flash": "flash"},
    provenance="*{gpu}；{versions}；提交 {commit}；{date}。复现：`{command}`*",
    attention_note=(
        "{dtype}，共 {tokens:,} 个 token，头数 × 头维度 = {width}；TFLOP/s 按前向 4·B·H·S²·D 计，反向 × 2.5，因果掩码减半；"
        "比值为速度之比，取 {rounds} 轮交错测量的中位数（最低 – 最高）。"
    ),
    train_note=(
        "{dtype}{graph}；各方案所列次数的运行的中位数，每次独立进程；加速比 = 基线 / flash 的每步毫秒，显存节省 = 1 - flash / 基线的"
        "峰值（MB = 2^20 字节），括号内为各次运行所容许的最低 – 最高；只运行一次时，波动范围未知。"
    ),
    cuda_graph={True: "；每一步均为一个 CUDA graph", False: "；未使用 CUDA graph"},
    nothing="*尚无测量数据。运行：`{command}`*",
)

LANGUAGES = {"en": _ENGLISH, "zh": _CHINESE}


def words_for(language: str) -> Words:
    """The words of `en` or `zh`; ValueError for another language."""
    if language not in LANGUAGES:
        raise ValueError(f"`language` was {language!r}; it must be one of {', '.join(LANGUAGES)}")
    return LANGUAGES[language]
