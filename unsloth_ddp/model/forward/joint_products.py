"""Compute products with thin matrices that share a factor, or are added up, as one: a pass over a graph that is compiled.

A product with a matrix of an adapter takes as long as reading or writing its other factor. Layers that read the same input
(queries, keys and values, or gate and up) read it once for each of them, and write a gradient of it for each. Joined, they
read and write it once. Terms of adapters in a sum are then added in fp32, before they are rounded.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.node import map_arg

aten: Any = torch.ops.aten
SHAPED = (aten.permute.default, aten.reshape.default, aten.view.default)
# Larger matrices are no adapters', and putting frozen ones side by side would copy them in every pass.
LARGEST_RANK = 256
# Unsloth adds a product to a gradient in place by this operator, which a graph has as a call of `IN_PLACE`.
UNSLOTH_ADDS, IN_PLACE = "unsloth::addmm_", torch.ops.higher_order.auto_functionalized_v2


class JoinThinProducts(CustomGraphPass):
    """Join products with thin matrices; for the option `post_grad_custom_pre_pass` of torch.compile."""

    def __call__(self, graph: Any) -> None:
        """Change a graph of torch.fx in place."""
        for side in (0, 1):
            _join_shared(graph, side)
        # What is part of a larger sum is joined with it.
        for total in [node for node in graph.nodes if _adds(node) and not _is_part(node)]:
            _join_terms(graph, total)
        for last in [node for node in graph.nodes if _adds_in_place(node) and not _is_part_in_place(node)]:
            _join_in_place(graph, last)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return what tells compiled code in caches apart from that of other versions."""
        return get_hash_for_files((__file__,))


def _is_thin(rank: Any, other: Any) -> bool:
    """Return whether a matrix is thin, by its smaller size and its larger one, which may not be fixed."""
    return type(rank) is int and rank <= LARGEST_RANK and (type(other) is not int or rank < other)


def _size(node: Any, axis: int) -> Any:
    return node.meta["val"].shape[axis]


def _call(graph: Any, target: Any, *args: Any) -> Any:
    """Add a node, with the value that Inductor reads its size from."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda one: one.meta["val"]))
    return node


def _cat(graph: Any, matrices: Sequence[Any], axis: int) -> Any:
    """Put matrices side by side; transposed ones before they are transposed, so that whole rows are copied."""
    if all(one.target is aten.permute.default and one.args[1] == [1, 0] for one in matrices):
        return _call(graph, aten.permute.default, _cat(graph, [one.args[0] for one in matrices], 1 - axis), [1, 0])
    return _call(graph, aten.cat.default, list(matrices), axis)


def _product(node: Any) -> tuple[Any, float] | None:
    """Return the two factors of a product of matrices, and the number that it is multiplied by; None for other nodes."""
    if node.target is aten.mm.default:
        return node.args, 1
    if node.target is aten.addmm.default and node.kwargs.get("beta", 1) == 0:
        return node.args[1:], node.kwargs.get("alpha", 1)
    return None


def _join_shared(graph: Any, side: int) -> None:
    """Join products that have the same left (0) or right (1) factor, where the other one is thin."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for node in graph.nodes:
        if (found := _product(node)) is not None:
            shared, thin = found[0][side], found[0][1 - side]
            if _is_thin(_size(thin, 1 - side), _size(thin, side)) and _is_read_by_products(node):
                groups[shared, found[1]].append(node)
    for (_, scale), nodes in groups.items():
        for chosen in _independent(graph, nodes):
            _join(graph, chosen, side, scale)


def _is_read_by_products(node: Any) -> bool:
    """Return whether only products read a result, or the caller.

    A part of a joint product has other strides. What else reads a result may have been given those that it had.
    """
    return all(
        user.op == "output"
        or _product(user) is not None
        or user.target is aten.addmm.default
        or _is_unsloth_addition(user)
        or (user.target in SHAPED and _is_read_by_products(user))
        for user in node.users
    )


def _independent(graph: Any, nodes: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield sets of several nodes of which none needs the result of another; the graph may change in between."""
    left = list(nodes)
    while len(left) > 1:
        needed = _needed(graph, left)
        chosen: list[Any] = []
        for node in left:
            if not any(other in needed[node] or node in needed[other] for other in chosen):
                chosen.append(node)
        left = [node for node in left if node not in chosen]
        if len(chosen) > 1:
            yield chosen


def _needed(graph: Any, nodes: Sequence[Any]) -> dict[Any, set[Any]]:
    """Return those of `nodes` that each node needs the result of."""
    known = set(nodes)
    needed: dict[Any, set[Any]] = {}
    for node in graph.nodes:
        needed[node] = {one for one in node.all_input_nodes if one in known}
        needed[node].update(*(needed[one] for one in node.all_input_nodes))
    return needed


def _join(graph: Any, nodes: Sequence[Any], side: int, scale: float) -> None:
    """Replace products with the same factor by parts of one."""
    axis = 1 - side
    factors: list[Any] = [found[0] for node in nodes if (found := _product(node))]
    with graph.inserting_before(nodes[-1]):
        thin = _cat(graph, [pair[axis] for pair in factors], axis)
        shared = factors[0][side]
        joint = _call(graph, aten.mm.default, *((shared, thin) if side == 0 else (thin, shared)))
        if scale != 1:
            joint = _call(graph, aten.mul.Tensor, joint, scale)
        begin = 0
        for node in nodes:
            end = begin + _size(node, axis)
            node.replace_all_uses_with(_call(graph, aten.slice.Tensor, joint, axis, begin, end))
            begin = end
    for node in nodes:
        graph.erase_node(node)
    # What reads the first ones stood before the last.
    stable_topological_sort(graph)


def _adds(node: Any) -> bool:
    """Return whether a node adds two tensors of its own size and type."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    own: Any = node.meta["val"]
    others = [getattr(one, "meta", {}).get("val") for one in node.args]
    return all(isinstance(one, torch.Tensor) and (one.shape, one.dtype) == (own.shape, own.dtype) for one in others)


def _is_part(total: Any) -> bool:
    """Return whether only another sum reads a sum."""
    return len(total.users) == 1 and _adds(next(iter(total.users)))


def _terms(total: Any) -> Iterator[Any]:
    """Yield what a sum adds up, and what sums that only it reads add up."""
    for one in total.args:
        if _adds(one) and len(one.users) == 1:
            yield from _terms(one)
        else:
            yield one


def _join_terms(graph: Any, total: Any) -> None:
    """Join the products of two thin matrices among the terms of a sum."""
    found = [(term, _thin_factors(term)) for term in _terms(total)]
    thin = [factors for _, factors in found if factors is not None]
    shape = [size if type(size) is int else -1 for size in total.meta["val"].shape]
    sizes = [(_size(left, 0), _size(right, 1)) for left, right in thin]
    if len(thin) < 2 or shape.count(-1) > 1 or any(one != sizes[0] for one in sizes):
        return
    with graph.inserting_before(total):
        joint = _call(graph, aten.mm.default, *_side_by_side(graph, thin))
        joint = _call(graph, aten.reshape.default, joint, shape)
        for term, factors in found:
            if factors is None:
                joint = _call(graph, aten.add.Tensor, joint, term)
        total.replace_all_uses_with(joint)


def _thin_factors(term: Any) -> Any:
    """Return the factors of a term that is a product of two thin matrices, in another shape or not; None for others."""
    product = term.args[0] if term.target in (aten.reshape.default, aten.view.default) else term
    if product.target is not aten.mm.default or len(term.users) > 1 or len(product.users) > 1:
        return None
    left, right = product.args
    return product.args if _is_thin(_size(left, 1), _size(right, 1)) else None


def _side_by_side(graph: Any, pairs: Sequence[Any]) -> tuple[Any, Any]:
    """Return the two factors whose product is the sum of the products of `pairs`."""
    return _cat(graph, [pair[0] for pair in pairs], 1), _cat(graph, [pair[1] for pair in pairs], 0)


def _is_unsloth_addition(node: Any) -> bool:
    return node.target is IN_PLACE and node.args[0]._schema.name == UNSLOTH_ADDS


def _adds_in_place(node: Any) -> bool:
    """Return whether a node is Unsloth's operator, which adds a product to all of a tensor."""
    if not _is_unsloth_addition(node):
        return False
    base, given = node.kwargs["_all_bases"][0], node.kwargs
    return given["beta"] == 1 and base.meta["val"].shape == (_size(given["A"], 0), _size(given["B"], 1))


def _changed(node: Any) -> Any:
    """Return the node of the tensor that an operator has changed in place, where nothing else of it is read."""
    user = next(iter(node.users), None)
    is_alone = len(node.users) == 1 and user is not None and user.target is operator.getitem and user.args[1] == 1
    return user if is_alone else None


def _is_part_in_place(node: Any) -> bool:
    """Return whether only another addition to it reads what an operator has changed."""
    changed = _changed(node)
    user = next(iter(changed.users), None) if changed is not None else None
    return (
        user is not None and len(changed.users) == 1 and _adds_in_place(user) and user.kwargs["_all_bases"] == [changed]
    )


def _join_in_place(graph: Any, last: Any) -> None:
    """Join the thin products that several operators add to the same tensor; the last of them adds all."""
    chain = [last]
    while (base := chain[-1].kwargs["_all_bases"][0]).target is operator.getitem and _adds_in_place(base.args[0]):
        if not _is_part_in_place(base.args[0]):
            break
        chain.append(base.args[0])
    thin = [node for node in chain if _is_thin(_size(node.kwargs["A"], 1), _size(node.kwargs["B"], 1))]
    if len(thin) < 2 or len({node.kwargs["alpha"] for node in thin}) > 1:
        return
    with graph.inserting_before(thin[0]):
        left, right = _side_by_side(graph, [(node.kwargs["A"], node.kwargs["B"]) for node in thin])
    thin[0].kwargs = {**thin[0].kwargs, "A": left, "B": right}
    # Inductor would lay the new factors out like those that are recorded here, which have other sizes.
    thin[0].meta.pop("eager_input_vals", None)
    for node in thin[1:]:
        changed = _changed(node)
        changed.replace_all_uses_with(node.kwargs["_all_bases"][0])
        graph.erase_node(changed)
        graph.erase_node(node)
