"""The configuration: whether a codec exists is checked when a session opens, its form is checked here."""

import pytest

from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["auto", "none", "zero-value", "int8", "zero-value+bfloat16", "csr+float8+byteplane"]
)
def test_a_codec_is_a_name_or_a_chain_of_them(name):
    assert OffloadConfig(codec=name, host_memory="1MiB").codec == name


def test_codecs_are_chosen_by_measurement_unless_told_otherwise():
    assert OffloadConfig().codec == "auto"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Zero-Value",
        "zero value",
        "zero-value+",
        "+int8",
        "a++b",
        "-a",
        "a-",
        "a_b",
        "é",
        "a\n",
        8,
    ],
)
def test_what_cannot_be_a_name_is_refused_with_examples(name):
    with pytest.raises(ConfigError, match=r"codec is .*; it is 'auto', 'none', .*'zero-value\+bfl"):
        OffloadConfig(codec=name, host_memory="1MiB")


def test_a_named_codec_needs_somewhere_to_spill_to():
    with pytest.raises(
        ConfigError, match="codec 'int8' is set, but there is no tier to offload to"
    ):
        OffloadConfig(codec="int8")
    assert OffloadConfig(codec="none").codec == "none"


def test_it_can_be_set_in_a_file(tmp_path):
    path = tmp_path / "offload.toml"
    path.write_text('[offload]\ncodec = "narrow"\nflash = "."\n')
    assert OffloadConfig.from_toml(path).codec == "narrow"
    path.write_text('[offload]\ncodec = "No"\nflash = "."\n')
    with pytest.raises(ConfigError, match=r"offload\.toml: codec is 'No'"):
        OffloadConfig.from_toml(path)


@pytest.mark.parametrize("files", [0, -1, 2.5, "3", True])
def test_an_event_log_has_a_whole_number_of_files(files):
    with pytest.raises(ConfigError, match=r"event_log_files is .*whole number, at least 1"):
        OffloadConfig(event_log_files=files)


def test_the_size_of_a_file_of_the_event_log_is_a_size():
    assert OffloadConfig(event_log_size="1MiB").event_log_bytes == 1 << 20
    with pytest.raises(ConfigError, match="event_log_size must be more than 0 bytes"):
        OffloadConfig(event_log_size=0)
