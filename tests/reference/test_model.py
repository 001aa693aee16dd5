"""The whole model's own promises: any split gives the same bits, profiles, crossing, oracle, life, generation."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from reference.cache import KeyCache, LightningCache, Sequence
from reference.compression import window_count
from reference.config import LIGHTNING, SPARSE, SalaConfig, SparseConfig, preset
from reference.model import Sala, Trace, generate
from reference.numerics import ORACLE
from reference.weights import seeded_weights

# Narrow, so that hundreds of single steps take a second; one free block beside the forced ones.
SMALL = SalaConfig(
    hidden_size=48,
    intermediate_size=64,
    vocab_size=97,
    num_attention_heads=4,
    head_dim=16,
    lightning_heads=3,
    dim_model_base=16,
    mixer_types=(SPARSE, LIGHTNING, SPARSE),
    sparse=SparseConfig(topk=3, window_size=64, dense_len=200),
    eos_tokens=(2,),
)


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def small(device: str) -> Sala:
    return Sala(SMALL, seeded_weights(SMALL, 5, device))


def _tokens(count: int, vocabulary: int = SMALL.vocab_size) -> Tensor:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(11))


Fed = tuple[Sequence, list[Tensor], list[Tensor]]


def _run(model: Sala, tokens: Tensor, pieces: list[int], prompt: int, begun: Sequence | None = None) -> Fed:
    """Feed `tokens` in `pieces`, after what `begun` holds; the sequence, all hidden states and all chosen blocks."""
    assert sum(pieces) == len(tokens)
    sequence, traces = begun or model.start(prompt), []
    for piece in tokens.split(pieces):
        traces.append(Trace())
        model.forward(piece, sequence, traces[-1])
    hidden = [torch.cat(parts) for parts in zip(*(trace.hidden for trace in traces))]
    blocks = [torch.cat([trace.blocks[layer] for trace in traces]) for layer in traces[0].blocks]
    return sequence, hidden, blocks


def _caches(sequence: Sequence) -> list[Tensor]:
    tensors: list[Tensor] = []
    for cache in sequence.layers:
        if isinstance(cache, LightningCache):
            tensors.append(cache.state)
        else:
            tensors += [cache.keys, cache.values, *cache.compressed()]
    return tensors


def _same_bits(one: Fed, other: Fed) -> bool:
    pairs = zip([*_caches(one[0]), *one[1], *one[2]], [*_caches(other[0]), *other[1], *other[2]])
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_a_piece_may_end_anywhere_in_a_window(small: Sala) -> None:
    tokens = _tokens(330)
    whole = _run(small, tokens, [330], 330)
    assert all((blocks[200:, :, 1] > 1).any() for blocks in whole[2])  # not only the first blocks and the window
    begun, _, _ = _run(small, tokens[:191], [191], 330)
    for cut in range(192, 320):  # every offset within a window of 128 keys, and of 32, and within a block
        sequence, hidden, blocks = _run(small, tokens[191:], [cut - 191, 330 - cut], 330, copy.deepcopy(begun))
        rest = whole[0], [x[191:] for x in whole[1]], [chosen[191:] for chosen in whole[2]]
        assert _same_bits(rest, (sequence, hidden, blocks)), f"split at {cut}"


def test_token_by_token_gives_the_bits_of_one_piece(small: Sala) -> None:
    tokens = _tokens(330)
    assert _same_bits(_run(small, tokens, [330], 330), _run(small, tokens, [1] * 330, 330))


def test_tiny_model_past_its_threshold_gives_the_same_bits_in_pieces(device: str) -> None:
    config = preset("sala-tiny")
    weights = {name: weight.double() for name, weight in seeded_weights(config, 1, device).items()}
    model = Sala(config, weights)
    count = config.sparse.dense_len + 20
    tokens = _tokens(count, config.vocab_size)
    whole = _run(model, tokens, [count], count)
    pieces = _run(model, tokens, [1, 31, 97, 127, 64, count - 330, *[1] * 10], count)
    assert _same_bits(whole, pieces)
    # Past 512 keys a query leaves blocks out, and its choice is not just the window.
    for blocks in whole[2]:
        assert len(set(blocks[-1, 0].tolist()) - {-1}) == config.sparse.chosen
    assert whole[1][-1].float().isfinite().all()


def test_prompt_that_outgrows_dense_len_builds_its_compressed_keys_at_that_step(small: Sala) -> None:
    tokens = _tokens(280)
    sequence = small.start(150)
    built = {}
    for piece in tokens.split([150, *[1] * 130]):
        small.forward(piece, sequence)
        cache = sequence.layers[0]
        assert isinstance(cache, KeyCache)
        built[sequence.length] = cache.windows
    assert built[150] == built[199] == (0, 0)
    for keys in (200, 207, 208, 256, 280):
        assert built[keys] == (window_count(keys, 32, 16), window_count(keys, 128, 64))
    alone = _run(small, tokens, [150, *[1] * 130], 150)
    assert _same_bits(alone, _run(small, tokens, [150, 130], 150))
    assert _same_bits(alone, _run(small, tokens, [90, 100, 33, 57], 150))
    for blocks in alone[2]:
        assert (blocks[:199] == -1).all()
        assert (blocks[199:] >= 0).any(-1).all()


@pytest.mark.parametrize(("prompt", "sparse"), [(199, False), (200, True)])
def test_whole_prompts_length_decides_for_every_piece(small: Sala, prompt: int, sparse: bool) -> None:
    _, _, blocks = _run(small, _tokens(prompt), [70, prompt - 70], prompt)
    assert all(bool((chosen[:, :, 0] == 0).all()) == sparse for chosen in blocks)
    assert all(bool((chosen == -1).all()) != sparse for chosen in blocks)


def test_race_is_sparse_from_the_first_key_and_equals_dense_while_all_blocks_fit(small: Sala) -> None:
    race = Sala(SMALL.with_profile("race"), small.weights)
    tokens = _tokens(180)  # three blocks, of which four may be chosen
    dense, sparse = _run(small, tokens, [180], 180), _run(race, tokens, [180], 180)
    assert all((blocks == -1).all() for blocks in dense[2])
    assert all((blocks[:, :, 0] == 0).all() for blocks in sparse[2])
    assert torch.equal(dense[1][-1], sparse[1][-1])
    longer = _tokens(320)
    wide = dataclasses.replace(SMALL, sparse=dataclasses.replace(SMALL.sparse, dense_len=400))
    dense, sparse = _run(Sala(wide, small.weights), longer, [320], 320), _run(race, longer, [320], 320)
    assert torch.equal(dense[1][-1][:256], sparse[1][-1][:256])
    assert not torch.equal(dense[1][-1], sparse[1][-1])


def test_batch_of_one_does_not_depend_on_what_ran_before(small: Sala) -> None:
    first = _run(small, _tokens(120), [120], 120)
    _run(small, _tokens(77), [77], 77)
    assert _same_bits(first, _run(small, _tokens(120), [120], 120))


def test_oracle_is_finite_and_near_the_model(small: Sala) -> None:
    tokens = _tokens(230)
    oracle = Sala(SMALL, small.weights, ORACLE)
    exact, rounded = oracle.forward(tokens, oracle.start(230)), small.forward(tokens, small.start(230))
    assert exact.dtype == torch.float64
    assert oracle.logits(exact).isfinite().all()
    error = (exact - rounded.double()).norm(dim=-1) / exact.norm(dim=-1)
    assert 1e-4 < error.median() < 0.03


def test_activations_stay_alive_through_32_layers(device: str) -> None:
    narrow = dataclasses.replace(
        preset("sala-9b"),
        hidden_size=128,
        intermediate_size=256,
        vocab_size=512,
        num_attention_heads=4,
        head_dim=32,
        lightning_heads=4,
        dim_model_base=8,
        sparse=SparseConfig(topk=3, window_size=64, dense_len=0),
        eos_tokens=(2,),
    )
    model = Sala(narrow, seeded_weights(narrow, 0, device))
    trace = Trace()
    out = model.forward(_tokens(400, 512), model.start(400), trace)
    for layer, (before, after) in enumerate(zip(trace.hidden, trace.hidden[1:])):
        size = after.double().square().mean().sqrt()
        change = (after.double() - before.double()).norm() / before.double().norm()
        assert 0.8 < size < 4.0, f"layer {layer}: rms {size:.3f}"
        assert 0.1 < change < 0.8, f"layer {layer} changes its input by {change:.3f}"
    directions = torch.nn.functional.normalize(out.double(), dim=-1)
    alike = (directions @ directions.mT).fill_diagonal_(0).abs().mean()
    assert alike < 0.3  # tokens have not collapsed onto one direction
    assert 1.0 < model.logits(out).double().std() < 4.0


def test_greedy_generation_is_the_argmax_of_a_fresh_pass(small: Sala) -> None:
    prompt = _tokens(190).tolist()
    out = generate(small, prompt, 20, stop=())
    assert len(out) == 20
    text = list(prompt)
    sequence = small.start(len(prompt))
    for token in out:
        if len(text) < 200:  # in one piece a longer text would be a longer prompt, and sparse from its start
            logits = small.logits(small.forward(torch.tensor(text), small.start(len(prompt)))[-1:])
            assert token == int((logits[0] == logits.max()).nonzero()[0])
        text.append(token)
    for piece in torch.tensor(text[:-1]).split([len(prompt), *[1] * 19]):
        logits = small.logits(small.forward(piece, sequence)[-1:])
        assert text[sequence.length] == int((logits[0] == logits.max()).nonzero()[0])
    assert out == generate(small, prompt, 20, stop=(), piece=37)


def test_generation_stops_after_an_end_of_text(small: Sala) -> None:
    prompt = _tokens(30).tolist()
    out = generate(small, prompt, 12, stop=())
    cut = out.index(out[5])
    assert generate(small, prompt, 12, stop={out[5]}) == out[: cut + 1]


def test_sampling_repeats_with_its_seed(small: Sala) -> None:
    prompt = _tokens(30).tolist()
    one, again, other = (
        generate(small, prompt, 16, seed=seed, temperature=1.3, top_k=40, top_p=0.95, stop=()) for seed in (7, 7, 8)
    )
    assert one == again
    assert one != other


def test_mistakes_are_named(small: Sala) -> None:
    with pytest.raises(ValueError, match="0 to 96"):
        small.forward(torch.tensor([3, 97]), small.start(2))
    with pytest.raises(ValueError, match="prompt_length 0"):
        small.start(0)
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing"):
        Sala(SMALL, {name: w for name, w in small.weights.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"lm_head\.weight: shape \[97, 1\]"):
        Sala(SMALL, {**small.weights, "lm_head.weight": torch.zeros(97, 1)})
    released = Sala(SMALL, small.weights, end_effect=True)
    sequence = released.start(255)
    with pytest.raises(ValueError, match="one piece"):
        released.forward(_tokens(100), sequence)


def test_end_effect_shows_only_at_its_lengths(small: Sala) -> None:
    released = Sala(SMALL, small.weights, end_effect=True)
    differs = {}
    for count in (319, 320):
        rule, kernel = (_run(model, _tokens(count), [count], count)[1][-1] for model in (small, released))
        differs[count] = not torch.equal(rule, kernel)
    assert differs == {319: True, 320: False}
