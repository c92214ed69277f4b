"""A training loop of Accelerate's over a DataLoader whose batches tdcopier prefetches."""

import tdcopier


def train(accelerator, model, optimizer, loader, epochs=1):
    """Train on a loader of (inputs, labels); return the mean loss of each epoch."""
    model, optimizer = accelerator.prepare(model, optimizer)
    # Else Accelerate moves each batch itself, leaf by leaf, in the thread that reads.
    loader = accelerator.prepare_data_loader(loader, device_placement=False)
    batches = tdcopier.prefetch(loader, accelerator.device)

    means = []
    for _ in range(epochs):
        losses = []
        for inputs, labels in batches:  # each epoch is a pass of its own
            loss = (model(inputs) - labels).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())  # read at the end: the host may run ahead
        means.append((sum(losses) / len(losses)).item())
    batches.close()
    return means
