"""The models that this server knows: their names, and the directories that they are loaded from.

Owns: the built-in model's directory, made on first use.
Always holds: the name of a model is fixed while the server runs, and names one directory. Only the state directory is written
to. So a model is missing while its storage is not mounted, also if it has the built-in model's name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from midstream.core import extras
from midstream.core.child import importing
from midstream.core.config import Settings, check_name
from midstream.core.errors import ConfigError

logger = logging.getLogger(__name__)

BUILT_IN = "tiny-moe"


def known_models(settings: Settings) -> tuple[str, dict[str, Path]]:
    """The name of the command line's model, and the directories of all known models by name. Raises ConfigError.

    Known are the command line's model, those of the setting `models`, and the built-in one unless its name is taken.
    """
    known = {name: _checkpoint(f"models.{name}", directory) for name, directory in settings.models.items()}
    for name in known:
        check_name("models: the key is the model's name;", name)
    built_in = built_in_directory(Path(settings.state_dir))
    given = settings.deployment.model
    if given in known:
        return given, {BUILT_IN: built_in, **known}
    if given == BUILT_IN:
        return BUILT_IN, {**known, BUILT_IN: built_in}
    directory = _checkpoint("--model", given)
    name = directory.name
    check_name("--model: the directory's name becomes the model's;", name)
    if known.get(name, directory) != directory:
        raise ConfigError(f"--model {given}: models.{name} is another directory")
    return name, {BUILT_IN: built_in, **known, name: directory}


def built_in_directory(state_dir: Path) -> Path:
    return state_dir.absolute() / "models" / BUILT_IN


def model_directory(known: Mapping[str, Path], name: str, state_dir: Path) -> Path:
    """The model's directory. The built-in model is made if it does not exist. Raises ConfigError."""
    directory = known.get(name)
    if directory is None:
        raise ConfigError(f"model {name} is not known any more: give it in the setting models.{name}")
    make_built_in(directory, state_dir)
    return directory


def make_built_in(directory: Path, state_dir: Path) -> None:
    """Write the built-in model, if the directory is the built-in model's and does not exist."""
    if directory == built_in_directory(state_dir) and not directory.is_dir():
        if hint := extras.advice(extras.missing(("torch", "transformers", "tokenizers", "safetensors"))):
            raise ConfigError(f"the built-in model {hint}; or name a checkpoint with --model DIR")
        logger.info("making the built-in model in %s, once for this state directory", directory)
        with importing():
            from midstream.models.tiny_moe import write_tiny_moe
        write_tiny_moe(directory)


def _checkpoint(what: str, path: str) -> Path:
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{what} {path}: neither a built-in model ({BUILT_IN}) nor a directory with a config.json; "
            "nothing is downloaded from a hub"
        )
    return directory.resolve()
