"""
Parking: train and generate on one GPU
======================================

We train a small model, park it and its optimizer in pinned host memory, use the device memory for
something else, resume, and get the same losses as without it, to the last bit.
Then we take a snapshot beside training and go back to it.

Programs that train and generate on the same GPU (RLHF, colocated rollouts) do this at every step.
"""

import copy

import torch
from torch import nn

import tdcopier

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"device: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    print(f"device: {device}, the simulated device (no CUDA device here)")

memory = torch.get_device_module(device).memory_allocated
history = []  # (what happened, bytes of device memory in use)


def note(what):
    history.append((what, memory(device)))


# %%
# A model and its optimizer
# -------------------------
# AdamW keeps two tensors for each parameter, so the state is three times as large as the model.

torch.manual_seed(0)
note("start")
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = [torch.randn(16, 256).to(device) for _ in range(12)]


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


twin = copy.deepcopy(model)  # trains without being parked, for comparison
twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
expected = [train(twin, twin_optimizer, batch) for batch in batches]
del twin, twin_optimizer

losses = [train(model, optimizer, batch) for batch in batches[:4]]
note("4 steps")

# %%
# Park and resume
# ---------------
# :func:`tdcopier.park` takes any tree of modules, optimizers, state dicts, TensorDicts and tensors.
# It returns at once: the copies run in the background, and the memory returns to torch's allocator.
# An allocation that needs the memory waits until the copies have read it.

weight = model[0].weight
parked = tdcopier.park([model, optimizer])
note("park")
print(f"parked: {parked.nbytes:,} bytes")

# %%
# The tensors are still the same objects, with shapes and without memory, so their use fails.

try:
    weight.norm()
except RuntimeError as error:
    print("while parked:", str(error).splitlines()[0])

# %%
# Now something else may use the memory.

cache = torch.zeros(history[1][1] // 4, device=device)  # as large as the training state was
note("other use")
del cache
note("other use ends")

parked.resume()
note("resume")
assert model[0].weight is weight
losses += [train(model, optimizer, batch) for batch in batches[4:8]]
note("4 steps")

# %%
# :func:`tdcopier.parked` does both for a ``with`` block.

with tdcopier.parked(model, optimizer):
    note("park")
    sampled = torch.randn(1000).to(device)
note("resume")
losses += [train(model, optimizer, batch) for batch in batches[8:]]
note("4 steps")

print("losses:", [round(loss, 4) for loss in losses])
assert losses == expected, "parking has changed a bit"

# %%
# The picture shows the device memory that is in use after each of these lines.

try:
    import pictures
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    pictures.memory("Device memory while a model is parked", history)

# %%
# A snapshot beside training
# --------------------------
# :func:`tdcopier.snapshot` copies the same state without emptying it.
# Training goes on: only the next ``optimizer.step()`` waits, on the device, until the bytes that it
# overwrites have been read.
# Modules and optimizers become state dicts, so ``torch.save(taken.get(), path)`` is a checkpoint.

taken = tdcopier.snapshot({"model": model, "optimizer": optimizer})
after = [train(model, optimizer, batch) for batch in batches[:3]]
checkpoint = taken.get()

model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
again = [train(model, optimizer, batch) for batch in batches[:3]]
print("after going back:", [round(loss, 4) for loss in again])
assert again == after
