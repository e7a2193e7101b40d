"""What does not fit together is refused in words, before any rank waits for another."""

from __future__ import annotations

import pytest
import torch

from tileflash.models import model_config
from tileflash.parallel.layout import SINGLE, Layout
from tileflash.parallel.ranks import Alone, join, world_size_from_environment
from tileflash.train import TrainConfig
from tileflash.train.setup import rank_device


def test_the_label_is_the_log_lines() -> None:
    assert SINGLE.label == "DP=1, TP=1, SP=1, PP=1"
    assert Layout(data=2, tensor=4, sequence_parallel=True, zero_stage=3).label == "DP=2, TP=4, SP=4, PP=1, ZeRO=3"
    assert Layout(pipeline=2, context=4).label == "DP=1, TP=1, SP=1, PP=2, CP=4, ZeRO=0"


@pytest.mark.parametrize(
    ("layout", "world", "told"),
    [
        (Layout(data=2), None, r"2 \* 1 = 2, and this is a single process: start it by torchrun --nproc-per-node 2"),
        (Layout(), 4, r"1 \* 1 = 1: it must be the number of ranks, 4 \(for example --data-parallel 4\)"),
        (Layout(data=2, tensor=2), 8, r"2 \* 2 = 4: it must be the number of ranks, 8 .*--data-parallel 4"),
        (
            Layout(data=2, pipeline=2, context=2),
            16,
            r"data_parallel \* tensor_parallel \* pipeline_parallel \* context_parallel is 2 \* 1 \* 2 \* 2 = 8: .*--data-parallel 4",
        ),
    ],
)
def test_the_product_is_the_number_of_ranks(layout: Layout, world: int | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        layout.check_world(world)


@pytest.mark.parametrize(
    ("model", "overrides", "layout", "told"),
    [
        ("gpt2-xl", {}, Layout(tensor=2), "tensor_parallel is 2: it must divide n_head, 25"),
        ("llama3-1b", {}, Layout(tensor=16), "tensor_parallel is 16: it must divide n_kv_head, 8"),
        ("llama3-tiny", {"intermediate_size": 385}, Layout(tensor=2), "the MLP's width, 385"),
        ("gpt2", {}, Layout(tensor=4, sequence_parallel=True), "sequence_length is 66: .* a multiple of"),
        ("gpt2", {}, Layout(context=2), r"66: it must be a multiple of twice context_parallel, 4 \(for example 68\)"),
        ("gpt2", {}, Layout(context=4, context_kind="ulysses"), r"66: it must be a multiple of context_parallel, 4 \("),
        (
            "gpt2",
            {},
            Layout(context=2, tensor=3, sequence_parallel=True),
            r"of twice context_parallel, 4 and of tensor_parallel, 3 \(for example 72\)",
        ),
        (
            "llama3-1b",
            {},
            Layout(context=3, context_kind="ulysses"),
            "32 heads of queries and 8 of keys for 3 context ranks",
        ),
        ("gpt2-tiny", {"n_layer": 3}, Layout(pipeline=4), "pipeline_parallel is 4: n_layer, 3, must be at least 4"),
        ("gpt2-tiny", {"n_layer": 3}, Layout(pipeline=2, schedule="zb"), "zb gives each two .* must be at least 4"),
    ],
)
def test_what_does_not_divide_is_refused(model: str, overrides: dict, layout: Layout, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        layout.check_model(model_config(model, **overrides), 66)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "told"),
    [
        (Layout(pipeline=4), 3, r"a step has 3 micro-batches \(total_batch_size .* at least pipeline_parallel, 4"),
        (
            Layout(pipeline=2, schedule="interleaved"),
            5,
            r"with interleaved it must be a multiple of 2 \(for example 4\)",
        ),
    ],
)
def test_too_few_micro_batches_are_refused(layout: Layout, micro_batches: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        layout.check_micro_batches(micro_batches)


def test_stages_share_the_layers() -> None:
    from tileflash.parallel.pipeline import layers_of_stages

    assert layers_of_stages(12, Layout()) == [range(12)]
    assert layers_of_stages(8, Layout(pipeline=3)) == [range(3), range(3, 6), range(6, 8)]
    assert [len(layers) for layers in layers_of_stages(6, Layout(pipeline=2, schedule="interleaved"))] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"zero_stage": 1}, "zero_stage is 1 and data_parallel is 1"),
        ({"zero_stage": 4, "data_parallel": 2}, "zero_stage is 4: it must be at most 3"),
        ({"sequence_parallel": True}, "sequence_parallel is set and tensor_parallel is 1"),
        ({"data_parallel": 2, "cuda_graph": True}, "steps of several ranks are not captured"),
        ({"pipeline_parallel": 2, "cuda_graph": True}, "steps of several ranks are not captured"),
        (
            {"context_parallel": 2},
            "context_parallel is 2 and flash is off: the baseline needs whole sequences; add --flash",
        ),
        ({"context_parallel": 2, "flash": True, "context_parallel_kind": "star"}, "context_parallel_kind is .*ring"),
        ({"separate_documents": True}, "the baseline has no documents; add --flash"),
        (
            {"data_parallel": 2, "total_batch_size": 256 * 3},
            r"\* data_parallel = 4 \* 64 \* 2 = 512 \(for example 1024\)",
        ),
    ],
)
def test_settings_that_exclude_each_other(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainConfig(model="gpt2-tiny", **settings)


def test_a_step_has_the_tokens_of_all_data_ranks() -> None:
    config = TrainConfig(model="gpt2-tiny", data_parallel=2, batch_size=4, sequence_length=8)
    assert (config.step_tokens, config.micro_batches, config.step_samples) == (64, 1, 8)
    config = TrainConfig(model="gpt2-tiny", data_parallel=2, batch_size=4, sequence_length=8, total_batch_size=192)
    assert (config.micro_batches, config.step_samples) == (3, 24)


def test_one_process_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert isinstance(join(SINGLE, lambda number: torch.device("cpu"), 1.0), Alone)
    # A cluster's variables without torchrun's, or torchrun with a single rank: one process all the same.
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert world_size_from_environment() is None
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert world_size_from_environment() == 8
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world_size_from_environment() is None


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device("cpu", 3) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="there are 2 GPUs"):
        rank_device("cuda", 2)
    with pytest.raises(ValueError, match="each takes the GPU of its number; it must be cuda"):
        rank_device("cuda:0", 1)


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama3-tiny"])
def test_equal_cuts_of_qkv_hold_whole_heads(model: str) -> None:
    from tileflash.parallel.tensor import qkv_order

    config = model_config(model)
    order = qkv_order(config, 2)
    assert sorted(order.tolist()) == list(range((config.n_head + 2 * config.n_kv_head) * config.head_dim))
    head = [int(row) // config.head_dim for row in order[:: config.head_dim]]
    queries, keys = config.n_head, config.n_kv_head
    first = [
        *range(queries // 2),
        *(queries + k for k in range(keys // 2)),
        *(queries + keys + k for k in range(keys // 2)),
    ]
    assert head[: len(head) // 2] == first
