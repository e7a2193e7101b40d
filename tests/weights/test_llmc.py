"""llm.c files against an independent writer, built here from transformers' models as llm.c's scripts do it."""

import struct

import numpy as np
import pytest
import torch

from tileflash.models import PRESETS, RopeScaling, model_config
from tileflash.weights import config_from_path, load_into, load_weights, save_huggingface, save_llmc
from tileflash.weights.llmc_header import parse_header, swiglu_width
from tileflash.weights.tensor_map import TensorMap

VERSIONS = [(torch.float32, 3), (torch.bfloat16, 5)]


def raw(tensors, dtype):
    parts = (tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return b"".join(parts)


def slots(*values):
    return struct.pack("<256i", *values, *[0] * (256 - len(values)))


def gpt2_file(theirs, version, dtype):
    """As train_gpt2.py's write_model: Conv1D transposed to [out, in], wte padded with zeros to a multiple of 128."""
    config, weights = theirs.config, theirs.state_dict()
    rows = -(-config.vocab_size // 128) * 128
    wte = torch.zeros(rows, config.n_embd)
    wte[: config.vocab_size] = weights["transformer.wte.weight"]
    tensors = [wte, weights["transformer.wpe.weight"]]
    kinds = "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias "
    kinds += "ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias"
    for kind in kinds.split():
        for i in range(config.n_layer):
            tensor = weights[f"transformer.h.{i}.{kind}"]
            tensors.append(tensor.T if kind.startswith(("attn", "mlp")) and kind.endswith("weight") else tensor)
    tensors += [weights["transformer.ln_f.weight"], weights["transformer.ln_f.bias"]]
    sizes = (config.n_positions, config.vocab_size, config.n_layer, config.n_head, config.n_embd, rows)
    return slots(20240326, version, *sizes) + raw(tensors, dtype)


def to_neighbours(weight, head_dim):
    """Hugging Face's rows of each head (first all x, then all y) in Meta's order (x0 y0 x1 y1 ...)."""
    half = head_dim // 2
    order = [head + i // 2 + (i % 2) * half for head in range(0, weight.shape[0], head_dim) for i in range(head_dim)]
    return weight[order]


def llama_file(theirs, version, dtype, ffn, multiple_of, norm_eps, rope_theta, minor=1):
    """As train_llama3.py's write_model; `ffn`, `norm_eps` and `rope_theta` are what the int32 slots hold."""
    config, weights = theirs.config, theirs.state_dict()
    dim = config.hidden_size // config.num_attention_heads
    layers = range(config.num_hidden_layers)

    def each(name):
        return [weights[f"model.layers.{i}.{name}.weight"] for i in layers]

    queries = [to_neighbours(weight, dim) for weight in each("self_attn.q_proj")]
    keys = [to_neighbours(weight, dim) for weight in each("self_attn.k_proj")]
    values = each("self_attn.v_proj")
    tensors = [
        weights["model.embed_tokens.weight"],
        *each("input_layernorm"),
        *(torch.cat(parts) for parts in zip(queries, keys, values, strict=True)),
        *each("self_attn.o_proj"),
        *each("post_attention_layernorm"),
        *each("mlp.up_proj"),
        *each("mlp.gate_proj"),
        *each("mlp.down_proj"),
        weights["model.norm.weight"],
        weights["lm_head.weight"],
    ]
    sizes = (config.max_position_embeddings, config.vocab_size, len(layers), config.num_attention_heads)
    more = (config.num_key_value_heads, config.hidden_size, ffn, multiple_of, norm_eps, rope_theta)
    return slots(20240803, version, *sizes, *more, 1, 4, 3, minor) + raw(tensors, dtype)


def float_bits(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


# 32 wide: int(8 * 32 / 3) = 85, times 1.3 = 110, up to a multiple of 16: 112; cut to 1 it would be 96.
LLAMA_FIELDS = {"intermediate_size": 112}
HEADERS = {
    "integers, truncated": {"ffn": 1, "multiple_of": 16, "norm_eps": 0, "rope_theta": 500000},
    "bits of floats": {
        "ffn": float_bits(1.3),
        "multiple_of": 16,
        "norm_eps": float_bits(1e-5),
        "rope_theta": float_bits(500000.0),
    },
}


def through_transformers(model, directory):
    transformers = pytest.importorskip("transformers")
    save_huggingface(model, directory)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize(("dtype", "version"), VERSIONS)
@torch.no_grad()
def test_gpt2_is_the_file_that_llmc_writes(dtype, version, small, bit_equal, tmp_path):
    model = small("gpt2", vocab_multiple=1)
    theirs = through_transformers(model, tmp_path / "hf")
    expected = gpt2_file(theirs, version, dtype)
    (tmp_path / "llmc.bin").write_bytes(expected)
    loaded = load_weights(tmp_path / "llmc.bin")
    tokens = torch.randint(0, 131, (2, 20))
    truth = theirs.to(dtype).double()(tokens).logits
    assert (loaded.double()(tokens) - truth).abs().max() < 1e-9
    save_llmc(model, tmp_path / "ours.bin", dtype)
    assert (tmp_path / "ours.bin").read_bytes() == expected


@pytest.mark.parametrize(("dtype", "version"), VERSIONS)
@pytest.mark.parametrize("form", HEADERS)
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_llama3_is_the_file_that_llmc_writes(tied, form, dtype, version, small, tmp_path):
    model = small("llama3", tied=tied, **LLAMA_FIELDS)
    theirs = through_transformers(model, tmp_path / "hf")
    content = llama_file(theirs, version, dtype, **HEADERS[form])
    (tmp_path / "llmc.bin").write_bytes(content)
    loaded = load_weights(tmp_path / "llmc.bin", dtype=torch.float64)
    assert loaded.config == model.config
    tokens = torch.randint(0, 131, (2, 60))
    for parameter in theirs.parameters():
        parameter.copy_(parameter.to(dtype))
    assert (loaded(tokens) - theirs.double()(tokens).logits).abs().max() < 1e-9
    # All but the header's free choices (multiplier and multiple that give the same width) is what we write.
    save_llmc(model, tmp_path / "ours.bin", dtype, float_header=form == "bits of floats")
    ours = np.fromfile(tmp_path / "ours.bin", dtype="<i4")
    different = np.flatnonzero(ours != np.frombuffer(content, dtype="<i4"))
    assert set(different) <= {8, 9}


LLAMA_WAYS = [
    ("llama3", tied, float_header, {"intermediate_size": inner})
    for tied in (True, False)
    for float_header in (False, True)
    for inner in (1, 79, 80, 85, 112, 300, 1000, 2000)
]


@pytest.mark.parametrize(("family", "tied", "float_header", "fields"), [("gpt2", True, False, {}), *LLAMA_WAYS])
def test_written_then_read_is_bit_equal(family, tied, float_header, fields, small, bit_equal, tmp_path):
    model = small(family, tied=tied, **fields)
    save_llmc(model, tmp_path / "a.bin", float_header=float_header)
    bit_equal(load_weights(tmp_path / "a.bin"), model)
    model = model.bfloat16()
    save_llmc(model, tmp_path / "b.bin", torch.bfloat16, float_header=float_header)
    bit_equal(load_weights(tmp_path / "b.bin", dtype=torch.bfloat16), model)
    into = small(family, tied=tied, seed=5, **fields).bfloat16()
    load_into(into, tmp_path / "b.bin")
    bit_equal(into, model)


@pytest.mark.parametrize("name", ["llama3-1b", "llama3-3b", "llama3-8b"])
@pytest.mark.parametrize("float_header", [False, True])
def test_headers_of_the_real_sizes(name, float_header):
    """Without the numbers: the header llm.c would write and the file's size give the preset back."""
    from tileflash.models import parameter_count
    from tileflash.weights.llmc_header import INTEGERS, header_bytes

    config = model_config(name, tied=False)
    slots = INTEGERS.unpack(header_bytes(config, torch.bfloat16, config.vocab_size, float_header))
    size_bytes = 1024 + 2 * parameter_count(config)
    assert parse_header(slots, size_bytes).config == config
    with pytest.raises(ValueError, match=f"the file has {size_bytes - 2} bytes; by its header .* it must have"):
        parse_header(slots, size_bytes - 2)
    if not float_header:
        truncated = {"llama3-1b": (1, 256), "llama3-3b": (1, 256), "llama3-8b": (1, 1024)}
        assert slots[8:12] == (*truncated[name], 0, 500000)


def test_the_width_rule_is_metas():
    assert swiglu_width(4096, 1.3, 1024) == PRESETS["llama3-8b"].intermediate_size
    assert swiglu_width(2048, 1.5, 256) == PRESETS["llama3-1b"].intermediate_size
    assert swiglu_width(3072, 1.0, 256) == PRESETS["llama3-3b"].intermediate_size


@pytest.mark.parametrize(
    ("scaling", "flag", "minor"),
    [(None, 0, 0), (RopeScaling(factor=8.0), 1, 1), (RopeScaling(factor=32.0), 1, 2)],
)
def test_rope_scaling_is_told_by_flag_and_version(scaling, flag, minor, small, bit_equal, tmp_path):
    model = small("llama3", rope_scaling=scaling)
    save_llmc(model, tmp_path / "a.bin")
    header = struct.unpack("<256i", (tmp_path / "a.bin").read_bytes()[:1024])
    assert (header[12], header[14], header[15]) == (flag, 3, minor)
    bit_equal(load_weights(tmp_path / "a.bin"), model)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {"tied": False}, "tied is False; llm.c's header cannot hold it"),
        ("gpt2", {"norm_epsilon": 1e-6}, "norm_epsilon is 1e-06; llm.c's header cannot hold it"),
        ("llama3", {"norm_epsilon": 1e-6}, r"norm_epsilon is 1e-06; .* would be read as 1e-05"),
        ("llama3", {"rope_theta": 500000.5}, r"rope_theta is 500000\.5; .* would be read as 500000\.0"),
        ("llama3", {"rope_scaling": {"factor": 16.0}}, r"rope_scaling is RopeScaling\(factor=16\.0"),
    ],
)
def test_what_the_header_cannot_hold_is_refused(family, fields, message, small, tmp_path):
    path = tmp_path / "a.bin"
    with pytest.raises(ValueError, match=message):
        save_llmc(small(family, **fields), path)
    assert not list(tmp_path.iterdir())


def test_bits_of_floats_hold_what_integers_cannot(small, bit_equal, tmp_path):
    model = small("llama3", norm_epsilon=1e-6, rope_theta=500000.5)
    save_llmc(model, tmp_path / "a.bin", float_header=True)
    bit_equal(load_weights(tmp_path / "a.bin"), model)
    with pytest.raises(ValueError, match="float_header is True; it must be False for GPT-2"):
        save_llmc(small("gpt2"), tmp_path / "b.bin", float_header=True)


def test_dtype_must_be_one_that_llmc_has(small, tmp_path):
    with pytest.raises(ValueError, match=r"dtype is torch\.float16; .*torch\.float32 or torch\.bfloat16"):
        save_llmc(small("gpt2"), tmp_path / "a.bin", torch.float16)


def test_a_save_that_fails_leaves_the_old_file(small, bit_equal, tmp_path, monkeypatch):
    model = small("gpt2", seed=1)
    save_llmc(model, tmp_path / "a.bin")
    original = TensorMap.to_file

    def fail(self, parameter, dtype):
        if self.name == "ln_f.bias":
            raise OSError(28, "No space left on device")
        return original(self, parameter, dtype)

    monkeypatch.setattr(TensorMap, "to_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_llmc(small("gpt2", seed=2), tmp_path / "a.bin")
    bit_equal(load_weights(tmp_path / "a.bin"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.fixture
def files(small, tmp_path):
    made = {"gpt2": tmp_path / "gpt2.bin", "llama3": tmp_path / "llama3.bin"}
    for family, path in made.items():
        save_llmc(small(family, tied=family == "gpt2"), path)
    return made


@pytest.mark.parametrize(
    ("family", "slot", "value", "message"),
    [
        ("gpt2", 0, 20240520, "magic is 20240520; weights have 20240326"),
        ("gpt2", 1, 1, "version is 1; it must be 3"),
        ("gpt2", 4, 0, "n_layer is 0; it must be a positive integer"),
        ("gpt2", 5, 5, "n_embd is 32; it must be a multiple of n_head, 5"),
        ("gpt2", 7, 130, "padded vocabulary is 130; it must be at least the vocabulary, 131"),
        ("gpt2", 4, 3, r"breaks off in tensor h\.1\.mlp\.c_fc\.bias"),
        ("gpt2", 4, 1, r"has \d+ bytes; by its header it must have \d+"),
        ("llama3", 1, 4, "version is 4; it must be 3"),
        ("llama3", 6, 3, "n_head is 4; it must be a multiple of n_kv_head, 3"),
        ("llama3", 4, 4, "it is truncated, or not the file that its header says"),
        ("llama3", 9, 0, "multiple_of is 0; it must be a positive integer"),
        ("llama3", 8, 7, "it is truncated, or not the file that its header says"),
        ("llama3", 10, 12345, "norm_eps is 12345, neither 0 nor a sensible float's bits"),
        ("llama3", 11, 0, "rope_theta is 0, neither a sensible integer nor a sensible float's bits"),
        ("llama3", 12, 7, "use_scaled_rope is 7; it must be 0 or 1"),
    ],
)
def test_a_wrong_header_is_told(family, slot, value, message, files):
    path = files[family]
    content = bytearray(path.read_bytes())
    content[4 * slot : 4 * slot + 4] = struct.pack("<i", value)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        config_from_path(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_rope_theta_that_makes_no_sense_is_the_presets(tmp_path):
    """The last resort of the reader: dimensions of a preset, header of a third kind."""
    config = PRESETS["llama3-8b"]
    sizes = (131072, 128256, 32, 32, 8, 4096)
    header = [20240803, 5, *sizes, 0, 1024, 0, 0, 1, 4, 0, 0, *[0] * 240]
    assert parse_header(header, 1024 + 2 * 8_030_261_248).config == config


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_a_truncated_or_longer_file_is_told(family, files):
    path = files[family]
    content = path.read_bytes()
    for size in (0, 3, 1000, 1024, 1028, len(content) // 2, len(content) - 4, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=str(path)):
            load_weights(path)
    path.write_bytes(content + b"\0\0\0\0")
    with pytest.raises(ValueError, match=str(path)):
        load_weights(path)


def test_the_tensor_at_which_a_file_breaks_off_is_named(files):
    path = files["gpt2"]
    content = path.read_bytes()
    path.write_bytes(content[: 1024 + 4 * (256 * 32 + 24 * 32 + 40)])
    with pytest.raises(ValueError, match=r"breaks off in tensor h\.1\.ln_1\.weight"):
        load_weights(path)


def test_some_other_file_is_told(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"not a model, but long enough to have a header" * 100)
    with pytest.raises(ValueError, match="magic is"):
        load_weights(path)


def test_a_damaged_number_of_layers_is_told_at_once(small, tmp_path):
    """Listing the tensors of two billion layers took all memory before the size of the file was looked at."""
    path = tmp_path / "gpt2.bin"
    save_llmc(small("gpt2"), path, torch.float32)
    content = bytearray(path.read_bytes())
    content[16:20] = struct.pack("<i", 2**31 - 1)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"n_layer is 2147483647; a file of .* bytes cannot hold so many layers"):
        load_weights(path)
