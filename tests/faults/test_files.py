"""Files are replaced as a whole, and JSON is parsed with limits."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbraid import files
from fedbraid.limited_json import read_json


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    place = tmp_path / "config.toml"
    files.write_text(place, "old")

    def fails():
        with files.replacing(place) as partial:
            partial.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert place.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_private_files_are_never_readable_by_others(tmp_path):
    files.write_bytes(tmp_path / "state", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@given(VALUES)
def test_json_within_the_limits_is_read_as_usual(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")):
        try:
            expected = json.loads(text)
        except ValueError:
            continue
        assert read_json(text) == expected


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"[": '])
@pytest.mark.parametrize("levels", [65, 1000, 200_000])
def test_deep_nesting_is_an_error_and_no_recursion(opening, levels):
    with pytest.raises(ValueError, match="deeper than 64"):
        read_json(opening * levels)


def test_brackets_in_strings_do_not_count():
    assert read_json('["' + "[" * 1000 + '\\"{"]') == ["[" * 1000 + '"{']


def test_size_is_limited():
    with pytest.raises(ValueError, match="4 at most"):
        read_json("[1, 2]", size=4)
