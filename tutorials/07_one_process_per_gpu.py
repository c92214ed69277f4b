"""
One process per GPU
===================

Each rank has its own pipeline: workers that read samples, a copy to its GPU, a step.
tdcopier gives each rank batches whose leaves come from a worker in one piece of memory,
copies that overlap with the work, and trees from rank to rank in two messages.

If ``torchrun`` starts this script, it is a rank; otherwise it runs ``torchrun`` on itself.
With two GPUs the ranks communicate through NCCL.
Otherwise each rank has a simulated device, and they communicate through gloo.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

import tdcopier
import tdcopier.distributed

RANKS = 2
has_gpus = torch.cuda.device_count() >= RANKS

# %%
# The samples
# -----------
# Each sample is a nested dict of many small tensors and a string, like those of detection data.


class Scenes:
    """Sixty-four scenes of six cameras."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        cameras = [
            {
                "projection": torch.full((3, 4), float(index)),
                "boxes": torch.rand(20, 4),
                "class_ids": torch.randint(10, (20,)),
            }
            for _ in range(6)
        ]
        return {"cameras": cameras, "name": f"scene {index}", "index": index}


# %%
# The device and the process group
# --------------------------------
# The rank sets its device before the first copy, so that "cuda" means its own GPU.


def start():
    """Initialise the process group; return the rank and its device."""
    rank = int(os.environ["LOCAL_RANK"])
    if has_gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        from tdcopier import sim

        sim.enable(devices=RANKS)
        device = torch.device("sim", rank)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    return rank, device


# %%
# Send trees between ranks
# ------------------------
# The first rank has read the settings, and has divided the samples.
# :func:`tdcopier.distributed.broadcast` gives all ranks the same tree,
# :func:`tdcopier.distributed.scatter` gives each rank a tree of its own.
# Both send two messages for any number of leaves.


def share(rank, device):
    """Return the settings and this rank's part of the samples."""
    settings, parts = None, None
    if rank == 0:
        mean = {f"layer {i}": torch.full((8,), i / 4) for i in range(100)}
        settings = {"mean": mean, "names": ["car", "person"], "batch_size": 8}
        order = torch.randperm(len(Scenes()))
        parts = [{"indices": part} for part in order.chunk(RANKS)]
    settings = tdcopier.distributed.broadcast(settings, src=0, device=device)
    part = tdcopier.distributed.scatter(parts, src=0, device="cpu")
    return settings, part["indices"]


# %%
# The loop
# --------
# :func:`tdcopier.collate` puts all leaves of a batch into one piece of shared memory.
# ``pin_memory`` stays off, as ``start_copy`` stages the leaves.
# The loop starts the copy of the next batch before it enqueues the step of this one.


def train(rank, device, settings, indices):
    """Run one epoch; return the sum over all ranks."""
    loader = DataLoader(
        Subset(Scenes(), indices.tolist()),
        batch_size=settings["batch_size"],
        num_workers=1,
        collate_fn=tdcopier.collate,
    )
    seen = torch.zeros((), device=device)
    handle = None
    for batch in loader:
        following = tdcopier.start_copy(batch, device)
        if handle is not None:
            seen += step(handle.wait())
        handle = following
    seen += step(handle.wait())
    print(
        f"rank {rank} on {device}: {len(loader)} batches of {len(indices)} scenes, "
        f"{handle.stats.packed_leaves} leaves in {handle.stats.transfers} transfer(s)",
        flush=True,
    )
    assert handle.stats.transfers == handle.stats.chunks  # one per dtype
    assert handle.stats.delegated_leaves == 0
    total = seen if has_gpus else seen.cpu()  # gloo does not support sim
    dist.all_reduce(total)
    return total.item()


def step(batch):
    """Sum the scenes' numbers on the device, in place of a model."""
    return batch["index"].sum().float()


# %%
# A rank
# ------
# Each rank processes one half of the scenes, so the sum over the ranks covers each scene once.


def main():
    rank, device = start()
    settings, indices = share(rank, device)
    assert settings["mean"]["layer 99"].device == device
    assert settings["names"] == ["car", "person"]
    total = train(rank, device, settings, indices)
    assert total == sum(range(64))
    if rank == 0:
        print(f"all ranks: the sum over scenes is {total:.0f}", flush=True)
    dist.destroy_process_group()


# %%
# Start the ranks
# ---------------
# On your own machine, ``torchrun --nproc-per-node 2 07_one_process_per_gpu.py`` does the same.


def launch():
    """Run two ranks of this script with torchrun."""
    script = Path(globals().get("__file__", "07_one_process_per_gpu.py")).resolve()
    print(
        f"two ranks, each with {'a GPU' if has_gpus else 'a simulated device (not two GPUs here)'}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not has_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # use the simulated device
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, check=True, timeout=120
    )
    print("".join(sorted(done.stdout.splitlines(keepends=True))[::-1]), end="")


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        main()
    else:
        launch()
