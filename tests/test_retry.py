"""Which answers a retry may cure, and how long it waits."""

from __future__ import annotations

import email.utils

import pytest

from midstream.core import errors
from midstream.core.http_answer import MESSAGE_CHARS_MAX, HttpAnswer, NotThatAnswer
from midstream.core.retry import OUTCOMES, Backoff, Deadline, asked_pause_s, outcome_of


def tree(root: type[errors.MidstreamError]) -> list[type[errors.MidstreamError]]:
    below = [one for child in root.__subclasses__() for one in tree(child)]
    return [one for one in (root, *below) if one.__module__ == errors.__name__]


#: Errors with a Retry-After whose status alone does not say that a retry helps.
BY_THEIR_WORDS = {errors.SnapshotNotServed, errors.BodiesTooLarge, errors.RecordsNotStored}


@pytest.mark.parametrize("error", tree(errors.MidstreamError), ids=lambda error: error.__name__)
def test_the_table_agrees_with_the_error_tree(error: type[errors.MidstreamError]) -> None:
    outcome = outcome_of(error.status)
    if error.retry_after_s is not None and error not in BY_THEIR_WORDS:
        assert outcome in ("busy", "absent")
    elif error is not errors.RequestTimeout:
        assert outcome == ("failed" if error.status >= 500 else "refused")


def test_any_status_has_an_outcome() -> None:
    found = {outcome_of(status): status for status in (200, 202, 301, 404, 429, 500, 503, 599)}
    assert found == {"done": 202, "refused": 404, "busy": 429, "failed": 599, "absent": 503}
    assert {408, 425, 429, 502, 503, 504} == OUTCOMES.keys()


def test_pauses_double_up_to_the_last() -> None:
    backoff = Backoff(first_s=0.25, last_s=10.0)
    assert [backoff.pause_s(failures) for failures in range(1, 8)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert backoff.pause_s(10**6) == 10.0
    assert (backoff.pause_s(3, asked_s=30.0), backoff.pause_s(3, asked_s=0.0)) == (30.0, 1.0)


def test_a_deadline_counts_from_its_beginning() -> None:
    now = [100.0]
    deadline = Deadline(3.0, lambda: now[0])
    now[0] += 2
    assert (deadline.left_s, deadline.allows(1.0), deadline.allows(1.1)) == (1.0, True, False)
    now[0] += 2
    assert (deadline.left_s, deadline.allows(0.0)) == (-1.0, False)


def test_retry_after_is_read_in_both_of_its_forms() -> None:
    now = 1_700_000_000.0
    date = email.utils.formatdate(now + 7, usegmt=True)
    given = ["3", " 3 ", date, email.utils.formatdate(now - 7, usegmt=True), "soon", ""]
    assert [asked_pause_s(value, now) for value in given] == [3.0, 3.0, 7.0, 0.0, None, None]


@pytest.mark.parametrize(
    "date", ["01 Jan 99999999999999999999 00:00:00 GMT", "01 Jan 2026 00:00 +9999999999999"]
)
def test_a_date_that_no_clock_reaches_asks_for_no_pause(date: str) -> None:
    assert asked_pause_s(f"Thu, {date}", 0.0) is None


def test_an_answer_says_why_in_the_servers_words() -> None:
    def message(body: bytes) -> str:
        return HttpAnswer(503, {}, body).message

    assert message(b'{"error": {"message": "no replica"}}') == "no replica"
    assert message(b"<html>Bad gateway</html>") == "<html>Bad gateway</html>"
    assert message(b'{"error": "no replica"}') == '{"error": "no replica"}'
    assert message(b"\xff" + b"a" * 1000) == "\ufffd" + "a" * 199
    assert len(message(b'{"error": {"message": "%s"}}' % (b"a" * 5000))) == MESSAGE_CHARS_MAX


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"[1]"])
def test_another_answer_is_refused(body: bytes) -> None:
    with pytest.raises(NotThatAnswer):
        HttpAnswer(200, {}, body).read(dict[str, int])
    assert HttpAnswer(200, {}, b'{"a": 1}').read(dict[str, int]) == {"a": 1}
