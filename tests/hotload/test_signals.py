"""How a signal's and a hint's words are read: every spelling, every refusal, every way out of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from midstream.api.signals import overwrites, parse_hint, parse_signal, source_url
from midstream.core.errors import InvalidRequest, UnknownField
from midstream.core.headers import HEADER_OVERWRITE

DELTA = {"previous_snapshot_identity": "p", "compression_format": "arc_v2", "checksum_format": "alder32"}


def signal(**fields: Any) -> bytes:
    return msgspec.json.encode({"identity": "a", **fields})


@pytest.mark.parametrize(
    ("spelling", "policy", "age"),
    [
        (None, "all", None), (True, "all", None), (False, "none", None), ("all", "all", None),
        ("new_session", "new_session", None), ("none", "none", None),
        ({"max_age": 0}, "none", 0), ({"max_age": 7}, "none", 7),
    ],
)  # fmt: skip
def test_cache_policies(spelling: Any, policy: str, age: int | None) -> None:
    body = parse_signal(signal(reset_prompt_cache=spelling))
    assert (body.reset, body.max_cache_age) == (policy, age)


def test_an_absent_policy_is_all() -> None:
    body = parse_signal(signal())
    assert (body.reset, body.max_cache_age, body.previous, body.compression) == ("all", None, None, None)


@pytest.mark.parametrize(
    ("spelling", "format_"),
    [
        ("arc_v2", "arc_v2"), ("ARC_V2", "arc_v2"), ("xor_one_to_one_zstd", "arc_v2"),
        ("arc_v1", "arc_v1"), ("XOR_one_to_one_ZLIB", "arc_v1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("checksum", ["alder32", "adler32", "ALDER32", None, ...])
def test_spellings_of_an_incremental_snapshot(spelling: str, format_: str, checksum: Any) -> None:
    metadata = {"previous_snapshot_identity": "run/p", "compression_format": spelling}
    if checksum is not ...:
        metadata["checksum_format"] = checksum
    body = parse_signal(signal(incremental_snapshot_metadata=metadata))
    assert (body.previous, body.compression, body.checksum_format) == ("run/p", format_, "adler32")


def test_fields_to_ignore_are_names() -> None:
    body = parse_signal(signal(validation={"extra_fields_ignore": ["b", "a", "b"]}))
    assert body.ignore_config == ("a", "b")
    assert parse_signal(signal(validation={})).ignore_config == ()
    assert parse_signal(signal(validation=None)).ignore_config == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reset_prompt_cache": {"max_age": -1}}, "reset_prompt_cache.max_age"),
        ({"reset_prompt_cache": {"max_age": True}}, "reset_prompt_cache.max_age"),
        ({"reset_prompt_cache": {"max_age": 1.5}}, "reset_prompt_cache.max_age"),
        ({"reset_prompt_cache": {"max_age": 2**40}}, "reset_prompt_cache.max_age"),
        ({"reset_prompt_cache": {}}, "reset_prompt_cache.max_age"),
        ({"reset_prompt_cache": 3}, "reset_prompt_cache"),
        ({"incremental_snapshot_metadata": "p"}, "incremental_snapshot_metadata"),
        ({"incremental_snapshot_metadata": {}}, "incremental_snapshot_metadata.previous_snapshot_identity"),
        ({"incremental_snapshot_metadata": {"previous_snapshot_identity": "p"}},
         "incremental_snapshot_metadata.compression_format"),
        ({"incremental_snapshot_metadata": DELTA | {"previous_snapshot_identity": "../p"}},
         "incremental_snapshot_metadata.previous_snapshot_identity"),
        ({"incremental_snapshot_metadata": DELTA | {"compression_format": "lz4"}},
         "incremental_snapshot_metadata.compression_format"),
        ({"incremental_snapshot_metadata": DELTA | {"checksum_format": "md5"}},
         "incremental_snapshot_metadata.checksum_format"),
        ({"validation": {"extra_fields_ignore": "x"}}, "validation.extra_fields_ignore"),
        ({"validation": {"extra_fields_ignore": [""]}}, "validation.extra_fields_ignore"),
        ({"validation": {"extra_fields_ignore": [1]}}, "validation.extra_fields_ignore[0]"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_signal(signal(**fields))
    assert refused.value.param == param
    assert param.partition("[")[0].rpartition(".")[2] in refused.value.message


@pytest.mark.parametrize(
    "field",
    ["extra", "reset_prompt_cache.age", "validation.strict", "incremental_snapshot_metadata.parent"],
)
def test_an_unknown_field_is_refused_by_its_path(field: str) -> None:
    outer, _, inner = field.partition(".")
    whole = {"reset_prompt_cache": {"max_age": 1}, "validation": {}, "incremental_snapshot_metadata": DELTA}
    fields = {outer: {**whole[outer], inner: 1}} if inner else {outer: 1}
    with pytest.raises(UnknownField) as refused:
        parse_signal(signal(**fields))
    assert refused.value.message == f"Extra inputs are not permitted, field: '{field}'"


def test_arc_v3_is_refused_by_name_and_says_why() -> None:
    with pytest.raises(
        InvalidRequest, match=r"'arc_v3' is not supported: its blobs hold pickles, .*use arc_v2"
    ):
        parse_signal(signal(incremental_snapshot_metadata=DELTA | {"compression_format": "arc_v3"}))


@pytest.mark.parametrize("read", [parse_signal, parse_hint])
@pytest.mark.parametrize("body", [b'{"identity":' + b"[" * 200_000, b'{"identity":"\xff"}', b"[]", b""])
def test_what_is_no_json_object_is_refused_whatever_is_wrong_with_it(
    read: Callable[[bytes], object], body: bytes
) -> None:
    with pytest.raises(InvalidRequest, match=r"the body (is not valid JSON|must be a JSON object)"):
        read(body)


def test_a_hint_names_one_file_or_several_once_each() -> None:
    def names(**fields: Any) -> tuple[str, ...]:
        return parse_hint(signal(**fields)).names

    assert names(file="config.json") == ("config.json",)
    assert names(files=["b.safetensors", "config.json", "b.safetensors"]) == ("b.safetensors", "config.json")
    assert names(files=["b.safetensors"], file="config.json") == ("b.safetensors", "config.json")
    assert names(file="config.json", incremental_snapshot_metadata=DELTA) == ("config.json",)


def test_a_hint_names_a_policy_alone_or_files_of_one() -> None:
    alone = parse_hint(b'{"policy": "red"}')
    assert (alone.policy, alone.identity, alone.names) == ("red", None, ())
    files = parse_hint(signal(file="adapter_config.json", policy="red"))
    assert (files.policy, files.names) == ("red", ("adapter_config.json",))
    for body in (b"{}", b'{"file": "config.json"}', b'{"policy": "red", "file": "config.json"}'):
        with pytest.raises(InvalidRequest) as refused:
            parse_hint(body)
        assert refused.value.param == "identity"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "files"), ({"files": []}, "files"), ({"files": ["../x.safetensors"]}, "files"),
        ({"files": ["a/x.safetensors"]}, "files"), ({"file": "model.bin"}, "file"), ({"file": ""}, "file"),
        ({"files": ["config.json", ".hidden.safetensors"]}, "files"), ({"file": "x\n.safetensors"}, "file"),
        ({"files": "config.json"}, "files"), ({"name": "config.json"}, "name"),
        ({"files": ["x.safetensors"], "reset_prompt_cache": "all"}, "reset_prompt_cache"),
    ],
)  # fmt: skip
def test_a_hint_that_cannot_be_followed_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_hint(signal(**fields))
    assert refused.value.param == param


BUCKETS = ("file:///b/root/", "s3://bucket/pre%20fix")


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("file:///b/root/x", "file:///b/root/x"),
        ("file://localhost/b/root/x/y/", "file:///b/root/x/y"),
        ("file:///b/%72oot/a%20b@1", "file:///b/root/a%20b%401"),
        ("s3://bucket/pre%20fix/step-1/", "s3://bucket/pre%20fix/step-1"),
        ("s3://bucket/pre%20fix/..a/b..", "s3://bucket/pre%20fix/..a/b.."),
    ],
)
def test_a_source_inside_an_allowed_bucket_is_taken(source: str, url: str) -> None:
    assert source_url(source, BUCKETS)[0] == url


@pytest.mark.parametrize(
    "source",
    [
        "file:///b/root", "file:///b/root/", "file:///b/root2/x", "file:///b/x", "file:///etc/x", "/b/root/x", "x", "",
        "file:///b/root/../x", "file:///b/root/./x", "file:///b/root//x", "file:///b/root/%2e%2e/x",
        "file:///b/root/.%2E/x", "file:///b/root/%252e%252e/x", "file:///b/root/a%2f..%2f..%2fx",
        "file:///b/root/a%252fb", "file:///b/root/a%5cb", "file:///b/root/a\\b", "file:///b/root/%00",
        "file:///b/root/%0a", "file:///b/root/x%ff", "file:///b/root/x?y", "file:///b/root/x#y", "file:///b/root/x\n",
        "file://host/b/root/x", "file:///b/other/../root/x", "s3://bucket/pre fix/x", "s3://bucket/prefix/x",
        "s3://other/pre%20fix/x", "s3://bucket:80/pre%20fix/x", "s3://key:hush@bucket/pre%20fix/x",
        "s3://bucket@evil/pre%20fix/x", "s3://evil/s3://bucket/pre%20fix/x", "http://bucket/pre%20fix/x",
        "s3://[bucket/pre%20fix/x", "file:///b/root/" + "x" * 5000,
    ],
)  # fmt: skip
def test_no_spelling_of_a_source_leads_out_of_the_buckets(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        source_url(source, BUCKETS)
    assert refused.value.param == "x-fireworks-hot-load-source-url"
    assert "hush" not in refused.value.message


@pytest.mark.parametrize(("given", "meant"), [({}, False), ({HEADER_OVERWRITE: "1"}, True)])
def test_whether_files_replace_what_a_name_meant_is_said_in_a_header(
    given: dict[str, str], meant: bool
) -> None:
    assert overwrites(given) is meant


@pytest.mark.parametrize("value", ["", "0", "true", "1 "])
def test_any_other_word_for_it_is_refused_by_the_headers_name(value: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^x-midstream-overwrite: must be 1, or be left out$"
    ) as refused:
        overwrites({HEADER_OVERWRITE: value})
    assert refused.value.param == HEADER_OVERWRITE
