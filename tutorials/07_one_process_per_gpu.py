"""
One process per GPU
===================

Training on several GPUs of a machine is one process for each, its rank, and each has a pipeline of
its own: workers that read samples, a copy to its GPU, a step. tdcopier has no part in how ranks are
started or how gradients are averaged. What it gives each rank: batches whose leaves come from a
worker in one piece, copies beside the work, and trees from rank to rank in two messages.

The script is both sides. Started by ``torchrun`` it is a rank; started by hand, or by these pages,
it runs ``torchrun`` on itself with two ranks. With two GPUs they talk through NCCL. Otherwise each
has a device of the simulated kind, and they talk through gloo.
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
# Each is a nested dict of many small tensors, with a string in between, as detection data are.


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
# A device and a group
# --------------------
# ``torchrun`` says in the environment which rank this is. The device is set before anything is
# copied, so that "cuda" means this rank's own.


def start():
    """The rank, and its device."""
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
# What one rank has and all need
# ------------------------------
# The first rank has read the settings, and has divided the samples.
# :func:`tdcopier.distributed.broadcast` gives everybody the same tree,
# :func:`tdcopier.distributed.scatter` gives each rank one of its own. Both are two messages,
# however many leaves there are, where a message for each would be as slow as a copy for each.


def share(rank, device):
    """The settings, and this rank's part of the samples."""
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
# :func:`tdcopier.collate` stacks the samples in the worker, as torch's own function does, and puts
# all leaves into one piece of shared memory: one file descriptor comes with a batch, not one for
# each leaf. ``pin_memory`` stays off, since ``start_copy`` stages by itself. The copy of the next
# batch is started before the step of this one is enqueued.


def train(rank, device, settings, indices):
    """One epoch; what all ranks have seen together."""
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
    assert handle.stats.transfers == handle.stats.chunks  # one for each dtype
    assert handle.stats.delegated_leaves == 0
    total = seen if has_gpus else seen.cpu()  # gloo knows nothing of a simulated device
    dist.all_reduce(total)
    return total.item()


def step(batch):
    """In place of a model: the sum of the scenes' numbers, on the device."""
    return batch["index"].sum().float()


# %%
# One rank
# --------
# Each has seen its own half of the scenes, and together they have seen each of them once.


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
# Both sides
# ----------
# On your own machine, ``torchrun --nproc-per-node 2 07_one_process_per_gpu.py`` does the same.


def launch():
    """Two ranks of this script, as torchrun starts them."""
    script = Path(globals().get("__file__", "07_one_process_per_gpu.py")).resolve()
    print(
        f"two ranks, each with {'a GPU' if has_gpus else 'a simulated device (not two GPUs here)'}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not has_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # else they would outrank the simulated device
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, check=True, timeout=120
    )
    print("".join(sorted(done.stdout.splitlines(keepends=True))[::-1]), end="")


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        main()
    else:
        launch()
