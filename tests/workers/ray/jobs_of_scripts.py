"""What scripts in a Ray cluster do, each in a process of its own; see `test_ray_scripts.py`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
PATIENCE = 240.0  # seconds until a change of the cluster is followed
Found = dict[str, torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [[nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1)] for _ in range(3)]
    return nn.Sequential(*(module for each in layers for module in each))


class Training:
    """A pipeline that trains, and what comes of it."""

    def __init__(self, workers: Any, **options: Any) -> None:
        subject = model()
        torch.manual_seed(7)
        options = {"num_microbatches": 4, "progress": None} | options
        self.pipe = ps.Pipeline(subject, (X,), workers=workers, **options)
        self.optimizer = self.pipe.optimizer(torch.optim.Adam, lr=0.01)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self.losses.append(self.pipe.train_step(X, target=X, loss_fn=F.mse_loss))
        self.pipe.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def until(self, workers: int) -> None:
        """Train until there are so many workers."""
        deadline = time.monotonic() + PATIENCE
        while len(self.pipe.members) != workers:
            assert time.monotonic() < deadline, (
                f"there are still {len(self.pipe.members)}: {self.pipe.status().notes}"
            )
            self.step()
            time.sleep(0.2)
        self.step()

    def end(self) -> Found:
        found = {f"loss {k}": loss for k, loss in enumerate(self.losses)}
        found |= {name: value.clone() for name, value in self.pipe.state_dict().items()}
        self.pipe.close()
        return found


def assert_undisturbed(found: Found, steps: int) -> None:
    """It is what threads get that nobody disturbs."""
    training = Training("threads", devices=["cpu"] * 2)
    torch.set_num_threads(1)
    for _ in range(steps):
        training.step()
    expected = training.end()
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different, different


def one_thread(**options: Any) -> ps.Ray:
    return ps.Ray(cpus=1, **options)


def nodes() -> None:
    """A node comes, is drained and removed, and another one comes, while a script trains."""
    import ray
    from ray._raylet import GcsClient
    from ray.cluster_utils import Cluster
    from ray.core.generated import autoscaler_pb2

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    ray.init(address=cluster.address, logging_level="ERROR")
    training = Training(ps.Ray(min=1, max=2), schedule="1f1b")
    assert len(training.pipe.members) == 1
    training.step()
    seen = []
    for _ in range(2):
        node = cluster.add_node(num_cpus=1)
        training.until(2)
        seen.append({member.node for member in training.pipe.members})
        assert node.node_id in seen[-1]
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        deadline = int(1000 * (time.time() + 300))
        assert gcs.drain_node(node.node_id, reason, "a test", deadline)[0]
        training.until(1)
        assert {member.node for member in training.pipe.members} == seen[-1] - {node.node_id}
        cluster.remove_node(node)
        training.step()
    assert seen[0] != seen[1]
    assert training.pipe.members.number == 4
    steps, found = len(training.losses), training.end()
    ray.shutdown()
    cluster.shutdown()
    assert_undisturbed(found, steps)


def lost_nodes() -> None:
    """Nodes are lost without notice while a script trains, with and without another one."""
    import ray
    from ray.cluster_utils import Cluster

    def lose(training: Training, node: Any) -> None:
        assert node.node_id in {member.node for member in training.pipe.members}
        cluster.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + PATIENCE
        while node.node_id in {member.node for member in training.pipe.members}:
            assert time.monotonic() < deadline
            training.step()
        training.step()

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    ray.init(address=cluster.address, logging_level="ERROR")
    node = cluster.add_node(num_cpus=1)
    kept = {"schedule": "1f1b", "on_failure": "replace"}
    training = Training(one_thread(), devices=["cpu"] * 2, **kept)
    training.step()
    training.step()
    cluster.add_node(num_cpus=1)
    lose(training, node)
    assert len(training.pipe.members) == 2
    steps, found = len(training.losses), training.end()
    assert_undisturbed(found, steps)

    training = Training(ps.Ray(min=1, max=2), schedule="1f1b", on_failure="continue")
    training.step()
    training.step()
    lose(training, next(iter(cluster.worker_nodes)))
    assert len(training.pipe.members) == 1
    cluster.add_node(num_cpus=1)
    training.until(2)
    steps, found = len(training.losses), training.end()
    ray.shutdown()
    cluster.shutdown()
    assert_undisturbed(found, steps)


def machines() -> None:
    """Stages and replicas on the two nodes of the cluster at RAY_ADDRESS, on other machines."""
    for replicas, links in ((1, ("torch.distributed (gloo)",)), (2, ())):
        options = {"devices": ["cpu"] * 2, "replicas": replicas}
        if replicas == 1:
            options["schedule"] = "1f1b"
        training = Training(one_thread(placement="strict_spread"), **options)
        assert tuple(training.pipe.links) == links
        assert len({member.node for member in training.pipe.members}) == 2
        with training.pipe.recording() as timelines:
            training.step()
        assert {event.worker for event in timelines[0].events} == {0, 1}
        training.step()
        passes = [worker.passes for worker in training.pipe.status().workers]
        assert passes == [2, 2], passes  # of the other machine as well, which is asked
        assert_undisturbed(training.end(), 2)


def alone() -> None:
    """Ray is started and shut down again, and a second pipeline does not end it for the first."""
    import ray

    assert not ray.is_initialized()
    training = Training("ray", devices=2, schedule="1f1b")
    assert ray.is_initialized()
    with ps.Pipeline(model(), (X,), workers="ray", devices=1, progress=None) as other:
        other.train_step(X, target=X, loss_fn=F.mse_loss)
    assert ray.is_initialized()
    training.step()
    training.end()
    assert not ray.is_initialized()


def forever() -> None:
    """Update who works, and train until somebody ends this process."""
    training = Training("ray", devices=2, schedule="1f1b")
    print(os.getpid(), *(member.pid for member in training.pipe.members), flush=True)
    while True:
        training.step()


def in_ray_train() -> None:
    """A pipeline in the workers of Ray Train, that is told nothing of them."""
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    folder = sys.argv[2]
    trainer = TorchTrainer(
        rank, train_loop_config={"folder": folder}, scaling_config=ScalingConfig(num_workers=2)
    )
    trainer.fit()
    for number in range(2):
        assert_undisturbed(torch.load(os.path.join(folder, f"{number}.pt")), 3)
    ray.shutdown()


def rank(config: dict[str, str]) -> None:
    """One of Ray Train's workers."""
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    torch.set_num_threads(1)
    training = Training("auto", schedule="1f1b")
    assert [member.kind for member in training.pipe.members] == ["rank"] * 2
    assert training.pipe.threads_per_worker >= 1
    for _ in range(3):
        training.step()
    torch.save(training.end(), os.path.join(config["folder"], f"{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done", flush=True)
