"""The flags of ledger lines: their names as written there, and their words in every table, the one place for both.

The first ones are written into the ledger by whoever measured. The later ones are found by `audit` whenever lines are read, so that
a rule made today holds for the lines of yesterday.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

UNSUPPORTED = "unsupported"
FAILED = "failed"
OUT_OF_MEMORY = "out_of_memory"
WRONG_RESULT = "wrong_result"
FASTER_THAN_LIMIT = "faster_than_limit"
LOSSES_DIFFER = "losses_differ"
TRIVIAL_INPUT = "trivial_input"
TIMER_DISAGREES = "timer_disagrees"
THROTTLED = "throttled"
LESS_THAN_NEEDED = "less_than_needed"
WIDE_SPREAD = "wide_spread"
CONTRADICTION = "contradiction"

# A figure with these alone is still what was measured, and counts in means; with any other it is not to be relied on.
DOUBTFUL = frozenset({WIDE_SPREAD, THROTTLED})
# What a peer or the GPU's memory cannot do is a result; these are no fault of the measurement.
RESULTS = frozenset({UNSUPPORTED, OUT_OF_MEMORY})


@dataclass(frozen=True)
class FlagWords:
    """`short` stands in a cell that has no figure; `meaning` explains a mark below the table."""

    short: str
    meaning: str


# language -> flag -> its words
FLAG_WORDS: Mapping[str, Mapping[str, FlagWords]] = MappingProxyType(
    {
        "en": {
            UNSUPPORTED: FlagWords("unsupported", "the variant does not serve this case"),
            FAILED: FlagWords("failed", "the variant raised an error"),
            OUT_OF_MEMORY: FlagWords("out of memory", "a run ended for lack of memory"),
            WRONG_RESULT: FlagWords("wrong result", "the result is not that of the fp32 reference"),
            FASTER_THAN_LIMIT: FlagWords(
                "impossible: faster than the limit", "the GPU cannot be so fast, so the figure is wrong"
            ),
            LOSSES_DIFFER: FlagWords(
                "losses differ",
                "at some step the losses of both schemes were further apart than was expected of rounding when this "
                "was measured",
            ),
            TRIVIAL_INPUT: FlagWords(
                "trivial input", "the inputs are constant or not finite, on which wrong results look right"
            ),
            TIMER_DISAGREES: FlagWords(
                "timer disagrees", "the host's clock, with the device waited for, says at least twice as long"
            ),
            THROTTLED: FlagWords("throttled", "the GPU lowered its clocks for heat or a fault while this was measured"),
            LESS_THAN_NEEDED: FlagWords(
                "impossible: less than needed", "what must be there needs more memory, so the figure is wrong"
            ),
            WIDE_SPREAD: FlagWords("wide spread", "lowest and highest are far apart for their median"),
            CONTRADICTION: FlagWords("contradiction", "another figure of the same run says that this cannot be"),
        },
        "zh": {
            UNSUPPORTED: FlagWords("不支持", "该实现不支持此配置"),
            FAILED: FlagWords("失败", "该实现运行出错"),
            OUT_OF_MEMORY: FlagWords("显存不足", "有运行因显存不足而终止"),
            WRONG_RESULT: FlagWords("结果错误", "结果与 fp32 参考不符"),
            FASTER_THAN_LIMIT: FlagWords("不可能：快于物理上限", "GPU 不可能如此之快，该数值有误"),
            LOSSES_DIFFER: FlagWords("损失不一致", "某一步两种方案的损失之差超过测量时对舍入误差的预期"),
            TRIVIAL_INPUT: FlagWords("输入无效", "输入为常数或含非有限值，错误的结果在其上也会显得正确"),
            TIMER_DISAGREES: FlagWords("计时不符", "等待设备完成后，主机时钟给出至少两倍的时间"),
            THROTTLED: FlagWords("降频", "测量期间 GPU 因过热或故障降低了频率"),
            LESS_THAN_NEEDED: FlagWords("不可能：少于所需", "必需的数据占用更多内存，该数值有误"),
            WIDE_SPREAD: FlagWords("波动过大", "相对于中位数，最低值与最高值相差过大"),
            CONTRADICTION: FlagWords("相互矛盾", "同一次运行中的另一数值表明该值不可能成立"),
        },
    }
)
