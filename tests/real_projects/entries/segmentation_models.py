"""Segmentation, with a module like that of the project's first example: lists of results, metrics at the end."""

from typing import Any

import lightning.pytorch as pl
import segmentation_models_pytorch as smp
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.real_projects.cases import Case, Run


class Segmenter(pl.LightningModule):
    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.model = smp.create_model("FPN", encoder_name="resnet18", encoder_weights=None, decoder_dropout=0.0)
        self.loss = loss
        self.found: dict[str, list[tuple[Tensor, ...]]] = {"train": [], "valid": []}

    def shared_step(self, batch: Any, stage: str) -> Tensor:
        image, mask = batch
        logits = self.model(image)
        loss = self.loss(logits, mask)
        self.log(f"{stage}_loss", loss)
        self.found[stage].append(smp.metrics.get_stats(logits.sigmoid() > 0.5, mask.long(), mode="binary"))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "valid")

    def shared_end(self, stage: str) -> None:
        counts = [torch.cat(values) for values in zip(*self.found[stage], strict=True)]
        for reduction in ("micro", "micro-imagewise"):
            self.log(f"{stage}_{reduction}", smp.metrics.iou_score(*counts, reduction=reduction))
        self.found[stage].clear()

    def on_train_epoch_end(self) -> None:
        self.shared_end("train")

    def on_validation_epoch_end(self) -> None:
        self.shared_end("valid")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).sigmoid()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def segment(run: Run, loss: torch.nn.Module) -> None:
    image = torch.rand(16, 3, 32, 32)
    mask = (image.mean(1, keepdim=True) > 0.5).float()
    train = DataLoader(TensorDataset(image[:12], mask[:12]), batch_size=4)
    valid = DataLoader(TensorDataset(image[12:], mask[12:]), batch_size=4)

    def make() -> Segmenter:
        pl.seed_everything(0)
        return Segmenter(loss)

    # In float32 Adam makes full steps of what is rounding error in step 0, and batch norms spread them.
    trainer, model = run.fit(make, train, valid, precision="64-true")
    run.keep(predictions=trainer.predict(model, valid))


CASES = {
    "Dice": Case(lambda run: segment(run, smp.losses.DiceLoss("binary")), "FPN: training, resumed; predictions"),
    "focal": Case(lambda run: segment(run, smp.losses.FocalLoss("binary")), "FPN: the same"),
}
