"""The oracle of all tests that recompute: plain transformers, which share nothing with an engine."""

from __future__ import annotations

from midstream.verify.reference import OWN_ROUTE, Passes, Recomputer

__all__ = ["OWN_ROUTE", "Passes", "Recomputer"]
