"""The bucket and the cache of snapshots, as settings."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from midstream.core.config import DeploymentSettings, Settings
from midstream.core.errors import ConfigError
from midstream.core.settings import load_settings
from midstream.launch.supervisor import bucket_url


def in_bucket(url: str) -> Settings:
    return Settings(deployment=DeploymentSettings(bucket=url))


def test_a_local_buckets_directory_is_made(tmp_path: Path) -> None:
    url = bucket_url(Settings(state_dir=str(tmp_path / "state")))
    assert (url, (tmp_path / "state" / "bucket").is_dir()) == ((tmp_path / "state" / "bucket").as_uri(), True)
    bucket_url(in_bucket(f"file://{quote(str(tmp_path))}/a%20b"))
    assert (tmp_path / "a b").is_dir()


def test_nothing_is_made_for_a_bucket_elsewhere_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert bucket_url(in_bucket("s3://rollouts/x")) == "s3://rollouts/x"
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_cannot_work_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for bucket, says in [
        ("az://container/x", "[Aa]ccount"),
        ("s3://user:hunter2@bucket", "no user or password"),
        ("https://example.org/bucket", "write file:///absolute/path, s3://"),
    ]:
        with pytest.raises(ConfigError, match=says) as caught:
            bucket_url(in_bucket(bucket))
        assert "hunter2" not in str(caught.value)


def test_the_size_of_the_cache_is_checked_when_settings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('[replica]\nsnapshot_cache = "20GiB"\n')
    assert load_settings(str(file), {}).replica.snapshot_cache == "20GiB"
    file.write_text('[replica]\nsnapshot_cache = "plenty"\n')
    with pytest.raises(
        ConfigError, match=r"replica\.snapshot_cache 'plenty': expected a number and one of KiB"
    ):
        load_settings(str(file), {})
