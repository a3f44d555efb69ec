"""Products with thin matrices that share a factor or are added up: joined, with the same results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache

from tests.data.test_packing import KV, make
from unsloth_ddp.model.forward.compile_options import layer_options
from unsloth_ddp.model.forward.joint_products import IN_PLACE, LARGEST_RANK, UNSLOTH_ADDS, JoinThinProducts

aten: Any = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, IN_PLACE)


class Counted(CustomGraphPass):
    """Join the products of each graph, and note how many there were before and after."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []
        self.wide: list[tuple[int, ...]] = []

    def __call__(self, graph: Any) -> None:
        before = sum(node.target in PRODUCTS for node in graph.nodes)
        JoinThinProducts()(graph)
        graph.lint()
        self.counts.append((before, sum(node.target in PRODUCTS for node in graph.nodes)))
        self.wide += [tuple(node.meta["val"].shape) for node in graph.nodes if node.target is aten.cat.default]

    def uuid(self) -> None:
        """Compile each time."""


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], Counted]:
    torch._dynamo.reset()
    counted = Counted()
    return torch.compile(function, dynamic=False, options={"post_grad_custom_pre_pass": counted}), counted


def matrices(*shapes: tuple[int, int]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def assert_same(function: Callable[..., Any], *given: Tensor, counts: list[tuple[int, int]]) -> None:
    wanted = function(*(one.clone() for one in given))
    joined, counted = compiled(function)
    found = joined(*(one.clone() for one in given))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert counted.counts == counts


@pytest.fixture(scope="module")
def adapted() -> Any:
    torch.manual_seed(0)
    base = make("Qwen3", **{"hidden_size": 64, "intermediate_size": 96, **KV, "head_dim": 32})
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    return model


def passes(model: Any, layer: Callable[..., Any]) -> list[Tensor]:
    """Return the result of a layer, and the gradients of its input and adapters."""
    x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    rotary = model.get_base_model().model.rotary_emb(x, torch.arange(24)[None])
    result = layer(x, position_embeddings=rotary)
    (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def traced(function: Callable[..., Any]) -> tuple[Callable[..., Any], Counted]:
    """Trace for any number of tokens, as Inductor does, and run the joined graphs without generating code of them."""
    torch._dynamo.reset()
    counted = Counted()

    def join(graph: torch.fx.GraphModule, _: Any) -> Any:
        counted(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    given = {"decompositions": select_decomp_table(), "partition_fn": min_cut_rematerialization_partition}
    return torch.compile(function, dynamic=True, backend=aot_autograd(fw_compiler=join, **given)), counted


@pytest.mark.parametrize("prepare", [pytest.param(compiled, marks=pytest.mark.slow), traced])
def test_a_layer_with_adapters_computes_fewer_products_and_the_same(adapted: Any, prepare: Any) -> None:
    layer = adapted.get_base_model().model.layers[0]
    wanted = passes(adapted, layer)
    joined, counted = prepare(layer)
    found = passes(adapted, joined)
    assert len(found) == len(wanted) == 2 + 14
    for one, other in zip(found, wanted, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 2e-6
    (before, after), (before_backward, after_backward) = counted.counts
    # Queries, keys and values read their input once for all adapters, and so do gate and up.
    assert before - after >= 3
    # Their gradients read it once too, and are written to its gradient once.
    assert before_backward - after_backward >= 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_matrices_are_put_side_by_side_by_whole_rows(dtype: torch.dtype) -> None:
    # torch 2.14 on a CPU computes NaN where 16-bit matrices are transposed before they are put side by side.
    x, a, b = (one.to(dtype) for one in matrices((64, 32), (8, 32), (16, 32)))
    joined, counted = compiled(lambda x, a, b: (x @ a.t(), x @ b.t()))
    for found, wanted in zip(joined(x, a, b), (x @ a.t(), x @ b.t()), strict=True):
        torch.testing.assert_close(found, wanted)
    assert counted.counts == [(2, 1)] and counted.wide == [(24, 32)]


def test_products_that_need_each_other_stay_apart() -> None:
    def chained(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x @ (b @ (x @ a))

    assert_same(chained, *matrices((32, 16), (16, 4), (16, 32)), counts=[(3, 3)])


def test_two_joint_products_that_would_need_each_other_are_not_both_made() -> None:
    def crossed(x: Tensor, y: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        first, other = x @ a, y @ b
        return first, other, y @ (c @ first), x @ (d @ other)

    shapes = (32, 16), (32, 16), (16, 4), (16, 4), (16, 32), (16, 32)
    assert_same(crossed, *matrices(*shapes), counts=[(6, 5)])


def test_a_product_that_a_kernel_reads_keeps_its_strides() -> None:
    read: list[tuple[int, ...]] = []

    @torch.library.custom_op("unsloth_ddp_tests::strides", mutates_args=[])
    def strides(x: Tensor) -> Tensor:
        read.append(x.stride())
        return x.clone()

    @strides.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keys(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return strides((x @ w).view(2, 16, 8)), x @ a, x @ b

    assert_same(keys, *matrices((32, 16), (16, 8), (16, 4), (16, 4)), counts=[(3, 2)])
    assert read == [(128, 8, 1)] * 2


@pytest.mark.parametrize(("rank", "counts"), [(LARGEST_RANK, [(2, 1)]), (LARGEST_RANK + 1, [(2, 2)])])
def test_only_thin_matrices_are_put_side_by_side(rank: int, counts: list[tuple[int, int]]) -> None:
    given = matrices((8, 300), (300, rank), (300, rank))
    assert_same(lambda x, a, b: (x @ a, x @ b), *given, counts=counts)


def test_a_sum_that_something_else_reads_stays_as_it_is() -> None:
    def read(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ a
        return product + y @ b, product

    assert_same(read, *matrices((8, 2), (2, 8), (8, 2), (2, 8)), counts=[(2, 2)])


def test_products_of_a_sum_in_two_shapes_are_not_joined() -> None:
    def spread(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return x @ a + y @ b

    # The second term is as wide as the first by repetition alone.
    assert_same(spread, *matrices((8, 2), (2, 8), (1, 2), (2, 8)), counts=[(2, 2)])


def test_products_of_other_sizes_in_the_shape_of_their_sum_are_not_joined() -> None:
    def folded(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return (x @ a).view(4, 2, 8) + (y @ b).view(4, 2, 8)

    assert_same(folded, *matrices((8, 2), (2, 8), (4, 2), (2, 16)), counts=[(2, 2)])


def test_products_times_a_number_keep_it() -> None:
    def scaled(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        empty = torch.empty(8, 2, dtype=x.dtype)
        return empty.addmm(x, a, beta=0, alpha=0.5), empty.addmm(x, b, beta=0, alpha=0.5)

    assert_same(scaled, *matrices((8, 6), (6, 2), (6, 2)), counts=[(2, 1)])


@pytest.fixture(scope="module")
def unsloth_operator() -> Any:
    """Define Unsloth's operator as it does, since it cannot be imported without a GPU."""

    @torch.library.custom_op(UNSLOTH_ADDS, mutates_args=["out"])
    def addmm_(out: Tensor, A: Tensor, B: Tensor, alpha: float, beta: float) -> None:
        out.addmm_(A, B, alpha=alpha, beta=beta)

    return torch.ops.unsloth.addmm_


def test_what_unsloth_adds_in_place_is_added_once(unsloth_operator: Any) -> None:
    def gradient(dq: Tensor, w: Tensor, h: Tensor, a: Tensor, dk: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        dx = dq @ w
        unsloth_operator(dx, h, a, 2.0, 1.0)
        unsloth_operator(dx, dk, v, 1.0, 1.0)
        unsloth_operator(dx, g, b, 2.0, 1.0)
        return dx

    shapes = (32, 300), (300, 400), (32, 2), (2, 400), (32, 290), (290, 400), (32, 3), (3, 400)
    assert_same(gradient, *matrices(*shapes), counts=[(4, 3)])


def test_additions_in_place_with_other_factors_stay_apart(unsloth_operator: Any) -> None:
    def gradient(x: Tensor, h: Tensor, a: Tensor, g: Tensor, b: Tensor) -> Tensor:
        total = x * 2
        unsloth_operator(total, h, a, 2.0, 1.0)
        unsloth_operator(total, g, b, 1.0, 1.0)
        return total

    assert_same(gradient, *matrices((8, 6), (8, 2), (2, 6), (8, 2), (2, 6)), counts=[(2, 2)])


def test_a_tensor_that_is_read_between_two_additions_is_what_it_was(unsloth_operator: Any) -> None:
    def gradient(x: Tensor, h: Tensor, a: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x * 2
        unsloth_operator(total, h, a, 2.0, 1.0)
        between = total.sum()
        unsloth_operator(total, g, b, 2.0, 1.0)
        return total, between

    assert_same(gradient, *matrices((8, 6), (8, 2), (2, 6), (8, 2), (2, 6)), counts=[(2, 2)])


def test_compiled_code_in_caches_is_kept_by_the_pass() -> None:
    def product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x @ a) * (x @ b)

    given = matrices((8, 6), (6, 2), (6, 2))
    hits: list[Counter[str]] = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            torch.compile(product, options=layer_options())(*given)
            hits.append(Counter(torch._dynamo.utils.counters["inductor"]))
    assert [counts["fxgraph_cache_hit"] for counts in hits] == [0, 1]
