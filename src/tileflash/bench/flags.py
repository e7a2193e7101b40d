"""The flags of ledger lines: their names as written there, and their words in every table, the one place for both."""

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
        },
        "zh": {
            UNSUPPORTED: FlagWords("不支持", "该实现不支持此配置"),
            FAILED: FlagWords("失败", "该实现运行出错"),
            OUT_OF_MEMORY: FlagWords("显存不足", "有运行因显存不足而终止"),
            WRONG_RESULT: FlagWords("结果错误", "结果与 fp32 参考不符"),
            FASTER_THAN_LIMIT: FlagWords("不可能：快于物理上限", "GPU 不可能如此之快，该数值有误"),
            LOSSES_DIFFER: FlagWords("损失不一致", "某一步两种方案的损失之差超过测量时对舍入误差的预期"),
        },
    }
)
