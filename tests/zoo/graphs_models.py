"""torch_geometric's dense layers, as its examples use them: batches of graphs of six nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import table

_NODES, _IN, _WIDTH = 6, 4, 8
_LAYERS: dict[str, dict[str, Any]] = {
    "DenseGCNConv": {},
    "DenseGraphConv": {},
    "DenseSAGEConv": {"normalize": True},
    "DenseGATConv": {"heads": 2, "concat": False},
    "DenseGINConv": {"train_eps": True},
}


def entries() -> list[Entry]:
    """A network of every kind of layer, and one of every kind of pooling."""
    layers = {name: (partial(Convolved, name), graphs) for name in _LAYERS}
    pools = {kind.__name__: (kind, graphs) for kind in (DiffPooled, CutPooled, ModularityPooled)}
    masked = {"DenseGCNConv, masked": (partial(Convolved, "DenseGCNConv"), masked_graphs)}
    return table("graphs", layers | pools | masked)


def graphs(rows: int) -> Inputs:
    """Features of nodes, and which are neighbours."""
    adjacency = (torch.rand(rows, _NODES, _NODES) > 0.5).float()
    return (torch.randn(rows, _NODES, _IN), torch.maximum(adjacency, adjacency.mT)), {}


def masked_graphs(rows: int) -> Inputs:
    """Graphs whose last nodes are not there."""
    (x, adjacency), _ = graphs(rows)
    return (x, adjacency, torch.arange(_NODES).expand(rows, -1) < _NODES - 2), {}


def _layer(name: str, into: int, out: int) -> nn.Module:
    from torch_geometric.nn import dense

    if name == "DenseGINConv":
        inner = nn.Sequential(nn.Linear(into, out), nn.ReLU(), nn.Linear(out, out))
        return dense.DenseGINConv(inner, **_LAYERS[name])
    layer: nn.Module = getattr(dense, name)(into, out, **_LAYERS[name])
    return layer


class Convolved(nn.Module):
    """Three layers of a kind, with normalisation between them, and a mean over the nodes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        widths = (_IN, _WIDTH, _WIDTH, _WIDTH)
        self.layers = nn.ModuleList(_layer(name, *widths[k : k + 2]) for k in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(_WIDTH) for _ in range(3))
        self.head = nn.Linear(_WIDTH, 3)

    def forward(
        self, x: torch.Tensor, adjacency: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, adjacency, mask).relu().mT).mT
        return self.head(x.mean(dim=1))


class DiffPooled(nn.Module):
    """`examples/proteins_diff_pool.py`: a layer that gives nodes to clusters, one that embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.assign = _layer("DenseSAGEConv", _IN, 3)
        self.embed = _layer("DenseSAGEConv", _IN, _WIDTH)
        self.last = _layer("DenseSAGEConv", _WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch_geometric.nn import dense_diff_pool

        clusters, features = self.assign(x, adjacency), self.embed(x, adjacency).relu()
        x, adjacency, link, entropy = dense_diff_pool(features, adjacency, clusters)
        x = self.last(x, adjacency).relu().mean(dim=1)
        return self.head(x).log_softmax(-1), link + entropy


class CutPooled(nn.Module):
    """`examples/proteins_mincut_pool.py`, its first layers dense as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _layer("DenseGraphConv", _IN, _WIDTH)
        self.assign = nn.Linear(_WIDTH, 3)
        self.last = _layer("DenseGraphConv", _WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch_geometric.nn import dense_mincut_pool

        x = self.first(x, adjacency).relu()
        x, adjacency, cut, orthogonal = dense_mincut_pool(x, adjacency, self.assign(x))
        return self.head(self.last(x, adjacency).mean(dim=1)).log_softmax(-1), cut + orthogonal


class ModularityPooled(nn.Module):
    """`examples/proteins_dmon_pool.py`, its first layer dense as well."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import DMoNPooling

        self.first = _layer("DenseGCNConv", _IN, _WIDTH)
        self.pool = DMoNPooling([_WIDTH, _WIDTH], 3)
        self.last = _layer("DenseGraphConv", _WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.first(x, adjacency).relu()
        _, x, adjacency, spectral, orthogonal, cluster = self.pool(x, adjacency)
        x = self.last(x, adjacency).mean(dim=1)
        return self.head(x).log_softmax(-1), spectral + orthogonal + cluster
