"""MQSim's configuration files, from the keys that differ from the defaults here."""

HOST = {"PCIe_Lane_Bandwidth": "1.00000", "PCIe_Lane_Count": 4, "SATA_Processing_Delay": 400000}
DEVICE = {
    "Seed": 321, "Memory_Type": "FLASH", "HostInterface_Type": "NVME", "Queue_Fetch_Size": 512,
    "Caching_Mechanism": "ADVANCED", "Ideal_Mapping_Table": "true", "Plane_Allocation_Scheme": "CWDP",
    "Overprovisioning_Ratio": 0.07, "GC_Exec_Threshold": "0.05000", "GC_Block_Selection_Policy": "RGA",
    "Flash_Channel_Count": 8, "Channel_Transfer_Rate": 333, "Chip_No_Per_Channel": 4,
}  # fmt: skip
FLASH = {
    "Flash_Technology": "MLC", "Page_Read_Latency_LSB": 75000, "Page_Read_Latency_CSB": 75000,
    "Page_Read_Latency_MSB": 75000, "Page_Program_Latency_LSB": 750000,
    "Page_Program_Latency_CSB": 750000, "Page_Program_Latency_MSB": 750000,
    "Block_Erase_Latency": 3800000, "Block_PE_Cycles_Limit": 10000, "Die_No_Per_Chip": 2,
    "Plane_No_Per_Die": 2, "Block_No_Per_Plane": 256, "Page_No_Per_Block": 256, "Page_Capacity": 8192,
    "Page_Metadat_Capacity": 448,
}  # fmt: skip
FLOW = {
    "Device_Level_Data_Caching_Mode": "TURNED_OFF", "Initial_Occupancy_Percentage": 0,
    "Working_Set_Percentage": 50, "Synthetic_Generator_Type": "QUEUE_DEPTH",
    "Read_Percentage": 100, "Address_Distribution": "RANDOM_UNIFORM",
    "Generated_Aligned_Addresses": "true", "Address_Alignment_Unit": 16,
    "Request_Size_Distribution": "FIXED", "Average_Request_Size": 16, "Seed": 798,
    "Average_No_of_Reqs_in_Queue": 16, "Stop_Time": 0, "Total_Requests_To_Generate": 100,
}  # fmt: skip


def xml(keys):
    return "".join(f"<{key}>{value}</{key}>" for key, value in keys.items())


def files(tmp_path, device=None, flows=None, in_flash=None):
    told = {**HOST, **DEVICE, **FLASH, **(device or {})}
    host, drive, flash = ({key: told.pop(key) for key in part} for part in (HOST, DEVICE, FLASH))
    config, work = tmp_path / "ssdconfig.xml", tmp_path / "workload.xml"
    config.write_text(
        f"<Execution_Parameter_Set><Host_Parameter_Set>{xml(host)}</Host_Parameter_Set>"
        f"<Device_Parameter_Set>{xml({**drive, **told})}"
        f"<Flash_Parameter_Set>{xml({**flash, **(in_flash or {})})}</Flash_Parameter_Set>"
        "</Device_Parameter_Set></Execution_Parameter_Set>"
    )
    tag = "IO_Flow_Parameter_Set_Synthetic"
    each = "".join(f"<{tag}>{xml({**FLOW, **flow})}</{tag}>" for flow in flows or [{}])
    work.write_text(f"<MQSim_IO_Scenarios><IO_Scenario>{each}</IO_Scenario></MQSim_IO_Scenarios>")
    return config, work
