"""Every case of 2 and of 4 gloo ranks, each world started once."""

from pathlib import Path

import pytest

from tests.mla_attention.parallel.ranks import CASES, load_cases, outcomes

load_cases()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(2, Path(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcomes(4, Path(tmp_path_factory.mktemp("four")))


@pytest.mark.parametrize("name", CASES[2])
def test_two_ranks(two: dict[str, str], name: str) -> None:
    assert two[name] == ""


@pytest.mark.parametrize("name", CASES[4])
def test_four_ranks(four: dict[str, str], name: str) -> None:
    assert four[name] == ""
