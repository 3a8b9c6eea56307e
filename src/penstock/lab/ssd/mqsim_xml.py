"""MQSim's XML: its elements and their keys, of which those that nobody asks for are named."""

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
"""What there is one value of, here: with another the key is named as ignored, with this it is not."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key that has no effect here."""

    key: str
    value: str


class Keys:
    """The leaves of an element by name; those that nobody asks for are ignored."""

    def __init__(self, path: str, element: ElementTree.Element) -> None:
        self._path = path
        self._values = {each.tag: (each.text or "").strip() for each in element if not len(each)}
        self._left = dict(self._values)

    def text(self, key: str) -> str:
        """What it says. Raises ConfigError: the file lacks it."""
        if key not in self._values:
            near = nearest(key, self._values)
            raise ConfigError(f"MQSim file {self._path!r} has no {key}{near}")
        self._left.pop(key, None)
        return self._values[key]

    def whole(self, key: str) -> int:
        """A whole number. Raises ConfigError: it is none."""
        return self._number(key, int, "a whole number")

    def real(self, key: str) -> float:
        """A number. Raises ConfigError: it is none."""
        return self._number(key, float, "a number")

    def has(self, key: str) -> bool:
        """Whether the file has it."""
        return key in self._values

    def says(self, key: str, text: str) -> bool:
        """Whether the file says so; that alone does not keep the key from being ignored."""
        return self._values.get(key) == text

    def text_or(self, key: str, absent: str) -> str:
        """What it says, or what a file that lacks it means."""
        return self.text(key) if self.has(key) else absent

    def whole_or(self, key: str, absent: int) -> int:
        """The same of a whole number."""
        return self.whole(key) if self.has(key) else absent

    def real_or(self, key: str, absent: float) -> float:
        """The same of a number."""
        return self.real(key) if self.has(key) else absent

    def flag(self, key: str) -> bool:
        """Whether it says true; a file that lacks it says false."""
        return self._left.pop(key, None) == "true"

    def one_of(self, key: str, known: dict[str, Victim] | dict[str, str]) -> str:
        """One of those known. Raises ConfigError: it is none."""
        text = self.text(key)
        if text not in known:
            raise ConfigError(
                f"MQSim file {self._path!r}: {key} is {text!r}; known here are {', '.join(known)}"
            )
        return text

    def _number(self, key: str, kind: Callable[[str], float], what: str) -> int:
        text = self.text(key)
        try:
            value = kind(text)
            int(value)  # which infinity has not, nor what is no number
            return value  # type: ignore[return-value]
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"MQSim file {self._path!r}: {key} is {text!r}, not {what}"
            ) from error

    def ignored(self) -> tuple[Ignored, ...]:
        """What has not been asked for, but for what is as this simulator is."""
        left = ((key, value) for key, value in self._left.items())
        return tuple(Ignored(key, value) for key, value in left if _ALWAYS.get(key) != value)


def is_mqsim(path: str | Path) -> bool:
    """Whether a file is named as MQSim's are."""
    return Path(path).suffix.lower() == ".xml"


def parse(name: str, tag: str) -> ElementTree.Element:
    """The root of a file. Raises ConfigError: it cannot be read, or is another's."""
    try:
        with open(name, "rb", opener=open_regular) as file:
            root = ElementTree.parse(file).getroot()
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:
        raise ConfigError(f"MQSim file {name!r} cannot be read: {error}") from error
    if root.tag != tag:
        raise ConfigError(f"MQSim file {name!r} is a {root.tag}, not a {tag}")
    return root


def find(name: str, root: ElementTree.Element, tag: str) -> ElementTree.Element:
    """An element in another. Raises ConfigError: there is none."""
    found = root.find(tag)
    if found is None:
        raise ConfigError(f"MQSim file {name!r} has no {tag.removeprefix('.//')}")
    return found
