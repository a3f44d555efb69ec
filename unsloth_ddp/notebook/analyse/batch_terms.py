"""Find what a loss computes across the rows of a batch: its value depends on which rows a process has."""

import re
from collections.abc import Iterator

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph
from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.tree import contains, dotted, goes_backward, walk

# Losses that compare the rows of a batch, by what papers and libraries call them.
_ACROSS = re.compile(
    r"InfoNCE|NT_?Xent|SupCon|SimCLR|SimCSE|MultipleNegatives|InBatch|BatchHard|BatchAll|BatchSemiHard|MegaBatch|CoSENT"
    r"|AnglE|GISTEmbed|GuidedInSample|Barlow|VICReg|C[Ll][Ii][Pp]Loss|SigLIPLoss|MMDLoss|CORALLoss|MatryoshkaLoss"
    r"|(?<!Online)(?<!Margin)\bContrastive(Tension)?Loss|_KTO"
)
# Losses of Sentence Transformers that look at one row of texts at a time.
_BY_ROW = re.compile(r"^(CosineSimilarity|Softmax|MSE|MarginMSE|Triplet|Contrastive|DenoisingAutoEncoder)Loss$")
# What is called with rows, each of which stays alone, and what computes losses.
_COMPUTES = re.compile(r"^(compute_loss|forward|__call__|training_step|\w*loss\w*)$", re.IGNORECASE)
_COUNTS_ROWS = re.compile(r"^len\(|\.(size\(0\)|shape\[0\])$|^(batch_size|bsz|bs|B)$")
_TURNS = re.compile(r"\.(T|mT|t\(\)|transpose\((0, ?1|1, ?0)\))$")
_ROW_AXIS = re.compile(r"\[:, ?None\b|\.unsqueeze\((dim=)?1\)$")
_COLUMN_AXIS = re.compile(r"\[None\b|\.unsqueeze\((dim=)?0\)$")
_BETWEEN = {"cdist", "pdist", "fill_diagonal_", "pairwise_distance_matrix", "cov", "corrcoef"}


def batch_term(graph: Graph) -> str:
    """Return what in a notebook's losses takes several rows of a batch together, as it is written there; or ""."""
    norms = [site.path for site in graph.sites if re.search(r"BatchNorm([123]d)?$", site.tail)]
    named = [name for name in (*(site.tail for site in graph.sites), *graph.imports) if _ACROSS.search(name)]
    return next((text for text in (*named, *_written_out(graph), *norms)), "")


def only_by_row(graph: Graph) -> bool:
    """Return whether the notebook names losses of Sentence Transformers, and only such as take each row alone."""
    losses = {site.tail for site in graph.sites if re.fullmatch(r"[A-Z]\w*Loss", site.tail)}
    return bool(losses) and all(_BY_ROW.match(name) for name in losses)


def _written_out(graph: Graph) -> Iterator[str]:
    for statement in graph.statements:
        for node in walk(statement.node):
            if (isinstance(node, cst.FunctionDef) and _COMPUTES.match(node.name.value)) or (
                isinstance(node, cst.For) and contains(node, goes_backward)
            ):
                yield from _across(node.body)


def _across(body: cst.CSTNode) -> Iterator[str]:
    """Yield the expressions that take rows together: products and comparisons of all with all, labels by place."""
    indices = {id(part) for node in walk(body) if isinstance(node, cst.Subscript) for part in walk(node)}
    for node in walk(body):
        match node:
            case cst.BinaryOperation(operator=cst.MatrixMultiply(), right=second) if _turned(second):
                yield code(node)
            case (
                cst.BinaryOperation(left=first, right=second)
                | cst.Comparison(left=first, comparisons=[cst.ComparisonTarget(comparator=second)])
            ) if _of_all_pairs(first, second):
                yield code(node)
            case cst.Call(args=[cst.Arg(value=first), *rest]):
                name = dotted(node.func).split(".")[-1]
                second = rest[0].value if rest else first
                product = name in ("matmul", "mm") and _turned(second)
                places = name == "arange" and bool(_COUNTS_ROWS.search(code(first))) and id(node) not in indices
                if product or places or name in _BETWEEN or (rest and _of_all_pairs(first, second)):
                    yield code(node)
            case cst.Call(func=cst.Attribute(attr=cst.Name("fill_diagonal_"))):
                yield code(node)


def _turned(node: cst.BaseExpression) -> bool:
    """Return whether a factor is a batch of vectors with its axes swapped, and not a weight of the module."""
    return bool(_TURNS.search(code(node))) and not code(node).startswith("self.")


def _of_all_pairs(first: cst.BaseExpression, second: cst.BaseExpression) -> bool:
    texts = code(first), code(second)
    if "arange" in texts[0] + texts[1]:
        return False  # places in a text
    return any(_ROW_AXIS.search(text) and _COLUMN_AXIS.search(other) for text, other in (texts, texts[::-1]))
