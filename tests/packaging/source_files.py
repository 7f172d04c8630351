"""The package's source files, as the tests of its form read them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("configs", "fusions", "mla_attention") for path in (ROOT / folder).rglob("*.py"))


def in_folder(folder: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(ROOT).parts[0] == folder]


def module_name(path: Path) -> str:
    """Dotted name after an install; a package's own name for its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "mla_attention" else ("mla_attention", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
