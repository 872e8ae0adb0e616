"""`midstream model`: a built-in model written as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_model)
    parser.add_argument("name", choices=("tiny-moe",), help="a small MoE with random weights")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where it goes; made if it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden states")
    parser.add_argument("--experts", type=int, default=8, help="of each layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts that compute each token")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add_progress_argument(parser)


def _model(options: argparse.Namespace) -> int:
    from midstream.models.tiny_moe import write_tiny_moe

    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "experts", "top_k")}
    try:
        with ProgressLine(options.progress) as line:
            line.show(f"making {options.name}")
            write_tiny_moe(options.directory, seed=options.seed, dtype=options.dtype, **sizes)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {options.directory}")
    return 0
