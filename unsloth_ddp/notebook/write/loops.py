"""Share a training loop written by hand: average its gradients, and give each process its part of every batch."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Statement
from unsloth_ddp.notebook.analyse.own_loops import OwnLoop, find_loop, steps_by_training_loss
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, set_keyword
from unsloth_ddp.notebook.syntax.effects import Effect, makes_accelerator
from unsloth_ddp.notebook.syntax.lines import lead
from unsloth_ddp.notebook.syntax.tree import dotted

_SHARED = "a loop by hand: each process takes its part of every batch, and the gradients are averaged"
_EARLY = "this loop can end early: every process has to leave it at the same batch, or those that go on wait"

_BY_LOSS = "a scheduler steps by a training loss: each process has that of its own rows, so step by the same on all"


def share_loop(statement: Statement, graph: Graph, context: ConversionContext) -> cst.BaseStatement:
    """Return a statement whose loop, if it is plain enough to see, trains on all processes together."""
    own = statement.effects.union(*(graph.class_effects(name) for name in statement.usage.defines))
    if Effect.LOOP not in own or own & {Effect.TRAIN, Effect.SYNC} or graph.prepares:
        return statement.node
    loop = find_loop(statement.node, graph)
    if loop is None:
        return statement.node
    context.shared_loops.add(id(statement))
    new = statement.node.visit(_Sharer(loop, context, by_loss=steps_by_training_loss(graph)))
    if isinstance(new, cst.FlattenSentinel):  # a loop at top level, behind the line that it needs first
        first, new = new
        statement.before.append(first)
    assert isinstance(new, cst.BaseStatement)
    return new


class _Sharer(cst.CSTTransformer):
    def __init__(self, loop: OwnLoop, context: ConversionContext, *, by_loss: bool) -> None:
        self.loop, self.context, self.by_loss = loop, context, by_loss

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if original_node is not self.loop.backward:
            return updated_node
        return cst.FlattenSentinel([updated_node, self._line("average_gradients")])

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if original_node is not self.loop.loader:
            return updated_node
        return cst.parse_expression(f"{self.context.names['share_rows']}({updated_node.value})")

    def leave_For(
        self, original_node: cst.For, updated_node: cst.For
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if original_node is not self.loop.outermost:
            return updated_node
        notes = [self.context.edit("loop", _SHARED)]
        notes += [self.context.warn("loop", _EARLY)] if self.loop.ends_early else []
        notes += [self.context.warn("loop", _BY_LOSS)] if self.by_loss else []
        return cst.FlattenSentinel([lead(self._line("same_weights"), notes), updated_node])

    def _line(self, helper: str) -> cst.BaseStatement:
        return cst.parse_statement(f"{self.context.names[helper]}({self.loop.optimizer})")


def edit_accelerated(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return the call of an Accelerator or a DataLoader so that the processes share each batch of the notebook."""
    if makes_accelerator(full) and full.startswith("accelerate."):
        if keyword(call, "dataloader_config") or keyword(call, "split_batches"):
            return call, [context.warn("loop", "check that the processes share the batch: split_batches=True")]
        split = cst.Arg(value=cst.parse_expression(f"{context.names['split_batches']}()"), star="**")
        note = context.edit("loop", "Accelerate shares each batch among the processes, and averages the gradients")
        return call.with_changes(args=[*call.args, split]), [note]
    if dotted(call.func).split(".")[-1] != "DataLoader" or keyword(call, "batch_sampler"):
        return call, []
    batch = keyword(call, "batch_size")
    if batch is None and len(call.args) > 1 and call.args[1].keyword is None:
        batch = call.args[1]
    size = "1" if batch is None else code(batch.value)
    shared = f"{context.names['shared_batch']}({size})"
    note = context.edit("batch", "a batch that the processes can share")
    if batch is None or batch.keyword is not None:
        return set_keyword(call, "batch_size", shared), [note]
    args = [arg.with_changes(value=cst.parse_expression(shared)) if arg is batch else arg for arg in call.args]
    return call.with_changes(args=args), [note]
