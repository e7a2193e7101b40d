"""Problems: a function of seed and index, all options among them, tensors that lie as they say, JSON there and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from tileflash.fuzz.drawing import draw
from tileflash.fuzz.layouts import place, places, signature
from tileflash.fuzz.limits import ANYTHING, Limits
from tileflash.fuzz.problems import BIASES, GRADIENT_LAYOUTS, LAYOUTS, OPTIONS, Problem, from_json, to_json
from tileflash.fuzz.textbook import make_scene, textbook
from tileflash.fuzz.variants import make_problem, make_variants


def test_a_problem_is_a_function_of_seed_and_index() -> None:
    first, again = (make_variants(40, 7, "cuda") for _ in range(2))
    assert first == again
    assert make_variants(60, 7, "cuda")[:40] == first
    assert make_variants(40, 8, "cuda") != first
    made = [make_problem(first[index % 40], 7, index, "cuda") for index in range(200)]
    assert made[123] == make_problem(first[123 % 40], 7, 123, "cuda")
    assert len(set(made)) == 200


def test_all_options_and_most_pairs_are_among_the_variants_of_a_run() -> None:
    variants = make_variants(70, 0, "cuda")
    single = Counter(option for variant in variants for option in variant.model.options)
    assert set(single) == set(OPTIONS)
    possible = [pair for pair in combinations(sorted(OPTIONS), 2) if not set(pair) <= set(BIASES)]
    pairs = {pair for variant in variants for pair in combinations(sorted(variant.model.options), 2)}
    assert len(pairs) >= 0.8 * len(possible)
    assert {variant.model.dtype for variant in variants} == {torch.float16, torch.bfloat16, torch.float32}
    assert {variant.model.layout for variant in variants} == set(LAYOUTS)
    assert any(max(variant.model.d, variant.model.dv) > 256 for variant in variants)
    assert any(not variant.model.options for variant in variants)


def test_the_problems_of_a_variant_are_compiled_alike_and_differ() -> None:
    for number, variant in enumerate(make_variants(20, 5, "cuda")):
        made = [make_problem(variant, 5, number + 20 * step, "cuda") for step in range(20)]
        assert {signature(problem) for problem in made} == {signature(variant.model)}
        assert len({(problem.query_shape, problem.key_shape, problem.lengths) for problem in made}) >= 8, variant


def test_json_there_and_back() -> None:
    for index, variant in enumerate(make_variants(30, 1, "cuda")):
        problem = make_problem(variant, 1, index, "cuda")
        assert from_json(to_json(problem)) == problem
    assert from_json('{"options": ["sinks"], "sq": 3}') == Problem(options=("sinks",), sq=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ('{"sqq": 3}', "no field sqq"),
        ('{"dtype": "float64"}', "got 'float64'"),
        ('{"options": ["sink"]}', "not 'sink'"),
        ('{"options": ["bias", "mask"]}', "one bias"),
        ('{"heads": 3}', "multiple of kv_heads"),
        ('{"layout": "odd"}', "layout must be one of"),
        ('{"sq": -1}', "must not be negative"),
        ('{"d": "x"}', 'd must be a whole number, got "x"'),
        ('{"batch": 1.5}', "batch must be a whole number, got 1.5"),
        ('{"heads": true}', "heads must be a whole number, got true"),
        ('{"spread": null}', "spread must be a number, got null"),
        ('{"causal": "maybe"}', 'causal must be false, true, "top-left" or "bottom-right", got "maybe"'),
        ('{"causal": 1}', "causal must be"),
        ('{"window": [3]}', "window must be two bounds"),
        ('{"window": [3, -1]}', "window must be two bounds"),
        ('{"window": 3}', "window must be two bounds"),
        ('{"lengths": [[3, 4], [5]]}', "lengths must be null or pairs"),
        ('{"lengths": [[3, -4]]}', "lengths must be null or pairs"),
        ('{"lengths": 3}', "lengths must be null or pairs"),
        ('{"options": "sinks"}', "options must be a list of words"),
        ('{"dtype": []}', "dtype must be a word"),
        ('{"with_lse": "no"}', "with_lse must be true or false"),
    ],
)
def test_json_that_is_no_problem(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_lie_as_they_say_and_apart(layout: str) -> None:
    problem = Problem(sq=7, sk=7, heads=4, kv_heads=2, layout=layout, gradient_layout="gapped", seed=1)
    drawn = draw(problem, "cpu")
    found = places(problem)
    for name in "qkv":
        assert drawn.tensors[name].stride() == found[name].strides
        assert bool(torch.isfinite(drawn.tensors[name]).all())
    assert bool(torch.isfinite(drawn.d_out).all())
    if layout != "expanded":
        # every element is its own: as many different numbers as elements
        everything = torch.cat([tensor.detach().flatten() for tensor in drawn.tensors.values()])
        assert everything.unique().numel() >= 0.99 * everything.numel()
    again = draw(problem, "cpu")
    assert all(torch.equal(drawn.tensors[name], again.tensors[name]) for name in drawn.tensors)
    if layout == "gapped":
        whole = drawn.tensors["q"].detach().as_strided((20,), (1,))
        assert bool(torch.isnan(whole[16:20]).all()), "what lies between rows is NaN"


def test_layouts_are_what_pytorch_makes() -> None:
    shape = (2, 5, 3, 4)
    plain = torch.zeros(shape)
    assert place(shape, "contiguous").strides == plain.stride()
    assert place(shape, "heads_first").strides == plain.transpose(1, 2).contiguous().transpose(1, 2).stride()
    assert place(shape, "sequence_first").strides == plain.transpose(0, 1).contiguous().transpose(0, 1).stride()
    assert place(shape, "last").strides == plain.transpose(2, 3).contiguous().transpose(2, 3).stride()
    assert place((2, 0, 3, 4), "contiguous").strides == torch.zeros(2, 0, 3, 4).stride()
    assert all(place(shape, layout).end <= 400 for layout in GRADIENT_LAYOUTS)


def test_the_textbook_of_packed_sequences_is_that_of_each_alone() -> None:
    problem = Problem(lengths=((3, 5), (0, 2), (4, 0), (6, 6)), causal=True, window=(3, None), slack=2, seed=2)
    drawn = draw(problem, "cpu")
    out, lse = textbook(drawn, make_scene(drawn), drawn.tensors)
    starts_q, starts_k = drawn.starts or ([], [])
    for number, (sq, sk) in enumerate(problem.lengths or ()):
        alone = draw(replace(problem, lengths=None, batch=1, sq=sq, sk=sk), "cpu")
        rows, keys = slice(starts_q[number], starts_q[number] + sq), slice(starts_k[number], starts_k[number] + sk)
        tensors = {"q": drawn.tensors["q"][None, rows], **{n: drawn.tensors[n][None, keys] for n in "kv"}}
        expected, expected_lse = textbook(alone, make_scene(alone), tensors)
        torch.testing.assert_close(out[rows], expected[0])
        torch.testing.assert_close(lse[:, rows], expected_lse[0])
    assert bool((out[-2:] == 0).all())
    assert bool((lse[:, -2:] == -torch.inf).all())


def test_the_textbook_is_pytorchs_attention() -> None:
    problem = Problem(sq=9, sk=9, heads=4, kv_heads=2, causal=True, seed=3)
    drawn = draw(problem, "cpu")
    q, k, v = (drawn.tensors[name].transpose(1, 2) for name in "qkv")
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out, _ = textbook(drawn, make_scene(drawn), drawn.tensors)
    torch.testing.assert_close(out, theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_problems_are_bent_to_what_all_backends_serve() -> None:
    limits = Limits.of(("hopper",))
    assert limits == Limits(("float16", "bfloat16"), frozenset({"sinks", "softcap"}), True, 256, 8)
    assert Limits.of(("triton", "tiled", "reference")) == ANYTHING
    for name in ("sdpa-cpu", "sdpa-math", "sdpa-flash"):
        with pytest.raises(ValueError, match=f"--backend {name}: fuzz draws windows"):
            Limits.of(("tiled", name))
    assert Limits.of(("triton", "hopper")) == limits
    variants = make_variants(40, 3, "cuda", limits)
    for index in range(400):
        problem = make_problem(variants[index % 40], 3, index, "cuda", limits)
        assert problem == limits.bend(problem)
        assert set(problem.options) <= {"sinks", "softcap"}
        assert problem.dtype in (torch.float16, torch.bfloat16)
        assert problem.d % 8 == problem.dv % 8 == 0 < max(problem.d, problem.dv) <= 256
    assert len({(v.model.d, v.model.dtype, v.band) for v in variants}) > 20
