import hypothesis.strategies as st
import pytest
from hypothesis import given

from ckpt.paths import Path
from ckpt.storage.files import under
from ckpt.storage.names import directory

KEYS = st.one_of(
    st.integers(),
    st.text(),
    st.text(st.characters(categories=["Cs", "Nd", "Ll"])),  # lone surrogates and digits of all scripts
    st.text(alphabet="ab%~/.0123-c", max_size=6),
    st.text(alphabet="a/\u00e9", min_size=150, max_size=400),
    st.sampled_from(
        ["", ".", "..", "c", "c.0", "zarr.json", "state.json", "intent.json", "parts", "packed", "__x", "~root", "%"]
    ),
)
PATHS = st.lists(KEYS, max_size=8).map(tuple)


@given(PATHS, PATHS)
def test_injective(a: Path, b: Path) -> None:
    assert (directory(a) == directory(b)) == (a == b)


@given(PATHS)
def test_safe(path: Path) -> None:
    name = directory(path)
    assert name.isascii()
    assert name.isprintable()
    assert len(name) <= 900
    assert under("/root", name).startswith("/root/")
    for component in name.split("/"):
        assert 0 < len(component) <= 180
        assert not component.startswith((".", "c.", "__"))
        assert component not in {"zarr.json", "c"}


@given(PATHS.filter(bool), PATHS.filter(bool))
def test_a_directory_contains_another_only_if_the_path_does(a: Path, b: Path) -> None:
    if directory(b).startswith(directory(a) + "/"):
        assert b[: len(a)] == a


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("model", "layers.0.weight"), "model/layers.0.weight"),
        (("optimizer", "state", 3, "exp_avg"), "optimizer/state/3/exp_avg"),
        (("3",), "%33"),
        ((-3,), "%-3"),
        (("a b",), "a%20b"),
        (("",), "%"),
        (("..",), "%2E."),
        (("c",), "%63"),
        (("parts",), "parts"),
        (("\ud800",), "%ED%A0%80"),
        ((), "~root"),
    ],
)
def test_readable(path: Path, expected: str) -> None:
    assert directory(path) == expected
