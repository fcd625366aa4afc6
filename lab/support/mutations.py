"""Generates the errors that can be planted in a module, each of which changes one expression."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
_COMBINED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.Mult}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum",
          "any": "all", "all": "any", "exp": "log", "sum": "mean", "mean": "sum"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one expression: its character offsets in the file, its text, and the replacement.

    `text` is the line in which it begins.
    """

    file: str
    line: int
    text: str
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """A name that does not depend on the line's position."""
        return f"{self.file}: {self.text}: {self.before} -> {self.after}"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Returns all mutants of a module, in the order of their positions."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: list[Mutant] = []
    for node in _changeable(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        for changed in _changes(node):
            text = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp):
                text = f"({text})"
            found.append(Mutant(file, node.lineno, lines[node.lineno - 1].strip(), start, end, source[start:end], text))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _changeable(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields expressions except annotations, decorators, messages, assertions, imports and `strict=` of zip."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "require", "ConfigError")):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.AnnAssign):
            stack += [node.value] if node.value is not None else []
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += [*node.body, *(default for default in node.args.defaults + node.args.kw_defaults if default)]
            continue
        if isinstance(node, ast.ClassDef):
            stack += node.body
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.expr):
            yield node
        stack += ast.iter_child_nodes(node)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield _with(node, ops=[_COMPARED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMBINED:
        yield _with(node, op=_COMBINED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield ast.Constant(node.value * 2 if node.value else 1.0)
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES and isinstance(node.ctx, ast.Load):
        yield _with(node, attr=_NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield _with(node, id=_NAMES[node.id])


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def lines_that_run_it(mutant: Mutant, source: str) -> range | None:
    """Returns the lines of the statement that a mutant changes; None outside of functions: every import runs those."""
    tree = ast.parse(source)
    statement: ast.stmt | None = None
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in (inner for part in function.body for inner in ast.walk(part)):
            inside = isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
            if inside and (statement is None or _length(node) <= _length(statement)):
                statement = node
    if statement is None:
        return None
    # Of a loop or a condition only the head, since its body may not run.
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno
