"""SAC, TD3 and deep Q-learning: torchrl's losses, each as a function that learns from a batch.

In a graph, Python runs once: a counter in Python would stay where it was. So target networks are
updated a little at each step (`SoftUpdate`, not `HardUpdate`), and TD3, whose actor learns from
every second batch, takes two batches as one. Nor can a graph copy from pageable host memory: the
bounds of SAC's actions are tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, OneHot
from torchrl.modules import (
    MLP,
    ConvNet,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate, TD3Loss


class Agent(NamedTuple):
    policy: Any
    """Takes a TensorDict with an observation, and sets its action."""
    update: Callable[[TensorDict], TensorDict]
    """Takes a batch, learns, and returns losses."""
    loss: nn.Module


class Value(nn.Module):
    """Values of observations and actions."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.net = MLP(in_features=inputs, out_features=1, num_cells=[width, width])

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([observation, action], -1))


def sac(observations: int, actions: int, device: str, *, width: int = 256) -> Agent:
    """Actions are from -1 to 1."""
    with torch.device(device):
        net = nn.Sequential(
            MLP(in_features=observations, out_features=2 * actions, num_cells=[width, width]),
            NormalParamExtractor(),
        )
        actor = ProbabilisticActor(
            TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=Bounded(-1.0, 1.0, (actions,), device=device),
            distribution_class=TanhNormal,
            distribution_kwargs={"low": -torch.ones(actions), "high": torch.ones(actions)},
        )
        value = ValueOperator(Value(observations + actions, width), ["observation", "action"])
        loss = SACLoss(actor, value, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4)

    def update(batch: TensorDict) -> TensorDict:
        losses = loss(batch)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        return losses.detach()

    return Agent(actor, update, loss)


def td3(observations: int, actions: int, device: str, *, width: int = 256) -> Agent:
    """Actions are from -1 to 1. The actor learns from the second half of a batch alone."""
    with torch.device(device):
        net = MLP(in_features=observations, out_features=actions, num_cells=[width, width])
        low = torch.full((actions,), -1.0)
        actor = nn.Sequential(net, nn.Tanh())
        actor = TensorDictModule(actor, in_keys=["observation"], out_keys=["action"])
        value = ValueOperator(Value(observations + actions, width), ["observation", "action"])
        loss = TD3Loss(actor, value, num_qvalue_nets=2, bounds=(low, -low))
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    of_actor = torch.optim.Adam(loss.actor_network_params.parameters(), lr=3e-4)
    of_values = torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=3e-4)

    def update(batch: TensorDict) -> TensorDict:
        first, second = batch.chunk(2)
        for half in (first, second):
            value_loss, _ = loss.value_loss(half)
            value_loss.backward()
            of_values.step()
            of_values.zero_grad()
        actor_loss, _ = loss.actor_loss(second)
        actor_loss.backward()
        of_actor.step()
        of_actor.zero_grad()
        target.step()
        return TensorDict({"loss_actor": actor_loss, "loss_qvalue": value_loss}).detach()

    return Agent(actor, update, loss)


def dqn(actions: int, device: str) -> Agent:
    """Learns from frames: observations of 4 x 84 x 84 bytes."""
    with torch.device(device):
        frames = ConvNet(
            in_features=4,
            num_cells=[32, 64, 64],
            kernel_sizes=[8, 4, 3],
            strides=[4, 2, 1],
            activation_class=nn.ReLU,
        )
        values = MLP(
            in_features=64 * 7 * 7,
            out_features=actions,
            num_cells=[512],
            activation_class=nn.ReLU,
        )
        actor = QValueActor(
            Scaled(nn.Sequential(frames, values)),
            in_keys=["observation"],
            spec=OneHot(actions, device=device),
        )
        loss = DQNLoss(actor, action_space="one-hot", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4)

    def update(batch: TensorDict) -> TensorDict:
        losses = loss(batch)
        losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        return losses.detach()

    return Agent(actor, update, loss)


class Scaled(nn.Module):
    """Takes bytes as numbers from 0 to 1."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.net(frames.float() / 255.0)
