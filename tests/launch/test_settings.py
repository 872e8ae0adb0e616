"""Settings from a file and from options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from midstream.commands import serve
from midstream.commands.common import settings_of
from midstream.core.config import GatewaySettings
from midstream.core.errors import ConfigError
from midstream.core.key_settings import KeySettings
from midstream.core.settings import load_settings


def test_an_option_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text(
        '[deployment]\nreplicas = 3\n[embedded]\nblock_size = 32\n[gateway]\nport = 9000\napi_keys = ["k"]\n'
    )
    settings = load_settings(str(file), {"gateway.port": 9001, "deployment.replicas": None})
    gateway = settings.gateway
    assert (gateway.port, gateway.host, settings.deployment.replicas) == (9001, "127.0.0.1", 3)
    assert (settings.embedded.block_size, settings.gateway.api_keys) == (32, ("k",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gateway]\nport = 'x'", "gateway.port"),
        ("[embedded]\nmax_batch_tokens = 0", "embedded.max_batch_tokens must be at least 1"),
        ("[embedded]\nmax_batch_tokens = 8\nmax_running = 16", "would starve"),
        ("[embedded]\nkv_cache_tokens = 8", "must hold at least two blocks"),
        ('[gateway]\napi_keys = ["", "real"]', "empty key"),
        ('[gateway]\napi_keys = ["real", "real"]', "gateway.api_keys holds a key twice"),
        (
            '[gateway]\napi_keys = ["k", "sha256:8254C329A92850F6D539DD376F4816EE2764517DA5E0235514AF433164480D7A"]',
            "gateway.api_keys holds a key twice",
        ),
        ('[gateway]\napi_keys = ["sha256:abc"]', "followed by the 64 hexadecimal digits"),
        ('[gateway]\napi_keys = ["j", {key = "k"}]', "missing required field `scopes`"),
        ('[gateway]\napi_keys = ["j", {key = "k", scopes = []}]', "gateway.api_keys: number 2 has no scopes"),
        (
            '[gateway]\napi_keys = [{key = "k", scopes = ["train"]}]',
            "gateway.api_keys: number 1: scope 'train': expected one of sample, publish, observe, operate",
        ),
        (
            '[gateway]\napi_keys = [{key = "k", scopes = ["publish:default/actor"]}]',
            "a scope is for a whole deployment",
        ),
        ('[gateway]\napi_keys = [{key = "k", scopes = ["sample"], tenant = "a b"}]', "tenant 'a b'"),
        ('[gateway]\napi_keys = [{key = "k", scope = ["sample"]}]', "unknown field `scope`"),
        ("[gateway]\nconnect_timeout_s = 0", "gateway.connect_timeout_s must be above 0"),
        ('[gateway]\ntls_cert = "c"', "gateway.tls_cert and gateway.tls_key go together"),
        ("[gateway]\nload_bound = inf", "gateway.load_bound must be above 0 and finite"),
        ("[gateway]\nsession_idle_s = inf", "gateway.session_idle_s must be above 0 and finite"),
        ("[embedded]\nsilence_s_max = inf", "embedded.silence_s_max must be at least 1 and finite"),
        (
            "[gateway]\nmax_unfinished_body_bytes = 1000000",
            "gateway.max_unfinished_body_bytes and its _per_tenant must be at least gateway.max_body_bytes",
        ),
        ("[gateway]\nmin_body_rate = -1", "gateway.min_body_rate must be at least 0"),
        ("[gateway]\nmax_requests_per_tenant = -1", "gateway.max_requests_per_tenant must be at least 0"),
        ("[gateway]\nrestart_drain_s = 0", "gateway.restart_drain_s must be above 0"),
        (
            '[gateway]\naudit_log = "audit.log"',
            "gateway.audit_log must be log, off or the absolute path of a file",
        ),
        ("[gateway]\nworkers = 0", "gateway.workers must be 1 to 64, got 0"),
        ("[replica]\npin_drain_s = -1", "replica.pin_drain_s must be 0 to 86400"),
        ('account = "a/b"', "account 'a/b'"),
        ('[deployment]\nname = ""', "deployment.name ''"),
        ('[embedded]\nkv_cache_memory = "4 gigs"', "expected a number and one of KiB, MiB, GiB, kB, MB, GB"),
        ('[tinker]\nbase_models = [""]', "tinker.base_models must hold names"),
        ('[tinker]\nbase_models = [" x"]', "tinker.base_models must hold names"),
        ('[tinker]\nbase_model_clients = "some"', "base_model_clients"),
        ("[tinker]\ntrainer_threads = -1", "tinker.trainer_threads must be at least 0"),
        ("[tinker]\nfull_every = 0", "tinker.full_every must be at least 1"),
        ("[tinker]\nkey = 1", "unknown field `key`"),
        ("nonsense = 1", "nonsense"),
        ("[", "not valid TOML"),
    ],
)
def test_a_setting_that_cannot_work_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_settings(str(file), {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gateway]\nconnect_timeout_s = 0", "gateway.connect_timeout_s must be above 0 and finite, got 0"),
        ("[gateway]\nload_bound = nan", "gateway.load_bound must be above 0 and finite, got nan"),
        ("[gateway]\nmax_sessions = -3", "gateway.max_sessions must be at least 1, got -3"),
        ("[gateway]\nworkers = 65", "gateway.workers must be 1 to 64, got 65"),
        (
            '[gateway.replica_weights]\none = 1\n"h:80" = 2e6',
            "gateway.replica_weights.h:80 must be above 0 and at most 1e6, got 2000000.0",
        ),
        ("[embedded]\nblock_size = 1", "embedded.block_size must be at least 2, got 1"),
        ("[embedded]\nload_s_max = 0.5", "embedded.load_s_max must be at least 1 and finite, got 0.5"),
        ("[replica]\nresident_snapshots = 0", "replica.resident_snapshots must be 1 to 64, got 0"),
        ("[replica]\nresident_policies = 0", "replica.resident_policies must be 1 to 4096, got 0"),
        ("[gateway]\nmax_policies = 0", "gateway.max_policies must be at least 1, got 0"),
        (
            "[gateway]\nmax_policies_per_tenant = 5",
            "gateway.max_policies_per_tenant must be 0 or at least tinker.adapters_max (32), or the front could not load as"
            " many, got 5",
        ),
        (
            '[replica]\nresident_memory = "much"',
            "replica.resident_memory 'much': expected a number and one of KiB, MiB, GiB, kB, MB, GB",
        ),
        (
            'engine = "vllm"\n[replica]\nresident_snapshots = 2',
            "replica.resident_snapshots above 1 needs engine = embedded: a vLLM server holds one set of weights",
        ),
        ("[replica]\npin_drain_s = 1e9", "replica.pin_drain_s must be 0 to 86400 seconds, got 1000000000.0"),
        ("[replica]\nport = 65536", "replica.port must be 0 to 65535, got 65536"),
        (
            '[vllm]\nurls = ["http://h:1", "http://u:hunter2@h"]',
            "vllm.urls must be of the form http://HOST:PORT, got 'http://***@h'",
        ),
        (
            "[tinker]\nbase_models = ['ok', 'x\\n ']",
            r"tinker.base_models must hold names of 1 to 1024 characters, without blanks around them, got 'x\\n '",
        ),
        (
            '[ray.gateway_resources]\n"node:h" = -1',
            "ray.gateway_resources.node:h must be at least 0 and finite, got -1",
        ),
        (
            '[gateway]\nengine = "vllm"',
            "unknown field `engine` in [gateway]; engine is written above the first [section]",
        ),
        ("[gateway]\nworkers = 'two'", "gateway.workers: Expected `int`, got `str`"),
        ("replicass = 3", "unknown field `replicass`; did you mean deployment.replicas or gateway.replicas?"),
        ("port = 1", "unknown field `port`; did you mean gateway.port or replica.port?"),
        ('database = "postgresql://h/d"', "unknown field `database`; did you mean ledger.database?"),
        ('log_level = "info"', "unknown field `log_level`; did you mean log.level?"),
        ('replica_token = "t"', "unknown field `replica_token`; did you mean replica.token?"),
        ('[gateway]\nmodel = "m"', "unknown field `model` in [gateway]; did you mean deployment.model?"),
        (
            'records = "s3://b/p"',
            "records: Expected `object`, got `str`; [records] is a section with bucket, disk, files_keep_s, files_max, "
            "audit_share",
        ),
        (
            "[embedded]\nblock_sise = 8",
            "unknown field `block_sise` in [embedded]; did you mean embedded.block_size?",
        ),
        ("max_running = 8", "unknown field `max_running`; did you mean embedded.max_running?"),
        ("[embeded]\nblock_size = 8", "unknown field `embeded`; did you mean embedded?"),
        (
            '[[gateway.api_keys]]\nkey = "hunter2"\nscope = ["sample"]',
            "unknown field `scope` in [gateway.api_keys]; did you mean gateway.api_keys.scopes?",
        ),
        (
            "[ray]\nqqq = 1",
            "unknown field `qqq` in [ray]; there are address, cpus, gpus, resources, bundles, strategy, gateway, gateways, "
            "gateway_resources, python",
        ),
        (
            'engine = "vlm"',
            "engine: Invalid enum value 'vlm'; expected one of embedded, vllm, sglang; did you mean vllm?",
        ),
    ],
)
def test_an_error_names_the_setting_what_was_expected_and_the_value(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_settings(str(file), {})
    assert str(error.value) == f"--config {file}: {says}"


def test_an_error_of_an_option_does_not_blame_the_file(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text("account = 'a'\ngateway = 4\n")
    with pytest.raises(ConfigError, match=r"midstream\.toml: gateway: Expected `object`, got `int`"):
        load_settings(str(file), {"gateway.workers": 2})
    file.write_text("account = 'a'\n")
    with pytest.raises(ConfigError) as error:
        load_settings(str(file), {"gateway.port": 70000})
    assert str(error.value) == "configuration: gateway.port must be 0 to 65535, got 70000"


def test_empty_arguments_of_vllm_on_the_command_line_are_none(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('[vllm]\nargs = ["--max-num-seqs", "4"]\n')
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert settings_of(parser.parse_args(["--config", str(file), "--vllm-args", ""])).vllm.args == ()


def test_the_cache_size_on_the_command_line_joins_the_engine_settings_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text("[embedded]\nblock_size = 32\n")
    settings = load_settings(str(file), {"embedded.kv_cache_memory": "64MiB"})
    assert (settings.embedded.block_size, settings.embedded.kv_cache_memory) == (32, "64MiB")


def test_the_gateways_options_join_the_gateways_settings_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('[gateway]\nkeep_alive_s = 3\ntls_cert = "old"\n')
    settings = load_settings(
        str(file), {"gateway.workers": 4, "gateway.tls_cert": "c", "gateway.tls_key": "k"}
    )
    gateway = settings.gateway
    assert (gateway.workers, gateway.tls_cert, gateway.tls_key, gateway.keep_alive_s) == (4, "c", "k", 3)


def test_the_tinker_api_is_on_and_can_be_switched_off(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('[tinker]\nbase_models = ["Qwen/Qwen3-8B-Base"]\n')
    assert load_settings(str(file), {"tinker.enabled": None}).tinker.enabled
    off = load_settings(str(file), {"tinker.enabled": False}).tinker
    assert (off.enabled, off.base_models) == (False, ("Qwen/Qwen3-8B-Base",))
    file.write_text("[tinker]\nenabled = false\n")
    assert not load_settings(str(file), {"tinker.enabled": None}).tinker.enabled


def test_keys_are_written_as_texts_and_as_tables(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text(
        '[gateway]\napi_keys = ["a", {key = "b", scopes = ["sample:x", "publish"], tenant = "t"}]\n'
    )
    expected = ("a", KeySettings(key="b", scopes=("sample:x", "publish"), tenant="t"))
    assert load_settings(str(file), {}).gateway.api_keys == expected
    file.write_text('[[gateway.api_keys]]\nkey = "b"\nscopes = ["observe"]\n')
    assert load_settings(str(file), {}).gateway.api_keys == (KeySettings(key="b", scopes=("observe",)),)


def test_no_message_about_a_key_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    for keys in (
        '"secret", "secret"',
        '" secret"',
        '"sha256:secret"',
        '{key = "secret", scopes = []}',
        '{key = "secret", scopes = ["x"]}',
        '{key = "secret", scopes = "sample"}',
    ):
        file.write_text(f"[gateway]\napi_keys = [{keys}]\n")
        with pytest.raises(ConfigError) as error:
            load_settings(str(file), {})
        assert "secret" not in str(error.value)


def test_the_bounds_of_unfinished_bodies_follow_the_one_of_a_body() -> None:
    for most, together, of_one in ((64, 512, 256), (512, 2048, 1024)):
        gateway = GatewaySettings(max_body_bytes=most << 20)
        assert gateway.unfinished_body_bytes == (together << 20, of_one << 20)
