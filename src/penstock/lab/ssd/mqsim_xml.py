"""MQSim's XML: its elements and their keys; keys that are never read are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from penstock.core.errors import ConfigError
from penstock.core.files import open_regular
from penstock.lab.ssd.control import Victim
from penstock.lab.ssd.description import nearest

_ALWAYS: Final = {
    "Memory_Type": "FLASH",
    "HostInterface_Type": "NVME",
    "Address_Mapping": "PAGE_LEVEL",
    "Use_Copyback_for_GC": "false",
    "Flash_Comm_Protocol": "NVDDR2",
    "Flash_Channel_Width": "1",
    "Enabled_Preconditioning": "false",
    "Initial_Occupancy_Percentage": "0",
    "Device_Level_Data_Caching_Mode": "TURNED_OFF",
    "Percentage_of_Hot_Region": "0",
    "Variance_Request_Size": "0",
    "CMT_Sharing_Mode": "SHARED",
    "Caching_Mechanism": "ADVANCED",
    "Data_Cache_Sharing_Mode": "SHARED",
    "Time_Unit": "NANOSECOND",
}
"""The only value that some keys have here; a key with another value is reported as ignored."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key that has no effect here."""

    key: str
    value: str


class Keys:
    """The leaves of an element by name; those that are never read count as ignored."""

    def __init__(self, path: str, element: ElementTree.Element) -> None:
        self._path = path
        self._values = {each.tag: (each.text or "").strip() for each in element if not len(each)}
        self._left = dict(self._values)

    def text(self, key: str) -> str:
        """Return the text of a key. Raises ConfigError if the file lacks it."""
        if key not in self._values:
            near = nearest(key, self._values)
            raise ConfigError(f"MQSim file {self._path!r} has no {key}{near}")
        self._left.pop(key, None)
        return self._values[key]

    def whole(self, key: str) -> int:
        """Return a whole number. Raises ConfigError if it is not one."""
        return self._number(key, int, "a whole number")

    def real(self, key: str) -> float:
        """Return a number. Raises ConfigError if it is not one."""
        return self._number(key, float, "a number")

    def has(self, key: str) -> bool:
        """Return True if the file has the key."""
        return key in self._values

    def says(self, key: str, text: str) -> bool:
        """Return True if the key has this text; the key may still count as ignored."""
        return self._values.get(key) == text

    def text_or(self, key: str, absent: str) -> str:
        """Return the text of a key, or the default of a file without it."""
        return self.text(key) if self.has(key) else absent

    def whole_or(self, key: str, absent: int) -> int:
        """Return a whole number, or the default."""
        return self.whole(key) if self.has(key) else absent

    def real_or(self, key: str, absent: float) -> float:
        """Return a number, or the default."""
        return self.real(key) if self.has(key) else absent

    def flag(self, key: str) -> bool:
        """Return True if the key is true; False if the file lacks it."""
        return self._left.pop(key, None) == "true"

    def one_of(self, key: str, known: dict[str, Victim] | dict[str, str]) -> str:
        """Return one of the known values. Raises ConfigError for others."""
        text = self.text(key)
        if text not in known:
            raise ConfigError(
                f"MQSim file {self._path!r}: {key} is {text!r}; it must be one of {', '.join(known)}"
            )
        return text

    def _number(self, key: str, kind: Callable[[str], float], what: str) -> int:
        text = self.text(key)
        try:
            value = kind(text)
            int(value)  # fails for infinity and NaN
            return value  # type: ignore[return-value]
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"MQSim file {self._path!r}: {key} is {text!r}, not {what}"
            ) from error

    def ignored(self) -> tuple[Ignored, ...]:
        """Return the keys that were not read, except those with the only value supported here."""
        left = ((key, value) for key, value in self._left.items())
        return tuple(Ignored(key, value) for key, value in left if _ALWAYS.get(key) != value)


def is_mqsim(path: str | Path) -> bool:
    """Return True if the file's name is like those of MQSim."""
    return Path(path).suffix.lower() == ".xml"


def parse(name: str, tag: str) -> ElementTree.Element:
    """Return the root of a file. Raises ConfigError if it cannot be read, or is of another kind."""
    try:
        with open(name, "rb", opener=open_regular) as file:
            root = ElementTree.parse(file).getroot()
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:
        raise ConfigError(f"cannot read the MQSim file {name!r}: {error}") from error
    if root.tag != tag:
        raise ConfigError(f"MQSim file {name!r} is a {root.tag}, not a {tag}")
    return root


def find(name: str, root: ElementTree.Element, tag: str) -> ElementTree.Element:
    """Return an element within another. Raises ConfigError if there is none."""
    found = root.find(tag)
    if found is None:
        raise ConfigError(f"MQSim file {name!r} has no {tag.removeprefix('.//')}")
    return found
