"""MQSim's own figures, of points that were drawn at random (benchmarks/peers/mqsim.py)."""

import json
from pathlib import Path

import pytest
from mqsim_files import files

from penstock.lab.ssd import with_field
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.mqsim import read_device
from penstock.lab.ssd.mqsim_flows import read_workload

POINTS = json.loads((Path(__file__).parent / "mqsim.json").read_text(encoding="utf-8"))["points"]
FAST = {"collection 6", "collection 7", "collection 15"}
"""Of the points with garbage collection: the others are slow."""


def of_kind(kind):
    return [point for point in POINTS if point["kind"] == kind]


def run(point, tmp_path):
    device, _ = read_device(files(tmp_path, point["device"], point["flows"])[0])
    device = with_field(device, "ftl.streams", len(point["flows"]))
    (scenario,) = read_workload(tmp_path / "workload.xml")
    drive = Drive(device)
    return drive.serve_flows(
        [(flow.stream(device, drive.events), flow.queue_depth) for flow in scenario.flows]
    )


def compare(one, its, within):
    assert one.latency.mean_ps / 1000 == pytest.approx(its["mean_ns"], rel=within)
    assert one.iops == pytest.approx(its["served"] / its["end_ns"] * 1e9, rel=within)


@pytest.mark.parametrize("point", of_kind("plain"), ids=lambda point: point["name"])
def test_latency_and_rate(point, tmp_path):
    one = run(point, tmp_path)
    # two flows at once get pages of one plane in another order now and then
    compare(one, point["mqsim"], 1e-5 if len(point["flows"]) == 1 else 0.02)


@pytest.mark.parametrize("point", of_kind("cache"), ids=lambda point: point["name"])
def test_waits_for_the_write_cache(point, tmp_path):
    one = run(point, tmp_path)
    assert one.cache_use is not None
    compare(one, point["mqsim"], 0.02)


@pytest.mark.parametrize("point", of_kind("map"), ids=lambda point: point["name"])
def test_misses_of_the_map(point, tmp_path):
    one = run(point, tmp_path)
    assert one.map_use.reads
    # what waits for one page of the map goes on in another order, which many of them feel
    many = point["flows"][0]["Average_No_of_Reqs_in_Queue"] == 256
    compare(one, point["mqsim"], 0.15 if many else 0.03)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point, marks=[] if point["name"] in FAST else [pytest.mark.slow], id=point["name"]
        )
        for point in of_kind("collection")
    ],
)
def test_write_amplification(point, tmp_path):
    one, its = run(point, tmp_path), point["mqsim"]
    written = point["flows"][0]["Total_Requests_To_Generate"]
    # random victims are others here and there, and differ as much from seed to seed
    within = 0.01 if point["device"]["GC_Block_Selection_Policy"] == "GREEDY" else 0.05
    assert one.write_amplification == pytest.approx(1 + its["moved"] / written, rel=within)
    if not its["lost"]:  # else MQSim's depth has shrunk
        compare(one, its, within)
