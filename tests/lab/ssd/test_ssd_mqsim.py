"""MQSim's files as input, and MQSim's own figures: the same addresses, so nearly the same picoseconds."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqsim_files import files, xml

from penstock.cli import main
from penstock.core.errors import ConfigError, PenstockError
from penstock.lab.ssd import load
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.mqsim import read_device
from penstock.lab.ssd.mqsim_flows import read_workload
from penstock.lab.ssd.mqsim_random import MqsimRandom
from tries import tries

TLC = {
    "Flash_Technology": "TLC", "Page_Read_Latency_LSB": 50000, "Page_Read_Latency_MSB": 100000,
    "Page_Program_Latency_LSB": 500000, "Page_Program_Latency_CSB": 900000,
    "Page_Program_Latency_MSB": 1500000, "Plane_No_Per_Die": 4, "Die_No_Per_Chip": 1,
}  # fmt: skip


def run(tmp_path, device=None, flows=None):
    config, work = files(tmp_path, device, flows)
    made, _ = read_device(config)
    (scenario,) = read_workload(work)
    streams = [(flow.stream(made), flow.queue_depth) for flow in scenario.flows]
    return Drive(made).serve_flows(streams)


def flow(reads, depth, sectors, count, **more):
    return {
        "Read_Percentage": reads, "Average_No_of_Reqs_in_Queue": depth,
        "Average_Request_Size": sectors, "Total_Requests_To_Generate": count, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "work", "mean_us", "iops"),
    [
        ({}, flow(100, 256, 16, 1500), 1180.28, 181026),
        ({}, flow(0, 16, 16, 1000), 971.41, 15838),
        ({}, flow(50, 64, 16, 1000), 1047.54, 52469),
        ({}, flow(100, 32, 8, 1000, Address_Alignment_Unit=8), 159.89, 186279),
        ({}, flow(50, 32, 32, 600, Generated_Aligned_Addresses="false"), 1576.25, 18554),
        (
            {"Plane_Allocation_Scheme": "PDCW"},
            flow(0, 8, 128, 300, Address_Distribution="STREAMING"),
            *(2111.55, 3722),
        ),
        (TLC, flow(50, 64, 16, 1000), 771.21, 65492),
        ({"Flash_Channel_Count": 2, "Page_Capacity": 16384}, flow(70, 16, 16, 800), 786.02, 19262),
        (
            {"Page_Capacity": 4096, "Flash_Channel_Count": 2},
            flow(
                50,
                32,
                1,
                1000,
                Address_Distribution="STREAMING",
                Address_Alignment_Unit=1,
                Generated_Aligned_Addresses="false",
            ),
            *(1923.09, 15694),
        ),
        (
            {
                **{"Flash_Technology": "SLC", "Chip_No_Per_Channel": 2, "Die_No_Per_Chip": 1},
                **{"Plane_No_Per_Die": 4, "Plane_Allocation_Scheme": "CPDW"},
            },
            flow(30, 64, 8, 1000, Address_Distribution="STREAMING", Address_Alignment_Unit=8),
            *(1517.10, 39160),
        ),
    ],
    ids=(
        *("reads, depth 256", "writes, depth 16", "mixed, depth 64", "4 KiB reads", "unaligned"),
        *("sequential writes, PDCW", "TLC of four planes", "two channels"),
        *("single sectors in sequence", "half pages in sequence"),
    ),
)
def test_what_mqsim_itself_gives(device, work, mean_us, iops, tmp_path):
    """Latency and rate that MQSim's newest source gave for the same files."""
    one = run(tmp_path, device, [work])
    assert one.latency.mean_ps / 1e6 == pytest.approx(mean_us, rel=0.005)
    assert one.iops == pytest.approx(iops, rel=0.005)


@pytest.mark.parametrize(
    ("policy", "working_set", "amplification", "iops"),
    [("GREEDY", 86, 1.3549, 878.9), ("RGA", 65, 1.1883, 1018.3)],
)
@pytest.mark.slow
def test_write_amplification_and_rate_under_garbage_collection(
    policy, working_set, amplification, iops, tmp_path
):
    """As MQSim's for the same files. Deeper queues are not compared: MQSim loses requests there."""
    device = {
        **{"Flash_Channel_Count": 2, "Chip_No_Per_Channel": 1, "Die_No_Per_Chip": 1},
        **{"Plane_No_Per_Die": 1, "Page_No_Per_Block": 64, "GC_Block_Selection_Policy": policy},
    }
    one = run(tmp_path, device, [flow(0, 1, 16, 60_000, Working_Set_Percentage=working_set)])
    assert one.write_amplification == pytest.approx(amplification, rel=0.02)
    assert one.iops == pytest.approx(iops, rel=0.02)


# -- traces -----------------------------------------------------------------------------------------


def traced(tmp_path, lines, **keys):
    (tmp_path / "a.trace").write_text(lines)
    told = {"File_Path": "a.trace", "Percentage_To_Be_Executed": 100, "Relay_Count": 1, **keys}
    config, work = files(tmp_path)
    tag = "IO_Flow_Parameter_Set_Trace_Based"
    flow = f"<{tag}>{xml(told)}</{tag}>"
    work.write_text(f"<MQSim_IO_Scenarios><IO_Scenario>{flow}</IO_Scenario></MQSim_IO_Scenarios>")
    made, _ = read_device(config)
    (scenario,) = read_workload(work)
    return list(scenario.flows[0].stream(made)), scenario.ignored


LINES = "1000 0 64 16 1\n5000 0 128 8 0\n9000 0 0 8 1\n9500 0 8 8 1\n"


def test_a_trace_flow_is_replayed_as_mqsim_does(tmp_path):
    requests, ignored = traced(tmp_path, LINES)
    told = [(each.arrival_ps, each.is_read, each.offset_bytes, each.nbytes) for each in requests]
    assert told == [
        (1_000_000, True, 64 * 512, 16 * 512),
        (5_000_000, False, 128 * 512, 8 * 512),
        (9_000_000, True, 0, 8 * 512),
        (9_500_000, True, 8 * 512, 8 * 512),
    ]
    assert ignored == ()


def test_a_share_of_a_trace_and_several_rounds(tmp_path):
    assert len(traced(tmp_path, LINES, Percentage_To_Be_Executed=50)[0]) == 2
    twice, _ = traced(tmp_path, LINES, Relay_Count=2)
    # the second round begins when the last request of the first has come
    assert [each.arrival_ps for each in twice[4:]] == [
        10_500_000,
        14_500_000,
        18_500_000,
        19_000_000,
    ]


def test_addresses_of_a_trace_stay_in_their_flows_part(tmp_path):
    config, _ = files(tmp_path)
    made, _ = read_device(config)
    sectors = int(made.geometry.pages_per_plane * 16 * 0.93) * made.geometry.planes
    requests, _ = traced(tmp_path, f"0 0 {sectors + 5} 8 1\n0 0 {sectors - 1} 8 1\n")
    assert requests[0].offset_bytes == 6 * 512
    assert requests[1].offset_bytes == (sectors - 8) * 512


def test_a_trace_runs_beside_another_flow_by_the_command(tmp_path, capsys):
    (tmp_path / "a.trace").write_text(LINES)
    config, work = files(tmp_path, flows=[{"Total_Requests_To_Generate": 20}])
    tag = "IO_Flow_Parameter_Set_Trace_Based"
    keys = {
        "File_Path": str(tmp_path / "a.trace"),
        "Percentage_To_Be_Executed": 100,
        "Relay_Count": 1,
    }
    also = f"<{tag}>{xml({**keys, 'Time_Unit': 'PICOSECOND'})}</{tag}></IO_Scenario>"
    work.write_text(work.read_text().replace("</IO_Scenario>", also))
    assert main(["ssd", "run", str(config), str(work)]) == 0
    captured = capsys.readouterr()
    assert "24 in" in captured.out
    assert "Time_Unit (PICOSECOND)" in captured.err  # MQSim reads nanoseconds, whatever is said


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"File_Path": "none.trace"}, "there is no trace"),
        ({"Percentage_To_Be_Executed": 0}, "it must be 1 to 100"),
        ({"Relay_Count": 0}, "it must be 1 or more"),
    ],
)
def test_trace_flows_that_make_no_sense_are_refused(keys, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        traced(tmp_path, LINES, **keys)


@pytest.mark.parametrize(
    ("seed", "first"),
    [(798, 31377040), (1, 9293872), (12345, 33527808), (199, 886528), (400, 31140544)],
)
def test_streams_begin_where_mqsim_begins_them(seed, first, tmp_path):
    work = flow(0, 1, 128, 1, Address_Distribution="STREAMING", Seed=seed)
    config, path = files(tmp_path, flows=[work])
    made, _ = read_device(config)
    (request,) = read_workload(path)[0].flows[0].stream(made)
    assert request.offset_bytes == first * 512


def test_random_numbers_are_even():
    stream = MqsimRandom(7)
    drawn = [stream.next() for _ in range(4000)]
    assert 0 < min(drawn) < 0.002
    assert 0.998 < max(drawn) <= 1
    assert sum(drawn) / 4000 == pytest.approx(0.5, abs=0.02)


def test_its_default_device_is_ours(tmp_path):
    made, ignored = read_device(files(tmp_path, {"Block_No_Per_Plane": 2048})[0])
    ours = load("mqsim-default")
    assert made.geometry == ours.geometry
    assert (made.cell.read_ns, made.channel, made.link, made.ftl) == (
        *(ours.cell.read_ns, ours.channel, ours.link, ours.ftl),
    )
    assert {each.key for each in ignored} == {"SATA_Processing_Delay", "Seed"}


def test_a_cached_map_is_read(tmp_path):
    """As many entries as MQSim's memory holds, as many in a page as it has there, and a sector a miss."""
    keys = {"Ideal_Mapping_Table": "false", "CMT_Capacity": 2097152, "CMT_Sharing_Mode": "SHARED"}
    made, ignored = read_device(files(tmp_path, {**keys, "Block_No_Per_Plane": 2048})[0])
    ftl = made.ftl
    # 2**26 pages of 16 sectors: 26 + 16 bits on flash, and 26 more in memory
    assert ftl.map_entry_bytes == 6
    assert ftl.map_cache_bytes // ftl.map_entry_bytes == 2097152 // 9
    assert ftl.map_read_bytes == 512
    assert ftl.map_stored
    assert not {each.key for each in ignored} & set(keys)
    ideal, ignored = read_device(files(tmp_path, {**keys, "Ideal_Mapping_Table": "true"})[0])
    assert ideal.ftl.map_cache_bytes == ideal.ftl.map_read_bytes == 0
    assert not {each.key for each in ignored} & set(keys)


SMALL = {
    "Block_No_Per_Plane": 64, "Page_No_Per_Block": 64, "Flash_Channel_Count": 2,
    "Chip_No_Per_Channel": 2, "Die_No_Per_Chip": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("work", "mean_us", "within"),
    [
        (flow(100, 1, 16, 1000), 177.290, 1e-5),
        (flow(50, 1, 16, 1000), 514.144, 1e-5),
        (flow(0, 8, 32, 1000), 3517.688, 1e-5),
        (flow(100, 16, 16, 1000), 700.624, 0.01),
        (flow(50, 8, 8, 1000), 1186.128, 1e-5),
    ],
    ids=("reads", "mixed", "writes of two pages", "reads, depth 16", "half pages, depth 8"),
)
def test_misses_of_a_cached_map_cost_what_they_do_in_mqsim(work, mean_us, within, tmp_path):
    """Latency that MQSim's newest source gave; none of its entries has to make room for another."""
    one = run(tmp_path, {**SMALL, "Ideal_Mapping_Table": "false", "CMT_Capacity": 2000000}, [work])
    assert one.map_use.reads > 0.7 * work["Total_Requests_To_Generate"]
    assert one.latency.mean_ps / 1e6 == pytest.approx(mean_us, rel=within)


CACHE = {
    "Caching_Mechanism": "ADVANCED", "Data_Cache_Sharing_Mode": "SHARED",
    "Data_Cache_Capacity": 16 << 20, "Data_Cache_DRAM_Data_Rate": 800,
    "Data_Cache_DRAM_Data_Busrt_Size": 4, "Data_Cache_DRAM_tRCD": 13, "Data_Cache_DRAM_tCL": 12,
}  # fmt: skip


def test_the_write_cache_is_read(tmp_path):
    told = {**SMALL, **CACHE, "Data_Cache_DRAM_Row_Size": 8192, "Data_Cache_DRAM_tRP": 13}
    made, ignored = read_device(files(tmp_path, told)[0])
    cache = made.cache
    assert (cache.capacity_bytes, cache.bytes_per_s, cache.access_ns) == (
        16 << 20,
        6_400_000_000,
        25,
    )
    assert (cache.at_once, cache.flush_pages) == (True, 8)  # a page for each plane
    assert {each.key for each in ignored} & set(told) == {
        *("Data_Cache_DRAM_Row_Size", "Data_Cache_DRAM_tRP"),
    }
    assert not read_device(files(tmp_path)[0])[0].cache.capacity_bytes


@pytest.mark.parametrize(
    ("mode", "cached", "named"),
    [
        ("TURNED_OFF", False, False),
        ("WRITE_CACHE", True, False),
        ("WRITE_READ_CACHE", True, True),
        ("READ_CACHE", False, True),
    ],
)
def test_flows_say_whether_they_are_cached(mode, cached, named, tmp_path):
    work = flow(0, 1, 16, 50, Device_Level_Data_Caching_Mode=mode)
    one = run(tmp_path, {**SMALL, **CACHE}, [work])
    assert (one.cache_use.write_misses > 0) is cached
    (scenario,) = read_workload(tmp_path / "workload.xml")
    assert ("Device_Level_Data_Caching_Mode" in {each.key for each in scenario.ignored}) is named


@pytest.mark.parametrize(
    ("work", "pages", "mean_us", "within"),
    [
        (flow(0, 1, 16, 1000), 2048, 228.596, 1e-5),
        (flow(0, 8, 32, 1000, Address_Alignment_Unit=32), 2048, 3425.200, 1e-5),
        (flow(0, 32, 64, 1000, Address_Alignment_Unit=64), 2048, 23527.128, 1e-5),
        (flow(50, 8, 16, 1000), 2048, 999.695, 1e-3),
        (flow(50, 4, 8, 1000, Address_Alignment_Unit=8), 2048, 400.558, 1e-3),
        (flow(0, 16, 24, 1000, Address_Alignment_Unit=24), 2048, 6482.740, 5e-3),
        (flow(0, 8, 16, 1000, Working_Set_Percentage=2), 64, 1716.553, 1e-3),
        (flow(30, 8, 16, 1000, Working_Set_Percentage=2), 64, 1178.964, 0.01),
    ],
    ids=(
        *("pages", "two pages", "four pages", "mixed", "half pages", "pages and a half"),
        *("evictions", "evictions and reads"),
    ),
)
def test_writes_wait_for_the_cache_as_long_as_in_mqsim(work, pages, mean_us, within, tmp_path):
    """Latency that MQSim's newest source gave, with rows of its memory as long as the requests."""
    device = {
        **SMALL, **CACHE, "Block_No_Per_Plane": 256, "Data_Cache_DRAM_tCL": 13,
        "Data_Cache_Capacity": pages * 8192,
    }  # fmt: skip
    one = run(tmp_path, device, [{**work, "Device_Level_Data_Caching_Mode": "WRITE_CACHE"}])
    assert one.latency.mean_ps / 1e6 == pytest.approx(mean_us, rel=within)


def test_preemptible_garbage_collection_is_read(tmp_path):
    keys = {"Preemptible_GC_Enabled": "true", "GC_Hard_Threshold": 0.02}
    made, ignored = read_device(files(tmp_path, keys)[0])
    assert made.ftl.gc_preemptible
    assert made.ftl.gc_hard_threshold == 0.02
    assert not {each.key for each in ignored} & set(keys)
    assert not read_device(files(tmp_path)[0])[0].ftl.gc_preemptible


def test_preempted_garbage_collection_keeps_the_host_waiting_as_little_as_in_mqsim(tmp_path):
    """Latency that MQSim's newest source gave; without preemption it is 1.45 ms there."""
    device = {
        **SMALL, "Flash_Channel_Count": 1, "Page_No_Per_Block": 32, "GC_Exec_Threshold": 0.3,
        "Overprovisioning_Ratio": 0.25, "GC_Block_Selection_Policy": "GREEDY",
        "Preemptible_GC_Enabled": "true", "GC_Hard_Threshold": 0.005,
    }  # fmt: skip
    by_time = {"Synthetic_Generator_Type": "BANDWIDTH", "Bandwidth": 2_000_000}
    one = run(tmp_path, device, [flow(0, 1, 16, 9000, Working_Set_Percentage=75, **by_time)])
    assert one.latency.mean_ps / 1e6 == pytest.approx(842.829, rel=0.01)
    assert one.write_amplification == pytest.approx(1 + 1901 / 9000, rel=0.01)


def test_flows_have_parts_of_the_drive_and_run_at_once(tmp_path):
    one = run(tmp_path, flows=[flow(100, 4, 16, 60), flow(0, 2, 16, 40, Seed=5)])
    assert (one.reads, one.writes) == (60, 40)
    assert one.outstanding <= 6
    config, work = files(tmp_path, flows=[{}, {}])
    made, _ = read_device(config)
    low, high = ([r.offset_bytes for r in f.stream(made)] for f in read_workload(work)[0].flows)
    assert max(low) < min(high)


def test_a_scenario_of_several_is_chosen(tmp_path, capsys):
    config, work = files(tmp_path, flows=[{"Total_Requests_To_Generate": 20}])
    scenario = work.read_text().partition("<IO_Scenario>")[2].partition("</IO_Scenario>")[0]
    two = f"<IO_Scenario>{scenario}</IO_Scenario>" * 2
    work.write_text(f"<MQSim_IO_Scenarios>{two}</MQSim_IO_Scenarios>")
    assert main(["ssd", "run", str(config), str(work)]) != 0
    assert "has 2 scenarios, each for a new drive; choose one" in capsys.readouterr().err
    assert main(["ssd", "run", str(config), str(work), "--scenario", "2"]) == 0
    assert "20 in" in capsys.readouterr().out
    assert main(["ssd", "run", str(config), "read", "--scenario", "2"]) != 0
    assert "--scenario is for MQSim's workload" in capsys.readouterr().err


def test_a_flow_that_ends_at_a_moment_needs_the_time(tmp_path):
    config, work = files(tmp_path, flows=[{"Stop_Time": 1_000_000}])
    made, _ = read_device(config)
    (scenario,) = read_workload(work)
    with pytest.raises(ConfigError, match="needs the clock"):
        scenario.flows[0].stream(made)


def test_files_are_run_and_what_they_say_in_vain_is_named(tmp_path, capsys):
    config, work = files(tmp_path, flows=[{"Priority_Class": "HIGH"}])
    assert main(["ssd", "run", str(config), str(work)]) == 0
    captured = capsys.readouterr()
    assert "100 in" in captured.out
    assert "SATA_Processing_Delay (400000)" in captured.err
    assert "Caching_Mechanism" not in captured.err
    assert "Priority_Class (HIGH)" in captured.err
    assert "Ideal_Mapping_Table" not in captured.err


@pytest.mark.parametrize(
    ("device", "work", "says"),
    [
        ({"Flash_Technology": "QLC"}, {}, "it must be one of SLC, MLC, TLC"),
        ({"Page_Capacity": "many"}, {}, "Page_Capacity is 'many', not a whole number"),
        ({"Flash_Channel_Count": 0}, {}, "geometry.channels is 0"),
        ({}, {"Stop_Time": -1}, "where Stop_Time is 0, Total_Requests_To_Generate must be 1"),
        ({}, {"Read_Percentage": "nan"}, "Read_Percentage is 'nan', not a number"),
        ({}, {"Working_Set_Percentage": "inf"}, "Working_Set_Percentage is 'inf', not a number"),
        (
            {},
            {"Synthetic_Generator_Type": "BANDWIDTH", "Bandwidth": 10**14},
            "less than one request, or more than one in a nanosecond",
        ),
        ({}, {"Address_Distribution": "NEAR"}, "it must be one of RANDOM_UNIFORM, RANDOM_HOTCOLD"),
        ({}, {"Address_Distribution": "RANDOM_HOTCOLD"}, "has no Percentage_of_Hot_Region"),
        (
            {},
            {"Synthetic_Generator_Type": "BANDWIDTH", "Bandwidth": 100},
            "Bandwidth is 100 bytes a second, which is less than one request",
        ),
        ({}, {"Total_Requests_To_Generate": 0}, "must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(device, work, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, device, [work])


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "a.xml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_device(path)
    path.write_text("<Other/>")
    with pytest.raises(ConfigError, match="is a Other, not a Execution_Parameter_Set"):
        read_device(path)
    path.write_text("<MQSim_IO_Scenarios/>")
    with pytest.raises(ConfigError, match="no IO_Scenario"):
        read_workload(path)


@settings(max_examples=tries(200))
@given(
    at=st.floats(0, 1),
    cut=st.integers(0, 12),
    put=st.one_of(
        st.binary(max_size=4),
        st.sampled_from(
            [b"-1", b"1e999", b"9" * 400, b"nan", b"<", b"</", b"\xff", b"&x;", b"0", b"-0"]
        ),
    ),
)
def test_damaged_files_are_refused_or_read(at, cut, put, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged-mqsim"
    folder.mkdir(exist_ok=True)
    for path, read in zip(files(folder), (read_device, read_workload), strict=True):
        data = path.read_bytes()
        place = int(at * len(data))
        path.write_bytes(data[:place] + put + data[place + cut :])
        with suppress(PenstockError):
            read(path)
