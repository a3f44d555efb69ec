"""Test attention through torch's varlen_attn with a slow stand-in for the kernel, which needs a GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.test_packing import KV, ROWS, both_ways, make, token_losses
from unsloth_ddp.data.arrow_rows import ArrowRows, PackedRows
from unsloth_ddp.data.order.collate import Flatten
from unsloth_ddp.model.packing import attention_operators, varlen
from unsloth_ddp.model.packing.attention import packing_obstacles

QWEN3 = {**KV, "head_dim": 16}
MISTRAL = {**KV, "sliding_window": 8}
# Its scores are not divided by the root of the head size.
GRANITE = {**KV, "attention_multiplier": 0.7}
GPT_OSS = {**QWEN3, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8, "initializer_range": 0.3}
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip


def slow_varlen(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, boundaries_k: Tensor, longest: int, longest_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """Compute what torch's varlen_attn does, row by row, causal, within a window: (tokens, heads, size)."""
    assert boundaries.dtype == boundaries_k.dtype == torch.int32 and query.is_contiguous()
    assert longest == int(boundaries.diff().max()) and longest_k == int(boundaries_k.diff().max())
    assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1])
    rows, sums = [], []
    for first, end, first_k, end_k in of_rows(boundaries, boundaries_k):
        q = query[first:end].transpose(0, 1)[None]
        k, v = (x[first_k:end_k].transpose(0, 1)[None] for x in (key, value))
        seen = seen_keys(end - first, end_k - first_k, window_size[0])
        row = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)
        rows.append(row[0].transpose(0, 1))
        sums.append(scores_of(q[0], k[0], seen, scale or q.shape[-1] ** -0.5).logsumexp(-1))
    return (torch.cat(rows), torch.cat(sums, dim=1)) if return_aux and return_aux.lse else torch.cat(rows)


def of_rows(boundaries: Tensor, boundaries_k: Tensor) -> Any:
    """Return where each row begins and ends among queries, and among keys."""
    return zip(*(x.tolist()[i:][: len(x) - 1] for x in (boundaries, boundaries_k) for i in (0, 1)), strict=True)


def seen_keys(queries: int, keys: int, before: int) -> Tensor:
    """Return which keys each query attends to; queries are those of the last tokens."""
    ago = torch.arange(keys)[keys - queries :, None] - torch.arange(keys)
    return (ago >= 0) & ((ago <= before) | (before < 0))


def scores_of(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:
    key = key.repeat_interleave(len(query) // len(key), dim=0)
    return (scale * query @ key.mT).masked_fill(~seen, -torch.inf)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of the queries that the stand-in is called with."""
    import torch.nn.attention.varlen

    seen: list[tuple[int, ...]] = []

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return slow_varlen(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", counted)
    # Compared is in fp32, which the kernel would not take.
    monkeypatch.setattr(varlen, "SIXTEEN_BIT", (*varlen.SIXTEEN_BIT, torch.float32))
    return seen


def packed_for_flash() -> dict[str, Any]:
    rows, packing, _, _ = both_ways()
    packs = PackedRows(ArrowRows(rows), packing)
    return Flatten("flash")([packs[i] for i in range(len(packs))])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", KV),
        ("Qwen3", QWEN3),
        ("Mistral", MISTRAL),
        ("Granite", GRANITE),
        # Its values are narrower than its keys.
        ("DeepseekV3", LATENT),
        # With sinks, and a window in every other layer.
        ("GptOss", GPT_OSS),
    ],
)
def test_every_token_loss_is_the_same_packed_or_padded(name: str, config: dict[str, Any], calls: list[Any]) -> None:
    model = make(name, **config)
    _, _, padded, _ = both_ways()
    expected = token_losses(model, padded)
    assert varlen.obstacle(model) is None
    varlen.use(model)
    packed = packed_for_flash()
    torch.testing.assert_close(token_losses(model, packed), expected, rtol=2e-6, atol=1e-6)
    assert len(calls) == model.config.num_hidden_layers
    # Padded rows, as evaluation has them, take sdpa and its mask.
    torch.testing.assert_close(token_losses(model, padded), expected, rtol=2e-6, atol=1e-6)
    assert len(calls) == model.config.num_hidden_layers
    one_row = {**packed, "cu_seq_lens_q": torch.tensor([0, packed["input_ids"].shape[1]], dtype=torch.int32)}
    one_row |= {"position_ids": torch.arange(packed["input_ids"].shape[1])[None], "max_length_q": sum(ROWS) + 1}
    assert (token_losses(model, one_row) - expected).abs().max() > 1e-4, "the comparison sees no mixing"


def test_rows_without_padding_need_no_mask(calls: list[Any]) -> None:
    model = make("Mistral", **MISTRAL)
    ids = torch.randint(3, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    expected = token_losses(model, batch)
    varlen.use(model)
    torch.testing.assert_close(token_losses(model, batch), expected, rtol=2e-6, atol=1e-6)
    assert calls == [(60, 2, 16)] * 2


@pytest.mark.parametrize(
    ("name", "config", "called"),
    [
        ("Granite", GRANITE, False),
        ("Mistral", {**MISTRAL, "sliding_window": 20}, False),
        ("Mistral", {**MISTRAL, "sliding_window": 19}, True),
        ("Mistral", MISTRAL, True),
    ],
)
def test_a_dense_batch_is_computed_without_boundaries_unless_its_window_is_shorter(
    name: str, config: dict[str, Any], called: bool, calls: list[Any]
) -> None:
    ids = torch.randint(3, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    model = make(name, **config)
    expected = model(ids).logits
    varlen.use(model)
    found = model(ids, dense=True, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    assert bool(calls) is called


def test_generation_is_what_it_is_with_sdpa(calls: list[Any]) -> None:
    model = make("Llama", **KV)
    asked = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    given = {**asked, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.set_attn_implementation("sdpa")
    expected = model.generate(**given)
    varlen.use(model)
    assert model.generate(**given).tolist() == expected.tolist()
    alone = {**given, **{name: value[1:] for name, value in asked.items()}}
    assert model.generate(**alone).tolist() == expected[1:].tolist()


def test_tokens_after_a_cache_are_what_they_are_with_sdpa(calls: list[Any]) -> None:
    model = make("Llama", **KV)
    ids = torch.tensor([[8, 9, 10, 11, 12, 13]])
    expected = model(ids).logits[:, 3:]
    varlen.use(model)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    found = model(ids[:, 3:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


def test_gradients_reach_what_is_trained(calls: list[Any]) -> None:
    model = make("Qwen3", **QWEN3).train()
    packed = packed_for_flash()
    gradients = []
    for implementation in ("sdpa", varlen.NAME):
        if implementation == varlen.NAME:
            varlen.use(model)
        model.zero_grad()
        model(**packed, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert calls


def test_under_autocast_the_kernel_gets_16_bits(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen

    kinds = set()
    counted = torch.nn.attention.varlen.varlen_attn

    def kept(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kinds.update({query.dtype, key.dtype, value.dtype})
        return counted(query, key, value, *args, **kwargs)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kept)
    model = make("Qwen3", **QWEN3)
    varlen.use(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        token_losses(model, packed_for_flash())
    assert kinds == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("Llama", {**KV, "attention_dropout": 0.1}, "has dropout"),
        # Its dropout has another name.
        ("GPT2", {}, "has dropout"),
        ("Gemma2", {**KV, "head_dim": 16}, "has a softcap"),
        ("Bloom", {"hidden_size": 32, "n_head": 2}, "does not let other attention"),
        # Its layers do not pass row boundaries on.
        ("Nemotron", KV, "does not pass the boundaries"),
        # Its window is in the mask only.
        ("Phimoe", {**KV, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}, "does not pass its "
            "sliding window"),
    ],
)  # fmt: skip
def test_models_with_other_attention_arguments_keep_their_attention(
    name: str, config: dict[str, Any], said: str
) -> None:
    assert said in str(varlen.obstacle(make(name, **config)))


@pytest.mark.parametrize(("name", "config", "own"), [("Ministral3", QWEN3, False), ("GptOss", GPT_OSS, True)])
def test_unsloth_keeps_its_attention_where_there_is_no_sdpa(name: str, config: dict[str, Any], own: bool) -> None:
    model = make(name, **config)
    kept = packing_obstacles(model, "unsloth", unsloth_attention=False).no_kernel
    assert (kept or "").startswith("Unsloth computes the model's attention") is own
    assert packing_obstacles(model, "transformers", unsloth_attention=False).no_kernel is None


CALL = {
    "cu_seq_lens_q": torch.tensor([0, 4, 6]),
    "max_length_q": 4,
    "same_shapes": True,
    "head_size": 16,
    "is_causal": True,
}


@pytest.mark.parametrize(
    ("changed", "supported"),
    [
        ({}, True), ({"is_causal": None}, True), ({"is_causal": False}, False), ({"same_shapes": False}, False),
        # Without either, `attend` would take a pack for one row.
        ({"cu_seq_lens_q": None}, False), ({"max_length_q": None}, False),
        ({"dropout": 0.0, "softcap": None}, True), ({"dropout": 0.1}, False), ({"softcap": 30.0}, False),
        ({"head_size": 512}, True), ({"head_size": 512, "sliding_window": 8}, False), ({"sliding_window": 8}, True),
        ({"s_aux": torch.zeros(2)}, True), ({"s_aux": torch.zeros(2), "head_size": 512}, False),
        ({"position_bias": torch.zeros(2)}, False),
    ],
)  # fmt: skip
def test_a_call_is_supported_with_every_needed_argument_and_no_other(changed: dict[str, Any], supported: bool) -> None:
    assert (varlen._obstacle_in(CALL | changed) is None) is supported


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, False), ({"sliding_window": 8}, True), ({"sliding_window": None}, False),
        ({"sliding_window": 8, "use_sliding_window": False}, False),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)  # fmt: skip
def test_a_config_tells_if_there_is_a_window(config: dict[str, Any], window: bool) -> None:
    assert varlen._has_window(SimpleNamespace(**config)) is window


def test_a_model_that_does_not_support_it_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama", **KV)
    monkeypatch.setattr(model, "_supports_flash_attn", False)
    assert varlen.obstacle(model)


def test_a_trial_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = make("Llama", **KV)

    def fail(*given: Any) -> None:
        raise RuntimeError("no embedding")

    model.model.embed_tokens.register_forward_hook(fail)
    with caplog.at_level(logging.WARNING):
        assert varlen.obstacle(model)
    assert (
        "packed rows use the attention of Transformers, because a trial forward pass failed: no embedding"
        in caplog.text
    )
    assert model.config._attn_implementation == "eager"


def test_the_kernel_is_available_where_torch_takes_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen

    def older(query: Tensor, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> None: ...

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", slow_varlen)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert varlen.is_available()
    for where, name, value in (
        (torch.nn.attention.varlen, "varlen_attn", older),
        (torch.backends.cuda, "is_flash_attention_available", lambda: False),
        (torch.version, "hip", "6.4"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(where, name, value)
            assert not varlen.is_available(), name


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = make("Qwen3", **QWEN3).train()
    # As adapters have it.
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.lm_head)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.get_rng_state()
    assert varlen.obstacle(model) is None
    assert torch.equal(torch.get_rng_state(), draws)
    assert model.training and model.config._attn_implementation == "eager"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_sharded_weights_are_not_needed() -> None:
    model, mixing = make("Qwen3", **QWEN3), make("Nemotron", **KV)
    for one in (model, mixing):
        for parameter in one.parameters():
            parameter.ds_id, parameter.data = 0, torch.empty(0)
    assert varlen.obstacle(model) is None and varlen.obstacle(mixing)


def slow_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: None, boundaries: Tensor, boundaries_k: Tensor, longest: int,
    longest_k: int,
    dropout: float, mask_type: int, with_sums: bool, *, scale: float, window_size: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute what torch's memory-efficient kernel does; the sums hold nothing."""
    assert bias is None and torch.equal(boundaries, boundaries_k) and (dropout, mask_type, with_sums) == (0.0, 1, True)
    assert longest == longest_k <= query.shape[1]
    width = -1 if window_size is None else window_size - 1
    rows = int(boundaries.diff().max())
    attended = slow_varlen(
        query[0], key[0], value[0], boundaries, boundaries, rows, rows, scale=scale, window_size=(width, 0)
    )
    padded = -(-longest // 32) * 32
    return attended[None].contiguous(), query.new_zeros((len(boundaries) - 1, query.shape[2], padded)), *[None] * 4


def slow_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, attended: Tensor, boundaries: Tensor,
    boundaries_k: Tensor, longest: int, longest_k: int, sums: Tensor, dropout: float, *others: Any, scale: float,
    num_splits_key: int, window_size: int | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of torch's memory-efficient kernel by hand: there is no autograd below an operator."""
    assert torch.equal(boundaries, boundaries_k) and sums.dtype == torch.float32 and num_splits_key == 1
    assert window_size is None
    gradients: list[list[Tensor]] = [[], [], []]
    for first, end in zip(boundaries.tolist(), boundaries.tolist()[1:], strict=False):
        q, k, v, o, g = (one[0, first:end].transpose(0, 1) for one in (query, key, value, attended, grad))
        ahead = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        shares = (scale * q @ k.mT).masked_fill(ahead, -torch.inf).softmax(-1)
        scores = scale * shares * (g @ v.mT - (g * o).sum(-1, keepdim=True))
        for kept, one in zip(gradients, (scores @ k, scores.mT @ q, shares.mT @ g), strict=True):
            kept.append(one.transpose(0, 1))
    return *(torch.cat(rows)[None] for rows in gradients), None


@pytest.mark.parametrize("compiled", [False, True])
def test_wide_heads_take_the_other_kernel_forward_and_backward(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"_efficient_attention_forward": slow_forward, "_efficient_attention_backward": slow_backward}
    monkeypatch.setattr(attention_operators, "aten", SimpleNamespace(**kernels))
    monkeypatch.setattr(varlen, "SIXTEEN_BIT", (torch.float32,))
    torch.manual_seed(0)
    sizes = [(1, heads, 10, 264) for heads in (4, 2, 2)]
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    boundaries = torch.tensor([0, 6, 10], dtype=torch.int32)

    def attend(*given: Tensor) -> Tensor:
        # The longest row of any batch, which is longer than this one.
        return varlen.attend(torch.nn.Identity(), *given, scaling=0.1, cu_seq_lens_q=boundaries, max_length_q=64)[0]

    attended = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(*inputs)
    weights = torch.randn_like(attended)
    gradients = torch.autograd.grad((attended * weights).sum(), inputs)
    rows = [[one[:, :, first:end] for one in inputs] for first, end in ((0, 6), (6, 10))]
    alone = [
        torch.nn.functional.scaled_dot_product_attention(*row, is_causal=True, scale=0.1, enable_gqa=True)
        for row in rows
    ]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    torch.testing.assert_close(attended, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), inputs))


@torch.library.custom_op("tests::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, sums: Tensor, boundaries: Tensor,
    boundaries_k: Tensor, longest: int, longest_k: int, causal: bool, random_state: Tensor, scale: float,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients that flash attention computes from its output and its log-sum-exp values."""
    assert causal == (window[0] < 0) and window[1] == 0 and random_state.dtype == torch.uint64
    of_query, of_key, of_value = (torch.zeros_like(one) for one in (query, key, value))
    for first, end, first_k, end_k in of_rows(boundaries, boundaries_k):
        q, o, g = (one[first:end].transpose(0, 1) for one in (query, attended, grad))
        k, v = (one[first_k:end_k].transpose(0, 1) for one in (key, value))
        groups = len(q) // len(k)
        shares = (
            scores_of(q, k, seen_keys(end - first, end_k - first_k, window[0]), scale) - sums[:, first:end, None]
        ).exp()
        k, v = (one.repeat_interleave(groups, dim=0) for one in (k, v))
        scores = scale * shares * (g @ v.mT - (g * o).sum(-1, keepdim=True))
        of_query[first:end] = (scores @ k).transpose(0, 1)
        for kept, one in ((of_key, scores.mT @ q), (of_value, shares.mT @ g)):
            kept[first_k:end_k] = one.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return of_query, of_key, of_value


@flash_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(one) for one in (query, key, value))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_sinks_are_in_the_softmax_forward_and_backward(
    compiled: bool, window: int | None, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", flash_backward)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 10, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True)
    boundaries = torch.tensor([0, 6, 10], dtype=torch.int32)

    def attend(*given: Tensor) -> Tensor:
        return varlen.attend(
            torch.nn.Identity(), *given[:3], s_aux=given[3], sliding_window=window, scaling=0.3,
            cu_seq_lens_q=boundaries,
            max_length_q=6,
        )[0]  # fmt: skip

    attended = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(*inputs, sinks)
    weights = torch.randn_like(attended)
    gradients = torch.autograd.grad((attended * weights).sum(), [*inputs, sinks])
    expected = torch.cat(
        [softmax_with_sinks(*(x[0, :, i:j] for x in inputs), sinks, window) for i, j in ((0, 6), (6, 10))]
    )
    torch.testing.assert_close(attended[0], expected)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights[0]).sum(), [*inputs, sinks]))
    assert calls == [(10, 4, 16)]


def softmax_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Compute attention of one row, (tokens, heads, size), as the paper writes it."""
    tokens = query.shape[1]
    scores = scores_of(query, key, seen_keys(tokens, tokens, -1 if window is None else window - 1), 0.3)
    shares = torch.cat([scores, sinks[:, None, None].expand(-1, tokens, 1)], dim=-1).softmax(-1)[..., :-1]
    return (shares @ value.repeat_interleave(len(query) // len(value), dim=0)).transpose(0, 1)


def test_32_bits_are_left_to_sdpa() -> None:
    """Run without the stand-in: a call of torch's own function would fail on a CPU."""
    model = make("Mistral", **MISTRAL)
    _, _, padded, _ = both_ways()
    expected = token_losses(model, padded)
    varlen.use(model)
    torch.testing.assert_close(token_losses(model, packed_for_flash()), expected, rtol=2e-6, atol=1e-6)


def test_a_saved_config_does_not_name_the_kernel(tmp_path: Path) -> None:
    model = make("Llama", **KV)
    varlen.use(model)
    model.save_pretrained(tmp_path)
    assert varlen.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
