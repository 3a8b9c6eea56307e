"""From figures to words, tables and pictures; and what is asked for, checked. Nothing is measured."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from characterize_records import mix, record

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
        ({"networks": ()}, "networks: there is none"),
        ({"networks": ("gpt2", "gpt2")}, "twice"),
        ({"scale": 0.0}, "scale=0.0 is not between 0.05 and 1"),
        ({"scale": 1.5}, "scale=1.5"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"epochs": 0}, "epochs=0 must not be below 1"),
        ({"steps": 0}, "steps=0"),
        ({"threads": 0}, "threads=0"),
        ({"colocate": -1}, "colocate=-1"),
        ({"parallel": "tensor"}, "parallel='tensor' is not none, ddp or pipeline"),
        ({"seconds": 0}, "seconds=0"),
        ({"mix": ("gpt2",)}, "mix: gpt2 is one network; name two or more"),
        ({"mix": ("gpt2", "gpt3")}, "mix: 'gpt3' is not one of"),
        ({"mix": ("gpt2", "gpt2")}, "mix: gpt2, gpt2 names one of them twice"),
        ({"mix": ("gpt2", "vgg11"), "parallel": "ddp"}, "mix does not go with parallel='ddp'"),
        ({"directory": "/no/such/place"}, "does not exist"),
    ],
)
def test_senseless_settings_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        replace(Settings(), **wrong)


def test_claims_are_words_made_of_the_figures():
    small = record("gpt2", "GPT-2", stalls=(3.0, 2.0, 0.4), step_s=1.0)
    other = record("bert-large", "BERT-Large", stalls=(0.5, 0.4, 0.3), step_s=1.0)
    stall, latency, beside, growth, mixed = claims([small, other], {})
    assert [each["verdict"] for each in (stall, latency, beside)] == ["confirmed"] * 3
    assert [each["verdict"] for each in (growth, mixed)] == ["not measured"] * 2
    assert "torch.save 0.50% (BERT-Large) to 3.00% (GPT-2)" in stall["words"]
    assert "in the background 0.30%" in stall["words"]
    assert stall["most"] == {"torch_save": 0.03, "sync": 0.02, "async": 0.004}

    bound_by_io = {"copies": 1.5, "cpu": 1.2, "memory": 1.2, "io": 3.0}
    dear = record("bert-base", "BERT-Base", stalls=(9.0, 0.9, 0.4), beside=bound_by_io)
    dear["stages"][0]["checkpoint"]["sync"]["latency_s"] = 7.0
    stall, latency, beside, _, _ = claims([small, dear], {})
    assert [each["verdict"] for each in (stall, latency, beside)] == ["contradicted"] * 3
    assert (
        "Below the poster's limits (GPT-2 5%, BERT-Base 1%) are 1 of 2 with torch.save,"
        in stall["words"]
    )
    assert "2 of 2 with ours, 2 of 2 with ours in the background." in stall["words"]
    assert "BERT-Base does not." in latency["words"]

    alone = record(beside={})
    stall, _, beside, _, _ = claims([alone], {})
    assert [stall["verdict"], beside["verdict"]] == ["not measured"] * 2
    assert "torch.save 0.10%" in stall["words"]  # of which the poster says nothing


def test_the_first_claim_is_judged_by_the_posters_own_figures():
    for shares, verdict in (
        ({"bert-base": 0.9, "gpt2": 4.9}, "confirmed"),
        ({"bert-base": 0.9, "gpt2": 4.9, "vgg11": 9.0}, "confirmed"),
        ({"bert-base": 0.9, "bert-large": 1.1, "gpt2": 4.9}, "contradicted"),
        ({"bert-base": 0.9, "gpt2": 5.1}, "contradicted"),
        ({"gpt2": 5.1}, "contradicted"),
        ({"gpt2": 4.9}, "not measured"),  # of BERT nothing is known
        ({"vgg11": 9.0}, "not measured"),
    ):
        records = [record(name, name, stalls=(share, 0.1, 0.1)) for name, share in shares.items()]
        assert claims(records, {})[0]["verdict"] == verdict, shares


def test_growth_is_judged_by_the_larger_of_two_networks_of_one_kind():
    def grown(name, larger, share):
        small = record(name, name, stalls=(0.5, 0.2, 0.1))
        large = record(larger, larger, stalls=(share, 0.2, 0.1))
        large["parameters"] = 3_000_000
        return claims([large, small], {})[3]

    growth = grown("bert-base", "bert-large", 0.6)
    assert growth["verdict"] == "confirmed"
    assert "from bert-base (1 million parameters) to bert-large (3 million" in growth["words"]
    assert "torch.save 0.50% to 0.60%, ours 0.20% to 0.20%" in growth["words"]
    growth = grown("bert-base", "bert-large", 1.5)
    assert growth["verdict"] == "contradicted"
    assert growth["words"].endswith("bert-large does not.")
    assert grown("resnet18", "resnet50", 4.9)["verdict"] == "confirmed"
    assert grown("resnet18", "resnet50", 5.1)["verdict"] == "contradicted"


def test_a_mix_is_judged_by_what_grows_more_the_step_or_the_stall():
    easy = claims([], mix())[4]
    assert easy["verdict"] == "confirmed"
    assert "steps take 3.00 times as long as alone" in easy["words"]
    assert "2.00 times with torch.save, 1.50 times with ours" in easy["words"]
    assert claims([], mix(stalls=(4.0, 1.0, 1.0)))[4]["verdict"] == "contradicted"
    assert {each["verdict"] for each in claims([], mix())[:4]} == {"not measured"}


def test_a_result_keeps_its_schema_in_tables_and_pictures_and_says_its_scale(tmp_path):
    settings = Settings(networks=("resnet18",), scale=0.5)
    made = document(settings, MACHINE, [record()], {})
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


def test_a_mix_alone_is_a_result_with_a_table_and_a_picture(tmp_path):
    settings = Settings(networks=(), mix=("gpt2", "resnet18"))
    made = document(settings, MACHINE, [], mix())
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)
    assert Settings.from_json(made["settings"], ".") == replace(settings, steps=25)
    text = to_text(table(made), width=110)
    assert "Different networks at the same time" in text
    assert "1.50 s" in text
    assert "DRAM of a job" not in text
    plot(made, tmp_path / "figure.svg")
    assert "at the same time" in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_results_of_one_network_each_are_put_together():
    first = document(Settings(networks=("vgg11",)), MACHINE, [record("vgg11", "VGG11")], {})
    second = document(Settings(networks=("gpt2",)), MACHINE, [record("gpt2", "GPT-2")], {})
    both = merge([first, second])
    jsonschema.validate(json.loads(json.dumps(both)), SCHEMA)
    assert both["settings"]["networks"] == ["gpt2", "vgg11"]
    assert both["claims"] == claims(both["networks"], {})
    together = document(Settings(networks=(), mix=("gpt2", "resnet18")), MACHINE, [], mix())
    all_three = merge([first, together, second])
    jsonschema.validate(json.loads(json.dumps(all_three)), SCHEMA)
    assert all_three["mix"] == mix()
    assert all_three["settings"]["mix"] == ["gpt2", "resnet18"]
    assert all_three["claims"] == claims(both["networks"], mix())
    with pytest.raises(ConfigError, match="only one may have a mix"):
        merge([together, together])
    for each in (first, second):  # as files from before there was a mix
        del each["mix"], each["settings"]["mix"]
    assert merge([first, together, second]) == all_three
    with pytest.raises(ConfigError, match="twice"):
        merge([first, first])
    with pytest.raises(ConfigError, match=r"scale=0\.25 and scale=0\.5"):
        merge(
            [
                first,
                document(Settings(networks=("gpt2",), scale=0.5), MACHINE, [record("gpt2")], {}),
            ]
        )
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
