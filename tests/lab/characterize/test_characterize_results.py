"""From figures to words, tables and pictures; and what is asked for, checked. Nothing is measured."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from characterize_records import record

from penstock import ConfigError, NoSpaceError
from penstock.lab import zoo
from penstock.lab.characterize import Settings, merge, plot, table
from penstock.lab.characterize.claims import claims
from penstock.lab.characterize.energy import EnergyMeter
from penstock.lab.characterize.experiment import document
from penstock.lab.characterize.networks import NETWORKS
from penstock.lab.characterize.scratch import PREFIX, check_free_space, scratch
from penstock.observe.summary_text import to_text

SCHEMA = json.loads(
    (Path(__file__).parents[3] / "docs" / "characterize.schema.json").read_text(encoding="utf-8")
)
MACHINE = {
    "cpu": "a processor", "cores": 2, "memory_bytes": 1 << 34, "device": "cpu", "processes": 1,
    "filesystem": "ext4", "energy": "unreported", "penstock": "0", "torch": "2", "python": "3",
}  # fmt: skip


def test_at_full_size_they_are_the_networks_of_the_poster():
    counts = {}
    with torch.device("meta"):
        for name, case in NETWORKS.items():
            network = zoo.build(case.zoo, **case.settings(1.0))
            counts[name] = sum(each.numel() for each in network.parameters())
    assert len(counts) == 9
    assert counts["resnet18"] == 11_689_512
    assert counts["resnet50"] == 25_557_032
    assert counts["googlenet"] == 13_004_888
    assert counts["alexnet"] == 61_100_840
    assert counts["vgg11"] == 132_863_336
    # positions are as many as a sequence has tokens: 128 instead of 512, 1024 and 2048
    assert counts["bert-base"] == 109_514_298 - (512 - 128) * 768
    assert counts["bert-large"] == 335_174_458 - (512 - 128) * 1024
    assert counts["gpt2"] == 124_439_808 - (1024 - 128) * 768
    assert counts["gpt-neo"] == 125_198_592 - (2048 - 128) * 768


def test_a_smaller_scale_is_a_smaller_network_and_the_same_batch():
    for case in NETWORKS.values():
        sizes = []
        for scale in (0.05, 0.25, 0.5, 1.0):
            with torch.device("meta"):
                network = zoo.build(case.zoo, **case.settings(scale))
            sizes.append(sum(each.numel() for each in network.parameters()))
            for name, value in case.fixed.items():
                assert getattr(network.config, name) == value
        assert sizes == sorted(set(sizes)), case.title


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"networks": ("resnet18", "resnet99")}, "'resnet99' is not one of the poster's nine"),
        ({"networks": ()}, "none is not one of"),
        ({"networks": ("gpt2", "gpt2")}, "twice"),
        ({"scale": 0.0}, "scale=0.0 is not between 0.05 and 1"),
        ({"scale": 1.5}, "scale=1.5"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"epochs": 0}, "epochs=0 must not be below 1"),
        ({"steps": 0}, "steps=0"),
        ({"colocate": -1}, "colocate=-1"),
        ({"parallel": "tensor"}, "parallel='tensor' is not none, ddp or pipeline"),
        ({"seconds": 0}, "seconds=0"),
        ({"directory": "/no/such/place"}, "does not exist"),
    ],
)
def test_senseless_settings_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        replace(Settings(), **wrong)


def test_claims_are_words_made_of_the_figures():
    small = record(stalls=(3.0, 2.0, 0.4), step_s=1.0)
    stall, latency, beside = claims([small])
    assert [each["verdict"] for each in (stall, latency, beside)] == ["confirmed"] * 3
    assert "torch.save 3.00%" in stall["words"]
    assert "in the background 0.40%" in stall["words"]
    assert stall["most"] == {"torch_save": 0.03, "sync": 0.02, "async": 0.004}

    bound_by_io = {"copies": 1.5, "cpu": 1.2, "memory": 1.2, "io": 3.0}
    dear = record("gpt2", "GPT-2", stalls=(9.0, 8.0, 0.4), beside=bound_by_io)
    dear["stages"][0]["checkpoint"]["sync"]["latency_s"] = 7.0
    stall, latency, beside = claims([small, dear])
    assert [each["verdict"] for each in (stall, latency, beside)] == ["contradicted"] * 3
    assert "1 of 2 stays within 5% with torch.save; GPT-2 does not." in stall["words"]
    assert "GPT-2 does not." in latency["words"]

    alone = record(beside={})
    assert claims([alone])[2]["verdict"] == "not measured"


def test_a_result_keeps_its_schema_in_tables_and_pictures_and_says_its_scale(tmp_path):
    settings = Settings(networks=("resnet18",), scale=0.5)
    made = document(settings, MACHINE, [record()])
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)
    text = to_text(table(made), width=110)
    assert "scale 0.5: blocks, heads" in text
    assert "ResNet-18" in text
    for claim in made["claims"]:
        assert claim["verdict"] in text
    plot(made, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    with pytest.raises(ConfigError, match="cannot write the picture"):
        plot(made, tmp_path / "figure.nothing")


def test_results_of_one_network_each_are_put_together():
    first = document(Settings(networks=("vgg11",)), MACHINE, [record("vgg11", "VGG11")])
    second = document(Settings(networks=("gpt2",)), MACHINE, [record("gpt2", "GPT-2")])
    both = merge([first, second])
    jsonschema.validate(json.loads(json.dumps(both)), SCHEMA)
    assert both["settings"]["networks"] == ["gpt2", "vgg11"]
    assert both["claims"] == claims(both["networks"])
    with pytest.raises(ConfigError, match="twice"):
        merge([first, first])
    with pytest.raises(ConfigError, match=r"scale=0\.25 and scale=0\.5"):
        merge([first, document(Settings(networks=("gpt2",), scale=0.5), MACHINE, [record("gpt2")])])
    with pytest.raises(ConfigError, match="different machines"):
        merge([first, second | {"machine": MACHINE | {"cores": 4}}])


def test_energy_is_modelled_from_busy_cores_where_no_counter_reports(tmp_path):
    stat, second = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  100 0 50 1000 7 1 2 40 60 0\ncpu0 1 1\n")
    meter = EnergyMeter(tmp_path, stat)
    assert "a model of the processor" in meter.source
    assert "10 W for each busy core" in meter.source
    assert meter.joules() == 0
    user, kernel = 100 + 3 * second, 50 + second  # what is idle, waits and is stolen does not count
    stat.write_text(f"cpu  {user} 0 {kernel} {9000 * second} {9 * second} 1 2 {8 * second} 70 0\n")
    assert meter.joules() == pytest.approx(10 * 4)
    meter.start()
    assert meter.joules() == 0
    mine = EnergyMeter(tmp_path)
    assert mine.joules() >= 0  # of this machine


def test_energy_is_what_counters_say_across_a_wrap_around(tmp_path):
    for name, value in (("intel-rapl:0", 9_000_000), ("intel-rapl:0:0", 5), ("intel-rapl:1", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    meter = EnergyMeter(tmp_path)
    assert meter.source == "RAPL, 2 packages"
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1000000\n")  # 1 J to its end, 1 J more
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500100\n")
    assert meter.joules() == pytest.approx(2.5)


def test_a_killed_runs_directory_is_removed_by_the_next_and_a_living_ones_is_not(disk_path):
    dead = disk_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / "state.pt").write_bytes(b"left")
    with scratch(str(disk_path)) as living:
        assert not dead.exists()
        with scratch(str(disk_path)) as other:
            assert living.exists()
            assert other != living
    assert not list(disk_path.iterdir())


def test_too_little_space_is_said_before_anything_is_saved(disk_path):
    with pytest.raises(NoSpaceError, match="choose a smaller scale"):
        check_free_space(disk_path, 1 << 60)
