"""Every public function carries full type hints and a docstring."""

import ast
from collections.abc import Iterator

import pytest

from tests.packaging.source_files import FILES, module_name

IMPLIED = {"self", "cls", "ctx"}  # their types follow from where they stand


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Functions of a module and methods of its classes that a caller may use, with whether they stand alone."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and is_public(node):
            yield node, True
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (
                (child, False) for child in node.body if isinstance(child, ast.FunctionDef) and is_public(child)
            )


def is_public(function: ast.FunctionDef) -> bool:
    """Not private, and neither a Triton kernel nor the fake of a registered op."""
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    machinery = any("jit" in name or "register_fake" in name or "heuristics" in name for name in decorators)
    return not function.name.startswith("_") and not machinery


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_type_hints(path):
    bare = []
    for function, _ in public_functions(ast.parse(path.read_text())):
        given = function.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        untyped = [p.arg for p in parameters if p.annotation is None and p.arg not in IMPLIED]
        if untyped or function.returns is None:
            bare.append(f"{function.name}: {untyped or 'return'}")
    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_docstrings(path):
    tree = ast.parse(path.read_text())
    bare = [f.name for f, alone in public_functions(tree) if alone and ast.get_docstring(f) is None]
    assert bare == []
