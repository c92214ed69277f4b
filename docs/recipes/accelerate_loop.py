"""A training loop with Accelerate over a DataLoader whose batches tdcopier prefetches."""

import tdcopier


def train(accelerator, model, optimizer, loader, epochs=1):
    """Trains on a loader of (inputs, labels); returns the mean loss of each epoch."""
    model, optimizer = accelerator.prepare(model, optimizer)
    # Otherwise Accelerate moves each batch itself, leaf by leaf, in the thread that reads.
    loader = accelerator.prepare_data_loader(loader, device_placement=False)
    batches = tdcopier.prefetch(loader, accelerator.device)

    means = []
    for _ in range(epochs):
        losses = []
        for inputs, labels in batches:  # each epoch is one pass
            loss = (model(inputs) - labels).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())  # read at the end: the host may run ahead
        means.append((sum(losses) / len(losses)).item())
    batches.close()
    return means
