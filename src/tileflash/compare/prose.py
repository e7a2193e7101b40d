"""The longer texts of a report, in English and in Chinese: definitions, how to read it, what it cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# key -> (English, Chinese)
PROSE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # Definitions
        "define.latency": (
            "avg latency: mean time of steps 2 to {steps} of a run (forward, backward, clipping, optimizer), the "
            "public report's definition. Beside it the median of the same steps, which one slow step cannot move.",
            "平均延迟：一次运行中第 2 至 {steps} 步的平均耗时（前向、反向、梯度裁剪、优化器），与公开报告定义相同；旁"
            "列同样各步的中位数，不受个别慢步影响。",
        ),
        "define.throughput": (
            "tok/s: tokens of a step / avg latency.",
            "tok/s：每步 token 数 / 平均延迟。",
        ),
        "define.peak_gpu": (
            "peak used: the most memory that PyTorch's allocator had in use on the GPU in any step of the run, in MB "
            "(1 MB = 2^20 bytes).",
            "峰值占用：运行各步中 PyTorch 分配器在 GPU 上实际使用的最大显存，单位 MB（1 MB = 2^20 字节）。",
        ),
        "define.peak_cpu": (
            "peak used: the largest resident memory of the whole process, Python and PyTorch included, in MB (1 MB = "
            "2^20 bytes). On a GPU it would be the allocator's peak, which is the finer measure.",
            "峰值占用：整个进程（含 Python 与 PyTorch）的最大常驻内存，单位 MB（1 MB = 2^20 字节）。在 GPU 上则为分配"
            "器的峰值，更为精确。",
        ),
        "define.speedup": (
            "speed-up = latency_baseline / latency_flash.",
            "加速比 = latency_baseline / latency_flash。",
        ),
        "define.gain": (
            "throughput gain = tok/s_flash / tok/s_baseline - 1.",
            "吞吐提升 = tok/s_flash / tok/s_baseline - 1。",
        ),
        "define.saving": (
            "memory saving = (mem_baseline - mem_flash) / mem_baseline; negative where flash needs more.",
            "峰值占用节省 = (mem_baseline - mem_flash) / mem_baseline；为负表示 flash 占用更多。",
        ),
        "define.spread": (
            "Figures are the median over the repeats, with the lowest and the highest beside it where they differ. "
            "Ratios are taken on the two runs of the same repeat, then their median and spread. A difference that is "
            "not larger than this spread (high - low; at least {floor}, and {single} where there is one repeat) is "
            "called no measurable difference.",
            "各数值为多次重复的中位数，若各次不同则旁列最低与最高值。比值先在同一次重复的两个运行之间计算，再取中位数与范围。差异"
            "不大于该范围（最高 - 最低；至少 {floor}，仅一次重复时取 {single}）时，称为没有可测量的差异。",
        ),
        "define.oom": (
            "OOM: the run ended for lack of memory. It is not repeated.",
            "OOM：运行因内存不足而终止，不再重复。",
        ),
        # How to read
        "read.schemes": (
            "baseline is attention as a chain of small operators (matmul, scale, mask, softmax, matmul), which "
            "writes the whole sequence x sequence matrix to memory; flash is the same training command with --flash "
            "added, and nothing else changed. Model, data, seed and optimizer are the same.",
            "baseline 的注意力由一串小算子组成（矩阵乘、缩放、掩码、softmax、矩阵乘），会把完整的 序列 x 序列 矩阵写"
            "入内存；flash 为同一训练命令仅增加 --flash，其余（模型、数据、随机种子、优化器）完全相同。",
        ),
        "read.losses": (
            "Look at the losses first: a speed-up counts only when both train alike. Then the speed-up and the "
            "saving at the sequence length you train at.",
            "请先看损失：只有两者训练结果一致，加速才有意义；然后查看您所用序列长度下的加速比与峰值占用节省。",
        ),
        "read.slopes": (
            "Both axes of the time and memory plots are logarithmic: where attention dominates, the baseline's "
            "memory rises by 4x when the length doubles and flash's by 2x. Whiskers are the spread over the repeats.",
            "时间与内存图均为双对数坐标：当注意力占主导时，长度加倍，baseline 的内存增至 4 倍，flash 增至 2 倍。误差"
            "线为各次重复的范围。",
        ),
        # Caveats
        "caveat.short": (
            "At sequence 64 attention is a small part of a step and its matrix is tiny: a gain there is kernels and "
            "memory traffic removed from around it. Each step is one CUDA graph, so the host's pace and noise take no "
            "part; without a graph they are most of such a step. It shows neither the speed nor the memory that flash "
            "gains at the lengths people train at.",
            "序列长度 64 时，注意力只占单步的一小部分，其矩阵也很小：此处的提升来自减少的内核与访存。每一步均为一个 CUDA graph，"
            "主机的快慢与抖动不计入结果；若不用 graph，这样的一步大部分取决于主机。此处无法体现 flash 在实际训练长度下的速度与"
            "内存收益。",
        ),
        "caveat.short_host": (
            "At sequence 64 attention is a small part of a step and its matrix is tiny: a gain there is launch "
            "overhead and memory traffic removed from around it. The steps are no CUDA graphs, so the host sets the "
            "pace at this size, and its noise is in the figures. It shows neither the speed nor the memory that flash "
            "gains at the lengths people train at.",
            "序列长度 64 时，注意力只占单步的一小部分，其矩阵也很小：此处的提升来自减少的启动开销与访存。各步未使用 CUDA graph，"
            "此规模下快慢取决于主机，其抖动也计入结果。此处无法体现 flash 在实际训练长度下的速度与内存收益。",
        ),
        "caveat.steps": (
            "{steps} steps show that both start alike, not that they end alike after days of training.",
            "{steps} 步只能说明两者起步一致，不能说明长时间训练后仍一致。",
        ),
        "caveat.machine": (
            "The figures hold for this GPU, these versions and one device; other GPUs give other ratios.",
            "以上数据仅适用于本机设备、所列版本与单设备训练；其他 GPU 的比值会不同。",
        ),
        "caveat.cpu": (
            "Measured on a CPU: it shows that the comparison works and that the losses agree. What FlashAttention "
            "gains is a matter of GPU memory traffic, so these times say nothing about a GPU.",
            "本次在 CPU 上测试：只能说明对比流程可用且损失一致。FlashAttention 的收益来自 GPU 访存，这些耗时不能推及"
            " GPU。",
        ),
        "caveat.baseline": (
            "The baseline is what plain PyTorch code does, as in the public report; a framework that already calls a "
            "fused attention starts from better figures.",
            "baseline 为普通 PyTorch 写法（与公开报告一致）；已使用融合注意力的框架，其起点会更好。",
        ),
        # Plots
        "plot.time": (
            "Step time of {model} by sequence length",
            "{model}：不同序列长度的单步时间",
        ),
        "plot.memory": (
            "Peak memory of {model} by sequence length",
            "{model}：不同序列长度的峰值占用",
        ),
        "plot.speedup": (
            "Speed-up of {model} by sequence length",
            "{model}：不同序列长度的加速比",
        ),
        "plot.loss": (
            "Losses of {model} at sequence {length}",
            "{model}：序列长度 {length} 的训练损失",
        ),
    }
)
