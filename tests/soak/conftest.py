from __future__ import annotations

import soakpath  # noqa: F401
