"""With `separate_documents` what stands before a document changes nothing of it; on one rank, in training and in looks."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import tileflash
from tileflash.data import write_token_file
from tileflash.models import build_model, model_config
from tileflash.parallel.attention import DocumentAttention
from tileflash.train import TrainConfig, train
from tileflash.train.step import token_loss_sum

BEGIN = 256  # of the tokenizer `bytes`
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 257}


def test_other_documents_are_not_seen() -> None:
    documents = DocumentAttention(functools.partial(tileflash.attention, backend="tiled"), BEGIN)
    config = model_config("llama3-tiny", **SIZES, n_kv_head=1, intermediate_size=48)
    model = build_model(config, documents, seed=1)
    model.embedding.register_forward_pre_hook(documents.look_at)
    torch.manual_seed(2)
    tokens = torch.randint(256, (1, 20))
    tokens[:, [6, 13]] = BEGIN
    targets = torch.randint(256, (1, 20))
    other = tokens.clone()
    other[:, :6] = torch.randint(256, (1, 6))
    assert documents.ids_of(tokens)[0].tolist() == [0] * 6 + [1] * 7 + [2] * 7

    def gradient(of: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        token_loss_sum(model(of)[:, 6:], targets[:, 6:]).backward()
        assert model.layers[0].attention.qkv.weight.grad is not None
        return model.layers[0].attention.qkv.weight.grad.clone()

    torch.testing.assert_close(model(tokens)[:, 6:], model(other)[:, 6:], rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient(tokens), gradient(other), rtol=0, atol=1e-6)
    # Rotary positions are relative: a document is what it would be alone.
    torch.testing.assert_close(model(tokens)[:, 13:], model(tokens[:, 13:]), rtol=0, atol=1e-5)
    # With a beginning taken away, what stands before it is seen.
    joined = tokens.clone()
    joined[:, 6] = 7
    assert not torch.allclose(model(joined)[:, 7:13], model(tokens)[:, 7:13], atol=1e-4)


def test_a_run_separates_them_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.bin"
    numbers = np.random.default_rng(1).integers(0, 64, 400)
    numbers[::7] = BEGIN
    write_token_file(path, numbers, vocab_size=257)
    settings = {
        "model": "gpt2-tiny",
        "model_overrides": SIZES,
        "input_bin": str(path),
        "input_val_bin": str(path),
        "val_loss_every": 2,
        "val_max_batches": 2,
        "device": "cpu",
        "sequence_length": 16,
        "num_iteration": 2,
        "flash": True,
        "attention_backend": "tiled",
        "tokenizer": "bytes",
    }
    losses = [train(TrainConfig(**settings, separate_documents=separate)).train_loss for separate in (False, True)]
    assert losses[0] != losses[1]
    assert "tileflash.attention: tiled, of documents that begin at token 256" in capsys.readouterr().out


def test_without_a_tokenizer_nobody_knows_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    write_token_file(path, np.arange(400) % 64, vocab_size=64)
    config = TrainConfig(
        model="gpt2-tiny",
        model_overrides={**SIZES, "vocab_size": 64},
        input_bin=str(path),
        device="cpu",
        flash=True,
        separate_documents=True,
    )
    with pytest.raises(
        ValueError, match=r"separate_documents is set and no tokenizer says .* name it with --tokenizer"
    ):
        train(config)
