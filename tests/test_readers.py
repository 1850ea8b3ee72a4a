import json
import re

import pytest

from loopformers.errors import CheckpointError, ConfigError, DataError
from loopformers.readers import MAX_DEPTH, MAX_YAML_BYTES, parse_yaml, read_json, read_text, read_yaml


def test_an_object_is_read_and_a_byte_order_mark_ignored(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": [1, 2]}).encode())
    assert read_json(file) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not readable JSON"),
        (b'{"a": 1', "not readable JSON"),
        (b"[1]", "contains a value of type list but must contain an object"),
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


def yaml_of(text: str, **options):
    return parse_yaml(text, dict, "a.yaml", **options)


def test_scalars_are_what_json_would_make_of_them_and_else_text():
    text = "{on: yes, a: 1e-3, b: 12:30:00, c: 0o17, d: 010, e: 2024-01-31, f: -7, g: .5, h: ~, i: , j: true, k: '3', l: 0x1F}"
    assert yaml_of(text) == {
        "on": "yes", "a": 0.001, "b": "12:30:00", "c": "0o17", "d": "010", "e": "2024-01-31", "f": -7, "g": 0.5, "h": None,
        "i": None, "j": True, "k": "3", "l": "0x1F",
    }  # fmt: skip


def test_scalars_may_be_kept_as_they_are_written():
    text = "{a: 1.50, b: 'null', c: null, d: , no: [010, 1e3, true]}"
    assert yaml_of(text, as_text=True) == {"a": "1.50", "b": "null", "c": None, "d": None, "no": ["010", "1e3", "true"]}


def test_anchors_and_merges_mean_what_yaml_says_and_an_empty_file_is_an_empty_mapping(tmp_path):
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: [*a, {y: 5, z: 6}]}\n"
    assert yaml_of(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 1, "y": 2, "z": 6}}
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n")
    assert read_yaml(file) == {}


def aliases(levels: int, width: int) -> str:
    """Each level names the one below `width` times: width ** levels values of a few hundred characters."""
    lines = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(["l0: &l0 [x]", *lines])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 3\nseed: 1\nsteps: 4", "the key 'steps' twice in one mapping, in lines 1 and 3"),
        ("model: {a: 1}\ndata: {b: 2}\nmodel: {c: 3}", "the key 'model' twice in one mapping, in lines 1 and 3"),
        ("blocks:\n  - a: {x: 1,\n      x: 1}", "the key 'x' twice in one mapping, in lines 2 and 3"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "the key '<<' twice"),
        ("a: !!python/object/apply:os.system [true]", "has the tag 'tag:yaml.org,2002:python/object/apply:os.system' in line 1"),
        ("a: !own 3", "has the tag '!own'"),
        ("a: 1\n---\nb: 2", "holds a second document, from line 2"),
        ("{[a]: 1}", "has a key in line 1 that is a list or a mapping"),
        ("a: *b", "uses the anchor 'b' in line 1, which is not defined"),
        ("a: &a [*a]", "uses the anchor 'a' in line 1"),
        ("a: {<<: 3}", "has << in line 1 with a value that is not a mapping"),
        (aliases(11, 10), "has more than 1,048,576 values and characters"),
        (aliases(150, 1), "is nested more than 100 levels deep"),
        ("a: " + "[" * 100_000, "is nested more than 100 levels deep"),
        ("a: " + "{a: " * 50_000, "is nested more than 100 levels deep"),
        ("\n".join(" " * i + "a:" for i in range(300)), "is nested more than 100 levels deep"),
        ("- 3", "contains a list but must contain a mapping"),
        ("3", "contains a single value but must contain a mapping"),
        ("a: [", "is not readable YAML"),
        ("a: \0", "is not readable YAML"),
        ('a: "\\UFFFFFFFF"', "is not readable YAML"),
    ],
)  # fmt: skip
def test_what_yaml_would_take_without_a_word_is_refused_in_a_short_error(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        yaml_of(text)
    assert str(caught.value).startswith("a.yaml ")
    assert len(str(caught.value)) < 500


def test_a_yaml_file_that_is_large_or_not_utf_8_is_refused(tmp_path):
    file = tmp_path / "a.yaml"
    for content, said in ((b"a: " + b"x" * MAX_YAML_BYTES, "is larger than"), (b"a: \xff", "is not UTF-8")):
        file.write_bytes(content)
        with pytest.raises(DataError, match=said):
            read_yaml(file, error=DataError)
