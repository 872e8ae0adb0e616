"""What subcommands share: the server they ask, looking again and again, and the options that choose an engine.

Always holds: a key comes from the option or the environment, and is never printed. A refusal of the server, or no answer, is
one line and exit code 1. With --watch on a terminal a picture is drawn over itself; elsewhere it is printed when it changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import reduce
from urllib.parse import urlsplit

from midstream.client import PublishError, ServerClient
from midstream.client.deployment_calls import which_deployment
from midstream.client.errors import Unanswered
from midstream.core.config import Settings
from midstream.core.errors import ConfigError, SnapshotRefused
from midstream.core.settings import all_settings, choices_of, load_settings
from midstream.core.text import plain

DEFAULT_SERVER = "http://127.0.0.1:8080"
SERVER_VARIABLE = "MIDSTREAM_SERVER"
KEY_VARIABLE = "MIDSTREAM_API_KEY"
CLEAR = "\x1b[H\x1b[J"


def add_server_arguments(parser: argparse.ArgumentParser, *, of: str = "of the server") -> None:
    """of: what the URL as an argument is of; empty: the command has other arguments, and takes --server alone."""
    add_url_arguments(parser, of)
    parser.add_argument(
        "--deployment", metavar="NAME", help="of the server (default: the only one, or the server's own)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"better kept in the environment (default: ${KEY_VARIABLE})"
    )


def add_url_arguments(parser: argparse.ArgumentParser, of: str = "of the server") -> None:
    parser.set_defaults(url=None)
    if of:
        parser.add_argument("url", nargs="?", metavar="URL", help=f"{of} {default_server_words()}")
    help_text = "the same as an option" if of else f"http://HOST:PORT {default_server_words()}"
    parser.add_argument("--server", metavar="URL", help=help_text)


def default_server_words() -> str:
    """Which server is meant where none is named, for a help text."""
    return f"(default: ${SERVER_VARIABLE}, or {DEFAULT_SERVER})"


@contextlib.contextmanager
def connect(options: argparse.Namespace, request_timeout_s: float = 30.0) -> Iterator[ServerClient]:
    """Raises ConfigError when the address is not one."""
    server = ServerClient(
        address(options),
        deployment=options.deployment,
        api_key=api_key(options),
        request_timeout_s=request_timeout_s,
    )
    with contextlib.closing(server):
        yield server


def given_url(options: argparse.Namespace) -> str | None:
    """Raises ConfigError when two are given."""
    if options.url and options.server and options.url != options.server:
        raise ConfigError(f"--server {options.server}: the URL {options.url} is given, too; name one server")
    url: str | None = options.url or options.server
    return url


def address(options: argparse.Namespace) -> str:
    """Raises ConfigError when it is not one."""
    url = given_url(options) or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(f"--server {url!r}: write http://HOST:PORT")
    if "@" in parts.netloc:
        raise ConfigError("--server: must not hold a user or password; give a key as --api-key")
    return url


def api_key(options: argparse.Namespace) -> str | None:
    return options.api_key or os.environ.get(KEY_VARIABLE) or None


def request_headers(options: argparse.Namespace) -> dict[str, str]:
    """The headers of a request that ServerClient does not make: the key and the deployment."""
    key = api_key(options)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return headers | ({"fireworks-deployment": options.deployment} if options.deployment else {})


def full_deployment_name(server: ServerClient, asked: str | None) -> str:
    """The name as accounts/A/deployments/D. Raises ConfigError when no deployment, or more than one, fits `asked`."""
    if asked is not None and "/" in asked:
        return asked
    try:
        return str(which_deployment(server.deployments.all(retry_s=0), asked)["name"])
    except ValueError as error:
        raise ConfigError(f"--{error}") from error


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="look again until interrupted")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: %(default)g)",
    )


def show(look: Callable[[], str], options: argparse.Namespace) -> int:
    """Print what `look` gives, once or with --watch until interrupted. While the server does not answer, its error is shown.

    Raises ValueError on a wrong --interval, and what `look` raises where it is not watched.
    """
    if not options.interval > 0:
        raise ValueError(f"--interval must be above 0, got {options.interval:g}")
    if not options.watch:
        print(look())
        return 0
    shown = ""
    while True:
        try:
            picture = look()
        except PublishError as error:
            picture = plain(str(error))
        if sys.stdout.isatty():
            print(CLEAR + picture, flush=True)
        elif picture != shown:
            print(picture, flush=True)
        shown = picture
        time.sleep(options.interval)


def guarded(act: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`act`, with errors as messages. Wrong arguments become a ConfigError, other errors exit code 1."""

    def run(options: argparse.Namespace) -> int:
        try:
            return act(options)
        except PublishError as error:
            unanswered = isinstance(error, Unanswered) and error.status is None
            advice = "; is the server running, and is this its address?" if unanswered else ""
            print(f"midstream {options.command}: {plain(str(error))}{advice}", file=sys.stderr)
            return 1
        except (ValueError, SnapshotRefused) as error:
            raise ConfigError(str(error)) from error
        except BrokenPipeError:
            # The reader of the pipe has seen enough.
            sys.stderr.close()
            return 1

    return run


#: Arguments of servers, each option one string.
ARGS = ("vllm.args", "sglang.args")


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings of --config, with the options whose `dest` is a setting on top. Raises ConfigError."""
    given = {name: value for name, value in vars(options).items() if name in all_settings()}
    for setting in ARGS:
        if (text := given.get(setting)) is not None:
            try:
                given[setting] = shlex.split(text)
            except ValueError as error:
                raise ConfigError(f"--{setting.replace('.', '-')} {text!r}: {error}") from error
    return load_settings(options.config, given)


def add_setting(
    parser: argparse.ArgumentParser, option: str, setting: str, help_text: str, metavar: str | None = None
) -> None:
    """An option that gives a setting. Its type, its choices and its default are those of the setting."""
    default = reduce(getattr, setting.split("."), Settings())
    number = type(default) if isinstance(default, (int, float)) else None
    choices = choices_of(setting) or None
    if default and "(default" not in help_text:
        help_text += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    parser.add_argument(
        option,
        dest=setting,
        type=number or str,
        choices=choices,
        metavar=metavar or (None if choices else option.lstrip("-").upper()),
        action="append" if isinstance(default, tuple) and setting not in ARGS else "store",
        help=help_text,
    )


#: Of engines that are servers: option, setting, help and what stands for its value.
SERVER_OPTIONS = (
    (
        "--vllm-args",
        "vllm.args",
        'for each vLLM server, in one string: --vllm-args "--tensor-parallel-size 2 --quantization fp8"',
        "ARGS",
    ),
    (
        "--vllm-python",
        "vllm.python",
        "interpreter of the environment that vLLM is installed in (default: this one)",
        "FILE",
    ),
    (
        "--vllm-url",
        "vllm.urls",
        "http://HOST:PORT of a running vLLM server to attach to instead of starting one; one per replica",
        "URL",
    ),
    (
        "--sglang-args",
        "sglang.args",
        'for each SGLang server, in one string: --sglang-args "--tp-size 2"',
        "ARGS",
    ),
    (
        "--sglang-python",
        "sglang.python",
        "interpreter of the environment that SGLang is installed in (default: this one)",
        "FILE",
    ),
    (
        "--sglang-url",
        "sglang.urls",
        "http://HOST:PORT of a running SGLang server to attach to instead of starting one; one per replica",
        "URL",
    ),
)


def add_arguments(parser: argparse.ArgumentParser, address: str) -> None:
    """What `serve` and `replica` share. address: the section that says where the command listens."""
    for option, setting, help_text, metavar in (
        ("--model", "deployment.model", "built-in name or Hugging Face directory", None),
        ("--engine", "engine", "the built-in engine, or vLLM or SGLang servers", None),
        ("--host", f"{address}.host", "address to listen on", None),
        ("--port", f"{address}.port", "0 takes a free one", None),
        (
            "--kv-cache-memory",
            "embedded.kv_cache_memory",
            "KV cache of each embedded engine, e.g. 512MiB (default: 65536 tokens)",
            "SIZE",
        ),
        *SERVER_OPTIONS,
        (
            "--records",
            "records.bucket",
            "where the tokens and numbers of sessions' turns are kept for trainers: file:///DIR, s3://BUCKET/PREFIX, gs:// "
            "or az:// (default: nowhere)",
            "URL",
        ),
        ("--state-dir", "state_dir", "ledger, caches, built-in models", "DIR"),
        ("--log-level", "log.level", "the least that is logged", None),
        ("--log-format", "log.format", "of every process: for people, or one JSON object a line", None),
    ):
        add_setting(parser, option, setting, help_text, metavar)
    parser.add_argument("--config", help="TOML file with any of the settings; options here win over it")
