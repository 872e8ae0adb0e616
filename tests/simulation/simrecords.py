"""Clients of a simulated history that want records by reference, and what has to be true of the files that they are told of.

Always holds: a file is whole in the bucket when its reference arrives, and its rows are the tokens of that answer with their
labels. Later it is the same, or its reader says that it is gone. It goes no earlier than was promised. Nobody reads a file that
is half there, or other bytes than those of its reference.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simclient import Broken, Oracle, Rollout, Turn, Wrong
from simfiles import FILES, LOOK_S, RECORDS, Kept, Trouble
from simprocess import Process

from midstream.client.decode import SamplingMasks
from midstream.client.errors import RecordFileError, RecordFileGone
from midstream.client.references import read_reference
from midstream.client.shared_references import read_masks, read_routes
from midstream.core.config import RecordsSettings, parse_size
from midstream.core.masks import kept_ids
from midstream.core.record_files import SUFFIX, is_file_name
from midstream.replica.shared_rows import ROWS
from midstream.snapshots.store.objects import CLOCK

if TYPE_CHECKING:
    from simworld import World

#: Of each history; and how often somebody reads what an earlier answer referred to.
CLIENTS = (1, 3)
READ_S = 0.7
#: Of histories, those whose server may not remove files.
WITHOUT_REMOVAL = 0.1
NOT_STORED = "records_not_stored"
FULL = "no room for record files"
#: What is asked in calm weather comes true within so many seconds.
CALM_S = 60.0
#: What half of the prompts begin with, so that their rows may be those of an earlier file.
OPENING = list(range(2, 2 + 2 * ROWS + 3))


def settings_of(rng: random.Random) -> RecordsSettings:
    keep_s = rng.choice((None, None, 3.0, 6.0, 6.0, 1800.0))
    files_max = rng.choice(("1GiB", "1GiB", "20KiB"))
    return RecordsSettings(bucket=RECORDS, files_keep_s=keep_s, files_max=files_max)


def kinds(rng: random.Random) -> list[tuple[float, str, Any]]:
    """What befalls the files, and who writes them: seconds, kind and value."""
    made: list[tuple[float, str, Any]] = []
    for _ in range(rng.randint(0, 4)):
        value = {"fails": rng.choice((0.0, 0.3, 0.3, 1.0)), "torn": rng.choice((0.0, 0.7))}
        value |= {"again": rng.choice((0.0, 0.3)), "wrong": rng.choice((0.0, 0.3))}
        value |= {"seconds": rng.choice((0.02, 0.5, 3.0, 8.0)), "s": round(rng.uniform(0.5, 6.0), 2)}
        made.append((rng.uniform(0.0, 20.0), "record files", value))
    strikes = range(rng.randint(0, 4))
    return made + [(rng.uniform(0.0, 20.0), "kill writer", rng.choice(("begun", "placed"))) for _ in strikes]


@dataclass(frozen=True)
class Held:
    """An answer whose records are in files. files: their paths."""

    turn: Turn
    files: tuple[str, ...]


class Records:
    """settings: of a server that has a bucket of records."""

    def __init__(
        self,
        port: int,
        world: World,
        oracle: Oracle,
        settings: RecordsSettings | None,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._port, self._world, self._oracle, self._seed, self._say = port, world, oracle, seed, say
        self._bucket = world.records
        self._rng = random.Random(f"{seed} reader")
        self._held: list[Held] = []
        self._over = False
        if settings is not None:
            self._bucket.keep_s = settings.files_keep_s
            self._bucket.bytes_max = parse_size("", settings.files_max)
            self._bucket.may_remove = self._rng.random() >= WITHOUT_REMOVAL

    def client(self, number: int) -> RecordClient:
        name = f"record-client-{number}"
        rng = random.Random(f"{self._seed} {name}")
        client = RecordClient(name, self._port, rng, self._oracle, self._count, lambda: None)
        client.opening, client.records = OPENING, self
        return client

    def _count(self, what: str) -> None:
        self._world.counts[what] += 1

    async def befall(self, kind: str, value: Any, kill: Callable[[Process], None]) -> None:
        if kind == "kill writer":

            def struck(process: Process) -> None:
                self._count(f"a replica was killed when its put was {value}")
                kill(process)

            self._bucket.struck[value] = struck
            return
        self._bucket.trouble = Trouble(**{name: most for name, most in value.items() if name != "s"})
        await asyncio.sleep(value["s"])
        self._bucket.trouble = Trouble()

    def calm(self) -> None:
        self._bucket.trouble = Trouble()
        self._bucket.struck.clear()
        self._over = True

    # -- what is answered

    def refused(self, said: str, begun_at: float) -> Broken:
        """A file that was not stored, since the bucket failed or is full. Raises Wrong where it did not and is not."""
        bucket, is_bound = self._bucket, "records.files_max" in said
        bucket.note_size()
        # A replica knows of room when it has looked, and looks take long in bad weather.
        since = bucket.full_at + CALM_S if is_bound else bucket.failed_at
        if since < begun_at:
            raise Wrong(f"the bucket of records did not fail and has room: {said}")
        return Broken(FULL if is_bound else f"507 {NOT_STORED}")

    def answered(self, turn: Turn, body: Mapping[str, Any], stay_s: float) -> None:
        """A client has this answer. Raises Wrong."""
        named: list[Any] = [turn.reference] if turn.in_files is None else turn.in_files["files"]
        for one in named:
            if one is None:
                raise Wrong(f"an answer without the reference that was asked for: {turn}")
            wrong = self._bucket.why_not_whole(one["file"], one["sha256"], one["bytes"])
            if one["file"] in self._bucket.gone and turn.begun_at + stay_s < self._bucket.now:
                self._count("records: gone before the answer came")
                return
            if wrong is not None:
                raise Wrong(f"a reference came before its file: {wrong}; {turn}")
            until = turn.begun_at + stay_s
            self._bucket.stays[one["file"]] = max(until, self._bucket.stays.get(one["file"], 0.0))
        held = Held(turn, tuple(one["file"] for one in named))
        if turn.in_files is not None:
            # Its log-probabilities are in the answer, those of the prompt before the others.
            count = len(turn.prompt)
            del turn.tokens[:count], turn.logprobs[:count], turn.routes[:count]
            turn.labels = turn.labels[-len(turn.sampled) :]
        with self._bucket.quiet():
            self._read(held)
        self._held.append(held)
        self._oracle.check(turn, body["max_tokens"])
        self._count(f"records: {'a reference' if turn.in_files is None else 'shared references'}")
        if len(named) > 1:
            self._count("records: rows of an earlier file")
        if turn.resumed:
            self._count("records: resumed")
        if len(set(turn.labels)) > 1:
            self._count("records: of several snapshots")

    def _read(self, held: Held) -> None:
        """As a trainer does. Raises RecordFileError, and Wrong for other rows than those of the answer's tokens."""
        if held.turn.in_files is None:
            self._read_columns(held.turn)
        else:
            self._read_routes(held.turn, held.turn.in_files)

    def _read_columns(self, turn: Turn) -> None:
        assert turn.reference is not None
        (found,) = read_reference(RECORDS, turn.reference)
        tokens = found.token_ids.tolist()
        labels = [span.snapshot for span in found.snapshots for _ in range(span.start, span.end)]
        if (tokens, labels) != (turn.sampled, turn.labels):
            raise Wrong(f"a file has the tokens {tokens} of {labels}: {turn}")
        turn.tokens, turn.logprobs = tokens, found.logprobs.tolist()
        turn.routes = [None] * len(tokens)
        turn.kv = [(span.snapshot, span.start, span.end) for span in found.kv_snapshots]
        assert found.routes is not None
        self._check_routes(turn, [route.tobytes() for route in found.routes])
        try:
            self._check_masks(turn, found.sampling_masks())
        except ValueError as error:
            raise Wrong(f"a file has masks that are none of its tokens: {error}; {turn}") from error

    def _read_routes(self, turn: Turn, references: dict[str, Any]) -> None:
        routes, known = read_routes(references)
        if known.tolist() != [False, *[True] * (len(turn.prompt) + len(turn.sampled) - 1)]:
            raise Wrong(f"routes are known at {known.tolist()}: {turn}")
        if turn.tokens != turn.sampled:
            raise Wrong(f"{turn.sampled} was sampled: {turn}")
        found = [route.tobytes() for route in routes]
        # All of a prompt that is shown was computed by the weights of its first token.
        assert turn.kv is not None
        count, label = len(turn.prompt), turn.kv[0][0]
        prompt = Turn(turn.prompt[:1], labels=[label] * (count - 1), tokens=turn.prompt[1:], kv=turn.kv)
        self._check_routes(prompt, found[1:count])
        self._check_routes(turn, found[count:])
        assert turn.masks_in_files is not None
        masks, drawn = read_masks(turn.masks_in_files)
        if not drawn.all():
            raise Wrong(f"masks are known at {drawn.tolist()}: {turn}")
        self._check_masks(turn, masks)

    def _check_routes(self, turn: Turn, found: list[bytes]) -> None:
        assert turn.kv is not None
        expected = self._oracle.expected_of(turn, len(turn.tokens), turn.kv)
        for number, (_, route, _) in enumerate(expected):
            # Experts ascend in a file.
            if bytes(sorted(route)) != found[number]:
                raise Wrong(
                    f"a file has the route {found[number]!r} for token {number}, not {route!r}: {turn}"
                )

    def _check_masks(self, turn: Turn, found: SamplingMasks) -> None:
        assert turn.kv is not None
        expected = self._oracle.expected_of(turn, len(turn.tokens), turn.kv)
        for number, (_, _, mask) in enumerate(expected):
            ids = list(kept_ids(mask, turn.tokens[number]) or ())
            if found.row(number).tolist() != ids:
                raise Wrong(f"a file has the mask {found.row(number)} for token {number}, not {ids}: {turn}")

    # -- what becomes of the files

    async def read_on(self) -> None:
        """Reads what earlier answers referred to, in whatever weather."""
        while not self._over:
            await asyncio.sleep(READ_S)
            if self._held:
                self._read_later(self._rng.choice(self._held))

    def _read_later(self, held: Held) -> None:
        gone = [path for path in held.files if f"{RECORDS}/{path}" not in self._bucket.objects]
        trouble = self._bucket.trouble
        try:
            self._read(held)
        except RecordFileGone as error:
            if not gone:
                raise Wrong(f"a file is there, and its reader says: {error}") from error
            self._count("records: gone, as its reader says")
        except RecordFileError as error:
            if not trouble.fails and not trouble.wrong:
                raise Wrong(f"a file cannot be read: {error}") from error
            self._count("records: not read")
        else:
            if gone:
                raise Wrong(f"{gone} are not there, and were read")
            self._count("records: read")

    async def end_well(self) -> None:
        """In calm weather old files go, and the others are whole. Raises Wrong."""
        bucket, until = self._bucket, self._bucket.now + CALM_S
        if bucket.keep_s is not None and bucket.keep_s < 60.0 and bucket.may_remove:
            oldest = bucket.now
            while any(kept.at < oldest for url, kept in bucket.objects.items() if not url.endswith(CLOCK)):
                if bucket.now > until:
                    raise Wrong(f"files stay for longer than {bucket.keep_s} s: {sorted(bucket.objects)[:3]}")
                await asyncio.sleep(LOOK_S)
            self._count("end: old record files are gone")
        for held in self._held:
            self._read_later(held)
        for url, kept in [*bucket.objects.items()]:
            self._check_name(url, kept)
        await self._ask_at_the_bound(bucket.now + CALM_S)
        self._count("end: record files are well")

    def _check_name(self, url: str, kept: Kept) -> None:
        """A torn file is there, and nobody was told of it, and nobody could read it."""
        name = url.removeprefix(FILES)
        if name == CLOCK:
            return
        if not is_file_name(name):
            raise Wrong(f"{url} is no name of a record file")
        path, sha256 = url.removeprefix(f"{RECORDS}/"), name.removesuffix(SUFFIX)
        if self._bucket.why_not_whole(path, sha256, len(kept.data)) is None:
            return
        self._count("records: torn, and nobody was told")
        forged = {"format": "midstream_records_v1", "file": path, "sha256": sha256, "bytes": len(kept.data)}
        try:
            read_reference(RECORDS, forged | {"rows": 0, "choices": []})
        except RecordFileError:
            return
        raise Wrong(f"{url} is torn, and was read")

    async def _ask_at_the_bound(self, until: float) -> None:
        """A bucket without room comes to take no more, and one with room to take all."""
        bucket, client, said = self._bucket, self.client(len(self._held)), ""
        while self._world.now < until:
            # Each replica may look meanwhile.
            await asyncio.sleep(LOOK_S)
            is_full = bucket.size >= bucket.bytes_max
            try:
                await client.turn_of("record-end", [3, 1, 4, 1, 5])
                said = "takes more"
            except Broken as error:
                said = str(error)
            if said == (FULL if is_full else "takes more"):
                self._count(f"end: the bucket is {'full' if is_full else 'not full'}")
                return
        raise Wrong(f"the bucket has {bucket.size} bytes of {bucket.bytes_max}: {said}")


class RecordClient(Rollout):
    """Wants the records of each turn by reference, in our own form or in Fireworks'."""

    records: Records

    def request(self, session: str, ids: list[int]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        body, headers = super().request(session, ids)
        body |= {"include_routing_matrix": True, "top_k": 20}
        if self._rng.random() < 0.5:
            return body | {"return_sampling_mask": True, "return_record_reference": True}, headers
        del body["include_routing_matrix"]
        body |= {"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1", "echo": True}
        most = self.records._bucket.keep_s
        stay_s = self._rng.choice((1, 2, 3)) if most is not None else 600
        headers += [("x-fireworks-r3-store-id", RECORDS), ("x-fireworks-r3-ttl-seconds", str(stay_s))]
        return body, headers

    async def _turn(self, session: str, ids: list[int]) -> Turn | None:
        try:
            return await self.turn_of(session, ids)
        except Broken as error:
            self._count(f"record turn: {str(error)[:60]}")
            return None

    async def turn_of(self, session: str, ids: list[int]) -> Turn:
        """Raises Broken, Wrong."""
        body, headers = self.request(session, ids)
        turn = await self.ask(body, headers)
        if turn.error is not None:
            if turn.error["code"] == NOT_STORED:
                raise self.records.refused(str(turn.error), turn.begun_at)
            if self.undisturbed():
                raise Wrong(f"a stream ended with an error: {turn}")
            raise Broken(f"error {turn.error['code']}")
        stay_s = float(dict(headers).get("x-fireworks-r3-ttl-seconds", 0.0))
        self.records.answered(turn, body, stay_s)
        return turn

    def _refused(self, status: int, text: bytes, *, pinned: bool) -> Exception:
        if status != 507:
            return super()._refused(status, text, pinned=pinned)
        assert self._part is not None
        told = json.loads(text)["error"]
        return self.records.refused(told["message"], self._part.begun_at)
