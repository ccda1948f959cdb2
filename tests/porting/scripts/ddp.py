import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group("gloo")


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic():
    setup()
    rank = dist.get_rank()
    print(f"Running basic DDP example on rank {rank}.")

    # create model and move it to GPU with id rank
    torch.manual_seed(0)
    model = ToyModel().to("cpu")
    ddp_model = DDP(model)

    dataset = TensorDataset(torch.randn(20, 10), torch.randn(20, 5))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            outputs = ddp_model(inputs)
            loss_fn(outputs, labels.to("cpu")).backward()
            optimizer.step()

    state = ddp_model.module.state_dict()
    if rank == 0:
        torch.save(state, "model.pth")
    cleanup()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    demo_basic()
