"""The names of delta formats, as clients spell them."""

from __future__ import annotations

import pytest

from midstream.snapshots.delta_formats import check_checksum_format, compression_format


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("arc_v1", "arc_v1"),
        ("ARC_V2", "arc_v2"),
        ("xor_one_to_one_zlib", "arc_v1"),
        ("XOR_one_to_one_ZSTD", "arc_v2"),
        ("Miles_Delta", "miles_delta"),
        ("skyrl_delta", "skyrl_delta"),
    ],
)
def test_formats_have_aliases_in_any_case(name: str, expected: str) -> None:
    assert compression_format(name) == expected


@pytest.mark.parametrize("name", ["arc_v3", "ARC_V3"])
def test_the_format_with_pickles_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)'arc_v3' is not supported: its blobs hold pickles"):
        compression_format(name)


@pytest.mark.parametrize("name", ["", "zstd", "arc_v4", "arc_v2 "])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is not supported: use arc_v2 or arc_v1"):
        compression_format(name)


def test_checksum_formats() -> None:
    for name in (None, "alder32", "adler32", "Alder32", "ADLER32"):
        check_checksum_format(name)
    with pytest.raises(ValueError, match="'crc32' is not supported: use alder32"):
        check_checksum_format("crc32")
    check_checksum_format(None, "miles_delta")
    with pytest.raises(ValueError, match="leave it out, the files of a skyrl_delta say it"):
        check_checksum_format("alder32", "skyrl_delta")
