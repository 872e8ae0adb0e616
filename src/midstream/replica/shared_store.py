"""In which store a request wants columns in files, and for how long, as Fireworks' clients say it.

Owns: the two headers of such a request.
Always holds: the store is the server's own bucket of records. At the refusal of routes in files that clients know, they take
their routes inline; every other refusal names its field or header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from midstream.core.errors import InvalidRequest, UnknownField
from midstream.replica.record_files import NO_BUCKET, PARAM, RecordFiles
from midstream.replica.request.checked import MASKS, ROUTES, Checked

HEADER_STORE = "x-fireworks-r3-store-id"
HEADER_STAY = "x-fireworks-r3-ttl-seconds"
#: Fireworks' client says so of requests without a lifetime.
STAY_S = 6 * 3600.0
STAY_S_MAX = 10 * 365 * 86400


def check_files(checked: Checked, files: RecordFiles | None, headers: Mapping[str, str]) -> float:
    """How many seconds the file of an answer has to stay, at least. Raises InvalidRequest, RecordsNotStored."""
    if files is None or files.lacking is not None:
        if ROUTES in checked.stored:
            # At this answer, clients ask for routes inline.
            raise UnknownField(ROUTES)
        why = NO_BUCKET if files is None else f"{PARAM}: {files.lacking}"
        if MASKS in checked.stored:
            raise InvalidRequest(f"{UnknownField(MASKS).message}: {why}", param=MASKS)
        raise InvalidRequest(why, param=PARAM)
    if not checked.stored:
        files.check()
        return 0.0
    _check_store(checked, files, headers.get(HEADER_STORE))
    files.check()
    return _stay_s(headers.get(HEADER_STAY), files.keep_s)


def _check_store(checked: Checked, files: RecordFiles, store: str | None) -> None:
    asked = min(checked.stored)
    if store is None:
        message = f"{HEADER_STORE}: {asked}: parquet_v1 needs it: the URL of the bucket of --records"
        raise InvalidRequest(message, param=HEADER_STORE)
    if store.rstrip("/") == files.store_id:
        return
    if ROUTES in checked.stored:
        # A trainer with a store of its own could not read our files. At this answer, it gets its routes inline.
        raise UnknownField(ROUTES)
    message = f"{HEADER_STORE}: this server writes to its own store alone, whose id is the URL of --records"
    raise InvalidRequest(message, param=HEADER_STORE)


def _stay_s(header: str | None, keep_s: float | None) -> float:
    most = math.inf if keep_s is None else keep_s
    if header is None:
        return min(STAY_S, most)
    stay_s = int(header) if header.isascii() and header.isdecimal() and len(header) < 12 else 0
    if not 1 <= stay_s <= min(STAY_S_MAX, most):
        message = (
            f"{HEADER_STAY}: expected whole seconds from 1 to {int(min(STAY_S_MAX, most))}, got {header!r}"
        )
        if stay_s > most:
            message += "; records.files_keep_s is the longest that files stay"
        raise InvalidRequest(message, param=HEADER_STAY)
    return float(stay_s)
