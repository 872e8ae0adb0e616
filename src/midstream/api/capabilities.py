"""What a deployment's engines can do: what a signal needs of them, and how they are shown. Pure.

Owns: which signals are refused when an engine lacks a feature.
Always holds: a deployment has a feature when every known replica of it has the feature. Of unknown replicas nothing is
claimed, and nothing is refused on their account.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from midstream.api import answers
from midstream.api.signals import SignalBody
from midstream.core.engine_words import engine_name, in_order, refusal
from midstream.core.errors import SnapshotRefused
from midstream.core.reports import ReplicaReport, Reported
from midstream.core.types import ENGINE_FEATURES, EngineCard, PolicyFate


class SignalNeed(NamedTuple):
    """words: what an engine without the feature does not do, as in `does not {words}`."""

    feature: str
    words: str


_MAX_AGE = SignalNeed("max_cache_age", "know how old cached KV is; signal all, new_session or none")
_POLICY = SignalNeed("cache_policies", "keep cached KV from being reused; signal none")
# What the fields of reset_prompt_cache need.
SIGNAL_NEEDS = (_MAX_AGE, _POLICY)
# What the field policy needs, and what a signal without it.
_SEVERAL = SignalNeed("policies", "serve adapters; serve a merged checkpoint in a deployment of its own")
FULL = SignalNeed("full_snapshots", "take full weights; signal a policy")
# What `keep` of the field policies needs, and what `rebase` excludes.
BASE = SignalNeed("policy_base", "keep another base for policies; signal rebase, end or refuse")


def check_signal(signal: SignalBody, reports: Iterable[Reported | None]) -> None:
    """Raises SnapshotRefused, which names the field, the engine and the feature, when a replica's engine cannot do what the
    signal asks for. reports: of the deployment's replicas, None of one that cannot be reached."""
    needs = [("reset_prompt_cache", need) for need in [_need(signal)] if need is not None]
    if signal.policy is not None:
        # Whatever its cache policy would need: this is what the signal is for.
        needs.insert(0, ("policy", _SEVERAL))
    else:
        needs.insert(0, ("identity", FULL))
    for card in _cards(reports):
        for param, need in needs:
            if not card.has(need.feature):
                raise SnapshotRefused(refusal(param, card, need.feature, need.words), param=param)
        if card.has("policies"):
            _check_fate(signal.policies, card)


def _check_fate(fate: PolicyFate | None, card: EngineCard) -> None:
    """Raises SnapshotRefused."""
    if fate == "keep" and not card.has(BASE.feature):
        raise SnapshotRefused(refusal("policies", card, BASE.feature, BASE.words), param="policies")
    if fate == "rebase" and card.has(BASE.feature):
        raise SnapshotRefused(
            f"policies: this deployment's engine ({engine_name(card)}) computes policies on the weights of the start "
            f"(feature {BASE.feature}); signal keep, end or refuse",
            param="policies",
        )


def fate_of_policies(signal: SignalBody, reports: Iterable[Reported | None]) -> PolicyFate | None:
    """What becomes of policies under full weights. A signal that does not say changes nothing for them.

    None: they are to keep their base, and no replica has said yet whether its engine can do that."""
    if signal.policies not in (None, "keep"):
        return signal.policies
    cards = _cards(reports)
    if not cards:
        return None
    kept = all(card.has(BASE.feature) for card in cards if card.has("policies"))
    return "keep" if kept else "refuse"


def _need(signal: SignalBody) -> SignalNeed | None:
    """A signal that does not say asks for `all`."""
    if signal.max_cache_age is not None:
        return _MAX_AGE
    return None if signal.reset == "none" else _POLICY


def engines(reports: Iterable[Reported | None]) -> answers.ModelEngines | UnsetType:
    """What a model's object says of the engines that serve it. UNSET while no engine is known.

    `engine` names the features that all of them have, and those that one or more of them lacks. Engines of several kinds or
    versions are named with commas. `why` has reasons for some that are lacking. `max_model_len` is the shortest.
    """
    heard = [report for report in reports if report is not None]
    cards = _cards(heard)
    if not cards:
        return UNSET
    common = set(ENGINE_FEATURES).intersection(*(card.features for card in cards))
    engine = answers.EngineShown(
        kind=_all(card.kind for card in cards),
        version=_all(card.version for card in cards),
        features=in_order(common),
        lacks=in_order(ENGINE_FEATURES.keys() - common),
        why={feature: reason for card in cards for feature, reason in card.why.items()} or UNSET,
    )
    return answers.ModelEngines(engine, max_model_len(heard))


def max_model_len(reports: Iterable[Reported | ReplicaReport | None]) -> int | UnsetType:
    """The shortest, in tokens; UNSET while no engine is known."""
    lengths = [
        report.max_model_len for report in reports if report is not None and report.max_model_len is not None
    ]
    return min(lengths) if lengths else UNSET


def engine_of(report: Reported | None) -> str | UnsetType:
    """The engine's name; UNSET while it is not known."""
    return UNSET if report is None or report.card is None else engine_name(report.card)


def _cards(reports: Iterable[Reported | None]) -> list[EngineCard]:
    return [report.card for report in reports if report is not None and report.card is not None]


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))
