"""Collect what one top-level statement does to names: reads, writes, mutations, calls, function bodies.

Names are the notebook's globals; parameters, locals and comprehension variables stay inside. The body of a function is
deferred: it counts when the function is used, not where it is defined.
"""

import itertools
from dataclasses import dataclass, field

import libcst as cst

from unsloth_ddp.notebook.syntax import tree
from unsloth_ddp.notebook.syntax.ipython import ipython_call, references
from unsloth_ddp.notebook.syntax.tree import dotted, root_name, root_names
from unsloth_ddp.notebook.syntax.usage import (
    ENVIRONMENT,
    NAMESPACE,
    RETURNED,
    CallSite,
    DeferredBody,
    NameUsage,
    follow_aliases,
    gives_parts,
    of_namespace,
    sets_any_variable,
    tail_changes,
)


@dataclass
class _Scope:
    kind: str  # module, function, class, comprehension
    local: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)  # declared global
    rebound: set[str] = field(default_factory=set)  # bound by a block of this statement
    usage: NameUsage = field(default_factory=NameUsage)


def collect(node: cst.CSTNode) -> NameUsage:
    """Collect the usage of names in one top-level statement."""
    visitor = _Collector()
    visitor.straight = isinstance(node, cst.SimpleStatementLine)
    node.visit(visitor)
    usage = visitor.scopes[0].usage
    usage.assigned = visitor.assigned
    return usage


class _Collector(tree.NamesRead):
    def __init__(self) -> None:
        self.scopes = [_Scope("module")]
        self.function: list[DeferredBody] = []
        self.bare: cst.Call | None = None
        self.assigned: list[tuple[str, CallSite]] = []
        self.straight = False  # one line, in which `import torch; torch.x` reads its own torch

    # Names -----------------------------------------------------------------------------------------------------------

    def _bind_block(self, target: cst.BaseExpression) -> None:
        """Bind what a block binds before its body runs: later reads are of this binding, not of an earlier one."""
        self._bind(target)
        for element in target.elements if isinstance(target, cst.Tuple | cst.List) else [target]:
            value = element.value if isinstance(element, cst.BaseElement) else element
            if isinstance(value, cst.Name):
                self.scopes[-1].rebound.add(value.value)

    def _write(self, name: str) -> None:
        scope = self.scopes[-1]
        if scope.kind == "module":
            scope.usage.writes.add(name)
        elif name in scope.outer:
            if self.function:
                self.function[-1].writes.add(name)
        else:
            scope.local.add(name)

    def _mutate(self, name: str | None) -> None:
        if name is not None:
            self.scopes[-1].usage.mutates.add(name)

    def _store(self, target: cst.BaseExpression) -> None:
        """Note that an attribute or an item is assigned or deleted."""
        name = root_name(target)
        self._mutate(name)
        self.scopes[-1].usage.stores.add(NAMESPACE if of_namespace(target) else name or "?")
        if sets_any_variable(target):
            self.scopes[-1].usage.stores.add(ENVIRONMENT)

    def _bind(self, target: cst.BaseExpression) -> None:
        if isinstance(target, cst.Name):
            self._write(target.value)
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self._bind(element.value)
        elif isinstance(target, cst.StarredElement):
            self._bind(target.value)
        elif isinstance(target, cst.Attribute | cst.Subscript):
            self._store(target)
            target.visit(self)

    def visit_Name(self, node: cst.Name) -> None:
        if node.value not in self.scopes[-1].rebound:
            self.scopes[-1].usage.reads.add(node.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        self._bind(node.target)
        return False

    def visit_Assign(self, node: cst.Assign) -> None:
        target = node.targets[0].target
        if isinstance(node.value, cst.Call):
            site = CallSite(dotted(node.value.func), node.value, frozenset())
            names = root_names(target) if isinstance(target, cst.Name | cst.Tuple | cst.List) else []
            self.assigned += [(name, site) for name in names]
            moved = root_name(node.value.func) if site.is_method and tree.moves(site.tail) else None
            if moved not in names and not self.function:  # `m = model.to(device)` moves the model itself
                self._mutate(moved)
        if gives_parts(node.value) and not isinstance(target, cst.Attribute | cst.Subscript):
            self._alias(target, node.value)

    def visit_Return(self, node: cst.Return) -> None:
        if isinstance(node.value, cst.Call):
            self.assigned.append((RETURNED, CallSite(dotted(node.value.func), node.value, frozenset())))
        if node.value is not None and gives_parts(node.value):
            self._alias(cst.Name(RETURNED), node.value)

    def visit_Raise(self, node: cst.Raise) -> None:
        if isinstance(node.exc, cst.Name):  # an end of the script: `raise SystemExit`
            self.scopes[-1].usage.calls.append(CallSite(node.exc.value, cst.Call(func=node.exc), frozenset()))

    def _alias(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        """Note that the parts bound by `target` belong to the objects that `value` names."""
        pairs = itertools.product(root_names(target), root_names(value))
        self.scopes[-1].usage.aliases += [(part, whole) for part, whole in pairs if part != whole]

    def visit_AugAssign(self, node: cst.AugAssign) -> bool:
        node.target.visit(self)
        node.value.visit(self)
        self._bind(node.target)
        return False

    def visit_AnnAssign(self, node: cst.AnnAssign) -> bool:
        if node.value is not None:
            node.value.visit(self)
            self._bind(node.target)
        node.annotation.visit(self)
        return False

    def visit_NamedExpr(self, node: cst.NamedExpr) -> bool:
        node.value.visit(self)
        self._bind(node.target)
        return False

    def visit_AsName(self, node: cst.AsName) -> bool:
        self._bind_block(node.name)
        return False

    def visit_Del(self, node: cst.Del) -> bool:
        if isinstance(node.target, cst.Attribute | cst.Subscript):
            self._store(node.target)
        self._mutate(root_name(node.target))
        node.target.visit(self)
        return False

    def visit_Global(self, node: cst.Global) -> bool:
        self.scopes[-1].outer.update(item.name.value for item in node.names)
        return False

    def visit_Nonlocal(self, node: cst.Nonlocal) -> bool:
        return False

    def visit_MatchAs(self, node: cst.MatchAs) -> bool:
        if node.pattern is not None:
            node.pattern.visit(self)
        if node.name is not None:
            self._write(node.name.value)
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            root = alias.evaluated_name.split(".")[0]
            self._import(alias.evaluated_alias or root, alias.evaluated_name if alias.asname else root)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = dotted(node.module) if node.module else ""
        if isinstance(node.names, cst.ImportStar):
            return False
        for alias in node.names:
            self._import(alias.evaluated_alias or alias.evaluated_name, f"{module}.{alias.evaluated_name}")
        return False

    def _import(self, name: str, path: str) -> None:
        self._write(name)
        if self.straight and len(self.scopes) == 1:
            self.scopes[-1].rebound.add(name)
        self.scopes[-1].usage.imports[name] = path

    # Statements ------------------------------------------------------------------------------------------------------

    def visit_If(self, node: cst.If) -> bool:
        if not tree.is_false(node.test):
            return True
        if node.orelse is not None:
            node.orelse.visit(self)
        return False

    def visit_For(self, node: cst.For) -> bool:
        node.iter.visit(self)
        self._iterate(node.iter)
        self._bind_block(node.target)
        self._alias(node.target, node.iter)
        node.body.visit(self)
        if node.orelse is not None:
            node.orelse.visit(self)
        return False

    def _iterate(self, node: cst.BaseExpression) -> None:
        self.scopes[-1].usage.iterates.update(root_names(node))

    def visit_Expr(self, node: cst.Expr) -> None:
        value = node.value.expression if isinstance(node.value, cst.Await) else node.value
        self.bare = value if isinstance(value, cst.Call) else None

    def visit_Call(self, node: cst.Call) -> None:
        path = dotted(node.func)
        names = frozenset(arg.value.value for arg in node.args if isinstance(arg.value, cst.Name))
        site = CallSite(path, node, names, bare=node is self.bare)
        usage = self.scopes[-1].usage
        usage.calls.append(site)
        for arg in node.args:
            if isinstance(arg.value, cst.Attribute):  # partial(model.generate, ...), Thread(target=model.generate)
                usage.calls.append(CallSite(dotted(arg.value), cst.Call(func=arg.value), frozenset(), passed=True))
        call = ipython_call(node)
        if call is not None:
            usage.reads |= references(call.interpolated)
        elif (site.is_method and tree.changes_its_object(site.tail, site.bare)) or (
            site.bare and tree.moves(site.tail) and not self.function
        ):
            self._mutate(root_name(node.func))
        if path in ("setattr", "delattr") or (tail_changes(site) and node.args):  # torch.nn.init.zeros_(weight)
            self._mutate(root_name(node.args[0].value))
        if path in ("next", "iter") and node.args:
            self._iterate(node.args[0].value)
        if site.is_method and of_namespace(node.func) and site.tail in ("pop", "clear", "update", "setdefault"):
            usage.stores.add(NAMESPACE)
        if sets_any_variable(node):
            usage.stores.add(ENVIRONMENT)

    # Scopes ----------------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        self._write(node.name.value)
        for part in (*node.decorators, *tree.defaults(node.params)):
            part.visit(self)
        self._body(node.name.value, tree.parameters(node.params), node.body)
        return False

    def _body(self, name: str, params: list[str], block: cst.BaseSuite) -> None:
        """Collect a deferred body under the outermost definition it belongs to."""
        deferred = DeferredBody(params=params)
        first_assigned = len(self.assigned)
        self.function.append(deferred)
        self.scopes.append(_Scope("function", local=set(params)))
        block.visit(self)
        scope = self.scopes.pop()
        self.function.pop()
        hidden = scope.local - scope.outer
        follow_aliases(scope.usage.mutates, scope.usage.aliases)
        deferred.reads |= scope.usage.reads - hidden
        deferred.calls += scope.usage.calls
        deferred.mutates |= {n for n in scope.usage.mutates if n not in hidden or n in params}
        deferred.mutates_inside |= scope.usage.mutates & hidden
        deferred.stores |= scope.usage.stores - hidden
        deferred.iterates |= scope.usage.iterates
        deferred.aliases += scope.usage.aliases
        deferred.assigned += self.assigned[first_assigned:]
        if self.function:
            self.function[-1].absorb(deferred)
            return
        owner = self.scopes[-1]
        target = owner.usage.defines.get(name)
        if target is None or owner.kind == "module":
            owner.usage.defines[name] = deferred
        else:
            target.absorb(deferred)

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        for default in tree.defaults(node.params):
            default.visit(self)
        self.scopes.append(_Scope("comprehension", local=set(tree.parameters(node.params))))
        node.body.visit(self)
        self._pop()
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self._write(node.name.value)
        for part in (*node.decorators, *node.bases, *node.keywords):
            part.visit(self)
        self.scopes.append(_Scope("class"))
        node.body.visit(self)
        scope = self.scopes.pop()
        parent = self.scopes[-1]
        bases = [dotted(base.value) for base in node.bases]
        whole = DeferredBody(bases=bases, methods=dict(scope.usage.defines), is_class=True)
        for method in scope.usage.defines.values():
            whole.absorb(method)
        whole.calls += scope.usage.calls
        parent.usage.reads |= scope.usage.reads - scope.local
        if self.function:
            self.function[-1].absorb(whole)
        else:
            parent.usage.defines[node.name.value] = whole
        return False

    def visit_ListComp(self, node: cst.ListComp) -> None:
        self.scopes.append(_Scope("comprehension"))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]

    def leave_ListComp(self, original_node: cst.BaseExpression) -> None:
        self._pop()

    leave_SetComp = leave_DictComp = leave_GeneratorExp = leave_ListComp

    def visit_CompFor(self, node: cst.CompFor) -> bool:
        self._bind(node.target)
        node.iter.visit(self)
        self._iterate(node.iter)
        self._alias(node.target, node.iter)
        for part in (*node.ifs, *([node.inner_for_in] if node.inner_for_in else [])):
            part.visit(self)
        return False

    def _pop(self) -> None:
        """Close a scope that runs in place: its usage counts for the parent, except for its own names."""
        scope = self.scopes.pop()
        parent = self.scopes[-1]
        follow_aliases(scope.usage.mutates, scope.usage.aliases)
        parent.usage.reads |= scope.usage.reads - scope.local
        parent.usage.mutates |= scope.usage.mutates - scope.local
        parent.usage.calls += scope.usage.calls
        parent.usage.iterates |= scope.usage.iterates
        parent.usage.aliases += scope.usage.aliases
