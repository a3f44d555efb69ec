"""Edit statement lines: comments go above the line they concern, an emptied line becomes `pass`."""

import libcst as cst

# What a small statement of a line becomes.
Small = cst.BaseSmallStatement | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseSmallStatement]


def parse_line(source: str) -> cst.SimpleStatementLine:
    """Return a line of source as a statement."""
    return cst.ensure_type(cst.parse_statement(source), cst.SimpleStatementLine)


def comment_line(text: str) -> cst.EmptyLine:
    """Return a line that holds one comment."""
    return cst.EmptyLine(comment=cst.Comment(text))


def lead(node: cst.BaseStatement, notes: list[str]) -> cst.BaseStatement:
    """Return `node` with comment lines right above it."""
    fresh = [comment_line(note) for note in dict.fromkeys(notes)]
    leading = getattr(node, "leading_lines", ())
    return node.with_changes(leading_lines=[*leading, *fresh]) if fresh else node


def is_empty(node: cst.BaseStatement) -> bool:
    """Return whether a line holds nothing but `pass`."""
    return isinstance(node, cst.SimpleStatementLine) and all(isinstance(small, cst.Pass) for small in node.body)


class LineEditor(cst.CSTTransformer):
    """Collects notes while a line's parts are edited, and writes them above the line."""

    def __init__(self) -> None:
        self._open: list[list[str]] = []
        self.outer: list[str] = []  # notes of block headers, for above the whole statement
        self.depth = 0  # functions around the current node

    def note(self, *texts: str) -> None:
        """Comment on the line being edited."""
        (self._open[-1] if self._open else self.outer).extend(texts)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._open.append([])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        notes = self._open.pop()
        if not updated_node.body:
            updated_node = updated_node.with_changes(body=[cst.Pass()], trailing_whitespace=cst.TrailingWhitespace())
        return lead(self.finish_line(original_node, updated_node), notes)

    def finish_line(self, original: cst.SimpleStatementLine, line: cst.SimpleStatementLine) -> cst.BaseStatement:
        """Return what replaces the whole line; subclasses override this."""
        return line

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        return updated_node if updated_node.body else updated_node.with_changes(body=[cst.Pass()])

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.depth += 1

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.BaseStatement:
        self.depth -= 1
        return updated_node
