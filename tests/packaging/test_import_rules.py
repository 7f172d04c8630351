"""Who may import whom: configs <- mla_attention -> fusions; kernels without references; optional packages lazily."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.source_files import FILES, ROOT, in_folder, module_name

OPTIONAL = {"transformers", "transformer_engine", "megatron", "matplotlib", "tensorboard"}


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Absolute names of what a file imports; with `top_level` only what importing the file imports."""
    tree = ast.parse(path.read_text())
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    nodes = top_level_nodes(tree) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def top_level_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements run at import: not those inside functions, nor under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not lazy and not typing_only:
            yield node
            yield from top_level_nodes(node)


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def refused(paths: list[Path], allowed: set[str]) -> list[str]:
    allowed = allowed | sys.stdlib_module_names
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imports(path)
        if not any(under(name, package) for package in allowed)
    ]


def test_configs_import_only_themselves():
    assert refused(in_folder("configs"), {"mla_attention.configs", "torch"}) == []
    modules = [name for path in in_folder("configs") for name in imports(path) if under(name, "torch.nn")]
    assert modules == []


def test_fusions_import_only_themselves():
    assert refused(in_folder("fusions"), {"mla_attention.fusions", "torch", "triton", "einops"}) == []


def test_kernels_never_import_their_reference():
    kernels = [path for path in in_folder("fusions") if "reference" not in path.stem and path.name != "__init__.py"]
    assert [f"{path.name} imports {name}" for path in kernels for name in imports(path) if "reference" in name] == []


def test_the_module_loads_no_parallelism():
    """Only a layer that is given process groups does, and then lazily."""
    paths = [path for path in in_folder("mla_attention") if "parallel" not in path.parts and path.name != "__init__.py"]
    found = {name for path in paths for name in imports(path, top_level=True)}
    assert not any(under(name, "mla_attention.parallel") for name in found)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_optional_packages_are_imported_lazily(path):
    assert OPTIONAL.isdisjoint(name.split(".")[0] for name in imports(path, top_level=True))
