"""Self-supervised learning, put together of the project's parts as its examples do, momentum teachers in the step."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.loss import DINOLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import heads
from lightly.models.utils import batch_shuffle, batch_unshuffle, deactivate_requires_grad, update_momentum
from lightly.transforms import DINOTransform, SimCLRTransform
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.real_projects.cases import Case, Run
from tests.real_projects.draws import in_order

LIGHTNING = "pytorch_lightning"


class Images(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Any, int]:
        rng = np.random.default_rng(index)
        return self.transform(Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8))), index % 3


class Learner(pl.LightningModule):
    """An encoder with a head, and a second pair that follows it."""

    def __init__(self, make_head: Callable[[], nn.Module], is_followed: bool = True) -> None:
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.head = make_head()
        if is_followed:
            self.teacher = deactivated(copy.deepcopy(self.backbone))
            self.teacher_head = deactivated(make_head())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).flatten(start_dim=1))

    def follow(self) -> None:
        update_momentum(self.backbone, self.teacher, m=0.9)
        update_momentum(self.head, self.teacher_head, m=0.9)

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor:
        return self.teacher_head(self.teacher(x).flatten(start_dim=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def deactivated(module: nn.Module) -> nn.Module:
    deactivate_requires_grad(module)
    return module


class SimCLR(Learner):
    def __init__(self) -> None:
        super().__init__(lambda: heads.SimCLRProjectionHead(512, 64, 32), is_followed=False)
        self.criterion = NTXentLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1), _, _ = batch
        loss = self.criterion(self(x0), self(x1))
        self.log("loss", loss)
        return loss


class BYOL(Learner):
    def __init__(self) -> None:
        super().__init__(lambda: heads.BYOLProjectionHead(512, 64, 32))
        self.predict = heads.BYOLPredictionHead(32, 64, 32)
        self.criterion = NegativeCosineSimilarity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        (x0, x1), _, _ = batch
        p0, p1 = self.predict(self(x0)), self.predict(self(x1))
        loss = 0.5 * (self.criterion(p0, self.taught(x1)) + self.criterion(p1, self.taught(x0)))
        self.log("loss", loss)
        return loss


class DINO(Learner):
    def __init__(self) -> None:
        super().__init__(lambda: heads.DINOProjectionHead(512, 64, 32, 128, freeze_last_layer=1))
        self.criterion = DINOLoss(output_dim=128, warmup_teacher_temp_epochs=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        views = batch[0]
        taught = [self.taught(view) for view in views[:2]]
        loss = self.criterion(taught, [self(view) for view in views], epoch=self.current_epoch)
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.head.cancel_last_layer_gradients(current_epoch=self.current_epoch)


class MoCo(Learner):
    def __init__(self) -> None:
        super().__init__(lambda: heads.MoCoProjectionHead(512, 64, 32))
        self.criterion = NTXentLoss(memory_bank_size=(64, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        (query, key), _, _ = batch
        shuffled, order = batch_shuffle(key)
        loss = self.criterion(self(query), batch_unshuffle(self.taught(shuffled), order))
        self.log("loss", loss)
        return loss


def learn(run: Run, make_module: Callable[[], Any], transform: Any) -> None:
    data = LightlyDataset.from_torch_dataset(Images(transform))

    def make() -> Any:
        pl.seed_everything(0)
        return make_module()

    # Shuffles of a step, which are draws.
    with in_order():
        run.fit(make, DataLoader(data, batch_size=8, shuffle=True, drop_last=True))


CASES = {
    "SimCLR": Case(lambda run: learn(run, SimCLR, SimCLRTransform(32)), "training, resumed"),
    "BYOL": Case(lambda run: learn(run, BYOL, SimCLRTransform(32)), "the same"),
    "DINO": Case(
        lambda run: learn(run, DINO, DINOTransform(global_crop_size=32, local_crop_size=16, n_local_views=2)),
        "the same",
    ),
    "MoCo": Case(lambda run: learn(run, MoCo, SimCLRTransform(32)), "the same"),
}
