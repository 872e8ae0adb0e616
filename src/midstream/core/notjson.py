"""What decoding JSON raises. Pure.

Always holds: whoever reads JSON of another process catches all of it, so that any bytes raise the reader's own error.
"""

from __future__ import annotations

import msgspec

#: Nested too deeply it is a RecursionError, and not UTF-8 in a text a UnicodeDecodeError.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
