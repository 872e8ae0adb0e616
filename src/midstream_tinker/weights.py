"""Names of saved weights: checkpoint URIs, their directories, and the snapshots made of a run's weights.

Always holds: an accepted URI names one directory below the root, whatever characters it has. Two checkpoints, two runs and two
saves of one run never share a directory or a snapshot identity. The identity of a snapshot names its run.
"""

from __future__ import annotations

import contextlib
import glob
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.types import CheckpointKind

KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
SCHEME = "tinker://"
NAME_CHARS = 128

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._=+~-]{{0,{NAME_CHARS - 1}}}")
_MODEL = re.compile(r"session_([0-9a-f]{1,64}):train:([0-9]{1,19})")
_IDENTITY = re.compile(r"(tinker-[0-9a-f]{1,64}-[0-9]{1,19})-([0-9]{1,19})(?:-.+)?", re.DOTALL)


@dataclass(frozen=True)
class CheckpointUri:
    """`tinker://<model_id>/<weights|sampler_weights>/<name>`; what is made by `parse_uri` or `of` is well-formed."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """As the REST calls name it within a training run."""
        return f"{self.kind}/{self.name}"


def parse_uri(uri: str, param: str = "path") -> CheckpointUri:
    """Raises TinkerRefusal(400), naming `param`."""
    model_id, kind, name = _three_parts(uri, param)
    if _MODEL.fullmatch(model_id) is None:
        raise TinkerRefusal(400, f"{_shown(uri)} names no training run of this server", param)
    for known in KINDS:
        if kind == known:
            check_name(name, param)
            return CheckpointUri(model_id, known, name)
    raise TinkerRefusal(400, f"{_shown(uri)}: {_shown(kind)} is neither weights nor sampler_weights", param)


def checkpoint_uri(model_id: str, kind: CheckpointKind, name: str) -> CheckpointUri:
    """Raises TinkerRefusal(400) when `name` cannot be a checkpoint's."""
    check_name(name)
    return CheckpointUri(model_id, kind, name)


def check_name(name: str, param: str = "path") -> None:
    """Raise TinkerRefusal(400) unless `name` can be a checkpoint's: letters, digits and `._=+~-`, at most 128, no dot first."""
    if _NAME.fullmatch(name) is None:
        raise TinkerRefusal(
            400,
            f"{_shown(name)} cannot name a checkpoint: at most {NAME_CHARS} letters, digits and any of . _ = + ~ -, "
            "beginning with a letter, a digit or _",
            param,
        )


def model_key(model_id: str) -> str:
    """`<session's hex>-<number>`: the model's name where ':' is of no use, such as in file names. ValueError if it is none."""
    match = _MODEL.fullmatch(model_id)
    if match is None:
        raise ValueError(f"{model_id!r} is not a model id")
    return f"{match[1]}-{match[2]}"


def run_name(model_id: str) -> str:
    """What the identities of all snapshots of this model's weights begin with."""
    return f"tinker-{model_key(model_id)}"


def snapshot_identity(model_id: str, seq_id: int, name: str | None = None) -> str:
    """Of the weights that training request `seq_id` saved; `name`: of the checkpoint, None for ephemeral ones."""
    identity = f"{run_name(model_id)}-{seq_id}"
    return identity if name is None else f"{identity}-{name}"


def run_of(identity: str) -> str | None:
    """The run that made the weights of the snapshot `identity`; None: it was not made by training here."""
    match = _IDENTITY.fullmatch(identity)
    return None if match is None else match[1]


def policy_of(identity: str) -> str:
    """The policy that serves the adapter `identity`: `tinker-<run>-<seq_id>`, as the checkpoint's name has other letters."""
    match = _IDENTITY.fullmatch(identity)
    if match is None:
        raise ValueError(f"{identity!r} was not made by training here")
    return f"{match[1]}-{match[2]}"


def is_own_policy(name: str) -> bool:
    """Whether `policy_of` gives such names."""
    match = _IDENTITY.fullmatch(name)
    return match is not None and name == f"{match[1]}-{match[2]}"


def same_run_not_older(identity: str, than: str) -> bool:
    """Whether both are of one run, and `identity` was saved with `than` or after it."""
    match, least = _IDENTITY.fullmatch(identity), _IDENTITY.fullmatch(than)
    if match is None or least is None:
        return False
    return match[1] == least[1] and int(match[2]) >= int(least[2])


class CheckpointPlaces:
    """Where files lie below `root`: checkpoints that last, and what is on its way into the bucket."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        return self._root

    @property
    def publishing(self) -> Path:
        """The publisher's work directory."""
        return self._root / "publish"

    @property
    def exports(self) -> Path:
        """Of what is on its way; nothing in it outlives the process."""
        return self._root / "exports"

    def checkpoint(self, uri: CheckpointUri) -> Path:
        return self._root / "checkpoints" / model_key(uri.model_id) / uri.kind / uri.name

    def put_aside(self, uri: CheckpointUri) -> Path:
        """Free the directory of a checkpoint; where it is now, to be removed."""
        directory = self.checkpoint(uri)
        aside = directory.with_name(f".{uri.name}.deleted-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            directory.rename(aside)
        return aside

    def leftovers(self) -> list[Path]:
        """Of checkpoints that were being written or deleted; the names of whole ones begin with no dot."""
        places = self._root / "checkpoints"
        return [*places.glob("*/*/.*.writing-*"), *places.glob("*/*/.*.deleted-*")]

    def export(self, identity: str) -> Path:
        return self.exports / identity

    def export_with_leftovers(self, identity: str) -> list[Path]:
        """What there is of an export, also when the trainer died while it wrote."""
        return [self.export(identity), *self.exports.glob(f".{glob.escape(identity)}.writing-*")]


def _three_parts(uri: str, param: str) -> tuple[str, str, str]:
    parts = uri.removeprefix(SCHEME).split("/")
    if not uri.startswith(SCHEME) or len(parts) != 3:
        raise TinkerRefusal(400, f"{_shown(uri)} is not tinker://RUN/weights/NAME", param)
    return parts[0], parts[1], parts[2]


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
