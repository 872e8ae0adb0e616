"""The values that settings may have, as types. The end of an error that a value outside them gets is their description."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

FINITE = sys.float_info.max
SIZE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
SIZE_PATTERN = r"^([0-9]+(?:\.[0-9]+)?) ?(KiB|MiB|GiB|kB|MB|GB)\Z"
SIZE_EXPECTED = f"expected a number and one of {', '.join(SIZE_UNITS)}"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
NAME_EXPECTED = "expected letters, digits, '.', '_' and '-', at most 128"

Positive = Annotated[float, Meta(gt=0, le=FINITE, description="must be above 0 and finite")]
NotNegative = Annotated[float, Meta(ge=0, le=FINITE, description="must be at least 0 and finite")]
Seconds = Annotated[float, Meta(ge=1, le=FINITE, description="must be at least 1 and finite")]
Count = Annotated[int, Meta(ge=1, description="must be at least 1")]
CountOrZero = Annotated[int, Meta(ge=0, description="must be at least 0")]
Size = Annotated[str, Meta(pattern=SIZE_PATTERN, description=SIZE_EXPECTED)]
Port = Annotated[int, Meta(ge=0, le=65535, description="must be 0 to 65535")]
Name = Annotated[str, Meta(pattern=NAME_PATTERN, description=NAME_EXPECTED)]
Weight = Annotated[float, Meta(gt=0, le=1e6, description="must be above 0 and at most 1e6")]
BaseModel = Annotated[
    str,
    Meta(
        pattern=r"(?s)^(?=\S)(?=.*\S\Z).{1,1024}\Z",
        description="must hold names of 1 to 1024 characters, without blanks around them",
    ),
]
Backend = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]*\Z", description="must be the name of a backend")]
VllmUrl = Annotated[
    str, Meta(pattern=r"^http://[^/\s]+:[0-9]+\Z", description="must be of the form http://HOST:PORT")
]
