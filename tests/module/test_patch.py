"""``k3plan.patch`` on a transformers Kimi-Linear: the same text as without, whatever happens to the cache between."""
from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import k3plan
from k3plan.compiler.errors import BindError
from k3plan.graphs.module.hf_cache import visible
from k3plan.graphs.module.layer import DecodeLayer
from k3plan.graphs.module.patch import CACHE, Patched, _decode_or_prefill, as_read

transformers = pytest.importorskip("transformers")

from hf_models import VOCAB, make_model, texts  # noqa: E402 - transformers may not be there

NEW = 20


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def patched(model: Any):
    with k3plan.patch(model, sequences=3, context=64) as handle:
        yield handle


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask,
                              max_new_tokens=NEW, do_sample=False, **how)


def count_steps(handle: Patched) -> list[int]:
    """Calls of each layer's plan from now on."""
    counts = [0] * len(handle.layers)
    for index, layer in handle.layers.items():
        def counted(*args: Any, run: Any = layer.step, at: int = index, **kwargs: Any) -> Any:
            counts[at] += 1
            return run(*args, **kwargs)

        layer.step = counted
    return counts


@pytest.mark.parametrize("lengths", [[1], [7], [5, 5, 5], [6, 2, 4]], ids=["one", "seven", "batch", "padded"])
def test_greedy_text_is_the_same(model: Any, lengths: list[int]) -> None:
    ids, mask = texts(lengths)
    wanted = generate(model, ids, mask)
    with k3plan.patch(model, sequences=3, context=64) as handle:
        counts = count_steps(handle)
        found = generate(model, ids, mask)
    assert torch.equal(found, wanted)
    assert counts == [NEW - 1] * 4, "every layer decodes every token behind the prompt"
    assert len(set(wanted[0, ids.shape[1]:].tolist())) > 8, "the text must not be one loop"


@pytest.mark.parametrize("lengths", [[4], [3, 6]], ids=["one", "padded"])
def test_logits_step_by_step(model: Any, patched: Patched, lengths: list[int]) -> None:
    """Teacher-forced, against the whole text in one forward without a cache."""
    ids, mask = texts(lengths)
    more = torch.randint(3, VOCAB, (len(lengths), 10), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
        for at in range(10):
            mask = torch.cat([mask, torch.ones(len(lengths), 1, dtype=mask.dtype)], 1)
            found = model(more[:, at : at + 1], attention_mask=mask, cache=cache, use_cache=True).logits[:, -1]
            whole = torch.cat([ids, more[:, : at + 1]], 1)
            assert_close(found, model(whole, attention_mask=mask, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == ids.shape[1] + 10


@pytest.mark.parametrize("first", [True, False], ids=["patched-then-not", "not-then-patched"])
def test_the_cache_passes_from_one_to_the_other(model: Any, first: bool) -> None:
    """Ten tokens with the plans and ten without, in either order: the cache is current at the seam."""
    ids, _ = texts([5, 5])
    wanted = generate(model, ids)
    cache = transformers.DynamicCache(config=model.config)
    handle = k3plan.patch(model, sequences=2, context=64) if first else None
    tokens, text = ids, ids
    with torch.no_grad():
        for at in range(NEW):
            if at == 10:
                handle = handle.restore() if handle else k3plan.patch(model, sequences=2, context=64)
            tokens = model(tokens, cache=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, tokens], 1)
    if handle:
        handle.restore()
    assert torch.equal(text, wanted)


def test_two_caches_in_turn(model: Any, patched: Patched) -> None:
    """Two conversations over one set of states: each cache keeps what is its own."""
    starts = [texts([5])[0], texts([3])[0]]
    wanted = [generate_plainly(model, ids) for ids in starts]
    caches = [transformers.DynamicCache(config=model.config) for _ in starts]
    found, tokens = list(starts), list(starts)
    with torch.no_grad():
        for at in range(8):
            for i in (0, 1) if at % 3 else (1, 0):
                tokens[i] = model(tokens[i], cache=caches[i], use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
                found[i] = torch.cat([found[i], tokens[i]], 1)
    for got, text, ids in zip(found, wanted, starts, strict=True):
        assert torch.equal(got, text[:, : ids.shape[1] + 8])


def generate_plainly(model: Any, ids: Tensor) -> Tensor:
    """Greedy text by whole forwards, without a cache and so without a plan."""
    text = ids
    with torch.no_grad():
        for _ in range(8):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return text


@pytest.mark.parametrize("what", ["copied", "reordered", "chunk"])
def test_a_cache_that_changed_is_read_anew(model: Any, patched: Patched, what: str) -> None:
    ids, _ = texts([4, 4])
    more = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    cache, text = transformers.DynamicCache(config=model.config), ids

    def feed(rows: Tensor) -> Tensor:
        nonlocal text
        text = torch.cat([text, rows], 1)
        return model(rows, cache=cache, use_cache=True).logits[:, -1]

    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
        feed(more[:, :1])
        feed(more[:, 1:2])
        if what == "copied":
            cache = copy.deepcopy(cache)
        elif what == "reordered":
            cache.reorder_cache(torch.tensor([1, 0]))
            text = text[[1, 0]]
        else:
            feed(more[:, 2:5])
        for at in range(5, 8):
            found = feed(more[:, at : at + 1])
        assert_close(found, model(text, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_a_static_cache(model: Any, patched: Patched) -> None:
    ids, _ = texts([5, 5])
    with torch.no_grad():
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        logits = [model(ids, cache=cache, use_cache=True).logits[:, -1]]
        text = ids
        for _ in range(6):
            text = torch.cat([text, logits[-1].argmax(-1, keepdim=True)], 1)
            logits.append(model(text[:, -1:], cache=cache, use_cache=True).logits[:, -1])
        assert_close(logits[-1], model(text, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_eager_attention(model: Any) -> None:
    ids, mask = texts([6, 3])
    model.set_attn_implementation("eager")
    try:
        wanted = generate(model, ids, mask)
        with k3plan.patch(model, sequences=2, context=64):
            assert torch.equal(generate(model, ids, mask), wanted)
    finally:
        model.set_attn_implementation("sdpa")


def test_inference_mode(model: Any, patched: Patched) -> None:
    ids, _ = texts([5])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    patched.restore()
    assert torch.equal(found, generate(model, ids))


def test_bf16_with_wide_routers(tmp_path: Any) -> None:
    """As transformers loads a bf16 checkpoint: router and dt_bias widened, nothing lost."""
    make_model(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.float32
    ids, _ = texts([5, 5])
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :-1], cache=cache, use_cache=True)
        other = copy.deepcopy(cache)
        wanted = model(ids[:, -1:], cache=cache, use_cache=True).logits.float()
        with k3plan.patch(model, sequences=2, context=64):
            found = model(ids[:, -1:], cache=other, use_cache=True).logits.float()
    # two roundings of one value: bf16 has 8 bits, and logits have a deviation near 1
    assert (found - wanted).square().mean().sqrt() < 0.05 * wanted.std()


def test_reload_after_the_weights_changed(patched: Patched) -> None:
    model = patched.model
    ids, _ = texts([5])
    kept = copy.deepcopy(model.state_dict())
    before = generate(model, ids)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.neg_()
        model.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
    patched.reload()
    found = generate(model, ids)
    patched.restore()
    assert torch.equal(found, generate(model, ids))
    assert not torch.equal(found, before)
    model.load_state_dict(kept)


def test_restore_leaves_no_trace(model: Any) -> None:
    before, layers = dict(model.state_dict()), list(model.model.layers)
    handle = k3plan.patch(model, context=64)
    assert all("forward" in vars(layer) for layer in layers)
    assert dict(model.state_dict()).keys() == before.keys()
    with pytest.raises(BindError, match=r"patched already\n  fix: restore"):
        k3plan.patch(model, context=64)
    handle.restore()
    handle.restore()
    assert list(model.model.layers) == layers
    assert not any("forward" in vars(layer) for layer in layers)


def test_what_cannot_be_patched(model: Any, patched: Patched) -> None:
    ids, _ = texts([2, 2, 2, 2])
    with pytest.raises(BindError, match=r"4 sequences, the plan has 3.*\n  fix: .* patch with sequences=4"):
        generate(model, ids)
    ids, _ = texts([60])
    with pytest.raises(BindError, match=r"64 tokens and one more, the plan serves 64"):
        generate(model, ids)
    cache = transformers.DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :3], cache=cache, use_cache=True)
        with pytest.raises(BindError, match="records its past"):
            model(ids[:, :1], cache=cache, use_cache=True)
    patched.restore()
    with pytest.raises(BindError, match="not a KimiLinearForCausalLM"):
        k3plan.patch(torch.nn.Linear(2, 2))
    with pytest.raises(BindError, match=r"is on cpu, the plans would be for h200\n  fix: pass gpu='cpu'"):
        k3plan.patch(model, gpu="h200")
    for sizes in ({"sequences": 0}, {"context": -1}):
        with pytest.raises(BindError, match="fix: pass sequences and context of 1 or more"):
            k3plan.patch(model, **sizes)
    with pytest.raises(BindError, match=r"float16\n  fix: load it with"):
        k3plan.patch(make_model(torch.float16))


@pytest.mark.parametrize("name", CACHE)
def test_the_names_of_a_cache(model: Any, patched: Patched, name: str) -> None:
    """A layer that is called by an older transformers decodes with its plan too."""
    ids, _ = texts([4])
    cache, counts = transformers.DynamicCache(config=model.config), count_steps(patched)
    rows = torch.randn(1, 1, model.config.hidden_size)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
        model.model.layers[0](rows, position_ids=torch.tensor([[4]]), use_cache=True, **{name: cache})
    assert counts == [1, 0, 0, 0]


def test_a_layer_without_a_cache_is_refused(patched: Patched) -> None:
    """It would never decode with its plan, and nobody would be told."""
    with pytest.raises(BindError, match=r"layer 2 of this transformers takes hidden_states, state, no cache\n  fix: "):
        _decode_or_prefill(lambda hidden_states, state=None: hidden_states, patched.layers[2], 2)


def test_the_signature_is_that_of_a_decoder_layer() -> None:
    """Every argument of transformers' layer by name and in its place, and the cache by its older name."""
    theirs = inspect.signature(transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDecoderLayer.forward)
    ours = inspect.signature(DecodeLayer.forward)
    named = [n for n, p in theirs.parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert list(ours.parameters)[: len(named)] == named
    assert "past_key_values" in ours.parameters


def test_a_layer_by_itself(model: Any, patched: Patched) -> None:
    """Called as transformers calls a layer, next to transformers' own on a copy of the cache."""
    ids, _ = texts([6, 6])
    cache = transformers.DynamicCache(config=model.config)
    x = torch.randn(2, 1, 48, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
        other = copy.deepcopy(cache)
        layers = dict(patched.layers)
        patched.restore()
        for index, layer in layers.items():
            wanted = model.model.layers[index](x, attention_mask=None, cache=other, use_cache=True)
            assert_close(layer(x, None, None, past_key_values=cache), wanted, rtol=1e-5, atol=1e-5)


def test_a_weight_that_would_lose_digits() -> None:
    from k3plan.compiler.recipe import Leaf

    recipe = Leaf(("w",), (2,), "bf16")
    assert as_read({"w": torch.tensor([1.0, 0.5])}, [recipe])["w"].dtype == torch.bfloat16
    with pytest.raises(BindError, match="would lose digits"):
        as_read({"w": torch.tensor([1.0, 1.001])}, [recipe])


def test_masks() -> None:
    seen = torch.tensor([[False, True, True, True], [True, True, True, True]])
    assert visible(None, 2, 3) is None
    assert torch.equal(visible(seen[:, None, None], 2, 3), seen[:, :3])
    numbers = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    assert torch.equal(visible(numbers[:, None, None], 2, 3), seen[:, :3])
    with pytest.raises(BindError, match="2 dims"):
        visible(seen, 2, 3)
