"""A loop with Accelerate over batches that tdcopier prefetches."""

import tdcopier


def train(accelerator, model, optimizer, loader, epochs=1):
    """Train on (inputs, labels); return the mean loss of each epoch."""
    model, optimizer = accelerator.prepare(model, optimizer)
    # Otherwise Accelerate moves each batch itself, leaf by leaf.
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
            losses.append(loss.detach())  # read at the end, without a wait
        means.append((sum(losses) / len(losses)).item())
    batches.close()
    return means
