"""Graphs: classification of many small ones, and of the nodes of one, with the project's loaders."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, GraphSAGE, global_add_pool

from tests.real_projects.cases import Case, Run


class Graphs(pl.LightningModule):
    """That of the project's example ``pytorch_lightning/gin.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = GIN(4, 16, num_layers=2, norm=None)
        self.head = MLP([16, 16, 3], norm=None)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(global_add_pool(self.gnn(x, edge_index), batch))

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)
        self.log("loss", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        right = self(data.x, data.edge_index, data.batch).argmax(-1) == data.y
        self.log("accuracy", right.float().mean(), batch_size=data.num_graphs)

    def predict_step(self, data: Data, batch_idx: int) -> Tensor:
        return self(data.x, data.edge_index, data.batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Nodes(Graphs):
    """All nodes of a graph, of which some are trained, as in the project's first tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = GraphSAGE(4, 16, num_layers=2, out_channels=3)
        self.head = nn.Identity()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.gnn(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        self.log("loss", loss, batch_size=1)
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.gnn(data.x, data.edge_index), data.y), batch_size=1)

    def predict_step(self, data: Data, batch_idx: int) -> Tensor:
        return self.gnn(data.x, data.edge_index)


def graph(nodes: int) -> Data:
    edges = torch.randint(nodes, (2, 3 * nodes))
    return Data(x=torch.randn(nodes, 4), edge_index=edges, y=torch.randint(3, (1,)))


def graphs(run: Run) -> None:
    data = [graph(4 + index % 5) for index in range(24)]
    loaders = LightningDataset(data[:16], data[16:], pred_dataset=data[16:], batch_size=8)
    trainer, model = run.fit(Graphs, loaders)
    run.keep(predictions=trainer.predict(model, loaders))


def one_graph(run: Run) -> None:
    data = graph(30)
    data.y, data.train_mask = torch.randint(3, (30,)), torch.arange(30) < 20
    loader = DataLoader([data])
    trainer, model = run.fit(Nodes, loader, loader)
    run.keep(predictions=trainer.predict(model, loader))


CASES = {
    "graphs": Case(graphs, "`LightningDataset`: training, resumed; predictions"),
    "one graph": Case(one_graph, "`DataLoader`: the same"),
}
