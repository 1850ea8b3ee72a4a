import json

import pytest

from loopformers.errors import CheckpointError, DataError
from loopformers.readers import MAX_DEPTH, read_json, read_text


def test_an_object_is_read_and_a_byte_order_mark_ignored(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": [1, 2]}).encode())
    assert read_json(file) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not readable JSON"),
        (b'{"a": 1', "not readable JSON"),
        (b"[1]", "holds list where an object must be"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than"),
        (b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "nested more than"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not readable JSON"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "larger than 999 bytes"),
    ],
)
def test_whatever_is_wrong_with_a_file_has_one_error_that_names_it(tmp_path, content, said):
    file = tmp_path / "b.json"
    file.write_bytes(content)
    max_bytes = 999 if "larger" in said else 10**6
    with pytest.raises(DataError, match=said) as caught:
        read_json(file, error=DataError, remedy="make it anew", max_bytes=max_bytes)
    assert str(file) in str(caught.value)
    assert "make it anew" in str(caught.value)


def test_a_depth_at_the_limit_is_read(tmp_path):
    file = tmp_path / "c.json"
    file.write_bytes(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert read_json(file, list)


def test_missing_files_folders_and_impossible_names_are_named(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(CheckpointError):
            read_text(path)
