"""Records of networks as the experiment makes them, with figures that a test chooses."""

import copy

WAY = {
    "stall_s": 0.1, "most_stall_s": 0.2, "stall_share": 0.001, "latency_s": 0.2, "restore_s": 0.1,
    "nbytes": 1000, "samples": 3, "same_bits": True,
}  # fmt: skip


def mix(*, steps=3.0, stalls=(2.0, 1.5, 1.2)):
    """A mix of two networks, whose steps and stalls are so many times as long beside each other."""
    ways = dict(zip(("torch_save", "sync", "async"), stalls, strict=True))
    return {
        "seconds": 60.0,
        "all_slowdown": 1.1,
        "networks": [
            {
                "name": name,
                "title": title,
                "state_bytes": 1000,
                "step_s": {"alone": 0.5, "beside": 0.5 * steps},
                "stall_s": {way: {"alone": 0.1, "beside": 0.1 * by} for way, by in ways.items()},
                "steps": 12,
            }
            for name, title in (("gpt2", "GPT-2"), ("resnet18", "ResNet-18"))
        ],
    }


def record(name="resnet18", title="ResNet-18", *, stalls=(0.1, 0.1, 0.01), step_s=1.0, beside=None):
    """A record; ``stalls`` of torch.save, ours and ours in the background."""
    ways = ("torch_save", "sync", "async")
    checkpoint = {
        way: copy.deepcopy(WAY) | {"stall_s": stall, "stall_share": stall / (100 * step_s)}
        for way, stall in zip(ways, stalls, strict=True)
    }
    beside = {"copies": 2.0, "cpu": 1.8, "memory": 1.5, "io": 1.1} if beside is None else beside
    return {
        "name": name,
        "title": title,
        "configuration": {"image_size": 64},
        "batch": 16,
        "optimizer": "sgd",
        "parameters": 1_000_000,
        "state_bytes": 1000,
        "threads": 2,
        "stages": [
            {
                "stage": "training",
                "data": "made up",
                "steps": 12,
                "seconds": 12 * step_s,
                "step_s": {"median": step_s, "min": step_s, "max": step_s},
                "losses": [2.0, 1.0],
                "checkpoint": checkpoint,
                "energy": {"source": "unreported", "joules": None},
            }
        ],
        "colocation": {
            kind: {"count": 1, "slowdown": slowdown}
            | ({"all_slowdown": 1.0} if kind == "copies" else {"neighbour_slowdown": 1.2})
            for kind, slowdown in beside.items()
        },
        "dram": {
            "idle_bytes": 1 << 30,
            "suspended_bytes": 1 << 28,
            "moved_bytes": 1 << 29,
            "written_bytes": 0,
            "suspend_s": 0.2,
            "resume_s": 0.3,
        },
    }
