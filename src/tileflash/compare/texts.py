"""Every text of a comparison's report, in English and in Chinese side by side; plots are labelled in English only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tileflash.compare.plan import LANGUAGES
from tileflash.compare.prose import PROSE


@dataclass(frozen=True)
class Texts:
    """The texts of one language: `texts("key", name=value, ...)` is the text with its placeholders filled."""

    language: str
    entries: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        return self.entries[key].format(**values)

    def sentence_space(self) -> str:
        """What stands between two sentences."""
        return "" if self.language == "zh" else " "

    def listed(self, items: list[str]) -> str:
        return ("、" if self.language == "zh" else ", ").join(items)


def texts(language: str) -> Texts:
    """The texts of `language` ("en" or "zh"); ValueError for another."""
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}; must be one of {', '.join(LANGUAGES)}")
    column = LANGUAGES.index(language)
    return Texts(language, MappingProxyType({key: pair[column] for key, pair in {**TEXTS, **PROSE}.items()}))


# key -> (English, Chinese). The longer ones (definitions, how to read, caveats) are in `prose.py`.
TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # Title and headings
        "title": (
            "Training with and without FlashAttention: {models}",
            "启用与不启用 FlashAttention 的训练对比：{models}",
        ),
        "subtitle": ("Measured on {device}, {date}", "测试设备：{device}，{date}"),
        "heading.environment": ("Environment", "测试环境"),
        "heading.configuration": ("Configuration", "测试配置"),
        "heading.command": ("The command that repeats it", "复现命令"),
        "heading.definitions": ("Definitions", "指标定义"),
        "heading.public": ("In the public report's setting", "公开报告的配置"),
        "heading.first": ("At sequence length {length}", "序列长度 {length}"),
        "heading.lengths": ("{model} by sequence length", "{model}：不同序列长度"),
        "heading.losses": ("Losses", "训练损失"),
        "heading.reading": ("How to read this", "如何阅读本报告"),
        "heading.caveats": ("What these figures cannot show", "局限性"),
        "heading.failures": ("Runs that failed", "失败的运行"),
        # Columns and rows
        "column.model": ("model", "模型"),
        "column.length": ("sequence", "序列长度"),
        "column.scheme": ("scheme", "方案"),
        "column.latency": ("avg latency ms", "平均延迟 ms"),
        "column.median": ("median step ms", "单步中位数 ms"),
        "column.throughput": ("tok/s", "tok/s"),
        "column.peak": ("peak used MB", "峰值占用 MB"),
        "column.peak_cpu": ("peak used MB (process)", "峰值占用 MB（进程）"),
        "column.speedup": ("speed-up", "加速比"),
        "column.gain": ("throughput gain", "吞吐提升"),
        "column.saving": ("memory saving", "峰值占用节省"),
        "column.loss_baseline": ("baseline: first → last loss", "baseline：首步 → 末步损失"),
        "column.loss_flash": ("flash: first → last loss", "flash：首步 → 末步损失"),
        "column.gap": ("largest difference for its loss", "相对于损失的最大差异"),
        "column.tolerance": ("expected", "预期范围"),
        "column.gap_step": ("at step", "所在步"),
        "column.within": ("between repeats of one scheme", "同一方案重复间差异"),
        "cell.oom": ("OOM", "OOM"),
        "cell.baseline_oom": ("baseline OOM", "baseline OOM"),
        "cell.flash_oom": ("flash OOM", "flash OOM"),
        "cell.failed": ("failed", "失败"),
        "cell.timed_out": ("timed out", "超时"),
        "cell.not_run": ("not run", "未运行"),
        "cell.none": ("–", "–"),
        "cell.not_finite": ("not finite", "非有限值"),
        "row.device": ("GPU", "GPU"),
        "row.no_gpu": ("none: measured on the CPU", "无，在 CPU 上测试"),
        "row.cpu": ("CPU", "CPU"),
        "row.driver": ("driver", "驱动"),
        "row.cuda": ("CUDA", "CUDA"),
        "row.torch": ("PyTorch", "PyTorch"),
        "row.triton": ("Triton", "Triton"),
        "row.python": ("Python", "Python"),
        "row.commit": ("tileflash commit", "tileflash 提交"),
        "row.date": ("date", "日期"),
        "row.models": ("models", "模型（参数量）"),
        "row.batch": ("batch size", "批大小"),
        "row.lengths": ("sequence lengths", "序列长度"),
        "row.iterations": ("steps of a run", "每次运行步数"),
        "row.dtype": ("compute dtype", "计算精度"),
        "row.repeats": ("repeats", "重复次数"),
        "value.order": (
            "Baseline and flash run back to back, each in its own process. Which one comes first is drawn with seed "
            "{seed} and turns round at each repeat.",
            "baseline 与 flash 紧邻运行，各自使用独立进程；先后由随机种子 {seed} 决定，每次重复交换先后。",
        ),
        "row.attention": ("attention of {scheme}", "{scheme} 的注意力实现"),
        # Exactly what the trainer logs, so that the report can say it in its own language.
        "attention.unfused": (
            "unfused chain of small operators (the baseline; --flash for fused kernels)",
            "未融合的小算子链（baseline；融合内核见 --flash）",
        ),
        "row.cuda_graph": ("CUDA graph", "CUDA graph"),
        "value.cuda_graph": (
            "yes: each step of both schemes is one CUDA graph, so the host's pace and noise take no part",
            "是：两种方案的每一步均为一个 CUDA graph，主机的快慢与抖动不计入结果",
        ),
        "value.no_cuda_graph": (
            "no: the host starts each operation of a step by itself, and its pace and noise are in the figures",
            "否：一步中的每个操作由主机逐一启动，主机的快慢与抖动计入结果",
        ),
        "value.cuda_graph_mixed": ("the runs differ: their figures cannot be compared", "各次运行不一致：数据不可比较"),
        "row.public": ("public report's setting", "公开报告的配置"),
        "value.public": (
            "batch 4, sequence 64, 256 tokens a step, 10 steps, bfloat16",
            "批大小 4，序列长度 64，每步 256 个 token，10 步，bfloat16",
        ),
        "note.mixed": (
            "The runs were not all made in the same environment ({what} differ); the table names the first one's.",
            "各次运行的环境并不完全一致（{what} 不同）；表中为第一次运行的环境。",
        ),
        "note.incomplete": (
            "{done} of {planned} planned runs are in this report: {reason}. `--continue` makes the others.",
            "本报告包含 {planned} 次计划运行中的 {done} 次：{reason}。使用 `--continue` 可补齐其余运行。",
        ),
        "reason.interrupted": ("it was interrupted", "对比被中断"),
        "reason.budget": ("its time budget of {seconds} s was spent", "{seconds} 秒的时间预算已用完"),
        # The public report, as context
        "public.caption": (
            "For context, what the public report (InfiniTrain with a cuDNN FlashAttention) printed for this setting on "
            "one A100-SXM4-80GB, from a single run. The GPU and the framework differ, so only the ratios can be set "
            "beside those above.",
            "供参考：公开报告（InfiniTrain 接入 cuDNN FlashAttention）在一块 A100-SXM4-80GB 上同一配置的单次结果。"
            "GPU 与框架均不同，只有比值可与上表对照。",
        ),
        "public.baseline": ("baseline (unfused small ops)", "baseline（未融合小算子）"),
        # Conclusion
        "about.one": (
            "{model}, batch {batch}, sequence {length}: {time}; {memory}.",
            "{model}，批大小 {batch}，序列长度 {length}：{time}；{memory}。",
        ),
        "about.oom": (
            "{model}, batch {batch}, sequence {length}: {what}.",
            "{model}，批大小 {batch}，序列长度 {length}：{what}。",
        ),
        "time.faster": (
            "--flash is {ratio} as fast as the baseline ({spread})",
            "启用 --flash 后速度为 baseline 的 {ratio}（{spread}）",
        ),
        "time.slower": (
            "--flash is slower than the baseline, at {ratio} its speed ({spread})",
            "启用 --flash 后反而更慢，速度仅为 baseline 的 {ratio}（{spread}）",
        ),
        "time.same": (
            "there is no measurable difference in speed ({ratio}, {spread})",
            "速度没有可测量的差异（{ratio}，{spread}）",
        ),
        "memory.less": ("--flash needs {percent} less peak memory", "启用 --flash 后峰值占用减少 {percent}"),
        "memory.more": ("--flash needs {percent} more peak memory", "启用 --flash 后峰值占用增加 {percent}"),
        "memory.same": ("there is no measurable difference in peak memory", "峰值占用没有可测量的差异"),
        "memory.unknown": ("peak memory was not measured", "未测得峰值占用"),
        "spread.repeats": ("{low} to {high} over {count} repeats", "{count} 次重复为 {low} 至 {high}"),
        "spread.single": ("one repeat, so its spread is unknown", "仅一次重复，离散程度未知"),
        "oom.baseline": (
            "the baseline runs out of memory, --flash takes {latency} ms a step",
            "baseline 内存不足，--flash 每步 {latency} ms",
        ),
        "oom.flash": (
            "--flash runs out of memory, the baseline takes {latency} ms a step",
            "--flash 内存不足，baseline 每步 {latency} ms",
        ),
        "oom.both": ("both run out of memory", "两种方案均内存不足"),
        "oom.other_missing": (
            "{scheme} runs out of memory, the other was not measured",
            "{scheme} 内存不足，另一方案未测得",
        ),
        "unmeasured": ("there is no pair of finished runs to compare", "没有可供比较的一对完整运行"),
        "across.range": (
            "From sequence {short} to {long} its speed-up goes from {first} to {last}.",
            "序列长度从 {short} 增至 {long}，加速比从 {first} 变为 {last}。",
        ),
        "across.range_saving": (
            "From sequence {short} to {long} its speed-up goes from {first} to {last} and its memory saving from "
            "{saving_first} to {saving_last}.",
            "序列长度从 {short} 增至 {long}，加速比从 {first} 变为 {last}，"
            "节省的峰值占用从 {saving_first} 变为 {saving_last}。",
        ),
        "across.noise": ("{ratio} (within the spread)", "{ratio}（在波动范围内）"),
        "across.best": ("The best is {best} at {length}.", "最高为序列长度 {length} 时的 {best}。"),
        "across.slower": ("--flash is slower at sequence {lengths}.", "在序列长度 {lengths} 时 --flash 更慢。"),
        "across.more_memory": (
            "--flash needs more peak memory at sequence {lengths}.",
            "在序列长度 {lengths} 时 --flash 峰值占用更高。",
        ),
        "across.oom": ("At sequence {lengths} {what}.", "在序列长度 {lengths} 时{what}。"),
        "across.oom.baseline": ("only the baseline runs out of memory", "仅 baseline 内存不足"),
        "across.oom.flash": ("only --flash runs out of memory", "仅 --flash 内存不足"),
        "loss.agree": (
            "The losses agree: where they are furthest apart for their size ({where}) they differ by {gap}, within the "
            "{tolerance} expected of {dtype} there.",
            "两者损失一致：相对于损失大小差异最大处（{where}）相差 {gap}，在 {dtype} 于该处的预期范围 {tolerance} 之内。",
        ),
        "loss.noise": (
            "The losses differ by {gap} ({where}), more than the {tolerance} expected of {dtype}, but for their size no "
            "more than two repeats of the same scheme do.",
            "两者损失相差 {gap}（{where}）：超过 {dtype} 的预期范围 {tolerance}，"
            "但相对于损失大小，不大于同一方案两次重复之间的差异。",
        ),
        "loss.differ": (
            "The losses differ by {gap} ({where}), more than the {tolerance} expected of {dtype}: look into it before "
            "using the figures.",
            "两者损失差异达 {gap}（{where}），超过 {dtype} 的预期范围 {tolerance}：使用这些数据前请先查明原因。",
        ),
        "loss.not_finite": (
            "A loss is not finite ({where}): the figures are of a run that diverged.",
            "出现非有限损失（{where}）：该运行已发散。",
        ),
        "loss.where": ("{model}, sequence {length}, step {step}", "{model}，序列长度 {length}，第 {step} 步"),
        "nothing": ("Nothing could be compared: no pair of runs finished.", "没有可比较的结果：没有一对运行完成。"),
    }
)
