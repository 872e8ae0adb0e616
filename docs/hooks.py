"""For the site: a link to a file outside docs/ becomes the file's path, as the site has no such page."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{found[2]}`)", markdown)
