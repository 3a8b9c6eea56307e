"""A benchmark measured in several sittings: what is done is kept in a file, and not measured again.

Some figures take longer than a machine can be kept quiet. Each measurement is a part of its own with a
key, written as soon as it is there; a script that is started again with the same file goes on with what
is missing. All parts are of one commit: those of another are refused.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _results


class OutOfTimeError(Exception):
    """Nothing more is begun in this sitting."""


class Parts:
    """Measurements by key, some of them made before.

    Attributes:
        commit: What is measured.
    """

    def __init__(self, path: str | os.PathLike[str] | None, limit_s: float | None) -> None:
        """Read what is there.

        Args:
            path: Where parts are kept; None: nowhere, all is measured now.
            limit_s: After so many seconds nothing is begun any more; None: there is no limit.
        """
        self.commit = _results.commit()
        self._path = None if path is None else Path(path)
        self._limit_s = limit_s
        self._begun = time.monotonic()
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                part = json.loads(line)
                if part["commit"] != self.commit:
                    raise SystemExit(
                        f"{path} holds parts of commit {part['commit']}, and this is {self.commit}:"
                        " name another file"
                    )
                self._found[part["key"]] = part["value"]

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The part of this name: what is known, or else what ``measure`` returns.

        Raises:
            OutOfTimeError: It is not known, and the time is up.
        """
        if key not in self._found:
            if self._limit_s is not None and time.monotonic() - self._begun > self._limit_s:
                raise OutOfTimeError
            self._found[key] = measure()
            if self._path is not None:
                part = {"commit": self.commit, "key": key, "value": self._found[key]}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(part) + "\n")
        return self._found[key]
